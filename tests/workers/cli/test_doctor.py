"""Every check of `ttsv doctor`: what it says where all is well, and where it is not, and what mends that."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from sqlalchemy import text, update
from typer.testing import CliRunner

from service.access import keys, security
from service.database import Artifact, Experiment, ExperimentState, Worker
from service.database.engine import Database, sqlite_driver
from service.database.server import Server
from service.experiments import submission
from service.experiments.submission import Draft
from service.queue import nodes
from service.queue.cluster import Node
from service.settings import Settings
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.specs.states import NodeState
from service.storage import opening
from ttsv.data import verify_dataset
from workers.cli import doctor, doctor_files, doctor_machine, doctor_service
from workers.cli.__main__ import app
from workers.cli.findings import Check, Finding, Status, ago, size, worst
from workers.node.processes import identity

ENVIRONMENT = {
    "python": "3.11.7",
    "torch": "2.15.0+cu132",
    "platform": "Linux",
    "git_revision": "0123456789abcdef",
    "git_dirty": False,
}
SEEN: dict[str, Any] = {"cuda": "13.2", "available": False, "gpus": 0, "environment": ENVIRONMENT}
CARD = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.95.05"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bare one: no variables of ours, no GPU, no other temporary files; the command finds a torch that is quick."""
    for name in [name for name in os.environ if name.startswith(("TTSV_", "RAY_", "CUDA_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.defpath}")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setattr(doctor_machine, "_DEVICE", tmp_path / "no-device")
    monkeypatch.setattr("workers.node.machine._DRIVER", tmp_path / "driver")
    monkeypatch.setattr(doctor_files, "_LITTLE_BYTES", 2**30)
    monkeypatch.chdir(tmp_path)
    torch_says(monkeypatch, SEEN)
    return tmp_path


def torch_says(patch: pytest.MonkeyPatch, seen: object, stderr: str = "") -> None:
    program = f"import sys; print({json.dumps(seen)!r}); print({stderr!r}, file=sys.stderr)"
    patch.setattr(doctor_machine, "_PROBE", program)


def program(machine: Path, name: str, script: str) -> None:
    path = machine / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def only(findings: Sequence[Finding], says: str) -> Finding:
    """The one that says this."""
    (found,) = [finding for finding in findings if says in finding.says]
    return found


def is_wrong(findings: Sequence[Finding], says: str, mend: str) -> None:
    found = only(findings, says)
    assert (found.status, mend in str(found.mend)) == (Status.WRONG, True), found


def is_warning(findings: Sequence[Finding], says: str, mend: str) -> None:
    found = only(findings, says)
    assert (found.status, mend in str(found.mend)) == (Status.WARNING, True), found


def is_ok(findings: Sequence[Finding], says: str) -> None:
    assert only(findings, says).status is Status.OK


class TestFindings:
    def test_a_command_belongs_to_what_is_not_in_order(self) -> None:
        for status, mend in ((Status.OK, "x"), (Status.WRONG, None), (Status.WARNING, None)):
            with pytest.raises(ValueError, match="a command belongs to everything that is not as it should be"):
                Finding("disk", status, "says", mend)

    def test_one_line(self) -> None:
        assert Check("disk").ok("two\n  lines").says == "two lines"

    def test_the_worst(self) -> None:
        check = Check("x")
        assert worst([]) is Status.OK
        assert worst([check.warning("a", "b"), check.ok("a")]) is Status.WARNING
        assert worst([check.wrong("a", "b"), check.warning("a", "b")]) is Status.WRONG

    def test_units(self) -> None:
        assert [ago(seconds) for seconds in (-1, 3, 119, 120, 7200, 200_000)] == [
            "0 s",
            "3 s",
            "119 s",
            "2 min",
            "2 h",
            "2 d",
        ]
        assert [size(count) for count in (2**20, 2**30, 1.5 * 2**40)] == ["1 MiB", "1.0 GiB", "1536.0 GiB"]
        assert [size(count) for count in (0, 1, 14_200, 2**20 - 1)] == ["0 KiB", "1 KiB", "14 KiB", "1024 KiB"]


class TestSettings:
    def test_in_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_PORT", "8001")
        monkeypatch.setenv("TTSV_KEY", "ttsv_x_y")
        settings, findings = doctor_service.look_at_settings()
        assert settings is not None
        is_ok(findings, "2 TTSV_ variables are set")

    def test_a_slip_names_what_was_meant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_DATABSE_URL", "postgresql://me:secret@host/x")
        _, findings = doctor_service.look_at_settings()
        mend = "unset TTSV_DATABSE_URL  # set TTSV_DATABASE_URL"
        is_wrong(findings, "TTSV_DATABSE_URL is no setting and has no effect: TTSV_DATABASE_URL?", mend)
        assert "secret" not in str(findings)

    def test_every_variable_of_ours_is_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        root = Path(doctor.__file__).parents[2]
        files = [*root.glob("*.yml"), *(root / "docker").glob("*.yml"), *(root / "workers" / "cli").glob("*.py")]
        text = "\n".join(path.read_text() for path in files if not path.name.startswith("doctor"))
        names = set(re.findall(r'(?:envvar="|\$\{|^ +)(TTSV_[A-Z_]*[A-Z])\b', text, re.MULTILINE))
        assert {"TTSV_URL", "TTSV_HEAD", "TTSV_BIND", "TTSV_DATABASE_URL"} <= names
        for name in names:
            monkeypatch.setenv(name, "")
        findings = doctor_service.look_at_settings()[1]
        assert not [finding for finding in findings if "is no setting" in finding.says]

    def test_a_name_far_from_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_ZZZ", "1")
        is_warning(doctor_service.look_at_settings()[1], "TTSV_ZZZ is no setting", "unset TTSV_ZZZ")

    def test_what_is_invalid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_PORT", "many")
        monkeypatch.setenv("TTSV_DATABASE_URL", "mysql://me:secret@x")
        settings, findings = doctor_service.look_at_settings()
        assert settings is None
        is_wrong(findings, "TTSV_PORT: Input should be a valid integer", "unset TTSV_PORT")
        is_wrong(findings, "TTSV_DATABASE_URL: must be a URL of SQLite or PostgreSQL", "unset TTSV_DATABASE_URL")
        assert "secret" not in str(findings)

    @pytest.mark.parametrize(("content", "says"), [(None, "cannot be read: No such file"), (" \n", "is empty")])
    def test_the_password_file(
        self, content: str | None, says: str, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = machine / "password"
        if content is not None:
            file.write_text(content)
        monkeypatch.setenv("TTSV_DATABASE_PASSWORD_FILE", str(file))
        settings, findings = doctor_service.look_at_settings()
        assert settings is not None
        is_wrong(findings, says, f"ls -l {file}")
        file.write_text("secret")
        is_ok(doctor_service.look_at_settings()[1], "as they should be")

    def test_the_password_file_is_no_reason_to_stop(self, machine: Path) -> None:
        settings = Settings(database_url="postgresql://me@host/x", database_password_file=machine / "none")
        assert doctor_service.look_at_database(settings, deep=False) == []

    def test_webhooks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_WEBHOOK_URL", "https://example.org/hook")
        is_wrong(doctor_service.look_at_settings()[1], "TTSV_WEBHOOK_URL needs", "secrets.token_hex")

    def test_open_to_everyone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_HOST", "0.0.0.0")
        monkeypatch.setenv("TTSV_REQUIRE_KEYS", "false")
        is_wrong(doctor_service.look_at_settings()[1], "everyone who reaches this machine", "unset TTSV_REQUIRE_KEYS")

    def test_the_secret_of_keys(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_DATA_DIR", str(machine))
        secret = machine / "key-secret"
        secret.touch(0o600)
        is_ok(doctor_service.look_at_settings()[1], "as they should be")
        secret.chmod(0o644)
        is_wrong(doctor_service.look_at_settings()[1], "can be read by other users", f"chmod 600 {secret}")


Usage = namedtuple("Usage", "total used free")
Mount = namedtuple("Mount", "mountpoint fstype")


class TestDisk:
    def look(self, folder: Path, url: str | None = None) -> list[Finding]:
        return doctor_files.look_at_disk(Settings(data_dir=folder, database_url=url))

    def test_in_order(self, machine: Path) -> None:
        is_ok(self.look(machine), f"free in {machine}")
        is_ok(self.look(machine / "a" / "b"), "which will be made")
        assert not (machine / "a").exists()

    @pytest.mark.parametrize(("free", "status"), [(2**20, Status.WRONG), (2**29, Status.WARNING)])
    def test_it_is_full(self, free: int, status: Status, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40 - free, free))
        found = only(self.look(machine), f"{size(free)} of 1024.0 GiB free")
        assert found.status is status
        assert "du " in str(found.mend)

    def test_it_cannot_be_written(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)
        is_wrong(self.look(machine), f"{machine} cannot be written", "sudo install --directory")
        is_wrong(self.look(machine / "a"), f"{machine / 'a'} cannot be made", "sudo install --directory")

    def test_a_file_is_in_its_way(self, machine: Path) -> None:
        (machine / "file").touch()
        is_wrong(self.look(machine / "file" / "data"), "it is a file", f"mv {machine / 'file'}")

    def test_the_store(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def look(storage: str) -> list[Finding]:
            return doctor_files.look_at_disk(Settings(data_dir=machine, storage=storage))

        folder = machine / "results"
        is_warning(look(str(folder)), f"{folder}, is not there and will be made", f"findmnt {folder}")
        folder.mkdir()
        is_ok(look(str(folder)), f"free in the store of TTSV_STORAGE, {folder}")
        room = shutil.disk_usage
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 0) if path == folder else room(path))
            is_wrong(look(str(folder)), f"0 KiB of 1024.0 GiB free in the store of TTSV_STORAGE, {folder}: at", "du ")
            is_ok(look(str(folder)), f"free in {machine}")
        monkeypatch.setattr(os, "access", lambda path, _: path != folder)
        is_wrong(look(str(folder)), f"{folder}, cannot be written", "sudo chown")

        found = only(look("s3://key:word@bucket/x?shape=round"), "cannot be read")
        assert found.status is Status.WRONG
        assert "bucket/x, cannot be read: TTSV_STORAGE: Unexpected query parameter" in found.says
        assert "word" not in found.says

    def test_a_store_that_is_silent_is_given_up(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(opening, "_ANSWER_SECONDS", 0.1)
        found = doctor_files.look_at_disk(Settings(data_dir=machine, storage="s3://key:word@bucket/x"))
        is_wrong(found, "bucket/x, does not answer within 0.1 s", "Does its host answer?")

    def test_a_linked_folder_of_trials(self, machine: Path) -> None:
        (machine / "linked").mkdir()
        (machine / "big").mkdir()
        (machine / "linked" / "trials").symlink_to(machine / "big")
        mend = f"mount --bind {machine}/big {machine}/linked/trials"
        is_wrong(self.look(machine / "linked"), "trials is a link", mend)

    @pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre"])
    def test_sqlite_on_a_network(self, kind: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mounts = [Mount("/", "ext4"), Mount(str(machine / "shared"), kind), Mount(str(machine / "sha"), "xfs")]
        monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
        folder = machine / "shared" / "data"
        is_wrong(self.look(folder), f"lies on {kind}, whose locks", "export TTSV_DATABASE_URL=sqlite:///")
        assert "backup" not in str(only(self.look(folder), "whose locks").mend), "nothing is there yet"
        folder.mkdir(parents=True)
        (folder / "ttsv.db").touch()
        mend = "ttsv backup ttsv.backup && export TTSV_DATABASE_URL=sqlite:////var/lib/ttsv/ttsv.db && ttsv restore"
        is_wrong(self.look(folder), f"lies on {kind}, whose locks", mend)
        (machine / "link").symlink_to(folder)
        is_wrong(self.look(machine / "link"), f"lies on {kind}, whose locks", mend)
        for url in ("postgresql://host/x", f"sqlite:///{machine / 'local.db'}"):
            assert worst(self.look(folder, url)) is Status.OK  # files may lie there
        assert worst(self.look(machine / "data")) is Status.OK


@pytest.fixture
def lab(database: Database, machine: Path) -> Settings:
    """Settings of a migrated database in the data folder."""
    return Settings(data_dir=machine)


def greet(database: Database, name: str, seconds_ago: float = 0, *, since: float = 0) -> None:
    """A worker that was heard of so many seconds ago, and first `since` seconds ago."""
    seen, began = (datetime.now(UTC) - timedelta(seconds=seconds) for seconds in (seconds_ago, since))
    database.write(lambda session: session.add(Worker(name=name, cpus=8, gpus=2, seen_at=seen, started_at=began)))


def post(database: Database, state: str = "queued", waiting: str | None = None, *, unfit: bool = False) -> int:
    spec = ExperimentSpec.model_validate({"name": "grid", "base": {"dataset": "digits", "model": "small-cnn"}})
    plan = expand_grid(spec, max_trials=10)

    def work(session: Any) -> int:
        experiment = session.get_one(Experiment, submission.submit(session, Draft(spec, plan)).id)
        experiment.state, experiment.waiting = ExperimentState(state), waiting
        experiment.unfit_since = datetime.now(UTC) if unfit else None
        return int(experiment.id)

    return database.write(work)


class TestDatabase:
    def look(self, settings: Settings, *, deep: bool = False) -> list[Finding]:
        return doctor_service.look_at_database(settings, deep=deep)

    def test_in_order(self, lab: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.database.engine.keeps_wal", lambda: True)
        findings = self.look(lab, deep=True)
        is_ok(findings, "at the newest schema in ")
        is_ok(findings, "SQLite goes by the clock of this machine")

    def test_files_that_a_worker_wrote_elsewhere(
        self, lab: Settings, database: Database, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its data folder is another: what it says succeeded, and nobody can have the files."""
        post(database)
        assert not [finding for finding in self.look(lab) if "newest files" in finding.says], "there are none"
        whole, store = machine / "trials/1/1/a", machine / "store"
        files = [Artifact(trial_id=1, kind=kind, path=f"trials/1/1/{kind}", sha256="0" * 64, size=1) for kind in "ab"]
        database.write(lambda session: session.add_all(files))
        whole.parent.mkdir(parents=True)
        whole.write_text("x")
        says = f"of the 2 newest files of trials 1 are not in {machine}, as the b of trial 1"
        is_wrong(self.look(lab), says, "TTSV_DATA_DIR and TTSV_STORAGE")
        stored = Settings(data_dir=machine, storage=str(store))
        is_wrong(self.look(stored), f"not in {machine}, nor in the store {store}, as the b", "TTSV_STORAGE")
        (store / "trials/1/1").mkdir(parents=True)
        (store / "trials/1/1/b").write_text("x")
        is_ok(self.look(stored), "the 2 newest files of trials are where they are served from")
        monkeypatch.setattr("service.experiments.artifacts.is_kept", lambda *_: Path("/proc/1/mem/x").stat())
        is_wrong(self.look(stored), "cannot be told", "TTSV_DATA_DIR")
        removed = datetime.now(UTC)
        database.write(lambda session: session.execute(update(Artifact).values(removed_at=removed)))
        assert not [finding for finding in self.look(lab) if "newest files" in finding.says]

    def test_an_old_sqlite(self, lab: Settings, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        database.close()
        connection = sqlite_driver.connect(lab.data_dir / "ttsv.db")
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.close()
        monkeypatch.setattr("service.database.engine.keeps_wal", lambda: False)
        is_warning(self.look(lab), "cannot be trusted with a write-ahead log", "pip install pysqlite3")

    def test_an_old_sqlite_opens_no_log_of_a_new_one(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.database.engine.keeps_wal", lambda: False)
        connection = sqlite_driver.connect(machine / "ttsv.db")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE x (y)")
        connection.close()
        before = (machine / "ttsv.db").read_bytes()
        is_wrong(self.look(Settings(data_dir=machine)), "has a write-ahead log, which SQLite", "pip install pysqlite3")
        assert (machine / "ttsv.db").read_bytes() == before

    def test_there_is_none(self, machine: Path) -> None:
        settings = Settings(data_dir=machine / "data")
        is_warning(self.look(settings), "there is none yet", "ttsv migrate")
        assert not (machine / "data").exists()

    def test_it_is_lost_and_the_files_of_its_trials_are_not(self, lab: Settings, machine: Path) -> None:
        (machine / "data/trials").mkdir(parents=True)
        none = Settings(data_dir=machine / "data")
        is_warning(self.look(none), "there is none yet", "ttsv migrate")
        (machine / "data/trials/1").mkdir()
        says = f"trials have left files in {machine}/data/trials"
        is_wrong(self.look(none), f"{machine}/data/ttsv.db is not there, and {says}", "ttsv restore --force FILE")
        assert not (machine / "data/ttsv.db").exists()
        elsewhere = Settings(data_dir=machine / "data", database_url=str(lab.url))
        is_wrong(self.look(elsewhere), f"has never had an experiment, and {says}", "ttsv restore --force FILE")
        (machine / "data/trials").rename(machine / "data/aside")
        (machine / "data/trials").write_text("")
        is_warning(self.look(none), "there is none yet", "ttsv migrate")

    def test_whether_it_is_lost_cannot_be_told(self, machine: Path) -> None:
        (machine / "trials").symlink_to("trials")
        is_wrong(self.look(Settings(data_dir=machine)), "of this database cannot be told", f"ls -ld {machine}/trials")

    def test_a_restore_was_cut_short(self, machine: Path, lab: Settings) -> None:
        (machine / "restore.json").write_text("{}")
        for settings in (lab, Settings(data_dir=machine)):
            (found,) = self.look(settings)
            is_wrong([found], f"a restore into {machine} was cut short", "ttsv restore FILE")

    def test_it_is_not_migrated(self, machine: Path) -> None:
        (machine / "ttsv.db").touch()
        findings = self.look(Settings(data_dir=machine))
        is_wrong(findings, "its schema is at None, this code needs", "ttsv migrate")
        assert [finding.mend for finding in findings] == ["ttsv migrate"]

    def test_it_is_of_a_newer_version(self, lab: Settings, database: Database) -> None:
        database.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = 'ffffffff'")))
        findings = self.look(lab)
        is_wrong(findings, "its schema is at ffffffff, of a newer version than this code", "pip install --upgrade .")

    def test_a_metric_has_no_column(self, lab: Settings, database: Database) -> None:
        database.write(lambda session: session.execute(text("ALTER TABLE results DROP COLUMN brier")))
        is_wrong(self.look(lab), "no column for brier", "ttsv migrate")

    def test_it_is_no_database(self, machine: Path) -> None:
        (machine / "ttsv.db").write_bytes(b"not a database, but long enough to be read as one" * 100)
        says = f"{machine / 'ttsv.db'} is damaged: file is not a database"
        is_wrong(self.look(Settings(data_dir=machine)), says, "ttsv restore --force FILE")

    def test_it_is_away(self, machine: Path) -> None:
        settings = Settings(database_url=f"postgresql://me:secret@/x?host={machine}")
        findings = self.look(settings)
        is_wrong(findings, "it does not answer: ", "pg_isready --host")
        assert "secret" not in str(findings)

    def test_it_is_read_only(self, lab: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Database, "takes_writes", lambda _: False)
        is_wrong(self.look(lab), "it is read-only", f"chmod u+rw {lab.data_dir / 'ttsv.db'}")

    def test_it_is_damaged(self, lab: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.database.server.damage", lambda _: "row 7 missing from index")
        is_wrong(self.look(lab, deep=True), "is damaged: row 7 missing", "backup")
        assert not [finding for finding in self.look(lab) if "is damaged" in finding.says]

    def test_nobody_has_a_key(self, lab: Settings) -> None:
        open_to_all = lab.model_copy(update={"host": "0.0.0.0"})
        is_wrong(self.look(open_to_all), "requests from elsewhere need a key", "ttsv keys create PROJECT")

    def test_the_secret_of_the_keys_is_elsewhere(self, lab: Settings, database: Database) -> None:
        def add(session: Any) -> None:
            key = security.new_key(security.installation_secret(lab.data_dir))
            keys.add_key(session, keys.create_project(session, "vision").id, key, owner="ada", scopes=[])

        database.write(add)
        secret, says = lab.data_dir / "key-secret", "under which they are hashed, is not there"
        assert not [finding for finding in self.look(lab) if says in finding.says]
        secret.unlink()
        mend = f"unzip -p FILE files/key-secret > {secret}"
        is_wrong(self.look(lab), says, mend)
        is_warning(self.look(lab.model_copy(update={"storage": str(lab.data_dir / "store")})), says, mend)

    @pytest.mark.parametrize(
        ("version", "ahead", "statuses"),
        [
            ((18, 1), 0.0, (Status.OK, Status.OK)),
            ((12, 4), 0.0, (Status.WARNING, Status.OK)),
            ((18, 1), -7.0, (Status.OK, Status.WARNING)),
            ((18, 1), 3600.0, (Status.OK, Status.WRONG)),
        ],
    )
    def test_postgres(
        self,
        version: tuple[int, ...],
        ahead: float,
        statuses: tuple[Status, Status],
        lab: Settings,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("service.database.server.describe", lambda _: Server("PostgreSQL", version, ahead))
        findings = self.look(lab)
        shown = only([finding for finding in findings if finding.check == "database"], f"PostgreSQL {version[0]}")
        clock = only(findings, "the clock of the database at PostgreSQL")
        assert (shown.status, clock.status) == statuses
        if shown.mend is not None:
            assert re.match(r"ttsv backup \S+  # .* newer server .* ttsv restore --force", shown.mend)
        if ahead:
            assert clock.mend == "sudo timedatectl set-ntp true"
            assert ("1 h ahead" if ahead > 7200 else "60 min ahead of" if ahead > 0 else "7 s behind") in clock.says


class TestWorkers:
    def look(self, settings: Settings) -> list[Finding]:
        return doctor_service.look_at_database(settings, deep=False)

    def test_in_order(self, lab: Settings, database: Database) -> None:
        greet(database, "gpu-1", 3)
        post(database)
        found = only(self.look(lab), "gpu-1 (8 CPUs, 2 GPUs)")
        assert found.status is Status.OK
        assert re.search(r"gpu-1 \(8 CPUs, 2 GPUs\) ([3-9]|[1-5]\d) s ago", found.says)

    def test_one_whose_ray_does_not_start(self, lab: Settings, database: Database) -> None:
        name = f"{socket.gethostname()}-7"
        greet(database, name, 3, since=40)
        post(database, waiting="no worker is there")
        is_ok(self.look(lab), f"{name} (8 CPUs, 2 GPUs)")
        greet(database, "other-8", 3, since=600)
        is_wrong(self.look(lab), "other-8 (8 CPUs, 2 GPUs)", "logs/ray-8.log  # on other")
        logs = lab.data_dir / "logs"
        logs.mkdir()
        database.write(lambda session: session.execute(text("DELETE FROM workers")))
        greet(database, name, 3, since=600)
        ray = f"tail --lines 20 {logs}/ray-7.log"
        is_wrong(self.look(lab), "without a node for 10 min: no trial can run", ray)
        error = "2026-01-01T00:00:00.000Z ERROR workers.worker.poller: "
        log = logs / "worker.log"
        log.write_text(f"INFO w: worker {name}9: 8 CPUs\n{error}the one before\n")
        is_wrong(self.look(lab), "without a node for 10 min: no trial can run", ray)
        log.write_text(f"{log.read_text()}INFO w: worker {name}: 8 CPUs\n{error}a port is taken\nno error\n")
        findings = self.look(lab)
        is_wrong(findings, "no trial can run (its log: a port is taken)", f"tail --lines 20 {log}")
        assert "the one before" not in str(findings)
        is_warning(findings, "waits: no worker is there", "ttsv nodes")

    def test_nodes_of_its_own_or_of_others(self, lab: Settings, database: Database) -> None:
        for name in ("one-1", "two-2"):
            greet(database, name, since=600)
        seen = [Node("a" * 56, "one", "10.0.0.1", cpus=4, gpus=0, memory_gib=10, head=True)]
        database.write(lambda session: nodes.record(session, "one-1", seen))
        is_ok(self.look(lab), "one-1 (8 CPUs, 2 GPUs)")
        is_warning(self.look(lab), "two-2 (8 CPUs, 2 GPUs)", "ray-2.log  # on two")
        # A node of the machine, told of by another worker of the same cluster; then one that just left.
        database.write(lambda session: nodes.record(session, "one-1", [*seen, replace(seen[0], id="b", host="two")]))
        is_ok(self.look(lab), "two-2 (8 CPUs, 2 GPUs)")
        database.write(lambda session: nodes.record(session, "one-1", []))
        is_ok(self.look(lab), " ago, whose Ray starts")
        is_wrong(self.look(lab), "two-2 (8 CPUs, 2 GPUs)", "ray-2.log")

    def test_none(self, lab: Settings, database: Database) -> None:
        is_warning(self.look(lab), "no worker was heard of in the last minute; nothing waits", "ttsv worker")
        post(database, "paused")
        assert only(self.look(lab), "no worker").status is Status.WARNING
        post(database, "running")
        is_wrong(
            self.look(lab),
            "no worker was heard of in the last minute, and 1 experiment is queued or running",
            "ttsv worker",
        )

    def test_one_that_is_gone(self, lab: Settings, database: Database) -> None:
        greet(database, "here")
        greet(database, "gone", 7300)
        is_warning(self.look(lab), "not heard of any more: gone (8 CPUs, 2 GPUs) 2 h ago", "ttsv worker")

    def test_one_that_another_of_its_machine_has_replaced(self, lab: Settings, database: Database) -> None:
        greet(database, "lab-1", 540, since=7200)
        greet(database, "lab-2", since=7300)
        is_warning(self.look(lab), "not heard of any more: lab-1 (8 CPUs, 2 GPUs) 9 min ago", "ttsv worker")
        greet(database, "other-4", since=60)
        is_warning(self.look(lab), "not heard of any more: lab-1 (8 CPUs, 2 GPUs) 9 min ago", "ttsv worker")
        greet(database, "lab-3", since=500)
        assert not [finding for finding in self.look(lab) if "not heard of any more" in finding.says]

    def test_one_whose_clock_is_ahead(self, lab: Settings, database: Database) -> None:
        greet(database, "ahead", -30)
        is_warning(self.look(lab), "the clock of worker ahead is 30 s ahead of ours", "timedatectl")

    def test_a_machine_that_does_not_fit(self, lab: Settings, database: Database) -> None:
        greet(database, "here")
        seen = [
            Node("a" * 56, "one", "10.0.0.1", cpus=4, gpus=0, memory_gib=10),
            Node("b" * 56, "two", "10.0.0.2", 4, 0, 10, state=NodeState.REFUSED, problem="it has Python 3.12"),
        ]
        database.write(lambda session: nodes.record(session, "here", seen))
        findings = self.look(lab)
        is_warning(findings, "machine two (refused): it has Python 3.12", "ttsv nodes")
        assert not [finding for finding in findings if "machine one" in finding.says]

    def test_why_experiments_wait(self, lab: Settings, database: Database) -> None:
        greet(database, "here")
        turn = post(database, waiting="others of higher priority")
        unfit = post(database, waiting="needs 3 GPUs on one node; the largest has 2", unfit=True)
        findings = self.look(lab)
        is_ok(findings, f"experiment {turn} (grid) waits: others of higher priority")
        is_warning(findings, f"experiment {unfit} (grid) waits: needs 3 GPUs", f"ttsv cancel {unfit}")

    def test_many_wait(self, lab: Settings, database: Database) -> None:
        greet(database, "here")
        for _ in range(12):
            post(database, waiting="its turn")
        findings = self.look(lab)
        assert len([finding for finding in findings if "waits: its turn" in finding.says]) == 10
        is_ok(findings, "2 more experiments wait")


class TestRay:
    def look(self, folder: Path) -> list[Finding]:
        return doctor_machine.look_at_ray(Settings(data_dir=folder))

    def pin(self, text: str, machine: Path, patch: pytest.MonkeyPatch) -> None:
        (machine / "constraints.txt").write_text(text)
        patch.setattr(doctor_machine, "_CONSTRAINTS", machine / "constraints.txt")

    def test_version(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pin("ray==1.0.0\n", machine, monkeypatch)
        is_wrong(self.look(machine), "1.0.0 is what this code is tested with", "pip install --constraint")
        (machine / "constraints.txt").unlink()
        is_ok(self.look(machine), "Ray ")

    def test_not_installed(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "version", missing)
        is_wrong(self.look(machine), "Ray is not installed", "pip install")

    def test_token(self, machine: Path) -> None:
        (machine / "token").touch(0o600)
        is_wrong(self.look(machine), "token is empty, which ends Ray", f"rm {machine / 'token'}  # a worker makes")
        (machine / "token").write_text("x")
        assert worst(self.look(machine)) is Status.OK
        (machine / "token").chmod(0o640)
        is_wrong(self.look(machine), "token can be read by other users", f"chmod 600 {machine / 'token'}")

    def test_the_token_of_a_node(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (machine / "copy").write_text("x")
        (machine / "copy").chmod(0o604)
        monkeypatch.setenv("TTSV_TOKEN_FILE", str(machine / "copy"))
        is_wrong(self.look(machine), "copy can be read by other users", f"chmod 600 {machine / 'copy'}")

    def test_an_address_of_another_machine(self, machine: Path) -> None:
        found = doctor_machine.look_at_ray(Settings(data_dir=machine, head_address="198.51.100.77"))
        is_wrong(found, "TTSV_HEAD_ADDRESS: 198.51.100.77 is no address of this machine", "ip -brief address")
        found = doctor_machine.look_at_ray(Settings(data_dir=machine, head_address="localhost"))
        is_warning(found, "localhost is 127.0.0.1, where no other machine reaches this one", "ip -brief address")

    def test_the_port_of_its_head_is_taken(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By a program of ours, another's, or the head itself: which a process is by its words and its token."""

        def look(*words: str, token: Path = machine / "token", **settings: Any) -> list[Finding]:
            code = "import socket, time; one = socket.create_server(('', 0)); print(one.getsockname()[1], flush=True)"
            command = [sys.executable, "-c", f"{code}; time.sleep(60)", *words]
            environment = os.environ | {"RAY_AUTH_TOKEN_PATH": str(token)}
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
                try:
                    assert process.stdout is not None
                    port = int(process.stdout.readline())
                    found: dict[str, Any] = {"data_dir": machine, "head_address": "127.0.0.1", "head_port": port}
                    return [
                        one
                        for one in doctor_machine.look_at_ray(Settings(**(found | settings)))
                        if "is taken" in one.says
                    ]
                finally:
                    process.kill()

        is_wrong(look(), "is taken by another program (python", "export TTSV_HEAD_PORT=63")
        assert only(look(), "(TTSV_HEAD_PORT)").mend != only(look(node_ports="6300-6379"), "(TTSV_HEAD_PORT)").mend
        head = "/tmp/ttsv-ray-x/session"
        assert look(head) == look(head_address=None) == []
        is_wrong(look(head, token=machine / "other" / "token"), "is taken by another program", "export")
        monkeypatch.setattr(psutil, "net_connections", lambda _: [])
        is_warning(look(), "that this user cannot see", "sudo ss --listening")
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
        assert look() == []

    def test_leftovers(self, machine: Path) -> None:
        owner = identity()
        assert owner is not None
        folder = machine / "temporary" / "ttsv-ray-x"
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps(owner))
        assert worst(self.look(machine)) is Status.OK  # its worker lives
        (folder / "owner.json").write_text(json.dumps(owner | {"start": 1}))
        is_warning(self.look(machine), f"killed workers left clusters behind: {folder}", "ttsv worker")
        assert folder.exists()

    def test_another_cluster(self, machine: Path, monkeypatch: pytest.MonkeyPatch, answering: str) -> None:
        monkeypatch.setenv("RAY_ADDRESS", answering.removeprefix("http://"))
        is_ok(self.look(machine), "something listens at RAY_ADDRESS")
        for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            is_wrong(self.look(machine), f"no cluster answers at RAY_ADDRESS, {address}", "ray status")


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


class TestGpus:
    def look(self, settings: Settings | None = None) -> list[Finding]:
        return doctor_machine.look_at_gpus(settings)

    def test_none(self) -> None:
        is_ok(self.look(), "no nvidia-smi: trials compute on the CPU")
        is_ok(self.look(), "torch 2.15.0+cu132, ttsv 0.1.0 (git 0123456789ab) on Linux")

    def test_in_order(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program(machine, "nvidia-smi", f"echo '{CARD}'; echo '{CARD}'")
        torch_says(monkeypatch, SEEN | {"available": True, "gpus": 2})
        is_ok(self.look(), "2 x NVIDIA H100 80GB HBM3, 81559 MiB; driver 580.95.05")
        is_ok(self.look(), "torch 2.15.0+cu132 computes on them with CUDA 13.2")

    def test_the_driver_fails(self, machine: Path) -> None:
        says = "Failed to initialize NVML: Driver/library version mismatch"
        program(machine, "nvidia-smi", f"echo '{says}'; exit 18")
        is_wrong(self.look(), f"nvidia-smi finds no GPU: {says}", "sudo modprobe nvidia")

    def test_the_driver_hangs(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_machine, "_DRIVER_SECONDS", 0.1)
        monkeypatch.setattr("workers.node.machine._DRIVER_SECONDS", 0.1)
        program(machine, "nvidia-smi", "exec sleep 20")
        left: list[subprocess.Popen[str]] = []
        with monkeypatch.context() as patch:  # as one that the kernel holds, and no signal ends
            patch.setattr(subprocess.Popen, "kill", lambda child: left.append(child))
            began = time.monotonic()
            is_wrong(self.look(), "nvidia-smi: does not answer", "reboot")
            assert time.monotonic() - began < 15.0
        for child in left:
            child.kill()

    def test_a_driver_without_its_program(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_machine, "_DEVICE", machine)
        monkeypatch.setattr(shutil, "which", lambda _: None)
        is_wrong(self.look(), "nvidia-smi is not", "nvidia-utils")

    def test_what_the_driver_alone_lists_is_offered_and_looked_at(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (machine / "driver" / "0000:01:00.0").mkdir(parents=True)
        (machine / "driver" / "0000:01:00.0" / "information").write_text("Model: H100\nGPU UUID: GPU-1111-a\n")
        torch_says(monkeypatch, SEEN | {"available": True, "gpus": 1})
        monkeypatch.setattr(doctor_machine, "_DEVICE", machine)
        says = "trials are given GPUs all the same, 1 of them, whose memory is not known"
        is_warning(self.look(), f"nvidia-smi is not: {says}", "nvidia-utils")
        program(machine, "nvidia-smi", "echo 'Unable to determine the device handle for GPU0: Unknown Error'; exit 15")
        is_warning(self.look(), f"GPU0: Unknown Error: {says}", "reboot")
        is_ok(self.look(), "torch 2.15.0+cu132 computes on them")
        torch_says(monkeypatch, SEEN, "the card is gone")
        is_wrong(self.look(), "can use no GPU: the card is gone", "reboot")

    def test_torch_cannot_use_them(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program(machine, "nvidia-smi", f"echo '{CARD}'")
        torch_says(monkeypatch, SEEN | {"cuda": None})
        is_wrong(self.look(), "is built without CUDA", "pip install")
        torch_says(monkeypatch, SEEN, "The NVIDIA driver on your system is too old (found version 12040)")
        is_wrong(self.look(), "can use no GPU: The NVIDIA driver on your system is too old", "cuda-drivers")

    def test_some_are_hidden(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program(machine, "nvidia-smi", f"echo '{CARD}'; echo '{CARD}'")
        torch_says(monkeypatch, SEEN | {"available": True, "gpus": 1})
        is_warning(self.look(), "torch sees 1 of 2 GPUs", "unset CUDA_VISIBLE_DEVICES")

    def test_mps(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = Settings(worker_mps=True)
        is_wrong(self.look(asked), "nvidia-cuda-mps-control is not installed", "install nvidia-compute-utils-")
        assert not [one for one in self.look() if "MPS" in one.says]
        answers = 'read command; case "$CUDA_MPS_PIPE_DIRECTORY" in *good*) exit 0;; *) exit 1;; esac'
        program(machine, "nvidia-cuda-mps-control", answers)
        assert not [one for one in self.look() if "MPS" in one.says]
        is_ok(self.look(asked), "MPS is asked for and installed: a worker starts it")
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/good/pipes")
        is_ok(self.look(asked), "MPS: a daemon that is not ours answers in /good/pipes: trials are its clients")
        is_ok(self.look(Settings()), "trials are its clients, although TTSV_WORKER_MPS is not set")
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
        for name in ("good", "gone"):
            folder = machine / "temporary" / f"ttsv-mps-{name}"
            folder.mkdir()
            (folder / "owner.json").write_text(json.dumps(identity()))
        found = self.look(asked)
        is_ok(found, f"MPS: the daemon of a worker or node answers in {machine}/temporary/ttsv-mps-good")
        is_warning(found, "MPS: the daemon of a worker or node does not answer in", "ttsv-mps-gone/log/*.log")

    def test_torch_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_machine, "_PROBE", "raise ImportError('libcudart.so.13: no such file')")
        is_wrong(self.look(), "torch cannot compute: ImportError: libcudart.so.13", "pip install")

    def test_of_what_cuda_says_the_reason_is_told(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """And where it is that there is no room, trials may have it."""
        program(machine, "nvidia-smi", f"echo '{CARD}'")
        probe = "class AcceleratorError(RuntimeError): pass\nraise AcceleratorError('CUDA error: {}{}')"
        advice = r"\nCUDA kernel errors might be asynchronously reported at some other API call\nCompile with `X`.\n"
        monkeypatch.setattr(doctor_machine, "_PROBE", probe.format("uncorrectable ECC error encountered", advice))
        is_wrong(self.look(), "torch cannot compute: AcceleratorError: CUDA error: uncorrectable ECC error", "python")
        for says in ("out of memory", "CUDA-capable device(s) is/are busy or unavailable"):
            monkeypatch.setattr(doctor_machine, "_PROBE", probe.format(says, advice))
            is_warning(
                self.look(), f"as where trials compute there: AcceleratorError: CUDA error: {says}", "nvidia-smi"
            )

    def test_torch_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_machine, "_PROBE", "import time; time.sleep(20)")
        monkeypatch.setattr(doctor_machine, "_TORCH_SECONDS", 0.1)
        is_wrong(self.look(), "torch says nothing for", "torch.cuda.is_available()")

    def test_more_is_offered_than_there_is(self) -> None:
        is_wrong(self.look(Settings(worker_gpus=2)), "TTSV_WORKER_GPUS = 2, and there are 0", "unset TTSV_WORKER_GPUS")
        is_warning(self.look(Settings(worker_cpus=10_000)), "TTSV_WORKER_CPUS = 10000", "unset TTSV_WORKER_CPUS")
        assert worst(self.look(Settings(worker_gpus=0, worker_cpus=1))) is Status.OK

    @pytest.mark.slow
    def test_the_real_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        says = only(doctor_machine.look_at_gpus(None), "ttsv 0.1.0")
        assert says.check == "versions"


class TestData:
    def look(self, folder: Path, *, deep: bool = False) -> list[Finding]:
        return doctor_files.look_at_data(Settings(data_dir=folder), deep=deep)

    def test_none(self, machine: Path) -> None:
        is_ok(self.look(machine), "not here: cifar10, cifar100, svhn, fashion-mnist")
        assert not (machine / "datasets").exists()

    def test_one_that_is_here(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_DATA_DIR", str(machine))
        sha256 = verify_dataset("digits", machine)
        is_ok(self.look(machine), f"digits: as at its first use, by size and times (content SHA-256 {sha256[:12]})")
        is_ok(self.look(machine, deep=True), f"digits: every file has its checksum (content SHA-256 {sha256[:12]})")
        (images,) = machine.glob("datasets/cache/*/images.npy")
        images.chmod(0o644)
        with images.open("r+b") as file:
            file.seek(500)
            file.write(b"other")
        is_warning(self.look(machine), "its files have other times than at its first use", "ttsv data verify digits")
        found = only(self.look(machine, deep=True), "is cut or altered")
        assert found.status is Status.WRONG
        self.mend(found)
        is_ok(self.look(machine, deep=True), "digits: every file has its checksum")

    def test_its_record_is_cut(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_DATA_DIR", str(machine))
        (machine / "datasets").mkdir()
        (machine / "datasets" / "digits.sha256.json").write_text("{")
        found = only(self.look(machine), "is cut or altered")
        assert found.status is Status.WRONG
        self.mend(found)
        is_ok(self.look(machine), "digits: as at its first use")

    def test_published_corruptions(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (machine / "datasets" / "CIFAR-10-C").mkdir(parents=True)
        assert not [one for one in self.look(machine) if "CIFAR-10-C" in one.says], "they are gigabytes"
        found = only(self.look(machine, deep=True), "labels.npy is missing")
        assert found.status is Status.WRONG
        assert str(found.mend).startswith("ttsv data verify CIFAR-10-C")
        monkeypatch.setattr("ttsv.data.shared._verify_corruptions", lambda *_: "0123456789abcdef")
        is_ok(self.look(machine, deep=True), "CIFAR-10-C: every file has its checksum (content SHA-256 0123456789ab)")

    @pytest.fixture
    def own(self, machine: Path) -> Path:
        """A set of one's own that was used."""
        path = machine / "datasets" / "mine.npz"
        path.parent.mkdir()
        self.save(path, 0)
        verify_dataset("npz:mine", machine)
        return path

    def save(self, path: Path, value: int) -> None:
        images, labels = np.full((40, 1, 8, 8), value, np.uint8), np.arange(40) % 2
        np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)

    def mend(self, found: Finding) -> None:
        """Runs what is said to mend it, as far as that is a command of ours or of the shell."""
        for command in str(found.mend).partition("  #")[0].split(" && "):
            if command.startswith("ttsv "):
                assert CliRunner().invoke(app, command.split()[1:]).exit_code == 0
            else:
                subprocess.run(command, shell=True, check=True)

    @pytest.mark.parametrize("deep", [False, True])
    def test_one_s_own_was_changed(self, deep: bool, machine: Path, own: Path) -> None:
        before, was = own.read_bytes(), hashlib.sha256(own.read_bytes()).hexdigest()
        self.save(own, 1)
        for _ in range(2):
            found = only(self.look(machine, deep=deep), "npz:mine: trials are refused it: ")
            assert found.status is Status.WRONG
            assert f"{own} has changed since the set's first use" in found.says
            assert f"put back what was, of the SHA-256 {was}" in str(found.mend)
        own.write_bytes(before)
        if deep:
            is_ok(self.look(machine, deep=True), "npz:mine: every file has its checksum")
        else:
            is_warning(self.look(machine), "npz:mine: its copy is gone, or its files have other times", "data verify")
        self.save(own, 1)
        self.mend(only(self.look(machine, deep=deep), "npz:mine"))
        assert not [one for one in self.look(machine, deep=deep) if "npz:mine" in one.says], "as before its first use"
        verify_dataset("npz:mine", machine)
        is_ok(self.look(machine, deep=deep), "npz:mine: ")

    def test_the_copy_of_one_s_own_is_gone(self, machine: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_DATA_DIR", str(machine))
        shutil.rmtree(machine / "datasets" / "cache")
        found = only(self.look(machine), "npz:mine: its copy is gone")
        assert found.status is Status.WARNING
        self.mend(found)
        is_ok(self.look(machine), "npz:mine: as at its first use")

    def test_of_several_files_the_record_has_the_sums(self, machine: Path) -> None:
        folder = machine / "datasets" / "pictures"
        for name in ("a", "b"):
            (folder / "train" / name).mkdir(parents=True)
            for number in range(20):
                Image.new("L", (8, 8), number).save(folder / "train" / name / f"{number}.png")
        verify_dataset("folder:pictures", machine)
        (folder / "train" / "a" / "3.png").unlink()
        record = machine / "datasets" / "folder-pictures.sha256.json"
        is_wrong(self.look(machine), "3.png is gone since the set's first use", f"of the SHA-256 in {record}")

    def test_a_published_one_is_fetched_again(self, machine: Path) -> None:
        (machine / "datasets").mkdir()
        record = {"dataset": "svhn", "sha256": "0", "files": {"train_32x32.mat": "0"}}
        (machine / "datasets" / "svhn.sha256.json").write_text(json.dumps(record))
        is_wrong(self.look(machine), "svhn: trials are refused it: ", "ttsv data fetch svhn")


class TestVersions:
    def test_as_pinned(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def installed(name: str) -> str:
            return {"ray": "2.60.0", "torch": "2.15.0+cu132", "ttsv": "0.1.0"}.get(name) or missing(name)

        monkeypatch.setattr(doctor_machine, "_CONSTRAINTS", machine / "constraints.txt")
        is_ok(doctor_machine.look_at_versions(), "no constraints.txt beside the code")
        monkeypatch.setattr(importlib.metadata, "version", installed)
        (machine / "constraints.txt").write_text("ray==2.60.0\n# a remark\ntorch==2.15.0\nnot-here==1.0\n")
        is_ok(doctor_machine.look_at_versions(), "2 packages are as in constraints.txt")

    def test_others(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_machine, "_CONSTRAINTS", machine / "constraints.txt")
        (machine / "constraints.txt").write_text("ray==1.0\nnot-installed-at-all==1.0\n")
        is_warning(doctor_machine.look_at_versions(), "1 packages are not of the version", "pip install --constraint")

    def test_it_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "version", missing)
        is_wrong(doctor_machine.look_at_versions(), "the package ttsv is not installed", "pip install")


@pytest.fixture
def answers() -> dict[str, tuple[int, object]]:
    """Path -> status and body of an API's stand-in."""
    checks = {"database": "ok", "schema": "ok", "disk": "ok"}
    return {
        "/livez": (200, {"status": "ok"}),
        "/readyz": (200, {"status": "ok", "checks": checks, "worker_seen_at": None}),
        "/v1/experiments": (200, {"items": [], "next": None}),
        "/openapi.json": (200, {"info": {"version": importlib.metadata.version("ttsv")}}),
        "Date": (0, 0.0),
    }


@pytest.fixture
def answering(answers: dict[str, tuple[int, Any]]) -> Iterator[str]:
    """The address of an API's stand-in; `answers["Date"]` has the seconds by which its clock is ahead."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[self.path.partition("?")[0]]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(datetime.now(UTC).timestamp() + answers["Date"][1])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class TestApi:
    @pytest.fixture
    def look(self, answering: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Finding]]:
        monkeypatch.setenv("TTSV_URL", f"{answering}/")
        return doctor_service.look_at_api

    def test_in_order(self, look: Callable[[], list[Finding]]) -> None:
        findings = look()
        is_ok(findings, "answers, version ")
        is_ok(findings, "the clock of the API at http://127.0.0.1")
        assert len(findings) == 2

    @pytest.mark.slow
    def test_the_real_one(self, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_URL", server)
        findings = doctor_service.look_at_api()
        assert [finding.status for finding in findings] == [Status.OK] * 2, findings

    def test_nobody_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.client.connection.DEFAULT_URL", "http://127.0.0.1:1")
        is_warning(doctor_service.look_at_api(), "no API answers at http://127.0.0.1:1", "ttsv serve")
        monkeypatch.setenv("TTSV_URL", "http://127.0.0.1:1")
        is_wrong(doctor_service.look_at_api(), "no API answers", "curl --verbose http://127.0.0.1:1/livez")
        monkeypatch.setenv("TTSV_URL", "no address")
        is_wrong(doctor_service.look_at_api(), "no API answers at no address", "curl")

    @pytest.mark.parametrize("answer", [(404, {}), (200, {"hello": 1})])
    def test_something_else_answers(
        self, answer: tuple[int, object], look: Callable[[], list[Finding]], answers: dict[str, tuple[int, object]]
    ) -> None:
        answers["/livez"] = answer
        is_wrong(look(), "is no service of ours", "curl --include")

    def test_it_is_not_ready(self, look: Callable[[], list[Finding]], answers: dict[str, tuple[int, object]]) -> None:
        checks = {"schema": "at None", "disk": "full", "database": "OperationalError: does it run?"}
        answers["/readyz"] = (503, {"status": "not ready", "checks": checks})
        is_wrong(look(), "is not ready: schema: at None", "ttsv migrate  # where the API runs")
        is_wrong(look(), "is not ready: disk: full", "du --human-readable")
        is_wrong(look(), "is not ready: database: OperationalError: does it run?", "pg_isready")
        answers["/readyz"] = (503, {"status": "not ready", "checks": {"database": "read-only: nothing can be stored"}})
        is_wrong(look(), "is not ready: database: read-only", "SHOW default_transaction_read_only")
        answers["/readyz"] = (500, {})
        is_wrong(look(), "is not ready: readiness: status 500", "logs/api.log")

    def test_it_is_of_another_version(
        self, look: Callable[[], list[Finding]], answers: dict[str, tuple[int, object]]
    ) -> None:
        answers["/openapi.json"] = (200, {"info": {"version": "99.0"}})
        is_warning(look(), "is of version 99.0, this command of ", "pip install --upgrade")

    def test_it_refuses_the_key(
        self, look: Callable[[], list[Finding]], answers: dict[str, tuple[int, object]]
    ) -> None:
        answers["/v1/experiments"] = (401, {"detail": "the key is revoked"})
        is_wrong(look(), "refuses the key in TTSV_KEY, or its absence: the key is revoked", "export TTSV_KEY=")

    @pytest.mark.parametrize(
        ("ahead", "status"),
        [(-1.0, Status.OK), (1.0, Status.OK), (20.0, Status.WARNING), (-20.0, Status.WARNING), (-900.0, Status.WRONG)],
    )
    def test_its_clock(
        self, ahead: float, status: Status, look: Callable[[], list[Finding]], answers: dict[str, tuple[int, object]]
    ) -> None:
        answers["Date"] = (0, ahead)
        assert only(look(), "the clock of the API").status is status


class TestCommand:
    def run(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["doctor", *arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout

    @pytest.fixture(autouse=True)
    def no_api(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.client.connection.DEFAULT_URL", "http://127.0.0.1:1")

    def test_a_bare_machine(self, machine: Path) -> None:
        before = sorted(machine.rglob("*"))
        code, output = self.run()
        assert code == 0, output
        lines = output.splitlines()
        place = next(number for number, line in enumerate(lines) if line.startswith("warning  database  there is none"))
        assert lines[place + 1].strip() == "ttsv migrate  # as `ttsv serve` does"
        assert lines[-1].startswith("0 wrong, 2 to look at, ")
        assert sorted(machine.rglob("*")) == before

    def test_something_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_URL", "http://127.0.0.1:1")
        code, output = self.run()
        assert code == 1
        assert "\n1 wrong, " in output

    def test_json(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        code, output = self.run("--json")
        found = json.loads(output)
        assert (code, found["status"]) == (0, "warning")
        assert {tuple(finding) for finding in found["findings"]} == {("check", "status", "says", "mend")}
        assert {finding["status"] for finding in found["findings"]} == {"ok", "warning"}
        checks = {finding["check"] for finding in found["findings"]}
        assert checks == {"settings", "disk", "database", "data", "ray", "gpus", "versions", "api"}
        monkeypatch.setenv("TTSV_PORT", "x")
        code, output = self.run("--json")
        found = json.loads(output)
        assert (code, found["status"]) == (1, "wrong")
        assert {finding["check"] for finding in found["findings"]} == {"settings", "gpus", "versions", "api"}

    def test_deep_is_passed_on(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_DATA_DIR", str(machine))
        verify_dataset("digits", machine)
        assert "digits: as at its first use" in self.run()[1]
        assert "digits: every file has its checksum" in self.run("--deep")[1]

    def test_a_look_that_fails_hides_no_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor_machine, "look_at_versions", lambda: 1 / 0)
        findings = doctor.examine(deep=False)
        is_wrong(findings, "could not be looked at: ZeroDivisionError", "report this of `versions`")
        is_ok(findings, "no nvidia-smi")


@pytest.mark.parametrize(("no_color", "escapes"), [("", True), ("1", False)])
def test_colours_are_left_out_where_nobody_wants_them(
    monkeypatch: pytest.MonkeyPatch, no_color: str, escapes: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr("workers.cli.doctor.examine", lambda **_: [Check("disk").warning("it is nearly full", "rm x")])
    assert ("\x1b[" in CliRunner().invoke(app, ["doctor"], color=True).stdout) == escapes
