import errno
import json
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from service.storage import Folder
from ttsv.data import load_dataset
from workers.cli import data as data_commands
from workers.cli.__main__ import app
from workers.node.depot.data_sets import DataSetFiles, describe_data_set, known_data_sets


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


def test_a_set_that_cannot_be_looked_at_hides_no_other(data_dir: Path) -> None:
    for name in ("good", "mine"):
        path = data_dir / "datasets" / f"{name}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, x_train=np.zeros((30, 2, 6, 6), np.uint8), y_train=np.arange(30) % 3)
        load_dataset(f"npz:{name}", data_dir)
    (data_dir / "datasets" / "npz-mine.sha256.json").write_text("{")
    done = data("list")
    lines = {line.split()[0]: line.split("\t") for line in done.stdout.splitlines()[1:]}
    assert (done.exit_code, lines["npz:mine"][3]) == (1, "cannot be looked at")
    assert lines["npz:good"][3].startswith("ready, content ")
    assert done.stderr.startswith(f"ttsv: {data_dir}/datasets/npz-mine.sha256.json is cut or altered")
    listed = data("list", "--json")
    assert (listed.exit_code, len(json.loads(listed.stdout))) == (1, len(lines))


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


def test_of_many_files_the_newest_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw all of some thousand images with each that comes would take hours."""
    terminal = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr(data_commands, "console", lambda: terminal)
    with data_commands._progress() as progress:
        assert progress is not None
        for number in range(100):
            progress(f"image-{number:02}.png", 1, 1)
    last = terminal.export_text(clear=False).rpartition("image-98.png")[0].rpartition("image-89.png")[2]
    assert "image-88.png" not in last
    assert terminal.export_text().rpartition("image-99.png")[1]


class Head(Folder):
    """The head's folder as `join_head` gives it, without Ray."""

    def data_set(self, name: str) -> DataSetFiles | str:
        return describe_data_set(name, self.root / "datasets")

    def data_sets(self) -> list[str]:
        return known_data_sets(self.root)


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    """One with three sets that were never used."""
    head = Head(tmp_path_factory.mktemp("head"))
    (data_dir / "token").write_text("x")
    monkeypatch.setattr("workers.node.raylet.token_environment", lambda token: {})
    monkeypatch.setattr("workers.node.depot.remote.join_head", lambda address: head)
    for seed, name in enumerate(("first", "mine", "other")):
        save(head.root, name, seed)
    return head


def save(data_dir: Path, name: str, seed: int) -> None:
    (data_dir / "datasets").mkdir(exist_ok=True)
    images = np.random.default_rng(seed).integers(0, 256, (60, 2, 6, 6), np.uint8)
    np.savez(data_dir / "datasets" / f"{name}.npz", x_train=images, y_train=np.arange(60) % 3)


def sync(data_dir: Path, *names: str) -> Result:
    return data("sync", "--head", "gpu1", "--token-file", str(data_dir / "token"), *names)


def test_sync_brings_what_the_head_never_used(data_dir: Path, head: Head) -> None:
    done = sync(data_dir)
    assert (done.exit_code, done.stderr) == (0, "")
    expected = [f"npz:{name} is in {data_dir}, the same as on the head" for name in ("first", "mine", "other")]
    assert done.stdout.splitlines() == expected


def test_one_set_that_misfits_keeps_no_other_from_coming(data_dir: Path, head: Head) -> None:
    save(data_dir, "mine", seed=7)
    load_dataset("npz:mine", data_dir)
    (head.root / "datasets" / "broken.npz").write_text("no archive")
    done = sync(data_dir)
    assert done.exit_code == 1
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["npz:first", "npz:other"]
    broken, mine, last = done.stderr.splitlines()
    assert "broken.npz is no whole archive" in broken
    assert mine.startswith(f"ttsv: dataset = 'npz:mine': on {socket.gethostname()} its content has SHA-256")
    assert last == "ttsv: 2 of 4 data sets did not come: npz:broken, npz:mine"


def test_a_disk_that_is_full_ends_it(data_dir: Path, head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(head, "read", refuse)
    done = sync(data_dir, "npz:first", "npz:mine")
    assert done.exit_code == 1
    assert done.stderr == "ttsv: [Errno 28] No space left on device\n"


def test_what_is_waited_for_is_said_until_a_file_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr(data_commands, "console", lambda: terminal)
    with data_commands._progress(before="npz:mine: the head reads it"):
        time.sleep(0.2)
    assert "npz:mine: the head reads it" in terminal.export_text()
    with data_commands._progress(before="npz:mine: the head reads it") as progress:
        assert progress is not None
        progress("mine.npz", 500, 2000)
        terminal.export_text()
        progress("mine.npz", 2000, 2000)
    shown = terminal.export_text()
    assert "mine.npz" in shown
    assert "the head reads it" not in shown


def test_a_token_that_is_of_no_use_is_said(tmp_path: Path) -> None:
    """Ray would end the process that reads it."""
    (tmp_path / "token").touch()
    result = data("sync", "--head", "127.0.0.1:1", "--token-file", str(tmp_path / "token"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"ttsv: {tmp_path / 'token'} is empty: copy the file `token` of the head's")


def test_a_head_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    result = data("sync", "--head", address, "--token-file", str(tmp_path / "token"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"ttsv: nothing answers at {address} (Connection refused)\n"
    assert time.monotonic() - began < 20, "Ray itself asks for three quarters of a minute"
