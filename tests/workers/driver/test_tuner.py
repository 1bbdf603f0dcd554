"""What a pass of Tune keeps of trials that ended, nothing, as there may be any number, and of those that wait."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.search import SearchGenerator
from ray.tune.utils.callback import _create_default_callbacks

from service.specs.spec import Asha, Fifo
from workers.driver.feed import Feed, Slots
from workers.driver.tuner import _NoProgress, make_scheduler
from workers.trial_process.messages import Job

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.workers.conftest import Lab


@pytest.mark.parametrize("wanted", [Fifo(), Asha(type="asha")])
@pytest.mark.parametrize("status", [Trial.TERMINATED, Trial.ERROR])
def test_tune_lets_go_of_trials_that_ended(wanted: Fifo | Asha, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the newest where there is no other: Tune looks at one when nothing runs for a minute."""
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    feed = Feed(lambda _taken: None, Slots(), lambda: None)
    scheduler: Any = make_scheduler(wanted, feed)
    make: Any = TuneController
    tune = make(
        search_alg=SearchGenerator(feed), scheduler=scheduler, callbacks=_create_default_callbacks([_NoProgress()])
    )

    def add(count: int) -> list[weakref.ref[Trial]]:
        trials = [Trial("stub", stub=True, config={"job": {}}) for _ in range(count)]
        for trial in trials:
            tune.add_trial(trial)
            tune._set_trial_status(trial, Trial.RUNNING)
        return [weakref.ref(trial) for trial in trials]

    def end(trial: Trial | None) -> None:
        assert trial is not None
        tune._callbacks.on_trial_result(iteration=1, trials=tune._trials, trial=trial, result={"done": True})
        if status == Trial.ERROR:
            tune._process_trial_failure(trial, RuntimeError("its process died"))
        else:
            tune.stop_trial(trial)
        assert trial.status == status

    def left(trials: list[weakref.ref[Trial]]) -> list[bool]:
        scheduler.choose_trial_to_run(tune._wrapped())
        gc.collect()
        return [trial() is not None for trial in trials]

    monkeypatch.setattr(Trial, "handle_error", lambda _trial, _error: None)  # it writes a file
    monkeypatch.setattr(Trial, "should_recover", lambda _trial: False)
    trials = add(3)
    for trial in trials[:2]:
        end(trial())
    assert left(trials) == [False, False, True]
    end(trials[2]())
    assert left(trials) == [False, False, True]
    assert tune.get_trials() == [trials[2]()]
    assert not tune._live_trials
    trials += add(1)
    assert left(trials) == [False, False, True, True], "nothing ended since"
    assert not tune.is_finished()
    end(trials[3]())
    assert left(trials) == [False, False, False, True]
    assert tune.is_finished()


@pytest.mark.parametrize("wanted", [Fifo(), Asha(type="asha")])
def test_what_waits_for_room_is_taken_back_when_fewer_may_run(
    wanted: Fifo | Asha, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who has the room now: else all that were handed out would begin as others end. What was lost goes last."""
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    attempts = Counter[int]()

    def next_job(taken: Collection[int]) -> Job:
        number = min({1, 2, 3, 4, 5} - set(taken))
        attempts[number] += 1
        return Job(number, 1, stored_epochs=9 if number == 4 else 0, config={}, attempt=attempts[number] - 1)

    slots = Slots()
    slots.set(5)
    feed = Feed(next_job, slots, lambda: None)
    scheduler: Any = make_scheduler(wanted, feed)
    make: Any = TuneController
    tune = make(
        search_alg=SearchGenerator(feed), scheduler=scheduler, callbacks=_create_default_callbacks([_NoProgress()])
    )
    gone: list[str] = []
    tune._actor_manager = SimpleNamespace(
        _pending_actors_to_attrs={"room": 1, "lost": 1},
        _live_actors_to_ray_actors_resources={},
        remove_actor=gone.append,
    )

    def hand_out(name: str) -> Trial:
        trial = Trial("stub", stub=True, trial_id=name, config=feed.suggest(name))
        tune.add_trial(trial)
        return trial

    runs, starting, waiting, lost, _ = map(hand_out, "abcde")
    tune._set_trial_status(runs, Trial.RUNNING)
    for trial, actor in ((runs, "runs"), (starting, "starts"), (waiting, "room"), (lost, "lost")):
        tune._trial_to_actor[trial], tune._actor_to_trial[actor] = actor, trial
        tune._staged_trials.add(trial)
        tune._actor_cache.increase_max(trial.placement_group_factory)
    scheduler.choose_trial_to_run(tune._wrapped())
    assert gone == []
    slots.set(3)
    scheduler.choose_trial_to_run(tune._wrapped())
    assert gone == ["room"]
    assert (tune._pending_trials, tune._live_trials) == ({starting, lost}, {runs, starting, lost})
    assert tune._trial_to_actor.keys() == tune._staged_trials == {runs, starting, lost}
    assert feed.suggest("f") is None
    slots.set(1)
    scheduler.choose_trial_to_run(tune._wrapped())
    assert gone == ["room", "lost"], "one whose process starts already is not"
    assert (tune._pending_trials, tune._live_trials) == ({starting}, {runs, starting})
    slots.set(4)
    again = [feed.suggest(name)["job"] for name in "gh"]
    assert [(job["trial_id"], job["attempt"]) for job in again] == [(3, 1), (4, 1)]
    assert [feed.has_begun(Job(**job)) for job in again] == [False, True]


@pytest.mark.slow
@pytest.mark.deep
def test_a_driver_does_not_grow_with_its_trials(quick_lab: Lab) -> None:
    """Of each it may keep its result's place in comparisons, and what Ray keeps: Tune's own books take 140 KiB."""
    space = {"seed": {"int": [0, 999]}, "training.weight_decay": {"uniform": [0.0, 1.0]}}
    search = {"algorithm": "random", "trials": 130, "space": space}
    experiment_id = quick_lab.post([], epochs=2, seconds=0.001, search=search)
    quick_lab.start_worker()
    quick_lab.wait_for(lambda: len(quick_lab.results(experiment_id)) >= 50, 300)
    (driver,) = quick_lab.drivers()
    before = driver.memory_full_info().uss
    quick_lab.wait_for(lambda: len(quick_lab.results(experiment_id)) >= 120, 300)
    assert (driver.memory_full_info().uss - before) / 2**10 / 70 < 50, "KiB a trial"
