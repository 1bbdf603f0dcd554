"""Deleted experiments: refused, out of sight at once, gone with their files whoever is killed on the way."""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import JsonValue
from sqlalchemy import func, select, update
from typer.testing import CliRunner

from service.access import keys
from service.access.security import ANYONE, Principal, Scope
from service.database import (
    Artifact,
    EpochPoint,
    Event,
    Experiment,
    IdempotencyKey,
    Project,
    Result,
    Score,
    Tag,
    Tally,
    Trial,
    TrialState,
    WebhookDelivery,
    now,
)
from service.database.engine import Database
from service.errors import NotFoundError, StateError
from service.experiments import actions, store, webhooks
from service.experiments.drafts import draft_reevaluation
from service.experiments.events import EventKind, list_events
from service.experiments.listing import ExperimentFilter, TrialFilter, list_experiments, list_trials
from service.experiments.submission import submit
from service.queue.census import take_census
from service.queue.leases import Lease
from service.queue.trials import HeldExperiment
from service.settings import Settings
from service.upkeep import deletion, home
from service.upkeep.deletion import mark, preview, remove_marked
from service.upkeep.files import DataFolder
from tests.held import under
from tests.migrations.statements import Installation
from tests.service.upkeep.conftest import write_artifacts
from workers.cli.__main__ import app

FIRST, SECOND, EVALUATING = 1, 2, 3
"""The experiments of `Installation`: cancelled with two results, stopped with none, one that evaluates the first."""


@pytest.fixture
def folder(source: Settings) -> DataFolder:
    return DataFolder(source.data_dir)


def delete(database: Database, experiment_id: int, **how: Any) -> deletion.Deletion:
    return database.write(lambda session: mark(session, experiment_id, ANYONE, **how))


def settle(database: Database) -> None:
    """Makes what is marked as old as it must be."""
    marked = Experiment.deleted_at.is_not(None)
    change = update(Experiment).where(marked).values(deleted_at=now() - timedelta(minutes=2))
    database.write(lambda session: session.execute(change))


def count(database: Database, kind: Any) -> int:
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(kind)) or 0


class TestRefused:
    def test_while_it_is_not_final(self, database: Database, submit: Callable[..., int]) -> None:
        number = submit()
        for state in ("queued", "paused"):
            with pytest.raises(StateError, match=f"is {state}: cancel it first"):
                delete(database, number, force=True)
            database.write(lambda session: actions.pause(session, number))
        database.write(lambda session: actions.cancel(session, number))
        assert delete(database, number).deleted

    def test_while_another_evaluates_its_networks(self, lived: Database) -> None:
        for force in (False, True):
            with pytest.raises(StateError, match=f"experiment {EVALUATING} evaluates its networks"):
                delete(lived, FIRST, force=force)

    def test_while_boards_show_it(self, lived: Database, folder: DataFolder) -> None:
        delete(lived, EVALUATING)
        settle(lived)
        assert remove_marked(lived, folder) == 1
        with pytest.raises(StateError, match="boards of digits; archive it first"):
            delete(lived, FIRST)
        assert count(lived, Score) == 2
        assert delete(lived, FIRST, force=True).deleted
        assert count(lived, Score) == 0

    def test_of_another_project(self, database: Database, submit: Callable[..., int]) -> None:
        number = submit()
        database.write(lambda session: actions.cancel(session, number))
        other = Principal("other", 77, frozenset(Scope))
        for act in (preview, mark):
            with pytest.raises(NotFoundError, match=f"no experiment {number}"):
                database.write(partial(act, experiment_id=number, who=other))


