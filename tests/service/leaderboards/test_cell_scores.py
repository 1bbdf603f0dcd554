"""Stored scores are what plain Python makes of all results, whatever happened before."""

import statistics
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from sqlalchemy import delete, event, func, select, text
from sqlalchemy.orm import Session

from service.database import (
    Experiment,
    ExperimentState,
    Project,
    Protocol,
    Result,
    Score,
    ScoreBoard,
    ScoreRank,
    Trial,
    TrialState,
    now,
)
from service.database.engine import Database
from service.leaderboards import cell_scores
from service.leaderboards.counted_results import CellResults
from service.leaderboards.metrics import Metric
from service.leaderboards.score_ranks import tie_of
from service.queue import leases
from service.queue.leases import Lease
from service.upkeep.migrate import migrate
from tests.examples import examples
from tests.held import unfinished_trials
from tests.machinery import Make

OPTIONAL = "robust_accuracy"
values = st.floats(-1e6, 1e6).map(lambda x: x or 0.0)

# What can happen: a result (cell, seed, protocol, value, optional value, validity), or archiving and bringing back.
finishes = st.tuples(
    st.just("finish"),
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 2),
    st.sampled_from("ab"),
    values,
    st.none() | values,
    st.sampled_from([True, True, False]),
)
# Or a trial is only queued: (experiment, cell, seed).
queued = st.tuples(st.just("queue"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3))
archivings = st.tuples(st.sampled_from(["archive", "unarchive"]), st.integers(0, 2))
histories = st.lists(finishes | finishes | queued | archivings, min_size=1, max_size=12)

PROJECTS = [None, 1, 2]  # of the three experiments


def play(session: Session, history: list[tuple[Any, ...]], trial_result: Make) -> None:
    """Enters a history, refreshing scores as the service does."""
    session.add_all(Project(id=number, name=f"p{number}") for number in (1, 2))
    session.add_all(Protocol(fingerprint=name, record={}) for name in "ab")
    session.flush()
    for index, project in enumerate(PROJECTS):
        counts = {"grid_points": 9, "trial_count": 9, "state": ExperimentState.SUCCEEDED}
        session.add(Experiment(id=index + 1, name="drawn", spec={}, project_id=project, **counts))
    session.flush()
    seen: set[tuple[int, str]] = set()
    for number, (kind, *what) in enumerate(history):
        if kind not in ("finish", "queue"):
            session.get_one(Experiment, what[0] + 1).archived_at = now() if kind == "archive" else None
            cell_scores.refresh_experiment(session, what[0] + 1)
            continue
        experiment, cell, seed, *result = what
        fingerprint = f"{cell}-{seed}"
        if (experiment, fingerprint) in seen:  # an experiment has each trial once
            continue
        seen.add((experiment, fingerprint))
        trial = Trial(
            experiment_id=experiment + 1,
            number=number,
            fingerprint=fingerprint,
            cell=str(cell),
            config={"seed": seed, "layer": "dense", "training": {"lr": 0.5, "epochs": 20}},
            dataset="digits",
            model="small-cnn",
            layer="dense",
            lambda_ort=0.0,
            constraint="none",
            seed=seed,
            epochs=1,
            state=TrialState.SUCCEEDED if result else TrialState.QUEUED,
        )
        session.add(trial)
        session.flush()
        cell_scores.recount(session, session.get_one(Experiment, experiment + 1), [("digits", str(cell))])
        if not result:
            continue
        protocol, value, optional, valid = result
        row = trial_result(0.5) | {"loss": value, OPTIONAL: optional, "valid": valid}
        session.add(Result(trial_id=trial.id, protocol=protocol, fence=1, **row))
        cell_scores.refresh_cells(session, [("digits", str(cell))], counted=True)


