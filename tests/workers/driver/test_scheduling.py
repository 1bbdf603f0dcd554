"""Schedulers, searches, time limits and stops, through a real Ray."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from service.database import Trial
from service.experiments import actions
from service.queue.rests import RESTLESS_DEATHS
from service.specs.columns import value_of
from workers.trial_process.trial_folder import tune_folder

if TYPE_CHECKING:
    from tests.workers.conftest import Lab

pytestmark = pytest.mark.slow

DECAY = "training.weight_decay"


@pytest.mark.deep
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


@pytest.mark.deep
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
        assert point == {DECAY: value_of(trial.config, DECAY), "seed": trial.seed}


@pytest.mark.deep
def test_hung_trial_is_killed(quick_lab: Lab) -> None:
    """Its siblings live on."""
    quick_lab.settings |= {"TTSV_TENSORBOARD": "true"}
    experiment_id = quick_lab.post([0, 1004, 1], epochs=2, seconds=0.05, timeout_seconds=3.0, max_concurrent_trials=2)
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


@pytest.mark.deep
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
    assert quick_lab.model(good.id) == f"{quick_lab.weights(0, 8)}, again"
    assert (bad.state, bad.failure) == ("failed", "bad_data")
    assert f"trial {trials[1].id}" in (bad.error or "")


@pytest.mark.deep
def test_a_lost_trial_runs_again_before_new_ones_begin(quick_lab: Lab) -> None:
    """Under the same driver and in the same pass of Tune, from where it was; nothing else is touched."""
    experiment_id = quick_lab.post([0, 1, 2, 3], epochs=4, seconds=0.3, max_concurrent_trials=1)
    quick_lab.start_worker()
    quick_lab.wait_for_epochs(experiment_id, 2)
    first = quick_lab.trials(experiment_id)[0].id
    (pid,) = quick_lab.pids(experiment_id).values()
    mark = tune_folder(quick_lab.data_dir, experiment_id, 1) / "mark"
    mark.touch()
    os.kill(pid, signal.SIGKILL)
    quick_lab.wait_for(lambda: len(quick_lab.results(experiment_id)) >= 2, 120)
    assert mark.exists(), "another pass would have removed it"
    quick_lab.wait_until_final(experiment_id)
    quick_lab.assert_whole(experiment_id)
    trials = quick_lab.trials(experiment_id)
    log = (quick_lab.data_dir / "logs" / f"experiment-{experiment_id}-1.log").read_text()
    assert [int(number) for number in re.findall(r"trial (\d+) begins", log)] == [first, *(t.id for t in trials)]
    assert [(trial.attempts, trial.turn) for trial in trials] == [(2, -1), (1, 0), (1, 0), (1, 0)]
    assert {trial.node for trial in trials} == {socket.gethostname()}
    assert quick_lab.experiment(experiment_id).fence == 1
    (file,) = (quick_lab.data_dir / "trials" / str(first)).glob("*/trained")
    trained = [int(line) for line in file.read_text().split()]
    assert sorted(set(trained)) == [1, 2, 3, 4]
    assert len(trained) <= 5, "no more than the epoch whose checkpoint was not written yet"


@pytest.mark.deep
def test_a_trial_whose_process_is_killed_again_and_again_rests_and_others_run(quick_lab: Lab) -> None:
    """Whoever kills processes for some minutes fails no trial; what was waiting has the place meanwhile."""
    experiment_id = quick_lab.post([0, 1], epochs=1, seconds=8, max_concurrent_trials=1)
    quick_lab.start_worker()
    first, second = (trial.id for trial in quick_lab.trials(experiment_id))
    killed: set[int | None] = {None}
    for _ in range(RESTLESS_DEATHS + 1):
        quick_lab.wait_for(lambda: quick_lab.pids(experiment_id).get(first) not in killed, 120)
        pid = quick_lab.pids(experiment_id)[first]
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    quick_lab.wait_until_final(experiment_id)
    quick_lab.assert_whole(experiment_id)
    trials = quick_lab.trials(experiment_id)
    assert [(trial.state, trial.attempts) for trial in trials] == [("succeeded", RESTLESS_DEATHS + 2), ("succeeded", 1)]
    log = (quick_lab.data_dir / "logs" / f"experiment-{experiment_id}-1.log").read_text()
    begun = [int(number) for number in re.findall(r"trial (\d+) begins", log)]
    assert begun == [*[first] * (RESTLESS_DEATHS + 1), second, first]


@pytest.mark.deep
def test_while_all_of_an_experiment_rests_another_has_its_place(lab: Lab) -> None:
    """Where that is for long, its driver goes as well; whoever claims it then knows how long to wait."""
    experiment_id, other = lab.post([0], epochs=1, seconds=6), lab.post([1], epochs=1, seconds=6)
    died = update(Trial).where(Trial.experiment_id == experiment_id)
    lab.database.write(lambda s: s.execute(died.values(deaths=RESTLESS_DEATHS, rest_seconds=30)))
    lab.start_worker()
    (trial,) = lab.trials(experiment_id)
    lab.wait_for(lambda: lab.pids(experiment_id).get(trial.id) is not None, 240)
    assert lab.trials(other)[0].state == "queued"
    os.kill(lab.pids(experiment_id)[trial.id], signal.SIGKILL)
    lab.wait_for(lambda: lab.trials(experiment_id)[0].rests_until is not None, 60)
    (trial,) = lab.trials(experiment_id)
    assert trial.rest_seconds == 60
    assert (trial.error or "").endswith("; after that it rests for 60 s")
    lab.wait_for(lambda: (lab.experiment(experiment_id).waiting or "").startswith("what is left of it rests until"), 30)
    lab.wait_until_final(other)
    lab.wait_until_final(experiment_id)
    for number in (experiment_id, other):
        lab.assert_whole(number)
    again, second = lab.trials(experiment_id)[0].started_at, lab.trials(other)[0].started_at
    assert trial.rests_until is not None
    assert again is not None
    assert second is not None
    assert second < trial.rests_until <= again
    assert lab.experiment(experiment_id).fence == 2


@pytest.mark.deep
def test_a_trial_whose_epoch_takes_longer_lives_as_long_as_it_gets_on(quick_lab: Lab) -> None:
    """WRN-16-10 takes more than an hour for an epoch of CIFAR on a CPU. What it uses meanwhile is told, too."""
    experiment_id = quick_lab.post([1007], epochs=1, seconds=45, hung_after=15)
    quick_lab.start_worker()
    quick_lab.wait_for(lambda: quick_lab.trials(experiment_id)[0].state == "running", 120)
    began = time.monotonic()
    quick_lab.wait_for(lambda: quick_lab.used(experiment_id), 44)
    assert time.monotonic() - began < 44, "before its epoch ended"
    quick_lab.wait_until_final(experiment_id)
    (trial,) = quick_lab.trials(experiment_id)
    assert (trial.state, trial.attempts, trial.deaths) == ("succeeded", 1, 0)


@pytest.mark.deep
def test_a_trial_that_says_nothing_is_tried_again(quick_lab: Lab) -> None:
    """Before all that never began; it is its own fault."""
    experiment_id = quick_lab.post([1004, 0], epochs=1, seconds=0.05, hung_after=1.5, max_concurrent_trials=1)
    quick_lab.start_worker()
    quick_lab.wait_for(lambda: quick_lab.trials(experiment_id)[0].deaths >= 1, 120)
    hung, other = quick_lab.trials(experiment_id)
    assert "reported nothing for 1.5 s (`hung_after`)" in (hung.error or "")
    assert (hung.turn, hung.attempts >= 1) == (-1, True)
    assert other.state == "queued"
