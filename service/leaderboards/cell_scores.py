"""Scores: every cell's mean and spread over its seeds, kept up to date so that leaderboards need not add anything up.

A cell's results count where they are valid and their experiment is not archived; a trial that ran more than once (the
same fingerprint in several experiments) counts once per protocol, with its newest result. There is one board for every
scope, data set and protocol: scope 0 has the trials of all projects, the others those of one. Results with a mean
corruption error are on two: see `corruption_baselines`.
"""

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import attrgetter
from typing import Any, TypedDict

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.database import Experiment, Protocol, Result, Score, ScoreBoard, ScoreRank, Trial
from service.database.engine import insert_rows, is_among, is_postgres
from service.leaderboards.corruption_baselines import BASELINE, with_baseline, without_error
from service.leaderboards.metrics import Measure, Measures, Metric, Stored, from_stored, measures, to_stored
from service.specs.columns import told
from ttsv.config.fields import FieldValues
from ttsv.results import protocol_fingerprint

EVERYONE = 0
"""The scope of all projects."""
METRIC_COLUMNS = tuple(getattr(Result, metric.value) for metric in Metric)
_FIELDS = ("model", "layer", "constraint", "rank")
_BATCH = 500
"""Cells written at a time by `refresh_all`."""

_TRIALS = (
    select(Trial.id, Trial.fingerprint, Experiment.project_id, Result.protocol, BASELINE)
    .add_columns(*METRIC_COLUMNS, *(getattr(Trial, name) for name in _FIELDS))
    .outerjoin(Result, (Result.trial_id == Trial.id) & Result.valid)
    .join(Experiment, Experiment.id == Trial.experiment_id)
    .where(Experiment.archived_at.is_(None))
)
_LOCK = text("SELECT pg_advisory_xact_lock(:of_scores, slot) FROM unnest(CAST(:slots AS int[])) AS slot")
_OF_SCORES = 0x7C07E5
_SLOTS = 256
"""Locks that all cells share, as a server has room for some thousands in all."""
_BOARD = select(ScoreBoard.id).where(
    ScoreBoard.scope == bindparam("scope_name"),
    ScoreBoard.dataset == bindparam("dataset_name"),
    ScoreBoard.protocol == bindparam("protocol_name"),
)
_ENTER = insert(Score).returning(Score.id, sort_by_parameter_order=True)
_CHANGE = update(Score).where(Score.id == bindparam("score_id"))
_TURN = update(ScoreRank).where(ScoreRank.score_id == bindparam("of_score")).values(standing=1 - ScoreRank.standing)
_UNPLACE = delete(ScoreRank).where(
    ScoreRank.score_id == bindparam("of_score"), ScoreRank.metric == bindparam("of_metric")
)


@cache
def _of_cells(*, postgres: bool) -> tuple[Select[*tuple[Any, ...]], Select[*tuple[Any, ...]]]:
    """The trials of cells of one data set, and the scores that they have."""
    trials = _TRIALS.add_columns(Trial.cell).where(
        Trial.dataset == bindparam("dataset_name"), is_among(Trial.cell, "cell_names", postgres=postgres)
    )
    scores = (
        select(Score.id, Score.board_id, Score.cell, Score.trial_id, Score.seeds, Score.trials, Score.metrics)
        .add_columns(ScoreBoard.scope, ScoreBoard.protocol)
        .join(ScoreBoard, ScoreBoard.id == Score.board_id)
        .where(is_among(Score.cell, "cell_names", postgres=postgres), ScoreBoard.dataset == bindparam("dataset_name"))
    )
    return trials, scores


@cache
def _configs(*, postgres: bool) -> Select[*tuple[Any, ...]]:
    return select(Trial.id, Trial.config).where(is_among(Trial.id, "trials", postgres=postgres))


@dataclass(frozen=True)
class Counted:
    """One result as it enters a score; `values` in the order of `Metric`."""

    trial_id: int
    fingerprint: str
    project_id: int | None
    protocol: str
    values: Sequence[float | None]
    fields: Sequence[Any] = ()
    """Of its cell, by which rows are filtered."""


class _Columns(TypedDict):
    """What a score's row has of how it was made."""

    trial_id: int
    seeds: int
    trials: int
    metrics: Stored
    model: str
    layer: str
    constraint: str
    rank: float | None


class _ChangedScore(_Columns):
    """A row of `_CHANGE`."""

    score_id: int


@dataclass(frozen=True)
class _Made:
    """A cell's score as its results make it, of so many different trials."""

    trial_id: int
    seeds: int
    trials: int
    measures: Measures
    fields: Sequence[Any]

    @property
    def complete(self) -> bool:
        """Whether every trial has a result."""
        return self.seeds == self.trials

    def columns(self) -> _Columns:
        """As they are written."""
        model, layer, constraint, rank = self.fields
        return {
            "trial_id": self.trial_id,
            "seeds": self.seeds,
            "trials": self.trials,
            "metrics": to_stored(self.measures),
            "model": model,
            "layer": layer,
            "constraint": constraint,
            "rank": rank,
        }


