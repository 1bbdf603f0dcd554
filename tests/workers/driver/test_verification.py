"""A result counts once its files are found in the store."""

import errno
import hashlib
import io
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from service.storage import Folder
from tests.results import made_result
from workers.driver import verification
from workers.driver.callback import TuneCallback
from workers.driver.verification import Verification
from workers.trial_process.messages import FileFields, ResultReport

CONTENT = b"weights"


def report(**changes: Any) -> ResultReport:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    file: FileFields = {"kind": "model", "path": "trials/7/1/model", "sha256": sha256, "size": 7}
    return ResultReport(made_result(), [file | changes])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"path": "trials/7/1/other"}, "`model` is not in the store"),
        ({"size": 8}, "`model` is not whole in the store"),
        ({"sha256": "0" * 64}, "`model` is not whole in the store"),
        ({"path": "../model"}, "`model` may not be read in the store"),
    ],
)
def test_found_missing_or_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str | None
) -> None:
    monkeypatch.setattr(verification, "PATIENCE_SECONDS", 0.0)
    store, recorder, watchdog = Folder(tmp_path), MagicMock(), MagicMock()
    store.write("trials/7/1/model", io.BytesIO(CONTENT), 7)
    stored, told = Verification(store, recorder), report(**changes)
    callback = TuneCallback(recorder, watchdog, tmp_path, stored)
    trial: Any = MagicMock(config={"job": {"trial_id": 7, "fence": 1, "stored_epochs": 0, "config": {}}})
    callback.on_trial_result(0, [], trial, {"report": told, "done": True})
    stored.close()
    watchdog.ended.assert_called_once_with(7)
    if said is None:
        assert recorder.mock_calls == [call.reported(7, told)]
    else:
        (recorded,) = recorder.reported.call_args_list
        assert recorded.args[0] == 7
        assert recorded.args[1].failure == "infrastructure"
        assert recorded.args[1].message.startswith(said)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_store_that_does_not_answer_costs_no_result(monkeypatch: pytest.MonkeyPatch, comes_back: bool) -> None:
    monkeypatch.setattr(verification, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(verification, "PATIENCE_SECONDS", 60.0 if comes_back else 0.0)
    store, recorder, told = MagicMock(), MagicMock(), report()
    away = OSError(errno.EIO, "no route to the store")
    store.size.side_effect = [away, away, 7] if comes_back else away
    store.digest.return_value = None
    stored = Verification(store, recorder)
    stored.begin(7, told)
    stored.close()
    if comes_back:
        assert recorder.mock_calls == [call.reported(7, told)]
    else:
        (died,) = recorder.died.call_args_list
        assert (died.args[0], died.kwargs) == (7, {"charged": False})
        recorder.reported.assert_not_called()
