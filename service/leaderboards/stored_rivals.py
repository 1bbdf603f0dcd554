"""Stored rows with which those of a board's page are compared: of a large board the first and last of each metric."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any, cast

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    Text,
    bindparam,
    func,
    select,
    true,
    union_all,
)
from sqlalchemy.orm import Session, aliased

from service.database import Score, ScoreRank
from service.database.engine import among, driver_rows, is_postgres
from service.leaderboards.metrics import Measure, Metric
from service.leaderboards.score_ranks import ORDER, standing_of
from service.leaderboards.source import BEST, WORST, BoardKey, Rivals, compared_whole, ends_of

_FEW = 1000
"""Rows all of whose means are read at once; of more, an index is walked from its ends."""
_ALL_ROWS = 2**31 - 1
_Compared = tuple[int, float, float | None, float, float]
"""A `Measure`'s values; of a rival its range decides nothing, and is its mean."""
_as_measure = cast("Callable[[_Compared], Measure]", partial(tuple.__new__, Measure))
"""As `_make`, without asking each of thousands for its length."""
_mean = itemgetter(1)
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
        # By the ranked metric it is known whether a complete row is there: it may have none of the others.
        asked = list(dict.fromkeys([*metrics, self.ranked]))
        found = self._ends(asked, complete=True)
        complete = any(found.values())
        return Rivals(complete, found if complete else self._ends(asked, complete=False))

    def _ends(self, metrics: Sequence[Metric], *, complete: bool) -> dict[str, list[Measure]]:
        """By metric the complete rows, or the others; of many the first and the last. In one statement, mostly."""
        board = self.board
        if compared_whole(board.cells) or (board.cells <= _FEW and (self.meant is not None or self.conditions)):
            read = self._few(metrics, complete=complete)
        else:
            # Of so many rows in order about as many are meant as are wanted; where they are not, all are read.
            times = 2 * self.on_board / board.cells if self.meant is not None else 1.0
            read = self._walked(metrics, times, complete=complete)
            if self.meant is not None:
                wanted = min(BEST, board.ranked) // 2
                short = [metric for metric in metrics if len(read.get(metric.value, ())) < wanted]
                read |= self._walked(short, None, complete=complete) if short else {}
        found: dict[str, list[Measure]] = {}
        for metric in metrics:
            rows = read.get(metric.value, [])
            if not compared_whole(board.cells):
                rows.sort(key=_mean, reverse=metric.more_is_better)
            found[metric.value] = list(map(_as_measure, ends_of(rows, board.cells)))
        return found

    def _few(self, metrics: Sequence[Metric], *, complete: bool) -> dict[str, list[_Compared]]:
        """All rows."""
        names = [metric.value for metric in metrics]
        mine = [Score.board_id == self.board.id, *self.conditions, ScoreRank.metric.in_(names)]
        if self.board.ranked != self.board.cells:
            mine.append(_has(self.ranked.value))
        if self.meant is not None:
            mine.append(among(self.session, ScoreRank.score_id, list(self.meant)))
        standing = {metric.value: standing_of(metric, complete=complete) for metric in metrics}
        values = ScoreRank.seeds, ScoreRank.mean, ScoreRank.std
        if is_postgres(self.session):  # which sends thousands of rows sooner as a few arrays
            lists = select(ScoreRank.metric, ScoreRank.standing, *map(func.array_agg, values))
            lists = lists.join(Score, Score.id == ScoreRank.score_id).where(*mine)
            return {
                name: list(zip(seeds, means, stds, means, means, strict=True))
                for name, stands, seeds, means, stds in driver_rows(
                    self.session, lists.group_by(ScoreRank.metric, ScoreRank.standing)
                )
                if stands == standing[name]
            }
        query = select(ScoreRank.metric, ScoreRank.standing, *values).join(Score, Score.id == ScoreRank.score_id)
        read: dict[str, list[_Compared]] = {}
        for name, stands, seeds, mean, std in driver_rows(self.session, query.where(*mine)):
            if stands == standing[name]:
                read.setdefault(name, []).append((seeds, mean, std, mean, mean))
        return read

    def _walked(self, metrics: Sequence[Metric], times: float | None, *, complete: bool) -> dict[str, list[_Compared]]:
        """From the ends of each metric's order: so many `times` what is wanted, or all; those that are meant."""
        counts = [_ALL_ROWS if times is None else math.ceil(count * times) for count in (BEST, WORST)]
        values: dict[str, Any] = {"board": self.board.id, "ranked": self.ranked.value}
        narrowed: dict[str, Any] = {
            "has_ranked": self.board.ranked != self.board.cells,
            "where": tuple(self.conditions),
        }
        query: Select[Any] | CompoundSelect[Any]
        if is_postgres(self.session):
            query = (_ends_of_each if self.conditions else _kept_ends_of_each)(**narrowed)
            ups = [metric.more_is_better for metric in metrics]
            values["metrics"] = [metric.value for metric in metrics]
            values["standings"] = [standing_of(metric, complete=complete) for metric in metrics]
            values["least"], values["most"] = ([counts[up != most] for up in ups] for most in (False, True))
        else:
            more = sum(metric.more_is_better for metric in metrics)
            query = (_ends_of if self.conditions else _kept_ends)(len(metrics) - more, more, **narrowed)
            values |= {"best": counts[0], "worst": counts[1]}
            values |= {f"standing{int(up)}": int(complete == up) for up in (False, True)}
            ordered = sorted(metrics, key=lambda metric: metric.more_is_better)
            values |= {f"metric{index}": metric.value for index, metric in enumerate(ordered)}
        rows = driver_rows(self.session, query, values)
        if self.meant is not None:
            rows = [row for row in rows if row[-1] in self.meant]
        read: dict[str, list[_Compared]] = {}
        for name, seeds, mean, std, _ in rows if times is not None else dict.fromkeys(rows):
            read.setdefault(name, []).append((seeds, mean, std, mean, mean))
        return read


