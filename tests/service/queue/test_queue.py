"""The queue's contract, the same on SQLite and Postgres."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Update, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from service.database import (
    Artifact,
    EpochPoint,
    Event,
    Experiment,
    ExperimentState,
    Protocol,
    Result,
    Trial,
    TrialState,
    Worker,
    now,
)
from service.database.engine import Database
from service.database.experiments import ResourceSeries
from service.errors import LeaseLostError
from service.experiments import actions, store, submission, transitions
from service.experiments.submission import Draft, trial_columns
from service.leaderboards import field_index
from service.queue import driver_reads, leases
from service.queue.census import take_census
from service.queue.contenders import Specs, contenders, say_why
from service.queue.leases import Lease, Watched
from service.queue.rests import FIRST_SECONDS, LONGEST_SECONDS
from service.queue.rests import until as until_then
from service.queue.trials import MAX_DEATHS, ArtifactFile, HeldExperiment, ProtocolRecord, hold
from service.specs.grid import PlannedTrial, expand_grid
from service.specs.spec import ExperimentSpec
from tests.held import reported, under, unfinished_trials, write
from tests.machinery import Claim, Finish, Make, Submit, Table
from ttsv.config.trial import TrialConfig

BASE: dict[str, Any] = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 3}}

MakeProtocol = Callable[..., ProtocolRecord]


PROTOCOL = ProtocolRecord("p" * 64, {"split": "test"})
SERIES: ResourceSeries = {
    "interval": 1.0,
    "seconds": [1.0],
    "cpu": [99.0],
    "memory": [100.0],
    "gpu": [None],
    "gpu_memory": [None],
}


def planned(**fields: Any) -> PlannedTrial:
    """A trial as a searcher suggests it."""
    spec = ExperimentSpec(name="one", base=BASE | fields)
    return expand_grid(spec, max_trials=1).trials[0]


def snapshot(table: Table) -> list[tuple[Any, ...]]:
    """Everything that is stored, to be compared."""
    kinds = (Experiment, Trial, EpochPoint, Protocol, Result, Artifact, Event)
    return [
        (kind.__name__, *(getattr(row, column.key) for column in kind.__table__.columns))
        for kind in kinds
        for row in table(kind)
    ]


def try_claim(database: Database) -> Lease | None:
    return write(database, leases.claim, "worker", None)


class TestClaim:
    def test_an_empty_queue_gives_nothing(self, database: Database) -> None:
        assert try_claim(database) is None

    def test_the_highest_priority_comes_first_and_the_oldest_among_equals(
        self, submit: Submit, database: Database
    ) -> None:
        ids = [submit(name=str(priority), priority=priority) for priority in (0, 5, -3, 5, 0)]
        claimed = [lease.experiment_id for lease in iter(lambda: try_claim(database), None)]
        assert claimed == [ids[1], ids[3], ids[0], ids[4], ids[2]]

    def test_marks_the_experiment_and_leaves_its_trials(self, submit: Submit, claim: Claim, table: Table) -> None:
        submit()
        lease = claim("first")
        (experiment,) = table(Experiment)
        assert lease == Lease(experiment.id, 1)
        assert (experiment.state, experiment.fence) == (ExperimentState.RUNNING, 1)
        assert (experiment.worker, experiment.process and experiment.process["pid"]) == ("first", 1)
        assert experiment.started_at is not None
        assert {trial.state for trial in table(Trial)} == {TrialState.QUEUED}

    def test_a_second_claim_keeps_the_first_start(
        self, submit: Submit, claim: Claim, table: Table, database: Database
    ) -> None:
        submit()
        lease = claim()
        started = table(Experiment)[0].started_at
        write(database, leases.release, lease, drained=True)
        claim()
        assert table(Experiment)[0].started_at == started

    def test_what_was_done_before_is_no_progress_of_the_claim(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make
    ) -> None:
        """An estimate of what is left counts epochs since the claim, of this experiment's trials alone."""
        submit(seeds=2)
        submit(seeds=1)
        lease = claim()
        assert [experiment.epochs_at_claim for experiment in table(Experiment)] == [0, 0]
        for trial, epochs in zip(table(Trial), (2, 1), strict=False):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(epochs))))
        write(database, leases.release, lease, drained=False)
        before = now()
        again, other = claim(), claim("other")
        assert [experiment.epochs_at_claim for experiment in table(Experiment)] == [3, 0]
        assert all(before <= experiment.claimed_at <= now() for experiment in table(Experiment))
        told = [(event.experiment_id, event.actor, event.detail) for event in table(Event) if event.kind == "claimed"]
        assert told == [
            (lease.experiment_id, "worker", {"fence": 1}),
            (again.experiment_id, "worker", {"fence": 2}),
            (other.experiment_id, "other", {"fence": 1}),
        ]

    @pytest.mark.parametrize("state", [state for state in ExperimentState if state != ExperimentState.QUEUED])
    def test_only_queued_experiments_can_be_claimed(
        self, submit: Submit, database: Database, state: ExperimentState
    ) -> None:
        experiment_id = submit()

        def change(session: Session) -> None:
            store.get_experiment(session, experiment_id).state = state

        database.write(change)
        assert try_claim(database) is None

    def test_that_experiment_and_no_other(self, submit: Submit, database: Database) -> None:
        first, second = submit(), submit(priority=9)
        for _ in range(2):
            lease = write(database, leases.claim, "worker", None, first)
            assert (lease and lease.experiment_id) == (None if _ else first)
        assert write(database, leases.claim, "worker", None, 99) is None
        lease = write(database, leases.claim, "worker", None, second)
        assert lease == Lease(second, 1)

    def test_what_is_claimed_waits_for_nothing(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        experiment_id = submit()
        write(database, say_why, {experiment_id: "needs 3 GPUs on one node; the largest has 2"}, {experiment_id})
        (experiment,) = table(Experiment)
        assert experiment.waiting is not None
        assert experiment.unfit_since is not None
        claim()
        (experiment,) = table(Experiment)
        assert (experiment.waiting, experiment.unfit_since) == (None, None)

    def test_the_time_without_any_worker_is_not_time_in_which_it_fits_no_node(
        self, submit: Submit, database: Database, table: Table
    ) -> None:
        """Else the next worker would fail it at its first look, before its nodes have joined."""
        experiment_id = submit()
        write(database, leases.greet, "a", 4, 0)
        write(database, say_why, {experiment_id: "needs 3 GPUs on one node; the largest has 2"}, {experiment_id})
        write(database, leases.part, "a")
        (experiment,) = table(Experiment)
        assert (experiment.waiting, experiment.unfit_since) == (leases.NOBODY, None)
        with database.read() as session:
            waiting = take_census(session).waiting
        assert {name: count for name, count in waiting.items() if count} == {"worker": 1}

    def test_where_no_worker_is_all_that_is_open_waits_for_one(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        """Whoever was killed says nothing, and what is posted or taken up again later meets nobody."""
        running, paused, over, posted = submit(), submit(), submit(), submit()
        claim()
        for number, verb in ((paused, actions.pause), (over, actions.cancel)):
            write(database, verb, number)

        def waiting() -> dict[int, str | None]:
            write(database, leases.miss_workers)
            return {one.id: one.waiting for one in table(Experiment)}

        def missed() -> bool:
            with database.read() as session:
                return leases.are_workers_missed(session)

        assert missed()
        assert waiting() == {running: leases.NOBODY, paused: None, over: None, posted: leases.NOBODY}
        assert not missed(), "it is said"
        write(database, actions.resume, paused)
        assert missed()
        assert waiting()[paused] == leases.NOBODY
        write(database, leases.greet, "worker", 4, 0)
        assert not missed()
        assert set(waiting().values()) == {None}
        silent = update(Worker).values(seen_at=now() - 2 * transitions.HEARD_WITHIN)
        database.write(partial(_execute, statement=silent))
        assert waiting()[running] == leases.NOBODY

    @pytest.mark.parametrize("claimed", [False, True])
    @pytest.mark.parametrize(("silent", "counts"), [(timedelta(minutes=2), False), (timedelta(seconds=20), True)])
    def test_nor_is_the_time_after_the_last_worker_was_killed(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        silent: timedelta,
        counts: bool,
        claimed: bool,
    ) -> None:
        """It left no word: its record is as old as its last greeting. One that was restarted at once counts on."""
        experiment_id = submit()
        if claimed:
            claim()
        write(database, leases.greet, "killed", 4, 0)
        write(database, say_why, {experiment_id: "needs 3 GPUs on one node; the largest has 2"}, {experiment_id})
        (before,) = table(Experiment)
        database.write(lambda session: session.execute(update(Worker).values(seen_at=now() - silent)))
        write(database, leases.greet, "next", 4, 0)
        write(database, leases.greet, "next", 4, 0)
        (experiment,) = table(Experiment)
        assert experiment.unfit_since == (before.unfit_since if counts else None)
        assert before.unfit_since is not None


def _execute(session: Session, statement: Update) -> None:
    session.execute(statement)


class TestBlame:
    """No death of a cluster, node, driver, worker or database is charged to an experiment or a trial."""

    @pytest.mark.parametrize("how", ["reaped", "released", "drained", "lost with its node"])
    def test_what_dies_around_a_trial_costs_it_nothing_however_often(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish, how: str
    ) -> None:
        submit(seeds=2)
        for _ in range(MAX_DEATHS + 1):
            lease, trial = claim(), table(Trial)[0]
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            if how == "reaped":
                with database.read() as session:
                    (seen,) = leases.watch(session)
                assert write(database, leases.reap, seen)
            else:
                if how == "lost with its node":
                    database.write(under(lease, HeldExperiment.lose_trial, trial.id, "node died", charged=False))
                write(database, leases.release, lease, drained=how == "drained")
            (trial, other) = table(Trial)
            assert (trial.state, trial.attempts, trial.deaths) == (TrialState.QUEUED, 0, 0)
            assert (other.state, other.attempts, other.turn) == (TrialState.QUEUED, 0, 0)
        lease = claim()
        for trial in table(Trial):
            finish(lease, trial.id)
        assert write(database, leases.complete, lease)
        assert table(Experiment)[0].state == ExperimentState.SUCCEEDED
        assert [trial.attempts for trial in table(Trial)] == [1, 1]

    @pytest.mark.parametrize("way", ["epoch", "stage"])
    def test_only_deaths_in_a_row_without_getting_on_count(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make, way: str
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]

        def die(times: int, *, get_on: int | None = None) -> None:
            for _ in range(times):
                assert database.write(under(lease, HeldExperiment.start_trial, trial.id))
                if get_on is not None and way == "epoch":
                    point = reported(epoch_point(get_on))
                    database.write(under(lease, HeldExperiment.add_epoch, trial.id, point))
                elif get_on is not None:
                    database.write(under(lease, HeldExperiment.progress, trial.id))
                database.write(under(lease, HeldExperiment.lose_trial, trial.id, "signal 9"))

        die(MAX_DEATHS - 1)
        assert (table(Trial)[0].state, table(Trial)[0].deaths) == (TrialState.QUEUED, MAX_DEATHS - 1)
        before = table(Experiment)[0].progressed_at
        die(1, get_on=1)
        assert (table(Trial)[0].state, table(Trial)[0].deaths) == (TrialState.QUEUED, 1)
        assert before is None
        assert table(Experiment)[0].progressed_at is not None
        die(MAX_DEATHS - 2)
        assert table(Trial)[0].state == TrialState.QUEUED
        die(1)
        assert (table(Trial)[0].state, table(Trial)[0].failure) == (TrialState.FAILED, "crashed")

    @pytest.mark.parametrize(
        ("charged", "longest", "expected"),
        [
            (True, 0.0, [0, 0, 0, 0, 15, 30, 60, 60, 60]),
            (True, LONGEST_SECONDS, [15, 30, 60, 120, 240, 300, 300, 300, 300]),
            (False, LONGEST_SECONDS, [15, 30, 60, 120, 240, 300, 300, 300, 300]),
            (False, FIRST_SECONDS, [15] * 9),
            (False, 0.0, [0] * 9),
        ],
    )
    def test_what_keeps_dying_rests_longer_and_longer_until_it_gets_on(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        epoch_point: Make,
        charged: bool,
        longest: float,
        expected: list[float],
    ) -> None:
        """Some minutes of killing fail no trial; what may need too much memory fails within half an hour."""
        submit(seeds=1)
        trial, seconds = table(Trial)[0], list[float]()

        def die() -> float:
            lease = claim()  # whatever driver it has
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            died = under(lease, HeldExperiment.lose_trial, trial.id, "gone", charged=charged, longest_rest=longest)
            database.write(died)
            write(database, leases.release, lease, drained=False)
            until = table(Trial)[0].rests_until
            return 0.0 if until is None else (until - now()).total_seconds()

        for _ in expected:
            seconds.append(die())
        assert seconds == [pytest.approx(rest, abs=10) for rest in expected]
        assert sum(seconds) > 1_500 or longest < LONGEST_SECONDS
        lease = claim()
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(1))))
        write(database, leases.release, lease, drained=False)
        assert die() == pytest.approx(expected[0], abs=10), "it got on"

    def test_a_short_rest_for_another_reason_makes_none_shorter(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        for longest in (*[LONGEST_SECONDS] * 3, FIRST_SECONDS, LONGEST_SECONDS):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            lost = under(lease, HeldExperiment.lose_trial, trial.id, "gone", charged=False, longest_rest=longest)
            database.write(lost)
        assert table(Trial)[0].rest_seconds == 120.0

    def test_a_clock_that_was_ahead_makes_no_trial_rest_for_ever(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        for ahead, rests in ((LONGEST_SECONDS - 5, True), (LONGEST_SECONDS + 60, False), (1e9, False)):
            until = update(Trial).values(rests_until=now() + timedelta(seconds=ahead))
            database.write(partial(_execute, statement=until))
            with database.read() as session:
                assert (driver_reads.next_trial(session, lease, ()) is None) == rests
                assert (driver_reads.rest_seconds(session, lease) > 0) == rests
                (one,) = contenders(session, [lease.experiment_id], Specs())
                assert (one.demand.trials, one.rests_until is not None) == ((0, True) if rests else (1, False))
                assert (until_then(session.get_one(Trial, trial.id)) is not None) == rests

    def test_an_epoch_that_was_there_before_is_no_progress(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make
    ) -> None:
        """A trial that dies in epoch 2 and starts from epoch 1 again would go on for ever."""
        submit(seeds=1)
        lease, starts = claim(), 0
        while table(Trial)[0].state == TrialState.QUEUED and starts < 99:
            starts += 1
            trial = table(Trial)[0]
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(1))))
            database.write(under(lease, HeldExperiment.lose_trial, trial.id, "signal 9"))
        assert starts == MAX_DEATHS
        assert table(Trial)[0].state == TrialState.FAILED

    def test_deaths_around_it_do_not_forgive_its_own(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        submit(seeds=1)
        for times in range(1, MAX_DEATHS):
            lease, trial = claim(), table(Trial)[0]
            for charged in (True, False):
                database.write(under(lease, HeldExperiment.start_trial, trial.id))
                database.write(under(lease, HeldExperiment.lose_trial, trial.id, "gone", charged=charged))
            write(database, leases.release, lease, drained=False)
            assert (table(Trial)[0].deaths, table(Trial)[0].attempts) == (times, times)
        database.write(under(lease := claim(), HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.lose_trial, trial.id, "gone"))
        assert table(Trial)[0].state == TrialState.FAILED


WRITES: dict[str, Callable[[Lease, int, dict[str, Any], dict[str, Any]], Callable[[Session], object]]] = {
    "renew": lambda lease, *_: lambda session: leases.renew(session, lease),
    "release": lambda lease, *_: lambda session: leases.release(session, lease, drained=False),
    "drain": lambda lease, *_: lambda session: leases.release(session, lease, drained=True),
    "complete": lambda lease, *_: lambda session: leases.complete(session, lease),
    "lock": lambda lease, *_: lambda session: leases.lock(session, lease),
    "next_trial": lambda lease, *_: lambda session: driver_reads.next_trial(session, lease, ()),
    "rest_seconds": lambda lease, *_: lambda session: driver_reads.rest_seconds(session, lease),
    "read_trials": lambda lease, trial, *_: under(lease, HeldExperiment.read_trials, [trial]),
    "start_trial": lambda lease, trial, *_: under(lease, HeldExperiment.start_trial, trial),
    "add_epoch": lambda lease, trial, point, _: under(lease, HeldExperiment.add_epoch, trial, reported(point)),
    "finish_trial": lambda lease, trial, _, result: under(lease, HeldExperiment.finish_trial, trial, result, PROTOCOL),
    "fail_trial": lambda lease, trial, *_: under(lease, HeldExperiment.fail_trial, trial, "oom", "too big"),
    "lose_trial": lambda lease, trial, *_: under(lease, HeldExperiment.lose_trial, trial, "gone"),
    "lose_trial_with_its_node": lambda lease, trial, *_: under(
        lease, HeldExperiment.lose_trial, trial, "gone", charged=False
    ),
    "crowd_trial": lambda lease, trial, *_: under(lease, HeldExperiment.crowd_trial, trial, "alone"),
    "yield_trial": lambda lease, trial, *_: under(lease, HeldExperiment.yield_trial, trial),
    "place_trial": lambda lease, trial, *_: under(lease, HeldExperiment.place_trial, trial, "node-2"),
    "record_resources": lambda lease, trial, *_: under(lease, HeldExperiment.record_resources, trial, SERIES),
    "progress": lambda lease, trial, *_: under(lease, HeldExperiment.progress, trial),
    "early_stop_trial": lambda lease, trial, *_: under(lease, HeldExperiment.early_stop_trial, trial),
    "add_trial": lambda lease, *_: under(lease, HeldExperiment.add_trial, planned(seed=77)),
    "end_search": lambda lease, *_: under(lease, HeldExperiment.end_search),
}
"""What is done under a lease on a trial, with a point or a result."""

READS = {"is_held", "holds", "is_stopping", "last_ended", "lost", "running_trials", "curves", "planned_trials", "tried"}
"""What takes a lease and refuses no stale one."""


def test_every_function_that_takes_a_lease_is_in_the_fence_tests() -> None:
    taking = {
        name
        for module in (leases, driver_reads)
        for name, function in vars(module).items()
        if callable(function) and not name.startswith("_") and "lease" in getattr(function, "__annotations__", {})
    }
    methods = {name for name, member in vars(HeldExperiment).items() if callable(member) and not name.startswith("_")}
    assert (taking - READS) | methods == set(WRITES) - {"drain", "lose_trial_with_its_node"}


class TestFence:
    @pytest.mark.parametrize(
        "how", ["reaped", "claimed anew", "released", "cancelled", "paused", "stopped", "completed", "invented"]
    )
    def test_a_stale_lease_writes_nothing(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        epoch_point: Make,
        trial_result: Make,
        finish: Finish,
        how: str,
    ) -> None:
        experiment_id = submit(seeds=2)
        lease = claim()
        trial_id = table(Trial)[0].id
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        if how in ("reaped", "claimed anew"):
            with database.read() as session:
                (seen,) = leases.watch(session)
            assert write(database, leases.reap, seen)
            if how == "claimed anew":
                newer = claim()
                database.write(under(newer, HeldExperiment.start_trial, trial_id))
        elif how == "released":
            write(database, leases.release, lease, drained=False)
        elif how == "cancelled":
            write(database, actions.cancel, experiment_id)
        elif how == "paused":
            write(database, actions.pause, experiment_id)
        elif how == "stopped":
            database.write(under(lease, HeldExperiment.fail_trial, trial_id, "oom", "too big"))
            write(database, actions.stop, experiment_id)
        elif how == "completed":
            for trial in table(Trial):
                finish(lease, trial.id)
            assert write(database, leases.complete, lease)
        else:
            lease = Lease(experiment_id, lease.fence + 1)
        before = snapshot(table)
        for name, call in WRITES.items():
            refused = None
            try:
                database.write(call(lease, trial_id, epoch_point(), trial_result()))
            except LeaseLostError as error:
                refused = str(error)
            assert (name, refused) == (name, f"experiment {experiment_id} under fence {lease.fence}")
        assert snapshot(table) == before
        with database.read() as session:
            assert not leases.is_held(session, lease)
            assert not leases.is_stopping(session, lease)

    @pytest.mark.parametrize(
        "name",
        [
            "start_trial", "place_trial", "add_epoch", "progress", "finish_trial", "fail_trial", "lose_trial",
            "lose_trial_with_its_node", "yield_trial", "early_stop_trial", "record_resources",
        ],
    )  # fmt: skip
    def test_a_lease_writes_to_its_own_trials_only(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        epoch_point: Make,
        trial_result: Make,
        name: str,
    ) -> None:
        submit(seeds=1)
        submit(seeds=1)
        first, second = claim(), claim()
        other = next(trial for trial in table(Trial) if trial.experiment_id == second.experiment_id)
        if name != "start_trial":
            database.write(under(second, HeldExperiment.start_trial, other.id))

        def stored() -> list[tuple[Any, ...]]:
            return [row for row in snapshot(table) if row[0] != "Experiment"]

        before = stored()
        database.write(WRITES[name](first, other.id, epoch_point(), trial_result()))
        assert stored() == before

    @pytest.mark.parametrize("how", ["released", "cancelled", "claimed anew"])
    def test_what_the_transaction_itself_gave_away_is_written_no_more(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        epoch_point: Make,
        trial_result: Make,
        how: str,
    ) -> None:
        """No statement looks again: the object that the transaction holds says so."""
        experiment_id = submit(seeds=2)
        lease = claim()
        trial_id = table(Trial)[0].id
        writes: dict[str, Callable[[HeldExperiment], object]] = {
            "read_trials": lambda held: held.read_trials([trial_id]),
            "start_trial": lambda held: held.start_trial(trial_id),
            "add_epoch": lambda held: held.add_epoch(trial_id, reported(epoch_point())),
            "finish_trial": lambda held: held.finish_trial(trial_id, trial_result(), PROTOCOL),
            "fail_trial": lambda held: held.fail_trial(trial_id, "oom", "too big"),
            "lose_trial": lambda held: held.lose_trial(trial_id, "gone"),
            "yield_trial": lambda held: held.yield_trial(trial_id),
            "place_trial": lambda held: held.place_trial(trial_id, "node-2"),
            "record_resources": lambda held: held.record_resources(trial_id, SERIES),
            "progress": lambda held: held.progress(trial_id),
            "early_stop_trial": lambda held: held.early_stop_trial(trial_id),
            "add_trial": lambda held: held.add_trial(planned(seed=77)),
            "end_search": lambda held: held.end_search(),
        }

        refused: list[str] = []

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                assert held.start_trial(trial_id)
                if how == "released":
                    leases.release(session, lease, drained=True)
                elif how == "cancelled":
                    actions.cancel(session, experiment_id)
                else:
                    (seen,) = leases.watch(session)
                    assert leases.reap(session, seen)
                    assert leases.claim(session, "next", None) == Lease(experiment_id, lease.fence + 2)
                for name, call in writes.items():
                    try:
                        call(held)
                    except LeaseLostError:
                        refused.append(name)

        with pytest.raises(LeaseLostError):
            database.write(work)
        assert refused == list(writes)
        assert [trial.state for trial in table(Trial)] == [TrialState.QUEUED] * 2
        write(database, leases.renew, lease)

    def test_renewing_moves_the_heartbeat_only(self, submit: Submit, claim: Claim, database: Database) -> None:
        submit()
        lease = claim()
        with database.read() as session:
            (before,) = leases.watch(session)
            assert leases.is_held(session, lease)
        write(database, leases.renew, lease)
        with database.read() as session:
            (after,) = leases.watch(session)
        assert (after.heartbeat, after.fence) == (before.heartbeat + 1, before.fence)


class TestReap:
    def seen(self, database: Database) -> Watched:
        with database.read() as session:
            (seen,) = leases.watch(session)
        return seen

    def test_puts_the_experiment_back_and_spends_no_attempt(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        submit(seeds=2)
        lease = claim()
        first = table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, first.id))
        assert write(database, leases.reap, self.seen(database))
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.fence) == (ExperimentState.QUEUED, lease.fence + 1)
        assert (experiment.worker, experiment.process) == (None, None)
        assert [(trial.state, trial.attempts, trial.turn) for trial in table(Trial)] == [
            (TrialState.QUEUED, 0, -1),
            (TrialState.QUEUED, 0, 0),
        ]
        assert claim().fence == lease.fence + 2

    def test_not_after_a_heartbeat(self, submit: Submit, claim: Claim, database: Database, table: Table) -> None:
        submit()
        lease = claim()
        seen = self.seen(database)
        write(database, leases.renew, lease)
        before = snapshot(table)
        assert not write(database, leases.reap, seen)
        assert snapshot(table) == before

    def test_not_twice(self, submit: Submit, claim: Claim, database: Database, table: Table) -> None:
        submit()
        claim()
        seen = self.seen(database)
        assert write(database, leases.reap, seen)
        claim()
        before = snapshot(table)
        assert not write(database, leases.reap, seen)
        assert snapshot(table) == before

    def test_that_experiment_and_no_other(self, submit: Submit, claim: Claim, database: Database, table: Table) -> None:
        """Whatever else runs under the same fence with as many heartbeats."""
        submit()
        submit()
        first, second = claim("alive"), claim("dead")
        mine, _, lost, _ = (trial.id for trial in table(Trial))
        database.write(under(first, HeldExperiment.start_trial, mine))
        database.write(under(second, HeldExperiment.start_trial, lost))
        with database.read() as session:
            (seen,) = (seen for seen in leases.watch(session) if seen.experiment_id == second.experiment_id)
        assert (seen.fence, seen.heartbeat, seen.worker, seen.process) == (
            first.fence,
            0,
            "dead",
            {"boot": "a kernel", "pids": 1, "pid": 1, "start": 1},
        )
        assert write(database, leases.reap, seen, by="neighbour")
        assert [experiment.state for experiment in table(Experiment)] == ["running", "queued"]
        assert [trial.state for trial in table(Trial)] == ["running", "queued", "queued", "queued"]
        event = table(Event)[-1]
        assert (event.experiment_id, event.kind, event.actor) == (second.experiment_id, "reaped", "neighbour")
        assert event.detail == {"worker": "dead", "fence": second.fence}

    @pytest.mark.parametrize("end", ["cancel", "release"])
    def test_not_what_ended_meanwhile(
        self, submit: Submit, claim: Claim, database: Database, table: Table, end: str
    ) -> None:
        experiment_id = submit()
        lease = claim()
        seen = self.seen(database)
        if end == "cancel":
            write(database, actions.cancel, experiment_id)
        else:
            write(database, leases.release, lease, drained=False)
        before = snapshot(table)
        assert not write(database, leases.reap, seen)
        assert snapshot(table) == before

    def test_the_fence_never_falls_whatever_the_session_saw_before(
        self, submit: Submit, claim: Claim, postgres_url: str
    ) -> None:
        """A session that loaded the experiment long ago must not count on from the fence of then."""
        mine, others = Database(postgres_url), Database(postgres_url)
        with others.read() as session:
            assert session.get(Experiment, 1) is None  # a database of its own
        others.write(_submit_one)
        write(others, leases.claim, "other", None)

        def work(session: Session) -> bool:
            loaded = store.get_experiment(session, 1)
            assert loaded.fence == 1
            with others.read() as other:
                (seen,) = leases.watch(other)
            assert others.write(lambda other: leases.reap(other, seen))
            assert others.write(lambda other: leases.claim(other, "other", None)) == Lease(1, 3)
            (now_seen,) = leases.watch(session)
            return leases.reap(session, now_seen)

        assert mine.write(work)
        with mine.read() as session:
            assert store.get_experiment(session, 1).fence == 4
        mine.close()
        others.close()


