"""The places where files of trials are: the data folder, a store in another folder, a bucket.

In folders a name that leads out or through a link is as good as absent: what is read goes into a backup, and what is
removed is gone. But for data sets: whoever keeps them may have linked them there, and trials read them so.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from service.access.security import SECRET
from service.storage import Attempt, Folder, Store, StoredFile, is_later, mark_of, remove_checkpoints
from service.storage.attempts import attempts
from ttsv.results import CHECKPOINTS

TRIALS, DATASETS = "trials", "datasets"
NUMBER = re.compile(r"\d{1,18}")
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}")
_UNFINISHED = (".tmp", ".partial")
_LONGEST_PATH = 1000
_MOST_PARTS = 32
TOP = 4
"""Parts of the path of a file that is in an attempt's folder itself."""
_MOST_QUESTIONS = 50
_MOST_TRIES = 1000
_NO_FOLDER = (FileNotFoundError, NotADirectoryError)
"""What a folder that is not there raises: a disk that cannot be read is no empty one."""


def is_safe(path: str) -> bool:
    """Whether a relative path can be a file of the data folder that is worth keeping, and names nothing outside."""
    parts = path.split("/")
    if len(path) > _LONGEST_PATH or len(parts) > _MOST_PARTS:
        return False
    if any(part in (".", "..") or not _PART.fullmatch(part) for part in parts):
        return False
    match parts:
        case [name]:
            return name == SECRET
        case [folder, number, fence, *inner] if folder == TRIALS:
            return bool(inner and NUMBER.fullmatch(number) and Attempt.parse(fence))
        case [folder, *_]:
            return folder == DATASETS
    return False


class Place(Protocol):
    """Somewhere that has files of trials. Every method may raise `OSError`."""

    def open(self, path: str) -> BinaryIO:
        """A file for reading. Raises `FileNotFoundError`."""

    def attempts(self, trial_id: int) -> list[Attempt]:
        """Those at a trial that have a folder."""

    def below(self, folder: str) -> dict[str, int]:
        """The size of every file in a folder, by path; what is being written still is left out."""

    def there(self, paths: Sequence[str]) -> list[str]:
        """Those of these files that are there."""

    def checkpointed(self) -> set[int]:
        """Trials that have checkpoints."""

    def used(self) -> bool:
        """Whether any trial has a folder."""

    def mark(self) -> str | None:
        """The word by which it is known again; None where it has none."""

    def remove(self, path: str) -> None:
        """Removes one file, where it is there."""

    def remove_trial(self, trial_id: int) -> None:
        """Removes the folder of a trial. Raises `OSError` where something of it stays."""

    def remove_checkpoints(self, trial_id: int, fence: int) -> None:
        """Removes a trial's checkpoints, of every attempt that is not of a later claim."""


class Disk:
    """A folder as a place, which itself may be a link."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, path: str) -> BinaryIO:
        """As `Place.open`: a plain file, with no link on the way to it unless it is a data set's."""
        follow = 0 if path.startswith(f"{DATASETS}/") else os.O_NOFOLLOW
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            *parents, name = path.split("/")
            if any(part in ("", ".", "..") for part in (*parents, name)):
                raise FileNotFoundError(errno.ENOENT, "leads out of the data folder", path)
            for part in parents:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | follow, dir_fd=folder)
                os.close(folder)
                folder = inner
            # NONBLOCK: a pipe somebody put there would keep us waiting.
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | follow, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise FileNotFoundError(errno.ENOENT, "is no plain file of the data folder", path) from error
            raise
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "is no plain file of the data folder", path)
        return os.fdopen(descriptor, "rb")

    def attempts(self, trial_id: int) -> list[Attempt]:
        """As `Place.attempts`."""
        try:
            with os.scandir(self.path / TRIALS / str(trial_id)) as entries:
                names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        except _NO_FOLDER:
            return []
        return [attempt for attempt in map(Attempt.parse, names) if attempt is not None]

    def below(self, folder: str, *, deep: bool = True) -> dict[str, int]:
        """As `Place.below`; without what is in folders of the folder, unless `deep`. Only of data sets links count."""
        found, follow = dict[str, int](), folder.split("/")[0] == DATASETS
        waiting = [(folder, frozenset[tuple[int, int]]())]
        while waiting:
            here, above = waiting.pop()
            with contextlib.suppress(*_NO_FOLDER), os.scandir(self.path / here) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=follow)
                    except OSError as error:
                        if error.errno in (errno.ENOENT, errno.ELOOP):  # it went, or leads nowhere
                            continue
                        raise
                    path, itself = f"{here}/{entry.name}", (status.st_dev, status.st_ino)
                    if stat.S_ISDIR(status.st_mode):
                        if deep and itself not in above:  # else a link led back
                            waiting.append((path, above | {itself}))
                    elif stat.S_ISREG(status.st_mode) and _is_kept(path):
                        found[path] = status.st_size
        return found

    def there(self, paths: Sequence[str]) -> list[str]:
        """As `Place.there`."""
        return [path for path in paths if _opens(self, path)]

    def checkpointed(self) -> set[int]:
        """As `Place.checkpointed`."""
        folders = (self.path / TRIALS).glob(f"*/*/{CHECKPOINTS}")
        return set(filter(None, (_trial_of(folder.relative_to(self.path).parts) for folder in folders)))

    def used(self) -> bool:
        """As `Place.used`: else the folder is another one, or not mounted."""
        return (self.path / TRIALS).is_dir()

    def mark(self) -> str | None:
        """As `Place.mark`."""
        return mark_of(Folder(self.path))

    def refuse_removal(self) -> None:
        """Raises `OSError` where nothing can be removed: the disk is read-only, or the folder of all trials a link."""
        if self.path.exists() and os.statvfs(self.path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, "is on a disk that is mounted read-only", str(self.path))
        if not self.is_ours(Path(TRIALS)):
            says = "is a link, through which nothing is removed: mount the folder there, or link the data folder itself"
            raise OSError(errno.ELOOP, says, str(self.path / TRIALS))

    def remove(self, path: str) -> None:
        """As `Place.remove`: nothing through a link, and nothing outside."""
        self.refuse_removal()
        if is_safe(path) and self.is_ours(Path(path).parent):
            removed(self.path / path)

    def remove_trial(self, trial_id: int) -> None:
        """As `Place.remove_trial`."""
        self.refuse_removal()
        removed(self.path / TRIALS / str(trial_id))

    def remove_checkpoints(self, trial_id: int, fence: int) -> None:
        """As `Place.remove_checkpoints`."""
        self.refuse_removal()
        for folder in (self.path / TRIALS / str(trial_id)).glob(f"*/{CHECKPOINTS}"):
            if not is_later(folder.parent.name, fence) and self.is_ours(folder.parent.relative_to(self.path)):
                removed(folder)

    def is_ours(self, folder: Path) -> bool:
        """Whether a folder below this one is where it says, without a link on the way."""
        return (self.path / folder).resolve() == self.path.resolve() / folder


