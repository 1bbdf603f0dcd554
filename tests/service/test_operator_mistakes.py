"""What whoever runs the service can get wrong: each is said in one line, with the setting that mends it."""

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from service.client import Client, UnreachableError
from service.database.engine import Database, is_full, is_read_only
from service.errors import UserError
from service.main import create_app
from service.queue import leases
from service.settings import Settings
from service.upkeep.migrate import migrate, refuse_unmigrated, schema_fault
from workers.cli.__main__ import app

SPEC = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}}
COMMANDS = [("serve",), ("migrate",), ("keys", "create", "vision", "--owner", "me"), ("api",), ("worker",)]


def said(command: tuple[str, ...], **environment: str) -> str:
    """The one line in which a command refuses to begin."""
    done = CliRunner().invoke(app, list(command), env=environment)
    assert done.exit_code == 1, (done.output, done.exception)
    (line,) = done.stderr.splitlines()
    assert line.startswith("ttsv: ")
    return line


class TestFolder:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_file_is_in_its_way(self, tmp_path: Path, command: tuple[str, ...]) -> None:
        (tmp_path / "file").touch()
        folder = tmp_path / "file" / "data"
        line = said(command, TTSV_DATA_DIR=str(folder))
        assert f"no database can be made in {folder} (Not a directory)" in line
        assert "TTSV_DATA_DIR" in line

    def test_it_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "(File exists)" in said(("migrate",), TTSV_DATA_DIR=str(tmp_path / "file"))

    def test_it_cannot_be_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path, *_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(UserError, match=r"\(Permission denied\): let TTSV_DATA_DIR, or TTSV_DATABASE_URL"):
            Database(f"sqlite:///{tmp_path / 'data' / 'ttsv.db'}")

    def test_it_cannot_be_written(self, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(UserError, match=r"\(it may not be written\): let TTSV_DATA_DIR"):
            Database(f"sqlite:///{tmp_path / 'ttsv.db'}")
        Database(sqlite_url).close()  # a file that is there may be read


class TestUnmigrated:
    @pytest.mark.parametrize("command", ["api", "worker"])
    def test_the_command_is_named(self, tmp_path: Path, command: str) -> None:
        line = said((command,), TTSV_DATA_DIR=str(tmp_path))
        assert "the database is not ready: at None, this code needs " in line
        assert line.endswith("run `ttsv migrate`")

    @pytest.mark.parametrize("command", [("keys", "ls"), ("keys", "revoke", "0123456789ab"), ("prune", "--best", "1")])
    def test_who_only_looks_into_a_mistyped_folder_makes_none(self, tmp_path: Path, command: tuple[str, ...]) -> None:
        folder = tmp_path / "mistyped"
        line = said(command, TTSV_DATA_DIR=str(folder))
        assert f"there is no database {folder / 'ttsv.db'}: let TTSV_DATA_DIR name another folder" in line
        assert not folder.exists()

    def test_a_database_that_is_migrated(self, database: Database) -> None:
        refuse_unmigrated(database)
        database.write(lambda session: session.execute(text("ALTER TABLE results DROP COLUMN brier")))
        with pytest.raises(UserError, match="no column for brier: run `ttsv migrate`"):
            refuse_unmigrated(database)

    def test_workers_of_the_version_before_go_on(self, database: Database) -> None:
        database.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = 'next'")))
        refuse_unmigrated(database, newer=False)
        with pytest.raises(UserError, match="at next, of a newer version than this code"):
            refuse_unmigrated(database)
        with pytest.raises(UserError, match="revision next, of a newer version than this code"):
            migrate(database)
        with database.read() as session:
            fault = schema_fault(session.connection(), "next")
        assert fault == "at next, of a newer version than this code: run `pip install --upgrade .`"

    def test_one_that_is_away_may_come_back(self, tmp_path: Path) -> None:
        away = Database(f"postgresql+psycopg://nobody@/nothing?host={tmp_path}")
        refuse_unmigrated(away)
        away.close()


class TestADatabaseThatFails:
    @pytest.mark.parametrize("command", [*COMMANDS, ("backup", "lab.backup"), ("prune", "--best", "0", "--yes")])
    def test_a_damaged_one_is_named_with_what_mends_it(self, command: tuple[str, ...], tmp_path: Path) -> None:
        file = tmp_path / "ttsv.db"
        file.write_bytes(b"no database, and long enough to be read as one" * 100)
        line = said(command, TTSV_DATA_DIR=str(tmp_path))
        says = f"ttsv: the database {file}: file is not a database: it is damaged; `ttsv restore --force FILE` puts"
        assert line.startswith(says)

    def test_the_disk_of_a_full_one_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(database: Database) -> None:
            with database.writer.connect() as connection:
                connection.exec_driver_sql("PRAGMA max_page_count=1")
                connection.exec_driver_sql("CREATE TABLE x AS SELECT randomblob(10000)")

        monkeypatch.setattr("service.upkeep.migrate.migrate", full)
        says = f"the database {tmp_path}/ttsv.db: database or disk is full: make room on the disk of {tmp_path}"
        assert said(("migrate",), TTSV_DATA_DIR=str(tmp_path)) == f"ttsv: {says}"

    def test_one_that_does_not_answer_is_named_without_its_password(self, tmp_path: Path) -> None:
        url = f"postgresql://me:secret@/lab?host={tmp_path}&password=secret"
        line = said(("migrate",), TTSV_DATABASE_URL=url, TTSV_DATA_DIR=str(tmp_path))
        assert line.startswith("ttsv: the database postgresql://me:***@/lab?host=")
        assert "secret" not in line
        assert "psycopg" not in line


class TestDatabaseUrl:
    @pytest.mark.parametrize(
        "url",
        [
            "mysql://someone:secret@host/x",
            "oracle://x",
            "postgresql+psycopg2://x/y",
            "sqlite+aiosqlite:///x.db",
            "no url",
            "",
            "postgresql://host:port/x",
        ],
    )
    def test_another_database(self, url: str) -> None:
        line = said(("migrate",), TTSV_DATABASE_URL=url)
        assert line.startswith("ttsv: TTSV_DATABASE_URL: must be a URL of SQLite or PostgreSQL, as sqlite:///")
        assert "secret" not in line

    @pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+pysqlite://"])
    def test_sqlite_without_a_file(self, url: str, tmp_path: Path) -> None:
        """A restore took the folder in which it was run for the file, and moved it aside."""
        line = said(("restore", str(tmp_path / "lab.backup")), TTSV_DATABASE_URL=url)
        assert line.startswith("ttsv: TTSV_DATABASE_URL: must name the file of SQLite's database, as sqlite:///")

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_says_so(self, command: tuple[str, ...]) -> None:
        assert "TTSV_DATABASE_URL: must be" in said(command, TTSV_DATABASE_URL="mysql://x")

    def test_the_password_is_in_no_error(self) -> None:
        with pytest.raises(ValidationError) as caught:
            Settings(database_url="mysql://someone:secret@host/x")
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize(
        ("url", "driver"),
        [
            ("sqlite:///x.db", "sqlite"),
            ("sqlite+pysqlite:///x.db", "sqlite+pysqlite"),
            ("postgres://h/x", "postgresql+psycopg"),
            ("postgresql://h/x", "postgresql+psycopg"),
            ("postgresql+psycopg://h/x", "postgresql+psycopg"),
        ],
    )
    def test_those_that_there_are(self, url: str, driver: str) -> None:
        assert Settings(database_url=url).url.drivername == driver


class TestLease:
    @pytest.mark.parametrize(
        ("environment", "numbers"),
        [
            ({"TTSV_LEASE_SECONDS": "1", "TTSV_BEAT_SECONDS": "0.6"}, ("1", "0.6")),
            ({"TTSV_LEASE_SECONDS": "19.5", "TTSV_BEAT_SECONDS": "10"}, ("19.5", "10")),
            ({"TTSV_BEAT_SECONDS": "100"}, ("60", "100")),
        ],
    )
    def test_shorter_than_two_beats(self, environment: dict[str, str], numbers: tuple[str, str]) -> None:
        lease, beat = numbers
        expected = f"TTSV_LEASE_SECONDS: is {lease}, must be at least twice TTSV_BEAT_SECONDS, which is {beat}"
        assert said(("migrate",), **environment) == f"ttsv: {expected}"

    def test_a_beat_that_is_wrong_itself(self) -> None:
        assert "TTSV_BEAT_SECONDS" in said(("migrate",), TTSV_BEAT_SECONDS="0")

    def test_two_beats(self) -> None:
        assert Settings(lease_seconds=2, beat_seconds=1).lease_seconds == 2

    @pytest.mark.parametrize(("lease", "beat"), [(600, 10), (60, 10), (30, 5), (0.6, 0.1)])
    def test_of_a_short_lease_alone_the_beats_follow(
        self, lease: float, beat: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert Settings(lease_seconds=lease).beat_seconds == pytest.approx(beat)
        monkeypatch.setenv("TTSV_LEASE_SECONDS", str(lease))
        assert Settings().beat_seconds == pytest.approx(beat)
        assert "TTSV_LEASE_SECONDS" in said(("migrate",), TTSV_LEASE_SECONDS="soon")
        assert "TTSV_LEASE_SECONDS" in said(("migrate",), TTSV_LEASE_SECONDS="-1")


class TestPorts:
    @pytest.mark.parametrize("text", ["6380", "6380-", "a-b", "6380-6390", "900-1000", "65530-65600", "7000-6000", "-"])
    def test_ports_that_cannot_be(self, text: str, tmp_path: Path) -> None:
        found = said(("migrate",), TTSV_NODE_PORTS=text, TTSV_DATA_DIR=str(tmp_path))
        assert found.startswith("ttsv: TTSV_NODE_PORTS: ")
        assert "must be" in found

    def test_the_heads_own_port_is_apart(self, tmp_path: Path) -> None:
        found = said(("migrate",), TTSV_HEAD_PORT="6400", TTSV_DATA_DIR=str(tmp_path))
        assert found == "ttsv: TTSV_NODE_PORTS: must be without TTSV_HEAD_PORT"
        assert Settings(data_dir=tmp_path, head_port=6400, node_ports="7000-7019").ports == range(7000, 7020)


def read_only(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA query_only=ON")


class TestReadOnly:
    @pytest.fixture
    def application(self, sqlite_url: str, tmp_path: Path) -> Any:
        settings = Settings(database_url=sqlite_url, data_dir=tmp_path / "data", host="127.0.0.1")
        return create_app(settings)

    def test_it_is_named_and_over_once_it_is_mended(self, application: Any) -> None:
        engine = application.state.database.engine
        with TestClient(application, raise_server_exceptions=False) as api:
            engine.dispose()
            event.listen(engine, "connect", read_only)
            response = api.post("/v1/experiments", json=SPEC)
            assert response.status_code == 503
            assert response.json()["detail"].startswith("the database is read-only; nothing was stored: make its file")
            assert "Retry-After" not in response.headers
            assert api.get("/v1/experiments").json()["items"] == []
            ready = api.get("/readyz")
            assert ready.status_code == 503
            assert ready.json()["checks"] == {
                "database": ready.json()["checks"]["database"],
                "schema": "ok",
                "disk": "ok",
            }
            assert ready.json()["checks"]["database"].startswith("read-only: ")
            event.remove(engine, "connect", read_only)
            api.post("/v1/experiments", json=SPEC)  # at the latest this one drops the connections that were so
            assert api.post("/v1/experiments", json=SPEC).status_code == 201
            assert api.get("/readyz").status_code == 200

    def test_a_file_that_cannot_be_opened_is_no_server_that_does_not_run(self, application: Any) -> None:
        engine = application.state.database.engine

        def unable(*_: Any) -> None:  # as where SQLite may make no file beside it
            raise engine.dialect.dbapi.OperationalError("unable to open database file")

        with TestClient(application) as api:
            engine.dispose()
            event.listen(engine, "do_connect", unable)
            ready = api.get("/readyz")
            event.remove(engine, "do_connect", unable)
        assert ready.status_code == 503
        assert "its folder and the disk under it writable" in ready.json()["checks"]["database"]

    def test_readiness_waits_for_no_writer(self, application: Any) -> None:
        database = application.state.database
        with TestClient(application) as api, Session(database.writer) as writer:
            writer.execute(text("SELECT 1"))  # takes the lock
            begun = time.monotonic()
            assert api.get("/readyz").status_code == 200
            assert time.monotonic() - begun < 5
            writer.rollback()
            with database.engine.connect() as connection:
                assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30_000

    def test_the_error_is_recognised(self, sqlite_url: str) -> None:
        database = Database(sqlite_url)
        event.listen(database.engine, "connect", read_only)
        with pytest.raises(OperationalError) as caught:
            database.write(lambda session: leases.greet(session, "worker", 1, 0))
        assert is_read_only(caught.value)
        assert not is_full(caught.value)
        assert not is_read_only(OperationalError("BEGIN", {}, ConnectionError("away")))
        database.close()

    def test_the_client_does_not_ask_again(self, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Database, work: Callable[..., Any]) -> None:
            error = sqlite3.OperationalError("attempt to write a readonly database")
            error.sqlite_errorcode = sqlite3.SQLITE_READONLY
            raise OperationalError("BEGIN IMMEDIATE", {}, error)

        monkeypatch.setattr(Database, "write", refuse)
        start = time.monotonic()
        with Client(server) as client, pytest.raises(UnreachableError, match="the database is read-only"):
            client.submit(SPEC)
        assert time.monotonic() - start < 3

    def test_what_else_is_asked_again(self) -> None:
        with Client("http://127.0.0.1:9") as client:
            kind = {"Content-Type": "application/problem+json"}
            assert client._pause_after(httpx.Response(503, headers=kind | {"Retry-After": "5"}), 0) == 5
            assert client._pause_after(httpx.Response(503), 0) < 1
            with pytest.raises(UnreachableError):
                client._pause_after(httpx.Response(503, headers=kind, content=b"x"), 0)
