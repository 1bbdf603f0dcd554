"""The files that trials left: what the manifest lists, found on the disk again."""

import re
from dataclasses import dataclass
from pathlib import Path

from service.database import Artifact
from service.errors import GoneError, NotFoundError

_MEDIA_TYPES = {
    ".csv": "text/csv; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".log": "text/plain; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class Content:
    """A file that is there: `name` is safe to be offered for saving."""

    path: Path
    name: str
    media_type: str


def file_name(artifact: Artifact) -> str:
    """`trial-7-model.safetensors`: letters, digits, dots, dashes and underscores only."""
    suffix = re.sub(r"[^A-Za-z0-9.]", "", Path(artifact.path).suffix)
    return f"trial-{artifact.trial_id}-{re.sub(r'[^A-Za-z0-9_-]', '_', artifact.kind)}{suffix}"


def media_type(artifact: Artifact) -> str:
    """By the file's suffix; what is not known is bytes."""
    return _MEDIA_TYPES.get(Path(artifact.path).suffix.lower(), "application/octet-stream")


def content_of(data_dir: Path, artifact: Artifact) -> Content:
    """The artifact's file, which must lie in the data folder and have the manifest's size.

    Raises `NotFoundError` where it is missing, `GoneError` where it is something else.
    """
    what = f"artifact {artifact.id} ({artifact.kind} of trial {artifact.trial_id})"
    path = (data_dir / artifact.path).resolve()
    if not path.is_relative_to(data_dir.resolve()):
        raise GoneError(f"{what} does not lie in the data folder: its manifest is damaged, or a link leads out of it")
    if not path.is_file():
        raise NotFoundError(f"{what} was manifested but is gone: its file was removed from the data folder")
    if (size := path.stat().st_size) != artifact.size:
        raise GoneError(f"{what} is not what was manifested: {size} bytes instead of {artifact.size}")
    return Content(path, file_name(artifact), media_type(artifact))
