"""The recorder and the lease's keeper over a real database."""

from __future__ import annotations

import itertools
import logging
import operator
import sqlite3
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

import pytest
from sqlalchemy.exc import OperationalError

from service.database import Experiment, Result, Trial, now
from service.database.experiments import Pace, ResourceSeries
from service.database.outages import MOST_FAILURES
from service.experiments import actions
from service.queue import attempts, driver_reads, leases
from service.queue.leases import Lease
from service.queue.trials import MAX_DEATHS, HeldExperiment
from tests.results import made_epoch, made_result
from ttsv.results import StageProgress
from ttsv.runtime import faults
from workers.driver.__main__ import Driver
from workers.driver.callback import TuneCallback
from workers.driver.lease_keeper import LeaseKeeper
from workers.driver.recorder import Recorder
from workers.driver.watchdog import Verdict, Watchdog
from workers.trial_process.messages import (
    CrowdedReport,
    EpochReport,
    FailureReport,
    HinderedReport,
    Job,
    ResourceReport,
    ResultReport,
    StageReport,
    StartedReport,
)

pytestmark = pytest.mark.here

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from sqlalchemy.orm import Session

    from tests.workers.conftest import Lab


def epoch(number: int) -> EpochReport:
    return EpochReport([made_epoch(number, val_accuracy=number / 10)])


def used(*cpu: float | None) -> ResourceSeries:
    absent: list[float | None] = [None] * len(cpu)
    seconds = [float(moment) for moment in range(len(cpu))]
    return {
        "interval": 1.0, "seconds": seconds, "cpu": list(cpu), "memory": absent, "gpu": absent, "gpu_memory": absent,
    }  # fmt: skip


def result(accuracy: float = 0.5) -> ResultReport:
    value = made_result(accuracy=accuracy)
    return ResultReport(value, [{"kind": "model", "path": "trials/1/1/model", "sha256": "0" * 64, "size": 7}])


def stage(*, further: bool = True) -> StageReport:
    return StageReport(StageProgress(stage="attack", done=1, total=2), further)


class Bench:
    """A claimed experiment of three trials and a recorder for it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.database = lab.database
        self.experiment_id = lab.post([0, 1, 2])
        lease = self.database.write(lambda session: leases.claim(session, "worker", None))
        assert lease is not None
        self.lease: Lease = lease
        self.lost = threading.Event()
        self.recorder = Recorder(self.database, lease, self.lost.set)
        self.recorder.open()

    def trials(self) -> list[Trial]:
        return self.lab.trials(self.experiment_id)

    def taken_over(self) -> Lease:
        """The lease of another worker, to whom the experiment's heartbeat stood still."""
        with self.database.read() as session:
            (seen,) = leases.watch(session)
        assert self.database.write(lambda session: leases.reap(session, seen))
        lease = self.database.write(lambda session: leases.claim(session, "next", None))
        assert lease is not None
        return lease


@pytest.fixture
def bench(lab: Lab) -> Bench:
    return Bench(lab)


def test_everything_arrives(bench: Bench) -> None:
    first, second, third = (trial.id for trial in bench.trials())
    bench.recorder.started(first)
    for number in (1, 2, 3):
        bench.recorder.reported(first, epoch(number))
    bench.recorder.reported(first, result())
    bench.recorder.started(second)
    bench.recorder.reported(second, FailureReport("oom", "too large"))
    bench.recorder.died(third, "killed")
    assert bench.recorder.flush(5)
    bench.recorder.mute()
    bench.recorder.started(third)
    assert bench.recorder.flush(5)
    trials = bench.trials()
    assert [(trial.state, trial.attempts) for trial in trials] == [("succeeded", 1), ("failed", 1), ("queued", 1)]
    assert (trials[1].failure, trials[1].error, trials[2].error) == ("oom", "too large", "killed")
    assert trials[0].best_val_accuracy == 0.3
    assert bench.lab.points(bench.experiment_id) == [(first, 1), (first, 2), (first, 3)]
    assert bench.lab.artifact_paths(first) == ["trials/1/1/model"]


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_what_a_broken_connection_leaves_open_is_stored_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: str
) -> None:
    """Whether it was committed or not: the same is written again."""
    monkeypatch.setattr(faults, "_armed", faults.read(f"{point}=raise"))
    monkeypatch.setenv(faults.ONCE, str(tmp_path / "faults"))
    first, *_ = (trial.id for trial in bench.trials())
    bench.recorder.started(first)
    bench.recorder.reported(first, epoch(1))
    bench.recorder.reported(first, result())
    assert bench.recorder.flush(10)
    assert (tmp_path / "faults" / point).exists()
    assert next((trial.state, trial.attempts) for trial in bench.trials()) == ("succeeded", 1)
    assert bench.lab.points(bench.experiment_id) == [(first, 1)]
    assert not bench.lost.is_set()


