"""The feed without a Tuner around it: what it hands out, when, and when a pass is over."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.search import Searcher
from sqlalchemy.exc import OperationalError

from service.errors import LeaseLostError
from service.queue.contenders import amount
from service.queue.shares import Amount
from service.specs.spec import Fifo, Resources
from ttsv.results import StageProgress
from workers.driver.feed import HINDERED_SECONDS, Feed, Slots
from workers.driver.tuner import make_scheduler
from workers.trial_process.messages import CrowdedReport, EpochReport, HinderedReport, Job, StageReport, StartedReport
from workers.trial_process.trainable import Reservation

FINISHED = Searcher.FINISHED


class Table:
    """Trials that wait, as a database has them: a start, or an end, is written some time after it was said."""

    def __init__(self, count: int, slots: int) -> None:
        self.waiting = list(range(1, count + 1))
        self.errors: list[Exception] = []
        self.asked: list[set[int]] = []
        self.over = 0
        self.alone: set[int] = set()
        self.slots = Slots()
        self.slots.set(slots)
        self.feed = Feed(self.next_job, self.slots, self.say_over)

    def say_over(self) -> None:
        self.over += 1

    def next_job(self, taken: Collection[int]) -> Job | None:
        self.asked.append(set(taken))
        if self.errors:
            raise self.errors.pop(0)
        waiting = [trial_id for trial_id in self.waiting if trial_id not in taken]
        return Job(waiting[0], 1, 0, {}, alone=waiting[0] in self.alone) if waiting else None

    def suggest(self, name: str) -> Any:
        """The trial that Tune gets under this name, or what else it is told."""
        answer = self.feed.suggest(name)
        return answer["job"]["trial_id"] if isinstance(answer, dict) else answer

    def back(self) -> None:
        """The database answers again: what became of some trial is stored."""
        self.feed.settled(0)

    def end(self, name: str, trial_id: int, *, again: bool = False) -> None:
        """The trial's process ended, and what became of it is stored."""
        self.feed.on_trial_complete(name, error=again)
        if not again:
            self.waiting.remove(trial_id)
        self.feed.settled(trial_id)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.driver.feed.LOOK_SECONDS", 0.1)


def away() -> OperationalError:
    return OperationalError("SELECT", {}, ConnectionError("the database is away"))


class TestSlots:
    def test_no_more_at_a_time_than_there_are(self) -> None:
        table = Table(5, slots=2)
        assert [table.suggest(name) for name in "abc"] == [1, 2, None]
        table.end("a", 1)
        assert [table.suggest(name) for name in "cd"] == [3, None]
        assert table.feed.handed_out == 3

    def test_they_change_while_trials_run(self) -> None:
        table = Table(9, slots=1)
        assert [table.suggest(name) for name in "ab"] == [1, None]
        table.slots.set(3)
        assert [table.suggest(name) for name in "bcd"] == [2, 3, None]
        table.slots.set(1)
        table.end("a", 1)
        table.end("b", 2)
        assert table.suggest("d") is None  # one still runs, and no more may
        table.end("c", 3)
        assert table.suggest("d") == 4

    def test_without_one_and_with_nothing_at_work_the_pass_ends(self) -> None:
        """The cluster's other drivers get the actors; the experiment is not over."""
        table = Table(3, slots=1)
        assert table.suggest("a") == 1
        table.slots.set(0)
        assert table.suggest("b") is None
        table.end("a", 1)
        assert table.suggest("b") == FINISHED
        assert table.over == 0

    def test_waiting_for_one(self) -> None:
        slots = Slots()
        assert slots.count == 0
        assert not slots.wait(0.01)
        threading.Timer(0.1, slots.set, (2,)).start()
        assert slots.wait(10)
        assert slots.count == 2
        slots.unlimited()
        assert slots.count > 10**9

    def test_what_ends_on_a_node_that_fits_no_more_leaves_no_place_on_the_others(self) -> None:
        """Others may have these: it is for the worker to say how many there are now."""
        table = Table(9, slots=2)
        assert [table.suggest(name) for name in "ab"] == [1, 2]
        for name, node in (("a", "bad"), ("b", "good")):
            table.feed.on_trial_result(name, {"report": StartedReport("gpu1", [], node=node)})
        table.slots.set(2, ["bad"], besides=1, unfit=["bad"])
        table.end("a", 1)
        assert table.suggest("c") is None
        table.slots.set(3, ["bad"], besides=1, unfit=["bad"])  # said before it was heard of that end
        assert [table.suggest(name) for name in "cd"] == [3, None]
        table.slots.set(1, ["bad"], besides=1, unfit=["bad"])
        table.end("b", 2)
        table.end("c", 3)
        assert table.suggest("d") == FINISHED
        assert not table.slots.wait(0.01)
        table.slots.set(1, ["bad"])
        assert table.suggest("d") == 4


