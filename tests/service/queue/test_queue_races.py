"""Two at the queue at once: every interleaving that matters, and a crowd."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from service.database import (
    OPEN_EXPERIMENTS,
    Experiment,
    ExperimentState,
    Result,
    Score,
    ScoreRank,
    Tag,
    Trial,
    TrialState,
)
from service.database.engine import Database
from service.errors import LeaseLostError, StateError
from service.experiments import actions, store, submission
from service.experiments.submission import Draft
from service.leaderboards.metrics import Metric
from service.leaderboards.score_ranks import standing_of
from service.queue import leases
from service.queue.contenders import give_up_unfit, say_why
from service.queue.leases import Lease, Watched
from service.queue.trials import HeldExperiment, ProtocolRecord, hold
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.fresh import FRESH
from tests.held import under
from tests.machinery import BASE, Claim, Finish, Make, Submit, Table
from tests.service.queue import crowd

Work = Callable[[Session], Any]


def overlap(url: str, first: Work, second: Work, *, order: list[str] | None = None) -> tuple[object, object]:
    """Runs `second` while `first` has written but not committed. What each returned, or raised.

    `order` receives their names as they end.
    """
    written, asked, ended, outcomes = threading.Event(), threading.Event(), threading.Event(), dict[str, object]()
    databases = Database(url), Database(url)

    def attempt(database: Database, name: str, work: Work) -> None:
        try:
            outcomes[name] = database.write(work)
        except Exception as error:
            outcomes[name] = error
        if order is not None:
            order.append(name)

    def slow(session: Session) -> object:
        found = first(session)
        session.flush()
        written.set()
        assert asked.wait(60)
        if url.startswith("sqlite"):  # nothing tells who waits for its file
            ended.wait(0.05)
        else:
            last = time.monotonic() + 60
            while not (ended.wait(0.005) or session.scalar(text(WAITING))):
                assert time.monotonic() < last
        return found

    with contextlib.closing(databases[0]), contextlib.closing(databases[1]):
        with databases[1].engine.connect() as connection:  # it is to write at once
            connection.exec_driver_sql("SELECT 1")
        one = threading.Thread(target=attempt, args=(databases[0], "first", slow))
        one.start()
        assert written.wait(60)
        asked.set()
        attempt(databases[1], "second", second)
        ended.set()
        one.join()
    return outcomes["first"], outcomes["second"]


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))"
"""How many wait for a lock of whoever asks."""


class TestTwo:
    @pytest.fixture
    def seen(self, submit: Submit, claim: Claim, database: Database, table: Table) -> Watched:
        """A running experiment with one running trial."""
        submit(seeds=2)
        lease = claim()
        database.write(under(lease, HeldExperiment.start_trial, table(Trial)[0].id))
        with database.read() as session:
            (seen,) = leases.watch(session)
        return seen

    @pytest.fixture
    def lease(self, seen: Watched) -> Lease:
        return Lease(seen.experiment_id, seen.fence)

    def test_claim_then_cancel(self, submit: Submit, database_url: str, table: Table) -> None:
        experiment_id = submit()
        lease, _ = overlap(
            database_url,
            lambda session: leases.claim(session, "worker", None),
            lambda session: actions.cancel(session, experiment_id).state,
        )
        assert lease == Lease(experiment_id, 1)
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.fence) == (ExperimentState.CANCELLED, 2)
        assert {trial.state for trial in table(Trial)} == {TrialState.CANCELLED}

    def test_cancel_then_claim(self, submit: Submit, database_url: str, table: Table) -> None:
        experiment_id = submit()
        _, lease = overlap(
            database_url,
            lambda session: actions.cancel(session, experiment_id).state,
            lambda session: leases.claim(session, "worker", None),
        )
        assert lease is None
        assert table(Experiment)[0].state == ExperimentState.CANCELLED

    def test_two_claims_of_one(self, submit: Submit, database_url: str) -> None:
        experiment_id = submit()
        found = overlap(database_url, *[lambda session: leases.claim(session, "worker", None)] * 2)
        assert found == (Lease(experiment_id, 1), None)

    def test_two_claims_of_that_one(self, submit: Submit, database_url: str) -> None:
        submit()
        experiment_id = submit()
        found = overlap(database_url, *[lambda session: leases.claim(session, "worker", None, experiment_id)] * 2)
        assert found == (Lease(experiment_id, 1), None)

    @pytest.mark.parametrize("asked_for", [True, False])
    def test_a_row_that_refers_to_it_hides_no_experiment(
        self, submit: Submit, database_url: str, asked_for: bool
    ) -> None:
        """Whoever inserts one holds a lock on the experiment's key, until its transaction ends."""
        first, _ = submit(), submit()
        _, lease = overlap(
            database_url,
            lambda session: session.add(Tag(experiment_id=first, name="x")),
            lambda session: leases.claim(session, "worker", None, first if asked_for else None),
        )
        assert lease == Lease(first, 1)

    def test_claims_of_different_ones_do_not_wait_for_each_other(self, submit: Submit, database_url: str) -> None:
        """On Postgres; and neither gives way to another experiment than the one it was asked for."""
        first, second = submit(), submit()
        order = list[str]()
        found = overlap(
            database_url,
            lambda session: leases.claim(session, "one", None, second),
            lambda session: leases.claim(session, "two", None, first),
            order=order,
        )
        assert found == (Lease(second, 1), Lease(first, 1))
        assert order == (["first", "second"] if database_url.startswith("sqlite") else ["second", "first"])

    @pytest.mark.parametrize("claimed_first", [True, False])
    def test_claim_and_giving_up(
        self, submit: Submit, database_url: str, database: Database, table: Table, claimed_first: bool
    ) -> None:
        """A worker with larger nodes takes what another gives up: whoever is first."""
        experiment_id = submit(seeds=2)
        database.write(lambda session: say_why(session, {experiment_id: "needs 9"}, {experiment_id}))
        works: list[Work] = [
            lambda session: leases.claim(session, "large", None, experiment_id),
            lambda session: give_up_unfit(session, experiment_id, "small", "never fitted"),
        ]
        found = overlap(database_url, *(works if claimed_first else works[::-1]))
        (experiment,) = table(Experiment)
        states = {trial.state for trial in table(Trial)}
        if claimed_first:
            assert found == (Lease(experiment_id, 1), None)
            assert (experiment.state, states) == (ExperimentState.RUNNING, {TrialState.QUEUED})
        else:
            assert found == (None, None)
            assert (experiment.state, states) == (ExperimentState.FAILED, {TrialState.FAILED})
        assert (experiment.waiting, experiment.unfit_since) == (None, None)

    def test_claim_then_saying_why(self, submit: Submit, database_url: str, table: Table) -> None:
        """Words are no more than words: they change nobody's lease."""
        experiment_id = submit()
        lease, _ = overlap(
            database_url,
            lambda session: leases.claim(session, "worker", None, experiment_id),
            lambda session: say_why(session, {experiment_id: "others come first"}, ()),
        )
        assert lease == Lease(experiment_id, 1)
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.fence, experiment.worker) == (ExperimentState.RUNNING, 1, "worker")

    def test_yield_then_reap(self, seen: Watched, lease: Lease, database_url: str, table: Table, claim: Claim) -> None:
        trial_id = table(Trial)[0].id
        _, reaped = overlap(
            database_url,
            under(lease, HeldExperiment.yield_trial, trial_id),
            lambda session: leases.reap(session, seen),
        )
        assert reaped is True
        assert [(trial.state, trial.attempts, trial.turn) for trial in table(Trial)] == [
            (TrialState.QUEUED, 0, -1),
            (TrialState.QUEUED, 0, 0),
        ]

    def test_two_claims_of_two(self, submit: Submit, database_url: str) -> None:
        """On Postgres the second does not wait for the first."""
        ids, order = [submit(), submit()], list[str]()
        found = overlap(database_url, *[lambda session: leases.claim(session, "worker", None)] * 2, order=order)
        assert found == (Lease(ids[0], 1), Lease(ids[1], 1))
        assert order == (["first", "second"] if database_url.startswith("sqlite") else ["second", "first"])

    def test_renew_then_reap(self, seen: Watched, lease: Lease, database_url: str, database: Database) -> None:
        _, reaped = overlap(
            database_url, lambda session: leases.renew(session, lease), lambda session: leases.reap(session, seen)
        )
        assert reaped is False
        with database.read() as session:
            assert leases.is_held(session, lease)

    def test_reap_then_renew(self, seen: Watched, lease: Lease, database_url: str) -> None:
        reaped, renewed = overlap(
            database_url, lambda session: leases.reap(session, seen), lambda session: leases.renew(session, lease)
        )
        assert reaped is True
        assert isinstance(renewed, LeaseLostError)

    def test_two_reapers(self, seen: Watched, database_url: str, table: Table) -> None:
        found = overlap(database_url, *[lambda session: leases.reap(session, seen)] * 2)
        assert found == (True, False)
        assert table(Experiment)[0].fence == seen.fence + 1

    @pytest.mark.parametrize("end", ["reap", "cancel", "release"])
    def test_a_result_that_comes_too_late(
        self, seen: Watched, lease: Lease, database_url: str, table: Table, trial_result: Make, end: str
    ) -> None:
        ends: dict[str, Work] = {
            "reap": lambda session: leases.reap(session, seen),
            "cancel": lambda session: actions.cancel(session, seen.experiment_id).id,
            "release": lambda session: leases.release(session, lease, drained=False),
        }
        trial_id = table(Trial)[0].id
        _, finished = overlap(
            database_url,
            ends[end],
            under(lease, HeldExperiment.finish_trial, trial_id, trial_result(), ProtocolRecord("p" * 64, {})),
        )
        assert isinstance(finished, LeaseLostError)
        assert table(Result) == []
        expected = TrialState.CANCELLED if end == "cancel" else TrialState.QUEUED
        assert table(Trial)[0].state == expected

    @pytest.mark.parametrize("end", ["reap", "cancel"])
    def test_a_result_that_comes_just_in_time(
        self, seen: Watched, lease: Lease, database_url: str, table: Table, trial_result: Make, end: str
    ) -> None:
        ends: dict[str, Work] = {
            "reap": lambda session: leases.reap(session, seen),
            "cancel": lambda session: actions.cancel(session, seen.experiment_id).id,
        }
        trial_id = table(Trial)[0].id
        overlap(
            database_url,
            under(lease, HeldExperiment.finish_trial, trial_id, trial_result(), ProtocolRecord("p" * 64, {})),
            ends[end],
        )
        assert [result.trial_id for result in table(Result)] == [trial_id]
        assert table(Trial)[0].state == TrialState.SUCCEEDED
        assert table(Experiment)[0].fence == seen.fence + 1

    def test_complete_then_cancel(
        self, seen: Watched, lease: Lease, database_url: str, table: Table, finish: Finish
    ) -> None:
        for trial in table(Trial):
            finish(lease, trial.id)
        completed, state = overlap(
            database_url,
            lambda session: leases.complete(session, lease),
            lambda session: actions.cancel(session, seen.experiment_id).state,
        )
        assert completed is True
        assert isinstance(state, StateError)
        assert table(Experiment)[0].state == ExperimentState.SUCCEEDED

    def test_pause_then_finish(
        self, seen: Watched, lease: Lease, database_url: str, table: Table, trial_result: Make
    ) -> None:
        trial_id = table(Trial)[0].id
        _, finished = overlap(
            database_url,
            lambda session: actions.pause(session, seen.experiment_id).state,
            under(lease, HeldExperiment.finish_trial, trial_id, trial_result(), ProtocolRecord("p" * 64, {})),
        )
        assert isinstance(finished, LeaseLostError)
        assert (table(Result), table(Experiment)[0].state) == ([], ExperimentState.PAUSED)
        assert {trial.state for trial in table(Trial)} == {TrialState.QUEUED}

    def test_start_then_stop(self, seen: Watched, lease: Lease, database_url: str, table: Table) -> None:
        """What began just before still finishes."""
        waiting = table(Trial)[1].id
        started, _ = overlap(
            database_url,
            under(lease, HeldExperiment.start_trial, waiting),
            lambda session: actions.stop(session, seen.experiment_id).state,
        )
        assert started is True
        assert table(Trial)[1].state == TrialState.RUNNING
        assert table(Experiment)[0].state == ExperimentState.RUNNING

    def test_stop_then_start(self, seen: Watched, lease: Lease, database_url: str, table: Table) -> None:
        waiting = table(Trial)[1].id
        _, started = overlap(
            database_url,
            lambda session: actions.stop(session, seen.experiment_id).state,
            under(lease, HeldExperiment.start_trial, waiting),
        )
        assert started is False
        assert table(Trial)[1].state == TrialState.CANCELLED

    @pytest.mark.parametrize("complete_first", [True, False])
    def test_retry_and_complete(
        self, seen: Watched, lease: Lease, database: Database, database_url: str, table: Table, complete_first: bool
    ) -> None:
        """Whoever is first: the failed trials wait again, and nobody takes the experiment for finished."""

        def fail(session: Session) -> None:
            with hold(session, lease) as held:
                for trial in table(Trial):
                    held.start_trial(trial.id)
                    held.fail_trial(trial.id, "oom", "too big")

        database.write(fail)
        works: list[Work] = [
            lambda session: leases.complete(session, lease),
            lambda session: actions.retry(session, seen.experiment_id).state,
        ]
        overlap(database_url, *(works if complete_first else works[::-1]))
        (experiment,) = table(Experiment)
        assert experiment.state == (ExperimentState.QUEUED if complete_first else ExperimentState.RUNNING)
        assert (experiment.error, experiment.finished_at) == (None, None)
        assert {trial.state for trial in table(Trial)} == {TrialState.QUEUED}

    def test_cancel_then_complete(
        self, seen: Watched, lease: Lease, database_url: str, table: Table, finish: Finish
    ) -> None:
        for trial in table(Trial):
            finish(lease, trial.id)
        _, completed = overlap(
            database_url,
            lambda session: actions.cancel(session, seen.experiment_id).state,
            lambda session: leases.complete(session, lease),
        )
        assert isinstance(completed, LeaseLostError)
        assert table(Experiment)[0].state == ExperimentState.CANCELLED
        assert len(table(Result)) == 2

    def test_the_same_result_twice_at_once(
        self, lease: Lease, database_url: str, table: Table, trial_result: Make
    ) -> None:
        """A worker that gave up waiting for COMMIT sends it again while the first is still on its way."""
        trial_id = table(Trial)[0].id

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                held.finish_trial(trial_id, trial_result(), ProtocolRecord("p" * 64, {}))

        assert overlap(database_url, work, work) == (None, None)
        assert len(table(Result)) == 1

    @pytest.mark.parametrize("post_first", [True, False])
    def test_a_cells_first_result_and_further_seeds_of_it(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        database_url: str,
        table: Table,
        trial_result: Make,
        post_first: bool,
    ) -> None:
        """Whoever is second sees what the first one wrote."""
        submit(seeds=1)
        lease, trial_id = claim(), table(Trial)[0].id
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        finish = under(lease, HeldExperiment.finish_trial, trial_id, trial_result(), ProtocolRecord("p" * 64, {}))
        spec = ExperimentSpec(name="more", base=BASE, grid={"seed": [0, 1, 2]})
        draft = Draft(spec, expand_grid(spec, max_trials=3))

        def post(session: Session) -> None:
            submission.submit(session, draft)

        assert overlap(database_url, *((post, finish) if post_first else (finish, post))) == (None, None)
        assert [(score.seeds, score.trials) for score in table(Score)] == [(1, 3)]
        standing = next(rank.standing for rank in table(ScoreRank) if rank.metric == "accuracy")
        assert standing == standing_of(Metric("accuracy"), complete=False)


