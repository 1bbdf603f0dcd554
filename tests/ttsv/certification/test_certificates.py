"""Bounds against the norms of true Jacobians, certificates against exact radii and against searches."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.examples import deep, examples
from tests.lazily import lazily
from ttsv.certification.certificates import (
    assumed_certified_accuracy,
    assumed_lipschitz,
    certificates,
    certified_accuracy,
    lipschitz_bound,
    shares_beyond,
)
from ttsv.certification.reach import SHORTEST_STEP, Reach
from ttsv.certification.rules import FUNCTIONS
from ttsv.certification.trace import Traced
from ttsv.errors import ConfigError, DataError
from ttsv.layers import SOC, SOCTT, MinMax, TTConv2d
from ttsv.models import create_model
from ttsv.models.build import Normalize
from ttsv.runtime.precision import in_float64

torchvision = lazily("torchvision")


def jacobian_norm(model: nn.Module, pixels: Tensor) -> float:
    """Of the model in float64 at one image (channels, ...)."""
    exact = in_float64(model)
    jacobian = torch.func.jacrev(lambda image: exact(image[None]).flatten())(pixels.double())
    norm: float = torch.linalg.matrix_norm(jacobian.flatten(1), 2).item()
    return norm


def randomize(model: nn.Module, seed: int) -> nn.Module:
    """Weights, biases and statistics of batch norm drawn, so that no activation or scale is trivial."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                for tensor, low, high in (
                    (module.running_mean, -1, 1),
                    (module.running_var, 0.3, 3),
                    (module.weight, -2, 2),
                    (module.bias, -1, 1),
                ):
                    assert isinstance(tensor, Tensor)
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)
    return model


class Applied(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[[Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FACTOR = drawn(3, 1, 1, seed=5)

# Linear functions of (1, 3, 6, 5) images whose rule is exact: the bound is the norm of the dense matrix.
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "avg_pool disjoint": lambda x: functional.avg_pool2d(x, (3, 5)),
    "avg_pool overlapping": lambda x: functional.avg_pool2d(x, 3, 1),
    "avg_pool padded": lambda x: functional.avg_pool2d(x, 3, 2, 1),
    "avg_pool padding not counted": lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool ceil": lambda x: functional.avg_pool2d(x, (3, 2), 2, (1, 0), ceil_mode=True),
    "avg_pool divisor": lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=2),
    "avg_pool negative divisor": lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=-2),
    "avg_pool1d": lambda x: functional.avg_pool1d(x.flatten(2), 7, 3),
    "avg_pool3d": lambda x: functional.avg_pool3d(x[:, None], 2, 1),
    "adaptive_avg_pool": lambda x: functional.adaptive_avg_pool2d(x, (4, 3)),
    "adaptive_avg_pool enlarging": lambda x: functional.adaptive_avg_pool2d(x, (7, 5)),
    "global mean": lambda x: x.mean((2, 3)),
    "mean of one axis, kept": lambda x: torch.mean(x, dim=-1, keepdim=True),
    "mean over channels": lambda x: x.mean(1),
    "sum": lambda x: x.sum((1, 2)),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose and flatten": lambda x: x.transpose(1, 2).flatten(1),
    "view": lambda x: x.view(x.size(0), -1),
    "reshape by attributes": lambda x: x.reshape(x.shape[0], x.shape[1], -1),
    "pixel_unshuffle": lambda x: functional.pixel_unshuffle(x[..., :4], 2),
    "channels flipped, then scaled": lambda x: x.flip(1) * FACTOR,
    "scaled, flipped, scaled": lambda x: (x * FACTOR).flip(1).flip(1) * 2,
    "chunk": lambda x: x.chunk(2, 2)[1],
    "slices": lambda x: x[:, 1:, ::2, 3],
    "zero channels": lambda x: functional.pad(x, (0, 0, 0, 0, 1, 2)),
    "reflect": lambda x: functional.pad(x, (2, 2, 1, 3), mode="reflect"),
    "replicate": lambda x: functional.pad(x, (2, 0, 1, 3), mode="replicate"),
    "circular": lambda x: functional.pad(x, (1, 4, 2, 2), mode="circular"),
    "scalar": lambda x: 3 - x * -2.5,
    "quotient": lambda x: (x - FACTOR) / FACTOR,
    "factor and channel repeated": lambda x: x[:, :1] * torch.ones(4, 1, 1),
    "sum with itself": lambda x: x + x * 2,
    "weighted sum": lambda x: torch.add(x, x, alpha=3),
    "concatenation": lambda x: torch.cat([x, 2 * x, torch.ones(1, 1, 6, 5, dtype=torch.float64)], 1),
    "stack": lambda x: torch.stack([x, x], 2),
    "in place": lambda x: (x * 2).mul_(3).add_(x).sub_(1),
    "index list": lambda x: x[:, [0, 2, 1]],
    "index list with repetitions": lambda x: x[:, [0, 0, 2, -3], 1:],
    "index tensors": lambda x: x[:, torch.tensor([0, 2, 0]), torch.tensor([5, 0, 5])],
    "index of all but some": lambda x: x[..., np.array([0, 4])],
    "index_select": lambda x: torch.index_select(x, 3, torch.tensor([4, 4, 1, 4])),
    "gather": lambda x: x.gather(2, torch.tensor([[0, 5, 0, 1, 2], [0, 5, 0, 1, 1]]).expand(len(x), 3, 2, 5)),
    "expand": lambda x: x[:, :1].expand(-1, 7, -1, -1),
    "repeat": lambda x: x.repeat(1, 2, 1, 3),
    "tile": lambda x: torch.tile(x, (2, 1)),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
    "repeat_interleave, some more often": lambda x: x.repeat_interleave(torch.tensor([1, 4, 2]), 1, output_size=7),
    "flips": lambda x: x.fliplr().rot90(1, (2, 3)).flip(2, 3).moveaxis(1, 2).swapdims(1, 2),
    "half of it, flipped": lambda x: x.flip(3).tensor_split(2, 2)[1],
    "dropout off": lambda x: functional.dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("name", EXACT)
def test_linear_rules_are_exact(name: str) -> None:
    model = Applied(EXACT[name])
    truth = jacobian_norm(model, drawn(3, 6, 5))
    bound = float(lipschitz_bound(model, (6, 5), in_channels=3))
    assert truth * (1 - 1e-12) <= bound <= truth * (1 + 1e-9)


# Rules for functions with a bend: bound from above at every point, and reached at some.
BENT: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "relu": (functional.relu, 1),
    "relu in place": (lambda x: (x * 1).relu_(), 1),
    "leaky_relu": (lambda x: functional.leaky_relu(x, -1.5), 1.5),
    "elu": (lambda x: functional.elu(x, 2.0), 2),
    "clamp": (lambda x: x.clamp(-1, 1), 1),
    "relu6": (functional.relu6, 1),
    "hardtanh": (functional.hardtanh, 1),
    "abs": (torch.abs, 1),
    "tanh": (torch.tanh, 1),
    "sigmoid": (torch.sigmoid, 0.25),
    "hardsigmoid": (functional.hardsigmoid, 1 / 6),
    "softplus": (functional.softplus, 1),
    "selu": (functional.selu, 1.758099340847376),
    "silu": (functional.silu, 1.0998393),
    "mish": (functional.mish, 1.0884981),
    "gelu": (functional.gelu, 1.1289041),
    "gelu tanh": (lambda x: functional.gelu(x, approximate="tanh"), 1.1289930),
    "hardswish": (functional.hardswish, 1.5),
}


