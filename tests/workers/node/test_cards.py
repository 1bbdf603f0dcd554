"""No two processes of one machine offer the same card."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from service.errors import UserError
from workers.node import machine
from workers.node.cards import OFFERED, Cards


def told(*cards: str) -> dict[str, str]:
    """What whatever uses these cards is told."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(cards), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", OFFERED: ",".join(cards)}


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The UUIDs of the two GPUs that this machine is made to have."""
    names = [f"GPU-{uuid.uuid4()}" for _ in range(2)]
    script = tmp_path / "nvidia-smi"
    rows = "".join(f"{name}, H100, 81559\\n" for name in names)
    script.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return names


def test_all_that_is_there(cards: list[str]) -> None:
    booked = Cards(None, os.environ)
    assert (booked.count, dict(booked.environment), list(booked.names)) == (2, told(*cards), cards)
    booked.close()


def test_what_is_left_and_nothing_twice(cards: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = Cards(1, os.environ)
    assert (first.count, dict(first.environment)) == (1, told(cards[0]))
    second = Cards(None, os.environ)
    assert (second.count, dict(second.environment)) == (1, told(cards[1]))
    assert (list(first.names), list(second.names)) == (cards[:1], cards[1:])
    assert "other workers on this machine offer 1 of its GPUs" in caplog.text
    with pytest.raises(UserError, match="of 2 GPUs 0 are free: other workers on this machine"):
        Cards(1, os.environ)
    third = Cards(None, os.environ)
    assert (third.count, dict(third.environment)) == (0, told())
    first.close()
    again = Cards(1, os.environ)
    assert dict(again.environment) == told(cards[0])
    for one in (second, third, again):
        one.close()


def test_who_is_refused_keeps_nothing(cards: list[str]) -> None:
    first = Cards(1, os.environ)
    with pytest.raises(UserError, match="of 2 GPUs 1 are free"):
        Cards(2, os.environ)
    first.close()
    with pytest.raises(UserError, match="TTSV_WORKER_GPUS = 3, and there are 2 GPUs"):
        Cards(3, os.environ)
    whole = Cards(2, os.environ)
    assert whole.count == 2
    whole.close()


def test_by_what_the_environment_shows(cards: list[str]) -> None:
    first = Cards(None, {**os.environ, "CUDA_VISIBLE_DEVICES": "1"})
    assert (first.count, dict(first.environment)) == (1, told(cards[1])), "CUDA may call another one its number 1"
    second = Cards(None, {**os.environ, "CUDA_VISIBLE_DEVICES": f"0,{cards[1][:12]}"})
    assert dict(second.environment) == told(cards[0])
    slice_of_a_card = f"MIG-{uuid.uuid4()}"
    third = Cards(None, {**os.environ, "CUDA_VISIBLE_DEVICES": slice_of_a_card})
    fourth = Cards(None, {**os.environ, "CUDA_VISIBLE_DEVICES": slice_of_a_card})
    assert (third.count, fourth.count) == (1, 0)
    for one in (first, second, third, fourth):
        one.close()


@pytest.fixture
def driver(cards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the device files of those GPUs, whose numbers there are not those of nvidia-smi."""
    for number, uuid_ in enumerate(cards):
        said = tmp_path / "gpus" / f"0000:0{number}:00.0" / "information"
        said.parent.mkdir(parents=True)
        said.write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid_}\nDevice Minor: \t {1 - number}\n")
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(machine, "_DEVICES", tmp_path)
    return tmp_path


class TestDevices:
    def test_whoever_does_not_see_the_sockets_sees_the_locks(
        self, cards: list[str], driver: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a container with a network of its own, whose names of sockets are its own."""
        first = Cards(1, os.environ)
        monkeypatch.setattr("workers.node.cards._NAME", "\0ttsv-in-another-network-{}")
        second = Cards(None, os.environ)
        assert (first.names, second.names) == ((cards[0],), (cards[1],))
        with pytest.raises(UserError, match="of 2 GPUs 0 are free"):
            Cards(1, os.environ)
        first.close()
        third = Cards(1, os.environ)
        assert third.names == (cards[0],)
        for one in (second, third):
            one.close()

    def test_a_file_that_cannot_be_opened_keeps_nobody(self, cards: list[str], driver: Path) -> None:
        for number in range(2):
            (driver / f"nvidia{number}").unlink()
        booked = Cards(None, os.environ)
        assert booked.count == 2
        booked.close()

    @pytest.mark.parametrize("there", [False, True])
    def test_without_nvidia_smi_the_driver_says_what_there_is(
        self, cards: list[str], driver: Path, monkeypatch: pytest.MonkeyPatch, there: bool
    ) -> None:
        """And where it fails while one card is booked: by its number that would be another one, and booked twice."""
        first = Cards(1, os.environ)
        if there:
            (driver / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
        else:
            monkeypatch.setenv("PATH", "/nowhere")
        second = Cards(1, {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"})
        assert (first.names, second.names) == ((cards[0],), (cards[1],))
        with pytest.raises(UserError, match="of 2 GPUs 0 are free"):
            Cards(1, os.environ)
        assert [gpu.name for gpu in machine.describe(driver).gpus] == ["NVIDIA H100"] * 2
        for one in (first, second):
            one.close()


def test_a_process_that_is_killed_gives_its_cards_back(cards: list[str]) -> None:
    code = "import os; from workers.node.cards import Cards; cards = Cards(2, os.environ); print(cards.count); input()"
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"2\n"
        with pytest.raises(UserError, match="are free"):
            Cards(1, os.environ)
        child.kill()
        child.wait()
    booked = Cards(2, os.environ)
    assert booked.count == 2
    booked.close()


def test_where_no_driver_says_what_there_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks for GPUs is believed, and told what becomes of trials where there are none."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [Cards(wanted, os.environ).count for wanted in (None, 0)] == [0, 0]
    assert not caplog.messages
    assert [Cards(3, os.environ).count, Cards(3, os.environ).count] == [3, 3]
    assert "TTSV_WORKER_GPUS = 3 is believed, though this machine lists no GPU" in caplog.messages[0]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_what_is_hidden_cannot_be_offered(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would refuse to start, again and again."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(UserError, match="TTSV_WORKER_GPUS = 2, and CUDA_VISIBLE_DEVICES hides every GPU"):
        Cards(2, os.environ)
    assert [Cards(wanted, os.environ).count for wanted in (None, 0)] == [0, 0]
