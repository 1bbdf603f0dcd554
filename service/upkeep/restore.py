"""Restoring a backup: whole or not at all, whatever ends it on the way.

Everything is verified, then prepared aside; what changes anything is a list of renames that is written down first
(`restore.json` in the data folder), and the end of one transaction. A restore that was cut short is either taken back
or finished by the next one, and no service starts before. What was there is moved aside, never deleted.

A trial that ran when the backup was made waits again, with its checkpoint. Whoever still works for the installation
that the backup is of can write nothing: fences jump, and ids go on after a gap, so that no claim of his is one of ours.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
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
from service.database.engine import Database
from service.errors import UserError
from service.experiments import events, transitions
from service.experiments.events import EventKind
from service.leaderboards import field_index
from service.migrate import bring_up, changing_schema, make_schema, refuse_newer
from service.settings import Settings
from service.storage import Objects, open_storage
from service.storage.store import sync_folder
from service.upkeep import rows
from service.upkeep.archive import FileEntry, Manifest, Reader
from service.upkeep.backup import Progress, Say
from service.upkeep.files import removed

FENCE_JUMP = 1_000_000
"""More claims than an experiment of the old installation can have had since the backup."""
GAPS = {"experiments": 1_000, "trials": 1_000_000, "events": 1_000_000, "artifacts": 1_000_000}
"""More rows than the old installation can have added since the backup."""
ACTOR = "restore"
_JOURNAL, _STAGE, _TRIALS = "restore.json", "restore.partial", "trials"
_SEEN_WITHIN = timedelta(minutes=1)
_SPARE_BYTES = 256 * 2**20
_LOOKS, _LOOK_SECONDS = 10, 0.2


@dataclass(frozen=True)
class Restored:
    """What a restore did: the backup's manifest, experiments that wait again, and where what was there is now.

    `aside_in_store`: where in the store what that had of trials.
    """

    manifest: Manifest
    requeued: int
    aside: Path | None
    aside_in_store: str | None = None


@dataclass(frozen=True)
class _Move:
    source: Path
    target: Path

    def do(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.source.rename(self.target)

    def undo(self) -> None:
        """Takes the renaming back, if it was done."""
        if os.path.lexists(self.target) and not os.path.lexists(self.source):
            self.target.rename(self.source)


@dataclass(frozen=True)
class _ObjectsMove:
    """A move of all that is in a folder of an object store: one after the other, so it may be done in part."""

    store: Objects
    source: str
    target: str

    def do(self) -> None:
        self.store.move(self.source, self.target)

    def undo(self) -> None:
        """Takes it back, as far as it was done: nothing else was in the target."""
        self.store.move(self.target, self.source)


_Moves = Sequence[_Move | _ObjectsMove]


def refuse_half_restored(settings: Settings) -> None:
    """Raises `UserError` where a restore was cut short between its first change and its last."""
    if (settings.data_dir / _JOURNAL).exists():
        raise UserError(
            f"a restore into {settings.data_dir} was cut short: run `ttsv restore FILE` again, which takes it back or "
            "ends it first"
        )


def restore(settings: Settings, file: Path, *, force: bool = False, say: Say = lambda _progress: None) -> Restored:
    """Puts a backup in the place of database and data folder, which must be empty unless `force`.

    Raises `UserError` where the backup is not whole, the place is taken or in use, or a disk has no room.
    """
    data_dir = settings.data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    with Reader(file) as backup, _alone(data_dir):
        manifest = backup.manifest
        target = _Target.of(settings)
        with contextlib.closing(target):
            _recover(settings, target)
            target.refuse_in_use()
            present, shelf = _present(data_dir, manifest), _Shelf.of(settings)
            if not force and (present or shelf.filled() or target.filled()):
                there = [*(["the database"] if target.filled() else []), *present]
                there += ["the store (TTSV_STORAGE)"] if shelf.filled() else []
                raise UserError(
                    f"{', '.join(there)}: is there already; --force moves what is there aside and restores over it"
                )
            shelf.refuse_full(data_dir, manifest)
            backup.verify(_told(say, "verifying", manifest.size))
            aside = data_dir / f"before-restore-{now():%Y%m%d-%H%M%S-%f}"  # another may have ended in this second
            stage = data_dir / _STAGE
            removed(stage)
            shelf.clear()
            try:
                moves = [*(_Move(data_dir / name, aside / name) for name in present), *shelf.make_room(aside.name)]
                aside_in_store = shelf.where(aside.name) if shelf.filled() else None
                moves += _extract(backup, data_dir, stage, shelf, say)
                requeued = target.fill(backup, moves, aside, say)
            finally:
                if not (data_dir / _JOURNAL).exists():
                    removed(stage)
                    shelf.clear()
    kept = aside if aside.exists() else None
    return Restored(manifest, requeued, kept, aside_in_store)


@contextlib.contextmanager
def _alone(data_dir: Path) -> Iterator[None]:
    """Keeps other restores out. Raises `UserError` where one is at work."""
    descriptor = os.open(data_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another restore into {data_dir} is at work: wait for it") from None
        yield
    finally:
        os.close(descriptor)


def _told(say: Say, stage: str, total: int) -> Callable[[int], None]:
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        say(Progress(stage, done, total))

    return step


def _tops(manifest: Manifest) -> list[str]:
    """What is renamed as one: a folder of trials, one file or folder of a data set."""
    tops = ("/".join(path.split("/")[: 2 if path.startswith("datasets/") else 1]) for path in _paths(manifest))
    return list(dict.fromkeys(tops))


def _paths(manifest: Manifest) -> Iterator[str]:
    return (file.path for file in manifest.files)


def _present(data_dir: Path, manifest: Manifest) -> list[str]:
    """What is in the way: the files that trials left here, the secret of keys, and data sets that the backup has."""
    names = dict.fromkeys(["trials", "key-secret", *_tops(manifest)])
    return [name for name in names if _is_something(data_dir / name)]


def _is_something(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return any(path.iterdir())
    return os.path.lexists(path)


def _refuse_full(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + _SPARE_BYTES:
        need = size // 2**20
        raise UserError(f"{folder} has {free // 2**20} MiB free, the backup needs {need}: make room, then try again")


class _Shelf:
    """Where the files of trials go: the data folder, like all else."""

    @staticmethod
    def of(settings: Settings) -> "_Shelf":
        """That of the settings."""
        if settings.storage is None:
            return _Shelf()
        store = open_storage(settings.storage)
        return _ObjectsShelf(store) if isinstance(store, Objects) else _FolderShelf(Path(settings.storage))

    def filled(self) -> bool:
        """Whether there is anything of trials beside the data folder."""
        return False

    def refuse_full(self, data_dir: Path, manifest: Manifest) -> None:
        """Raises `UserError` where a disk has too little room."""
        _refuse_full(data_dir, manifest.size)

    def clear(self) -> None:
        """Removes what a restore has prepared beside the data folder."""

    def make_room(self, aside: str) -> _Moves:
        """What moves aside what is there, into a folder of this name."""
        return []

    def where(self, aside: str) -> str:
        """That folder, in words."""
        return aside

    def put(self, file: FileEntry, staged: Path) -> None:
        """Takes a file of a trial that was written to `staged`."""

    def moves(self) -> _Moves:
        """What puts that in its place."""
        return []


class _FolderShelf(_Shelf):
    """The folder that `TTSV_STORAGE` names."""

    def __init__(self, root: Path) -> None:
        self._root, self._stage = root, root / _STAGE

    def filled(self) -> bool:
        return _is_something(self._root / _TRIALS)

    def refuse_full(self, data_dir: Path, manifest: Manifest) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        trials = _bytes_of_trials(manifest)
        _refuse_full(self._root, trials)
        _refuse_full(data_dir, manifest.size - trials)

    def clear(self) -> None:
        removed(self._stage)

    def make_room(self, aside: str) -> _Moves:
        return [_Move(self._root / _TRIALS, self._root / aside / _TRIALS)] if self.filled() else []

    def where(self, aside: str) -> str:
        return str(self._root / aside)

    def put(self, file: FileEntry, staged: Path) -> None:
        target = self._stage / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(staged, target)

    def moves(self) -> _Moves:
        trials = self._stage / _TRIALS
        return [_Move(trials, self._root / _TRIALS)] if trials.exists() else []


class _ObjectsShelf(_Shelf):
    """The bucket that `TTSV_STORAGE` names."""

    def __init__(self, store: Objects) -> None:
        self._store = store

    def filled(self) -> bool:
        return bool(self._store.folders(_TRIALS, partial=True))

    def refuse_full(self, data_dir: Path, manifest: Manifest) -> None:
        # Files of trials pass through the data folder one by one.
        largest = max((file.size for file in manifest.files), default=0)
        _refuse_full(data_dir, manifest.size - _bytes_of_trials(manifest) + largest)

    def clear(self) -> None:
        self._store.remove(_STAGE)

    def make_room(self, aside: str) -> _Moves:
        return [_ObjectsMove(self._store, _TRIALS, f"{aside}/{_TRIALS}")] if self.filled() else []

    def where(self, aside: str) -> str:
        return f"{aside} of the store"

    def put(self, file: FileEntry, staged: Path) -> None:
        with staged.open("rb") as source:
            sent = self._store.write(f"{_STAGE}/{file.path}", source, file.size)
        if sent != file.sha256:
            raise OSError(errno.EIO, "other bytes were sent to the store than are in the backup", file.path)
        staged.unlink()

    def moves(self) -> _Moves:
        return [_ObjectsMove(self._store, f"{_STAGE}/{_TRIALS}", _TRIALS)]


def _bytes_of_trials(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files if file.path.startswith(f"{_TRIALS}/"))


def _extract(backup: Reader, data_dir: Path, stage: Path, shelf: _Shelf, say: Say) -> _Moves:
    """Writes the files aside; the renames that put them in their places."""
    stage.mkdir(mode=0o700)
    step = _told(say, "files", sum(file.size for file in backup.manifest.files))
    for file in backup.manifest.files:
        path = stage / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        backup.extract(file, path, step)
        if file.path.startswith(f"{_TRIALS}/"):
            shelf.put(file, path)
    os.sync()
    further = shelf.moves()
    names = [name for name in _tops(backup.manifest) if not (further and name == _TRIALS)]
    return [*(_Move(stage / name, data_dir / name) for name in names), *further]


class _Target:
    """The database into which a backup goes."""

    @staticmethod
    def of(settings: Settings) -> "_Target":
        """That of the settings."""
        if settings.url.get_backend_name() == "sqlite":
            return _SqliteFile(settings)
        return _PostgresDatabase(settings)

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def close(self) -> None:
        """Closes every connection."""

    def refuse_in_use(self) -> None:
        """Raises `UserError` where a service or a worker is at work on it."""
        raise NotImplementedError

    def filled(self) -> bool:
        """Whether anything is in it."""
        raise NotImplementedError

    def fill(self, backup: Reader, moves: _Moves, aside: Path, say: Say) -> int:
        """Puts the rows in and does the renames, both or neither; how many experiments wait again."""
        raise NotImplementedError

    def took(self, journal: "_Journal") -> bool:
        """Whether a restore that was cut short had come so far that it is to be finished."""
        raise NotImplementedError


class _SqliteFile(_Target):
    """A file that is made anew beside the one that is there, and takes its place by a rename, the last of all."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._path = Path(settings.url.database or "").absolute()

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

    def fill(self, backup: Reader, moves: _Moves, aside: Path, say: Say) -> int:
        made = self._path.with_name(self._path.name + ".restore.partial")
        rows.remove_sqlite(made)
        try:
            journal = _Journal(self._settings.data_dir)
            database = Database(URL.create("sqlite", database=str(made)))
            with contextlib.closing(database), changing_schema(database) as connection:
                requeued = _load(connection, backup, journal, {}, say)
            old = [self._path.with_name(self._path.name + suffix) for suffix in ("", *rows.BESIDE)]
            kept = [_Move(path, self._kept(path, aside)) for path in old if path.exists()]
            try:
                journal.begin([*moves, *kept, _Move(made, self._path)])
            except BaseException:
                _settle(journal, self)
                raise
            journal.end()
        finally:
            rows.remove_sqlite(made)
        return requeued

    def _kept(self, path: Path, aside: Path) -> Path:
        """Where an old file goes: beside itself, as a rename needs it."""
        inside = path.parent.resolve() == self._settings.data_dir.resolve()
        return aside / path.name if inside else path.with_name(f"{path.name}.{aside.name}")

    def took(self, journal: "_Journal") -> bool:
        if not self._path.exists():
            return False
        with contextlib.closing(Database(self._settings.url)) as database, contextlib.suppress(DBAPIError):
            return _is_marked(database, journal)
        return False  # what was there before is no database


