"""Engine and transactions on SQLite and PostgreSQL."""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from select import POLLIN, poll
from sqlite3 import SQLITE_BUSY, SQLITE_CORRUPT, SQLITE_FULL, SQLITE_NOTADB, SQLITE_READONLY
from types import ModuleType
from typing import Any, TypeVar

from pydantic_core import from_json, to_json  # several times as fast as the package json
from sqlalchemy import (
    ARRAY,
    JSON,
    URL,
    ColumnElement,
    CompoundSelect,
    Connection,
    CursorResult,
    Engine,
    Select,
    UpdateBase,
    any_,
    bindparam,
    create_engine,
    event,
    func,
    literal,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, OperationalError
from sqlalchemy.orm import InstrumentedAttribute, Session

from service.database import clock
from service.errors import UserError

_T = TypeVar("_T")

_PATIENCE = 30
"""Seconds that a connection to SQLite waits for others."""
PRAGMAS = ("foreign_keys=ON", "synchronous=FULL")
"""What each connection to SQLite is told: a commit that was heard of outlives a loss of power."""

# SQLite 3.7.0 to 3.51.2 can corrupt a WAL database that several connections checkpoint at once.
_FIRST_SOUND_WAL = (3, 51, 3)
_RETRIED_STATES = {"40001", "40P01"}  # serialization failure, deadlock
_DISK_FULL = "53100"
_READ_ONLY_TRANSACTION = "25006"
_WRITE_ATTEMPTS = 5
_CLOCK_SECONDS = 3600
"""After so long a connection to PostgreSQL is made anew, and its clock read again: no two clocks go alike."""
_IN_BINARY = "ttsv_binary"
"""An execution option of statements whose rows the driver is to receive in binary."""


def _newest_sqlite() -> ModuleType:
    """SQLite of today where there is a wheel of it, else the one of this Python."""
    try:
        return import_module("pysqlite3.dbapi2")
    except ImportError:
        return import_module("sqlite3")


sqlite_driver = _newest_sqlite()


def _to_text(value: Any) -> str:
    return to_json(value).decode()


_JSON: dict[str, Any] = {"json_serializer": _to_text, "json_deserializer": from_json}


class Database:
    """One database: `read` gives a session that writes nothing, `write` runs a function in one transaction.

    Raises `UserError` where the folder of an SQLite file can neither be made nor written.
    """

    def __init__(self, url: str | URL) -> None:
        parsed = make_url(url)
        self.engine = _sqlite(parsed) if parsed.get_backend_name() == "sqlite" else _postgres(parsed)
        self.writer = self.engine.execution_options(ttsv_writes=True)
        self._reader = self._onlooker = self.engine
        if self.engine.dialect.name == "postgresql":  # SQLite's readers see one moment anyhow
            self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            self._onlooker = self.engine.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session on one transaction that sees one moment; what is changed in it is never stored."""
        with Session(self._reader) as session:
            yield session
            if is_postgres(session) and session.in_transaction():
                # After a ROLLBACK psycopg forgets what it has prepared: all would be parsed and planned anew each time.
                session.connection().connection.commit()

    @contextmanager
    def look(self) -> Iterator[Session]:
        """A session that reads, of which each statement sees a moment of its own: one round trip, with no BEGIN."""
        with Session(self._onlooker) as session:
            yield session

    def write(self, work: Callable[[Session], _T]) -> _T:
        """Runs `work` in one transaction and commits; deadlocks and serialization failures are tried again."""
        for attempt in range(1, _WRITE_ATTEMPTS + 1):
            try:
                with Session(self.writer, expire_on_commit=False) as session, session.begin():
                    return work(session)
            except OperationalError as error:
                if is_read_only(error):
                    self.engine.dispose()  # a file that was opened so stays so, whatever is mended
                state = getattr(error.orig, "sqlstate", None)
                if state not in _RETRIED_STATES or attempt == _WRITE_ATTEMPTS:
                    raise
                time.sleep(random.uniform(0, 0.05 * 2**attempt))
        raise AssertionError("unreachable")

    def takes_writes(self) -> bool:
        """Whether changes can be stored: tries one of no row, and waits for nobody; who holds the lock can write."""
        with self.engine.connect() as connection:
            sqlite_alone = connection.dialect.name == "sqlite"
            if sqlite_alone:
                connection.exec_driver_sql("PRAGMA busy_timeout=0")
            try:
                connection.exec_driver_sql("UPDATE alembic_version SET version_num = '' WHERE 1 = 0")
            except DBAPIError as error:
                if is_read_only(error):
                    return False
                if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF != SQLITE_BUSY:
                    raise
            finally:
                if sqlite_alone:
                    connection.exec_driver_sql(f"PRAGMA busy_timeout={1000 * _PATIENCE}")
        return True

    def close(self) -> None:
        """Closes every connection."""
        self.engine.dispose()


def keeps_wal() -> bool:
    """Whether this process's SQLite is one that can be trusted with a write-ahead log."""
    return bool(sqlite_driver.sqlite_version_info >= _FIRST_SOUND_WAL)


def shown(url: URL) -> str:
    """A database as it may be shown: SQLite's by its file, PostgreSQL's by its URL without a password."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    plain = url.set(drivername=url.get_backend_name()).difference_update_query(["password", "sslpassword"])
    return plain.render_as_string(hide_password=True)


def is_postgres(session: Session) -> bool:
    """Whether the session's database is PostgreSQL."""
    return session.get_bind().dialect.name == "postgresql"


def among(
    session: Session, column: ColumnElement[_T] | InstrumentedAttribute[_T], values: Sequence[_T]
) -> ColumnElement[bool]:
    """That a column has one of many values.

    PostgreSQL takes them as one array: the statement is short and stays the same, so that it is prepared only once.
    """
    if is_postgres(session):
        return column == any_(literal(values, ARRAY(column.type)))
    return column.in_(values)


def is_among(
    column: ColumnElement[_T] | InstrumentedAttribute[_T], name: str, *, postgres: bool
) -> ColumnElement[bool]:
    """The same in a statement that is made once: the parameter of that name gives the values, as a list.

    SQLite, too, takes them as one: else text and parameters are made anew with each execution.
    """
    if postgres:
        return column == any_(bindparam(name, type_=ARRAY(column.type)))
    values = func.json_each(bindparam(name, type_=JSON)).table_valued("value", name=name)
    return column.in_(select(values.c.value))


def driver_rows(
    session: Session,
    query: Select[*tuple[Any, ...]] | CompoundSelect[*tuple[Any, ...]],
    values: Mapping[str, Any] | None = None,
) -> list[tuple[Any, ...]]:
    """A query's rows as the driver makes them: of tens of thousands in half the time, and without types of ours.

    PostgreSQL sends them in binary, so that neither side writes or reads a number's digits.
    """
    with session.connection().execute(query, values, execution_options={_IN_BINARY: True}) as result:
        assert isinstance(result, CursorResult), "of such a statement it always is"
        return list(result.cursor.fetchall())


def upsert(connected: Session | Connection) -> Any:
    """The database's own INSERT, which knows what to do with a row that exists."""
    dialect = (connected if isinstance(connected, Connection) else connected.get_bind()).dialect
    return postgresql.insert if dialect.name == "postgresql" else sqlite.insert


def is_full(error: Exception) -> bool:
    """Whether the database's disk is."""
    cause = getattr(error, "orig", None)
    return getattr(cause, "sqlite_errorcode", None) == SQLITE_FULL or getattr(cause, "sqlstate", None) == _DISK_FULL


def is_read_only(error: Exception) -> bool:
    """Whether SQLite may not write its file, or nothing beside it, or PostgreSQL takes no changes."""
    cause = getattr(error, "orig", None)
    read_only = getattr(cause, "sqlite_errorcode", 0) & 0xFF == SQLITE_READONLY
    return read_only or getattr(cause, "sqlstate", None) == _READ_ONLY_TRANSACTION


def is_damaged(error: Exception) -> bool:
    """Whether what SQLite finds in its file is no database, or no whole one."""
    return getattr(getattr(error, "orig", None), "sqlite_errorcode", 0) & 0xFF in (SQLITE_CORRUPT, SQLITE_NOTADB)


def said_by(error: Exception) -> str:
    """What the database itself says of an error, in a line."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def changed_rows(session: Session, change: UpdateBase, parameters: Mapping[str, object] | None = None) -> int:
    """Executes an UPDATE or DELETE; how many rows it met."""
    result = session.execute(change, parameters)
    assert isinstance(result, CursorResult), "of such a statement it always is"
    return result.rowcount


def _sqlite(url: URL) -> Engine:
    if url.database and url.database != ":memory:":
        _make_folder(Path(url.database))
    # Autocommit in the driver: transactions begin where we say. A deferred BEGIN that turns into a write fails at
    # once, whatever the timeout, when another connection wrote in between; writers therefore take the lock first.
    connect = {"isolation_level": None, "timeout": _PATIENCE}
    engine = create_engine(url, module=sqlite_driver, connect_args=connect, **_JSON)
    journal = "WAL" if keeps_wal() else "DELETE"

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        _patiently(partial(connection.execute, f"PRAGMA journal_mode={journal}"))
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        # SQLite's own knows the letters of ASCII alone; PostgreSQL's knows all.
        connection.create_function("lower", 1, _lower, deterministic=True)

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        if connection.get_execution_options().get("ttsv_writes"):
            _begin_writing(connection)
        else:
            connection.exec_driver_sql("BEGIN")

    if url.database and url.database != ":memory:":
        _hold_to(engine, Path(url.database))
    return engine


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _hold_to(engine: Engine, file: Path) -> None:
    """Lets an engine make its file once: where that is gone later, a volume say, an empty one must not take its place.

    Nor is a connection used that has another file open than the one that is there.
    """
    known = file.exists()

    @event.listens_for(engine, "do_connect")
    def _refuse_new_file(_dialect: Any, _record: Any, _args: Any, _options: Any) -> None:
        if known and not file.exists():
            raise sqlite_driver.OperationalError(f"unable to open database file: {file} is gone")

    @event.listens_for(engine, "connect")
    def _remember(_connection: Any, record: Any) -> None:
        nonlocal known
        record.info["file"] = _identity(file)
        known = known or record.info["file"] is not None

    @event.listens_for(engine, "checkout")
    def _refuse_other_file(_connection: Any, record: Any, _proxy: Any) -> None:
        if record.info["file"] not in (None, _identity(file)):  # none was made yet when it connected
            raise InvalidatePoolError("the file is another one, or gone")


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _begin_writing(connection: Connection) -> None:
    """Takes the lock of writers, as soon as it is free: SQLite itself would look ever more rarely, ten times a second.

    Of many writers the same one might then miss its turn for seconds.
    """
    driver, last = connection.connection.driver_connection, time.monotonic() + _PATIENCE
    assert driver is not None, "a connection that is in use is open"
    driver.execute("PRAGMA busy_timeout=0")
    try:
        while True:
            try:
                driver.execute("BEGIN IMMEDIATE")
            except sqlite_driver.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != SQLITE_BUSY or time.monotonic() > last:
                    connection.exec_driver_sql("BEGIN IMMEDIATE")  # which says so as others expect it
                    return
                time.sleep(random.uniform(0.001, 0.005))
            else:
                return
    finally:
        driver.execute(f"PRAGMA busy_timeout={1000 * _PATIENCE}")


def _make_folder(file: Path) -> None:
    """Makes a database's folder. Raises `UserError` where that cannot be, or where a new file cannot stand in it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() or os.access(file.parent, os.W_OK | os.X_OK):
            return
        reason: str | None = "it may not be written"
    except OSError as error:
        reason = error.strerror
    raise UserError(
        f"no database can be made in {file.parent} ({reason}): let TTSV_DATA_DIR, "
        "or TTSV_DATABASE_URL where it is set, name a folder that can be written"
    )


def _patiently(change: Callable[[], object]) -> None:
    """Changes a new file's journal, again while others do: SQLite refuses all but one at once, whatever the timeout."""
    last = time.monotonic() + _PATIENCE
    while True:
        try:
            change()
        except sqlite_driver.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > last:
                raise
            time.sleep(random.uniform(0.005, 0.05))
        else:
            return


def _postgres(url: URL) -> Engine:
    limits = "-c statement_timeout=30s -c lock_timeout=10s -c idle_in_transaction_session_timeout=60s"
    # A server whose machine is gone, or a broken line, says nothing: by itself TCP waits for it for up to two hours.
    alive = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
    connect = {"options": limits, "connect_timeout": 5, **alive}
    engine = create_engine(url, connect_args=connect, pool_recycle=_CLOCK_SECONDS, **_JSON)

    @event.listens_for(engine, "connect")
    def _follow_its_clock(connection: Any, _record: Any) -> None:
        before = clock.machine_now()
        (theirs,) = connection.execute("SELECT clock_timestamp()").fetchone()
        clock.follow(theirs, before, clock.machine_now())
        connection.commit()

    @event.listens_for(engine, "checkout")
    def _refuse_ended(connection: Any, _record: Any, _proxy: Any) -> None:
        # What is heard of an idle connection is its end: to look is a hundredth of a ping, which is a round trip.
        sockets = poll()
        if not connection.closed:
            sockets.register(connection.fileno(), POLLIN)
        if connection.closed or sockets.poll(0):
            raise InvalidatePoolError("the server ended this connection")

    @event.listens_for(engine, "before_cursor_execute")
    def _choose_format(_connection: Any, cursor: Any, _text: str, _values: Any, context: Any, _many: bool) -> None:
        if context is not None and context.execution_options.get(_IN_BINARY):
            cursor.format = 1  # psycopg.pq.Format.BINARY

    return engine
