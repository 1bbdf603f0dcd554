"""Backups: the database at one moment, then the files that it names at that moment, while everything runs on.

The rows come first, so that every file in a manifest was on disk before it is looked for. A file that is not what its
manifest says is left out and reported: either it was taken away on purpose meanwhile, or the data folder is damaged.
"""

import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, inspect, select
from sqlalchemy.orm import Session

from service.access.keys import has_keys
from service.access.security import SECRET
from service.database import OPEN_TRIALS, ApiKey, Artifact, Experiment, Trial, TrialState, now
from service.database.engine import Database
from service.errors import UserError
from service.experiments.actions import RESUMED_BY_RETRY
from service.settings import Settings
from service.upkeep import rows
from service.upkeep.archive import PARTIAL, FileEntry, Manifest, Missing, TableEntry, Writer, WritingError, writing
from service.upkeep.files import DataFolder
from service.upkeep.migrate import refuse_newer
from service.upkeep.places import attempt_of

_ROWS_AT_ONCE = 1000
_TRIES = 3
"""Of a trial's checkpoint: whoever runs the trial may replace it while it is copied."""


@dataclass(frozen=True)
class Progress:
    """What is being done, and how many bytes or rows of it."""

    stage: str
    done: int
    total: int | None = None


Say = Callable[[Progress], None]


def steps(say: Say, stage: str, total: int) -> Callable[[int], None]:
    """Says how far a stage is whenever so many more bytes or rows of it are done."""
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        say(Progress(stage, done, total))

    return step


@dataclass
class _Files:
    """What is copied of the data folder, and what could not be."""

    folder: DataFolder
    writer: Writer
    say: Say
    total: int
    done: int = 0
    copied: list[FileEntry] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _damaged: set[str] = field(default_factory=set)

    def add(self, path: str, sha256: str | None = None, *, needed: bool = False) -> bool:
        """Copies a file; whether it is there, and where its SHA-256 is known, what it was; without it it need not be,
        unless it is `needed`.
        """
        if path in self._seen or path in self._damaged:
            return path in self._seen
        try:
            with self.folder.open(path) as source:
                entry = self.writer.file(path, source, self._step)
        except WritingError:
            raise  # what is wrong with the backup's own disk is no fault of the file
        except OSError as error:
            self.lack(path, error, expected=not needed and sha256 is None and isinstance(error, FileNotFoundError))
            return False
        if sha256 is not None and entry.sha256 != sha256:
            reason = f"its SHA-256 is {entry.sha256}, its manifest says {sha256}"
            self.missing.append(Missing(path=path, reason=reason, expected=False))
            self._damaged.add(path)
            return False
        self._seen.add(path)
        self.copied.append(entry)
        return True

    def lack(self, path: str, reason: str | OSError, *, expected: bool) -> None:
        """Reports what is not there, `expected` where it need not be."""
        words = reason if isinstance(reason, str) else reason.strerror or str(reason)
        self.missing.append(Missing(path=path, reason=words, expected=expected))

    def forgive(self, before: int) -> None:
        """Forgets what was missing since then and need not be there; not what could not be read."""
        self.missing[before:] = [one for one in self.missing[before:] if not one.expected]

    @contextmanager
    def lacking(self, path: str) -> Iterator[None]:
        """Reports where nobody can tell what there is at a path, as the disk cannot be read."""
        try:
            yield
        except WritingError:
            raise
        except OSError as error:
            self.lack(path, error, expected=False)

    def _step(self, count: int) -> None:
        self.done += count
        self.say(Progress("files", self.done, max(self.total, self.done)))


def back_up(settings: Settings, database: Database, file: Path, say: Say = lambda _progress: None) -> Manifest:
    """Writes a backup of database and data folder; what is in it.

    Raises `UserError` where the database was never migrated, or is of a newer version, or the file cannot be written.
    """
    folder = DataFolder.of(settings)
    scratch = file.with_name(f"{file.name}.db{PARTIAL}")
    with writing(file) as out, Writer(out) as writer:
        rows.remove_sqlite(scratch)  # what somebody left who was killed
        try:
            with rows.snapshot(database, scratch) as connection:
                found = _read(connection, writer, say)
        finally:
            rows.remove_sqlite(scratch)
        # From here on nothing holds the database: files may take hours.
        manifest = _copy_files(folder, database, found, writer, say)
        writer.finish(manifest)
    return manifest


@dataclass(frozen=True)
class _Read:
    """What the database said at one moment: of the files, `artifacts` are paths with their SHA-256.

    `trials` ever began; those of `open_trials` are to go on after so many epochs, those of `lost_trials` may: what the
    machine did to them is retried from their checkpoints. `keys`: whether some open the API.
    """

    at: datetime
    dialect: str
    revision: str
    counters: dict[str, int]
    tables: list[TableEntry]
    artifacts: list[tuple[str, str]]
    bytes: int
    trials: list[int]
    open_trials: dict[int, int]
    lost_trials: frozenset[int]
    data_sets: Sequence[str]
    keys: bool


