"""Where a leaderboard's rows come from: stored scores, or results added up for the trials that were asked for.

Both give the same numbers (`service.measures`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sqlalchemy import ColumnElement, Select, func, select, tuple_
from sqlalchemy.orm import Session

from service import scores
from service.filters import Filters, GroupBy
from service.measures import Measures, measures, spread
from service.metric import Metric
from service.models import Experiment, Result, Score, ScoreBoard, ScoreRank, Trial
from service.models import Protocol as ProtocolRow
from service.scores import Counted

_MAY_LACK = {metric for metric in Metric if getattr(Result, metric.value).nullable}
"""Metrics that not every result has."""
_BATCH = 10_000
"""Values that one statement names; SQLite takes 32,766."""


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


class Position(NamedTuple):
    """A row's place in the order of one metric: equal means follow their cells (`service.scores.tie_of`)."""

    mean: float
    tie: int


class ScoreSource(Protocol):
    """Boards and rows; a row's key means something within its board and source only."""

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""

    def positions(self, board: BoardKey, metric: Metric) -> dict[int, Position]:
        """All rows, in any order."""

    def groups(self, board: BoardKey, field: GroupBy) -> dict[int, Any]:
        """All rows' values of a field."""

    def entries(self, board: BoardKey, keys: Sequence[int]) -> dict[int, Entry]:
        """Whole rows."""

    def find(self, board: BoardKey, cell: str) -> int | None:
        """The key of a cell."""


class StoredScores:
    """Rows as `service.scores` keeps them: as many are read as are shown."""

    def __init__(self, session: Session, dataset: str, scope: int, filters: Filters) -> None:
        self._session = session
        self._dataset = dataset
        self._scope = scope
        self._conditions = filters.of_cells(Score)
        if filters.min_seeds > 1:
            self._conditions.append(Score.seeds >= filters.min_seeds)
        self._protocol = filters.protocol

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""
        query = (
            select(ScoreBoard.id, ScoreBoard.protocol, ProtocolRow.record)
            .join(ProtocolRow, ProtocolRow.fingerprint == ScoreBoard.protocol)
            .where(ScoreBoard.scope == self._scope, ScoreBoard.dataset == self._dataset)
        )
        if self._protocol is not None:
            query = query.where(ScoreBoard.protocol == self._protocol)
        rows = self._session.execute(query).all()
        ids = [row.id for row in rows]
        # All counted along indexes; with filters by the metric only on boards where some cells lack it.
        per_board = select(Score.board_id, func.count()).where(Score.board_id.in_(ids)).group_by(Score.board_id)
        of_metric = ScoreRank.board_id.in_(ids), ScoreRank.metric == metric.value
        per_rank = select(ScoreRank.board_id, func.count()).where(*of_metric).group_by(ScoreRank.board_id)
        cells = self._counts(per_board)
        ranked = self._counts(per_rank) if metric in _MAY_LACK else dict(cells)
        if self._conditions:
            chosen = self._counts(per_board.where(*self._conditions))
            with_metric = select(func.count()).select_from(ScoreRank)
            for board_id, count in chosen.items():
                some_lack_it = cells[board_id] != ranked.get(board_id, 0)
                known = self._session.scalar(self._of(with_metric, board_id, metric)) if some_lack_it else count
                ranked[board_id] = known or 0
            cells = chosen
        return [
            BoardKey(board_id, protocol, record, ranked.get(board_id, 0), cells[board_id])
            for board_id, protocol, record in rows
            if board_id in cells
        ]

    def _counts(self, query: Select[int, int]) -> dict[int, int]:
        return dict(self._session.execute(query).all())

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""
        query = self._of(select(ScoreRank.score_id, ScoreRank.mean, ScoreRank.tie), board.id, metric)
        if after is not None:
            query = query.where(_beyond(metric, after))
        columns = (ScoreRank.mean, ScoreRank.tie)
        order = [column.desc() for column in columns] if metric.more_is_better else list(columns)
        return self._placed(query.order_by(*order).limit(limit))

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""
        better = ScoreRank.mean > position.mean if metric.more_is_better else ScoreRank.mean < position.mean
        count = self._of(select(func.count()).select_from(ScoreRank), board.id, metric)
        beyond = self._session.scalar(count.where(_beyond(metric, position))) or 0
        return self._session.scalar(count.where(better)) or 0, board.ranked - beyond

    def positions(self, board: BoardKey, metric: Metric) -> dict[int, Position]:
        """All rows, in any order."""
        return self._placed(self._of(select(ScoreRank.score_id, ScoreRank.mean, ScoreRank.tie), board.id, metric))

    def _placed(self, query: Any) -> dict[int, Position]:
        rows = self._session.connection().execute(query).all()  # without objects: there may be thousands
        return {key: Position(mean, tie) for key, mean, tie in rows}

    def groups(self, board: BoardKey, field: GroupBy) -> dict[int, Any]:
        """All rows' values of a field."""
        query = select(Score.id, getattr(Trial, field)).join(Trial, Trial.id == Score.trial_id)
        return dict(self._session.execute(query.where(Score.board_id == board.id)).all())

    def entries(self, board: BoardKey, keys: Sequence[int]) -> dict[int, Entry]:
        """Whole rows."""
        columns = (Score.id, Score.cell, Trial.config, Score.seeds, Score.metrics)
        query = select(*columns).join(Trial, Trial.id == Score.trial_id).where(Score.id.in_(keys))
        return {key: Entry(*row) for key, *row in self._session.execute(query)}

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


