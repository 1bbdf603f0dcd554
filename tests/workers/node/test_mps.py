"""The control daemon of MPS: how it is started, used, watched, ended and swept up; the programs are stand-ins."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.errors import UserError
from tests.mps import write_stand_ins
from ttsv.hardware.mps import PIPES, PROGRAM, answers, told
from workers.node import mps
from workers.node.mps import Mps, is_answering, remove_daemons, serving_elsewhere
from workers.node.processes import identity
from workers.node.raylet import RayProcess

CARDS = ["GPU-1111", "GPU-2222"]


class Machine:
    """What is on the machine: the folder for temporary files, and the daemons that were started."""

    def __init__(self, folder: Path) -> None:
        self.temporary, self._journal = folder / "t", folder / "journal"

    def daemons(self) -> list[tuple[int, dict[str, str]]]:
        """The pid and the environment of each daemon that came to listen."""
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        return [(pid, env) for pid, env in map(json.loads, lines)]

    def folders(self) -> list[Path]:
        return sorted(self.temporary.iterdir())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine with MPS installed and nobody's daemon. (`tmp_path` is made before temporary files go elsewhere.)"""
    short = Path(tempfile.mkdtemp(prefix="m"))  # a test's own folder is too long for sockets
    (short / "t").mkdir()
    write_stand_ins(short)
    monkeypatch.setenv("PATH", f"{short}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_JOURNAL", str(short / "journal"))
    monkeypatch.setenv("TMPDIR", str(short / "t"))
    monkeypatch.setattr("tempfile.tempdir", str(short / "t"))
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_PIPES", short / "nobody")
    found = Machine(short)
    yield found
    for process in running(found):
        process.kill()
    shutil.rmtree(short)


