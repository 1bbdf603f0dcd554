"""Two nodes of Ray on one machine: a machine joins, works and leaves, or is refused with the reason."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from service.database import ClusterNode
from service.queue import nodes
from service.specs.states import NodeState
from workers.node.raylet import free_ports

if TYPE_CHECKING:
    from tests.workers.conftest import Lab

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


class Machines:
    """Machines that join the cluster of a lab's worker, each by the command `ttsv node`."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.token = folder / "token"
        # Ray puts Unix sockets there, whose paths end at 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="n"))
        (self.port,) = free_ports(1)
        first = 20_000 + os.getpid() % 100 * 100
        lab.settings |= {
            "TTSV_HEAD_ADDRESS": "127.0.0.1",
            "TTSV_HEAD_PORT": str(self.port),
            "TTSV_NODE_PORTS": f"{first}-{first + 49}",
        }
        self.ports = f"{first + 50}-{first + 99}"
        self.children: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *, token: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """Joins, with what it says in a log of this name; it knows nothing of the lab but address and token."""
        own = {key: value for key, value in os.environ.items() if not key.startswith(("TTSV_", "RAY_"))}
        env = own | {"PYTHONPATH": str(ROOT), "TTSV_WORKER_CPUS": "1", "TTSV_WORKER_GPUS": "2"}
        env |= {"TMPDIR": str(self.temporary)} | environment
        options = ["--head", f"127.0.0.1:{self.port}", "--token-file", str(token or self.token), "--ports", self.ports]
        with (self.folder / name).open("wb") as log:
            command = [sys.executable, "-m", "workers.cli", "node", *options]
            child = subprocess.Popen(command, env=env, cwd=self.folder, stdout=log, stderr=log)
        self.children.append(child)
        return child

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_AUTH_TOKEN_PATH") == str(self.token):
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def seen(self, *states: NodeState) -> list[ClusterNode]:
        """What the database says, without the head."""
        with self.lab.database.read() as session:
            return [row for row in nodes.listed(session, 100) if row.state in states and not row.head]

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.terminate()
                child.wait(20)
        shutil.rmtree(self.temporary)


@pytest.fixture
def machines(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    machines = Machines(lab, tmp_path_factory.mktemp("machines"))
    yield machines
    machines.close()
    lab.wait_for(lambda: not machines.processes(), 10)


def test_machines_join_work_and_leave_or_are_refused(lab: Lab, machines: Machines) -> None:
    worker = lab.start_worker()
    token = lab.wait_for((lab.data_dir / "token").exists) and lab.data_dir / "token"
    shutil.copy(token, machines.token)
    experiment_id = lab.post([0, 1], epochs=60, seconds=0.5)

    wrong = machines.folder / "wrong"
    wrong.write_text("0" * 64)
    late = machines.folder / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text("import time; real = time.time; time.time = lambda: real() + 60")
    other = machines.folder / "other"
    for package in ("ttsv", "service", "workers"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "ttsv" / "errors.py").open("a") as file:
        file.write("\n")
    refused = {
        "stranger": machines.start("stranger", token=wrong),
        "clock": machines.start("clock", PYTHONPATH=f"{late}:{ROOT}"),
        "code": machines.start("code", PYTHONPATH=str(other)),
    }
    node = machines.start("node")

    for name, child in refused.items():
        assert child.wait(120) == 1, machines.said(name)
    assert "the token is not that of the cluster" in machines.said("stranger")
    assert "the clock is 60 s ahead of the head's" in machines.said("clock")
    assert "the code differs" in machines.said("code")
    assert "Ray" not in machines.said("code").partition("cannot join")[2]

    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 120)
    (there,) = machines.seen(NodeState.ALIVE)
    assert (there.cpus, there.gpus, there.problem) == (1, 2, None)
    machine = nodes.machine_of(there)
    assert machine is not None
    assert abs(machine.clock_seconds or 9) < 1

    pids = lab.wait_for(lambda: both(lab.pids(experiment_id)), 60)
    there_too = {process.pid for process in machines.processes()}
    away = [trial_id for trial_id, pid in pids.items() if pid in there_too]
    assert len(away) == 1, "one trial of two runs on the node"
    raylet = next(process for process in machines.processes() if process.name() == "raylet")
    listening = {
        connection.laddr.port
        for process in (raylet, psutil.Process(pids[away[0]]))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    first, last = map(int, machines.ports.split("-"))
    assert listening <= set(range(first, last + 1))

    node.kill()  # and the kernel ends what it started
    node.wait()
    lab.wait_for(lambda: not machines.seen(NodeState.ALIVE), 30)
    (left,) = machines.seen(NodeState.LEFT)
    assert left.id == there.id
    lab.wait_for(lambda: not machines.processes(), 10)
    assert list(machines.temporary.iterdir())

    again = machines.start("again")
    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 120)
    assert len(list(machines.temporary.iterdir())) == 1, "what the killed one left is removed"
    again.send_signal(signal.SIGTERM)
    assert again.wait(30) == 0
    lab.wait_for(lambda: not machines.seen(NodeState.ALIVE), 15)
    assert not machines.processes()
    assert not list(machines.temporary.iterdir())
    worker.terminate()
    worker.wait(40)
    with lab.database.read() as session:
        assert {row.state for row in nodes.listed(session, 100)} == {NodeState.LEFT}


def both(pids: dict[int, int]) -> dict[int, int] | None:
    return pids if len(pids) == 2 else None
