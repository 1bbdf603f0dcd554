"""A search without a Tuner around it: what it hands out, what it learns, and what it does not repeat."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ray.tune.search import Searcher
from sqlalchemy.exc import OperationalError

from service.database import TrialState
from service.errors import LeaseLostError
from service.queue.driver_reads import Curve, Tried
from service.specs.planner import Fields, PlannedTrial
from service.specs.search import Search
from service.specs.spec import Asha, Fifo
from workers.driver.search import SearchTrials, any_trial
from workers.driver.tuner import make_scheduler
from workers.driver.watchdog import Watchdog
from workers.trial_process.messages import EpochReport, FailureReport, Job
from workers.trial_process.trainable import COMPARED_EPOCH

BASE = {"dataset": "digits", "model": "small-cnn"}
DECAY = "training.weight_decay"
SPACE = {DECAY: {"uniform": [0.0, 1.0]}, "training.milestones": {"choice": [[1], [1, 2]]}, "seed": {"int": [0, 99]}}
EPOCH = EpochReport([])


class Rows:
    """What a database would keep."""

    def __init__(self) -> None:
        self.tried: list[Tried] = []
        self.errors: list[Exception] = []

    def add(self, planned: PlannedTrial, point: Fields) -> Job:
        if self.errors:
            raise self.errors.pop(0)
        trial_id = len(self.tried) + 1
        self.tried.append(Tried(trial_id, planned.fingerprint, TrialState.QUEUED, point, None))
        return Job(trial_id, 1, 0, planned.config.to_dict())

    def finish(self, trial_id: int, value: float | None, state: TrialState = TrialState.SUCCEEDED) -> None:
        old = self.tried[trial_id - 1]
        self.tried[trial_id - 1] = Tried(trial_id, old.fingerprint, state, old.point, value)


def search_of(algorithm: str = "random", trials: int = 8, space: dict[str, Any] = SPACE, **fields: Any) -> Search:
    return Search.model_validate({"algorithm": algorithm, "trials": trials, "space": space} | fields)


def worth(point: Fields) -> float:
    return 1 - abs(float(point[DECAY]) - 0.3)


def run(trials: SearchTrials, rows: Rows, count: int | None = None) -> list[int]:
    """Runs so many trials, or all, one after another."""
    ran: list[int] = []
    while count is None or len(ran) < count:
        name = f"tune-{len(rows.tried)}-{len(ran)}"
        suggested = trials.suggest(name)
        if suggested == Searcher.FINISHED:
            break
        trial_id = suggested["job"]["trial_id"]
        value = worth(rows.tried[trial_id - 1].point)
        trials.on_trial_result(name, {"val_accuracy": value, "report": EPOCH})
        trials.on_trial_complete(name, {"val_accuracy": value, "report": EPOCH})
        rows.finish(trial_id, value)
        ran.append(trial_id)
    return ran


@pytest.mark.parametrize("algorithm", ["random", "optuna"])
class TestSearch:
    def test_as_many_as_were_asked_for_each_once(self, algorithm: str) -> None:
        rows = Rows()
        trials = SearchTrials(search_of(algorithm), BASE, [], [], rows.add)
        assert (trials.most, trials.total) == (8, None)
        assert run(trials, rows) == list(range(1, 9))
        assert (trials.most, trials.total, trials.exhausted) == (0, 8, True)
        assert len({tried.fingerprint for tried in rows.tried}) == 8
        for tried in rows.tried:
            assert set(tried.point) == set(SPACE)
            assert 0 <= tried.point[DECAY] <= 1
            assert type(tried.point["seed"]) is int
            assert tried.point["training.milestones"] in ([1], [1, 2])

    def test_made_anew_it_goes_on(self, algorithm: str) -> None:
        """Five of eight ran, one is open: that one runs first, then two new ones."""
        rows = Rows()
        run(SearchTrials(search_of(algorithm), BASE, [], [], rows.add), rows, 5)
        rows.finish(3, None, TrialState.FAILED)
        rows.finish(5, 0.4, TrialState.QUEUED)
        open_job = Job(5, 2, 1, {})
        trials = SearchTrials(search_of(algorithm), BASE, rows.tried, [open_job], rows.add)
        assert trials.most == 4
        assert run(trials, rows) == [5, 6, 7, 8]
        assert len({tried.fingerprint for tried in rows.tried}) == 8

    @pytest.mark.slow
    def test_a_small_space_ends(self, algorithm: str) -> None:
        rows = Rows()
        space = {DECAY: {"choice": [0.1, 0.2]}, "seed": {"int": [0, 1]}}
        trials = SearchTrials(search_of(algorithm, 10, space), BASE, [], [], rows.add)
        assert len(run(trials, rows)) == 4
        assert (trials.exhausted, trials.total) == (True, 4)

    def test_waits_for_the_database_and_keeps_the_point(self, algorithm: str) -> None:
        rows = Rows()
        rows.errors = [OperationalError("INSERT", {}, ConnectionError("away"))]
        trials = SearchTrials(search_of(algorithm), BASE, [], [], rows.add)
        assert trials.suggest("one") is None
        assert trials.suggest("one")["job"]["trial_id"] == 1
        assert len(rows.tried) == 1

    def test_ends_with_its_lease_and_when_it_is_told(self, algorithm: str) -> None:
        rows = Rows()
        rows.errors = [LeaseLostError("gone")]
        assert SearchTrials(search_of(algorithm), BASE, [], [], rows.add).suggest("x") == Searcher.FINISHED
        trials = SearchTrials(search_of(algorithm), BASE, [], [], rows.add)
        run(trials, rows, 2)
        trials.stop()
        assert trials.suggest("y") == Searcher.FINISHED
        assert trials.total == 2

    def test_the_same_seed_the_same_points(self, algorithm: str) -> None:
        found = []
        for seed in (1, 1, 2):
            rows = Rows()
            run(SearchTrials(search_of(algorithm, seed=seed), BASE, [], [], rows.add), rows)
            found.append([tried.point for tried in rows.tried])
        assert found[0] == found[1] != found[2]


def test_random_points_are_those_of_an_unbroken_search() -> None:
    whole, broken = Rows(), Rows()
    run(SearchTrials(search_of(), BASE, [], [], whole.add), whole)
    for _ in range(4):
        run(SearchTrials(search_of(), BASE, broken.tried, [], broken.add), broken, 2)
    assert [tried.point for tried in broken.tried] == [tried.point for tried in whole.tried]


def test_optuna_learns_from_what_an_earlier_driver_tried() -> None:
    """After thirty points remembered its next ones are better than random ones."""
    space = {DECAY: {"uniform": [0.0, 1.0]}}
    rows = Rows()
    run(SearchTrials(search_of("random", 30, space), BASE, [], [], rows.add), rows)
    run(SearchTrials(search_of("optuna", 40, space), BASE, rows.tried, [], rows.add), rows)
    first, later = ([worth(tried.point) for tried in part] for part in (rows.tried[:30], rows.tried[30:]))
    assert sum(later) / len(later) > sum(first) / len(first) + 0.1


def test_failures_teach_nothing() -> None:
    """A diverged trial's last accuracy is no outcome."""
    rows = Rows()
    trials = SearchTrials(search_of("optuna"), BASE, [], [], rows.add)
    trials.suggest("a")
    trials.on_trial_result("a", {"val_accuracy": 1.0, "report": EPOCH})
    trials.on_trial_complete("a", {"report": FailureReport("diverged", "nan")})
    trials.suggest("b")
    trials.on_trial_complete("b", error=True)
    study = trials._source._searcher._ot_study  # type: ignore[attr-defined]
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL"]


