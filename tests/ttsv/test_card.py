"""Whole trials on a card that is only pretended: nothing lies on the wrong device, and no step waits for the card."""

import gc
import io
import math
import pickle
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyautoattack
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.examples import deep
from tests.pretended import PretendedCards, UnexpectedSync, WrongDevice, counted
from ttsv.config.trial import TrialConfig
from ttsv.constraints import Clip, Unconstrained
from ttsv.data import load_dataset
from ttsv.evaluation.saved import evaluate
from ttsv.metrics import cost
from ttsv.metrics.accuracy import run_to_end
from ttsv.models import create_model
from ttsv.models.conv_shape import LAYERS
from ttsv.results import EpochMetrics, TrialResult
from ttsv.training import checkpoint, network
from ttsv.training.loop import fit
from ttsv.trial import run_trial

STEPS = 3
LAYERS_OF_ALL = 4
"""Of the network that is trained here, the linear one included."""


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
    "training.graph:__init__": Allowed(1, "before a step is captured, once a training, all that runs is waited for"),
    "training.stopwatch:read": Allowed(2, "what the constraint took is read off the card's clock, in a graph too"),
    "metrics.accuracy:cross_entropy": Allowed(4, "the validation's loss is read, its labels and logits checked"),
    "metrics.accuracy:accuracy": Allowed(8, "so is the accuracy, once for the metrics and once for the best epoch"),
    "training.checkpoint:save": Allowed(0, "what is on the card, each tensor once, is copied to the disk"),
    "training.checkpoint:start": Allowed(0, "or to memory, from which it is written in the background"),
    "training.loop:state": Allowed(2, "so are the scale of fp16, and its age"),
    "training.optimizers:make_optimizer": Allowed(0, "torch looks at the rate when the optimizer is made"),
    "training.spectra:take": Allowed(0, "where spectra are asked for, they are taken after the epoch"),
    "certification.certificates:assumed_certified_accuracy": Allowed(0, "so is certified accuracy, to find the best"),
}
"""In every epoch; 0 where it depends on the trial, see `limits`."""
PROJECTION = "constraints.projection:project"
STARTS = "constraints.power:start_of"
A_LAYER = {
    "exact": Allowed(60, "a norm is bounded from above, in float64, before and after"),
    "zero-padded": Allowed(90, "so it is for a clip, and for its two rounds"),
    "floor": Allowed(32, "small singular values are looked for, too"),
    "clip": Allowed(22, "norms, Cholesky tests, and what these leave to decompose"),
}
"""What a projection that is measured waits for, at each layer: it found 51, 76, 29 and 16 to 21."""
TABLES = Allowed(14, "and for the tables of each layer's geometry, when it is the first")
SPECTRUM = Allowed(14, "a layer's singular values; and its tables, when it is the first")
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
ALLOWED = {*EPOCH, PROJECTION, STARTS, *AROUND}

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


def projections(config: TrialConfig, epochs: int) -> int:
    """How often the first epochs project."""
    every = {"clip": config.clipping.every, "divide": config.division.every}.get(config.constraint)
    return 0 if every is None else epochs * STEPS // every


def a_projection(config: TrialConfig, *, first: bool) -> float:
    """How often one of them may wait: where it runs ahead, to see whose frames are to be made orthonormal, and whether
    products did.
    """
    if config.constraint == "divide" and config.division.power_iterations is not None:
        return 2 * (config.layer == "tt" and config.frames == "free")
    clipping = config.clipping
    kind = "floor" if clipping.floor is not None else "zero-padded" if clipping.operator == "zero-padded" else "clip"
    found = A_LAYER["exact" if config.constraint == "divide" else kind].times
    return LAYERS_OF_ALL * (found + first * TABLES.times)


def limits(config: TrialConfig, item: EpochMetrics, tensors: "Noted") -> dict[str, float]:
    """How often is waited in an epoch, by place, at most."""
    found = {place: allowed.times for place, allowed in EPOCH.items()}
    found["training.loop:fit"] += item.ort_loss is not None
    found |= dict.fromkeys(("training.checkpoint:save", "training.checkpoint:start"), tensors.saved)
    before = projections(config, item.epoch - 1)
    found[PROJECTION] = a_projection(config, first=not before) * (projections(config, item.epoch) - before)
    found[STARTS] = 0 if before else LAYERS_OF_ALL  # what division starts from, when it is the first
    if config.training.spectra_every is not None:
        times = 1 + (projections(config, item.epoch) > before)  # before and after the last projection, or after all
        found["training.spectra:take"] = SPECTRUM.times * LAYERS_OF_ALL * times
    if config.training.best_by == "certified":
        found["certification.certificates:assumed_certified_accuracy"] = 4
    if item.epoch == 1:  # network and images are copied
        found["training.loop:fit"] += tensors.network
        found["data.loading:to"] = 4
        found["training.optimizers:make_optimizer"] = 1
    if item.epoch == item.epochs:
        found |= dict.fromkeys(AROUND, math.inf)
    return found


