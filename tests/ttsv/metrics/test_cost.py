from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.examples import deep, examples
from ttsv.errors import ConfigError
from ttsv.layers import SOC, FramedConv2d, TTConv2d, TTConv3d, tensorize
from ttsv.layers.prior_art import bcop
from ttsv.metrics import cost
from ttsv.models import create_model, layer_shapes, list_models
from ttsv.models.conv_shape import LAYERS, SOC_TERMS, ConvShape
from ttsv.models.convolutions import ConvFactory
from ttsv.models.shapes import shape_compression, shape_macs
from ttsv.spectral.network import model_spectra, spectral_layers

NAMES = (*list_models(), "wrn10-1")
SMALLEST = (
    "small-cnn",
    "small-cnn1d",
    "small-cnn3d",
    "single-conv",
    "wrn10-1",
    "wrn16-10",
    "vgg11",
    "lipconvnet-5",
    "resnet18",
)
"""Of each family one; the others have more of the same layers."""
RANKS = (24, 256, 0.25)
META_KINDS = ("dense", "tt", "soc", "soc-tt")
"""Kinds that need no weights to be built: those of orthogonium iterate on theirs."""


def on_meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return create_model(name, num_classes=10, **options)


def linear_macs(model: nn.Module) -> int:
    return sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, nn.Linear))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in SMALLEST else deep(name) for name in NAMES])
def test_costs_from_shapes_are_those_of_the_model(name: str) -> None:
    """Of every network, kind of layer and rank: compression of all, multiply-accumulates at two of the ranks."""
    shapes = layer_shapes(name)
    kinds = META_KINDS if shapes[0].dims == 2 else META_KINDS[:2]
    for kind in kinds:
        for rank in RANKS if kind.endswith("tt") else (None,):
            model = on_meta(name, layer=kind, rank=rank)
            found = cost.compression(model)
            assert shape_compression(shapes, rank, kind) == found, (kind, rank)
            assert found == 1 if rank is None else found > 0
            if rank in (None, 0.25):
                measured = cost.multiply_accumulates(model, 32) - linear_macs(model)
                assert shape_macs(shapes, rank, kind) == measured, (kind, rank)


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in META_KINDS])
def test_costs_of_other_orthogonal_layers(kind: str) -> None:
    """Strided AOC and Cayley make their operators in every pass, which the count from shapes leaves out."""
    for rank in (None, 3, 0.5) if kind.endswith("tt") else (None,):
        model = create_model("wrn10-1", num_classes=10, image_size=8, layer=kind, rank=rank)
        shapes = layer_shapes("wrn10-1", image_size=8)
        assert shape_compression(shapes, rank, kind) == cost.compression(model)
        measured = cost.multiply_accumulates(model, 8) - linear_macs(model)
        if kind.startswith(("aoc", "cayley")):
            assert shape_macs(shapes, rank, kind) < measured
        else:
            assert shape_macs(shapes, rank, kind) == measured


@pytest.mark.parametrize(
    ("name", "layer", "rank", "printed"),
    [
        *(("wrn16-10", "tt", rank, printed) for rank, printed in ((192, 3.6), (256, 2.4), (320, 1.8))),
        ("wrn16-10", "tt", 0.3, 3.6),
        *(("lipconvnet-5", "soc-tt", rank, printed) for rank, printed in ((128, 2.9), (256, 1.2), (0.25, 2.9))),
        *(("lipconvnet-20", "soc-tt", rank, printed) for rank, printed in ((128, 3.3), (256, 1.4), (0.5, 1.4))),
        *(("lipconvnet-30", "soc-tt", rank, printed) for rank, printed in ((128, 3.5), (256, 1.5))),
        *(("vgg19", "tt", rank, printed) for rank, printed in ((192, 3.3), (256, 2.2))),
    ],
)
def test_compression_of_the_paper(name: str, layer: str, rank: float, printed: float) -> None:
    """Tables 1 and 2, and the figure for VGG-19."""
    assert round(shape_compression(layer_shapes(name), rank, layer), 1) == printed
    assert round(cost.compression(on_meta(name, layer=layer, rank=rank)), 1) == printed