@pytest.mark.parametrize("name", BENT)
def test_slopes(name: str) -> None:
    function, slope = BENT[name]
    points = torch.linspace(-9, 9, 180001, dtype=torch.float64).requires_grad_()
    (slopes,) = torch.autograd.grad(function(points).sum(), points)
    assert slopes.abs().max().item() == pytest.approx(slope, rel=1e-3)
    bound = float(lipschitz_bound(Applied(function), (2, 2), in_channels=1))
    assert slopes.abs().max().item() * (1 - 1e-14) <= bound <= 1.001 * slope


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (nn.MaxPool2d(2), 1.0),
        (nn.MaxPool2d(3, 2), 2.0),
        (nn.MaxPool2d(3, 2, 1), 2.0),
        (nn.MaxPool2d(3, 1), 3.0),
        (nn.MaxPool2d((3, 1), 1), math.sqrt(3)),
        (nn.MaxPool2d(2, 1, dilation=2), 2.0),
        (nn.MaxPool2d(2, 3), 1.0),
        (nn.MaxPool2d(3, 2, ceil_mode=True), 2.0),
        (nn.AdaptiveMaxPool2d(1), 1.0),
        (nn.AdaptiveMaxPool2d(5), 2.0),
    ],
    ids=repr,
)
def test_max_pooling_is_exact_where_a_pixel_wins_all_its_windows(pool: nn.Module, expected: float) -> None:
    bound = float(lipschitz_bound(pool, 8, in_channels=2))
    assert bound == pytest.approx(expected, rel=1e-9)
    assert bound >= expected
    # One large pixel in each place in turn: the place that most windows see shows the norm.
    norms = []
    for place in range(64):
        image = torch.zeros(2, 64, dtype=torch.float64)
        image[:, place] = 1
        norms.append(jacobian_norm(pool, image.reshape(2, 8, 8)))
    assert max(norms) == pytest.approx(expected, rel=1e-12)


CONVOLUTIONS = [
    nn.Conv2d(3, 4, 3, padding=1),
    nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 3)),
    nn.Conv2d(4, 6, 3, padding=1, groups=2),
    nn.Conv2d(3, 5, 1, stride=2, padding=1),
    nn.Conv2d(6, 6, 1, groups=3),
    nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(3, 1)),
    nn.Conv2d(2, 3, 3, padding="valid"),
    nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    nn.Conv2d(2, 3, 3, padding=1, stride=2, padding_mode="circular"),
    nn.Conv2d(2, 3, 2, padding=1, padding_mode="circular"),
    nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"),
    nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"),
    TTConv2d(5, 4, 3, 2, padding=1),
    TTConv2d(5, 4, (3, 2), (3, 2), stride=2, padding=1, dilation=2),
    TTConv2d(5, 4, 2, 2, padding="same"),
    TTConv2d(5, 4, 3, 2, padding=1, padding_mode="circular"),
    TTConv2d(5, 4, 3, 2, padding=1, padding_mode="reflect"),
    TTConv2d(5, 4, 1, 2, stride=2),
    SOCTT(4, 6, 3, 3, 2),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=repr)
def test_convolutions_as_they_pad(layer: nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    channels = layer.in_channels
    assert isinstance(channels, int)
    truth = jacobian_norm(layer, drawn(channels, 6, 8))
    bound = float(lipschitz_bound(layer, (6, 8)))
    # Padding that repeats pixels is bounded apart, the frames' norms multiply around a core of another kind.
    loose = isinstance(layer, SOCTT) or getattr(layer, "padding_mode", "zeros") in ("reflect", "replicate")
    shifted = isinstance(layer, nn.Conv2d) and layer.kernel_size == (2, 2)
    unequal = "same" in repr(layer)
    assert truth * (1 - 1e-12) <= bound <= truth * (4 if loose or shifted or unequal else 1 + 1e-8)


@examples(25)
@given(data=st.data())
def test_scales_are_folded_soundly(data: st.DataObject) -> None:
    """Batch norm before and behind convolutions, with the activations, poolings and reshapes that keep channels."""
    seed = data.draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    widths = [data.draw(st.integers(1, 4)) for _ in range(3)]
    layers: list[nn.Module] = [Normalize(tuple(torch.rand(widths[0])), tuple(torch.rand(widths[0]) + 0.1))]
    for c_in, c_out in pairwise(widths):
        if data.draw(st.booleans()):
            layers += [nn.BatchNorm2d(c_in), data.draw(st.sampled_from([nn.ReLU(inplace=True), nn.Tanh()]))]
        layers.append(data.draw(st.sampled_from([nn.Identity(), nn.AvgPool2d(2, 1), nn.MaxPool2d(2, 1)])))
        groups = math.gcd(c_in, c_out) if data.draw(st.booleans()) else 1
        layers.append(nn.Conv2d(c_in, c_out, 3, padding=1, groups=groups))
        if data.draw(st.booleans()):
            layers.append(nn.BatchNorm2d(c_out))
        if data.draw(st.booleans()):
            layers.append(nn.LeakyReLU(0.3))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(widths[-1]), nn.Linear(widths[-1], 3)]
    model = randomize(nn.Sequential(*layers), seed).eval()
    found = lipschitz_bound(model, 5, in_channels=widths[0])
    product = math.prod(factor.bound for factor in found.factors)
    assert product == pytest.approx(float(found), rel=1e-9)
    assert found.pairs is not None
    exact = in_float64(model)
    for image in torch.rand(3, widths[0], 5, 5, dtype=torch.float64):
        jacobian = torch.func.jacrev(lambda x: exact(x[None])[0])(image).flatten(1)
        assert torch.linalg.matrix_norm(jacobian, 2).item() <= float(found) * (1 + 1e-14)
        differences = (jacobian[:, None] - jacobian[None]).norm(dim=2)
        assert (differences <= found.pairs * (1 + 1e-14)).all()
    # Never looser than without folding: each scale's largest value times each layer's own norm.
    unfolded = 1.0
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
            assert layer.running_var is not None
            gain = layer.weight.detach().double().abs() / (layer.running_var.double() + layer.eps).sqrt()
            unfolded *= gain.max().item()
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            # On the size that it sees; the pools take a pixel each.
            unfolded *= conv_norm_at(layer, 5)
        elif isinstance(layer, Normalize):
            unfolded /= layer.std.min().item()
        elif isinstance(layer, nn.MaxPool2d):
            unfolded *= 2
    assert float(found) <= unfolded * (1 + 1e-6)


