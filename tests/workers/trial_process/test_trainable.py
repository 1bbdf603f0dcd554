"""The trainable without Ray around it: what it reports, and what a resumed trial does not repeat."""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.results import made_epoch, made_result
from ttsv.config.training import TrainingConfig
from ttsv.config.trial import TrialConfig
from ttsv.errors import (
    BrokenContextError,
    DataError,
    DeviceError,
    LibraryMemoryError,
    LostDeviceError,
    MachineMemoryError,
    OutOfMemoryError,
)
from ttsv.results import EpochMetrics, StageProgress, TrialResult
from ttsv.trial import run_trial
from workers.node.depot.data_sets import OtherDataError
from workers.trial_process.messages import (
    NOT_TAKEN,
    UNABLE,
    CrowdedReport,
    EpochReport,
    FailureReport,
    HinderedReport,
    Job,
    Report,
    ResourceReport,
    ResultReport,
    StageReport,
    StartedReport,
)
from workers.trial_process.resources import Sampler
from workers.trial_process.trainable import UNABLE_SECONDS, TrialTrainable

CONFIG = TrialConfig(dataset="digits", model="small-cnn").to_dict()


def result(folder: Path, **changes: Any) -> TrialResult:
    (folder / "model").write_text("weights")
    value = made_result(
        layers=[{"largest": 1.0}],
        artifacts={"model": folder / "model"},
    )
    return dataclasses.replace(value, **changes)


def good(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics | TrialResult]:
    """Resumes behind the epoch its checkpoint names."""
    checkpoint = folder / "checkpoint"
    for epoch in range(int(checkpoint.read_text()) + 1 if checkpoint.exists() else 1, 4):
        yield made_epoch(epoch)
        checkpoint.write_text(str(epoch))
    yield result(folder)


def raising(error: BaseException) -> Any:
    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        yield made_epoch(1)
        raise error

    return run


def config(data_dir: Path, run: Any, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"trial_id": 1, "fence": 1, "stored_epochs": 0, "config": CONFIG} | changes
    job = Job(**fields)
    return {
        "job": dataclasses.asdict(job),
        "run": run,
        "data_dir": str(data_dir),
        "cpus": 1,
        "gpus": 0.0,
        "every_epoch": False,
    }


def reports(trainable: TrialTrainable) -> list[Report]:
    """All that it says but for its beginning, which comes first of all."""
    assert trainable.step() == {"report": StartedReport(socket.gethostname(), []), "done": False}
    found = []
    while True:
        step = trainable.step()
        if not isinstance(step["report"], ResourceReport):  # which a machine that is slow to test gives, too
            found.append(step["report"])
        if step["done"]:
            return found


def turned_away(trainable: TrialTrainable, kind: type[DeviceError]) -> str:
    """Why no trial can run in its process; before that it says where it is."""
    step = trainable.step()
    assert (step["report"].hinders, step["done"]) == (True, False)
    with pytest.raises(DeviceError) as found:
        trainable.step()
    assert type(found.value) is kind
    return str(found.value)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Which parts of a card of 8 GiB torch was told that it may fill: CUDA's context takes a sixteenth beside them."""
    told: list[float] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=8 << 30))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", told.append)
    return told


@pytest.fixture
def trainable(tmp_path: Path) -> Iterator[TrialTrainable]:
    """One that has run a trial before."""
    trainable = TrialTrainable.__new__(TrialTrainable)  # Ray's constructor wants a running cluster
    trainable.setup(config(tmp_path, good, trial_id=99))
    yield trainable
    trainable.cleanup()


