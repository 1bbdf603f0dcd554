"""The worker with stand-ins for Ray and for drivers."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from sqlalchemy import String, cast, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from service.database import ClusterNode, Event, Experiment, Trial, TrialState, now
from service.database import Worker as WorkerRow
from service.database.experiments import ProcessIdentity
from service.errors import UserError
from service.experiments import actions
from service.experiments.transitions import BEHIND, MOST_OF_A_PERSON
from service.queue import leases, nodes
from service.queue.cluster import UNKNOWN, Node
from service.queue.contenders import say_why
from service.queue.leases import Lease
from service.queue.shares import Amount, Demand
from service.queue.trials import HeldExperiment, hold
from service.settings import Settings
from service.storage import MARKER, remove_checkpoints
from service.upkeep.home import settle
from tests.held import under
from ttsv.results import CHECKPOINTS
from ttsv.runtime import faults
from workers.node import processes
from workers.node.processes import identity
from workers.worker import job_time, poller
from workers.worker.job_time import Allocation
from workers.worker.poller import Standstill, Worker
from workers.worker.ray_cluster import STUCK, Cluster, LocalCluster
from workers.worker.upkeep import Upkeep

pytestmark = pytest.mark.here

if TYPE_CHECKING:
    from tests.workers.conftest import Lab


class StandInCluster(Cluster):
    """Always there, until it is told to fail."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.starts = self.stops = 0
        self.room = [Amount(8)]
        self.broken = False

    def start(self) -> None:
        self.starts += 1
        self.broken = False

    def stop(self) -> None:
        self.stops += 1

    def ready(self) -> bool:
        return not self.broken

    def failed(self) -> bool:
        return self.broken

    def nodes(self) -> list[Node]:
        return [Node(f"node-{place}", "host", "127.0.0.1", *amount) for place, amount in enumerate(self.room)]

    def last_words(self) -> str:
        return "no port left"

    def env(self) -> dict[str, str]:
        return {}