POOLED_CHANNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool": lambda x: functional.avg_pool1d(x, 3, 1, 1),
    "max_pool": lambda x: functional.max_pool1d(x, 3, 1, 1),
    "adaptive_avg_pool": lambda x: functional.adaptive_avg_pool1d(x, 5),
    "adaptive_max_pool": lambda x: functional.adaptive_max_pool1d(x, 5),
    "pad": lambda x: functional.pad(x, (1, 1), mode="replicate"),
    "avg_pool2d": lambda x: functional.avg_pool2d(x.unsqueeze(2), (3, 1), 1, (1, 0)).flatten(1),
}


@pytest.mark.parametrize("name", POOLED_CHANNELS)
def test_pooling_over_channels_mixes_their_scales(name: str) -> None:
    """What torch takes for one image without a batch: a large channel gets past a head that leaves it out."""
    pool = POOLED_CHANNELS[name]
    scales, head = (
        torch.tensor([100.0, 0.01, 0.01, 0.01]).double(),
        torch.tensor([[0.0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]]),
    )
    model = Applied(
        lambda x: functional.linear(pool(x.flatten(1) * scales), head[:, : pool(torch.ones(1, 4)).shape[1]].double())
    )
    truth = jacobian_norm(model, torch.tensor([0.9, 0.1, 0.2, 0.3]).reshape(1, 2, 2))
    assert truth > 20
    assert truth <= float(lipschitz_bound(model, 2, in_channels=1))


def conv_norm_at(layer: nn.Conv2d | nn.Linear, size: int) -> float:
    if isinstance(layer, nn.Linear):
        return jacobian_norm(layer, torch.zeros(layer.in_features))
    return jacobian_norm(layer, torch.zeros(layer.in_channels, size, size))


class Branched(nn.Module):
    """Residual sums, a concatenation, halves of the channels, what a network may do with shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.left = nn.Conv2d(2, 2, 3, padding=1)
        self.right = TTConv2d(2, 3, 3, 1, padding=1)
        self.last = nn.Linear(7, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.stem(images)).relu()
        first, second = features.chunk(2, 1)
        first = self.left(first).add_(first) if features.ndim == 4 else first
        features = torch.cat([first, self.right(second), second], 1)
        logits: Tensor = self.last(features.mean(tuple(range(2, features.ndim))))
        return logits


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "branched": Branched,
    "small-cnn": lambda: create_model("small-cnn", num_classes=4, in_channels=1, image_size=8),
    "small-cnn tt": lambda: create_model("small-cnn", num_classes=4, image_size=8, layer="tt", rank=0.25, std=(0.2,)),
    "small-cnn1d": lambda: create_model("small-cnn1d", num_classes=3, in_channels=2, image_size=12),
    "small-cnn3d": lambda: create_model("small-cnn3d", num_classes=3, in_channels=1, image_size=4),
    "single-conv": lambda: create_model("single-conv", num_classes=3, image_size=8),
    "wrn10-1": lambda: create_model("wrn10-1", num_classes=3, image_size=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)),
    "soc": lambda: create_model("lipconvnet-5", num_classes=4, layer="soc", width=2, in_channels=1),
    "soc-tt": lambda: create_model("lipconvnet-5", num_classes=4, layer="soc-tt", rank=0.5, width=2, in_channels=1),
    "bcop-tt": lambda: create_model("lipconvnet-5", num_classes=4, layer="bcop-tt", rank=0.5, width=4, in_channels=1),
    "cayley": lambda: create_model("lipconvnet-5", num_classes=4, layer="cayley", width=2, in_channels=1),
    "tt lipconvnet": lambda: create_model("lipconvnet-5", num_classes=4, layer="tt", rank=4, width=4, in_channels=1),
    "aoc": lambda: create_model("small-cnn", num_classes=3, image_size=8, layer="aoc"),
    "aol-tt": lambda: create_model("small-cnn", num_classes=3, image_size=8, layer="aol-tt", rank=0.5),
}


def image_shape(name: str) -> tuple[int, ...]:
    shapes = {
        "branched": (2, 7, 6),
        "small-cnn": (1, 8, 8),
        "small-cnn1d": (2, 12),
        "small-cnn3d": (1, 4, 4, 4),
    }
    if name in shapes:
        return shapes[name]
    return (1, 32, 32) if name in ("soc", "soc-tt", "bcop-tt", "cayley", "tt lipconvnet") else (3, 8, 8)


@pytest.mark.slow
# Frames are those of `tt`.
@pytest.mark.parametrize("name", [deep(name) if name in ("aol-tt", "bcop-tt") else name for name in NETWORKS])
@examples(2)
@given(seed=st.integers(0, 2**16))
def test_bound_holds_for_networks(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = randomize(NETWORKS[name](), seed).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shape = image_shape(name)
    bound = float(lipschitz_bound(model, shape[1:]))
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    norm = jacobian_norm(model, torch.rand(shape, dtype=torch.float64))
    assert norm <= bound * (1 + 1e-14)
    # All units may be dead at an image; else the bound is of the true constant's kind.
    assert not norm or bound < 1e6 * norm


@pytest.mark.parametrize("name", ["soc", "soc-tt", "bcop-tt", "cayley"])
def test_orthogonal_networks_have_the_constant_of_their_normalisation(name: str) -> None:
    torch.manual_seed(0)
    found = lipschitz_bound(NETWORKS[name](), 32)
    assert 2 <= float(found) <= 2 * 1.0001
    assert found.pairs is not None
    assert (found.pairs <= math.sqrt(2) * 2 * 1.0001).all()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [deep("densenet121"), "squeezenet1_1", "shufflenet_v2_x0_5", "mobilenet_v2"])
def test_bound_holds_for_torchvision(architecture: str) -> None:
    torch.manual_seed(0)
    network = torchvision.models.get_model(architecture, weights=None, num_classes=3)
    model = nn.Sequential(torchvision.transforms.Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3)), network).eval()
    bound = float(lipschitz_bound(model, 32))
    assert jacobian_norm(model, torch.rand(3, 32, 32)) <= bound


@pytest.mark.deep
@pytest.mark.parametrize("name", ["resnet18", "vgg11"])
def test_bound_holds_for_larger_networks(name: str) -> None:
    torch.manual_seed(0)
    model = randomize(create_model(name, num_classes=3, layer="tt", rank=32), 0)
    bound = float(lipschitz_bound(model, 32))
    assert 0 < jacobian_norm(model, torch.rand(3, 32, 32)) <= bound


def linear_classifier(seed: int, classes: int = 4) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(Normalize((0.3, 0.4), (0.2, 0.5)), nn.Flatten(), nn.Linear(2 * 3 * 3, classes))
    weight = model[2].get_parameter("weight").detach().double().reshape(classes, 2, 3, 3)
    return model, weight / torch.tensor([0.2, 0.5]).double()[:, None, None]


@examples(30)
@given(seed=st.integers(0, 2**16), classes=st.integers(2, 5))
def test_radii_of_linear_classifiers_are_exact(seed: int, classes: int) -> None:
    model, weight = linear_classifier(seed, classes)
    images = torch.rand(20, 2, 3, 3)
    logits = in_float64(model)(images.double()).detach()
    labels = logits.argmax(1)
    labels[::5] = (labels[::5] + 1) % classes
    found = certificates(model, images, labels)
    for index, (row, label) in enumerate(zip(logits, labels.tolist(), strict=True)):
        others = [j for j in range(classes) if j != label]
        exact = min((row[label] - row[j]).item() / (weight[label] - weight[j]).norm().item() for j in others)
        assert found.correct[index].item() == (exact > 0)
        if exact <= 0:
            assert found.radii[index] == 0
        else:
            assert found.radii[index].item() == pytest.approx(exact, rel=1e-4, abs=1e-5)
            assert found.radii[index].item() <= exact * (1 + 1e-6)
    radii = sorted({round(radius, 3) + 1e-4 for radius in found.radii.tolist()})
    shares = certified_accuracy(model, images, labels, radii)
    assert list(shares) == radii
    assert all(share == (found.radii > radius).double().mean().item() for radius, share in shares.items())
    few: Any = np.int64(7)
    for kept in (np.array(radii), torch.tensor(radii, dtype=torch.float64)):
        assert certified_accuracy(model, images, labels, kept, batch_size=few) == shares


def test_norm_of_a_linear_classifier_is_exact() -> None:
    model, weight = linear_classifier(0)
    found = lipschitz_bound(model, 3)
    truth = torch.linalg.matrix_norm(weight.flatten(1), 2).item()
    assert truth <= float(found) <= truth * (1 + 1e-6)
    assert found.pairs_by == "head"
    assert found.pairs is not None
    assert found.pairs[0, 1].item() == pytest.approx((weight[0] - weight[1]).norm().item(), rel=1e-6)


@pytest.mark.parametrize("std", [(0.2, 0.5, 1.5), (0.25,)])
def test_a_linear_classifier_may_be_a_convolution_over_the_whole_image(std: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Normalize((0.5,) * len(std), std), nn.Conv2d(3, 5, 8), nn.Flatten())
    weight = model[1].get_parameter("weight").detach().double() / torch.tensor(std).double()[:, None, None]
    found = lipschitz_bound(model, 8)
    truth = torch.linalg.matrix_norm(weight.flatten(1), 2).item()
    assert truth <= float(found) <= truth * (1 + 1e-6)
    assert found.pairs_by == "head"
    assert found.pairs is not None
    exact = torch.cdist(weight.flatten(1), weight.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(found.pairs, exact, rtol=1e-6, atol=1e-6)
    assert (found.pairs >= exact).all()


def test_rows_that_are_near_each_other_are_told_apart() -> None:
    """A head of as many classes for which torch takes distances by a product, which would lose theirs."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 30)).double()
    weight = model[1].get_parameter("weight")
    with torch.no_grad():
        weight.copy_(torch.ones(8) + 1e-9 * drawn(30, 8))
    found = lipschitz_bound(model, 2, in_channels=2)
    assert found.pairs is not None
    exact = (weight[:, None] - weight[None]).norm(dim=2)
    torch.testing.assert_close(found.pairs, exact, rtol=1e-4, atol=1e-12)


