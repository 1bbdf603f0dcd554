"""How a terminal shows experiments: tables and one line of progress."""

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.leaderboards.metrics import Metric
from service.schemas.experiments import ArtifactOut, DryRunOut, ExperimentOut, TrialDetailOut, TrialOut
from service.schemas.leaderboards import BoardOut, LeaderboardOut, RowOut
from service.specs.states import OPEN_TRIALS, TrialState

if TYPE_CHECKING:
    from rich.progress import Progress


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
    """7 s, 38 min or 1 h 5 min."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return " ".join(f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min")) if count)


def experiments_table(experiments: list[ExperimentOut]) -> Table:
    """One line per experiment."""
    table = Table("id", "name", "state", "trials", "done", "best accuracy", "created")
    for experiment in experiments:
        progress = experiment.progress
        best = progress.best_accuracy
        table.add_row(
            str(experiment.id),
            Text(experiment.name),  # whatever it says, it is no markup
            experiment.state.value,
            str(experiment.trial_count),
            str(progress.trials[TrialState.SUCCEEDED]),
            "-" if best is None else f"{best:.2%}",
            f"{experiment.created_at:%Y-%m-%d %H:%M}",
        )
    return table


def trials_table(trials: list[TrialOut]) -> Table:
    """One line per trial."""
    table = _table("id", "network", "layer", "rank", "lambda_ort", "delta", "seed", "state", "epoch", "accuracy %")
    for trial in trials:
        table.add_row(
            str(trial.id),
            *_configuration(trial.config),
            str(trial.config["seed"]),
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


def epochs_table(trial: TrialDetailOut) -> Table:
    """One line per epoch."""
    table = _table("epoch", "train loss", "acc. %", "val. loss", "acc. %", "ort. loss", "lr", "seconds")
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
    return table


def artifacts_table(artifacts: list[ArtifactOut]) -> Table:
    """One line per file."""
    table = _table("kind", "name", "bytes", "SHA-256")
    for artifact in artifacts:
        table.add_row(Text(artifact.kind), Text(artifact.name), str(artifact.size), artifact.sha256)
    return table


def dry_run_table(would: DryRunOut) -> Table:
    """One line per trial that would be made."""
    configured = ("network", "layer", "rank", "lambda_ort", "delta", "seed")
    table = _table("#", *configured, "parameters", "comp.", "steps", "time")
    for trial in would.trials:
        table.add_row(
            str(trial.number),
            *_configuration(trial.config),
            str(trial.config["seed"]),
            _or_dash(trial.parameters),
            "-" if trial.compression is None else f"{trial.compression:.1f}",
            _or_dash(trial.steps),
            "-" if trial.seconds is None else duration(trial.seconds),
        )
    return table


def show_leaderboard(console: Console, leaderboard: LeaderboardOut, extra: Sequence[str] = ()) -> None:
    """One table per protocol, why it is apart, then what no table shows. `extra`: metrics in columns of their own."""
    if not leaderboard.boards:
        console.print(f"no results on {leaderboard.dataset} yet")
    for board in leaderboard.boards:
        console.print(_board_table(leaderboard, board, extra))
        if board.apart:
            reasons = "; ".join(f"{d.field}: {d.here} here, {d.there} there" for d in board.apart)
            console.print(f"not ranked with the first table: {reasons}", markup=False, highlight=False)
        if board.total > len(board.rows):
            console.print(f"{len(board.rows)} of {board.total} rows")
    if leaderboard.holes:
        trials = sum(hole.trials for hole in leaderboard.holes)
        console.print(f"{leaderboard.hole_count} cells ({trials} trials) have no result yet")
    for bad in leaderboard.invalid:
        reasons = "; ".join(bad.reasons)
        console.print(f"trial {bad.trial_id} does not count: {reasons}", markup=False, highlight=False)


def _board_table(leaderboard: LeaderboardOut, board: BoardOut, extra: Sequence[str]) -> Table:
    """One line per cell in 80 columns; what all cells share stands above."""
    models = {row.config["model"] for row in board.rows}
    several = len(models) != 1
    title = f"{leaderboard.dataset}{'' if several else ', ' + models.pop()}: by {leaderboard.metric}"
    more = [Metric(name) for name in dict.fromkeys([leaderboard.metric, *extra]) if name not in SHOWN]
    paper = any(Metric.ACCURACY in reference.values for row in board.rows for reference in row.paper)
    table = _table(
        "#",
        *(["network"] if several else []),
        *("layer", "rank", "lambda_ort", "delta", "accuracy %", "seeds", "ECE %", "sigma", "comp.", "time s"),
        *(metric.reading.title for metric in more),
        *(["paper %"] if paper else []),
        *(["front"] if board.front is not None else []),
        title=f"{title} (protocol {board.protocol[:12]})",
        caption="mean ± standard deviation over seeds; sigma: largest singular value\n"
        "(periodic convolutions); comp.: compression; time: training, mean",
    )
    for row in board.rows:
        cells = _cells(row, with_model=several)
        cells += [_mean(row, m, m.reading.factor, m.reading.decimals) for m in more]
        if paper:
            printed = (ref.values[Metric.ACCURACY].mean for ref in row.paper if Metric.ACCURACY in ref.values)
            cells.append(next((f"{value * 100:.2f}" for value in printed), "-"))
        cells += ["*" if row.on_front else ""] if board.front is not None else []
        table.add_row(*cells)
    return table


SHOWN = (Metric.ACCURACY, Metric.ECE, Metric.MAX_SINGULAR_VALUE, Metric.COMPRESSION, Metric.TRAIN_SECONDS)
"""Metrics that the terminal has columns for in any case."""


def _cells(row: RowOut, *, with_model: bool) -> list[str]:
    sigma = row.metrics.get(Metric.MAX_SINGULAR_VALUE)
    return [
        str(row.place),
        *_configuration(row.config)[0 if with_model else 1 :],
        _mean(row, Metric.ACCURACY, 100, 2),
        str(row.seeds) if row.complete else f"{row.seeds} of {row.trials}",
        _mean(row, Metric.ECE, 100, 2),
        "-" if sigma is None else f"{sigma.max:.3f}",
        _mean(row, Metric.COMPRESSION, 1, 1, spread=False),
        _mean(row, Metric.TRAIN_SECONDS, 1, 1, spread=False),
    ]


def _mean(row: RowOut, metric: Metric, factor: float, digits: int, *, spread: bool = True) -> str:
    found = row.metrics.get(metric)
    if found is None:
        return "-"
    mean = f"{found.mean * factor:.{digits}f}"
    return mean if found.std is None or not spread else f"{mean} ± {found.std * factor:.{digits}f}"


_LEFT = frozenset({"id", "network", "layer", "state", "kind", "name", "SHA-256", "front"})
"""Columns of words; numbers stand on the right."""


def _table(*columns: str, **labels: Any) -> Table:
    """Narrow enough for 80 columns: no lines."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold underline", **labels)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    return table


