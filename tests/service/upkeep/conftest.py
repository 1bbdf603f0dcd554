"""An installation with a life behind it, and empty ones to restore into."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update

from service.database import Artifact, Trial
from service.database.engine import Database
from service.settings import Settings
from tests.migrations.statements import Installation

if TYPE_CHECKING:
    from tests.machinery import PostgresServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """From one kind of database into the other is `deep`: in either form rows are the same lines."""
    here = Path(__file__).parent
    for item in items:
        drawn = getattr(item, "callspec", None)
        kinds = {drawn.params.get(name) for name in ("database_url", "target")} if drawn else set()
        if here in item.path.parents and kinds == {"sqlite", "postgres"}:
            item.add_marker("deep")


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others of this machine have not written yet is not waited for."""
    monkeypatch.setattr("os.sync", lambda: None)


@pytest.fixture
def source(database_url: str, tmp_path: Path) -> Settings:
    """The settings of an installation."""
    return Settings(database_url=database_url, data_dir=tmp_path / "source")


@pytest.fixture(params=["sqlite", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Settings]:
    """Those of one that was never started."""
    if request.param == "sqlite":
        yield Settings(data_dir=tmp_path / "target")
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.create()
    yield Settings(database_url=url, data_dir=tmp_path / "target")
    server.drop(url)


@pytest.fixture
def lived(database: Database, source: Settings) -> Database:
    """A database in which everything happened once, with the files that it names."""
    Installation(database).live()
    write_artifacts(database, source.data_dir)
    (source.data_dir / "key-secret").write_bytes(b"s" * 32)
    return database


def write_artifacts(database: Database, data_dir: Path) -> None:
    """Puts a file where every manifest names one, and its checksum there."""

    def work(session: Any) -> None:
        for artifact in session.scalars(select(Artifact)):
            content = f"weights of trial {artifact.trial_id}".encode() * 1000
            path = data_dir / artifact.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.with_name("trial.log").write_text("it began\n")
            values = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            session.execute(update(Artifact).where(Artifact.id == artifact.id).values(values))

    database.write(work)


def write_checkpoint(folder: Path, number: int, content: bytes = b"tensors") -> None:
    """A checkpoint as `ttsv.training.checkpoint` lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:06d}.safetensors").write_bytes(content)
    record = {"tensors_sha256": hashlib.sha256(b"tensors").hexdigest(), "body": {}}
    (folder / f"{number:06d}.json").write_text(json.dumps(record))


@pytest.fixture
def opened() -> Iterator[Callable[[Settings], Database]]:
    """Opens the database of settings."""
    found: list[Database] = []

    def opened(settings: Settings) -> Database:
        found.append(Database(settings.url))
        return found[-1]

    yield opened
    for database in found:
        database.close()


@pytest.fixture
def trial_ids(database: Database) -> Callable[[int], list[int]]:
    """The trials of an experiment."""

    def trial_ids(experiment_id: int) -> list[int]:
        with database.read() as session:
            query = select(Trial.id).where(Trial.experiment_id == experiment_id).order_by(Trial.number)
            return list(session.scalars(query))

    return trial_ids