def test_pairs_of_a_head_behind_a_bend() -> None:
    """The bound before it times the rows' distance; of a network that bends in the end, `sqrt(2)` times the whole's."""
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
    nn.init.orthogonal_(first.weight, 3.0)
    model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), last).double()
    found, weight = lipschitz_bound(model, 2, in_channels=1), last.weight.detach()
    assert found.pairs_by == "head"
    torch.testing.assert_close(found.pairs, 3 * (weight[:, None] - weight[None]).norm(dim=2), rtol=1e-6, atol=1e-9)
    found = lipschitz_bound(model.append(nn.ReLU()), 2, in_channels=1)
    assert found.pairs_by == "whole"
    largest = math.sqrt(2) * found.value
    torch.testing.assert_close(found.pairs, torch.full((3, 3), largest, dtype=torch.float64), rtol=1e-12, atol=0)


def test_no_pairs_without_logits() -> None:
    found = lipschitz_bound(nn.Conv2d(1, 2, 3), 5)
    assert (found.pairs, found.pairs_by) == (None, "whole")
    found = lipschitz_bound(Applied(lambda x: torch.tensor(1.0)), 5, in_channels=1)
    assert (found.value, found.pairs, found.pairs_by) == (0, None, "whole")


def test_a_bound_that_is_given_is_what_radii_come_from() -> None:
    model, _ = linear_classifier(0)
    images = torch.rand(20, 2, 3, 3)
    labels = model(images).argmax(1)
    own = lipschitz_bound(model, 3)
    assert own.pairs is not None
    looser = replace(own, pairs=4 * own.pairs)
    found, expected = certificates(model, images, labels, bound=looser), certificates(model, images, labels)
    assert found.bound is looser
    torch.testing.assert_close(found.radii, expected.radii / 4, rtol=1e-12, atol=SHORTEST_STEP)
    radii = [radius + 1e-4 for radius in expected.radii.tolist()]
    shares = certified_accuracy(model, images, labels, [radius / 4 for radius in radii], bound=looser)
    assert list(shares.values()) == list(certified_accuracy(model, images, labels, radii).values())
    fewer = lipschitz_bound(linear_classifier(0, 3)[0], 3)
    for bound, by in ((fewer, "head"), (replace(own, pairs=None, pairs_by="whole"), "whole")):
        with pytest.raises(ConfigError, match=rf"^bound = '{by}': must be that of a network with 4 logits$"):
            certificates(model, images, labels, bound=bound)


def test_no_more_images_at_once_than_were_asked_for() -> None:
    seen: list[int] = []

    def count(images: Tensor) -> Tensor:
        seen.append(len(images))
        return images.flatten(1)

    model, images, labels = Applied(count), torch.rand(7, 1, 2, 2), torch.zeros(7, dtype=torch.long)
    bound = lipschitz_bound(model, 2, in_channels=1)
    for measure in (certificates, certified_accuracy):
        seen.clear()
        measure(model, images, labels, bound=bound, batch_size=3)
        assert seen == [3, 3, 1] * 2
    with pytest.raises(ConfigError, match=r"^batch_size = 0: "):
        certificates(model, images, labels, bound=bound, batch_size=0)