def test_a_trial_is_told_where_it_must_not_begin() -> None:
    table = Table(3, slots=3)
    assert table.feed.suggest("a")["shunned"] == ()
    table.slots.set(3, ["bad"])
    assert table.feed.suggest("b")["shunned"] == ("bad",)


class Handed:
    """A trial as Tune has it that waits for a process."""

    trial_id = ""

    def __init__(self, *shunned: str, attempt: int = 0) -> None:
        self.config = {"job": asdict(Job(1, 1, 0, {}, attempt=attempt)), "shunned": shunned}
        self.placement_group_factory = self.default_resource_request(self.config)

    def get_trainable_cls(self) -> Handed:
        return self

    def default_resource_request(self, config: dict[str, Any]) -> Any:
        return Reservation(Amount(1))(config)

    def update_resources(self, resources: Any) -> None:
        self.placement_group_factory = resources


def test_what_waits_is_sent_elsewhere_when_other_nodes_are_shunned() -> None:
    """It was handed out before: it would take what is kept for others, or wait for one node though another is free."""
    waiting, new, beginning = Handed("bad"), Handed(), Handed("bad")
    tuner: Any = SimpleNamespace(
        _stopped_trials=set(),
        _failed_trials=set(),
        _actor_cache=SimpleNamespace(
            _may_keep_one=None, decrease_max=lambda key: lessened.append(key), has_cached_object=lambda _key: False
        ),
        _actor_manager=SimpleNamespace(
            _pending_actors_to_attrs={"w": 1},
            _live_actors_to_ray_actors_resources={},
            remove_actor=lambda actor: gone.append(actor),
        ),
        _started_actors=set(),
        _pending_trials={waiting, new, beginning},
        _pending_trials_list=[beginning],
        _staged_trials={waiting, beginning},
        _trial_to_actor={waiting: "w", beginning: "b"},
        _actor_to_trial={"w": waiting, "b": beginning},
        _resources_to_pending_trials=defaultdict(set),
    )
    gone: list[str] = []
    lessened: list[Any] = []
    controller: Any = SimpleNamespace(_tune_controller=tuner)
    table = Table(3, slots=3)
    table.slots.set(3, ["bad"])
    new.config["shunned"] = ("bad",)
    scheduler: Any = make_scheduler(Fifo(), table.feed)
    scheduler.choose_trial_to_run(controller)
    assert gone == []
    table.slots.set(3, ["kept"])
    assert scheduler.choose_trial_to_run(controller) in (waiting, new)
    assert (gone, tuner._trial_to_actor, tuner._actor_to_trial) == (["w"], {beginning: "b"}, {"b": beginning})
    assert (
        waiting.placement_group_factory == new.placement_group_factory == Reservation(Amount(1))({"shunned": ("kept",)})
    )
    assert lessened == [Handed("bad").placement_group_factory]
    assert tuner._staged_trials == {beginning}, "its process starts already"
    assert beginning.config["shunned"] == ("bad",)
    assert set(tuner._pending_trials_list) == {waiting, new, beginning}
    assert tuner._resources_to_pending_trials[waiting.placement_group_factory] == {waiting, new}


