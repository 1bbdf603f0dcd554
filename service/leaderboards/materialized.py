"""Leaderboards' rows as `cell_scores` keeps them: as many are read as are shown."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json
from sqlalchemy import JSON, ColumnElement, Text, cast, column, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from service.database import Protocol, Result, Score, ScoreBoard, ScoreRank, Trial
from service.database.engine import among, is_postgres
from service.leaderboards.answer import Position
from service.leaderboards.conditions import COLUMNS, Condition
from service.leaderboards.filters import Question
from service.leaderboards.metrics import Metric, from_stored
from service.leaderboards.source import BoardKey, Cell, Entry, Order, front_of, hashable
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
        self._orders: dict[tuple[int, Metric], Order] = {}
        others = [condition for condition in question.filters.where if not condition.on_column]
        self._meant = self._held(others) if others else None
        """Of conditions that no column answers: board -> the rows for which they hold."""

    def _held(self, conditions: Sequence[Condition]) -> dict[int, set[int]]:
        of_boards = select(ScoreBoard.id).where(
            ScoreBoard.scope == self._question.scope, ScoreBoard.dataset == self._question.dataset
        )
        fields = list(dict.fromkeys(condition.field for condition in conditions))
        found: dict[int, set[int]] = {}
        for (board, *values), (keys,) in self._alike(Score.board_id.in_(of_boards), fields, [Score.id], by_board=True):
            of = dict(zip(fields, values, strict=True))
            if all(condition.holds(of[condition.field]) for condition in conditions):
                found.setdefault(board, set()).update(keys)
        return found

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""
        # All counted along indexes, board by board; with filters by the metric only where some cells lack it.
        of_board = select(func.count()).select_from(Score).where(Score.board_id == ScoreBoard.id)
        with_metric = select(func.count()).select_from(ScoreRank)
        counts = {"cells": of_board}
        if metric in _MAY_LACK:
            counts["ranked"] = with_metric.where(ScoreRank.board_id == ScoreBoard.id, ScoreRank.metric == metric.value)
        if self._conditions and self._meant is None:
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
            cells = of.get("chosen", of["cells"]) if self._meant is None else len(self._meant.get(board_id, ()))
            all_have_it = of.get("ranked", of["cells"]) == of["cells"]
            if all_have_it:
                ranked = cells
            elif self._meant is not None:
                ranked = len(self._order_of(board_id, metric).rows)
            else:
                ranked = (
                    self._session.scalar(self._of(with_metric, board_id, metric)) if self._conditions else of["ranked"]
                )
            if cells:
                found.append(BoardKey(board_id, protocol, record, ranked, cells))
        return found

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""
        if self._meant is not None:
            return self.order(board, metric).page(limit, after)
        query = self._of(_PLACES, board.id, metric)
        if after is not None:
            query = query.where(_beyond(metric, after))
        rows = self._session.connection().execute(query.order_by(*_best_first(metric)).limit(limit)).all()
        return {row[0]: Position._make(row[1:]) for row in rows}

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""
        if self._meant is not None:
            return self.order(board, metric).ahead(position)
        better = _beyond(metric, position.shared, ahead=True)
        count = self._of(select(func.count()).select_from(ScoreRank), board.id, metric)
        beyond = self._session.scalar(count.where(_beyond(metric, position))) or 0
        return self._session.scalar(count.where(better)) or 0, board.ranked - beyond

    def order(self, board: BoardKey, metric: Metric) -> Order:
        """All rows."""
        return self._order_of(board.id, metric)

    def _order_of(self, board: int, metric: Metric) -> Order:
        if (board, metric) not in self._orders:
            query = self._of(_PLACES, board, metric).order_by(*_best_first(metric))
            rows = self._session.connection().execute(query).all()  # without objects: there may be thousands
            if self._meant is not None:
                meant = self._meant.get(board, set())
                rows = [row for row in rows if row[0] in meant]
            self._orders[board, metric] = Order(rows, metric.more_is_better)
        return self._orders[board, metric]

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
        if len(others) == 1 and not self._conditions and self._meant is None:
            # A whole board comes in half the time from PostgreSQL; where few rows are chosen this would take longer.
            query = _unbeaten(query, first, others[0], means[0])
        rows = self._session.connection().execute(query).all()
        if self._meant is not None:
            meant = self._meant.get(board.id, set())
            rows = [row for row in rows if row[0] in meant]
        return front_of(rows, metrics)

    def values(self, board: BoardKey, field: str) -> dict[int, Hashable]:
        """All rows' values of a field, tuples for lists."""
        found: dict[int, Hashable] = {}
        for (value,), (keys,) in self._alike(Score.board_id == board.id, [field], [Score.id]):
            found |= dict.fromkeys(keys, hashable(value))
        return found

    def places(
        self, board: BoardKey, fields: tuple[str, str], metric: Metric
    ) -> dict[tuple[Hashable, Hashable], list[Cell]]:
        """By the values of two fields, tuples for lists: all rows that have a metric."""
        spread = select(ScoreRank.score_id, ScoreRank.seeds, ScoreRank.mean, ScoreRank.std)
        rows = self._session.connection().execute(self._of(spread, board.id, metric)).all()
        measured = {row[0]: row[1:] for row in rows}
        meant = None if self._meant is None else self._meant.get(board.id, set())
        found: dict[tuple[Hashable, Hashable], list[Cell]] = {}
        columns = [Score.id, Score.seeds, Score.trials]
        for (down, across), listed in self._alike(Score.board_id == board.id, fields, columns):
            mine = [
                Cell(seeds, trials, *measured[key])
                for key, seeds, trials in zip(*listed, strict=True)
                if key in measured and (meant is None or key in meant)
            ]
            if mine:
                found.setdefault((hashable(down), hashable(across)), []).extend(mine)
        return found

    def _alike(
        self,
        of_boards: ColumnElement[bool],
        fields: Sequence[str],
        columns: Sequence[InstrumentedAttribute[int]],
        *,
        by_board: bool = False,
    ) -> Iterator[tuple[tuple[Any, ...], list[list[int]]]]:
        """The rows' values of fields (`by_board`: with its key first), and what those that share them have in columns.

        Added up where they lie: of tens of thousands of rows a database sends some hundred texts.
        """
        every = all(field in COLUMNS for field in fields)
        shared: list[ColumnElement[Any]] = [Score.board_id.expression] if by_board else []
        shared += [getattr(Score, field).expression if every else self._field(field) for field in fields]
        shared = [one.label(f"shared_{index}") for index, one in enumerate(shared)]
        gathered = [cast(self._listed(column), Text) for column in columns]
        query = select(*shared, *gathered).where(of_boards, *self._conditions)
        query = query.group_by(*[one.name for one in shared])
        for row in self._session.connection().execute(query):
            values = row[: len(shared)]
            if not every:
                told = zip(fields, values[by_board:], strict=True)
                read = [default_of(field) if value is None else from_json(value) for field, value in told]
                values = (*values[:by_board], *read)
            yield tuple(values), [from_json(one) for one in row[len(shared) :]]

    def _field(self, field: str) -> ColumnElement[str]:
        """What a score's fields say of one, as JSON; NULL: nothing, as it is at its default."""
        if is_postgres(self._session):
            return cast(Score.fields.op("->")(field), Text)
        return Score.fields.op("->", return_type=Text())(f'$."{field}"')

    def _listed(self, column: InstrumentedAttribute[int]) -> ColumnElement[Any]:
        return func.json_agg(column) if is_postgres(self._session) else func.json_group_array(column)

    def entries(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Whole rows, of one board or several."""
        columns = (Score.id, Score.cell, Trial.config, Score.seeds, Score.trials, self._measures())
        query = select(*columns).join(Trial, Trial.id == Score.trial_id).where(among(self._session, Score.id, keys))
        rows = self._session.connection().execute(query).all()
        return {
            key: Entry(cell, config, seeds, trials, from_stored(found or {}))
            for key, cell, config, seeds, trials, found in rows
        }

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


def _best_first(metric: Metric) -> list[ColumnElement[Any]]:
    return [_by_value(column, metric) for column in _ORDER]


def _by_value(column: ColumnElement[Any] | InstrumentedAttribute[Any], metric: Metric) -> ColumnElement[Any]:
    return column.desc() if metric.more_is_better else column.asc()


def _unbeaten(query: Any, first: Metric, second: Metric, mean: ColumnElement[float]) -> Any:
    """Best first: without those that are worse than any before them in the second metric."""
    order = [_by_value(ScoreRank.mean, first), _by_value(mean, second)]
    extreme = (func.max if second.more_is_better else func.min)(mean).over(order_by=order, rows=(None, -1))
    rows = query.add_columns(extreme.label("best")).subquery()
    *columns, beside, best = rows.c
    kept = beside >= best if second.more_is_better else beside <= best
    return select(*columns, beside).where(best.is_(None) | kept)


def _beyond(metric: Metric, position: Sequence[float], *, ahead: bool = False) -> ColumnElement[bool]:
    """That a row stands behind a position, or before it; of a position also the first parts alone."""
    order = tuple_(*_ORDER[: len(position)])
    return order > position if metric.more_is_better == ahead else order < position
