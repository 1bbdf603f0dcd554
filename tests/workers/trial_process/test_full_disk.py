"""Real trials on a small disk that is full from some moment on: no failure, no broken file, and the same in the end."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.trial_process.test_trainable import config, good
from ttsv.config.trial import TrialConfig
from ttsv.results import EpochMetrics
from ttsv.trial import run_trial
from workers.trial_process.messages import EpochReport, HinderedReport, Report, ResultReport
from workers.trial_process.trainable import TrialTrainable
from workers.trial_process.trial_folder import Journal

DISK_MIB = 16
TRIAL = TrialConfig.from_dict(
    {
        "dataset": "digits",
        "model": "small-cnn",
        "layer": "tt",
        "rank": 4,
        "constraint": "clip",
        "delta": 1.0,
        "training": {"epochs": 3, "lr": 0.1, "spectra_every": 1},
        "evaluation": {"attack": "pgd", "attack_images": 8},
    }
).to_dict()


@pytest.fixture
def disk(small_disk: Callable[[int], Path]) -> Path:
    """A folder on a disk of its own."""
    return small_disk(DISK_MIB * 1024)


@pytest.fixture
def trainable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialTrainable]:
    monkeypatch.setattr("workers.trial_process.trainable.REPORT_SECONDS", 0)
    trainable = TrialTrainable.__new__(TrialTrainable)  # Ray's constructor wants a running cluster
    trainable.setup(config(tmp_path, good, trial_id=99))
    yield trainable
    trainable.cleanup()


def last(trainable: TrialTrainable, folder: Path, **changes: Any) -> Report:
    """What the trial said in the end."""
    trainable.reset_config(config(folder, run_trial, config=TRIAL, **changes))
    while True:
        step = trainable.step()
        report: Report = step["report"]
        if step["done"]:
            return report


def free(folder: Path) -> int:
    """Bytes that still fit on the folder's disk."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def leave(folder: Path, size: int) -> Path:
    """Takes all of the disk but so many bytes; the file that does."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, free(folder) - size)
    return filler


def figures(report: ResultReport) -> dict[str, Any]:
    """All of a result that does not tell of time or place."""
    plain = dataclasses.asdict(report.result) | {"environment": None, "artifacts": None, "peak_memory": None}
    return {name: untimed(value) for name, value in plain.items() if "seconds" not in name}


def untimed(plain: Any) -> Any:
    if isinstance(plain, list | tuple):
        return [untimed(value) for value in plain]
    if isinstance(plain, dict):
        return {name: untimed(value) for name, value in plain.items() if "seconds" not in name}
    return plain


class Writes:
    """Files below a folder that are opened to be written, in their order; at one of them the disk becomes full.

    So many bytes are left then.
    """

    def __init__(self, folder: Path, full_at: int | None = None, room: int = 0) -> None:
        self.folder, self.full_at, self.room = folder, full_at, room
        self.names = list[str]()
        self.filler: Path | None = None

    def __enter__(self) -> Writes:
        _watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)

    def see(self, path: str) -> None:
        """One is opened."""
        if self.filler is None and path.startswith(f"{self.folder}/"):
            self.names.append(re.sub(r"(?<![a-z])[0-9a-f]{8,}|\d+", "N", path.removeprefix(f"{self.folder}/")))
            if len(self.names) - 1 == self.full_at:
                self.filler = self.folder / "filler"
                leave(self.folder, self.room)


_watching = list[Writes]()


def _hear(event: str, given: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(given[0], str) and given[2] & (os.O_WRONLY | os.O_RDWR):
        _watching[-1].see(given[0])


sys.addaudithook(_hear)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "every"),
    [(0, False), *(pytest.param(room, True, marks=pytest.mark.deep) for room in (0, 4096))],
)
def test_full_at_each_write(trainable: TrialTrainable, disk: Path, room: int, every: bool) -> None:
    """From the first byte of a file on, or within it, or of the next one if it is small."""
    last(trainable, disk, trial_id=1)  # which leaves what is shared by all
    with Writes(disk) as written:
        whole = last(trainable, disk, trial_id=3)
    assert isinstance(whole, ResultReport)
    shutil.rmtree(disk / "trials")
    points = [
        written.names.index(name) for name in written.names if name.endswith(("model.json.tmp", "/evaluation.json"))
    ]
    for point in range(len(written.names)) if every else points:
        with Writes(disk, full_at=point, room=room) as until:
            hindered = last(trainable, disk, trial_id=3)
        assert until.filler is not None, (point, until.names)
        until.filler.unlink()
        assert isinstance(hindered, HinderedReport) or (room and point == len(written.names) - 1), until.names[-1]
        if isinstance(hindered, HinderedReport):
            assert socket.gethostname() in hindered.message
        again = last(trainable, disk, trial_id=3, attempt=1)
        assert isinstance(again, ResultReport), (until.names[-1], again)
        assert figures(again) == figures(whole), until.names[-1]
        for file in again.artifacts:
            content = (disk / file["path"]).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"]), until.names
        shutil.rmtree(disk / "trials")


def test_a_disk_that_may_only_be_read(trainable: TrialTrainable, disk: Path) -> None:
    """As one of a network that is mounted so on one node: the trial runs where it can write."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    hindered = last(trainable, disk, trial_id=3)
    assert isinstance(hindered, HinderedReport), hindered
    assert "Read-only file system" in hindered.message
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert isinstance(last(trainable, disk, trial_id=3, attempt=1), ResultReport)


def test_an_epoch_that_the_journal_does_not_take_is_trained_again(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full for a moment, and had room for a checkpoint right after: the epoch would be told by nobody."""
    append = Journal.append

    def fails_once(self: Journal, point: EpochMetrics) -> None:
        if point.epoch == 2:
            monkeypatch.setattr(Journal, "append", append)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, point)

    monkeypatch.setattr(Journal, "append", fails_once)
    told = list[int]()
    for attempt in (0, 1):
        stored = max(told, default=0)
        trainable.reset_config(
            config(tmp_path, run_trial, config=TRIAL, trial_id=1, attempt=attempt, stored_epochs=stored)
        )
        step = trainable.step()
        while not step["done"]:
            if isinstance(step["report"], EpochReport):
                told += [point.epoch for point in step["report"].points]
            step = trainable.step()
        assert isinstance(step["report"], ResultReport if attempt else HinderedReport)
    assert told == [1, 2, 3]
