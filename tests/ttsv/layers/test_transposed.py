"""Transposed convolutions against dense operators made of their own forward pass."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttsv.constraints import Clip, Divide
from ttsv.constraints.operators import Operator
from ttsv.layers import densify, tensorize
from ttsv.metrics.cost import compression
from ttsv.spectral.network import model_spectra

LAYERS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
SHAPES: list[tuple[tuple[int, ...], int, int, dict[str, Any]]] = [
    ((7,), 3, 4, {"kernel_size": 4, "stride": 2, "padding": 1}),
    ((4, 5), 3, 2, {"kernel_size": 3, "stride": (2, 3), "padding": 1, "output_padding": (1, 2)}),
    ((5, 3), 4, 6, {"kernel_size": (3, 2), "dilation": (2, 1), "groups": 2}),
    ((2, 2), 2, 3, {"kernel_size": 5, "stride": 1, "padding": 2}),
    ((2, 3, 2), 2, 2, {"kernel_size": 3, "stride": (1, 2, 2), "padding": 1}),
]


def made(shape: tuple[int, ...], c_in: int, c_out: int, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[len(shape)](c_in, c_out, dtype=torch.float64, **options)


def applied(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The matrix (inputs, outputs) of what the layer applies."""
    channels = layer.in_channels
    assert isinstance(channels, int)
    dims = channels * math.prod(shape)
    images = torch.eye(dims, dtype=torch.float64).reshape(dims, channels, *shape)
    with torch.no_grad():
        outputs: Tensor = layer(images) - layer(torch.zeros_like(images))
    return outputs


def periodic_values(shape: tuple[int, ...], c_in: int, c_out: int, options: dict[str, Any], layer: nn.Module) -> Tensor:
    """Of the layer without padding, its outputs wrapped onto the input's size times the stride."""
    plain = made(shape, c_in, c_out, {k: v for k, v in options.items() if k not in ("padding", "output_padding")})
    plain.load_state_dict(layer.state_dict())
    outputs = applied(plain, shape)
    stride = options.get("stride", 1)
    strides = (stride,) * len(shape) if isinstance(stride, int) else stride
    for axis, (n, s) in enumerate(zip(shape, strides, strict=True), start=2):
        wrapped = torch.zeros(*outputs.shape[:axis], n * s, *outputs.shape[axis + 1 :], dtype=torch.float64)
        outputs = wrapped.index_add_(axis, torch.arange(outputs.shape[axis]) % (n * s), outputs)
    values: Tensor = torch.linalg.svdvals(outputs.flatten(1))
    return values


@pytest.mark.parametrize(("shape", "c_in", "c_out", "options"), SHAPES)
def test_spectra_are_those_of_the_wrapped_operator(
    shape: tuple[int, ...], c_in: int, c_out: int, options: dict[str, Any]
) -> None:
    layer = made(shape, c_in, c_out, options)
    truth = periodic_values(shape, c_in, c_out, options, layer)
    found = model_spectra(layer, shape)[""].flatten().sort(descending=True).values
    torch.testing.assert_close(found, truth[: len(found)], rtol=1e-10, atol=1e-12)
    assert not len(truth) > len(found) or truth[len(found) :].max() < 1e-12


@pytest.mark.parametrize("operator", ["periodic", "zero-padded"])
@pytest.mark.parametrize(("shape", "c_in", "c_out", "options"), SHAPES)
def test_norms_are_brought_to_their_bounds(
    shape: tuple[int, ...], c_in: int, c_out: int, options: dict[str, Any], operator: Operator
) -> None:
    def norm(layer: nn.Module) -> float:
        values: Tensor = torch.linalg.svdvals(applied(layer, shape).flatten(1))
        if operator == "periodic":
            values = periodic_values(shape, c_in, c_out, options, layer)
        return values[0].item()

    layer = made(shape, c_in, c_out, options)
    before = norm(layer)
    for constraint, bound in (
        (Clip(0.8 * before, operator=operator), 0.8 * before),
        (Divide(0.5 * before, operator=operator, power_iterations="exact"), 0.5 * before),
        (Divide(0.2 * before, operator=operator, power_iterations=200), 0.2 * before),
    ):
        constraint.bind(layer, shape)
        first = norm(layer)
        constraint.project(layer, 1, force=True)
        norms = constraint.report().layers[""]
        assert norms.before == pytest.approx(first, rel=1e-3)
        assert norm(layer) <= norms.after * (1 + 1e-12)
        assert norms.after == pytest.approx(norm(layer), rel=1e-3)
        assert 0.95 * bound <= norm(layer) <= bound * (1 + 1e-3)


def test_they_stay_dense_and_count_as_weights() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.ConvTranspose2d(8, 4, 3, bias=False))
    small = tensorize(model, 2)
    assert type(small.get_submodule("1")) is nn.ConvTranspose2d
    assert compression(small) == 2 * 288 / (288 + 8 + 36 + 16)
    assert type(densify(small).get_submodule("1")) is nn.ConvTranspose2d
