"""Spectra over training: right, of the right moment, and without a trace in the training."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.examples import deep
from ttsv.config.training import TrainingConfig
from ttsv.config.trial import TrialConfig
from ttsv.constraints import Clip, Compose, Constraint, Divide, Orthogonal, Unconstrained
from ttsv.data import DATASETS
from ttsv.data.loading import Dataset, Split
from ttsv.models import create_model
from ttsv.results import SPECTRUM_SHARES, EpochMetrics, LayerSpectrum
from ttsv.runtime.determinism import random_state
from ttsv.spectral.network import model_spectra
from ttsv.training.checkpoint import Checkpoints
from ttsv.training.loop import fit
from ttsv.training.spectra import SpectraWatch, quantiles

CPU = torch.device("cpu")
DELTA = 0.5


def noise(count: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand((count, 1, 8, 8), generator=generator)
    return Split(images, torch.randint(0, 10, (count,), generator=generator))


DATA = Dataset(
    info=DATASETS["digits"], train=noise(22, 1), validation=noise(10, 2), test=noise(10, 3), sha256="", split={}
)
STEPS = 3
"""Of an epoch: 22 images by 8."""


def config(every: int | None, epochs: int = 4, **training: Any) -> TrialConfig:
    values = {"epochs": epochs, "batch_size": 8, "lr": 0.3, "spectra_every": every, **training}
    return TrialConfig(dataset="digits", model="small-cnn", training=TrainingConfig(**values))


def network(layer: str = "dense", rank: int | None = None) -> nn.Module:
    with random_state(7, CPU):
        return create_model("small-cnn", num_classes=10, in_channels=1, image_size=8, layer=layer, rank=rank)


def trained(
    model: nn.Module, asked: TrialConfig, constraint: Constraint, checkpoints: Checkpoints | None = None
) -> list[EpochMetrics]:
    return list(fit(model, DATA, asked, constraint, device=CPU, checkpoints=checkpoints))


def plain(epochs: Sequence[EpochMetrics]) -> list[EpochMetrics]:
    return [replace(one, seconds=0, constraint_seconds=0, spectra=None) for one in epochs]


def weights(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


@given(data=st.data())
def test_quantiles_are_those_of_the_dense_operator(data: st.DataObject, dense: Any) -> None:
    case = data.draw(dense.drawn_convolutions())
    values = dense.periodic_values(case)
    conv = getattr(nn, f"Conv{len(case.input_size)}d")(
        case.groups * case.kernel.shape[1],
        case.kernel.shape[0],
        tuple(case.kernel.shape[2:]),
        bias=False,
        padding_mode="circular",
        **case.options,
    ).double()
    conv.weight.data.copy_(case.kernel)
    watch = SpectraWatch(conv, None, 1, case.input_size)
    watch._sizes = {"": case.input_size}
    (found,) = watch._quantiles([{"": conv}])[0]
    expected = values.quantile(torch.tensor(SPECTRUM_SHARES, dtype=torch.float64))
    assert torch.allclose(
        torch.tensor(found, dtype=torch.float64), expected, rtol=1e-9, atol=1e-9 * values.max().item()
    )


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_quantiles_are_torchs(values: list[float], shares: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    expected = tensor.quantile(torch.tensor(shares, dtype=torch.float64))
    assert torch.allclose(quantiles(tensor.reshape(1, -1), shares), expected, rtol=1e-12, atol=1e-12)


CONSTRAINTS: dict[str, Callable[[], Constraint]] = {
    "none": Unconstrained,
    "clip": lambda: Clip(DELTA, every=2),
    "clip at the end": lambda: Clip(DELTA, every=STEPS),
    "divide": lambda: Divide(conv=DELTA, power_iterations=1, operator="periodic"),
    "both": lambda: Compose(Orthogonal(0.1), Clip(DELTA, every=4)),
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize(("layer", "rank"), [("dense", None), ("tt", 4), ("soc", None)])
def test_a_training_that_is_watched_has_the_same_bits(layer: str, rank: int | None, kind: str) -> None:
    if layer == "soc" and kind != "none":
        pytest.skip("skew layers have no kernel that a projection could write")
    lone, watched = network(layer, rank), network(layer, rank)
    before = torch.random.get_rng_state()
    epochs = 1 if layer == "soc" else 4  # the spectra of its exponentials take seconds
    alone = trained(lone, config(None, epochs), CONSTRAINTS[kind]())
    seen = trained(watched, config(1, epochs), CONSTRAINTS[kind]())
    assert torch.equal(before, torch.random.get_rng_state())
    assert plain(alone) == plain(seen)
    assert all(map(torch.equal, weights(lone), weights(watched)))
    assert all(one.spectra is None for one in alone)
    assert all(one.spectra for one in seen)


@pytest.mark.parametrize(("layer", "rank"), [deep("bcop", None), ("aoc-tt", 4), ("aol", None), ("cayley", None)])
def test_so_has_one_of_layers_to_compare_with(layer: str, rank: int | None) -> None:
    lone, watched = network(layer, rank), network(layer, rank)
    assert plain(trained(lone, config(None, 2), Unconstrained())) == plain(
        trained(watched, config(1, 2), Unconstrained())
    )
    kept, seen = lone.state_dict(), watched.state_dict()
    assert all(torch.equal(kept[name], seen[name]) for name in kept)


def test_it_looks_at_the_first_the_last_and_every_so_many_epochs() -> None:
    found = trained(network(), config(3, epochs=8), Unconstrained())
    assert [one.epoch for one in found if one.spectra] == [1, 3, 6, 8]


class Noting(Clip):
    """A clip that notes the network's spectra right before and right after it."""

    def __init__(self, every: int) -> None:
        super().__init__(DELTA, every=every)
        self.seen: dict[int, tuple[Any, Any]] = {}

    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        before = {name: values.clone() for name, values in model_spectra(model, (8, 8)).items()}
        super().project(model, step, force=force)
        if not force:
            self.seen[step] = before, {name: values.clone() for name, values in model_spectra(model, (8, 8)).items()}


