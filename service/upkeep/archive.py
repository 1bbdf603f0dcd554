"""A backup's file: a zip of rows and files, and a manifest with the size and the SHA-256 of everything in it.

What the manifest does not name is not there: a file that could not be copied whole stays in the zip, unnamed. It is
written as `FILE.partial`, which no reader takes, and gets its name when all of it is on disk.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated, BinaryIO, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import UserError
from service.storage.store import sync_folder
from service.upkeep.files import copy
from service.upkeep.places import is_safe
from service.upkeep.rows import LONGEST_ROW, CopiedTable

PARTIAL = ".partial"
_MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 2**30
_WRONG = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError)
"""What the package zipfile raises over bytes that are no sound zip."""

Step = Callable[[int], None]
"""Is told of so many bytes that are done."""


def _safe(path: str) -> str:
    if not is_safe(path):
        raise ValueError("is no path of the data folder")
    return path


def _moment(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("has no time zone")
    return text


_Name = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TableEntry(_Strict):
    """A table's rows, one a line."""

    name: _Name
    columns: list[_Name]
    rows: _Count
    size: _Count
    sha256: _Sha256


class FileEntry(_Strict):
    """A file of the data folder."""

    path: Annotated[str, AfterValidator(_safe)]
    size: _Count
    sha256: _Sha256


class Missing(_Strict):
    """A file that the database names and the backup has not, and why; `expected` where it was taken away meanwhile."""

    path: str
    reason: str
    expected: bool


class Manifest(_Strict):
    """What a backup has: rows of a database at a revision, as they were at `made_at`, and files.

    `counters`: the largest ids ever given.
    """

    format: Literal["ttsv backup"] = "ttsv backup"
    version: Literal[1] = 1
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    made_at: Annotated[str, AfterValidator(_moment)]
    package: str
    database: str
    revision: Annotated[str, Field(pattern=r"^\w{1,32}$")]
    counters: dict[_Name, _Count]
    tables: list[TableEntry]
    files: list[FileEntry]
    missing: list[Missing]

    @model_validator(mode="after")
    def _each_once(self) -> "Manifest":
        for names in ([one.name for one in self.tables], [one.path for one in self.files]):
            if len(set(names)) != len(names):
                raise ValueError("a table or a file is named twice")
        return self

    @property
    def size(self) -> int:
        """Bytes of everything, unpacked."""
        return sum(one.size for one in self.tables) + sum(one.size for one in self.files)


class WritingError(OSError):
    """The backup itself cannot be written, such as for want of room on its disk."""


class _Member:
    """A file in the zip, whose errors are told from those of what is copied into it."""

    def __init__(self, member: IO[bytes]) -> None:
        self._member = member

    def write(self, piece: bytes) -> int:
        with _writing():
            return self._member.write(piece)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WritingError(*error.args) from error


class Writer:
    """Writes a backup: tables and files, then the manifest."""

    def __init__(self, file: BinaryIO) -> None:
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # after `finish` there is nothing to do
            self._zip.close()

    def table(self, copied: CopiedTable, lines: Iterable[bytes], step: Step) -> TableEntry:
        """Adds a table's rows."""
        digest, size, count = hashlib.sha256(), 0, 0
        with self._zip.open(_info(f"tables/{copied.name}.jsonl", packed=True), "w", force_zip64=True) as member:
            for line in lines:
                if len(line) > LONGEST_ROW:
                    raise UserError(
                        f"row {count + 1} of table {copied.name} has {len(line)} bytes, too many for a backup"
                    )
                digest.update(line)
                member.write(line)
                size += len(line)
                count += 1
                step(len(line))
        return TableEntry(
            name=copied.name, columns=list(copied.columns), rows=count, size=size, sha256=digest.hexdigest()
        )

    def file(self, path: str, source: BinaryIO, step: Step) -> FileEntry:
        """Adds a file as it is found. Raises `OSError`: `WritingError` where it is the backup that fails."""
        with _writing():
            member = self._zip.open(_info(f"files/{path}"), "w", force_zip64=True)
        try:
            size, sha256 = copy(source, _Member(member), step)
        finally:
            with _writing():
                member.close()
        return FileEntry(path=path, size=size, sha256=sha256)

    def finish(self, manifest: Manifest) -> None:
        """Adds the manifest and ends the zip. Raises `UserError` for more files than a reader would take."""
        text = manifest.model_dump_json().encode()
        if len(text) > _LARGEST_MANIFEST:
            raise UserError(f"one backup cannot name {len(manifest.files)} files: delete old experiments, or prune")
        self._zip.writestr(_info(_MANIFEST, packed=True), text)
        self._zip.close()


def _info(name: str, *, packed: bool = False) -> zipfile.ZipInfo:
    found = zipfile.ZipInfo(name)
    found.compress_type = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    found.external_attr = 0o600 << 16
    return found


