"""Real processes, a real Ray, and what happens when parts of it are taken away."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from service.database import TrialState
from service.database.engine import sqlite_driver
from service.experiments import actions

if TYPE_CHECKING:
    from tests.workers.conftest import Lab

pytestmark = pytest.mark.slow


def test_grid_with_failures_of_its_own(quick_lab: Lab) -> None:
    """A trial that fails for a known reason, or by a bug, is final; the others do not notice."""
    experiment_id = quick_lab.post([0, 1001, 1, 1002, 1003, 2], max_concurrent_trials=1)
    quick_lab.start_worker()
    experiment = quick_lab.wait_until_final(experiment_id)
    assert experiment.state == "failed"
    assert experiment.error == "3 of 6 trials did not succeed"
    trials = quick_lab.trials(experiment_id)
    states = [trial.state for trial in trials]
    assert states == ["succeeded", "diverged", "succeeded", "failed", "diverged", "succeeded"]
    assert trials[3].failure == "error"
    assert "RuntimeError: a bug" in (trials[3].error or "")
    assert "train_loss is nan" in (trials[4].error or "")
    assert [trial.attempts for trial in trials] == [1] * 6
    assert quick_lab.model(trials[0].id) == quick_lab.weights(0, trials[0].epochs)
    quick_lab.wait_for(lambda: not list((quick_lab.data_dir / "tune").iterdir()), 5)
    log_file = quick_lab.data_dir / "logs" / f"experiment-{experiment_id}-1.log"
    steps = [f"experiment {experiment_id} begins"]
    steps += [f"trial {one.id} {what}" for one in trials for what in ("begins", _in_the_log(one.state))]
    steps += [f"experiment {experiment_id} ends: every trial is final"]
    # Its end is written down once the database knows of it.
    log = quick_lab.wait_for(lambda: said if steps[-1] in (said := log_file.read_text()) else None, 5)
    places = [log.index(step) for step in steps]
    assert places == sorted(places)


@pytest.mark.deep
def test_killed_actor_leaves_its_siblings_alone(quick_lab: Lab) -> None:
    """The trial whose process died runs again, from its checkpoint, under the same driver."""
    experiment_id = quick_lab.post([2000, 2001], epochs=8, seconds=0.3)
    quick_lab.start_worker()
    pids = quick_lab.wait_for(lambda: _two(quick_lab.pids(experiment_id)))
    victim = min(pids)
    quick_lab.wait_for(lambda: (victim, 2) in quick_lab.points(experiment_id))
    os.kill(pids[victim], signal.SIGKILL)
    quick_lab.wait_until_final(experiment_id)
    quick_lab.assert_whole(experiment_id)
    attempts = {trial.id: trial.attempts for trial in quick_lab.trials(experiment_id)}
    assert attempts.pop(victim) == 2
    assert set(attempts.values()) == {1}
    assert quick_lab.experiment(experiment_id).fence == 1


@pytest.mark.deep
def test_killed_driver(quick_lab: Lab) -> None:
    experiment_id = quick_lab.post([0], epochs=8, seconds=0.3)
    quick_lab.start_worker()
    quick_lab.wait_for_epochs(experiment_id, 2)
    (driver,) = quick_lab.drivers()
    pids = quick_lab.pids(experiment_id)
    driver.kill()
    quick_lab.wait_for(lambda: quick_lab.all_gone(pids.values()), 5)
    quick_lab.wait_until_final(experiment_id)
    quick_lab.assert_whole(experiment_id)
    assert quick_lab.experiment(experiment_id).fence == 2
    _assert_resumed(quick_lab, experiment_id, epochs=8)


@pytest.mark.deep
def test_cancel_stops_running_trials(quick_lab: Lab) -> None:
    experiment_id = quick_lab.post([0, 1], epochs=500, seconds=0.2, max_concurrent_trials=1)
    quick_lab.start_worker()
    quick_lab.wait_for_epochs(experiment_id, 2)
    pids = quick_lab.pids(experiment_id)
    assert pids
    quick_lab.database.write(lambda session: actions.cancel(session, experiment_id))
    before = quick_lab.points(experiment_id)
    quick_lab.wait_for(lambda: quick_lab.all_gone(pids.values()), 3)
    quick_lab.wait_for(lambda: not quick_lab.drivers(), 3)
    assert quick_lab.points(experiment_id) == before
    assert quick_lab.experiment(experiment_id).state == "cancelled"
    assert {trial.state for trial in quick_lab.trials(experiment_id)} == {"cancelled"}


@pytest.mark.deep
def test_drain_spends_no_attempt(quick_lab: Lab) -> None:
    """SIGTERM: what was reported is stored, the lease is given back; the next worker goes on."""
    experiment_id = quick_lab.post([0], epochs=8, seconds=0.3)
    worker = quick_lab.start_worker()
    quick_lab.wait_for_epochs(experiment_id, 2)
    worker.terminate()
    started = time.monotonic()
    assert worker.wait(30) == 0
    assert time.monotonic() - started < 5
    experiment = quick_lab.experiment(experiment_id)
    assert experiment.state == "queued"
    assert {(trial.state, trial.attempts) for trial in quick_lab.trials(experiment_id)} == {("queued", 0)}
    assert not quick_lab.processes()
    quick_lab.start_worker()
    quick_lab.wait_until_final(experiment_id)
    quick_lab.assert_whole(experiment_id)
    _assert_resumed(quick_lab, experiment_id, epochs=8)


@pytest.mark.deep
def test_stopped_driver_loses_its_lease(quick_lab: Lab) -> None:
    """A driver that stands still past its lease is taken for dead; what it says afterwards is refused.

    The worker is stopped with it (a suspended machine), and another one takes over.
    """
    # Longer than a driver takes to its first heartbeat where the machine has much else to do.
    quick_lab.settings |= {"TTSV_LEASE_SECONDS": "8", "TTSV_BEAT_SECONDS": "0.5"}
    experiment_id = quick_lab.post([0], epochs=20, seconds=0.2)
    first = quick_lab.start_worker()
    quick_lab.wait_for_epochs(experiment_id, 2)
    (driver,) = quick_lab.drivers()
    first.send_signal(signal.SIGSTOP)
    driver.send_signal(signal.SIGSTOP)
    try:
        quick_lab.start_worker()
        quick_lab.wait_for(lambda: quick_lab.experiment(experiment_id).fence >= 3)  # reaped, claimed
    finally:
        first.send_signal(signal.SIGCONT)
        driver.send_signal(signal.SIGCONT)
    quick_lab.wait_for(lambda: not driver.is_running() or driver.status() == psutil.STATUS_ZOMBIE, 20)
    quick_lab.wait_until_final(experiment_id)
    quick_lab.assert_whole(experiment_id)
    (result,) = quick_lab.results(experiment_id)
    assert result.fence == quick_lab.experiment(experiment_id).fence


@pytest.mark.deep
def test_database_away(quick_lab: Lab) -> None:
    """Locked for longer than anyone waits: training goes on, and every epoch arrives afterwards."""
    experiment_id = quick_lab.post([0], epochs=10, seconds=0.3)
    quick_lab.start_worker()
    quick_lab.wait_for_epochs(experiment_id, 2)
    lock = sqlite_driver.connect(quick_lab.data_dir / "ttsv.db", isolation_level=None, timeout=10)
    lock.execute("BEGIN EXCLUSIVE")
    time.sleep(5)
    lock.execute("ROLLBACK")
    lock.close()
    quick_lab.wait_until_final(experiment_id)
    quick_lab.assert_whole(experiment_id)
    assert quick_lab.experiment(experiment_id).fence == 1


@pytest.mark.deep
def test_killed_worker(lab: Lab) -> None:
    """SIGKILL in the middle of a grid: nothing stays behind, and a new worker finishes it."""
    experiment_id = lab.post([0, 1, 2], epochs=6, seconds=0.3, max_concurrent_trials=1)
    worker = lab.start_worker()
    lab.wait_for_epochs(experiment_id, 8)
    pids = lab.pids(experiment_id)
    worker.kill()
    worker.wait()
    lab.wait_for(lambda: not lab.processes(), 10)
    lab.wait_for(lambda: lab.all_gone(pids.values()), 10)
    lab.start_worker()
    lab.wait_until_final(experiment_id)
    lab.assert_whole(experiment_id)
    _assert_resumed(lab, experiment_id, epochs=6)


@pytest.mark.deep
def test_worker_killed_right_after_its_claim(quick_lab: Lab) -> None:
    """Its neighbour sees that the process is gone, and does not wait for the lease to end."""
    quick_lab.settings["TTSV_LEASE_SECONDS"] = "1000"
    experiment_id = quick_lab.post([0], epochs=1)
    assert quick_lab.start_worker(DIES_AFTER_CLAIM="1").wait(30) == -signal.SIGKILL
    assert quick_lab.experiment(experiment_id).state == "running"
    quick_lab.start_worker()
    quick_lab.wait_until_final(experiment_id)
    quick_lab.assert_whole(experiment_id)


@pytest.mark.deep
def test_lost_cluster(lab: Lab) -> None:
    """The raylet dies: another cluster starts, and the grid goes on."""
    experiment_id = lab.post([0], epochs=6, seconds=0.3)
    lab.start_worker()
    lab.wait_for_epochs(experiment_id, 2)
    (raylet,) = [process for process in lab.processes() if process.name() == "raylet"]
    raylet.kill()
    lab.wait_until_final(experiment_id)
    lab.assert_whole(experiment_id)


def _in_the_log(state: TrialState) -> str:
    return "succeeded: accuracy 0.5000" if state == "succeeded" else "failed"


def _two(pids: dict[int, int]) -> dict[int, int] | None:
    return pids if len(pids) == 2 else None


def _assert_resumed(lab: Lab, experiment_id: int, *, epochs: int) -> None:
    """At most the epoch whose checkpoint was cut short ran twice."""
    for trial in lab.trials(experiment_id):
        (file,) = (lab.data_dir / "trials" / str(trial.id)).glob("*/trained")
        trained = [int(line) for line in file.read_text().split()]
        assert sorted(set(trained)) == list(range(1, epochs + 1))
        assert len(trained) <= epochs + 1


def test_a_trial_that_ray_ends_for_memory_takes_no_other_along(lab: Lab) -> None:
    """To Ray that is neither a death nor an error, and to Tune neither: its driver ended with all that it ran."""
    lab.settings |= {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "250"}
    experiment_id = lab.post([7], epochs=400)
    lab.start_worker()
    said = "lost its process: its machine ran short of memory"
    lab.wait_for(lambda: (lab.data_dir / "logs").is_dir() and said in lab.driver_log(experiment_id))
    assert lab.experiment(experiment_id).fence == 1
    assert lab.trials(experiment_id)[0].state == "queued"
