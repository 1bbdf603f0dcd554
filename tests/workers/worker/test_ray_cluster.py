from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers.node.processes import identity
from workers.worker.ray_cluster import LocalCluster


@pytest.fixture
def fast_death(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Clusters whose child ends at once, with their temporary folders under the test's; the commands asked for."""
    commands: list[list[str]] = []

    def spawn(command: list[str], **_: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        return subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("workers.node.raylet.spawn", spawn)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return commands


def test_token_is_ours_alone_and_stays(tmp_path: Path, fast_death: list[list[str]]) -> None:
    token = tmp_path / "data" / "token"
    for _ in range(2):
        cluster = LocalCluster(tmp_path / "data", cpus=1, gpus=0)
        cluster.start()
        first = token.read_text()
        assert len(bytes.fromhex(first)) == 32
        assert token.stat().st_mode & 0o777 == 0o600
        cluster.stop()
    assert token.read_text() == first
    assert [path.name for path in token.parent.iterdir()] == ["token"]
    ports = [part for command in fast_death for part in command if part.startswith("--port=")]
    assert len(set(ports)) == 2


def test_failed_start_is_noticed_and_leaves_nothing(tmp_path: Path, fast_death: list[list[str]]) -> None:
    cluster = LocalCluster(tmp_path, cpus=1, gpus=0)
    assert cluster.failed()
    cluster.start()
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    while not cluster.failed():
        assert not cluster.ready()
    cluster.stop()
    assert not list((tmp_path / "tmp").iterdir())


def test_start_removes_what_killed_workers_left(tmp_path: Path, fast_death: list[list[str]]) -> None:
    mine = identity()
    assert mine is not None
    for name, owner in (("dead", {**mine, "start": 1}), ("alive", mine)):
        folder = tmp_path / "tmp" / f"ttsv-ray-{name}"
        folder.mkdir()
        (folder / "owner.json").write_text(json.dumps(owner))
    left = [sys.executable, "-c", "import time; time.sleep(60)", str(tmp_path / "tmp" / "ttsv-ray-dead")]
    with subprocess.Popen(left, start_new_session=True) as process:
        cluster = LocalCluster(tmp_path, cpus=1, gpus=0)
        cluster.start()
        assert process.wait(5) == -9
    cluster.stop()
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["ttsv-ray-alive"]
