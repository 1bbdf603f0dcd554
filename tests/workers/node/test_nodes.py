"""Two nodes of Ray on one machine: a machine joins, works and leaves, or is refused with the reason."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from service.experiments import actions
from service.queue import nodes
from service.specs.states import NodeState

if TYPE_CHECKING:
    from tests.workers.conftest import Lab, Machines

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


@pytest.mark.deep
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
    assert machine.clock_seconds is not None
    assert abs(machine.clock_seconds) < 1

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
    assert list(machines.temporary.glob("ttsv-ray-*"))

    again = machines.start("again")
    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 120)
    assert len(list(machines.temporary.glob("ttsv-ray-*"))) == 1, "what the killed one left is removed"
    again.send_signal(signal.SIGTERM)
    assert again.wait(30) == 0
    lab.wait_for(lambda: not machines.seen(NodeState.ALIVE), 15)
    assert not machines.processes()
    assert not list(machines.temporary.glob("ttsv-ray-*"))
    worker.terminate()
    worker.wait(40)
    with lab.database.read() as session:
        assert {row.state for row in nodes.listed(session, 100)} == {NodeState.LEFT}


def both(pids: dict[int, int]) -> dict[int, int] | None:
    return pids if len(pids) == 2 else None


@pytest.mark.timeout(3600)
@pytest.mark.deep
def test_nothing_begins_on_a_node_that_does_not_fit_any_more(lab: Lab, machines: Machines) -> None:
    """Ray itself would: its place is the only one that is free. What fits again is used again."""
    lab.settings["TTSV_LEASE_SECONDS"] = "60"
    lab.start_worker()
    token = lab.wait_for((lab.data_dir / "token").exists) and lab.data_dir / "token"
    shutil.copy(token, machines.token)
    machines.start("node", TTSV_WORKER_GPUS="0")
    (node,) = lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 180)
    machines.complain("its clock is ahead")
    lab.wait_for(lambda: [row.problem for row in machines.seen(NodeState.ALIVE)] == ["its clock is ahead"], 30)

    busy = lab.post([0], epochs=10_000, seconds=0.2)
    lab.wait_for_epochs(busy, 2, 180)
    urgent = lab.post([1], epochs=2, priority=9)
    lab.wait_for(lambda: lab.experiment(urgent).state == "running", 60)
    lab.wait_for(lambda: "1 trials may run now" in lab.driver_log(urgent), 90)
    time.sleep(15)
    assert lab.trials(urgent)[0].started_at is None, "it began where nothing may"
    lab.database.write(lambda session: actions.cancel(session, busy))
    lab.wait_until_final(urgent, 180)
    assert lab.nodes_of(urgent) != {node.id}

    machines.complain(None)
    both = lab.post([2, 3, 4, 5], epochs=4, seconds=0.5)
    lab.wait_until_final(both, 240)
    assert node.id in lab.nodes_of(both)
