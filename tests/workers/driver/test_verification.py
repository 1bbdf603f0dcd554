"""A result counts once its files are found where they are served from."""

import errno
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest

from service.settings import Settings
from service.storage import MARKER, Folder, marked
from tests.results import made_result
from workers.driver import verification
from workers.driver.verification import Verification
from workers.node.depot.home import Home, light_beacon
from workers.trial_process.messages import FailureReport, FileFields, HinderedReport, ResultReport

CONTENT = b"weights"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_PAUSE_SECONDS", 0.0)


def report(**changes: Any) -> ResultReport:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    board: FileFields = {"kind": "board", "path": "trials/7/1/model", "sha256": sha256, "size": 7}
    model = board | {"kind": "model"} | changes
    return ResultReport(made_result(), [board, model])  # type: ignore[list-item]


def verified(told: ResultReport, data_dir: Path, storage: str | None = None, mark: str | None = None) -> MagicMock:
    recorder = MagicMock()
    looking = Verification(Home(str(data_dir), "node-1", "beacon", "word", storage=storage, mark=mark), recorder)
    looking.begin(7, told, "node-2")
    looking.close()
    return recorder


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"path": "trials/7/1/other"}, "is not"),
        ({"path": "trials/7/1"}, "is not"),
        ({"size": 8}, "is not whole"),
        ({"sha256": "0" * 64}, "is not whole"),
        ({"path": "../model"}, "may not be read"),
    ],
)
def test_found_missing_or_other(tmp_path: Path, in_store: bool, changes: dict[str, Any], said: str | None) -> None:
    """A node of its own disk leaves them there alone; what a disk spoilt has its size."""
    Folder(tmp_path).write("trials/7/1/model", io.BytesIO(CONTENT), 7)
    told = report(**changes)
    recorder = verified(told, tmp_path / "other" if in_store else tmp_path, str(tmp_path) if in_store else None)
    if said is None:
        assert recorder.mock_calls == [call.reported(7, told, at=ANY)]
        return
    (recorded,) = recorder.reported.call_args_list
    assert (recorded.args[0], recorded.args[1].failure) == (7, "infrastructure")
    where = "the store (TTSV_STORAGE)" if in_store else str(tmp_path)
    message = recorded.args[1].message
    assert message.startswith(f"`model` of node-2 {said} in {where}, where it is served from; ")
    assert ("umask" in message) == (said == "may not be read")
    assert ("share the data folder" in message) == (not in_store and said != "may not be read")


@pytest.mark.parametrize(("looks", "succeeds"), [([None, 4, 7], True), ([None, 4, 4], False)])
def test_what_a_shared_folder_shows_a_moment_later_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, looks: Sequence[int | None], succeeds: bool
) -> None:
    store = MagicMock(size=MagicMock(side_effect=[7, looks[0], 7, looks[1], 7, looks[2]]))
    store.digest.return_value = None
    monkeypatch.setattr(verification, "open_kept", lambda *_: store)
    told = report()
    recorder = verified(told, tmp_path)
    (recorded,) = recorder.reported.call_args_list
    assert (recorded == call(7, told, at=ANY)) == succeeds


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_store_that_does_not_answer_costs_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, comes_back: bool
) -> None:
    monkeypatch.setattr(verification, "PATIENCE_SECONDS", 60.0 if comes_back else 0.0)
    store, told = MagicMock(), report()
    away = OSError(errno.ESTALE, "no route to the store")
    store.size.side_effect = [away, away, 7, 7] if comes_back else away
    store.digest.return_value = None
    monkeypatch.setattr(verification, "open_kept", lambda *_: store)
    recorder = verified(told, tmp_path)
    if comes_back:
        assert recorder.mock_calls == [call.reported(7, told, at=ANY)]
    else:
        (died,) = recorder.died.call_args_list
        assert (died.args[0], died.kwargs) == (7, {"charged": False, "at": ANY})
        recorder.reported.assert_not_called()


def test_a_data_folder_that_is_not_there_for_us_either_fails_no_trial(tmp_path: Path) -> None:
    """Where we see it, and Ray's node beside us does not, it never will."""
    home = light_beacon(Settings(data_dir=tmp_path / "data"), tmp_path / "data" / "tune" / "1-1", "node-1")
    recorder, told = MagicMock(), FailureReport("infrastructure", "Ray's node does not see it")
    for mounted in (True, False):
        if not mounted:
            (tmp_path / "data").rename(tmp_path / "unmounted")
        looking = Verification(home, recorder)
        looking.doubt(7, told)
        looking.close()
    assert recorder.mock_calls == [
        call.reported(7, told, at=ANY),
        call.reported(7, HinderedReport("not mounted now? Ray's node does not see it"), at=ANY),
    ]


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize("there", ["another", "nothing", "its files"])
def test_a_store_that_is_not_mounted_costs_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str, in_store: bool
) -> None:
    """Its mount point is an empty folder then: files would seem to be missing.

    Where the trial wrote on they are there, until the mount that comes back hides them.
    """
    store, aside = tmp_path / "store", tmp_path / "aside"
    places: tuple[Path, str | None] = (tmp_path, str(store)) if in_store else (store, None)
    Folder(store).write("trials/7/1/model", io.BytesIO(CONTENT), 7)
    mark, told = marked(Folder(store)), report()
    assert verified(told, *places, mark).mock_calls == [call.reported(7, told, at=ANY)]
    store.rename(aside)
    if there == "another":
        store.mkdir()
        (store / MARKER).write_text("another word")
    elif there == "its files":
        Folder(store).write("trials/7/1/model", io.BytesIO(CONTENT), 7)
    monkeypatch.setattr(verification, "PATIENCE_SECONDS", 0.0)
    recorder = verified(told, *places, mark)
    (died,) = recorder.died.call_args_list
    assert "not mounted here" in died.args[1]
    assert died.kwargs == {"charged": False, "at": ANY}
    recorder.reported.assert_not_called()
