"""Empirical constants: exact for linear networks, never above the certified bound, found in the space they name."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.examples import deep, examples
from ttsv.certification.certificates import lipschitz_bound
from ttsv.errors import ConfigError, DataError
from ttsv.metrics.lipschitz import Method, empirical_lipschitz
from ttsv.models import create_model
from ttsv.models.build import Normalize

STD = (0.2, 0.5)


def linear(seed: int = 0) -> tuple[nn.Sequential, Tensor]:
    """A classifier of (2, 3, 3) images behind a normalisation, and its matrix with respect to pixels."""
    torch.manual_seed(seed)
    model = nn.Sequential(Normalize((0.3, 0.4), STD), nn.Flatten(), nn.Linear(18, 4))
    weight = model[2].get_parameter("weight").detach().double().reshape(4, 2, 9) / torch.tensor(STD).double()[:, None]
    return model, weight.flatten(1)


@examples(20)
@given(seed=st.integers(0, 2**16), radius=st.sampled_from([0.01, 0.5, 3.0]))
def test_linear_networks_are_exact(seed: int, radius: float) -> None:
    model, weight = linear(seed)
    images, labels = torch.rand(6, 2, 3, 3), torch.arange(6) % 4
    gradient = (model(images).softmax(1) - nn.functional.one_hot(labels, 4)).detach().double() @ weight
    for norm, step in (("L2", gradient), ("Linf", gradient.sign())):
        found = empirical_lipschitz(model, images, labels, radius=radius, norm=norm)  # type: ignore[arg-type]
        truth = (step @ weight.T).norm(dim=1) / step.norm(dim=1)
        torch.testing.assert_close(found.values, truth, rtol=1e-4, atol=1e-6)
        assert found.maximum == found.values.max().item()
    ascended = empirical_lipschitz(model, images, labels, radius=radius, method="ascent", steps=300)
    largest = torch.linalg.matrix_norm(weight, 2).item()
    assert ascended.maximum == pytest.approx(largest, rel=1e-3)
    assert ascended.maximum <= float(lipschitz_bound(model, 3))


@pytest.mark.parametrize("scale", [30.0, 1e3])
def test_the_step_is_the_cross_entropys_where_the_network_is_sure(scale: float) -> None:
    model, weight = linear()
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.mul_(scale)
    images = torch.rand(20, 2, 3, 3)
    logits = model.double()(images.double()).detach()
    labels = logits.argmax(1)
    assert logits.topk(2).values.diff().abs().max() > 20
    # Its direction: what the other classes share, less the label.
    own = nn.functional.one_hot(labels, 4)
    step = (logits.masked_fill(own.bool(), -math.inf).softmax(1) - own) @ weight
    found = empirical_lipschitz(model.float(), images, labels)
    truth = scale * (step @ weight.T).norm(dim=1) / step.norm(dim=1)
    torch.testing.assert_close(found.values, truth, rtol=1e-4, atol=0)


def test_normalised_values_are_those_behind_the_normalisation() -> None:
    model, _ = linear()
    images, labels = torch.rand(5, 2, 3, 3), torch.arange(5) % 4
    inner = model[2].get_parameter("weight").detach().double()
    options: dict[str, Any] = {"method": "ascent", "steps": 200}
    normalised = empirical_lipschitz(model, images, labels, space="normalised", **options)
    assert normalised.maximum == pytest.approx(torch.linalg.matrix_norm(inner, 2).item(), rel=1e-3)
    assert normalised.space == "normalised"
    assert normalised.maximum <= float(lipschitz_bound(model, 3)) * normalised.longest_unit
    # With one std for all channels the two spaces differ by that factor alone, if the steps are of equal length.
    equal = nn.Sequential(Normalize((0.5,), (0.25,)), nn.Flatten(), nn.Linear(18, 4), nn.Tanh())
    in_pixels = empirical_lipschitz(equal, images, labels, radius=0.125)
    behind = empirical_lipschitz(equal, images, labels, radius=0.5, space="normalised")
    torch.testing.assert_close(in_pixels.values, behind.values * 4, rtol=1e-5, atol=0)


def test_orthogonal_networks_reach_their_bound() -> None:
    torch.manual_seed(0)
    model = create_model("lipconvnet-5", num_classes=8, layer="soc", width=2, in_channels=1, mean=(0.5,), std=(0.5,))
    images, labels = torch.rand(4, 1, 32, 32), torch.arange(4)
    bound = float(lipschitz_bound(model, 32))
    found = empirical_lipschitz(model, images, labels, method="ascent", steps=10)
    assert 0.3 * bound < found.maximum <= bound
    assert bound == pytest.approx(2, rel=1e-6)
    normalised = empirical_lipschitz(model, images, labels, space="normalised")
    assert 0 < normalised.maximum <= bound * normalised.longest_unit == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("radius", [1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("precision", ["model", "float64"])
def test_what_float64_rounds_is_no_slope(radius: float, precision: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)))
    images, labels = torch.rand(50, 1, 4, 4), torch.arange(50) % 16
    bound = float(lipschitz_bound(model, 4, in_channels=1))
    assert empirical_lipschitz(model, images, labels, radius=radius, precision=precision).maximum <= bound


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "small-cnn": lambda: create_model("small-cnn", num_classes=4, image_size=8),
    "small-cnn tt": lambda: create_model("small-cnn", num_classes=4, image_size=8, layer="tt", rank=8),
    "wrn10-1": lambda: create_model("wrn10-1", num_classes=4, image_size=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [deep(name) if name == "wrn10-1" else name for name in NETWORKS])
@examples(3)
@given(seed=st.integers(0, 2**16), radius=st.sampled_from([1e-3, 0.5, 5.0]))
def test_never_above_the_certified_bound_and_ascent_no_less_than_fgsm(name: str, seed: int, radius: float) -> None:
    torch.manual_seed(seed)
    model = NETWORKS[name]().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images, labels = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8), torch.arange(5) % 4
    bound = float(lipschitz_bound(model, 8))
    simple = empirical_lipschitz(model, images, labels, radius=radius)
    strong = empirical_lipschitz(model, images, labels, radius=radius, method="ascent", steps=8)
    assert (strong.values >= simple.values * (1 - 1e-3)).all()
    assert strong.values.mean() > simple.values.mean()
    assert 0 < strong.maximum <= bound
    normalised = empirical_lipschitz(model, images, labels, radius=radius, space="normalised")
    assert 0 < normalised.maximum <= bound * normalised.longest_unit < bound
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_constant_networks_do_not_move() -> None:
    model, _ = linear()
    with torch.no_grad():
        model[2].get_parameter("weight").zero_()
    images, labels = torch.rand(3, 2, 3, 3), torch.arange(3)
    methods: tuple[Method, ...] = ("fgsm", "ascent")
    for method in methods:
        found = empirical_lipschitz(model, images, labels, method=method)
        assert found.values.tolist() == [0, 0, 0]
        assert found.maximum == 0


class Constant(nn.Module):
    """Logits that do not depend on the image, with or without a gradient of their own."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([1.0, 0.0, 2.0]), requires_grad=trained)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits.expand(len(images), -1)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("method", ["fgsm", "ascent"])