def test_rounding_is_that_of_each_image() -> None:
    """Twice what float32 moved any of its logits by, at least 1e-12 of its largest; margins are without it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    images, labels = torch.rand(9, 1, 2, 2), torch.zeros(9, dtype=torch.long)
    images[8] = 0  # whose logits are the biases, without rounding
    found = certificates(model, images, labels)
    with torch.no_grad():
        own, exact = model(images).double(), in_float64(model)(images.double())
    expected = torch.maximum(2 * (own - exact).abs().amax(1), 1e-12 * exact.abs().amax(1))
    torch.testing.assert_close(found.rounding, expected, rtol=1e-12, atol=0)
    assert found.rounding[8].item() == pytest.approx(1e-12 * model[1].get_parameter("bias").abs().max().item())
    margins = exact[:, 0] - exact[:, 1:].amax(1) - expected
    torch.testing.assert_close(found.margins, margins, rtol=1e-12, atol=1e-15)


def test_logits_are_those_of_float64_without_weights_that_say_so() -> None:
    """Of a network without any, which takes float32: what that rounds is taken off, too."""
    torch.manual_seed(0)
    weight = torch.randn(2, 1, 1)  # no parameter, and no buffer

    def function(images: Tensor) -> Tensor:
        return (images * weight).mean((2, 3)) * 1000

    images = torch.rand(50, 2, 5, 5)
    labels = function(images).argmax(1)
    found = certificates(Applied(function), images, labels)
    exact = function(images.double())
    margins = exact.gather(1, labels[:, None]) - exact.gather(1, 1 - labels[:, None])
    assert (found.margins <= margins[:, 0] + 1e-11).all()
    assert found.rounding.max() > 1e-6


def test_a_radius_below_the_shortest_step_is_none() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).double()
    nn.init.eye_(model[1].get_parameter("weight"))
    images = torch.full((2, 1, 1, 2), 0.5, dtype=torch.float64)
    images[:, 0, 0, 1] -= math.sqrt(2) * SHORTEST_STEP * torch.tensor([0.9, 1.1]).double()
    found = certificates(model, images, torch.tensor([0, 0]))
    assert found.radii.tolist() == [0, pytest.approx(1.1 * SHORTEST_STEP, rel=1e-6)]
    assert found.correct.all()


def test_a_share_is_of_radii_beyond() -> None:
    certified = torch.tensor([0.0, 0.1, 0.1, 0.3], dtype=torch.float64)
    assert shares_beyond(certified, (0.05, 0.1, 0.2)) == {0.05: 0.75, 0.1: 0.25, 0.2: 0.25}


def test_margins_of_an_orthogonal_network() -> None:
    """MinMax between rotations of a flat image: f = R2 minmax(R1 x), pairs of logits with distance sqrt(2)."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    for layer in (first, last):
        nn.init.orthogonal_(layer.weight)
    model = nn.Sequential(nn.Flatten(), first, MinMax(), last).double()
    images = torch.rand(50, 2, 2, 2, dtype=torch.float64)
    logits = model(images).detach()
    labels = logits.argmax(1)
    found = certificates(model, images, labels)
    assert float(found.bound) == pytest.approx(1, rel=1e-6)
    top = logits.topk(2).values
    torch.testing.assert_close(found.radii, (top[:, 0] - top[:, 1]) / math.sqrt(2), rtol=1e-5, atol=1e-8)
    assumed = assumed_certified_accuracy(logits, labels, (0.01, 0.1, 0.3), 1.0)
    assert assumed == certified_accuracy(model, images, labels, (0.01, 0.1, 0.3))


def test_constant_networks() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Flatten(), nn.Linear(12, 2))
    with torch.no_grad():
        model[2].get_parameter("weight").zero_()
        model[2].get_parameter("bias").copy_(torch.tensor([1.0, 0.0]))
    images = torch.rand(3, 1, 2, 2)
    assert float(lipschitz_bound(model, 2)) == 0
    assert certified_accuracy(model, images, torch.tensor([0, 0, 1]), (1.0, 1e6)) == {1.0: 2 / 3, 1e6: 2 / 3}
    with torch.no_grad():
        model[2].get_parameter("bias").zero_()
    # A tie is no certificate.
    found = certificates(model, images, torch.zeros(3, dtype=torch.long))
    assert found.correct.all()
    assert found.radii.tolist() == [0, 0, 0]
    assert found.bound.pairs_by == "whole"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.zeros(len(x), 3) + torch.tensor([1.0, 0.0, 0.5]),
        lambda x: nn.Parameter(torch.tensor([1.0, 0.0, 0.5])).expand(len(x), 3),
    ],
)
def test_networks_that_ignore_their_input(function: Callable[[Tensor], Tensor]) -> None:
    model, images = Applied(function), torch.rand(2, 1, 2, 2)
    assert float(lipschitz_bound(model, 2, in_channels=1)) == 0
    found = certificates(model, images, torch.tensor([0, 1]))
    assert found.radii.tolist() == [math.inf, 0]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_a_hook_makes() -> None:
    layer: Any = nn.utils.weight_norm(nn.Linear(4, 3))
    with torch.no_grad():
        layer.weight_g.mul_(torch.tensor([[3.0], [0.5], [1.0]]))
    model, image = nn.Sequential(nn.Flatten(), layer), torch.rand(1, 1, 2, 2)
    layer(image.flatten(1))
    weight = (layer.weight_v * layer.weight_g / layer.weight_v.norm(dim=1, keepdim=True)).detach().double()
    assert float(lipschitz_bound(model, 2)) == pytest.approx(torch.linalg.matrix_norm(weight, 2).item(), rel=1e-6)
    # The given model still learns.
    model(image).sum().backward()
    assert layer.weight_g.grad is not None


@pytest.mark.parametrize("slope", [0.1, 0.9999, -1.0, math.inf, math.nan])
def test_a_bound_that_a_gradient_refutes_is_not_given(slope: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for any rule that is wrong: relu() taken for flatter than it is."""
    monkeypatch.setitem(FUNCTIONS, "relu", lambda trace, _, features: Reach(features.reach.total * slope))
    with pytest.raises(ConfigError, match="report"):
        lipschitz_bound(nn.ReLU(), 2, in_channels=1)


def test_a_constant_that_is_none_is_not_taken_for_one() -> None:
    """Whatever gets past the trace: without a gradient, values at two images speak."""
    model = Applied(lambda x: torch.zeros(1, 3) if isinstance(x, Traced) else x.detach().flatten(1)[:, :3])
    with pytest.raises(ConfigError, match="report"):
        lipschitz_bound(model, 2, in_channels=1)


def unseen(traced: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> nn.Module:
    """What gets past the trace: it follows one function, and numbers are another's."""
    return Applied(lambda x: traced(x) if isinstance(x, Traced) else function(x))


def fail(_images: Tensor) -> Tensor:
    raise RuntimeError("no kernel for it")


DRAWS = "gives one image two outputs: it draws random numbers in evaluation mode"
MIXES = "gives an image another output beside another image: it mixes those of a batch"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail, "fails in float64: no kernel for it"),
        (lambda x: x * (1 + 1e-7 * random.random()), DRAWS),
        (lambda x: 1e-9 * x * random.random(), DRAWS),
        (lambda x: x * (1 + 8e-6 * len(x)), MIXES),
        (lambda x: torch.zeros(1, 3), MIXES),
        (lambda x: 3 * x, "has the slope 3 or more, its bound came out as 1: please report it"),
    ],
)
def test_what_values_refute_is_said(function: Callable[[Tensor], Tensor], message: str) -> None:
    random.seed(0)  # of other draws one in two hundred is as the one before, but for what is allowed for rounding
    with pytest.raises(ConfigError, match=f"^model = 'Applied': {message}$"):
        lipschitz_bound(unseen(lambda x: x, function), 2, in_channels=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1e12,
        lambda x: (x + 1e9) * (1 + 1e-8 * len(x)),
        lambda x: x.view(1, 1, 4)[:, 0],
    ],
    ids=["far from 0", "in another order", "of one image at a time"],
)
def test_what_rounding_does_refutes_nothing(function: Callable[[Tensor], Tensor]) -> None:
    assert float(lipschitz_bound(unseen(lambda x: x.flatten(1), function), 2, in_channels=1)) == 1


