"""The files of an installation as those see them who keep it: which belong to a trial, read and removed.

Everything is named by its path relative to the data folder, as manifests have it. What trials left is in that folder
or in the store that `TTSV_STORAGE` names, or in both where the store was set later; all else is in the folder: see
`places`.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol, Self

from service.errors import UserError
from service.settings import Settings
from service.storage import Folder, open_storage
from service.upkeep.places import (
    DATASETS,
    NUMBER,
    TOP,
    TRIALS,
    Bucket,
    Disk,
    Place,
    in_checkpoints,
    removed,
)
from ttsv.data.catalog import own_set
from ttsv.errors import DataError

_CHUNK = 2**20
_OF_EXPERIMENTS = {
    "logs": re.compile(r"experiment-(\d{1,18})-.*\.log"),
    "tune": re.compile(r"(\d{1,18})-.*"),
    "tensorboard": re.compile(r"(\d{1,18})"),
}
"""What drivers leave in folders of the data folder, by the number of the experiment."""


@dataclass(frozen=True)
class Checkpoint:
    """A trial's newest whole checkpoint: its files, and how many epochs are done in it."""

    epoch: int
    files: Sequence[str]


class DataFolder:
    """The data folder at a path, and the store that keeps the files of trials where there is one."""

    def __init__(self, path: Path, storage: str | None = None) -> None:
        self.path, self._disk = path, Disk(path)
        self.kept: Place | None = None if storage is None else _opened(storage)
        self._places: list[Place] = [self._disk] if self.kept is None else [self._disk, self.kept]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The one of an installation. Raises `UserError` where `TTSV_STORAGE` names no store that can be."""
        return cls(settings.data_dir, settings.storage)

    def open(self, path: str) -> BinaryIO:
        """A file for reading. Raises `OSError`."""
        for place in self._places if path.startswith(f"{TRIALS}/") else [self._disk]:
            with contextlib.suppress(FileNotFoundError):
                return place.open(path)
        raise FileNotFoundError(errno.ENOENT, "no such file", path)

    def leftovers(self, trial_id: int) -> list[str]:
        """What stands in the newest folder of a trial, but for its checkpoints: the log, what plots are of."""
        return [path for path in self._newest(trial_id).paths if not in_checkpoints(path)]

    def resumable(self, trial_id: int) -> list[str]:
        """What a trial that is not final goes on from but its checkpoint: journal, log, what an attack has found.

        They are to be read after the checkpoint: the journal then has all epochs before it.
        """
        newest = self._newest(trial_id)
        kept = [path for path in newest.paths if len(path.split("/")) == TOP and path.endswith((".jsonl", ".log"))]
        inner = [path for path in newest.paths if in_checkpoints(path)]
        return [*(path for path in inner if not NUMBER.fullmatch(Path(path).stem)), *kept]

    def checkpoint(self, trial_id: int) -> Checkpoint | None:
        """The trial's newest checkpoint whose tensors are those that its record names; None without one.

        Raises `OSError` where none is whole, and one could not be read.
        """
        newest, unread = self._newest(trial_id), list[OSError]()
        records = [path for path in newest.paths if in_checkpoints(path) and path.endswith(".json")]
        numbered = {int(Path(path).stem): path for path in records if NUMBER.fullmatch(Path(path).stem)}
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

    def data_sets(self, names: Sequence[str]) -> dict[str, bool]:
        """The files of the user's own data sets of these, and what is known of any set: checksums, baselines.

        Each with whether it is sure to have been there, as it was at the first use of its set.
        """
        known = sorted(path for path in self._disk.below(DATASETS, deep=False) if path.endswith(".json"))
        found = dict.fromkeys(known, False)
        for name in names:
            if (own := own_set(name)) is None:
                continue
            there = f"{DATASETS}/{own[1]}"
            files = [f"{there}.npz"] if own[0] == "npz" else sorted(self._disk.below(there))
            found |= dict.fromkeys(files, False) | dict.fromkeys(self._used(name), True)
        return found

    def _used(self, name: str) -> list[str]:
        """The files that a data set had at its first use; none where that is not known."""
        from ttsv.data.record import ContentRecord

        try:
            record = ContentRecord.find(name, self.path / DATASETS)
        except DataError:  # `ttsv doctor` says so
            return []
        return [] if record is None else [f"{DATASETS}/{path}" for path in record.files]

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

    def mark(self) -> str | None:
        """The word of the place that keeps the files of trials: the store, else the data folder. Raises `OSError`."""
        return (self.kept or self._disk).mark()

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

    def experiments(self) -> dict[int, float]:
        """Experiments of which drivers left something here -> when that changed last, in seconds since 1970."""
        found: dict[int, float] = {}
        for folder, name in _OF_EXPERIMENTS.items():
            _note_changes(self.path / folder, name, found)
        return found

    def trials(self) -> dict[int, float]:
        """Trials with a folder here, whatever a store has -> when it changed last, in seconds since 1970."""
        found: dict[int, float] = {}
        _note_changes(self.path / TRIALS, NUMBER, found)
        return found

    def checkpointed(self) -> list[int]:
        """Trials that have checkpoints, in order."""
        return sorted(set[int]().union(*(place.checkpointed() for place in self._places)))

    def checkpoint_bytes(self, trial_id: int) -> int:
        """Bytes of a trial's checkpoints."""
        found = [place.below(f"{TRIALS}/{trial_id}") for place in self._places]
        return sum(size for files in found for path, size in files.items() if in_checkpoints(path))

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


def _note_changes(folder: Path, name: re.Pattern[str], found: dict[int, float]) -> None:
    """Notes by number when the latest of a folder's entries of these names changed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if (match := name.fullmatch(entry.name)) is not None:
                number = int(match[match.lastindex or 0])
                with contextlib.suppress(FileNotFoundError):
                    changed = entry.stat(follow_symlinks=False).st_mtime
                    found[number] = max(changed, found.get(number, 0.0))


def _opened(storage: str) -> Place:
    try:
        store = open_storage(storage)
    except ValueError as error:  # what only its library can read of the address
        raise UserError(str(error)) from error
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