class TestCrowd:
    @pytest.mark.parametrize("by_id", [False, True])
    def test_claimers_never_share(self, submit: Submit, database_url: str, table: Table, by_id: bool) -> None:
        ids = [submit(seeds=1, priority=n % 3) for n in range(20)]
        claimed: list[list[int]] = [[] for _ in range(5)]
        errors: list[BaseException] = []
        barrier = threading.Barrier(len(claimed))

        def run(mine: list[int]) -> None:
            database = Database(database_url)
            barrier.wait()
            try:
                wanted = iter(ids) if by_id else repeat(None)
                for number in wanted:
                    take = partial(leases.claim, worker="worker", process=None, experiment_id=number)
                    if (lease := database.write(take)) is not None:
                        mine.append(lease.experiment_id)
                    elif not by_id:
                        break
            except BaseException as error:
                errors.append(error)
            database.close()

        threads = [threading.Thread(target=run, args=(mine,)) for mine in claimed]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert sorted(one for mine in claimed for one in mine) == ids
        assert {experiment.fence for experiment in table(Experiment)} == {1}

    @pytest.mark.slow
    def test_nothing_is_lost_or_doubled(
        self,
        submit: Submit,
        database: Database,
        database_url: str,
        table: Table,
        epoch_point: Make,
        trial_result: Make,
    ) -> None:
        """Worker processes at work, while one thread reads, one takes experiments away and one cancels some."""
        ids = [submit(seeds=3) for _ in range(16)]
        pool = ProcessPoolExecutor(3, mp_context=FRESH)
        work_as = partial(crowd.work, database_url, point=epoch_point(), result=trial_result())
        workers = [pool.submit(work_as, f"worker-{n}") for n in range(3)]
        stop, errors, reads = threading.Event(), list[BaseException](), list[int]()

        def again(pause: float, work: Callable[[], object]) -> threading.Thread:
            def run() -> None:
                try:
                    while not stop.wait(pause):
                        work()
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def read() -> None:
            with database.read() as session:
                found = store.progress(session, ids)
                succeeded = sum(progress.trials[TrialState.SUCCEEDED] for progress in found.values())
                scored = session.scalars(select(Score.seeds)).all()
                reads.append(succeeded)
                with_results = session.scalar(select(func.count()).select_from(Result))
            assert with_results == succeeded  # one moment
            assert (sum(scored) > 0) == (succeeded > 0)

        def reap() -> None:
            with database.read() as session:
                seen = leases.watch(session)
            if seen:
                database.write(lambda session: leases.reap(session, seen[0]))

        cancelled = iter(ids[::5])

        def cancel() -> None:
            if (experiment_id := next(cancelled, None)) is not None:
                with contextlib.suppress(StateError):  # it was finished already
                    database.write(lambda session: actions.cancel(session, experiment_id))

        threads = [again(0.005, read), again(0.15, reap), again(0.3, cancel)]
        reports = [worker.result(timeout=120) for worker in workers]
        stop.set()
        for thread in threads:
            thread.join()
        assert errors == []
        # What was taken from the last worker at its end.
        reports.append(pool.submit(work_as, "last").result(timeout=120))
        pool.shutdown()
        assert len({report.process for report in reports[:3]}) == 3

        assert all(experiment.state not in OPEN_EXPERIMENTS for experiment in table(Experiment))
        finished = [trial_id for report in reports for trial_id in report.finished]
        results = [result.trial_id for result in table(Result)]
        assert sorted(finished) == sorted(results)
        assert [trial.id for trial in table(Trial) if trial.state == TrialState.SUCCEEDED] == results
        assert reads == sorted(reads)
        assert sum(report.claims for report in reports) >= len(ids) - len(ids[::5])
        fences = {experiment.id: experiment.fence for experiment in table(Experiment)}
        owner = {trial.id: trial.experiment_id for trial in table(Trial)}
        assert all(result.fence <= fences[owner[result.trial_id]] for result in table(Result))
