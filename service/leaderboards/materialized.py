"""Leaderboards' rows as `cell_scores` keeps them: as many are read as are shown."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json
from sqlalchemy import JSON, ColumnElement, Text, cast, column, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from service.database import Protocol, Result, Score, ScoreBoard, ScoreRank, Trial
from service.database.engine import among, is_postgres
from service.leaderboards.answer import Position
from service.leaderboards.conditions import COLUMNS, Condition
from service.leaderboards.filters import Question
from service.leaderboards.metrics import Measure, Metric, from_stored
from service.leaderboards.source import BoardKey, Entry, front_of
from service.specs.columns import default_of

_MAY_LACK = {metric for metric in Metric if getattr(Result, metric.value).nullable}
"""Metrics that not every result has."""
_ORDER = (ScoreRank.standing, ScoreRank.mean, ScoreRank.tie)
"""As the parts of a `Position`."""
_PLACES = select(ScoreRank.score_id, *_ORDER)


class StoredScores:
    """Rows as `cell_scores` keeps them: as many are read as are shown, and of each the metrics shown."""

    def __init__(self, session: Session, question: Question) -> None:
        self._session, self._question = session, question
        self._conditions = question.filters.of_cells(Score)
        if question.filters.min_seeds > 1:
            self._conditions.append(Score.seeds >= question.filters.min_seeds)
        if others := [condition for condition in question.filters.where if not condition.on_column]:
            self._conditions.append(_any_of(session, self._meant(others)))

    def _meant(self, conditions: Sequence[Condition]) -> list[int]:
        """The scores whose fields all conditions hold for: read once; SQL would take them apart in every query."""
        of_boards = select(ScoreBoard.id).where(
            ScoreBoard.scope == self._question.scope, ScoreBoard.dataset == self._question.dataset
        )
        keys, every = self._told(Score.board_id.in_(of_boards))
        asked = [(condition.field, default_of(condition.field), condition.holds) for condition in conditions]
        return [
            key
            for key, told in zip(keys, every, strict=True)
            if all(holds(told.get(field, default)) for field, default, holds in asked)
        ]

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""
        # All counted along indexes, board by board; with filters by the metric only where some cells lack it.
        of_board = select(func.count()).select_from(Score).where(Score.board_id == ScoreBoard.id)
        with_metric = select(func.count()).select_from(ScoreRank)
        counts = {"cells": of_board}
        if metric in _MAY_LACK:
            counts["ranked"] = with_metric.where(ScoreRank.board_id == ScoreBoard.id, ScoreRank.metric == metric.value)
        if self._conditions:
            counts["chosen"] = of_board.where(*self._conditions)
        query = (
            select(ScoreBoard.id, ScoreBoard.protocol, Protocol.record)
            .add_columns(*(count.scalar_subquery().label(name) for name, count in counts.items()))
            .join(Protocol, Protocol.fingerprint == ScoreBoard.protocol)
            .where(ScoreBoard.scope == self._question.scope, ScoreBoard.dataset == self._question.dataset)
        )
        if self._question.filters.protocol is not None:
            query = query.where(ScoreBoard.protocol == self._question.filters.protocol)
        found = []
        for board_id, protocol, record, *known in self._session.execute(query):
            of = dict(zip(counts, known, strict=True))
            cells = of.get("chosen", of["cells"])
            ranked = of.get("ranked", of["cells"])
            if self._conditions:
                some_lack_it = of["cells"] != ranked
                ranked = self._session.scalar(self._of(with_metric, board_id, metric)) if some_lack_it else cells
            if cells:
                found.append(BoardKey(board_id, protocol, record, ranked, cells))
        return found

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""
        query = self._of(_PLACES, board.id, metric)
        if after is not None:
            query = query.where(_beyond(metric, after))
        order = [_best_first(column, metric) for column in _ORDER]
        return self._placed(query.order_by(*order).limit(limit))

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""
        better = _beyond(metric, position.shared, ahead=True)
        count = self._of(select(func.count()).select_from(ScoreRank), board.id, metric)
        beyond = self._session.scalar(count.where(_beyond(metric, position))) or 0
        return self._session.scalar(count.where(better)) or 0, board.ranked - beyond

    def positions(self, board: BoardKey, metric: Metric) -> dict[int, Position]:
        """All rows, in any order."""
        return self._placed(self._of(_PLACES, board.id, metric))

    def _placed(self, query: Any) -> dict[int, Position]:
        rows = self._session.connection().execute(query).all()  # without objects: there may be thousands
        return {row[0]: Position._make(row[1:]) for row in rows}

    def front(self, board: BoardKey, metrics: Sequence[Metric]) -> list[int]:
        """Of the rows that have all of these metrics those that no other beats, best in the first metric first."""
        first, *others = metrics
        query = self._of(select(ScoreRank.score_id, ScoreRank.tie, ScoreRank.mean), board.id, first)
        means: list[ColumnElement[float]] = []
        for metric in others:
            other = aliased(ScoreRank)
            of_row = (other.score_id == ScoreRank.score_id) & (other.metric == metric.value)
            query = query.join(other, of_row).where(other.board_id == board.id).add_columns(other.mean)
            means.append(other.mean.expression)
        if len(others) == 1 and not self._conditions:
            # A whole board comes in half the time from PostgreSQL; where few rows are chosen this would take longer.
            query = _unbeaten(query, first, others[0], means[0])
        return front_of(self._session.connection().execute(query).all(), metrics)

    def values(self, board: BoardKey, fields: Sequence[str]) -> dict[int, tuple[Any, ...]]:
        """All rows' values of fields."""
        of_board = Score.board_id == board.id
        if all(name in COLUMNS for name in fields):
            query = select(Score.id, *(getattr(Score, name) for name in fields)).where(of_board, *self._conditions)
            return {row[0]: tuple(row[1:]) for row in self._session.connection().execute(query).all()}
        keys, every = self._told(of_board)
        asked = [(name, default_of(name)) for name in fields]
        return {key: tuple([told.get(*one) for one in asked]) for key, told in zip(keys, every, strict=True)}

    def _told(self, of_boards: ColumnElement[bool]) -> tuple[list[int], list[dict[str, Any]]]:
        """The scores that are asked about, and what their fields say: read as one document, which takes least time."""
        query = select(Score.id, cast(Score.fields, Text)).where(of_boards, *self._conditions)
        rows = self._session.connection().execute(query).all()
        return [row[0] for row in rows], from_json(f"[{','.join(row[1] for row in rows)}]")

    def counted(self, board: BoardKey, metric: Metric) -> dict[int, tuple[int, int, Measure]]:
        """Of all rows that have a metric: results, trials, and the mean over the results with its spread."""
        query = select(Score.id, Score.seeds, Score.trials, Score.metrics[metric.value])
        rows = self._session.connection().execute(query.where(Score.board_id == board.id, *self._conditions))
        return {key: (seeds, trials, Measure._make(one)) for key, seeds, trials, one in rows if one is not None}

    def entries(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Whole rows, of one board or several."""
        columns = (Score.id, Score.cell, Trial.config, Score.seeds, self._measures())
        query = select(*columns).join(Trial, Trial.id == Score.trial_id).where(among(self._session, Score.id, keys))
        rows = self._session.connection().execute(query).all()
        return {key: Entry(cell, config, seeds, from_stored(found or {})) for key, cell, config, seeds, found in rows}

    def _measures(self) -> ColumnElement[Any]:
        """Those of a score's metrics that are shown: quicker to pick where they lie than to send and read the rest."""
        shown = self._question.shown
        if len(shown) == len(Metric):
            return Score.metrics.expression
        on_postgres = is_postgres(self._session)
        every = func.json_each(Score.metrics).table_valued(column("key", Text), "value", joins_implicitly=True)
        name, value = every.c.key, every.c.value if on_postgres else func.json(every.c.value)
        gathered = (func.json_object_agg if on_postgres else func.json_group_object)(name, value, type_=JSON)
        picked = among(self._session, name, [metric.value for metric in shown])
        return select(gathered).where(picked).correlate(Score).scalar_subquery()

    def cells(self, keys: Sequence[int]) -> dict[int, str]:
        """The cells of rows."""
        return dict(
            self._session.execute(select(Score.id, Score.cell).where(among(self._session, Score.id, keys))).all()
        )

    def find(self, board: BoardKey, cell: str) -> int | None:
        """The key of a cell."""
        return self._session.scalar(select(Score.id).where(Score.cell == cell, Score.board_id == board.id))

    def _of(self, query: Any, board_id: int, metric: Metric) -> Any:
        """Narrows a query on `ScoreRank` to a board's cells that were asked for."""
        if not self._conditions:
            return query.where(ScoreRank.board_id == board_id, ScoreRank.metric == metric.value)
        # From the scores to their ranks: in the order of ranks most of the board would be read for a few rows. (Named
        # by its scores only, the board cannot lead a database that way.)
        of_cells = Score.board_id == board_id, ScoreRank.metric == metric.value, *self._conditions
        return query.join(Score, Score.id == ScoreRank.score_id).where(*of_cells)


def _any_of(session: Session, keys: list[int]) -> ColumnElement[bool]:
    """That a score is one of many, which travel as one value: SQLite takes 32,766, and each would be sent by itself."""
    if is_postgres(session):
        return among(session, Score.id, keys)
    listed = func.json_each(json.dumps(keys)).table_valued("value")
    return Score.id.in_(select(listed.c.value))


def _best_first(column: ColumnElement[Any] | InstrumentedAttribute[Any], metric: Metric) -> ColumnElement[Any]:
    return column.desc() if metric.more_is_better else column.asc()


def _unbeaten(query: Any, first: Metric, second: Metric, mean: ColumnElement[float]) -> Any:
    """Best first: without those that are worse than any before them in the second metric."""
    order = [_best_first(ScoreRank.mean, first), _best_first(mean, second)]
    extreme = (func.max if second.more_is_better else func.min)(mean).over(order_by=order, rows=(None, -1))
    rows = query.add_columns(extreme.label("best")).subquery()
    *columns, beside, best = rows.c
    kept = beside >= best if second.more_is_better else beside <= best
    return select(*columns, beside).where(best.is_(None) | kept)


def _beyond(metric: Metric, position: Sequence[float], *, ahead: bool = False) -> ColumnElement[bool]:
    """That a row stands behind a position, or before it; of a position also the first parts alone."""
    order = tuple_(*_ORDER[: len(position)])
    return order > position if metric.more_is_better == ahead else order < position
