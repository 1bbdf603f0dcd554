"""Two nodes that share no folder: trials run on both, and what they leave is where the API reads it."""

from __future__ import annotations

import hashlib
import shutil
import signal
from typing import TYPE_CHECKING

import pytest
from fastapi.testclient import TestClient

from service.main import create_app
from service.settings import Settings
from service.specs.states import NodeState

if TYPE_CHECKING:
    from tests.workers.conftest import Lab, Machines

pytestmark = pytest.mark.slow


def test_files_travel_to_the_head_and_a_killed_nodes_trial_goes_on(lab: Lab, machines: Machines) -> None:
    worker = lab.start_worker()
    lab.wait_for((lab.data_dir / "token").exists)
    shutil.copy(lab.data_dir / "token", machines.token)
    own = machines.folder / "own"
    node = machines.start("node", TTSV_DATA_DIR=str(own))
    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 180)

    quick = lab.post([0, 1], epochs=3, seconds=0.3)
    both = lab.post([2, 3], epochs=30, seconds=0.6)
    lab.wait_until_final(quick, 180)
    lab.assert_whole(quick)
    assert_served(lab, quick)

    pids = lab.wait_for(lambda: two(lab.pids(both)), 180)
    there = {process.pid for process in machines.processes()}
    (away,) = (trial_id for trial_id, pid in pids.items() if pid in there)
    assert list((own / "scratch").iterdir()), "it works in a folder of its own"
    lab.wait_for(lambda: epoch(lab, both, away) >= 6, 180)
    assert "epoch 3 of 30" in log(lab, away), "its log is read while it runs"
    node.send_signal(signal.SIGKILL)
    node.wait()
    lab.wait_for(lambda: not machines.processes(), 30)
    reported = epoch(lab, both, away)
    (checkpoint,) = (lab.data_dir / "trials" / str(away)).glob("*/checkpoint")
    kept = int(checkpoint.read_text().split()[0])
    assert kept >= reported - 1, "what is lost is one checkpoint interval at most"

    lab.wait_until_final(both, 300)
    lab.assert_whole(both)
    assert_served(lab, both)
    (trial,) = (one for one in lab.trials(both) if one.id == away)
    assert (trial.deaths, trial.error) == (0, None)
    (file,) = (lab.data_dir / "trials" / str(away)).glob("*/trained")
    trained = [int(line) for line in file.read_text().split()]
    again = [number for place, number in enumerate(trained) if number in trained[:place]]
    assert len(again) <= 1

    back = machines.start("back", TTSV_DATA_DIR=str(own))
    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 180)
    assert not list((own / "scratch").iterdir()), "what a killed trial left goes when its machine is back"
    back.send_signal(signal.SIGTERM)
    assert back.wait(30) == 0
    worker.terminate()
    worker.wait(60)
    assert not list((lab.data_dir / "incoming").iterdir())


def assert_served(lab: Lab, experiment_id: int) -> None:
    """The API gives every file of every trial, whole."""
    with TestClient(create_app(Settings(data_dir=lab.data_dir))) as api:
        for trial in lab.trials(experiment_id):
            (artifact,) = api.get(f"/v1/trials/{trial.id}/artifacts").json()["items"]
            content = api.get(f"/v1/artifacts/{artifact['id']}").content
            assert hashlib.sha256(content).hexdigest() == artifact["sha256"]
            assert content.decode() == lab.weights(trial.config["seed"], trial.epochs)


def epoch(lab: Lab, experiment_id: int, trial_id: int) -> int:
    return max((number for owner, number in lab.points(experiment_id) if owner == trial_id), default=0)


def log(lab: Lab, trial_id: int) -> str:
    (file,) = (lab.data_dir / "trials" / str(trial_id)).glob("*/trial.log")
    return file.read_text()


def two(pids: dict[int, int]) -> dict[int, int] | None:
    return pids if len(pids) == 2 else None
