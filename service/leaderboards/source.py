"""Where a leaderboard's rows come from: scores that are stored (`materialized`), or results added up for the trials
that were asked for (`on_demand`). Both give the same numbers (`metrics`) in the same order.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from service.leaderboards.boards import Position
from service.leaderboards.metrics import Measure, Measures, Metric
from service.leaderboards.pareto import on_front
from service.leaderboards.protocols import Record
from ttsv.config.fields import FieldValue, TrialFields


@dataclass(frozen=True)
class BoardKey:
    """One board: its protocol, how many of its cells have the ranked metric, and how many cells it has."""

    id: int
    protocol: str
    record: Record
    ranked: int
    cells: int


@dataclass(frozen=True)
class Entry:
    """One cell on one board, with the configuration of one of its trials."""

    cell: str
    config: TrialFields
    seeds: int
    trials: int
    metrics: Measures


Cell = tuple[int, int, tuple[int, float, float | None, int]]
"""One row as a matrix takes it: its results, its trials, and how many have the metric, mean, deviation and its key."""


ALL = 500
"""Rows of a board that a page of it is compared with, if it has no more."""
BEST, WORST = 10, 2
"""Complete rows of a larger board, from either end of each metric's order, that a page of it is compared with."""


_Row = TypeVar("_Row")


def compared_whole(count: int) -> bool:
    """Whether a page of a board of so many rows is compared with all of them."""
    return count <= ALL


def ends_of(rows: Sequence[_Row], count: int) -> Sequence[_Row]:
    """Of ordered rows of a board of so many those that its pages are compared with."""
    return rows if compared_whole(count) else [*rows[:BEST], *rows[BEST:][-WORST:]]


@dataclass(frozen=True)
class Rivals:
    """Rows with which those of a page are compared, by metric; `complete`: where there are complete ones only these."""

    complete: bool
    measured: Mapping[str, Sequence[Measure]]


class ScoreSource(Protocol):
    """Boards and rows; a row's key means something within its source only, and is that of one row of one board."""

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""

    def order(self, board: BoardKey, metric: Metric) -> list[int]:
        """All rows, best first."""

    def positions(self, board: BoardKey, metric: Metric, keys: Sequence[int] | None = None) -> dict[int, Position]:
        """Some rows, in any order; without `keys` all."""

    def sharing(self, board: BoardKey, metric: Metric, places: Collection[tuple[int, float]]) -> dict[int, Position]:
        """The rows that stand in one of these places (`Position.shared`), in any order."""

    def front(self, board: BoardKey, metrics: Sequence[Metric]) -> list[int]:
        """Of the rows that have all of these metrics those that no other beats, best in the first metric first."""

    def rivals(self, board: BoardKey, ranked: Metric, metrics: Sequence[Metric]) -> Rivals:
        """Of the rows that have the ranked metric those that a page is compared with, in each of several metrics."""

    def values(self, board: BoardKey, field: str) -> Mapping[int, FieldValue]:
        """All rows' values of a field, tuples for lists."""

    def places(
        self, board: BoardKey, fields: tuple[str, str], metric: Metric
    ) -> Mapping[tuple[FieldValue, FieldValue], list[Cell]]:
        """By the values of two fields, tuples for lists: all rows that have a metric."""

    def entries(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Whole rows, of one board or several."""

    def cells(self, keys: Sequence[int]) -> dict[int, str]:
        """The cells of rows."""

    def find(self, board: BoardKey, cell: str) -> int | None:
        """The key of a cell."""


Contender = tuple[int, int, float, *tuple[float, ...]]
"""A row's key, its tie and its means."""


def front_of(rows: Sequence[Contender], metrics: Sequence[Metric]) -> list[int]:
    """The keys of the rows that no other beats in these metrics, best in the first metric first."""
    kept = on_front([row[2:] for row in rows], [metric.more_is_better for metric in metrics])
    chosen = [row for row, keep in zip(rows, kept, strict=True) if keep]
    chosen.sort(key=lambda row: (row[2], row[1]), reverse=metrics[0].more_is_better)
    return [row[0] for row in chosen]


def hashable(value: FieldValue) -> FieldValue:
    """A field's value, a tuple for a list."""
    return tuple(value) if isinstance(value, list) else value


def in_order(value: FieldValue) -> tuple[bool, int, Any]:
    """None first, then truth values and numbers, texts, lists."""
    if isinstance(value, tuple):
        return True, 2, [in_order(one) for one in value]
    return value is not None, 1 if isinstance(value, str) else 0, value
