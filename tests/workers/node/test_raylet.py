"""Ray's processes start whatever cards are lost, and what is left in their folder goes while they run."""

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from workers.node import raylet
from workers.node.processes import own_folder, spawn
from workers.node.raylet import _RAY, SETTLED_SECONDS, RayProcess, clear

SLEEPS = "import time; time.sleep(60)"
Start = Callable[..., None]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that sleep, with arguments and in a folder."""
    with ExitStack() as stack:

        def start(*arguments: str, cwd: Path | None = None) -> None:
            child = stack.enter_context(subprocess.Popen([sys.executable, "-c", SLEEPS, *arguments], cwd=cwd))
            stack.callback(child.kill)

        yield start


def aged(path: Path, seconds: float) -> None:
    """Has all of a folder, or a file, be so old."""
    moment = time.time() - seconds
    for one in (path, *path.rglob("*")):
        os.utime(one, (moment, moment))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_nobody_needs_goes(tmp_path: Path, start: Start) -> None:
    session = tmp_path / "session_2026-11-28_09-30-58_002207_4552"
    claims = {}  # of numbers that no driver has of what runs beside these tests
    for number, name in enumerate(("987651-1", "987652-1", "987653-2", "987654-1", "987655-1")):
        claims[name] = session / f"artifacts/2026-11-28_10-42-5{number % 4}/{name}"
        (claims[name] / "working_dirs/trial-7-4083d33a").mkdir(parents=True)
        (claims[name] / "driver_artifacts").mkdir()
        (claims[name] / "driver_artifacts/experiment_state-1.json").touch()
        aged(claims[name], 2 * SETTLED_SECONDS)
    aged(claims["987652-1"] / "working_dirs", 60)  # a trial has just begun there
    start(cwd=claims["987653-2"] / "working_dirs/trial-7-4083d33a")
    start("--experiment", "987654", "--fence", "1")
    logs = session / "logs"
    logs.mkdir()
    for name in ("worker-old.err", "python-core-driver-old.log", "raylet.out", "gcs_server.out", "worker-new.out"):
        (logs / name).touch()
        aged(logs / name, 4 * 86400 if "new" not in name else 86400)
    time.sleep(0.5)  # until they are what was started
    clear(tmp_path)
    assert {name for name, claim in claims.items() if claim.exists()} == {"987652-1", "987653-2", "987654-1"}
    assert names(session / "artifacts") == [f"2026-11-28_10-42-5{number}" for number in (1, 2, 3)]
    assert names(logs) == ["gcs_server.out", "raylet.out", "worker-new.out"]
    clear(tmp_path / "nothing")


def test_its_folder_stays_known_as_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what clears temporary files would take that, and nobody the folder of a worker that was killed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(raylet, "_CLEAR_SECONDS", 0.01)
    over = threading.Event()
    monkeypatch.setattr(raylet, "clear", lambda folder: over.set())
    folder = own_folder(raylet.PREFIX)
    aged(folder, 9 * 86400)
    raylet._keep_clear(folder, over)
    assert (folder / "owner.json").stat().st_mtime > time.time() - 60


def test_without_a_thread_to_look_after_it_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have a process more and no thread; who started it tries again, as for want of a process."""
    started = []

    def sleeping(_command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(spawn([sys.executable, "-c", SLEEPS], **options))
        return started[-1]

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (tmp_path / "token").write_text("secret")
    monkeypatch.setattr(raylet, "spawn", sleeping)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ray = RayProcess({"raylet"}, tmp_path / "token")
    with pytest.raises(OSError, match="can't start new thread") as caught:
        ray.start(options={}, environment={})
    assert caught.value.errno == errno.EAGAIN
    assert started[0].poll() is not None
    ray.stop()  # as its callers do


LOST = """
from unittest.mock import Mock
import ray._private.thirdparty.pynvml as pynvml
lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
for name in dir(pynvml):
    if name.startswith("nvmlDevice"):
        setattr(pynvml, name, Mock(side_effect=lost))
pynvml.nvmlInit = pynvml.nvmlShutdown = Mock()
pynvml.nvmlDeviceGetCount = Mock(return_value=2)
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
found = ResourceAndLabelSpec(num_cpus=1, num_gpus=2).resolve(is_head=True, node_ip_address="127.0.0.1")
print(found.to_resource_dict()["GPU"])
"""


def test_where_the_first_card_is_lost_ray_starts_none_the_less() -> None:
    """As `ray start` works out what it has, once it runs as we have it run."""
    before, main, _ = _RAY.rpartition("main()")
    assert main
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", before + LOST]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "2\n", done.stderr
