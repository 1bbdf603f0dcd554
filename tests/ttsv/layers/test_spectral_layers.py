"""Layers that are orthogonal by construction, alone and between frames: spectra, conversion, what is listed."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ttsv.layers import SOC, SOCTT, FramedConv2d, FrameKind, TTConv2d, densify, tensorize
from ttsv.layers.prior_art import Cayley, aoc, bcop
from ttsv.spectral.network import layer_singular_values, model_spectra, spectral_layers

Core = Callable[[int, int], nn.Module]

PERIODIC: dict[str, tuple[Core, int]] = {
    "cayley": (lambda a, b: Cayley(a, b, 3, bias=False), 1),
    "cayley, stride 2": (lambda a, b: Cayley(a, b, 3, 2, bias=False), 2),
    "cayley, 1x1": (lambda a, b: Cayley(a, b, 1, bias=False), 1),
    "bcop": (lambda a, b: bcop(a, b, 3, bias=False), 1),
    "bcop, stride 2": (lambda a, b: bcop(a, b, 3, 2, bias=False), 2),
    "aoc, stride 2": (lambda a, b: aoc(a, b, 3, 2, bias=False), 2),
    # Kernels of one tap: nothing is padded.
    "soc, 1x1": (lambda a, b: SOC(a, b, 1, bias=False), 1),
    "soc, 1x1, stride 2": (lambda a, b: SOC(a, b, 1, 2, bias=False), 2),
    "dense": (lambda a, b: nn.Conv2d(a, b, 3, stride=2, padding=1, padding_mode="circular", bias=False), 2),
}
"""Cores whose padding is periodic, hence their operators are those that have the spectra; and their strides."""


def singular_values(layer: nn.Module, channels: int, size: tuple[int, int]) -> Tensor:
    """Of the dense operator, all of them, descending; applied in float32, as orthogonium has nothing else."""
    dims = channels * math.prod(size)
    images = torch.eye(dims).reshape(dims, channels, *size)
    with torch.no_grad():
        outputs = layer(images) - layer(torch.zeros_like(images))
    found: Tensor = torch.linalg.svdvals(outputs.flatten(1).double())
    return found


def nonzero(values: Tensor, count: int) -> Tensor:
    """The largest `count`, ascending; all others must be rounding."""
    ordered = values.double().flatten().sort(descending=True).values
    assert (ordered[count:] < 1e-4).all()
    return ordered[:count].flip(0)


@pytest.mark.parametrize("size", [(6, 10), (8, 6), (4, 4)], ids=str)
@pytest.mark.parametrize("core", PERIODIC)
def test_spectra_between_frames_of_any_norm(core: str, size: tuple[int, int]) -> None:
    """Against the dense operator: frames held orthonormal, orthonormal by chance, far from it."""
    make, stride = PERIODIC[core]
    kinds: list[tuple[FrameKind, float]] = [("orthonormal", 0.0), ("free", 0.0), ("free", 0.5)]
    for frames, change in kinds:
        torch.manual_seed(0)
        layer = FramedConv2d(5, 7, (3, 4), make, frames=frames).eval()
        if change:
            for frame in (layer.k1, layer.k3):
                frame.data.add_(change * torch.randn_like(frame))
        found = layer_singular_values(layer, size)
        frequencies = math.prod(size) // stride**2
        assert found.shape == (frequencies, min(4, stride**2 * 3))
        assert (found.diff(dim=1) <= 1e-6).all()
        count = found.numel()
        torch.testing.assert_close(
            nonzero(found, count), nonzero(singular_values(layer, 5, size), count), atol=1e-4, rtol=1e-4
        )
        if core != "dense" and not change:
            assert (found - 1).abs().max() < 1e-3


@pytest.mark.parametrize("core", PERIODIC)
def test_spectra_without_frames(core: str) -> None:
    make, stride = PERIODIC[core]
    torch.manual_seed(0)
    for c_in, c_out in ((3, 4), (5, 2)):
        layer = make(c_in, c_out).eval()
        found = layer_singular_values(layer, (4, 6))
        assert found.shape == (24 // stride**2, min(c_out, stride**2 * c_in))
        torch.testing.assert_close(
            nonzero(found, found.numel()),
            nonzero(singular_values(layer, c_in, (4, 6)), found.numel()),
            atol=1e-4,
            rtol=1e-4,
        )


def test_rows_of_cayley_are_frequencies() -> None:
    """Each row has the values of the block at its frequency: those of a layer of one by one channels, by hand."""
    torch.manual_seed(0)
    layer = FramedConv2d(2, 2, (2, 1), lambda a, b: Cayley(a, b, 3, bias=False)).double().eval()
    layer.k1.data.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.5]]))
    found = layer_singular_values(layer, (4, 5)).reshape(4, 5, -1)
    response = torch.zeros(2, 2, 4, 5, dtype=torch.float64)  # of each input channel to a pixel
    with torch.no_grad():
        for channel in (0, 1):
            pixel = torch.zeros(1, 2, 4, 5, dtype=torch.float64)
            pixel[0, channel, 0, 0] = 1
            response[:, channel] = layer(pixel)[0] - layer(0 * pixel)[0]
    blocks = torch.fft.fft2(response).permute(2, 3, 0, 1)
    torch.testing.assert_close(found[..., 0], torch.linalg.svdvals(blocks)[..., 0])
    assert found.std() > 0.1


def test_a_stride_that_does_not_divide_is_taken_at_the_next_size() -> None:
    torch.manual_seed(0)
    layer = SOCTT(3, 4, 3, 2, stride=2).eval()
    torch.testing.assert_close(layer_singular_values(layer, (5, 8)), layer_singular_values(layer, (6, 8)))
    with pytest.raises(TypeError, match="ReLU is no spectral layer"):
        layer_singular_values(nn.ReLU(), 4)


def test_a_soc_counts_with_the_terms_of_its_mode() -> None:
    torch.manual_seed(0)
    layer = SOC(4, 4, 3, dtype=torch.float64)
    layer.refresh(1000)
    errors = [(layer_singular_values(layer.train(mode), 6) - 1).abs().max().item() for mode in (True, False)]
    assert errors[0] > 1e-6 > 1e-7 > errors[1]


class TestListed:
    def test_layers_and_not_what_they_consist_of(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            SOC(4, 4, 3),
            bcop(4, 6, 3, 2),
            FramedConv2d(6, 6, 3, lambda a, b: bcop(a, b, 3, bias=False)),
            SOCTT(6, 6, 3, 2),
            Cayley(6, 6, 1),
            FramedConv2d(6, 6, 3, lambda a, b: nn.Sequential(nn.Conv2d(a, b, 1))),
            FramedConv2d(6, 6, 3, lambda a, b: nn.Conv2d(a, b, 1, groups=3)),
            nn.Linear(2, 2),
        )
        names = ["0", "1", "2", "3", "4", "5", "6.core.0", "7.core"]
        assert list(spectral_layers(model)) == names
        assert list(spectral_layers(model, linear=True)) == [*names, "8"]
        assert list(spectral_layers(model[4])) == [""]

    def test_spectra_of_a_model_of_them(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(bcop(3, 8, 3, 2), nn.ReLU(), SOCTT(8, 6, 3, 4), Cayley(6, 5, 3, 2)).train()
        spectra = model_spectra(model, (8, 12))
        assert {name: values.shape for name, values in spectra.items()} == {
            "0": (24, 8),
            "2": (24, 4),
            "3": (6, 5),
        }
        assert all((values - 1).abs().max() < 0.01 for values in spectra.values())
        assert all(module.training for module in model.modules())


class TestConversion:
    def test_a_soc_gets_frames(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(SOC(8, 12, 3, 2, correction=0.9, eval_terms=9), SOC(4, 4, 1), nn.Conv2d(4, 8, 3)).eval()
        converted = tensorize(model, 6, frames="orthonormal")
        framed = converted.get_submodule("0")
        assert isinstance(framed, SOCTT)
        assert framed.rank == (6, 6)
        assert framed.frames == "orthonormal"
        assert (framed.core.correction, framed.core.eval_terms, framed.core.stride) == (0.9, 9, 2)
        assert framed.bias is not None
        assert torch.equal(framed.bias, model.get_submodule("0").bias)  # type: ignore[arg-type]
        assert not framed.training
        assert type(converted.get_submodule("1")) is SOC
        assert isinstance(converted.get_submodule("2"), nn.Module)
        assert framed(torch.rand(1, 8, 4, 4)).shape == (1, 12, 2, 2)
        # Half of 12, the widest; a 1x1 one counts too.
        widest = tensorize(nn.Sequential(SOC(8, 12, 3), SOC(12, 12, 1)), 0.5)
        assert [layer.rank for layer in widest.children()] == [(6, 6), (6, 6)]

    def test_frames_are_not_put_between_frames(self) -> None:
        model = nn.Sequential(SOCTT(8, 8, 3, 6), FramedConv2d(8, 8, 6, lambda a, b: nn.Conv2d(a, b, 3)))
        model.append(model[1])
        converted = tensorize(model, 2)
        assert [type(layer.core) for layer in converted.children()] == [SOC, nn.Conv2d]
        assert converted.get_submodule("1") is converted.get_submodule("2")
        assert type(tensorize(SOCTT(8, 8, 3, 6), 2)) is SOCTT

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("mode", ["zeros", "circular"])
    def test_frames_around_a_kernel_are_merged(self, mode: str, bias: bool) -> None:
        torch.manual_seed(0)
        options = {"stride": 2, "padding": 1, "padding_mode": mode}
        model = nn.Sequential(
            FramedConv2d(4, 6, (3, 2), lambda a, b: nn.Conv2d(a, b, 3, bias=not bias, **options), bias),  # type: ignore[arg-type]
            FramedConv2d(6, 8, 5, lambda a, b: bcop(a, b, 3, bias=False), bias),
            TTConv2d(8, 6, 3, 4),
        ).eval()
        merged = densify(model)
        assert [type(layer) for layer in merged.children()] == [nn.Conv2d] * 3
        images = torch.randn(2, 4, 8, 8)
        torch.testing.assert_close(merged(images), model(images), rtol=1e-4, atol=1e-5)

    def test_frames_around_what_has_no_kernel_stay(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            SOCTT(4, 6, 3, 3), FramedConv2d(6, 6, 3, lambda a, b: Cayley(a, b, 3)), bcop(6, 6, 3, 2)
        ).eval()
        images = torch.randn(2, 4, 8, 8)
        kept = densify(model)
        assert [type(layer) for layer in kept.children()] == [type(layer) for layer in model]
        assert torch.equal(kept(images), model(images))
