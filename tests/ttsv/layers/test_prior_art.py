import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttsv.constraints import Clip
from ttsv.layers import FramedConv2d
from ttsv.layers.prior_art import Cayley, aoc, aol, bcop, spectral_normalized, svd_unfolded
from ttsv.spectral.network import model_spectra, spectral_layers

SHAPES = [(4, 4, 1), (3, 6, 1), (6, 4, 1), (2, 6, 2), (4, 8, 2)]
ORTHOGONAL: list[Callable[..., nn.Module]] = [bcop, aoc, Cayley]


def values(layer: nn.Module, channels: int, size: tuple[int, int]) -> Tensor:
    """Singular values of the layer's dense operator in evaluation mode, descending."""
    layer = copy.deepcopy(layer).eval()
    dims = channels * math.prod(size)
    images = torch.eye(dims, dtype=next(layer.parameters()).dtype).reshape(dims, channels, *size)
    with torch.no_grad():
        outputs = layer(images) - layer(torch.zeros_like(images))
    found: Tensor = torch.linalg.svdvals(outputs.flatten(1).double())
    return found


def trained(layer: nn.Module, channels: int, steps: int = 20) -> nn.Module:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9)
    images = torch.randn(8, channels, 6, 6)
    layer.train()
    for _ in range(steps):
        loss = (layer(images) - 1).square().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return layer


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", ORTHOGONAL, ids=lambda make: make.__name__)
def test_orthogonal_layers_have_singular_values_of_one(
    make: Callable[..., nn.Module], shape: tuple[int, int, int]
) -> None:
    c_in, c_out, stride = shape
    torch.manual_seed(0)
    layer = make(c_in, c_out, 3, stride)
    start = values(layer, c_in, (6, 6))
    assert (start - 1).abs().max() < 1e-4
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    trained(layer, c_in)
    assert (values(layer, c_in, (6, 6)) - 1).abs().max() < 1e-3
    assert any((p - before[name]).abs().max() > 1e-3 for name, p in layer.named_parameters())


@pytest.mark.parametrize("make", [*ORTHOGONAL, aol], ids=lambda make: make.__name__)
def test_a_pass_in_evaluation_changes_nothing(make: Callable[..., nn.Module]) -> None:
    """What is measured of a network is of the weights that are saved, however often it was looked at."""
    torch.manual_seed(0)
    layer, images = trained(make(4, 6, 3), 4, 3).eval(), torch.randn(2, 4, 6, 6)
    saved = copy.deepcopy(layer.state_dict())
    with torch.inference_mode():
        first, again = layer(images), layer(images)
    assert torch.equal(first, again)
    assert all(torch.equal(saved[name], value) for name, value in layer.state_dict().items())
    other = make(4, 6, 3).eval()
    other.load_state_dict(saved)
    assert torch.equal(other(images), first)
    trained(layer, 4, 1)
    assert not torch.equal(layer.eval()(images), first)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("make", [*ORTHOGONAL, aol], ids=lambda make: make.__name__)
def test_layers_take_the_memory_format_of_images(make: Callable[..., nn.Module], stride: int) -> None:
    torch.manual_seed(0)
    layer, images = make(4, 6, 3, stride).eval(), torch.randn(2, 4, 6, 6)
    expected = layer(images)
    layer = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(images.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [bcop, aoc], ids=lambda make: make.__name__)
