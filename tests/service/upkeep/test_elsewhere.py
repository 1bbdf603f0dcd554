"""Backups, restores, deletion and retention where TTSV_STORAGE keeps the files of trials: a folder, or a bucket."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update
from starlette.testclient import TestClient
from typer.testing import CliRunner

from service.access.security import ANYONE
from service.database import Artifact, Experiment, Trial, TrialState, now
from service.database.engine import Database
from service.errors import UserError
from service.experiments.artifacts import KEPT, content_of
from service.main import create_app
from service.queue.leases import Lease
from service.queue.trials import HeldExperiment
from service.settings import Settings
from service.storage import Folder, Objects, Store
from service.upkeep import restore
from service.upkeep.backup import back_up
from service.upkeep.deletion import mark, remove_marked
from service.upkeep.files import DataFolder
from service.upkeep.moves import Journal, Move
from service.upkeep.places import Bucket, Disk
from service.upkeep.retention import Rules, finish, plan, prune
from service.upkeep.shelves import STAGE
from service.upkeep.target import Target
from tests.examples import deep
from tests.held import under
from tests.service.upkeep.conftest import write_checkpoint
from workers.cli.__main__ import app
from workers.worker import upkeep as upkeep_of_worker
from workers.worker.upkeep import Upkeep

Elsewhere = Callable[[Settings, str], Settings]
Open = Callable[[Settings], Database]
EVALUATING = 3
"""The experiment of `Installation` whose networks nobody evaluates."""


def objects_in(folder: Path) -> Store:
    """What pyarrow makes of a folder: it answers as a bucket does."""
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    folder.mkdir(parents=True, exist_ok=True)
    return Objects(SubTreeFileSystem(str(folder), LocalFileSystem()))


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """What the database is of plays no part."""
    return sqlite_url


@pytest.fixture(params=["folder", "objects", "s3"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Settings of an installation with a store of this name."""
    if request.param == "s3":
        options = request.getfixturevalue("s3_server")
        drawn = os.urandom(4).hex()

        def in_bucket(settings: Settings, name: str) -> Settings:
            from pyarrow.fs import FileSystem

            filesystem, _ = FileSystem.from_uri(f"s3://{name}-{drawn}?{options}")
            filesystem.create_dir(f"{name}-{drawn}")
            return settings.model_copy(update={"storage": f"s3://{name}-{drawn}/prefix?{options}"})

        return in_bucket
    if request.param == "objects":
        opened: dict[str, Store] = {}

        def open_objects(place: str) -> Store:
            return opened.setdefault(place, objects_in(tmp_path / "stores" / place.removeprefix("s3://")))

        for module in (
            "service.upkeep.files",
            "service.upkeep.moves",
            "service.upkeep.shelves",
            "service.experiments.artifacts",
        ):
            monkeypatch.setattr(f"{module}.open_storage", open_objects)
        return lambda settings, name: settings.model_copy(update={"storage": f"s3://{name}/prefix"})
    return lambda settings, name: settings.model_copy(update={"storage": str(tmp_path / "stores" / name)})


def store_of(settings: Settings) -> Store:
    kept = DataFolder.of(settings).kept
    assert isinstance(kept, Disk | Bucket)
    return Folder(kept.path) if isinstance(kept, Disk) else kept.store


def put(store: Store, path: str, content: bytes) -> None:
    store.write(path, io.BytesIO(content), len(content))


def carried(settings: Settings) -> None:
    """Moves what trials left in the data folder into the store."""
    store, trials = store_of(settings), settings.data_dir / "trials"
    for path in sorted(trials.rglob("*")):
        if path.is_file():
            put(store, path.relative_to(settings.data_dir).as_posix(), path.read_bytes())
            path.unlink()


def in_store(settings: Settings) -> dict[str, bytes]:
    store = store_of(settings)
    return {path: store.read(path, 0, 2**20) for path in (f"trials/{name}" for name in store.files("trials"))}


@pytest.fixture
def kept(lived: Database, source: Settings, elsewhere: Elsewhere) -> Settings:
    """The installation with a life behind it, its files of trials in a store."""
    settings = elsewhere(source, "source")
    carried(settings)
    return settings