def running(machine: Machine) -> list[psutil.Process]:
    """The stand-ins that run."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = any(str(machine.temporary.parent / "nvidia-cuda-mps") in part for part in process.cmdline())
            if mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(true: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def started(machine: Machine) -> Iterator[Mps]:
    service = Mps(CARDS)
    service.start()
    yield service
    service.stop()


def client_environment(service: Mps) -> dict[str, str]:
    return {**os.environ, **service.environment}


def test_it_serves_the_cards_that_are_offered(machine: Machine, started: Mps, monkeypatch: pytest.MonkeyPatch) -> None:
    ((pid, env),) = machine.daemons()
    assert psutil.Process(pid).ppid() == os.getpid()
    (folder,) = machine.folders()
    assert started.environment == {
        "CUDA_VISIBLE_DEVICES": "GPU-1111,GPU-2222",
        "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
    }
    assert started.environment.items() <= env.items()
    assert folder.stat().st_mode & 0o077 == 0, "nobody else's business"
    assert answers(client_environment(started))
    assert is_answering(folder)
    assert not started.failed()


def test_it_holds_no_credentials_and_speaks_version_2(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTSV_DATABASE_URL", "postgresql://secret@/x")
    monkeypatch.setenv("CUDA_MPS_PROTOCOL_VERSION", "3")
    service = Mps(CARDS)
    service.start()
    ((_, env),) = machine.daemons()
    service.stop()
    assert not {"TTSV_DATABASE_URL", "CUDA_MPS_PROTOCOL_VERSION"} & env.keys()


def test_it_ends_with_its_server_and_leaves_nothing(machine: Machine, started: Mps) -> None:
    assert told(f"start_server -uid {os.getuid()}", client_environment(started), 5)
    until(lambda: len(running(machine)) == 2)
    started.stop()
    assert running(machine) == machine.folders() == []
    assert started.failed()
    started.start()
    assert not started.failed()
    assert len(machine.daemons()) == 2


@pytest.mark.slow
def test_one_that_does_not_listen_any_more_is_killed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_STOP_SECONDS", 0.5)
    monkeypatch.setenv("STAND_IN_MPS", "stubborn")
    service = Mps(CARDS)
    service.start()
    assert told(f"start_server -uid {os.getuid()}", client_environment(service), 5)
    until(lambda: len(running(machine)) == 2)
    ((pid, _),) = machine.daemons()
    os.kill(pid, signal.SIGSTOP)
    service.stop()
    assert running(machine) == machine.folders() == []


@pytest.mark.parametrize("manner", ["", "stubborn"])
def test_what_a_killed_owner_leaves(machine: Machine, monkeypatch: pytest.MonkeyPatch, manner: str) -> None:
    monkeypatch.setenv("STAND_IN_MPS", manner)
    code = (
        "import os; from ttsv.hardware.mps import told; from workers.node.mps import Mps; service = Mps(['GPU-1']);"
        "service.start(); told('start_server -uid 0', {**os.environ, **service.environment}, 5); print(); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        until(lambda: len(running(machine)) == 2)
        remove_daemons()
        assert len(running(machine)) == 2, "its owner lives"
        owner.kill()
        owner.wait()
    if not manner:
        until(lambda: len(running(machine)) == 1)  # the kernel told the daemon, and nobody told its server
    remove_daemons()
    assert running(machine) == machine.folders() == []


class TestWhereThereCanBeNone:
    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(UserError, match=f"{PROGRAM} is not installed: it comes with NVIDIA's driver"):
            Mps(CARDS)

    def test_no_card(self, machine: Machine) -> None:
        with pytest.raises(UserError, match="no GPU that nvidia-smi lists is offered here; unset it"):
            Mps([])

    def test_parts_of_a_card(self, machine: Machine) -> None:
        Mps(["MIG-1"])
        with pytest.raises(UserError, match=r"parts of a card \(MIG\).* start a worker for each"):
            Mps(["MIG-1", "MIG-2"])

    def test_a_path_that_is_too_long(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        long = machine.temporary / ("x" * 60)
        long.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(long))
        with pytest.raises(UserError, match="too long a path for its sockets: set TMPDIR to a shorter one"):
            Mps(CARDS).start()
        assert not list(long.iterdir())

    def test_one_that_cannot_be_started_leaves_nothing(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        """However often that is tried, as where the machine has no process left for a moment."""

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        service = Mps(CARDS)
        service.start()
        service.stop()
        monkeypatch.setattr(mps, "spawn", refuse)
        for _ in range(2):
            service.start()
            assert service.failed()
            assert "cannot be started: [Errno 11] Resource temporarily unavailable" in service.last_words()
            service.stop()
            assert machine.folders() == []

    def test_one_that_ends_at_once(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAND_IN_MPS", "die")
        service = Mps(CARDS)
        with pytest.raises(UserError, match=r"ended at once: .*Failed to set up / .*Cannot bind to the control socket"):
            service.start()
        assert running(machine) == machine.folders() == []

    @pytest.mark.slow
    def test_one_that_never_answers(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAND_IN_MPS", "deaf")
        monkeypatch.setattr(mps, "START_SECONDS", 1.0)
        with pytest.raises(UserError, match="does not answer within 1 s: it said nothing; mend that, or unset TTSV_WO"):
            Mps(CARDS).start()
        assert running(machine) == machine.folders() == []


def test_one_that_dies_is_started_again_when_it_can_be(
    machine: Machine, started: Mps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has served, its owner goes on trying."""
    ((pid, _),) = machine.daemons()
    os.kill(pid, signal.SIGKILL)
    until(started.failed)
    assert started.last_words().startswith("the MPS control daemon ended: [")
    monkeypatch.setenv("STAND_IN_MPS", "die")
    started.stop()
    started.start()
    assert started.failed()
    assert started.last_words().startswith("the MPS control daemon ended at once: [")
    assert "\n" not in started.last_words()
    monkeypatch.delenv("STAND_IN_MPS")
    started.stop()
    started.start()
    assert not started.failed()


