"""A child of the local stack that ends is started again, by stand-ins for its processes and for time."""

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from service.errors import UserError
from service.settings import Settings
from workers.worker import single_machine
from workers.worker.ray_cluster import STUCK
from workers.worker.single_machine import PATIENCE_SECONDS, Child, LocalStack


class Clock:
    """Time that passes only where somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(single_machine, "time", found)
    return found


class Process:
    """One that lives until it is told to end."""

    ended, code = False, 1

    def poll(self) -> int | None:
        return self.code if self.ended else None


class Machine:
    """Starts processes, where it does not refuse."""

    def __init__(self) -> None:
        self.refuses = False
        self.tries, self.started = 0, list[Process]()

    def start(self, _log: Path) -> Any:
        self.tries += 1
        if self.refuses:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        self.started.append(Process())
        return self.started[-1]


def stay(child: Child, clock: Clock, seconds: float) -> None:
    until = clock.now + seconds
    while clock.now < until:
        child.tend()
        clock.sleep(0.5)


def test_a_machine_that_refuses_for_a_while_is_asked_again(clock: Clock, tmp_path: Path) -> None:
    machine = Machine()
    child = Child("worker", machine.start, tmp_path / "log")
    stay(child, clock, 60)
    machine.started[0].ended = machine.refuses = True
    stay(child, clock, PATIENCE_SECONDS / 2)
    assert 1 + PATIENCE_SECONDS / 60 <= machine.tries < 2 * PATIENCE_SECONDS / 2  # ever less often
    machine.refuses = False
    stay(child, clock, 60)
    assert len(machine.started) == 2
    # Refusals are none of its quick ends: it may end so often at once as ever.
    for _ in range(single_machine._MAX_QUICK_RESTARTS - 1):
        machine.started[-1].ended = True
        stay(child, clock, 1)
    assert len(machine.started) == 1 + single_machine._MAX_QUICK_RESTARTS


def test_the_number_of_one_that_ended_long_ago_is_not_killed(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Any] = []
    monkeypatch.setattr(single_machine, "stop", lambda process, grace: stopped.append(process))
    machine = Machine()
    child = Child("worker", machine.start, tmp_path / "log")
    machine.started[0].ended = machine.refuses = True
    stay(child, clock, 60)
    child.stop(1)
    assert stopped == []
    machine.refuses = False
    stay(child, clock, 60)
    child.stop(1)
    assert stopped == machine.started[1:]


def test_one_that_refuses_for_good_is_said(clock: Clock, tmp_path: Path) -> None:
    machine = Machine()
    child = Child("worker", machine.start, tmp_path / "log")
    machine.started[0].ended = machine.refuses = True
    with pytest.raises(UserError, match=r"the worker ended, and could not be started again for 600 s: .*unavailable"):
        stay(child, clock, 2 * PATIENCE_SECONDS)
    assert clock.now < PATIENCE_SECONDS + 60


def test_the_first_start_is_not_tried_again(tmp_path: Path) -> None:
    machine = Machine()
    machine.refuses = True
    with pytest.raises(OSError, match="unavailable"):
        Child("worker", machine.start, tmp_path / "log")


def test_one_that_ends_at_once_again_and_again_is_given_up(clock: Clock, tmp_path: Path) -> None:
    machine = Machine()
    log = tmp_path / "log"
    log.write_text("no such table")
    child = Child("API", machine.start, log)
    for _ in range(single_machine._MAX_QUICK_RESTARTS - 1):
        machine.started[-1].ended = True
        stay(child, clock, 1)
    machine.started[-1].ended = True
    with pytest.raises(UserError, match=r"the API ended 5 times at once; .*\n.*no such table"):
        child.tend()


def test_one_that_is_killed_again_and_again_is_started_again(clock: Clock, tmp_path: Path) -> None:
    machine = Machine()
    child = Child("worker", machine.start, tmp_path / "log")
    for _ in range(20):
        machine.started[-1].ended, machine.started[-1].code = True, -signal.SIGKILL
        stay(child, clock, 1)
    assert len(machine.started) == 21


class TestComplaints:
    """A worker lives on whose Ray does not start: it ends no more often than any other, and its log alone tells why."""

    LINE = f"2026-01-01T00:00:00.000Z ERROR workers.worker.poller: {STUCK}, so that no trial can run: port 6379\n"

    def test_each_is_said_once(self, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        stack, said = LocalStack(Settings(data_dir=tmp_path)), list[str]()
        log = tmp_path / "logs" / "worker.log"
        log.parent.mkdir()

        def sleep(_seconds: float) -> None:
            if len(rounds) == 0:
                raise KeyboardInterrupt
            with log.open("a") as file:
                file.write(rounds.pop(0))

        other = "2026-01-01T00:00:00.000Z ERROR workers.worker.poller: the Ray cluster is gone\n"
        rounds = ["", other, self.LINE[:60], self.LINE[60:] + other, ""]
        monkeypatch.setattr(clock, "sleep", sleep)
        stack.stay(said.append)
        assert said == [f"the worker tries again and again: {STUCK}, so that no trial can run: port 6379 (see {log})"]

    def test_a_log_that_was_emptied_is_read_from_its_begin(self, tmp_path: Path) -> None:
        stack = LocalStack(Settings(data_dir=tmp_path))
        assert stack.complaints() == [], "there is none yet"
        log = tmp_path / "logs" / "worker.log"
        log.parent.mkdir()
        log.write_text("x" * 500 + "\n")
        assert stack.complaints() == []
        log.write_text(self.LINE)
        assert len(stack.complaints()) == 1
