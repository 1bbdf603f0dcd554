"""The whole stack as a user starts it: real processes, real Ray, real training on the digits."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
TTSV = [sys.executable, "-m", "workers.cli"]
Stack = tuple[subprocess.Popen[str], Client]
SPEC: dict[str, Any] = {
    "name": "small grid",
    "base": {
        "dataset": "digits",
        "model": "small-cnn",
        "layer": "tt",
        "lambda_ort": 1.0,
        "constraint": "clip",
        "training": {"epochs": 4, "lr": 0.1},
        "clipping": {"every": 10},
    },
    "grid": {"rank": [None, 4], "delta": [None, 1.0], "seed": [0, 1]},
}


@contextmanager
def _serving(data_dir: Path, cpus: int = 1) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`ttsv serve` in its own session, and its URL; so many trials at a time."""
    env = os.environ | {"TTSV_DATA_DIR": str(data_dir), "TTSV_POLL_SECONDS": "0.2", "TTSV_WORKER_CPUS": str(cpus)}
    command = [*TTSV, "serve", "--port", "0"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\d.:]+", process.stdout.readline())
        assert found is not None
        yield process, found.group()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for the tests that leave it as they found it."""
    with _serving(tmp_path_factory.mktemp("stack")) as (process, url), Client(url) as client:
        yield process, client


def _family(process: subprocess.Popen[str], name: str = "") -> list[psutil.Process]:
    """Living descendants whose command line has the name."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child, command in zip(children, _commands(children), strict=True) if name in command]


def _awaited(process: subprocess.Popen[str], name: str, seconds: float = 240) -> list[psutil.Process]:
    """The same, as soon as there is one."""
    deadline = time.monotonic() + seconds
    while not (found := _family(process, name)):
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.05)
    return found


