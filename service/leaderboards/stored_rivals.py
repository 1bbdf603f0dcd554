"""Stored rows with which those of a board's page are compared: of a large board the first and last of each metric."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, CompoundSelect, Integer, bindparam, select, union_all
from sqlalchemy.orm import Session, aliased

from service.database import Score, ScoreRank
from service.database.engine import among, driver_rows
from service.leaderboards.metrics import Measure, Metric
from service.leaderboards.score_ranks import ORDER, standing_of
from service.leaderboards.source import BEST, WORST, BoardKey, Rivals, compared_whole, ends_of

_FEW = 1000
"""Rows all of whose means are read at once; of more, an index is walked from its ends."""
_ALL_ROWS = 2**31 - 1
_MEASURED = (ScoreRank.metric, ScoreRank.seeds, ScoreRank.mean, ScoreRank.std, ScoreRank.score_id)


@dataclass(frozen=True)
class StoredRivals:
    """Rows of one board that have its ranked metric and meet conditions.

    `meant` are those that meet also conditions that no column answers, None where there is none of these; `on_board`
    are all rows of the board, those that were not asked for among them.
    """

    session: Session
    board: BoardKey
    ranked: Metric
    conditions: Sequence[ColumnElement[bool]]
    meant: Collection[int] | None
    on_board: int

    def of(self, metrics: Sequence[Metric]) -> Rivals:
        """Those that a page is compared with in each of several metrics: the complete rows where there are some."""
        for complete in (True, False):
            if any((found := self._ends(metrics, complete=complete)).values()):
                return Rivals(complete, found)
        return Rivals(complete=False, measured={})

    def _ends(self, metrics: Sequence[Metric], *, complete: bool) -> dict[str, list[Measure]]:
        """By metric the complete rows, or the others; of many the first and the last. In one statement, mostly."""
        board = self.board
        if compared_whole(board.cells) or (board.cells <= _FEW and (self.meant is not None or self.conditions)):
            rows = self._few(metrics, complete=complete)
        else:
            # Of so many rows in order about as many are meant as are wanted; where they are not, all are read.
            times = 2 * self.on_board / board.cells if self.meant is not None else 1.0
            rows = self._walked(metrics, times, complete=complete)
            if self.meant is not None:
                held = Counter(row[0] for row in rows)
                short = [metric for metric in metrics if held[metric.value] < min(BEST, board.ranked) // 2]
                rows = [row for row in rows if row[0] not in set(short)]
                rows += self._walked(short, None, complete=complete) if short else []
        read: dict[str, list[tuple[Any, ...]]] = {}
        for row in rows:
            read.setdefault(row[0], []).append(row)
        found: dict[str, list[Measure]] = {}
        for metric in metrics:
            mine = read.get(metric.value, [])
            mine.sort(key=lambda row: row[2], reverse=metric.more_is_better)
            ends = ends_of(mine, board.cells)
            # (Of a rival its range decides nothing.)
            found[metric.value] = [Measure(seeds, mean, std, mean, mean) for _, seeds, mean, std, _ in ends]
        return found

    def _few(self, metrics: Sequence[Metric], *, complete: bool) -> list[tuple[Any, ...]]:
        names = [metric.value for metric in metrics]
        query = select(*_MEASURED, ScoreRank.standing).join(Score, Score.id == ScoreRank.score_id)
        query = query.where(Score.board_id == self.board.id, *self.conditions, ScoreRank.metric.in_(names))
        if self.board.ranked != self.board.cells:
            query = query.where(_has(self.ranked.value))
        if self.meant is not None:
            query = query.where(among(self.session, ScoreRank.score_id, list(self.meant)))
        standing = {metric.value: standing_of(metric, complete=complete) for metric in metrics}
        return [row[:-1] for row in driver_rows(self.session, query) if row[-1] == standing[row[0]]]

    def _walked(self, metrics: Sequence[Metric], times: float | None, *, complete: bool) -> list[tuple[Any, ...]]:
        """From the ends of each metric's order: so many `times` what is wanted, or all; those that are meant."""
        ordered = sorted(metrics, key=lambda metric: metric.more_is_better)
        more = sum(metric.more_is_better for metric in metrics)
        query = (_ends_of if self.conditions else _kept_ends)(
            len(metrics) - more,
            more,
            has_ranked=self.board.ranked != self.board.cells,
            where=tuple(self.conditions),
        )
        counts = [_ALL_ROWS if times is None else math.ceil(count * times) for count in (BEST, WORST)]
        values = {"board": self.board.id, "ranked": self.ranked.value, "best": counts[0], "worst": counts[1]}
        values |= {f"standing{int(up)}": int(complete == up) for up in (False, True)}
        values |= {f"metric{index}": metric.value for index, metric in enumerate(ordered)}
        rows = driver_rows(self.session, query, values)
        if self.meant is not None:
            rows = [row for row in rows if row[-1] in self.meant]
        return rows if times is not None else list(dict.fromkeys(rows))


def _has(metric: Any) -> ColumnElement[bool]:
    """That a row has another metric."""
    other = aliased(ScoreRank)
    return select(other.score_id).where(other.score_id == ScoreRank.score_id, other.metric == metric).exists()


def _ends_of(less: int, more: int, *, has_ranked: bool, where: tuple[ColumnElement[bool], ...]) -> CompoundSelect[Any]:
    """The first rows and the last of so many metrics, of which more or less is better; whose, `_walked` says."""
    narrowed = [_has(bindparam("ranked"))] if has_ranked else []
    if where:
        narrowed.append(select(Score.id).where(Score.id == ScoreRank.score_id, *where).exists())
    parts = []
    for index in range(less + more):
        of_metric = ScoreRank.board_id == bindparam("board"), ScoreRank.metric == bindparam(f"metric{index}")
        standing = ScoreRank.standing == bindparam(f"standing{int(index >= less)}")
        query = select(*_MEASURED).where(*of_metric, standing, *narrowed)
        for count, descending in (("best", index >= less), ("worst", index < less)):
            order = [column.desc() if descending else column.asc() for column in ORDER]
            end = query.order_by(*order).limit(bindparam(count, type_=Integer))
            parts.append(select(*end.subquery().c))
    return union_all(*parts)


_kept_ends = cache(_ends_of)
"""Made once: to make one takes longer than to answer it."""