@contextmanager
def writing(target: Path) -> Iterator[BinaryIO]:
    """The file that becomes `target` at the block's end, readable by us alone; where the block fails nothing is left.

    Raises `UserError` where `target` is there already, somebody else is writing it, or its disk is full.
    """
    try:
        with _becoming(target) as file:
            yield file
    except OSError as error:  # also of closing the file
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"FILE {target}: its disk is full; free room there, or name a file on another") from error


@contextmanager
def _becoming(target: Path) -> Iterator[BinaryIO]:
    """The same, but for the words of a full disk."""
    if target.name.endswith(PARTIAL):
        raise UserError(f"FILE {target}: a name that ends with {PARTIAL} is that of a backup that is not done")
    _refuse_present(target)
    partial = target.with_name(target.name + PARTIAL)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w+b") as file:
        _lock_alone(file, partial, target)
        try:
            os.fchmod(descriptor, 0o600)
            file.truncate()
            yield file
            file.flush()
            os.fsync(descriptor)
            _refuse_present(target)
            partial.rename(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync_folder(target.parent)


def _lock_alone(file: BinaryIO, partial: Path, target: Path) -> None:
    """Locks the unfinished file; raises `UserError` where another process writes it, or has just finished it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # What was renamed between our opening and our lock is somebody's backup now.
        same = partial.lstat().st_ino == os.fstat(file.fileno()).st_ino
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:
        raise UserError(f"FILE {target}: another backup writes {partial.name} now; wait for it")


def _refuse_present(target: Path) -> None:
    if os.path.lexists(target):
        raise UserError(f"FILE {target} exists: name another file, or remove it first")
    if not target.parent.is_dir():
        raise UserError(f"FILE {target}: there is no folder {target.parent}; make it first")


class Reader:
    """A backup that is read; every error of its bytes is a `UserError` that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.name.endswith(PARTIAL):
            raise UserError(f"FILE {path} is a backup that was never finished: take one without {PARTIAL}")
        with self._soundly():
            self._zip = zipfile.ZipFile(path)
            try:
                self.manifest = self._read_manifest()
            except BaseException:
                self._zip.close()
                raise

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def verify(self, step: Step) -> None:
        """Reads everything that the manifest names, and compares sizes and checksums."""
        for table in self.manifest.tables:
            with self._soundly(), self._member(f"tables/{table.name}.jsonl", table.size) as source:
                self._compare(source, None, table, f"table {table.name}", step)
        for file in self.manifest.files:
            with self._soundly(), self._member(f"files/{file.path}", file.size) as source:
                self._compare(source, None, file, file.path, step)

    def lines(self, table: TableEntry, step: Step) -> Iterator[bytes]:
        """The lines of a table, compared with its checksum once they are all read."""
        digest = hashlib.sha256()
        with self._soundly(), self._member(f"tables/{table.name}.jsonl", table.size) as source:
            while line := source.readline(LONGEST_ROW + 1):
                if len(line) > LONGEST_ROW:
                    raise ValueError(f"a row of table {table.name} is longer than {LONGEST_ROW} bytes")
                digest.update(line)
                step(len(line))
                yield line
            if digest.hexdigest() != table.sha256:
                raise ValueError(f"table {table.name} is not what its checksum says")

    def extract(self, file: FileEntry, target: Path, step: Step) -> None:
        """Writes a file, which must not be there, and compares its checksum."""
        mode = 0o600 if "/" not in file.path else 0o666
        with self._soundly(), self._member(f"files/{file.path}", file.size) as source:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            with os.fdopen(descriptor, "wb") as out:
                self._compare(source, out, file, file.path, step)

    def _compare(
        self, source: IO[bytes], out: IO[bytes] | None, entry: TableEntry | FileEntry, name: str, step: Step
    ) -> None:
        if copy(source, out, step, entry.size) != (entry.size, entry.sha256):
            raise ValueError(f"{name} is not what its checksum says")

    def _member(self, name: str, size: int) -> IO[bytes]:
        try:
            found = self._zip.getinfo(name)
        except KeyError:
            raise ValueError(f"its manifest names {name}, which is not in it") from None
        if found.file_size != size:
            raise ValueError(f"{name} has {found.file_size} bytes, its manifest says {size}")
        return self._zip.open(found)

    def _read_manifest(self) -> Manifest:
        try:
            found = self._zip.getinfo(_MANIFEST)
        except KeyError:
            raise ValueError("it has no manifest") from None
        if found.file_size > _LARGEST_MANIFEST:
            raise ValueError("its manifest is too large")
        text = self._zip.read(found)
        try:
            return Manifest.model_validate_json(text)
        except ValidationError as error:
            newer = _version_of(text)
            if newer is not None and newer > 1:
                raise ValueError(f"it has version {newer} of the format: restore it with a newer ttsv") from None
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"its manifest is damaged: {where}: {first['msg']}") from None

    @contextmanager
    def _soundly(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (*_WRONG, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:  # to seek a place before the file's begin
                raise
            raise UserError(f"FILE {self._path} is no whole backup: {error}; nothing was changed") from error


def _version_of(text: bytes) -> int | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    version = found.get("version") if isinstance(found, dict) else None
    return version if isinstance(version, int) else None
