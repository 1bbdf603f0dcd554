"""The files of an installation as those see them who keep it: which belong to a trial, read and removed.

Everything is named by its path relative to the data folder, as manifests have it. What trials left is in that folder
or in the store that `TTSV_STORAGE` names, or in both where the store was set later; all else is in the folder. In
folders a name that leads out or through a link is as good as absent: what is read goes into a backup, and what is
removed is gone.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol, Self

from service.settings import Settings
from service.storage import Attempt, Folder, Store, StoredFile, is_later, open_storage, remove_checkpoints
from service.storage.attempts import attempts
from ttsv.data.catalog import own_set
from ttsv.results import CHECKPOINTS

SECRET = "key-secret"
"""The file with the secret under which keys are hashed."""
_TRIALS, _DATASETS = "trials", "datasets"
_NUMBER = re.compile(r"\d{1,18}")
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}")
_UNFINISHED = (".tmp", ".partial")
_LONGEST_PATH = 1000
_MOST_PARTS = 32
_CHUNK = 2**20
_TOP = 4
"""Parts of the path of a file that is in an attempt's folder itself."""
_MOST_QUESTIONS = 50
_MOST_TRIES = 1000
_NO_FOLDER = (FileNotFoundError, NotADirectoryError)
"""What a folder that is not there raises: a disk that cannot be read is no empty one."""