def test_networks_that_ignore_the_image_do_not_move(method: Method, trained: bool) -> None:
    found = empirical_lipschitz(Constant(trained=trained), torch.rand(3, 2, 3, 3), torch.arange(3), method=method)
    assert found.values.tolist() == [0, 0, 0]


def test_steps_without_a_gradient_are_drawn_from_the_seed() -> None:
    """ReLU(-1 - x) is flat at every image; only a long random step may leave the flat part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[1].get_parameter("bias").fill_(-3)
    images, labels = torch.rand(6, 1, 2, 2), torch.zeros(6, dtype=torch.long)
    assert empirical_lipschitz(model, images, labels).maximum == 0
    first, again, other = (empirical_lipschitz(model, images, labels, radius=30, seed=seed) for seed in (1, 1, 2))
    assert first.maximum > 0
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, other.values)


def test_batches_do_not_matter_and_float64_searches() -> None:
    model, _ = linear()
    images, labels = torch.rand(7, 2, 3, 3), torch.arange(7) % 4
    whole = empirical_lipschitz(model, images, labels, method="ascent")
    parts = empirical_lipschitz(model, images, labels, method="ascent", batch_size=3)
    torch.testing.assert_close(whole.values, parts.values, rtol=1e-5, atol=0)
    exact = empirical_lipschitz(model, images, labels, precision="float64")
    torch.testing.assert_close(exact.values, empirical_lipschitz(model, images, labels).values, rtol=1e-4, atol=0)
    assert exact.values.dtype == torch.float64


def test_clamped_steps_stay_among_images() -> None:
    """f(x) = x pays in full inside the cube; along a face that the step would leave it cannot move."""

    seen: list[tuple[float, float]] = []

    class Recorder(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append((images.min().item(), images.max().item()))
            return images.flatten(1)

    images, labels = torch.tensor([[[[0.0, 1.0]]], [[[0.1, 0.5]]]]), torch.tensor([0, 1])
    methods: tuple[Method, ...] = ("fgsm", "ascent")
    for method in methods:
        seen.clear()
        found = empirical_lipschitz(Recorder(), images, labels, clamp=True, method=method)
        assert min(low for low, _ in seen) > -1e-6
        assert max(high for _, high in seen) < 1 + 1e-6
        # The ratio of the identity is 1 wherever there is a step. FGSM would leave the first image's corner.
        assert found.values[1].item() == pytest.approx(1)
        if method == "fgsm":
            assert found.values[0].item() == 0
        seen.clear()
        empirical_lipschitz(Recorder(), images, labels, method=method)
        assert max(high for _, high in seen) > 1.1


def test_histogram() -> None:
    model, _ = linear()
    found = empirical_lipschitz(model, torch.rand(40, 2, 3, 3), torch.arange(40) % 4)
    counts, edges = found.histogram(7)
    assert len(counts) == 7
    assert len(edges) == 8
    assert sum(counts) == 40
    assert edges[0] == found.values.min().item()
    assert edges[-1] == found.maximum
    inside = (found.values >= edges[2]) & (found.values < edges[3])
    assert counts[2] == inside.sum().item()
    with pytest.raises(ConfigError, match="bins = 0"):
        found.histogram(0)


@pytest.mark.parametrize("values", [[0.0], [2.0, 2.0], [3e37], [2e7, 2e7 + 2], [1e30, 1e30]])
def test_a_histogram_of_values_too_near_each_other_for_its_bins(values: list[float]) -> None:
    found = replace(empirical_lipschitz(linear()[0], IMAGES, LABELS), values=torch.tensor(values))
    counts, edges = found.histogram()
    assert sum(counts) == len(values)
    assert len(set(edges)) == 31
    assert edges[0] <= found.values.min() <= found.values.max() <= edges[-1]


IMAGES, LABELS = torch.rand(2, 2, 3, 3), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": 0}, "radius = 0"),
        ({"radius": -0.5}, "radius = -0.5"),
        ({"radius": math.nan}, "radius = nan"),
        ({"radius": "a"}, "radius = 'a'"),
        ({"batch_size": 1.5}, "batch_size = 1.5"),
        ({"space": "cubes"}, "space = 'cubes'"),
        ({"method": "luck"}, "method = 'luck'"),
        ({"norm": "L1"}, "norm = 'L1'"),
        ({"norm": "Linf", "method": "ascent"}, "norm = 'Linf'"),
        ({"precision": "float16"}, "precision = 'float16'"),
        ({"steps": 0}, "steps = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"seed": True}, "seed = True"),
        ({"seed": 1.5}, "seed = 1.5"),
        ({"seed": 2**70}, f"seed = {2**70}: must be a whole number"),
        ({"seed": -(2**70)}, f"seed = -{2**70}"),
        ({"labels": LABELS[:1]}, "want"),
        ({"labels": LABELS + 7}, "want 0 to 3"),
        ({"images": IMAGES * 3}, r"\[0, 1\]"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "n >= 1"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"images": IMAGES, "labels": LABELS} | options
    with pytest.raises((ConfigError, DataError), match=message):
        empirical_lipschitz(linear()[0], **arguments)


def test_what_the_normalised_space_needs_and_what_is_not_finite() -> None:
    with pytest.raises(ConfigError, match="space = 'normalised'"):
        empirical_lipschitz(nn.Sequential(nn.Flatten(), nn.Linear(18, 4)), IMAGES, LABELS, space="normalised")
    model, _ = linear()
    with torch.no_grad():
        model[2].get_parameter("bias")[0] = math.inf
    with pytest.raises(DataError, match="not finite"):
        empirical_lipschitz(model, IMAGES, LABELS)