def _submit_one(session: Session) -> None:
    spec = ExperimentSpec(name="one", base={"dataset": "digits", "model": "small-cnn"})
    submission.submit(session, Draft(spec, expand_grid(spec, max_trials=1)))


class TestRelease:
    @pytest.mark.parametrize("drained", [True, False])
    def test_giving_back_spends_nothing(
        self, submit: Submit, claim: Claim, database: Database, table: Table, drained: bool
    ) -> None:
        submit(seeds=2)
        lease = claim()
        database.write(under(lease, HeldExperiment.start_trial, table(Trial)[1].id))
        write(database, leases.release, lease, drained=drained)
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.worker, experiment.process) == (ExperimentState.QUEUED, None, None)
        assert [(trial.state, trial.attempts, trial.turn) for trial in table(Trial)] == [
            (TrialState.QUEUED, 0, 0),
            (TrialState.QUEUED, 0, -1),
        ]
        assert (table(Event)[-1].kind, table(Event)[-1].detail) == ("released", {"fence": 1, "drained": drained})

    def test_final_trials_stay(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=2)
        lease = claim()
        done, queued = table(Trial)
        finish(lease, done.id)
        write(database, leases.release, lease, drained=False)
        newer = claim()
        trials = write(database, unfinished_trials, newer)
        assert [trial.id for trial in trials] == [queued.id]
        assert len(table(Result)) == 1