@dataclass(frozen=True)
class Checkpoint:
    """A trial's newest whole checkpoint: its files, and how many epochs are done in it."""

    epoch: int
    files: Sequence[str]


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
        case [folder, number, fence, *inner] if folder == _TRIALS:
            return bool(inner and _NUMBER.fullmatch(number) and Attempt.parse(fence))
        case [folder, *_]:
            return folder == _DATASETS
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
        """As `Place.open`: a plain file, with no link on the way to it."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            *parents, name = path.split("/")
            if any(part in ("", ".", "..") for part in (*parents, name)):
                raise FileNotFoundError(errno.ENOENT, "leads out of the data folder", path)
            for part in parents:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            # NONBLOCK: a pipe somebody put there would keep us waiting.
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
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
            with os.scandir(self.path / _TRIALS / str(trial_id)) as entries:
                names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        except _NO_FOLDER:
            return []
        return [attempt for attempt in map(Attempt.parse, names) if attempt is not None]

    def below(self, folder: str, *, deep: bool = True) -> dict[str, int]:
        """As `Place.below`; without what is in folders of the folder, unless `deep`."""
        found: dict[str, int] = {}
        waiting = [folder]
        while waiting:
            here = waiting.pop()
            with contextlib.suppress(*_NO_FOLDER), os.scandir(self.path / here) as entries:
                for entry in entries:
                    path = f"{here}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        waiting += [path] if deep else []
                    elif entry.is_file(follow_symlinks=False) and _is_kept(path):
                        with contextlib.suppress(FileNotFoundError):
                            found[path] = entry.stat(follow_symlinks=False).st_size
        return found

    def there(self, paths: Sequence[str]) -> list[str]:
        """As `Place.there`."""
        return [path for path in paths if _opens(self, path)]

    def checkpointed(self) -> set[int]:
        """As `Place.checkpointed`."""
        folders = (self.path / _TRIALS).glob(f"*/*/{CHECKPOINTS}")
        return set(filter(None, (_trial_of(folder.relative_to(self.path).parts) for folder in folders)))

    def used(self) -> bool:
        """As `Place.used`: else the folder is another one, or not mounted."""
        return (self.path / _TRIALS).is_dir()

    def refuse_removal(self) -> None:
        """Raises `OSError` where nothing can be removed: the disk is read-only, or the folder of all trials a link."""
        if self.path.exists() and os.statvfs(self.path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, "is on a disk that is mounted read-only", str(self.path))
        if not self.is_ours(Path(_TRIALS)):
            says = "is a link, through which nothing is removed: mount the folder there, or link the data folder itself"
            raise OSError(errno.ELOOP, says, str(self.path / _TRIALS))

    def remove(self, path: str) -> None:
        """As `Place.remove`: nothing through a link, and nothing outside."""
        self.refuse_removal()
        if is_safe(path) and self.is_ours(Path(path).parent):
            removed(self.path / path)

    def remove_trial(self, trial_id: int) -> None:
        """As `Place.remove_trial`."""
        self.refuse_removal()
        removed(self.path / _TRIALS / str(trial_id))

    def remove_checkpoints(self, trial_id: int, fence: int) -> None:
        """As `Place.remove_checkpoints`."""
        self.refuse_removal()
        for folder in (self.path / _TRIALS / str(trial_id)).glob(f"*/{CHECKPOINTS}"):
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
            listed = self.below(_TRIALS)
            return [path for path in paths if path in listed]
        return [path for path in paths if self.store.size(path) is not None]

    def checkpointed(self) -> set[int]:
        """As `Place.checkpointed`."""
        return set(filter(None, (_trial_of(path.split("/")) for path in self.below(_TRIALS))))

    def used(self) -> bool:
        """As `Place.used`."""
        return bool(self.store.folders(_TRIALS))

    def remove(self, path: str) -> None:
        """As `Place.remove`."""
        if is_safe(path):
            self.store.remove(path)

    def remove_trial(self, trial_id: int) -> None:
        """As `Place.remove_trial`."""
        folder = f"{_TRIALS}/{trial_id}"
        self.store.remove(folder)
        if self.store.files(folder):
            raise OSError(errno.EIO, "something of it stays in the store", folder)

    def remove_checkpoints(self, trial_id: int, fence: int) -> None:
        """As `Place.remove_checkpoints`."""
        remove_checkpoints(self.store, trial_id, fence)


class DataFolder:
    """The data folder at a path, and the store that keeps the files of trials where there is one."""

    def __init__(self, path: Path, storage: str | None = None) -> None:
        self.path, self._disk = path, Disk(path)
        self.kept: Place | None = None if storage is None else _opened(storage)
        self._places: list[Place] = [self._disk] if self.kept is None else [self._disk, self.kept]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The one of an installation."""
        return cls(settings.data_dir, settings.storage)

    def open(self, path: str) -> BinaryIO:
        """A file for reading. Raises `OSError`."""
        for place in self._places if path.startswith(f"{_TRIALS}/") else [self._disk]:
            with contextlib.suppress(FileNotFoundError):
                return place.open(path)
        raise FileNotFoundError(errno.ENOENT, "no such file", path)

    def leftovers(self, trial_id: int) -> list[str]:
        """What stands in the newest folder of a trial, but for its checkpoints: the log, what plots are of."""
        return [path for path in self._newest(trial_id).paths if not _in_checkpoints(path)]

    def resumable(self, trial_id: int) -> list[str]:
        """What a trial that is not final goes on from but its checkpoint: journal, log, what an attack has found.

        They are to be read after the checkpoint: the journal then has all epochs before it.
        """
        newest = self._newest(trial_id)
        kept = [path for path in newest.paths if len(path.split("/")) == _TOP and path.endswith((".jsonl", ".log"))]
        inner = [path for path in newest.paths if _in_checkpoints(path)]
        return [*(path for path in inner if not _NUMBER.fullmatch(Path(path).stem)), *kept]

    def checkpoint(self, trial_id: int) -> Checkpoint | None:
        """The trial's newest checkpoint whose tensors are those that its record names; None without one.

        Raises `OSError` where none is whole, and one could not be read.
        """
        newest, unread = self._newest(trial_id), list[OSError]()
        records = [path for path in newest.paths if _in_checkpoints(path) and path.endswith(".json")]
        numbered = {int(Path(path).stem): path for path in records if _NUMBER.fullmatch(Path(path).stem)}
        for number in sorted(numbered, reverse=True):
            tensors = numbered[number].removesuffix(".json") + ".safetensors"
            try:
                with newest.place.open(numbered[number]) as file:
                    expected = json.load(file)["tensors_sha256"]
                with newest.place.open(tensors) as file:
                    if copy(file, None, lambda _size: None)[1] == expected:
                        return Checkpoint(number, (tensors, numbered[number]))
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue
            except OSError as error:
                unread.append(error)
        if unread:
            raise unread[0]
        return None

    def data_sets(self, names: Sequence[str]) -> list[str]:
        """The files of the user's own data sets, and what is known of any set: checksums, baselines."""
        found = [path for path in sorted(self._disk.below(_DATASETS, deep=False)) if path.endswith(".json")]
        for kind, name in filter(None, map(own_set, names)):
            place = f"{_DATASETS}/{name}.npz" if kind == "npz" else f"{_DATASETS}/{name}"
            found += [place] if kind == "npz" else sorted(self._disk.below(place))
        return found

    def exists(self, path: str) -> bool:
        """Whether the file is there. Raises `OSError` where it cannot be read."""
        try:
            self.open(path).close()
        except FileNotFoundError:
            return False
        return True

    def there(self, paths: Sequence[str]) -> list[str]:
        """Those of these files of trials that are there. Raises `OSError` where a store does not answer."""
        found = {path for place in self._places for path in place.there(paths)}
        return [path for path in paths if path in found]

    def require(self, path: str) -> None:
        """Raises `OSError` where a file cannot be read, or is not there, and some place has nothing of any trial.

        Then that place is another one, or not mounted. So it does where nothing can be removed.
        """
        for place in self._places:
            if isinstance(place, Disk):
                place.refuse_removal()
        try:
            there = self.exists(path)
        except PermissionError:  # who may remove it need not be allowed to read it
            there = True
        if not there and not all(place.used() for place in self._places):
            says = "no trial left anything here; is the data folder mounted, and the store?"
            raise FileNotFoundError(errno.ENOENT, says, str(self.path))

    def remove(self, path: str) -> None:
        """Removes one file of a trial, where it is there; nothing through a link, and nothing outside."""
        for place in self._places:
            place.remove(path)

    def remove_trial(self, trial_id: int) -> None:
        """Removes the folder of a trial. Raises `OSError` where something of it stays."""
        for place in self._places:
            place.remove_trial(trial_id)

    def remove_experiment(self, experiment_id: int) -> None:
        """Removes what drivers left of an experiment: logs, curves for TensorBoard, Ray's books."""
        logs, books = f"logs/experiment-{experiment_id}-*.log", f"tune/{experiment_id}-*"
        for name in (logs, books, f"tensorboard/{experiment_id}"):
            for path in self.path.glob(name):
                if self._disk.is_ours(path.parent.relative_to(self.path)):
                    removed(path)

    def checkpointed(self) -> list[int]:
        """Trials that have checkpoints, in order."""
        return sorted(set[int]().union(*(place.checkpointed() for place in self._places)))

    def checkpoint_bytes(self, trial_id: int) -> int:
        """Bytes of a trial's checkpoints."""
        found = [place.below(f"{_TRIALS}/{trial_id}") for place in self._places]
        return sum(size for files in found for path, size in files.items() if _in_checkpoints(path))

    def remove_checkpoints(self, trial_id: int, fence: int) -> None:
        """Removes a trial's checkpoints, of every attempt that is not of a later claim."""
        for place in self._places:
            place.remove_checkpoints(trial_id, fence)

    def _newest(self, trial_id: int) -> "_Newest":
        """What the newest attempt left."""
        found = [(attempt, place) for place in reversed(self._places) for attempt in place.attempts(trial_id)]
        if not found:
            return _Newest(self._disk, [])
        newest, place = max(found, key=lambda one: one[0])
        return _Newest(place, sorted(place.below(newest.folder(trial_id))))


