"""What a card must give: run on a real one by `pytest -m gpu`, and in every run on a pretended one at the same size."""

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.examples import deep
from ttsv.certification.certificates import lipschitz_bound
from ttsv.config.trial import TrialConfig
from ttsv.metrics import cost
from ttsv.models import create_model
from ttsv.models.conv_shape import LAYERS
from ttsv.results import EpochMetrics, TrialResult
from ttsv.runtime.determinism import CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACE
from ttsv.spectral import conv_norm_bounds, model_spectra
from ttsv.spectral.singular_values import conv_norm
from ttsv.training.checkpoint import load_network
from ttsv.training.stopwatch import Stopwatch
from ttsv.trial import run_trial

if TYPE_CHECKING:
    from tests.ttsv.conftest import Cards, Dense

# cuBLAS reads it once, when the first of these tests uses it.
os.environ.setdefault(CUBLAS_WORKSPACE, DETERMINISTIC_WORKSPACE)

ROOT = Path(__file__).parents[2]
MOST_ARE_DEEP = [layer if layer in ("dense", "tt") else deep(layer) for layer in LAYERS]
BASE: dict[str, Any] = {
    "dataset": "synthetic:3x8x8:4:80",
    "model": "small-cnn",
    "rank": 6,
    "training": {"epochs": 2, "steps": 3, "batch_size": 8, "lr": 0.01, "convolutions": "direct"},
}
CLIP: dict[str, Any] = {"constraint": "clip", "delta": 1.0, "clipping": {"every": 2}}


def trial(**changes: Any) -> TrialConfig:
    return TrialConfig.from_dict({**BASE, **changes, "training": BASE["training"] | changes.pop("training", {})})


def on(device: torch.device | str, config: TrialConfig, folder: Path) -> Generator[Any, None, None]:
    return run_trial(config, data_dir=folder / "data", folder=folder / "trial", device=str(device))


def result_of(run: Generator[Any, None, None]) -> TrialResult:
    *_, result = run
    assert isinstance(result, TrialResult)
    return result


def epochs_of(run: Generator[Any, None, None], count: int = 2) -> list[EpochMetrics]:
    """Trains, and leaves before the evaluation."""
    found = [next(run) for _ in range(count)]
    run.close()
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttsv.metrics.cost.inference_seconds", partial(cost.inference_seconds, budget=0.0))
    monkeypatch.setattr("ttsv.evaluation.evaluated.write_plots", lambda *_, **__: {})