def _commands(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.Error:  # it has just ended
            found.append("")
    return found


def _left(data_dir: Path, pids: set[int]) -> list[str]:
    """Command lines of processes that belong to the stack and still run."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid in pids or process.environ().get("TTSV_DATA_DIR") == str(data_dir):
                left.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return left


def _assert_nothing_left(data_dir: Path, pids: set[int], seconds: float) -> None:
    """Who is killed with its parent, by the kernel, takes a moment to go."""
    deadline = time.monotonic() + seconds
    while left := _left(data_dir, pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _assert_whole(client: Client, experiment_id: int, count: int) -> None:
    """Every trial succeeded exactly once, with all its epochs."""
    trials = list(client.trials(experiment_id))
    assert len(trials) == count == len({trial.fingerprint for trial in trials})
    for trial in trials:
        assert trial.state == "succeeded", trial.error
        assert trial.result is not None
        assert trial.result.accuracy > 0.5
        detail = client.trial(trial.id)
        assert [point.epoch for point in detail.epoch_metrics] == list(range(1, trial.epochs + 1))


def _wait_for(client: Client, experiment_id: int, epochs: int, seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while client.experiment(experiment_id).progress.epochs_done < epochs:
        assert time.monotonic() < deadline, client.experiment(experiment_id)
        time.sleep(0.1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seeds", "victims_in_turn"),
    [
        pytest.param(1, [], id="all at once"),
        pytest.param(
            2,
            [
                ("workers.cli api",),
                ("Trainable",),
                ("workers.driver",),
                ("ray::DashboardAgent",),  # takes the raylet with it, which `ray start` holds for an orderly end
                ("workers.cli worker",),
            ],
            id="every",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_grid_outlives_sigkills_cancel_stops_one_and_ctrl_c_leaves_nothing(
    seeds: int, victims_in_turn: list[tuple[str, ...]], tmp_path: Path
) -> None:
    """Of `ttsv serve` itself; whom else it started `make chaos` kills one by one, of which CI runs five minutes."""
    count = 4 * seeds
    with _serving(tmp_path, cpus=seeds) as (process, url), Client(url) as client:
        experiment = client.submit(SPEC | {"grid": SPEC["grid"] | {"seed": list(range(seeds))}})
        assert (experiment.grid_points, experiment.trial_count) == (count, count)
        _wait_for(client, experiment.id, 4)
        assert not _family(process, "ray.util.client.server"), "a port that nobody asks for is not opened"
        pids = {child.pid for child in _family(process)}
        process.kill()
        process.wait()
    _assert_nothing_left(tmp_path, pids, 30)
    with _serving(tmp_path, cpus=seeds) as (process, url), Client(url, retries=8) as client:
        for turn, victims in enumerate(victims_in_turn):
            _wait_for(client, experiment.id, 7 + 4 * turn)
            for victim in victims:
                random.choice(_awaited(process, victim)).kill()
        _assert_cancel_stops_within_seconds(process, client)
        *_, last = client.watch(experiment.id, every=0.2)
        assert last.state == "succeeded", last
        _assert_whole(client, experiment.id, count)

        (board,) = client.leaderboard("digits", experiment_id=experiment.id).boards
        assert [row.seeds for row in board.rows] == [seeds] * 4
        assert board.record["dataset"] == "digits"
        for row in board.rows:
            clipped = row.config["delta"] is not None
            assert (row.metrics["max_singular_value"].max <= 1 + 1e-5) == clipped
            assert (row.metrics["compression"].mean > 10) == (row.config["layer"] == "tt")
            assert (row.metrics["accuracy"].std is not None) == (seeds > 1)
        finished = [trial.id for trial in client.trials(experiment.id)]
        kept = [number for number in finished if list(tmp_path.glob(f"trials/{number}/*/checkpoints"))]
        assert kept == [], "checkpoints of finished trials are gone"
        assert len(list(tmp_path.glob("trials/*/*/model.safetensors"))) == count
        pids = {child.pid for child in _family(process)}
        assert pids
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    _assert_nothing_left(tmp_path, pids, 2)


def _assert_cancel_stops_within_seconds(process: subprocess.Popen[str], client: Client) -> None:
    """Another experiment, which begins beside the one that is there; it alone ends."""
    long = SPEC | {"base": SPEC["base"] | {"training": {"epochs": 100_000}}}
    experiment = client.submit(long)
    _wait_for(client, experiment.id, 2)
    assert client.cancel(experiment.id).state == "cancelled"
    deadline = time.monotonic() + 15
    while _family(process, f"workers.driver --experiment {experiment.id} "):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = client.experiment(experiment.id).progress
    time.sleep(1)
    assert client.experiment(experiment.id).progress == before
    assert before.trials == {
        "queued": 0, "running": 0, "succeeded": 0, "early_stopped": 0, "failed": 0, "diverged": 0, "cancelled": 8,
    }  # fmt: skip


@pytest.mark.deep
def test_missing_data_set_fails_with_the_command_that_fetches_it(stack: Stack) -> None:
    _, client = stack
    spec = {"name": "no data", "base": {"dataset": "cifar10", "model": "small-cnn"}}
    *_, last = client.watch(client.submit(spec).id, every=0.2)
    assert last.state == "failed"
    (trial,) = client.trials(last.id)
    assert trial.failure == "bad_data"
    assert "ttsv data fetch cifar10" in (trial.error or "")
    assert trial.epoch == 0


@pytest.mark.deep
def test_demo_prints_its_leaderboard(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(
        json.dumps(
            SPEC | {"base": SPEC["base"] | {"training": {"epochs": 1}}, "grid": {"rank": [None, 4], "seed": [0, 1]}}
        )
    )
    env = os.environ | {"TTSV_DATA_DIR": str(tmp_path / "data"), "TTSV_WORKER_CPUS": "1", "COLUMNS": "150"}
    done = subprocess.run([*TTSV, "demo", str(spec)], env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trials 4/4" in done.stdout
    assert "digits: by accuracy" in done.stdout
    assert "All rows: model small-cnn, epochs 1." in done.stdout
    assert "±" in done.stdout
    assert "curl -sS http://127.0.0.1:8000/v1/experiments" in done.stdout
    _assert_nothing_left(tmp_path / "data", set(), 2)


@pytest.mark.deep
def test_a_preset_runs_through_the_service(stack: Stack) -> None:
    """A figure, which times constraint steps; the tutorial's blocks run a table."""
    _, client = stack
    experiment = client.submit_preset("senderovich2022/figure-speedup", scale="smoke")
    *_, last = client.watch(experiment.id, every=0.5)
    assert last.state == "succeeded", [trial.error for trial in client.trials(last.id)]
    for trial in client.trials(last.id):
        assert trial.result is not None
        assert trial.result.step_seconds > 0
        assert 0 < trial.result.constraint_step_seconds < trial.result.step_seconds
        assert trial.result.spectrum_seconds > 0
        assert trial.result.latency_seconds > 0
        assert trial.result.batch_seconds > 0