class TestSomebodyElses:
    @pytest.fixture
    def pipes(self, machine: Machine) -> Iterator[Path]:
        """The folder of a daemon in the background."""
        pipes = machine.temporary.parent / "theirs"
        pipes.mkdir()
        env = {**os.environ, PIPES: str(pipes)}
        subprocess.run([PROGRAM, "-d"], env=env, check=True, stdout=subprocess.DEVNULL)
        yield pipes
        assert told("quit", env, 5)

    def test_is_used_and_left_alone(self, machine: Machine, pipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(PIPES, str(pipes))
        service = Mps(CARDS)
        service.start()
        assert service.environment == {PIPES: str(pipes), "CUDA_VISIBLE_DEVICES": "GPU-1111,GPU-2222"}
        assert not service.failed()
        service.stop()
        assert len(machine.daemons()) == 1
        assert answers(os.environ)
        assert machine.folders() == []

    def test_where_every_process_looks(self, machine: Machine, pipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mps, "DEFAULT_PIPES", pipes)
        assert serving_elsewhere(os.environ) == pipes
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        if pipes.stat().st_uid != 0:
            assert serving_elsewhere(os.environ) is None, "another user's takes no client of ours"

    def test_one_that_is_gone_is_none(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv(PIPES, str(machine.temporary.parent / "gone"))
        service = Mps(CARDS)
        service.start()
        assert "no MPS daemon answers at" in caplog.text
        ((_, env),) = machine.daemons()
        assert env[PIPES] == service.environment[PIPES] == f"{machine.folders()[0]}/pipe"
        service.stop()


class TestRay:
    @pytest.fixture
    def environments(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
        """In place of Ray a program that waits; what it is given."""
        found = []

        def spawn(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.Popen[bytes]:
            found.append(env)
            return subprocess.Popen(["sleep", "60"], start_new_session=True)

        monkeypatch.setattr("workers.node.raylet.spawn", spawn)
        return found

    def test_it_starts_after_the_daemon_and_ends_before_it(
        self, machine: Machine, tmp_path: Path, environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        service = Mps(CARDS)
        ray = RayProcess({"raylet"}, tmp_path / "token", mps=service)
        ray.start(options={}, environment={"CUDA_VISIBLE_DEVICES": "GPU-1111"})
        assert service.environment.items() <= environments[0].items()
        assert answers(environments[0])
        assert not ray.failed()
        ray.stop()
        assert running(machine) == machine.folders() == []

    def test_it_goes_with_the_daemon(
        self, machine: Machine, tmp_path: Path, environments: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ray = RayProcess({"raylet"}, tmp_path / "token", mps=Mps(CARDS))
        ray.start(options={})
        os.kill(machine.daemons()[0][0], signal.SIGKILL)
        until(ray.failed)
        assert "the MPS control daemon ended: " in ray.last_words()
        ray.stop()
        monkeypatch.setenv("STAND_IN_MPS", "die")
        ray.start(options={})
        assert ray.failed()
        assert not ray.ready()
        assert len(environments) == 1, "no trial begins without the daemon"
        assert "the MPS control daemon ended at once: " in ray.last_words()
        ray.stop()
        monkeypatch.delenv("STAND_IN_MPS")
        ray.start(options={})
        assert not ray.failed()
        assert environments[0][PIPES] != environments[1][PIPES]
        ray.stop()
        assert running(machine) == machine.folders() == []

    def test_what_is_left_is_swept_by_one_without_it(
        self, machine: Machine, tmp_path: Path, environments: list[dict[str, str]]
    ) -> None:
        left = machine.temporary / "ttsv-mps-left"
        left.mkdir()
        (left / "owner.json").write_text(json.dumps({**(identity() or {}), "start": 1}))
        ray = RayProcess({"raylet"}, tmp_path / "token")
        ray.start(options={})
        ray.stop()
        assert machine.folders() == []