@pytest.fixture
def place(tmp_path: Path, elsewhere: Elsewhere) -> Settings:
    """An installation with another store, that was never started."""
    return elsewhere(Settings(data_dir=tmp_path / "target"), "target")


def artifacts(database: Database) -> dict[str, Artifact]:
    with database.read() as session:
        return {row.path: row for row in session.scalars(select(Artifact).where(Artifact.removed_at.is_(None)))}


def copies(database: Database, settings: Settings) -> list[Path]:
    """Of all files that manifests name, as somebody asked for each."""
    for row in artifacts(database).values():
        content_of(settings, row)
    return sorted((settings.data_dir / KEPT).iterdir())


class TestBackup:
    def test_everything_comes_back_into_another_store(
        self, lived: Database, kept: Settings, place: Settings, tmp_path: Path, opened: Open
    ) -> None:
        before = in_store(kept)
        assert before
        manifest = back_up(kept, lived, tmp_path / "backup")
        assert manifest.missing == []
        done = restore.restore(place, tmp_path / "backup")
        assert (done.aside, done.aside_in_store) == (None, None)
        assert in_store(place).items() >= {path: before[path] for path in artifacts(lived)}.items()
        assert not (place.data_dir / "trials").exists()
        assert (place.data_dir / "key-secret").read_bytes() == b"s" * 32
        for row in artifacts(opened(place)).values():
            assert content_of(place, row).path.stat().st_size == row.size
        assert not store_of(place).files("restore.partial")

    @pytest.mark.parametrize("way", ["into a store", "out of one"])
    def test_a_store_may_be_set_or_left_by_it(
        self, way: str, lived: Database, kept: Settings, source: Settings, place: Settings, tmp_path: Path
    ) -> None:
        for path, content in in_store(kept).items() if way == "into a store" else ():
            (source.data_dir / path).write_bytes(content)
        begin, end = (source, place) if way == "into a store" else (kept, Settings(data_dir=place.data_dir))
        assert back_up(begin, lived, tmp_path / "backup").missing == []
        restore.restore(end, tmp_path / "backup")
        paths = set(artifacts(lived))
        found = in_store(place).keys() if end is place else {path for path in paths if (end.data_dir / path).is_file()}
        assert paths <= found

    def test_what_is_in_the_folder_from_before_is_there_too(
        self, lived: Database, kept: Settings, tmp_path: Path
    ) -> None:
        path = next(iter(artifacts(lived)))
        (kept.data_dir / path).write_bytes(in_store(kept)[path])
        store_of(kept).remove(path)
        assert back_up(kept, lived, tmp_path / "backup").missing == []

    def test_what_a_trial_goes_on_from_is_its_newest_attempt_s(
        self,
        database: Database,
        source: Settings,
        elsewhere: Elsewhere,
        place: Settings,
        tmp_path: Path,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        trial_ids: Callable[[int], list[int]],
    ) -> None:
        """A further attempt under the same claim has a folder `FENCE.NUMBER`; the oldest is in the data folder."""
        (trial_id, *_), lease = trial_ids(submit()), claim()
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        settings = elsewhere(source, "source")
        for attempt, number in (("1", 1), ("1.2", 3), ("1.1", 2)):
            folder = source.data_dir / f"trials/{trial_id}/{attempt}"
            write_checkpoint(folder / "checkpoints", number)
            (folder / "epochs.jsonl").write_text(f"{number}\n")
            if attempt != "1":
                (folder / "trial.log").write_text(attempt)
        for attempt in ("1.1", "1.2"):
            for path in sorted((source.data_dir / f"trials/{trial_id}/{attempt}").rglob("*.*")):
                put(store_of(settings), path.relative_to(source.data_dir).as_posix(), path.read_bytes())
                path.unlink()
        backed = {file.path for file in back_up(settings, database, tmp_path / "backup").files}
        newest = f"trials/{trial_id}/1.2"
        names = {"epochs.jsonl", "trial.log", "checkpoints/000003.json", "checkpoints/000003.safetensors"}
        assert backed == {f"{newest}/{name}" for name in names}
        restore.restore(place, tmp_path / "backup")
        assert in_store(place).keys() == backed

    def test_what_is_missing_or_damaged_is_told(self, lived: Database, kept: Settings, tmp_path: Path) -> None:
        path = next(iter(artifacts(lived)))
        put(store_of(kept), path, b"other bytes")
        (damaged,) = back_up(kept, lived, tmp_path / "backup").missing
        assert damaged.path == path
        assert "its SHA-256 is" in damaged.reason
        store_of(kept).remove(path)
        (missing,) = back_up(kept, lived, tmp_path / "second").missing
        assert (missing.path, missing.expected) == (path, False)


