"""An installation with a life behind it, and empty ones to restore into."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Connection, event, make_url, select, text, update

from service.database import Artifact, Trial
from service.database.engine import Database
from service.settings import Settings
from service.upkeep import migrate
from service.upkeep import target as restored_into
from tests.migrations.statements import Installation

if TYPE_CHECKING:
    from tests.machinery import PostgresServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """From one kind of database into the other is `deep`: in either form rows are the same lines.

    So is most of what ends a restore between two renames on PostgreSQL: they are renames of files on either.
    """
    here = Path(__file__).parent
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        drawn = getattr(item, "callspec", None)
        kinds = {drawn.params.get(name) for name in ("database_url", "target")} if drawn else set()
        if kinds == {"sqlite", "postgres"} and item.path.is_relative_to(here):
            item.add_marker("deep")
        drawn_here = drawn.params if drawn and item.originalname == "test_between_renames" else {}
        cut = (drawn_here.get("moves"), drawn_here.get("how"))
        if drawn_here.get("target") == "postgres" and cut not in ((0, "killed"), (2, "killed"), (0, "raised")):
            item.add_marker("deep")


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others of this machine have not written yet is not waited for."""
    monkeypatch.setattr("os.sync", lambda: None)


Schemas = dict[tuple[str, str, tuple[str, ...]], list[tuple[str, Any]]]
"""What makes a schema, by the kind of database, the revision, and the columns of results: statements with values."""


@pytest.fixture(scope="session")
def _schemas() -> Schemas:
    return {}


@pytest.fixture(autouse=True)
def _schemas_are_made_once(monkeypatch: pytest.MonkeyPatch, _schemas: Schemas) -> None:
    """A restore makes the tables of its backup's revision by all migrations: a third of what it costs a test."""

    def make_schema(connection: Connection, revision: str, results: Collection[str]) -> None:
        kind = connection.dialect.name, revision, tuple(results)
        if kind not in _schemas:
            _schemas[kind] = _made(connection, lambda: migrate.make_schema(connection, revision, results))
            return
        for statement, given in _schemas[kind]:
            connection.exec_driver_sql(statement, given)

    monkeypatch.setattr(restored_into, "make_schema", make_schema)


def _made(connection: Connection, make: Callable[[], None]) -> list[tuple[str, Any]]:
    """Lets a schema be made, and gives what makes it again: all that SQLite has then, what PostgreSQL was told."""
    written: list[tuple[str, Any]] = []

    def note(_connection: Any, cursor: Any, statement: str, given: Any, *_: Any) -> None:
        word = statement.split(maxsplit=1)[0]
        if word in ("CREATE", "ALTER", "DROP") or (word in ("INSERT", "UPDATE", "DELETE") and cursor.rowcount):
            written.append((statement, given))

    event.listen(connection, "after_cursor_execute", note)
    make()
    event.remove(connection, "after_cursor_execute", note)
    if connection.dialect.name == "postgresql":
        return written
    (version,) = connection.execute(text("SELECT version_num FROM alembic_version")).scalars()
    every = text(
        "SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite%' AND sql > '' ORDER BY type = 'table' DESC"
    )
    made = [(statement, ()) for statement in connection.execute(every).scalars()]
    return [*made, ("INSERT INTO alembic_version VALUES (?)", (version,))]


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


@dataclass(frozen=True)
class Place:
    """What an installation is: a database and a data folder. Copied, it is another."""

    url: str
    data_dir: Path

    def copy_to(self, url: str, data_dir: Path, server: PostgresServer | None) -> None:
        """Puts a copy in the place of a database that nobody has open, and its files in a folder."""
        if server is None:
            database = make_url(url).database
            assert database is not None
            Path(database).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(make_url(self.url).database or "", database)
        else:
            server.replace(url, self.url)
        shutil.copytree(self.data_dir, data_dir, dirs_exist_ok=True)


Places = Callable[[str], Place]
"""By the name of the database: `sqlite` or `postgres`."""


def server_of(request: pytest.FixtureRequest, kind: str) -> PostgresServer | None:
    """PostgreSQL where the database is one of it."""
    server: PostgresServer | None = request.getfixturevalue("postgres") if kind == "postgres" else None
    return server


@pytest.fixture(scope="session")
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Installations in which everything happened once, with the files that their databases name. To be copied."""

    @cache
    def life(kind: str) -> Place:
        folder = tmp_path_factory.mktemp("life")
        if kind == "sqlite":
            url = f"sqlite:///{folder / 'ttsv.db'}"
            shutil.copyfile(request.getfixturevalue("sqlite_template"), folder / "ttsv.db")
        else:
            server: PostgresServer = request.getfixturevalue("postgres")
            url = server.create(request.getfixturevalue("postgres_template"))
        place = Place(url, folder / "data")
        place.data_dir.mkdir()
        with contextlib.closing(Database(url)) as database:
            Installation(database).live()
            write_artifacts(database, place.data_dir)
        (place.data_dir / "key-secret").write_bytes(b"s" * 32)
        return place

    return life


@pytest.fixture
def lived(
    database: Database, database_url: str, source: Settings, lives: Places, request: pytest.FixtureRequest
) -> Database:
    """A database in which everything happened once, with the files that it names."""
    kind = database_url.partition(":")[0].partition("+")[0].removesuffix("ql")
    lives(kind).copy_to(database_url, source.data_dir, server_of(request, kind))
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