@pytest.mark.slow
@pytest.mark.parametrize("layer", MOST_ARE_DEEP)
def test_training_is_that_of_the_processor(card: "Cards", tmp_path: Path, layer: str) -> None:
    """In float32: TensorFloat-32 would be off by 1e-3 after the first step.

    Of BCOP and AOC as far as the first epoch: weights that differ by 1e-7 make their losses differ by 1e-3 in the next.
    """
    config = trial(layer=layer, lambda_ort=0.1)
    epochs = 1 if layer.startswith(("bcop", "aoc")) else 2
    ours = epochs_of(on(card.device, config, tmp_path / "card"), epochs)
    theirs = epochs_of(on("cpu", config, tmp_path / "processor"), epochs)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.train_loss == pytest.approx(expected.train_loss, rel=1e-3)
        assert found.val_loss == pytest.approx(expected.val_loss, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("training", [{"precision": "bf16"}, {"precision": "fp16"}, {"tf32": True}])
def test_less_precision_is_near(card: "Cards", tmp_path: Path, training: dict[str, Any]) -> None:
    (found, _) = epochs_of(on(card.device, trial(training=training), tmp_path / "card"))
    (expected, _) = epochs_of(on("cpu", trial(), tmp_path / "processor"))
    assert found.train_loss == pytest.approx(expected.train_loss, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", deep("bf16")])
@pytest.mark.parametrize("layer", [deep("dense"), "tt", deep("soc")])
def test_a_deterministic_trial_goes_on_bit_for_bit(card: "Cards", tmp_path: Path, layer: str, precision: str) -> None:
    training = {"deterministic": True, "ema": 0.9, "precision": precision}
    config = trial(layer=layer, training=training, **({} if layer == "soc" else CLIP))
    whole = result_of(on(card.device, config, tmp_path / "whole"))
    first = on(card.device, config, tmp_path / "stopped")
    next(first)
    first.close()
    rest = result_of(on(card.device, config, tmp_path / "stopped"))
    assert rest.artifacts["model"].read_bytes() == whole.artifacts["model"].read_bytes()


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "clip": {"constraint": "clip", "delta": 1.0, "clipping": {"every": 2}},
    "zero-padded": {"constraint": "clip", "delta": 1.0, "clipping": {"every": 2, "operator": "zero-padded"}},
    "exact": {"constraint": "divide", "division": {"conv": 1.0, "power_iterations": None}},
    "divide": {"constraint": "divide", "division": {"conv": 1.0, "linear": 1.0, "batch_norm": 2.0}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "kind"),
    [*(("tt", kind) for kind in CONSTRAINTS), *map(deep, ["dense"] * len(CONSTRAINTS), CONSTRAINTS)],
)
def test_every_constraint_holds(card: "Cards", tmp_path: Path, layer: str, kind: str) -> None:
    """By what is reported, and by what the processor finds in the network that was saved."""
    constraint, limit = CONSTRAINTS[kind], math.inf if kind == "divide" else 1.0
    result = result_of(on(card.device, trial(layer=layer, training={"epochs": 1}, **constraint), tmp_path))
    assert all(one["projection"]["after"] <= limit * (1 + 1e-5) for one in result.layers if one["projection"])
    if kind == "clip":
        model = load_network(result.artifacts["model"]).model.double()
        assert max(values.max().item() for values in model_spectra(model, 8).values()) <= limit * (1 + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layer", MOST_ARE_DEEP)
def test_spectra_and_bounds_are_those_of_the_processor(card: "Cards", layer: str) -> None:
    torch.manual_seed(0)
    model = create_model("small-cnn", num_classes=4, in_channels=3, image_size=8, layer=layer, rank=6).eval()
    expected = model_spectra(model, 8)
    bound = lipschitz_bound(model, 8).value
    model.to(card.device)
    found = model_spectra(model, 8)
    for name, values in expected.items():
        assert (found[name].cpu() - values).abs().max() <= 1e-4 * values.max()
    assert lipschitz_bound(model, 8).value == pytest.approx(bound, rel=1e-2)


@pytest.mark.parametrize("stride", [1, 2])
def test_norms_lie_within_their_bounds(card: "Cards", dense: "Dense", stride: int) -> None:
    kernel = dense.gaussian(8, 6, 3, 3)
    exact = conv_norm(kernel, 8, stride=stride)
    on_card = kernel.to(card.device)
    assert conv_norm(on_card, 8, stride=stride) == pytest.approx(exact, rel=1e-9)
    bounds = conv_norm_bounds(on_card, 8, stride=stride, padding=1)
    theirs = conv_norm_bounds(kernel, 8, stride=stride, padding=1)
    assert (bounds.lower, bounds.upper) == pytest.approx((theirs.lower, theirs.upper), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["L2", deep("Linf")])
def test_attacks_break_what_they_break_on_the_processor(card: "Cards", tmp_path: Path, norm: str) -> None:
    """With a radius that breaks everything at once, and one that breaks nothing."""
    for eps, left in ((1e-6, None), (10.0, 0.0)):
        evaluation = {"attack": "pgd", "attack_norm": norm, "attack_eps": eps, "attack_images": 4, "certified": True}
        config = trial(evaluation=evaluation, training={"epochs": 1})
        result = result_of(on(card.device, config, tmp_path / f"{eps}"))
        assert result.valid
        assert left is None or result.pgd_accuracy == left


def test_no_step_waits_for_the_card(card: "Cards", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own account: three times as many steps an epoch wait as often, once they are a graph."""
    waited = []
    for steps in (2, 6):
        run = on(card.device, trial(layer="tt", training={"steps": steps, "epochs": 4}), tmp_path / str(steps))
        next(run), next(run)
        waited.append(card.synchronizations(lambda run=run: next(run)))  # type: ignore[misc]
        run.close()
    assert waited[0] == waited[1] > 0


@pytest.mark.slow
def test_trials_of_one_process_leave_no_memory(card: "Cards", tmp_path: Path) -> None:
    """As an actor runs them, one after the other, the last steps of each as a graph."""
    held = []
    for seed in range(50 if card.real else 4):
        epochs_of(on(card.device, trial(seed=seed, layer="tt", training={"steps": 5}, **CLIP), tmp_path / str(seed)), 1)
        gc.collect()
        held.append(torch.cuda.memory_allocated(card.device))
    # A mebibyte, as what libraries hold for themselves may be laid out anew; fifty networks are many times that.
    assert max(held[1:]) <= held[1] + (1 << 20), "what the first trial left, such as tables, the others use"


BESIDE = """
import contextlib, json, sys, torch
from pathlib import Path
from tests.pretended import PretendedCards
from ttsv.config.trial import TrialConfig
from ttsv.trial import run_trial
with contextlib.nullcontext() if sys.argv[1] == "real" else PretendedCards():
    torch.cuda.set_per_process_memory_fraction(0.25)
    folder = Path(sys.argv[3])
    run = run_trial(TrialConfig.from_dict(json.loads(sys.argv[2])), data_dir=folder / "data", folder=folder / "trial",
                    device="cuda")
    print([next(run).train_loss for _ in range(2)])
    run.close()
"""


@pytest.mark.deep
def test_two_trials_share_a_card(card: "Cards", tmp_path: Path) -> None:
    arguments = ["real" if card.real else "pretended", json.dumps(trial(training={"deterministic": True}).to_dict())]
    program = [sys.executable, "-W", "ignore", "-c", BESIDE, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen([*program, str(tmp_path / name)], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        for name in ("one", "other")
    ]
    found = [one.communicate(timeout=250)[0].splitlines()[0] for one in both]
    assert found[0] == found[1]


def test_a_stopwatch_reads_the_card_it_was_made_for(card: "Cards") -> None:
    watch = Stopwatch(card.device)
    assert watch.read() == 0
    for _ in range(2):
        with watch:
            torch.ones(64, 64, device=card.device).square()
    assert watch.read() > 0
    assert watch.read() == 0