def test_what_is_not_finite_is_not_taken_for_random() -> None:
    model = Applied(lambda x: x.flatten(1) + torch.tensor([0.0, math.nan, 0.0, 0.0]))
    with pytest.raises(DataError, match="2 of 2 images have logits that are not finite"):
        certificates(model, torch.rand(2, 1, 2, 2), torch.tensor([0, 1]))


def test_a_gradient_shows_what_drawn_directions_do_not() -> None:
    """Of 400 pixels two matter: between drawn images, or along a drawn step, the output moves by a tenth of that."""
    weight = torch.zeros(2, 400, dtype=torch.float64)
    weight[0, 7] = weight[1, 3] = 0.1
    seen = []

    def twice(images: Tensor) -> Tensor:
        seen.append(images)
        return functional.linear(images.flatten(1), 2 * weight)

    with pytest.raises(ConfigError, match=r"slope 0\.2 or more, its bound came out as 0\.1"):
        lipschitz_bound(unseen(lambda x: functional.linear(x.flatten(1), weight), twice), 20, in_channels=1)
    assert (seen[-1] - seen[-2]).norm().item() == pytest.approx(1e-3)


def test_two_images_show_what_is_flat_around_each() -> None:
    """A stair, whose gradient is 0 wherever it has one."""
    with pytest.raises(ConfigError, match=r"bound came out as 0\.1"):
        lipschitz_bound(unseen(lambda x: 0.1 * x, lambda x: (8 * x).floor() / 8), 2, in_channels=1)


class Misled(torch.autograd.Function):
    """Leaves values as they are; its gradient is the same number everywhere."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, gradient: float) -> Tensor:
        ctx.gradient = gradient
        return images.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return torch.full_like(gradients[0], ctx.gradient), None


@pytest.mark.parametrize("gradient", [0.0, math.inf, math.nan, None])
def test_where_a_gradient_says_nothing_a_drawn_step_speaks(gradient: float | None) -> None:
    """A saw between 0 and 1, flat between two images and steep at each."""

    def saw(images: Tensor) -> Tensor:
        return (100 * (images.detach() if gradient is None else Misled.apply(images, gradient))).frac()

    with pytest.raises(ConfigError, match="has the slope 1"):
        lipschitz_bound(unseen(lambda x: 10 * x, saw), 2, in_channels=1)


def test_a_bound_neither_reads_nor_changes_the_processs_random_state() -> None:
    model, bounds = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        bounds.append(lipschitz_bound(model, 4).value)
        assert torch.equal(before, torch.get_rng_state())
    assert bounds[0] == bounds[1]


@pytest.mark.slow
def test_no_search_comes_closer_than_the_certificate() -> None:
    """1,000 images in 40 networks, from each 3 searches for the boundary, by gradient and bisection."""
    closest = math.inf
    certified = 0
    for seed in range(40):
        torch.manual_seed(seed)
        conv = [nn.Conv2d(1, 4, 3, padding=1), TTConv2d(1, 4, 3, 1, padding=1)][seed % 2]
        body: list[nn.Module] = [Normalize((0.5,), (0.5,)), conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        model = nn.Sequential(*body, nn.Linear(16, 3)).eval()
        images = torch.rand(25, 1, 4, 4)
        labels = model(images).argmax(1)
        found = certificates(model, images, labels, bound=None)
        exact = in_float64(model)
        distances = adversarial_distances(exact, images.double(), labels)
        certified += int((found.radii > 0).sum())
        assert (found.radii <= distances).all()
        closest = min(closest, (distances / found.radii.clamp_min(1e-12)).min().item())
    assert certified > 950
    # The search is no straw man: somewhere it comes within a few times the certificate.
    assert closest < 4


def adversarial_distances(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The nearest adversarial example per image: gradients of the margin to each class, then bisection."""
    nearest = torch.full((len(images),), math.inf, dtype=torch.float64)
    for target in range(3):
        moved = images.clone()
        for _ in range(12):
            moved = moved.detach().requires_grad_()
            logits = model(moved)
            gap = logits.gather(1, labels[:, None])[:, 0] - logits[:, target]
            (gradient,) = torch.autograd.grad(gap.sum(), moved)
            square = gradient.flatten(1).square().sum(1).clamp_min(1e-12)
            step = (gap.detach().clamp_min(0) * 1.05 + 1e-6) / square
            moved = moved.detach() - step[:, None, None, None] * gradient
        low, high = torch.zeros(len(images), dtype=torch.float64), torch.ones(len(images), dtype=torch.float64)
        ends = moved.detach()
        with torch.no_grad():
            fooled = model(ends).argmax(1) != labels
            for _ in range(30):
                middle = (low + high) / 2
                wrong = model(images + middle[:, None, None, None] * (ends - images)).argmax(1) != labels
                high, low = torch.where(wrong, middle, high), torch.where(wrong, low, middle)
        distance = high * (ends - images).flatten(1).norm(dim=1)
        nearest = torch.where(fooled, torch.minimum(nearest, distance), nearest)
    return nearest


def test_own_precision_counts() -> None:
    """An image that the float32 network misclassifies has no certificate, whatever float64 says."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        model[1].get_parameter("weight").copy_(torch.tensor([[0.0], [1e-9]]))
        model[1].get_parameter("bias").copy_(torch.tensor([1.0, 1.0]))
    images, labels = torch.ones(2, 1, 1), torch.tensor([1, 0])
    found = certificates(model, images, labels, bound=lipschitz_bound(model, (1,)))
    assert in_float64(model)(images.double()).argmax(1).tolist() == [1, 1]
    assert model(images).argmax(1).tolist() == [0, 0]
    assert found.correct.tolist() == [False, False]
    assert found.radii.tolist() == [0, 0]
    assert (found.rounding >= 1e-9).all()


def test_assumed_accuracy_is_the_papers_formula() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0], [1.0, 2.0, 0.0]])
    labels = torch.tensor([0, 1, 0])
    radius = 36 / 255
    needed = radius * math.sqrt(2) * 4
    assert 0.5 < needed < 1
    assert assumed_certified_accuracy(logits, labels, (radius, 0.3), 4) == {
        radius: pytest.approx(2 / 3),
        0.3: pytest.approx(1 / 3),
    }


@pytest.mark.parametrize("layer", ["dense", "tt", "soc", "soc-tt", "aoc", "cayley-tt"])
def test_only_of_soc_and_soc_tt_a_constant_is_assumed(layer: str) -> None:
    """That of the paper's table 1, with respect to pixels, from the smallest std of a channel."""
    std = (0.25, 0.2, 0.5)
    model = create_model("small-cnn", num_classes=4, image_size=8, layer=layer, rank=4, std=std)
    assert assumed_lipschitz(model, std) == (pytest.approx(5) if layer in ("soc", "soc-tt") else None)
    assert assumed_lipschitz(nn.Linear(3, 2), std) is None


