"""Leaderboards' rows as `cell_scores` keeps them: as many are read as are shown."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from itertools import compress
from typing import Any

from pydantic_core import from_json
from sqlalchemy import JSON, ColumnElement, Integer, Select, Text, bindparam, cast, func, literal_column, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from service.database import Protocol, Result, Score, ScoreBoard, ScoreRank, Trial
from service.database.engine import among, driver_rows, is_among, is_postgres
from service.leaderboards.boards import Position
from service.leaderboards.conditions import COLUMNS
from service.leaderboards.filters import Question
from service.leaderboards.metrics import Measures, Metric, from_stored
from service.leaderboards.score_ranks import ORDER
from service.leaderboards.source import BoardKey, Cell, Entry, Rivals, front_of, hashable
from service.leaderboards.stored_rivals import StoredRivals
from service.specs.columns import default_of
from ttsv.config.fields import FieldValue

_MAY_LACK = {metric for metric in Metric if getattr(Result, metric.value).nullable}
"""Metrics that not every result has."""
_PLACES = select(ScoreRank.score_id, *ORDER)


class StoredScores:
    """Rows as `cell_scores` keeps them: as many are read as are shown, and of each the metrics shown."""

    def __init__(self, session: Session, question: Question) -> None:
        self._session, self._question = session, question
        self._shown = tuple(metric.value for metric in question.shown)
        self._conditions = question.filters.of_cells(Score)
        if question.filters.min_seeds > 1:
            self._conditions.append(Score.seeds >= question.filters.min_seeds)
        self._others = [condition for condition in question.filters.where if not condition.on_column]
        """Conditions that no column answers: asked of what the scores' fields say, once for every board."""
        self._meant: dict[int, set[int]] = {}
        self._on_board: dict[int, int] = {}
        """Of a board how many rows it has, those that were not asked for among them."""

    def _of_others(self, board: int) -> set[int]:
        """The rows of a board that meet all conditions, those that no column answers among them."""
        if board not in self._meant:
            fields = list(dict.fromkeys(condition.field for condition in self._others))
            keys, *told = self._read(board, fields, [Score.id])
            values = dict(zip(fields, told, strict=True))
            kept = []
            for condition in self._others:
                mine = values[condition.field]
                held = {value: condition.holds(value) for value in set(mine)}
                kept.append(set(compress(keys, map(held.__getitem__, mine))))
            self._meant[board] = set.intersection(*kept)
        return self._meant[board]

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""
        question = self._question
        chosen = () if self._others else tuple(self._conditions)
        of_protocol = question.filters.protocol is not None
        query = (_boards if chosen else _kept_boards)(chosen, may_lack=metric in _MAY_LACK, of_protocol=of_protocol)
        asked = {"scope_name": question.scope, "dataset_name": question.dataset, "metric_name": metric.value}
        asked |= {"protocol_name": question.filters.protocol} if of_protocol else {}
        found = []
        for board_id, protocol, record, on_board, *known in self._session.connection().execute(query, asked):
            ranked = known.pop(0) if metric in _MAY_LACK else on_board
            cells = len(self._of_others(board_id)) if self._others else known.pop(0) if chosen else on_board
            if self._conditions or self._others:
                ranked = cells if ranked == on_board else self._count(board_id, metric)
            self._on_board[board_id] = on_board
            if cells:
                found.append(BoardKey(board_id, protocol, record, ranked, cells))
        return found

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""
        beyond = [] if after is None else [_beyond(metric, after)]
        if self._others:
            keys = self._keys(board.id, metric, *beyond)[:limit]
            found = self.positions(board, metric, keys)
            return {key: found[key] for key in keys}
        if self._conditions or beyond:
            query = self._of(_PLACES, board.id, metric).where(*beyond)
            return self._placed(query.order_by(*_best_first(metric)).limit(limit))
        asked = {"board": board.id, "metric_name": metric.value, "count": limit}
        return self._placed(_first_rows(more_is_better=metric.more_is_better), asked)

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""
        better = self._count(board.id, metric, _beyond(metric, position.shared, ahead=True))
        return better, board.ranked - self._count(board.id, metric, _beyond(metric, position))

    def _count(self, board: int, metric: Metric, *conditions: ColumnElement[bool]) -> int:
        if self._others:
            return len(self._keys(board, metric, *conditions))
        query = self._of(select(func.count()).select_from(ScoreRank), board, metric)
        return self._session.scalar(query.where(*conditions)) or 0

    def order(self, board: BoardKey, metric: Metric) -> list[int]:
        """All rows, best first."""
        return self._keys(board.id, metric)

    def _keys(self, board: int, metric: Metric, *conditions: ColumnElement[bool]) -> list[int]:
        """The rows that conditions on their ranks leave, best first: of tens of thousands a database sends one text."""
        query = self._of(select(ScoreRank.score_id), board, metric).where(*conditions)
        ordered = query.order_by(*_best_first(metric)).subquery()
        found = self._session.scalar(select(cast(self._listed(ordered.c.score_id), Text)))
        keys = from_json(found) if found else []
        if self._others:
            meant = self._of_others(board)
            keys = [key for key in keys if key in meant]
        return keys

    def positions(self, board: BoardKey, metric: Metric, keys: Sequence[int] | None = None) -> dict[int, Position]:
        """Some rows, in any order; without `keys` all."""
        if keys is None:
            found = self._placed(self._of(_PLACES, board.id, metric))
            return {key: found[key] for key in found.keys() & self._of_others(board.id)} if self._others else found
        of_rows = ScoreRank.metric == metric.value, among(self._session, ScoreRank.score_id, keys)
        return self._placed(_PLACES.where(*of_rows))

    def sharing(self, board: BoardKey, metric: Metric, places: Collection[tuple[int, float]]) -> dict[int, Position]:
        """The rows that stand in one of these places (`Position.shared`), in any order."""
        means = among(self._session, ScoreRank.mean, list({mean for _, mean in places}))
        found = self._placed(self._of(_PLACES, board.id, metric).where(ScoreRank.standing.in_((0, 1)), means))
        meant = found.keys() & self._of_others(board.id) if self._others else found.keys()
        return {key: found[key] for key in meant if found[key].shared in places}

    def _placed(self, query: Any, values: Mapping[str, Any] | None = None) -> dict[int, Position]:
        rows = driver_rows(self._session, query, values)  # without objects: there may be thousands
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
        if len(others) == 1 and not self._conditions and not self._others:
            # A whole board comes in half the time from PostgreSQL; where few rows are chosen this would take longer.
            query = _unbeaten(query, first, others[0], means[0])
        rows = driver_rows(self._session, query)
        if self._others:
            meant = self._of_others(board.id)
            rows = [row for row in rows if row[0] in meant]
        return front_of(rows, metrics)

    def rivals(self, board: BoardKey, ranked: Metric, metrics: Sequence[Metric]) -> Rivals:
        """Of the rows that have the ranked metric those that a page is compared with, in each of several metrics."""
        meant = self._of_others(board.id) if self._others else None
        found = StoredRivals(self._session, board, ranked, self._conditions, meant, self._on_board[board.id])
        return found.of(metrics)

    def values(self, board: BoardKey, field: str) -> dict[int, FieldValue]:
        """All rows' values of a field, tuples for lists."""
        keys, values = self._read(board.id, [field], [Score.id])
        return dict(zip(keys, values, strict=True))

    def places(
        self, board: BoardKey, fields: tuple[str, str], metric: Metric
    ) -> dict[tuple[FieldValue, FieldValue], list[Cell]]:
        """By the values of two fields, tuples for lists: all rows that have a metric."""
        spreads = select(ScoreRank.seeds, ScoreRank.mean, ScoreRank.std, ScoreRank.score_id)
        measured = {row[-1]: row for row in driver_rows(self._session, self._of(spreads, board.id, metric))}
        if self._others:
            measured = {key: measured[key] for key in measured.keys() & self._of_others(board.id)}
        found: defaultdict[tuple[FieldValue, FieldValue], list[Cell]] = defaultdict(list)
        keys, *counts, down, across = self._read(board.id, fields, [Score.id, Score.seeds, Score.trials])
        cells = zip(*counts, map(measured.get, keys), strict=True)
        for place, cell in zip(zip(down, across, strict=True), cells, strict=True):
            if cell[2] is not None:
                found[place].append(cell)
        return found

    def _read(
        self, board: int, fields: Sequence[str], columns: Sequence[InstrumentedAttribute[int]]
    ) -> list[Sequence[Any]]:
        """What a board's rows have in columns, and their values of fields, tuples for lists."""
        mine = Score.board_id == board, *self._conditions
        if all(field in COLUMNS for field in fields):
            stored = select(*columns, *(getattr(Score, field) for field in fields)).where(*mine)
            rows = self._session.connection().execute(stored).all()
            return list(zip(*rows, strict=True)) if rows else [()] * (len(columns) + len(fields))
        # Each as one array or text: of tens of thousands of rows that takes half the time.
        arrays = list(map(func.array_agg if is_postgres(self._session) else self._listed, columns))
        told = [cast(self._listed(self._field(field)), Text) for field in fields]
        (gathered,) = driver_rows(self._session, select(*arrays, *told).where(*mine))
        lists = [from_json(one) if type(one) is str else one or [] for one in gathered]
        for index, field in enumerate(fields, len(columns)):
            default = hashable(default_of(field))
            if dict in (kinds := set(map(type, lists[index]))):
                lists[index] = [default if type(one) is dict else one for one in lists[index]]
            if list in kinds:
                lists[index] = list(map(hashable, lists[index]))
        return lists

    def _field(self, field: str) -> ColumnElement[Any]:
        """What a score's fields say of one, as JSON: a mapping, as no value is, for one that is at its default."""
        if is_postgres(self._session):
            return func.coalesce(Score.fields.op("->")(field), literal_column("'{}'::json"))
        return func.coalesce(Score.fields.op("->")(f'$."{field}"'), func.json("{}"))

    def _listed(self, column: Any) -> ColumnElement[Any]:
        return func.json_agg(column) if is_postgres(self._session) else func.json_group_array(column)

    def entries(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Whole rows, of one board or several."""
        query = _entries(None if len(self._shown) == len(Metric) else self._shown, postgres=is_postgres(self._session))
        rows = self._session.connection().execute(query, {"keys": keys}).all()
        return {
            key: Entry(cell, config, seeds, trials, self._read_measures(found))
            for key, cell, config, seeds, trials, found in rows
        }

    def _read_measures(self, found: Any) -> Measures:
        if type(found) is list:
            found = {name: one for name, one in zip(self._shown, found, strict=False) if one is not None}
        return from_stored(found or {}, self._shown)

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


# Statements that are the same for many questions are made once: to make one takes about as long as to answer it.


def _boards(chosen: tuple[ColumnElement[bool], ...], *, may_lack: bool, of_protocol: bool) -> Select[*tuple[Any, ...]]:
    """A data set's boards: of each how many cells it has, how many have a metric, and how many meet conditions.

    All counted along indexes, board by board; by the metric only where some cells may lack it.
    """
    of_board = select(func.count()).select_from(Score).where(Score.board_id == ScoreBoard.id)
    counts = [of_board]
    if may_lack:
        with_metric = ScoreRank.board_id == ScoreBoard.id, ScoreRank.metric == bindparam("metric_name")
        counts.append(select(func.count()).select_from(ScoreRank).where(*with_metric))
    if chosen:
        counts.append(of_board.where(*chosen))
    boards = select(ScoreBoard.id, ScoreBoard.protocol, Protocol.record)
    boards = boards.add_columns(*(count.scalar_subquery() for count in counts))
    boards = boards.join(Protocol, Protocol.fingerprint == ScoreBoard.protocol)
    boards = boards.where(ScoreBoard.scope == bindparam("scope_name"), ScoreBoard.dataset == bindparam("dataset_name"))
    return boards.where(ScoreBoard.protocol == bindparam("protocol_name")) if of_protocol else boards


_kept_boards = cache(_boards)


@cache
def _first_rows(*, more_is_better: bool) -> Select[*tuple[Any, ...]]:
    """The best rows of a board by a metric."""
    mine = ScoreRank.board_id == bindparam("board"), ScoreRank.metric == bindparam("metric_name")
    order = [column.desc() if more_is_better else column.asc() for column in ORDER]
    return _PLACES.where(*mine).order_by(*order).limit(bindparam("count", type_=Integer))


@lru_cache
def _entries(shown: tuple[str, ...] | None, *, postgres: bool) -> Select[*tuple[Any, ...]]:
    """Whole rows, of their metrics those that are shown where to pick them is less than to send and read the rest."""
    measures: ColumnElement[Any] = Score.metrics.expression
    if shown is not None and not postgres:  # of several paths SQLite makes a list
        paths = [f"$.{name}" for name in shown]
        measures = func.json_extract(Score.metrics, *paths, paths[0], type_=JSON)
    columns = (Score.id, Score.cell, Trial.config, Score.seeds, Score.trials, measures)
    return select(*columns).join(Trial, Trial.id == Score.trial_id).where(is_among(Score.id, "keys", postgres=postgres))


def _best_first(metric: Metric) -> list[ColumnElement[Any]]:
    return [_by_value(column, metric) for column in ORDER]


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
    order = tuple_(*ORDER[: len(position)])
    return order > position if metric.more_is_better == ahead else order < position
