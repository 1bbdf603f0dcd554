"""Constraints say what the weights have as they are stored: rounded frames, half precision."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.examples import deep
from ttsv.constraints import Clip, Divide
from ttsv.constraints.operators import Operator
from ttsv.layers import SOC, FramedConv2d, TTConv, TTConv2d, densify, tensorize
from ttsv.spectral.bounds import conv_norm_bounds
from ttsv.spectral.network import model_spectra
from ttsv.spectral.singular_values import conv_norm
from ttsv.tt.decomposition import tt_error, tt_to_dense

HALVES = [torch.bfloat16, torch.float16]


def stored_kernel(layer: nn.Module) -> Tensor:
    """The dense kernel in float64 of the weights as they are."""
    if isinstance(layer, TTConv):
        return tt_to_dense(layer.k1.double(), layer.core.double(), layer.k3.double()).detach()
    return layer.get_parameter("weight").detach().double()


@pytest.mark.slow
@pytest.mark.parametrize("frames", ["free", "orthonormal"])
@pytest.mark.parametrize("constraint", [Clip(0.5), Clip(0.5, rescale=False), Divide(0.5, power_iterations="exact")])
@pytest.mark.parametrize("seeds", [range(2), deep(range(2, 8))], ids=str)
def test_frames_orthonormal_to_float32_are_part_of_the_norm(
    frames: Any, constraint: Clip | Divide, seeds: range
) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        layer = TTConv2d(40, 48, 3, 24, padding=1, frames=frames)
        constraint.bind(layer, 6)
        constraint.project(layer, 1, force=True)
        operator: Operator = constraint.operator
        kernel = stored_kernel(layer)
        truth = conv_norm(kernel, 6) if operator == "periodic" else conv_norm_bounds(kernel, 6).lower
        after = constraint.report().layers[""].after
        assert truth <= after <= truth * (1 + (1e-5 if operator == "periodic" else 0.02))
        if not (isinstance(constraint, Clip) and not constraint.options.rescale):
            assert after <= 0.5


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        TTConv2d(16, 24, 3, 8, stride=2, padding=1, dtype=dtype),
        TTConv2d(24, 16, 3, 12, padding=1, frames="orthonormal", dtype=dtype),
        nn.ConvTranspose2d(16, 8, 3, stride=2),
        SOC(8, 8, 3, dtype=dtype),
        FramedConv2d(8, 8, 4, lambda a, b: nn.Conv2d(a, b, 1, dtype=dtype), dtype=dtype),
        nn.Flatten(),
        nn.LazyLinear(10, dtype=dtype),
    ).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_spectra_of_half_precision_are_those_of_the_same_numbers(dtype: torch.dtype) -> None:
    model = network(dtype)
    model(torch.zeros(1, 3, 8, 8, dtype=dtype))
    found = model_spectra(model, 8, linear=True)
    assert len(found) == 7
    exact = network(torch.float64)
    exact(torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    for name, values in model_spectra(exact.eval(), 8, linear=True).items():
        # Held frames and the powers of a SOC are computed from these numbers, then rounded.
        slack = 0.02 if name in "24" else 1e-5
        torch.testing.assert_close(found[name].double(), values, rtol=slack, atol=slack * values.max().item())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("operator", ["periodic", "zero-padded"])
@pytest.mark.parametrize("floor", [None, 0.05])
def test_clips_of_half_precision_hold_for_the_rounded_weights(
    dtype: torch.dtype, operator: Operator, floor: float | None
) -> None:
    model = network(dtype)[:4].append(nn.Flatten()).append(nn.LazyLinear(10, dtype=dtype))
    model(torch.zeros(1, 3, 8, 8, dtype=dtype))
    clip = Clip(0.4, operator=operator, linear=True, rounds=2, floor=floor)
    clip.bind(model, 8)
    clip.project(model, 1, force=True)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    sizes = {"0": (8, 1), "1": (8, 2), "2": (4, 1), "3": (8, 2)}
    report = clip.report().layers
    assert list(report) == [*sizes, "5"]
    for name, (size, stride) in sizes.items():
        kernel = stored_kernel(model[int(name)])
        if operator == "periodic":
            truth = conv_norm(kernel, size, stride=stride)
        else:
            size, padding = (9, 0) if name == "3" else (size, 1)
            truth = conv_norm_bounds(kernel, size, stride=stride, padding=padding).lower
        assert truth <= report[name].after * (1 + 1e-12) <= 0.4 * (1 + 1e-12)
        assert truth >= 0.37
    linear = torch.linalg.matrix_norm(model.get_parameter("5.weight").detach().double(), 2).item()
    assert linear <= report["5"].after * (1 + 1e-12) <= 0.4 * (1 + 1e-12)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("iterations", [300, "exact"])
def test_divisions_of_half_precision(dtype: torch.dtype, iterations: Any) -> None:
    model = network(dtype)[:4]
    divide = Divide(0.2, power_iterations=iterations, operator="periodic")
    divide.bind(model, 8)
    divide.project(model, 1, force=True)
    for name, (size, stride) in {"0": (8, 1), "1": (8, 2), "2": (4, 1), "3": (8, 2)}.items():
        truth = conv_norm(stored_kernel(model[int(name)]), size, stride=stride)
        assert truth == pytest.approx(divide.report().layers[name].after, rel=1e-5)
        assert truth <= 0.2 * (1 + (1e-12 if iterations == "exact" else 0.02))


@pytest.mark.parametrize("frames", ["free", "orthonormal"])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_decomposed_in_float32(dtype: torch.dtype, frames: Any) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(12, 16, 3, padding=1).to(dtype)
    eps = torch.finfo(dtype).eps
    layer = tensorize(conv, 15, frames=frames)
    assert isinstance(layer, TTConv2d)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    best = TTConv2d.from_dense(_double(conv), 15)
    factors = (layer.k1.double(), layer.core.double(), layer.k3.double())
    error = tt_error(conv.weight.double(), *factors)
    assert error <= tt_error(conv.weight.double(), best.k1, best.core, best.k3) + 2 * eps
    torch.testing.assert_close(layer.k1.T.double() @ layer.k1.double(), torch.eye(12).double(), rtol=0, atol=2 * eps)
    images = torch.randn(2, 12, 6, 6, dtype=dtype)
    torch.testing.assert_close(densify(layer)(images), layer(images), rtol=0.1, atol=20 * eps)


def _double(conv: nn.Conv2d) -> nn.Conv2d:
    copied = nn.Conv2d(12, 16, 3, padding=1).double()
    copied.load_state_dict({name: tensor.double() for name, tensor in conv.state_dict().items()})
    return copied