def test_a_free_process_is_for_what_has_waited_long_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost trial, for which no room came while others of its experiment ended: all later ones would begin before."""
    monkeypatch.setattr("workers.driver.tuner.PLACE_SECONDS", 0.0)
    table, cached = Table(5, slots=5), [Handed().placement_group_factory]
    scheduler: Any = make_scheduler(Fifo(), table.feed)
    starting, lost, other, new, again = Handed(), Handed(), Handed(), Handed(), Handed(attempt=1)
    for handed, name in zip((starting, lost, other, new, again), "abcde", strict=True):
        handed.trial_id = name
        table.suggest(name)
    tuner: Any = SimpleNamespace(
        _stopped_trials=set(),
        _failed_trials=set(),
        _actor_cache=SimpleNamespace(_may_keep_one=None, has_cached_object=lambda key: key in cached),
        _actor_manager=SimpleNamespace(
            _pending_actors_to_attrs={"l": 1, "o": 1}, _live_actors_to_ray_actors_resources={}
        ),
        _started_actors=set(),
        _pending_trials={starting, lost, other, new},
        _pending_trials_list=[starting, new],  # Tune drops what it asked for room for
        _trial_to_actor={starting: "s", lost: "l", other: "o", again: "a"},
    )
    controller: Any = SimpleNamespace(_tune_controller=tuner)
    assert scheduler.choose_trial_to_run(controller) is lost
    tuner._pending_trials.add(again)
    assert scheduler.choose_trial_to_run(controller) is again, "it was lost, and its process takes long to start"
    monkeypatch.setattr("workers.driver.tuner.PLACE_SECONDS", 60.0)
    assert scheduler.choose_trial_to_run(controller) is new, "room may come at once"
    monkeypatch.setattr("workers.driver.tuner.PLACE_SECONDS", 0.0)
    cached.clear()
    assert scheduler.choose_trial_to_run(controller) is new, "there is no process that would be for it"


def test_a_process_that_hangs_as_it_starts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or as it is to take its next trial. It has its place, and no trial of which anybody could hear nothing."""
    killed = list[Any]()
    monkeypatch.setattr("workers.driver.tuner.ray.kill", killed.append)
    monkeypatch.setattr("workers.driver.feed.STARTING_SECONDS", 0.1)
    table = Table(5, slots=5)
    placeless, starting, resetting, training = (Handed() for _ in range(4))
    for handed, name in zip((placeless, starting, resetting, training), "psrt", strict=True):
        handed.trial_id = name
    actors = {placeless: "P", starting: "S", resetting: "R", training: "T"}
    tuner: Any = SimpleNamespace(
        _stopped_trials=set(),
        _failed_trials=set(),
        _actor_cache=SimpleNamespace(_may_keep_one=None, has_cached_object=lambda _key: False),
        _actor_manager=SimpleNamespace(
            _pending_actors_to_attrs={"P": 1},
            _live_actors_to_ray_actors_resources={name: (f"process {name}", "room") for name in "SRT"},
        ),
        _pending_trials=set(),
        _pending_trials_list=[],
        _trial_to_actor=actors,
        _started_actors={"R", "T"},
        _resetting_trials={resetting},
    )
    scheduler: Any = make_scheduler(Fifo(), table.feed)
    controller: Any = SimpleNamespace(_tune_controller=tuner)
    scheduler.choose_trial_to_run(controller)
    assert killed == []
    time.sleep(0.15)
    scheduler.choose_trial_to_run(controller)
    assert killed == ["process S", "process R"]
    scheduler.choose_trial_to_run(controller)
    assert len(killed) == 2, "that takes a moment"
    tuner._started_actors.add("S")
    time.sleep(0.15)
    scheduler.choose_trial_to_run(controller)
    assert killed[2:] == ["process R"]


@pytest.mark.parametrize(("alone", "gpus"), [(False, 0.5), (True, 1.0)])
def test_what_is_reserved_for_it(alone: bool, gpus: float) -> None:
    reservation = Reservation(amount(Resources(cpus=2, gpus=0.5, memory_gib=1)))
    job = {"job": {"alone": alone}}
    anywhere = reservation(job)
    assert anywhere.bundles == [{"CPU": 2.0, "GPU": gpus, "memory": 2.0**30}]
    elsewhere = reservation({**job, "shunned": ("a", "b")})
    assert elsewhere.bundles == anywhere.bundles
    assert elsewhere != anywhere, "no process of the one is taken for the other"
    assert elsewhere._kwargs["bundle_label_selector"] == [{"ray.io/node-id": "!in(a, b)"}]


class TestAlone:
    """A trial that needs a whole card, where the others have shares of one."""

    def test_until_it_has_a_card_nothing_else_is_handed_out(self) -> None:
        table = Table(4, slots=3)
        table.alone = {2}
        assert [table.suggest(name) for name in "abc"] == [1, 2, None]
        table.end("a", 1)
        assert [table.suggest(name) for name in "cd"] == [None, None]
        table.feed.began(7)  # another one
        assert table.suggest("c") is None
        table.feed.began(2)
        assert [table.suggest(name) for name in "cde"] == [3, 4, None]

    @pytest.mark.parametrize("again", [False, True])
    def test_nor_where_it_ends_before_it_began(self, again: bool) -> None:
        """It was cancelled, or the process that was started for it died."""
        table = Table(3, slots=2)
        table.alone = {1}
        assert [table.suggest(name) for name in "ab"] == [1, None]
        table.end("a", 1, again=again)
        assert [table.suggest(name) for name in "bc"] == ([1, None] if again else [2, 3])

    def test_the_next_one_waits_for_a_card_too(self) -> None:
        table = Table(3, slots=3)
        table.alone = {1, 2}
        assert [table.suggest(name) for name in "ab"] == [1, None]
        table.feed.began(1)
        assert [table.suggest(name) for name in "bc"] == [2, None]


