"""What a pass of Tune keeps of trials that ended: nothing, as an experiment may have any number of them."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.search import SearchGenerator
from ray.tune.utils.callback import _create_default_callbacks

from service.specs.spec import Asha, Fifo
from workers.driver.feed import Feed, Slots
from workers.driver.tuner import _NoProgress, make_scheduler

if TYPE_CHECKING:
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
