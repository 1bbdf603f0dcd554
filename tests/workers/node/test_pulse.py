"""The pulse by which a container's health check knows its worker."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from workers.cli.__main__ import app
from workers.node import pulse


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def health() -> tuple[int, str]:
    done = CliRunner().invoke(app, ["alive"])
    return done.exit_code, done.stderr


def test_nobody_was_ever_there() -> None:
    code, said = health()
    assert code == 1
    assert "no worker and no node was started here" in said


def test_one_that_turns() -> None:
    pulse.beat()
    assert health() == (0, "")


def test_a_full_disk_keeps_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    pulse.beat()
    assert not list(tmp_path.iterdir())


def test_one_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse.beat()
    now = time.monotonic()
    # Of this module alone: loops of other threads, which go by the real one, would stand still.
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: now + pulse.LONGEST_PAUSE + 10))
    assert "has not turned for 160 s" in (pulse.silence() or "")


def test_one_that_was_killed() -> None:
    code = "from workers.node import pulse; pulse.beat()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TMPDIR": tempfile.gettempdir()})
    assert health()[0] == 1
    assert "is gone" in health()[1]


def test_before_the_machine_started_anew(tmp_path: Path) -> None:
    pulse.beat()
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "at": time.monotonic() + 1000}))
    assert pulse.silence() is not None


def test_a_full_disk_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    pulse.beat()