class TestRestore:
    @pytest.fixture
    def file(self, lived: Database, kept: Settings, tmp_path: Path) -> Path:
        back_up(kept, lived, tmp_path / "backup")
        return tmp_path / "backup"

    def test_json_says_where_what_the_store_had_is(self, file: Path, place: Settings) -> None:
        put(store_of(place), "trials/1/1/model", b"old")
        env = {"TTSV_DATA_DIR": str(place.data_dir), "TTSV_STORAGE": place.storage}
        done = CliRunner().invoke(app, ["restore", str(file), "--force", "--json"], env=env)
        assert done.exit_code == 0, (done.output, done.exception)
        said = json.loads(done.stdout)
        (aside,) = [name for name in _tops(store_of(place)) if name.startswith("before-restore-")]
        assert (said["aside"], aside in said["aside_in_store"]) == (None, True)

    def test_over_what_the_store_has_only_by_force(self, file: Path, place: Settings) -> None:
        """It is moved aside, whole."""
        old = {"trials/1/1/model": b"old", "trials/8/1/trial.log": b"log"}
        for path, content in old.items():
            put(store_of(place), path, content)
        with pytest.raises(UserError, match=r"the store \(TTSV_STORAGE\): is there already"):
            restore.restore(place, file)
        assert in_store(place) == old
        done = restore.restore(place, file, force=True)
        assert in_store(place).keys().isdisjoint({"trials/8/1/trial.log"})
        assert done.aside_in_store is not None
        (aside,) = [name for name in _tops(store_of(place)) if name.startswith("before-restore-")]
        assert aside in done.aside_in_store
        store = store_of(place)
        assert {path: store.read(f"{aside}/{path}", 0, 99) for path in old} == old

    @pytest.mark.slow
    @pytest.mark.parametrize("elsewhere", ["folder", "objects", deep("s3")], indirect=True)
    def test_cut_short_what_was_there_is_there_again(
        self, file: Path, place: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = {"trials/1/1/model": b"old", "trials/8/1/trial.log": b"log"}
        for path, content in old.items():
            put(store_of(place), path, content)
        for step in range(20):
            if not self._cut(place, file, step, monkeypatch):
                break
            for back in range(20):
                if not self._undo_cut(place, back, monkeypatch):
                    break
            else:
                pytest.fail("it is never taken back")
            store_of(place).remove(STAGE)
            assert in_store(place) == old, step
        else:
            pytest.fail("it never came to its end")
        assert step > 2
        assert "trials/8/1/trial.log" not in in_store(place)

    def _cut(self, place: Settings, file: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> bool:
        """Whether a restore is cut off at that change, counted from 0; nothing tidies up after it."""
        killed_at = _killed_after(step)
        with monkeypatch.context() as patch:
            patch.setattr(Target, "settle", lambda *_: True)
            patch.setattr(Move, "do", killed_at(Move.do))
            patch.setattr(Objects, "_copy_file", killed_at(Objects._copy_file))
            try:
                restore.restore(place, file, force=True)
            except _Killed:
                return True
        return False

    def _undo_cut(self, place: Settings, step: int, monkeypatch: pytest.MonkeyPatch) -> bool:
        """Whether taking it back is cut off after so many changes, as it was before after fewer."""
        killed_at = _killed_after(step)
        journal = Journal.read(place)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed_at(Path.rename))
            patch.setattr(Objects, "_copy_file", killed_at(Objects._copy_file))
            try:
                if journal is not None:
                    journal.undo()
            except _Killed:
                return True
        return False

    def test_one_that_went_into_a_bucket_is_ended_with_that_bucket(
        self, file: Path, place: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if isinstance(store_of(place), Folder):
            pytest.skip("renames in a folder need no store")
        assert self._cut(place, file, 0, monkeypatch)
        with pytest.raises(UserError, match=r"TTSV_STORAGE must name s3://target\S*, into which"):
            restore.restore(place.model_copy(update={"storage": None}), file, force=True)
        with pytest.raises(UserError, match=r"TTSV_STORAGE must name s3://target\S*, into which"):
            restore.restore(place.model_copy(update={"storage": "s3://another/bucket"}), file, force=True)
        restore.restore(place, file, force=True)
        assert in_store(place)


class _Killed(BaseException):
    pass


def _killed_after(step: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes functions end all once they were called so often, together."""
    calls = itertools.count()

    def killed_at(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*given: Any) -> Any:
            if next(calls) >= step:
                raise _Killed
            return genuine(*given)

        return changed

    return killed_at


def _tops(store: Store) -> list[str]:
    if isinstance(store, Folder):
        return sorted(path.name for path in store.root.iterdir())
    from pyarrow.fs import FileSelector

    found: list[str] = [info.path for info in store._fs.get_file_info(FileSelector(""))]  # type: ignore[attr-defined]
    return found


class TestDeletion:
    def test_its_files_go_with_it(self, lived: Database, kept: Settings) -> None:
        with lived.read() as session:
            mine = select(Trial.id).where(Trial.experiment_id == EVALUATING)
            trials = set(session.scalars(mine))
        for trial_id in trials:
            put(store_of(kept), f"trials/{trial_id}/1.1/trial.log", b"log")
        others = {path for path in in_store(kept) if int(path.split("/")[1]) not in trials}
        lived.write(lambda session: mark(session, EVALUATING, ANYONE, force=True))
        _settle(lived)
        assert remove_marked(lived, DataFolder.of(kept)) == 1
        assert in_store(kept).keys() == others
        with lived.read() as session:
            assert session.scalar(select(func.count()).select_from(mine.subquery())) == 0

    def test_copies_go_with_it(self, lived: Database, kept: Settings) -> None:
        assert copies(lived, kept)
        for experiment_id in (EVALUATING, 1):
            lived.write(partial(mark, experiment_id=experiment_id, who=ANYONE, force=True))
            _settle(lived)
            assert remove_marked(lived, DataFolder.of(kept)) == 1
        assert not artifacts(lived)
        assert copies(lived, kept) == []

    def test_what_the_store_will_not_let_go_keeps_its_rows(
        self, lived: Database, kept: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(*_: Any, **__: Any) -> None:
            raise OSError("the store is away")

        lived.write(lambda session: mark(session, EVALUATING, ANYONE, force=True))
        _settle(lived)
        before = in_store(kept)
        with monkeypatch.context() as patch:
            patch.setattr(Objects, "remove", away)
            patch.setattr("service.upkeep.places.removed", away)
            assert remove_marked(lived, DataFolder.of(kept)) == 0
        assert in_store(kept) == before
        assert remove_marked(lived, DataFolder.of(kept)) == 1

    def test_without_the_store_nothing_is_forgotten(
        self, lived: Database, kept: Settings, elsewhere: Elsewhere
    ) -> None:
        """Another place, or one that is not mounted: files would stay that nobody knows of."""
        with lived.read() as session:
            named = select(Trial.experiment_id).join(Artifact, Artifact.trial_id == Trial.id).limit(1)
            owner = session.scalars(named).one()
        lived.write(lambda s: s.execute(update(Experiment).where(Experiment.id == owner).values(deleted_at=now())))
        lived.write(lambda s: s.execute(update(Trial).values(source_trial_id=None)))
        _settle(lived)
        assert remove_marked(lived, DataFolder.of(elsewhere(kept, "empty"))) == 0
        assert remove_marked(lived, DataFolder.of(kept)) == 1

    def test_the_api_deletes(self, lived: Database, kept: Settings) -> None:
        with TestClient(create_app(kept), base_url="http://localhost") as client:
            assert client.delete(f"/v1/experiments/{EVALUATING}?force=true").json()["deleted"]
            assert client.get(f"/v1/experiments/{EVALUATING}").status_code == 404


class TestRetention:
    def test_networks_and_checkpoints_go(self, lived: Database, kept: Settings) -> None:
        rules, folder = Rules(best=0, force=True), DataFolder.of(kept)
        with lived.read() as session:
            final = session.scalars(select(Trial.id).where(Trial.state == TrialState.SUCCEEDED)).first()
            running = session.scalars(select(Trial.id).where(Trial.finished_at.is_(None))).first()
        for trial_id in (final, running):
            if trial_id is not None:
                put(store_of(kept), f"trials/{trial_id}/1.1/checkpoints/000001.safetensors", b"tensors")
        with lived.read() as session:
            found = plan(session, folder, rules)
        assert {one.path for one in found.networks} == {path for path in artifacts(lived) if path in in_store(kept)}
        assert [(one.trial_id, one.size) for one in found.checkpoints] == [(final, 7)]
        assert copies(lived, kept)
        done = prune(lived, folder, found, force=True)
        assert done.size == found.size
        assert copies(lived, kept) == []
        assert [path for path in in_store(kept) if "model" in path or f"/{final}/1.1" in path] == []
        assert running is None or any(path.startswith(f"trials/{running}/") for path in in_store(kept))

    def test_what_was_marked_by_somebody_who_was_killed_goes(
        self, lived: Database, kept: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One listing of the store serves where there are many."""
        monkeypatch.setattr("service.upkeep.places._MOST_QUESTIONS", 0)
        folder, paths = DataFolder.of(kept), set(artifacts(lived))
        listings, genuine = list[str](), Bucket.below

        def listed(here: Bucket, name: str) -> dict[str, int]:
            listings.append(name)
            return genuine(here, name)

        monkeypatch.setattr(Bucket, "below", listed)
        everything = sorted(in_store(kept))
        assert folder.there([*everything, "trials/999/1/model.safetensors"]) == everything
        assert len(everything) > 1
        assert len(listings) == isinstance(folder.kept, Bucket)
        lived.write(lambda session: session.execute(update(Artifact).values(removed_at=now())))
        assert finish(lived, folder) == len(paths)
        assert in_store(kept).keys().isdisjoint(paths)
        assert finish(lived, folder) == 0

    def test_a_store_that_is_away_when_a_worker_begins_is_asked_again(
        self, lived: Database, kept: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(*_: Any) -> None:
            raise OSError("the store is away")

        path = next(path for path in artifacts(lived) if path in in_store(kept))
        lived.write(lambda session: session.execute(update(Artifact).values(removed_at=now())))
        upkeep = Upkeep(kept, lived)
        with monkeypatch.context() as patch:
            for place in (Bucket, Disk):
                patch.setattr(place, "there", away)
            upkeep.tidy(first=True)
        assert path in in_store(kept)
        upkeep.tidy(first=not upkeep._finished)
        assert path not in in_store(kept)

    def test_the_worker_tidies(self, lived: Database, kept: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep_of_worker, "LOOK_SECONDS", 0.05)
        lived.write(lambda session: mark(session, EVALUATING, ANYONE, force=True))
        _settle(lived)
        with Upkeep(kept, lived) as upkeep:
            for _ in range(200):
                with lived.read() as session:
                    if session.get(Experiment, EVALUATING) is None:
                        return
                upkeep._over.wait(0.05)
        pytest.fail("it was not removed in time")


def _settle(database: Database) -> None:
    marked = Experiment.deleted_at.is_not(None)
    change = update(Experiment).where(marked).values(deleted_at=now() - timedelta(minutes=2))
    database.write(lambda session: session.execute(change))
