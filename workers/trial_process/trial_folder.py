"""What a trial leaves in its folder besides what it trains, the manifest of its files, and the folders of Tune."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from ttsv.results import CHECKPOINTS, EpochMetrics, StageProgress
from workers.trial_process.messages import FileFields

_JOURNAL = "epochs.jsonl"
_STAGES = "stages.json"
_PROBE_BYTES = 2**18


def require_there(folder: Path) -> None:
    """Raises `OSError` where a trial's folder is gone, as with a mount: what the trial met then is no fault of its."""
    if not folder.is_dir():
        raise OSError(errno.ESTALE, "the trial's folder is gone; is what it was in mounted?", str(folder))


def require_room(folder: Path) -> None:
    """Raises `OSError` where `folder` takes nothing more, as libraries that write files do not always say so.

    (safetensors and NumPy tell of a full disk by errors of their own, without a number.)
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if file.write(bytes(_PROBE_BYTES)) < _PROBE_BYTES:
            raise OSError(errno.ENOSPC, f"{folder} takes nothing more")


class Journal:
    """The epochs a trial reported, kept beside its checkpoints.

    A trial resumes behind its newest checkpoint and does not repeat earlier epochs; those whose report was lost with
    a killed driver are in here.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _JOURNAL

    def append(self, point: EpochMetrics) -> None:
        """Adds an epoch, durably. Raises `ValueError` for a number that is not finite."""
        line = json.dumps(dataclasses.asdict(point), allow_nan=False)
        with self._path.open("a") as file:
            # A line break first: a line that a kill cut short stays apart. Its check tells what a disk made of it.
            file.write(f"\n{line}\t{_check(line)}")
            file.flush()
            os.fsync(file.fileno())

    def after(self, epoch: int) -> list[EpochMetrics]:
        """The epochs past `epoch`, in order; of an epoch that ran twice, the second."""
        if not self._path.exists():
            return []
        points = {}
        for line in self._path.read_text(errors="replace").splitlines():  # what a disk spoilt costs a point
            text, _, check = line.partition("\t")
            if check not in ("", _check(text)):  # an earlier version wrote none
                continue
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                point = EpochMetrics.from_dict(json.loads(text))
                points[point.epoch] = point
        return [points[number] for number in sorted(points) if number > epoch]


def _check(line: str) -> str:
    return f"{zlib.crc32(line.encode(errors='replace')):08x}"


class Furthest:
    """How far a trial's evaluation ever came, kept with its checkpoints.

    What an earlier attempt did before it died is no progress when it is done again.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CHECKPOINTS / _STAGES

    def passed(self, stage: StageProgress) -> bool:
        """Remembers where the evaluation is; whether it never was there before."""
        came: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            came = json.loads(self._path.read_text())
        if stage.done <= came.get(stage.stage, -1):
            return False
        self._path.parent.mkdir(exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({**came, stage.stage: stage.done}))
        partial.replace(self._path)
        return True


def manifest(artifacts: Mapping[str, Path], data_dir: Path) -> list[FileFields]:
    """Makes files durable and describes each."""
    return [_describe(kind, path, data_dir) for kind, path in artifacts.items()]


def _describe(kind: str, path: Path, data_dir: Path) -> FileFields:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
    relative = path.resolve().relative_to(data_dir.resolve())
    return {"kind": kind, "path": relative.as_posix(), "sha256": digest, "size": path.stat().st_size}


def tune_folder(data_dir: Path, experiment_id: int, fence: int) -> Path:
    """Where Ray Tune keeps its own books of one claim; nobody reads them."""
    return data_dir / "tune" / f"{experiment_id}-{fence}"


def remove_tune_folders(data_dir: Path, experiment_id: int, fence: int) -> None:
    """Removes Tune's books of this claim and of earlier ones."""
    for folder in (data_dir / "tune").glob(f"{experiment_id}-*"):
        if int(folder.name.rpartition("-")[2]) <= fence:
            shutil.rmtree(folder, ignore_errors=True)