def test_a_trial_that_gives_way_has_the_epoch_that_it_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real training: its next process goes on behind that epoch, and this one says nothing more, asked as it is."""
    monkeypatch.setattr("workers.trial_process.trainable.REPORT_SECONDS", 0)
    settings = TrialConfig(dataset="digits", model="small-cnn", training=TrainingConfig(epochs=3)).to_dict()

    def begun(**changes: Any) -> TrialTrainable:
        trainable = TrialTrainable.__new__(TrialTrainable)
        trainable.setup(config(tmp_path, run_trial, config=settings, **changes))
        return trainable

    def epochs(trainable: TrialTrainable, until: int) -> list[int]:
        found = list[int]()
        while not found or found[-1] < until:
            report = trainable.step()["report"]
            if isinstance(report, EpochReport):
                found += [point.epoch for point in report.points]
        return found

    first = begun()
    assert epochs(first, 2) == [1, 2]
    first.give_way()
    said = list[object]()
    asked = threading.Thread(target=lambda: said.append(first.step()), daemon=True)
    asked.start()
    asked.join(0.5)
    assert said == []
    second = begun(fence=2, stored_epochs=2)
    assert epochs(second, 3) == [3]
    second.cleanup()


@pytest.mark.parametrize(("seconds", "together"), [(0, [[1], [2], [3]]), (60, [[1], [2, 3]])])
def test_epochs_then_the_result(
    trainable: TrialTrainable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    together: list[list[int]],
) -> None:
    """The first epoch at once; those that follow sooner than REPORT_SECONDS together."""
    monkeypatch.setattr("workers.trial_process.trainable.REPORT_SECONDS", seconds)
    assert trainable.reset_config(config(tmp_path, good))
    *epochs, final = reports(trainable)
    assert epochs == [EpochReport([made_epoch(number) for number in numbers]) for numbers in together]
    assert isinstance(final, ResultReport)
    assert final.artifacts[0]["path"] == "trials/1/1/model"


def test_next_fence_resumes_and_tells_what_was_lost(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs ran, the database has one: the other one is told again, not trained again."""
    monkeypatch.setattr("workers.trial_process.trainable.REPORT_SECONDS", 0)
    trainable.reset_config(config(tmp_path, good))
    for _ in range(4):
        trainable.step()  # the fourth step writes the second checkpoint
    trainable.reset_config(config(tmp_path, good, fence=2, stored_epochs=1))
    first, second, final = reports(trainable)
    assert first == EpochReport([made_epoch(2)])
    assert second == EpochReport([made_epoch(3)]), "which is trained again"
    assert isinstance(final, ResultReport)
    assert final.artifacts[0]["path"] == "trials/1/2/model"


@pytest.mark.parametrize("checkpoint", [None, "2", "3"])
def test_what_is_trained_again_is_told_when_it_is(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str | None
) -> None:
    """A trial that failed is run again, and of its checkpoints none is left, or some, or the last."""
    monkeypatch.setattr("workers.trial_process.trainable.REPORT_SECONDS", 0)
    trainable.reset_config(config(tmp_path, good))
    reports(trainable)
    file = tmp_path / "trials/1/1/checkpoint"
    if checkpoint is None:
        file.unlink()
    else:
        file.write_text(checkpoint)
    trainable.reset_config(config(tmp_path, good, fence=2))
    told = [report.points for report in reports(trainable) if isinstance(report, EpochReport)]
    together = {None: ([1], [2], [3]), "2": ([1, 2], [3]), "3": ([1, 2, 3],)}[checkpoint]
    assert told == [[made_epoch(number) for number in numbers] for numbers in together]


def test_epochs_before_a_failure_are_not_lost(trainable: TrialTrainable, tmp_path: Path) -> None:
    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        yield made_epoch(1)
        yield made_epoch(2)
        raise DataError("gone")

    trainable.reset_config(config(tmp_path, run))
    first, second, final = reports(trainable)
    assert (first, second) == (EpochReport([made_epoch(1)]), EpochReport([made_epoch(2)]))
    assert isinstance(final, FailureReport)
    assert final.message == "gone"


