"""Transactions: what Database promises on each backend."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session

from service.database import Experiment, Protocol, Trial, TrialState, Worker, engine
from service.database.engine import Database, sqlite_driver
from service.experiments import store
from service.queue import leases
from service.queue.trials import HeldExperiment
from tests.held import under, write
from tests.machinery import GENUINE_PRAGMAS, Claim, Submit, Table


@pytest.fixture
def sqlite_database(sqlite_url: str) -> Iterator[Database]:
    database = Database(sqlite_url)
    yield database
    database.close()


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[Database]:
    database = Database(postgres_url)
    yield database
    database.close()


def _path(url: str) -> str:
    return url.removeprefix("sqlite:///")


class TestSqlite:
    def test_a_writer_takes_the_lock_before_it_reads(self, sqlite_database: Database, sqlite_url: str) -> None:
        other = sqlite_driver.connect(_path(sqlite_url), timeout=0, isolation_level=None)

        def work(session: Session) -> None:
            session.scalar(text("SELECT 1"))  # begins the transaction
            with pytest.raises(sqlite_driver.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")

        sqlite_database.write(work)
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
        other.close()

    def test_a_writer_looks_for_the_lock_every_few_milliseconds(
        self, sqlite_database: Database, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SQLite's own waiting doubles its pauses: among many writers one would wait for seconds."""
        other = sqlite_driver.connect(_path(sqlite_url), timeout=0, isolation_level=None)
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 40:
                other.execute("ROLLBACK")

        monkeypatch.setattr("service.database.engine.time.sleep", pause)
        other.execute("BEGIN IMMEDIATE")
        timeout = sqlite_database.write(lambda session: session.scalar(text("PRAGMA busy_timeout")))
        assert (len(pauses), max(pauses) <= 0.005, timeout) == (40, True, 30_000)
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr("service.database.engine._PATIENCE", 0)
        with pytest.raises(OperationalError, match="locked"):
            sqlite_database.write(lambda session: session.scalar(text("SELECT 1")))
        other.close()

    def test_a_reader_leaves_the_lock(self, sqlite_database: Database, sqlite_url: str) -> None:
        other = sqlite_driver.connect(_path(sqlite_url), timeout=0, isolation_level=None)
        with sqlite_database.read() as session:
            store.get_experiments(session, [1])
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
        other.close()

    def test_the_pragmas(self, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "PRAGMAS", GENUINE_PRAGMAS)
        with closing(Database(sqlite_url)) as database, database.read() as session:
            found = {
                name: session.scalar(text(f"PRAGMA {name}"))
                for name in ("foreign_keys", "synchronous", "busy_timeout", "journal_mode")
            }
        wal = sqlite_driver.sqlite_version_info >= (3, 51, 3)
        assert found == {
            "foreign_keys": 1,
            "synchronous": 2,
            "busy_timeout": 30_000,
            "journal_mode": "wal" if wal else "delete",
        }

    def test_a_writer_waits_for_another(self, sqlite_url: str) -> None:
        first, second = Database(sqlite_url), Database(sqlite_url)
        inside = threading.Event()

        def slow(session: Session) -> None:
            leases.greet(session, "slow", 1, 0)
            inside.set()
            time.sleep(0.3)

        thread = threading.Thread(target=first.write, args=(slow,))
        thread.start()
        inside.wait()
        write(second, leases.greet, "quick", 1, 0)
        thread.join()
        first.close()
        second.close()

    def test_makes_the_folder_of_its_file(self, tmp_path: Path) -> None:
        database = Database(f"sqlite:///{tmp_path / 'a' / 'b' / 'ttsv.db'}")
        with database.read() as session:
            assert session.scalar(text("SELECT 1")) == 1
        database.close()
        assert (tmp_path / "a" / "b" / "ttsv.db").exists()


def test_a_server_whose_machine_is_gone_is_not_waited_for_by_the_hour() -> None:
    """A statement's own limit is the server's, which is not there any more to keep it."""
    database, asked = Database("postgresql+psycopg://nobody@127.0.0.1:1/none"), dict[str, Any]()
    event.listen(database.engine, "do_connect", lambda _dialect, _record, _args, options: asked.update(options))
    with pytest.raises(OperationalError), database.read() as session:
        session.scalar(text("SELECT 1"))
    idle, interval, count = (asked[f"keepalives_{name}"] for name in ("idle", "interval", "count"))
    assert idle + interval * count <= 30
    assert asked["tcp_user_timeout"] == 30_000
    database.close()


