"""How a terminal shows experiments: tables and one line of progress."""

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.table import Table

from service.models import OPEN_TRIALS, TrialState
from service.schemas import BoardOut, ExperimentOut, LeaderboardOut, RowOut, SpreadOut, TrialDetailOut, TrialOut


def progress_line(experiment: ExperimentOut) -> str:
    """Trials done, epochs, best so far and the time left, on one line."""
    progress = experiment.progress
    final = sum(count for state, count in progress.trials.items() if state not in OPEN_TRIALS)
    parts = [
        f"{experiment.state.value:<9}",
        f"trials {final}/{experiment.trial_count} ({progress.trials[TrialState.RUNNING]} running)",
        f"epochs {progress.epochs_done}/{progress.epochs}",
    ]
    if progress.best_accuracy is not None:
        parts.append(f"best test accuracy {progress.best_accuracy:.2%}")
    elif progress.best_val_accuracy is not None:
        parts.append(f"best validation accuracy {progress.best_val_accuracy:.2%}")
    bad = progress.trials[TrialState.FAILED] + progress.trials[TrialState.DIVERGED]
    if bad:
        parts.append(f"{bad} failed or diverged")
    if progress.seconds_left is not None:
        parts.append(f"about {duration(progress.seconds_left)} left")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """7 s, 3:05 min or 2:10 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def experiments_table(experiments: list[ExperimentOut]) -> Table:
    """One line per experiment."""
    table = Table("id", "name", "state", "trials", "done", "best accuracy", "created")
    for experiment in experiments:
        progress = experiment.progress
        best = progress.best_accuracy
        table.add_row(
            str(experiment.id),
            experiment.name,
            experiment.state.value,
            str(experiment.trial_count),
            str(progress.trials[TrialState.SUCCEEDED]),
            "-" if best is None else f"{best:.2%}",
            f"{experiment.created_at:%Y-%m-%d %H:%M}",
        )
    return table


def trials_table(trials: list[TrialOut]) -> Table:
    """One line per trial."""
    table = _table()
    _columns(table, "id", "network", "layer")
    _columns(table, "rank", "lambda_ort", "delta", "seed", right=True)
    _columns(table, "state")
    _columns(table, "epoch", "accuracy %", right=True)
    for trial in trials:
        config = trial.config
        table.add_row(
            str(trial.id),
            config["model"],
            config["layer"],
            _or_dash(config["rank"]),
            _lambda_ort(config),
            _or_dash(config["delta"]),
            str(config["seed"]),
            trial.state.value,
            f"{trial.epoch}/{trial.epochs}",
            "-" if trial.result is None else f"{trial.result.accuracy * 100:.2f}",
        )
    return table


def show_errors(console: Console, trials: list[TrialOut]) -> None:
    """Why trials failed; each reason once."""
    reasons: dict[str, list[int]] = {}
    for trial in trials:
        if trial.error:
            reasons.setdefault(f"{trial.failure or trial.state.value}: {trial.error}", []).append(trial.id)
    for reason, ids in reasons.items():
        console.print(f"trial {', '.join(map(str, ids))}: {reason}", markup=False, highlight=False)


def show_trial(console: Console, trial: TrialDetailOut) -> None:
    """A trial with its epochs."""
    console.print(trials_table([trial]))
    show_errors(console, [trial])
    table = _table()
    _columns(table, "epoch", "train loss", "acc. %", "val. loss", "acc. %", "ort. loss", "lr", "seconds", right=True)
    for point in trial.epoch_metrics:
        table.add_row(
            str(point.epoch),
            f"{point.train_loss:.4f}",
            f"{point.train_accuracy * 100:.2f}",
            f"{point.val_loss:.4f}",
            f"{point.val_accuracy * 100:.2f}",
            "-" if point.ort_loss is None else f"{point.ort_loss:.2e}",
            f"{point.lr:.4g}",
            f"{point.seconds:.2f}",
        )
    console.print(table)


def show_leaderboard(console: Console, leaderboard: LeaderboardOut) -> None:
    """One table per protocol, then the cells without a result."""
    if not leaderboard.boards:
        console.print(f"no results on {leaderboard.dataset} yet")
    for board in leaderboard.boards:
        console.print(_board_table(leaderboard, board))
    if leaderboard.holes:
        trials = sum(hole.trials for hole in leaderboard.holes)
        console.print(f"{len(leaderboard.holes)} cells ({trials} trials) have no result yet")


def _board_table(leaderboard: LeaderboardOut, board: BoardOut) -> Table:
    """One line per cell in 80 columns; what all cells share stands above."""
    models = {row.config["model"] for row in board.rows}
    several = len(models) > 1
    title = f"{leaderboard.dataset}{'' if several else ', ' + models.pop()}: by {leaderboard.metric}"
    table = _table(
        title=f"{title} (protocol {board.protocol[:12]})",
        caption="mean ± standard deviation over seeds; sigma: largest singular value\n"
        "(periodic convolutions); comp.: compression; time: training, mean",
    )
    _columns(table, "#", *(["network"] if several else []), "layer")
    _columns(
        table, "rank", "lambda_ort", "delta", "accuracy %", "seeds", "ECE %", "sigma", "comp.", "time s", right=True
    )
    for row in board.rows:
        table.add_row(*_cells(row, with_model=several))
    return table


def _cells(row: RowOut, *, with_model: bool) -> list[str]:
    config, metrics = row.config, row.metrics
    return [
        str(row.place),
        *([config["model"]] if with_model else []),
        config["layer"],
        _or_dash(config["rank"]),
        _lambda_ort(config),
        _or_dash(config["delta"]),
        _spread(metrics["accuracy"], 100, 2),
        str(row.seeds) if row.complete else f"{row.seeds} of {row.trials}",
        _spread(metrics["ece"], 100, 2),
        f"{metrics['max_singular_value'].max:.3f}",
        f"{metrics['compression'].mean:.1f}",
        f"{metrics['train_seconds'].mean:.1f}",
    ]


def _table(**labels: str) -> Table:
    """Narrow enough for 80 columns: no lines."""
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold underline", **labels)  # type: ignore[arg-type]


def _columns(table: Table, *names: str, right: bool = False) -> None:
    for name in names:
        table.add_column(name, justify="right" if right else "left", no_wrap=True)


def _spread(spread: SpreadOut, factor: float, digits: int) -> str:
    mean = f"{spread.mean * factor:.{digits}f}"
    return mean if spread.std is None else f"{mean} ± {spread.std * factor:.{digits}f}"


def _lambda_ort(config: dict[str, object]) -> str:
    return "-" if config["layer"] == "dense" else f"{config['lambda_ort']:g}"


def _or_dash(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


class LiveLine:
    """One line that is rewritten in a terminal; elsewhere a line whenever trials finish, at most every 5 seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._printed_at = -math.inf
        self._last = ""

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._status:
            self._status.stop()
        self._console.print(self._last, markup=False, highlight=False)

    def show(self, experiment: ExperimentOut) -> None:
        """Shows the newest state."""
        line = progress_line(experiment)
        if self._status:
            self._status.update(line)
        elif line != self._last and time.monotonic() - self._printed_at >= 5:
            self._console.print(line, markup=False, highlight=False)
            self._printed_at = time.monotonic()
        self._last = line