def _configuration(config: Mapping[str, Any]) -> list[str]:
    """Network, layer, rank, lambda_ort and delta of a trial."""
    lambda_ort = "-" if config["layer"] == "dense" else f"{config['lambda_ort']:g}"
    return [config["model"], config["layer"], _or_dash(config["rank"]), lambda_ort, _or_dash(config["delta"])]


def _or_dash(value: object) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


class LiveLine:
    """A bar with one line of text in a terminal; elsewhere a line when something changed, every 5 seconds at most."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            from rich import progress

            columns = (progress.BarColumn(20), progress.TextColumn("{task.description}"))
            self._bar = progress.Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=None)
        self._printed_at = -math.inf
        self._last = self._printed = ""

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()
        if self._last != self._printed:
            self._print(self._last)

    def show(self, experiment: ExperimentOut) -> None:
        """Shows the newest state."""
        line = progress_line(experiment)
        if self._bar:
            done, epochs = experiment.progress.epochs_done, experiment.progress.epochs
            # Trials without epochs evaluate what others trained: how far they are is not known.
            self._bar.update(self._task, description=line, completed=done, total=epochs or None)
        elif line != self._printed and time.monotonic() - self._printed_at >= 5:
            self._print(line)
        self._last = line

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)
        self._printed, self._printed_at = line, time.monotonic()