class _PostgresDatabase(_Target):
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

    def fill(self, backup: Reader, moves: _Moves, aside: Path, say: Say) -> int:
        journal = _Journal(self._settings.data_dir)
        try:
            with changing_schema(self._database) as connection:
                for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
                    connection.execute(text(f"SET LOCAL {limit} = 0"))
                before = _drop_tables(connection)
                requeued = _load(connection, backup, journal, before, say)
                journal.begin(moves)
        except BaseException:
            # Whether the reply to COMMIT came or not: what the database has decides.
            if not (journal.begun and _settle(journal, self)):
                raise
        else:
            journal.end()
        return requeued

    def took(self, journal: "_Journal") -> bool:
        return _is_marked(self._database, journal)


class _Journal:
    """The renames of a restore, written down before the first is done, with how many are done."""

    def __init__(self, data_dir: Path, restore_id: str | None = None, moves: _Moves = (), done: int = 0) -> None:
        self._path = data_dir / _JOURNAL
        self.id, self.begun = restore_id or uuid.uuid4().hex, False
        self._moves, self._done = moves, done

    @property
    def mark(self) -> str:
        """The key of the row by which a database says that it has this restore."""
        return f"restore {self.id}"

    @classmethod
    def read(cls, settings: Settings) -> "_Journal | None":
        """What a restore that was cut short left; None where none did. Raises `UserError` without its store."""
        try:
            found = json.loads((settings.data_dir / _JOURNAL).read_bytes())
        except FileNotFoundError:
            return None
        store = None if settings.storage is None else open_storage(settings.storage)
        moves: list[_Move | _ObjectsMove] = []
        for source, target, *in_store in found["moves"]:
            if not in_store:
                moves.append(_Move(Path(source), Path(target)))
            elif isinstance(store, Objects):
                moves.append(_ObjectsMove(store, source, target))
            else:
                raise UserError("TTSV_STORAGE must name the bucket that the restore went into which was cut short")
        return cls(settings.data_dir, found["id"], moves, found["done"])

    def begin(self, moves: _Moves) -> None:
        """Writes them down, then does them."""
        self._moves, self.begun = moves, True
        os.sync()
        self._write()
        for move in moves:
            move.do()
            self._done += 1
            self._write()

    def undo(self) -> None:
        """Takes back what was done of them. Of one more it is not known: it was done where its source is gone."""
        for move in reversed(self._moves[: self._done + 1]):
            move.undo()
        self.end()

    def end(self) -> None:
        """Forgets them."""
        os.sync()
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        moves = [
            [str(one.source), str(one.target), *(["in the store"] if isinstance(one, _ObjectsMove) else [])]
            for one in self._moves
        ]
        draft = self._path.with_name(f"{_JOURNAL}.partial")
        with draft.open("w") as file:
            json.dump({"id": self.id, "done": self._done, "moves": moves}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self._path)
        sync_folder(self._path.parent)