def _read(connection: Connection, writer: Writer, say: Say) -> _Read:
    revision = rows.revision_of(connection)
    if revision is None:
        raise UserError("the database was never migrated: there is nothing to back up")
    refuse_newer(revision)  # of its tables and columns some would be left out unseen
    at = now()
    tables, counters = _copy_tables(connection, writer, say)
    columns = {table.name: table.columns for table in tables}
    artifacts = select(Artifact.path, Artifact.sha256).order_by(Artifact.id)
    if "removed_at" in columns["artifacts"]:  # else it is an older version's database
        artifacts = _there(artifacts)
    began = select(Trial.id).where(Trial.started_at.is_not(None)).order_by(Trial.id)
    lost = select(Trial.id).where(Trial.state == TrialState.FAILED, Trial.failure.in_(RESUMED_BY_RETRY))
    to_go_on = select(Trial.id, Trial.epoch).where(Trial.started_at.is_not(None), Trial.state.in_(OPEN_TRIALS))
    return _Read(
        at=at,
        dialect=connection.dialect.name,
        revision=revision,
        counters=counters,
        tables=tables,
        artifacts=[(path, sha256) for path, sha256 in connection.execute(artifacts)],
        bytes=int(connection.scalar(select(func.coalesce(func.sum(Artifact.size), 0))) or 0),
        trials=list(connection.scalars(began)),
        open_trials={row[0]: row[1] for row in connection.execute(to_go_on)},
        lost_trials=frozenset(connection.scalars(lost)),
        data_sets=connection.scalars(select(Trial.dataset).distinct().order_by(Trial.dataset)).all(),
        keys=ApiKey.__tablename__ in columns and _has_keys(connection),
    )


def _has_keys(connection: Connection) -> bool:
    with Session(connection) as session:  # the transaction stays the connection's
        return has_keys(session)


def _copy_files(folder: DataFolder, database: Database, found: _Read, writer: Writer, say: Say) -> Manifest:
    files = _Files(folder, writer, say, found.bytes)
    for path, sha256 in found.artifacts:
        files.add(path, sha256)
    for trial_id in found.trials:
        with files.lacking(f"trials/{trial_id}"):
            _add_rest(files, trial_id, found.open_trials.get(trial_id), lost=trial_id in found.lost_trials)
    with files.lacking("datasets"):
        for path, needed in files.folder.data_sets(found.data_sets).items():
            files.add(path, needed=needed)
    with files.lacking(SECRET):
        if files.folder.exists(SECRET):
            files.add(SECRET)
        elif found.keys:
            says = "without it none of the database's keys opens anything: back up where the API runs, which has it"
            files.lack(SECRET, says, expected=False)
    return Manifest(
        id=uuid.uuid4().hex,
        made_at=found.at.isoformat(),
        package=_package(),
        database=found.dialect,
        revision=found.revision,
        counters=found.counters,
        tables=found.tables,
        files=files.copied,
        missing=_explained(database, files.missing, {path for path, _ in found.artifacts}),
    )


def _copy_tables(connection: Connection, writer: Writer, say: Say) -> tuple[list[TableEntry], dict[str, int]]:
    done = 0

    def step(_size: int) -> None:
        nonlocal done
        done += 1
        if done % _ROWS_AT_ONCE == 0:
            say(Progress("rows", done))

    every = rows.tables_of(connection)
    found = [writer.table(table, rows.read_rows(connection, table), step) for table in every]
    say(Progress("rows", done, done))
    return found, rows.counters(connection, [table.name for table in every])


def _add_rest(files: _Files, trial_id: int, epoch: int | None, *, lost: bool) -> None:
    """What belongs to a trial beside its manifest; `epoch`: of one that is not final, whose checkpoint is kept.

    So is that of one that is `lost`, where it is still there: it may have been pruned.
    """
    if epoch is None:
        before = len(files.missing)
        for path in files.folder.leftovers(trial_id):
            files.add(path)
        files.forgive(before)  # a log that went with its trial is no loss
        if not lost:
            return
    before = len(files.missing)
    for _ in range(_TRIES):
        checkpoint = files.folder.checkpoint(trial_id)
        if checkpoint is None:
            files.forgive(before)
            if epoch:
                says = "has no whole checkpoint (any more): restored, the trial begins anew"
                files.lack(f"trials/{trial_id}", says, expected=True)
        elif not all(files.add(path) for path in checkpoint.files):
            continue
        rest = files.folder.resumable(trial_id)
        if checkpoint is not None and any(attempt_of(path) != attempt_of(checkpoint.files[0]) for path in rest):
            continue  # another attempt began with a copy of it, and without that it would be the newest one
        after = len(files.missing)
        added = [files.add(path) for path in rest]
        files.forgive(after)
        if all(added) or len(files.missing) > after:
            files.forgive(before if checkpoint is not None else after)
            return
    if len(files.missing) == before:
        says = "one attempt at it followed the other while it was copied: what it did last may be missing"
        files.lack(f"trials/{trial_id}", says, expected=True)


def _there(artifacts: Any) -> Any:
    """Those that are neither removed nor their experiment's that is being deleted."""
    experiment = select(Trial.id).join(Experiment).where(Experiment.deleted_at.is_not(None))
    return artifacts.where(Artifact.removed_at.is_(None), Artifact.trial_id.not_in(experiment))


def _explained(database: Database, missing: Sequence[Missing], artifacts: Collection[str]) -> list[Missing]:
    """Of the artifacts that are missing, those not named any more were taken away on purpose while we copied."""
    with database.read() as session:
        columns = {one["name"] for one in inspect(session.connection()).get_columns(Artifact.__tablename__)}
        old = "removed_at" not in columns
        return [
            one if one.path not in artifacts or _is_named(session, one.path, old=old) else _gone(one) for one in missing
        ]


def _is_named(session: Session, path: str, *, old: bool) -> bool:
    named = select(Artifact.id).where(Artifact.path == path)
    return session.scalar(named if old else _there(named)) is not None


def _gone(one: Missing) -> Missing:
    return Missing(path=one.path, reason="was removed while the backup was made", expected=True)


def _package() -> str:
    try:
        return version("ttsv")
    except PackageNotFoundError:
        return "none"