@pytest.mark.parametrize(
    ("error", "failure", "message"),
    [
        (DataError("digits is missing: run this"), "bad_data", "digits is missing: run this"),
        (OutOfMemoryError("too large"), "oom", "too large"),
        (MemoryError(), "oom", "memory"),
        (ZeroDivisionError("a bug"), "error", "ZeroDivisionError: a bug"),
        (PermissionError(errno.EACCES, "no"), "error", "PermissionError"),
    ],
)
def test_failures_are_reported(
    trainable: TrialTrainable, tmp_path: Path, error: Exception, failure: str, message: str
) -> None:
    trainable.reset_config(config(tmp_path, raising(error)))
    _, final = reports(trainable)
    assert isinstance(final, FailureReport)
    assert final.failure == failure
    assert message in final.message


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes a part of what is written, as it does at its end."""
    monkeypatch.setattr("workers.trial_process.trial_folder._PROBE_BYTES", 9)
    monkeypatch.setattr("workers.trial_process.trial_folder.bytes", lambda count: b"part", raising=False)


def unreadable(cause: OSError) -> DataError:
    """As a loader says it whose cache could not be written."""
    error = DataError("the data set cannot be read")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "room", "said"),
    [
        (OSError(errno.ENOSPC, "no space left"), True, "no space left"),
        (OSError(errno.EIO, "the store is away"), True, "the store is away"),
        (unreadable(OSError(errno.EDQUOT, "quota exceeded")), True, "the data set cannot be read"),
        (unreadable(OSError(errno.EROFS, "read-only", "/data/datasets/cache")), True, "the data set cannot be read"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/trials/1"), True, "Permission denied"),
        (RuntimeError("unexpected pos 576"), False, "takes nothing more"),
    ],
)
def test_files_that_cannot_be_kept_are_not_the_trials_fault(
    trainable: TrialTrainable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    room: bool,
    said: str,
) -> None:
    if not room:
        full(monkeypatch)
    trainable.reset_config(config(tmp_path, raising(error)))
    _, final = reports(trainable)
    assert isinstance(final, HinderedReport)
    assert final.message.startswith(f"{socket.gethostname()} cannot keep the trial's files: ")
    assert said in final.message
    assert trainable.reset_config(config(tmp_path, good, fence=2)), "another trial may have better luck"
    assert isinstance(reports(trainable)[-1], ResultReport)


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "no such file"), DataError("no such data set")])
def test_what_a_trial_meets_once_its_folder_is_gone_is_not_its_fault(
    trainable: TrialTrainable, tmp_path: Path, error: Exception
) -> None:
    """The data folder was unmounted, and with it all that a trial may look for."""

    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        yield made_epoch(1)
        data_dir.rename(tmp_path / "unmounted")
        raise error

    trainable.reset_config(config(tmp_path / "data", run))
    *_, final = reports(trainable)
    assert isinstance(final, HinderedReport)
    assert "the trial's folder is gone" in final.message


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]
)
def test_a_machine_without_a_further_thread_is_not_the_trials_fault(
    trainable: TrialTrainable, tmp_path: Path, error: Exception
) -> None:
    """Each checkpoint is written by a thread, and somebody else may have as many as the user or the container may."""
    trainable.reset_config(config(tmp_path, raising(error)))
    *_, final = reports(trainable)
    assert final == HinderedReport(f"{socket.gethostname()} has no further thread or process now: {error}")


def test_another_data_set_is_the_nodes_trouble_and_not_the_trials(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node says so before the trial is tried again: else it would come here once more."""
    happened = list[str]()
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_accelerator_ids=dict))
    monkeypatch.setattr("workers.trial_process.trainable.complain", happened.append)
    words = "on gpu2 its content has another SHA-256"

    def bring(*_: Any) -> Iterator[StageProgress]:
        raise OtherDataError(words)

    monkeypatch.setattr("workers.trial_process.workplace.Workplace.bring_data_sets", bring)
    monkeypatch.setattr("workers.trial_process.trainable._here", lambda: (socket.gethostname(), None))
    trainable.reset_config(config(tmp_path, good))
    assert reports(trainable)[-1] == HinderedReport(words)
    assert happened == [words]

    def refuse(_words: str) -> None:
        raise RuntimeError("the head does not answer")

    monkeypatch.setattr("workers.trial_process.trainable.complain", refuse)
    trainable.reset_config(config(tmp_path, good, fence=2))
    assert reports(trainable)[-1] == HinderedReport(words)


