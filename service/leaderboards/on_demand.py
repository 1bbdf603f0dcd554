"""Leaderboards' rows added up from the results of the trials that were asked for."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Experiment, Protocol, Result, Trial
from service.leaderboards.boards import Position
from service.leaderboards.conditions import COLUMNS
from service.leaderboards.corruption_baselines import BASELINE, BaselineProtocols, without_error
from service.leaderboards.counted_results import Counted, newest
from service.leaderboards.filters import Question
from service.leaderboards.metrics import Measure, Metric, measures, spread
from service.leaderboards.score_ranks import standing_of, tie_of
from service.leaderboards.source import BoardKey, Cell, Contender, Entry, Rivals, ends_of, front_of, hashable
from service.specs.columns import value_of
from ttsv.config.fields import FieldValue, FieldValues, TrialFields

_BATCH = 10_000
"""Values that one statement names; SQLite takes 32,766."""


class ChosenTrials:
    """Rows added up from the results of the trials that an experiment or a tag names."""

    def __init__(self, session: Session, question: Question) -> None:
        filters = question.filters
        self._session = session
        self._metrics = list(dict.fromkeys((question.metric, *question.front)))
        self._shown = tuple(question.shown)
        columns = [getattr(Result, metric.value) for metric in self._metrics]
        query = (
            select(Trial.id, Trial.fingerprint, Trial.cell, Result.protocol, BASELINE, *columns)
            .outerjoin(Result, (Result.trial_id == Trial.id) & Result.valid)
            .join(Experiment, Experiment.id == Trial.experiment_id)
            .where(*question.of_trials())
        )
        cells: dict[int, str] = {}
        trials: dict[str, set[str]] = {}
        counted = []
        names = BaselineProtocols(session.connection(), enter=False)
        of_baselines: set[str] = set()
        for trial_id, fingerprint, cell, protocol, baseline, *values in session.connection().execute(query).all():
            trials.setdefault(cell, set()).add(fingerprint)
            if protocol is None:
                continue
            cells[trial_id] = cell
            found = Counted(trial_id, fingerprint, None, protocol, values)
            if baseline is not None:
                counted.append(replace(found, protocol=names.name(protocol, baseline)))
                of_baselines.add(counted[-1].protocol)
                found = replace(found, values=without_error(values, self._metrics))
            counted.append(found)
        boards: dict[str, dict[str, list[Counted]]] = {}
        for result in newest(counted):
            if filters.protocol in (None, result.protocol):
                boards.setdefault(result.protocol, {}).setdefault(cells[result.trial_id], []).append(result)
        self._protocols = sorted(boards)
        # A row's key is its newest trial, below 0 on a board of a baseline: a trial may stand on two.
        self._rows: list[dict[int, list[Counted]]] = [
            {
                rows[-1].trial_id * (-1 if name in of_baselines else 1): rows
                for rows in boards[name].values()
                if len(rows) >= filters.min_seeds
            }
            for name in self._protocols
        ]
        self._cells = cells
        self._trials = {cell: len(different) for cell, different in trials.items()}
        self._positions: dict[tuple[int, Metric], dict[int, Position]] = {}

    def boards(self, metric: Metric) -> list[BoardKey]:
        """All boards."""
        query = select(Protocol.fingerprint, Protocol.record).where(Protocol.fingerprint.in_(self._protocols))
        records = {row[0]: row[1] for row in self._session.execute(query)}
        return [
            BoardKey(index, name, records[name], len(self._positions_of(index, metric)), len(self._rows[index]))
            for index, name in enumerate(self._protocols)
            if self._rows[index]
        ]

    def ranked(self, board: BoardKey, metric: Metric, limit: int, after: Position | None) -> dict[int, Position]:
        """The best rows, or those after a position, in their order."""
        first = 0 if after is None else self.ahead(board, metric, after)[1]
        return dict(islice(self.positions(board, metric).items(), first, first + limit))

    def ahead(self, board: BoardKey, metric: Metric, position: Position) -> tuple[int, int]:
        """How many rows have a better mean, and how many stand up to and with the position."""
        more = metric.more_is_better
        others, shared = self.positions(board, metric).values(), position.shared
        better = sum(other.shared > shared if more else other.shared < shared for other in others)
        return better, sum(other >= position if more else other <= position for other in others)

    def order(self, board: BoardKey, metric: Metric) -> list[int]:
        """All rows, best first."""
        return list(self.positions(board, metric))

    def positions(self, board: BoardKey, metric: Metric, keys: Sequence[int] | None = None) -> dict[int, Position]:
        """Some rows, in any order; without `keys` all, best first."""
        found = self._positions_of(board.id, metric)
        return found if keys is None else {key: found[key] for key in keys}

    def sharing(self, board: BoardKey, metric: Metric, places: Collection[tuple[int, float]]) -> dict[int, Position]:
        """The rows that stand in one of these places (`Position.shared`)."""
        return {key: one for key, one in self.positions(board, metric).items() if one.shared in places}

    def _positions_of(self, board: int, metric: Metric) -> dict[int, Position]:
        if (board, metric) not in self._positions:
            found = {}
            for key, results in self._rows[board].items():
                if known := self._values(results, metric):
                    cell = self._cells[abs(key)]
                    standing = standing_of(metric, complete=len(known) == self._trials[cell])
                    found[key] = Position(standing, spread(known).mean, tie_of(cell))
            ordered = sorted(found, key=found.__getitem__, reverse=metric.more_is_better)
            self._positions[board, metric] = {key: found[key] for key in ordered}
        return self._positions[board, metric]

    def _values(self, results: Sequence[Counted], metric: Metric) -> list[float]:
        """A metric's values, of the results that have it."""
        column = self._metrics.index(metric)
        return [float(value) for result in results if (value := result.values[column]) is not None]

    def front(self, board: BoardKey, metrics: Sequence[Metric]) -> list[int]:
        """Of the rows that have all of these metrics those that no other beats, best in the first metric first."""
        first, *others = [self.positions(board, metric) for metric in metrics]
        keys = set(first).intersection(*others)
        rows: list[Contender] = [
            (key, first[key].tie, first[key].mean, *(other[key].mean for other in others)) for key in keys
        ]
        return front_of(rows, metrics)

    def rivals(self, board: BoardKey, ranked: Metric, metrics: Sequence[Metric]) -> Rivals:
        """Of the rows that have the ranked metric those that a page is compared with, in each of several metrics."""
        keys = self._positions_of(board.id, ranked)
        rows = {key: self._rows[board.id][key] for key in keys}
        complete = any(one.standing == standing_of(ranked, complete=True) for one in keys.values())
        values = self._results([result.trial_id for mine in rows.values() for result in mine], metrics)
        found: dict[str, list[Measure]] = {}
        for index, metric in enumerate(metrics):
            known = []
            for key, results in rows.items():
                mine = [float(one) for r in results if (one := values[key < 0, r.trial_id][index]) is not None]
                if mine and (not complete or len(mine) == self._trials[self._cells[abs(key)]]):
                    known.append((sum(mine) / len(mine), mine))
            known.sort(key=lambda one: one[0], reverse=metric.more_is_better)
            # Exact sums of those that lead or end alone: there may be tens of thousands between.
            found[metric.value] = [spread(mine) for _, mine in ends_of(known, board.cells)]
        return Rivals(complete, found)

    def values(self, board: BoardKey, field: str) -> dict[int, FieldValue]:
        """All rows' values of a field, tuples for lists."""
        return {key: one for key, (one,) in self._fields(board, [field]).items()}

    def places(
        self, board: BoardKey, fields: tuple[str, str], metric: Metric
    ) -> dict[tuple[FieldValue, FieldValue], list[Cell]]:
        """By the values of two fields, tuples for lists: all rows that have a metric."""
        found: dict[tuple[FieldValue, FieldValue], list[Cell]] = {}
        for key, (down, across) in self._fields(board, fields).items():
            results = self._rows[board.id][key]
            if known := self._values(results, metric):
                one = spread(known)
                trials = self._trials[self._cells[abs(key)]]
                cell = len(results), trials, (one.seeds, one.mean, one.std, key)
                found.setdefault((down, across), []).append(cell)
        return found

    def _fields(self, board: BoardKey, fields: Sequence[str]) -> dict[int, tuple[FieldValue, ...]]:
        keys = list(self._rows[board.id])
        configs = self._configs(keys) if any(name not in COLUMNS for name in fields) else {}
        stored: dict[int, FieldValues] = {}
        for first in range(0, len(keys), _BATCH):
            some = select(Trial.id, *(getattr(Trial, name) for name in COLUMNS))
            rows = self._session.execute(some.where(Trial.id.in_(list(map(abs, keys[first : first + _BATCH])))))
            stored |= {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in rows}
        return {
            key: tuple(
                stored[abs(key)][name] if name in COLUMNS else hashable(value_of(configs[key], name)) for name in fields
            )
            for key in keys
        }

    def _configs(self, keys: Sequence[int]) -> dict[int, TrialFields]:
        found: dict[int, TrialFields] = {}
        for first in range(0, len(keys), _BATCH):
            some = select(Trial.id, Trial.config).where(Trial.id.in_(list(map(abs, keys[first : first + _BATCH]))))
            found |= {row[0]: row[1] for row in self._session.execute(some)}
        return {key: found[abs(key)] for key in keys}

    def entries(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Whole rows, of one board or several."""
        rows = {key: row for board in self._rows for key, row in board.items()}
        values = self._results([result.trial_id for key in keys for result in rows[key]], self._shown)
        configs = self._configs(keys)
        return {
            key: Entry(
                self._cells[abs(key)],
                configs[key],
                len(rows[key]),
                self._trials[self._cells[abs(key)]],
                measures((values[key < 0, result.trial_id] for result in rows[key]), self._shown),
            )
            for key in keys
        }

    def _results(
        self, trials: Sequence[int], metrics: Sequence[Metric]
    ) -> dict[tuple[bool, int], Sequence[float | None]]:
        """Metrics by whether a row is on a board of a baseline, and by trial."""
        values: dict[tuple[bool, int], Sequence[float | None]] = {}
        columns = [getattr(Result, metric.value) for metric in metrics]
        for first in range(0, len(trials), _BATCH):
            query = select(Result.trial_id, BASELINE, *columns)
            query = query.where(Result.trial_id.in_(trials[first : first + _BATCH]))
            for trial_id, baseline, *found in self._session.execute(query):
                values[True, trial_id] = found
                values[False, trial_id] = found if baseline is None else without_error(found, metrics)
        return values

    def cells(self, keys: Sequence[int]) -> dict[int, str]:
        """The cells of rows."""
        return {key: self._cells[abs(key)] for key in keys}

    def find(self, board: BoardKey, cell: str) -> int | None:
        """The key of a cell."""
        return next((key for key in self._rows[board.id] if self._cells[abs(key)] == cell), None)