@dataclass(frozen=True)
class _Newest:
    """The files of a trial's newest attempt, where they are."""

    place: Place
    paths: Sequence[str]


def _opened(storage: str) -> Place:
    store = open_storage(storage)
    return Disk(store.root) if isinstance(store, Folder) else Bucket(store)


class _Sink(Protocol):
    def write(self, piece: bytes, /) -> object: ...


def copy(
    source: IO[bytes], target: _Sink | None, step: Callable[[int], None], most: int | None = None
) -> tuple[int, str]:
    """Copies a file piece by piece, each told to `step`: its size and SHA-256. Without a target it is only read.

    Raises `ValueError` for more than `most` bytes.
    """
    digest, total = hashlib.sha256(), 0
    while piece := source.read(_CHUNK):
        total += len(piece)
        if most is not None and total > most:
            raise ValueError(f"it has more than the {most} bytes that are said of it")
        digest.update(piece)
        if target is not None:
            target.write(piece)
        step(len(piece))
    return total, digest.hexdigest()


def _opens(place: Disk, path: str) -> bool:
    """Whether a file is there and can be read."""
    try:
        place.open(path).close()
    except OSError:
        return False
    return True


def _in_checkpoints(path: str) -> bool:
    parts = path.split("/")
    return len(parts) > _TOP and parts[3] == CHECKPOINTS


def _is_kept(path: str) -> bool:
    return is_safe(path) and not path.endswith(_UNFINISHED)


def _trial_of(parts: Sequence[str]) -> int | None:
    """The trial whose checkpoints a path leads to."""
    match parts:
        case [folder, number, attempt, inner, *_] if folder == _TRIALS and inner == CHECKPOINTS:
            return int(number) if _NUMBER.fullmatch(number) and Attempt.parse(attempt) else None
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
