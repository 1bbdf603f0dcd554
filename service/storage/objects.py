"""An object store as a store, through pyarrow: S3 and what speaks its language, or any of pyarrow's file systems."""

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from service.storage.store import CHUNK, COPIES, require_inside

_COPYING = ".copying"
"""An object in a folder that is being copied: without it the folder is whole."""


class Objects:
    """A store (`service.storage.store.Store`) over a `pyarrow.fs.FileSystem`, whose paths begin at its root.

    An object appears as a whole, when all of it is there; where its bytes cannot be read to their end it is removed,
    or stays as it was before.
    """

    chunk = 16 * CHUNK
    """Each reading is a request of its own."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def files(self, folder: str) -> dict[str, int]:
        """As `Store.files`."""
        prefix = f"{require_inside(folder)}/"
        found = {info.path.removeprefix(prefix): info.size for info in self._below(folder) if info.is_file}
        return {path: size for path, size in sorted(found.items()) if not path.rpartition("/")[2].startswith(".")}

    def folders(self, folder: str, *, partial: bool = False) -> list[str]:
        """As `Store.folders`."""
        prefix, names, unfinished = f"{require_inside(folder)}/", set(), set()
        for info in self._below(folder):
            name, slash, rest = info.path.removeprefix(prefix).partition("/")
            if slash and info.is_file:
                names.add(name)
                if rest == _COPYING:
                    unfinished.add(name)
        return sorted(names if partial else names - unfinished)

    def size(self, path: str) -> int | None:
        """As `Store.size`."""
        with numbered(path):
            info = self._fs.get_file_info(str(require_inside(path)))
        return info.size if info.is_file else None

    def read(self, path: str, offset: int, count: int) -> bytes:
        """As `Store.read`."""
        with numbered(path), self._fs.open_input_file(str(require_inside(path))) as file:
            size = file.size()
            return bytes(file.read_at(min(count, max(0, size - offset)), offset)) if offset < size else b""

    def write(self, path: str, source: BinaryIO, size: int) -> str:
        """As `Store.write`."""
        name, digest, done = str(require_inside(path)), hashlib.sha256(), 0
        if self.size(path) is not None:
            _require_readable(source, size, path)  # closing a stream replaces what is there, whatever had come
        with numbered(path):
            try:
                with self._output(name) as file:
                    while done < size:
                        piece = source.read(min(CHUNK, size - done))
                        if not piece:
                            break
                        file.write(piece)
                        digest.update(piece)
                        done += len(piece)
            except BaseException:
                self._discard(name, done, size)
                raise
            if done < size or self.size(path) != size:
                self._discard(name, done, size)
                raise OSError(errno.EIO, f"{done} of {size} bytes were written", path)
        return digest.hexdigest()

    def digest(self, path: str) -> str | None:
        """None: an object store does not say it. It checks itself what it sends."""
        return None

    def copy(self, source: str, target: str) -> None:
        """As `Store.copy`."""
        begin, end = str(require_inside(source)), str(require_inside(target))
        with numbered(target):
            if end.rpartition("/")[2] in self.folders(end.rpartition("/")[0]):
                return
            if not self.files(source):
                raise FileNotFoundError(errno.ENOENT, "no such folder", source)
            with self._output(f"{end}/{_COPYING}") as file:
                file.write(b".")
            for _ in range(COPIES):
                if self._copy_files(begin, end):
                    break
            if not self.files(source):  # it went meanwhile: who knows what of it was copied
                self.remove(target)
                raise FileNotFoundError(errno.ENOENT, "it went while it was copied", source)
            self._finish_copy(end)

    def move(self, source: str, target: str) -> None:
        """Moves all that is in a folder, unfinished copies included; one that was cut short is gone on with."""
        begin, end = str(require_inside(source)), str(require_inside(target))
        with numbered(target):
            for info in self._below(source):
                if info.is_file:
                    self._copy_file(info.path, f"{end}/{info.path.removeprefix(f'{begin}/')}")
                    self._fs.delete_file(info.path)
        self.remove(source)

    def make(self, folder: str) -> None:
        """Makes nothing: there are no empty folders."""

    def remove(self, path: str) -> None:
        """As `Store.remove`."""
        name = str(require_inside(path))
        with numbered(path):
            info = self._fs.get_file_info(name)
            if info.is_file:
                self._fs.delete_file(name)
            elif info.type.name == "Directory":
                with suppress(FileNotFoundError):
                    self._fs.delete_dir(name)

    def _below(self, folder: str) -> list[Any]:
        from pyarrow.fs import FileSelector

        with numbered(folder):
            selector = FileSelector(str(require_inside(folder)), allow_not_found=True, recursive=True)
            return list(self._fs.get_file_info(selector))

    def _output(self, name: str) -> Any:
        """A stream that becomes an object; folders are made only where the file system has such."""
        try:
            return self._fs.open_output_stream(name)
        except FileNotFoundError:
            self._fs.create_dir(name.rpartition("/")[0], recursive=True)
            return self._fs.open_output_stream(name)

    def _copy_files(self, begin: str, end: str) -> bool:
        """Copies what is in a folder; whether all of it stayed, as an owner who still lives may delete some.

        What stands beside folders tells of them, so it comes last.
        """
        whole = True
        for path in sorted(self.files(begin), key=lambda path: "/" not in path):
            try:
                self._copy_file(f"{begin}/{path}", f"{end}/{path}")
            except OSError:  # of an object that went, a server says no more
                if self.size(f"{begin}/{path}") is not None:
                    raise
                whole = False
        return whole

    def _copy_file(self, source: str, target: str) -> None:
        try:
            self._fs.copy_file(source, target)
        except FileNotFoundError:
            self._fs.create_dir(target.rpartition("/")[0], recursive=True)
            self._fs.copy_file(source, target)

    def _finish_copy(self, folder: str) -> None:
        self._fs.delete_file(f"{folder}/{_COPYING}")

    def _discard(self, name: str, done: int, size: int) -> None:
        """Removes what closing a stream has made of the bytes that had come, and not what is there from before.

        Of a stream that the server broke off nothing is made. Where all bytes had come what is there is whole, be it
        the new or the old.
        """
        with suppress(OSError):
            if done < size and self._fs.get_file_info(name).size == done:
                self._fs.delete_file(name)


def _require_readable(source: BinaryIO, size: int, path: str) -> None:
    """Raises `OSError` where the next `size` bytes of a file cannot be read, and comes back to where it was."""
    start, done = source.tell(), 0
    while done < size and (piece := source.read(min(CHUNK, size - done))):
        done += len(piece)
    if done < size:
        raise OSError(errno.EIO, f"{done} of {size} bytes can be read", path)
    source.seek(start)


@contextmanager
def numbered(path: str) -> Iterator[None]:
    """Gives errors of a server a number, as it says none: they are of input and output."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EIO, f"the object store: {error}", path) from error