class _Cell:
    """The results of a cell, and of each scope the different trials that it has."""

    def __init__(self, names: "BaselineProtocols") -> None:
        self._names = names
        self._results: list[Counted] = []
        self._trials: dict[int, set[str]] = {}

    def add(self, row: Any) -> None:
        """One row of `_TRIALS`."""
        trial_id, fingerprint, project_id, protocol, baseline = row[:5]
        for scope in (EVERYONE, project_id):
            if scope is not None:
                self._trials.setdefault(scope, set()).add(fingerprint)
        if protocol is not None:
            values = 5 + len(METRIC_COLUMNS)
            found = Counted(
                trial_id, fingerprint, project_id, protocol, row[5:values], row[values : values + len(_FIELDS)]
            )
            if baseline is not None:
                self._results.append(replace(found, protocol=self._names.name(protocol, baseline)))
                found = replace(found, values=without_error(found.values, tuple(Metric)))
            self._results.append(found)

    def scores(self) -> Iterator[tuple[tuple[int, str], _Made]]:
        """(scope, protocol) and the score there."""
        for (scope, protocol), counted in _by_board(self._results).items():
            found = measures(one.values for one in counted)
            newest_one, trials = counted[-1], len(self._trials[scope])
            yield (
                (scope, protocol),
                _Made(newest_one.trial_id, len(counted), trials, found, newest_one.fields),
            )


class BaselineProtocols:
    """The protocols of boards for a protocol and a baseline of mean corruption errors; `enter` those that are new."""

    def __init__(self, connection: Connection, *, enter: bool) -> None:
        self._connection, self._enter = connection, enter
        self._known: dict[tuple[str, str], str] = {}

    def name(self, protocol: str, baseline: str) -> str:
        """The protocol's fingerprint."""
        if (protocol, baseline) not in self._known:
            own = self._connection.scalar(select(Protocol.record).where(Protocol.fingerprint == protocol))
            record = with_baseline(own or {}, baseline)
            found = self._known[protocol, baseline] = protocol_fingerprint(record)
            if self._enter:
                new = _insert(self._connection)(Protocol).values(fingerprint=found, record=record)
                self._connection.execute(new.on_conflict_do_nothing())
        return self._known[protocol, baseline]


def newest(results: Iterable[Counted]) -> list[Counted]:
    """Of results that share fingerprint and protocol the newest, in the order of their trials."""
    of_trial = attrgetter("trial_id")
    found = {(counted.fingerprint, counted.protocol): counted for counted in sorted(results, key=of_trial)}
    return sorted(found.values(), key=of_trial)  # a dictionary keeps the place of the oldest


def tie_of(cell: str) -> int:
    """By what cells of equal means are ordered: 56 bits of the cell itself, the same in every database and query."""
    return int.from_bytes(hashlib.blake2b(cell.encode(), digest_size=7).digest())


def standing_of(metric: Metric, *, complete: bool) -> int:
    """What puts complete cells first, in the direction in which the metric's values get worse."""
    return int(complete == metric.more_is_better)


def refresh_experiment(session: Session, experiment_id: int) -> None:
    """Makes the scores of all cells of an experiment anew: for archiving it and bringing it back."""
    cells = select(Trial.dataset, Trial.cell).where(Trial.experiment_id == experiment_id).distinct()
    refresh_cells(session, [(row[0], row[1]) for row in session.execute(cells)])


def refresh_cells(session: Session, cells: Iterable[tuple[str, str]]) -> None:
    """Makes the scores of cells (data set, cell) anew from their results, in the caller's transaction."""
    session.flush()
    cells = sorted(set(cells))
    _lock(session, cells)
    for dataset, group in groupby(cells, key=lambda pair: pair[0]):
        names = [cell for _, cell in group]
        for first in range(0, len(names), _BATCH):
            _refresh(session.connection(), dataset, names[first : first + _BATCH])


