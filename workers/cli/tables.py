"""How a terminal shows experiments: tables and one line of progress."""

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from service.errors import QueryError, UserError
from service.leaderboards.boards import Leaderboard
from service.leaderboards.comparison_sheets import comparison_sheets
from service.leaderboards.metrics import Metric
from service.leaderboards.sheets import board_sheets, configuration_sheet, measured_metrics, read
from service.leaderboards.sides import Comparison
from service.leaderboards.text_tables import Cell, Measured, Sheet
from service.schemas.comparisons import CompareOut
from service.schemas.dry_runs import DryRunOut
from service.schemas.experiments import ExperimentOut
from service.schemas.leaderboards import LeaderboardOut
from service.schemas.service import NodeTrialOut
from service.schemas.trial_tables import EVERY, Shown, trials_sheet
from service.schemas.trials import ArtifactOut, AttemptResources, TrialDetailOut, TrialOut
from service.specs.columns import validates_on_test
from service.specs.states import OPEN_TRIALS, TrialState
from ttsv.config.fields import TrialFields
from workers.cli.client_options import print_table, print_whole, whole_width

if TYPE_CHECKING:
    from rich.live import Live


def progress_line(experiment: ExperimentOut) -> str:
    """Trials done, epochs, best so far and the time left, on one line."""
    progress = experiment.progress
    final = sum(count for state, count in progress.trials.items() if state not in OPEN_TRIALS)
    parts = [
        f"{experiment.state.value:<9}",
        f"trials {final}/{experiment.trial_count} ({progress.trials[TrialState.RUNNING]} running)",
        f"epochs {progress.epochs_done}/{progress.epochs}",
    ]
    if experiment.waiting is not None:
        parts.append(f"waiting: {experiment.waiting}")
    if progress.best_val_accuracy is not None:
        said, _, apart = progress.best_said.partition(":")
        parts.append(f"{said} {progress.best_val_accuracy:.2%}" + (f" ({apart.strip()})" if apart else ""))
    bad = progress.trials[TrialState.FAILED] + progress.trials[TrialState.DIVERGED]
    if bad:
        parts.append(f"{bad} failed or diverged")
    if progress.seconds_left is not None:
        parts.append(f"about {duration(max(1.0, progress.seconds_left))} left")  # nothing is done in no time
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """7 s, 38 min or 1 h 5 min."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return " ".join(f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min")) if count)


def experiments_table(experiments: list[ExperimentOut]) -> Table:
    """One line per experiment."""
    table = Table("id", "name", "state", "trials", "done", "best validation accuracy", "created (UTC)")
    for experiment in experiments:
        progress = experiment.progress
        best = progress.best_to_choose_by
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


def trials_table(
    trials: list[TrialOut],
    shown: Shown = EVERY,
    among: Sequence[TrialFields] = (),
    fitting: Console | None = None,
) -> Table:
    """One line per trial: the fields in which they differ, and what became of each; above, what all share.

    `among`: configurations of more trials than are shown, whose columns the table has. `fitting`: a terminal for whose
    width fields are left out, those that people ask for last.
    """
    table = sheet_table(trials_sheet(trials, shown, among=among))
    if fitting is not None:
        # Without any field there are four columns.
        for most in range(len(table.columns) - 5, -1, -1):
            if whole_width(fitting, table) <= fitting.width:
                break
            table = sheet_table(trials_sheet(trials, shown, among=among, most=most))
    return table


def shown_fields(columns: str | None, hide: str | None) -> Shown:
    """The fields that `--columns` and `--hide` name; raises `UserError`."""
    try:
        return Shown.named(columns, hide)
    except QueryError as error:
        raise UserError(error.problems[0].message) from None


def show_errors(console: Console, trials: list[TrialOut]) -> None:
    """Why trials failed; each reason once."""
    reasons: dict[str, list[int]] = {}
    for trial in trials:
        if trial.error:
            reasons.setdefault(f"{trial.failure or trial.state.value}: {trial.error}", []).append(trial.id)
    for reason, ids in reasons.items():
        console.print(f"trial {', '.join(map(str, ids))}: {reason}", markup=False, highlight=False)


_SILENT = 10
"""Of so many trials it is said how long they are silent."""


def show_silences(console: Console, trials: Sequence[TrialOut | NodeTrialOut]) -> None:
    """How long trials that run have reported nothing, and how long they may: first whose time is up first."""
    moment = datetime.now(UTC)
    running = [
        (one.id, max(0.0, (moment - one.last_report_at).total_seconds()), one.hung_after)
        for one in trials
        if one.last_report_at is not None and one.hung_after is not None
    ]
    running.sort(key=lambda one: one[2] - one[1])
    lines = [
        f"trial {number}: last report {duration(past)} ago; killed and tried again after {duration(limit)} without one"
        for number, past, limit in running[:_SILENT]
    ]
    if more := len(running) - len(lines):
        lines.append(f"{more} more run, with more time left")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def resources_table(found: Sequence[tuple[int, AttemptResources]]) -> Table:
    """One line per attempt (with its trial): how long it was watched, the means and peaks of what it used."""
    table = _table(
        "trial", "attempt", "seconds", "CPU %", "memory MiB", "peak", "GPU %", "GPU memory MiB", "peak", "where"
    )
    for trial_id, attempt in found:
        points = attempt.points
        of = {name: [v for point in points if (v := getattr(point, name)) is not None] for name in _USED}
        cells = [_mean_of(of["cpu"]), _mean_of(of["memory"]), _peak_of(of["memory"])]
        cells += [_mean_of(of["gpu"]), _mean_of(of["gpu_memory"]), _peak_of(of["gpu_memory"])]
        seconds = f"{points[-1].seconds:.0f}" if points else "-"
        table.add_row(str(trial_id), str(attempt.number), seconds, *cells, Text(attempt.place))
    return table


_USED = ("cpu", "memory", "gpu", "gpu_memory")


def _mean_of(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.0f}" if values else "-"


def _peak_of(values: Sequence[float]) -> str:
    return f"{max(values):.0f}" if values else "-"


def epochs_table(trial: TrialDetailOut) -> Table:
    """One line per epoch."""
    images = "test" if validates_on_test(trial.config) else "val."
    table = _table("epoch", "train loss", "acc. %", f"{images} loss", "acc. %", "ort. loss", "lr", "seconds")
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


def dry_run_table(would: DryRunOut, shown: Shown = EVERY) -> Table:
    """One line per trial that would be made: the fields in which they differ, and what each would cost."""
    shape = shown.of_all(would)
    fields = configuration_sheet(shape, [trial.config for trial in would.trials])
    rows: list[list[Cell]] = []
    for trial, own in zip(would.trials, fields.rows, strict=True):
        compression = None if trial.compression is None else read(Metric.COMPRESSION, trial.compression, None)
        seconds = None if trial.seconds is None else duration(trial.seconds)
        rows.append([trial.number, *own, trial.parameters, compression, trial.steps, seconds])
    # (A field of the spec is called "steps", those of an epoch.)
    headings = ["#", *fields.headings, "parameters", "compression", "all steps", "time"]
    above = fields.above
    if len(would.trials) < would.trial_count:
        above = f"The first {len(would.trials):,} of {would.trial_count:,} trials. {above.replace('rows', 'trials')}"
    return sheet_table(Sheet("", headings, [True, *fields.numeric, True, True, True, True], rows, [], above))


_ANSWER: TypeAdapter[Leaderboard] = TypeAdapter(Leaderboard)


def show_leaderboard(console: Console, leaderboard: LeaderboardOut, wanted: Sequence[str] = ()) -> None:
    """The tables that Markdown has: one per protocol, then what no table shows. `wanted`: metrics that they show."""
    found = _ANSWER.validate_python(leaderboard.model_dump(exclude={"boards": {"__all__": {"next"}}}))
    if not found.boards:
        lacking = found.hole_count + found.invalid_count
        console.print(
            f"no cell has a result on {leaderboard.dataset}"
            if lacking
            else f"no trial on {leaderboard.dataset} fits what was asked"
        )
    metrics = measured_metrics(found) if [*wanted] == ["all"] else [Metric(name) for name in wanted]
    for sheet in board_sheets(found, leaderboard.dataset, Metric(leaderboard.metric), metrics):
        if any(sheet.texts) and sheet.rows[0]:
            print_whole(console, sheet_table(sheet))
        for note in sheet.notes:
            console.print(note, markup=False, highlight=False)


def show_comparison(console: Console, comparison: CompareOut) -> None:
    """The tables that Markdown has: what differs, and the results."""
    for sheet in comparison_sheets(TypeAdapter(Comparison).validate_python(comparison.model_dump())):
        if sheet.rows:
            print_whole(console, sheet_table(sheet))
        for note in sheet.notes:
            console.print(note, markup=False, highlight=False)


def sheet_table(sheet: Sheet) -> Table:
    """A table for people in a terminal; headings are broken where words end."""
    title = Text("\n".join(filter(None, (sheet.title, sheet.above))))
    table = _table(title=title, title_justify="left") if title else _table()
    for heading, numeric in zip(sheet.headings, sheet.numeric, strict=True):
        table.add_column(Text(heading.replace(" ", "\n")), justify="right" if numeric else "left", no_wrap=True)
    for row in sheet.texts:
        table.add_row(*map(_text, row))
    return table


def _text(cell: str | Measured) -> Text:
    """Whatever it says, it is no markup; means that are best in bold."""
    if isinstance(cell, str):
        return Text(cell)
    mean, std = cell.printed
    behind = f" ({cell.of})" if cell.of else ""
    return Text.assemble((mean, "bold" if cell.best else ""), "" if std is None else f" ± {std}", behind)


_READ_EVERY = 2.0
"""Seconds for which a table of trials stands in a terminal."""

_LEFT = frozenset({"kind", "name", "SHA-256", "where"})
"""Columns of words; numbers stand on the right."""


def _table(*columns: str, **labels: Any) -> Table:
    """Narrow enough for 80 columns: no lines."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold underline", **labels)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    return table


