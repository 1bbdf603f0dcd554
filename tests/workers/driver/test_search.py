"""A search without a Tuner around it: what it hands out, what it learns, and what it does not repeat."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.tune.search import Searcher
from sqlalchemy.exc import OperationalError

from service.database import TrialState
from service.errors import LeaseLostError
from service.queue.driver_reads import Curve, Tried
from service.specs.planner import PlannedTrial
from service.specs.search import Search
from service.specs.spec import Asha, Fifo
from tests.results import made_epoch
from ttsv.config.fields import FieldValues
from workers.driver.feed import Feed, Slots
from workers.driver.search import SearchTrials
from workers.driver.tuner import make_scheduler
from workers.trial_process.messages import EpochReport, FailureReport, Job, ResultReport

BASE = {"dataset": "digits", "model": "small-cnn"}
DECAY = "training.weight_decay"
SPACE = {DECAY: {"uniform": [0.0, 1.0]}, "training.milestones": {"choice": [[1], [1, 2]]}, "seed": {"int": [0, 99]}}
EPOCH = EpochReport([])


class Rows:
    """What a database would keep."""

    def __init__(self) -> None:
        self.tried: list[Tried] = []
        self.errors: list[Exception] = []
        self.lost_replies: list[Exception] = []
        self.over: list[bool] = []
        self.ended = 0

    def end(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.ended += 1

    def add(self, planned: PlannedTrial, point: FieldValues) -> Job:
        if self.errors:
            raise self.errors.pop(0)
        known = [tried.trial_id for tried in self.tried if tried.fingerprint == planned.fingerprint]
        trial_id = known[0] if known else len(self.tried) + 1
        if not known:
            self.tried.append(Tried(trial_id, planned.fingerprint, TrialState.QUEUED, point, None))
        if self.lost_replies:
            raise self.lost_replies.pop(0)
        return Job(trial_id, 1, 0, planned.config.to_dict())

    def next_job(self, taken: Collection[int]) -> Job | None:
        """What still waits, in order."""
        waiting = [tried for tried in self.tried if tried.state == TrialState.QUEUED and tried.trial_id not in taken]
        return Job(waiting[0].trial_id, 2, 1, {}) if waiting else None

    def search(self, wanted: Search, history: Sequence[Tried] = ()) -> SearchTrials:
        """A search that these rows feed, of which nothing is slow."""
        slots = Slots()
        slots.unlimited()
        make = partial(SearchTrials, wanted, BASE, wanted.trials, history, self.add, self.end)
        return make(self.next_job, slots, lambda: self.over.append(True))

    def finish(self, trial_id: int, value: float | None, state: TrialState = TrialState.SUCCEEDED) -> None:
        old = self.tried[trial_id - 1]
        self.tried[trial_id - 1] = Tried(trial_id, old.fingerprint, state, old.point, value)


def search_of(algorithm: str = "random", trials: int = 8, space: dict[str, Any] = SPACE, **fields: Any) -> Search:
    return Search.model_validate({"algorithm": algorithm, "trials": trials, "space": space} | fields)


def worth(point: FieldValues) -> float:
    return 1 - abs(decay_of(point) - 0.3)


def decay_of(point: FieldValues) -> float:
    drawn = point[DECAY]
    assert isinstance(drawn, float)
    return drawn


def study_of(trials: SearchTrials) -> Any:
    """What Optuna knows."""
    assert trials._optuna is not None
    return trials._optuna._searcher._ot_study


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
        trials.settled(trial_id)
        ran.append(trial_id)
    return ran


@pytest.mark.parametrize("algorithm", ["random", "optuna"])
class TestSearch:
    def test_as_many_as_were_asked_for_each_once(self, algorithm: str) -> None:
        rows = Rows()
        trials = rows.search(search_of(algorithm))
        assert not trials.exhausted
        assert run(trials, rows, 7) == list(range(1, 8))
        assert (trials.handed_out, trials.exhausted, rows.over) == (7, False, [])
        assert run(trials, rows) == [8]
        assert (trials.handed_out, trials.exhausted, rows.over) == (8, True, [True])
        assert len({tried.fingerprint for tried in rows.tried}) == 8
        for tried in rows.tried:
            assert set(tried.point) == set(SPACE)
            assert 0 <= decay_of(tried.point) <= 1
            assert type(tried.point["seed"]) is int
            assert tried.point["training.milestones"] in ([1], [1, 2])

    def test_made_anew_it_goes_on(self, algorithm: str) -> None:
        """Five of eight ran, one is open: that one runs first, then two new ones."""
        rows = Rows()
        run(rows.search(search_of(algorithm)), rows, 5)
        rows.finish(3, None, TrialState.FAILED)
        rows.finish(5, 0.4, TrialState.QUEUED)
        trials = rows.search(search_of(algorithm), rows.tried[:])
        assert not trials.exhausted
        assert run(trials, rows) == [5, 6, 7, 8]
        assert len({tried.fingerprint for tried in rows.tried}) == 8

    def test_with_all_made_it_has_none_of_its_own(self, algorithm: str) -> None:
        """What is left open is fed like the trials of any grid."""
        rows = Rows()
        run(rows.search(search_of(algorithm, 2)), rows)
        rows.finish(1, None, TrialState.QUEUED)
        assert rows.search(search_of(algorithm, 2), rows.tried[:]).exhausted

    def test_what_lost_its_process_comes_again_before_new_points_and_teaches_once(self, algorithm: str) -> None:
        rows = Rows()
        trials = rows.search(search_of(algorithm, 3))
        assert trials.suggest("a")["job"]["trial_id"] == 1
        trials.on_trial_complete("a", error=True)
        trials.settled(1)
        assert trials.suggest("b")["job"]["trial_id"] == 1
        assert len(rows.tried) == 1
        rows.finish(1, 0.7, TrialState.RUNNING)
        trials.on_trial_complete("b", {"val_accuracy": 0.7, "report": EPOCH})
        rows.finish(1, 0.7)
        trials.settled(1)
        assert run(trials, rows) == [2, 3]
        if algorithm == "optuna":
            study = study_of(trials)
            outcomes = [(trial.state.name, trial.value) for trial in study.trials]
            assert outcomes[:2] == [("FAIL", None), ("COMPLETE", 0.7)]
            assert study.trials[1].params == study.trials[0].params

    @pytest.mark.slow
    def test_a_small_space_ends(self, algorithm: str) -> None:
        rows = Rows()
        space = {DECAY: {"choice": [0.1, 0.2]}, "seed": {"int": [0, 1]}}
        trials = rows.search(search_of(algorithm, 10, space))
        assert len(run(trials, rows)) == 4
        assert (trials.exhausted, trials.handed_out, rows.ended) == (True, 4, 1)

    def test_that_a_small_space_ends_is_stored_before_it_is_over(self, algorithm: str) -> None:
        rows = Rows()
        trials = rows.search(search_of(algorithm, 2, {"seed": {"int": [7, 8]}}))
        assert trials.suggest("a")["job"]["trial_id"] == 1
        trials._new_point = Mock(return_value=None)  # type: ignore[method-assign] # as after 200 tries
        rows.errors = [OperationalError("UPDATE", {}, ConnectionError("away"))]
        assert trials.suggest("b") is None
        assert (trials.exhausted, rows.ended) == (False, 0)
        trials.settled(0)  # the database answers again
        assert trials.suggest("b") is None
        assert (trials.exhausted, rows.ended) == (True, 1)

    def test_waits_for_the_database_and_keeps_the_point(self, algorithm: str) -> None:
        rows = Rows()
        rows.errors = [OperationalError("INSERT", {}, ConnectionError("away"))]
        trials = rows.search(search_of(algorithm))
        assert trials.suggest("one") is None
        trials.settled(0)  # the database answers again
        assert trials.suggest("one")["job"]["trial_id"] == 1
        assert len(rows.tried) == 1

    def test_a_point_that_was_stored_unheard_is_tried_once(self, algorithm: str) -> None:
        """The reply to its COMMIT was lost: its trial waits in the database, and the point here."""
        rows = Rows()
        rows.lost_replies = [OperationalError("COMMIT", {}, ConnectionError("away"))]
        trials = rows.search(search_of(algorithm, 3))
        assert trials.suggest("a") is None
        assert len(rows.tried) == 1
        trials.settled(0)
        handed = [trials.suggest(name)["job"]["trial_id"] for name in "abc"]
        assert handed == [1, 2, 3], "no two processes at work on one trial: they would share its folder"
        assert trials.suggest("d") is None
        assert trials.exhausted
        assert len(rows.tried) == 3

    def test_ends_with_its_lease_and_when_it_is_told(self, algorithm: str) -> None:
        rows = Rows()
        rows.errors = [LeaseLostError("gone")]
        lost = rows.search(search_of(algorithm))
        assert lost.suggest("x") is None
        assert lost.suggest("x") == Searcher.FINISHED
        assert rows.tried == []
        trials = rows.search(search_of(algorithm))
        run(trials, rows, 2)
        trials.stop()
        assert trials.suggest("y") == Searcher.FINISHED
        assert trials.handed_out == len(rows.tried) == 2

    def test_the_same_seed_the_same_points(self, algorithm: str) -> None:
        found = []
        for seed in (1, 1, 2):
            rows = Rows()
            run(rows.search(search_of(algorithm, seed=seed)), rows)
            found.append([tried.point for tried in rows.tried])
        assert found[0] == found[1] != found[2]


def test_random_points_are_those_of_an_unbroken_search() -> None:
    whole, broken = Rows(), Rows()
    run(whole.search(search_of()), whole)
    for _ in range(4):
        run(broken.search(search_of(), broken.tried[:]), broken, 2)
    assert [tried.point for tried in broken.tried] == [tried.point for tried in whole.tried]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("done", [50, 90, 250])
def test_a_search_goes_on_however_much_an_earlier_driver_tried(done: int, seed: int) -> None:
    """Of a hundred points the last ones are drawn among ever more repeats; of a continuum there is always another."""
    small = {DECAY: {"choice": [tenth / 10 for tenth in range(10)]}, "seed": {"int": [0, 9]}}
    wanted = search_of(trials=300, space={DECAY: SPACE[DECAY]} if done > 100 else small, seed=seed)
    whole, broken = Rows(), Rows()
    run(whole.search(wanted), whole)
    run(broken.search(wanted), broken, done)
    run(broken.search(wanted, broken.tried[:]), broken)
    assert [tried.point for tried in broken.tried] == [tried.point for tried in whole.tried]


def test_optuna_learns_from_what_an_earlier_driver_tried() -> None:
    """After thirty points remembered its next ones are better than random ones."""
    space = {DECAY: {"uniform": [0.0, 1.0]}}
    rows = Rows()
    run(rows.search(search_of("random", 30, space)), rows)
    run(rows.search(search_of("optuna", 40, space), rows.tried[:]), rows)
    first, later = ([worth(tried.point) for tried in part] for part in (rows.tried[:30], rows.tried[30:]))
    assert sum(later) / len(later) > sum(first) / len(first) + 0.1


@pytest.mark.parametrize("drivers", [1, 3])
def test_optuna_settles_on_the_best_points_and_the_search_goes_on(drivers: int) -> None:
    """What it did not suggest teaches it too."""
    space = {DECAY: {"choice": [tenth / 10 for tenth in range(6)]}, "seed": {"int": [0, 5]}}
    rows = Rows()
    for _ in range(drivers):
        trials = rows.search(search_of("optuna", 33, space), rows.tried[:])
        run(trials, rows, 33 // drivers)
    assert (trials.exhausted, rows.ended, len({tried.fingerprint for tried in rows.tried})) == (True, 0, 33)
    learned = [trial.value for trial in study_of(trials).trials if trial.state.name == "COMPLETE"]
    assert learned == [tried.value for tried in rows.tried]


@pytest.mark.parametrize("new_driver", [False, True])
def test_a_trial_that_only_evaluates_again_teaches_what_it_had_trained(new_driver: bool) -> None:
    """Its process ended in its evaluation, so that the next one tells of no epoch."""
    rows = Rows()
    trials = rows.search(search_of("optuna"))
    trials.suggest("a")
    trials.on_trial_result("a", {"val_accuracy": 0.9, "report": EPOCH})
    trials.on_trial_complete("a", error=True)
    trials.settled(1)
    if new_driver:
        rows.finish(1, 0.9, TrialState.QUEUED)
        trials = rows.search(search_of("optuna"), rows.tried[:])
    assert trials.suggest("b")["job"]["trial_id"] == 1
    trials.on_trial_complete("b", {"report": ResultReport(Mock(), [])})
    study = study_of(trials)
    assert [trial.value for trial in study.trials if trial.state.name == "COMPLETE"] == [0.9]


def test_an_end_that_was_refused_and_comes_again_teaches_once() -> None:
    """As where its files were not to be seen: it trained nothing else meanwhile."""
    rows = Rows()
    trials = rows.search(search_of("optuna"))
    for name in "ab":
        assert trials.suggest(name)["job"]["trial_id"] == 1
        trials.on_trial_result(name, {"val_accuracy": 0.9, "report": EPOCH})
        trials.on_trial_complete(name, {"report": ResultReport(Mock(), [])})
        trials.settled(1)
    assert [trial.value for trial in study_of(trials).trials if trial.state.name == "COMPLETE"] == [0.9]


@pytest.mark.slow
def test_failures_teach_nothing() -> None:
    """A diverged trial's last accuracy is no outcome."""
    rows = Rows()
    trials = rows.search(search_of("optuna"))
    trials.suggest("a")
    trials.on_trial_result("a", {"val_accuracy": 1.0, "report": EPOCH})
    trials.on_trial_complete("a", {"report": FailureReport("diverged", "nan")})
    trials.suggest("b")
    trials.on_trial_complete("b", error=True)
    study = study_of(trials)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL"]


