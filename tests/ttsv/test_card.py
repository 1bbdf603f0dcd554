"""Whole trials on a card that is only pretended: nothing lies on the wrong device, and no step waits for the card."""

import gc
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyautoattack
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.examples import deep
from tests.pretended import PretendedCards, UnexpectedSync, WrongDevice, counted
from ttsv.config.trial import TrialConfig
from ttsv.evaluation.saved import evaluate
from ttsv.metrics import cost
from ttsv.metrics.accuracy import run_to_end
from ttsv.models.conv_shape import LAYERS
from ttsv.results import EpochMetrics, TrialResult
from ttsv.trial import run_trial

STEPS = 3


class Shortened(pyautoattack.AutoAttack):  # type: ignore[misc] # the package is untyped
    """The authors' attacks with few iterations."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for attack in (self.apgd, self.apgd_targeted):
            attack.n_iter = attack.n_iter_orig = 3
            attack.n_restarts = 1
        self.fab.n_iter, self.fab.n_restarts, self.square.n_queries = 2, 1, 5


@dataclass(frozen=True)
class Allowed:
    """How often the processor may wait within a function, in an epoch or at each projection, and why."""

    times: float
    why: str


EPOCH = {
    "training.feed:batches": Allowed(1, "the order of the images, drawn on the processor, is copied"),
    "data.augment:to": Allowed(2, "so are the draws of the augmentation"),
    "training.loop:fit": Allowed(1, "the summed loss and accuracy are read; and the orthogonal loss, if there is one"),
    "training.loop:read": Allowed(1, "what the constraint took is read off the card's clock"),
    "metrics.accuracy:cross_entropy": Allowed(4, "the validation's loss is read, its labels and logits checked"),
    "metrics.accuracy:accuracy": Allowed(8, "so is the accuracy, once for the metrics and once for the best epoch"),
    "training.checkpoint:save": Allowed(math.inf, "everything is copied to the disk"),
    "training.checkpoint:start": Allowed(math.inf, "or to memory, from which it is written in the background"),
    "training.loop:state": Allowed(2, "so are the scale of fp16, and its age"),
}
PROJECTION = {"constraints.projection:project": Allowed(1000, "norms are measured and said; there is one in a while")}
AROUND = {
    "training.loop:restore": "a checkpoint is read",
    "training.loop:finish": "the weights that are evaluated are projected once more",
    "constraints.protocol:settle": "so they are where they are the best epoch's",
    "data.loading:to": "the data set is copied to the card",
    "training.network:train_network": "what comes before the first step and after the last: the network is copied",
    "evaluation.evaluated:evaluate_network": "an evaluation reads what it measures",
    "evaluation.trial_result:evaluate_trial": "and writes it",
    "evaluation.saved:evaluate": "so does that of a saved network",
    "evaluation.trial_result:take_network": "a saved network is copied to the card",
}
ALLOWED = {*EPOCH, *PROJECTION, *AROUND}

BASE: dict[str, Any] = {
    "dataset": "synthetic:3x8x8:4:80",
    "model": "small-cnn",
    "rank": 6,
    "lambda_ort": 0.1,
    "training": {"epochs": 2, "steps": STEPS, "batch_size": 8, "lr": 0.01},
}
CLIP = {"constraint": "clip", "delta": 1.0, "clipping": {"every": 2}}
DIVISION = {"conv": 1.0, "linear": 1.0, "batch_norm": 2.0}


def trial(**changes: Any) -> TrialConfig:
    training = BASE["training"] | changes.pop("training", {})
    return TrialConfig.from_dict({**BASE, **changes, "training": training})


def on(device: str, config: TrialConfig, folder: Path, **options: Any) -> Generator[Any, None, None]:
    return run_trial(config, data_dir=folder / "data", folder=folder / "trial", device=device, **options)


def projections(config: TrialConfig) -> int:
    every = {"clip": config.clipping.every, "divide": config.division.every}.get(config.constraint)
    return 0 if every is None else math.ceil(STEPS / every)


def trained(cards: PretendedCards, config: TrialConfig, folder: Path, *, whole: bool = True) -> list[Any]:
    """Runs a trial on the card, and has an eye on what its epochs wait for; not `whole`: as far as its last epoch."""
    cards.take()
    found, run = list[Any](), on("cuda", config, folder)
    for item in run:
        found.append(item)
        syncs = cards.take()
        waited = counted(syncs, ALLOWED)
        if not isinstance(item, EpochMetrics):
            continue
        limits = {place: allowed.times for place, allowed in EPOCH.items()}
        limits |= {place: allowed.times * projections(config) for place, allowed in PROJECTION.items()}
        limits["training.loop:fit"] += item.ort_loss is not None
        if item.epoch == 1:
            limits |= dict.fromkeys(("training.loop:fit", "data.loading:to"), math.inf)  # network and images are copied
        if item.epoch == item.epochs:
            limits |= dict.fromkeys(AROUND, math.inf)
        seen = [f"{times}x {sync.why}: {' > '.join(sync.stack)}" for sync, times in syncs.items()]
        assert {place: times for place, times in waited.items() if times > limits.get(place, 0)} == {}, "\n".join(seen)
        if item.epoch == item.epochs and not whole:
            run.close()
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttsv.metrics.cost.inference_seconds", partial(cost.inference_seconds, budget=0.0))
    monkeypatch.setattr("ttsv.evaluation.evaluated.write_plots", lambda *_, **__: {})


@pytest.fixture
def cards() -> Iterator[PretendedCards]:
    with PretendedCards(allowed=ALLOWED) as cards:
        yield cards


def drained(run: Generator[Any, None, None]) -> TrialResult:
    *_, result = run
    assert isinstance(result, TrialResult)
    return result


# --- whole trials ---


# Frames are those of `tt`, and AOC is made of the convolutions of BCOP: others cost seconds and walk the same lines.
@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [deep(layer) if layer == "aoc" or (layer.endswith("-tt") and layer != "soc-tt") else layer for layer in LAYERS],
)
def test_every_kind_of_layer(cards: PretendedCards, tmp_path: Path, layer: str) -> None:
    *epochs, result = trained(cards, trial(layer=layer), tmp_path)
    assert [epoch.epoch for epoch in epochs] == [1, 2]
    assert (result.environment["device"], result.peak_memory) == ("cuda", 1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [deep("dense"), "tt"])
@pytest.mark.parametrize(
    "constraint",
    [
        {**CLIP, "clipping": {"every": 1, "rounds": 2, "operator": "zero-padded", "linear": True}},
        {**CLIP, "clipping": {"every": 2, "floor": 0.3}},
        {"constraint": "divide", "division": DIVISION},
        {"constraint": "divide", "division": DIVISION | {"operator": "periodic", "every": 2}},
        {"constraint": "divide", "division": DIVISION | {"power_iterations": None, "every": 3}},
    ],
    ids=["clip", "floor", "divide", "periodic", "exact"],
)
def test_every_constraint(cards: PretendedCards, tmp_path: Path, layer: str, constraint: dict[str, Any]) -> None:
    epochs = trained(cards, trial(layer=layer, **constraint), tmp_path, whole=False)
    assert len(epochs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["dense", "tt", deep("soc"), deep("bcop-tt")])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_precision(cards: PretendedCards, tmp_path: Path, layer: str, precision: str) -> None:
    assert len(trained(cards, trial(layer=layer, training={"precision": precision}), tmp_path, whole=False)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_with_all_that_surrounds_it(cards: PretendedCards, tmp_path: Path, optimizer: str) -> None:
    training = {
        "optimizer": optimizer,
        "precision": "fp16",
        "clip_gradient": 1.0,
        "ema": 0.9,
        "recalibrate": True,
        "keep_best": True,
        "schedule": "onecycle",
        "label_smoothing": 0.1,
        "validation": "test",
    }
    augmentation = {"flip": True, "pad": 2, "padding": "symmetric"}
    config = trial(layer="tt", frames="orthonormal", **CLIP, training=training, augmentation=augmentation)
    assert len(trained(cards, config, tmp_path, whole=False)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["dense", "tt", deep("soc")])
def test_every_metric(cards: PretendedCards, tmp_path: Path, layer: str) -> None:
    evaluation = {
        "certified": True,
        "lipschitz": "both",
        "lipschitz_images": 2,
        "corruptions": "generated",
        "corruption_images": 2,
        "attack": "pgd",
        "attack_images": 4,
    }
    config = trial(dataset="synthetic:3x8x8:4:40", layer=layer, training={"epochs": 1}, evaluation=evaluation)
    result = trained(cards, config, tmp_path)[-1]
    assert result.pgd_accuracy is not None
    assert result.valid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "version"),
    [("L2", "standard"), ("Linf", "standard"), ("L1", "standard"), ("L2", "plus"), ("Linf", "rand")],
)
def test_every_attack(
    cards: PretendedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: str, version: str
) -> None:
    monkeypatch.setattr(pyautoattack, "AutoAttack", Shortened)
    evaluation = {
        "attack": "autoattack",
        "attack_norm": norm,
        "attack_version": version,
        "attack_eps": 0.001,
        "attack_images": 3,
    }
    model = {"dataset": "synthetic:3x16x16:4:40", "model": "single-conv", "training": {"epochs": 1}}
    result = trained(cards, trial(**model, evaluation=evaluation), tmp_path)[-1]
    assert result.robust_accuracy is not None


@pytest.mark.slow
def test_a_saved_network(cards: PretendedCards, tmp_path: Path) -> None:
    """Evaluated once more as a trial, and by itself."""
    config = trial(layer="tt", training={"epochs": 1, "select": "best"})
    first = drained(on("cuda", config, tmp_path))
    source = tmp_path / "trial" / "model.safetensors"
    again = drained(on("cuda", config, tmp_path / "again", source=source))
    assert again.accuracy == first.accuracy
    found = run_to_end(evaluate(source, BASE["dataset"], tmp_path / "data", device="cuda"))
    assert found.measured.columns["accuracy"] == first.accuracy


def test_a_trial_on_the_second_card_stays_there(tmp_path: Path) -> None:
    """And its stopwatch waits for that card: torch reads no clock of an event that is not over."""
    gc.collect()
    with PretendedCards(2, allowed=ALLOWED) as cards:
        before = cards.allocated(0)  # what earlier tests left
        run = on("cuda:1", trial(layer="tt", **CLIP), tmp_path)
        first = next(run)
        assert first.constraint_seconds > 0
        assert cards.allocated(0) <= before
        assert cards.allocated(1) > 0
        run.close()


# --- what a pretended card is worth ---


@pytest.mark.slow
def test_its_numbers_are_the_processors(tmp_path: Path) -> None:
    """But for Winograd's way, and what is chosen by the kind of device."""
    augmentation = {"flip": True, "pad": 1}
    config = trial(layer="tt", training={"convolutions": "direct", "optimizer": "adam"}, augmentation=augmentation)
    with PretendedCards(allowed=ALLOWED):
        card = drained(on("cuda", config, tmp_path / "card"))
    processor = drained(on("cpu", config, tmp_path / "processor"))
    assert card.artifacts["model"].read_bytes() == processor.artifacts["model"].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["dense", deep("aoc")])
