"""Where TTSV_STORAGE keeps files of trials, nothing that knows a data folder alone is begun."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from service.database.engine import Database
from service.errors import UserError
from service.main import create_app
from service.settings import Settings
from service.upkeep.backup import back_up
from service.upkeep.restore import restore
from workers.worker.upkeep import Upkeep


@pytest.fixture
def settings(sqlite_url: str, tmp_path: Path) -> Settings:
    return Settings(database_url=sqlite_url, data_dir=tmp_path / "data", storage="s3://bucket/prefix")


def test_backup_and_restore_are_refused(settings: Settings, tmp_path: Path) -> None:
    database = Database(settings.url)
    with pytest.raises(UserError, match=r"TTSV_STORAGE = 's3://bucket/prefix': backups"):
        back_up(settings, database, tmp_path / "backup")
    with pytest.raises(UserError, match="TTSV_STORAGE"):
        restore(settings, tmp_path / "backup")
    database.close()
    assert not list(tmp_path.glob("backup*"))
    assert not settings.data_dir.exists()


def test_nothing_is_deleted(settings: Settings) -> None:
    with TestClient(create_app(settings), base_url="http://localhost") as client:
        spec = {"name": "one", "base": {"dataset": "digits", "model": "small-cnn"}}
        assert client.post("/v1/experiments", json=spec).status_code == 201
        client.post("/v1/experiments/1/cancel")
        answer = client.delete("/v1/experiments/1")
        assert answer.status_code == 409
        assert "TTSV_STORAGE" in answer.json()["detail"]
        assert client.get("/v1/experiments/1").status_code == 200


def test_the_worker_tidies_nothing(settings: Settings) -> None:
    database = Database(settings.url)
    with Upkeep(settings, database) as upkeep:
        assert not upkeep._thread.is_alive()
    database.close()