class Unknown(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.cumsum(1)


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        return images * 5


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + Fivefold.apply(x),
        lambda x: x + torch.ops.aten.mul.Tensor(x, torch.tensor(5.0)),
        lambda x: x + x.clone().apply_(lambda value: value),
        lambda x: x + torch.utils.dlpack.from_dlpack(x),
    ],
    ids=["autograd function", "operator", "apply", "dlpack"],
)
def test_nothing_gets_past_unseen(function: Callable[[Tensor], Tensor]) -> None:
    """Ways around torch's functions are followed or refused, never taken for constants."""
    try:
        bound = float(lipschitz_bound(Applied(function), 3, in_channels=1))
    except ConfigError:
        return
    assert bound == pytest.approx(6, rel=1e-9)


ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 1), Unknown()), r"cumsum\(\) in 1"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.LayerNorm(4, eps=0.0)), r"layer_norm\(\) with eps = 0.0 in 1"),
        (nn.GroupNorm(1, 1, eps=math.nan), r"group_norm\(\) with eps = nan"),
        (nn.InstanceNorm2d(1, eps=-1.0), r"instance_norm\(\) with eps = -1.0"),
        (Applied(lambda x: functional.layer_norm(x, tuple(x.shape))), r"layer_norm\(\).*mixes the images"),
        (Applied(lambda x: functional.layer_norm(x, (4,), 9 * x[0, 0, 0])), r"layer_norm\(\) of several"),
        (Applied(lambda x: torch.instance_norm(x, ONE, ONE, ONE, ONE, False, 0.1, 1e-5, False)), "instance_norm"),
        (Applied(lambda x: torch.batch_norm(x, ONE, ONE, ONE, ONE, False, 0.1, 1e-5, False)), "batch_norm"),
        (Applied(lambda x: x.softmax(0)), r"softmax over the first axis.*mixes the images"),
        (
            Applied(lambda x: functional.softmax(x, 1, dtype=torch.float32)),
            r"softmax\(\) with a result of torch.float32",
        ),
        (
            Applied(lambda x: functional.conv_transpose2d(x[0], torch.ones(1, 1, 2, 2))),
            r"conv_transpose2d\(\) of 3 axes",
        ),
        (Applied(lambda x: functional.conv_transpose2d(x, x)), "several tensors"),
        (Applied(lambda x: functional.interpolate(x, 2, mode="bilinear", antialias=True)), "antialias"),
        (Applied(lambda x: functional.interpolate(x, (0, 4))), "interpolate|greater than 0"),
        (Applied(lambda x: x[:, :, x[0, 0, 0]]), "index|several"),
        (Applied(lambda x: x.repeat_interleave(2, 0).mean(0, keepdim=True)), "mixes the images"),
        (nn.BatchNorm2d(1, track_running_stats=False), "batch_norm"),
        (Applied(lambda x: x * x), "several tensors that depend on the input"),
        (Applied(lambda x: 1 / x), "rdiv|division"),
        (Applied(lambda x: x if x.sum() > 0 else -x), "sum|gt"),
        (Applied(lambda x: x if (x > 0).all() else -x), "gt"),
        (Applied(lambda x: functional.dropout(x, 0.5)), "random"),
        (Applied(lambda x: x.data), "attribute data"),
        (Applied(lambda x: x.view(torch.float32)), "result of torch.float32.*another dtype"),
        (Applied(lambda x: x.flatten(1).mul_(2) + x.flatten(1)), "used elsewhere"),
        (Applied(lambda x: functional.conv2d(x, x)), "several tensors"),
        (Applied(lambda x: x.clamp(min=x.flip(2))), "several tensors"),
        (Applied(lambda x: x.clamp(min=torch.zeros(2, 1, 1, 1))), r"clamp|option that makes \(2, 1, 4, 4\)"),
        (Applied(lambda x: functional.linear(x, torch.eye(4), 10 * x.flatten())), r"linear\(\) of several"),
        (Applied(lambda x: functional.conv2d(x, FACTOR[:1, None], x.mean((2, 3))[0])), r"conv2d\(\) of several"),
        (Applied(lambda x: functional.batch_norm(x, FACTOR[0, 0], ONE, bias=50 * x[0, :, 0, 0])), "norm.* of several"),
        (Applied(lambda x: functional.batch_norm(x, x[0, :, 0, 0], ONE)), r"batch_norm\(\) of several"),
        (Applied(lambda x: (x * (3 + 4j)).abs()), "complex"),
        (Applied(lambda x: (x / torch.tensor(0.3 + 0.4j)).abs()), "complex"),
        (Applied(lambda x: x.view(dtype=torch.int64)), "result of torch.int64"),
        (Applied(lambda x: torch.stack(torch.adaptive_max_pool1d(x.flatten(2), 1))), "finite|float"),
        (Applied(lambda x: functional.conv2d(x[0], torch.ones(4, 1, 1, 1))[None]), r"conv2d\(\) of 3 axes"),
        (nn.Sequential(Applied(lambda x: x[0].expand(4, 4, 4)), SOC(4, 4, 3)), r"SOC of 3 axes in 1"),
        (Applied(lambda x: x.is_contiguous() and x), "is_contiguous"),  # type: ignore[arg-type, return-value]
        (Applied(lambda x: x.mean(0)), "mixes the images"),
        (Applied(lambda x: x.amax(dim=())), "maximum over the first axis.*mixes the images"),
        (Applied(lambda x: 3.0), "one tensor"),  # type: ignore[arg-type, return-value]
        (Applied(lambda x: (x, x)), "one tensor"),  # type: ignore[arg-type, return-value]
        (nn.Conv2d(2, 1, 1), "must have 2"),
        (nn.Linear(3, 1), "cannot be followed"),
    ],
)
def test_nothing_is_guessed(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lipschitz_bound(model, 4, in_channels=1)


class Catching(nn.Module):
    """Goes another way where its first one fails, which with numbers it does not."""

    def forward(self, images: Tensor) -> Tensor:
        try:
            scaled: Tensor = images * (1.8 if bool(images.mean() > -1) else 1.0)
            return scaled
        except Exception:
            return images


class Hyper(nn.Module):
    """A layer whose bias is made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        bias = 9 * images[0, :, 0, 0]
        made: Tensor = torch.func.functional_call(self.conv, {"bias": bias}, (images,))
        return made


class Rearranged(nn.Module):
    """`contiguous` copies where the data lie channels first, and does not where they lie last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.conv(images)
        same = features.permute(0, 2, 3, 1).contiguous()
        same.mul_(5)
        return features + same.permute(0, 3, 1, 2)


class Scaling(nn.Module):
    """Its weight is another one while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, images: Tensor) -> Tensor:
        kept = self.linear.weight.data.clone()
        self.linear.weight.data.mul_(1.8)
        found: Tensor = self.linear(images.flatten(1))
        self.linear.weight.data.copy_(kept)
        return found


def test_what_a_network_hides_from_the_trace_is_refused() -> None:
    for model, message in (
        (Catching(), "sum|mean|gt|bool"),
        (Hyper(), "bias that depends on the input"),
        (Rearranged(), "used elsewhere"),
    ):
        with pytest.raises(ConfigError, match=message):
            lipschitz_bound(model, 4, in_channels=1)


def test_an_operator_with_a_borrowed_name_has_no_rule() -> None:
    library: Any = torch.library.Library("ttsv_test", "DEF")  # type: ignore[no-untyped-call]
    library.define("relu(Tensor x) -> Tensor")
    library.impl("relu", lambda x: 1.8 * x, "CompositeImplicitAutograd")
    with pytest.raises(ConfigError, match=r"relu\(\)"):
        lipschitz_bound(Applied(torch.ops.ttsv_test.relu), 4, in_channels=1)


def test_weights_are_those_of_the_moment() -> None:
    model = Scaling()
    norm = torch.linalg.matrix_norm(model.linear.weight.detach().double(), 2).item()
    assert lipschitz_bound(model, 4, in_channels=1).value == pytest.approx(1.8 * norm, rel=1e-6)


@pytest.mark.parametrize("mode", ["circular", "replicate", "reflect"])
def test_padding_is_that_with_which_the_layer_was_made(mode: Any) -> None:
    conv = nn.Conv2d(1, 1, 3, padding=1, padding_mode=mode)
    nn.init.constant_(conv.weight, 0.3)
    conv.padding = (0, 0)  # which torch does not look at
    model = nn.Sequential(conv, nn.Flatten())
    assert lipschitz_bound(model, 6, in_channels=1).value >= jacobian_norm(model, torch.rand(1, 6, 6))


def test_channels_are_those_of_the_weight() -> None:
    conv = nn.Conv2d(2, 8, 3, padding=1)
    nn.init.constant_(conv.weight, 0.05)
    conv.weight, conv.bias = nn.Parameter(conv.weight[:2].detach()), None
    model = nn.Sequential(conv, Applied(lambda x: x.mean(1).flatten(1)))
    assert lipschitz_bound(model, 4).value >= jacobian_norm(model, torch.rand(2, 4, 4))


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.rand(x.shape),
        lambda x: x * torch.randn(1, generator=GENERATOR),
        lambda x: x + torch.randn(1, device=x.device),
        lambda x: x * torch.bernoulli(torch.full((3,), 0.5)),
        lambda x: x * functional.dropout(torch.ones(3), 0.5),
        lambda x: x + torch.empty(1).normal_(),
        lambda x: x.flip(2) if torch.rand(1).item() < 0.5 else x,
        lambda x: x.roll(int(torch.randint(3, (1,))), 2),
        lambda x: functional.dropout(x, 0.5, training=True),
        lambda x: x * random.random(),
        lambda x: x + float(np.random.rand()),
        lambda x: x * np.random.default_rng().random(),
    ],
)
def test_a_network_that_draws_random_numbers_has_no_bound(function: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), Applied(function))
    with pytest.raises(ConfigError, match="random"):
        lipschitz_bound(model, 3)
    with pytest.raises(ConfigError, match="random"):
        certificates(model, torch.rand(2, 2, 3, 3), torch.tensor([0, 1]))


class Noisy(nn.Module):
    """A parametrization that is another one each time."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight)


def test_random_weights_have_no_bound() -> None:
    layer = nn.Conv2d(2, 4, 1)
    nn.utils.parametrize.register_parametrization(layer, "weight", Noisy())
    fix = "draws random numbers: the weights are other ones each time"
    with pytest.raises(ConfigError, match=rf"^model = '.*randn_like.* in a parametrization': {fix}$"):
        lipschitz_bound(layer, 3)


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_a_layer_with_a_forward_of_its_own_is_not_its_class(name: str) -> None:
    layer = nn.Conv2d(1, 2, 1)
    forward = getattr(type(layer), name)
    setattr(layer, name, MethodType(lambda self, *args: 3 * forward(self, *args), layer))
    with pytest.raises(ConfigError, match=rf"Conv2d with its own {name}\(\).*has no rule"):
        lipschitz_bound(nn.Sequential(layer), 4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_parts_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), torch.jit.trace(nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 4, 4)))  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match="compiled"):
        lipschitz_bound(model, 4)


