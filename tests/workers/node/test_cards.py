"""No two processes of one machine offer the same card."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from service.errors import UserError
from workers.node.cards import Cards


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
    assert (booked.count, dict(booked.environment), list(booked.names)) == (2, {}, cards)
    booked.close()


def test_what_is_left_and_nothing_twice(cards: list[str], caplog: pytest.LogCaptureFixture) -> None:
    first = Cards(1, os.environ)
    assert (first.count, dict(first.environment)) == (1, {"CUDA_VISIBLE_DEVICES": cards[0]})
    second = Cards(None, os.environ)
    assert (second.count, dict(second.environment)) == (1, {"CUDA_VISIBLE_DEVICES": cards[1]})
    assert (list(first.names), list(second.names)) == (cards[:1], cards[1:])
    assert "other workers on this machine offer 1 of its GPUs" in caplog.text
    with pytest.raises(UserError, match="of 2 GPUs 0 are free: other workers on this machine"):
        Cards(1, os.environ)
    third = Cards(None, os.environ)
    assert (third.count, dict(third.environment)) == (0, {"CUDA_VISIBLE_DEVICES": ""})
    first.close()
    again = Cards(1, os.environ)
    assert dict(again.environment) == {"CUDA_VISIBLE_DEVICES": cards[0]}
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
    assert (first.count, dict(first.environment)) == (1, {})
    second = Cards(None, {**os.environ, "CUDA_VISIBLE_DEVICES": f"0,{cards[1][:12]}"})
    assert dict(second.environment) == {"CUDA_VISIBLE_DEVICES": cards[0]}
    slice_of_a_card = f"MIG-{uuid.uuid4()}"
    third = Cards(None, {**os.environ, "CUDA_VISIBLE_DEVICES": slice_of_a_card})
    fourth = Cards(None, {**os.environ, "CUDA_VISIBLE_DEVICES": slice_of_a_card})
    assert (third.count, fourth.count) == (1, 0)
    for one in (first, second, third, fourth):
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


def test_where_no_driver_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Cards(None, os.environ).count == 0
    assert [Cards(3, os.environ).count, Cards(3, os.environ).count] == [3, 3]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_what_is_hidden_cannot_be_offered(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would refuse to start, again and again."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    with pytest.raises(UserError, match="TTSV_WORKER_GPUS = 2, and CUDA_VISIBLE_DEVICES hides every GPU"):
        Cards(2, os.environ)
    assert [Cards(wanted, os.environ).count for wanted in (None, 0)] == [0, 0]
