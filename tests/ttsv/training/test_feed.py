"""Batches of images that do not fit the card are those of images that do."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pretended import PretendedCards
from ttsv.config.trial import TrialConfig
from ttsv.data.loading import Split
from ttsv.results import TrialResult
from ttsv.training import feed
from ttsv.training.feed import batches, place, whole
from ttsv.trial import run_trial

CARD = torch.device("cuda", 0)


def trial(**training: Any) -> TrialConfig:
    return TrialConfig.from_dict(
        {
            "dataset": "synthetic:3x8x8:4:80",
            "model": "small-cnn",
            "augmentation": {"flip": True, "pad": 2},
            "training": {"epochs": 2, "batch_size": 7, "convolutions": "direct"} | training,
        }
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCards]:
    """A card with room for 1,000 bytes of images."""
    with PretendedCards() as cards:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2000, 1 << 34))
        yield cards


def split(count: int = 30, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 4, 4), generator=generator, dtype=torch.uint8)
    return Split(images, torch.arange(count) % 4)


def test_images_are_placed_where_there_is_room(small: PretendedCards) -> None:
    assert [part.is_cuda for part in place(split(20), CARD)] == [True, True]
    assert [part.is_cuda for part in place(split(21), CARD)] == [False, True]
    assert [part.is_cuda for part in place(split(21), torch.device("cpu"))] == [False, False]


def test_a_share_of_a_card_has_its_share_of_room(small: PretendedCards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1000 / (1 << 34), raising=False)
    assert not place(split(20), CARD).images.is_cuda


@pytest.mark.parametrize("count", [30, 23, 7, 3])
def test_batches_are_the_same_wherever_the_images_are(small: PretendedCards, count: int) -> None:
    config = trial()
    there = Split(split().images, split().labels.to(CARD))
    for epoch in (0, 1):
        found = list(batches(there, config, epoch, count))
        expected = list(batches(split(), config, epoch, count))
        assert [(images.is_cuda, labels.is_cuda) for images, labels in found] == [(True, True)] * -(-count // 7)
        for (images, labels), (same_images, same_labels) in zip(found, expected, strict=True):
            assert torch.equal(images.cpu(), same_images)
            assert torch.equal(labels.cpu(), same_labels)
    assert torch.equal(torch.cat([part.cpu() for part in whole(there, 8)]), split().images)


def test_nothing_waits_for_a_batch(small: PretendedCards) -> None:
    there = Split(split().images, split().labels.to(CARD))
    taken = batches(there, trial(), 0, 30)
    next(taken)
    assert sum(small.take().values()) == 4, "labels, order and draws, once an epoch"
    list(taken)
    assert not small.take()


def gathering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "images"]


def test_whoever_stops_leaves_no_thread(small: PretendedCards) -> None:
    there = Split(split().images, split().labels.to(CARD))
    taken = batches(there, trial(), 0, 30)
    next(taken)
    assert gathering()
    taken.close()  # type: ignore[attr-defined] # a generator
    assert not gathering()


def test_an_error_in_the_background_is_the_takers(small: PretendedCards, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: Tensor) -> Tensor:
        raise MemoryError("no memory to pin")

    monkeypatch.setattr(Tensor, "pin_memory", fail)
    there = Split(split().images, split().labels.to(CARD))
    with pytest.raises(MemoryError, match="no memory to pin"):
        list(batches(there, trial(), 0, 30))
    assert not gathering()


@pytest.mark.slow
def test_a_trial_gives_the_same_with_its_images_on_either_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained and evaluated; where they have no room, no set is ever on the card as a whole."""
    monkeypatch.setattr("ttsv.evaluation.evaluated.write_plots", lambda *_, **__: {})
    evaluation = {"certified": True, "lipschitz": "fgsm", "lipschitz_images": 3, "attack": "pgd", "attack_images": 8}
    config = TrialConfig.from_dict({**trial(ema=0.9, recalibrate=True).to_dict(), "evaluation": evaluation})
    found, moved, move = [], list[torch.device](), Split.to

    def noted(self: Split, device: torch.device) -> Split:
        moved.append(device)
        return move(self, device)

    monkeypatch.setattr(Split, "to", noted)
    for room in (0.5, 0.0):
        monkeypatch.setattr(feed, "_ROOM", room)
        moved.clear()
        with PretendedCards():
            folder = tmp_path / str(room)
            *_, result = run_trial(config, data_dir=tmp_path / "data", folder=folder, device="cuda")
        assert isinstance(result, TrialResult)
        assert (CARD in moved) == (room > 0)
        measured = json.loads(result.artifacts["evaluation"].read_text())["results"]
        assert result.pgd_accuracy is not None
        found.append((result.artifacts["model"].read_bytes(), without_seconds(measured)))
    assert found[0] == found[1]


def without_seconds(tree: Any) -> Any:
    """A record without what its making took."""
    if isinstance(tree, dict):
        return {name: without_seconds(part) for name, part in tree.items() if name not in ("seconds", "cost")}
    return [without_seconds(part) for part in tree] if isinstance(tree, list) else tree
