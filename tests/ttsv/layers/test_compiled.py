"""What trains is one graph for `torch.compile`: no breaks, and not compiled anew for every size of a batch."""

import copy
import importlib
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.examples import deep
from ttsv.layers import SOC, FrameKind, MinMax, TTConv1d, TTConv2d, TTConv3d
from ttsv.layers.prior_art import spectral_normalized, svd_unfolded
from ttsv.models import create_model
from ttsv.models.conv_shape import LAYERS, ConvShape
from ttsv.models.convolutions import ConvFactory

BATCHES = (16, 128, 17, 64, 100, 192)
"""None smaller than 16: there oneDNN's convolutions, of which torch's own guards are, go another way."""

FRAMES: tuple[FrameKind, ...] = ("free", "orthonormal")

BROKEN_BY_THEIR_LIBRARY = ("bcop", "bcop-tt", "aoc", "aoc-tt")
"""orthogonium's power iteration assigns to parametrized vectors, which torch's compiler does not follow."""


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Brings in the compiler too, which takes every process seconds that only reads this module."""
    importlib.import_module("torch._dynamo.testing")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def layer_of(kind: str, frames: FrameKind, **options: int) -> nn.Module:
    torch.manual_seed(0)
    shape = {"in_channels": 6, "out_channels": 8, "kernel_size": 3, "stride": 1, "padding": 1, "input_size": 6}
    conv = ConvShape(name="conv", bias=True, **{**shape, **options})
    return ConvFactory(kind, 4 if kind.endswith("tt") else None, frames)(conv)


def kinds() -> list[object]:
    found: list[object] = []
    for kind in LAYERS:
        for frames in FRAMES if kind.endswith("tt") else FRAMES[:1]:
            # Frames around a kind of layer are compiled as those of `tt`, and the kind as it is by itself.
            framed_alike = kind.endswith("-tt") and (kind, frames) != ("soc-tt", FRAMES[0])
            marks = [pytest.mark.deep] * framed_alike + [pytest.mark.slow] * (
                kind not in ("dense", "tt", "soc", "soc-tt")
            )
            if kind in BROKEN_BY_THEIR_LIBRARY:
                marks.append(pytest.mark.xfail(reason="orthogonium assigns to parametrized vectors", strict=True))
            found.append(pytest.param(kind, frames, marks=marks))
    return found


def passes(layer: nn.Module, forward: Callable[[Tensor], Tensor], sides: tuple[int, ...]) -> list[Tensor]:
    """Results and gradients over all sizes of batches, the layer's state going on from one to the next."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for count in BATCHES:
        images = torch.randn((count, *sides), generator=generator)
        layer.zero_grad()
        result = forward(images)
        torch.autograd.backward(result.square().mean())
        found += [result.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
    return found


def compiles(layer: nn.Module, sides: tuple[int, ...], backend: str = "eager") -> None:
    """Asserts that one graph, or two, serve all batches, to the numbers of the layer itself."""
    layer.train()
    for part in layer.modules():
        if isinstance(part, SOC):
            part.train_terms = 2  # as all that follow are traced
    own = copy.deepcopy(layer)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    found = passes(layer, torch.compile(layer, backend=counter, fullgraph=True), sides)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert counter.frame_count <= 2, "compiled anew more than once"
    for got, wanted in zip(found, passes(own, own, sides), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "frames"), kinds())
def test_every_kind_of_layer_is_one_graph_for_all_batches(kind: str, frames: FrameKind) -> None:
    compiles(layer_of(kind, frames), (6, 6, 6))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tt", deep("soc")])
def test_strides_and_small_images_too(kind: str) -> None:
    compiles(layer_of(kind, "orthonormal", stride=2), (6, 6, 6))  # of which the core's are 3 x 3


@pytest.mark.parametrize("dims", [1, 3])
def test_other_numbers_of_axes(dims: int) -> None:
    torch.manual_seed(0)
    layer = {1: TTConv1d, 3: TTConv3d}[dims](6, 8, 3, 4, padding=1)
    compiles(layer, (6, *(4,) * dims))


@pytest.mark.parametrize("make", [svd_unfolded, spectral_normalized])
def test_prior_art_beside_the_kinds(make: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    layer = make(6, 8, 3)
    compiles(layer, (6, 6, 6))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tt", deep("soc"), deep("soc-tt")])
def test_gradients_are_traced_too(kind: str) -> None:
    compiles(layer_of(kind, "free"), (6, 6, 6), "aot_eager")


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("c++") is None, reason="takes a C++ compiler")
def test_generated_code_gives_the_same_numbers() -> None:
    compiles(layer_of("tt", "free"), (6, 6, 6), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [deep("soc"), "soc-tt"])
def test_the_cast_of_mixed_precision_is_traced(kind: str) -> None:
    layer = layer_of(kind, "free").train()
    own, images = copy.deepcopy(layer), torch.randn(16, 6, 6, 6)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(images), own(images)
    assert torch.equal(found, expected)
    for result in (found, expected):
        torch.autograd.backward(result.square().mean())
    for got, wanted in zip(layer.parameters(), own.parameters(), strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        assert torch.linalg.vector_norm(got.grad - wanted.grad) <= 1e-3 * torch.linalg.vector_norm(wanted.grad)


@pytest.mark.slow
def test_a_whole_network_is_one_graph() -> None:
    torch.manual_seed(0)
    network = create_model("small-cnn", num_classes=10, in_channels=3, image_size=16, layer="tt", rank=8)
    compiles(network, (3, 16, 16))


def test_frames_are_merged_as_for_one_size_of_a_batch() -> None:
    """Another way of merging is best for the smallest of these batches, and none costs a graph of its own."""
    torch.manual_seed(0)
    layers = nn.Sequential(TTConv2d(6, 8, 3, (6, 2), padding=1), MinMax(), TTConv2d(8, 6, 3, (2, 6), padding=1))
    shapes = [torch.Size((count, 8, 3, 3)) for count in (1, *BATCHES)]
    second = layers[2]
    assert isinstance(second, TTConv2d)
    assert len({second._merges(shape) for shape in shapes}) > 1
    compiles(layers, (6, 3, 3))


def test_a_break_is_seen() -> None:
    class Breaking(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(images)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiles(Breaking(2, 2), (2,))
