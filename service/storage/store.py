"""The interface of everything that keeps files of trials, and what is made of it."""

import errno
import hashlib
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from typing_extensions import Buffer

from ttsv.errors import TrialError

CHUNK = 2**20
"""Bytes that are read or sent at a time."""
TRIES = 3
"""So often a file is copied whose bytes arrive otherwise than they were sent, before that is an error."""

COPIES = 5
"""So often a folder is copied anew of which files went meanwhile; then what is left of it is enough."""


_OF_A_DISK = "ENOSPC", "EDQUOT", "EIO", "EROFS", "ENODEV", "ENXIO", "ENFILE"
_OF_A_SHARE = "ESTALE", "EREMOTEIO", "EKEYEXPIRED", "ENOLCK", "ENOTCONN", "ESHUTDOWN", "ETIMEDOUT", "EHOSTDOWN"
_OF_A_SERVER = "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "ENETDOWN", "ENETUNREACH", "EHOSTUNREACH"
TROUBLE = {getattr(errno, name) for name in _OF_A_DISK + _OF_A_SHARE + _OF_A_SERVER if hasattr(errno, name)}
"""Numbers of errors that say that a disk, or a shared folder of whatever kind, keeps or gives nothing now."""
_REFUSED = {errno.EACCES, errno.EPERM}
_OF_A_TRIAL = re.compile(r"/trials/\d+(/|$)")


def trouble_of(error: BaseException) -> OSError | None:
    """What says that files cannot be kept or read, nobody's fault who meets it: an error, or one of which it came.

    A folder that may not be written is such trouble. An input that may not be read is not: it stays what it is wherever
    it is met.
    """
    told: BaseException | None = error
    explained = False
    while told is not None:
        if isinstance(told, OSError) and (told.errno in TROUBLE or _keeps_out(told, explained)):
            return told
        explained |= isinstance(told, TrialError)  # which takes it for one of the trial's input
        told = told.__cause__ or told.__context__
    return None


def _keeps_out(error: OSError, explained: bool) -> bool:
    """Whether a place lets nothing be written, or its user not read what other attempts at a trial wrote there."""
    if error.errno not in _REFUSED or not isinstance(error.filename, str):
        return False
    path = Path(error.filename)
    if not path.is_absolute():  # refused by ourselves (`require_inside`)
        return False
    if not explained and _OF_A_TRIAL.search(error.filename):
        return True
    there = next(one for one in (path, *path.parents) if os.path.lexists(one))
    return os.access(there, os.R_OK if there == path else os.R_OK | os.X_OK)


class DamagedFileError(OSError):
    """Other bytes than there should be arrive, however often they are read."""


class Store(Protocol):
    """Files by relative paths with slashes. Every method raises `OSError`, and for paths that lead out of it.

    A file is written as a whole or not at all, over one that is there; what lies in a folder without files is unknown.
    """

    chunk: int
    """So many bytes are best read at once."""

    def files(self, folder: str) -> dict[str, int]:
        """The size of every file below a folder, by its path from there; none where there is no such folder."""

    def folders(self, folder: str, *, partial: bool = False) -> list[str]:
        """The names of the folders in a folder; those too, if asked for, that a copy left unfinished."""

    def size(self, path: str) -> int | None:
        """A file's size; None where there is no such file."""

    def read(self, path: str, offset: int, count: int) -> bytes:
        """So many bytes of a file from a place on, fewer at its end. Raises `FileNotFoundError`."""

    def write(self, path: str, source: BinaryIO, size: int) -> str:
        """Keeps the next `size` bytes of `source`, durably, and returns their SHA-256 (hex)."""

    def digest(self, path: str) -> str | None:
        """A file's SHA-256 (hex) where that is known without sending it here; None where it is not."""

    def copy(self, source: str, target: str) -> None:
        """Copies a folder into one that is not there, else does nothing: until it is whole, `folders` omits it.

        Raises `FileNotFoundError` where there is no such folder, or no more.
        """

    def make(self, folder: str) -> None:
        """Makes an empty folder, where the store has such."""

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all in it, if it is there."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a store as `Path` has one: what can be opened."""

    store: Store
    path: str

    def open(self, mode: str = "rb", buffering: int = 64 * 2**10) -> BinaryIO:
        """Its bytes, read as they are asked for, so many at once. Raises `FileNotFoundError`."""
        size = self.store.size(self.path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such file in the store", self.path)
        return io.BufferedReader(_Reader(self.store, self.path, size), buffering)


class _Reader(io.RawIOBase):
    """Reads a file of a store, whose size is fixed when it is opened."""

    def __init__(self, store: Store, path: str, size: int) -> None:
        self._store, self._path, self._size, self._at = store, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer).cast("B")
        count = min(len(into), self._size - self._at)
        if count <= 0:
            return 0
        piece = self._store.read(self._path, self._at, count)
        into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def require_inside(path: str) -> PurePosixPath:
    """A relative path that stays inside. Raises `PermissionError`."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise PermissionError(errno.EACCES, "a path of a store must be relative and stay in it", path)
    return pure


def copy_out(
    store: Store,
    path: str,
    target: Path,
    *,
    sha256: str | None = None,
    resume: bool = False,
    told: Callable[[int], None] = lambda done: None,
) -> str:
    """Copies a file of a store to `target`, durably, whole or not at all; returns its SHA-256 (hex).

    `sha256`: what it must be, else what the store says of it. With `resume`, what an interrupted copy left is gone on
    with. `told` hears how many bytes are here. Raises `DamagedFileError`, and other `OSError`s.
    """
    expected = store.digest(path) if sha256 is None else sha256
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    if not resume:
        part.unlink(missing_ok=True)
    for _ in range(TRIES):
        try:
            with part.open("ab") as file:
                while piece := store.read(path, file.tell(), store.chunk):
                    file.write(piece)
                    told(file.tell())
                file.flush()
                os.fsync(file.fileno())
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if expected is None or found == expected:
                part.replace(target)
                sync_folder(target.parent)
                return found
        except BaseException:
            if not resume:
                part.unlink(missing_ok=True)
            raise
        part.unlink()
    raise DamagedFileError(errno.EIO, f"its SHA-256 is {found}, and must be {expected}", path)


def sync_folder(folder: Path) -> None:
    """Has a folder's list of files survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
