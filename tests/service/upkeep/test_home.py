"""Who would leave files where the API does not read them is refused, and nobody else is."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import delete, func, select, text
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from service.database import Experiment, Home
from service.database.engine import Database, shown
from service.errors import UserError
from service.experiments import submission
from service.experiments.submission import Draft
from service.settings import Settings
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.storage import MARKER
from service.upkeep import home
from service.upkeep.home import move_here, problem_of, refuse_elsewhere, refuse_link, refuse_lost, settle
from service.upkeep.migrate import migrate
from workers.cli.__main__ import app

At = Callable[[str], Settings]


@pytest.fixture
def at(tmp_path: Path, database_url: str) -> At:
    """Settings of the same database with a data folder of this name."""

    def settings(name: str) -> Settings:
        (tmp_path / name).mkdir(exist_ok=True)
        return Settings(data_dir=tmp_path / name, database_url=database_url)

    return settings


def test_a_linked_folder_of_trials_is_refused(at: At) -> None:
    """Else each trial trains to its end, and nobody can read what it left."""
    settings = at("api")
    (settings.data_dir / "elsewhere").mkdir(parents=True)
    refuse_link(settings)
    (settings.data_dir / "trials").symlink_to(settings.data_dir / "elsewhere")
    with pytest.raises(UserError, match=r"trials is a link, .* mount the disk there"):
        refuse_link(settings)
    refuse_link(settings.model_copy(update={"storage": str(settings.data_dir / "store")}))


class TestALostDatabase:
    """Numbers begin at 1 in a new one: its trials would write into the folders of those that were."""

    def test_a_new_one_beside_files_of_trials(self, database: Database, at: At, tmp_path: Path) -> None:
        settings = at("api")
        for name in ("datasets/mine", "trials", "trials/lost+found"):
            (settings.data_dir / name).mkdir(parents=True)
        (settings.data_dir / "key-secret").write_bytes(b"s")
        refuse_lost(database, settings)
        stored = settings.model_copy(update={"storage": str(tmp_path / "store")})
        (tmp_path / "store/trials/7/1").mkdir(parents=True)
        with pytest.raises(UserError, match=rf"left files in {tmp_path}/store/trials"):
            refuse_lost(database, stored)
        (settings.data_dir / "trials/1/1").mkdir(parents=True)
        for here in (settings, stored):
            with pytest.raises(UserError, match="has never had an experiment") as refused:
                refuse_lost(database, here)
            words = str(refused.value)
            assert "`ttsv restore --force FILE`" in words
            assert f"move {settings.data_dir}/trials aside" in words
            assert shown(database.engine.url) in words

    def test_one_that_had_an_experiment(self, database: Database, at: At) -> None:
        (at("api").data_dir / "trials/1/1").mkdir(parents=True)
        spec = ExperimentSpec.model_validate({"name": "grid", "base": {"dataset": "digits", "model": "small-cnn"}})
        draft = Draft(spec, expand_grid(spec, max_trials=10))
        database.write(lambda session: submission.submit(session, draft))
        refuse_lost(database, at("api"))
        database.write(lambda session: session.execute(delete(Experiment)))
        refuse_lost(database, at("api"))  # what is left of what was deleted

    def test_one_that_cannot_be_looked_at(
        self, database: Database, at: At, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def away() -> None:
            raise OperationalError("SELECT", {}, Exception("away"))

        trials = at("api").data_dir / "trials"
        trials.symlink_to(trials)
        refuse_lost(database, at("api"))
        assert "cannot be told" in caplog.text
        trials.unlink()
        (trials / "1").mkdir(parents=True)
        monkeypatch.setattr(database, "read", away)
        refuse_lost(database, at("api"))


class TestFolders:
    def test_the_api_s_folder_is_the_one(self, database: Database, at: At) -> None:
        refuse_elsewhere(database, at("elsewhere"))  # no API was there yet: nobody can tell
        settle(database, at("api"))
        settle(database, at("api"))
        refuse_elsewhere(database, at("api"))
        for come in (refuse_elsewhere, settle):
            with pytest.raises(UserError) as refused:
                come(database, at("elsewhere"))
            words = str(refused.value)
            assert str(at("elsewhere").data_dir) in words
            assert str(at("api").data_dir) in words
            assert "TTSV_DATA_DIR" in words
            assert "ttsv migrate --here" in words
        assert not (at("elsewhere").data_dir / MARKER).exists()

    def test_the_same_folder_by_another_path_and_one_that_moved(
        self, database: Database, at: At, tmp_path: Path
    ) -> None:
        settle(database, at("api"))
        (tmp_path / "mounted").symlink_to(tmp_path / "api")
        refuse_elsewhere(database, at("mounted"))
        shutil.copytree(tmp_path / "api", tmp_path / "copied")
        settle(database, at("copied"))

    def test_what_can_name_no_store_is_refused_and_not_waited_for(self, database: Database, at: At) -> None:
        typed = at("api").model_copy(update={"storage": "s3://bucket/x?region=y&nosuch=1"})
        for come in (settle, move_here):
            with pytest.raises(UserError, match="TTSV_STORAGE: Unexpected query parameter"):
                come(database, typed)
        settle(database, at("api"))
        with pytest.raises(UserError, match="TTSV_STORAGE: Unexpected query parameter"):
            refuse_elsewhere(database, typed)

    def test_a_mount_that_is_missing(self, database: Database, at: At) -> None:
        settle(database, at("api"))
        (at("api").data_dir / MARKER).unlink()
        assert problem_of(database, at("api")) is not None
        with pytest.raises(UserError, match="not mounted here"):
            settle(database, at("api"))

    def test_a_disk_that_cannot_be_read_tells_nothing(
        self, database: Database, at: At, caplog: pytest.LogCaptureFixture
    ) -> None:
        settle(database, at("api"))
        marker = at("api").data_dir / MARKER
        marker.unlink()
        marker.mkdir()  # reading it is an error of the system
        with pytest.raises(OSError, match="directory"):
            problem_of(database, at("api"))
        with caplog.at_level(logging.WARNING):
            refuse_elsewhere(database, at("api"))
        assert "cannot be told" in caplog.text
        with pytest.raises(UserError, match=r"cannot be told: .* nothing is done"):
            refuse_elsewhere(database, at("api"), in_doubt=True)

    def test_two_apis_at_once(self, database: Database, at: At) -> None:
        def come(name: str) -> bool:
            try:
                settle(database, at(name))
            except UserError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            came = list(pool.map(come, ["one", "two"] * 4))
        assert came in ([True, False] * 4, [False, True] * 4)
        with database.read() as session:
            assert session.scalar(select(func.count()).select_from(Home)) == 1

    def test_database_away(self, database: Database, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
        settle(database, at("api"))

        def away() -> None:
            raise OperationalError("SELECT", {}, Exception("away"))

        monkeypatch.setattr(database, "read", away)
        settle(database, at("elsewhere"))  # it is looked at again at the next start
        refuse_elsewhere(database, at("elsewhere"))
        with pytest.raises(OperationalError):
            refuse_elsewhere(database, at("elsewhere"), in_doubt=True)

    def test_a_database_of_before_there_were_marks(
        self, database: Database, at: At, caplog: pytest.LogCaptureFixture
    ) -> None:
        database.write(lambda session: session.execute(text("DROP TABLE homes")))
        refuse_elsewhere(database, at("elsewhere"), in_doubt=True)
        assert not caplog.records


class TestStores:
    def test_a_store_that_is_set_later(self, database: Database, at: At, tmp_path: Path) -> None:
        settle(database, at("api"))

        def stored(name: str, store: str = "store") -> Settings:
            return at(name).model_copy(update={"storage": str(tmp_path / store)})

        for come in (refuse_elsewhere, settle):
            with pytest.raises(UserError, match="store"):
                come(database, stored("other"))  # which cannot read what is in the folder
        with pytest.raises(UserError, match="store"):
            refuse_elsewhere(database, stored("api"))  # before the API
        settle(database, stored("api"))
        refuse_elsewhere(database, stored("other"))
        for come in (refuse_elsewhere, settle):
            with pytest.raises(UserError, match="TTSV_STORAGE"):
                come(database, at("api"))
            with pytest.raises(UserError, match="TTSV_STORAGE"):
                come(database, stored("other", "another"))
        assert str(at("api").data_dir) in move_here(database, at("api"))
        settle(database, at("api"))

    def test_a_bucket(self, database: Database, at: At, s3_server: str) -> None:
        from pyarrow.fs import FileSystem

        filesystem, _ = FileSystem.from_uri(f"s3://homes?{s3_server}")
        for bucket in ("homes", "others"):
            filesystem.create_dir(bucket)

        def stored(place: str) -> Settings:
            return at("api").model_copy(update={"storage": f"s3://{place}?{s3_server}"})

        settle(database, stored("homes/lab"))
        refuse_elsewhere(database, stored("homes/lab"))
        for place in ("homes/other", "others/lab"):
            with pytest.raises(UserError, match=f"s3://{place}, and the API .* s3://homes/lab") as refused:
                refuse_elsewhere(database, stored(place))
            assert "=" not in str(refused.value)  # options of the URL may be keys

    def test_a_silent_bucket_is_not_waited_for(
        self, database: Database, at: At, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(home, "bucket_problem", lambda place: "does not answer within 10 s")
        silent = at("api").model_copy(update={"storage": "s3://homes/lab?endpoint_override=127.0.0.1:9"})
        settle(database, silent)
        with database.read() as session:
            assert session.get(Home, 1) is None
        settle(database, at("api"))
        refuse_elsewhere(database, silent)
        with pytest.raises(UserError, match="cannot be used now: nothing is done"):
            refuse_elsewhere(database, silent, in_doubt=True)


class TestCommands:
    @pytest.fixture
    def database_url(self, sqlite_url: str) -> str:
        return sqlite_url

    def test_what_a_user_sees(self, database_url: str, at: At, monkeypatch: pytest.MonkeyPatch) -> None:
        database = Database(database_url)
        migrate(database)
        settle(database, at("api"))
        database.close()

        def ttsv(*words: str) -> tuple[int, str]:
            environment = {"TTSV_DATABASE_URL": database_url, "TTSV_DATA_DIR": str(at("elsewhere").data_dir)}
            done = CliRunner().invoke(app, list(words), env=environment)
            return done.exit_code, done.output

        backup = at("api").data_dir / "lab.backup"
        for command in (("api",), ("worker",), ("prune", "--best", "0", "--yes"), ("backup", str(backup))):
            code, says = ttsv(*command)
            assert code == 1, says
            assert "ttsv: files of trials would be in" in says
        assert not backup.exists()
        assert ttsv("migrate")[0] == 0
        assert ttsv("worker")[0] == 1
        code, says = ttsv("migrate", "--here")
        assert code == 0
        assert f"the files of trials are in {at('elsewhere').data_dir} on " in says
        monkeypatch.setattr("uvicorn.run", lambda *_, **__: None)
        assert ttsv("api")[0] == 0

    @pytest.mark.parametrize("emptied", [False, True])
    def test_nothing_is_made_beside_the_files_of_a_lost_database(
        self, emptied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = tmp_path / "lost"
        (data / "trials/1/1").mkdir(parents=True)
        if emptied:
            (data / "ttsv.db").touch()
        monkeypatch.setenv("TTSV_DATA_DIR", str(data))
        before = sorted(data.rglob("*"))
        for command in (["migrate"], ["migrate", "--here"], ["serve", "--port", "0"]):
            done = CliRunner().invoke(app, command)
            assert (done.exit_code, "aside, to begin anew" in done.output) == (1, True), done.output
            assert sorted(data.rglob("*")) == before or emptied
        (data / "trials").rename(tmp_path / "aside")
        assert CliRunner().invoke(app, ["migrate"]).exit_code == 0
        (tmp_path / "aside").rename(data / "trials")
        for name in ("api", "worker"):
            assert "has never had an experiment" in CliRunner().invoke(app, [name]).output
