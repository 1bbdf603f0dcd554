"""The counts that triggers keep are those of the trials, whatever is written and however."""

import math
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import op
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import String, delete, insert, text, update
from sqlalchemy.orm import Session

from service.database import OPEN_TRIALS, Experiment, Protocol, Result, Tally, Trial, TrialState, tallies
from service.database.engine import Database
from service.experiments import store
from service.experiments.store import Progress
from service.upkeep.migrate import migrate
from tests.machinery import Submit


def check(database: Database) -> None:
    """Compares with counting in Python."""
    with database.read() as session:
        expected: dict[tuple[int, TrialState], list[Trial]] = defaultdict(list)
        for trial in session.query(Trial):
            expected[trial.experiment_id, trial.state].append(trial)
        found = {(row.experiment_id, row.state): row for row in session.query(Tally)}
        for key, trials in expected.items():
            row = found.pop(key)
            assert row.trials == len(trials)
            assert (row.epoch, row.epochs) == (sum(t.epoch for t in trials), sum(t.epochs for t in trials))
            assert math.isclose(row.run_seconds, sum(t.run_seconds for t in trials), abs_tol=1e-9)
        for row in found.values():
            assert (row.trials, row.epoch, row.epochs) == (0, 0, 0)
        ids = [experiment.id for experiment in session.query(Experiment)]
        progress = store.progress(session, ids)
        for experiment_id in ids:
            mine = [trial for trial in session.query(Trial) if trial.experiment_id == experiment_id]
            best = max((t.best_val_accuracy for t in mine if t.best_val_accuracy is not None), default=None)
            results = [session.get(Result, trial.id) for trial in mine]
            assert progress[experiment_id] == Progress(
                {state: sum(t.state == state for t in mine) for state in TrialState},
                sum(t.epochs if t.state == TrialState.SUCCEEDED else t.epoch for t in mine),
                sum(t.epochs if t.state in (*OPEN_TRIALS, TrialState.SUCCEEDED) else t.epoch for t in mine),
                max((result.accuracy for result in results if result and result.valid), default=None),
                best,
                progress[experiment_id].validated_on,  # which no tally says
            )


def test_any_history(database: Database, submit: Submit, trial_result: Callable[..., dict[str, Any]]) -> None:
    rng = random.Random(0)
    database.write(lambda session: session.add(Protocol(fingerprint="p", record={})))
    for _ in range(3):
        submit(seeds=rng.choice([1, 5]))

    def step(session: Session) -> None:
        trials = session.query(Trial).all()
        some = rng.sample(trials, min(len(trials), rng.choice([1, 3])))
        match rng.choice(["change", "change", "fall", "bulk", "result", "delete", "delete experiment", "nothing"]):
            case "change":
                for trial in some:
                    trial.state = rng.choice(list(TrialState))
                    trial.epoch = rng.randrange(4)
                    trial.run_seconds += rng.random()
                    trial.best_val_accuracy = max(trial.best_val_accuracy or 0, rng.random())
            case "fall":
                fallen = [trial.best_val_accuracy for trial in some if trial.best_val_accuracy is not None]
                for trial in some:
                    trial.best_val_accuracy = rng.choice([None, rng.random()])
                session.flush()
                for experiment_id in {trial.experiment_id for trial in some}:
                    tallies.lower_bests(session, experiment_id, rng.choice([None, fallen]))
            case "bulk":
                values: Any = {"state": rng.choice(list(TrialState)), "epoch": Trial.epoch + 1}
                session.execute(update(Trial).where(Trial.seed == rng.randrange(5)).values(**values))
            case "result":
                for trial in some:
                    if session.get(Result, trial.id) is None:
                        values = trial_result(rng.random(), valid=rng.random() < 0.7)
                        session.add(Result(trial_id=trial.id, protocol="p", fence=1, **values))
            case "delete" if rng.random() < 0.3:
                # With a result or epochs the best of them stays told, so only trials without go.
                ids = [t.id for t in some if not session.get(Result, t.id) and t.best_val_accuracy is None]
                session.execute(delete(Trial).where(Trial.id.in_(ids)))
            case "delete experiment" if rng.random() < 0.2:
                session.execute(delete(Experiment).where(Experiment.id == rng.randrange(4)))

    for _ in range(60):
        database.write(step)
        check(database)


def test_a_change_that_is_taken_back_counts_nothing(database: Database, submit: Submit) -> None:
    submit(seeds=3)

    def work(session: Session) -> None:
        session.execute(update(Trial).values(state=TrialState.FAILED))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        database.write(work)
    check(database)


def test_migrating_again_counts_anew(database: Database, submit: Submit) -> None:
    submit(seeds=3)
    with database.writer.begin() as connection:
        tallies.uninstall(connection)
        connection.execute(text("UPDATE tallies SET trials = 99"))
        connection.execute(text("UPDATE trials SET epoch = 2"))
    migrate(database)
    check(database)
    database.write(lambda session: session.execute(update(Trial).values(epoch=3)))
    check(database)


def test_a_migration_that_copies_the_trials_keeps_the_counts(database: Database, submit: Submit) -> None:
    """As `migrate` does it: on SQLite the old table's triggers go with it."""
    submit(seeds=3)
    with database.writer.connect() as connection:
        if connection.dialect.name == "sqlite":
            driver: Any = connection.connection.driver_connection
            driver.execute("PRAGMA foreign_keys=OFF")
        with connection.begin():
            tallies.uninstall(connection)
            with (
                Operations.context(MigrationContext.configure(connection)),
                op.batch_alter_table("trials") as batch,
            ):
                batch.alter_column("failure", type_=String(40), existing_type=String(32), existing_nullable=True)
            tallies.install(connection)
        if connection.dialect.name == "sqlite":
            driver.execute("PRAGMA foreign_keys=ON")
    check(database)
    database.write(lambda session: session.execute(update(Trial).values(state=TrialState.RUNNING, epoch=1)))
    check(database)


def test_thousands_of_trials_are_counted_while_they_are_inserted(database: Database, submit: Submit) -> None:
    """A statement that counts row by row would take minutes on Postgres."""
    submit(seeds=1)

    def work(session: Session) -> None:
        columns = {c.key: getattr(session.query(Trial).one(), c.key) for c in Trial.__table__.columns if c.key != "id"}
        rows = [columns | {"number": number, "fingerprint": str(number)} for number in range(1, 4_000)]
        session.execute(insert(Trial), rows)

    database.write(work)
    with database.read() as session:
        assert store.progress(session, [1])[1].trials[TrialState.QUEUED] == 4_000


def test_the_triggers_are_there_after_every_way_up(empty_url: str, tmp_path: Path) -> None:
    database = Database(empty_url)
    migrate(database)
    names = (
        "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        if database.engine.dialect.name == "sqlite"
        else "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal"
    )
    with database.engine.connect() as connection:
        found = sorted(connection.scalars(text(names)))
    database.close()
    assert found == ["tally_delete", "tally_insert", "tally_result", "tally_update"]
