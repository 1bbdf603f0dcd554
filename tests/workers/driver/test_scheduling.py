"""Schedulers, searches, time limits and stops, through a real Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from service.experiments import actions

if TYPE_CHECKING:
    from tests.workers.conftest import Lab

pytestmark = pytest.mark.slow

DECAY = "training.weight_decay"


def test_halving_stops_what_is_worse(quick_lab: Lab) -> None:
    """One after another, the best first: the later ones end at their first comparison, a close one at its second.

    They are compared with what ran before the driver was killed, too.
    """
    asha = {"type": "asha", "grace_epochs": 2, "reduction": 2}
    experiment_id = quick_lab.post(
        [], epochs=5, seconds=0.2, grid={DECAY: [0.3, 0.9, 0.31, 0.8]}, scheduler=asha, max_concurrent_trials=1
    )
    quick_lab.start_worker()
    quick_lab.wait_for(lambda: quick_lab.trials(experiment_id)[0].state == "succeeded")
    for driver in quick_lab.drivers():
        driver.kill()
    assert quick_lab.wait_until_final(experiment_id).state == "succeeded"
    trials = quick_lab.trials(experiment_id)
    assert [trial.state for trial in trials] == ["succeeded", "early_stopped", "early_stopped", "early_stopped"]
    assert [trial.epoch for trial in trials] == [5, 2, 4, 2]
    assert [result.trial_id for result in quick_lab.results(experiment_id)] == [trials[0].id]
    assert quick_lab.experiment(experiment_id).fence == 2


def test_search_survives_its_driver(quick_lab: Lab) -> None:
    """Killed in the middle: what was tried is not tried again, and there are as many trials as were asked for."""
    search = {"algorithm": "optuna", "trials": 6, "space": {DECAY: {"uniform": [0.0, 1.0]}, "seed": {"int": [0, 9]}}}
    experiment_id = quick_lab.post([], epochs=2, seconds=0.2, search=search, max_concurrent_trials=2)
    assert quick_lab.trials(experiment_id) == []
    quick_lab.start_worker()
    quick_lab.wait_for(lambda: len(quick_lab.results(experiment_id)) >= 2, 60)
    before = [trial.fingerprint for trial in quick_lab.trials(experiment_id)]
    for driver in quick_lab.drivers():
        driver.kill()
    assert quick_lab.wait_until_final(experiment_id).state == "succeeded"
    quick_lab.assert_whole(experiment_id)
    trials = quick_lab.trials(experiment_id)
    assert len(trials) == quick_lab.experiment(experiment_id).trial_count == 6
    assert [trial.fingerprint for trial in trials][: len(before)] == before
    assert quick_lab.experiment(experiment_id).fence == 2
    for trial in trials:
        point = quick_lab.suggested(trial.id)
        assert point == {DECAY: trial.config["training"]["weight_decay"], "seed": trial.seed}


def test_hung_trial_is_killed(quick_lab: Lab) -> None:
    """Its siblings live on; a search that could never run here says why, side by side with it."""
    quick_lab.settings |= {"TTSV_TENSORBOARD": "true"}
    experiment_id = quick_lab.post([0, 1004, 1], epochs=2, seconds=0.05, timeout_seconds=3.0, max_concurrent_trials=2)
    search = {"algorithm": "random", "trials": 2, "space": {"seed": {"int": [0, 9]}}}
    too_large = quick_lab.post([], search=search, resources={"memory_gib": 1e5})
    quick_lab.start_worker()
    experiment = quick_lab.wait_until_final(experiment_id)
    assert experiment.error == "1 of 3 trials did not succeed"
    trials = quick_lab.trials(experiment_id)
    assert [trial.state for trial in trials] == ["succeeded", "failed", "succeeded"]
    assert (trials[1].failure, trials[1].attempts) == ("timeout", 1)
    assert (trials[1].error or "").startswith("timeout_seconds = 3: ")
    log = next((quick_lab.data_dir / "trials" / str(trials[0].id)).glob("*/trial.log")).read_text()
    assert "INFO hello" in log
    board = quick_lab.data_dir / "tensorboard" / str(experiment_id) / f"trial-{trials[0].id}"
    (events,) = board.glob("events.out.tfevents.*")
    assert b"ray/tune/val_accuracy" in events.read_bytes()
    assert quick_lab.wait_until_final(too_large).state == "failed"
    (trial,) = quick_lab.trials(too_large)
    assert (trial.error or "").startswith("resources.memory_gib = 100000: the worker's cluster has ")


def test_stop_lets_the_running_trial_finish(quick_lab: Lab) -> None:
    """And what it left is evaluated again by another experiment, which cannot take up what another did not leave."""
    experiment_id = quick_lab.post([0, 1, 2, 3], epochs=8, seconds=0.25, max_concurrent_trials=1)
    quick_lab.start_worker()
    quick_lab.wait_for_epochs(experiment_id, 1)
    quick_lab.database.write(lambda session: actions.stop(session, experiment_id))
    assert quick_lab.wait_until_final(experiment_id).state == "stopped"
    trials = quick_lab.trials(experiment_id)
    assert [trial.state for trial in trials] == ["succeeded", "cancelled", "cancelled", "cancelled"]
    assert quick_lab.points(experiment_id) == [(trials[0].id, epoch) for epoch in range(1, 9)]
    assert not any((quick_lab.data_dir / "trials" / str(trial.id)).exists() for trial in trials[1:])

    again = quick_lab.post([0, 1], epochs=1, sources=[trials[0].id, trials[1].id])
    assert quick_lab.wait_until_final(again).error == "1 of 2 trials did not succeed"
    good, bad = quick_lab.trials(again)
    (path,) = quick_lab.artifact_paths(good.id)
    assert (quick_lab.data_dir / path).read_text() == "weights, again"
    assert (bad.state, bad.failure) == ("failed", "bad_data")
    assert f"trial {trials[1].id}" in (bad.error or "")