def _beyond(metric: Metric, position: Position) -> ColumnElement[bool]:
    order = tuple_(ScoreRank.mean, ScoreRank.tie)
    return order < position if metric.more_is_better else order > position


class ChosenTrials:
    """Rows added up from the results of the trials that an experiment or a tag names.

    `metrics` are those by which rows are ranked and compared, `shown` those of whole rows.
    """

    def __init__(
        self,
        session: Session,
        dataset: str,
        scope: int,
        filters: Filters,
        metrics: Sequence[Metric],
        shown: Sequence[Metric],
        group: GroupBy | None,
    ) -> None:
        self._session = session
        self._metrics = list(dict.fromkeys(metrics))
        self._shown = tuple(shown)
        columns = [getattr(Result, metric.value) for metric in self._metrics]
        query = (
            select(Trial.id, Trial.fingerprint, Result.protocol, Trial.cell, getattr(Trial, group or "model"), *columns)
            .join(Result, Result.trial_id == Trial.id)
            .join(Experiment, Experiment.id == Trial.experiment_id)
            .where(*filters.of_trials(dataset, scope), Result.valid)
        )
        if filters.protocol is not None:
            query = query.where(Result.protocol == filters.protocol)
        cells: dict[int, str] = {}
        groups: dict[int, Any] = {}
        counted = []
        for trial_id, fingerprint, protocol, cell, value, *values in session.execute(query):
            cells[trial_id], groups[trial_id] = cell, value
            counted.append(Counted(trial_id, fingerprint, None, protocol, values))
        boards: dict[str, dict[str, list[Counted]]] = {}
        for result in scores.newest(counted):
            boards.setdefault(result.protocol, {}).setdefault(cells[result.trial_id], []).append(result)
        self._protocols = sorted(boards)
        # A row's key is its newest trial.
        self._rows: list[dict[int, list[Counted]]] = [
            {rows[-1].trial_id: rows for rows in boards[name].values() if len(rows) >= filters.min_seeds}
            for name in self._protocols
        ]
        self._cells, self._groups = cells, groups
        self._positions: dict[tuple[int, Metric], dict[int, Position]] = {}

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""
        query = select(ProtocolRow.fingerprint, ProtocolRow.record).where(ProtocolRow.fingerprint.in_(self._protocols))
        records = {row[0]: row[1] for row in self._session.execute(query)}
        found = [
            BoardKey(index, name, records[name], 0, len(self._rows[index]))
            for index, name in enumerate(self._protocols)
            if self._rows[index]
        ]
        return [
            BoardKey(board.id, board.protocol, board.record, len(self.positions(board, metric)), board.cells)
            for board in found
        ]

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""
        ordered = self._ordered(board, metric)
        first = 0 if after is None else self.ahead(board, metric, after)[1]
        return dict(ordered[first : first + limit])

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""
        more = metric.more_is_better
        others = self.positions(board, metric).values()
        better = sum(other.mean > position.mean if more else other.mean < position.mean for other in others)
        return better, sum(other >= position if more else other <= position for other in others)

    def positions(self, board: BoardKey, metric: Metric) -> dict[int, Position]:
        """All rows, in any order."""
        if (board.id, metric) not in self._positions:
            column = self._metrics.index(metric)
            found = self._positions[board.id, metric] = {}
            for key, rows in self._rows[board.id].items():
                known = [float(value) for row in rows if (value := row.values[column]) is not None]
                if known:
                    found[key] = Position(spread(known)[1], scores.tie_of(self._cells[key]))
        return self._positions[board.id, metric]

    def groups(self, board: BoardKey, field: GroupBy) -> dict[int, Any]:
        """All rows' values of the field that the source was made for."""
        return {key: self._groups[key] for key in self._rows[board.id]}

    def entries(self, board: BoardKey, keys: Sequence[int]) -> dict[int, Entry]:
        """Whole rows."""
        rows = self._rows[board.id]
        trials = [result.trial_id for key in keys for result in rows[key]]
        values: dict[int, Sequence[float | None]] = {}
        for first in range(0, len(trials), _BATCH):
            some = Result.trial_id.in_(trials[first : first + _BATCH])
            query = select(Result.trial_id, *(getattr(Result, metric.value) for metric in self._shown)).where(some)
            values |= {row[0]: row[1:] for row in self._session.execute(query)}
        chosen = select(Trial.id, Trial.config).where(Trial.id.in_(keys))
        configs = {row[0]: row[1] for row in self._session.execute(chosen)}
        return {
            key: Entry(
                self._cells[key],
                configs[key],
                len(rows[key]),
                measures((values[result.trial_id] for result in rows[key]), self._shown),
            )
            for key in keys
        }

    def find(self, board: BoardKey, cell: str) -> int | None:
        """The key of a cell."""
        return next((key for key in self._rows[board.id] if self._cells[key] == cell), None)

    def _ordered(self, board: BoardKey, metric: Metric) -> list[tuple[int, Position]]:
        placed = self.positions(board, metric).items()
        return sorted(placed, key=lambda row: row[1], reverse=metric.more_is_better)