class Bucket:
    """An object store as a place."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def open(self, path: str) -> BinaryIO:
        """As `Place.open`; each reading is a request."""
        return StoredFile(self.store, path).open(buffering=self.store.chunk)

    def attempts(self, trial_id: int) -> list[Attempt]:
        """As `Place.attempts`."""
        return attempts(self.store, trial_id)

    def below(self, folder: str) -> dict[str, int]:
        """As `Place.below`."""
        found = {f"{folder}/{name}": size for name, size in self.store.files(folder).items()}
        return {path: size for path, size in found.items() if _is_kept(path)}

    def there(self, paths: Sequence[str]) -> list[str]:
        """As `Place.there`: of many one listing is cheaper than a question each."""
        if len(paths) > _MOST_QUESTIONS:
            listed = self.below(TRIALS)
            return [path for path in paths if path in listed]
        return [path for path in paths if self.store.size(path) is not None]

    def checkpointed(self) -> set[int]:
        """As `Place.checkpointed`."""
        return set(filter(None, (_trial_of(path.split("/")) for path in self.below(TRIALS))))

    def used(self) -> bool:
        """As `Place.used`."""
        return bool(self.store.folders(TRIALS))

    def mark(self) -> str | None:
        """As `Place.mark`."""
        return mark_of(self.store)

    def remove(self, path: str) -> None:
        """As `Place.remove`."""
        if is_safe(path):
            self.store.remove(path)

    def remove_trial(self, trial_id: int) -> None:
        """As `Place.remove_trial`."""
        folder = f"{TRIALS}/{trial_id}"
        self.store.remove(folder)
        if self.store.files(folder):
            raise OSError(errno.EIO, "something of it stays in the store", folder)

    def remove_checkpoints(self, trial_id: int, fence: int) -> None:
        """As `Place.remove_checkpoints`."""
        remove_checkpoints(self.store, trial_id, fence)


def _opens(place: Disk, path: str) -> bool:
    """Whether a file is there and can be read."""
    try:
        place.open(path).close()
    except OSError:
        return False
    return True


def in_checkpoints(path: str) -> bool:
    """Whether a file is in the folder of a trial's checkpoints."""
    parts = path.split("/")
    return len(parts) > TOP and parts[3] == CHECKPOINTS


def attempt_of(path: str) -> str:
    """The folder of the attempt that a trial's file is in."""
    return "/".join(path.split("/")[: TOP - 1])


def _is_kept(path: str) -> bool:
    return is_safe(path) and not path.endswith(_UNFINISHED)


def _trial_of(parts: Sequence[str]) -> int | None:
    """The trial whose checkpoints a path leads to."""
    match parts:
        case [folder, number, attempt, inner, *_] if folder == TRIALS and inner == CHECKPOINTS:
            return int(number) if NUMBER.fullmatch(number) and Attempt.parse(attempt) else None
    return None


def removed(path: Path) -> None:
    """Removes a file or a folder with all in it, where it is there; links are removed, not followed.

    Several may remove the same at once. Raises `OSError` where something of it stays.
    """
    for _ in range(_MOST_TRIES):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except FileNotFoundError:  # of the folder itself, or of a file in it that somebody else took first
            if not os.path.lexists(path):
                return
        else:
            return
    raise OSError(errno.EIO, "something of it stays", str(path))
