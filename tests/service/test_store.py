"""Experiments and trials as people see them, the same on SQLite and Postgres."""

import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest
from sqlalchemy import delete
from sqlalchemy.orm import Session

from service import queue, store
from service.db import Database
from service.errors import IdempotencyError, NotFoundError
from service.grid import ExperimentSpec, Plan, expand_grid
from service.models import (
    Artifact,
    EpochPoint,
    Experiment,
    ExperimentState,
    IdempotencyKey,
    Result,
    Trial,
    TrialState,
)
from service.queue import ArtifactFile, Lease

Submit = Callable[..., int]
Claim = Callable[..., Lease]
Finish = Callable[..., None]
Table = Callable[[type], list[Any]]
Make = Callable[..., dict[str, Any]]

P = ParamSpec("P")
T = TypeVar("T")


def write(database: Database, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """One call in one transaction."""
    return database.write(lambda session: function(session, *args, **kwargs))


SPEC = ExperimentSpec(
    name="two ranks",
    priority=3,
    base={"model": "small-cnn", "dataset": "digits", "layer": "tt", "constraint": "clip", "delta": 1.5},
    grid={"training.lr": [0.1, 1e-5], "rank": [8, None], "seed": [2**32 - 1, 0]},
    notes="ünïcode ✓",
)


def plan_of(spec: ExperimentSpec) -> Plan:
    return expand_grid(spec, max_trials=10_000)


class TestCreate:
    def test_stores_spec_and_trials_as_they_are(self, database: Database, table: Table) -> None:
        plan = plan_of(SPEC)
        write(database, store.create_experiment, SPEC, plan)
        (experiment,) = table(Experiment)
        assert experiment.spec == SPEC.model_dump(mode="json")
        assert (experiment.name, experiment.priority, experiment.state) == ("two ranks", 3, ExperimentState.QUEUED)
        assert (experiment.grid_points, experiment.trial_count) == (8, 8)
        trials = table(Trial)
        assert [trial.number for trial in trials] == list(range(8))
        for trial, planned in zip(trials, plan.trials, strict=True):
            assert (trial.fingerprint, trial.cell) == (planned.fingerprint, planned.cell)
            assert trial.config == planned.config.to_dict()
            for name in ("dataset", "model", "layer", "rank", "lambda_ort", "constraint", "delta", "seed"):
                assert getattr(trial, name) == getattr(planned.config, name)
            assert trial.epochs == planned.config.training.epochs
            assert (trial.state, trial.attempts, trial.epoch) == (TrialState.QUEUED, 0, 0)

    def test_keeps_the_order_of_the_axes(self, database: Database, table: Table) -> None:
        """The last axis varies fastest: a spec posted again must give the same trials in the same order."""
        write(database, store.create_experiment, SPEC, plan_of(SPEC))
        (experiment,) = table(Experiment)
        assert list(experiment.spec["grid"]) == ["training.lr", "rank", "seed"]
        again = plan_of(ExperimentSpec.model_validate(experiment.spec))
        assert [planned.fingerprint for planned in again.trials] == [trial.fingerprint for trial in table(Trial)]

    def test_all_or_nothing(self, database: Database, table: Table) -> None:
        plan = plan_of(SPEC)
        doubled = Plan([*plan.trials, plan.trials[0]], plan.points + 1)
        with pytest.raises(Exception, match=r"(?i)unique"):
            write(database, store.create_experiment, SPEC, doubled)
        assert (table(Experiment), table(Trial)) == ([], [])

    def test_a_failure_after_the_insert_takes_it_back(self, database: Database, table: Table) -> None:
        def work(session: Session) -> None:
            def answer() -> dict[str, Any]:
                store.create_experiment(session, SPEC, plan_of(SPEC))
                raise RuntimeError("power cut")

            store.answer_once(session, "key", {}, answer)

        with pytest.raises(RuntimeError, match="power cut"):
            database.write(work)
        assert (table(Experiment), table(Trial), table(IdempotencyKey)) == ([], [], [])

    def test_ids_are_never_used_again(self, submit: Submit, database: Database) -> None:
        first = submit()
        database.write(lambda session: session.execute(delete(Experiment)))
        assert submit() > first

    def test_trials_go_with_their_experiment(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit()
        lease = claim()
        finish(lease, table(Trial)[0].id)
        database.write(lambda session: session.execute(delete(Experiment)))
        assert (table(Trial), table(Result)) == ([], [])


class TestAnswerOnce:
    @staticmethod
    def ask(database: Database, key: str | None, body: object, answer: object) -> dict[str, Any]:
        return write(database, store.answer_once, key, body, lambda: {"answer": answer})

    def test_same_key_and_body_get_the_first_answer(self, database: Database, table: Table) -> None:
        assert self.ask(database, "key", {"a": 1, "b": 2}, 1) == {"answer": 1}
        assert self.ask(database, "key", {"b": 2, "a": 1}, 2) == {"answer": 1}
        assert len(table(IdempotencyKey)) == 1

    def test_another_body_is_refused(self, database: Database) -> None:
        self.ask(database, "key", {"a": 1}, 1)
        with pytest.raises(IdempotencyError, match=r"Idempotency-Key 'key' was used before .* use a new key"):
            self.ask(database, "key", {"a": 2}, 2)

    def test_other_keys_and_no_key_are_asked_anew(self, database: Database, table: Table) -> None:
        answers = [self.ask(database, key, {}, n) for n, key in enumerate(("one", "two", None, None))]
        assert answers == [{"answer": n} for n in range(4)]
        assert [row.key for row in table(IdempotencyKey)] == ["one", "two"]

    def test_a_failed_request_does_not_use_up_its_key(self, database: Database) -> None:
        def fail() -> dict[str, Any]:
            raise RuntimeError

        with pytest.raises(RuntimeError):
            write(database, store.answer_once, "key", {}, fail)
        assert self.ask(database, "key", {}, 2) == {"answer": 2}

    def test_two_at_once_store_one(self, database: Database, table: Table) -> None:
        barrier = threading.Barrier(4)
        answers: list[dict[str, Any]] = []

        def post() -> None:
            plan = plan_of(SPEC)
            barrier.wait()

            def work(session: Session) -> dict[str, Any]:
                return store.answer_once(
                    session, "key", {}, lambda: {"id": store.create_experiment(session, SPEC, plan).id}
                )

            answers.append(database.write(work))

        threads = [threading.Thread(target=post) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (experiment,) = table(Experiment)
        assert answers == [{"id": experiment.id}] * 4
        assert len(table(Trial)) == 8


class TestLists:
    def test_experiments_newest_first_in_pages(self, submit: Submit, database: Database) -> None:
        ids = [submit(seeds=1) for _ in range(5)]
        with database.read() as session:
            first = store.list_experiments(session, limit=2)
            second = store.list_experiments(session, limit=2, after=first[-1].id)
            third = store.list_experiments(session, limit=2, after=second[-1].id)
        assert [e.id for page in (first, second, third) for e in page] == ids[::-1]

    def test_experiments_of_one_state(self, submit: Submit, claim: Claim, database: Database) -> None:
        ids = [submit(seeds=1) for _ in range(3)]
        claim()
        with database.read() as session:
            queued = store.list_experiments(session, limit=9, state=ExperimentState.QUEUED)
        assert [e.id for e in queued] == [ids[2], ids[1]]

    def test_trials_with_their_results(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        submit(seeds=1)
        other = submit(seeds=3)
        claim()
        lease = claim()
        trials = [trial for trial in table(Trial) if trial.experiment_id == other]
        finish(lease, trials[1].id, 0.5)
        with database.read() as session:
            found = store.list_trials(session, other, limit=10)
            rest = store.list_trials(session, other, limit=10, after=0)
            done = store.list_trials(session, other, limit=10, state=TrialState.SUCCEEDED)
        accuracies = [(trial.number, result and result.accuracy) for trial, result in found]
        assert accuracies == [
            (0, None),
            (1, 0.5),
            (2, None),
        ]
        assert [trial.number for trial, _ in rest] == [1, 2]
        assert [trial.id for trial, _ in done] == [trials[1].id]

    @pytest.mark.parametrize("look", [store.get_experiment, store.cancel_experiment, store.get_trial])
    def test_what_is_not_there_is_said_so(self, database: Database, look: Callable[[Session, int], object]) -> None:
        with pytest.raises(NotFoundError, match=r"there is no (experiment|trial) 7"):
            write(database, look, 7)

    def test_trials_of_no_experiment(self, database: Database) -> None:
        with database.read() as session, pytest.raises(NotFoundError, match="no experiment 7"):
            store.list_trials(session, 7, limit=1)

    def test_a_trial_with_everything(
        self, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make, trial_result: Make
    ) -> None:
        submit(seeds=1)
        lease, trial_id = claim(), table(Trial)[0].id
        with database.read() as session:
            bare = store.get_trial(session, trial_id)
        assert (bare.points, bare.result, bare.protocol, bare.artifacts) == ([], None, None, [])

        def work(session: Session) -> None:
            queue.start_trial(session, lease, trial_id)
            for epoch in (2, 1, 3):
                queue.add_epoch(session, lease, trial_id, epoch_point(epoch))
            files = [ArtifactFile(kind, f"{kind}.bin", "0" * 64, 1) for kind in ("model", "log")]
            queue.finish_trial(session, lease, trial_id, trial_result(), ("p" * 64, {"split": "test"}), files)

        database.write(work)
        with database.read() as session:
            found = store.get_trial(session, trial_id)
        assert [point.epoch for point in found.points] == [1, 2, 3]
        assert found.result is not None
        assert found.result.layers == trial_result()["layers"]
        assert found.protocol == {"split": "test"}
        assert [artifact.kind for artifact in found.artifacts] == ["log", "model"]


class TestProgress:
    def test_counts_every_state(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        finish: Finish,
        epoch_point: Make,
    ) -> None:
        first, second = submit(seeds=4), submit(seeds=1)
        lease = claim()
        ids = [trial.id for trial in table(Trial)]
        finish(lease, ids[0], 0.75)

        def work(session: Session) -> None:
            queue.start_trial(session, lease, ids[1])
            queue.add_epoch(session, lease, ids[1], epoch_point(1, val_accuracy=0.875))
            queue.start_trial(session, lease, ids[2])
            queue.fail_trial(session, lease, ids[2], "diverged", "NaN")

        database.write(work)
        with database.read() as session:
            found = store.progress(session, [first, second])
        counts = {state.value: count for state, count in found[first].trials.items() if count}
        assert counts == {"succeeded": 1, "running": 1, "diverged": 1, "queued": 1}
        assert set(found[first].trials) == set(TrialState)
        # Three epochs each: both final trials are done with theirs, the running one with its first.
        assert (found[first].epochs_done, found[first].epochs) == (3 + 3 + 1, 12)
        assert (found[first].best_accuracy, found[first].best_val_accuracy) == (0.75, 0.875)
        assert (found[second].epochs_done, found[second].epochs, found[second].best_accuracy) == (0, 3, None)

    def test_of_nothing(self, database: Database) -> None:
        with database.read() as session:
            assert store.progress(session, []) == {}


class TestCancel:
    def test_in_the_middle(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        finish: Finish,
        epoch_point: Make,
    ) -> None:
        experiment_id = submit(seeds=3)
        lease = claim()
        done, running, _ = table(Trial)
        finish(lease, done.id)
        write(database, queue.start_trial, lease, running.id)
        write(database, queue.add_epoch, lease, running.id, epoch_point())
        write(database, store.cancel_experiment, experiment_id)
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.fence) == (ExperimentState.CANCELLED, lease.fence + 1)
        assert experiment.finished_at is not None
        assert [trial.state.value for trial in table(Trial)] == ["succeeded", "cancelled", "cancelled"]
        assert all(trial.finished_at is not None for trial in table(Trial))
        assert (len(table(Result)), len(table(EpochPoint))) == (1, 1)
        assert write(database, queue.claim, "other", None) is None

    def test_again_changes_nothing(self, submit: Submit, claim: Claim, database: Database, table: Table) -> None:
        experiment_id = submit()
        claim()
        write(database, store.cancel_experiment, experiment_id)
        before = table(Experiment)[0]
        again = write(database, store.cancel_experiment, experiment_id)
        after = table(Experiment)[0]
        assert again.state == ExperimentState.CANCELLED
        assert (after.fence, after.finished_at) == (before.fence, before.finished_at)

    def test_too_late_changes_nothing(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        experiment_id = submit(seeds=1)
        lease = claim()
        finish(lease, table(Trial)[0].id)
        write(database, queue.complete, lease)
        fence = table(Experiment)[0].fence
        experiment = write(database, store.cancel_experiment, experiment_id)
        assert (experiment.state, experiment.fence) == (ExperimentState.SUCCEEDED, fence)
        assert [trial.state for trial in table(Trial)] == [TrialState.SUCCEEDED]

    def test_before_anyone_claimed(self, submit: Submit, database: Database, table: Table) -> None:
        experiment_id = submit(seeds=2)
        other = submit(seeds=2)
        write(database, store.cancel_experiment, experiment_id)
        assert [experiment.state.value for experiment in table(Experiment)] == ["cancelled", "queued"]
        states = [trial.state.value for trial in table(Trial) if trial.experiment_id == other]
        assert states == ["queued", "queued"]


def test_artifacts_are_few_columns(table: Table) -> None:
    """The manifest knows no absolute path: only what lies in the data folder exists."""
    assert {column.key for column in Artifact.__table__.columns} == {"id", "trial_id", "kind", "path", "sha256", "size"}
    assert table(Artifact) == []