def test_zero_padding_keeps_the_norm_and_loses_the_small_values(make: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    found = values(make(4, 4, 3, padding_mode="zeros"), 4, (6, 6))
    assert found[0] < 1 + 1e-4
    assert found[-1] < 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_aol_is_one_lipschitz(shape: tuple[int, int, int]) -> None:
    c_in, c_out, stride = shape
    torch.manual_seed(0)
    layer = trained(aol(c_in, c_out, 3, stride), c_in)
    assert 0.1 < values(layer, c_in, (6, 6))[0] < 1 + 1e-5


def test_cayley_in_float64_on_rectangles() -> None:
    torch.manual_seed(0)
    layer = Cayley(3, 5, 3, stride=2, dtype=torch.float64)
    for size in ((6, 10), (8, 6), (4, 2)):  # the last of 2 x 1 pixels after the stride: the kernel wraps around
        found = values(layer, 3, size)
        torch.testing.assert_close(found, torch.ones_like(found))
    assert list(spectral_layers(layer)) == [""]
    with pytest.raises(ValueError, match=r"stride = 2: must divide the input's sides, \(5, 6\)"):
        layer(torch.zeros(1, 3, 5, 6, dtype=torch.float64))
    assert repr(Cayley(3, 5, 3, bias=False)) == "Cayley(3, 5, kernel_size=3, stride=1, bias=False)"


def test_cayley_of_a_skew_kernel_is_the_textbook_transform() -> None:
    """(I + A)^-1 (I - A) for the dense skew operator A of a square kernel."""
    torch.manual_seed(0)
    layer = Cayley(2, 2, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.sub_(layer.weight.transpose(0, 1).flip(2, 3).clone())
        layer.alpha.copy_(torch.linalg.vector_norm(layer.weight))
    conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64)
    conv.load_state_dict({"weight": layer.weight})
    images = torch.eye(2 * 20, dtype=torch.float64).reshape(40, 2, 4, 5)
    skew, found = conv(images).flatten(1).T, layer(images).flatten(1).T
    one = torch.eye(40, dtype=torch.float64)
    # The library's map doubles the skew part: A = U - U^H of the block U.
    torch.testing.assert_close(found, torch.linalg.solve(one + 2 * skew, one - 2 * skew))


@pytest.mark.parametrize("make", [bcop, aoc, aol, svd_unfolded], ids=lambda make: make.__name__)
def test_kernels_are_not_rounded_in_mixed_precision(make: Callable[..., nn.Module]) -> None:
    """In bf16 Bjorck's iteration may diverge. (The power iteration of torch has no operation that autocast rounds.)"""
    conv = copy.deepcopy(make(4, 8, 3)).eval()
    expected = conv.weight
    assert isinstance(expected, Tensor)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(conv.weight, expected, rtol=0, atol=1e-5)
        assert conv(torch.rand(1, 4, 6, 6)).dtype == torch.bfloat16


def test_spectral_normalisation_is_of_the_unfolding() -> None:
    torch.manual_seed(0)
    layer = spectral_normalized(4, 6, 3)
    assert isinstance(layer, nn.Conv2d)
    for _ in range(200):
        layer(torch.zeros(1, 4, 3, 3))
    unfolding = torch.linalg.matrix_norm(layer.weight.flatten(1), 2).item()
    assert unfolding == pytest.approx(1, rel=1e-3)
    assert 1 < values(layer, 4, (6, 6))[0] < 3 * unfolding


def test_svd_of_the_unfolding() -> None:
    torch.manual_seed(0)
    layer = svd_unfolded(3, 8, 3, stride=2)
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 8, 3, 2, 1)
    assert isinstance(layer, nn.Conv2d)
    torch.testing.assert_close(layer.weight, plain.weight)
    trained(layer, 3)
    assert (layer.weight - plain.weight).abs().max() > 1e-3
    s = layer.get_parameter("parametrizations.weight.original1").detach()
    torch.testing.assert_close(
        torch.linalg.svdvals(layer.weight.detach().flatten(1)), s.abs().sort(descending=True).values
    )
    assert values(layer, 3, (6, 6))[0] <= 3 * s.abs().max()
    low = svd_unfolded(3, 8, 3, rank=2)
    assert torch.linalg.matrix_rank(low.weight.detach().flatten(1), rtol=1e-5) == 2  # type: ignore[operator]
    for rank, fix in ((0, "at least 1"), (9, "at most 8")):
        with pytest.raises(ValueError, match=f"rank = {rank}: must be {fix}"):
            svd_unfolded(3, 8, 3, rank=rank)


@pytest.mark.parametrize("stride", [1, 2])
def test_bcop_between_orthonormal_frames(stride: int) -> None:
    torch.manual_seed(0)
    layer = FramedConv2d(6, 10, 4, lambda a, b: bcop(a, b, 3, stride, bias=False), frames="orthonormal")
    trained(layer, 6)
    found = values(layer, 6, (6, 6))
    kept = 4 * 36 // stride**2
    assert (found[:kept] - 1).abs().max() < 1e-3
    assert found[kept:].max() < 1e-5


def test_their_spectra_are_those_of_their_kernels_and_projections_refuse_them() -> None:
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {
        "bcop": bcop(4, 4, 3),
        "aoc": aoc(4, 8, 3, 2),
        "aol": aol(8, 8, 3),
        "svd": svd_unfolded(8, 8, 3),
    }
    model = nn.Sequential(*layers.values()).eval()
    spectra = model_spectra(model, 8)
    assert list(spectra) == ["0", "1", "2", "3"]
    for name in ("0", "1"):
        assert (spectra[name] - 1).abs().max() < 1e-4
    assert spectra["2"].max() <= 1 + 1e-5
    with pytest.raises(ValueError, match=r"model\.0 = '.*': must not be parametrized"):
        Clip(1.0).bind(model, 8)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [(aoc, (4, 4, 1, 2), "kernel_size = 1: must be at least the stride, 2"), (bcop, (4, 4, 2, 2), "must be odd")],
)
def test_kernels_that_cannot_be(make: Callable[..., nn.Module], arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*arguments)
