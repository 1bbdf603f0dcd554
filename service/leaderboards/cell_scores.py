"""Scores: every cell's mean and spread over its seeds, kept up to date so that leaderboards need not add anything up.

`counted_results` says which results count, and on which boards.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, bindparam, delete, func, insert, literal, select, text
from sqlalchemy.orm import Session

from service.database import Experiment, Result, Score, ScoreBoard, ScoreRank, Trial
from service.database.engine import is_among, is_postgres, upsert
from service.database.rows import Rows, Way, write_rows
from service.leaderboards.corruption_baselines import BaselineProtocols
from service.leaderboards.counted_results import CELL_TRIALS, EVERYONE, CellResults, MadeScore
from service.leaderboards.metrics import from_stored
from service.leaderboards.score_ranks import RankChanges, Recounted, turn_standing
from service.specs.columns import told
from ttsv.config.fields import FieldValues

_BATCH = 500
"""Cells written at a time by `refresh_all`."""

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


@cache
def _of_cells(*, postgres: bool) -> tuple[Select[*tuple[Any, ...]], Select[*tuple[Any, ...]]]:
    """The results of cells of one data set, and the scores that they have."""
    results = CELL_TRIALS.add_columns(Trial.cell).where(*_in_cells(postgres=postgres), Result.trial_id.is_not(None))
    scores = (
        select(Score.id, Score.board_id, Score.cell, Score.trial_id, Score.seeds, Score.trials, Score.metrics)
        .add_columns(ScoreBoard.scope, ScoreBoard.protocol)
        .join(ScoreBoard, ScoreBoard.id == Score.board_id)
        .where(is_among(Score.cell, "cell_names", postgres=postgres), ScoreBoard.dataset == bindparam("dataset_name"))
    )
    return results, scores


@cache
def _counts(*, postgres: bool) -> tuple[Select[*tuple[Any, ...]], ...]:
    """How many different trials cells of one data set have, those without a result too: in all, and of each project."""
    everyone = (
        select(Trial.cell, func.count(Trial.fingerprint.distinct()))
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .where(*_in_cells(postgres=postgres), Experiment.archived_at.is_(None))
        .group_by(Trial.cell)
    )
    of_projects = everyone.where(Experiment.project_id.is_not(None)).group_by(Experiment.project_id)
    return everyone.add_columns(literal(EVERYONE)), of_projects.add_columns(Experiment.project_id)


def _in_cells(*, postgres: bool) -> tuple[ColumnElement[bool], ...]:
    return Trial.dataset == bindparam("dataset_name"), is_among(Trial.cell, "cell_names", postgres=postgres)


@cache
def _configs(*, postgres: bool) -> Select[*tuple[Any, ...]]:
    return select(Trial.id, Trial.config).where(is_among(Trial.id, "trials", postgres=postgres))


def refresh_experiment(session: Session, experiment_id: int) -> None:
    """Makes the scores of all cells of an experiment anew: for archiving it and bringing it back."""
    cells = select(Trial.dataset, Trial.cell).where(Trial.experiment_id == experiment_id).distinct()
    refresh_cells(session, [(row[0], row[1]) for row in session.execute(cells)])


def refresh_cells(session: Session, cells: Iterable[tuple[str, str]], *, counted: bool = False) -> None:
    """Makes the scores of cells (data set, cell) anew from their results, in the caller's transaction.

    `counted`: their trials are the same ones as before, of which a cell may have thousands.
    """
    session.flush()
    cells = sorted(set(cells))
    _lock(session, cells)
    for dataset, group in groupby(cells, key=lambda pair: pair[0]):
        names = [cell for _, cell in group]
        for first in range(0, len(names), _BATCH):
            _refresh(session.connection(), dataset, names[first : first + _BATCH], counted=counted)


def recount(session: Session, experiment: Experiment, cells: Iterable[tuple[str, str]]) -> None:
    """Counts the trials of those cells (data set, cell) anew that have scores, after an experiment was given trials.

    A cell that was complete by a metric may lack seeds of it then, and stands behind those that are.
    """
    session.flush()
    given = sorted(set(cells))
    _lock(session, given)  # before the look: whoever stores the first result of one may not see our trials
    scopes = [EVERYONE, *([experiment.project_id] if experiment.project_id is not None else [])]
    query = (
        select(Score.id, Trial.dataset, Score.cell, ScoreBoard.scope, Score.trials)
        .join(ScoreBoard, ScoreBoard.id == Score.board_id)
        .join(Trial, (Trial.cell == Score.cell) & (Trial.dataset == ScoreBoard.dataset))
        .where(Trial.experiment_id == experiment.id, ScoreBoard.scope.in_(scopes))
        .distinct()
    )
    scores = session.execute(query).all()
    scored = sorted({(row.dataset, row.cell) for row in scores}.intersection(given))
    counts: dict[tuple[int, str, str], int] = {}
    for scope in scopes:
        trials = (
            select(Trial.dataset, Trial.cell, func.count(Trial.fingerprint.distinct()))
            .join(Experiment, Experiment.id == Trial.experiment_id)
            .where(Experiment.archived_at.is_(None))
            .group_by(Trial.dataset, Trial.cell)
        )
        trials = trials if scope == EVERYONE else trials.where(Experiment.project_id == scope)
        for dataset, group in groupby(scored, key=lambda pair: pair[0]):
            names = [cell for _, cell in group]
            for first in range(0, len(names), _BATCH):
                some = trials.where(Trial.dataset == dataset, Trial.cell.in_(names[first : first + _BATCH]))
                counts |= {(scope, row[0], row[1]): row[2] for row in session.execute(some)}
    changed: list[Recounted] = [
        {"of_score": score_id, "before": before, "now": now}
        for score_id, dataset, cell, scope, before in scores
        if (now := counts.get((scope, dataset, cell), before)) != before
    ]
    if changed:
        connection = session.connection()
        write_rows(
            connection, Rows(Score, [{"id": one["of_score"], "trials": one["now"]} for one in changed], Way.CHANGE)
        )
        turn_standing(connection, changed)


def _lock(session: Session, cells: Sequence[tuple[str, str]]) -> None:
    """Two trials of one cell that end at once: the second must see the first one's result. (SQLite has one writer.)"""
    if is_postgres(session):
        slots = sorted({zlib.crc32(f"{dataset} {cell}".encode()) % _SLOTS for dataset, cell in cells})
        session.execute(_LOCK, {"of_scores": _OF_SCORES, "slots": slots})  # in one order: no deadlocks