class TestDeleted:
    @pytest.fixture
    def marked(self, lived: Database, folder: DataFolder) -> Database:
        delete(lived, EVALUATING)
        settle(lived)
        remove_marked(lived, folder)
        delete(lived, FIRST, force=True)
        return lived

    def test_it_is_out_of_sight_at_once(self, marked: Database) -> None:
        with marked.read() as session:
            with pytest.raises(NotFoundError):
                store.get_experiment(session, FIRST)
            with pytest.raises(NotFoundError):
                store.get_trial(session, 1)
            with pytest.raises(NotFoundError):
                store.get_artifact(session, 1)
            found = list_experiments(session, ExperimentFilter(archived=None), limit=10)
            assert [one.id for one in found.rows] == [SECOND]
            trials = list_trials(session, TrialFilter(), limit=100).rows
            assert {trial.experiment_id for trial, _ in trials} == {SECOND}
            assert not store.get_experiments(session, [FIRST])
        with pytest.raises(NotFoundError):
            marked.write(lambda session: actions.retry(session, FIRST))

    def test_then_its_files_go_and_its_rows(self, marked: Database, folder: DataFolder) -> None:
        data = folder.path
        for name in (f"logs/experiment-{FIRST}-1.log", f"tensorboard/{FIRST}/x", f"logs/experiment-{FIRST}1-1.log"):
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            (data / name).touch()
        (data / "trials/1/1/checkpoints").mkdir()
        assert remove_marked(marked, folder) == 0, "its processes may still write"
        assert (data / "trials/1").exists()
        for number in (FIRST, SECOND):
            answer = partial(dict[str, JsonValue], id=number)
            marked.write(partial(store.answer_once, key=str(number), body={}, answer=answer))
        settle(marked)
        assert remove_marked(marked, folder) == 1
        with marked.read() as session:
            told = [row.response["id"] for row in session.scalars(select(IdempotencyKey)) if row.key in ("1", "2")]
        assert told == [SECOND], "nor is what was posted kept elsewhere"
        assert not (data / "trials/1").exists()
        assert [path.name for path in (data / "logs").iterdir()] == [f"experiment-{FIRST}1-1.log"]
        assert not (data / f"tensorboard/{FIRST}").exists()
        for kind in (EpochPoint, Artifact, Result, Score):
            assert count(marked, kind) == 0
        assert count(marked, Experiment) == 1
        with marked.read() as session:
            assert set(session.scalars(select(Tally.experiment_id))) == {SECOND}
            assert set(session.scalars(select(Tag.experiment_id))) == {SECOND}
            kept = session.scalars(select(Event).where(Event.kind == "deleted").order_by(Event.id)).all()
            assert [event.detail["experiment"] for event in kept] == [EVALUATING, FIRST]
            assert (kept[1].actor, kept[1].experiment_id) == ("anonymous", None)
            assert kept[1].detail["results"] == 2
        assert remove_marked(marked, folder) == 0

    def test_again_it_changes_nothing(self, marked: Database) -> None:
        events = count(marked, Event)
        assert delete(marked, FIRST).deleted
        assert count(marked, Event) == events

    @pytest.mark.parametrize("place", ["remove_trial", "remove_experiment", "rows"])
    def test_who_is_killed_on_the_way_leaves_it_to_the_next(
        self, marked: Database, folder: DataFolder, monkeypatch: pytest.MonkeyPatch, place: str
    ) -> None:
        def killed(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        settle(marked)
        owner, name = (deletion, "_remove_trials") if place == "rows" else (DataFolder, place)
        genuine = getattr(owner, name)
        monkeypatch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            remove_marked(marked, folder)
        monkeypatch.setattr(owner, name, genuine)
        assert remove_marked(marked, folder) == 1
        assert count(marked, Result) == 0
        assert not (folder.path / "trials/1").exists()

    def test_files_that_cannot_go_keep_the_rows(
        self, marked: Database, folder: DataFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: Any) -> None:
            raise PermissionError("no")

        settle(marked)
        genuine = DataFolder.remove_trial
        monkeypatch.setattr(DataFolder, "remove_trial", refused)
        assert remove_marked(marked, folder) == 0
        assert count(marked, Result) == 2
        monkeypatch.setattr(DataFolder, "remove_trial", genuine)
        assert remove_marked(marked, folder) == 1

    def test_a_data_folder_that_is_not_mounted_keeps_the_rows(
        self, marked: Database, folder: DataFolder, tmp_path: Path
    ) -> None:
        settle(marked)
        (tmp_path / "empty").mkdir()
        assert remove_marked(marked, DataFolder(tmp_path / "empty")) == 0
        assert count(marked, Artifact) == 1
        assert remove_marked(marked, folder) == 1

    def test_trials_that_left_no_file_in_a_manifest_stay_with_a_store_that_is_not_mounted(
        self, lived: Database, source: Settings, tmp_path: Path
    ) -> None:
        """They have logs and checkpoints, and nobody would know any more whose these are."""
        mount = tmp_path / "store"
        mount.mkdir()
        kept = source.model_copy(update={"storage": str(mount)})
        home.settle(lived, kept)
        delete(lived, EVALUATING)
        settle(lived)
        with lived.read() as session:
            trial_id = session.scalars(select(Trial.id).where(Trial.experiment_id == EVALUATING)).first()
        log = mount / f"trials/{trial_id}/1/trial.log"
        log.parent.mkdir(parents=True)
        log.touch()
        mount.rename(tmp_path / "disk")
        mount.mkdir()
        assert remove_marked(lived, DataFolder.of(kept)) == 0
        assert count(lived, Experiment) == 3
        mount.rmdir()
        (tmp_path / "disk").rename(mount)
        assert remove_marked(lived, DataFolder.of(kept)) == 1
        assert not log.parent.parent.exists()

    def test_rows_stay_where_the_folder_of_all_trials_is_a_link(self, marked: Database, folder: DataFolder) -> None:
        settle(marked)
        (folder.path / "trials").rename(folder.path / "elsewhere")
        (folder.path / "trials").symlink_to("elsewhere")
        assert remove_marked(marked, folder) == 0
        assert count(marked, Result) == 2
        with pytest.raises(OSError, match="is a link"):  # also of trials that left no file
            folder.remove_trial(1)
        assert (folder.path / "elsewhere/1").exists()

    def test_a_link_is_removed_and_not_followed(self, marked: Database, folder: DataFolder, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").touch()
        (folder.path / "trials/1/1/link").symlink_to(outside)
        (folder.path / "trials/2").symlink_to(outside)
        settle(marked)
        assert remove_marked(marked, folder) == 1
        assert (outside / "precious").exists()
        assert not (folder.path / "trials/2").is_symlink()

    def test_what_another_worker_takes_first_leaves_nothing_of_the_rest(
        self, marked: Database, folder: DataFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file that is gone in the middle of a folder ended the removal, and the rows went without the rest."""
        (folder.path / "trials/1/1/inner").mkdir()
        (folder.path / "trials/1/1/inner/file").touch()
        settle(marked)
        genuine, taken = os.unlink, list[Any]()

        def taken_first(path: Any, **options: Any) -> None:
            if not taken:
                taken.append(path)
                genuine(path, **options)
            genuine(path, **options)

        monkeypatch.setattr("os.unlink", taken_first)
        assert remove_marked(marked, folder) == 1
        assert taken
        assert not (folder.path / "trials/1").exists()

    def test_quota_and_prometheus_count_its_hours_still(
        self, database: Database, folder: DataFolder, submit: Callable[..., int]
    ) -> None:
        """A counter that becomes less begins anew, for all that Prometheus knows: a rate would have all of it."""
        number, other = submit(seeds=3), submit(seeds=3)

        def work(session: Any) -> int:
            project = keys.create_project(session, "vision")
            for experiment in session.scalars(select(Experiment)):
                experiment.spec = experiment.spec | {"resources": {"gpus": 0.5}}
                session.add(Event(actor="worker", kind="reaped", experiment_id=experiment.id))
            session.get_one(Experiment, number).project_id = project.id
            session.execute(update(Trial).values(run_seconds=3600.0))
            first = select(func.min(Trial.id)).group_by(Trial.experiment_id)
            session.execute(update(Trial).where(Trial.id.in_(first)).values(state=TrialState.SUCCEEDED))
            actions.cancel(session, number)
            return project.id

        def counted() -> list[tuple[float, int, int]]:
            with database.read() as session:
                assert keys.usage(session, project_id).gpu_hours == pytest.approx(1.5)
                found = take_census(session), take_census(session, project_id), take_census(session, 99)
                return [(one.gpu_seconds, one.lost_leases, one.succeeded) for one in found]

        project_id = database.write(work)
        expected = [(10800.0, 2, 2), (5400.0, 1, 1), (0.0, 0, 0)]
        assert counted() == expected
        delete(database, number)
        assert counted() == expected
        settle(database)
        assert remove_marked(database, folder) == 1
        assert counted() == expected
        with database.read() as session:
            assert session.get_one(Project, project_id).deleted_gpu_hours == pytest.approx(1.5)
            assert session.get(Experiment, other) is not None
            told = partial(list_events, session, limit=9, kinds=[EventKind.DELETED])
            assert [event.detail["experiment"] for event in told(project_id=project_id)] == [number]
            assert told(project_id=99) == [], "who deleted it is told to its project alone"

    def test_what_an_address_is_to_be_told_of_stays_until_it_was(
        self, database: Database, folder: DataFolder, submit: Callable[..., int], claim: Callable[..., Lease]
    ) -> None:
        """Of the trials those stay of which it is to be told."""
        told = {"e": (EventKind.CLOSED, EventKind.TRIAL_FAILED)}
        database.write(lambda session: webhooks.enrol(session, "e"))
        number, lease = submit(seeds=3), claim()
        database.write(under(lease, HeldExperiment.start_trial, 1))
        database.write(under(lease, HeldExperiment.fail_trial, 1, "error", "no"))
        database.write(lambda session: actions.cancel(session, number))
        delete(database, number)
        settle(database)
        for delivered in (False, True):  # as the events are not enrolled yet, then as it did not take them
            assert remove_marked(database, folder, told) == 0
            assert (count(database, Trial), count(database, Experiment)) == (1, 1)
            due = update(WebhookDelivery).values(due_at=now() - timedelta(days=2))
            database.write(lambda session, due=due: session.execute(due))  # type: ignore[misc]
            taken = database.write(lambda session: webhooks.take(session, "e", told["e"], 9))
            kinds = [(one.message["kind"], one.message["trial"] is not None) for one in taken]
            assert kinds == [("trial_failed", True), ("closed", False)]
            for one in taken:
                database.write(partial(webhooks.settle, delivery=one, delivered=delivered))
        assert remove_marked(database, folder, told) == 1
        assert count(database, Trial) == 0

    def test_an_address_that_nobody_tells_any_more_keeps_nothing_for_ever(
        self, database: Database, folder: DataFolder, submit: Callable[..., int]
    ) -> None:
        database.write(lambda session: webhooks.enrol(session, "e"))
        enrolled, other = submit(seeds=1), submit(seeds=1)
        database.write(lambda session: actions.cancel(session, enrolled))
        database.write(lambda session: webhooks.take(session, "e", [EventKind.CLOSED], 9))
        database.write(lambda session: actions.cancel(session, other))
        for number in (enrolled, other):
            delete(database, number)
        settle(database)
        assert remove_marked(database, folder) == 1, "another worker may tell it of what was enrolled"
        due = update(WebhookDelivery).values(due_at=now() - timedelta(days=1))
        database.write(lambda session: session.execute(due))
        assert remove_marked(database, folder) == 1

    def test_many_trials_go_in_steps_and_two_workers_do_not_meet(
        self, database: Database, folder: DataFolder, submit: Callable[..., int]
    ) -> None:
        number = submit(seeds=350)
        database.write(lambda session: actions.cancel(session, number))
        delete(database, number)
        settle(database)
        threads = [threading.Thread(target=remove_marked, args=(database, folder)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (count(database, Trial), count(database, Experiment)) == (0, 0)


def test_networks_cannot_be_taken_up_in_the_very_moment(lived: Database, folder: DataFolder) -> None:
    with lived.read() as session:
        draft = draft_reevaluation(
            session, FIRST, evaluation={"attack": "autoattack"}, name=None, who=ANYONE, max_trials=9
        )
    delete(lived, EVALUATING)
    settle(lived)
    remove_marked(lived, folder)
    delete(lived, FIRST, force=True)
    with pytest.raises(NotFoundError):
        lived.write(lambda session: submit(session, draft))


class TestApi:
    @pytest.fixture
    def full(self, api: TestClient, database: Database, tmp_path: Path) -> TestClient:
        Installation(database).live()
        write_artifacts(database, tmp_path / "data")
        return api

    def test_dry_run_first(self, full: TestClient, database: Database) -> None:
        answer = full.delete(f"/v1/experiments/{EVALUATING}?dry_run=true")
        assert answer.status_code == 200
        assert answer.json() == {
            "id": EVALUATING,
            "name": "renamed (re-evaluated)",
            "trials": 2,
            "results": 0,
            "files": 0,
            "size": 0,
            "shown_on": [],
            "deleted": False,
        }
        assert full.get(f"/v1/experiments/{EVALUATING}").status_code == 200
        assert full.delete(f"/v1/experiments/{EVALUATING}").json()["deleted"]
        assert full.get(f"/v1/experiments/{EVALUATING}").status_code == 404
        assert full.delete(f"/v1/experiments/{EVALUATING}").json()["deleted"], "an answer may be lost"

    def test_refusals_name_what_to_do(self, full: TestClient) -> None:
        answer = full.delete(f"/v1/experiments/{FIRST}?dry_run=true")
        assert answer.status_code == 409
        assert f"experiment {EVALUATING} evaluates" in answer.json()["detail"]
        assert full.delete("/v1/experiments/99").status_code == 404
        assert full.delete(f"/v1/experiments/{EVALUATING}?dryrun=true").status_code == 422
        assert full.get(f"/v1/experiments/{EVALUATING}").status_code == 200


def test_the_command_asks_first(server: str, sqlite_url: str, tmp_path: Path) -> None:
    database = Database(sqlite_url)
    Installation(database).live()

    def run(*arguments: str, answer: str = "", code: int = 0) -> Any:
        done = CliRunner().invoke(app, ["delete", *arguments], env={"TTSV_URL": server}, input=answer)
        assert done.exit_code == code, (done.output, done.exception)
        return done

    assert "2 trials, 0 results, 0 files" in run("3", "--dry-run").stdout
    run("3", answer="n\n", code=1)
    assert count(database, Experiment) == 3
    assert "experiment 3 is deleted" in run("3", answer="y\n").stdout
    assert "it is deleted already" in run("3", "--dry-run").stdout
    assert "cancel it first" not in run("2", "--yes", "--json").stdout
    assert "3 evaluates its networks, and is being deleted" in run("1", "--dry-run", code=1).stderr
    settle(database)
    remove_marked(database, DataFolder(tmp_path))
    assert "deleted with --force alone" in run("1", "--dry-run").stdout
    refused = run("1", answer="y\n", code=1)
    assert "say --force" in refused.stderr
    assert "for good?" not in refused.output, "what is refused anyway is not asked for"
    assert "experiment 1 is deleted" in run("1", "--force", answer="y\n").stdout
    told = CliRunner().invoke(app, ["events"], env={"TTSV_URL": server}).stdout
    assert "anonymous: deleted (experiment 1) {" in told
    database.close()