def test_what_a_trial_says_of_itself_is_believed_where_the_disk_is_full(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(monkeypatch)
    trainable.reset_config(config(tmp_path, raising(DataError("no such data set"))))
    *_, final = reports(trainable)
    assert final == FailureReport("bad_data", "no such data set")


def test_an_input_that_may_not_be_read_is_the_trials(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever otherwise, and nobody be told of the file."""
    images = tmp_path / "images"
    images.touch()
    monkeypatch.setattr("service.storage.store.os.access", lambda place, mode: place != images)
    error = PermissionError(errno.EACCES, "Permission denied", str(images))
    trainable.reset_config(config(tmp_path, raising(unreadable(error))))
    *_, final = reports(trainable)
    assert final == FailureReport("bad_data", "the data set cannot be read")


@pytest.mark.parametrize("gpus", [0.0, 0.5, 1.0])
def test_a_process_that_mps_does_not_take_ends_before_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: float
) -> None:
    """torch would find no card, and the trial would compute on the processor."""

    def refuse() -> None:
        raise RuntimeError("Error 807: MPS server is not ready to accept new MPS client requests")

    waited = list[float]()
    monkeypatch.setattr("workers.trial_process.trainable.time.sleep", waited.append)
    monkeypatch.setattr("torch.cuda.init", refuse)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup({**config(tmp_path, good), "gpus": gpus})
    if gpus == 0:
        assert isinstance(reports(trainable)[-1], ResultReport), "it needs no card"
    else:
        words = f"{NOT_TAKEN} on {socket.gethostname()}: Error 807: MPS server is not ready to accept new MPS client"
        assert turned_away(trainable, BrokenContextError).startswith(words)
        assert waited == [UNABLE_SECONDS]
        with pytest.raises(BrokenContextError, match="no trial can run on"):
            trainable.reset_config(config(tmp_path, good))
    trainable.cleanup()


def test_a_process_whose_card_torch_cannot_use_does_not_compute_on_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("Unexpected error from cudaGetDeviceCount(): Error 804: forward compatibility was attempted")

    monkeypatch.setattr("workers.trial_process.trainable.time.sleep", lambda seconds: None)
    monkeypatch.setattr("torch.cuda.init", refuse)
    monkeypatch.setattr("workers.trial_process.trainable._DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup({**config(tmp_path, good), "gpus": 1.0})
    words = f"torch cannot use the GPU that {socket.gethostname()} offers: "
    assert re.match(f"{words}.* 804", turned_away(trainable, LostDeviceError))
    with pytest.raises(BrokenContextError, match="no trial can run on"):
        trainable.reset_config(config(tmp_path, good))
    trainable.cleanup()


@pytest.mark.parametrize(
    ("says", "others", "kind", "shown"),
    [
        ("Torch not compiled with CUDA enabled", [], BrokenContextError, True),
        ("The NVIDIA driver on your system is too old (found version 12040)", [], BrokenContextError, True),
        ("Torch not compiled with CUDA enabled", [1.0], LostDeviceError, True),
        ("CUDA error: uncorrectable ECC error encountered", [], LostDeviceError, False),
    ],
    ids=["torch", "driver", "elsewhere", "card"],
)
def test_where_no_gpu_is_ever_had_its_node_says_so_and_no_trial_waits_for_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    others: list[float],
    kind: type[DeviceError],
    shown: bool,
) -> None:
    """It is charged where no further node has GPUs, and with no card that may come back: that one is named."""

    def refuse() -> None:
        raise AssertionError(says)

    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["GPU-bb"]}, get_node_id=lambda: "c6416f7231edaf7b")
    nodes = [
        {"Alive": alive, "NodeManagerHostname": f"gpu{number}", "Resources": {"CPU": 1.0} | resources}
        for number, (alive, resources) in enumerate(
            [(True, {"GPU": 2.0}), (False, {"GPU": 2.0}), (True, {}), *((True, {"GPU": gpus}) for gpus in others)]
        )
    ]
    problems = list[str]()
    monkeypatch.setattr("workers.trial_process.trainable.complain", problems.append)
    monkeypatch.setattr("workers.trial_process.trainable.ray.is_initialized", lambda: True)
    monkeypatch.setattr("workers.trial_process.trainable.ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("workers.trial_process.trainable.ray.nodes", lambda: nodes)
    monkeypatch.setattr("workers.trial_process.trainable.time.sleep", lambda seconds: None)
    monkeypatch.setattr("workers.trial_process.trainable._DEVICES", tmp_path)
    monkeypatch.setattr("torch.cuda.init", refuse)
    monkeypatch.setenv("TTSV_OFFERED_CARDS", "GPU-aa,GPU-bb")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    (tmp_path / "nvidia0").touch()
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup({**config(tmp_path, good), "gpus": 1.0})
    report = trainable.step()["report"]
    assert report == StartedReport(socket.gethostname(), ["1"])
    assert (report.node, report.hinders) == ("c6416f7231edaf7b", True)
    words = f"torch cannot use the GPU that {socket.gethostname()} offers: {says}"
    with pytest.raises(DeviceError) as found:
        trainable.step()
    assert type(found.value) is kind
    assert str(found.value).startswith(words)
    assert problems == ([f"{words}; `ttsv doctor` there says what mends it"] if shown else [])


def test_nothing_is_held_against_a_trial_where_no_trial_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where torch finds no library of its own: nobody's process would have lived there."""
    waited = list[float]()
    monkeypatch.setattr("workers.trial_process.trainable.time.sleep", waited.append)
    monkeypatch.setitem(sys.modules, "torch", None)
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup(config(tmp_path, good))
    words = f"no trial can run on {socket.gethostname()}: import of torch"
    assert turned_away(trainable, BrokenContextError).startswith(words)
    assert waited == [UNABLE_SECONDS]
    with pytest.raises(BrokenContextError, match="no trial can run on"):
        trainable.reset_config(config(tmp_path, good))
    trainable.cleanup()


def test_a_client_of_mps_has_its_share_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: list[float]
) -> None:
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup({**config(tmp_path, good), "gpus": 0.25})
    assert shares == [0.1875]
    assert isinstance(reports(trainable)[-1], ResultReport)
    trainable.cleanup()


@pytest.mark.parametrize(
    "error", [BrokenContextError("a kernel failed"), LostDeviceError("the GPU is lost")], ids=["context", "card"]
)
def test_a_process_whose_gpu_is_gone_ends_and_is_not_used_again(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DeviceError
) -> None:
    """Its trial is lost and tried again elsewhere, as one whose process was killed."""

    def never() -> None:
        raise AssertionError("nothing of a broken context can be called")

    trainable.reset_config(config(tmp_path, raising(error)))
    for _ in range(2):
        trainable.step()
    with pytest.raises(type(error), match=str(error)):
        trainable.step()
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", never)
    with pytest.raises(BrokenContextError, match="no trial can run on"):
        trainable.reset_config(config(tmp_path, good))
    assert f"ERROR {error.failure}: {error}" in (tmp_path / "trials" / "1" / "1" / "trial.log").read_text()


@pytest.mark.parametrize("where", ["folder", "file"])
@pytest.mark.parametrize("error", [BrokenContextError("a kernel failed"), LostDeviceError("the GPU is lost")])
def test_a_gpu_that_is_gone_is_not_hidden_by_a_disk_that_fails_then(
    trainable: TrialTrainable, tmp_path: Path, error: DeviceError, where: str
) -> None:
    """The data folder is unmounted meanwhile, or a file that is closed finds the disk full."""

    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        yield made_epoch(1)
        try:
            raise error
        finally:
            if where == "file":
                raise OSError(errno.ENOSPC, "No space left on device")
            data_dir.rename(tmp_path / "unmounted")

    trainable.reset_config(config(tmp_path / "data", run))
    for _ in range(2):
        trainable.step()
    with pytest.raises(type(error), match=str(error)):
        trainable.step()
    with pytest.raises(BrokenContextError, match=f"^{UNABLE} "):
        trainable.reset_config(config(tmp_path, good))


def test_a_library_that_failed_for_lack_of_memory_is_not_hidden_by_a_disk_that_fails_then(
    trainable: TrialTrainable, tmp_path: Path
) -> None:
    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        yield made_epoch(1)
        data_dir.rename(tmp_path / "unmounted")
        raise LibraryMemoryError("cuBLAS failed")

    trainable.reset_config(config(tmp_path / "data", run))
    assert isinstance(reports(trainable)[-1], HinderedReport)
    with pytest.raises(BrokenContextError, match=f"^{UNABLE} "):
        trainable.reset_config(config(tmp_path, good))


def test_a_context_that_breaks_between_two_trials_is_not_the_next_ones_fault(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another client of the same card under MPS."""

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", fail)
    for words in ("in an idle process: a kernel failed, .* illegal memory", "whose card or libraries failed"):
        with pytest.raises(BrokenContextError, match=f"^{UNABLE} {socket.gethostname()} .*{words}"):
            trainable.reset_config(config(tmp_path, good))


@pytest.mark.parametrize(
    ("gpus", "alone", "expected"),
    [
        (0.25, False, CrowdedReport("too large; it had 0.25 of a GPU")),
        (0.25, True, FailureReport("oom", "too large")),
        (1, False, FailureReport("oom", "too large")),
        (0, False, FailureReport("oom", "too large")),
    ],
)
def test_too_little_memory_on_a_shared_card_is_another_thing_than_on_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: float, alone: bool, expected: Report
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup(config(tmp_path, raising(OutOfMemoryError("too large")), alone=alone) | {"gpus": gpus})
    _, final = reports(trainable)
    assert final == expected
    trainable.cleanup()


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [(0.25, CrowdedReport("cuBLAS failed; it had 0.25 of a GPU")), (1, FailureReport("oom", "cuBLAS failed"))],
)
def test_a_process_in_which_a_library_failed_for_lack_of_memory_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: float, expected: Report
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup(config(tmp_path, raising(LibraryMemoryError("cuBLAS failed"))) | {"gpus": gpus})
    assert reports(trainable)[-1] == expected
    with pytest.raises(BrokenContextError, match=f"^{UNABLE} "):
        trainable.reset_config(config(tmp_path, good) | {"gpus": gpus})
    trainable.cleanup()


def test_too_little_memory_of_the_machine_is_no_crowd_on_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the card to itself the trial would lack it again."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup(config(tmp_path, raising(MachineMemoryError("too large"))) | {"gpus": 0.25})
    assert reports(trainable)[-1] == FailureReport("oom", "too large")
    trainable.cleanup()


@pytest.mark.parametrize(("alone", "told"), [(False, [0.1875]), (True, [])])
def test_alone_on_a_card_it_may_fill_it(tmp_path: Path, shares: list[float], alone: bool, told: list[float]) -> None:
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup(config(tmp_path, good, alone=alone) | {"gpus": 0.25})
    trainable.cleanup()
    assert shares == told


def test_unusable_configuration(trainable: TrialTrainable, tmp_path: Path) -> None:
    trainable.reset_config(config(tmp_path, good, config={**CONFIG, "seed": -1}))
    (final,) = reports(trainable)
    assert isinstance(final, FailureReport)
    assert (final.failure, final.message[:9]) == ("bad_config", "seed = -1")


@pytest.mark.parametrize("where", ["layers", "loss", "environment"])
def test_no_number_that_is_not_finite(trainable: TrialTrainable, tmp_path: Path, where: str) -> None:
    broken = {"layers": [{"largest": math.inf}], "loss": math.nan, "environment": {"x": {"y": [math.inf]}}}

    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[TrialResult]:
        yield result(folder, **{where: broken[where]})

    trainable.reset_config(config(tmp_path, run))
    (final,) = reports(trainable)
    assert isinstance(final, FailureReport)
    assert final.failure == "diverged"
    assert f"the result: {where}" in final.message


def test_trial_without_a_result(trainable: TrialTrainable, tmp_path: Path) -> None:
    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        yield made_epoch(1)

    trainable.reset_config(config(tmp_path, run))
    assert "without a result" in str(reports(trainable)[-1])


def test_generator_is_closed_between_trials(trainable: TrialTrainable, tmp_path: Path) -> None:
    closed = []

    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics]:
        try:
            yield made_epoch(1)
            yield made_epoch(2)
        finally:
            closed.append(True)

    trainable.reset_config(config(tmp_path, run))
    for _ in range(2):
        trainable.step()
    trainable.cleanup()
    assert closed == [True]


def test_it_says_where_it_runs_before_all_else(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it touches a file, so that what hangs there is known to hang on that node."""
    trainable.reset_config(config(tmp_path, good))
    assert trainable.step() == {"report": StartedReport(socket.gethostname(), []), "done": False}
    assert not (tmp_path / "trials" / "1").exists()
    assert StartedReport("node-1", []).place == "node-1"
    assert StartedReport("node-1", ["0", "3"]).place == "node-1, GPU 0, 3"
    visible, host = ["2"], socket.gethostname()
    context = SimpleNamespace(
        get_accelerator_ids=lambda: {"GPU": visible, "TPU": []}, get_node_id=lambda: "c6416f7231edaf7b"
    )
    nodes = [{"Alive": True, "NodeManagerHostname": name} for name in (host, "another")]
    monkeypatch.setattr("workers.trial_process.trainable.ray.is_initialized", lambda: True)
    monkeypatch.setattr("workers.trial_process.trainable.ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("workers.trial_process.trainable.ray.nodes", lambda: nodes)

    def said() -> StartedReport:
        trainable.reset_config(config(tmp_path, good))
        report: StartedReport = trainable.step()["report"]
        return report

    assert said() == StartedReport(host, ["2"])
    visible = ["GPU-bb", "GPU-cc"]
    monkeypatch.setenv("TTSV_OFFERED_CARDS", "GPU-aa,GPU-bb,GPU-cc")
    nodes.append({"Alive": True, "NodeManagerHostname": host})
    assert said().place == f"{host} (c6416f72), GPU 1, 2", "one of several nodes of this machine"
    del nodes[0]["Alive"]
    assert (said().host, said().node) == (host, "c6416f7231edaf7b"), "whatever Ray says, the trial runs"


@pytest.mark.parametrize(
    ("reserved", "there", "told"), [(["0"], False, True), (["0"], True, False), ([], False, False)]
)
def test_its_log_says_where_a_gpu_is_reserved_and_none_is_seen(
    trainable: TrialTrainable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reserved: list[str],
    there: bool,
    told: bool,
) -> None:
    """As where a worker's TTSV_WORKER_GPUS was believed: without a word it would compute on the processor."""
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": reserved}, get_node_id=lambda: "c6416f7231edaf7b")
    monkeypatch.setattr("workers.trial_process.trainable.ray.is_initialized", lambda: True)
    monkeypatch.setattr("workers.trial_process.trainable.ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("workers.trial_process.trainable.ray.nodes", list)
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    trainable.reset_config(config(tmp_path, good))
    while not trainable.step()["done"]:
        pass
    warning = "WARNING the trial reserves a GPU, and torch sees none: it computes on the processor"
    assert (warning in (tmp_path / "trials" / "1" / "1" / "trial.log").read_text()) == told


@pytest.mark.parametrize(("seconds", "told"), [(0, [1, 2, 3]), (60, [1])])
def test_an_evaluation_that_gets_on_says_so_now_and_then(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, told: list[int]
) -> None:
    """After the epochs that are still to be told; it is no end."""

    def run(
        config: TrialConfig, *, data_dir: Path, folder: Path
    ) -> Iterator[EpochMetrics | StageProgress | TrialResult]:
        yield made_epoch(1)
        yield made_epoch(2)
        for done in (1, 2, 3):
            yield StageProgress(stage="attack", done=done, total=3, seconds_left=None)
        yield result(folder)

    monkeypatch.setattr("workers.trial_process.trainable.STAGE_SECONDS", seconds)
    trainable.reset_config(config(tmp_path, run))
    first, second, *stages, final = reports(trainable)
    assert (first, second) == (EpochReport([made_epoch(1)]), EpochReport([made_epoch(2)]))
    assert [stage.stage.done for stage in stages if isinstance(stage, StageReport)] == told
    assert len(stages) == len(told)
    assert isinstance(final, ResultReport)


def test_an_evaluation_gets_on_only_where_no_earlier_attempt_came(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that always kills its process in its second stage would be tried for ever."""

    def run_to(*stages: tuple[str, int]) -> Any:
        def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[StageProgress]:
            for name, done in stages:
                yield StageProgress(stage=name, done=done, total=9)

        return run

    monkeypatch.setattr("workers.trial_process.trainable.STAGE_SECONDS", 0)
    found = []
    for fence, stages in (
        (1, [("attack", 0), ("attack", 3), ("corruptions", 0)]),
        (1, [("attack", 0), ("attack", 2), ("attack", 4)]),
        (2, [("attack", 3), ("corruptions", 0), ("corruptions", 1)]),
    ):
        trainable.reset_config(config(tmp_path, run_to(*stages), fence=fence))
        found.append([report.further for report in reports(trainable) if isinstance(report, StageReport)])
    assert found == [[True, True, True], [False, False, True], [False, False, True]]


@pytest.mark.parametrize(("gpus", "visible"), [(0, ""), (0.5, "GPU-7"), (1, "GPU-7")])
def test_without_a_gpu_reserved_it_sees_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: list[float], gpus: float, visible: str
) -> None:
    """Whoever started the cluster; of a shared one it may fill its share alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    trainable = TrialTrainable.__new__(TrialTrainable)
    trainable.setup(config(tmp_path, good) | {"gpus": gpus})
    trainable.cleanup()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert shares == ([0.4375] if gpus == 0.5 else [])


def test_of_the_cards_of_a_node_it_sees_those_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: list[float]
) -> None:
    """Where Ray was told not to hide the others, too (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES)."""
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["GPU-8", "MIG-9"], "TPU": []})
    monkeypatch.setattr("workers.trial_process.trainable.ray.is_initialized", lambda: True)
    monkeypatch.setattr("workers.trial_process.trainable.ray.get_runtime_context", lambda: context)
    for gpus, visible in ((2.0, "GPU-8,MIG-9"), (0.0, "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,GPU-8,MIG-9")
        trainable = TrialTrainable.__new__(TrialTrainable)
        trainable.setup(config(tmp_path, good) | {"gpus": gpus})
        trainable.cleanup()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize("ending", ["result", "failure", "crash"])
def test_it_says_at_its_end_what_it_used(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr("workers.trial_process.trainable.Sampler", partial(Sampler, first=0.01))

    def run(config: TrialConfig, *, data_dir: Path, folder: Path) -> Iterator[EpochMetrics | TrialResult]:
        time.sleep(0.1)
        if ending == "failure":
            raise DataError("damaged")
        if ending == "crash":
            raise ZeroDivisionError
        yield from good(config, data_dir=data_dir, folder=folder)

    assert trainable.reset_config(config(tmp_path, run))
    found = []
    while True:
        step = trainable.step()
        found.append(step["report"])
        if step["done"]:
            break
        assert set(step) >= {"report", "done"}
    used = [one for one in found if isinstance(one, ResourceReport)]
    assert found[-2] is used[-1]
    assert len(used) == 1, "they come every half minute, and at the end"
    assert (used[0].series["memory"][0] or 0) > 10
    assert len(used[0].series["seconds"]) >= 3


def test_a_place_that_cannot_be_told_ends_no_trial(
    trainable: TrialTrainable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "strange")

    monkeypatch.setattr("ttsv.runtime.provenance.provenance", broken)
    assert trainable.reset_config(config(tmp_path, good))
    assert trainable.step()["report"].environment is None
    assert isinstance(trainable.step()["report"], EpochReport)


def test_it_says_with_what_it_runs(trainable: TrialTrainable, tmp_path: Path) -> None:
    assert trainable.reset_config(config(tmp_path, good))
    environment = trainable.step()["report"].environment
    assert environment["host"] == socket.gethostname()
    assert environment["packages"]["torch"]


def test_source_is_handed_on(trainable: TrialTrainable, tmp_path: Path) -> None:
    sources = []

    def run(config: TrialConfig, *, data_dir: Path, folder: Path, source: Path) -> Iterator[TrialResult]:
        sources.append(source)
        yield result(folder)

    (tmp_path / "trials" / "7").mkdir(parents=True)
    (tmp_path / "trials" / "7" / "model").touch()
    trainable.reset_config(config(tmp_path, run, source="trials/7/model"))
    assert isinstance(reports(trainable)[-1], ResultReport)
    assert sources == [tmp_path / "trials" / "7" / "model"]
    trainable.reset_config(config(tmp_path, run, source="trials/8/model"))
    (final,) = reports(trainable)
    assert isinstance(final, FailureReport)
    assert final.failure == "bad_data"
    assert "trials/8/model" in final.message


def test_every_epoch_for_itself(trainable: TrialTrainable, tmp_path: Path) -> None:
    """A scheduler compares each."""
    trainable.reset_config(config(tmp_path, good) | {"every_epoch": True})
    trainable.step()
    steps = [trainable.step() for _ in range(4)]
    assert [step.get("val_accuracy") for step in steps] == [0.5, 0.5, 0.5, None]
    assert [step.get("timesteps_total") for step in steps] == [1, 2, 3, None]
    assert steps[3]["result/accuracy"] == 0.5
    assert "result/peak_memory" not in steps[3]


class TestLog:
    def lines(self, tmp_path: Path) -> list[str]:
        return (tmp_path / "trials" / "1" / "1" / "trial.log").read_text().splitlines()

    def test_tells_what_happened(self, trainable: TrialTrainable, tmp_path: Path) -> None:
        def run(
            config: TrialConfig, *, data_dir: Path, folder: Path
        ) -> Iterator[EpochMetrics | StageProgress | TrialResult]:
            print("printed\rover\nand", "more")
            print("trouble", file=sys.stderr, end="")
            logging.getLogger("ttsv.test").info("logged")
            yield made_epoch(1)
            yield StageProgress(stage="attack", done=3, total=9, seconds_left=12.4)
            yield result(folder)

        before = sys.stdout, sys.stderr, logging.getLogger().level, list(logging.getLogger().handlers)
        trainable.reset_config(config(tmp_path, run))
        reports(trainable)
        trainable.cleanup()
        assert before == (sys.stdout, sys.stderr, logging.getLogger().level, list(logging.getLogger().handlers))
        found = self.lines(tmp_path)
        for line in found:
            assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) ", line)
        said = [line.partition(" ")[2] for line in found]
        assert said[0] == "INFO trial 1 begins, fence 1; 0 epochs are stored"
        assert said[1:4] == ["INFO over", "INFO and more", "INFO logged"]
        assert said[4].startswith("INFO epoch 1 of 3: train loss 1, accuracy 0.5000; validation loss 1, ")
        assert said[5:] == [
            "INFO attack: 3 of 9, about 12 s left",
            "INFO the trial succeeded: accuracy 0.5000",
            "WARNING trouble",
        ]

    def test_has_the_traceback_of_a_bug(self, trainable: TrialTrainable, tmp_path: Path) -> None:
        trainable.reset_config(config(tmp_path, raising(ZeroDivisionError("a bug"))))
        reports(trainable)
        found = self.lines(tmp_path)
        assert any(line.endswith("ERROR the trial failed") for line in found)
        assert found[-1] == "ZeroDivisionError: a bug"

    def test_has_what_is_to_be_done_about_a_known_failure(self, trainable: TrialTrainable, tmp_path: Path) -> None:
        trainable.reset_config(config(tmp_path, raising(DataError("digits is missing: run this"))))
        reports(trainable)
        assert self.lines(tmp_path)[-1].endswith("ERROR bad_data: digits is missing: run this")

    def test_goes_on_under_the_next_fence(self, trainable: TrialTrainable, tmp_path: Path) -> None:
        trainable.reset_config(config(tmp_path, good))
        for _ in range(2):
            trainable.step()
        trainable.reset_config(config(tmp_path, good, fence=2, stored_epochs=1))
        reports(trainable)
        text = (tmp_path / "trials" / "1" / "2" / "trial.log").read_text()
        assert "trial 1 begins, fence 1" in text
        assert "trial 1 begins, fence 2; 1 epochs are stored" in text
