"""Specs over data of the user's own: what the API sees of the files is judged, and what it cannot see it says."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from service.api import own_data
from ttsv.data import archive

POSTED = ("/v1/experiments", "/v1/experiments?dry_run=true", "/v1/experiments?dry_run=true&summary=true")


@pytest.fixture
def folder(api: TestClient) -> Path:
    found: Path = api.app.state.settings.data_dir / "datasets"  # type: ignore[attr-defined]
    found.mkdir()
    return found


def save(folder: Path, name: str = "mine", shape: tuple[int, ...] = (3, 30, 30), *, count: int = 41) -> Path:
    path = folder / f"{name}.npz"
    np.savez(path, x_train=np.zeros((count, *shape), np.uint8), y_train=np.arange(count) % 2)
    return path


def refused(api: TestClient, spec: dict[str, Any]) -> tuple[str, str]:
    """Field and message of the one problem that every way to post the spec names."""
    answers = [api.post(where, json=spec) for where in POSTED]
    assert [answer.status_code for answer in answers] == [422, 422, 422], answers[0].text
    (problem,) = answers[0].json()["errors"]
    assert all(answer.json()["errors"] == [problem] for answer in answers)
    return problem["field"], problem["message"]


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"model": "vgg11"}, "model", "cannot take the images of npz:mine: image_size = 30: must be at least 32"),
        ({"model": "resnet18", "mean": [0.1, 0.2]}, "mean", "one per channel of npz:mine, 3"),
        ({"model": "resnet18", "evaluation": {"attack": "autoattack"}}, "evaluation.attack", "npz:mine has 2"),
        ({"model": "torchvision:resnet18", "training": {"batch_size": 28}}, "training.batch_size", "no image alone"),
        ({"model": "torchvision:alexnet"}, "model", "cannot take the images of npz:mine"),
    ],
)
def test_what_cannot_run_on_the_images_is_refused(
    api: TestClient, folder: Path, fields: dict[str, Any], field: str, said: str
) -> None:
    save(folder)
    spec = {"name": "x", "base": {"dataset": "npz:mine"} | fields, "grid": {"seed": [0, 1]}}
    found = refused(api, spec)
    assert found[0] == field
    assert said in found[1]
    save(folder, shape=(2, 64, 64), count=100)
    if "attack" not in field:
        assert api.post(POSTED[1], json=spec).json()["warnings"] == []


def test_what_is_wrong_with_the_files_is_refused(api: TestClient, folder: Path) -> None:
    """Wherever the trials would run; files are named as they lie in the data folder."""
    spec = {"name": "x", "base": {"model": "resnet18"}, "grid": {"dataset": ["npz:mine", "digits"], "seed": [0, 1]}}
    path = save(folder)
    path.write_bytes(path.read_bytes()[:-9])
    why = "datasets/mine.npz is no whole archive of plain arrays: File is not a zip file"
    assert refused(api, spec) == ("dataset", why)
    image = folder / "mine" / "train" / "a" / "1.png"
    image.parent.mkdir(parents=True)
    Image.new("L", (30, 30)).save(image)
    search = {"algorithm": "random", "trials": 4, "space": {"dataset": {"choice": ["folder:mine", *["digits"] * 99]}}}
    found = refused(api, {"name": "x", "base": {"model": "resnet18"}, "search": search})
    assert found == ("dataset", "data set 'folder:mine': 1 classes; there must be 2 to 10000")


def test_what_cannot_be_seen_is_refused_on_one_machine_and_said_of_others(
    api: TestClient, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"name": "x", "base": {"model": "wrn10-1"}, "grid": {"dataset": ["npz:mine", "digits"]}}
    reasons = {"is not in": FileNotFoundError(2, "gone"), "cannot be read (closed) in": PermissionError(13, "closed")}
    for why, error in reasons.items():  # (Who runs the tests may be allowed everything.)
        monkeypatch.setattr(own_data, "own_info", mock.Mock(side_effect=error))
        if database_url.startswith("sqlite"):
            found = refused(api, spec)
            fix = ("put it there" if why == "is not in" else "let this service read it") + ", or name another data set"
            assert found == ("dataset", f"npz:mine needs datasets/mine.npz, which {why} the data folder; {fix}")
        else:
            (warning,) = api.post(POSTED[1], json=spec).json()["warnings"]
            assert warning.startswith(f"dataset npz:mine: datasets/mine.npz is needed, which {why} this service's data")
            assert "data folder; the worker's must have it, and what its images are" in warning
            assert warning.endswith("one whose network takes others fails at the start")


def test_what_takes_too_long_to_look_at_is_said(api: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder)
    monkeypatch.setattr(archive, "_MOST_LABELS", 40)
    for where in POSTED:
        answer = api.post(where, json={"name": "x", "base": {"model": "vgg11", "dataset": "npz:mine"}})
        (warning,) = answer.json()["warnings"]
        assert warning.startswith("dataset npz:mine: what its images are is known once a trial reads them")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            np.arange(80) % 4 + 1,
            "it has 5 classes, as many as its largest label asks for when labels are counted from 0",
        ),
        (np.arange(80) % 4 + 1, "and of 1 of them no training image: of label 0"),
        (np.arange(80) % 4 * 3, "and of 6 of them no training image: of label 1, 2, 4, 5, 7, ..."),
        (np.arange(80) % 4, None),
    ],
)
def test_classes_without_an_image_are_said(
    api: TestClient, folder: Path, labels: np.ndarray[Any, Any], said: str | None
) -> None:
    """A network trains on them all the same, with outputs that nothing is ever shown for."""
    np.savez(folder / "mine.npz", x_train=np.zeros((80, 3, 30, 30), np.uint8), y_train=labels)
    for where in POSTED:
        answer = api.post(where, json={"name": "x", "base": {"model": "resnet18", "dataset": "npz:mine"}})
        warnings = answer.json()["warnings"]
        if said is None:
            assert warnings == []
        else:
            (warning,) = warnings
            assert warning.startswith("dataset npz:mine: it has")
            assert said in warning


def test_data_that_are_gone_are_missed_where_new_trials_need_them(
    api: TestClient, folder: Path, database_url: str
) -> None:
    path = save(folder)
    spec = {"name": "x", "base": {"model": "resnet18"}, "grid": {"dataset": ["npz:mine"]}}
    once = {"Idempotency-Key": "once"}
    stored = api.post("/v1/experiments", json=spec, headers=once).json()
    assert stored["warnings"] == []
    path.unlink()
    again = api.post("/v1/experiments", json=spec, headers=once)
    assert (again.status_code, again.json()) == (201, stored), "as before: nothing was lacking then"
    there = f"/v1/experiments/{stored['id']}"
    assert again.headers["Location"] == there
    assert api.post(f"{there}/clone").status_code == (422 if database_url.startswith("sqlite") else 201)
    save(folder, "other")
    extended = api.post(f"{there}/extend", json={"grid": {"dataset": ["npz:other"]}})
    assert (extended.status_code, extended.json()["warnings"]) == (200, [])
    save(folder, "third", (3, 32, 33))
    wrong = api.post(f"{there}/extend", json={"grid": {"dataset": ["npz:third"]}})
    assert wrong.status_code == 422
    assert "must be square" in wrong.json()["errors"][0]["message"]
