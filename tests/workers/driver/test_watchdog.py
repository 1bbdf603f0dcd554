"""The watchdog, with times shortened: what is killed, why, and what lives on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from workers.driver import hanging
from workers.driver.tuner import Passes
from workers.driver.watchdog import Verdict, Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Killer:
    """What was judged and killed, in its order; makes watchdogs and ends them."""

    def __init__(self) -> None:
        self.said: list[tuple[int, Verdict, float]] = []
        self.events: list[object] = []
        self.watchdogs: list[Watchdog] = []

    @property
    def killed(self) -> list[object]:
        return [event for event in self.events if isinstance(event, str)]

    def judge(self, trial_id: int, verdict: Verdict, seconds: float) -> None:
        self.said.append((trial_id, verdict, seconds))
        self.events.append(trial_id)

    def watchdog(self, timeout: float | None = None, hung_after: float | None = None) -> Watchdog:
        watchdog = Watchdog(timeout, hung_after, self.judge)
        self.watchdogs.append(watchdog)
        watchdog.start()
        return watchdog


class Actor(str):
    """A process that is asked to give way, and has once `answer` is set."""

    answer: Future[None]

    def __new__(cls, name: str, *, at_once: bool = True) -> Actor:
        actor = super().__new__(cls, name)
        actor.answer = Future[None]()
        if at_once:
            actor.answer.set_result(None)
        return actor

    @property
    def give_way(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: self.answer))


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Killer]:
    killer = Killer()
    monkeypatch.setattr("workers.driver.watchdog.ray.kill", killer.events.append)
    monkeypatch.setattr("workers.driver.watchdog.LOOK_SECONDS", 0.01)
    yield killer
    for watchdog in killer.watchdogs:
        watchdog.close()


def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def talk(watchdog: Watchdog, trial_id: int, seconds: float) -> None:
    """The trial reports again and again for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watchdog.heard(trial_id)
        time.sleep(0.02)


def test_only_what_takes_too_long(killer: Killer) -> None:
    watchdog = killer.watchdog(timeout=0.2)
    watchdog.began(1, "actor 1")
    watchdog.began(2, "actor 2")
    assert watchdog.ended(2)
    eventually(lambda: killer.killed)
    time.sleep(0.3)
    assert killer.said == [(1, Verdict.TIMEOUT, 0.2)]
    assert killer.events == [1, "actor 1"]  # judged before its process ends
    assert not watchdog.ended(1)