@pytest.mark.parametrize(("every", "last"), [(1, {1: 3, 2: 6, 3: 9}), (2, {1: 2, 2: 6, 3: 8}), (5, {2: 5})])
def test_they_are_those_before_and_after_the_last_projection_of_the_epoch(every: int, last: dict[int, int]) -> None:
    constraint = Noting(every)
    for one in trained(network(), config(1, epochs=3), constraint):
        assert one.spectra is not None
        step = last.get(one.epoch)
        before, after = constraint.seen[step if step is not None else one.epoch * STEPS]
        for layer in one.spectra:
            assert layer.values == tuple(quantiles(after[layer.name]).tolist())
            assert layer.before == (None if step is None else tuple(quantiles(before[layer.name]).tolist()))
        if step is not None:
            assert max(layer.values[-1] for layer in one.spectra) <= DELTA * (1 + 1e-6)
            assert max(layer.before[-1] for layer in one.spectra if layer.before) > DELTA * (1 + 1e-4)


def test_of_every_epoch_that_is_looked_at_both_sides_of_a_projection_are() -> None:
    found = trained(network(), config(3, epochs=5), Clip(DELTA, every=1))
    watched = {one.epoch: one.spectra for one in found if one.spectra is not None}
    assert list(watched) == [1, 3, 5]
    assert all(layer.before is not None for layers in watched.values() for layer in layers)


def test_a_training_that_was_killed_gives_the_same_spectra(tmp_path: Path) -> None:
    whole = trained(network(), config(2), Clip(DELTA, every=2))
    with Checkpoints(tmp_path, {}) as checkpoints:
        begun = fit(network(), DATA, config(2), Clip(DELTA, every=2), device=CPU, checkpoints=checkpoints)
        first = [next(begun), next(begun)]
        begun.close()
        rest = trained(network(), config(2), Clip(DELTA, every=2), checkpoints)
    assert [one.spectra for one in first + rest] == [one.spectra for one in whole]
    assert [one.epoch for one in rest] == [3, 4]


def test_no_device_is_waited_for_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    watch = SpectraWatch(model, 1, 4, (8, 8))
    reads: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            reads.append(name)
            return original(*arguments)

        return read

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__"):
        monkeypatch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
    watch.begin(1, Clip(DELTA), 0, 100)
    for step in range(1, 101):
        watch.before_projection(step)
        watch.after_projection(step)
    watch.end(1)
    assert reads == []
    found = watch.take()
    assert found is not None
    assert "tolist" in reads
    assert [len(layer.values) for layer in found] == [len(SPECTRUM_SHARES)] * len(found)
    assert watch.take() is None


def test_weights_that_are_not_finite_have_none() -> None:
    model = network()
    watch = SpectraWatch(model, 1, 4, (8, 8))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    watch.begin(1, Unconstrained(), 0, 1)
    watch.end(1)
    assert watch.take() is None


def test_epochs_come_back_from_plain_data() -> None:
    from dataclasses import asdict

    (first, *_) = trained(network(), config(1, epochs=1), Clip(DELTA, every=1))
    assert EpochMetrics.from_dict(asdict(first)) == first
    assert isinstance(first.spectra, tuple)
    assert isinstance(first.spectra[0], LayerSpectrum)
    assert EpochMetrics.from_dict(asdict(replace(first, spectra=None))).spectra is None


def test_it_is_in_no_fingerprint() -> None:
    asked, silent = config(3), config(None)
    assert asked != silent
    assert asked.fingerprint() == silent.fingerprint()
    assert asked.cell() == silent.cell()
    assert asked.canonical().training.spectra_every == 3