def _settle(journal: _Journal, target: _Target) -> bool:
    """Ends or takes back a restore that something ended on its way; whether it took place."""
    took = target.took(journal)
    if took:
        journal.end()
    else:
        journal.undo()
    return took


def _recover(settings: Settings, target: _Target) -> None:
    """Ends or takes back what an earlier restore left half done."""
    if (journal := _Journal.read(settings)) is not None:
        _settle(journal, target)


def _is_marked(database: Database, journal: _Journal) -> bool:
    """Whether the database is the one that the restore made."""
    if not _has_table(database, IdempotencyKey.__tablename__):
        return False
    with database.read() as session:
        return session.get(IdempotencyKey, journal.mark) is not None


def _load(connection: Connection, backup: Reader, journal: _Journal, before: Mapping[str, int], say: Say) -> int:
    """Makes the tables of the backup's revision, fills them, brings them up to date; how many experiments wait again.

    `before`: the largest ids that the database gave until now. The journal's mark is among the rows.
    """
    manifest = backup.manifest
    entries = {entry.name: entry for entry in manifest.tables}
    make_schema(connection, manifest.revision, entries["results"].columns if "results" in entries else ())
    tables = rows.tables_of(connection)
    if unknown := entries.keys() - {table.name for table in tables}:
        raise UserError(f"it has tables that are not known here: {', '.join(sorted(unknown))}; nothing was changed")
    step = _told(say, "rows", sum(entry.size for entry in manifest.tables))
    for table in tables:
        if (entry := entries.get(table.name)) is None:
            continue
        try:
            count = rows.write_rows(connection, rows.Rows(entry.name, tuple(entry.columns)), backup.lines(entry, step))
        except (ValueError, TypeError, RecursionError, StatementError) as error:
            if isinstance(error, OperationalError):
                raise
            raise UserError(f"table {entry.name} of the backup: {_first_line(error)}; nothing was changed") from error
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
        requeued = _fence_off(session)
        session.commit()
    return requeued


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def _fence_off(session: Session) -> int:
    """Lets what ran wait again, and raises every fence; how many experiments ran."""
    running = session.scalars(select(Experiment).where(Experiment.state == ExperimentState.RUNNING)).all()
    for experiment in running:
        transitions.requeue(session, experiment, ExperimentState.QUEUED)
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