class Rig:
    """A worker whose turns the test takes."""

    def __init__(self, lab: Lab, code: str, allocation: Allocation | None = None, **settings: Any) -> None:
        self.lab = lab
        self.cluster = StandInCluster()
        self.settings = Settings(data_dir=lab.data_dir, poll_seconds=0.02, **settings)
        command = (sys.executable, "-c", code)
        database, cluster = lab.database, self.cluster
        self.worker = Worker(self.settings, database, driver=command, cluster=cluster, allocation=allocation)

    def turn_until(self, condition: Callable[[], Any], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.seen()
            self.worker._turn()
            time.sleep(0.02)

    def seen(self) -> str:
        """What a reader wants to know when something did not happen in time."""
        with self.lab.database.read() as session:
            rows = session.scalars(select(Experiment).order_by(Experiment.id)).all()
            found = [f"{row.id} {row.state.value} fence {row.fence} {row.worker} {row.waiting}" for row in rows]
        logs = {path.name: path.read_text()[-500:] for path in (self.lab.data_dir / "logs").glob("*")}
        drivers = [(driver.lease, driver.told, driver.child.poll()) for driver in self.worker._drivers]
        return f"it did not happen in time: {found}, {drivers}, {logs}"


class TestNodes:
    NODE = Node("a" * 56, "one", "10.0.0.1", cpus=4, gpus=1, memory_gib=10)

    def states(self, lab: Lab) -> dict[str, str]:
        with lab.database.read() as session:
            return {row.host: row.state.value for row in nodes.listed(session, 10)}

    def test_what_the_cluster_says_is_stored_when_it_changes(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = Rig(lab, SLEEP, beat_seconds=20, lease_seconds=60)
        monkeypatch.setattr(rig.cluster, "nodes", lambda: seen)
        seen: tuple[Node, ...] | None = None
        rig.worker._turn()
        assert self.states(lab) == {}
        seen = (self.NODE,)
        rig.worker._turn()
        assert self.states(lab) == {"one": "alive"}
        seen = (self.NODE, dataclasses.replace(self.NODE, id="b", host="two"))
        rig.worker._turn()
        assert self.states(lab) == {"one": "alive", "two": "alive"}
        rig.worker._drain()
        assert self.states(lab) == {"one": "left", "two": "left"}

    def test_a_killed_neighbour_and_its_nodes_left_when_they_were_last_heard_of(
        self, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        here = identity()
        assert here is not None
        pid = max(psutil.pids()) + 1000
        (tmp_path / "ttsv-ray-x").mkdir()
        (tmp_path / "ttsv-ray-x/owner.json").write_text(json.dumps({**here, "pid": pid}))
        killed, heard = f"{socket.gethostname()}-{pid}", now() - timedelta(seconds=20)
        experiment_id = lab.post([0])
        _claim(lab, killed, {**here, "pid": pid})
        lab.database.write(lambda session: nodes.record(session, killed, [self.NODE]))
        lab.database.write(lambda session: session.add(WorkerRow(name=killed, cpus=1, gpus=0, seen_at=heard)))
        rig = Rig(lab, SLEEP, lease_seconds=1000)
        shutil.rmtree(tmp_path / "ttsv-ray-x")  # as a cluster that starts does
        rig.worker._turn()
        assert self.states(lab) == {"one": "left", "host": "alive"}
        with lab.database.read() as session:
            assert list(session.scalars(select(WorkerRow.name))) == [rig.worker.name]
        assert lab.experiment(experiment_id).worker == rig.worker.name
        rig.worker._drain()

    def test_and_with_every_beat(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[object] = []
        monkeypatch.setattr("service.queue.nodes.record", lambda session, worker, seen: written.append(seen))
        rig = Rig(lab, SLEEP, beat_seconds=0.2, lease_seconds=60)
        monkeypatch.setattr(rig.cluster, "nodes", lambda: (self.NODE,))
        for _ in range(3):
            rig.worker._turn()
        assert len(written) == 1
        time.sleep(0.25)
        rig.worker._turn()
        assert len(written) == 2


SLEEP = "import time; time.sleep(60)"


class TestMps:
    """Whether a worker has a daemon for its trials."""

    @pytest.fixture(autouse=True)
    def _card(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, says in (("nvidia-smi", f"GPU-{uuid.uuid4()}, H100, 81559"), ("nvidia-cuda-mps-control", "")):
            (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def test_only_where_it_is_asked_for(self, lab: Lab) -> None:
        for wanted in (False, True):
            worker = Worker(Settings(data_dir=lab.data_dir, worker_mps=wanted), lab.database)
            assert isinstance(worker._cluster, LocalCluster)
            assert (worker._cluster._ray._mps is not None) == wanted
            worker._cards.close()

    def test_where_no_card_is_offered(self, lab: Lab) -> None:
        with pytest.raises(UserError, match="TTSV_WORKER_MPS = true, and no GPU that nvidia-smi lists is offered"):
            Worker(Settings(data_dir=lab.data_dir, worker_mps=True, worker_gpus=0), lab.database)

    def test_of_a_cluster_of_somebody_else_no_card_is_booked(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("RAY_ADDRESS", "head:6379")
            joined = Worker(Settings(data_dir=lab.data_dir, worker_gpus=1), lab.database)
        here = Worker(Settings(data_dir=lab.data_dir, worker_gpus=1), lab.database)
        assert (joined._cards.count, here._cards.count) == (0, 1)
        here._cards.close()

    def test_a_cluster_of_somebody_else_has_somebody_elses(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
        with pytest.raises(UserError, match="RAY_ADDRESS = head:6379: whoever starts that cluster starts MPS"):
            Worker(Settings(data_dir=lab.data_dir, worker_mps=True), lab.database)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.database.outages.random.uniform", lambda low, high: 0.02)


def test_driver_that_always_dies_is_started_again_and_nobody_is_blamed(lab: Lab) -> None:
    experiment_id = lab.post([0, 1])
    rig = Rig(lab, "import sys; sys.exit(3)")
    rig.turn_until(lambda: lab.experiment(experiment_id).fence >= 6)
    assert {(trial.state, trial.attempts) for trial in lab.trials(experiment_id)} == {("queued", 0)}
    logs = sorted(path.name for path in (lab.data_dir / "logs").iterdir())
    assert logs[:5] == [f"experiment-{experiment_id}-{fence}.log" for fence in range(1, 6)]
    rig.worker._drain()


def test_who_waits_for_a_driver_that_dies_is_told_so(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.database.outages.random.uniform", lambda low, high: 60)
    experiment_id = lab.post([0, 1])
    rig = Rig(lab, "import sys; sys.exit(3)")
    rig.turn_until(lambda: lab.experiment(experiment_id).waiting)
    reason = lab.experiment(experiment_id).waiting
    assert reason == "its driver died or could not start once (see the worker's logs) and is started again soon"
    assert lab.experiment(experiment_id).state == "queued"
    rig.worker._drain()


def test_a_disk_without_room_costs_no_worker(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No driver and no cluster can be started while it is full; afterwards all goes on."""
    monkeypatch.setattr("service.database.outages.random.uniform", lambda low, high: 0.2)
    full = True

    def spawn(*arguments: Any, **options: Any) -> Any:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return processes.spawn(*arguments, **options)

    monkeypatch.setattr("workers.worker.drivers.spawn", spawn)
    rig = Rig(lab, SLEEP)
    start = rig.cluster.start

    def start_where_there_is_room() -> None:
        rig.cluster.broken = True
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        start()

    monkeypatch.setattr(rig.cluster, "start", start_where_there_is_room)
    experiment_id = lab.post([0, 1])
    rig.turn_until(lambda: lab.experiment(experiment_id).waiting)
    experiment = lab.experiment(experiment_id)
    assert re.fullmatch(
        r"its driver died or could not start (once|\d+ times) \(see the worker's logs\) and is started again soon",
        experiment.waiting or "",
    )
    assert (experiment.state, len(rig.worker._drivers)) == ("queued", 0)
    rig.cluster.broken = True
    rig.worker._turn()
    assert rig.cluster.failed()
    assert "the Ray cluster cannot be started, trying again: [Errno 28] No space left" in caplog.text
    assert "no driver can be started for experiment 1: [Errno 28] No space left" in caplog.text
    full = False
    rig.turn_until(lambda: len(rig.worker._drivers) == 1)
    assert not rig.cluster.failed()
    rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
    assert {(trial.attempts, trial.deaths) for trial in lab.trials(experiment_id)} == {(0, 0)}
    rig.worker._drain()


def test_what_was_claimed_and_could_not_be_started_is_claimed_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("service.database.outages.random.uniform", lambda low, high: 0.2)
    monkeypatch.setattr(faults, "_armed", faults.read("after_claim=raise"))
    monkeypatch.setenv(faults.ONCE, str(tmp_path / "faults"))
    experiment_id = lab.post([0, 1])
    rig = Rig(lab, SLEEP)
    rig.turn_until(lambda: len(rig.worker._drivers) == 1)
    assert (tmp_path / "faults" / "after_claim").exists()
    experiment = lab.experiment(experiment_id)
    assert (experiment.state, experiment.fence) == ("running", 2)
    assert {(trial.attempts, trial.deaths) for trial in lab.trials(experiment_id)} == {(0, 0)}
    rig.worker._drain()


def test_a_lease_without_a_driver_is_given_back_by_who_stops(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("workers.worker.drivers.spawn", spawn)
    rig = Rig(lab, SLEEP)
    experiment_id = lab.post([0])
    rig.turn_until(lambda: lab.experiment(experiment_id).fence == 1)
    rig.worker._drain()
    assert (lab.experiment(experiment_id).state, lab.experiment(experiment_id).worker) == ("queued", None)


def test_what_fits_no_node_waits_and_says_why(lab: Lab) -> None:
    experiment_id = lab.post([0, 1], resources={"gpus": 3})
    other = lab.post([0])
    rig = Rig(lab, SLEEP)
    rig.cluster.room = [Amount(8, 2), Amount(8, 2)]
    rig.turn_until(lambda: lab.experiment(experiment_id).waiting)
    assert lab.experiment(experiment_id).waiting == "needs 3 GPUs on one node; the largest has 2"
    assert lab.experiment(other).state == "running"
    assert lab.experiment(other).waiting is None
    rig.cluster.room.append(Amount(8, 4))
    rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
    assert (lab.experiment(experiment_id).waiting, lab.experiment(experiment_id).unfit_since) == (None, None)
    rig.worker._drain()


def test_a_clock_that_jumps_ahead_is_no_time_in_which_something_fits_no_node(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment_id = lab.post([0], resources={"gpus": 3})
    rig = Rig(lab, SLEEP, unfit_seconds=600)
    rig.turn_until(lambda: lab.experiment(experiment_id).unfit_since)
    # By the clock that jumped, what was written before is older.
    genuine, jump = time.time, timedelta(hours=2)
    before = now() - jump
    lab.database.write(lambda session: session.execute(update(Experiment).values(unfit_since=before)))
    lab.database.write(lambda session: session.execute(update(WorkerRow).values(seen_at=before)))
    monkeypatch.setattr(time, "time", lambda: genuine() + jump.total_seconds())
    rig.worker._turn()
    experiment = lab.experiment(experiment_id)
    assert experiment.state == "queued"
    rig.turn_until(lambda: lab.experiment(experiment_id).unfit_since)
    since = lab.experiment(experiment_id).unfit_since
    assert since is not None
    assert since > before + jump / 2
    rig.worker._drain()


def test_what_fits_here_runs_however_many_that_do_not_come_first(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of somebody's experiments no more than the first are looked at each time."""
    monkeypatch.setattr("workers.worker.scheduler.MOST_OF_A_PERSON", 3)
    monkeypatch.setattr("workers.worker.scheduler.LOOK_FAR_SECONDS", 0.2)
    large = [lab.post([0], resources={"gpus": 3}) for _ in range(7)]
    small = lab.post([0])
    rig = Rig(lab, SLEEP)
    rig.turn_until(lambda: lab.experiment(small).state == "running")
    assert all(str(lab.experiment(number).waiting).startswith("needs 3 GPUs") for number in large)
    rig.cluster.room = [Amount(8, 3)]
    rig.turn_until(lambda: lab.experiment(large[0]).state == "running")
    rig.worker._drain()


@pytest.mark.parametrize("people", [1, 2])
def test_what_has_room_runs_however_many_come_first_that_wait_for_others(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, people: int
) -> None:
    """Those fit as well, once a card is free: none of its places is to stay empty until then."""
    monkeypatch.setattr("workers.worker.scheduler.LOOK_FAR_SECONDS", 0.2)
    large = [lab.post([0], resources={"gpus": 1}) for _ in range(people * (MOST_OF_A_PERSON + 2))]
    small = [lab.post([0], resources={"gpus": 0}) for _ in range(people)]
    owner = cast(Experiment.id % people, String)
    lab.database.write(lambda session: session.execute(update(Experiment).values(owner=owner)))
    rig = Rig(lab, SLEEP)
    rig.cluster.room = [Amount(8, 1)]
    rig.turn_until(lambda: all(lab.experiment(number).state == "running" for number in small))
    states = [lab.experiment(number).state for number in large]
    assert states == ["running"] + ["queued"] * (len(large) - 1)
    rig.turn_until(lambda: all(lab.experiment(number).waiting for number in large[1:]))
    said = [str(lab.experiment(number).waiting) for number in large]
    assert all(reason.startswith("others come first") for reason in said[1:])
    assert [reason == BEHIND for reason in said[-people:]] == [True] * people
    rig.worker._drain()


class TestTwoClusters:
    """Two workers with clusters unlike each other's, and one queue."""

    def neighbour(self, lab: Lab, name: str, *room: Amount, problem: str | None = None) -> None:
        seen = [
            Node(f"{name}-{place}", name, "10.0.0.9", *amount, problem=problem) for place, amount in enumerate(room)
        ]
        lab.database.write(lambda session: nodes.record(session, name, seen))

    def test_who_has_room_says_why_it_waits(self, lab: Lab) -> None:
        """And nobody fails what another worker will run."""
        experiment_id = lab.post([0], resources={"gpus": 3})
        self.neighbour(lab, "zeta", Amount(8, 4))
        lab.database.write(lambda session: say_why(session, {experiment_id: "others come first"}, ()))
        rig = Rig(lab, SLEEP, unfit_seconds=0.1)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            rig.worker._turn()
            experiment = lab.experiment(experiment_id)
            assert (experiment.state, experiment.unfit_since) == ("queued", None)
            assert experiment.waiting == "others come first"

    def test_of_what_nobody_has_room_for_all_say_the_same(self, lab: Lab) -> None:
        experiment_id = lab.post([0], resources={"gpus": 5})
        self.neighbour(lab, "alpha", Amount(8, 4))
        self.neighbour(lab, "broken", Amount(8, 8), problem="its clock is ahead")
        rig = Rig(lab, SLEEP)
        rig.cluster.room = [Amount(8, 2)]
        rig.turn_until(lambda: lab.experiment(experiment_id).waiting)
        assert lab.experiment(experiment_id).waiting == "needs 5 GPUs on one node; the largest has 4"
        assert lab.experiment(experiment_id).unfit_since is not None

    def test_who_is_gone_says_nothing_any_more(self, lab: Lab) -> None:
        experiment_id = lab.post([0], resources={"gpus": 3})
        self.neighbour(lab, "alpha", Amount(8, 4))
        lab.database.write(lambda session: say_why(session, {experiment_id: "others come first"}, ()))
        killed = update(ClusterNode).values(seen_at=now() - timedelta(minutes=2))
        lab.database.write(lambda session: session.execute(killed))
        rig = Rig(lab, SLEEP)
        rig.turn_until(lambda: lab.experiment(experiment_id).waiting != "others come first")
        assert lab.experiment(experiment_id).waiting == "needs 3 GPUs on one node; the largest has 0"

    @pytest.mark.parametrize(("name", "told"), [("!", "theirs"), ("~", "ours")])
    def test_where_both_have_room_the_first_by_name_says_why(self, lab: Lab, name: str, told: str) -> None:
        first, second = lab.post([0]), lab.post([0])
        self.neighbour(lab, name, Amount(8))
        lab.database.write(lambda session: say_why(session, {second: "theirs"}, ()))
        rig = Rig(lab, SLEEP)
        rig.cluster.room = [Amount(1)]
        rig.turn_until(lambda: lab.experiment(first).state == "running")
        for _ in range(3):
            rig.worker._turn()
        ours = f"others come first: the cluster is shared by experiments {first}"
        assert lab.experiment(second).waiting == {"theirs": "theirs", "ours": ours}[told]
        rig.worker._drain()

    def test_whoever_has_room_runs_it_whatever_was_said(self, lab: Lab) -> None:
        experiment_id = lab.post([0], resources={"gpus": 3})
        self.neighbour(lab, "!", Amount(8, 4))
        lab.database.write(lambda session: say_why(session, {experiment_id: "others come first"}, ()))
        rig = Rig(lab, SLEEP)
        rig.cluster.room = [Amount(8, 4)]
        rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
        assert lab.experiment(experiment_id).waiting is None
        rig.worker._drain()

    def test_the_last_one_to_leave_says_that_nobody_is_there(self, lab: Lab) -> None:
        experiment_id = lab.post([0], resources={"gpus": 3})
        lab.database.write(lambda session: leases.greet(session, "another", 1, 0))
        first, second = Rig(lab, SLEEP), Rig(lab, SLEEP)
        second.worker.name = second.worker._scheduler._worker = "second"
        first.turn_until(lambda: lab.experiment(experiment_id).waiting)
        second.worker._turn()
        lab.database.write(lambda session: leases.part(session, "another"))
        first.worker._drain()
        assert str(lab.experiment(experiment_id).waiting).startswith("needs 3 GPUs")
        second.worker._drain()
        assert lab.experiment(experiment_id).waiting == "no worker is there"


def test_what_fits_no_node_fails_after_the_time_that_the_operator_sets(lab: Lab) -> None:
    experiment_id = lab.post([0, 1], resources={"gpus": 3})
    rig = Rig(lab, SLEEP, unfit_seconds=0.3)
    rig.turn_until(lambda: lab.experiment(experiment_id).state == "failed")
    reason = "needs 3 GPUs on one node; the largest has 0, and has for 0.3 s (TTSV_UNFIT_SECONDS)"
    assert (lab.experiment(experiment_id).error or "").startswith(reason)
    assert {(trial.state, trial.failure) for trial in lab.trials(experiment_id)} == {("failed", "infrastructure")}


def test_nothing_is_given_up_while_a_cluster_starts_that_has_no_node_yet(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the death of Ray's head: what ran there fits as well as before."""
    experiment_id = lab.post([0])
    rig = Rig(lab, SLEEP, unfit_seconds=0.3)
    monkeypatch.setattr(rig.cluster, "nodes", tuple)
    rig.turn_until(lambda: lab.experiment(experiment_id).waiting)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        rig.worker._turn()
        experiment = lab.experiment(experiment_id)
        assert (experiment.state, experiment.unfit_since) == ("queued", None)
        assert experiment.waiting == "no node is ready for trials"


def test_a_node_that_does_not_fit_gets_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no room, and drivers are told to keep off, those that run and those that are started."""
    fitting = [Node("good", "one", "10.0.0.1", 1, 0, 1)]
    nodes_now = [*fitting, Node("bad", "two", "10.0.0.2", 8, 4, 1, problem="its clock is ahead")]
    code = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
    rig = Rig(lab, code)
    monkeypatch.setattr(rig.cluster, "nodes", lambda: nodes_now)
    hungry, first = lab.post([0], resources={"gpus": 1}), lab.post([0, 1])
    log = lab.data_dir / "logs" / f"experiment-{first}-1.log"

    def told() -> list[Any]:
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    rig.turn_until(told)
    assert told() == [{"slots": 1, "most": sys.maxsize, "shunned": ["bad"]}]
    assert lab.experiment(hungry).waiting == "needs 1 GPU on one node; the largest has 0"
    nodes_now = [*fitting, dataclasses.replace(nodes_now[1], problem=None)]
    rig.turn_until(lambda: len(told()) > 1)
    assert told()[-1] == {"slots": 2, "most": sys.maxsize}
    rig.turn_until(lambda: lab.experiment(hungry).state == "running")
    nodes_now = [*fitting, dataclasses.replace(nodes_now[1], problem="its ttsv is another")]
    rig.turn_until(lambda: len(told()) > 2)
    assert told()[-1]["shunned"] == ["bad"]
    rig.worker._drain()


ECHO = "import sys; [print(line, end='', flush=True) for line in sys.stdin]"


class TestPlaces:
    """Two nodes of two GPUs; a grid has a trial on each, and another experiment's trials need two GPUs."""

    NODES = (
        Node("a" * 56, "gpu1", "10.0.0.1", 8, 2, 10, head=True),
        Node("b" * 56, "gpu2", "10.0.0.2", 8, 2, 10),
    )

    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.queue.places.SHORT_SECONDS", 0.2)
        monkeypatch.setattr("service.queue.places.SAY_SECONDS", 0.4)
        monkeypatch.setattr("workers.worker.scheduler.PLACES_SECONDS", 0.1)

    def told(self, lab: Lab, experiment_id: int) -> dict[str, Any]:
        log = lab.data_dir / "logs" / f"experiment-{experiment_id}-1.log"
        lines = log.read_text().splitlines() if log.exists() else []
        told: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return told

    def place(self, lab: Lab, experiment_id: int, *places: str) -> None:
        """Has so many trials of the experiment run there, and no others."""

        def work(session: Session) -> None:
            ids = [trial.id for trial in lab.trials(experiment_id)]
            with hold(session, Lease(experiment_id, 1)) as held:
                for trial_id, place in zip(ids, places, strict=False):
                    held.start_trial(trial_id)
                    held.place_trial(trial_id, place)

        lab.database.write(work)

    def test_a_node_is_kept_for_what_fits_nowhere_for_what_runs_elsewhere(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spread = lab.post([0, 1, 2, 3], resources={"gpus": 1}, max_concurrent_trials=2, preempt=True)
        rig = Rig(lab, ECHO)
        monkeypatch.setattr(rig.cluster, "nodes", lambda: self.NODES)
        rig.turn_until(lambda: self.told(lab, spread))
        self.place(lab, spread, "gpu1, GPU 0", "gpu2, GPU 1")
        large = lab.post([100], resources={"gpus": 2})
        rig.turn_until(lambda: lab.experiment(large).waiting)
        assert lab.experiment(large).waiting == (
            "needs 2 GPUs on one node; 2 are free, on different nodes; gpu1 is kept for it while trials end there"
        )
        assert (lab.experiment(large).state, lab.experiment(large).unfit_since) == ("running", None)
        rig.turn_until(lambda: "shunned" in self.told(lab, spread))
        assert self.told(lab, spread)["shunned"] == [self.NODES[0].id]
        assert self.told(lab, spread)["staying"] == {self.NODES[0].id: 0}, "its trials give way"
        assert "shunned" not in self.told(lab, large)
        self.place(lab, large, "gpu1, GPU 0, 1")
        rig.turn_until(lambda: "shunned" not in self.told(lab, spread) and not lab.experiment(large).waiting)
        assert "staying" not in self.told(lab, spread)
        rig.worker._drain()

    def test_what_shares_leave_over_is_lent_and_whose_trial_ends_there_may_begin_the_next(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two trials of three processors would leave room for one of five were they on one node of eight."""
        pair = lab.post([0, 1], priority=1, resources={"cpus": 3})
        rig = Rig(lab, ECHO)
        monkeypatch.setattr(rig.cluster, "nodes", lambda: self.NODES)
        rig.turn_until(lambda: self.told(lab, pair))
        self.place(lab, pair, "gpu1", "gpu2")
        grid = lab.post([10, 11, 12, 13], resources={"cpus": 5})
        rig.turn_until(lambda: self.told(lab, grid).get("slots") == 2)
        monkeypatch.setattr("service.queue.places.SHORT_SECONDS", 60)
        monkeypatch.setattr("workers.worker.scheduler.PLACES_SECONDS", 60)
        self.place(lab, grid, "gpu1", "gpu2")
        rig.worker._turn()
        first, *_ = lab.trials(grid)
        lab.database.write(under(Lease(grid, 1), HeldExperiment.fail_trial, first.id, "error", "of its own"))
        rig.worker._turn()
        (driver,) = (driver for driver in rig.worker._drivers if driver.lease.experiment_id == grid)
        assert driver.told is not None
        assert json.loads(driver.told)["slots"] == 2
        lab.post([20], priority=2, resources={"cpus": 5})
        rig.turn_until(lambda: self.told(lab, grid)["slots"] == 1)
        rig.worker._drain()

    def test_what_runs_on_a_node_that_fits_no_more_is_told_apart(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As these end, none of the experiment may begin on the node that is left, which another has all of."""
        here, gone = self.NODES
        grid = lab.post([0, 1, 2, 3], resources={"gpus": 1})
        seen = [here, gone]
        rig = Rig(lab, ECHO)
        monkeypatch.setattr(rig.cluster, "nodes", lambda: seen)
        rig.turn_until(lambda: self.told(lab, grid).get("slots") == 4)
        self.place(lab, grid, "gpu2, GPU 0", "gpu2, GPU 1")
        urgent = lab.post([10, 11], resources={"gpus": 1}, priority=5)
        seen[1] = dataclasses.replace(gone, problem="its clock is ahead")
        rig.turn_until(lambda: self.told(lab, urgent).get("slots") == 2 and self.told(lab, grid)["slots"] == 2)
        assert (self.told(lab, grid)["besides"], self.told(lab, grid)["unfit"]) == (2, [gone.id])
        seen[1] = gone
        rig.turn_until(lambda: "shunned" not in self.told(lab, grid))
        assert self.told(lab, grid).keys() == {"slots", "most"}
        rig.worker._drain()

    def beside_another(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Rig]:
        """An experiment of ours that could use four cards, of which another worker's has three."""
        theirs = lab.post([0, 1, 2], resources={"gpus": 1})
        assert _claim(lab, "their-worker", None).experiment_id == theirs
        self.place(lab, theirs, "gpu1, GPU 0", "gpu2, GPU 0", "gpu2, GPU 1")
        mine = lab.post([10, 11, 12, 13], resources={"gpus": 1})
        rig = Rig(lab, ECHO, beat_seconds=20, lease_seconds=60)
        monkeypatch.setattr(rig.cluster, "nodes", lambda: self.NODES)
        return mine, rig

    def test_what_a_worker_runs_that_shares_the_cluster_is_taken(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two with one `RAY_ADDRESS`: a node's row names whoever wrote it last."""
        mine, rig = self.beside_another(lab, monkeypatch)
        rig.turn_until(lambda: self.told(lab, mine))
        assert self.told(lab, mine)["slots"] == 4, "nobody is known to share it"
        lab.database.write(lambda session: nodes.record(session, "their-worker", self.NODES))
        rig.turn_until(lambda: self.told(lab, mine)["slots"] == 1)
        rig.worker._drain()

    def test_who_writes_the_nodes_just_before_us_is_seen(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each time, as two workers with the same beat may do for minutes."""
        mine, rig = self.beside_another(lab, monkeypatch)
        for _ in range(3):
            lab.database.write(lambda session: nodes.record(session, "their-worker", self.NODES))
            rig.worker._nodes_after = 0.0
            rig.worker._turn()
        rig.turn_until(lambda: self.told(lab, mine))
        assert self.told(lab, mine)["slots"] == 1
        rig.worker._drain()


def test_drivers_hear_of_their_shares(lab: Lab) -> None:
    """Three places: one experiment has all, then two share, then an urgent one has what it needs."""
    seeds = list(range(50))
    first = lab.post(seeds)
    rig = Rig(lab, ECHO)
    rig.cluster.room = [Amount(3)]

    def heard(experiment_id: int) -> list[int]:
        log = lab.data_dir / "logs" / f"experiment-{experiment_id}-1.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line)["slots"] for line in lines]

    rig.turn_until(lambda: heard(first) == [3])
    second = lab.post(seeds)
    rig.turn_until(lambda: heard(second) and heard(first)[-1] + heard(second)[-1] == 3 and heard(first)[-1] < 3)
    urgent = lab.post([0, 1], priority=1000)
    rig.turn_until(lambda: heard(urgent) and heard(urgent)[-1] == 2)
    rig.turn_until(lambda: heard(first)[-1] + heard(second)[-1] == 1)
    lab.database.write(lambda session: actions.change(session, urgent, {"max_concurrent_trials": 1}))
    rig.turn_until(lambda: heard(urgent)[-1] == 1 and heard(first)[-1] + heard(second)[-1] == 2)
    rig.worker._drain()


def test_an_idle_driver_makes_room_for_another_experiment(lab: Lab) -> None:
    first = lab.post(list(range(9)))
    rig = Rig(lab, SLEEP, max_experiments=1)
    rig.cluster.room = [Amount(1)]
    rig.turn_until(lambda: lab.experiment(first).state == "running")
    urgent = lab.post([0], priority=5)
    rig.turn_until(lambda: lab.experiment(urgent).state == "running")
    rig.turn_until(lambda: lab.experiment(first).state == "queued")
    rig.turn_until(lambda: lab.experiment(first).waiting)
    assert lab.experiment(first).waiting == f"others come first: the cluster is shared by experiments {urgent}"
    rig.worker._drain()


class TestIdle:
    """Of a driver that handed a trial to Tune which can never begin there, and so gives nothing back by itself."""

    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workers.worker.scheduler.IDLE_SECONDS", 0.2, raising=False)

    def test_what_fits_no_node_any_more_is_given_back(self, lab: Lab) -> None:
        experiment_id = lab.post([0], resources={"gpus": 1})
        rig = Rig(lab, SLEEP)
        rig.cluster.room = [Amount(8), Amount(8, 1)]
        rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
        rig.cluster.room = [Amount(8)]
        rig.turn_until(lambda: lab.experiment(experiment_id).state == "queued")
        rig.turn_until(lambda: lab.experiment(experiment_id).unfit_since)
        rig.worker._drain()

    def test_and_given_up_after_the_time_that_the_operator_sets(self, lab: Lab) -> None:
        experiment_id = lab.post([0], resources={"gpus": 1})
        rig = Rig(lab, SLEEP, unfit_seconds=0.3)
        rig.cluster.room = [Amount(8, 1)]
        rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
        rig.cluster.room = [Amount(8)]
        rig.turn_until(lambda: lab.experiment(experiment_id).state == "failed")
        rig.worker._drain()

    def test_what_was_stopped_before_its_last_trials_began_ends(self, lab: Lab) -> None:
        experiment_id = lab.post([0, 1])
        rig = Rig(lab, SLEEP)
        rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
        lease, (first, _) = Lease(experiment_id, 1), lab.trials(experiment_id)
        lab.database.write(under(lease, HeldExperiment.start_trial, first.id))
        lab.database.write(lambda session: actions.stop(session, experiment_id))
        lab.database.write(under(lease, HeldExperiment.fail_trial, first.id, "error", "of its own"))
        rig.turn_until(lambda: lab.experiment(experiment_id).state == "stopped")
        rig.worker._drain()

    def test_what_runs_something_goes_on(self, lab: Lab) -> None:
        experiment_id = lab.post([0], resources={"gpus": 1})
        rig = Rig(lab, SLEEP)
        rig.cluster.room = [Amount(8), Amount(8, 1)]
        rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
        lab.database.write(under(Lease(experiment_id, 1), HeldExperiment.start_trial, lab.trials(experiment_id)[0].id))
        rig.cluster.room = [Amount(8)]
        deadline = time.monotonic() + 0.6
        while time.monotonic() < deadline:
            rig.worker._turn()
        assert (lab.experiment(experiment_id).state, lab.experiment(experiment_id).fence) == ("running", 1)
        rig.worker._drain()


def test_what_has_nothing_left_to_do_is_completed(lab: Lab) -> None:
    """Whoever ran it stored its last result and died before it could say so."""
    experiment_id = lab.post([0])
    lab.database.write(lambda session: session.execute(update(Trial).values(state=TrialState.FAILED)))
    Rig(lab, SLEEP).turn_until(lambda: lab.experiment(experiment_id).state == "failed")


def test_driver_gets_the_workers_settings(lab: Lab) -> None:
    lab.post([0])
    code = (
        "from service.settings import Settings; import os;"
        "print(Settings().model_dump_json(), os.environ['RAY_ADDRESS'], flush=True); import time; time.sleep(60)"
    )
    rig = Rig(lab, code, worker_gpus=3, beat_seconds=7)
    log = lab.data_dir / "logs" / "experiment-1-1.log"
    rig.turn_until(lambda: log.exists() and "nowhere" in log.read_text())
    assert log.read_text().strip() == f"{rig.settings.model_dump_json()} nowhere"
    rig.worker._drain()


def test_claims_no_more_than_it_may_run(lab: Lab) -> None:
    for _ in range(3):
        lab.post([0])
    rig = Rig(lab, SLEEP, max_experiments=2)
    for _ in range(3):
        rig.worker._turn()
    assert [lab.experiment(number).state for number in (1, 2, 3)] == ["running", "running", "queued"]
    rig.worker._drain()
    assert [lab.experiment(number).state for number in (1, 2, 3)] == ["queued"] * 3
    assert rig.cluster.stops == 1


class TestMost:
    """Four nodes of eight GPUs, and more experiments than may run at a time."""

    ROOM = (Amount(64, 8),) * 4
    SAYS = "4 experiments run at a time here; TTSV_MAX_EXPERIMENTS"

    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.queue.places.SHORT_SECONDS", 0.1)
        monkeypatch.setattr("workers.worker.scheduler.PLACES_SECONDS", 0.1)

    def rig(self, lab: Lab, **settings: Any) -> Rig:
        rig = Rig(lab, SLEEP, **settings)
        rig.cluster.room = list(self.ROOM)
        return rig

    def post(self, lab: Lab, experiments: int, trials: int) -> list[int]:
        return [lab.post(list(range(trials)), resources={"gpus": 1}) for _ in range(experiments)]

    def slots(self, rig: Rig) -> dict[int, int]:
        """What each driver was told that it may run."""
        return {driver.lease.experiment_id: json.loads(driver.told or "")["slots"] for driver in rig.worker._drivers}

    def run(self, lab: Lab, experiment_id: int, trials: int) -> None:
        """Has so many trials of the experiment run."""
        ids = [trial.id for trial in lab.trials(experiment_id)][:trials]

        def start(session: Session) -> None:
            with hold(session, Lease(experiment_id, 1)) as held:
                for trial_id in ids:
                    held.start_trial(trial_id)

        lab.database.write(start)

    def end(self, lab: Lab, experiment_id: int, trials: int) -> None:
        """Has so many trials of the experiment end."""
        for trial in lab.trials(experiment_id)[:trials]:
            lab.database.write(under(Lease(experiment_id, 1), HeldExperiment.fail_trial, trial.id, "error", "its own"))

    def settle(self, rig: Rig) -> None:
        """Decides for longer than it takes until what is left over is lent."""
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            rig.worker._turn()
            time.sleep(0.02)

    def test_without_a_setting_as_many_run_as_the_machine_holds(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("workers.worker.poller.most_drivers", lambda: 32)
        numbers = self.post(lab, 32, trials=1)
        rig = self.rig(lab)
        rig.worker._turn()
        rig.worker._turn()
        assert {(lab.experiment(number).state, lab.experiment(number).waiting) for number in numbers} == {
            ("running", None)
        }
        assert self.slots(rig) == dict.fromkeys(numbers, 1)
        rig.worker._drain()

    def test_what_waits_only_for_that_says_so(self, lab: Lab) -> None:
        numbers = self.post(lab, 32, trials=1)
        everybodys = update(Experiment).values(owner=cast(Experiment.id, String))
        lab.database.write(lambda session: session.execute(everybodys))
        rig = self.rig(lab, max_experiments=4)
        rig.worker._turn()
        for number in numbers[:4]:
            self.run(lab, number, 1)
        self.settle(rig)
        waits = [(lab.experiment(number).state, lab.experiment(number).waiting) for number in numbers]
        assert waits == [("running", None)] * 4 + [("queued", self.SAYS)] * 28
        lab.database.write(lambda session: actions.cancel(session, numbers[0]))
        rig.turn_until(lambda: lab.experiment(numbers[4]).state == "running")
        rig.worker._turn()
        assert [lab.experiment(number).waiting for number in numbers[4:7]] == [None, self.SAYS, self.SAYS]
        rig.worker._drain()

    def test_what_waits_for_its_turn_says_that(self, lab: Lab) -> None:
        first, *_ = self.post(lab, 1, trials=40)
        urgent, last = (lab.post([0], priority=priority, resources={"gpus": 1}) for priority in (5, -5))
        rig = self.rig(lab, max_experiments=2)
        rig.turn_until(lambda: lab.experiment(last).waiting)
        assert (
            lab.experiment(last).waiting == f"others come first: the cluster is shared by experiments {first}, {urgent}"
        )
        rig.worker._drain()

    def test_who_runs_has_what_others_cannot_use_yet_and_half_at_a_time_make_room_for_them(self, lab: Lab) -> None:
        """They used nothing, so it is their turn."""
        numbers = self.post(lab, 8, trials=40)
        rig = self.rig(lab, max_experiments=4)
        rig.worker._turn()
        assert self.slots(rig) == dict.fromkeys(numbers[:4], 8)
        for number in numbers[:4]:
            self.run(lab, number, 8)
        self.settle(rig)
        assert self.slots(rig) == dict(zip(numbers[:4], (0, 0, 16, 16), strict=True))
        assert [lab.experiment(number).waiting for number in numbers] == [None] * 4 + [self.SAYS] * 4
        self.end(lab, numbers[0], 8)
        rig.turn_until(lambda: lab.experiment(numbers[4]).state == "running")
        rig.worker._turn()
        assert self.slots(rig).keys() == {*numbers[1:5]}
        assert self.slots(rig)[numbers[1]] == 0, "it goes on leaving"
        assert sum(self.slots(rig).values()) == 32
        assert lab.experiment(numbers[4]).waiting is None
        assert [lab.experiment(number).waiting for number in (numbers[0], *numbers[5:])] == [self.SAYS] * 4
        rig.worker._drain()

    def test_trials_that_give_way_do_for_whoever_has_no_driver_yet(self, lab: Lab) -> None:
        running = lab.post(list(range(40)), resources={"gpus": 1}, preempt=True)
        rig = self.rig(lab, max_experiments=1)
        rig.worker._turn()
        self.run(lab, running, 32)
        lab.post([0], resources={"gpus": 1}, priority=5)
        rig.worker._turn()
        (driver,) = rig.worker._drivers
        assert json.loads(driver.told or "") == {"slots": 0, "most": 0}
        rig.worker._drain()

    def test_who_made_room_is_not_the_next(self, lab: Lab) -> None:
        """Though it is its turn again before it is gone, and it is older than who has waited meanwhile."""
        first, second, third = self.post(lab, 3, trials=40)
        rig = self.rig(lab, max_experiments=2)
        rig.worker._turn()
        self.run(lab, first, 16)
        self.run(lab, second, 8)
        rig.turn_until(lambda: self.slots(rig) == {first: 0, second: 32})
        running = Demand(second, 40, Amount(1, 1), running=32)
        rig.worker._scheduler._usage.add([running], self.ROOM, 600)
        rig.worker._turn()
        assert self.slots(rig) == {first: 0, second: 32}
        self.end(lab, first, 16)
        rig.turn_until(lambda: first not in self.slots(rig) and len(rig.worker._drivers) == 2)
        assert self.slots(rig).keys() == {second, third}
        rig.worker._drain()


def test_drain_gives_back_what_runs_and_spends_no_attempt(lab: Lab) -> None:
    """Its drivers end at once when they are told to, as these do, or are killed: no trial pays for that."""
    experiment_id = lab.post([0, 1])
    rig = Rig(lab, SLEEP)
    rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
    lease, trial = Lease(experiment_id, 1), lab.trials(experiment_id)[0]
    lab.database.write(under(lease, HeldExperiment.start_trial, trial.id))
    rig.worker._drain()
    assert (lab.experiment(experiment_id).state, lab.experiment(experiment_id).worker) == ("queued", None)
    assert [(trial.state, trial.attempts, trial.deaths, trial.turn) for trial in lab.trials(experiment_id)] == [
        ("queued", 0, 0, -1),
        ("queued", 0, 0, 0),
    ]
    with lab.database.read() as session:
        released = select(Event.detail).where(Event.experiment_id == experiment_id, Event.kind == "released")
        assert session.scalars(released).all() == [{"fence": 1, "drained": True}]


SLOW_START = """
import sys, time
while time.process_time() < 1.5:  # what it imports
    pass
from service.database.engine import Database
from service.queue.leases import Lease
from service.settings import Settings
from workers.driver.lease_keeper import LeaseKeeper
LeaseKeeper(Database(Settings().url), Lease(int(sys.argv[2]), int(sys.argv[4])), 0.1, sys.exit).start()
time.sleep(60)
"""


def test_a_driver_may_take_longer_to_start_than_its_lease_lasts(lab: Lab) -> None:
    """Its worker renews the lease until it does so itself; from then on one that stands still is killed."""
    experiment_id = lab.post([0])
    rig = Rig(lab, SLOW_START, lease_seconds=1, beat_seconds=0.1)
    rig.worker._turn()
    (driver,) = rig.worker._drivers
    rig.turn_until(lambda: lab.experiment(experiment_id).heartbeat > driver.beats)
    assert (beats := driver.beats) > 5
    driver.child.send_signal(signal.SIGSTOP)
    rig.turn_until(lambda: lab.experiment(experiment_id).fence >= 2)
    assert (driver.beats, driver.child.poll()) == (beats, -signal.SIGKILL)
    rig.worker._drain()


@pytest.mark.parametrize(("code", "longest"), [("while True: pass", 0.2), (SLEEP, 300)])
def test_a_driver_that_never_gets_to_its_first_heartbeat_is_killed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, code: str, longest: float
) -> None:
    """Once it had time enough to start, or computes no more, and for as long as a lease lasts."""
    monkeypatch.setattr("workers.worker.drivers.START_SECONDS", longest)
    experiment_id = lab.post([0])
    rig = Rig(lab, code, lease_seconds=0.5)
    rig.turn_until(lambda: lab.experiment(experiment_id).fence >= 2)
    rig.worker._drain()


def test_a_driver_that_does_not_see_that_its_lease_is_lost_is_killed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that stands still: the experiment is somebody else's, and nobody watches its old heartbeat.

    However long a lease lasts: its trials hold cards that are free for others.
    """
    monkeypatch.setattr("workers.worker.poller.STRAY_SECONDS", 0.5)
    experiment_id = lab.post([0])
    rig = Rig(lab, SLEEP, lease_seconds=60)
    rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
    (driver,) = rig.worker._drivers
    for act in (actions.pause, actions.resume):
        lab.database.write(lambda session, act=act: act(session, experiment_id))  # type: ignore[misc]
    rig.turn_until(lambda: driver.child.poll() is not None)
    rig.turn_until(lambda: lab.experiment(experiment_id).state == "running")
    assert lab.experiment(experiment_id).fence == 3
    rig.worker._drain()


def test_dead_neighbour_is_reaped_at_once(lab: Lab) -> None:
    alive = identity()
    assert alive is not None
    experiment_id = lab.post([0])
    _claim(lab, "neighbour", {**alive, "start": alive["start"] - 1})
    rig = Rig(lab, SLEEP, lease_seconds=1000)
    rig.worker._turn()
    assert lab.experiment(experiment_id).worker == rig.worker.name
    rig.worker._drain()


def test_silent_neighbour_is_reaped_after_its_lease(lab: Lab) -> None:
    experiment_id = lab.post([0])
    lease = _claim(lab, "elsewhere", None)
    rig = Rig(lab, SLEEP, lease_seconds=1)
    for _ in range(5):
        rig.worker._turn()
        lab.database.write(lambda session: leases.renew(session, lease))
    assert lab.experiment(experiment_id).worker == "elsewhere"
    rig.turn_until(lambda: lab.experiment(experiment_id).worker == rig.worker.name)
    rig.worker._drain()


def test_claim_whose_reply_was_lost(lab: Lab) -> None:
    """The database says that we run it, and no driver does."""
    experiment_id = lab.post([0])
    rig = Rig(lab, SLEEP, lease_seconds=1000)
    _claim(lab, rig.worker.name, identity())
    rig.turn_until(lambda: lab.experiment(experiment_id).fence == 3)
    rig.worker._drain()


def test_database_away(lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, tried again; what ended drivers held is given back afterwards."""
    experiment_id = lab.post([0])
    rig = Rig(lab, "import time; time.sleep(0.2)")
    rig.worker._turn()

    def away(work: object) -> None:
        raise OperationalError("BEGIN", {}, ConnectionError("away"))

    with monkeypatch.context() as patched, caplog.at_level(logging.INFO):
        patched.setattr(lab.database, "write", away)
        rig.turn_until(lambda: caplog.text and not rig.worker._drivers)
        rig.worker._turn()
    assert caplog.text.count("does not answer") == 1
    assert lab.experiment(experiment_id).state == "running"
    rig.turn_until(lambda: lab.experiment(experiment_id).fence == 2)
    rig.worker._drain()


def test_files_that_would_be_left_where_the_api_does_not_read_them(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a folder whose mount went: nothing begins; it goes on once it is there again, and ends where it is not."""
    monkeypatch.setattr(poller, "AWAY_SECONDS", 0.3)
    rig = Rig(lab, SLEEP, beat_seconds=0.05)
    settle(lab.database, rig.settings)
    marker = lab.data_dir / MARKER
    away = marker.rename(lab.data_dir / "away")
    experiment_id = lab.post([0])
    for _ in range(5):
        rig.worker._turn()
    assert not list(rig.worker._drivers)
    assert caplog.text.count("nothing begins here: files of trials would be in") == 1
    away.rename(marker)
    rig.turn_until(lambda: list(rig.worker._drivers))
    (driver,) = rig.worker._drivers
    rig.turn_until(lambda: json.loads(driver.told or "{}") == {"slots": 1, "most": sys.maxsize})
    marker.rename(away)
    rig.turn_until(lambda: json.loads(driver.told or "{}") == {"slots": 0, "most": sys.maxsize})
    with pytest.raises(UserError, match="TTSV_DATA_DIR"):
        rig.turn_until(lambda: False)
    rig.worker._drain()
    given_back = lab.experiment(experiment_id)
    assert (given_back.state, given_back.worker) == ("queued", None)


def test_an_absence_of_the_database_is_held_against_no_lease(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it was: nobody could write a heartbeat meanwhile, or see one."""
    experiment_id = lab.post([0])
    lease = _claim(lab, "elsewhere", None)
    rig = Rig(lab, SLEEP, lease_seconds=1.5)
    clock = [1000.0]
    rig.worker._standstill = Standstill(1.0, lambda: clock[0])

    def away() -> None:
        raise OperationalError("BEGIN", {}, ConnectionError("away"))

    def turn(seconds: float) -> None:
        clock[0] += seconds
        rig.worker._turn()

    turn(0)
    for _ in range(2):
        turn(0.5)
        with monkeypatch.context() as patched:
            patched.setattr(lab.database, "read", away)
            turn(3600)
        turn(3600)
    assert (lab.experiment(experiment_id).worker, lab.experiment(experiment_id).fence) == ("elsewhere", lease.fence)
    turn(0.5)
    assert lab.experiment(experiment_id).worker == rig.worker.name
    rig.worker._drain()


def test_cluster_that_died(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Its drivers are killed, another one starts, the experiment is claimed anew; the log says what Ray said last."""
    experiment_id = lab.post([0])
    rig = Rig(lab, SLEEP)
    rig.worker._turn()
    rig.cluster.broken = True
    rig.turn_until(lambda: lab.experiment(experiment_id).fence == 2)
    assert (rig.cluster.starts, rig.cluster.stops) == (1, 1)
    assert f"the Ray cluster is gone; starting another (see {lab.data_dir / 'logs'}): no port left" in caplog.text
    rig.worker._drain()


def test_a_cluster_that_does_not_start_is_said_once(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends before it was ready; an end after that is none of these."""
    rig = Rig(lab, SLEEP)
    monkeypatch.setattr(rig.worker, "_sleep", lambda _: None)

    def end() -> int:
        rig.cluster.broken = True
        rig.worker._mind_cluster()
        return caplog.text.count(f"{STUCK}, so that no trial can run: no port left")

    assert end() == 0
    rig.worker._mind_cluster()  # it is ready
    assert [end() for _ in range(4)] == [0, 1, 1, 1]
    rig.worker._drain()


def test_where_the_machine_refuses_a_cluster_that_is_the_reason(
    lab: Lab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the cluster before has nothing to do with it."""
    rig = Rig(lab, SLEEP)
    monkeypatch.setattr(rig.worker, "_sleep", lambda _: None)

    def refuse() -> None:
        raise OSError("port 6379 is taken")

    monkeypatch.setattr(rig.cluster, "start", refuse)
    rig.cluster.broken = True
    for _ in range(3):
        rig.worker._mind_cluster()
    assert f"{STUCK}, so that no trial can run: port 6379 is taken" in caplog.text
    rig.worker._drain()


def test_greets_and_parts(lab: Lab) -> None:
    from service.experiments import store

    rig = Rig(lab, SLEEP)
    rig.worker._turn()
    with lab.database.read() as session:
        assert store.last_worker_sign(session)
    rig.worker._drain()
    with lab.database.read() as session:
        assert store.last_worker_sign(session) is None


class TestAllocation:
    """Workers that leave by themselves, run in the main thread as they are."""

    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(job_time, "IDLE_SECONDS", 1.0)
        monkeypatch.setattr(job_time, "DRAIN_SECONDS", 1.0)

    def test_leaves_when_there_is_nothing_to_run(self, lab: Lab) -> None:
        unfit = lab.post([0], resources={"gpus": 3})
        assert Rig(lab, SLEEP, Allocation(until_idle=True)).worker.run() is False
        assert lab.experiment(unfit).state == "queued"

    @pytest.mark.parametrize("away", ["database", "cluster"])
    def test_stays_while_it_cannot_see_whether_there_is_something(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, away: str
    ) -> None:
        experiment_id = lab.post([0])
        rig, write, is_back = Rig(lab, SLEEP, Allocation(until_idle=True)), lab.database.write, threading.Event()

        def come_back() -> None:
            write(lambda session: session.execute(update(Trial).values(state=TrialState.FAILED)))
            is_back.set()

        def written(work: Any) -> Any:
            if not is_back.is_set():
                raise OperationalError("BEGIN", {}, ConnectionError("away"))
            return write(work)

        if away == "database":
            monkeypatch.setattr(lab.database, "write", written)
        else:
            monkeypatch.setattr(rig.cluster, "ready", is_back.is_set)
        timer = threading.Timer(2, come_back)
        timer.start()
        assert rig.worker.run() is False
        timer.join()
        assert lab.experiment(experiment_id).state == "failed"

    @pytest.mark.parametrize(("problem", "stays"), [(UNKNOWN, True), ("its torch is another", False)])
    def test_stays_while_a_node_has_yet_to_say_what_it_is(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, problem: str, stays: bool
    ) -> None:
        """As a head does not while its data folder holds whoever looks. A job whose time ends meanwhile comes back."""
        lab.post([0])
        rig = Rig(lab, SLEEP, Allocation(ends=time.monotonic() + job_time.DRAIN_SECONDS + 0.2, until_idle=True))
        monkeypatch.setattr(job_time, "IDLE_SECONDS", 0.1)
        monkeypatch.setattr(rig.cluster, "nodes", lambda: [Node("a", "head", "127.0.0.1", 8, 0, 10, problem=problem)])
        assert rig.worker.run() is stays
        assert rig.worker._allocation.is_over() is stays

    @pytest.mark.slow
    def test_leaves_in_time_and_gives_back_what_it_runs(self, lab: Lab) -> None:
        experiment_id = lab.post([0])
        rig = Rig(lab, SLEEP, Allocation(ends=time.monotonic() + 4, until_idle=True))
        assert rig.worker.run() is True
        assert (lab.experiment(experiment_id).state, lab.experiment(experiment_id).fence) == ("queued", 1)
        assert [trial.attempts for trial in lab.trials(experiment_id)] == [0]

    def test_leaves_in_time_and_has_done_all_there_was(self, lab: Lab) -> None:
        """Else a job that puts itself back into its queue would do so for ever."""
        unfit = lab.post([0], resources={"gpus": 3})
        rig = Rig(lab, SLEEP, Allocation(ends=time.monotonic() + 1.5))
        assert rig.worker.run() is False
        assert lab.experiment(unfit).state == "queued"

    @pytest.mark.slow
    def test_stays_as_long_as_something_runs(self, lab: Lab) -> None:
        experiment_id = lab.post([0])
        finish = update(Trial).values(state=TrialState.FAILED)
        timer = threading.Timer(2, lambda: lab.database.write(lambda session: session.execute(finish)))
        timer.start()
        began = time.monotonic()
        assert Rig(lab, "import time; time.sleep(2.5)", Allocation(until_idle=True)).worker.run() is False
        assert time.monotonic() - began > 2
        assert lab.experiment(experiment_id).state == "failed"
        timer.join()


def _claim(lab: Lab, worker: str, process: ProcessIdentity | None) -> Lease:
    lease = lab.database.write(lambda session: leases.claim(session, worker, process))
    assert lease is not None
    return lease


def test_checkpoints_of_cancelled_trials_go_and_others_stay(lab: Lab) -> None:
    """Cancelled while nobody ran them; what waits, or is paused, goes on from its checkpoints."""
    cancelled, paused, queued, later = (lab.post([seed]) for seed in range(4))
    folders = {}
    for experiment_id in (cancelled, paused, queued, later):
        (trial,) = lab.trials(experiment_id)
        folders[experiment_id] = lab.data_dir / "trials" / str(trial.id) / "1" / CHECKPOINTS
        folders[experiment_id].mkdir(parents=True)
        folders[experiment_id].with_name("model").touch()
    lab.database.write(lambda session: actions.cancel(session, cancelled))
    lab.database.write(lambda session: actions.pause(session, paused))
    upkeep = Upkeep(Settings(data_dir=lab.data_dir), lab.database)
    upkeep.sweep()
    assert {experiment_id for experiment_id, folder in folders.items() if folder.exists()} == {paused, queued, later}
    assert folders[cancelled].with_name("model").exists()
    lab.database.write(lambda session: actions.cancel(session, later))
    upkeep.sweep()
    assert not folders[later].exists()


def test_cancelled_trials_that_never_began_are_looked_at_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a bucket each is a request, every twenty seconds, and of a large grid there are thousands."""
    looked_at = list[int]()
    monkeypatch.setattr(
        "workers.worker.upkeep.remove_checkpoints", lambda _store, number, _fence: looked_at.append(number)
    )
    upkeep = Upkeep(Settings(data_dir=lab.data_dir), lab.database)
    upkeep.sweep()

    def cancelled() -> tuple[int, int]:
        """A trial that had begun, and one that had not."""
        experiment_id = lab.post([0, 1])
        lease = _claim(lab, "worker", None)
        begun, other = (trial.id for trial in lab.trials(experiment_id))
        lab.database.write(under(lease, HeldExperiment.start_trial, begun))
        lab.database.write(lambda session: actions.cancel(session, experiment_id))
        return begun, other

    def looks() -> set[int]:
        looked_at.clear()
        upkeep.sweep()
        return set(looked_at)

    first, second = cancelled()
    assert looks() == {first, second}
    moment = now() + timedelta(minutes=5)
    monkeypatch.setattr("workers.worker.upkeep.now", lambda: moment)
    assert looks() == {first, second}  # the look before began just after they were cancelled
    assert looks() == {first}
    moment += timedelta(minutes=56)
    assert looks() == set()


def test_what_was_cancelled_while_the_store_was_away_goes_when_it_is_back(lab: Lab, tmp_path: Path) -> None:
    """However long that was: an empty folder is there in its place, in which there is nothing to remove."""
    mount, disk = tmp_path / "store", tmp_path / "disk"
    settings = Settings(data_dir=lab.data_dir, storage=str(mount))
    settle(lab.database, settings)
    upkeep = Upkeep(settings, lab.database)
    upkeep.sweep()
    experiment_id = lab.post([0])
    (trial,) = lab.trials(experiment_id)
    checkpoints = mount / "trials" / str(trial.id) / "1" / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    lab.database.write(lambda session: actions.cancel(session, experiment_id))
    mount.rename(disk)
    mount.mkdir()
    upkeep.sweep()
    long_ago = update(Experiment).values(finished_at=now() - timedelta(hours=2))
    lab.database.write(lambda session: session.execute(long_ago))
    mount.rmdir()
    disk.rename(mount)
    assert checkpoints.exists()
    upkeep.sweep()
    assert not checkpoints.exists()


def test_a_trial_that_is_retried_meanwhile_keeps_its_checkpoints(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """To remove those of thousands of cancelled trials takes minutes: one of the last may be at work again by then."""
    experiment_id = lab.post([0])
    (trial,) = lab.trials(experiment_id)
    lab.database.write(lambda session: actions.cancel(session, experiment_id))
    folders = [lab.data_dir / "trials" / str(trial.id) / "1" / CHECKPOINTS]
    folders[0].mkdir(parents=True)

    def slow(*arguments: Any) -> None:
        retried = (TrialState.CANCELLED,)
        lab.database.write(lambda session: actions.retry(session, experiment_id, retried))
        folders.append(lab.data_dir / "trials" / str(trial.id) / str(_claim(lab, "next", None).fence) / CHECKPOINTS)
        folders[1].mkdir(parents=True)
        remove_checkpoints(*arguments)

    monkeypatch.setattr("workers.worker.upkeep.remove_checkpoints", slow)
    Upkeep(Settings(data_dir=lab.data_dir), lab.database).sweep()
    assert [folder.exists() for folder in folders] == [False, True]
