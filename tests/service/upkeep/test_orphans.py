"""What data folders of other workers and APIs have of what was deleted goes; all else stays."""

import asyncio
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update
from starlette.testclient import TestClient

from service.database import Artifact, Experiment, ExperimentState, IdempotencyKey, Trial, now
from service.database.engine import Database
from service.experiments.store import KEPT_ANSWERS
from service.main import create_app
from service.queue.leases import NOBODY, greet
from service.settings import Settings
from service.upkeep import orphans
from service.upkeep.files import DataFolder
from service.upkeep.moves import JOURNAL
from service.upkeep.orphans import remove_orphans
from workers.worker import upkeep
from workers.worker.upkeep import Upkeep

GONE, NEWEST = 2, 3
"""Of the experiments of `Installation`: one without trials that others evaluate, and the one of the highest number."""


@pytest.fixture
def own(source: Settings, tmp_path: Path) -> Settings:
    """Another worker's settings: a data folder of its own, and the store."""
    return source.model_copy(update={"data_dir": tmp_path / "own", "storage": str(tmp_path / "store")})


@pytest.fixture
def deleted(lived: Database) -> Database:
    """Its rows are gone, with whoever had the store and another data folder."""
    lived.write(lambda session: session.execute(delete(Trial).where(Trial.experiment_id == GONE)))
    lived.write(lambda session: session.execute(delete(Experiment).where(Experiment.id == GONE)))
    return lived


def of_experiment(number: int) -> list[str]:
    return [f"logs/experiment-{number}-1.log", f"tune/{number}-1/books.json", f"tensorboard/{number}/7/events"]


