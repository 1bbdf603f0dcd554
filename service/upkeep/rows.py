"""The rows of a database, out of one moment of it and into another one, whichever of the two kinds either is.

A row is a JSON array on a line. Tables are taken as the database itself describes them, so that one of an older
version is copied as it is. JSON columns are copied as their text, moments in UTC with their zone.
"""

import errno
import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    URL,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    MetaData,
    Table,
    Text,
    bindparam,
    cast,
    column,
    insert,
    inspect,
    select,
    table,
    text,
)

from service.database.base import Base, Timestamp
from service.database.engine import Database, sqlite_driver

DERIVED = frozenset({"alembic_version", "tallies", "score_boards", "scores", "score_ranks", "field_index"})
"""Tables that follow from the others: `service.upkeep.migrate` makes them anew."""
PRESENT = frozenset({"workers", "nodes", "homes"})
"""Tables of what is there now: nothing of it is there in a database that is restored."""
_BATCH = 1000
_PAGES = 4096
_FULL = "database or disk is full"
"""SQLite's words, without a code where they come from a backup."""
LONGEST_ROW = 64 * 2**20
BESIDE = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside its file: with another file it would be that one's ruin."""


@dataclass(frozen=True)
class CopiedTable:
    """A table as it is copied: its name, the names of its columns, and what the database says of these and the key."""

    name: str
    columns: tuple[str, ...]
    described: Table


@contextmanager
def snapshot(database: Database, scratch: Path) -> Iterator[Connection]:
    """A connection that sees one moment of the database for as long as it is wanted, and keeps nobody waiting.

    PostgreSQL: one REPEATABLE READ transaction. SQLite: its online backup into the file `scratch`; while that is made
    writers wait only where the database keeps a rollback journal.
    """
    if database.engine.dialect.name == "postgresql":
        one_moment = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with database.engine.connect().execution_options(**one_moment) as connection:
            without_limits(connection)
            yield connection
        return
    _copy_sqlite(database, scratch)
    copy = Database(URL.create("sqlite", database=str(scratch)))
    try:
        with copy.engine.connect() as connection:
            yield connection
    finally:
        copy.close()


def _copy_sqlite(database: Database, target: Path) -> None:
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # SQLite would let everybody read it
    into = sqlite_driver.connect(target)
    try:
        with database.engine.connect() as connection:
            source: Any = connection.connection.driver_connection
            # Where a read transaction is open nobody's write makes the backup begin anew.
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            try:
                source.backup(into, pages=_PAGES, progress=lambda *_: None)  # so that Ctrl-C is heard between pages
            finally:
                source.execute("ROLLBACK")
    except sqlite_driver.OperationalError as error:
        if str(error) != _FULL:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from error
    finally:
        into.close()


def remove_sqlite(path: Path) -> None:
    """Removes an SQLite file and what lies beside it."""
    for suffix in ("", *BESIDE):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def without_limits(connection: Connection) -> None:
    """Lets a transaction of PostgreSQL take as long as a table needs, which may be longer than a request."""
    for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
        connection.execute(text(f"SET LOCAL {limit} = 0"))


def tables_of(connection: Connection) -> list[CopiedTable]:
    """The tables that are copied, each after those that its rows refer to; not what others keep beside ours."""
    inspector = inspect(connection)
    order = [name for name, _ in inspector.get_sorted_table_and_fkc_names() if name is not None]
    kept = [name for name in order if name in Base.metadata.tables.keys() - DERIVED - PRESENT]
    # Of all at once: to ask for one takes a server as long.
    found = inspector.get_multi_columns(filter_names=kept)
    keys = inspector.get_multi_pk_constraint(filter_names=kept)

    def described(name: str) -> Table:
        key = keys[None, name]["constrained_columns"]
        columns = [Column(one["name"], one["type"], primary_key=one["name"] in key) for one in found[None, name]]
        return Table(name, MetaData(), *columns)

    return [CopiedTable(name, tuple(one["name"] for one in found[None, name]), described(name)) for name in kept]


