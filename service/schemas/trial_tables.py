"""Trials as tables for people and programs: the fields in which they differ, and what became of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

from service.leaderboards.metrics import Metric
from service.leaderboards.records import FIELDS
from service.leaderboards.sheets import configuration_sheet, read
from service.leaderboards.text_tables import Cell, Sheet
from service.leaderboards.value_texts import exact_text
from service.schemas.dry_runs import DryRunOut
from service.schemas.trials import PASSING, ResultOut, TrialOut
from service.specs.columns import (
    Columns,
    FieldColumn,
    cell_field,
    columns_of,
    in_order,
    known_fields,
    short_name,
    value_of,
)
from ttsv.config.fields import TrialFields

_FACTS = tuple(name for name in TrialOut.model_fields if name not in ("config", "result", *PASSING))
_RESULT = tuple(ResultOut.model_fields)


@dataclass(frozen=True)
class Shown:
    """Which fields a table of trials shows: those `chosen`, or all that differ, without those `hidden`."""

    chosen: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    @classmethod
    def named(
        cls, columns: str | Iterable[str] | None, hide: str | Iterable[str] | None, *, of_cells: bool = False
    ) -> Self:
        """From names, whole or short, separated by commas; raises `QueryError`, which says where they stood.

        `of_cells`: rows are means over seeds, and the seed is no column of theirs.
        """
        named = _names(columns)
        chosen = [cell_field(name, "columns") for name in named] if of_cells else known_fields(named, "columns")
        return cls(tuple(dict.fromkeys(chosen)), known_fields(_names(hide), "hide"))

    def columns(self, configs: Sequence[TrialFields]) -> Columns:
        """The columns of a table of such trials."""
        return columns_of(configs, chosen=self.chosen, hidden=self.hidden, without_decided=True)

    def of_all(self, would: DryRunOut) -> Columns:
        """The columns of a dry run: those of all trials, of which it may list the first ones alone."""
        fields = [FieldColumn(path, short_name(path)) for path in self.chosen if path not in self.hidden]
        fields = fields or [FieldColumn(one.field, one.name) for one in would.columns if one.field not in self.hidden]
        decided = [] if self.chosen else [FieldColumn(one.field, one.name) for one in would.decided]
        told = {*self.hidden, *(one.field for one in fields)}
        common = {path: value for path, value in would.common.items() if path not in told}
        return Columns(fields, common, [one for one in decided if one.field not in told])


EVERY = Shown()
"""All fields that differ."""


def trials_sheet(
    trials: Sequence[TrialOut],
    shown: Shown = EVERY,
    *,
    title: str = "",
    among: Sequence[TrialFields] = (),
    most: int | None = None,
) -> Sheet:
    """One row per trial: the fields shown, its state, with the class of its failure, epochs and test accuracy; above,
    what all trials share.

    `among`: configurations of more trials than have a row, whose columns are wanted. `most`: of the fields so many at
    most; the others are named above.
    """
    configs = [trial.config for trial in trials]
    shape = shown.columns(among or configs)
    shape, others = (shape, []) if most is None else shape.first(most)
    fields = configuration_sheet(shape, configs)
    left_out = f" No room for: {', '.join(one.name for one in others)}." if others else ""
    rows: list[list[Cell]] = []
    for trial, own in zip(trials, fields.rows, strict=True):
        result, state = trial.result, trial.state.value
        if trial.failure not in (None, state):
            state = f"{state} ({trial.failure})"
        if result is not None and not result.valid:  # its numbers cannot be true
            result, state = None, f"{state}, invalid"
        accuracy = None if result is None else read(Metric.ACCURACY, result.accuracy, None)
        rows.append([trial.id, *own, state, f"{trial.epoch}/{trial.epochs}", accuracy])
    headings = ["id", *fields.headings, "state", "epoch", Metric.ACCURACY.reading.title]
    return Sheet(title, headings, [True, *fields.numeric, False, True, True], rows, [], fields.above + left_out)


def trial_records(trials: Sequence[TrialOut], shown: Shown = EVERY) -> tuple[list[str], list[list[Any]]]:
    """Header and rows for CSV: what a trial is, the fields shown by path, and every metric in the API's units.

    Unless fields are chosen some are there in any case, so that pages of one list differ in few columns, and what all
    trials share and says something is there, too: a file has no caption.
    """
    shape = shown.columns([trial.config for trial in trials])
    differing = [column.field for column in (*shape.fields, *shape.decided)]
    every = differing if shown.chosen else ("dataset", *FIELDS, "seed", *in_order({*differing, *shape.notable_paths}))
    fields = [path for path in dict.fromkeys(every) if path not in shown.hidden]
    rows = []
    for trial in trials:
        facts = [getattr(trial, name) for name in _FACTS]
        own = [value_of(trial.config, path) for path in fields]
        result = [None if trial.result is None else getattr(trial.result, name) for name in _RESULT]
        rows.append([_plain(value) for value in (*facts, *own, *result)])
    return [*_FACTS, *fields, *_RESULT], rows


def _names(given: str | Iterable[str] | None) -> list[str]:
    names = given.split(",") if isinstance(given, str) else given or ()
    return [name.strip() for name in names if name.strip()]


def _plain(value: Any) -> Any:
    """A value as CSV has it."""
    if isinstance(value, Enum):
        return value.value
    return value if value is None or isinstance(value, str | bool | int | float) else _said(value)


def _said(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else exact_text(value)
