"""Two nodes that share no folder: trials run on both, and what they leave is where the API reads it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from fastapi.testclient import TestClient

from service.errors import StateError
from service.experiments import actions
from service.main import create_app
from service.settings import Settings
from service.specs.states import NodeState
from tests.chaos.site import why_not_unshared
from ttsv.data import load_dataset

if TYPE_CHECKING:
    from tests.workers.conftest import Lab, Machines

ROOT = Path(__file__).parents[4]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.deep
def test_files_travel_to_the_head_and_a_killed_nodes_trial_goes_on(lab: Lab, machines: Machines) -> None:
    gate = machines.folder / "gate"
    worker = lab.start_worker(TRIALS_GATE=str(gate))
    lab.wait_for((lab.data_dir / "token").exists)
    shutil.copy(lab.data_dir / "token", machines.token)
    own = machines.folder / "own"
    node = machines.start("node", TTSV_DATA_DIR=str(own), TRIALS_GATE=str(gate))
    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 180)

    save_images(lab.data_dir / "datasets" / "mine.npz")
    synced = sync(machines, own)
    assert "npz:mine is in" in synced.stdout, synced.stderr
    assert (own / "datasets" / "mine.npz").read_bytes() == (lab.data_dir / "datasets" / "mine.npz").read_bytes()
    assert "npz:mine was in" in sync(machines, own).stdout

    whole = lab.post([0], epochs=4, seconds=0.5, resources={"cpus": 1, "gpus": 1})  # the head has none
    lab.wait_until_final(whole, 180)
    lab.assert_whole(whole)
    assert_served(lab, whole)

    both = [lab.post([seed], epochs=60, seconds=0.5) for seed in (3000, 3001)]
    pids: dict[int, int] = lab.wait_for(lambda: two(lab.pids(both[0]) | lab.pids(both[1])), 180)
    gate.touch()  # neither is over before the other has begun, however long its process takes
    there = {process.pid for process in machines.processes()}
    (away,) = (trial_id for trial_id, pid in pids.items() if pid in there)
    moves, stays = sorted(both, key=lambda experiment_id: lab.trials(experiment_id)[0].id != away)
    assert list((own / "scratch").iterdir()), "it works in a folder of its own"
    begun = epoch(lab, moves)
    lab.wait_for(lambda: epoch(lab, moves) >= begun + 2, 180)
    depots = [process for process in lab.processes() if "ray::Depot" in " ".join(process.cmdline())]
    assert depots, "two that ask at once may start two, of which Ray keeps one"
    for depot in depots:
        depot.kill()
    lab.wait_for(lambda: epoch(lab, moves) >= begun + 6, 180)
    assert "epoch 3 of 60" in log(lab, away), "its log is read while it runs"
    node.send_signal(signal.SIGKILL)
    node.wait()
    lab.wait_for(lambda: not machines.processes(), 30)
    reported = epoch(lab, moves)
    (checkpoint,) = (lab.data_dir / "trials" / str(away)).glob("*/checkpoint")
    kept = int(checkpoint.read_text().split()[0])
    assert kept >= reported - 1, "what is lost is one checkpoint interval at most"

    with contextlib.suppress(StateError):  # where that took long, it is over
        lab.database.write(lambda session: actions.cancel(session, stays))
    lab.wait_until_final(moves, 300)
    lab.assert_whole(moves)
    assert_served(lab, moves)
    (trial,) = lab.trials(moves)
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
    under_way = list((lab.data_dir / "incoming").iterdir())
    assert len(under_way) <= len(depots) + 1, "what was, when these and the node were killed, goes in six hours"


@pytest.mark.deep
def test_a_node_with_another_data_set_of_the_name_hinders_trials_and_fails_none(lab: Lab, machines: Machines) -> None:
    lab.start_worker()
    lab.wait_for((lab.data_dir / "token").exists)
    shutil.copy(lab.data_dir / "token", machines.token)
    own = machines.folder / "own"
    save_images(lab.data_dir / "datasets" / "mine.npz")
    save_images(own / "datasets" / "mine.npz", seed=1)
    machines.start("node", TTSV_DATA_DIR=str(own), TTSV_WORKER_GPUS="0")
    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 180)
    base = {"dataset": "npz:mine", "model": "small-cnn", "training": {"epochs": 4, "lr": 0.5}}
    experiment = lab.post([0, 1, 2, 3], base=base)
    (problem,) = lab.wait_for(lambda: [row.problem for row in machines.seen(NodeState.ALIVE) if row.problem], 120)
    assert f"on {socket.gethostname()} its content has SHA-256" in problem
    lab.wait_until_final(experiment, 240)
    lab.assert_whole(experiment)
    assert sum(trial.deaths for trial in lab.trials(experiment)) == 0


@pytest.mark.deep
def test_a_node_that_is_stopped_leaves_no_checkpoint_at_the_path_of_the_heads_folder(
    lab: Lab, machines: Machines
) -> None:
    """As the documented command has it: nothing says where its data folder is."""
    if (reason := why_not_unshared()) is not None:
        pytest.skip(reason)
    lab.start_worker()
    lab.wait_for((lab.data_dir / "token").exists)
    shutil.copy(lab.data_dir / "token", machines.token)
    own = machines.folder / "own"
    own.mkdir()
    mount = f"mount --bind '{own}' '{lab.data_dir}' && exec \"$@\""
    node = machines.start("node", before=["unshare", "--mount", "sh", "-c", mount, "sh"])
    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 180)
    experiment = lab.post([0], epochs=10_000, seconds=0.2, resources={"cpus": 1, "gpus": 1})  # the head has none
    lab.wait_for_epochs(experiment, 3, 180)
    assert list(own.glob("scratch/*/trials/*/*/checkpoint")), "it works there"
    node.send_signal(signal.SIGTERM)
    assert node.wait(30) == 0
    assert not list((own / "scratch").iterdir())
    assert not machines.processes()


def assert_served(lab: Lab, experiment_id: int) -> None:
    """The API gives every file of every trial, whole."""
    with TestClient(create_app(Settings(data_dir=lab.data_dir))) as api:
        for trial in lab.trials(experiment_id):
            (artifact,) = api.get(f"/v1/trials/{trial.id}/artifacts").json()["items"]
            content = api.get(f"/v1/artifacts/{artifact['id']}").content
            assert hashlib.sha256(content).hexdigest() == artifact["sha256"]
            assert content.decode() == lab.weights(trial.seed, trial.epochs)


def save_images(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(seed).integers(0, 256, (3000, 3, 20, 20), np.uint8)
    np.savez(path, x_train=images, y_train=np.arange(3000) % 3)
    load_dataset("npz:mine", path.parents[1])


def sync(machines: Machines, own: Path) -> subprocess.CompletedProcess[str]:
    """`ttsv data sync`, as it is run on the node."""
    options = ["--head", f"127.0.0.1:{machines.port}", "--token-file", str(machines.token)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TTSV_", "RAY_"))}
    return subprocess.run(
        [sys.executable, "-m", "workers.cli", "data", "sync", *options],
        env=kept | {"PYTHONPATH": str(ROOT), "TTSV_DATA_DIR": str(own)},
        cwd=machines.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def epoch(lab: Lab, experiment_id: int) -> int:
    return max((number for _, number in lab.points(experiment_id)), default=0)


def log(lab: Lab, trial_id: int) -> str:
    (file,) = (lab.data_dir / "trials" / str(trial_id)).glob("*/trial.log")
    return file.read_text()


def two(pids: dict[int, int]) -> dict[int, int] | None:
    return pids if len(pids) == 2 else None
