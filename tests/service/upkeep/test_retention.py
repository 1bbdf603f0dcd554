"""Retention: which networks go by which rule, what stays without force, and who is killed on the way."""

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from service.access.security import ANYONE
from service.database import Artifact, Event, Experiment, Result, Trial, TrialState, now
from service.database.engine import Database
from service.errors import GoneError, UserError
from service.experiments import actions, store
from service.queue import driver_reads, leases
from service.queue.leases import Lease
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.settings import Settings
from service.upkeep import retention
from service.upkeep.deletion import mark
from service.upkeep.files import DataFolder
from service.upkeep.retention import Plan, Rules, finish, plan, prune
from tests.service.upkeep.conftest import write_checkpoint
from workers.cli.__main__ import app
from workers.worker.upkeep import Upkeep

GIB = 2**30
ACCURACIES = (0.5, 0.9, 0.7, 0.8)


@pytest.fixture
def folder(source: Settings) -> DataFolder:
    return DataFolder(source.data_dir)


@pytest.fixture
def grown(
    database: Database,
    source: Settings,
    submit: Callable[..., int],
    claim: Callable[..., Lease],
    trial_ids: Callable[[int], list[int]],
    trial_result: Callable[..., dict[str, Any]],
    protocol: Callable[..., ProtocolRecord],
) -> Callable[..., list[int]]:
    """An experiment whose trials have these accuracies, a network and a plot each; ended so many days ago."""

    def grown(accuracies: tuple[float, ...] = ACCURACIES, *, days: float = 0, archived: bool = True) -> list[int]:
        number = submit(seeds=len(accuracies))
        lease, trials = claim(), trial_ids(number)
        for trial_id, accuracy in zip(trials, accuracies, strict=True):
            files = []
            for kind, name in (("model", "model.safetensors"), ("confusion-plot", "confusion.svg")):
                path = source.data_dir / f"trials/{trial_id}/1/{name}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(name)
                files.append(ArtifactFile(kind, str(path.relative_to(source.data_dir)), "0" * 64, GIB))

            def work(session: Any, trial_id: int = trial_id, accuracy: float = accuracy, files: Any = files) -> None:
                with hold(session, lease) as held:
                    held.start_trial(trial_id)
                    held.finish_trial(trial_id, trial_result(accuracy), protocol(), files)

            database.write(work)

        def end(session: Any) -> None:
            leases.complete(session, lease)
            if archived:
                actions.archive(session, number)
            ended = now() - timedelta(days=days)
            session.execute(update(Trial).where(Trial.id.in_(trials)).values(finished_at=ended))

        database.write(end)
        return trials

    return grown


def of(found: Plan) -> list[int]:
    """The trials whose checkpoints go, or are gone."""
    return [one.trial_id for one in found.checkpoints]


def planned(database: Database, folder: DataFolder, **rules: Any) -> retention.Plan:
    with database.read() as session:
        return plan(session, folder, Rules(**rules))


def going(database: Database, folder: DataFolder, **rules: Any) -> list[int]:
    return [one.trial_id for one in planned(database, folder, **rules).networks]


