"""What a data set was at its first use: a record that is made then, and compared ever after. It takes no NumPy."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttsv.data.download import file_digest
from ttsv.errors import DataError


def file_name(name: str) -> str:
    """A data set's name as it stands in the names of files: with dashes for colons."""
    return name.replace(":", "-")


def file_hashes(paths: Iterable[Path], folder: Path) -> dict[str, str]:
    """Path relative to `folder` -> SHA-256 (hex) of every file; folders are left out. Raises `DataError`."""
    found = {}
    for path in paths:
        if not path.is_dir():
            digest = file_digest(path, "sha256")
            if digest is None:
                raise DataError(f"{path} is missing")
            found[str(path.relative_to(folder))] = digest
    return found


@dataclass(frozen=True, kw_only=True)
class ContentRecord:
    """What a data set was at its first use: SHA-256 (hex) of its content, and of each file by its relative path.

    It lies in `datasets/NAME.sha256.json`. Whoever means to change a set removes it.
    """

    path: Path
    sha256: str
    files: Mapping[str, str]

    @classmethod
    def find(cls, name: str, folder: Path) -> "ContentRecord | None":
        """The record, or None before the first use. Raises `DataError` where it is cut or altered."""
        path = folder / f"{file_name(name)}.sha256.json"
        try:
            found = json.loads(path.read_bytes())
            return cls(path=path, sha256=str(found["sha256"]), files=dict(found["files"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is cut or altered ({error!r}): put it back, or remove it to start anew") from error

    @classmethod
    def make(cls, name: str, folder: Path, sha256: str, files: Mapping[str, str]) -> None:
        """Writes the record of a first use."""
        path = folder / f"{file_name(name)}.sha256.json"
        write_json(path, {"dataset": name, "sha256": sha256, "files": dict(files)})

    def require_files(self, files: Mapping[str, str], folder: Path) -> None:
        """Raises `DataError` naming the first file that is not what it was."""
        for file in sorted(self.files.keys() | files.keys()):
            if files.get(file) != self.files.get(file):
                change = "is gone" if file not in files else "is new" if file not in self.files else "has changed"
                raise DataError(f"{folder / file} {change} since the set's first use: {self._mend()}")

    def require_content(self, name: str, sha256: str) -> None:
        """Raises `DataError` where the content is not what it was (the files being the same: read otherwise)."""
        if sha256 != self.sha256:
            raise DataError(
                f"data set {name!r}: the content has SHA-256 {sha256}, {self.sha256} at its first use: {self._mend()}"
            )

    def _mend(self) -> str:
        return (
            f"put back what was, or give what is new another name (to accept it under this one, remove {self.path}: "
            "results before and after are not comparable)"
        )


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w") as file:
            file.write(json.dumps(value, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())  # else a machine that dies may keep the name without what it stands for
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
