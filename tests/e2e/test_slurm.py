"""The batch scripts, with stand-ins for what Slurm has: a worker on the first node, the others join it, all leave."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "docker" / "slurm"
pytestmark = pytest.mark.slow


class Allocation:
    """Two nodes, on one machine; whatever is started notes its arguments, and `ttsv worker` lives as it is told."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.folder = folder
        self._program("scontrol", 'echo "scontrol $*" >> $NOTES; if [ "$1" = show ]; then printf "gpu1\\ngpu2\\n"; fi')
        self._program("srun", 'echo "srun $* database=${TTSV_DATABASE_URL-none}" >> $NOTES; exec sleep 60')
        note = 'echo "ttsv $* head=$TTSV_HEAD_ADDRESS cpus=$TTSV_WORKER_CPUS" >> $NOTES'
        self._program("ttsv", f"{note}; {worker}")
        self.notes = folder / "notes"

    def _program(self, name: str, text: str) -> None:
        program = self.folder / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)

    def start(self, script: str) -> subprocess.Popen[bytes]:
        data = self.folder / "data"
        data.mkdir()
        (data / "token").write_text("x")
        env = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "NOTES": str(self.notes),
            "TTSV_DATABASE_URL": "postgresql://ttsv@db/ttsv",
            "TTSV_DATA_DIR": str(data),
            "TTSV_HEAD_ADDRESS": "",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "gpu[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "12",
        }
        command = ["bash", str(SCRIPTS / script)]
        return subprocess.Popen(command, env=env, start_new_session=True)

    def said(self, count: int) -> list[str]:
        deadline = time.monotonic() + 20
        while len(lines := self.notes.read_text().splitlines() if self.notes.exists() else []) < count:
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
        return sorted(lines)


def test_one_node(tmp_path: Path) -> None:
    allocation = Allocation(tmp_path, "exit 3")
    assert allocation.start("worker.sbatch").wait(20) == 3
    assert allocation.said(1) == ["ttsv worker --until-idle --requeue head= cpus=12"]


POOL = [
    "scontrol show hostnames gpu[1-2]",
    "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=12 --exclude=gpu1 ttsv node --head gpu1:6379 "
    "--token-file {data}/token database=none",
    "ttsv worker --until-idle --requeue head=gpu1 cpus=12",
]


@pytest.mark.parametrize("code", [0, 1])
def test_a_pool_ends_with_its_worker(tmp_path: Path, code: int) -> None:
    allocation = Allocation(tmp_path, f"sleep 2; exit {code}")
    job = allocation.start("pool.sbatch")
    assert allocation.said(3) == [line.format(data=tmp_path / "data") for line in POOL]
    assert job.wait(20) == code
    assert _gone(job.pid)


def test_a_pool_that_is_taken_away_lets_its_worker_finish(tmp_path: Path) -> None:
    allocation = Allocation(tmp_path, 'trap "sleep 1; echo left >> $NOTES; exit 0" TERM; sleep 60 & wait')
    job = allocation.start("pool.sbatch")
    allocation.said(3)
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 0
    assert "left" in allocation.said(4)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for script in ("worker.sbatch", "pool.sbatch"):
        command = ["bash", str(SCRIPTS / script)]
        done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "TTSV_DATABASE_URL: postgresql://ttsv@db.example.org/ttsv" in done.stderr


def test_they_say_how_much_memory_they_take() -> None:
    """Else a site's default a CPU is the limit, or there is none and a job takes its neighbours'."""
    for script in SCRIPTS.glob("*.sbatch"):
        assert any(line.startswith("#SBATCH --mem=") for line in script.read_text().splitlines()), script.name


def test_they_may_come_back() -> None:
    for script in SCRIPTS.glob("*.sbatch"):
        lines = script.read_text().splitlines()
        assert lines[0].startswith("#!"), "Slurm reads its options below the first line"
        assert "#SBATCH --requeue" in lines


def _gone(session: int) -> bool:
    """Whether nothing of a session is left, after a moment."""
    for _ in range(100):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