def put(folder: Path, *names: str, hours: float = 2) -> None:
    """Writes files that, with their folders, changed so long ago."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 3600 * hours,) * 2)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def highest(database: Database, table: Any) -> int:
    with database.read() as session:
        return session.scalar(select(func.max(table.id))) or 0


def test_what_drivers_left_goes_with_the_experiment(deleted: Database, own: Settings) -> None:
    stays = ["logs/api.log", "logs/experiment-x-1.log", f"tune/{GONE}", "tensorboard/notes", f"logs/{GONE}-1.log"]
    for number in (1, NEWEST, NEWEST + 1, 20, 10**18 - 1):
        stays += of_experiment(number)
    put(own.data_dir, *of_experiment(GONE), f"logs/experiment-{GONE}-20.log", *stays)
    assert remove_orphans(deleted, own) == 1
    assert files(own.data_dir) == sorted(stays)
    assert remove_orphans(deleted, own) == 0


@pytest.mark.parametrize("stored", [True, False])
def test_folders_of_trials_go(deleted: Database, own: Settings, stored: bool) -> None:
    """Of before a store was set; or of a machine that was cut off, and wrote on when they were deleted."""
    newest = highest(deleted, Trial)
    with deleted.read() as session:
        there = set(session.scalars(select(Trial.id)))
    gone = min(set(range(1, newest)) - there, default=0)
    if not gone:  # the experiment had none
        gone = min(there - {newest})
        deleted.write(lambda session: session.execute(update(Trial).values(source_trial_id=None)))
        deleted.write(lambda session: session.execute(delete(Trial).where(Trial.id == gone)))
    store = Path(str(own.storage))
    put(store, f"trials/{gone}/1.1/trial.log")
    stays = [f"trials/{newest}/1.1/trial.log", f"trials/{newest + 1}/1.1/trial.log"]
    put(own.data_dir, f"trials/{gone}/1.1/checkpoints/1.json", *stays)
    if not stored:
        own = own.model_copy(update={"storage": None})
    assert remove_orphans(deleted, own) == 1
    assert files(own.data_dir) == sorted(stays)
    assert files(store) == [f"trials/{gone}/1.1/trial.log"]


def test_what_may_still_be_written_stays(deleted: Database, own: Settings) -> None:
    put(own.data_dir, *of_experiment(GONE), hours=0.5)
    assert remove_orphans(deleted, own) == 0
    assert files(own.data_dir) == sorted(of_experiment(GONE))


def test_nothing_goes_while_a_restore_is_on_its_way(deleted: Database, own: Settings) -> None:
    put(own.data_dir, *of_experiment(GONE), JOURNAL)
    assert remove_orphans(deleted, own) == 0
    assert set(files(own.data_dir)) == {JOURNAL, *of_experiment(GONE)}


def test_an_empty_database_knows_of_nothing(database: Database, own: Settings) -> None:
    put(own.data_dir, *of_experiment(GONE))
    assert remove_orphans(database, own) == 0
    assert files(own.data_dir) == sorted(of_experiment(GONE))


def test_without_a_folder_there_is_nothing_to_do(deleted: Database, own: Settings) -> None:
    assert remove_orphans(deleted, own) == 0
    assert not own.data_dir.exists()


def test_nothing_is_removed_through_a_link(deleted: Database, own: Settings, tmp_path: Path) -> None:
    put(tmp_path / "theirs", f"experiment-{GONE}-1.log")
    own.data_dir.mkdir()
    (own.data_dir / "logs").symlink_to(tmp_path / "theirs")
    remove_orphans(deleted, own)
    assert files(tmp_path / "theirs") == [f"experiment-{GONE}-1.log"]


def test_what_cannot_be_removed_keeps_nothing_else(
    deleted: Database, own: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deleted.write(lambda session: session.execute(update(Trial).values(source_trial_id=None)))
    deleted.write(lambda session: session.execute(delete(Trial).where(Trial.experiment_id == 1)))
    deleted.write(lambda session: session.execute(delete(Experiment).where(Experiment.id == 1)))
    put(own.data_dir, *of_experiment(1), *of_experiment(GONE))
    genuine = DataFolder.remove_experiment

    def refused(folder: DataFolder, number: int) -> None:
        if number == 1:
            raise PermissionError(13, "not ours", str(number))
        genuine(folder, number)

    monkeypatch.setattr(DataFolder, "remove_experiment", refused)
    assert remove_orphans(deleted, own) == 1
    assert files(own.data_dir) == sorted(of_experiment(1))
    assert "stays for now" in caplog.text


def test_many_are_asked_for_a_part_at_a_time(deleted: Database, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "_AT_ONCE", 1)
    put(own.data_dir, *of_experiment(1), *of_experiment(GONE), *of_experiment(NEWEST))
    assert remove_orphans(deleted, own) == 1
    assert files(own.data_dir) == sorted([*of_experiment(1), *of_experiment(NEWEST)])


def test_copies_go_with_the_files_that_they_are_of(lived: Database, own: Settings) -> None:
    """Of a file that another manifest has, too, the copy stays; of one of a deleted experiment it goes."""
    digests = {kind: f"{index:064x}" for index, kind in enumerate(("twice", "again", "pruned", "left"))}
    digests["again"] = digests["twice"]

    def add(session: Any) -> None:
        trial_id = session.scalars(select(func.min(Trial.id))).one()
        for kind, digest in digests.items():
            path = f"trials/{trial_id}/1/{kind}"
            session.add(Artifact(trial_id=trial_id, kind=kind, path=path, sha256=digest, size=1))

    def prune(*kinds: str) -> None:
        pruned = update(Artifact).where(Artifact.kind.in_(kinds)).values(removed_at=now())
        lived.write(lambda session: session.execute(pruned))

    def kept() -> set[str]:
        remove_orphans(lived, own)
        return {path.name for path in (own.data_dir / "cache/artifacts").iterdir()}

    lived.write(add)
    partly = {f".{digests['pruned']}-01ab23cd.part", f"{digests['pruned']}-01ab23cd"}
    names = {*digests.values(), *partly, "README"}
    put(own.data_dir, *(f"cache/artifacts/{name}" for name in [*names, "f" * 64]))
    assert kept() == names
    prune("again", "pruned")
    assert kept() == {digests["twice"], digests["left"], "README"}
    prune("twice")
    assert kept() == {digests["left"], "README"}
    lived.write(lambda session: session.execute(update(Experiment).values(deleted_at=now())))
    assert kept() == {"README"}


def test_the_worker_looks_once_an_hour(lived: Database, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.01)
    looks, enough = list[Settings](), threading.Event()

    def look(_database: Database, settings: Settings) -> int:
        looks.append(settings)
        enough.set()
        return 0

    monkeypatch.setattr(orphans, "remove_orphans", look)
    monkeypatch.setattr(Upkeep, "tidy", lambda *_, **__: None)
    monkeypatch.setattr(Upkeep, "sweep", lambda _: None)
    with Upkeep(own, lived):
        assert enough.wait(10)
        time.sleep(0.3)
    assert looks == [own]


def test_the_worker_forgets_what_was_answered_long_ago(lived: Database, own: Settings) -> None:
    for key, age in (("old", KEPT_ANSWERS + timedelta(minutes=1)), ("new", timedelta(days=1))):
        row = IdempotencyKey(key=key, body_sha256="", response={"id": 1}, created_at=now() - age)
        lived.write(lambda session, row=row: session.add(row))  # type: ignore[misc]
    upkeep.Upkeep(own, lived).tidy(first=True)
    with lived.read() as session:
        assert {"old", "new"} & set(session.scalars(select(IdempotencyKey.key))) == {"new"}


def test_the_api_looks_now_and_then(
    lived: Database, own: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(orphans, "LOOK_SECONDS", 0.01)
    looks, enough = list[Settings](), threading.Event()

    def look(_database: Database, settings: Settings) -> int:
        looks.append(settings)
        if len(looks) == 1:
            raise OSError("cannot be read")
        enough.set()
        return 0

    monkeypatch.setattr(orphans, "remove_orphans", look)
    app = create_app(own)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            assert await asyncio.to_thread(enough.wait, 10)

    asyncio.run(live())
    assert looks[0] == own
    assert "stays for now" in caplog.text


def test_the_api_says_that_no_worker_is_there(lived: Database, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is posted then is looked at by nobody else."""
    monkeypatch.setattr("service.main.MISS_SECONDS", 0.01)
    lived.write(lambda session: session.execute(update(Experiment).values(state=ExperimentState.QUEUED)))

    def waiting() -> set[str | None]:
        with lived.read() as session:
            return set(session.scalars(select(Experiment.waiting)))

    assert waiting() == {None}
    with TestClient(create_app(own)):
        deadline = time.monotonic() + 20
        while waiting() != {NOBODY}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        lived.write(lambda session: greet(session, "worker", 1, 0))
        time.sleep(0.2)
        assert waiting() == {None}


def test_an_api_that_starts_misses_nobody_yet(lived: Database, own: Settings) -> None:
    """A worker may start with it; and what it said of an experiment would hide that from a claim on PostgreSQL."""
    lived.write(lambda session: session.execute(update(Experiment).values(state=ExperimentState.QUEUED)))
    with TestClient(create_app(own)):
        time.sleep(0.3)
        with lived.read() as session:
            assert set(session.scalars(select(Experiment.waiting))) == {None}


def test_a_worker_removes_what_dead_writers_left_in_its_folder_and_in_the_store(
    lived: Database, own: Settings, tmp_path: Path
) -> None:
    for folder in (own.data_dir, tmp_path / "store"):
        put(folder, "incoming/of-somebody-dead", hours=7)
        (folder / "incoming" / "just-now").touch()
    Upkeep(own, lived).remove_orphans()
    assert [path.name for path in tmp_path.rglob("incoming/*")] == ["just-now"] * 2