def expected(session: Session) -> dict[tuple[int, str, str], dict[str, tuple[Any, ...]]]:
    """(scope, protocol, cell) -> metric -> (count, mean, deviation, least, largest), from the tables alone."""
    results = {result.trial_id: result for result in session.scalars(select(Result))}
    experiments = {experiment.id: experiment for experiment in session.scalars(select(Experiment))}
    newest: dict[tuple[int, str, str, str], Result] = {}
    for trial in session.scalars(select(Trial).order_by(Trial.id)):
        result, experiment = results.get(trial.id), experiments[trial.experiment_id]
        if result is not None and result.valid and experiment.archived_at is None:
            for scope in {0, experiment.project_id or 0}:
                newest[scope, result.protocol, trial.cell, trial.fingerprint] = result
    found: dict[tuple[int, str, str], dict[str, tuple[Any, ...]]] = {}
    for key in {(scope, protocol, cell) for scope, protocol, cell, _ in newest}:
        mine = [result for (*where, _), result in newest.items() if tuple(where) == key]
        for name in Metric:
            known = [float(v) for result in mine if (v := getattr(result, name)) is not None]
            if known:
                std = statistics.stdev(known) if len(known) > 1 else None
                spread = (len(known), statistics.fmean(known), std, min(known), max(known))
                found.setdefault(key, {})[name.value] = spread
    return found


def stored(session: Session) -> dict[tuple[int, str, str], dict[str, list[Any]]]:
    """The same from the scores; their ranks must say the same."""
    boards = {board.id: board for board in session.scalars(select(ScoreBoard))}
    rows = session.scalars(select(Score)).all()
    ranks = {
        (r.score_id, r.metric): (r.board_id, r.standing, r.mean, r.tie, r.seeds, r.std)
        for r in session.scalars(select(ScoreRank))
    }
    assert ranks == {
        (row.id, name): (
            row.board_id,
            int((row.seeds == row.trials) == Metric(name).more_is_better),
            one[1],
            tie_of(row.cell),
            one[0],
            one[2],
        )
        for row in rows
        for name, one in row.metrics.items()
    }
    trials = [(t.cell, t.fingerprint, t.experiment_id) for t in session.scalars(select(Trial))]
    counted = {e.id: e.project_id or 0 for e in session.scalars(select(Experiment)) if e.archived_at is None}
    for row in rows:
        scope = boards[row.board_id].scope
        mine = {f for cell, f, e in trials if cell == row.cell and e in counted and scope in (0, counted[e])}
        assert row.trials == len(mine)
        assert row.fields == {"layer": "dense", "training.lr": 0.5}
    return {(boards[row.board_id].scope, boards[row.board_id].protocol, row.cell): row.metrics for row in rows}


def same(session: Session) -> None:
    session.expire_all()
    ours, theirs = stored(session), expected(session)
    assert ours.keys() == theirs.keys()
    for key, metrics in theirs.items():
        assert ours[key].keys() == metrics.keys()
        for name, (count, mean, std, low, high) in metrics.items():
            got = ours[key][name]
            assert (got[0], got[3], got[4]) == (count, low, high)
            assert got[1] == pytest.approx(mean, rel=1e-12, abs=1e-12)
            assert (got[2] is None) == (std is None)
            if std is not None:
                assert got[2] == pytest.approx(std, rel=1e-9, abs=1e-9)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories)
def test_any_history(database: Database, trial_result: Make, history: list[tuple[Any, ...]]) -> None:
    with Session(database.writer) as session:
        play(session, history, trial_result)
        session.flush()
        same(session)
        cell_scores.refresh_all(session)
        same(session)
        # And on from there: bulk-made scores can be changed like others.
        cell_scores.refresh_experiment(session, 1)
        same(session)
        session.rollback()


def test_trials_of_archived_experiments_are_not_counted_anew(database: Database, trial_result: Make) -> None:
    """Of a cell with a result of one seed: another seed was archived, a third one is posted."""
    history = [
        ("finish", 0, 0, 0, "a", 0.5, None, True),
        ("queue", 1, 0, 1),
        ("archive", 1),
        ("queue", 2, 0, 2),
    ]
    with Session(database.writer) as session:
        play(session, history, trial_result)
        same(session)
        assert [(score.seeds, score.trials) for score in session.scalars(select(Score))] == [(1, 2)]
        session.rollback()


def test_a_score_names_its_newest_trial(database: Database, trial_result: Make) -> None:
    """Be it one that ran before, while another seed came between."""
    history = [("finish", *where, "a", 0.5, None, True) for where in ((0, 0, 0), (0, 0, 1), (1, 0, 0))]
    with Session(database.writer) as session:
        play(session, history, trial_result)
        named = {session.get_one(ScoreBoard, score.board_id).scope: score for score in session.scalars(select(Score))}
        newest_trial = session.scalars(select(func.max(Trial.id))).one()
        assert {scope: (score.seeds, score.trial_id) for scope, score in named.items()} == {
            0: (2, newest_trial),
            1: (1, newest_trial),
        }
        session.rollback()


