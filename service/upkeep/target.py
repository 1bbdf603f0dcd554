"""The database into which a backup goes: a file of SQLite, or a database of PostgreSQL."""

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import URL, Connection, func, insert, inspect, select, text, update
from sqlalchemy.exc import DBAPIError, OperationalError, StatementError
from sqlalchemy.orm import Session

from service.database import (
    ApiKey,
    Base,
    Experiment,
    ExperimentState,
    IdempotencyKey,
    Project,
    Worker,
    now,
    tallies,
)
from service.database.engine import Database, said_by
from service.errors import UserError
from service.experiments import events, transitions
from service.experiments.events import EventKind
from service.leaderboards import field_index
from service.settings import Settings
from service.upkeep import rows
from service.upkeep.archive import Reader
from service.upkeep.backup import Say, steps
from service.upkeep.migrate import bring_up, changing_schema, make_schema, refuse_newer
from service.upkeep.moves import Journal, Move, Moves

FENCE_JUMP = 1_000_000
"""More claims than an experiment of the old installation can have had since the backup."""
GAPS = {"experiments": 1_000, "trials": 1_000_000, "events": 1_000_000, "artifacts": 1_000_000}
"""More rows than the old installation can have added since the backup."""
ACTOR = "restore"
_SEEN_WITHIN = timedelta(minutes=1)
_LOOKS, _LOOK_SECONDS = 10, 0.2


class Target(ABC):
    """The database into which a backup goes."""

    @staticmethod
    def of(settings: Settings) -> "Target":
        """That of the settings."""
        if settings.url.get_backend_name() == "sqlite":
            return _SqliteFile(settings)
        return _PostgresDatabase(settings)

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @abstractmethod
    def close(self) -> None:
        """Closes every connection."""

    @abstractmethod
    def refuse_in_use(self) -> None:
        """Raises `UserError` where a service or a worker is at work on it."""

    @abstractmethod
    def filled(self) -> bool:
        """Whether anything is in it."""

    @abstractmethod
    def fill(self, backup: Reader, moves: Moves, aside: Path, say: Say) -> int:
        """Puts the rows in and does the renames, both or neither; how many experiments wait again."""

    @abstractmethod
    def took(self, journal: Journal) -> bool:
        """Whether a restore that was cut short had come so far that it is to be finished."""

    def settle(self, journal: Journal) -> bool:
        """Ends or takes back a restore that something ended on its way; whether it took place."""
        took = self.took(journal)
        if took:
            journal.end()
        else:
            journal.undo()
        return took


class _SqliteFile(Target):
    """A file that is made anew beside the one that is there, and takes its place by a rename, the last of all."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._path = Path(settings.url.database or "").absolute()
        if self._path.exists() and not self._path.is_file():
            raise UserError(f"the database {self._path} is no file: let TTSV_DATABASE_URL name one")

    def close(self) -> None:
        pass  # none stays open: the file itself is exchanged

    def refuse_in_use(self) -> None:
        if users := _processes_with(self._path):
            raise UserError(
                f"the database {self._path} is open in process {', '.join(map(str, users))}: stop the service and its "
                "workers, then restore"
            )
        if self._path.exists():
            with contextlib.closing(Database(self._settings.url)) as database:
                _refuse_seen_workers(database)

    def filled(self) -> bool:
        if not self._path.exists():
            return False
        with contextlib.closing(Database(self._settings.url)) as database:
            return _has_rows(database)

    def fill(self, backup: Reader, moves: Moves, aside: Path, say: Say) -> int:
        made = self._path.with_name(self._path.name + ".restore.partial")
        rows.remove_sqlite(made)
        try:
            journal = Journal(self._settings.data_dir)
            database = Database(URL.create("sqlite", database=str(made)))
            with contextlib.closing(database), changing_schema(database) as connection:
                requeued = _load(connection, backup, journal, {}, say)
            self.refuse_in_use()  # who opened it meanwhile would go on writing into what is moved aside
            old = [self._path.with_name(self._path.name + suffix) for suffix in ("", *rows.BESIDE)]
            kept = [Move(path, self._kept(path, aside)) for path in old if path.exists()]
            try:
                journal.begin([*moves, *kept, Move(made, self._path)])
            except BaseException:
                self.settle(journal)
                raise
            journal.end()
        finally:
            rows.remove_sqlite(made)
        return requeued

    def _kept(self, path: Path, aside: Path) -> Path:
        """Where an old file goes: beside itself, as a rename needs it."""
        inside = path.parent.resolve() == self._settings.data_dir.resolve()
        return aside / path.name if inside else path.with_name(f"{path.name}.{aside.name}")

    def took(self, journal: Journal) -> bool:
        if not self._path.exists():
            return False
        with contextlib.closing(Database(self._settings.url)) as database, contextlib.suppress(DBAPIError):
            return _is_marked(database, journal)
        return False  # what was there before is no database


class _PostgresDatabase(Target):
    """A database whose tables are made anew in one transaction; the renames are done just before its end."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._database = Database(settings.url)

    def close(self) -> None:
        self._database.close()

    def refuse_in_use(self) -> None:
        self._database.close()  # our own connections that wait
        for attempt in range(_LOOKS):  # a connection that was just closed is seen a little longer
            if not (count := self._others()):
                break
            if attempt == _LOOKS - 1:
                raise UserError(
                    f"{count} other connections use the database: stop the service and its workers, then restore"
                )
            time.sleep(_LOOK_SECONDS)
        _refuse_seen_workers(self._database)

    def _others(self) -> int:
        others = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        with self._database.engine.connect() as connection:
            return int(connection.scalar(others) or 0)

    def filled(self) -> bool:
        return _has_rows(self._database)

    def fill(self, backup: Reader, moves: Moves, aside: Path, say: Say) -> int:
        journal = Journal(self._settings.data_dir)
        try:
            with changing_schema(self._database) as connection:
                before = _drop_tables(connection)
                requeued = _load(connection, backup, journal, before, say)
                journal.begin(moves)
        except BaseException:
            # Whether the reply to COMMIT came or not: what the database has decides.
            if not (journal.begun and self.settle(journal)):
                raise
        else:
            journal.end()
        return requeued

    def took(self, journal: Journal) -> bool:
        return _is_marked(self._database, journal)


