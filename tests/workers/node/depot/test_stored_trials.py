"""Trials whose files are kept in a store that `TTSV_STORAGE` names, with real processes on one node."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from fastapi.testclient import TestClient

from service.main import create_app
from service.settings import Settings

if TYPE_CHECKING:
    from tests.workers.conftest import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.deep
def test_a_killed_trial_goes_on_and_the_api_gives_its_files(quick_lab: Lab) -> None:
    lab = quick_lab
    place = lab.data_dir / "elsewhere"
    lab.settings["TTSV_STORAGE"] = str(place)
    experiment_id = lab.post([0, 1], epochs=6, seconds=0.5, max_concurrent_trials=1)
    lab.start_worker()
    lab.wait_for_epochs(experiment_id, 3, 180)
    first = lab.trials(experiment_id)[0]
    (file,) = (place / "trials" / str(first.id)).glob("*/pid")
    os.kill(int(file.read_text()), signal.SIGKILL)
    lab.wait_until_final(experiment_id, 300)
    assert not (lab.data_dir / "trials").exists()
    with TestClient(create_app(Settings(data_dir=lab.data_dir, storage=str(place)))) as api:
        for trial in lab.trials(experiment_id):
            (artifact,) = api.get(f"/v1/trials/{trial.id}/artifacts").json()["items"]
            assert api.get(f"/v1/artifacts/{artifact['id']}").text == lab.weights(trial.seed, 6)
            assert "the trial succeeded" in api.get(f"/v1/trials/{trial.id}/logs").text
    (file,) = (place / "trials" / str(first.id)).glob("*/trained")
    trained = [int(line) for line in file.read_text().split()]
    assert sorted(set(trained)) == list(range(1, 7))
    assert len(trained) <= 7, "at most one epoch ran twice"
    assert not list((lab.data_dir / "scratch").iterdir())
    assert not list((place / "incoming").iterdir())