def test_a_finished_trial_has_its_score_at_once(
    database: Database, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    submit(seeds=2)
    lease = claim()
    with database.read() as session:
        trials = [trial.id for trial in unfinished_trials(session, lease)]
    finish(lease, trials[0], 0.5)
    finish(lease, trials[1], 0.75)
    with database.read() as session:
        (score,) = session.scalars(select(Score)).all()
        assert (score.seeds, score.trial_id, score.metrics["accuracy"][1]) == (2, trials[1], 0.625)


def test_of_a_cell_of_many_trials_those_without_a_result_are_not_read(
    database: Database,
    submit: Callable[..., int],
    claim: Callable[..., Lease],
    finish: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each result of a grid of ten thousand seeds read all of them, and its driver kept room for that."""
    submit(seeds=50)
    lease, add, rows, asked = claim(), CellResults.add, list[Any](), list[str]()

    def added(cell: CellResults, row: Any) -> None:
        rows.append(row)
        add(cell, row)

    monkeypatch.setattr(CellResults, "add", added)
    event.listen(database.writer, "before_cursor_execute", lambda _, __, text, *___: asked.append(text))
    with database.read() as session:
        trials = [trial.id for trial in unfinished_trials(session, lease)]
    for trial_id in trials[:3]:
        asked.clear()
        finish(lease, trial_id, 0.5)
    assert len(rows) == 1 + 2 + 3
    assert not any("count(distinct" in text.lower() for text in asked)
    with database.read() as session:
        (score,) = session.scalars(select(Score)).all()
        assert (score.seeds, score.trials) == (3, 50)


def test_a_rerun_with_the_same_values_is_the_cells_newest_trial(
    database: Database, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    for _ in range(2):
        submit(seeds=1)
        lease = claim()
        with database.read() as session:
            (trial,) = unfinished_trials(session, lease)
        finish(lease, trial.id, 0.5)
        database.write(lambda session, lease=lease: leases.complete(session, lease))  # type: ignore[misc]
    with database.read() as session:
        (score,) = session.scalars(select(Score)).all()
        assert (score.seeds, score.trial_id) == (1, trial.id)


def test_thousands_of_cells_take_few_locks(postgres_url: str) -> None:
    """A server with its defaults has room for 6,400 locks of all transactions together."""
    database = Database(postgres_url)
    cells = [("digits", f"{number:064x}") for number in range(20_000)]
    with database.engine.begin() as connection, Session(connection) as session:
        cell_scores.refresh_cells(session, cells)
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert session.scalar(text(held)) == 256
    database.close()


def test_two_trials_of_a_cell_that_end_at_once_both_count(
    database: Database, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    """Of two experiments: the row that a worker locks is not the same."""
    for first in (0, 4):
        submit(seeds=4, name=str(first), **{"training.lr": [0.1 + first]})
    leases = [claim("a"), claim("b")]
    with database.read() as session:
        trials = [[t.id for t in unfinished_trials(session, lease)] for lease in leases]
    with database.writer.begin() as connection:  # of one cell, but different seeds
        connection.execute(text("UPDATE trials SET cell = 'c'"))
    barrier = threading.Barrier(2)

    def run(lease: Lease, mine: list[int]) -> None:
        barrier.wait()
        for trial_id in mine:
            finish(lease, trial_id, 0.5)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(leases, trials, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as session:
        (score,) = session.scalars(select(Score)).all()
        assert score.seeds == 8


def test_results_from_before_get_their_scores_with_the_migration(
    database: Database, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    submit(seeds=1)
    lease = claim()
    with database.read() as session:
        (trial,) = unfinished_trials(session, lease)
    finish(lease, trial.id, 0.5)
    database.write(lambda session: session.execute(delete(ScoreBoard)))
    migrate(database)
    with database.read() as session:
        (score,) = session.scalars(select(Score)).all()
        assert score.metrics["accuracy"] == [1, 0.5, None, 0.5, 0.5]