def _is_marked(database: Database, journal: Journal) -> bool:
    """Whether the database is the one that the restore made."""
    if not _has_table(database, IdempotencyKey.__tablename__):
        return False
    with database.read() as session:
        return session.get(IdempotencyKey, journal.mark) is not None


def _load(connection: Connection, backup: Reader, journal: Journal, before: Mapping[str, int], say: Say) -> int:
    """Makes the tables of the backup's revision, fills them, brings them up to date; how many experiments wait again.

    `before`: the largest ids that the database gave until now. The journal's mark is among the rows.
    """
    manifest = backup.manifest
    entries = {entry.name: entry for entry in manifest.tables}
    make_schema(connection, manifest.revision, entries["results"].columns if "results" in entries else ())
    tables = rows.tables_of(connection)
    if unknown := entries.keys() - {table.name for table in tables}:
        raise UserError(f"it has tables that are not known here: {', '.join(sorted(unknown))}; nothing was changed")
    step = steps(say, "rows", sum(entry.size for entry in manifest.tables))
    for table in tables:
        if (entry := entries.get(table.name)) is None:
            continue
        try:
            count = rows.write_rows(connection, replace(table, columns=tuple(entry.columns)), backup.lines(entry, step))
        except (ValueError, TypeError, RecursionError, StatementError) as error:
            if isinstance(error, OperationalError):
                raise
            raise UserError(f"table {entry.name} of the backup: {said_by(error)}; nothing was changed") from error
        if count != entry.rows:
            raise UserError(f"table {entry.name} has {count} rows, the manifest says {entry.rows}; nothing was changed")
    bring_up(connection)
    names = manifest.counters.keys() | before.keys()
    largest = {name: max(manifest.counters.get(name, 0), before.get(name, 0)) for name in names}
    known = {table.name for table in rows.tables_of(connection)}
    go_on = {name: last + GAPS.get(name, 0) for name, last in largest.items() if name in known}
    rows.count_on_from(connection, go_on)
    mark = {"key": journal.mark, "body_sha256": "", "response": {}, "created_at": now()}
    connection.execute(insert(IdempotencyKey).values(mark))
    with Session(connection) as session:  # the transaction stays the connection's
        while field_index.fill(session):
            pass
        requeued = _fence_off(session, datetime.fromisoformat(manifest.made_at))
        session.commit()
    return requeued


def _fence_off(session: Session, made_at: datetime) -> int:
    """Lets what ran wait again, and raises every fence; how many experiments ran.

    What ran did so until the backup was made, for all that is known here.
    """
    running = session.scalars(select(Experiment).where(Experiment.state == ExperimentState.RUNNING)).all()
    for experiment in running:
        transitions.requeue(session, experiment, ExperimentState.QUEUED, ended_at=made_at)
        events.record(session, EventKind.RELEASED, ACTOR, experiment, fence=experiment.fence, drained=False)
    session.flush()
    session.execute(update(Experiment).values(fence=Experiment.fence + FENCE_JUMP))
    return len(running)


def _drop_tables(connection: Connection) -> dict[str, int]:
    """Drops our tables and leaves all else; the largest ids that they gave. Raises `UserError` for a newer version's.

    Only where a transaction takes it back.
    """
    names = {*Base.metadata.tables, "alembic_version"} & set(inspect(connection).get_table_names())
    refuse_newer(rows.revision_of(connection))
    before = rows.counters(connection, names - rows.DERIVED - rows.PRESENT)
    tallies.uninstall(connection)
    quote = connection.dialect.identifier_preparer.quote
    if names:
        connection.execute(text(f"DROP TABLE {', '.join(map(quote, sorted(names)))} CASCADE"))
    return before


def _has_table(database: Database, name: str) -> bool:
    with database.engine.connect() as connection:
        return inspect(connection).has_table(name)


def _has_rows(database: Database) -> bool:
    """Whether there is an experiment, a project or a key; a file that is no database counts as filled."""
    try:
        for kind in (Experiment, Project, ApiKey):
            if _has_table(database, kind.__tablename__):
                with database.read() as session:
                    if session.scalar(select(func.count()).select_from(select(kind.id).limit(1).subquery())):
                        return True
    except DBAPIError as error:
        if isinstance(error, OperationalError) and database.engine.dialect.name == "postgresql":
            raise
        return True
    return False


def _refuse_seen_workers(database: Database) -> None:
    with contextlib.suppress(DBAPIError):  # what is no database has no workers
        if not _has_table(database, Worker.__tablename__):
            return
        with database.read() as session:
            seen = session.scalars(select(Worker.name).where(Worker.seen_at > now() - _SEEN_WITHIN)).all()
        if seen:
            raise UserError(
                f"worker {', '.join(seen)} was heard of in the last minute: stop it, then restore (one that was killed "
                "is forgotten after a minute)"
            )


def _processes_with(path: Path) -> list[int]:
    """Other processes of ours that have a file open; none without Linux's /proc."""
    wanted = str(path.resolve())
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) == wanted and process.name != str(os.getpid()):
                        found.add(int(process.name))
    return sorted(found)