def _has(metric: Any) -> ColumnElement[bool]:
    """That a row has another metric."""
    other = aliased(ScoreRank)
    return select(other.score_id).where(other.score_id == ScoreRank.score_id, other.metric == metric).exists()


def _narrowed(where: tuple[ColumnElement[bool], ...], *, has_ranked: bool) -> list[ColumnElement[bool]]:
    """That a row of ranks is of those that are compared."""
    narrowed = [_has(bindparam("ranked"))] if has_ranked else []
    return [*narrowed, select(Score.id).where(Score.id == ScoreRank.score_id, *where).exists()] if where else narrowed


def _ends_of_each(*, has_ranked: bool, where: tuple[ColumnElement[bool], ...]) -> Select[Any]:
    """The rows with the least means and with the most of each of several metrics; whose, `_walked` says.

    PostgreSQL takes a tenth of the time for it that a part for each end of each metric takes, as SQLite needs them.
    """
    given = (bindparam("metrics", type_=ARRAY(Text)), *(bindparam(name, type_=_NUMBERS) for name in _ENDS))
    each = func.unnest(*given).table_valued("metric", *_ENDS).render_derived()
    mine = ScoreRank.board_id == bindparam("board"), ScoreRank.metric == each.c.metric
    rows = select(*_MEASURED).where(
        *mine, ScoreRank.standing == each.c.standings, *_narrowed(where, has_ranked=has_ranked)
    )
    least = rows.order_by(*(column.asc() for column in ORDER)).limit(each.c.least)
    most = rows.order_by(*(column.desc() for column in ORDER)).limit(each.c.most)
    ends = union_all(*(end.correlate(each) for end in (least, most))).lateral()
    return select(*ends.c).select_from(each.join(ends, true()))


_ENDS = ("standings", "least", "most")
_NUMBERS = ARRAY(Integer)
_kept_ends_of_each = cache(_ends_of_each)


def _ends_of(less: int, more: int, *, has_ranked: bool, where: tuple[ColumnElement[bool], ...]) -> CompoundSelect[Any]:
    """The first rows and the last of so many metrics, of which more or less is better; whose, `_walked` says."""
    narrowed = _narrowed(where, has_ranked=has_ranked)
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
