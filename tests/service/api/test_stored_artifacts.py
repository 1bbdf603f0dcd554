"""Files and logs of trials that are kept in a store elsewhere, through the API."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from service.database import Artifact, Trial
from service.database.engine import Database
from service.experiments import artifacts
from service.experiments.submission import Draft, submit
from service.main import create_app
from service.settings import Settings
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.storage import Folder, open_storage

CONTENT = bytes(range(256)) * 20


@pytest.fixture
def settings(tmp_path: Path, sqlite_template: Path) -> Settings:
    import shutil

    (tmp_path / "data").mkdir()
    shutil.copyfile(sqlite_template, tmp_path / "data" / "ttsv.db")
    return Settings(data_dir=tmp_path / "data", storage=str(tmp_path / "store"))


@pytest.fixture
def store(settings: Settings) -> Folder:
    store = open_storage(settings.storage or "")
    assert isinstance(store, Folder)
    return store


@pytest.fixture
def api(settings: Settings) -> Iterator[TestClient]:
    database = Database(settings.url)

    def work(session: Session) -> None:
        base = {"dataset": "digits", "model": "small-cnn"}
        spec = ExperimentSpec.model_validate({"name": "n", "base": base, "grid": {"seed": [0]}})
        submit(session, Draft(spec, expand_grid(spec, max_trials=9)))
        session.flush()
        sha256 = hashlib.sha256(CONTENT).hexdigest()
        assert session.get(Trial, 1) is not None
        for path in ("trials/1/1/model.safetensors", "trials/1/1/gone.csv"):
            session.add(Artifact(trial_id=1, kind=Path(path).stem, path=path, sha256=sha256, size=len(CONTENT)))

    database.write(work)
    database.close()
    with TestClient(create_app(settings)) as api:
        yield api


def put(store: Folder, path: str, content: bytes) -> None:
    store.write(path, io.BytesIO(content), len(content))


def test_a_file_is_given_as_from_the_data_folder(api: TestClient, store: Folder, settings: Settings) -> None:
    put(store, "trials/1/1/model.safetensors", CONTENT)
    here = settings.data_dir / "trials/1/1/model.safetensors"
    answers = []
    for place in ("store", "kept", "data"):
        if place == "kept":  # it is not asked for twice
            store.remove("trials/1/1/model.safetensors")
        if place == "data":
            here.parent.mkdir(parents=True)
            here.write_bytes(CONTENT)
        whole = api.get("/v1/artifacts/1")
        part = api.get("/v1/artifacts/1", headers={"Range": "bytes=10-19"})
        beyond = api.get("/v1/artifacts/1", headers={"Range": "bytes=99999-"})
        same = api.get("/v1/artifacts/1", headers={"If-None-Match": whole.headers["etag"]})
        assert (whole.status_code, whole.content) == (200, CONTENT)
        assert (part.status_code, part.content) == (206, CONTENT[10:20])
        assert (beyond.status_code, same.status_code) == (416, 304)
        answers.append({name: whole.headers[name] for name in ("etag", "content-disposition", "content-type")})
    assert answers[0] == answers[1] == answers[2]


def test_what_is_missing_cut_or_altered_is_not_given(api: TestClient, store: Folder, settings: Settings) -> None:
    gone = api.get("/v1/artifacts/2")
    assert gone.status_code == 404
    assert "is not in the store (TTSV_STORAGE): its file was removed, or a worker" in gone.json()["detail"]
    for wrong in (CONTENT[:-1], CONTENT[::-1]):
        put(store, "trials/1/1/model.safetensors", wrong)
        answer = api.get("/v1/artifacts/1")
        assert answer.status_code == 410
        assert "is not what was manifested" in answer.json()["detail"]
    assert not list((settings.data_dir / "cache/artifacts").iterdir())


def test_a_store_that_does_not_answer_is_said(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: Folder, path: str) -> int:
        raise OSError("no route to the store")

    monkeypatch.setattr(Folder, "size", away)
    answer = api.get("/v1/artifacts/1")
    assert answer.status_code == 503
    assert answer.json()["type"].endswith("#storage-away")
    assert "no route to the store" in answer.json()["detail"]


def test_copies_have_room_for_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MOST_KEPT_BYTES", 25)
    for number in range(4):
        (tmp_path / str(number)).write_bytes(bytes(10))
        os.utime(tmp_path / str(number), (number, number))
    artifacts._forget_oldest(tmp_path, tmp_path / "0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "3"]


def test_logs_are_read_in_the_store(api: TestClient, store: Folder, settings: Settings) -> None:
    assert api.get("/v1/trials/1/logs").status_code == 404
    put(store, "trials/1/1/trial.log", b"one\n")
    put(store, "trials/1/1.1/trial.log", b"one\ntwo\n")
    assert api.get("/v1/trials/1/logs").text == "one\ntwo\n"
    assert api.get("/v1/trials/1/logs?tail=1").text == "two\n"
    assert "two" in api.get("/trials/1").text
    here = settings.data_dir / "trials/1/2/trial.log"
    here.parent.mkdir(parents=True)
    here.write_text("here\n")
    assert api.get("/v1/trials/1/logs").text == "here\n"