def read_rows(connection: Connection, copied: CopiedTable) -> Iterator[bytes]:
    """Every row as a line with its end, in the order of the primary key."""
    described = copied.described
    shown: list[Any] = []
    moments = set()
    for position, name in enumerate(copied.columns):
        found = described.c[name]
        if isinstance(found.type, DateTime):
            moments.add(position)
        shown.append(cast(found, Text) if isinstance(found.type, JSON) else found)
    query = select(*shown).order_by(*described.primary_key.columns)
    streamed = connection.execution_options(yield_per=_BATCH).execute(query)
    for row in streamed:
        values = [_as_text(value) if index in moments else value for index, value in enumerate(row)]
        yield json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _as_text(moment: datetime | None) -> str | None:
    """SQLite's moments have no zone, and are UTC."""
    if moment is None:
        return None
    return (moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)).isoformat()


def write_rows(connection: Connection, copied: CopiedTable, lines: Iterable[bytes]) -> int:
    """Inserts the rows of lines, and says how many there were. Raises `ValueError` for a line that is no such row."""
    described = copied.described
    if unknown := set(copied.columns) - set(described.c.keys()):
        raise ValueError(f"table {copied.name} has no column {', '.join(sorted(unknown))} here")
    kinds = {name: described.c[name].type for name in copied.columns}
    moments = [index for index, name in enumerate(copied.columns) if isinstance(kinds[name], DateTime)]
    values: dict[str, ColumnElement[Any]] = {}
    for index, name in enumerate(copied.columns):
        # Parameters have names of their own: a column's may be a word of SQL.
        given = bindparam(f"p{index}", type_=_type_of(kinds[name]))
        values[name] = cast(given, JSON) if _is_postgres_json(connection, kinds[name]) else given
    plain = table(copied.name, *(column(name) for name in copied.columns))
    statement = insert(plain).values(values)
    count = 0
    for batch in _batches(lines):
        parameters: list[dict[str, object]] = []
        for line in batch:
            row = json.loads(line)
            if not isinstance(row, list) or len(row) != len(copied.columns):
                raise ValueError(f"table {copied.name}: row {count + len(parameters) + 1} has not one value per column")
            for index in moments:
                row[index] = None if row[index] is None else datetime.fromisoformat(row[index])
            parameters.append({f"p{index}": value for index, value in enumerate(row)})
        connection.execute(statement, parameters)
        count += len(parameters)
    return count


def _type_of(kind: Any) -> Any:
    if isinstance(kind, JSON):
        return Text()
    return Timestamp() if isinstance(kind, DateTime) else kind


def _is_postgres_json(connection: Connection, kind: Any) -> bool:
    return connection.dialect.name == "postgresql" and isinstance(kind, JSON)


def _batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if len(batch) == _BATCH or size > LONGEST_ROW:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def revision_of(connection: Connection) -> str | None:
    """The migration at which the database stands; None for one that never was migrated."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return found


def counters(connection: Connection, names: Collection[str]) -> dict[str, int]:
    """Table -> the largest id that it ever gave, of those that count up by themselves."""
    found: dict[str, int] = {}
    for name in sorted(names):
        if connection.dialect.name == "sqlite":
            last = connection.scalar(text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": name})
        else:
            last = _postgres_counter(connection, name)
        if last is not None:
            found[name] = int(last)
    return found


def _postgres_counter(connection: Connection, name: str) -> int | None:
    sequence = _sequence(connection, name)
    if sequence is None:
        return None
    # A sequence that gave nothing yet says 1 and that it was not called.
    last: int | None = connection.scalar(text(f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {sequence}"))
    return last


def _sequence(connection: Connection, name: str) -> str | None:
    """PostgreSQL's name, quoted, of what counts a table's ids up."""
    if not any(one["name"] == "id" for one in inspect(connection).get_columns(name)):
        return None
    asked = text("SELECT pg_get_serial_sequence(:name, 'id')")
    found: str | None = connection.scalar(asked, {"name": name})
    return found


def count_on_from(connection: Connection, last: dict[str, int]) -> None:
    """Lets the ids of tables go on after these."""
    for name, number in last.items():
        if connection.dialect.name == "sqlite":
            parameters = {"name": name, "number": number}
            connection.execute(text("DELETE FROM sqlite_sequence WHERE name = :name"), parameters)
            connection.execute(text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :number)"), parameters)
        elif (sequence := _sequence(connection, name)) is not None:
            connection.execute(
                text("SELECT setval(:sequence, :number)"), {"sequence": sequence, "number": max(number, 1)}
            )
