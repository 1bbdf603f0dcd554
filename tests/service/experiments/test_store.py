"""Experiments and trials as people see them, the same on SQLite and Postgres."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import JsonValue
from sqlalchemy import update
from sqlalchemy.orm import Session

from service.database import Artifact, Experiment, IdempotencyKey, Project, Trial, TrialState, now
from service.database.engine import Database
from service.errors import IdempotencyError, NotFoundError
from service.experiments import store, submission
from service.experiments.submission import Draft
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.specs.spec import ExperimentSpec
from tests.grids import plan_of
from tests.held import reported, write
from tests.machinery import Claim, Finish, Make, Submit, Table

SPEC = ExperimentSpec(
    name="two ranks",
    priority=3,
    base={"model": "small-cnn", "dataset": "digits", "layer": "tt", "constraint": "clip", "delta": 1.5},
    grid={"training.lr": [0.1, 1e-5], "rank": [8, None], "seed": [2**32 - 1, 0]},
    notes="ünïcode ✓",
)


class TestAnswerOnce:
    @staticmethod
    def ask(database: Database, key: str | None, body: JsonValue, answer: JsonValue) -> dict[str, JsonValue]:
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

    def test_old_ones_are_forgotten(self, database: Database, table: Table) -> None:
        for key in ("old", "new"):
            self.ask(database, key, {}, 1)
        long_ago = now() - store.KEPT_ANSWERS - timedelta(minutes=1)
        aged = update(IdempotencyKey).where(IdempotencyKey.key == "old").values(created_at=long_ago)
        database.write(lambda session: session.execute(aged))
        database.write(store.forget_answers)
        assert [row.key for row in table(IdempotencyKey)] == ["new"]

    def test_two_at_once_store_one(self, database: Database, table: Table) -> None:
        barrier = threading.Barrier(4)
        answers: list[dict[str, Any]] = []

        def post() -> None:
            plan = plan_of(SPEC)
            barrier.wait()

            def work(session: Session) -> dict[str, Any]:
                return store.answer_once(
                    session, "key", {}, lambda: {"id": submission.submit(session, Draft(SPEC, plan)).id}
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


class TestOne:
    @pytest.mark.parametrize("look", [store.get_experiment, store.get_trial, store.trial_detail, store.get_artifact])
    def test_what_is_not_there_is_said_so(self, database: Database, look: Callable[[Session, int], object]) -> None:
        with pytest.raises(NotFoundError, match=r"there is no (experiment|trial|artifact) 7"):
            write(database, look, 7)

    def test_other_projects_are_not_there(
        self, submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make
    ) -> None:
        submit(seeds=1)
        lease, trial_id = claim(), table(Trial)[0].id

        def work(session: Session) -> None:
            session.add_all([Project(id=1, name="mine"), Project(id=2, name="theirs")])
            session.flush()
            store.get_experiment(session, 1).project_id = 1
            with hold(session, lease) as held:
                held.start_trial(trial_id)
                files = [ArtifactFile("model", "model.bin", "0" * 64, 1)]
                held.finish_trial(trial_id, trial_result(), ProtocolRecord("p" * 64, {}), files)

        database.write(work)
        looks: list[tuple[Callable[..., Any], int]] = [
            (store.get_experiment, 1),
            (store.get_trial, trial_id),
            (store.trial_detail, trial_id),
            (store.get_artifact, table(Artifact)[0].id),
        ]
        with database.read() as session:
            for look, identity in looks:
                assert look(session, identity, project_id=1)
                with pytest.raises(NotFoundError, match=f"there is no .* {identity}"):
                    look(session, identity, project_id=2)

    def test_a_trial_with_everything(
        self, submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make
    ) -> None:
        submit(seeds=1)
        lease, trial_id = claim(), table(Trial)[0].id
        with database.read() as session:
            bare = store.trial_detail(session, trial_id)
        assert (bare.result, bare.protocol, bare.artifacts) == (None, None, [])

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                held.start_trial(trial_id)
                files = [ArtifactFile(kind, f"{kind}.bin", "0" * 64, 1) for kind in ("model", "log")]
                held.finish_trial(trial_id, trial_result(), ProtocolRecord("p" * 64, {"split": "test"}), files)

        database.write(work)
        with database.read() as session:
            found = store.trial_detail(session, trial_id)
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
            with hold(session, lease) as held:
                held.start_trial(ids[1])
                held.add_epoch(ids[1], reported(epoch_point(1, val_accuracy=0.875)))
                held.start_trial(ids[2])
                held.fail_trial(ids[2], "diverged", "NaN")

        database.write(work)
        with database.read() as session:
            found = store.progress(session, [first, second])
        counts = {state.value: count for state, count in found[first].trials.items() if count}
        assert counts == {"succeeded": 1, "running": 1, "diverged": 1, "queued": 1}
        assert set(found[first].trials) == set(TrialState)
        # Three epochs each: one trial is done with its own, one with its first; one ended before any.
        assert (found[first].epochs_done, found[first].epochs) == (3 + 1, 3 + 3 + 3)
        assert (found[first].best_accuracy, found[first].best_val_accuracy) == (0.75, 0.875)
        assert (found[second].epochs_done, found[second].epochs, found[second].best_accuracy) == (0, 3, None)

    def test_of_nothing(self, database: Database) -> None:
        with database.read() as session:
            assert store.progress(session, []) == {}


def test_artifacts_are_few_columns(table: Table) -> None:
    """The manifest knows no absolute path: only what lies in the data folder exists."""
    columns = {"id", "trial_id", "kind", "path", "sha256", "size", "removed_at"}
    assert {column.key for column in Artifact.__table__.columns} == columns
    assert table(Artifact) == []


@pytest.mark.parametrize(
    ("parts", "images"),
    [
        ({}, "held-out"),
        ({"base": {"training": {"validation": "test"}}}, "test"),
        ({"notes": "validation on the test images?"}, "held-out"),
        ({"grid": {"training.validation": ["test"]}}, "test"),
        # Neither the first trial nor the last one.
        ({"trials": [{"training": {"validation": images}} for images in ("held-out", "test", "held-out")]}, "both"),
    ],
)
def test_progress_says_on_which_images_any_trial_validates(
    database: Database, parts: dict[str, Any], images: str
) -> None:
    training: dict[str, Any] = parts.get("base", {})
    base = {"dataset": "digits", "model": "small-cnn"} | training
    trials = [one | {"seed": seed} for seed, one in enumerate(parts.get("trials", ()))]
    grid = {"training.lr": [0.1, 0.2]} | parts.get("grid", {})
    spec = ExperimentSpec.model_validate(
        {"name": "images", **parts, "base": base, **({"trials": trials} if trials else {"grid": grid})}
    )
    number = database.write(lambda session: submission.submit(session, Draft(spec, plan_of(spec))).id)
    with database.read() as session:
        found = store.progress(session, [number, number + 1])
    assert (found[number].validated_on, found[number + 1].validated_on) == (images, None)