def test_parameters_of_the_papers_networks() -> None:
    """Counted by hand from the protocols: convolutions, batch norm, heads."""
    wrn = 9 * (3 * 16 + 16 * 160 + 3 * 160**2 + 160 * 320 + 3 * 320**2 + 320 * 640 + 3 * 640**2)
    wrn += 2 * (16 + 3 * 160 + 160 + 3 * 320 + 320 + 3 * 640 + 640) + 640 * 10 + 10
    assert cost.parameters(on_meta("wrn16-10")) == wrn == 16_858_074
    widths = [3, *[64] * 2, *[128] * 2, *[256] * 4, *[512] * 8]
    vgg = sum(9 * a * b + 3 * b for a, b in pairwise(widths))
    assert cost.parameters(on_meta("vgg19")) == vgg + 2 * (512 * 512 + 512) + 5120 + 10
    lipconvnet, channels = 0, 3
    for width in (32, 64, 128, 256, 512):
        taps = 1 if width == 512 else 9
        sides = [max(channels, width), *[width] * 6, 4 * width]
        outputs = [*[width] * 7, 2 * width]
        for side, out in zip(sides, outputs, strict=True):
            lipconvnet += side**2 * (taps if side == 4 * width else 9) + out
        channels = 2 * width
    assert cost.parameters(on_meta("lipconvnet-40", layer="soc")) == lipconvnet + 1024**2 + 10


def test_compression_by_hand() -> None:
    # 288 + 18,432 + 36,864 weights; at rank 8: 1 + 72 + 256, 256 + 576 + 512, 512 + 576 + 512.
    compressed = create_model("small-cnn", num_classes=10, in_channels=1, layer="tt", rank=8)
    assert cost.compression(compressed) == pytest.approx(55_584 / 3_273)
    # A SOC of 8 channels with stride 2 is square of 32; between frames to 3 channels of 12.
    soc = tensorize(SOC(8, 6, 3, stride=2), 3)
    assert cost.compression(soc) == 32**2 * 9 / (8 * 3 + 12**2 * 9 + 3 * 6)
    framed = FramedConv2d(8, 6, (3, 2), lambda a, b: bcop(a, b, 3, 2, bias=False))
    assert cost.compression(framed) == 4 * 8 * 6 * 9 / (8 * 3 + 4 * 3 * 2 * 9 + 2 * 6)
    assert cost.compression(nn.Conv1d(8, 8, 3, groups=2)) == 1


@st.composite
def drawn_shapes(draw: st.DrawFn) -> tuple[ConvShape, str, int | None]:
    kind = draw(st.sampled_from(META_KINDS))
    dims = draw(st.integers(1, 3)) if kind in ("dense", "tt") else 2
    kernel_size, stride = draw(st.sampled_from((1, 3, 5))), draw(st.integers(1, 3))
    shape = ConvShape(
        name="conv",
        in_channels=draw(st.integers(1, 40)),
        out_channels=draw(st.integers(1, 40)),
        kernel_size=kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        input_size=stride * draw(st.integers(1, 4)),
        dims=dims,
        bias=draw(st.booleans()),
    )
    return shape, kind, draw(st.one_of(st.none(), st.integers(1, 45)))


@examples(120)
@given(drawn_shapes())
def test_costs_of_drawn_convolutions(drawn: tuple[ConvShape, str, int | None]) -> None:
    shape, kind, rank = drawn
    with torch.device("meta"):
        layer = ConvFactory(kind, rank, "free")(shape)
    weights = sum(p.numel() for name, p in layer.named_parameters() if name != "bias")
    assert shape.weights(rank, kind) == weights
    assert shape.weights(None, kind) / weights == cost.compression(layer)
    assert cost.multiply_accumulates(layer, shape.input_size) == shape.macs(rank, kind)
    output = layer(torch.empty(1, shape.in_channels, *(shape.input_size,) * shape.dims, device="meta"))
    assert output.shape[1:] == (shape.out_channels, *(shape.output_size,) * shape.dims)


def test_multiply_accumulates_by_hand() -> None:
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
    assert cost.multiply_accumulates(conv, (8, 6)) == 4 * 3 * 6 * 2 * 9
    # Three convolutions of a TT layer, or one or two with frames merged where the ranks are close to the channels.
    tt = TTConv2d(16, 16, 3, 4, padding=1)
    assert cost.multiply_accumulates(tt, 8) == 64 * (16 * 4 + 4 * 4 * 9 + 4 * 16)
    volume = TTConv3d(2, 32, 3, 24, padding=1)
    assert cost.multiply_accumulates(volume, 6) == 6**3 * 2 * 2 + 27 * 2 * 24 * 32 + 6**3 * 27 * 2 * 32
    square = TTConv2d(16, 16, 3, (15, 16), padding=1)
    assert cost.multiply_accumulates(square, 30) == 9 * 15 * 16 * (16 + 16) + 900 * 16 * 16 * 9
    assert cost.multiply_accumulates(SOC(2, 5, 3, stride=2), 6) == SOC_TERMS * 9 * 8**2 * 9
    linear = nn.Sequential(nn.Flatten(), nn.Linear(2 * 4 * 3, 10), nn.ReLU(), nn.Linear(10, 5))
    assert cost.multiply_accumulates(linear, (4, 3)) == 24 * 10 + 10 * 5
    with pytest.raises(ConfigError, match="must have a convolution"):
        cost.multiply_accumulates(nn.ReLU(), 3)


