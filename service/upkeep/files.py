"""The data folder as those see it who keep it: which files belong to a trial, read and removed without following links.

Everything is named by its path relative to the data folder, as manifests have it. A name that leads out of the folder
or through a link is as good as absent: what is read goes into a backup, and what is removed is gone.
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
from typing import IO, BinaryIO, Self

from service.errors import UserError
from service.settings import Settings
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
            return bool(inner and _NUMBER.fullmatch(number) and _NUMBER.fullmatch(fence))
        case [folder, *_]:
            return folder == _DATASETS
    return False


class DataFolder:
    """The data folder at a path, which itself may be a link."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The one of an installation. Raises `UserError` where files of trials are kept elsewhere."""
        if settings.storage is not None:
            raise UserError(
                f"TTSV_STORAGE = {settings.storage!r}: backups, deletion and retention know the files of a data folder "
                "alone; use what that store has for it, and leave rows as they are"
            )
        return cls(settings.data_dir)

    def open(self, path: str) -> BinaryIO:
        """A plain file for reading; raises `FileNotFoundError` where there is none, or a link on the way to it."""
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

    def leftovers(self, trial_id: int) -> list[str]:
        """What stands in the newest folder of a trial, but for its checkpoints: the log, what plots are of."""
        folder = self._newest(trial_id)
        return [] if folder is None else [path for path in self._below(folder) if not _in_checkpoints(path)]

    def resumable(self, trial_id: int) -> list[str]:
        """What a trial that is not final goes on from but its checkpoint: journal, log, what an attack has found.

        They are to be read after the checkpoint: the journal then has all epochs before it.
        """
        folder = self._newest(trial_id)
        if folder is None:
            return []
        names = [path for path in self._below(folder) if "/" not in path.removeprefix(f"{folder}/")]
        kept = [path for path in names if path.endswith((".jsonl", ".log"))]
        inner = self._below(f"{folder}/{CHECKPOINTS}")
        return [*(path for path in inner if not _NUMBER.fullmatch(Path(path).stem)), *kept]

    def checkpoint(self, trial_id: int) -> Checkpoint | None:
        """The trial's newest checkpoint whose tensors are those that its record names; None without one."""
        folder = self._newest(trial_id)
        if folder is None:
            return None
        records = [path for path in self._below(f"{folder}/{CHECKPOINTS}") if path.endswith(".json")]
        numbered = {int(Path(path).stem): path for path in records if _NUMBER.fullmatch(Path(path).stem)}
        for number in sorted(numbered, reverse=True):
            tensors = numbered[number].removesuffix(".json") + ".safetensors"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                with self.open(numbered[number]) as file:
                    expected = json.load(file)["tensors_sha256"]
                with self.open(tensors) as file:
                    if copy(file, None, lambda _size: None)[1] == expected:
                        return Checkpoint(number, (tensors, numbered[number]))
        return None

    def data_sets(self, names: Sequence[str]) -> list[str]:
        """The files of the user's own data sets, and what is known of any set: checksums, baselines."""
        found = [path for path in self._below(_DATASETS, deep=False) if path.endswith(".json")]
        for kind, name in filter(None, map(own_set, names)):
            place = f"{_DATASETS}/{name}.npz" if kind == "npz" else f"{_DATASETS}/{name}"
            found += [place] if kind == "npz" else self._below(place)
        return found

    def exists(self, path: str) -> bool:
        """Whether the file is there."""
        try:
            self.open(path).close()
        except OSError:
            return False
        return True

    def require(self) -> None:
        """Raises `OSError` where no trial has a folder: then the data folder is another one, or not mounted."""
        if not (self.path / _TRIALS).is_dir():
            says = "no trial left anything here; is the data folder mounted?"
            raise FileNotFoundError(errno.ENOENT, says, str(self.path))

    def remove(self, path: str) -> None:
        """Removes one file, where it is there; nothing through a link, and nothing outside."""
        if is_safe(path) and self._is_ours(Path(path).parent):
            removed(self.path / path)

    def remove_trial(self, trial_id: int) -> None:
        """Removes the folder of a trial. Raises `OSError` where something of it stays."""
        if self._is_ours(Path(_TRIALS)):
            removed(self.path / _TRIALS / str(trial_id))

    def remove_experiment(self, experiment_id: int) -> None:
        """Removes what drivers left of an experiment: logs, curves for TensorBoard, Ray's books."""
        logs, books = f"logs/experiment-{experiment_id}-*.log", f"tune/{experiment_id}-*"
        for name in (logs, books, f"tensorboard/{experiment_id}"):
            for path in self.path.glob(name):
                if self._is_ours(path.parent.relative_to(self.path)):
                    removed(path)

    def checkpointed(self) -> list[int]:
        """Trials that have checkpoints, in order."""
        found = []
        for folder in (self.path / _TRIALS).glob(f"*/*/{CHECKPOINTS}"):
            number = folder.parent.parent.name
            if _NUMBER.fullmatch(number) and _NUMBER.fullmatch(folder.parent.name):
                found.append(int(number))
        return sorted(set(found))

    def checkpoint_bytes(self, trial_id: int) -> int:
        """Bytes of a trial's checkpoints."""
        total = 0
        for path in self._below(f"{_TRIALS}/{trial_id}"):
            if _in_checkpoints(path):
                with contextlib.suppress(OSError):
                    total += (self.path / path).lstat().st_size
        return total

    def remove_checkpoints(self, trial_id: int) -> None:
        """Removes a trial's checkpoints, of every fence."""
        for folder in (self.path / _TRIALS / str(trial_id)).glob(f"*/{CHECKPOINTS}"):
            if self._is_ours(folder.parent.relative_to(self.path)):
                removed(folder)

    def _is_ours(self, folder: Path) -> bool:
        """Whether a folder below the data folder is where it says, without a link on the way."""
        return (self.path / folder).resolve() == self.path.resolve() / folder

    def _newest(self, trial_id: int) -> str | None:
        """The folder of the trial's largest fence."""
        parent = f"{_TRIALS}/{trial_id}"
        try:
            with os.scandir(self.path / parent) as entries:
                fences = [
                    int(one.name)
                    for one in entries
                    if _NUMBER.fullmatch(one.name) and one.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return None
        return f"{parent}/{max(fences)}" if fences else None

    def _below(self, folder: str, *, deep: bool = True) -> list[str]:
        """Every plain file in a folder, by name; what is being written still is left out."""
        found: list[str] = []
        waiting = [folder]
        while waiting:
            here = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(self.path / here) as entries:
                for entry in entries:
                    path = f"{here}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        waiting += [path] if deep else []
                    elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(_UNFINISHED):
                        found.append(path)
        return sorted(path for path in found if is_safe(path))


def copy(
    source: IO[bytes], target: IO[bytes] | None, step: Callable[[int], None], most: int | None = None
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


def _in_checkpoints(path: str) -> bool:
    parts = path.split("/")
    return len(parts) > 4 and parts[3] == CHECKPOINTS


def removed(path: Path) -> None:
    """Removes a file or a folder with all in it, where it is there; links are removed, not followed."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
