"""How long a worker may stay where a batch system lends the machine."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import UserError
from workers.worker.job_time import Allocation, allocation, requeue, seconds_of


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> Path:
    """Puts a stand-in for a program of Slurm on the path; the file into which it writes its arguments."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" > {folder}/said\n{text}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "said"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1.5m", 90), ("4h", 14400), ("2d", 172800), ("0:30:00", 1800), ("1-12:00:00", 129600)],
)
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_times_as_slurm_writes_them(days: int, hours: int, minutes: int, seconds: int) -> None:
    assert (
        seconds_of(f"{days}-{hours:02}:{minutes:02}:{seconds:02}")
        == 60 * (60 * (24 * days + hours) + minutes) + seconds
    )


@pytest.mark.parametrize("text", ["", "4", "h", "-1h", "4 h", "4hours", "12:00", "1-2-00:00:00", "nan", "infs"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UserError, match=r"--time-limit: .* is no time; write it as 90s"):
        allocation(text, {}, until_idle=False)


def test_a_limit_that_leaves_no_time_to_leave() -> None:
    with pytest.raises(UserError, match="must be more than"):
        allocation("60s", {}, until_idle=False)


def test_by_the_option_before_the_job() -> None:
    job = {"SLURM_JOB_END_TIME": str(int(time.time()) + 7200)}
    asked, given_by_slurm = allocation("1h", job, until_idle=True), allocation(None, job, until_idle=False)
    assert asked.ends is not None
    assert given_by_slurm.ends is not None
    assert abs(asked.ends - time.monotonic() - 3600) < 5
    assert abs(given_by_slurm.ends - time.monotonic() - 7200) < 5
    assert allocation(None, {"SLURM_JOB_END_TIME": "Unknown"}, until_idle=False) == Allocation()


@pytest.mark.parametrize(
    ("printed", "seconds"), [("1:58", 118), ("0:05", 5), ("3:59:02", 14342), ("1-00:00:00", 86400)]
)
def test_a_slurm_that_has_to_be_asked(
    printed: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = program(tmp_path, monkeypatch, "squeue", f"echo ' {printed}'")
    given_by_slurm = allocation(None, {"SLURM_JOB_ID": "4711"}, until_idle=True)
    assert given_by_slurm.ends is not None
    assert abs(given_by_slurm.ends - time.monotonic() - seconds) < 5
    assert said.read_text() == "--noheader --job 4711 --format %L\n"


def test_a_job_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(tmp_path, monkeypatch, "squeue", "echo UNLIMITED")
    assert allocation(None, {"SLURM_JOB_ID": "1"}, until_idle=True) == Allocation(until_idle=True)
    assert not caplog.records


@pytest.mark.parametrize("text", ["echo INVALID", "echo", "echo 'slurm_load_jobs error' >&2; exit 1"])
def test_a_slurm_that_does_not_say_when_a_job_ends(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(tmp_path, monkeypatch, "squeue", text)
    assert allocation(None, {"SLURM_JOB_ID": "1"}, until_idle=True) == Allocation(until_idle=True)
    assert "stays until it is killed" in caplog.text
    assert "give --time-limit" in caplog.text


def test_it_is_over_in_time_to_leave() -> None:
    assert not Allocation().is_over()
    assert not Allocation(time.monotonic() + 65).is_over()
    assert Allocation(time.monotonic() + 55).is_over()


class TestRequeue:
    def test_the_job_that_we_are_in(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said = program(tmp_path, monkeypatch, "scontrol", "exit 0")
        requeue({"SLURM_JOB_ID": "4711"})
        assert said.read_text() == "requeue 4711\n"

    def test_slurm_ends_the_job_before_it_answers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Every process of it gets the signal."""
        heard: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        try:
            program(tmp_path, monkeypatch, "scontrol", "kill -TERM $PPID $$")
            with caplog.at_level("INFO"):
                requeue({"SLURM_JOB_ID": "4711"})
            assert "job 4711 is queued again" in caplog.text
            assert heard == []
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM], "afterwards it is heard again"
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_slurm_will_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program(tmp_path, monkeypatch, "scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
        with pytest.raises(UserError, match=r"requeue 4711: Requested operation is presently disabled \(submit"):
            requeue({"SLURM_JOB_ID": "4711"})

    def test_no_slurm_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UserError, match="there is no SLURM_JOB_ID"):
            requeue({})
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(UserError, match=r"scontrol requeue 1: .*No such file"):
            requeue({"SLURM_JOB_ID": "1"})
