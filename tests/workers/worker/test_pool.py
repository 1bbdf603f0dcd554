"""Experiments that share one cluster, with real drivers and processes on two places."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from service.database import Experiment, Project, TrialState
from service.experiments import actions

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from service.database import Trial
    from tests.workers.conftest import Lab

ENDLESS = list(range(900))


def _running(lab: Lab, *experiments: int) -> Counter[int]:
    return Counter({number: sum(t.state == "running" for t in lab.trials(number)) for number in experiments})


@pytest.mark.deep
def test_grids_share_and_urgent_ones_come_first(lab: Lab) -> None:
    lab.settings["TTSV_WORKER_CPUS"] = "2"
    first = lab.post(ENDLESS[:90], epochs=4, seconds=0.5)
    lab.start_worker()
    lab.wait_for(lambda: _running(lab, first)[first] == 2, 180)
    second = lab.post(ENDLESS[:90], epochs=4, seconds=0.5)
    lab.wait_for(lambda: _running(lab, first, second) == {first: 1, second: 1}, 180)
    done = Counter({number: len(lab.results(number)) for number in (first, second)})
    lab.wait_for(lambda: len(lab.results(first)) + len(lab.results(second)) >= done.total() + 10, 180)
    shares = [len(lab.results(number)) - done[number] for number in (first, second)]
    assert max(shares) - min(shares) <= 2

    urgent = lab.post([0, 1], epochs=4, seconds=0.5, priority=1000)
    lab.wait_until_final(urgent, 180)
    lab.assert_whole(urgent)
    begun = max(trial.started_at for trial in lab.trials(urgent) if trial.started_at is not None)
    others = [t for number in (first, second) for t in lab.trials(number) if t.started_at is not None]
    posted = lab.experiment(urgent).created_at
    late = [t for t in others if t.started_at is not None and posted < t.started_at < begun]
    assert len(late) <= 6, "while its driver and processes start, no more than some seconds go to others"

    lab.database.write(lambda session: actions.change(session, first, {"max_concurrent_trials": 1}))
    lab.database.write(lambda session: actions.cancel(session, second))
    lab.wait_for(lambda: _running(lab, first)[first] == 1, 180)
    time.sleep(3)
    assert _running(lab, first)[first] == 1
    lab.database.write(lambda session: actions.change(session, first, {"max_concurrent_trials": 10_000}))
    lab.wait_for(lambda: _running(lab, first)[first] == 2, 180)
    lab.database.write(lambda session: actions.change(session, first, {"max_concurrent_trials": 1}))
    lab.wait_for(lambda: _running(lab, first)[first] == 1, 30)
    time.sleep(3)
    assert _running(lab, first)[first] == 1, "though nobody else wants the other place"
    assert {trial.deaths for trial in lab.trials(first)} == {0}


@pytest.mark.deep
def test_what_is_due_to_a_project_in_part_is_had_in_turns(lab: Lab) -> None:
    """Weights of three and one on two places: half of the time the first has both."""
    grids = [lab.post(ENDLESS[:90], epochs=4, seconds=0.5) for _ in range(2)]

    def own(session: Session) -> None:
        for number, weight in zip(grids, (3.0, 1.0), strict=True):
            project = Project(name=f"weight {weight:g}", weight=weight)
            session.add(project)
            session.flush()
            session.execute(update(Experiment).where(Experiment.id == number).values(project_id=project.id))

    lab.database.write(own)
    lab.settings["TTSV_WORKER_CPUS"] = "2"
    lab.start_worker()
    lab.wait_for(lambda: sum(len(lab.results(number)) for number in grids) >= 60, 300)
    done = [len(lab.results(number)) for number in grids]
    assert done[0] / sum(done) == pytest.approx(0.75, rel=0.1)


@pytest.mark.deep
def test_trials_that_may_be_interrupted_give_way_and_go_on_later(lab: Lab) -> None:
    lab.settings["TTSV_WORKER_CPUS"] = "2"
    patient = lab.post([0, 1], epochs=60, seconds=0.5, preempt=True)
    lab.start_worker()
    lab.wait_for_epochs(patient, 6, 180)
    urgent = lab.post([0, 1], epochs=2, seconds=0.2, priority=7)
    lab.wait_for(lambda: not _running(lab, patient)[patient], 12)  # what the others need to start is their own affair
    lab.wait_until_final(urgent, 180)
    lab.assert_whole(urgent)
    epochs = {trial.id: trial.epoch for trial in lab.trials(patient)}
    lab.wait_for(lambda: all(trial.epoch > epochs[trial.id] + 2 for trial in lab.trials(patient)), 180)
    assert {(trial.attempts, trial.deaths) for trial in lab.trials(patient)} == {(1, 0)}
    for trial in lab.trials(patient):
        (file,) = (lab.data_dir / "trials" / str(trial.id)).glob("*/trained")
        trained = [int(line) for line in file.read_text().split()]
        assert len(trained) == len(set(trained)), "it gave way with a checkpoint of its last epoch"


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_who_finds_too_little_memory_on_a_shared_card_runs_again_alone_and_once(lab: Lab) -> None:
    """Two share the card of a machine, with its others at work; the driver of the experiment is killed meanwhile."""
    lab.settings |= {"TTSV_WORKER_CPUS": "2", "TTSV_WORKER_GPUS": "1", "TTSV_LEASE_SECONDS": "60"}
    half = {"cpus": 1, "gpus": 0.5}
    grid = lab.post([0, 1005, 1006, 1, 2], epochs=2, seconds=0.3, resources=half)
    lab.start_worker()

    def alone() -> list[Trial]:
        return [trial for trial in lab.trials(grid) if trial.alone]

    lab.wait_for(alone, 300)
    (driver,) = lab.drivers()
    driver.kill()
    assert all("alone after out of memory on a shared card: no room" in str(trial.error) for trial in alone())
    assert lab.wait_until_final(grid, 500).state == "failed"
    by_seed = {trial.seed: trial for trial in lab.trials(grid)}
    crowded, hopeless = by_seed[1005], by_seed[1006]
    assert (crowded.state, crowded.failure, crowded.error, crowded.attempts) == ("succeeded", None, None, 1)
    assert (hopeless.state, hopeless.failure, hopeless.error) == ("failed", "oom", "no room")
    others = [trial for seed, trial in by_seed.items() if seed < 1000]
    assert {trial.state for trial in others} == {TrialState.SUCCEEDED}
    cards = {seed: _cards(lab, trial.id) for seed, trial in by_seed.items()}
    assert [cards[seed] for seed in (1005, 1006)] == [["0.5", "1"]] * 2
    assert all(set(cards[trial.seed]) == {"0.5"} for trial in others)
    assert crowded.started_at is not None
    assert crowded.finished_at is not None
    for trial in others:
        assert trial.started_at is not None
        assert trial.finished_at is not None
        assert trial.finished_at <= crowded.started_at or trial.started_at >= crowded.finished_at, "it was not alone"


def _cards(lab: Lab, trial_id: int) -> list[str]:
    """What of a card the attempts at a trial had, the oldest first: each goes on in a copy of the folder before it."""
    (file,) = (lab.data_dir / "trials" / str(trial_id)).glob("*/cards")
    return file.read_text().split()