def test_points_that_would_choose_by_the_test_images_are_not_tried() -> None:
    """A rare value of a space gets past what is tried when the search is posted."""
    space = {"training.validation": {"choice": ["test", "held-out"]}, "seed": {"choice": [*range(8)]}}
    rows = Rows()
    ran: list[int] = []
    trials = rows.search(search_of(trials=6, space=space))
    while (suggested := trials.suggest(f"tune-{len(ran)}")) is not None:
        ran.append(suggested["job"]["trial_id"])
    assert ran == [1, 2, 3, 4, 5, 6]
    assert {tried.point["training.validation"] for tried in rows.tried} == {"held-out"}


def feed() -> Feed:
    """One that has nothing to hand out."""
    slots = Slots()
    slots.unlimited()
    return Feed(lambda _taken: None, slots, lambda: None)


class TestHalving:
    def decide(self, scheduler: Any, trial_id: int, *told: float, attempt: int = 0, epochs: int = 100) -> str:
        """By its metric, which has the name of a loss only where that is asked for; `told`: epochs and their values."""
        trial = Mock(trial_id=f"{trial_id} {attempt}", config={"job": asdict(Job(trial_id, 1, 0, {}, attempt=attempt))})
        scheduler.on_trial_add(None, trial)
        points = [
            made_epoch(int(epoch), epochs=epochs, **{scheduler._metric: value})
            for epoch, value in zip(told[::2], told[1::2], strict=True)
        ]
        decision: str = scheduler.on_trial_result(None, trial, {"report": EpochReport(points)})
        return decision

    def test_earlier_trials_are_compared_with(self) -> None:
        wanted = Asha(type="asha", grace_epochs=2, reduction=2)
        earlier = [Curve(1, [(1, 0.2), (2, 0.8), (3, 0.9), (4, 0.9)]), Curve(2, [(1, 0.1), (2, 0.3)])]
        scheduler = make_scheduler(wanted, feed(), earlier)
        assert self.decide(scheduler, 10, 1, 0.0) == "CONTINUE"
        assert self.decide(scheduler, 11, 2, 0.4) == "STOP"
        assert self.decide(scheduler, 12, 2, 0.7) == "CONTINUE"
        assert self.decide(scheduler, 13, 4, 0.7) == "STOP"
        assert self.decide(make_scheduler(wanted, feed()), 13, 4, 0.7) == "CONTINUE"

    def test_no_comparison_after_the_last_one_or_at_a_trials_end(self) -> None:
        wanted = Asha(type="asha", grace_epochs=1, reduction=2, max_epochs=2)
        scheduler = make_scheduler(wanted, feed(), [Curve(1, [(epoch, 0.9) for epoch in range(1, 9)])])
        assert self.decide(scheduler, 10, 2, 0.1, epochs=2) == "CONTINUE"
        scheduler = make_scheduler(wanted, feed(), [Curve(1, [(1, 0.1), (2, 0.1), (4, 0.9)])])
        assert self.decide(scheduler, 11, 2, 0.5) == "CONTINUE"
        assert self.decide(scheduler, 12, 4, 0.5) == "CONTINUE"

    def test_its_last_epoch_is_compared_with_all_the_same(self) -> None:
        """Trials may be of different lengths, and a driver that begins anew finds that epoch stored."""
        wanted = Asha(type="asha", grace_epochs=1, reduction=3)
        course = [(1, 0.9), (3, 0.9)]
        told = make_scheduler(wanted, feed())
        for number in (1, 2, 3):
            for point in course:
                assert self.decide(told, number, *point, epochs=3) == "CONTINUE"
        for scheduler in (told, make_scheduler(wanted, feed(), [Curve(number, course) for number in (1, 2, 3)])):
            assert self.decide(scheduler, 4, 3, 0.1, epochs=9) == "STOP"

    def test_of_epochs_that_are_told_together_each_is_compared(self) -> None:
        """As when a trial goes on whose driver died with some unstored."""
        wanted = Asha(type="asha", grace_epochs=3, reduction=2)
        scheduler = make_scheduler(wanted, feed(), [Curve(1, [(3, 0.5)]), Curve(2, [(3, 0.6)])])
        assert self.decide(scheduler, 3, 3, 0.1, 4, 0.8, 5, 0.9) == "STOP"
        assert self.decide(scheduler, 4, 3, 0.1, 4, 0.8, 5, 0.9, epochs=5) == "CONTINUE", "it has run to its end"

    def test_one_that_is_to_stop_does_so_though_it_was_killed_before_that_was_stored(self) -> None:
        """It tells the epoch again, of which the comparison has been; or the next."""
        scheduler = make_scheduler(Asha(type="asha", grace_epochs=2, reduction=2), feed(), [Curve(1, [(2, 0.9)])])
        assert self.decide(scheduler, 2, 2, 0.1) == "STOP"
        assert self.decide(scheduler, 2, 2, 0.1, attempt=1) == "STOP"
        assert self.decide(scheduler, 2, 3, 0.2, attempt=2) == "STOP"

    def test_losses_are_better_small(self) -> None:
        wanted = Asha(type="asha", metric="val_loss", reduction=2)
        assert self.decide(make_scheduler(wanted, feed(), [Curve(1, [(1, 0.5)])]), 2, 1, 0.9) == "STOP"

    @pytest.mark.parametrize("new_driver", [False, True])
    def test_a_trial_is_compared_once_however_often_it_begins(self, new_driver: bool) -> None:
        """It passed its third comparison before the other was there; then its process died, or its driver."""
        wanted = Asha(type="asha", grace_epochs=1, reduction=2)
        course = {1: [(1, 0.5), (2, 0.6), (4, 0.7), (5, 0.72)], 2: [(1, 0.8), (2, 0.85), (4, 0.9)]}
        if new_driver:
            scheduler = make_scheduler(wanted, feed(), [Curve(number, points) for number, points in course.items()])
        else:
            scheduler = make_scheduler(wanted, feed())
            told = [self.decide(scheduler, number, *point) for number, points in course.items() for point in points]
            assert set(told) == {"CONTINUE"}
        assert self.decide(scheduler, 1, 6, 0.73, attempt=1) == "CONTINUE"
        assert self.decide(scheduler, 3, 4, 0.79) == "STOP", "the half of 0.7 and 0.9 is 0.8"
        assert self.decide(scheduler, 4, 4, 0.8) == "CONTINUE", "the better one counts once, with what it had then"

    def test_without_one_nothing_is_compared(self) -> None:
        scheduler: Any = make_scheduler(Fifo(), feed())
        scheduler._metric = "val_accuracy"
        for epoch in (1, 2, 4):
            assert self.decide(scheduler, epoch, epoch, 0.0) == "CONTINUE"

    @pytest.mark.parametrize("wanted", [Fifo(), Asha(type="asha")])
    def test_the_feed_decides_of_tunes_idle_processes(self, wanted: Fifo | Asha) -> None:
        """Schedulers alone are shown Tune's controller; and its pickled books hold no feed."""
        fed, cache = feed(), SimpleNamespace(_may_keep_one=None)
        first, second, third = waiting = [Mock(trial_id=name, config={"shunned": ()}) for name in "abc"]
        tuner = SimpleNamespace(
            _stopped_trials=set(),
            _failed_trials=set(),
            _actor_cache=cache,
            _actor_manager=SimpleNamespace(_pending_actors_to_attrs={}, _live_actors_to_ray_actors_resources={}),
            _started_actors=set(),
            _pending_trials_list=["gone", *waiting],
            _pending_trials=set(waiting),
            _trial_to_actor={},
        )
        controller: Any = SimpleNamespace(_tune_controller=tuner)
        scheduler: Any = make_scheduler(wanted, fed)
        assert scheduler.choose_trial_to_run(controller) is first
        kept = [cache._may_keep_one]
        tuner._trial_to_actor = {first: "starts", third: "starts"}
        assert scheduler.choose_trial_to_run(controller) is second  # no process is being started for it
        tuner._trial_to_actor[second] = "starts"
        assert scheduler.choose_trial_to_run(controller) is first
        tuner._pending_trials.clear()
        fed.stop()
        assert scheduler.choose_trial_to_run(controller) is None
        assert [*kept, cache._may_keep_one] == [True, False]
        assert type(pickle.loads(pickle.dumps(scheduler))).__name__ == "FIFOScheduler"