class LiveLine:
    """A bar with one line of text in a terminal; elsewhere a line when something changed, every 5 seconds at most.

    With `trials` the table that they give, if any, stands below: in a terminal, for which they make it narrow enough,
    anew every few seconds; whole at the end, where it stays if the watching ended by itself.
    """

    def __init__(self, console: Console, trials: Callable[[Console | None], Table | None] | None = None) -> None:
        self._console = console
        self._trials = trials
        self._live: Live | None = None
        if console.is_terminal:
            from rich import live, progress

            columns = (progress.BarColumn(20), progress.TextColumn("{task.description}"))
            self._bar = progress.Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=None)
            self._live = live.Live(self._bar, console=console, transient=True)
        self._printed_at = self._asked_at = -math.inf
        self._last = self._printed = ""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        if self._last != self._printed:
            self._print(self._last)
        if kind is None and self._trials and (table := self._trials(None)):
            print_table(table)

    def show(self, experiment: ExperimentOut) -> None:
        """Shows the newest state."""
        line = progress_line(experiment)
        if self._live:
            done, epochs = experiment.progress.epochs_done, experiment.progress.epochs
            # Trials without epochs evaluate what others trained: how far they are is not known.
            self._bar.update(self._task, description=line, completed=done, total=epochs or None)
            self._show_trials(self._live)
        elif line != self._printed and time.monotonic() - self._printed_at >= 5:
            self._print(line)
        self._last = line

    def _show_trials(self, live: "Live") -> None:
        """Below the bar; the service is asked no more often than somebody reads."""
        if self._trials and time.monotonic() - self._asked_at >= _READ_EVERY:
            table = self._trials(self._console)
            live.update(Group(self._bar, table) if table else self._bar)
            self._asked_at = time.monotonic()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)
        self._printed, self._printed_at = line, time.monotonic()