@dataclass
class Noted:
    """How many tensors on the card the network of a trial has, and a checkpoint of it."""

    network: int = 0
    saved: int = 0


@contextmanager
def noted() -> Iterator[Noted]:
    """Has an eye on the trials that are run inside."""
    found, real_copies = Noted(), checkpoint._copies

    def made(*arguments: Any, **options: Any) -> nn.Module:
        model = create_model(*arguments, **options)
        found.network = len(model.state_dict())
        return model

    def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found.saved = 1 + sum(tensor.is_cuda for tensor in tensors.values())  # and once for all of them to be there
        return real_copies(tensors)

    made_here = mock.patch.object(network, "create_model", made)
    with made_here, mock.patch.object(checkpoint, "_copies", copied):
        yield found


def trained(cards: PretendedCards, config: TrialConfig, folder: Path, *, whole: bool = True) -> list[Any]:
    """Runs a trial on the card, and has an eye on what its epochs wait for; not `whole`: as far as its last epoch."""
    cards.take()
    found, run = list[Any](), on("cuda", config, folder)
    with noted() as tensors:
        for item in run:
            found.append(item)
            syncs = cards.take()
            if not isinstance(item, EpochMetrics):
                continue
            most = limits(config, item, tensors)
            in_steps = {sync: times for sync, times in syncs.items() if "training.loop:finish" not in sync.stack}
            over = {place: times for place, times in counted(in_steps, ALLOWED).items() if times > most.get(place, 0)}
            seen = [f"{times}x {sync.why}: {' > '.join(sync.stack)}" for sync, times in syncs.items()]
            assert over == {}, "\n".join(seen)
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
    "layer", [deep(layer) if layer == "bcop" or layer.endswith("-tt") else layer for layer in LAYERS]
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


