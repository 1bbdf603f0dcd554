"""The queue under any order of calls, stale leases among them: what must hold after each."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from sqlalchemy import select
from sqlalchemy.orm import Session

from service import queue, store
from service.db import Database
from service.errors import LeaseLostError
from service.grid import ExperimentSpec, expand_grid
from service.models import (
    OPEN_EXPERIMENTS,
    OPEN_TRIALS,
    Base,
    EpochPoint,
    Experiment,
    ExperimentState,
    Result,
    Trial,
    TrialState,
)
from service.queue import MAX_ATTEMPTS, MAX_FRUITLESS_CLAIMS, Lease, Watched

POINT = {
    "train_loss": 1.0,
    "train_accuracy": 0.5,
    "val_loss": 1.0,
    "val_accuracy": 0.5,
    "ort_loss": None,
    "lr": 0.1,
    "seconds": 1.0,
    "constraint_seconds": 0.0,
}
RESULT: dict[str, Any] = {
    "accuracy": 0.5,
    "loss": 1.0,
    "ece": 0.0,
    "max_singular_value": 1.0,
    "compression": 1.0,
    "parameters": 1,
    "multiply_accumulates": 1,
    "train_seconds": 1.0,
    "constraint_seconds": 0.0,
    "step_seconds": 0.0,
    "constraint_step_seconds": 0.0,
    "eval_seconds": 0.0,
    "spectrum_seconds": 0.0,
    "latency_seconds": 0.0,
    "batch_seconds": 0.0,
    "peak_memory": None,
    "selected_epoch": 1,
    "layers": [],
    "environment": {},
}

positions = st.integers(0, 3)


class QueueMachine(RuleBasedStateMachine):
    """Workers, reapers and people at one queue. Trials are named by their position in the lease's experiment."""

    leases: Bundle[Lease] = Bundle("leases")
    sights: Bundle[Watched] = Bundle("sights")

    def __init__(self) -> None:
        super().__init__()
        self.database = Database("sqlite://")
        with self.database.writer.begin() as connection:
            Base.metadata.create_all(connection)
        self.experiments: dict[int, dict[str, Any]] = {}
        self.trials: dict[int, dict[str, Any]] = {}

    def teardown(self) -> None:
        self.database.close()

    def look(self) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]], list[int], set[tuple[int, int]]]:
        """All rows: experiments, trials, the trials of results, the keys of epoch points."""
        with self.database.read() as session:
            experiments, trials = (
                {row.id: {c.key: getattr(row, c.key) for c in kind.__table__.columns} for row in session.scalars(rows)}
                for kind, rows in ((Experiment, select(Experiment)), (Trial, select(Trial)))
            )
            results = list(session.scalars(select(Result.trial_id)))
            points = {(point.trial_id, point.epoch) for point in session.scalars(select(EpochPoint))}
        return experiments, trials, results, points

    def write(self, lease: Lease, work: Callable[[Session], object]) -> None:
        """A write under a lease: refused, and without effect, exactly when the lease is stale."""
        before = self.look()
        held = before[0][lease.experiment_id]
        stale = held["fence"] != lease.fence or held["state"] != ExperimentState.RUNNING
        try:
            self.database.write(work)
        except LeaseLostError:
            assert stale
            assert self.look() == before
        else:
            assert not stale

    def trial_of(self, lease: Lease, position: int) -> int:
        mine = [trial for trial, row in self.look()[1].items() if row["experiment_id"] == lease.experiment_id]
        return mine[position % len(mine)]

    @rule(seeds=st.integers(1, 3), priority=st.integers(-1, 1))
    def submit(self, seeds: int, priority: int) -> None:
        base = {"dataset": "digits", "model": "small-cnn"}
        spec = ExperimentSpec(name="drawn", base=base, grid={"seed": list(range(seeds))}, priority=priority)
        self.database.write(lambda s: store.create_experiment(s, spec, expand_grid(spec, max_trials=9)))

    @rule(target=leases)
    def claim(self) -> Any:
        queued = [row for row in self.look()[0].values() if row["state"] == ExperimentState.QUEUED]
        queued.sort(key=lambda row: (-row["priority"], row["id"]))
        runnable = [row["id"] for row in queued if row["fruitless_claims"] < MAX_FRUITLESS_CLAIMS]
        lease = self.database.write(lambda s: queue.claim(s, "worker", None))
        assert (lease.experiment_id if lease else None) == (runnable[0] if runnable else None)
        return multiple() if lease is None else lease

    @rule(lease=leases)
    def renew(self, lease: Lease) -> None:
        self.write(lease, lambda s: queue.renew(s, lease))

    @rule(target=sights)
    def watch(self) -> Any:
        with self.database.read() as session:
            return multiple(*queue.watch(session))

    @rule(seen=consumes(sights))
    def reap(self, seen: Watched) -> None:
        row = self.look()[0][seen.experiment_id]
        same = (row["fence"], row["heartbeat"], row["state"]) == (seen.fence, seen.heartbeat, ExperimentState.RUNNING)
        assert self.database.write(lambda s: queue.reap(s, seen)) == same

    @rule(lease=leases, drained=st.booleans())
    def release(self, lease: Lease, drained: bool) -> None:
        self.write(lease, lambda s: queue.release(s, lease, drained=drained))

    @rule(lease=leases, position=positions)
    def start(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, lambda s: queue.start_trial(s, lease, trial_id))

    @rule(lease=leases, position=positions, epoch=st.integers(1, 3))
    def epoch(self, lease: Lease, position: int, epoch: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, lambda s: queue.add_epoch(s, lease, trial_id, POINT | {"epoch": epoch}))

    @rule(lease=leases, position=positions)
    def finish(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, lambda s: queue.finish_trial(s, lease, trial_id, RESULT, ("p", {})))

    @rule(lease=leases, position=positions, failure=st.sampled_from(["oom", "diverged"]))
    def fail(self, lease: Lease, position: int, failure: str) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, lambda s: queue.fail_trial(s, lease, trial_id, failure, "no"))

    @rule(lease=leases, position=positions)
    def lose(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, lambda s: queue.lose_trial(s, lease, trial_id, "gone"))

    @rule(lease=leases)
    def complete(self, lease: Lease) -> None:
        self.write(lease, lambda s: queue.complete(s, lease))

    @rule(lease=leases)
    def run_all(self, lease: Lease) -> None:
        """Brings some experiments to their end, which chance alone seldom does."""

        def work(session: Session) -> None:
            for trial in queue.unfinished_trials(session, lease):
                queue.start_trial(session, lease, trial.id)
                queue.finish_trial(session, lease, trial.id, RESULT, ("p", {}))
            assert queue.complete(session, lease)

        self.write(lease, work)

    @rule(lease=leases)
    def cancel(self, lease: Lease) -> None:
        self.database.write(lambda s: store.cancel_experiment(s, lease.experiment_id))

    @invariant()
    def what_must_hold(self) -> None:
        experiments, trials, results, points = self.look()
        succeeded = {trial for trial, row in trials.items() if row["state"] == TrialState.SUCCEEDED}
        assert sorted(results) == sorted(succeeded)
        for key, before in self.experiments.items():
            row = experiments[key]
            assert row["fence"] >= before["fence"]
            assert row["heartbeat"] >= before["heartbeat"]
            if before["state"] not in OPEN_EXPERIMENTS:
                assert row == before
        for key, before in self.trials.items():
            if before["state"] not in OPEN_TRIALS:
                assert trials[key] == before
            assert trials[key]["epoch"] >= before["epoch"]
        for row in experiments.values():
            assert 0 <= row["fruitless_claims"] <= MAX_FRUITLESS_CLAIMS
            assert (row["finished_at"] is None) == (row["state"] in OPEN_EXPERIMENTS)
            mine = [trial for trial in trials.values() if trial["experiment_id"] == row["id"]]
            states = {trial["state"] for trial in mine}
            if row["state"] != ExperimentState.RUNNING:
                assert TrialState.RUNNING not in states
            if row["state"] not in OPEN_EXPERIMENTS:
                assert states.isdisjoint(OPEN_TRIALS)
            if row["state"] == ExperimentState.SUCCEEDED:
                assert states == {TrialState.SUCCEEDED}
                assert row["error"] is None
            if row["state"] == ExperimentState.FAILED:
                assert states != {TrialState.SUCCEEDED}
                assert row["error"]
            if row["state"] == ExperimentState.QUEUED:
                assert row["worker"] is None
        for row in trials.values():
            assert row["attempts"] >= (row["state"] in (TrialState.RUNNING, TrialState.SUCCEEDED))
            assert (row["finished_at"] is None) == (row["state"] in OPEN_TRIALS)
            assert row["epoch"] == max((epoch for trial, epoch in points if trial == row["id"]), default=0)
            if row["failure"] == "crashed":
                assert row["attempts"] >= MAX_ATTEMPTS
        self.experiments, self.trials = experiments, trials


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
