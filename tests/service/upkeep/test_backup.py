"""Backups of either database into either: what comes back, and what happens when something is in the way."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import stat
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from service.database import (
    ApiKey,
    Artifact,
    Event,
    Experiment,
    ExperimentState,
    Result,
    Score,
    Trial,
    TrialState,
    Worker,
    now,
)
from service.database.engine import Database
from service.errors import LeaseLostError, UserError
from service.leaderboards import field_index
from service.leaderboards.filters import Question
from service.leaderboards.leaderboard import leaderboard
from service.queue import leases
from service.queue.leases import Lease
from service.queue.trials import ArtifactFile, HeldExperiment, ProtocolRecord, hold
from service.settings import Settings
from service.storage import Folder
from service.storage.attempts import Attempt, begin
from service.upkeep import archive, backup, restore, rows
from service.upkeep.archive import Manifest, Reader
from service.upkeep.backup import back_up
from service.upkeep.files import DataFolder
from service.upkeep.migrate import alembic_config, migrate, newest
from service.upkeep.moves import Journal, Move
from service.upkeep.restore import refuse_half_restored
from service.upkeep.target import FENCE_JUMP, GAPS, Target
from tests.examples import deep
from tests.fresh import FRESH
from tests.held import reported, under
from tests.migrations import test_schema
from tests.service.upkeep.conftest import Place, Places, server_of, write_checkpoint
from tests.service.upkeep.processes import keep_open, restore_and_die
from ttsv.data.record import ContentRecord
from workers.cli.__main__ import app

Open = Callable[[Settings], Database]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lab.backup"


def contents(database: Database) -> dict[str, list[Any]]:
    """Every row that is copied, by the names of its columns; what a restore says of itself is left out."""
    with database.engine.connect() as connection:
        found = {
            table.name: [
                dict(zip(table.columns, json.loads(line), strict=True)) for line in rows.read_rows(connection, table)
            ]
            for table in rows.tables_of(connection)
        }
    kept = [row for row in found["idempotency_keys"] if not row["key"].startswith("restore ")]
    return found | {"idempotency_keys": kept}


def fenced_off(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """With the fences that a restore gives."""
    return found | {"experiments": [row | {"fence": row["fence"] + FENCE_JUMP} for row in found["experiments"]]}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class TestThereAndBack:
    def test_everything_comes_back(
        self, lived: Database, source: Settings, target: Settings, file: Path, opened: Open
    ) -> None:
        manifest = back_up(source, lived, file)
        assert (manifest.revision, manifest.missing) == (newest(), [])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        done = restore.restore(target, file)
        assert (done.requeued, done.aside) == (0, None)
        there = opened(target)
        assert fenced_off(contents(lived)) == contents(there)
        with lived.read() as before, there.read() as after:
            question = Question(dataset="digits")
            assert leaderboard(after, question).boards == leaderboard(before, question).boards
            assert len(leaderboard(after, question).boards[0].rows) == 2
            assert field_index.is_whole(after)
        kept = {name: data for name, data in files_of(source.data_dir).items() if "ttsv.db" not in name}
        assert {name: data for name, data in files_of(target.data_dir).items() if "ttsv.db" not in name} == kept
        assert stat.S_IMODE((target.data_dir / "key-secret").stat().st_mode) == 0o600
        migrate(there)  # nothing is left to be done

    def test_it_goes_on_under_new_numbers(
        self, lived: Database, source: Settings, target: Settings, file: Path, opened: Open
    ) -> None:
        back_up(source, lived, file)
        with lived.read() as session:
            last = {kind: session.scalar(select(func.max(kind.id))) or 0 for kind in (Experiment, Event)}
        restore.restore(target, file)
        there = opened(target)

        def work(session: Any) -> list[int]:
            experiment = session.scalars(select(Experiment).order_by(Experiment.id)).first()
            values = {c.key: getattr(experiment, c.key) for c in Experiment.__table__.columns if c.key != "id"}
            session.add(fresh := Experiment(**values))
            session.flush()
            session.add(event := Event(experiment_id=fresh.id, actor="a", kind="submitted", detail={}))
            session.flush()
            return [fresh.id, event.id]

        expected = [last[Experiment] + GAPS["experiments"] + 1, last[Event] + GAPS["events"] + 1]
        assert there.write(work) == expected

    def test_an_older_version_s_is_brought_up_to_date(
        self, empty_url: str, tmp_path: Path, target: Settings, file: Path, opened: Open
    ) -> None:
        settings = Settings(database_url=empty_url, data_dir=tmp_path / "old")
        old = opened(settings)
        with old.writer.begin() as connection:
            command.upgrade(alembic_config(connection), "0008")
            for statement in test_schema.TestSecond.FILL:
                connection.execute(text(statement))
        assert back_up(settings, old, file).revision == "0008"
        restore.restore(target, file)
        with opened(target).read() as session:
            assert session.get_one(Result, 9).accuracy == 0.5
            assert session.get_one(Experiment, 7).fence == 1 + FENCE_JUMP
            assert session.scalars(select(Score.cell)).all() == ["c"]

    def test_a_newer_version_s_is_refused(
        self, lived: Database, source: Settings, target: Settings, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("service.upkeep.backup.refuse_newer", lambda _revision: None)  # as the newer version's
        lived.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = '9999'")))
        back_up(source, lived, file)
        with pytest.raises(UserError, match="revision 9999, of a newer version"):
            restore.restore(target, file)
        assert not files_of(target.data_dir)

    def test_a_newer_version_s_database_is_not_backed_up(self, lived: Database, source: Settings, file: Path) -> None:
        """Nobody would see that the tables were left out that this version does not know."""
        lived.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = '9999'")))
        with pytest.raises(UserError, match="revision 9999, of a newer version than this code"):
            back_up(source, lived, file)
        assert not file.exists()

    def test_nothing_is_backed_up_of_a_database_that_never_was(
        self, empty_url: str, tmp_path: Path, file: Path
    ) -> None:
        database = Database(empty_url)
        with pytest.raises(UserError, match="never migrated"):
            back_up(Settings(database_url=empty_url, data_dir=tmp_path), database, file)
        database.close()
        assert not [path for path in tmp_path.iterdir() if "backup" in path.name]


@pytest.fixture
def running(
    database: Database,
    source: Settings,
    submit: Callable[..., int],
    claim: Callable[..., Lease],
    epoch_point: Callable[..., dict[str, Any]],
    trial_ids: Callable[[int], list[int]],
) -> tuple[Lease, list[int]]:
    """An experiment that runs: its first trial has done two epochs."""
    number = submit(seeds=3)
    lease, trials = claim(), trial_ids(number)
    database.write(under(lease, HeldExperiment.start_trial, trials[0]))
    for epoch in (1, 2):
        database.write(under(lease, HeldExperiment.add_epoch, trials[0], reported(epoch_point(epoch))))
    folder = source.data_dir / f"trials/{trials[0]}/1"
    for epoch in (1, 2):
        write_checkpoint(folder / "checkpoints", epoch)
    (folder / "epochs.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n{"epo')
    (folder / "trial.log").write_text("two epochs\n")
    (folder / "checkpoints" / "attack.safetensors").write_bytes(b"found so far")
    (folder / "checkpoints" / "000003.safetensors.tmp").write_bytes(b"half")
    return lease, trials


class TestRunning:
    def test_what_ran_waits_again_and_its_worker_is_fenced_off(
        self,
        running: tuple[Lease, list[int]],
        database: Database,
        source: Settings,
        target: Settings,
        file: Path,
        opened: Open,
        epoch_point: Callable[..., dict[str, Any]],
    ) -> None:
        lease, (first, *_) = running
        back_up(source, database, file)
        assert restore.restore(target, file).requeued == 1
        there = opened(target)
        with there.read() as session:
            experiment = session.get_one(Experiment, lease.experiment_id)
            trial = session.get_one(Trial, first)
            assert (experiment.state, experiment.worker) == (ExperimentState.QUEUED, None)
            assert (trial.state, trial.epoch, trial.attempts, trial.turn) == (TrialState.QUEUED, 2, 0, -1)
            newest_event = session.scalars(select(Event).order_by(Event.id.desc())).first()
            assert newest_event is not None
            assert (newest_event.kind, newest_event.actor) == ("released", "restore")
        ours = there.write(lambda session: leases.claim(session, "new", None))
        assert ours is not None
        # The old installation may have claimed again and again since the backup was made.
        for claims in range(5):
            stale = Lease(lease.experiment_id, lease.fence + claims)
            with pytest.raises(LeaseLostError):
                there.write(under(stale, HeldExperiment.add_epoch, first, reported(epoch_point(3))))
        there.write(under(ours, HeldExperiment.start_trial, first))

    def test_what_ran_did_so_until_the_backup_was_made(
        self, running: tuple[Lease, list[int]], database: Database, source: Settings, tmp_path: Path, opened: Open
    ) -> None:
        """Not until it is restored, which may be months later: a quota counts these hours."""
        _, (first, *_) = running
        file, place = tmp_path / "backup", Settings(data_dir=tmp_path / "place")
        month = timedelta(days=30)
        database.write(
            lambda s: s.execute(update(Trial).where(Trial.id == first).values(started_at=now() - month - month / 10))
        )
        back_up(source, database, file)

        def older(manifest: dict[str, Any]) -> None:
            manifest["made_at"] = (now() - month).isoformat()

        restore.restore(place, remade(file, older, {}))
        with opened(place).read() as session:
            ran = session.get_one(Trial, first).run_seconds
        assert abs(ran - (month / 10).total_seconds()) < 60

    def test_it_is_of_the_moment_of_its_rows(
        self, lived: Database, source: Settings, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Files may take hours after that."""
        genuine, moments = backup._copy_files, list[Any]()

        def copy(*given: Any) -> Manifest:
            moments.append(now())
            return genuine(*given)

        monkeypatch.setattr(backup, "_copy_files", copy)
        assert datetime.fromisoformat(back_up(source, lived, file).made_at) < moments[0]

    def test_its_newest_whole_checkpoint_comes_with_it(
        self, running: tuple[Lease, list[int]], database: Database, source: Settings, target: Settings, file: Path
    ) -> None:
        _, (first, *_) = running
        folder = f"trials/{first}/1"
        damaged = source.data_dir / folder / "checkpoints" / "000002.safetensors"
        damaged.write_bytes(b"torn")
        assert back_up(source, database, file).missing == []
        restore.restore(target, file)
        assert files_of(target.data_dir / folder).keys() == {
            "checkpoints/000001.json",
            "checkpoints/000001.safetensors",
            "checkpoints/attack.safetensors",
            "epochs.jsonl",
            "trial.log",
        }

    @pytest.mark.parametrize("failure", ["crashed", "infrastructure", "bad_data", "error"])
    def test_so_does_that_of_a_trial_that_the_machine_failed(
        self,
        running: tuple[Lease, list[int]],
        database: Database,
        source: Settings,
        target: Settings,
        file: Path,
        failure: str,
    ) -> None:
        """A retry goes on from it; of any other failure it would begin anew."""
        _, (first, *_) = running
        ended = update(Trial).where(Trial.id == first).values(state=TrialState.FAILED, failure=failure)
        database.write(lambda session: session.execute(ended))
        assert back_up(source, database, file).missing == []
        restore.restore(target, file)
        kept = files_of(target.data_dir / f"trials/{first}/1").keys()
        assert {"epochs.jsonl", "trial.log"} <= kept
        of_checkpoint = {"checkpoints/000002.json", "checkpoints/000002.safetensors", "checkpoints/attack.safetensors"}
        assert kept & of_checkpoint == (of_checkpoint if failure != "error" else set())

    def test_one_that_the_machine_failed_may_have_been_pruned(
        self, running: tuple[Lease, list[int]], database: Database, source: Settings, file: Path
    ) -> None:
        _, (first, *_) = running
        ended = update(Trial).where(Trial.id == first).values(state=TrialState.FAILED, failure="crashed")
        database.write(lambda session: session.execute(ended))
        shutil.rmtree(source.data_dir / f"trials/{first}/1/checkpoints")
        assert back_up(source, database, file).missing == []

    def test_the_journal_is_read_after_the_checkpoint(
        self,
        running: tuple[Lease, list[int]],
        database: Database,
        source: Settings,
        file: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """An epoch that is in a checkpoint and in no journal would be lost."""
        opened: list[str] = []
        genuine = DataFolder.open

        def noted(self: DataFolder, path: str) -> Any:
            opened.append(path.rpartition("/")[2])
            return genuine(self, path)

        monkeypatch.setattr(DataFolder, "open", noted)
        back_up(source, database, file)
        assert opened.index("epochs.jsonl") > max(i for i, name in enumerate(opened) if name.startswith("000002"))

    @pytest.mark.parametrize(
        ("when", "path"), [("after", "000002.safetensors"), ("before", "epochs.jsonl"), ("after", "trial.log")]
    )
    def test_another_attempt_begins_meanwhile(
        self,
        running: tuple[Lease, list[int]],
        database: Database,
        source: Settings,
        target: Settings,
        file: Path,
        monkeypatch: pytest.MonkeyPatch,
        path: str,
        when: str,
    ) -> None:
        """The attempt that is the newest one in the backup has all that was done."""
        _, (first, *_) = running
        genuine = DataFolder.open
        begun = list[str]()

        def begin_another(self: DataFolder, asked: str) -> Any:
            opened = genuine(self, asked) if when == "after" else None
            if asked.endswith(path) and not begun:
                begun.append(begin(Folder(source.data_dir), first, Attempt(1, 1)))
            return opened or genuine(self, asked)

        monkeypatch.setattr(DataFolder, "open", begin_another)
        assert back_up(source, database, file).missing == []
        monkeypatch.undo()
        assert begun
        restore.restore(target, file)
        resumed = begin(Folder(target.data_dir), first, Attempt(9))
        assert files_of(target.data_dir / resumed).keys() >= {
            "checkpoints/000002.json",
            "checkpoints/000002.safetensors",
            "epochs.jsonl",
            "trial.log",
        }

    def test_a_trial_that_ends_meanwhile_begins_anew(
        self, running: tuple[Lease, list[int]], database: Database, source: Settings, file: Path
    ) -> None:
        _, (first, *_) = running
        shutil.rmtree(source.data_dir / f"trials/{first}/1/checkpoints")
        (missing,) = back_up(source, database, file).missing
        assert missing.expected
        assert "begins anew" in missing.reason

    def test_while_others_write_it_is_one_moment(
        self,
        database: Database,
        source: Settings,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        trial_ids: Callable[[int], list[int]],
        trial_result: Callable[..., dict[str, Any]],
        protocol: Callable[..., ProtocolRecord],
        file: Path,
        target: Settings,
        opened: Open,
    ) -> None:
        number = submit(seeds=200)
        lease, trials = claim(), trial_ids(number)
        begun, over = threading.Event(), threading.Event()

        def write() -> None:
            for trial_id in trials:
                if over.is_set():
                    return
                content = f"weights {trial_id}".encode()
                path = f"trials/{trial_id}/1/model.safetensors"
                (source.data_dir / path).parent.mkdir(parents=True)
                (source.data_dir / path).write_bytes(content)
                artifact = ArtifactFile("model", path, hashlib.sha256(content).hexdigest(), len(content))

                def work(session: Any, trial_id: int = trial_id, artifact: ArtifactFile = artifact) -> None:
                    with hold(session, lease) as held:
                        held.start_trial(trial_id)
                        held.finish_trial(trial_id, trial_result(), protocol(), [artifact])

                database.write(work)
                if trial_id == trials[10]:
                    begun.set()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert begun.wait(60)
            for attempt in range(3):
                made = file.with_name(f"{file.name}.{attempt}")
                manifest = back_up(source, database, made)
                assert manifest.missing == []
                count = {table.name: table.rows for table in manifest.tables}
                assert count["results"] == count["artifacts"] >= 10
                assert len([one for one in manifest.files if one.path.startswith("trials/")]) >= count["artifacts"]
        finally:
            over.set()
            writer.join()
        restore.restore(target, file.with_name(f"{file.name}.2"))
        with opened(target).read() as session:
            finished = session.scalar(select(func.count()).where(Trial.state == TrialState.SUCCEEDED))
            assert finished == count["results"]


class TestFiles:
    def test_a_manifested_file_that_is_gone_or_changed_is_reported(
        self, lived: Database, source: Settings, file: Path
    ) -> None:
        with lived.read() as session:
            path = session.scalars(select(Artifact.path)).one()
        (source.data_dir / path).write_bytes(b"others")
        (missing,) = back_up(source, lived, file).missing
        assert (missing.path, missing.expected) == (path, False)
        assert "SHA-256" in missing.reason
        (source.data_dir / path).unlink()
        (missing,) = back_up(source, lived, file.with_name("second")).missing
        assert (missing.path, missing.expected) == (path, False)

    def test_one_that_was_taken_away_meanwhile_is_no_damage(
        self, lived: Database, source: Settings, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        genuine = backup._copy_files

        def retained(folder: DataFolder, database: Database, found: Any, writer: Any, say: Any) -> Manifest:
            database.write(lambda session: session.execute(text("DELETE FROM artifacts")))
            for path, _ in found.artifacts:
                (folder.path / path).unlink()
            return genuine(folder, database, found, writer, say)

        monkeypatch.setattr(backup, "_copy_files", retained)
        (missing,) = back_up(source, lived, file).missing
        assert missing.expected
        assert "while the backup was made" in missing.reason

    def test_what_is_removed_or_being_deleted_is_no_damage(self, lived: Database, source: Settings, file: Path) -> None:
        """Its files may be gone for hours before its rows are."""
        shutil.rmtree(source.data_dir / "trials")
        assert [one.expected for one in back_up(source, lived, file).missing] == [False]
        lived.write(lambda session: session.execute(update(Artifact).values(removed_at=now())))
        assert back_up(source, lived, file.with_name("second")).missing == []
        lived.write(lambda session: session.execute(update(Artifact).values(removed_at=None)))
        lived.write(lambda session: session.execute(update(Experiment).values(deleted_at=now())))
        assert back_up(source, lived, file.with_name("third")).missing == []

    def test_links_are_not_followed(self, lived: Database, source: Settings, file: Path, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("not ours")
        with lived.read() as session:
            path = source.data_dir / session.scalars(select(Artifact.path)).one()
        path.unlink()
        path.symlink_to(secret)
        (path.parent / "link.log").symlink_to(secret)
        (path.parent / "more").symlink_to(tmp_path)
        os.mkfifo(path.parent / "pipe")
        manifest = back_up(source, lived, file)
        assert [one.path for one in manifest.missing] == [str(path.relative_to(source.data_dir))]
        assert b"not ours" not in file.read_bytes()

    def test_a_manifest_s_path_that_leads_out_is_not_read(self, lived: Database, source: Settings, file: Path) -> None:
        outside = source.data_dir.parent / "outside"
        outside.write_text("not ours")
        lived.write(lambda session: session.execute(update(Artifact).values(path="../outside")))
        (missing,) = back_up(source, lived, file).missing
        assert missing.path == "../outside"
        assert b"not ours" not in file.read_bytes()

    def test_tables_of_others_beside_ours_are_theirs(
        self, lived: Database, source: Settings, target: Settings, file: Path, opened: Open
    ) -> None:
        """As extensions of PostgreSQL make some; bytes and such names could not be copied."""
        with lived.engine.begin() as connection:
            kind = "BYTEA" if connection.dialect.name == "postgresql" else "BLOB"
            connection.execute(text(f'CREATE TABLE "Lab Notes" (id INTEGER PRIMARY KEY, note {kind})'))
            connection.execute(text('INSERT INTO "Lab Notes" VALUES (1, :note)'), {"note": b"0"})
        assert back_up(source, lived, file).missing == []
        restore.restore(target, file)
        assert contents(opened(target)) == fenced_off(contents(lived))
        with lived.engine.begin() as connection:
            assert connection.scalar(text('SELECT count(*) FROM "Lab Notes"')) == 1

    def test_own_data_sets_that_trials_name_are_kept(
        self, database: Database, source: Settings, target: Settings, file: Path, submit: Callable[..., int]
    ) -> None:
        submit()
        database.write(lambda session: session.execute(update(Trial).where(Trial.seed == 0).values(dataset="npz:mine")))
        database.write(lambda s: s.execute(update(Trial).where(Trial.seed == 1).values(dataset="folder:photos")))
        data = source.data_dir / "datasets"
        for name in ("mine.npz", "others.npz", "mine.sha256.json", "photos/train/a/1.png", "cache/big", "cifar/raw"):
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            (data / name).write_text(name)
        back_up(source, database, file)
        restore.restore(target, file)
        kept = {"mine.npz", "mine.sha256.json", "photos/train/a/1.png"}
        assert files_of(target.data_dir / "datasets").keys() == kept

    def test_own_data_sets_that_are_linked_there_are_kept_too(
        self, database: Database, source: Settings, target: Settings, file: Path, submit: Callable[..., int]
    ) -> None:
        """As DVC and git-annex do: trials read them so. What a link leads back to is there once."""
        submit()
        for seed, name in ((0, "npz:mine"), (1, "folder:photos")):
            named = update(Trial).where(Trial.seed == seed).values(dataset=name)
            database.write(functools.partial(Session.execute, statement=named))
        elsewhere, sets = source.data_dir.parent / "elsewhere", source.data_dir.parent / "sets"
        photos = elsewhere / "photos/train/a"
        for folder in (source.data_dir, sets, photos):
            folder.mkdir(parents=True, exist_ok=True)
        (source.data_dir / "datasets").symlink_to(sets)
        (sets / "mine.npz").symlink_to(elsewhere / "mine.npz")
        (elsewhere / "mine.npz").write_text("arrays")
        (sets / "photos").symlink_to(elsewhere / "photos")
        (photos / "1.png").write_text("photo")
        (photos / "2.png").symlink_to("1.png")
        (photos / "back").symlink_to(photos.parent)
        (photos / "nowhere").symlink_to("nowhere")
        manifest = back_up(source, database, file)
        assert manifest.missing == []
        restore.restore(target, file)
        assert files_of(target.data_dir / "datasets") == {
            "mine.npz": b"arrays",
            "photos/train/a/1.png": b"photo",
            "photos/train/a/2.png": b"photo",
        }

    @pytest.mark.parametrize("used", [True, False])
    def test_a_file_of_an_own_data_set_that_was_used_is_missed(
        self, database: Database, source: Settings, file: Path, submit: Callable[..., int], used: bool
    ) -> None:
        """One that was never there is of a name somebody mistyped."""
        submit()
        database.write(lambda session: session.execute(update(Trial).where(Trial.seed == 0).values(dataset="npz:mine")))
        data = source.data_dir / "datasets"
        data.mkdir(parents=True)
        if used:
            ContentRecord.make("npz:mine", data, "0" * 64, {"mine.npz": "0" * 64})
        (missing,) = back_up(source, database, file).missing
        assert (missing.path, missing.expected) == ("datasets/mine.npz", not used)


class TestWriting:
    def test_what_no_reader_would_take_is_no_backup(
        self, lived: Database, source: Settings, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(archive, "_LARGEST_MANIFEST", 1000)
            with pytest.raises(UserError, match=r"one backup cannot name .* files: delete old experiments, or prune"):
                back_up(source, lived, file)
        with monkeypatch.context() as patched:
            patched.setattr(archive, "LONGEST_ROW", 100)
            with pytest.raises(UserError, match=r"row 1 of table .* has .* bytes, too many for a backup"):
                back_up(source, lived, file)
        assert not file.exists()

    @pytest.fixture
    def database_url(self, sqlite_url: str) -> str:
        """Where the backup comes from plays no part."""
        return sqlite_url

    def test_what_is_cut_short_leaves_nothing(
        self, lived: Database, source: Settings, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(backup, "_copy_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            back_up(source, lived, file)
        assert [path.name for path in file.parent.iterdir() if file.name in path.name] == []

    def test_nobody_else_may_read_what_is_being_written(
        self, lived: Database, source: Settings, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file.with_name(f"{file.name}.db.partial").write_text("left by somebody who was killed")
        genuine = backup._read
        modes: dict[str, int] = {}

        def look(*given: Any) -> Any:
            modes.update({path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.glob(f"{file.name}*")})
            return genuine(*given)

        monkeypatch.setattr(backup, "_read", look)
        before = os.umask(0)
        try:
            back_up(source, lived, file)
        finally:
            os.umask(before)
        assert len(modes) >= 2
        assert set(modes.values()) == {0o600}
        assert not list(file.parent.glob("*.partial*"))

    def test_a_backup_is_never_written_over(self, lived: Database, source: Settings, file: Path) -> None:
        file.write_text("precious")
        with pytest.raises(UserError, match="exists"):
            back_up(source, lived, file)
        assert file.read_text() == "precious"

    def test_a_link_in_the_way_is_not_written_through(self, lived: Database, source: Settings, file: Path) -> None:
        other = file.with_name("other")
        file.with_name(f"{file.name}.partial").symlink_to(other)
        with pytest.raises(OSError, match="symbolic"):
            back_up(source, lived, file)
        assert not other.exists()

    def test_two_at_once_do_not_meet(self, lived: Database, source: Settings, file: Path) -> None:
        with archive.writing(file) as first:
            first.write(b"mine")
            with pytest.raises(UserError, match="another backup"), archive.writing(file):
                pass
        assert file.read_bytes() == b"mine"

    @pytest.mark.parametrize("name", ["lab.partial", "absent/lab"])
    def test_names_that_are_none(self, lived: Database, source: Settings, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match="FILE"):
            back_up(source, lived, tmp_path / name)


@dataclass(frozen=True)
class Backups:
    """Two of one installation, of which in between the experiments were renamed and a log was written."""

    first: Path
    second: Path


@pytest.fixture(scope="session")
def backups(lives: Places, tmp_path_factory: pytest.TempPathFactory) -> Backups:
    """On SQLite: where a backup comes from plays no part where it goes."""
    folder = tmp_path_factory.mktemp("backups")
    settings = Settings(database_url=f"sqlite:///{folder / 'ttsv.db'}", data_dir=folder / "data")
    lives("sqlite").copy_to(str(settings.database_url), settings.data_dir, None)
    made = Backups(folder / "first", folder / "second")
    with contextlib.closing(Database(settings.url)) as database:
        back_up(settings, database, made.first)
        database.write(lambda session: session.execute(update(Experiment).values(name="second time")))
        (settings.data_dir / "trials/1/1/trial.log").write_text("second time")
        back_up(settings, database, made.second)
    return made


@pytest.fixture
def whole(backups: Backups, file: Path) -> Path:
    """A backup, to be done to as a test likes."""
    shutil.copyfile(backups.first, file)
    return file


class TestRefused:
    def test_over_what_is_there_only_by_force(self, whole: Path, target: Settings, opened: Open) -> None:
        restore.restore(target, whole)
        before = files_of(target.data_dir)
        with pytest.raises(UserError, match="--force"):
            restore.restore(target, whole)
        assert files_of(target.data_dir) == before
        (target.data_dir / "trials/77/1").mkdir(parents=True)
        (target.data_dir / "trials/77/1/old").write_text("old")
        done = restore.restore(target, whole, force=True)
        assert done.aside is not None
        assert (done.aside / "trials/77/1/old").read_text() == "old"
        assert not (target.data_dir / "trials/77").exists()
        if target.database_url is None:
            assert (done.aside / "ttsv.db").is_file()
        database = opened(target)
        with database.read() as session:
            assert session.scalar(select(func.count()).select_from(Experiment)) == 3
        refuse_half_restored(target)

    def test_ids_of_what_was_there_are_not_given_again(self, whole: Path, target: Settings, opened: Open) -> None:
        if target.database_url is None:
            pytest.skip("the old file is moved aside whole: nobody who has it open writes into the new one")
        restore.restore(target, whole)
        database = opened(target)
        database.write(lambda session: session.execute(text("SELECT setval('experiments_id_seq', 500000)")))
        database.close()
        restore.restore(target, whole, force=True)
        with opened(target).read() as session:
            last = session.scalar(text("SELECT last_value FROM experiments_id_seq"))
        assert last == 500_000 + GAPS["experiments"]

    def test_over_a_file_that_is_no_database_any_more(self, whole: Path, tmp_path: Path, opened: Open) -> None:
        target = Settings(data_dir=tmp_path / "target")
        target.data_dir.mkdir()
        (target.data_dir / "ttsv.db").write_bytes(b"damaged" * 1000)
        with pytest.raises(UserError, match="the database: is there already"):
            restore.restore(target, whole)
        done = restore.restore(target, whole, force=True)
        assert done.aside is not None
        assert (done.aside / "ttsv.db").read_bytes() == b"damaged" * 1000
        with opened(target).read() as session:
            assert session.scalar(select(func.count()).select_from(Experiment)) == 3

    def test_where_the_database_is_to_be_there_is_a_folder(self, whole: Path, tmp_path: Path) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home/precious").touch()
        settings = Settings(data_dir=tmp_path / "target", database_url=f"sqlite:///{tmp_path / 'home'}")
        for force in (False, True):
            with pytest.raises(UserError, match="home is no file: let TTSV_DATABASE_URL name one"):
                restore.restore(settings, whole, force=force)
        assert (tmp_path / "home/precious").exists()

    def test_two_at_once_do_not_meet(self, whole: Path, tmp_path: Path) -> None:
        target = Settings(data_dir=tmp_path / "target")
        target.data_dir.mkdir()
        with restore._alone(target.data_dir), pytest.raises(UserError, match="another restore"):
            restore.restore(target, whole)
        restore.restore(target, whole)

    def test_what_is_in_the_way_of_files_counts(self, whole: Path, target: Settings) -> None:
        (target.data_dir / "trials/1").mkdir(parents=True)
        with pytest.raises(UserError, match="trials: is there already"):
            restore.restore(target, whole)

    def test_a_worker_that_lives(self, whole: Path, target: Settings, opened: Open) -> None:
        database = opened(target)
        migrate(database)
        database.write(lambda session: leases.greet(session, "living", 1, 0))
        database.close()
        for force in (False, True):
            with pytest.raises(UserError, match="living was heard of in the last minute"):
                restore.restore(target, whole, force=force)
        database.write(lambda s: s.execute(update(Worker).values(seen_at=now() - timedelta(minutes=2))))
        database.close()
        restore.restore(target, whole)

    def test_a_service_that_has_it_open(self, whole: Path, target: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.upkeep.target._LOOK_SECONDS", 0.02)
        here, there = FRESH.Pipe()
        process = FRESH.Process(target=keep_open, args=(target, there))
        process.start()
        try:
            assert here.poll(60)
            assert here.recv() == "open"
            with pytest.raises(UserError, match="stop the service and its workers"):
                restore.restore(target, whole, force=True)
        finally:
            process.kill()
            process.join()
            here.close()
            there.close()

    def test_a_service_that_opens_it_while_files_are_prepared(
        self, whole: Path, tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It looked for a restore that was cut short before there was one, and would write into what is moved aside."""
        place = Settings(data_dir=tmp_path / "place")
        restore.restore(place, whole)
        before, looks = files_of(place.data_dir), list[list[int]]()

        def opened_later(_path: Path) -> list[int]:
            looks.append([4711] if looks else [])
            return looks[-1]

        monkeypatch.setattr("service.upkeep.target._processes_with", opened_later)
        with pytest.raises(UserError, match="open in process 4711: stop the service and its workers"):
            restore.restore(place, whole, force=True)
        assert files_of(place.data_dir) == before

    def test_no_room(self, whole: Path, target: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(whole.parent)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=2**20))
        with pytest.raises(UserError, match="make room"):
            restore.restore(target, whole)
        assert not files_of(target.data_dir)

    def test_bytes_that_changed(self, whole: Path, tmp_path: Path) -> None:
        """Wherever a byte is another one: all but the few that say nothing, as times and attributes in the zip."""
        sound = whole.read_bytes()
        refused = 0
        for place in range(0, len(sound), len(sound) // 300):
            torn = bytearray(sound)
            torn[place] ^= 0x5A
            whole.write_bytes(bytes(torn))
            try:
                with Reader(whole) as found:
                    found.verify(lambda _size: None)
            except UserError:
                refused += 1
        assert refused > 280
        torn = bytearray(sound)
        torn[sound.index(b"weights")] ^= 1
        whole.write_bytes(bytes(torn))
        with pytest.raises(UserError, match="nothing was changed"):
            restore.restore(Settings(data_dir=tmp_path / "target"), whole)
        assert files_of(tmp_path / "target") == {}

    @pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
    def test_a_file_that_was_cut(self, whole: Path, tmp_path: Path, kept: float) -> None:
        sound = whole.read_bytes()
        whole.write_bytes(sound[: int(kept if kept > 1 else kept * len(sound))])
        with pytest.raises(UserError, match="is no whole backup"):
            restore.restore(Settings(data_dir=tmp_path / "target"), whole)

    def test_one_that_was_never_finished(self, whole: Path, tmp_path: Path) -> None:
        partial = whole.rename(whole.with_name(whole.name + ".partial"))
        with pytest.raises(UserError, match="never finished"):
            restore.restore(Settings(data_dir=tmp_path / "target"), partial)


class TestHostile:
    """Archives that somebody else made."""

    @pytest.fixture
    def refused(self, whole: Path, tmp_path: Path) -> Callable[..., str]:
        """Alters the manifest and adds members; nothing may be written anywhere."""

        def refused(alter: Callable[[dict[str, Any]], None], members: dict[str, bytes] | None = None) -> str:
            made = remade(whole, alter, members or {})
            place = tmp_path / "deep" / "target"
            settings = Settings(data_dir=place)
            with pytest.raises(UserError) as caught:
                restore.restore(settings, made)
            assert files_of(tmp_path / "deep") == {}
            made.unlink()
            return str(caught.value)

        return refused

    @pytest.mark.parametrize(
        "path",
        [
            "../outside",
            "/etc/passwd",
            "trials/1/1/../../../../outside",
            "trials/../../outside",
            "trials/1/1/./x",
            "trials/1/1//x",
            "trials/1/1/",
            "trials/x/1/model",
            "trials/1/model",
            "trials\\1\\1\\model",
            "trials/1/1/a\x00b",
            "trials/1/1/" + "x" * 256,
            "trials/1/1/" + "/".join("x" * 40),
            "ttsv.db",
            "token",
            "restore.json",
            "datasets",
            "datasets/../ttsv.db",
            "",
        ],
    )
    def test_paths(self, refused: Callable[..., str], path: str) -> None:
        data = b"x"
        entry = {"path": path, "size": 1, "sha256": hashlib.sha256(data).hexdigest()}
        said = refused(lambda manifest: manifest["files"].append(entry), {f"files/{path}": data})
        assert "no path of the data folder" in said

    def test_a_file_where_another_needs_a_folder(self, refused: Callable[..., str]) -> None:
        one, two = b"x", b"y"
        names = {"trials/9/9/a": one, "trials/9/9/a/b": two}
        entries = [
            {"path": path, "size": 1, "sha256": hashlib.sha256(data).hexdigest()} for path, data in names.items()
        ]
        with pytest.raises(OSError, match=r"exists|directory"):
            refused(lambda manifest: manifest["files"].extend(entries), {f"files/{p}": d for p, d in names.items()})

    def test_members_that_are_not_named_are_nothing(self, whole: Path, tmp_path: Path) -> None:
        made = remade(whole, lambda _manifest: None, {"../../outside": b"x", "files/trials/5/5/x": b"y"})
        restore.restore(Settings(data_dir=tmp_path / "deep" / "target"), made)
        assert not (tmp_path / "outside").exists()
        assert not (tmp_path / "deep/target/trials/5").exists()

    def test_a_member_larger_than_it_is_said(self, refused: Callable[..., str]) -> None:
        entry = {"path": "trials/9/9/bomb", "size": 10, "sha256": "0" * 64}
        said = refused(lambda manifest: manifest["files"].append(entry), {"files/trials/9/9/bomb": bytes(2**20)})
        assert "its manifest says 10" in said

    @pytest.mark.slow
    def test_tables_that_are_none_of_ours(self, refused: Callable[..., str]) -> None:
        empty = {"columns": ["id"], "rows": 0, "size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
        for name in ("alembic_version", "tallies", "pg_class", "sqlite_master"):
            said = refused(
                lambda manifest, name=name: manifest["tables"].append({"name": name, **empty}),
                {f"tables/{name}.jsonl": b""},
            )
            assert name in said

    @pytest.mark.parametrize(
        ("line", "word"),
        [(b"[1]\n", "one value per column"), (b"{}\n", "one value per column"), (b"nonsense\n", "projects")],
    )
    def test_rows_that_are_none(self, refused: Callable[..., str], line: bytes, word: str) -> None:
        def alter(manifest: dict[str, Any]) -> None:
            (entry,) = (one for one in manifest["tables"] if one["name"] == "projects")
            entry |= {"size": len(line), "sha256": hashlib.sha256(line).hexdigest(), "rows": 1}

        assert word in refused(alter, {"tables/projects.jsonl": line})

    @pytest.mark.parametrize("column", ["id; DROP TABLE trials", "nosuch"])
    def test_columns_that_are_none(self, refused: Callable[..., str], column: str) -> None:
        def alter(manifest: dict[str, Any]) -> None:
            manifest["tables"][0]["columns"][0] = column

        assert "column" in refused(alter)

    def test_rows_that_refer_to_nothing(self, refused: Callable[..., str]) -> None:
        def alter(manifest: dict[str, Any]) -> None:
            manifest["tables"] = [one for one in manifest["tables"] if one["name"] != "protocols"]

        with pytest.raises(RuntimeError, match="refer to nothing"):
            refused(alter)

    def test_a_manifest_that_is_none(self, refused: Callable[..., str]) -> None:
        assert "damaged: format" in refused(lambda manifest: manifest.update(format="other"))
        assert "newer ttsv" in refused(lambda manifest: manifest.update(version=2))
        assert "damaged" in refused(lambda manifest: manifest.update(surprise=1))
        assert "twice" in refused(lambda manifest: manifest["files"].append(manifest["files"][0]))


def remade(whole: Path, alter: Callable[[dict[str, Any]], None], members: dict[str, bytes]) -> Path:
    """The backup with another manifest, and with other members."""
    made = whole.with_name("made")
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(made, "w") as new:
        manifest = json.loads(old.read("manifest.json"))
        alter(manifest)
        for name in old.namelist():
            if name != "manifest.json" and name not in members:
                new.writestr(name, old.read(name))
        for name, data in members.items():
            new.writestr(name, data)
        new.writestr("manifest.json", json.dumps(manifest))
    return made


@pytest.fixture(scope="session")
def restored(backups: Backups, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Installations into which the first backup was restored. To be copied."""

    @functools.cache
    def restored(kind: str) -> Place:
        folder = tmp_path_factory.mktemp("restored") / "data"
        server = server_of(request, kind)
        place = Place(f"sqlite:///{folder / 'ttsv.db'}" if server is None else server.create(), folder)
        url = None if server is None else place.url
        restore.restore(Settings(database_url=url, data_dir=folder), backups.first)
        return place

    return restored


@pytest.mark.slow
class TestCutShort:
    """A restore that ends at any moment: nothing of it, or all of it."""

    @pytest.fixture
    def twice(self, backups: Backups, restored: Places, target: Settings, request: pytest.FixtureRequest) -> Path:
        """The target has the first backup; the second is what is restored."""
        kind = "sqlite" if target.database_url is None else "postgres"
        url = target.url.render_as_string(hide_password=False)
        restored(kind).copy_to(url, target.data_dir, server_of(request, kind))
        return backups.second

    def names(self, target: Settings, opened: Open) -> set[str]:
        database = opened(target)
        with database.read() as session:
            found = set(session.scalars(select(Experiment.name)))
        database.close()
        return found

    @pytest.mark.parametrize(
        ("moves", "how"), [*((moves, "killed") for moves in range(6)), (0, "raised"), (3, "raised")]
    )
    def test_between_renames(
        self,
        twice: Path,
        target: Settings,
        opened: Open,
        monkeypatch: pytest.MonkeyPatch,
        moves: int,
        how: str,
    ) -> None:
        done: list[Move] = []
        genuine, settle = Move.do, Target.settle

        def do(move: Move) -> None:
            if len(done) == moves:
                raise KeyboardInterrupt
            done.append(move)
            genuine(move)

        monkeypatch.setattr(Move, "do", do)
        if how == "killed":  # nobody takes anything back
            monkeypatch.setattr(Target, "settle", lambda *_: False)
        with contextlib.suppress(KeyboardInterrupt):
            restore.restore(target, twice, force=True)
            assert len(done) <= moves
            return  # there are not so many
        monkeypatch.setattr(Move, "do", genuine)
        monkeypatch.setattr(Target, "settle", settle)
        if how == "killed":
            with pytest.raises(UserError, match="cut short"):
                refuse_half_restored(target)
            with contextlib.closing(Target.of(target)) as place:
                restore._recover(target, place)
        refuse_half_restored(target)
        assert "second time" not in self.names(target, opened)
        assert (target.data_dir / "trials/1/1/trial.log").read_text() == "it began\n"
        restore.restore(target, twice, force=True)
        assert self.names(target, opened) == {"second time"}
        assert (target.data_dir / "trials/1/1/trial.log").read_text() == "second time"
        assert not (target.data_dir / "restore.partial").exists()

    def test_after_the_last_change(
        self, twice: Path, target: Settings, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def killed(_self: Any) -> None:
            raise KeyboardInterrupt

        genuine = Journal.end
        monkeypatch.setattr(Journal, "end", killed)
        with pytest.raises(KeyboardInterrupt):
            restore.restore(target, twice, force=True)
        monkeypatch.setattr(Journal, "end", genuine)
        with pytest.raises(UserError, match="cut short"):
            refuse_half_restored(target)
        with contextlib.closing(Target.of(target)) as place:
            restore._recover(target, place)
        refuse_half_restored(target)
        assert self.names(target, opened) == {"second time"}
        assert (target.data_dir / "trials/1/1/trial.log").read_text() == "second time"

    @pytest.mark.parametrize(
        ("moment", "took"),
        [
            deep("extract 1", False),
            ("rows", False),
            deep("move 0", False),
            deep("move 2", False),
            ("moved", None),
            deep("end", True),
        ],
    )
    def test_by_the_death_of_its_process(
        self, twice: Path, target: Settings, opened: Open, moment: str, took: bool | None
    ) -> None:
        """SIGKILL of a real one, with its connections and locks: nothing starts on what it left, the next mends it.

        Where all is moved an SQLite file is in its place already, while PostgreSQL's transaction has not ended.
        """
        took = target.database_url is None if took is None else took
        process = FRESH.Process(target=restore_and_die, args=(target, twice, moment))
        process.start()
        process.join(300)
        assert process.exitcode == -signal.SIGKILL
        journal = target.data_dir / "restore.json"
        assert journal.exists() == (moment not in ("extract 1", "rows"))
        if journal.exists():
            with pytest.raises(UserError, match="cut short"):
                refuse_half_restored(target)
            with contextlib.closing(Target.of(target)) as place:
                place.refuse_in_use()  # a server takes a moment to notice that a client is gone
                restore._recover(target, place)
        refuse_half_restored(target)
        expected = "second time" if took else "it began\n"
        assert (target.data_dir / "trials/1/1/trial.log").read_text() == expected
        assert ("second time" in self.names(target, opened)) == took
        restore.restore(target, twice, force=True)
        assert self.names(target, opened) == {"second time"}
        assert (target.data_dir / "trials/1/1/trial.log").read_text() == "second time"
        left = {path.name for path in target.data_dir.iterdir()}
        assert not left & {"restore.partial", "restore.json", "ttsv.db.restore.partial"}

    def test_in_the_middle_of_the_rows(
        self, twice: Path, target: Settings, opened: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> int:
            raise OSError("no space left")

        monkeypatch.setattr("service.upkeep.target.bring_up", broken)
        before = files_of(target.data_dir)
        with pytest.raises(OSError, match="no space"):
            restore.restore(target, twice, force=True)
        assert {name: data for name, data in files_of(target.data_dir).items() if "ttsv.db" not in name} == {
            name: data for name, data in before.items() if "ttsv.db" not in name
        }
        assert "second time" not in self.names(target, opened)


class TestCommands:
    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        def run(settings: Settings, *arguments: object, code: int = 0) -> Any:
            env = {"TTSV_DATA_DIR": str(settings.data_dir), "TTSV_DATABASE_URL": settings.database_url}
            done = CliRunner().invoke(app, list(map(str, arguments)), env=env)
            assert done.exit_code == code, (done.output, done.exception)
            return done

        return run

    @pytest.mark.slow
    def test_there_and_back(
        self, run: Callable[..., Any], lived: Database, source: Settings, target: Settings, file: Path
    ) -> None:
        said = run(source, "backup", file).stdout
        assert "3 files" in said
        assert "restored: the installation of" in run(target, "restore", file).stdout
        said = run(target, "restore", file, code=1).stderr
        assert "--force" in said
        done = json.loads(run(target, "restore", file, "--force", "--json").stdout)
        assert Path(done["aside"]).is_dir()
        assert done["manifest"]["revision"] == newest()
        assert "exists" in run(source, "backup", file, code=1).stderr

    def test_damage_ends_with_one(self, run: Callable[..., Any], lived: Database, source: Settings, file: Path) -> None:
        (source.data_dir / "trials/1/1/model.safetensors").unlink()
        said = run(source, "backup", file, code=1)
        assert "warning: trials/1/1/model.safetensors is not in it" in said.stderr
        with Reader(file) as found:
            assert len(found.manifest.missing) == 1

    def test_without_the_secret_of_its_keys_it_ends_with_one(
        self, run: Callable[..., Any], lived: Database, source: Settings, file: Path
    ) -> None:
        (source.data_dir / "key-secret").unlink()
        assert "warning: key-secret is not in it: without it none" in run(source, "backup", file, code=1).stderr
        with Reader(file) as found:
            assert [one.path for one in found.manifest.missing if not one.expected] == ["key-secret"]
        file.unlink()
        lived.write(lambda session: session.execute(update(ApiKey).values(revoked_at=now())))
        assert run(source, "backup", file).stderr == ""

    def test_no_service_starts_on_half_a_restore(self, run: Callable[..., Any], source: Settings) -> None:
        source.data_dir.mkdir()
        (source.data_dir / "restore.json").write_text("{}")
        for command_ in ("api", "worker", "serve", "migrate", "demo"):
            assert "cut short" in run(source, command_, code=1).stderr