def recount(session: Session, experiment: Experiment) -> None:
    """Counts the trials of cells that have scores anew, after trials were added to an experiment.

    A cell that was complete may lack seeds then, and stands behind those that are.
    """
    session.flush()
    scopes = [EVERYONE, *([experiment.project_id] if experiment.project_id is not None else [])]
    mine = (
        select(Score.id, Trial.dataset, Score.cell, ScoreBoard.scope, Score.seeds, Score.trials)
        .join(ScoreBoard, ScoreBoard.id == Score.board_id)
        .join(Trial, (Trial.cell == Score.cell) & (Trial.dataset == ScoreBoard.dataset))
        .where(Trial.experiment_id == experiment.id, ScoreBoard.scope.in_(scopes))
        .distinct()
    )
    if not (cells := sorted({(row.dataset, row.cell) for row in session.execute(mine)})):
        return
    _lock(session, cells)
    counts: dict[tuple[int, str, str], int] = {}
    for scope in scopes:
        trials = (
            select(Trial.dataset, Trial.cell, func.count(Trial.fingerprint.distinct()))
            .join(Experiment, Experiment.id == Trial.experiment_id)
            .where(Experiment.archived_at.is_(None))
            .group_by(Trial.dataset, Trial.cell)
        )
        trials = trials if scope == EVERYONE else trials.where(Experiment.project_id == scope)
        for dataset, group in groupby(cells, key=lambda pair: pair[0]):
            names = [cell for _, cell in group]
            for first in range(0, len(names), _BATCH):
                some = trials.where(Trial.dataset == dataset, Trial.cell.in_(names[first : first + _BATCH]))
                counts |= {(scope, row[0], row[1]): row[2] for row in session.execute(some)}
    changed, turned = [], []
    for score_id, dataset, cell, scope, seeds, before in session.execute(mine):
        if (now := counts.get((scope, dataset, cell), before)) != before:
            changed.append({"score_id": score_id, "trials": now})
            turned += [{"of_score": score_id}] if (seeds == now) != (seeds == before) else []
    connection = session.connection()
    if changed:
        connection.execute(_CHANGE, changed)
    if turned:
        connection.execute(_TURN, turned)


def _lock(session: Session, cells: Sequence[tuple[str, str]]) -> None:
    """Two trials of one cell that end at once: the second must see the first one's result. (SQLite has one writer.)"""
    if is_postgres(session):
        slots = sorted({zlib.crc32(f"{dataset} {cell}".encode()) % _SLOTS for dataset, cell in cells})
        session.execute(_LOCK, {"of_scores": _OF_SCORES, "slots": slots})  # in one order: no deadlocks


def _refresh(connection: Connection, dataset: str, cells: Sequence[str]) -> None:
    # Statements made once, and no objects: this runs whenever a trial finishes.
    asked = {"dataset_name": dataset, "cell_names": cells}
    found: dict[str, _Cell] = {}
    names = BaselineProtocols(connection, enter=True)
    trials, scores = _of_cells(postgres=connection.dialect.name == "postgresql")
    for row in connection.execute(trials, asked):
        found.setdefault(row[-1], _Cell(names)).add(row)
    known = {(row.cell, row.scope, row.protocol): row for row in connection.execute(scores, asked)}
    wanted = {(name, *board): made for name, cell in found.items() for board, made in cell.scores()}
    if gone := [known[key].id for key in known.keys() - wanted.keys()]:
        connection.execute(delete(Score).where(Score.id.in_(gone)))
    ranks = _Ranks()
    changed: list[_ChangedScore] = []
    new: list[tuple[int, str, _Made]] = []
    boards: dict[tuple[int, str], int] = {}
    for (cell, scope, protocol), made in wanted.items():
        if old := known.get((cell, scope, protocol)):
            measured = from_stored(old.metrics)
            if (old.trial_id, old.trials, measured) != (made.trial_id, made.trials, made.measures):
                changed.append({"score_id": old.id, **made.columns()})
                turned = (old.seeds == old.trials) != made.complete
                ranks.change(old.id, old.board_id, cell, made, measured, turned=turned)
        else:
            if (scope, protocol) not in boards:
                boards[scope, protocol] = _board(connection, scope, dataset, protocol)
            new.append((boards[scope, protocol], cell, made))
    if changed:
        connection.execute(_CHANGE, changed)
    if new:
        flat = _flat_fields(connection, [made for *_, made in new])
        rows = [
            {"board_id": board_id, "cell": cell, "fields": flat[made.trial_id], **made.columns()}
            for board_id, cell, made in new
        ]
        for (score_id,), (board_id, cell, made) in zip(connection.execute(_ENTER, rows), new, strict=True):
            ranks.change(score_id, board_id, cell, made, {})
    ranks.write(connection)


def refresh_all(session: Session) -> None:
    """Makes all scores anew, in bulk: after a migration, or to mend them."""
    session.execute(delete(ScoreRank))
    session.execute(delete(Score))
    session.execute(delete(ScoreBoard))
    last = int(session.scalar(select(func.max(Score.id))) or 0)
    boards: dict[tuple[int, str, str], int] = {}
    batch: list[tuple[int, int, str, _Made]] = []
    for dataset, cell, found in _all_cells(session):
        for (scope, protocol), made in found.scores():
            key = (scope, dataset, protocol)
            if key not in boards:
                boards[key] = _board(session.connection(), *key)
            last += 1
            batch.append((last, boards[key], cell, made))
        if len(batch) >= _BATCH:
            _store(session, batch)
            batch = []
    if batch:
        _store(session, batch)
    if is_postgres(session):  # the ids were given here, not by the sequence
        table = Score.__tablename__
        session.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), :last)"), {"last": max(last, 1)})


