"""Downloads: resumed where they broke off, and kept only if their SHA-256 is right."""

import hashlib
from pathlib import Path
from typing import BinaryIO, Self

import httpx2 as httpx

from service.client.errors import DamagedError
from service.schemas.trials import ArtifactOut

_CHUNK = 1 << 20


class Download:
    """One artifact on its way into a file; what has come stands in `FILE.part` until it is whole.

    Use as a context manager around all attempts. `target` may be a folder: the file then has the artifact's name.
    """

    def __init__(self, artifact: ArtifactOut, target: Path) -> None:
        self.artifact = artifact
        self.target = target / Path(artifact.name).name if target.is_dir() else target
        self.path = f"/v1/artifacts/{artifact.id}"
        self._part = self.target.with_name(f"{self.target.name}.part")
        self._hash = hashlib.sha256()
        self._file: BinaryIO

    def __enter__(self) -> Self:
        self._file = self._part.open("a+b")
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK):
            self._hash.update(chunk)
        if self._file.tell() > self.artifact.size:
            self._restart()
        return self

    def __exit__(self, *_: object) -> None:
        empty = self.size == 0
        self._file.close()
        if empty:  # nothing came, so nothing is kept
            self._part.unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes that are here."""
        return self._file.tell()

    @property
    def done(self) -> bool:
        """Whether all bytes are here."""
        return self.size >= self.artifact.size

    @property
    def headers(self) -> dict[str, str]:
        """Asks for what is missing; for all of it if the file is another one by now."""
        rest = {"Range": f"bytes={self.size}-", "If-Range": f'"{self.artifact.sha256}"'} if self.size else {}
        return {"Accept-Encoding": "identity"} | rest

    def begin(self, response: httpx.Response) -> None:
        """Looks at an answer before its body is read: all of the file, or what was missing."""
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            self._restart()

    def write(self, chunk: bytes) -> None:
        """Appends what came."""
        self._file.write(chunk)
        self._hash.update(chunk)

    def finish(self) -> Path:
        """Puts the whole file in its place. Raises `DamagedError` if it is not what was promised; nothing is kept."""
        found = self._hash.hexdigest()
        if found != self.artifact.sha256:
            self._part.unlink()
            what = f"artifact {self.artifact.id} ({self.artifact.name})"
            raise DamagedError(f"{what}: SHA-256 is {found} instead of {self.artifact.sha256}; ask for it again")
        self._file.flush()
        return self._part.replace(self.target)

    def _restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash = hashlib.sha256()