def test_a_trial_goes_on_bit_for_bit(cards: PretendedCards, tmp_path: Path, layer: str) -> None:
    config = trial(
        layer=layer, constraint="divide", division={"linear": 1.0}, training={"precision": "fp16", "ema": 0.9}
    )
    whole = drained(on("cuda", config, tmp_path / "whole"))
    first = on("cuda", config, tmp_path / "stopped")
    next(first)
    first.close()
    rest = drained(on("cuda", config, tmp_path / "stopped"))
    assert rest.artifacts["model"].read_bytes() == whole.artifacts["model"].read_bytes()


def spoiled(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Puts into the step what must not be there."""
    from ttsv.data.augment import Augmentation

    real_loss, real_apply = functional.cross_entropy, Augmentation.apply

    def read(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        loss = real_loss(logits, labels, **options)
        if "label_smoothing" not in options:  # of the validation
            return loss
        ways: dict[str, Callable[[], object]] = {
            "item": lambda: loss.item(),
            "bool": lambda: bool(loss > 0),
            "float": lambda: float(loss.detach()),
            "tolist": lambda: labels.tolist(),
            "cpu": lambda: logits.detach().cpu(),
            "to": lambda: logits.detach().to("cpu"),
            "copy_": lambda: torch.empty(logits.shape).copy_(logits.detach()),
            "nonzero": lambda: labels.nonzero(),
            "mask": lambda: logits[labels > 0],
            "write": lambda: logits.detach().clone().index_put_((labels > 0,), logits.detach()[:1]),
            "equal": lambda: torch.equal(labels, labels),
            "tensor": lambda: torch.tensor([1.0, 2.0], device=logits.device),
            "number": lambda: torch.as_tensor(1.0).to(logits),
            "index": lambda: logits[torch.zeros(2, dtype=torch.int64)],
            "svd": lambda: torch.linalg.svdvals(logits.detach().float()),
            "synchronize": lambda: torch.cuda.synchronize(),
            "labels": lambda: real_loss(logits, torch.zeros(len(labels), dtype=torch.int64)),
            "sum": lambda: logits + torch.zeros(4, 4)[:1],
            "write host": lambda: torch.zeros(len(labels)).add_(labels),
            "numpy": lambda: labels.numpy(),
            "generator": lambda: torch.empty_like(logits).normal_(generator=torch.Generator()),
        }
        if way in ways:
            ways[way]()
        return loss

    def host(self: Augmentation, images: Tensor, draws: Any) -> Tensor:
        found = real_apply(self, images, draws)
        return found + torch.zeros(found.shape[1:], dtype=found.dtype) if way == "images" else found

    monkeypatch.setattr(functional, "cross_entropy", read)
    monkeypatch.setattr(Augmentation, "apply", host)


SYNCS = (
    "item", "bool", "float", "tolist", "cpu", "to", "copy_", "nonzero", "mask", "write", "equal", "tensor", "number",
    "index", "svd", "synchronize",
)  # fmt: skip


@pytest.mark.parametrize("way", SYNCS)
def test_a_sync_put_into_the_step_is_seen(
    cards: PretendedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Once a step is more often than once an epoch; whoever may not wait at all is named at once."""
    trained(cards, trial(training={"epochs": 1}), tmp_path / "sound", whole=False)
    spoiled(monkeypatch, way)
    with pytest.raises(AssertionError, match=f"'training.loop:fit': {STEPS + 1}|test_card:"):
        trained(cards, trial(), tmp_path / "spoiled", whole=False)


@pytest.mark.parametrize("way", ["labels", "sum", "write host", "numpy", "generator", "images"])
def test_a_tensor_on_the_wrong_device_is_seen(
    cards: PretendedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    spoiled(monkeypatch, way)
    with pytest.raises(WrongDevice):
        trained(cards, trial(), tmp_path, whole=False)


def test_whoever_may_not_wait_is_named(cards: PretendedCards) -> None:
    tensor = torch.ones(3, device="cuda")
    assert (str(tensor.device), tensor.is_cuda, str((tensor + 1).device)) == ("cuda:0", True, "cuda:0")
    with pytest.raises(UnexpectedSync, match="waits for the card: a number is read"):
        tensor.sum().item()
    assert tensor[:0].new_zeros(2).is_cuda
    assert not torch.zeros(2).is_cuda
    assert nn.Linear(2, 2).to("meta").weight.device.type == "meta"
    layer = nn.Linear(2, 2)
    pinned = layer.weight.detach().pin_memory()
    assert (pinned.is_pinned(), layer.weight.is_pinned()) == (True, False)
    assert pinned.to("cuda", non_blocking=True).is_cuda, "behind: nobody waits"
    with pytest.raises(UnexpectedSync, match="host to device"):
        layer.to("cuda", non_blocking=True)
