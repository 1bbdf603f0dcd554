"""Where a leaderboard's rows come from: scores that are stored (`materialized`), or results added up for the trials
that were asked for (`on_demand`). Both give the same numbers (`metrics`) in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from service.leaderboards.answer import Position
from service.leaderboards.metrics import Measure, Measures, Metric
from service.leaderboards.pareto import on_front


@dataclass(frozen=True)
class BoardKey:
    """One board: its protocol, how many of its cells have the ranked metric, and how many cells it has."""

    id: int
    protocol: str
    record: dict[str, Any]
    ranked: int
    cells: int


@dataclass(frozen=True)
class Entry:
    """One cell on one board, with the configuration of one of its trials."""

    cell: str
    config: dict[str, Any]
    seeds: int
    metrics: Measures


class ScoreSource(Protocol):
    """Boards and rows; a row's key means something within its source only, and is that of one row of one board."""

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""

    def positions(self, board: BoardKey, metric: Metric) -> dict[int, Position]:
        """All rows, in any order."""

    def front(self, board: BoardKey, metrics: Sequence[Metric]) -> list[int]:
        """Of the rows that have all of these metrics those that no other beats, best in the first metric first."""

    def values(self, board: BoardKey, fields: Sequence[str]) -> dict[int, tuple[Any, ...]]:
        """All rows' values of fields."""

    def counted(self, board: BoardKey, metric: Metric) -> dict[int, tuple[int, int, Measure]]:
        """Of all rows that have a metric: results, trials, and the mean over the results with its spread."""

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