def test_weights_that_are_not_finite_have_no_bound() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    with torch.no_grad():
        model[0].get_parameter("weight")[0, 0, 0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"0 \(convolution\).*finite"):
        lipschitz_bound(model, 4)


IMAGES, LABELS = torch.rand(2, 2, 3, 3), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("images", "labels", "radii", "message"),
    [
        (
            IMAGES,
            LABELS,
            (0.1, 0.0),
            r"^radii = 0.0: must be finite numbers above 0: L2 distances in pixels of \[0, 1\]$",
        ),
        (IMAGES, LABELS, (-1.0,), "radii = -1.0"),
        (IMAGES, LABELS, (math.inf,), "radii = inf"),
        (IMAGES, LABELS, (), r"^radii = \(\): must be one L2 distance at least, in pixels of \[0, 1\]$"),
        (IMAGES, LABELS, 0.1, "radii = 0.1: must be one"),
        (IMAGES, LABELS, [True], "radii = True"),
        (IMAGES, LABELS, ["a"], "radii = 'a'"),
        (IMAGES, LABELS[:1], (0.1,), "want"),
        (IMAGES, LABELS.float(), (0.1,), "whole numbers"),
        (IMAGES, LABELS.bool(), (0.1,), "labels of torch.bool: want whole numbers"),
        (IMAGES, LABELS + 3, (0.1,), "want 0 to 3"),
        (IMAGES * 2 - 1, LABELS, (0.1,), r"\[0, 1\]"),
        (IMAGES * math.nan, LABELS, (0.1,), r"\[0, 1\]"),
        (IMAGES[:0], LABELS[:0], (0.1,), "n >= 1"),
    ],
)
def test_bad_input_is_refused(images: Tensor, labels: Tensor, radii: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        certified_accuracy(linear_classifier(0)[0], images, labels, radii)


def test_bad_logits_are_refused() -> None:
    good = torch.zeros(2, 3)
    refused = [
        (torch.tensor([[0.0, math.inf]]), LABELS[:1], 0.1, 1.0, "not finite"),
        (good, torch.tensor([0, 3]), 0.1, 1.0, "want 0 to 2"),
        (good, LABELS.bool(), 0.1, 1.0, "labels of torch.bool: want whole numbers"),
        (good, LABELS.float(), 0.1, 1.0, "labels of torch.float32: want whole numbers"),
        (good[0], LABELS, 0.1, 1.0, "want"),
        (torch.zeros(2, 1), LABELS * 0, 0.1, 1.0, "c >= 2"),
        (good, LABELS, 0.1, 0.0, "lipschitz = 0"),
        (good, LABELS, 0.0, 1.0, "radii = 0"),
    ]
    for logits, labels, radius, lipschitz, message in refused:
        with pytest.raises((ConfigError, DataError), match=message):
            assumed_certified_accuracy(logits, labels, (radius,), lipschitz)
    model = linear_classifier(0)[0]
    with torch.no_grad():
        model[2].get_parameter("bias")[0] = math.nan
    with pytest.raises(DataError, match="not finite"):
        certified_accuracy(model, IMAGES, LABELS)
