"""What a leaderboard says, as plain data: one model that the API, the text forms, the pages and the terminal show.

`service.schemas.leaderboards` describes every field, of `X` at `XOut`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import TypedDict  # that of Python 3.11 cannot be read from JSON (`Leaderboard`)

from service.leaderboards.metrics import Measures
from service.leaderboards.protocols import Difference, Record
from service.specs.columns import Columns, FieldColumn
from ttsv.config.fields import FieldValue, FieldValues, TrialFields


class Position(NamedTuple):
    """A row's place in the order of one metric, which walks all three in the direction in which values get worse.

    `standing` puts complete cells before the others (`standing_of`); equal means follow their cells
    (`score_ranks.tie_of`).
    """

    standing: int
    mean: float
    tie: int

    @property
    def shared(self) -> tuple[int, float]:
        """What rows that share a place have in common."""
        return self.standing, self.mean


class Spread(TypedDict):  # of which an answer has thousands: an object takes thrice as long to write
    """One metric over the seeds of a cell."""

    seeds: int
    mean: float
    std: float | None
    min: float
    max: float


def spreads(measures: Measures, names: Iterable[str]) -> dict[str, Spread]:
    """Those of the named metrics that have a value."""
    return {
        name: {"seeds": seeds, "mean": mean, "std": std, "min": least, "max": largest}
        for name in names
        if (one := measures.get(name)) is not None
        for seeds, mean, std, least, largest in (one,)  # thousands an answer: to unpack takes less than five names
    }


@dataclass(frozen=True)
class Change:
    """What sets a row apart from the baseline in one metric."""

    mean: float
    error: float | None


@dataclass(frozen=True)
class Group:
    """The cells of a board of which a row is the best."""

    field: str
    value: FieldValue
    cells: int


@dataclass(frozen=True)
class Printed:
    """A value that the paper prints, or that its formulas predict, in our units."""

    mean: float
    spread: float | None
    comparable: bool
    decimals: int | None = None


@dataclass(frozen=True)
class PaperReference:
    """A printed row beside ours."""

    table: str
    row: FieldValues
    values: dict[str, Printed]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Missing:
    """A trial that adds nothing to its cell, and why."""

    trial_id: int
    seed: int
    state: str
    failure: str | None = None

    @property
    def said(self) -> str:
        """What became of it, in words."""
        words = state_said(self.state)
        return words if self.failure in (None, self.state) else f"{words} ({self.failure})"


_STATES = {
    "early_stopped": "stopped early",
    "invalid": "with an invalid result",
    "other_protocol": "measured under another protocol",
}
_MOST_SEEDS = 20


def state_said(state: str) -> str:
    """What became of a trial, in words."""
    return _STATES.get(state, state)


def missing_said(missing: Iterable[Missing]) -> str:
    """In words: which seeds are missing, together where the reason is the same."""
    reasons: dict[str, list[int]] = {}
    for one in missing:
        reasons.setdefault(one.said, []).append(one.seed)
    parts = []
    for reason, seeds in reasons.items():
        more = f" and {len(seeds) - _MOST_SEEDS} more" if len(seeds) > _MOST_SEEDS else ""
        listed = ", ".join(map(str, seeds[:_MOST_SEEDS]))
        parts.append(f"{'seed' if len(seeds) == 1 else 'seeds'} {listed}{more} {reason}")
    return "; ".join(parts)


@dataclass(frozen=True)
class Row:
    """One cell under a board's protocol; `complete` in the ranked metric, as its place is."""

    place: int
    cell: str
    config: TrialFields
    trials: int
    seeds: int
    complete: bool
    missing_seeds: list[int]
    metrics: dict[str, Spread]
    group: Group | None = None
    on_front: bool | None = None
    difference: dict[str, Change] | None = None
    paper: list[PaperReference] = field(default_factory=list)
    fields: FieldValues = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    best: list[str] = field(default_factory=list)


class PivotCell(TypedDict):  # of which an answer may have thousands, too
    """The ranked metric over all results of the board's cells that share two fields' values.

    `missing` counts by what became of them the trials of cells that have no result on any board, on the first one.
    """

    mean: float | None
    std: float | None
    seeds: int
    trials: int
    cells: int
    missing: dict[str, int]


def counted_said(missing: Mapping[str, int]) -> str:
    """In words: how many trials of each kind there are."""
    return ", ".join(f"{count} {said}" for said, count in missing.items())


@dataclass(frozen=True)
class Pivot:
    """A matrix over two fields."""

    down: FieldColumn
    across: FieldColumn
    rows: list[FieldValue]
    columns: list[FieldValue]
    cells: list[list[PivotCell | None]]


@dataclass(frozen=True)
class Board:
    """Rows measured under one protocol: only these may be ranked together. `next` is where the next page begins.

    `baseline` is the configuration of the cell to which differences are, wherever its own row is.
    """

    protocol: str
    record: Record
    rows: list[Row]
    total: int
    unmeasured: int
    apart: list[Difference]
    front: list[str] | None = None
    next: Position | None = None
    columns: list[FieldColumn] = field(default_factory=list)
    common: FieldValues = field(default_factory=dict)
    pivot: Pivot | None = None
    decided: list[FieldColumn] = field(default_factory=list)
    baseline: TrialFields | None = None

    @property
    def shape(self) -> Columns:
        """Its columns, with what they leave out."""
        return Columns(self.columns, self.common, self.decided)

    @property
    def unmeasured_said(self) -> str:
        """In words: how many cells lack the ranked metric, whose name follows."""
        have = "cell has" if self.unmeasured == 1 else "cells have"
        return f"{self.unmeasured} {have} results without"


@dataclass(frozen=True)
class Hole:
    """A cell none of whose trials has a valid result; `missing` are at most `MOST_MISSING`."""

    cell: str
    config: TrialFields
    trials: int
    missing: list[Missing] = field(default_factory=list)


@dataclass(frozen=True)
class Invalid:
    """A result that cannot be true: it counts nowhere."""

    trial_id: int
    cell: str
    config: TrialFields
    protocol: str
    reasons: list[str]


MOST_MISSING = 1000
"""Missing trials that a hole names."""


@dataclass(frozen=True)
class Leaderboard:
    """All boards of a data set, the cells that no board shows and the results that none counts."""

    boards: list[Board]
    holes: list[Hole]
    hole_count: int
    invalid: list[Invalid]
    invalid_count: int
    columns: list[FieldColumn] = field(default_factory=list)
    common: FieldValues = field(default_factory=dict)
    decided: list[FieldColumn] = field(default_factory=list)

    @property
    def shape(self) -> Columns:
        """Its columns, with what they leave out."""
        return Columns(self.columns, self.common, self.decided)
