"""Experiments under any order of what workers and people do, stale leases among it: what must hold after each."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import (
    OPEN_EXPERIMENTS,
    OPEN_TRIALS,
    Base,
    EpochPoint,
    Event,
    Experiment,
    ExperimentState,
    Result,
    Trial,
    TrialState,
)
from service.database.engine import Database
from service.errors import LeaseLostError, StateError
from service.experiments import actions, drafts, store, submission
from service.experiments.submission import Draft
from service.queue import driver_reads, leases
from service.queue.contenders import give_up_unfit, say_why
from service.queue.leases import Lease, Watched
from service.queue.trials import MAX_DEATHS, HeldExperiment, ProtocolRecord, hold
from service.specs.grid import PlannedTrial, expand_grid
from service.specs.spec import Additions, ExperimentSpec
from tests.examples import examples
from tests.held import reported, under, unfinished_trials

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

BASE = {"dataset": "digits", "model": "small-cnn"}
ENDED_WELL = {TrialState.SUCCEEDED, TrialState.EARLY_STOPPED}
RETRIABLE = (TrialState.FAILED, TrialState.DIVERGED, TrialState.CANCELLED)
E = ExperimentState
ALLOWED: dict[str, set[ExperimentState]] = {
    "pause": {E.QUEUED, E.RUNNING, E.PAUSED},
    "resume": {E.QUEUED, E.RUNNING, E.PAUSED},
    "stop": {E.QUEUED, E.RUNNING, E.PAUSED, E.STOPPED},
    "cancel": {E.QUEUED, E.RUNNING, E.PAUSED, E.CANCELLED},
    "archive": {E.SUCCEEDED, E.STOPPED, E.FAILED, E.CANCELLED},
    "unarchive": set(E),
}
"""Where each action may be said, as its documentation has it."""
LEADS_TO: dict[str, set[ExperimentState]] = {
    "pause": {E.PAUSED},
    "resume": {E.QUEUED, E.RUNNING},
    "stop": {E.QUEUED, E.RUNNING, E.STOPPED},
    "cancel": {E.CANCELLED},
    "archive": {E.SUCCEEDED, E.STOPPED, E.FAILED, E.CANCELLED},
    "unarchive": set(E),
}

Rows = dict[int, dict[str, Any]]
positions = st.integers(0, 3)
places = st.integers(0, 5)


def planned(**fields: Any) -> PlannedTrial:
    """A trial as a searcher suggests it."""
    return expand_grid(ExperimentSpec(name="one", base=BASE | fields), max_trials=1).trials[0]


TABLES = list(reversed(Base.metadata.sorted_tables))


class QueueMachine(RuleBasedStateMachine):
    """Workers, reapers and people at one queue. Trials are named by their position in the lease's experiment."""

    leases: Bundle[Lease] = Bundle("leases")
    sights: Bundle[Watched] = Bundle("sights")

    database: Database

    def __init__(self) -> None:
        super().__init__()
        self.database.write(lambda session: [session.execute(table.delete()) for table in TABLES])
        self.experiments: Rows = {}
        self.trials: Rows = {}
        self.results: Rows = {}
        self.told: dict[int, int] = {}
        self.changed_by_people: set[int] = set()
        self.retried: set[int] = set()
        self.got_on: set[int] = set()
        self.interrupted: set[int] = set()

    def look(self) -> tuple[Rows, Rows, Rows, set[tuple[int, int]], dict[int, int]]:
        """All rows: experiments, trials, results; the keys of epoch points; events per experiment."""
        with self.database.read() as session:
            experiments, trials, results = (
                {
                    getattr(row, key): {c.key: getattr(row, c.key) for c in kind.__table__.columns}
                    for row in session.scalars(select(kind).order_by(getattr(kind, key)))
                }
                for kind, key in ((Experiment, "id"), (Trial, "id"), (Result, "trial_id"))
            )
            points = {(point.trial_id, point.epoch) for point in session.scalars(select(EpochPoint))}
            events = select(Event.experiment_id, func.count()).group_by(Event.experiment_id)
            told = {int(row[0] or 0): int(row[1]) for row in session.execute(events)}
        return experiments, trials, results, points, told

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

    def say(self, experiment_id: int, allowed: bool, action: Callable[[Session], Any]) -> bool:
        """What somebody does to an experiment: refused, and without effect, exactly where it is not allowed."""
        before = self.look()
        try:
            self.database.write(action)
        except StateError:
            assert not allowed
            assert self.look() == before
        else:
            assert allowed
            self.changed_by_people.add(experiment_id)
        return allowed

    def some(self, place: int) -> dict[str, Any]:
        """One of the experiments there are."""
        experiments = list(self.look()[0].values())
        return experiments[place % len(experiments)]

    def trial_of(self, lease: Lease, position: int) -> int:
        mine = [trial for trial, row in self.look()[1].items() if row["experiment_id"] == lease.experiment_id]
        return mine[position % len(mine)]

    @rule(seeds=st.integers(1, 3), priority=st.integers(-1, 1))
    def submit(self, seeds: int, priority: int) -> None:
        spec = ExperimentSpec(name="drawn", base=BASE, grid={"seed": list(range(seeds))}, priority=priority)
        self.database.write(lambda s: submission.submit(s, Draft(spec, expand_grid(spec, max_trials=9))))

    @rule(target=leases)
    def claim(self) -> Any:
        queued = [row for row in self.look()[0].values() if row["state"] == ExperimentState.QUEUED]
        queued.sort(key=lambda row: (-row["priority"], row["id"]))
        lease = self.database.write(lambda s: leases.claim(s, "worker", None))
        assert (lease.experiment_id if lease else None) == (queued[0]["id"] if queued else None)
        return multiple() if lease is None else lease

    @precondition(lambda self: self.experiments)
    @rule(target=leases, place=places)
    def claim_one(self, place: int) -> Any:
        row = self.some(place)
        lease = self.database.write(lambda s: leases.claim(s, "worker", None, row["id"]))
        assert lease == (Lease(row["id"], row["fence"] + 1) if row["state"] == ExperimentState.QUEUED else None)
        return multiple() if lease is None else lease

    @precondition(lambda self: self.experiments)
    @rule(place=places, unfit=st.booleans())
    def wait(self, place: int, unfit: bool) -> None:
        """A worker has no room for it."""
        row = self.some(place)
        self.database.write(lambda s: say_why(s, {row["id"]: "no room"}, {row["id"]} if unfit else ()))
        after = self.look()[0][row["id"]]
        if row["state"] in (ExperimentState.QUEUED, ExperimentState.RUNNING):
            assert after["waiting"] == "no room"
            assert (after["unfit_since"] is not None) == unfit
            assert not (unfit and row["unfit_since"]) or after["unfit_since"] == row["unfit_since"]
        else:
            assert after == row

    @precondition(lambda self: self.experiments)
    @rule(place=places)
    def give_up(self, place: int) -> None:
        row = self.some(place)
        before = self.look()
        mine = {i: t for i, t in before[1].items() if t["experiment_id"] == row["id"]}
        still_open = {i for i, trial in mine.items() if trial["state"] in OPEN_TRIALS}
        if row["state"] == ExperimentState.QUEUED and not still_open:
            return  # there is nothing to give up: workers complete it
        self.database.write(lambda s: give_up_unfit(s, row["id"], "worker", "never fitted"))
        after = self.look()
        if row["state"] != ExperimentState.QUEUED:
            assert after == before
            return
        assert (after[0][row["id"]]["state"], after[0][row["id"]]["error"]) == (E.FAILED, "never fitted")
        for trial_id in still_open:
            trial = after[1][trial_id]
            assert (trial["state"], trial["failure"]) == (TrialState.FAILED, "infrastructure")

    @rule(lease=leases)
    def renew(self, lease: Lease) -> None:
        self.write(lease, lambda s: leases.renew(s, lease))

    @rule(target=sights)
    def watch(self) -> Any:
        with self.database.read() as session:
            return multiple(*sorted(leases.watch(session), key=lambda seen: seen.experiment_id))

    @rule(seen=consumes(sights))
    def reap(self, seen: Watched) -> None:
        row = self.look()[0][seen.experiment_id]
        same = (row["fence"], row["heartbeat"], row["state"]) == (seen.fence, seen.heartbeat, ExperimentState.RUNNING)
        assert self.database.write(lambda s: leases.reap(s, seen)) == same

    @rule(lease=leases, drained=st.booleans())
    def release(self, lease: Lease, drained: bool) -> None:
        self.write(lease, lambda s: leases.release(s, lease, drained=drained))

    @rule(lease=leases, position=positions)
    def start(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, under(lease, HeldExperiment.start_trial, trial_id))

    @rule(lease=leases, position=positions, epoch=st.integers(1, 3))
    def epoch(self, lease: Lease, position: int, epoch: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, under(lease, HeldExperiment.add_epoch, trial_id, reported(POINT | {"epoch": epoch})))

    @rule(lease=leases, position=positions)
    def finish(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, under(lease, HeldExperiment.finish_trial, trial_id, RESULT, ProtocolRecord("p", {})))

    @rule(lease=leases, position=positions, failure=st.sampled_from(["oom", "diverged"]))
    def fail(self, lease: Lease, position: int, failure: str) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, under(lease, HeldExperiment.fail_trial, trial_id, failure, "no"))

    @rule(lease=leases, position=positions, charged=st.booleans())
    def lose(self, lease: Lease, position: int, charged: bool) -> None:
        trial_id = self.trial_of(lease, position)
        before = self.look()[1][trial_id]
        try:
            self.write(lease, under(lease, HeldExperiment.lose_trial, trial_id, "gone", charged=charged))
        finally:
            after = self.look()[1][trial_id]
        if (before["state"], after["state"]) == (TrialState.RUNNING, TrialState.QUEUED):
            assert after["deaths"] == before["deaths"] + charged
            assert after["attempts"] == before["attempts"] - (not charged)
        else:
            assert after["deaths"] <= before["deaths"] + 1

    @rule(lease=leases, position=positions, times=st.integers(1, MAX_DEATHS))
    def die(self, lease: Lease, position: int, times: int) -> None:
        """The trial kills its process again and again, which chance alone seldom does."""
        trial_id = self.trial_of(lease, position)

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                for _ in range(times):
                    held.start_trial(trial_id)
                    held.lose_trial(trial_id, "gone")

        before = self.look()[1][trial_id]
        self.write(lease, work)
        after = self.look()[1][trial_id]
        if before["state"] in OPEN_TRIALS and after != before:
            assert after["deaths"] == min(before["deaths"] + times, MAX_DEATHS)
            assert (after["state"] == TrialState.FAILED) == (after["deaths"] == MAX_DEATHS)
            if before["deaths"] + 1 < MAX_DEATHS:
                self.interrupted.add(trial_id)

    @rule(lease=leases, position=positions)
    def give_way(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        before = self.look()[1][trial_id]
        self.write(lease, under(lease, HeldExperiment.yield_trial, trial_id))
        after = self.look()[1][trial_id]
        assert after["deaths"] == before["deaths"]
        if after != before:
            assert (before["state"], after["state"]) == (TrialState.RUNNING, TrialState.QUEUED)
            assert after["attempts"] == before["attempts"] - 1

    @rule(lease=leases, position=positions)
    def place(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, under(lease, HeldExperiment.place_trial, trial_id, "node-1"))

    @rule(lease=leases, position=positions)
    def evaluate(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, under(lease, HeldExperiment.progress, trial_id))
        self.got_on.add(trial_id)

    @rule(lease=leases, taken=st.sets(positions))
    def next(self, lease: Lease, taken: set[int]) -> None:
        """What was interrupted comes before all that never began, each in the grid's order."""
        trials = self.look()[1]
        mine = [(i, trial) for i, trial in trials.items() if trial["experiment_id"] == lease.experiment_id]
        known = {mine[position][0] for position in taken if position < len(mine)}
        waiting = [
            (i not in self.interrupted, trial["number"], i)
            for i, trial in mine
            if trial["state"] == TrialState.QUEUED and i not in known
        ]
        expected = min(waiting)[2] if waiting else None
        self.write(lease, lambda s: self._is_next(driver_reads.next_trial(s, lease, known), expected))

    @staticmethod
    def _is_next(trial: Trial | None, expected: int | None) -> None:
        assert (trial.id if trial else None) == expected

    @rule(lease=leases)
    def complete(self, lease: Lease) -> None:
        self.write(lease, lambda s: leases.complete(s, lease))

    @rule(lease=leases)
    def run_all(self, lease: Lease) -> None:
        """Brings some experiments to their end, which chance alone seldom does."""

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                for trial in unfinished_trials(session, lease):
                    held.start_trial(trial.id)
                    held.finish_trial(trial.id, RESULT, ProtocolRecord("p", {}))
            assert leases.complete(session, lease)

        self.write(lease, work)

    @rule(lease=leases, position=positions)
    def stop_early(self, lease: Lease, position: int) -> None:
        trial_id = self.trial_of(lease, position)
        self.write(lease, under(lease, HeldExperiment.early_stop_trial, trial_id))

    @rule(lease=leases, seed=st.integers(0, 5))
    def search(self, lease: Lease, seed: int) -> None:
        self.write(lease, under(lease, HeldExperiment.add_trial, planned(seed=seed)))

    @precondition(lambda self: self.experiments)
    @rule(place=places, name=st.sampled_from(sorted(ALLOWED)))
    def action(self, place: int, name: str) -> None:
        row = self.some(place)
        action = getattr(actions, name)
        allowed = row["state"] in ALLOWED[name]
        if self.say(row["id"], allowed, lambda s: action(s, row["id"])):
            after = self.look()
            assert after[0][row["id"]]["state"] in LEADS_TO[name]
            assert self.say(row["id"], True, lambda s: action(s, row["id"]))
            assert self.look() == after  # said again it changes nothing

    @precondition(lambda self: self.experiments)
    @rule(place=places, states=st.sets(st.sampled_from(RETRIABLE), min_size=1))
    def retry(self, place: int, states: set[TrialState]) -> None:
        row = self.some(place)
        stopping = row["stopping"] and row["state"] in OPEN_EXPERIMENTS
        allowed = row["archived_at"] is None and not stopping
        trials = self.look()[1]
        asked = {i for i, t in trials.items() if t["experiment_id"] == row["id"] and t["state"] in states}
        if self.say(row["id"], allowed, lambda s: actions.retry(s, row["id"], states)) and asked:
            self.retried |= asked
            after = self.look()
            assert after[0][row["id"]]["state"] in OPEN_EXPERIMENTS
            assert {after[1][i]["state"] for i in asked} == {TrialState.QUEUED}

    @precondition(lambda self: self.experiments)
    @rule(place=places, seeds=st.sets(st.integers(0, 5), min_size=1, max_size=2))
    def extend(self, place: int, seeds: set[int]) -> None:
        row = self.some(place)
        stopping = row["stopping"] and row["state"] in OPEN_EXPERIMENTS
        reevaluation = any(
            trial["source_trial_id"] for trial in self.look()[1].values() if trial["experiment_id"] == row["id"]
        )
        allowed = not (stopping or row["archived_at"] or row["state"] == E.CANCELLED or reevaluation)
        more = Additions(grid={"seed": sorted(seeds)})

        def work(session: Session) -> None:
            drafted = drafts.draft_extension(session, row["id"], more, max_trials=99)
            submission.submit(session, drafted)

        self.say(row["id"], allowed, work)
        if allowed:
            mine = [trial for trial in self.look()[1].values() if trial["experiment_id"] == row["id"]]
            assert seeds <= {trial["seed"] for trial in mine}

    @precondition(lambda self: self.experiments)
    @rule(place=places)
    def clone(self, place: int) -> None:
        row = self.some(place)

        def work(session: Session) -> None:
            draft = drafts.draft_clone(session, row["id"], name=None, max_trials=99)
            submission.submit(session, draft)

        self.database.write(work)

    @precondition(lambda self: self.results)
    @rule(place=places)
    def reevaluate(self, place: int) -> None:
        row = self.some(place)
        trained = [
            trial
            for trial in self.look()[1].values()
            if trial["experiment_id"] == row["id"] and trial["state"] == TrialState.SUCCEEDED
        ]

        def work(session: Session) -> int:
            how = {"lipschitz": "fgsm"}
            draft = drafts.draft_reevaluation(session, row["id"], how, name=None, max_trials=99)
            return submission.submit(session, draft).id

        try:
            new = self.database.write(work)
        except StateError:
            assert not trained
            return
        mine = [trial for trial in self.look()[1].values() if trial["experiment_id"] == new]
        assert [trial["seed"] for trial in mine] == [trial["seed"] for trial in trained]
        assert {trial["source_trial_id"] for trial in mine} == {t["source_trial_id"] or t["id"] for t in trained}

    @invariant()
    def what_must_hold(self) -> None:
        experiments, trials, results, points, told = self.look()
        succeeded = {trial for trial, row in trials.items() if row["state"] == TrialState.SUCCEEDED}
        assert set(results) == succeeded
        assert {key: results[key] for key in self.results} == self.results
        for key, before in self.experiments.items():
            row = experiments[key]
            assert (row["fence"], row["heartbeat"]) >= (before["fence"], before["heartbeat"])
            if key not in self.changed_by_people:
                assert row["revision"] == before["revision"]
                if before["state"] not in OPEN_EXPERIMENTS:
                    assert row == before
            if row["state"] != before["state"] or row["revision"] != before["revision"]:
                assert told[key] > self.told[key]
        for key, before in self.trials.items():
            row = trials[key]
            if before["state"] not in OPEN_TRIALS and key not in self.retried:
                assert row == before
            if before["state"] == TrialState.QUEUED and row["state"] == TrialState.RUNNING:
                now, then = (rows[row["experiment_id"]] for rows in (experiments, self.experiments))
                # While it stops only what ran before begins again.
                assert not (now["stopping"] and then["stopping"]) or before["turn"] < 0
            assert row["epoch"] >= before["epoch"]
            assert row["run_seconds"] >= before["run_seconds"]
            if (before["state"], row["state"]) == (TrialState.RUNNING, TrialState.QUEUED):
                self.interrupted.add(key)
            if row["deaths"] < before["deaths"]:
                assert row["epoch"] > before["epoch"] or key in self.got_on | self.retried
            if row["attempts"] < before["attempts"]:
                began_again = before["state"] == TrialState.RUNNING and row["state"] == TrialState.QUEUED
                assert (began_again and row["attempts"] == before["attempts"] - 1) or key in self.retried
        with self.database.read() as session:
            progress = store.progress(session, list(experiments))
        for row in experiments.values():
            assert row["waiting"] is not None or row["unfit_since"] is None
            if row["state"] not in (ExperimentState.QUEUED, ExperimentState.RUNNING):
                assert (row["waiting"], row["unfit_since"]) == (None, None)
            assert (row["finished_at"] is None) == (row["state"] in OPEN_EXPERIMENTS)
            mine = [trial for trial in trials.values() if trial["experiment_id"] == row["id"]]
            states = {trial["state"] for trial in mine}
            assert len(mine) == row["trial_count"] <= row["grid_points"] + 6
            assert [trial["number"] for trial in mine] == list(range(len(mine)))
            counts = {state: sum(trial["state"] == state for trial in mine) for state in TrialState}
            assert progress[row["id"]].trials == counts
            if row["state"] != ExperimentState.RUNNING:
                assert TrialState.RUNNING not in states
                assert row["worker"] is None
            if row["state"] not in OPEN_EXPERIMENTS:
                assert states.isdisjoint(OPEN_TRIALS)
            if row["state"] == ExperimentState.SUCCEEDED:
                assert states <= ENDED_WELL
                assert row["error"] is None
            if row["state"] == ExperimentState.FAILED:
                assert not states <= ENDED_WELL
                assert row["error"]
            if row["state"] == ExperimentState.STOPPED:
                assert row["stopping"]
            if row["archived_at"]:
                assert row["state"] not in OPEN_EXPERIMENTS
        for row in trials.values():
            assert row["attempts"] >= (row["state"] in {TrialState.RUNNING, *ENDED_WELL})
            assert (row["finished_at"] is None) == (row["state"] in OPEN_TRIALS)
            assert row["epoch"] == max((epoch for trial, epoch in points if trial == row["id"]), default=0)
            assert 0 <= row["deaths"] <= min(row["attempts"], MAX_DEATHS)
            assert (row["failure"] == "crashed") == (row["deaths"] == MAX_DEATHS)
            assert row["turn"] == (-1 if row["id"] in self.interrupted else 0)
            assert row["node"] is None or row["attempts"] or row["id"] in self.interrupted | self.retried
            if row["state"] not in (TrialState.FAILED, TrialState.DIVERGED):
                assert row["failure"] is None
        self.experiments, self.trials, self.results, self.told = experiments, trials, results, told
        self.changed_by_people, self.retried, self.got_on = set(), set(), set()


def test_any_order_of_what_workers_and_people_do(database: Database) -> None:
    machine = type("Machine", (QueueMachine,), {"database": database})
    run_state_machine_as_test(
        machine,
        settings=examples(
            25,
            stateful_step_count=25,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        ),
    )