class TestPostgres:
    def test_the_limits(self, postgres_database: Database) -> None:
        with postgres_database.read() as session:
            found = {
                name: session.scalar(text(f"SHOW {name}"))
                for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
            }
        assert found == {
            "statement_timeout": "30s",
            "lock_timeout": "10s",
            "idle_in_transaction_session_timeout": "1min",
        }

    def test_what_a_reader_prepared_stays_so_and_what_it_changed_does_not(self, postgres_database: Database) -> None:
        """psycopg forgets after a ROLLBACK what it has prepared: no reader would ever see a plan a second time."""
        prepared = text("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%workers.name%'")
        for _ in range(8):
            with postgres_database.read() as session:
                assert session.scalars(select(Worker.name)).all() == []
        with postgres_database.read() as session:
            assert session.scalar(prepared) == 1
            session.add(Worker(name="unseen", cpus=1, gpus=0))
        with postgres_database.read() as session:
            assert session.scalars(select(Worker.name)).all() == []

    def test_a_deadlock_is_tried_again(self, postgres_database: Database) -> None:
        """Two workers enter the same two new protocols the other way round."""
        barrier = threading.Barrier(2)
        tries: list[str] = []

        def work(session: Session, order: str) -> None:
            tries.append(order)
            for name in order:
                session.add(Protocol(fingerprint=f"{order}{name}", record={}))
                session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ord(name)})
                session.flush()
                if name == order[0] and len(tries) <= 2:
                    barrier.wait()

        threads = [
            threading.Thread(target=postgres_database.write, args=(lambda session, order=order: work(session, order),))
            for order in ("ab", "ba")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(tries) == 3
        with postgres_database.read() as session:
            assert session.query(Protocol).count() == 4

    def test_a_connection_that_broke_is_replaced(self, postgres_database: Database) -> None:
        with postgres_database.read() as session:
            pid = session.scalar(text("SELECT pg_backend_pid()"))
        killer = Database(postgres_database.engine.url.render_as_string(hide_password=False))
        killer.write(lambda session: session.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid}))
        killer.close()
        with postgres_database.read() as session:
            assert session.scalar(text("SELECT pg_backend_pid()")) != pid

    def test_a_look_is_a_single_round_trip(self, postgres_database: Database) -> None:
        """Each statement sees a moment of its own, and no transaction is left open behind it."""
        with postgres_database.look() as session:
            before = session.scalar(text("SELECT pg_current_xact_id()"))
            assert session.scalar(text("SELECT pg_current_xact_id()")) != before
        with postgres_database.read() as session, postgres_database.look() as onlooker:
            pid = session.scalar(text("SELECT pg_backend_pid()"))
            state = text("SELECT state FROM pg_stat_activity WHERE pid = :pid")
            assert onlooker.scalar(state, {"pid": pid}) == "idle in transaction"


class TestBoth:
    def test_a_reader_sees_one_moment(
        self, submit: Submit, claim: Claim, database: Database, table: Table, database_url: str
    ) -> None:
        """What a page shows of an experiment and of its trials must fit together, whatever is written meanwhile."""
        experiment_id = submit(seeds=1)
        lease, trial_id = claim(), table(Trial)[0].id
        with database.read() as session:
            before = store.progress(session, [experiment_id])[experiment_id]

            def start() -> None:  # on SQLite the commit waits for the reader
                database.write(under(lease, HeldExperiment.start_trial, trial_id))

            thread = threading.Thread(target=start)
            thread.start()
            thread.join(0.3)
            after = store.progress(session, [experiment_id])[experiment_id]
        thread.join()
        assert before == after
        assert table(Trial)[0].state == TrialState.RUNNING

    def test_reading_stores_nothing(self, database: Database, table: Table) -> None:
        def write_while_reading() -> None:
            with database.read() as session:
                leases.greet(session, "someone", 1, 0)

        if database.engine.dialect.name == "postgresql":
            with pytest.raises(DBAPIError, match="read-only"):
                write_while_reading()
        else:
            write_while_reading()
        with database.read() as session:
            assert store.last_worker_sign(session) is None

    def test_a_failed_write_leaves_nothing(self, database: Database, table: Table, submit: Submit) -> None:
        submit(seeds=1)

        def work(session: Session) -> None:
            session.get_one(Experiment, 1).name = "changed"
            session.flush()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            database.write(work)
        assert table(Experiment)[0].name == "grid"

    def test_what_would_fail_again_is_not_tried_again(self, database: Database) -> None:
        tries = []

        def work(session: Session) -> None:
            tries.append(1)
            session.execute(insert(Protocol), [{"fingerprint": "a", "record": {}}] * 2)

        with pytest.raises(IntegrityError):
            database.write(work)
        assert len(tries) == 1

    def test_gives_up_after_some_tries(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        class DeadlockError(Exception):
            sqlstate = "40P01"

        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        tries = []

        def work(session: Session) -> None:
            tries.append(1)
            raise OperationalError("statement", {}, DeadlockError())

        with pytest.raises(OperationalError):
            database.write(work)
        assert len(tries) == 5
