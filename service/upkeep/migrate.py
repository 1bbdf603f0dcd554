"""Brings a database to the newest schema, and tells whether it is there."""

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Column, Connection, inspect, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import migrations
from service.database import Result, tallies
from service.database.engine import Database
from service.database.outages import Backoff
from service.errors import UserError
from service.leaderboards import cell_scores, field_index
from service.upkeep.rows import without_limits
from ttsv.metrics.catalog import METRICS

_IN_EACH_OTHERS_WAY = {"40P01", "55P03"}
"""A deadlock, of which we were the victim, and a lock that was not had within its time."""
_MOST_ATTEMPTS = 10


def migrate(database: Database) -> None:
    """Runs every migration that is still missing; safe to call from several processes at once.

    Readers and writers may be at work: where a lock of theirs and one of ours wait for each other it tries again.
    """
    backoff = Backoff()
    while True:
        try:
            with changing_schema(database) as connection:
                bring_up(connection)
            break
        except OperationalError as error:
            state = getattr(error.orig, "sqlstate", None)
            if state not in _IN_EACH_OTHERS_WAY or backoff.failures >= _MOST_ATTEMPTS:
                raise
            time.sleep(backoff.failed())
    while database.write(field_index.fill):  # a little at a time: others are at work
        pass


@contextmanager
def changing_schema(database: Database) -> Iterator[Connection]:
    """One transaction in which tables may be made anew; it is taken back where rows are left that refer to nothing."""
    with database.writer.connect() as connection, _foreign_keys_off(connection), connection.begin():
        if connection.dialect.name == "postgresql":
            without_limits(connection)
            # One at a time; the second finds nothing left to do. (SQLite: BEGIN IMMEDIATE.)
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended('ttsv migrate', 0))"))
        yield connection
        if connection.dialect.name == "sqlite" and connection.execute(text("PRAGMA foreign_key_check")).first():
            raise RuntimeError("a migration left rows that refer to nothing; it was taken back")


def bring_up(connection: Connection) -> None:
    """Runs the missing migrations in the caller's transaction; counts and missing scores are made anew.

    Raises `UserError` for a database that newer code has migrated.
    """
    refuse_newer(MigrationContext.configure(connection).get_current_revision())
    tallies.uninstall(connection)
    command.upgrade(alembic_config(connection), "head")
    _add_metrics(connection, lacking_metrics(connection))
    tallies.install(connection)
    with Session(connection) as session:  # the transaction stays the connection's
        cell_scores.fill_missing(session)
        session.commit()


def make_schema(connection: Connection, revision: str, results: Collection[str]) -> None:
    """Makes the tables as a database at that revision has them, whose results have these columns.

    Raises `UserError` for a revision that this code does not know.
    """
    refuse_newer(revision)
    command.upgrade(alembic_config(connection), revision)
    _add_metrics(connection, [name for name in lacking_metrics(connection) if name in results])


def refuse_newer(revision: str | None) -> None:
    """Raises `UserError` for a revision that this code does not know."""
    if revision is not None and revision not in _revisions():
        raise UserError(f"the database is at revision {revision}, {_NEWER}: install that version first")


def refuse_absent(url: URL) -> None:
    """Raises `UserError` where SQLite has no such file: who only looks would make one in a mistyped folder."""
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
        raise UserError(
            f"there is no database {url.database}: let TTSV_DATA_DIR name another folder, "
            "or make one with `ttsv migrate`"
        )


def refuse_unmigrated(database: Database, *, newer: bool = True) -> None:
    """Raises `UserError` for a database that answers, and whose schema is not the one that this code needs.

    `newer`: also for one that newer code has migrated, in which workers of the version before go on.
    """
    try:
        fault = fault_of(database)
    except OperationalError:  # it is away: the API says so until it is back
        return
    if fault is not None and (newer or _NEWER not in fault):
        raise UserError(f"the database is not ready: {fault}")


_NEWER = "of a newer version than this code"


def fault_of(database: Database) -> str | None:
    """What `schema_fault` finds in a database.

    Raises `DBAPIError` for one that does not answer.
    """
    with database.engine.connect() as connection:
        return schema_fault(connection, MigrationContext.configure(connection).get_current_revision())


def schema_fault(connection: Connection, head: str | None) -> str | None:
    """What a database at that revision lacks that this code needs, and the command that mends it; None: nothing.

    Or that newer code has migrated it.
    """
    if head is not None and head not in _revisions():
        return f"at {head}, {_NEWER}: run `pip install --upgrade .`"
    if head != newest():
        return f"at {head}, this code needs {newest()}: run `ttsv migrate`"
    lacking = lacking_metrics(connection)
    return f"no column for {', '.join(lacking)}: run `ttsv migrate`" if lacking else None


def lacking_metrics(connection: Connection) -> list[str]:
    """The catalogue's metrics for which the results have no column yet."""
    inspector, table = inspect(connection), Result.__tablename__
    present = {column["name"] for column in inspector.get_columns(table)} if inspector.has_table(table) else set()
    return [name for name in METRICS if name not in present]


def _add_metrics(connection: Connection, names: Iterable[str]) -> None:
    """Metrics that are new in the catalogue become empty columns: they need no migration.

    Raises `ValueError` for one that every result has: what older results have must be said by a migration.
    """
    operations = Operations(MigrationContext.configure(connection))
    for name in names:
        column = Result.__table__.c[name]
        if not column.nullable:
            raise ValueError(f"older results have no {name}: its presence must be optional, or a migration add it")
        operations.add_column(Result.__tablename__, Column(name, column.type))


@contextmanager
def _foreign_keys_off(connection: Connection) -> Iterator[None]:
    """SQLite changes a table by copying and dropping it, which would delete by cascade what refers to its rows.

    The switch does nothing inside a transaction, hence out here.
    """
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    driver.execute("PRAGMA foreign_keys=OFF")
    try:
        yield
    finally:
        driver.execute("PRAGMA foreign_keys=ON")


@cache
def newest() -> str:
    """The revision this code needs."""
    head = ScriptDirectory.from_config(alembic_config(None)).get_current_head()
    assert head is not None, "the distribution contains its migrations"
    return head


@cache
def _revisions() -> frozenset[str]:
    """Every revision this code knows."""
    script = ScriptDirectory.from_config(alembic_config(None))
    return frozenset(one.revision for one in script.walk_revisions())


def alembic_config(connection: Connection | None) -> Config:
    """Alembic's configuration, working on an open connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    return config