def test_who_lost_its_process_keeps_its_checkpoints(lab: Lab) -> None:
    """For `retry`: `ended`, upon which they are removed, is said of results and of failures of the trial's own."""
    bench, ended = Bench(lab), list[int]()
    recorder = Recorder(bench.database, bench.lease, bench.lost.set, ended.append)
    recorder.open()
    first, second, third = (trial.id for trial in bench.trials())
    for _ in range(MAX_DEATHS):
        recorder.died(first, "signal 9")
    recorder.started(second)
    recorder.reported(second, FailureReport("oom", "too large"))
    recorder.started(third)
    recorder.reported(third, result())
    assert recorder.flush(5)
    assert [(trial.state, trial.failure) for trial in bench.trials()][:2] == [("failed", "crashed"), ("failed", "oom")]
    assert ended == [second, third]


@pytest.mark.parametrize("failure", ["infrastructure", "bad_data"])
def test_who_failed_for_the_machine_or_its_data_keeps_its_checkpoints(lab: Lab, failure: str) -> None:
    """A retry costs no finished epoch: the head was away, or a disk had changed the data set."""
    bench, ended, settled = Bench(lab), list[int](), list[int]()
    recorder = Recorder(bench.database, bench.lease, bench.lost.set, ended.append, settled=settled.append)
    recorder.open()
    first = bench.trials()[0].id
    recorder.started(first)
    recorder.reported(first, FailureReport(failure, "what to do"))
    assert recorder.flush(5)
    assert (bench.trials()[0].state, bench.trials()[0].failure) == ("failed", failure)
    assert (ended, settled) == ([], [first])


def test_after_a_process_that_was_lost_unnoticed_the_next_attempt_counts(bench: Bench) -> None:
    """Else it would run as if it waited: its result would be dropped, and its checkpoints removed."""
    first = bench.trials()[0].id
    bench.recorder.started(first)
    assert bench.recorder.flush(5)
    driver = Driver.__new__(Driver)
    driver._lease, driver._recorder = bench.lease, bench.recorder
    bench.database.write(driver._tidy)
    assert bench.trials()[0].state == "queued"
    bench.recorder.started(first)
    bench.recorder.reported(first, result())
    assert bench.recorder.flush(5)
    assert bench.trials()[0].state == "succeeded"