class TestRules:
    def test_the_best_of_each_experiment_stay(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        one, other = grown(), grown((0.1, 0.2))
        assert going(database, folder, best=2) == [one[0], one[2]]
        assert going(database, folder, best=1) == [one[0], one[2], one[3], other[0]]
        assert going(database, folder, best=0) == [*one, *other]

    def test_both_networks_of_a_trial_count_and_stay_or_go(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        """With `training.keep_best` a trial leaves two."""
        trials = grown((0.1, 0.2))

        def add(session: Session) -> None:
            for trial_id in trials:
                path = f"trials/{trial_id}/1/best.safetensors"
                session.add(Artifact(trial_id=trial_id, kind="best-model", path=path, sha256="0" * 64, size=GIB))

        database.write(add)
        assert going(database, folder, best=1) == [trials[0], trials[0]]
        assert going(database, folder, gib=4) == []
        assert len(going(database, folder, gib=2.5)) == 2
        assert sorted(going(database, folder, best=0)) == [trials[0], trials[0], trials[1], trials[1]]

    def test_what_is_old_goes(self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]) -> None:
        old = grown(days=40)
        grown((0.1, 0.2), days=2)
        assert going(database, folder, days=30) == old
        assert going(database, folder, days=50) == []

    def test_the_oldest_go_until_there_is_room(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        young, old = grown(days=1), grown((0.1, 0.2), days=9)
        assert going(database, folder, gib=6) == []
        assert going(database, folder, gib=4) == old
        assert going(database, folder, gib=3.5) == [*old, young[0]]
        assert going(database, folder, gib=4, best=1) == [young[0], young[2], young[3], old[0]]

    def test_what_cannot_go_counts_towards_the_limit(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        """Networks of an experiment that was extended fill the disk as all others do."""
        old, extended = grown((0.1, 0.2, 0.3), days=9), grown((0.4, 0.5))
        with database.read() as session:
            number = session.get_one(Trial, extended[0]).experiment_id
        queued = update(Experiment).where(Experiment.id == number).values(state="queued")
        database.write(lambda session: session.execute(queued))
        found = planned(database, folder, gib=4)
        assert ([one.trial_id for one in found.networks], found.too_much) == (old[:1], 0)
        found = planned(database, folder, gib=1.5)
        assert ([one.trial_id for one in found.networks], found.too_much) == (old, GIB // 2)
        assert planned(database, folder, gib=float("inf")).too_much == 0

    def test_what_boards_show_stays_without_force(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        shown = grown(archived=False)
        found = planned(database, folder, best=1)
        assert (found.networks, found.spared, found.spared_size) == ([], 3, 3 * GIB)
        assert planned(database, folder, gib=1).networks == []
        assert going(database, folder, best=1, force=True) == [shown[0], shown[2], shown[3]]

    def test_what_a_newer_result_repeated_is_shown_still(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        """By the board of its own experiment; what is not valid is on none."""
        older, _ = grown(archived=False), grown(archived=False)
        assert going(database, folder, best=0) == []
        invalid = update(Result).where(Result.trial_id == older[1]).values(valid=False)
        database.write(lambda session: session.execute(invalid))
        assert going(database, folder, best=0) == [older[1]]

    def test_what_a_trial_is_still_to_evaluate_stays(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]], submit: Callable[..., int]
    ) -> None:
        trials = grown()
        number = submit(seeds=1, name="evaluates")
        wanted = update(Trial).where(Trial.experiment_id == number).values(source_trial_id=trials[0])
        database.write(lambda session: session.execute(wanted))
        assert going(database, folder, best=0, force=True) == trials[1:]
        database.write(lambda session: actions.cancel(session, number))
        assert going(database, folder, best=0, force=True) == trials

    def test_what_runs_is_no_candidate(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        grown()
        database.write(lambda session: session.execute(update(Experiment).values(state="queued", archived_at=None)))
        assert going(database, folder, best=0, force=True) == []

    def test_without_a_rule_nothing_goes(self, database: Database, folder: DataFolder) -> None:
        with pytest.raises(UserError, match="--older-than"):
            planned(database, folder)


class TestPruned:
    def test_networks_go_and_all_else_stays(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        trials = grown()
        done = prune(database, folder, planned(database, folder, best=1), actor="me")
        assert done.size == 3 * GIB
        gone = {trials[0], trials[2], trials[3]}
        for trial_id in trials:
            assert (folder.path / f"trials/{trial_id}/1/model.safetensors").exists() == (trial_id not in gone)
            assert (folder.path / f"trials/{trial_id}/1/confusion.svg").exists()
        with database.read() as session:
            assert session.scalar(select(func.count()).select_from(Result)) == 4
            assert [one.kind for one in store.artifacts_of(session, trials[0])] == ["confusion-plot"]
            artifact = session.scalars(
                select(Artifact).where(Artifact.trial_id == trials[0], Artifact.kind == "model")
            ).one()
            assert artifact.sha256 == "0" * 64
            with pytest.raises(GoneError, match=r"was removed on .* `ttsv clone 1` trains"):
                store.get_artifact(session, artifact.id)
            assert driver_reads.model_path(session, trials[0]) is None
            event = session.scalars(select(Event).where(Event.kind == "pruned")).one()
            assert (event.actor, event.detail) == ("me", {"networks": 3, "bytes": 3 * GIB, "force": False})
        assert planned(database, folder, best=1).networks == []

    def test_what_is_needed_or_shown_by_now_stays(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        trials = grown()
        found = planned(database, folder, best=0)
        with database.read() as session:
            number = session.get_one(Trial, trials[0]).experiment_id
        database.write(lambda session: actions.unarchive(session, number))
        assert prune(database, folder, found).networks == []
        assert all((folder.path / f"trials/{one}/1/model.safetensors").exists() for one in trials)

    def test_what_was_extended_by_now_stays(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        grown()
        found = planned(database, folder, best=0)
        database.write(lambda session: session.execute(update(Experiment).values(state="queued")))
        assert prune(database, folder, found).networks == []

    def test_one_file_that_may_not_be_removed_keeps_no_other(
        self,
        database: Database,
        folder: DataFolder,
        grown: Callable[..., list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Neither now nor when what is left is finished later."""
        first, *others = grown()
        for trial_id in (first, *others):
            write_checkpoint(folder.path / f"trials/{trial_id}/1/checkpoints", 1)
        genuine, genuine_checkpoints = DataFolder.remove, DataFolder.remove_checkpoints

        def refused(here: DataFolder, path: str) -> None:
            if path.startswith(f"trials/{first}/"):
                raise PermissionError("not ours")
            genuine(here, path)

        def refused_checkpoints(here: DataFolder, trial_id: int, fence: int) -> None:
            if trial_id == first:
                raise PermissionError("not ours")
            genuine_checkpoints(here, trial_id, fence)

        monkeypatch.setattr(DataFolder, "remove", refused)
        monkeypatch.setattr(DataFolder, "remove_checkpoints", refused_checkpoints)
        done = prune(database, folder, planned(database, folder, best=0))
        assert [one.trial_id for one in done.networks] == others
        assert of(done) == others
        (folder.path / f"trials/{others[-1]}/1/model.safetensors").touch()
        assert finish(database, folder) == 1
        monkeypatch.setattr(DataFolder, "remove", genuine)
        assert finish(database, folder) == 1

    def test_nothing_is_marked_where_the_folder_of_all_trials_is_a_link(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        """Nothing behind it is removed, so that neither the list nor the removal may say so."""
        grown()
        found = planned(database, folder, best=0)
        (folder.path / "trials").rename(folder.path / "elsewhere")
        (folder.path / "trials").symlink_to("elsewhere")
        with pytest.raises(OSError, match="is a link"):
            planned(database, folder, best=0)
        with pytest.raises(OSError, match="is a link"):
            prune(database, folder, found)
        with database.read() as session:
            assert session.scalar(select(func.count()).where(Artifact.removed_at.is_not(None))) == 0

    def test_nothing_is_marked_on_a_disk_that_is_read_only(
        self,
        database: Database,
        folder: DataFolder,
        grown: Callable[..., list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A network that is marked is as good as gone, and this one would stay."""
        grown()
        found = planned(database, folder, best=0)
        monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
        with pytest.raises(OSError, match="read-only"):
            prune(database, folder, found)
        with database.read() as session:
            assert session.scalar(select(func.count()).where(Artifact.removed_at.is_not(None))) == 0

    def test_what_is_deleted_by_now_is_left_to_that(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        grown()
        found = planned(database, folder, best=0)
        database.write(lambda session: session.execute(update(Experiment).values(deleted_at=now())))
        assert prune(database, folder, found).networks == []

    def test_who_is_killed_between_mark_and_file_leaves_it_to_the_next(
        self,
        database: Database,
        folder: DataFolder,
        grown: Callable[..., list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def killed(*_: Any) -> None:
            raise KeyboardInterrupt

        trials = grown()
        genuine = DataFolder.remove
        monkeypatch.setattr(DataFolder, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(database, folder, planned(database, folder, best=0))
        monkeypatch.setattr(DataFolder, "remove", genuine)
        assert (folder.path / f"trials/{trials[0]}/1/model.safetensors").exists()
        assert finish(database, folder) == 4
        assert not (folder.path / f"trials/{trials[0]}/1/model.safetensors").exists()
        assert finish(database, folder) == 0

    def test_a_path_that_leads_out_or_through_a_link_is_left(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]], tmp_path: Path
    ) -> None:
        first, second, *_ = grown()
        precious = tmp_path / "precious"
        precious.write_text("precious")
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "model.safetensors").write_text("precious")

        def work(session: Any) -> None:
            model = Artifact.kind == "model"
            out = update(Artifact).where(Artifact.trial_id == first, model).values(path="../precious")
            link = update(Artifact).where(Artifact.trial_id == second, model)
            session.execute(out)
            session.execute(link.values(path=f"trials/{second}/2/model.safetensors"))

        database.write(work)
        (folder.path / f"trials/{second}/2").symlink_to(outside)
        prune(database, folder, planned(database, folder, best=0))
        assert precious.exists()
        assert (outside / "model.safetensors").exists()

    def test_checkpoints_of_what_is_final_go(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]], submit: Callable[..., int]
    ) -> None:
        (trial_id, *_), number = grown(days=9), submit(seeds=1)
        with database.read() as session:
            waiting = session.scalars(select(Trial.id).where(Trial.experiment_id == number)).one()
        for one in (trial_id, waiting):
            write_checkpoint(folder.path / f"trials/{one}/1/checkpoints", 1)
        states = update(Experiment).where(Experiment.id != number)
        database.write(lambda session: session.execute(states.values(state="queued")))
        assert planned(database, folder, days=5).checkpoints == [], "its trials may be retried at any moment"
        database.write(lambda session: session.execute(states.values(state="succeeded")))
        found = planned(database, folder, days=5)
        assert of(found) == [trial_id]
        assert found.checkpoints[0].size > 7
        retried = update(Trial).where(Trial.id == trial_id).values(state=TrialState.QUEUED)
        database.write(lambda session: session.execute(retried))
        assert prune(database, folder, found).checkpoints == []
        assert (folder.path / f"trials/{trial_id}/1/checkpoints").exists()
        database.write(lambda s: s.execute(update(Trial).where(Trial.id == trial_id).values(state=TrialState.FAILED)))
        write_checkpoint(folder.path / f"trials/{trial_id}/99/checkpoints", 1)  # of who claims it now
        assert of(prune(database, folder, found)) == [trial_id]
        assert not (folder.path / f"trials/{trial_id}/1/checkpoints").exists()
        assert (folder.path / f"trials/{trial_id}/99/checkpoints").exists()
        assert (folder.path / f"trials/{waiting}/1/checkpoints").exists()

    def test_those_of_failed_trials_stay_for_a_week_without_an_age(
        self, database: Database, folder: DataFolder, grown: Callable[..., list[int]]
    ) -> None:
        """A rule about networks alone, kept by a worker every hour, would have a retry begin anew."""
        (older, *_), (failed, diverged, *_) = grown(days=8), grown(days=6)
        for one in (older, failed, diverged):
            write_checkpoint(folder.path / f"trials/{one}/1/checkpoints", 1)
        for those, state in (((older, failed), TrialState.FAILED), ((diverged,), TrialState.DIVERGED)):
            ended = update(Trial).where(Trial.id.in_(those)).values(state=state)
            with database.writer.begin() as connection:
                connection.execute(ended)
        assert of(planned(database, folder, best=9)) == [older, diverged]
        assert of(planned(database, folder, best=9, days=5)) == [older, failed, diverged]


def test_the_worker_does_it_by_itself(
    database: Database, source: Settings, folder: DataFolder, grown: Callable[..., list[int]]
) -> None:
    trials = grown()
    upkeep = Upkeep(source.model_copy(update={"retention_best": 1}), database)
    upkeep.tidy(first=True)
    upkeep.retain()
    assert [one for one in trials if (folder.path / f"trials/{one}/1/model.safetensors").exists()] == [trials[1]]
    with database.read() as session:
        assert session.scalars(select(Event.actor).where(Event.kind == "pruned")).all() == ["retention"]


@pytest.mark.parametrize("error", [OperationalError("select", {}, Exception("away")), ValueError("of a store")])
def test_a_worker_that_begins_in_an_outage_finishes_what_was_left_after_it(
    database: Database, source: Settings, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("workers.worker.upkeep.LOOK_SECONDS", 0.01)
    tries: list[int] = []

    def away_at_first(*_: Any) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise error
        return 0

    monkeypatch.setattr("workers.worker.upkeep.finish", away_at_first)
    monkeypatch.setattr(Upkeep, "sweep", lambda _: None)
    with Upkeep(source, database):
        time.sleep(0.5)
    assert len(tries) == 2, "once more, and when it is done no more"


def test_what_a_command_leaves_half_done_is_finished_while_the_worker_lives(
    database: Database, source: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no rule has the worker remove anything by itself."""
    monkeypatch.setattr("workers.worker.upkeep.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("workers.worker.upkeep.RETAIN_SECONDS", 0.05)
    tries, enough = list[int](), threading.Event()

    def counted(*_: Any) -> int:
        tries.append(1)
        if len(tries) == 3:
            enough.set()
        return 0

    monkeypatch.setattr("workers.worker.upkeep.finish", counted)
    monkeypatch.setattr(Upkeep, "sweep", lambda _: None)
    with Upkeep(source, database):
        assert enough.wait(10)


def test_the_worker_s_loop_does_all_of_it(
    database: Database,
    source: Settings,
    folder: DataFolder,
    grown: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was deleted, what somebody left marked, and what the rules name: one thread, on either database."""
    monkeypatch.setattr("workers.worker.upkeep.LOOK_SECONDS", 0.05)
    ruled, left, deleted = grown(), grown((0.5,)), grown((0.9,))
    for trial_id in ruled:
        write_checkpoint(folder.path / f"trials/{trial_id}/1/checkpoints", 1)

    def prepare(session: Any) -> int:
        mine = Artifact.trial_id == left[0], Artifact.kind == "model"
        session.execute(update(Artifact).where(*mine).values(removed_at=now()))
        number = session.get_one(Trial, deleted[0]).experiment_id
        mark(session, number, ANYONE)
        session.execute(update(Experiment).where(Experiment.id == number).values(deleted_at=now() - timedelta(hours=1)))
        return int(number)

    number = database.write(prepare)

    def networks() -> list[int]:
        every = [*ruled, *left, *deleted]
        return [one for one in every if (folder.path / f"trials/{one}/1/model.safetensors").exists()]

    def gone() -> bool:
        with database.read() as session:
            return session.get(Experiment, number) is None

    def pruned() -> list[str]:
        with database.read() as session:
            return list(session.scalars(select(Event.actor).where(Event.kind == "pruned")))

    with Upkeep(source.model_copy(update={"retention_best": 1}), database) as upkeep:
        deadline = time.monotonic() + 60
        while not (gone() and networks() == [ruled[1]] and pruned() == ["retention"]):
            assert time.monotonic() < deadline, (gone(), networks(), pruned())
            time.sleep(0.05)
        later = grown((0.1, 0.2))  # within the hour the rules are not asked again
        time.sleep(0.5)
        assert upkeep._thread.is_alive()
    assert not upkeep._thread.is_alive()
    assert all((folder.path / f"trials/{one}/1/model.safetensors").exists() for one in later)
    assert not (folder.path / f"trials/{deleted[0]}").exists()
    assert folder.checkpointed() == []
    with database.read() as session:
        kept = session.scalars(select(Artifact.trial_id).where(Artifact.kind == "model", Artifact.removed_at.is_(None)))
        assert set(kept) == {ruled[1], *later}


def test_the_api_says_that_it_is_gone(api: TestClient, database: Database, tmp_path: Path, grown: Any) -> None:
    trials = grown()
    (model,) = [one for one in api.get(f"/v1/trials/{trials[0]}/artifacts").json()["items"] if one["kind"] == "model"]
    folder = DataFolder(tmp_path / "source")
    prune(database, folder, planned(database, folder, best=0))
    answer = api.get(f"/v1/artifacts/{model['id']}")
    assert answer.status_code == 410
    assert "to make room" in answer.json()["detail"]
    kinds = [one["kind"] for one in api.get(f"/v1/trials/{trials[0]}/artifacts").json()["items"]]
    assert kinds == ["confusion-plot"]


def test_the_command_lists_first(database: Database, source: Settings, grown: Callable[..., list[int]]) -> None:
    trials = grown()
    env = {"TTSV_DATA_DIR": str(source.data_dir), "TTSV_DATABASE_URL": source.database_url}

    def run(*arguments: str, answer: str = "", code: int = 0, **more: str) -> Any:
        done = CliRunner().invoke(app, ["prune", *arguments], env=env | more, input=answer)
        assert done.exit_code == code, (done.output, done.exception)
        return done

    assert "no rule is given" in run(code=1).stderr
    said = run("--best", "1", "--dry-run").stdout
    assert "3 networks" in said
    assert "not among the best 1" in said
    run("--best", "1", answer="n\n", code=1)
    assert (source.data_dir / f"trials/{trials[0]}/1/model.safetensors").exists()
    found = json.loads(run("--best", "1", "--yes", "--json").stdout)
    assert (len(found["networks"]), found["size"], found["removed"]) == (3, 3 * GIB, True)
    assert not (source.data_dir / f"trials/{trials[0]}/1/model.safetensors").exists()
    assert "1 networks" in run("--yes", TTSV_RETENTION_BEST="0").stdout
    write_checkpoint(source.data_dir / f"trials/{trials[2]}/1/checkpoints", 1)
    (line,) = [one.split("\t") for one in run("--best", "9", "--dry-run").stdout.splitlines() if "\t" in one][1:]
    assert line[1:5] == [str(trials[2]), "checkpoints", line[3], "-"]
    assert line[3] != "0 B"
    assert line[-1] == "nobody resumes from them"
    (found,) = json.loads(run("--best", "9", "--dry-run", "--json").stdout)["checkpoints"]
    assert (found["trial_id"], str(found["experiment_id"])) == (trials[2], line[0])
    assert (source.data_dir / f"trials/{trials[2]}/1/checkpoints").exists()


def test_a_limit_that_cannot_be_met_is_said(
    database: Database,
    source: Settings,
    grown: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the command, which says also what was listed and stays, and by workers."""
    grown((0.1, 0.2), archived=False)
    env = {"TTSV_DATA_DIR": str(source.data_dir), "TTSV_DATABASE_URL": source.database_url}
    done = CliRunner().invoke(app, ["prune", "--size", "0.5", "--yes", "--json"], env=env)
    assert (done.exit_code, json.loads(done.stdout)["too_much"]) == (0, 3 * GIB // 2)
    assert "networks have 1.5 GiB more than is allowed" in done.stderr
    Upkeep(source.model_copy(update={"retention_gib": 0.5}), database).retain()
    assert "networks have 1.5 GiB more than TTSV_RETENTION_GIB" in caplog.text

    def refused(*_: Any) -> None:
        raise PermissionError("not ours")

    monkeypatch.setattr(DataFolder, "remove", refused)
    done = CliRunner().invoke(app, ["prune", "--best", "1", "--force", "--yes"], env=env)
    assert "removed: 0 networks" in done.stdout
    assert "1 of what was listed this did not remove" in done.stderr


def test_one_folder_that_may_not_be_removed_keeps_no_other_of_what_was_cancelled(
    database: Database, source: Settings, submit: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = submit(seeds=3)
    database.write(lambda session: actions.cancel(session, number))
    removed: list[int] = []

    def refused_at_first(_: Any, trial_id: int, __: int) -> None:
        removed.append(trial_id)
        if len(removed) == 1:
            raise PermissionError("not ours")

    monkeypatch.setattr("workers.worker.upkeep.remove_checkpoints", refused_at_first)
    Upkeep(source, database).sweep()
    assert len(removed) == 3
