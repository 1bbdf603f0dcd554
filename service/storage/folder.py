"""A folder as a store: of this machine, or one that several machines share."""

import errno
import hashlib
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import BinaryIO

from service.storage.store import CHUNK, COPIES, require_inside, sync_folder
from ttsv.runtime.faults import fault

PARTS = "incoming"
"""Folder, in a store's, of files that are being written."""
PARTIAL = ".partial"
"""The end of the names of folders that are being copied."""
_GONE = f"[Errno {errno.ENOENT}]"
_ABANDONED_SECONDS = 6 * 3600.0


class Folder:
    """A store (`service.storage.store.Store`) in a folder, which is made when something is written.

    A file may come in parts, over any time and from any process: `write_part` as often as it takes, then `finish`.
    """

    chunk = CHUNK

    def __init__(self, root: Path) -> None:
        self.root = root

    def files(self, folder: str) -> dict[str, int]:
        """As `Store.files`; temporary files are left out."""
        place, found = self.path(folder), {}
        for path in sorted(place.rglob("*")):
            try:
                if path.is_file() and not path.name.startswith("."):
                    found[path.relative_to(place).as_posix()] = path.stat().st_size
            except FileNotFoundError:  # removed meanwhile
                continue
        return found

    def folders(self, folder: str, *, partial: bool = False) -> list[str]:
        """As `Store.folders`."""
        try:
            names = [entry.name for entry in self.path(folder).iterdir() if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if partial or not name.endswith(PARTIAL))

    def size(self, path: str) -> int | None:
        """As `Store.size`."""
        place = self.path(path)
        try:
            return place.stat().st_size if place.is_file() else None
        except FileNotFoundError:
            return None

    def read(self, path: str, offset: int, count: int) -> bytes:
        """As `Store.read`."""
        with self.path(path).open("rb") as file:
            file.seek(offset)
            return file.read(count)

    def write(self, path: str, source: BinaryIO, size: int) -> str:
        """As `Store.write`."""
        part, digest, done = secrets.token_hex(8), hashlib.sha256(), 0
        try:
            while done < size or not done:
                piece = source.read(min(CHUNK, size - done))
                if not piece and done < size:
                    raise OSError(errno.EIO, f"it ended after {done} of {size} bytes", path)
                self.write_part(part, done, piece)
                digest.update(piece)
                done += len(piece)
                if not size:
                    break
            self.finish(part, path, size, digest.hexdigest())
        finally:
            self.drop(part)
        return digest.hexdigest()

    def write_part(self, part: str, offset: int, piece: bytes) -> None:
        """Writes a piece of a file that is known as `part` until it is whole; again, it changes nothing."""
        place = self._part(part)
        place.parent.mkdir(parents=True, exist_ok=True)
        # Not truncated: pieces may arrive twice, and out of their order.
        with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.seek(offset)
            file.write(piece)

    def finish(self, part: str, path: str, size: int, sha256: str) -> None:
        """Gives a file its name, durably. Raises `OSError` (EIO) where it is not what was to be written.

        Again, it changes nothing.
        """
        place, target = self._part(part), self.path(path)
        try:
            with place.open("rb+") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if file.tell() != size or found != sha256:
                    raise OSError(errno.EIO, f"{file.tell()} of {size} bytes arrived, or others than were sent", path)
                os.fsync(file.fileno())
            target.parent.mkdir(parents=True, exist_ok=True)
            _move(place, target)
        except FileNotFoundError:
            if self.size(path) != size or self.digest(path) != sha256:  # else it was done, and the answer lost
                raise
        sync_folder(target.parent)

    def drop(self, part: str) -> None:
        """Removes a file that shall not be written after all."""
        self._part(part).unlink(missing_ok=True)

    def drop_abandoned(self) -> None:
        """Removes what writers left that died long ago."""
        parts = self.root / PARTS
        for part in parts.iterdir() if parts.is_dir() else ():
            try:
                if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                    part.unlink()
            except FileNotFoundError:
                continue

    def digest(self, path: str) -> str | None:
        """As `Store.digest`."""
        with self.path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def copy(self, source: str, target: str) -> None:
        """As `Store.copy`."""
        place = self.path(target)
        # Under a name of its own first: a copy that a kill cuts short is never taken for a whole one, and two that are
        # made at once, as an answer was late, do not meet.
        partial = place.with_name(f"{place.name}.{secrets.token_hex(4)}{PARTIAL}")
        try:
            for _ in range(COPIES):
                if _copy_tree(self.path(source), partial):
                    break
                shutil.rmtree(partial)
            else:
                _copy_tree(self.path(source), partial)
            for parent, _, _ in os.walk(partial):
                sync_folder(Path(parent))
            fault("before_rename")
            partial.rename(place)
            sync_folder(place.parent)  # what was copied may go now
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if not place.is_dir():
                raise

    def make(self, folder: str) -> None:
        """As `Store.make`."""
        self.path(folder).mkdir(parents=True, exist_ok=True)

    def remove(self, path: str) -> None:
        """As `Store.remove`; what the disk will not let go stays."""
        place = self.path(path)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)

    def path(self, path: str) -> Path:
        """Where a file is."""
        return self.root / require_inside(path)

    def _part(self, part: str) -> Path:
        if not part.isalnum():
            raise PermissionError(errno.EACCES, "no name of a part", part)
        return self.root / PARTS / part


def _copy_tree(source: Path, target: Path) -> bool:
    """Copies a folder; whether all of it stayed where it was meanwhile, as an owner who still lives may delete files.

    Raises `FileNotFoundError` where it is gone itself. Files beside its folders come last: they tell of what is in
    these (a trial's epochs of its checkpoints), and must not be older than it.
    """
    whole, refused = True, list[OSError]()

    def copy(source: str, target: str) -> None:
        nonlocal whole
        try:
            shutil.copy2(source, target)
            with Path(target).open("rb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            whole = False
        except OSError as error:
            refused.append(error)
            raise

    def files(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder) == source and not (source / name).is_dir()]

    try:
        try:
            shutil.copytree(source, target, ignore=files, copy_function=copy)
        except shutil.Error as error:
            if refused or not all(_GONE in reason for _, _, reason in error.args[0]):
                raise
            whole = False  # folders in it went
        for path in source.iterdir():
            if not path.is_dir():
                copy(str(path), str(target / path.name))
    except OSError:
        if refused:  # the tree's own error has no number, by which a full disk is told from a trial's fault
            raise refused[0] from None
        if not source.is_dir():
            raise FileNotFoundError(errno.ENOENT, "it went while it was copied", str(source)) from None
        raise
    return whole


def _move(place: Path, target: Path) -> None:
    """Renames a file, also where its folder is a link to another disk."""
    try:
        place.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = target.with_name(f".{target.name}.{place.name}")
        try:
            shutil.copyfile(place, beside)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
        place.unlink()