def fill_missing(session: Session) -> None:
    """Makes the scores of a database that was filled before there were any."""
    if session.scalar(select(ScoreBoard.id).limit(1)) is None and session.scalar(select(Result.trial_id).limit(1)):
        refresh_all(session)


def _flat_fields(connection: Connection, scores: Iterable[_Made]) -> dict[int, FieldValues]:
    """Trial -> the fields of its cell that are not at their defaults, by path."""
    trials = list({made.trial_id for made in scores})
    query = _configs(postgres=connection.dialect.name == "postgresql")
    return {row[0]: told(row[1]) for row in connection.execute(query, {"trials": trials})}


def _by_board(results: Iterable[Counted]) -> dict[tuple[int, str], list[Counted]]:
    """(scope, protocol) -> the results that count there, oldest first."""
    found: dict[tuple[int, str], list[Counted]] = {}
    by_scope: dict[int, list[Counted]] = {}
    for counted in results:
        for scope in (EVERYONE, counted.project_id):
            if scope is not None:
                by_scope.setdefault(scope, []).append(counted)
    for scope, mine in by_scope.items():
        for counted in newest(mine):
            found.setdefault((scope, counted.protocol), []).append(counted)
    return found


def _all_cells(session: Session) -> Iterator[tuple[str, str, _Cell]]:
    query = _TRIALS.add_columns(Trial.dataset, Trial.cell).order_by(Trial.dataset, Trial.cell)
    rows = session.execute(query.execution_options(yield_per=2000))
    names = BaselineProtocols(session.connection(), enter=True)
    for (dataset, cell), mine in groupby(rows, key=lambda row: (row[-2], row[-1])):
        found = _Cell(names)
        for row in mine:
            found.add(row)
        yield dataset, cell, found


def _board(connection: Connection, scope: int, dataset: str, protocol: str) -> int:
    key = {"scope": scope, "dataset": dataset, "protocol": protocol}
    found = {f"{name}_name": value for name, value in key.items()}
    if (board_id := connection.scalar(_BOARD, found)) is None:
        connection.execute(_insert(connection)(ScoreBoard).values(**key).on_conflict_do_nothing())
        board_id = connection.execute(_BOARD, found).scalar_one()
    return board_id


class _RankedMean(TypedDict):
    """What ranks keep of a measure."""

    mean: float
    seeds: int
    std: float | None


class _NewRank(_RankedMean):
    """A row of `_PLACE`."""

    score_id: int
    metric: str
    board_id: int
    standing: int
    tie: int


class _GoneRank(TypedDict):
    """What `_UNPLACE` names."""

    of_score: int
    of_metric: str


class _Ranks:
    """What changes of the ordered index of means: only that is written."""

    def __init__(self) -> None:
        self._gone: list[_GoneRank] = []
        self._new: list[_NewRank] = []

    def change(
        self, score_id: int, board_id: int, cell: str, made: _Made, old: Measures, *, turned: bool = False
    ) -> None:
        """One score's means; `turned`: it became complete, or is so no more."""
        tie = tie_of(cell)
        self._gone += [{"of_score": score_id, "of_metric": name} for name in old if name not in made.measures]
        self._new += [
            {
                "score_id": score_id,
                "metric": name,
                "board_id": board_id,
                "standing": standing_of(Metric(name), complete=made.complete),
                "tie": tie,
                **_ranked(one),
            }
            for name, one in made.measures.items()
            if turned or name not in old or _ranked(old[name]) != _ranked(one)
        ]

    def write(self, connection: Connection) -> None:
        """Into the database."""
        if self._gone:
            connection.execute(_UNPLACE, self._gone)
        if self._new:
            insert_rows(connection, ScoreRank, self._new, replace=True)


def _ranked(one: Measure) -> _RankedMean:
    return {"mean": one.mean, "seeds": one.seeds, "std": one.std}


def _store(session: Session, scores: Sequence[tuple[int, int, str, _Made]]) -> None:
    flat = _flat_fields(session.connection(), [made for *_, made in scores])
    rows = [
        {"id": key, "board_id": board_id, "cell": cell, "fields": flat[made.trial_id], **made.columns()}
        for key, board_id, cell, made in scores
    ]
    session.execute(insert(Score), rows)
    ranks = _Ranks()
    for key, board_id, cell, made in scores:
        ranks.change(key, board_id, cell, made, {})
    ranks.write(session.connection())


def _insert(connection: Connection) -> Any:
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