def test_one_that_cannot_be_killed_now_is_later_and_the_others_are_watched(
    killer: Killer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's head may not answer just then."""
    refusals = iter(["away", "away", "away"])

    def kill(actor: object) -> None:
        if next(refusals, None) is not None:
            raise RuntimeError("the head does not answer")
        killer.events.append(actor)

    monkeypatch.setattr("workers.driver.watchdog.ray.kill", kill)
    watchdog = killer.watchdog(timeout=0.1)
    watchdog.began(1, "actor 1")
    eventually(lambda: killer.said)
    watchdog.began(2, "actor 2")
    eventually(lambda: len(killer.killed) == 2)
    assert sorted(map(str, killer.killed)) == ["actor 1", "actor 2"]
    assert killer.said == [(1, Verdict.TIMEOUT, 0.1), (2, Verdict.TIMEOUT, 0.1)]


def test_however_much_it_says(killer: Killer) -> None:
    watchdog = killer.watchdog(timeout=0.3, hung_after=60)
    watchdog.began(1, "actor 1")
    talk(watchdog, 1, 0.6)
    assert killer.said == [(1, Verdict.TIMEOUT, 0.3)]


def test_a_process_has_spoken_once_it_said_where_it_is(killer: Killer) -> None:
    watchdog = killer.watchdog()
    assert not watchdog.has_spoken(1)
    watchdog.began(1, "actor 1")
    assert not watchdog.has_spoken(1)
    watchdog.heard(1, "a node")
    watchdog.heard(1)
    assert watchdog.has_spoken(1)
    watchdog.ended(1)
    assert not watchdog.has_spoken(1)


@pytest.mark.slow
def test_while_it_waits_for_files_its_time_stands_still(killer: Killer) -> None:
    """A store may be away for minutes, and the head read a data set for longer."""
    watchdog = killer.watchdog(timeout=1.5)
    watchdog.began(1, "actor 1")
    for _ in range(3):
        watchdog.heard(1, waits=True)
        time.sleep(0.6)
    watchdog.heard(1)
    assert killer.said == []
    eventually(lambda: killer.said)
    assert killer.said == [(1, Verdict.TIMEOUT, 1.5)]


@pytest.mark.slow
def test_what_says_nothing(killer: Killer) -> None:
    watchdog = killer.watchdog(hung_after=0.5)
    watchdog.began(1, "actor 1")
    watchdog.began(2, "actor 2")
    talk(watchdog, 2, 0.8)
    assert killer.said == [(1, Verdict.HUNG, 0.5)]
    eventually(lambda: len(killer.said) == 2)
    assert killer.said[1] == (2, Verdict.HUNG, 0.5)
    assert killer.killed == ["actor 1", "actor 2"]


@pytest.mark.slow
def test_by_its_own_pace_where_nobody_says_how_long(killer: Killer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times its longest pause, and never less than the least."""
    monkeypatch.setattr("service.queue.attempts.LEAST_HUNG_SECONDS", 0.3)
    monkeypatch.setattr("service.queue.attempts.HUNG_PAUSES", 10)
    watchdog = killer.watchdog()
    watchdog.began(1, "quick")
    watchdog.began(2, "slow")
    time.sleep(0.15)
    watchdog.heard(2)  # after a pause so long that the next may be ten times as long
    eventually(lambda: killer.killed)
    assert killer.killed == ["quick"]
    assert killer.said[0][:2] == (1, Verdict.HUNG)
    assert killer.said[0][2] == 0.3
    time.sleep(0.5)
    assert killer.killed == ["quick"]
    eventually(lambda: len(killer.killed) == 2)
    assert killer.said[1][:2] == (2, Verdict.HUNG)
    assert killer.said[1][2] >= 1.5


def test_half_an_hour_is_nothing_yet(killer: Killer) -> None:
    watchdog = killer.watchdog()
    watchdog.began(1, "actor 1")
    watchdog._running[1].heard -= 1790
    time.sleep(0.1)
    assert killer.said == []
    watchdog._running[1].heard -= 20
    eventually(lambda: killer.killed)
    assert killer.said == [(1, Verdict.HUNG, 1800.0)]


def test_the_pace_is_that_by_which_it_is_judged(killer: Killer) -> None:
    """The pause that a report ends counts already: what is written with the report says the limit that holds then."""
    watchdog = killer.watchdog()
    watchdog.began(1, "actor 1")
    attempt = watchdog._running[1]
    attempt.began -= 1000
    attempt.reported -= 400
    assert watchdog.pace(1) == {"reported": 1000.0, "longest_pause": 400.0}
    watchdog.heard(1)
    attempt.reported -= 90
    assert watchdog.pace(1) == {"reported": 1000.0, "longest_pause": 400.0}
    watchdog.began(1, "actor 2")
    assert watchdog.pace(1) == {"reported": 0.0, "longest_pause": 0.0}
    assert watchdog.pace(2) == {"reported": 0.0, "longest_pause": 0.0}


def test_a_sign_of_life_is_no_report(killer: Killer) -> None:
    """It keeps a trial from being killed, but ends no pause, and none gives way upon it: no checkpoint follows it."""
    watchdog = killer.watchdog(hung_after=0.5)
    watchdog.began(1, "actor 1")
    watchdog.allow(0)
    until, headway = time.monotonic() + 1, 0
    while time.monotonic() < until:
        headway += 1
        assert watchdog.got_on(1, headway)
        time.sleep(0.02)
    assert killer.said == []
    assert watchdog.silence(1) < 0.5
    assert watchdog.pace(1, reports=False)["longest_pause"] == 0
    assert watchdog.pace(1)["longest_pause"] >= 1
    assert not watchdog.got_on(1, headway), "it got no further"
    eventually(lambda: killer.killed)
    assert killer.said == [(1, Verdict.HUNG, 0.5)]
    assert not watchdog.got_on(1, headway + 1), "it does not run any more"


def test_nothing_is_held_against_a_trial_while_the_machine_stood_still(killer: Killer) -> None:
    """As in a container that was paused for an hour: the clock that goes on meanwhile counts no working time."""
    watchdog = killer.watchdog(timeout=60, hung_after=30)
    watchdog.began(1, "actor 1")
    for _ in range(3):
        with watchdog._lock:
            watchdog._moment -= 3600
        time.sleep(0.05)
    assert killer.said == []
    assert 15 <= watchdog.silence(1) < 25
    assert watchdog.pace(1)["reported"] < 25


@pytest.mark.slow
def test_nothing_is_held_against_a_trial_while_the_database_stands_still(killer: Killer) -> None:
    """Tune's loop hears none of its reports meanwhile; one that is to give way does so for all that."""
    watchdog = killer.watchdog(timeout=2, hung_after=1.5)
    watchdog.began(1, "actor 1")
    watchdog.began(2, "actor 2")
    with hanging.unlimited():
        time.sleep(2.5)
        assert killer.said == []
        assert watchdog.silence(1) < 1
        with watchdog._lock:
            watchdog._running[2].yields_at = watchdog._now()
        eventually(lambda: killer.killed)
    assert killer.said == [(2, Verdict.YIELD, 0.0)]
    eventually(lambda: len(killer.said) > 1)
    assert killer.said[1:] == [(1, Verdict.HUNG, 1.5)]


def test_a_new_attempt_is_measured_anew(killer: Killer) -> None:
    watchdog = killer.watchdog(timeout=60, hung_after=0.4)
    watchdog.began(1, "first")
    eventually(lambda: killer.killed == ["first"])
    assert not watchdog.ended(1)
    watchdog.began(1, "second")
    time.sleep(0.1)
    assert killer.killed == ["first"]
    assert watchdog.ended(1)  # this one ended by itself


def test_a_process_that_dies_before_it_begins_was_not_killed_for_the_attempt_before(killer: Killer) -> None:
    """Else nobody would be told, and whatever waits would wait for ever until this trial is tried again."""
    watchdog = killer.watchdog()
    watchdog.began(1, "first")
    watchdog.kill(1)
    assert not watchdog.ended(1)
    assert watchdog.ended(1)  # of the second: its node died while it started


class TestGivingWay:
    def test_the_newest_after_its_next_word(self, killer: Killer) -> None:
        watchdog = killer.watchdog()
        for trial_id in (3, 1, 2):
            watchdog.began(trial_id, Actor(f"actor {trial_id}"))
            time.sleep(0.001)
        watchdog.allow(2)
        time.sleep(0.1)
        assert killer.said == []
        watchdog.heard(3)
        watchdog.heard(1)
        time.sleep(0.1)
        assert killer.said == []
        watchdog.heard(2)
        eventually(lambda: killer.events == [2, "actor 2"])
        assert killer.said == [(2, Verdict.YIELD, 0.0)]
        watchdog.heard(2)
        assert not watchdog.ended(2)
        assert watchdog.ended(1)
        assert killer.killed == ["actor 2"]

    def test_once_its_checkpoint_is_written(self, killer: Killer) -> None:
        """Others may go on in its place by then, and none of them for it: it has ended its work."""
        watchdog = killer.watchdog()
        leaving = Actor("actor 2", at_once=False)
        watchdog.began(1, Actor("actor 1"))
        time.sleep(0.001)
        watchdog.began(2, leaving)
        watchdog.allow(1)
        watchdog.heard(2)
        watchdog.allow(2)
        watchdog.heard(2)
        time.sleep(0.1)
        assert killer.said == []
        leaving.answer.set_result(None)
        eventually(lambda: killer.events == [2, "actor 2"])
        watchdog.heard(1)
        time.sleep(0.1)
        assert killer.killed == ["actor 2"]

    @pytest.mark.parametrize("answers", [False, True])
    def test_whose_checkpoint_cannot_be_written(
        self, killer: Killer, monkeypatch: pytest.MonkeyPatch, *, answers: bool
    ) -> None:
        monkeypatch.setattr("workers.driver.watchdog.YIELD_SECONDS", 0.1)
        monkeypatch.setattr("workers.driver.watchdog.LEAVE_SECONDS", 0.3)
        watchdog = killer.watchdog()
        actor = Actor("actor 1", at_once=False)
        watchdog.began(1, actor)
        watchdog.allow(0)
        begun = time.monotonic()
        watchdog.heard(1)
        if answers:
            actor.answer.set_exception(OSError(28, "No space left on device"))
        eventually(lambda: killer.killed)
        assert answers or time.monotonic() - begun >= 0.3
        assert killer.said == [(1, Verdict.YIELD, 0.0)]

    def test_on_some_nodes_before_the_newest_of_all(self, killer: Killer) -> None:
        watchdog = killer.watchdog()
        for trial_id, node in ((1, "kept"), (2, "other"), (3, "kept"), (4, "other")):
            watchdog.began(trial_id, Actor(f"actor {trial_id}"))
            watchdog.heard(trial_id, node)
            time.sleep(0.001)
        watchdog.allow(3, {"kept": 1})
        for trial_id in (4, 2, 1):
            watchdog.heard(trial_id)
        time.sleep(0.1)
        assert killer.said == []
        watchdog.heard(3)
        eventually(lambda: killer.said == [(3, Verdict.YIELD, 0.0)])
        watchdog.allow(3, {"kept": 1})  # what it was told before it ended
        watchdog.heard(1)
        time.sleep(0.1)
        assert killer.said == [(3, Verdict.YIELD, 0.0)]

    def test_who_begins_once_it_was_said(self, killer: Killer) -> None:
        """It was handed out before: else it would run to its end, however long, while others wait for its place."""
        watchdog = killer.watchdog()
        watchdog.began(1, Actor("actor 1"))
        watchdog.allow(2, {"kept": 0})
        for trial_id in (2, 3):
            time.sleep(0.001)
            watchdog.began(trial_id, Actor(f"actor {trial_id}"))
        watchdog.heard(2, "other")
        time.sleep(0.1)
        assert killer.said == []
        watchdog.heard(3, "other")
        eventually(lambda: killer.said == [(3, Verdict.YIELD, 0.0)])
        watchdog.heard(2, "kept")
        eventually(lambda: killer.said[1:] == [(2, Verdict.YIELD, 0.0)])

    def test_not_if_another_ends_in_its_place(self, killer: Killer) -> None:
        watchdog = killer.watchdog()
        watchdog.allow(1)
        watchdog.began(1, "actor 1")
        time.sleep(0.001)
        watchdog.began(2, "actor 2")
        assert watchdog.ended(1)
        watchdog.heard(2)
        assert killer.events == []

    def test_in_every_pass(self, killer: Killer, monkeypatch: pytest.MonkeyPatch) -> None:
        """A driver's next pass has a watchdog of its own, and the worker says only what is news."""

        def fit() -> None:
            (watchdog,) = began
            watchdog.began(1, Actor("actor 1"))
            watchdog.heard(1)
            eventually(lambda: killer.killed)

        began: list[Watchdog] = []

        def tuner(_passes: Passes, _work: Any, watchdog: Watchdog, _stored: Any) -> SimpleNamespace:
            began.append(watchdog)
            return SimpleNamespace(fit=fit)

        monkeypatch.setattr(Passes, "_tuner", tuner)
        recorded: list[int] = []
        recorder = cast("Any", SimpleNamespace(gave_way=recorded.append))
        passes = Passes(lambda *_, **__: iter(()), recorder)
        passes.allow(0, {})
        spec = SimpleNamespace(timeout_seconds=None, hung_after=None)
        passes.run(
            cast("Any", SimpleNamespace(spec=spec, data_dir=Path(), home=SimpleNamespace(data_dir="", storage=None)))
        )
        assert recorded == [1]

    def test_at_last_without_a_word(self, killer: Killer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Eight seconds, so that those who wait run within fifteen."""
        monkeypatch.setattr("workers.driver.watchdog.YIELD_SECONDS", 0.3)
        watchdog = killer.watchdog()
        watchdog.began(1, "actor 1")
        begun = time.monotonic()
        for _ in range(20):  # said again it is not put off
            watchdog.allow(0)
            time.sleep(0.01)
        eventually(lambda: killer.killed)
        assert 0.3 <= time.monotonic() - begun < 5
        assert killer.said == [(1, Verdict.YIELD, 0.0)]

    def test_not_if_it_may_go_on_after_all(self, killer: Killer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workers.driver.watchdog.YIELD_SECONDS", 0.3)
        watchdog = killer.watchdog()
        watchdog.began(1, "actor 1")
        watchdog.allow(0)
        watchdog.allow(1)
        watchdog.heard(1)
        time.sleep(0.5)
        assert killer.said == []
        assert watchdog.ended(1)

    def test_what_ended_by_itself_gives_no_way(self, killer: Killer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workers.driver.watchdog.YIELD_SECONDS", 0.1)
        watchdog = killer.watchdog()
        watchdog.began(1, "actor 1")
        watchdog.allow(0)
        assert watchdog.ended(1)
        time.sleep(0.3)
        watchdog.heard(1)
        assert killer.events == []


def test_nobody_is_judged_who_ended_meanwhile_and_nobody_twice(killer: Killer) -> None:
    """Else a good result would be followed by a verdict, or a trial that runs again by one of its last attempt."""
    watchdog = killer.watchdog()
    watchdog.began(1, "actor 1")
    watchdog.ended(1)
    watchdog._end(1, Verdict.HUNG, 1.0)  # decided just before
    assert killer.events == []
    watchdog.began(2, "actor 2")
    threads = [threading.Thread(target=watchdog._end, args=(2, Verdict.YIELD, 0.0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert killer.events == [2, "actor 2"]


def test_what_must_not_run(killer: Killer) -> None:
    """Nobody is told: it is final already."""
    watchdog = killer.watchdog()
    watchdog.began(1, "actor 1")
    watchdog.kill(1)
    watchdog.kill(2)
    assert killer.events == ["actor 1"]
    assert not watchdog.ended(1)