def test_any_trial_is_one_of_the_space() -> None:
    planned = any_trial(search_of(), BASE)
    assert planned.config.training.milestones in ((), (1,), (1, 2))
    assert 0 <= planned.config.seed <= 99


def test_points_that_would_choose_by_the_test_images_are_not_tried() -> None:
    """A rare value of a space gets past what is tried when the search is posted."""
    space = {"training.validation": {"choice": ["test", "held-out"]}, "seed": {"choice": [*range(8)]}}
    rows = Rows()
    ran: list[int] = []
    trials = SearchTrials(search_of(trials=6, space=space), BASE, [], [], rows.add)
    while (suggested := trials.suggest(f"tune-{len(ran)}")) != Searcher.FINISHED:
        ran.append(suggested["job"]["trial_id"])
    assert len(ran) == 6
    assert {tried.point["training.validation"] for tried in rows.tried} == {"held-out"}


class TestHalving:
    def decide(self, scheduler: Any, trial_id: str, epoch: int, value: float) -> str:
        class _Trial:
            pass

        trial: Any = _Trial()
        trial.trial_id = trial_id
        scheduler.on_trial_add(None, trial)
        decision: str = scheduler.on_trial_result(None, trial, {COMPARED_EPOCH: epoch, "val_accuracy": value})
        return decision

    def test_earlier_trials_are_compared_with(self) -> None:
        wanted = Asha(type="asha", grace_epochs=2, reduction=2)
        earlier = [Curve(1, [(1, 0.2), (2, 0.8), (3, 0.9), (4, 0.9)]), Curve(2, [(1, 0.1), (2, 0.3)])]
        scheduler = make_scheduler(wanted, earlier)
        assert self.decide(scheduler, "a", 1, 0.0) == "CONTINUE"
        assert self.decide(scheduler, "b", 2, 0.4) == "STOP"
        assert self.decide(scheduler, "c", 2, 0.7) == "CONTINUE"
        assert self.decide(scheduler, "d", 4, 0.7) == "STOP"
        assert self.decide(make_scheduler(wanted), "d", 4, 0.7) == "CONTINUE"

    def test_no_comparison_after_the_last_one_or_at_a_trials_end(self) -> None:
        wanted = Asha(type="asha", grace_epochs=1, reduction=2, max_epochs=2)
        scheduler = make_scheduler(wanted, [Curve(1, [(epoch, 0.9) for epoch in range(1, 9)])])
        assert self.decide(scheduler, "a", 0, 0.1) == "CONTINUE"
        scheduler = make_scheduler(wanted, [Curve(1, [(1, 0.1), (2, 0.1), (4, 0.9)])])
        assert self.decide(scheduler, "b", 2, 0.5) == "CONTINUE"
        assert self.decide(scheduler, "c", 4, 0.5) == "CONTINUE"

    def test_losses_are_better_small(self) -> None:
        scheduler: Any = make_scheduler(Asha(type="asha", metric="val_loss", reduction=2), [Curve(1, [(1, 0.5)])])
        trial: Any = type("T", (), {"trial_id": "a"})()
        scheduler.on_trial_add(None, trial)
        assert scheduler.on_trial_result(None, trial, {COMPARED_EPOCH: 1, "val_loss": 0.9}) == "STOP"

    def test_without_one_nothing_is_compared(self) -> None:
        assert type(make_scheduler(Fifo())).__name__ == "FIFOScheduler"


class TestWatchdog:
    @pytest.fixture
    def killed(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        found: list[str] = []
        monkeypatch.setattr("workers.driver.watchdog.ray.kill", found.append)
        monkeypatch.setattr("workers.driver.watchdog.LOOK_SECONDS", 0.01)
        return found

    def test_only_what_takes_too_long(self, killed: list[str]) -> None:
        told: list[int] = []
        watchdog = Watchdog(0.2, told.append)
        watchdog.start()
        watchdog.began(1, "actor 1")
        watchdog.began(2, "actor 2")
        assert watchdog.ended(2)
        deadline = time.monotonic() + 5
        while not killed and time.monotonic() < deadline:
            time.sleep(0.01)
        watchdog.close()
        assert (told, killed) == ([1], ["actor 1"])
        assert not watchdog.ended(1)

    def test_what_must_not_run(self, killed: list[str]) -> None:
        watchdog = Watchdog(None, lambda _trial_id: None)
        watchdog.start()
        watchdog.began(1, "actor 1")
        watchdog.kill(1)
        watchdog.kill(2)
        assert killed == ["actor 1"]
        assert not watchdog.ended(1)
