"""The recorder and the lease's keeper over a real database."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import OperationalError

from service import queue, verbs
from service.models import Result, Trial
from service.queue import Lease
from tests.results import made_result
from ttsv.trial import EpochMetrics
from workers.lease import LeaseKeeper
from workers.recorder import Recorder
from workers.reports import EpochReport, FailureReport, ResultReport

if TYPE_CHECKING:
    from tests.workers.conftest import Lab


def epoch(number: int) -> EpochReport:
    point = EpochMetrics(
        epoch=number,
        epochs=3,
        train_loss=1.0,
        train_accuracy=0.5,
        val_loss=1.0,
        val_accuracy=number / 10,
        ort_loss=None,
        lr=0.1,
        seconds=0.1,
        constraint_seconds=0.0,
    )
    return EpochReport([point])


def result(accuracy: float = 0.5) -> ResultReport:
    value = made_result(accuracy=accuracy)
    return ResultReport(value, [{"kind": "model", "path": "trials/1/1/model", "sha256": "0" * 64, "size": 7}])


class Bench:
    """A claimed experiment of three trials and a recorder for it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.database = lab.database
        self.experiment_id = lab.post([0, 1, 2])
        lease = self.database.write(lambda session: queue.claim(session, "worker", None))
        assert lease is not None
        self.lease: Lease = lease
        self.lost = threading.Event()
        self.recorder = Recorder(self.database, lease, self.lost.set)
        self.recorder.open()

    def trials(self) -> list[Trial]:
        return self.lab.trials(self.experiment_id)


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


def test_an_invalid_result_is_stored_as_such(bench: Bench) -> None:
    """With what contradicts itself, its evaluation's columns and its whole record."""
    first = bench.trials()[0].id
    value = dataclasses.replace(
        result().result,
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


def test_database_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports wait; a COMMIT whose reply was lost is repeated without harm."""
    first = bench.trials()[0].id
    write, failures = bench.database.write, iter(["before", "after", "before"])

    def flaky(work: Any) -> Any:
        when = next(failures, None)
        if when == "after":
            write(work)
        if when:
            raise OperationalError("COMMIT", {}, ConnectionError("the database is away"))
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


def test_lost_lease_writes_nothing(bench: Bench) -> None:
    first = bench.trials()[0].id
    bench.database.write(lambda session: verbs.cancel(session, bench.experiment_id))
    bench.recorder.started(first)
    bench.recorder.reported(first, epoch(1))
    assert bench.lost.wait(5)
    assert bench.trials()[0].state == "cancelled"
    assert bench.lab.points(bench.experiment_id) == []


def test_keeper_renews_until_the_lease_is_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that is away for a while is no reason to stop."""
    read, outages = bench.database.read, iter([True, True])

    def flaky() -> Any:
        if threading.current_thread().name == "lease" and next(outages, False):
            raise OperationalError("SELECT", {}, ConnectionError("the database is away"))
        return read()

    monkeypatch.setattr(bench.database, "read", flaky)
    monkeypatch.setattr("workers.lease.LOOK_SECONDS", 0.02)
    lost = threading.Event()
    LeaseKeeper(bench.database, bench.lease, 0.1, lost.set).start()
    bench.lab.wait_for(lambda: bench.lab.experiment(bench.experiment_id).heartbeat >= 3, 10)
    assert not lost.is_set()
    bench.database.write(lambda session: verbs.cancel(session, bench.experiment_id))
    started = time.monotonic()
    assert lost.wait(2)
    assert time.monotonic() - started < 1