@pytest.mark.parametrize("constraint", ["clip", "divide"])
def test_a_step_that_does_not_project_waits_for_nothing(cards: PretendedCards, tmp_path: Path, constraint: str) -> None:
    every: dict[str, dict[str, Any]] = {
        "clip": CLIP | {"clipping": {"every": STEPS + 1}},
        "divide": {"constraint": "divide", "division": DIVISION | {"every": STEPS + 1}},
    }
    config = trial(layer="tt", **every[constraint])
    assert projections(config, 1) == 0
    assert len(trained(cards, config, tmp_path, whole=False)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layer", [deep("dense"), "tt", "soc"])
def test_spectra_of_epochs(cards: PretendedCards, tmp_path: Path, layer: str) -> None:
    """Copies within a step wait for nothing."""
    rest: dict[str, Any] = {} if layer == "soc" else CLIP
    training = {"spectra_every": 1, "epochs": 1 if layer == "soc" else 2}  # those of its exponentials take seconds
    epochs = trained(cards, trial(layer=layer, **rest, training=training), tmp_path, whole=False)
    assert all(epoch.spectra for epoch in epochs)


@pytest.mark.slow
def test_the_best_epoch_by_certified_accuracy(cards: PretendedCards, tmp_path: Path) -> None:
    config = trial(layer="soc", training={"epochs": 3, "select": "best", "best_by": "certified"})
    assert len(trained(cards, config, tmp_path, whole=False)) == 3


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
@pytest.mark.parametrize("layer", [deep("dense"), "tt", deep("soc")])
def test_every_metric(cards: PretendedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    # Images are corrupted as arrays of the processor, by what is compiled for that in each process, for seconds.
    monkeypatch.setattr("ttsv.data.generated_corruptions.corrupted", lambda image, *_: image)
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
    assert result.lipschitz_bound is not None, "as a network with a tensor on the wrong device has none"
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_convolutions_of_steps_are_chosen_by_measuring(
    cards: PretendedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """By whoever trains, the benchmarks too; and not where other ones may win next time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen, real = set[bool](), functional.cross_entropy

    def noted(*arguments: Any, **options: Any) -> Tensor:
        if "label_smoothing" in options:  # not of the validation
            seen.add(torch.backends.cudnn.benchmark)
        return real(*arguments, **options)

    monkeypatch.setattr(functional, "cross_entropy", noted)
    config = trial(layer="dense", training={"epochs": 1, "deterministic": deterministic})
    data = load_dataset(config.dataset, tmp_path)
    model = create_model(config.model, num_classes=4, image_size=8)
    for _ in fit(model, data, config, Unconstrained(), device=torch.device("cuda", 0)):
        assert not torch.backends.cudnn.benchmark, "between epochs it is the caller's"
    assert seen == {not deterministic}


@pytest.mark.parametrize(("layer", "most"), [("dense", 28), ("tt", 46)])
def test_a_second_clip_waits_for_what_it_finds_alone(cards: PretendedCards, layer: str, most: int) -> None:
    """Tables of geometries are on the card since the first; kernels of one shape are waited for together.

    It found 23 and 41, in thirteen layers of which nine go together: one more a layer is too many. What is waited for
    are Cholesky tests and what these leave to decompose.
    """
    torch.manual_seed(0)
    model = create_model("wrn16-1", num_classes=4, image_size=16, layer=layer, rank=6)
    cards.allowed = None
    model.to("cuda")
    clip = Clip(1.0)
    clip.bind(model, 16, in_channels=3)
    clip.project(model, 1, force=True)
    cards.take()
    clip.project(model, 2, force=True)
    syncs = cards.take()
    assert [sync for sync in syncs if sync.why == "host to device"] == []
    assert sum(syncs.values()) <= most


# --- what a pretended card is worth ---


@pytest.mark.slow
def test_its_numbers_are_the_processors(tmp_path: Path) -> None:
    """But for Winograd's way, and what is chosen by the kind of device: a card has rates in float32."""
    augmentation = {"flip": True, "pad": 1}
    training = {"convolutions": "direct", "optimizer": "adam", "lr": 2**-7, "schedule": "constant"}
    config = trial(layer="tt", training=training, augmentation=augmentation)
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
            "write number": lambda: torch.zeros(()).add_(labels.sum()),
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
    spoiled(monkeypatch, way)
    with pytest.raises(AssertionError, match=r"'training.loop:fit': \d+|test_card:"):
        trained(cards, trial(), tmp_path, whole=False)


def test_a_step_into_which_nothing_is_put_is_sound(
    cards: PretendedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial that is spoiled above and below, behind the same functions."""
    spoiled(monkeypatch, "none")
    assert len(trained(cards, trial(), tmp_path, whole=False)) == 2


@pytest.mark.parametrize("way", ["labels", "sum", "write host", "write number", "numpy", "generator", "images"])
def test_a_tensor_on_the_wrong_device_is_seen(
    cards: PretendedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    spoiled(monkeypatch, way)
    with pytest.raises(WrongDevice):
        trained(cards, trial(), tmp_path, whole=False)


def test_what_torch_waits_for_within_an_operation_is_seen(cards: PretendedCards) -> None:
    """Where it reads a number by itself, no operation of its own says so."""
    square = torch.randn(4, 4, device="cuda")
    number: Any = square.abs().sum()  # torch's types have no tensor where a number is due
    ways: dict[str, Callable[[], object]] = {
        "allclose": lambda: torch.allclose(square, square),
        "multinomial": lambda: square.abs().multinomial(2),
        "histc": lambda: square.histc(),
        "exponential": lambda: torch.linalg.matrix_exp(square),
        "inverse": lambda: torch.linalg.pinv(square),
        "checked inverse": lambda: torch.linalg.inv_ex(square, check_errors=True),
        "list": lambda: torch.tensor([number, 1.0]),
        "range": lambda: torch.arange(number, device="cuda"),
        "full": lambda: torch.full((2,), number, device="cuda"),
        "normal": lambda: torch.normal(square, square.abs()),
        "normal of a number": lambda: torch.normal(0.0, square.abs()),
        "pickle": lambda: pickle.dumps(square),
        "save": lambda: torch.save({"square": square}, io.BytesIO()),
    }
    cards.allowed = None
    cards.take()
    assert [name for name, way in ways.items() if (way(), cards.take())[1] == {}] == []
    with pytest.raises(WrongDevice, match="stack of tensors of several devices"):
        torch.stack([square[0, 0], torch.tensor(1.0)])


def test_whoever_may_not_wait_is_named(cards: PretendedCards) -> None:
    tensor = torch.ones(3, device="cuda")
    assert (str(tensor.device), tensor.is_cuda, str((tensor + 1).device)) == ("cuda:0", True, "cuda:0")
    with pytest.raises(UnexpectedSync, match="waits for the card: a number is read"):
        tensor.sum().item()
    assert not torch.cuda.is_current_stream_capturing(), "which Adam asks for in torch 2.9"
    assert tensor[:0].new_zeros(2).is_cuda
    made = torch.ops.aten.ones.default([3])
    assert [made.is_cuda, (made + tensor).is_cuda, made.is_cuda] == [False, True, True], "as an operation of a card may"
    assert not torch.zeros(2).is_cuda
    assert nn.Linear(2, 2).to("meta").weight.device.type == "meta"
    layer = nn.Linear(2, 2)
    pinned = layer.weight.detach().pin_memory()
    assert (pinned.is_pinned(), layer.weight.is_pinned()) == (True, False)
    assert pinned.to("cuda", non_blocking=True).is_cuda, "behind: nobody waits"
    with pytest.raises(UnexpectedSync, match="host to device"):
        layer.to("cuda", non_blocking=True)