def _refresh(connection: Connection, dataset: str, cells: Sequence[str], *, counted: bool) -> None:
    # Statements made once, and no objects: this runs whenever a trial finishes.
    asked = {"dataset_name": dataset, "cell_names": cells}
    found: dict[str, CellResults] = {}
    names = BaselineProtocols(connection, enter=True)
    results, scores = _of_cells(postgres=connection.dialect.name == "postgresql")
    for row in connection.execute(results, asked):
        found.setdefault(row[-1], CellResults(names)).add(row)
    known = {(row.cell, row.scope, row.protocol): row for row in connection.execute(scores, asked)}
    trials: dict[str, dict[int, int]] = defaultdict(dict)
    for score in known.values() if counted else ():
        trials[score.cell][score.scope] = score.trials
    if uncounted := [cell for cell, mine in found.items() if not mine.scopes <= trials[cell].keys()]:
        for query in _counts(postgres=connection.dialect.name == "postgresql"):
            for cell, count, scope in connection.execute(query, asked | {"cell_names": uncounted}):
                trials[cell][scope] = count
    for cell, mine in found.items():
        mine.count(trials[cell])
    wanted = {(cell, *board): made for cell, mine in found.items() for board, made in mine.scores()}
    if gone := [known[key].id for key in known.keys() - wanted.keys()]:
        connection.execute(delete(Score).where(Score.id.in_(gone)))
    ranks = RankChanges()
    changed: list[dict[str, object]] = []
    new: list[tuple[int, str, MadeScore]] = []
    boards: dict[tuple[int, str], int] = {}
    for (cell, scope, protocol), made in wanted.items():
        if old := known.get((cell, scope, protocol)):
            measured = from_stored(old.metrics)
            if (old.trial_id, old.trials, measured) != (made.trial_id, made.trials, made.measures):
                changed.append({"id": old.id, **made.columns()})
                ranks.change(old.id, old.board_id, cell, made, measured, trials=old.trials)
        else:
            if (scope, protocol) not in boards:
                boards[scope, protocol] = _board(connection, scope, dataset, protocol)
            new.append((boards[scope, protocol], cell, made))
    if new:
        flat = _flat_fields(connection, [made for *_, made in new])
        rows = [
            {"board_id": board_id, "cell": cell, "fields": flat[made.trial_id], **made.columns()}
            for board_id, cell, made in new
        ]
        for (score_id,), (board_id, cell, made) in zip(connection.execute(_ENTER, rows), new, strict=True):
            ranks.change(score_id, board_id, cell, made, {})
    ranks.write(connection, Rows(Score, changed, Way.CHANGE))


def refresh_all(session: Session) -> None:
    """Makes all scores anew, in bulk: after a migration, or to mend them."""
    session.execute(delete(ScoreRank))
    session.execute(delete(Score))
    session.execute(delete(ScoreBoard))
    last = int(session.scalar(select(func.max(Score.id))) or 0)
    boards: dict[tuple[int, str, str], int] = {}
    batch: list[tuple[int, int, str, MadeScore]] = []
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


def _flat_fields(connection: Connection, scores: Iterable[MadeScore]) -> dict[int, FieldValues]:
    """Trial -> the fields of its cell that are not at their defaults, by path."""
    trials = list({made.trial_id for made in scores})
    query = _configs(postgres=connection.dialect.name == "postgresql")
    return {row[0]: told(row[1]) for row in connection.execute(query, {"trials": trials})}


def _all_cells(session: Session) -> Iterator[tuple[str, str, CellResults]]:
    query = CELL_TRIALS.add_columns(Trial.dataset, Trial.cell).order_by(Trial.dataset, Trial.cell)
    rows = session.execute(query.execution_options(yield_per=2000))
    names = BaselineProtocols(session.connection(), enter=True)
    for (dataset, cell), mine in groupby(rows, key=lambda row: (row[-2], row[-1])):
        found = CellResults(names)
        for row in mine:
            found.add(row)
        yield dataset, cell, found


def _board(connection: Connection, scope: int, dataset: str, protocol: str) -> int:
    key = {"scope": scope, "dataset": dataset, "protocol": protocol}
    found = {f"{name}_name": value for name, value in key.items()}
    if (board_id := connection.scalar(_BOARD, found)) is None:
        connection.execute(upsert(connection)(ScoreBoard).values(**key).on_conflict_do_nothing())
        board_id = connection.execute(_BOARD, found).scalar_one()
    return board_id


def _store(session: Session, scores: Sequence[tuple[int, int, str, MadeScore]]) -> None:
    flat = _flat_fields(session.connection(), [made for *_, made in scores])
    rows = [
        {"id": key, "board_id": board_id, "cell": cell, "fields": flat[made.trial_id], **made.columns()}
        for key, board_id, cell, made in scores
    ]
    session.execute(insert(Score), rows)
    ranks = RankChanges()
    for key, board_id, cell, made in scores:
        ranks.change(key, board_id, cell, made, {})
    ranks.write(session.connection())
