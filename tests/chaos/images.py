"""The data set that trials of chaos read, one of the user's own, and what becomes of it when a disk loses a bit.

It lies in the data folder as any other, is read by the code that trainings read theirs with, and every link of a
trial's chain is made of what the process has in its memory of it.
"""

import contextlib
import hashlib
import json
import random
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ttsv.data import shared
from ttsv.data.record import write_json
from ttsv.errors import DataError

if TYPE_CHECKING:
    from ttsv.data.loading import Dataset

NAME = "npz:chaos"
SOURCE, RECORD, NOTE = "chaos.npz", "npz-chaos.sha256.json", "cache/npz-chaos.json"
"""Its files in `datasets`: what the user has put there, what it was at its first use, what its copy was made of."""
HEAD = "the head"


def make(data_dir: Path) -> None:
    """Puts the set into a data folder, and has it used there once: from then on it may not change."""
    folder = data_dir / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 5
    np.savez(folder / SOURCE, x_train=images[:50], y_train=labels[:50], x_test=images[50:], y_test=labels[50:])
    shared.open_shared(NAME, folder)


def seen(data: "Dataset") -> str:
    """SHA-256 (hex) of all images and labels as a process has them, part by part."""
    digest = hashlib.sha256()
    for part in (data.train, data.validation, data.test):
        for tensor in part:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@cache
def right(name: str) -> str:
    """What is seen of a data set of this name that no mishap has met."""
    from ttsv.data import load_dataset  # brings torch

    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        return seen(load_dataset(name, Path(folder)))


@dataclass
class Spoilt:
    """A file of the set in which a bit was changed, in `folder`, which is the head's or of a node by itself (`where`).

    `dated`: it has the times of the change, as if somebody had written it; else it seems as old as it was, as after a
    fault of the disk.
    """

    where: str
    folder: Path
    file: str
    was: bytes
    wrong: bytes
    dated: bool

    def __str__(self) -> str:
        return f"{self.file} of {self.where}, {'with new times' if self.dated else 'its times as they were'}"

    @property
    def for_a_person(self) -> bool:
        """Whether nobody but a person can put it right: of what the user made, and its record, the head has no other.

        A node by itself has its files from the head.
        """
        return self.where == HEAD and self.file in (SOURCE, RECORD)

    def stands(self) -> bool | None:
        """Whether the file still is as wrong as it was made; None where it is gone with its node."""
        try:
            return (self.folder / self.file).read_bytes() == self.wrong
        except FileNotFoundError:
            return None if not self.folder.exists() else False
        except OSError:
            return None

    def put_right(self) -> bool:
        """Writes what was, as a person would from a backup; whether it could be written."""
        with contextlib.suppress(OSError, DataError), shared.locked(NAME, self.folder):
            _replace(self.folder / self.file, self.was)
            return True
        return False


def spoil(where: str, folder: Path, choose: random.Random, standing: Collection[Spoilt] = ()) -> Spoilt | None:
    """Changes a bit of a file of the set in a `datasets`; None where it is not there yet, or the disk takes nothing.

    None of those that are wrong as it is (`standing`).

    Files are replaced and not written into: who has the old one mapped goes on with it, as with pages in memory when
    the disk under them fails.
    """
    with contextlib.suppress(OSError, DataError):
        if (folder / NOTE).exists():
            with shared.locked(NAME, folder):
                return _spoil(where, folder, choose, {one.file for one in standing if one.folder == folder})
    return None


def _spoil(where: str, folder: Path, choose: random.Random, but: set[str]) -> Spoilt | None:
    note = _read_note(folder)
    if note is None:
        return None
    if where == HEAD and {SOURCE, RECORD} & but:  # trials that are refused either say much the same
        but = but | {SOURCE, RECORD}
    files = [file for file in (SOURCE, *note["arrays"], NOTE, *([RECORD] if where == HEAD else [])) if file not in but]
    if not files:
        return None
    file = choose.choice(files)
    was = (folder / file).read_bytes()
    wrong = bytearray(was)
    wrong[choose.randrange(len(wrong))] ^= 1 << choose.randrange(8)
    dated = file not in note["stamps"] or choose.random() < 0.5
    _replace(folder / file, bytes(wrong))
    if not dated:
        dated = True  # unless the disk has room for the note, too
        with contextlib.suppress(OSError):
            keep_times(folder, file)
            dated = False
    return Spoilt(where, folder, file, was, bytes(wrong), dated)


def keep_times(folder: Path, file: str) -> None:
    """Has a file seem as old as it was to who compares its times with those in the note: no program can set them."""
    note, state = _read_note(folder), (folder / file).stat()
    assert note is not None
    note["stamps"][file] = [state.st_size, state.st_mtime_ns, state.st_ctime_ns]
    write_json(folder / NOTE, shared.sealed(note))


def _read_note(folder: Path) -> dict[str, Any] | None:
    """What the note says; None where it is not as it was written."""
    try:
        sealed: dict[str, Any] = json.loads((folder / NOTE).read_bytes())
        note = {entry: value for entry, value in sealed.items() if entry != "note_sha256"}
    except (ValueError, AttributeError):
        return None
    return note if shared.sealed(note) == sealed else None


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.chaos")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
