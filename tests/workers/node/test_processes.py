import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from service.database.experiments import ProcessIdentity
from workers.node.processes import died, heard, identity, is_dead, keep_owned, own_folder, owned, spawn, stop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="identities and death signals need Linux")

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_is_dead_only_if_certain() -> None:
    alive = identity()
    assert alive is not None
    assert not is_dead(alive)
    assert not is_dead(None)
    assert is_dead({**alive, "start": alive["start"] - 1})  # another process took the number
    free = max(psutil.pids()) + 1000
    assert is_dead({**alive, "pid": free})
    assert not is_dead({**alive, "pid": free, "boot": "another machine"})
    assert not is_dead({**alive, "pid": free, "pids": 1})  # another container
    assert not is_dead(cast(ProcessIdentity, {"pid": free}))


def test_zombie_is_dead() -> None:
    child = subprocess.Popen(SLEEP)
    alive = identity()
    assert alive is not None
    ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    theirs: ProcessIdentity = {**alive, "pid": child.pid, "start": ticks}
    assert not is_dead(theirs)
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert is_dead(theirs)
    child.wait()
    assert is_dead(theirs)


def test_stop_ends_the_whole_session(tmp_path: Path) -> None:
    """A child that ignores SIGTERM, and its own child."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "logs" / "log"
    child = spawn([sys.executable, "-c", code], env=os.environ, log=log, death=signal.SIGKILL)
    while not (grandchild := log.read_text().strip()):
        time.sleep(0.02)
    assert os.getsid(int(grandchild)) == child.pid
    stop(child, grace=0.2)
    assert child.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(int(grandchild)) or psutil.Process(int(grandchild)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_spawned_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, time; from workers.node.processes import spawn;"
        f"child = spawn({SLEEP!r}, env=os.environ, log=pathlib.Path({str(tmp_path / 'log')!r}), death=signal.SIGTERM);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    while "time.sleep" not in " ".join(child.cmdline()):  # it is past its launcher
        time.sleep(0.02)
    parent.kill()
    parent.communicate()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_launcher_of_a_dead_parent_runs_nothing() -> None:
    command = [sys.executable, "-m", "workers.node.processes", "1", "SIGTERM", sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "parent" in done.stderr


def test_a_folder_of_its_own_that_has_no_room_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it would say whose it is, so nobody would ever remove it."""

    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        own_folder("ttsv-ray-")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("taken", [False, True])
def test_a_folder_that_is_kept_is_known_as_its_owners_however_old_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """What clears temporary files takes those that nobody touched for days, and may have been there first."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = own_folder("ttsv-ray-")
    (owner,) = folder.iterdir()
    os.utime(owner, (0, 0))
    if taken:
        owner.unlink()
    keep_owned(folder)
    assert owner.stat().st_mtime > time.time() - 60
    assert owned("ttsv-ray-") == [folder]


def test_whose_numbers_the_dead_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alive, free = identity(), max(psutil.pids()) + 1000
    assert alive is not None
    own_folder("ttsv-ray-")
    others: list[dict[str, Any]] = [{"pid": free}, {"pid": free + 1, "boot": "another"}, {"start": alive["start"] - 1}]
    for number, other in enumerate(others):
        (tmp_path / f"ttsv-ray-{number}").mkdir()
        (tmp_path / f"ttsv-ray-{number}/owner.json").write_text(json.dumps({**alive, **other}))
    assert died("ttsv-ray-") == [free]  # the last one's is that of another process now


class TestHeard:
    def test_all_that_it_says(self) -> None:
        done = heard(["sh", "-c", "echo out; echo errors >&2; exit 3"], 60.0)
        assert (done.stdout, done.stderr, done.returncode) == ("out\n", "errors\n", 3)

    def test_nobody_waits_for_one_that_cannot_be_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As one whose system call never returns."""
        left: list[subprocess.Popen[str]] = []
        monkeypatch.setattr(subprocess.Popen, "kill", lambda child: left.append(child))
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            heard(SLEEP, 0.2)
        assert time.monotonic() - began < 10.0
        monkeypatch.undo()
        (child,) = left
        assert child.poll() is None
        child.kill()
        child.wait(10.0)