@pytest.mark.parametrize("report", [HinderedReport("the disk is full"), CrowdedReport("no room on the card")])
def test_what_is_to_run_again_by_its_own_word_comes_before_all_that_never_began(
    report: HinderedReport | CrowdedReport,
) -> None:
    """To Tune it ended well. Until its end is stored the database has none of it to be handed out."""
    table = Table(3, slots=2)
    assert [table.suggest(name) for name in "ab"] == [1, 2]
    table.feed.on_trial_complete("a", {"report": report, "done": True}, error=False)
    assert table.suggest("c") is None
    table.feed.settled(1)
    assert table.suggest("c") == 1


class TestHindered:
    """A node's disk may be full, or a trial's own files not be there to be read: who knows."""

    def begin(self, table: Table, name: str, node: str) -> tuple[str, ...]:
        """Hands a trial out; the nodes that it shuns. Its process is on this one."""
        config = table.feed.suggest(name)
        table.feed.on_trial_result(name, {"report": StartedReport("gpu1", [], node=node)})
        return tuple(config["shunned"])

    def hinder(self, table: Table, name: str, trial_id: int) -> None:
        table.feed.on_trial_complete(name, {"report": HinderedReport("the disk is full"), "done": True})
        table.feed.settled(trial_id)

    def test_a_trial_goes_elsewhere_for_a_while_and_then_wherever_there_is_room(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        table = Table(2, slots=1)
        assert self.begin(table, "a", "full") == ()
        self.hinder(table, "a", 1)
        assert self.begin(table, "b", "other") == ("full",)
        assert table.feed.shunned_by("b") == ("full",)
        monkeypatch.setattr("workers.driver.feed.ELSEWHERE_SECONDS", 0.0)
        assert table.feed.shunned_by("b") == (), "there may be no other node"
        monkeypatch.undo()
        table.feed.on_trial_result("b", {"report": EpochReport([])})
        table.end("b", 1, again=True)
        assert self.begin(table, "c", "other") == (), "it got on meanwhile"

    def test_so_it_does_where_no_trial_can_run_in_the_process_that_it_was_given(self) -> None:
        """As where its card is lost: Ray would give that to the next one, too."""
        table = Table(1, slots=1)
        table.feed.suggest("a")
        table.feed.on_trial_result("a", {"report": StartedReport("gpu1", ["0"], node="lost", hinders=True)})
        table.end("a", 1, again=True)
        assert self.begin(table, "b", "other") == ("lost",)

    def test_where_trials_in_a_row_were_hindered_none_begins_for_a_while(self) -> None:
        table = Table(4, slots=2)
        for number, name in ((1, "a"), (2, "b")):
            assert self.begin(table, name, "full") == ()
            table.waiting.remove(number)  # it rests
            self.hinder(table, name, number)
        table.slots.set(2, ["kept"])
        assert self.begin(table, "c", "other") == ("full", "kept")

    def test_once_one_got_on_there_it_is_as_others(self) -> None:
        table = Table(4, slots=1)
        for number, name in ((1, "a"), (2, "b")):
            assert self.begin(table, name, "node") == ()
            if number == 2:
                table.feed.on_trial_result(
                    name, {"report": StageReport(StageProgress(stage="x", done=1, total=2), True)}
                )
            table.waiting.remove(number)
            self.hinder(table, name, number)
        assert self.begin(table, "c", "node") == (), "one in a row alone was hindered"

    def test_a_node_is_shunned_no_longer_than_that(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [100.0]
        monkeypatch.setattr("workers.driver.feed.time", SimpleNamespace(monotonic=lambda: clock[0]))
        slots = Slots()
        slots.hindered(7, "node")
        assert list(slots.shunned) == []
        for _ in range(2):
            slots.hindered(7, "node")
            assert list(slots.shunned) == ["node"]
            clock[0] += HINDERED_SECONDS + 1
            assert list(slots.shunned) == []
        slots.got_on(7, "node")
        slots.hindered(7, "node")
        assert list(slots.shunned) == []

    def test_where_a_trial_was_hindered_the_next_pass_knows(self) -> None:
        """All that is left may rest meanwhile: then Tune's pass ends."""
        table = Table(1, slots=1)
        self.begin(table, "a", "full")
        self.hinder(table, "a", 1)
        table.feed = Feed(table.next_job, table.slots, table.say_over)
        assert self.begin(table, "b", "other") == ("full",)


class TestTwice:
    def test_nothing_is_handed_out_twice_while_it_is_unsettled(self) -> None:
        """Its start, or its end, may not be written yet: the database still shows it as waiting."""
        table = Table(3, slots=9)
        assert [table.suggest(name) for name in "abcd"] == [1, 2, 3, None]
        table.feed.on_trial_complete("a", error=True)
        table.feed.on_trial_complete("b", {"done": True})
        assert table.suggest("d") is None
        assert table.asked[-1] == {1, 2, 3}

    def test_again_once_it_is_settled_and_before_others(self) -> None:
        table = Table(4, slots=2)
        assert [table.suggest(name) for name in "ab"] == [1, 2]
        table.end("a", 1, again=True)
        assert table.suggest("c") == 1
        table.end("c", 1, again=True)
        table.end("b", 2)
        assert [table.suggest(name) for name in "def"] == [1, 3, None]

    def test_nothing_new_begins_before_what_was_lost_is_settled(self) -> None:
        """Else a trial that never began would take its place."""
        table = Table(4, slots=2)
        assert [table.suggest(name) for name in "ab"] == [1, 2]
        table.feed.on_trial_complete("a", error=True)
        assert [table.suggest("c"), table.suggest("c")] == [None, None]
        table.feed.settled(1)
        assert table.suggest("c") == 1
        table.feed.on_trial_complete("b", {"done": True})
        assert table.suggest("d") == 3  # of what ended well nothing comes again
        table.feed.on_trial_complete("c", error=True)
        table.feed.on_trial_complete("d", error=True)
        table.slots.set(1)
        assert table.suggest("e") is None  # nothing at work, however long it takes
        table.feed.settled(1)
        table.feed.settled(3)
        assert table.suggest("e") == 1

    def test_however_long_that_takes_the_driver_lives(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tune asks again and again within one step, which would seem to hang: a database may be away for long."""
        turns = list[int]()
        monkeypatch.setattr("workers.driver.feed.turn", lambda: turns.append(1))
        table = Table(2, slots=1)
        table.suggest("a")
        table.feed.on_trial_complete("a", error=True)
        turns.clear()
        assert [table.suggest("b"), table.suggest("b")] == [None, None]
        assert len(turns) == 2

    def test_settled_before_tune_says_so(self) -> None:
        """The watchdog's verdict may be stored before Tune hears of the process's end."""
        table = Table(3, slots=2)
        assert table.suggest("a") == 1
        table.feed.settled(1)
        assert [table.suggest(name) for name in "bc"] == [2, None]  # never one trial in two processes
        table.feed.on_trial_complete("a", error=True)
        assert table.suggest("c") == 1

    def test_at_once_where_there_was_nothing_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An empty table is not asked all the time; what is settled is looked for at once."""
        monkeypatch.setattr("workers.driver.feed.LOOK_SECONDS", 60)
        table = Table(2, slots=9)
        assert [table.suggest(name) for name in "abc"] == [1, 2, None]
        asked = len(table.asked)
        assert [table.suggest("c") for _ in range(5)] == [None] * 5
        assert len(table.asked) == asked
        table.end("b", 2, again=True)
        assert table.suggest("c") == 2

    def test_what_is_added_is_found_within_a_second(self) -> None:
        table = Table(1, slots=2)
        assert [table.suggest(name) for name in "ab"] == [1, None]
        table.waiting.append(7)
        deadline = time.monotonic() + 5
        while (found := table.suggest("b")) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == 7


class TestOver:
    def test_once_when_everything_is_settled(self) -> None:
        table = Table(2, slots=2)
        assert [table.suggest(name) for name in "abc"] == [1, 2, None]
        table.end("a", 1)
        table.feed.on_trial_complete("b", {"done": True})
        assert table.suggest("c") is None  # its end is not stored: it might have to run again
        assert table.over == 0
        table.waiting.remove(2)
        table.feed.settled(2)
        assert table.suggest("c") == FINISHED
        assert table.over == 1

    def test_a_search_for_nothing_ends_at_once(self) -> None:
        table = Table(0, slots=2)
        assert table.suggest("a") == FINISHED
        assert (table.over, table.feed.handed_out) == (1, 0)

    def test_settling_is_waited_for_where_nothing_else_is_to_be_done(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tune would sleep for a second before it asks again."""
        monkeypatch.setattr("workers.driver.feed.LOOK_SECONDS", 30)
        table = Table(2, slots=1)
        assert table.suggest("a") == 1
        table.feed.on_trial_complete("a", error=True)
        threading.Timer(0.2, table.feed.settled, (1,)).start()
        begun = time.monotonic()
        assert table.suggest("b") == 1
        assert 0.1 < time.monotonic() - begun < 10

    def test_stopped_it_hands_out_nothing_and_is_over_with_what_runs(self) -> None:
        table = Table(5, slots=3)
        assert [table.suggest(name) for name in "ab"] == [1, 2]
        table.feed.stop()
        assert table.suggest("c") == FINISHED
        table.end("a", 1)
        assert table.over == 0
        table.end("b", 2)
        assert table.over == 1
        assert (table.suggest("c"), table.feed.handed_out) == (FINISHED, 2)


class TestDatabase:
    def test_away_there_is_nothing_new_and_no_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is asked seldom, as Tune's loop waits meanwhile; at once when something could be stored."""
        monkeypatch.setattr("workers.driver.feed.LOOK_SECONDS", 10)
        table = Table(2, slots=2)
        table.errors = [away(), away()]
        assert [table.suggest("a") for _ in range(5)] == [None] * 5
        assert len(table.asked) == 1
        table.back()
        assert table.suggest("a") is None
        table.back()
        assert [table.suggest(name) for name in "ab"] == [1, 2]
        table.end("a", 1, again=True)
        table.errors = [away()]
        assert table.suggest("c") is None
        table.back()
        assert table.suggest("c") == 1

    def test_away_after_it_was_empty_is_no_end_either(self) -> None:
        """What it was before says nothing of what was settled since."""
        table = Table(1, slots=2)
        assert [table.suggest(name) for name in "ab"] == [1, None]
        table.end("a", 1, again=True)
        table.errors = [away()]
        assert (table.suggest("b"), table.over) == (None, 0)
        table.back()
        assert table.suggest("b") == 1

    def test_a_lost_lease_ends_it(self) -> None:
        table = Table(2, slots=2)
        assert table.suggest("a") == 1
        table.errors = [LeaseLostError("gone")]
        assert [table.suggest(name) for name in "bbb"] == [None, FINISHED, FINISHED]
        assert (table.over, table.feed.handed_out) == (0, 1)


class TestIdleProcesses:
    """Tune keeps one process that is free, and with it its place in the cluster, unless it is told not to."""

    def keeps(self, table: Table, cache: Any) -> bool:
        table.feed.watch(cache)
        kept: bool = cache._may_keep_one
        return kept

    def test_only_where_another_trial_may_come(self) -> None:
        table, cache = Table(3, slots=2), SimpleNamespace(_may_keep_one=None)
        table.feed.keep_or_give_back()  # Tune has shown nothing yet
        assert self.keeps(table, cache)
        assert table.suggest("a") == 1
        assert self.keeps(table, cache)
        assert table.suggest("b") == 2
        assert not self.keeps(table, cache)
        table.end("a", 1)
        assert cache._may_keep_one is True  # at once: Tune asks after it has heard of the end
        table.slots.set(1)
        assert not self.keeps(table, cache)
        table.slots.set(2)
        assert self.keeps(table, cache)

    def test_not_where_none_waits(self) -> None:
        table, cache = Table(2, slots=9), SimpleNamespace(_may_keep_one=None)
        assert [table.suggest(name) for name in "abc"] == [1, 2, None]
        table.feed.watch(cache)
        table.end("a", 1)
        assert cache._may_keep_one is False
        table.end("b", 2, again=True)
        assert table.suggest("c") == 2
        assert self.keeps(table, cache)  # it is not known to be empty

    def test_not_once_it_is_stopped(self) -> None:
        table, cache = Table(2, slots=9), SimpleNamespace(_may_keep_one=None)
        assert table.suggest("a") == 1
        table.feed.stop()
        assert not self.keeps(table, cache)
