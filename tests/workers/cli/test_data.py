import json
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from workers.cli import data as data_commands
from workers.cli.__main__ import app


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTSV_DATA_DIR", str(tmp_path))
    return tmp_path


def data(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["data", *arguments])


def test_list_shows_what_is_here(data_dir: Path) -> None:
    (data_dir / "datasets").mkdir()
    images = np.zeros((30, 2, 6, 6), np.uint8)
    np.savez(data_dir / "datasets" / "mine.npz", x_train=images, y_train=np.arange(30) % 3)
    result = data("list")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()[1:]}
    assert lines["digits"].split()[1:] == ["1x8x8", "10", "made", "at", "first", "use"]
    assert lines["cifar100"].split()[1:] == ["3x32x32", "100", "ttsv", "data", "fetch", "cifar100"]
    assert lines["npz:mine"].split()[1:] == ["-", "-", "not", "used", "yet"]
    sha256 = data("verify", "npz:mine").stdout.split("SHA-256 ")[1].rstrip(")\n")
    lines = {line.split()[0]: line for line in data("list").stdout.splitlines()[1:]}
    assert lines["npz:mine"].split()[1:] == ["2x6x6", "3", "ready,", "content", sha256[:12]]
    listed = {entry["name"]: entry for entry in json.loads(data("list", "--json").stdout)}
    assert listed["npz:mine"] == {
        "name": "npz:mine",
        "ready": True,
        "sha256": sha256,
        "classes": 3,
        "shape": [2, 6, 6],
        "source": "the user's own",
    }
    assert not listed["digits"]["ready"]


def test_fetch_and_verify_an_embedded_set(data_dir: Path) -> None:
    assert data("fetch", "digits").stdout == f"digits is in {data_dir}\n"
    result = data("verify", "digits")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "digits: every file is as published, or as at its first use (content SHA-256 b4962e"
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fetch", "verify"])
def test_failures_are_said_plainly(command: str, data_dir: Path) -> None:
    for name, message in {
        "mnist": "ttsv: dataset = 'mnist': must be one of digits, cifar10",
        "npz:../x": "ttsv: dataset = 'npz:../x': must be one of",
        "npz:x": f"ttsv: {data_dir}/datasets/x.npz is missing",
    }.items():
        result = data(command, name)
        assert result.exit_code == 1
        assert result.stderr.startswith(message)
    assert data("verify", "svhn").stderr.endswith("run `ttsv data fetch svhn`\n")


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with data_commands._progress() as nothing:
        assert nothing is None
    terminal = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr(data_commands, "console", lambda: terminal)
    with data_commands._progress() as progress:
        assert progress is not None
        progress("train.gz", 500, 2000)
        progress("train.gz", 2000, 2000)
        progress("unknown.gz", 700, None)
    shown = terminal.export_text()
    assert "train.gz" in shown
    assert "2.0/2.0 kB" in shown
    assert "unknown.gz" in shown
    assert "700/? bytes" in shown


def test_a_head_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    result = data("sync", "--head", address, "--token-file", str(tmp_path / "token"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"ttsv: nothing answers at {address} (Connection refused)\n"
    assert time.monotonic() - began < 20, "Ray itself asks for three quarters of a minute"