class TestTrials:
    def test_lost_and_yielded_trials_come_before_those_that_never_began(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=6)
        lease = claim()
        ids = [trial.id for trial in table(Trial)]

        def shuffled(session: Session) -> None:
            for trial in session.scalars(select(Trial)):
                trial.turn = 5 - trial.number % 3

        database.write(shuffled)
        never_begun = [ids[2], ids[5], ids[1], ids[4], ids[0], ids[3]]

        def waiting(*taken: int) -> list[int]:
            found = list(taken)
            with database.read() as session:
                while (trial := driver_reads.next_trial(session, lease, found)) is not None:
                    found.append(trial.id)
            return found[len(taken) :]

        assert waiting() == never_begun
        assert waiting(ids[2], ids[1]) == [ids[5], ids[4], ids[0], ids[3]]
        for trial_id in ids[:4]:
            database.write(under(lease, HeldExperiment.start_trial, trial_id))
        assert waiting() == [ids[5], ids[4]]
        database.write(under(lease, HeldExperiment.lose_trial, ids[3], "gone"))
        database.write(under(lease, HeldExperiment.lose_trial, ids[1], "gone", charged=False))
        database.write(under(lease, HeldExperiment.yield_trial, ids[0]))
        assert waiting() == [ids[0], ids[1], ids[3], ids[5], ids[4]]
        assert waiting(ids[0]) == [ids[1], ids[3], ids[5], ids[4]]
        write(database, leases.release, lease, drained=False)  # what ran under it is lost, too
        lease = claim()
        assert waiting() == [ids[0], ids[1], ids[2], ids[3], ids[5], ids[4]]
        trials = write(database, unfinished_trials, lease)
        assert [trial.id for trial in trials] == waiting()
        finish(lease, ids[0])
        assert waiting() == [ids[1], ids[2], ids[3], ids[5], ids[4]]

    def test_one_that_rests_lets_others_begin_and_comes_before_them_later(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        submit(seeds=2)
        lease = claim()
        first, second = (trial.id for trial in table(Trial))

        def waits() -> tuple[int | None, float]:
            with database.read() as session:
                trial = driver_reads.next_trial(session, lease, ())
                return None if trial is None else trial.id, driver_reads.rest_seconds(session, lease)

        database.write(under(lease, HeldExperiment.start_trial, first))
        database.write(under(lease, HeldExperiment.lose_trial, first, "signal 9", longest_rest=300))
        lost = table(Trial)[0]
        assert lost.error == "signal 9; after that it rests for 15 s"
        assert lost.rests_until is not None
        assert 5 < (lost.rests_until - now()).total_seconds() <= 15
        assert waits() == (second, 0.0)
        database.write(under(lease, HeldExperiment.start_trial, second))
        found, seconds = waits()
        assert found is None
        assert 0 < seconds <= 15, "all that waits rests"
        write(database, leases.release, lease, drained=True)
        lease = claim()
        assert waits() == (second, 0.0), "which ran under the lease before"
        rested = update(Trial).where(Trial.id == first).values(rests_until=now())
        database.write(lambda session: session.execute(rested))
        assert waits() == (first, 0.0)
        database.write(under(lease, HeldExperiment.start_trial, first))
        assert (table(Trial)[0].rests_until, table(Trial)[0].rest_seconds) == (None, 15.0)

    @pytest.mark.parametrize("way", ["epoch", "stage", "retried", "cancelled"])
    def test_how_long_it_rested_is_known_until_it_gets_on(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make, way: str
    ) -> None:
        experiment_id = submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        for longest in (15, 0):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            database.write(under(lease, HeldExperiment.lose_trial, trial.id, "signal 9", longest_rest=longest))
        assert (table(Trial)[0].rest_seconds, table(Trial)[0].error) == (15.0, "signal 9")
        if way in ("epoch", "stage"):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
        if way == "epoch":
            database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(1))))
        elif way == "stage":
            database.write(under(lease, HeldExperiment.progress, trial.id))
        else:
            database.write(lambda session: actions.cancel(session, experiment_id))
            assert (table(Trial)[0].state, table(Trial)[0].rests_until) == (TrialState.CANCELLED, None)
            cancelled = [TrialState.CANCELLED]
            database.write(lambda session: actions.retry(session, experiment_id, cancelled))
        assert (table(Trial)[0].rest_seconds, table(Trial)[0].rests_until) == (0.0, None)

    def test_what_is_taken_and_final_meanwhile_hides_nothing(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=3)
        lease = claim()
        first, second, third = (trial.id for trial in table(Trial))
        finish(lease, first)
        database.write(under(lease, HeldExperiment.start_trial, second))
        with database.read() as session:
            trial = driver_reads.next_trial(session, lease, [first, second])
            assert (trial and trial.id) == third
            assert driver_reads.next_trial(session, lease, [first, second, third]) is None

    def test_starting_twice_counts_once(self, submit: Submit, claim: Claim, database: Database, table: Table) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        for _ in range(2):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
        (trial,) = table(Trial)
        assert (trial.state, trial.attempts) == (TrialState.RUNNING, 1)
        assert trial.started_at is not None

    def test_an_epoch_again_replaces(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        for epoch, accuracy in ((1, 0.5), (2, 0.75), (2, 0.625)):
            point = epoch_point(epoch, val_accuracy=accuracy)
            database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(point)))
        assert [(point.epoch, point.val_accuracy) for point in table(EpochPoint)] == [(1, 0.5), (2, 0.625)]
        (trial,) = table(Trial)
        assert (trial.epoch, trial.best_val_accuracy) == (2, 0.625), "no epoch has the other any more"
        with database.read() as session:
            assert store.progress(session, [1])[1].best_val_accuracy == 0.625

    def test_an_epoch_repeated_after_a_crash_does_not_turn_progress_back(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        for epoch in (1, 2, 3, 2):
            database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(epoch))))
        assert table(Trial)[0].epoch == 3

    @pytest.mark.parametrize("ended", [False, True])
    def test_epochs_belong_to_running_trials(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        finish: Finish,
        epoch_point: Make,
        ended: bool,
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        if ended:
            finish(lease, trial.id)
        database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point())))
        assert table(EpochPoint) == []

    def test_a_result_comes_whole_and_once(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        trial_result: Make,
        protocol: MakeProtocol,
    ) -> None:
        """Again after a lost reply to COMMIT, with other numbers to tell them apart."""
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        file = ArtifactFile("model", "trials/1/model.safetensors", "0" * 64, 2**40)
        for accuracy in (0.9, 0.1):
            result = trial_result(accuracy)
            database.write(under(lease, HeldExperiment.finish_trial, trial.id, result, protocol(), [file]))
        (trial,) = table(Trial)
        assert trial.state == TrialState.SUCCEEDED
        assert trial.finished_at is not None
        (stored,) = table(Result)
        assert {name: getattr(stored, name) for name in trial_result()} == trial_result(0.9)
        assert (stored.trial_id, stored.fence) == (trial.id, lease.fence)
        (known,) = table(Protocol)
        assert ProtocolRecord(known.fingerprint, known.record) == protocol()
        (artifact,) = table(Artifact)
        assert (artifact.kind, artifact.path, artifact.size) == ("model", "trials/1/model.safetensors", 2**40)

    def test_a_result_that_is_refused_leaves_the_trial_running(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        trial_result: Make,
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        before = snapshot(table)
        with pytest.raises(IntegrityError):
            database.write(under(lease, HeldExperiment.finish_trial, trial.id, trial_result(1.5), PROTOCOL))
        assert snapshot(table) == before

    def test_a_queued_trial_gets_no_result(
        self, submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.finish_trial, trial.id, trial_result(), PROTOCOL))
        assert table(Result) == []

    @pytest.mark.parametrize(
        ("failure", "state"), [("diverged", TrialState.DIVERGED), ("oom", TrialState.FAILED), ("error", "failed")]
    )
    def test_failing(
        self, submit: Submit, claim: Claim, database: Database, table: Table, failure: str, state: TrialState
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        for message in ("first", "second"):
            database.write(under(lease, HeldExperiment.fail_trial, trial.id, failure, message))
        (trial,) = table(Trial)
        assert (trial.state, trial.failure, trial.error) == (state, failure, "first")
        assert trial.finished_at is not None

    @pytest.mark.parametrize("lose", [False, True])
    def test_an_error_of_any_bytes_can_be_stored(
        self, submit: Submit, claim: Claim, database: Database, table: Table, lose: bool
    ) -> None:
        """Exceptions quote what they choke on: NUL, which Postgres has not, and file names that are not UTF-8."""
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        message = "bad \x00 and \udcff: ü"
        if lose:
            database.write(under(lease, HeldExperiment.lose_trial, trial.id, message))
        else:
            database.write(under(lease, HeldExperiment.fail_trial, trial.id, "error", message))
        error = table(Trial)[0].error
        assert error.startswith("bad ")
        assert error.endswith(": ü")

    def test_a_lost_trial_is_tried_again_so_often(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        for attempt in range(1, MAX_DEATHS + 1):
            (trial,) = table(Trial)
            assert (trial.state, trial.attempts, trial.deaths) == (TrialState.QUEUED, attempt - 1, attempt - 1)
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            for _ in range(2):
                database.write(under(lease, HeldExperiment.lose_trial, trial.id, f"signal {attempt}"))
        (trial,) = table(Trial)
        assert (trial.state, trial.failure, trial.attempts) == (TrialState.FAILED, "crashed", MAX_DEATHS)
        assert trial.error == (
            "the trial's process died 10 times in a row without getting on; the last time: signal 10"
        )
        assert trial.finished_at is not None
        (told,) = (event for event in table(Event) if event.kind == "trial_failed")
        assert (told.trial_id, told.detail["failure"]) == (trial.id, "crashed")

    def test_giving_way_spends_nothing_however_often(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=2)
        lease, trial = claim(), table(Trial)[1]
        database.write(under(lease, HeldExperiment.yield_trial, trial.id))
        assert (table(Trial)[1].turn, table(Trial)[1].attempts) == (0, 0)  # only what runs gives way
        for _ in range(2 * MAX_DEATHS):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            for _ in range(2):
                database.write(under(lease, HeldExperiment.yield_trial, trial.id))
            (_, trial) = table(Trial)
            assert (trial.state, trial.attempts, trial.deaths, trial.turn) == (TrialState.QUEUED, 0, 0, -1)
            assert trial.error is None
        told = [event.trial_id for event in table(Event) if event.kind == "trial_yielded"]
        assert told == [trial.id] * 2 * MAX_DEATHS

    def test_too_little_memory_on_a_shared_card_is_one_more_try_alone(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        """Nothing is held against it, the first time; what is lost or given up meanwhile changes nothing of it."""
        submit(seeds=2)
        lease, trial = claim(), table(Trial)[1]
        database.write(under(lease, HeldExperiment.crowd_trial, trial.id, "too early"))  # only what runs is crowded
        assert not table(Trial)[1].alone
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        for _ in range(2):
            database.write(under(lease, HeldExperiment.crowd_trial, trial.id, "no room\x00"))
            (_, trial) = table(Trial)
            assert (trial.state, trial.attempts, trial.deaths, trial.turn) == (TrialState.QUEUED, 0, 0, -1)
            assert (trial.alone, trial.failure, trial.finished_at) == (True, "oom", None)
            assert trial.error == "alone after out of memory on a shared card: no room\\x00"
        assert [event.trial_id for event in table(Event) if event.kind == "trial_crowded"] == [trial.id]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        assert table(Trial)[1].alone
        database.write(under(lease, HeldExperiment.lose_trial, trial.id, "its node died", charged=False))
        assert table(Trial)[1].alone
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(lambda session: leases.release(session, lease, drained=False))  # its driver died
        assert table(Trial)[1].alone
        lease = claim()
        with database.read() as session:
            upcoming = driver_reads.next_trial(session, lease, ())
        assert upcoming is not None
        assert (upcoming.id, upcoming.alone) == (trial.id, True)
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.fail_trial, trial.id, "oom", "no room at all"))
        (_, trial) = table(Trial)
        assert (trial.state, trial.failure, trial.error) == (TrialState.FAILED, "oom", "no room at all")
        assert (trial.alone, trial.attempts) == (False, 1)
        database.write(lambda session: actions.retry(session, lease.experiment_id))
        assert not table(Trial)[1].alone

    def test_who_is_crowded_though_it_was_to_be_alone_fails(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        """As a worker of an older version may have run it."""
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        for message in ("once", "twice"):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            database.write(under(lease, HeldExperiment.crowd_trial, trial.id, message))
        (trial,) = table(Trial)
        assert (trial.state, trial.failure, trial.error) == (TrialState.FAILED, "oom", "twice")

    @pytest.mark.parametrize("end", ["finished", "stopped early", "cancelled", "cancelled while it runs"])
    def test_what_it_was_crowded_by_is_forgotten_in_the_end(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish, end: str
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.crowd_trial, trial.id, "no room"))
        if end != "cancelled":
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
        if end == "finished":
            finish(lease, trial.id)
        elif end == "stopped early":
            database.write(under(lease, HeldExperiment.early_stop_trial, trial.id))
        else:
            database.write(lambda session: actions.cancel(session, lease.experiment_id))
        (trial,) = table(Trial)
        assert trial.state not in (TrialState.QUEUED, TrialState.RUNNING)
        assert (trial.failure, trial.alone) == (None, False)
        assert trial.finished_at is not None

    def test_a_trials_node_is_that_of_its_newest_attempt(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.place_trial, trial.id, "node-1"))
        assert table(Trial)[0].node is None  # it runs nowhere yet
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        for _ in range(2):
            database.write(under(lease, HeldExperiment.place_trial, trial.id, "node-1, GPU 0"))
        database.write(under(lease, HeldExperiment.lose_trial, trial.id, "gone"))
        assert table(Trial)[0].node == "node-1, GPU 0"
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        assert table(Trial)[0].node is None
        database.write(under(lease, HeldExperiment.place_trial, trial.id, "node-2"))
        finish(lease, trial.id)
        database.write(under(lease, HeldExperiment.place_trial, trial.id, "node-3"))
        assert table(Trial)[0].node == "node-2"

    def test_an_early_stopped_trial_keeps_its_epochs_and_has_no_result(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make, trial_result: Make
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.early_stop_trial, trial.id))
        assert table(Trial)[0].state == TrialState.QUEUED  # only what runs can be stopped
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(1))))
        database.write(under(lease, HeldExperiment.early_stop_trial, trial.id))
        database.write(under(lease, HeldExperiment.finish_trial, trial.id, trial_result(), PROTOCOL))
        (trial,) = table(Trial)
        assert (trial.state, trial.epoch, trial.failure) == (TrialState.EARLY_STOPPED, 1, None)
        (told,) = (event for event in table(Event) if event.kind == "trial_early_stopped")
        assert (told.trial_id, told.detail["epoch"]) == (trial.id, 1)
        assert trial.finished_at is not None
        assert (len(table(EpochPoint)), table(Result)) == (1, [])

    def test_starting_says_whether_the_trial_may_run(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        experiment_id = submit(seeds=3)
        lease = claim()
        done, running, waiting = (trial.id for trial in table(Trial))
        finish(lease, done)
        assert database.write(under(lease, HeldExperiment.start_trial, running))
        assert database.write(under(lease, HeldExperiment.start_trial, running))
        assert not database.write(under(lease, HeldExperiment.start_trial, done))
        write(database, actions.stop, experiment_id)
        assert not database.write(under(lease, HeldExperiment.start_trial, waiting))
        assert [trial.attempts for trial in table(Trial)] == [1, 1, 0]

    @pytest.mark.parametrize(
        "end", ["finish", "fail", "lose", "yield", "early stop", "drain", "reap", "pause", "cancel"]
    )
    def test_the_time_of_every_attempt_counts(
        self, submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make, end: str
    ) -> None:
        experiment_id = submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))

        def earlier(session: Session) -> None:
            trial = session.get_one(Trial, 1)
            assert trial.started_at is not None
            trial.started_at -= timedelta(seconds=100)
            trial.run_seconds = 1000.0

        database.write(earlier)
        with database.read() as session:
            (seen,) = leases.watch(session)
        ends: dict[str, Callable[[Session], object]] = {
            "finish": under(lease, HeldExperiment.finish_trial, trial.id, trial_result(), PROTOCOL),
            "fail": under(lease, HeldExperiment.fail_trial, trial.id, "oom", "too big"),
            "lose": under(lease, HeldExperiment.lose_trial, trial.id, "gone"),
            "yield": under(lease, HeldExperiment.yield_trial, trial.id),
            "early stop": under(lease, HeldExperiment.early_stop_trial, trial.id),
            "drain": lambda session: leases.release(session, lease, drained=True),
            "reap": lambda session: leases.reap(session, seen),
            "pause": lambda session: actions.pause(session, experiment_id),
            "cancel": lambda session: actions.cancel(session, experiment_id),
        }
        database.write(ends[end])
        assert 1099 <= table(Trial)[0].run_seconds < 1160

    @pytest.mark.parametrize("known", ["worker", "progress", "claim"])
    def test_no_time_counts_in_which_a_whole_machine_was_off(
        self, submit: Submit, claim: Claim, database: Database, table: Table, known: str, epoch_point: Make
    ) -> None:
        """Its worker is found dead when the next one looks, which may be days later."""
        submit(seeds=1)
        write(database, leases.greet, "worker", 1, 0)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(1))))
        began, last = now() - timedelta(days=3), now() - timedelta(days=3) + timedelta(seconds=100)
        database.write(lambda session: session.execute(update(Trial).values(started_at=began)))
        database.write(lambda session: session.execute(update(Worker).values(seen_at=last)))
        moments = {"claimed_at": began, "progressed_at": last} if known != "claim" else {"claimed_at": last}
        database.write(lambda session: session.execute(update(Experiment).values(progressed_at=None)))
        database.write(lambda session: session.execute(update(Experiment).values(moments)))
        # The next one has the same name where it is the same container, and greets first, which forgets the old ones.
        next_one = "other" if known == "worker" else "worker"
        if known != "worker":
            write(database, leases.greet, next_one, 1, 0)
        with database.read() as session:
            (seen,) = leases.watch(session)
        assert write(database, leases.reap, seen, next_one)
        assert 100 <= table(Trial)[0].run_seconds < 101

    @pytest.mark.parametrize("verb", [actions.pause, actions.cancel])
    def test_nor_where_somebody_ends_it_before_any_worker_looks(
        self, submit: Submit, claim: Claim, database: Database, table: Table, verb: Callable[..., Experiment]
    ) -> None:
        experiment_id = submit(seeds=1)
        write(database, leases.greet, "worker", 1, 0)
        lease = claim()
        database.write(under(lease, HeldExperiment.start_trial, table(Trial)[0].id))
        began = now() - timedelta(days=3)
        database.write(lambda session: session.execute(update(Trial).values(started_at=began)))
        last = began + timedelta(seconds=100)
        database.write(lambda session: session.execute(update(Worker).values(seen_at=last)))
        write(database, verb, experiment_id)
        assert 100 <= table(Trial)[0].run_seconds < 101

    def test_a_searchers_trial_comes_after_the_last(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        submit(seeds=2)
        lease = claim()
        first, again, known = (
            database.write(under(lease, HeldExperiment.add_trial, planned(seed=seed, layer="tt", rank=4)))
            for seed in (5, 5, 6)
        )
        assert first == again != known
        assert database.write(under(lease, HeldExperiment.add_trial, planned(seed=1))) == table(Trial)[1].id
        assert database.write(field_index.is_whole)
        trials = table(Trial)
        assert [(trial.number, trial.seed, trial.rank, trial.state) for trial in trials[2:]] == [
            (2, 5, 4, TrialState.QUEUED),
            (3, 6, 4, TrialState.QUEUED),
        ]
        assert trials[2].config == trial_columns(planned(seed=5, layer="tt", rank=4))["config"]
        assert TrialConfig.from_dict(trials[2].config) == planned(seed=5, layer="tt", rank=4).config
        assert table(Experiment)[0].trial_count == 4

    def test_what_another_experiment_tried_is_none_of_its_trials(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        """Both may try the same: each trains a trial of its own, or one of them would never end."""
        submit(seeds=2)
        mine = submit(seeds=1)
        claim()
        lease = claim()
        added = database.write(under(lease, HeldExperiment.add_trial, planned(seed=1)))
        assert [(trial.experiment_id, trial.number) for trial in table(Trial) if trial.id == added] == [(mine, 1)]
        assert [experiment.trial_count for experiment in table(Experiment)] == [2, 2]

    def test_what_a_search_tries_is_told_once(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        """A search that goes on learns from these events which point each of its trials was."""
        submit(seeds=1)
        lease, point = claim("node-1"), {"training.weight_decay": 0.5, "seed": 5}
        for _ in range(2):
            added = database.write(under(lease, HeldExperiment.add_trial, planned(seed=5), point))
        database.write(under(lease, HeldExperiment.add_trial, planned(seed=6)))
        told = [event for event in table(Event) if event.kind == "trial_suggested"]
        assert [(event.trial_id, event.actor, event.detail["point"]) for event in told] == [(added, "node-1", point)]

    def test_a_searchers_trial_in_an_experiment_that_stops_never_runs(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        experiment_id = submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        write(database, actions.stop, experiment_id)
        added = database.write(under(lease, HeldExperiment.add_trial, planned(seed=9)))
        assert not database.write(under(lease, HeldExperiment.start_trial, added))
        assert table(Trial)[1].state == TrialState.CANCELLED
        assert table(Trial)[1].finished_at is not None

    def test_many_writes_in_one_transaction(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make, trial_result: Make
    ) -> None:
        """As a recorder does that was without its database for a while."""
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                for _ in range(2):
                    held.start_trial(trial.id)
                    held.add_epoch(trial.id, reported(epoch_point(1, val_accuracy=0.5)))
                    held.lose_trial(trial.id, "gone")
                held.start_trial(trial.id)
                held.add_epoch(trial.id, reported(epoch_point(1, val_accuracy=0.25)))
                held.finish_trial(trial.id, trial_result(), PROTOCOL)
            assert leases.complete(session, lease)

        database.write(work)
        (trial,) = table(Trial)
        assert (trial.state, trial.attempts, trial.best_val_accuracy) == (TrialState.SUCCEEDED, 3, 0.25)
        assert trial.deaths == 2  # the second time its epoch was there already
        assert [point.val_accuracy for point in table(EpochPoint)] == [0.25]
        assert table(Experiment)[0].state == ExperimentState.SUCCEEDED

    def test_what_became_of_a_trial_counts_from_its_own_moment(
        self, submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make
    ) -> None:
        """The database may have been away for a night since: nobody is charged for that."""
        submit(seeds=2)
        lease, (first, second) = claim(), (trial.id for trial in table(Trial))
        began = now() - timedelta(hours=10)

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                for trial_id in (first, second):
                    held.start_trial(trial_id, began)
                held.moment = began + timedelta(minutes=10)
                held.finish_trial(first, trial_result(), PROTOCOL)
                held.lose_trial(second, "gone")

        database.write(work)
        done, waiting = table(Trial)
        assert (done.finished_at, done.run_seconds) == (began + timedelta(minutes=10), 600)
        assert (waiting.state, waiting.run_seconds) == (TrialState.QUEUED, 600)

    def test_many_trials_in_one_transaction(
        self, submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make
    ) -> None:
        """Reading another trial takes back nothing of what is yet to be sent of the first."""
        submit(seeds=2)
        lease, (first, second) = claim(), (trial.id for trial in table(Trial))

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                held.start_trial(first)
                held.start_trial(second)
                held.finish_trial(first, trial_result(), PROTOCOL)

        database.write(work)
        assert [(trial.state, trial.attempts) for trial in table(Trial)] == [("succeeded", 1), ("running", 1)]

    def test_a_trial_that_succeeded_in_the_end_carries_no_error(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=1)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.lose_trial, trial.id, "signal 9"))
        assert table(Trial)[0].error == "signal 9"
        finish(lease, trial.id)
        assert table(Trial)[0].error is None


class TestComplete:
    def test_not_while_a_trial_is_open(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=2)
        lease = claim()
        first, second = table(Trial)
        finish(lease, first.id)
        assert not write(database, leases.complete, lease)
        database.write(under(lease, HeldExperiment.start_trial, second.id))
        assert not write(database, leases.complete, lease)
        assert table(Experiment)[0].state == ExperimentState.RUNNING

    @pytest.mark.parametrize(
        ("change", "ends"),
        [
            (None, None),
            ("another", ExperimentState.SUCCEEDED),
            ("no other", ExperimentState.SUCCEEDED),
            ("stop", ExperimentState.STOPPED),
        ],
    )
    def test_not_while_a_search_has_trials_to_make(
        self,
        claim: Claim,
        database: Database,
        table: Table,
        finish: Finish,
        change: str | None,
        ends: ExperimentState | None,
    ) -> None:
        """They have no rows yet."""
        search = {"algorithm": "random", "trials": 2, "space": {"seed": {"int": [0, 9]}}}
        spec = ExperimentSpec.model_validate({"name": "search", "base": BASE, "search": search})
        draft = Draft(spec, expand_grid(spec, max_trials=9))
        experiment_id = database.write(lambda session: submission.submit(session, draft).id)
        lease = claim()
        assert not write(database, leases.complete, lease)
        first = database.write(under(lease, HeldExperiment.add_trial, planned(seed=1)))
        database.write(under(lease, HeldExperiment.start_trial, first))
        if change == "stop":
            write(database, actions.stop, experiment_id)
        elif change == "no other":
            database.write(under(lease, HeldExperiment.end_search))
        finish(lease, first)
        if change == "another":
            finish(lease, database.write(under(lease, HeldExperiment.add_trial, planned(seed=2))))
        assert write(database, leases.complete, lease) == (ends is not None)
        assert table(Experiment)[0].state == (ends or ExperimentState.RUNNING)

    def test_succeeds_if_every_trial_did(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=2)
        lease = claim()
        for trial in table(Trial):
            finish(lease, trial.id)
        assert write(database, leases.complete, lease)
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.error) == (ExperimentState.SUCCEEDED, None)
        assert (experiment.worker, experiment.process) == (None, None)
        assert experiment.finished_at is not None

    def test_fails_if_some_did_not(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=4)
        lease = claim()
        good, bad, worse, fine = table(Trial)
        finish(lease, good.id)
        finish(lease, fine.id)
        for trial, failure in ((bad, "diverged"), (worse, "oom")):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            database.write(under(lease, HeldExperiment.fail_trial, trial.id, failure, "no"))
        assert write(database, leases.complete, lease)
        (experiment,) = table(Experiment)
        reason = "2 of 4 trials did not succeed"
        assert (experiment.state, experiment.error) == (ExperimentState.FAILED, reason)
        told = table(Event)[-1]
        assert (told.kind, told.actor, told.detail) == ("closed", "worker", {"state": "failed", "error": reason})
        assert len(table(Result)) == 2

    def test_early_stopped_trials_are_no_failure(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=2)
        lease = claim()
        best, worse = table(Trial)
        finish(lease, best.id)
        database.write(under(lease, HeldExperiment.start_trial, worse.id))
        database.write(under(lease, HeldExperiment.early_stop_trial, worse.id))
        assert write(database, leases.complete, lease)
        assert table(Experiment)[0].state == ExperimentState.SUCCEEDED


class TestWorkers:
    def test_greeting_and_parting(self, database: Database, table: Table) -> None:
        before = now()
        for cpus in (2.0, 4.0):
            write(database, leases.greet, "node-1", cpus, 0.5)
        write(database, leases.greet, "node-2", 1, 0)
        assert [(worker.name, worker.cpus, worker.gpus) for worker in table(Worker)] == [
            ("node-1", 4.0, 0.5),
            ("node-2", 1.0, 0.0),
        ]
        with database.read() as session:
            seen = store.last_worker_sign(session)
        assert seen is not None
        assert before <= seen <= now()
        for _ in range(2):
            write(database, leases.part, "node-1")
        assert [worker.name for worker in table(Worker)] == ["node-2"]

    def test_whether_it_has_bf16_is_known_from_the_first_greeting(self, database: Database, table: Table) -> None:
        for bf16 in (True, False, None):
            write(database, leases.greet, "node-1", 1, 0, bf16)
            assert table(Worker)[0].bf16 is bf16

    def test_what_waits_is_told_once_the_last_has_left(
        self, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        """One without a sign for a minute is not there, nor does what it had run."""
        submit()
        submit()
        claim()
        for name in ("leaving", "here", "silent"):
            write(database, leases.greet, name, 1, 0)

        def age(session: Session) -> None:
            session.get_one(Worker, "silent").seen_at = now() - timedelta(seconds=61)
            session.get_one(Worker, "here").seen_at = now() - timedelta(seconds=30)

        database.write(age)
        write(database, leases.part, "leaving")
        assert [experiment.waiting for experiment in table(Experiment)] == [None, None]
        write(database, leases.part, "here")
        assert [experiment.waiting for experiment in table(Experiment)] == ["no worker is there"] * 2
        write(database, leases.greet, "back", 1, 0)  # which may look at others for long
        assert [experiment.waiting for experiment in table(Experiment)] == [None, None]

    def test_one_that_was_killed_long_ago_is_forgotten(self, database: Database, table: Table) -> None:
        for name in ("killed", "quiet", "here"):
            write(database, leases.greet, name, 1, 0)

        def age(session: Session) -> None:
            session.get_one(Worker, "killed").seen_at = now() - timedelta(hours=25)
            session.get_one(Worker, "quiet").seen_at = now() - timedelta(hours=23)

        database.write(age)
        write(database, leases.greet, "here", 1, 0)
        assert [worker.name for worker in table(Worker)] == ["here", "quiet"]


class TestUnitOfWork:
    """What is written outside the block would not be scored, nor be sure of its fence: it is refused."""

    def test_nothing_is_written_after_the_block(
        self, submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make
    ) -> None:
        submit(seeds=1)
        lease = claim()
        trial_id = table(Trial)[0].id

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                held.start_trial(trial_id)
            held.finish_trial(trial_id, trial_result(), PROTOCOL)

        with pytest.raises(RuntimeError, match="unit of work is over"):
            database.write(work)
        assert table(Result) == []
        assert table(Trial)[0].state is TrialState.QUEUED

    def test_nor_after_a_block_that_failed(self, submit: Submit, claim: Claim, database: Database) -> None:
        submit(seeds=1)
        lease, kept = claim(), []

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                kept.append(held)
                raise KeyError

        with pytest.raises(KeyError):
            database.write(work)
        with pytest.raises(RuntimeError, match="unit of work is over"):
            _ = kept[0].experiment
