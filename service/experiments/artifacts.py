"""The files that trials left: what the manifest lists, found on the disk or in the store again."""

import logging
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Artifact, Experiment, Trial
from service.errors import GoneError, NotFoundError, StorageAwayError
from service.settings import Settings
from service.storage import DamagedFileError, Folder, Store, copy_out, open_storage

logger = logging.getLogger(__name__)

KEPT = "cache/artifacts"
"""Folder, in the data folder, of copies of files that are in a store elsewhere."""
MOST_KEPT_BYTES = 4 * 2**30
_COPY = re.compile(r"\.?([0-9a-f]{64})(-.*)?")
"""A copy, or what is to be one, by its SHA-256."""
_AT_ONCE = 500

_MEDIA_TYPES = {
    ".csv": "text/csv; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".log": "text/plain; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class Content:
    """A file that is there: `name` is safe to be offered for saving."""

    path: Path
    name: str
    media_type: str


def file_name(artifact: Artifact) -> str:
    """`trial-7-model.safetensors`: letters, digits, dots, dashes and underscores only."""
    suffix = re.sub(r"[^A-Za-z0-9.]", "", Path(artifact.path).suffix)
    return f"trial-{artifact.trial_id}-{re.sub(r'[^A-Za-z0-9_-]', '_', artifact.kind)}{suffix}"


def media_type(artifact: Artifact) -> str:
    """By the file's suffix; what is not known is bytes."""
    return _MEDIA_TYPES.get(Path(artifact.path).suffix.lower(), "application/octet-stream")


def newest_artifacts(session: Session, count: int) -> Sequence[Artifact]:
    """So many of the files that trials left last, but for those that were removed, or whose experiment was deleted."""
    there = Artifact.removed_at.is_(None), Experiment.deleted_at.is_(None)
    query = select(Artifact).join(Trial, Trial.id == Artifact.trial_id).join(Experiment).where(*there)
    return session.scalars(query.order_by(Artifact.id.desc()).limit(count)).all()


def is_kept(settings: Settings, artifact: Artifact) -> bool:
    """Whether a file of the manifest's size is where these settings look for it. Raises `OSError`."""
    if Folder(settings.data_dir).size(artifact.path) == artifact.size:
        return True
    return settings.storage is not None and open_storage(settings.storage).size(artifact.path) == artifact.size


def content_of(settings: Settings, artifact: Artifact) -> Content:
    """The artifact's file, which must lie in the data folder or else in the store, and have the manifest's size.

    What is in the store is brought here first, checked by its SHA-256, and kept for a while. Raises `NotFoundError`
    where it is missing, `GoneError` where it is something else, `StorageAwayError`.
    """
    data_dir = settings.data_dir
    what = f"artifact {artifact.id} ({artifact.kind} of trial {artifact.trial_id})"
    path = (data_dir / artifact.path).resolve()
    if not path.is_relative_to(data_dir.resolve()):
        raise GoneError(f"{what} does not lie in the data folder: its manifest is damaged, or a link leads out of it")
    place = "the data folder"
    if not path.is_file() and settings.storage is not None:
        place = "the store (TTSV_STORAGE)"
        try:
            store = open_storage(settings.storage)
            found = _kept(store, artifact, data_dir / KEPT, what)
            size = artifact.size if found is not None else store.size(artifact.path)
        except OSError as error:
            raise StorageAwayError(f"{what} cannot be read in {place}: {error}") from error
        path = path if found is None else found
    else:
        size = path.stat().st_size if path.is_file() else None
    if size is None:
        raise NotFoundError(
            f"{what} was manifested but is not in {place}: its file was removed, or a worker with another "
            "TTSV_DATA_DIR or TTSV_STORAGE wrote it elsewhere"
        )
    if size != artifact.size:
        raise GoneError(f"{what} is not what was manifested: {size} bytes instead of {artifact.size}")
    return Content(path, file_name(artifact), media_type(artifact))


def _kept(store: Store, artifact: Artifact, folder: Path, what: str) -> Path | None:
    """The copy of a file of the store, fetched where there is none yet; None where it is missing, or of another size.

    Raises `GoneError` where it is of another SHA-256.
    """
    copy = folder / artifact.sha256
    with suppress(FileNotFoundError):
        os.utime(copy)
        return copy
    if store.size(artifact.path) != artifact.size:
        return None
    fresh = folder / f"{artifact.sha256}-{secrets.token_hex(4)}"
    try:
        copy_out(store, artifact.path, fresh, sha256=artifact.sha256)
    except DamagedFileError as error:
        raise GoneError(f"{what} is not what was manifested: {error.strerror}") from error
    fresh.replace(copy)
    _forget_oldest(folder, copy)
    return copy


def remove_copies(session: Session, data_dir: Path) -> int:
    """Removes copies of files that no manifest has any more, as they were pruned or deleted; how many these were."""
    try:
        found = [(name[1], path) for path in (data_dir / KEPT).iterdir() if (name := _COPY.fullmatch(path.name))]
    except FileNotFoundError:
        return 0
    digests = sorted({digest for digest, _ in found})
    needed = set[str]()
    for first in range(0, len(digests), _AT_ONCE):
        there = select(Artifact.sha256).join(Trial, Trial.id == Artifact.trial_id)
        there = there.join(Experiment, Experiment.id == Trial.experiment_id)
        there = there.where(Artifact.removed_at.is_(None), Experiment.deleted_at.is_(None))
        needed |= set(session.scalars(there.where(Artifact.sha256.in_(digests[first : first + _AT_ONCE]))))
    gone = [path for digest, path in found if digest not in needed]
    for path in gone:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # which keeps neither another copy nor the file itself from going
            logger.warning("%s stays for now: %s", path, error)
    return len(gone)


def _forget_oldest(folder: Path, kept: Path) -> None:
    """Removes the copies that were not asked for the longest, until the others have room."""
    copies = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            status = path.stat()
            copies.append((status.st_mtime, status.st_size, path))
    room = MOST_KEPT_BYTES
    for _, size, path in sorted(copies, reverse=True):
        room -= size
        if room < 0 and path != kept:
            path.unlink(missing_ok=True)