def test_who_gave_way_keeps_its_checkpoints_whatever_it_still_says(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result was under way when its process was killed: stored it cannot be any more."""
    killed, ended = list[object](), list[int]()
    monkeypatch.setattr("workers.driver.watchdog.ray.kill", killed.append)
    bench = Bench(lab)
    recorder = Recorder(bench.database, bench.lease, bench.lost.set, ended.append)
    recorder.open()
    first = bench.trials()[0].id
    watchdog = Watchdog(None, None, lambda trial_id, _verdict, _seconds: recorder.gave_way(trial_id))
    callback, trial = TuneCallback(recorder, watchdog, MagicMock()), cast("Any", MagicMock())
    trial.config = {"job": asdict(Job(first, bench.lease.fence, 0, {}))}
    callback.on_trial_start(0, [], trial)
    watchdog._end(first, Verdict.YIELD, 0.0)
    callback.on_trial_result(0, [], trial, {"report": ResultReport(made_result(), []), "done": True})
    assert recorder.flush(5)
    assert (bench.trials()[0].state, len(killed), ended) == ("queued", 1, [])


def test_use_that_was_told_is_not_told_again(lab: Lab) -> None:
    """A sign of life holds the newest series that it had, which a report may have told on since."""
    bench = Bench(lab)
    recorder = Recorder(bench.database, bench.lease, bench.lost.set)
    recorder.open()
    trial = bench.trials()[0]

    def told() -> list[list[float | None]]:
        assert recorder.flush(5)
        with bench.database.read() as session:
            found = attempts.listed(session, trial.id, resources=True)
        return [[] if one.resources is None else one.resources["cpu"] for one in found]

    recorder.started(trial.id)
    recorder.reported(trial.id, StartedReport("node-1", []))
    recorder.reported(trial.id, ResourceReport(used(1.0, 2.0, 3.0)))
    recorder.reported(trial.id, ResourceReport(used(1.0, 2.0)))
    assert told() == [[1.0, 2.0, 3.0]]
    recorder.died(trial.id, "SIGKILL")
    recorder.started(trial.id)
    recorder.reported(trial.id, StartedReport("node-1", []))
    recorder.reported(trial.id, ResourceReport(used(4.0, 5.0)))
    assert told() == [[1.0, 2.0, 3.0], [4.0, 5.0]], "the next attempt begins anew"


def test_a_pace_is_told_that_comes_with_no_further_use(bench: Bench) -> None:
    """The longer an attempt runs, the rarer it looks at what it uses; its reports come as often as before."""
    first = bench.trials()[0].id
    bench.recorder.started(first)
    bench.recorder.reported(first, StartedReport("node-1", []))

    def told(series: ResourceSeries, reported: float, longest_pause: float) -> tuple[float, float]:
        pace: Pace = {"reported": reported, "longest_pause": longest_pause}
        bench.recorder.reported(first, ResourceReport({**series, "pace": pace}))
        assert bench.recorder.flush(5)
        with bench.database.read() as session:
            (one,) = attempts.listed(session, first, resources=True)
        assert one.resources is not None
        assert one.resources["cpu"] == [1.0, 2.0]
        return one.resources["pace"]["reported"], one.resources["pace"]["longest_pause"]

    assert told(used(1.0, 2.0), 30.0, 1.0) == (30.0, 1.0)
    assert told(used(1.0, 2.0), 60.0, 1.0) == (60.0, 1.0)
    assert told(used(1.0, 2.0), 500.0, 440.0) == (500.0, 440.0)
    assert told(used(1.0), 505.0, 1.0) == (500.0, 440.0), "an older use, as a sign may hold it"


def test_a_night_without_the_database_is_charged_to_nobody(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(lab)
    recorder = Recorder(bench.database, bench.lease, bench.lost.set)
    first, second, _ = (trial.id for trial in bench.trials())
    recorder.started(first)
    recorder.started(second)
    recorder.reported(first, result())
    recorder.died(second, "SIGKILL")
    night = now() + timedelta(hours=10)
    monkeypatch.setattr("service.queue.trials.now", lambda: night)
    monkeypatch.setattr("service.experiments.transitions.now", lambda: night)
    recorder.open()
    assert recorder.flush(5)
    done, lost, _ = bench.trials()
    assert (done.state, lost.state) == ("succeeded", "queued")
    assert max(done.run_seconds, lost.run_seconds) < 60


def test_what_ended_under_a_driver_that_died_is_known_to_the_next(lab: Lab) -> None:
    """It may have died between a result's COMMIT and the removal of what the trial would have resumed from."""
    bench = Bench(lab)
    recorder = Recorder(bench.database, bench.lease, bench.lost.set)
    recorder.open()
    first, second, third = (trial.id for trial in bench.trials())
    recorder.started(first)
    recorder.reported(first, result())
    recorder.started(second)
    recorder.reported(second, FailureReport("oom", "too large"))
    recorder.started(third)
    assert recorder.flush(5)
    with bench.database.read() as session:
        assert driver_reads.last_ended(session, bench.lease, 10) == [first]


def test_who_is_to_run_alone_keeps_its_checkpoints_and_may_be_handed_out_again(lab: Lab) -> None:
    bench, told = Bench(lab), list[tuple[str, int]]()
    recorder = Recorder(
        bench.database,
        bench.lease,
        bench.lost.set,
        ended=lambda trial_id: told.append(("ended", trial_id)),
        settled=lambda trial_id: told.append(("settled", trial_id)),
    )
    recorder.open()
    first, *_ = (trial.id for trial in bench.trials())
    recorder.started(first)
    recorder.reported(first, epoch(1))
    recorder.reported(first, CrowdedReport("no room"))
    assert recorder.flush(5)
    trial = bench.trials()[0]
    assert (trial.state, trial.epoch, trial.alone, trial.attempts) == ("queued", 1, True, 0)
    assert trial.error == "alone after out of memory on a shared card: no room"
    assert told == [("settled", first)]
    recorder.started(first)
    recorder.reported(first, FailureReport("oom", "no room at all"))
    assert recorder.flush(5)
    assert bench.trials()[0].failure == "oom"
    assert told == [("settled", first), ("ended", first), ("settled", first)]


def test_nothing_is_held_against_a_trial_whose_files_cannot_be_kept(lab: Lab) -> None:
    """However often: a disk may be full for days."""
    bench, told = Bench(lab), list[int]()
    recorder = Recorder(bench.database, bench.lease, bench.lost.set, settled=told.append)
    recorder.open()
    first, *_ = (trial.id for trial in bench.trials())
    recorder.started(first)
    recorder.reported(first, epoch(1))
    for _ in range(MAX_DEATHS + 1):
        recorder.reported(first, HinderedReport("the disk is full"))
        recorder.started(first)
    recorder.reported(first, HinderedReport("the disk is full"))
    assert recorder.flush(5)
    trial = bench.trials()[0]
    assert (trial.state, trial.epoch, trial.deaths, trial.attempts) == ("queued", 1, 0, 0)
    assert trial.error == "the disk is full; after that it rests for 120 s"
    assert trial.rests_until is not None, "others begin meanwhile"
    assert told == [first] * (MAX_DEATHS + 2)


def test_settled_is_said_once_what_became_of_a_trial_is_stored(lab: Lab) -> None:
    """Only then may it be handed out again; `ended` is said of the final ones alone."""
    bench, told = Bench(lab), list[tuple[str, int, str]]()

    def tell(word: str, trial_id: int) -> None:
        state = next(trial.state.value for trial in bench.trials() if trial.id == trial_id)
        told.append((word, trial_id, state))

    recorder = Recorder(
        bench.database,
        bench.lease,
        bench.lost.set,
        lambda trial_id: tell("ended", trial_id),
        lambda trial_id: told.append(("refused", trial_id, "")),  # within the write
        lambda trial_id: tell("settled", trial_id),
    )
    recorder.open()
    first, second, third = (trial.id for trial in bench.trials())
    for trial_id in (first, second, third):
        recorder.started(trial_id)
        recorder.reported(trial_id, StartedReport("node-1", ["0"]))
        recorder.reported(trial_id, epoch(1))
        recorder.reported(trial_id, stage())
        assert recorder.flush(5)
    assert told == []
    recorder.reported(first, result())
    assert recorder.flush(5)
    recorder.died(second, "signal 9")
    assert recorder.flush(5)
    recorder.gave_way(third)
    assert recorder.flush(5)
    assert told == [
        ("ended", first, "succeeded"),
        ("settled", first, "succeeded"),
        ("settled", second, "queued"),
        ("settled", third, "queued"),
    ]
    told.clear()
    recorder.started(third)
    recorder.stopped_early(third, epoch(2))
    recorder.started(second)
    recorder.reported(second, FailureReport("oom", "too large"))
    assert recorder.flush(5)
    assert [trial.state for trial in bench.trials()] == ["succeeded", "failed", "early_stopped"]
    assert [(word, trial_id) for word, trial_id, _ in told] == [
        ("ended", third),
        ("settled", third),
        ("ended", second),
        ("settled", second),
    ]
    told.clear()
    recorder.started(second)
    assert recorder.flush(5)
    assert told == [("refused", second, "")]


def test_where_trials_run_and_whose_fault_their_deaths_are(bench: Bench) -> None:
    first, second, third = (trial.id for trial in bench.trials())
    for trial_id in (first, second, third):
        bench.recorder.started(trial_id)
        bench.recorder.reported(trial_id, StartedReport("node-1", ["0", "1"] if trial_id == first else []))
    bench.recorder.died(first, "signal 9")
    bench.recorder.died(second, "its node has died", charged=False)
    bench.recorder.gave_way(third)
    assert bench.recorder.flush(5)
    assert [(trial.state, trial.attempts, trial.deaths, trial.turn) for trial in bench.trials()] == [
        ("queued", 1, 1, -1),
        ("queued", 0, 0, -1),
        ("queued", 0, 0, -1),
    ]
    assert [trial.node for trial in bench.trials()] == ["node-1, GPU 0, 1", "node-1", "node-1"]
    assert [trial.error for trial in bench.trials()] == ["signal 9", "its node has died", None]
    bench.recorder.started(first)
    bench.recorder.reported(first, stage(further=False))
    assert bench.recorder.flush(5)
    assert bench.trials()[0].deaths == 1
    assert bench.lab.experiment(bench.experiment_id).progressed_at is None
    bench.recorder.reported(first, stage())
    assert bench.recorder.flush(5)
    assert bench.trials()[0].deaths == 0
    assert bench.lab.experiment(bench.experiment_id).progressed_at is not None


def test_an_attempt_has_its_environment_and_what_it_used(bench: Bench) -> None:
    first, second, _ = (trial.id for trial in bench.trials())
    environment, series = {"host": "node-1", "packages": {"torch": "2"}}, used(99.0, 101.5)
    for trial_id in (first, second):
        bench.recorder.started(trial_id)
        bench.recorder.reported(trial_id, StartedReport("node-1", [], environment if trial_id == first else None))
    bench.recorder.reported(first, ResourceReport(series))
    assert bench.recorder.flush(5)
    with bench.database.read() as session:
        assert [one.environment for one in attempts.listed(session, first)] == [environment]
        assert [one.resources for one in attempts.listed(session, first, resources=True)] == [series]
        assert [one.environment for one in attempts.listed(session, second)] == [None]
        assert [one.resources for one in attempts.listed(session, second, resources=True)] == [None]


def test_one_that_dies_before_it_could_begin_is_charged_as_well(bench: Bench) -> None:
    """Else one whose process never comes up would be tried for ever."""
    first = bench.trials()[0].id
    for _ in range(MAX_DEATHS):
        bench.recorder.died(first, "signal 9")
    assert bench.recorder.flush(5)
    trial = bench.trials()[0]
    assert (trial.state, trial.failure, trial.attempts) == ("failed", "crashed", MAX_DEATHS)


def test_an_invalid_result_is_stored_as_such(bench: Bench) -> None:
    """With what contradicts itself, its evaluation's columns and its whole record."""
    first = bench.trials()[0].id
    value = made_result(
        pgd_accuracy=0.25,
        certified_36=0.5,
        valid=False,
        violations=["pgd broke 3 images within the L2 radius for which they are certified"],
        evaluation={"images": 4, "seconds": {"pgd": 0.5}},
    )
    bench.recorder.started(first)
    bench.recorder.reported(first, ResultReport(value, []))
    assert bench.recorder.flush(5)
    with bench.database.read() as session:
        stored = session.get(Result, first)
        assert stored is not None
        assert (stored.valid, stored.violations, stored.evaluation) == (False, value.violations, value.evaluation)
        assert (stored.pgd_accuracy, stored.certified_36, stored.robust_accuracy) == (0.25, 0.5, None)


def test_one_bad_event_spoils_no_other(bench: Bench) -> None:
    """An accuracy that the database refuses fails its trial, in the middle of a batch."""
    first, second, _ = (trial.id for trial in bench.trials())
    lock = bench.database.writer.connect()
    lock.begin()  # so that all queue up into one batch
    bench.recorder.started(first)
    bench.recorder.started(second)
    bench.recorder.reported(first, result(accuracy=7.0))
    bench.recorder.reported(second, result())
    lock.close()
    assert bench.recorder.flush(10)
    bad, good, _ = bench.trials()
    assert (bad.state, bad.failure) == ("failed", "error")
    assert "could not be stored" in (bad.error or "")
    assert good.state == "succeeded"
    assert not bench.lost.is_set()


def test_what_has_queued_up_is_written_in_one_transaction(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write, writes = bench.database.write, list[int]()

    def counted(work: Any) -> Any:
        writes.append(1)
        return write(work)

    monkeypatch.setattr(bench.database, "write", counted)
    recorder = Recorder(bench.database, bench.lease, bench.lost.set)
    for trial in bench.trials():
        recorder.started(trial.id)
        recorder.reported(trial.id, epoch(1))
    recorder.open()
    assert recorder.flush(5)
    assert writes == [1]
    assert len(bench.lab.points(bench.experiment_id)) == 3


def test_a_flush_waits_no_longer_than_it_may(bench: Bench) -> None:
    recorder = Recorder(bench.database, bench.lease, bench.lost.set)
    assert recorder.flush(0)
    recorder.started(bench.trials()[0].id)
    late = threading.Timer(5, recorder.open)
    late.start()
    assert not recorder.flush(0.01)
    late.cancel()


def test_a_driver_may_end_while_its_recorder_waits(bench: Bench) -> None:
    """Else one whose experiment is done would go on for ever."""
    before = set(threading.enumerate())
    Recorder(bench.database, bench.lease, bench.lost.set).open()
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon) == ("recorder", True)


def test_database_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports wait; a COMMIT whose reply was lost is repeated without harm."""
    first = bench.trials()[0].id
    write, failures = bench.database.write, iter(["before", "after", "before"])

    def flaky(work: Any) -> Any:
        when = next(failures, None)
        if when == "after":
            write(work)
        if when:
            raise is_gone()
        return write(work)

    monkeypatch.setattr(bench.database, "write", flaky)
    bench.recorder.started(first)
    bench.recorder.reported(first, epoch(1))
    bench.recorder.reported(first, result())
    assert bench.recorder.flush(10)
    assert next(failures, None) is None
    assert bench.trials()[0].state == "succeeded"
    assert [trial.attempts for trial in bench.trials()] == [1, 0, 0]
    assert bench.lab.points(bench.experiment_id) == [(first, 1)]


def test_what_is_written_twice_counts_once(lab: Lab) -> None:
    """The reply to a COMMIT was lost: the same batch is written again, whatever ends of attempts and starts it has."""
    says: dict[str, Callable[[Recorder, int], None]] = {
        "start": lambda recorder, trial_id: recorder.started(trial_id),
        "death": lambda recorder, trial_id: recorder.died(trial_id, "killed"),
        "crowd": lambda recorder, trial_id: recorder.reported(trial_id, CrowdedReport("no room")),
        "way": lambda recorder, trial_id: recorder.gave_way(trial_id),
        "hindrance": lambda recorder, trial_id: recorder.reported(trial_id, HinderedReport("the disk is full")),
    }
    stories = [("start", *words) for words in itertools.product(says, repeat=2)]
    experiment_id = lab.post(list(range(2 * len(stories))))
    lease = lab.database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    recorder = Recorder(lab.database, lease, lambda: None)  # whose thread never begins: batches are stored by hand
    became = operator.attrgetter("state", "attempts", "deaths", "turn", "failure", "error")
    ids = [trial.id for trial in lab.trials(experiment_id)]
    for story, *pair in zip(stories, ids[::2], ids[1::2], strict=True):
        for trial_id, times in zip(pair, (1, 2), strict=True):
            for word in story:
                says[word](recorder, trial_id)
            for _ in range(times):
                recorder._store(recorder._events)
            recorder._events.clear()
        once, twice = (trial for trial in lab.trials(experiment_id) if trial.id in pair)
        assert became(once) == became(twice), story


def test_of_what_is_written_twice_nothing_is_taken_for_the_next_attempts(lab: Lab) -> None:
    """What the first used and where it ran stays with it, and that it got on does not forgive the next one's death."""
    experiment_id = lab.post([0])
    lease = lab.database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    recorder = Recorder(lab.database, lease, lambda: None)  # whose thread never begins: batches are stored by hand
    (trial,) = lab.trials(experiment_id)
    recorder.started(trial.id)
    recorder.reported(trial.id, StartedReport("node-1", []))
    recorder.reported(trial.id, ResourceReport(used(1.0)))
    recorder.reported(trial.id, stage())
    recorder.died(trial.id, "killed")
    recorder.started(trial.id)
    for _ in range(2):
        recorder._store(recorder._events)
    (trial,) = lab.trials(experiment_id)
    assert (trial.node, trial.deaths) == (None, 1)

    def listed() -> list[tuple[str | None, ResourceSeries | None]]:
        with lab.database.read() as session:
            return [(one.place, one.resources) for one in attempts.listed(session, trial.id, resources=True)]

    assert listed() == [("node-1", used(1.0))]
    recorder.reported(trial.id, StartedReport("node-2", []))
    for _ in range(2):
        recorder._store(recorder._events)
    assert listed() == [("node-1", used(1.0)), ("node-2", None)]


def test_attempts_are_told_apart_where_the_clock_stands_still(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """By when they began: of two at one moment the first one's death would be the second one's, once written again."""
    experiment_id = lab.post([0])
    lease = lab.database.write(lambda session: leases.claim(session, "worker", None))
    assert lease is not None
    begun = now()
    monkeypatch.setattr("workers.driver.recorder.now", lambda: begun)
    recorder = Recorder(lab.database, lease, lambda: None)  # whose thread never begins: batches are stored by hand
    (trial,) = lab.trials(experiment_id)
    recorder.started(trial.id)
    recorder.died(trial.id, "killed")
    recorder.started(trial.id)
    for _ in range(2):
        recorder._store(recorder._events)
    (trial,) = lab.trials(experiment_id)
    assert (trial.state, trial.attempts, trial.deaths) == ("running", 2, 1)


def is_gone() -> OperationalError:
    """As it is said where no server answers."""
    return OperationalError("COMMIT", {}, ConnectionError("the database is away"))


def disk_full() -> OperationalError:
    """As SQLite says it."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return OperationalError("COMMIT", {}, error)


class TestTrouble:
    """A database that answers and fails."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workers.driver.recorder.Backoff.failed", lambda _self: 0.0)

    def fail(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, times: int, *, away: Collection[int] = ()
    ) -> list[int]:
        """Writes fail so many times, the disk being full or the database `away`; counts what is still to fail."""
        write, left = bench.database.write, [times]

        def full(work: Any) -> Any:
            if left[0] > 0:
                left[0] -= 1
                raise is_gone() if left[0] in away else disk_full()
            return write(work)

        monkeypatch.setattr(bench.database, "write", full)
        return left

    def test_that_passes_costs_nothing(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """A good result is no failure because the disk was full for a while."""
        first = bench.trials()[0].id
        left = self.fail(bench, monkeypatch, MOST_FAILURES - 1)
        bench.recorder.started(first)
        bench.recorder.reported(first, epoch(1))
        bench.recorder.reported(first, result())
        assert bench.recorder.flush(10)
        assert left == [0]
        assert (bench.trials()[0].state, bench.trials()[0].attempts) == ("succeeded", 1)
        assert not bench.lost.is_set()

    @pytest.mark.parametrize(
        ("times", "away"),
        [(3 * MOST_FAILURES, range(3 * MOST_FAILURES)), (2 * MOST_FAILURES - 1, [MOST_FAILURES - 1])],
    )
    def test_an_absence_is_no_trouble_however_long(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, times: int, away: Collection[int]
    ) -> None:
        """It does not count as failing for good, and what follows it is counted anew."""
        first = bench.trials()[0].id
        left = self.fail(bench, monkeypatch, times, away=away)
        bench.recorder.started(first)
        bench.recorder.reported(first, result())
        assert bench.recorder.flush(10)
        assert left == [0]
        assert bench.trials()[0].state == "succeeded"
        assert not bench.lost.is_set()

    def test_that_stays_gives_the_lease_up_and_says_so(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What was not written runs again under the next claim, and its result is stored once."""
        first = bench.trials()[0].id
        bench.recorder.started(first)
        assert bench.recorder.flush(5)
        left = self.fail(bench, monkeypatch, 10**6)
        bench.recorder.reported(first, result())
        assert bench.lost.wait(10)
        assert 10**6 - left[0] == MOST_FAILURES
        (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert line.getMessage() == f"the database fails for good; given up with reports of trials [{first}]"
        assert bench.trials()[0].state == "running"
        left[0] = 0
        bench.database.write(lambda session: leases.release(session, bench.lease, drained=False))
        lease = bench.database.write(lambda session: leases.claim(session, "next", None))
        assert lease is not None
        again = Recorder(bench.database, lease, bench.lost.set)
        again.open()
        again.started(first)
        again.reported(first, result())
        assert again.flush(5)
        assert (bench.trials()[0].state, bench.trials()[0].attempts) == ("succeeded", 1)

    def test_that_stays_names_all_whose_reports_go_with_the_lease(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whatever it is that they said."""
        trials = [trial.id for trial in bench.trials()]
        self.fail(bench, monkeypatch, 10**6)
        recorder = Recorder(bench.database, bench.lease, bench.lost.set)
        recorder.started(trials[2])
        recorder.reported(trials[1], StartedReport("node-1", []))
        recorder.reported(trials[1], ResourceReport(used()))
        recorder.reported(trials[0], epoch(1))
        recorder.reported(trials[0], stage())
        recorder.open()
        assert bench.lost.wait(10)
        (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert line.endswith(f"given up with reports of trials {trials}")

    def test_amid_a_batch_fails_no_trial(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One result is refused, so each event is written for itself, and the disk is full at the good one's turn."""
        first, second, _ = (trial.id for trial in bench.trials())
        ended = list[int]()
        recorder = Recorder(bench.database, bench.lease, bench.lost.set, ended.append)
        recorder.started(first)
        recorder.started(second)
        recorder.reported(first, result(accuracy=7.0))
        recorder.reported(second, result())
        write, writes = bench.database.write, 0

        def full(work: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == 6:  # after the batch, three events of it and the failure
                raise disk_full()
            return write(work)

        monkeypatch.setattr(bench.database, "write", full)
        recorder.open()
        assert recorder.flush(10)
        assert [trial.state for trial in bench.trials()] == ["failed", "succeeded", "queued"]
        assert ended == [first, second]
        refused, waiting = (one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING)
        assert refused == f"trial {first}: what it reported cannot be stored"
        assert waiting.startswith("1 events wait for the database: (sqlite3.OperationalError) database or disk is full")

    def test_a_failure_that_cannot_be_recorded_gives_the_lease_up(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither tried for ever nor the end of the thread without a word."""

        def broken(*_args: Any, **_named: Any) -> None:
            raise ValueError("cannot be recorded")

        monkeypatch.setattr(HeldExperiment, "fail_trial", broken)
        first = bench.trials()[0].id
        bench.recorder.started(first)
        bench.recorder.reported(first, result(accuracy=7.0))
        assert bench.lost.wait(10)
        assert bench.trials()[0].state == "running"


def test_lost_lease_writes_nothing(bench: Bench) -> None:
    first = bench.trials()[0].id
    bench.database.write(lambda session: actions.cancel(session, bench.experiment_id))
    bench.recorder.started(first)
    bench.recorder.reported(first, epoch(1))
    assert bench.lost.wait(5)
    assert bench.trials()[0].state == "cancelled"
    assert bench.lab.points(bench.experiment_id) == []


def test_a_driver_that_comes_back_after_its_lease_writes_nothing(bench: Bench) -> None:
    """It stood still for so long that its experiment runs elsewhere; only what the next one says is stored, once."""
    first, second, _ = (trial.id for trial in bench.trials())
    bench.recorder.started(first)
    bench.recorder.reported(first, epoch(1))
    assert bench.recorder.flush(5)
    lease = bench.taken_over()
    lost = threading.Event()
    following = Recorder(bench.database, lease, lost.set)
    following.open()
    following.started(first)
    assert following.flush(5)
    bench.recorder.reported(first, epoch(2))
    bench.recorder.reported(first, result(0.25))
    bench.recorder.died(second, "signal 9")
    assert bench.lost.wait(5)
    assert [(trial.state, trial.epoch, trial.attempts) for trial in bench.trials()] == [
        ("running", 1, 1),
        ("queued", 0, 0),
        ("queued", 0, 0),
    ]
    following.reported(first, result(0.5))
    assert following.flush(5)
    (stored,) = bench.lab.results(bench.experiment_id)
    assert (stored.trial_id, stored.fence, stored.accuracy) == (first, lease.fence, 0.5)
    assert not lost.is_set()


def test_after_somebody_else_has_claimed_the_lock_itself_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an experiment that is another's now nothing is held, be it only to be looked at once more."""
    first = bench.trials()[0].id
    bench.recorder.started(first)
    assert bench.recorder.flush(5)
    next_one = bench.taken_over()
    fences, lock = list[int](), leases.lock

    def noting(session: Session, lease: Lease) -> Experiment:
        experiment = lock(session, lease)
        fences.append(experiment.fence)
        return experiment

    monkeypatch.setattr(leases, "lock", noting)
    bench.recorder.reported(first, epoch(2))
    bench.recorder.reported(first, result())
    assert bench.lost.wait(5)
    assert fences == [], f"fence {bench.lease.fence} has locked what fence {next_one.fence} runs"
    following = Recorder(bench.database, next_one, lambda: None)
    following.open()
    following.started(first)
    assert following.flush(5)
    assert fences == [next_one.fence]


def test_keeper_of_a_lease_that_somebody_else_has_now(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its heartbeats nor its looks may take the other's claim for its own: nobody cancelled anything."""
    monkeypatch.setattr("workers.driver.lease_keeper.LOOK_SECONDS", 0.02)
    looking, beating = threading.Event(), threading.Event()
    LeaseKeeper(bench.database, bench.lease, 60, looking.set).start()
    bench.lab.wait_for(lambda: bench.lab.experiment(bench.experiment_id).heartbeat == 1, 10)
    bench.taken_over()
    assert looking.wait(5)
    LeaseKeeper(bench.database, bench.lease, 60, beating.set).start()
    assert beating.wait(5)
    experiment = bench.lab.experiment(bench.experiment_id)
    assert (experiment.state, experiment.worker, experiment.heartbeat) == ("running", "next", 0)


def test_keeper_renews_until_the_lease_is_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that is away for a while is no reason to stop."""
    read, outages = bench.database.read, iter([True, True])

    def flaky() -> Any:
        if threading.current_thread().name == "lease" and next(outages, False):
            raise OperationalError("SELECT", {}, ConnectionError("the database is away"))
        return read()

    monkeypatch.setattr(bench.database, "read", flaky)
    monkeypatch.setattr("workers.driver.lease_keeper.LOOK_SECONDS", 0.02)
    lost = threading.Event()
    LeaseKeeper(bench.database, bench.lease, 0.1, lost.set).start()
    bench.lab.wait_for(lambda: bench.lab.experiment(bench.experiment_id).heartbeat >= 3, 10)
    assert not lost.is_set()
    bench.database.write(lambda session: actions.cancel(session, bench.experiment_id))
    started = time.monotonic()
    assert lost.wait(2)
    assert time.monotonic() - started < 1