def test_inference_times_are_of_the_network_as_it_is_and_merged() -> None:
    model, images = create_model("small-cnn", num_classes=10, in_channels=1, layer="tt", rank=4), torch.rand(2, 1, 8, 8)
    found = cost.inference_times(model, images, (1, 6))
    assert [(one.merged, one.count) for one in found] == [(False, 1), (False, 6), (True, 1), (True, 6)]
    assert all(one.images_per_second == pytest.approx(one.count / one.seconds) for one in found)
    dense = cost.inference_times(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), images)
    assert [(one.merged, one.count) for one in dense] == [(False, 1), (False, 128)]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says what to compare with")
def test_peak_allocation() -> None:
    def compute() -> float:
        first = torch.ones(1000, 1000)
        second = first + 1
        del first
        third = second[:10].clone()
        return float(second.sum() + third.sum())

    held = torch.ones(5000, 1000)  # before, and not counted
    found, peak = cost.peak_allocation(compute, torch.device("cpu"))
    assert found == 2e6 + 2e4
    assert peak == pytest.approx(8e6, rel=1e-3)
    assert cost.peak_allocation(lambda: held.shape, torch.device("cpu")) == (held.shape, 0)

    kept = [cost.peak_allocation(lambda: torch.ones(1000), torch.device("cpu"))[0]]

    def free_what_an_earlier_call_kept() -> int:
        kept.clear()
        return torch.ones(1000).numel()

    assert cost.peak_allocation(free_what_an_earlier_call_kept, torch.device("cpu")) == (1000, 4000)


@pytest.mark.parametrize(("share", "predicted"), [(2, 4), (3, 9)])
def test_the_spectrum_of_a_tt_layer_takes_less_memory(share: int, predicted: int) -> None:
    """By the square of what the frames take off the channels, less what the factors themselves take."""
    peaks = []
    for rank in (None, 96 // share):
        model = create_model("single-conv", num_classes=2, in_channels=96, image_size=16, layer="tt", rank=rank)
        peaks.append(cost.peak_allocation(partial(model_spectra, model, 16), torch.device("cpu"))[1])
    assert peaks[0] / peaks[1] == pytest.approx(predicted, rel=0.1)


def test_peak_memory_of_the_process() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    assert cost.peak_memory(torch.device("cpu")) == pytest.approx(1024 * int(kibibytes), rel=0.01)


def test_inference_is_timed_in_the_networks_precision() -> None:
    images = torch.rand(3, 1, 4, 4)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(16, 10)).double()
    assert 0 < cost.inference_seconds(linear, images, 5, budget=0) < 1
    for wrong in ((images[:0], 1, "images = 0"), (images, 0, "count = 0")):
        with pytest.raises(ConfigError, match=wrong[2]):
            cost.inference_seconds(linear, wrong[0], wrong[1])


def test_counting_changes_nothing_and_takes_parametrized_weights_as_made() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        parametrizations.orthogonal(nn.Conv2d(4, 4, 1)),
        nn.Sequential(SOC(4, 4, 3), nn.Dropout()).eval(),
        tensorize(nn.Conv2d(4, 6, 3), 2, frames="orthonormal"),
        nn.Flatten(),
        nn.Linear(6 * 36, 10),
    )
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    by_hand = 64 * (3 * 4 * 9 + 4 * 4 + SOC_TERMS * 16 * 9 + 4 * 2) + 36 * (4 * 9 + 2 * 6) + 2160
    assert cost.multiply_accumulates(model, 8) == by_hand
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_channels_of_an_image_that_the_first_convolution_does_not_see() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, images: Tensor) -> Tensor:
            first, second = images.chunk(2, dim=1)
            merged: Tensor = self.conv(first) + self.conv(second)
            return merged

    assert cost.multiply_accumulates(Half(), 3, in_channels=4) == 2 * 9 * 4
    assert list(spectral_layers(Half())) == ["conv"]


@given(c_in=st.integers(1, 64), c_out=st.integers(1, 64), rank=st.integers(1, 70))
def test_ranks_of_a_shape(c_in: int, c_out: int, rank: int) -> None:
    shape = ConvShape(
        name="conv", in_channels=c_in, out_channels=c_out, kernel_size=3, stride=1, padding=1, input_size=8
    )
    ranks = shape.ranks(rank)
    assert (ranks is None) == (rank >= max(c_in, c_out))
    assert ranks is None or ranks == (min(c_in, rank), min(c_out, rank))


@pytest.mark.parametrize("rank", [0, -1, 0.0, 1.5, True])
def test_ranks_that_cannot_be(rank: float) -> None:
    with pytest.raises(ConfigError, match="rank = "):
        shape_compression(layer_shapes("small-cnn"), rank)
