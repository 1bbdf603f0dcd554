import copy
import itertools
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ttsv.constraints import Clip
from ttsv.errors import ConfigError
from ttsv.layers import (
    FramedConv2d,
    FrameKind,
    TTConv,
    TTConv1d,
    TTConv2d,
    TTConv3d,
    densify,
    orthogonal_loss,
    tensorize,
)
from ttsv.models import create_model
from ttsv.spectral.bounds import conv_norm_bounds
from ttsv.spectral.geometry import periodic_size
from ttsv.spectral.network import layer_input_sizes, spectral_layers
from ttsv.tt.decomposition import tt_error

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense

TT: dict[int, type[TTConv]] = {1: TTConv1d, 2: TTConv2d, 3: TTConv3d}
CONV: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": "same"},
    {"padding": "valid", "bias": False},
    {"padding": 2, "padding_mode": "circular", "stride": 2},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate", "dilation": 2},
    {"padding": "same", "padding_mode": "circular"},
]


def of_torch(layer: TTConv, arguments: dict[str, Any]) -> nn.Module:
    conv: nn.Module = CONV[layer.spatial_dims](
        layer.in_channels, layer.out_channels, layer.kernel_size, dtype=torch.float64, **arguments
    )
    state = {"weight": layer.dense_kernel().detach()}
    conv.load_state_dict(state if layer.bias is None else state | {"bias": layer.bias.detach()})
    return conv


MERGES = list(itertools.product((False, True), repeat=2))
"""Whether k1, and whether k3, are merged into the core."""


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("merged", MERGES)
def test_forward_is_that_of_the_merged_convolution(
    d: int, arguments: dict[str, Any], merged: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    kernel_size = (3, 5, 3)[:d]
    layer = TT[d](4, 6, kernel_size, (2, 3), dtype=torch.float64, **arguments)
    conv = of_torch(layer, arguments)
    monkeypatch.setattr(layer, "_merges", lambda shape: merged)
    images = torch.randn(2, 4, *(9, 11, 7)[:d], dtype=torch.float64)
    torch.testing.assert_close(layer(images), conv(images))
    torch.testing.assert_close(layer(images[0]), conv(images[0]))


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("merged", MERGES)
def test_results_lie_as_those_of_torch(
    d: int, kernel_size: int, layout: str, merged: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what follows may view them: the strides that einsum leaves in a kernel decide over them."""
    sizes: list[tuple[int, int, int | tuple[int, int]]] = [(16, 8, 4), (8, 16, 4), (9, 5, (4, 1)), (1, 6, 3), (6, 1, 3)]
    for c_in, c_out, rank in sizes:
        layer = TT[d](c_in, c_out, kernel_size, rank, padding=kernel_size // 2)
        monkeypatch.setattr(layer, "_merges", lambda shape: merged)
        conv = of_torch(layer, {"padding": kernel_size // 2}).float()
        images = torch.randn(2, c_in, *(5,) * d)
        if layout == "channels last" and d > 1:
            images = images.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[d - 2])
        elif layout == "channels last":
            images = images.transpose(1, 2).contiguous().transpose(1, 2)
        result = layer(images.requires_grad_())
        if layout == "contiguous":
            assert result.stride() == conv(images).stride()
            result.view(2, -1)
        torch.autograd.backward(result.sum())


def test_merged_layers_can_be_saved() -> None:
    model = create_model("small-cnn", num_classes=10, in_channels=1, layer="tt", rank=6)
    wide = nn.Sequential(TTConv2d(16, 8, 3, 4), TTConv3d(16, 8, 3, 4), TTConv1d(16, 16, 3, 4), TTConv2d(16, 8, 1, 4))
    for network in (model, wide):
        state = densify(network).state_dict()
        assert load(save(state)).keys() == state.keys()  # safetensors takes contiguous tensors alone
        images = torch.randn(2, 16, 5, 5)
    densify(nn.Sequential(TTConv2d(16, 8, 3, 4)))(images).view(2, -1)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_same_padding_of_an_even_kernel_is_torchs() -> None:
    layer = TTConv1d(3, 3, 4, 2, padding="same", dtype=torch.float64)
    images = torch.randn(2, 3, 9, dtype=torch.float64)
    conv = of_torch(layer, {"padding": "same"})
    torch.testing.assert_close(layer(images), conv(images))


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_cheaper_way_is_taken(d: int) -> None:
    """The choice against multiply-accumulates counted layer by layer."""

    def counted(shape: tuple[int, ...], out: tuple[int, ...], layer: TTConv) -> dict[tuple[bool, bool], int]:
        c_in, c_out, (r1, r2), taps = layer.in_channels, layer.out_channels, layer.rank, math.prod(layer.kernel_size)
        first, last = shape[0] * math.prod(shape[2:]) * c_in * r1, shape[0] * math.prod(out[2:]) * r2 * c_out
        middle = shape[0] * math.prod(out[2:]) * taps
        adds_in, adds_out = int(r1 > 1), int(r2 > 1)  # elsewhere merging multiplies and adds nothing
        out_first = taps * (adds_out * r1 * r2 * c_out + adds_in * c_out * r1 * c_in)
        in_first = taps * (adds_in * r2 * r1 * c_in + adds_out * c_in * r2 * c_out)
        merge = out_first if r1 * c_out * (r2 + c_in) <= r2 * c_in * (r1 + c_out) else in_first
        return {
            (False, False): first + middle * r1 * r2 + last,
            (True, False): adds_in * taps * r2 * r1 * c_in + middle * c_in * r2 + last,
            (False, True): first + adds_out * taps * r2 * r1 * c_out + middle * r1 * c_out,
            (True, True): merge + middle * c_in * c_out,
        }

    choices = set()
    for c_in, c_out, rank in [(8, 8, 7), (8, 16, 2), (1, 32, 24), (32, 2, 24), (16, 16, 15), (8, 64, 8), (64, 8, 8)]:
        for batch, n in [(1, 3), (50, 3), (2, 8)]:
            layer = TT[d](c_in, c_out, 3, rank, padding=1, stride=2)
            shape = (batch, c_in, *(n for _ in range(d)))
            costs = counted(shape, tuple(layer(torch.zeros(shape)).shape), layer)
            chosen = layer._merges(torch.Size(shape))
            assert costs[chosen] == min(costs.values())
            choices.add(chosen)
    assert choices == set(MERGES)


def test_gradients_reach_every_factor_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TTConv2d(4, 5, 3, 2, padding=1, dtype=torch.float64)
    images = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    gradients = []
    for merged in MERGES:
        monkeypatch.setattr(layer, "_merges", lambda shape, merged=merged: merged)
        layer.zero_grad()
        layer(images).square().sum().backward()
        gradients.append([parameter.grad for parameter in layer.parameters()])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


def test_initialisation_has_torchs_variance_and_orthonormal_frames() -> None:
    torch.manual_seed(0)
    layer = TTConv2d(48, 64, 3, (24, 40))
    torch.testing.assert_close(layer.k1.T @ layer.k1, torch.eye(24), atol=1e-5, rtol=0)
    torch.testing.assert_close(layer.k3 @ layer.k3.T, torch.eye(40), atol=1e-5, rtol=0)
    conv = nn.Conv2d(48, 64, 3)
    assert layer.dense_kernel().var().item() == pytest.approx(conv.weight.var().item(), rel=0.05)
    assert layer.bias is not None
    assert layer.bias.abs().max() <= 1 / math.sqrt(48 * 9)
    assert layer.bias.std().item() == pytest.approx(1 / math.sqrt(3 * 48 * 9), rel=0.2)


def test_parameters_and_ranks() -> None:
    layer = TTConv3d(3, 8, (1, 2, 3), 5, bias=False)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "k1": (3, 3),
        "core": (5, 3, 1, 2, 3),
        "k3": (5, 8),
    }
    assert layer.rank == (3, 5)
    assert repr(TTConv2d(3, 8, 3, 2, stride=2, bias=False)) == (
        "TTConv2d(3, 8, kernel_size=(3, 3), rank=(2, 2), stride=(2, 2), bias=False)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_channels": 0}, "in_channels = 0"),
        ({"rank": 0}, "rank = 0"),
        ({"rank": (5, 1)}, r"rank = \(5, 1\)"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size"),
        ({"stride": 0}, "stride = 0"),
        ({"padding": -1}, "padding = -1"),
        ({"padding": "full"}, "padding = 'full'"),
        ({"padding": "same", "stride": 2}, 'must be 1 with padding="same"'),
        ({"padding_mode": "mirror"}, "padding_mode = 'mirror': must be one of zeros"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TTConv2d(**({"in_channels": 4, "out_channels": 4, "kernel_size": 3, "rank": 2} | arguments))


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_from_dense_at_full_rank_is_the_same_function(arguments: dict[str, Any]) -> None:
    conv = nn.Conv2d(4, 6, 3, dtype=torch.float64, **arguments).eval()
    state = torch.get_rng_state()
    layer = TTConv2d.from_dense(conv, 6)
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(images), conv(images))
    assert not layer.training
    assert all(p.requires_grad and p.is_leaf and not p.is_meta for p in layer.parameters())
    low = TTConv2d.from_dense(conv, (2, 3))
    assert 0 < tt_error(conv.weight, low.k1, low.core, low.k3) < 1


def test_from_dense_refuses() -> None:
    with pytest.raises(ValueError, match=r"conv\.groups = 2: must be 1"):
        TTConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2), 2)
    with pytest.raises(ValueError, match=r"must be an nn\.Conv2d"):
        TTConv2d.from_dense(nn.Conv1d(4, 4, 3), 2)
    with pytest.raises(ValueError, match=r"must be an nn\.Conv2d"):
        TTConv2d.from_dense(nn.Linear(4, 4), 2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    shared = nn.Conv2d(12, 12, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.Sequential(shared, nn.ReLU(), shared),
        nn.Conv2d(12, 12, 3, groups=3, padding=1),
        nn.Conv2d(12, 32, 1),
        parametrizations.spectral_norm(nn.Conv2d(32, 12, 3)),
        nn.Flatten(),
    ).double()


def test_tensorize_and_densify() -> None:
    model = network()
    images = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    tt = tensorize(model, 6)
    kinds = {name: type(tt.get_submodule(name)) for name in ("0", "2.0", "2.2", "3", "4")}
    assert kinds == {"0": TTConv2d, "2.0": TTConv2d, "2.2": TTConv2d, "3": nn.Conv2d, "4": TTConv2d}
    assert tt.get_submodule("2.0") is tt.get_submodule("2.2")
    assert tt.get_submodule("0").rank == (3, 6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    shared = {id(p) for p in model.parameters()} & {id(p) for p in tt.parameters()}
    assert not shared
    back = densify(tt)
    assert [type(layer) for layer in back.modules()] == [type(layer) for layer in model.modules()]
    assert back.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(back.eval()(images), tt.eval()(images))
    whole = tensorize(model, 31)
    assert [name for name, layer in whole.named_modules() if isinstance(layer, TTConv)] == ["4"]
    torch.testing.assert_close(whole.eval()(images), model.eval()(images))


def test_rank_as_a_fraction_of_the_widest_convolution() -> None:
    tt = tensorize(network(), 0.5)
    # Half of 32, the output of the 1x1: all layers of 12 channels stay dense.
    assert {name: layer.rank for name, layer in tt.named_modules() if isinstance(layer, TTConv)} == {"4": (12, 16)}
    pointwise = tensorize(nn.Conv1d(8, 4, 1), 0.25)
    assert isinstance(pointwise, TTConv1d)
    assert pointwise.rank == (2, 2)
    with_wide_head = nn.Sequential(nn.Conv1d(8, 8, 3), nn.Conv1d(8, 1000, 1))
    assert type(tensorize(with_wide_head, 0.5).get_submodule("0")) is nn.Conv1d
    assert tensorize(with_wide_head, 0.5, skip=["1"]).get_submodule("0").rank == (4, 4)
    whole = tensorize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 32, 1), nn.Conv2d(32, 32, 1)), 1.0)
    assert all(type(layer) is nn.Conv2d for layer in whole.children())
    assert tensorize(nn.Conv1d(4, 4, 3), 0.01).rank == (1, 1)


def test_skip() -> None:
    names = [n for n, m in tensorize(network(), 6, skip=["0", "2"]).named_modules() if isinstance(m, TTConv)]
    assert names == ["4"]
    with pytest.raises(ValueError, match="skip = 'stem': must be the name of a module"):
        tensorize(network(), 6, skip=["stem"])
    assert isinstance(tensorize(nn.Conv1d(4, 4, 3), 2, skip=[""]), nn.Conv1d)


@pytest.mark.parametrize("frames", ["free", "orthonormal"])
def test_frozen_weights_stay_frozen(frames: FrameKind) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[0].requires_grad_(False)
    tt = tensorize(model, 2, frames=frames)
    for converted in (tt, densify(tt)):
        assert not any(parameter.requires_grad for parameter in converted[0].parameters())  # type: ignore[index]
        assert all(parameter.requires_grad for parameter in converted[1].parameters())  # type: ignore[index]
    framed = FramedConv2d(4, 4, 2, lambda a, b: nn.Conv2d(a, b, 3)).requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in densify(framed).parameters())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_a_hook_recomputes_are_refused() -> None:
    for normed in (nn.utils.weight_norm(nn.Conv2d(4, 4, 3)), nn.utils.spectral_norm(nn.Conv2d(4, 4, 3))):
        with pytest.raises(ConfigError, match=r"model\.0 = 'Conv2d': must not have a weight that a hook recomputes"):
            tensorize(nn.Sequential(normed), 2)
    head = nn.Sequential(nn.Conv2d(4, 4, 3), nn.utils.weight_norm(nn.Linear(4, 4)))
    for convert in (densify, lambda model: tensorize(model, 2)):
        with pytest.raises(ConfigError, match=r"model\.1 = 'Linear': must not have a weight"):
            convert(head)
    unread = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(4, 4, 3)), nn.Conv2d(4, 4, 3))
    assert type(tensorize(unread, 2, skip=["0"]).get_submodule("0")) is nn.Conv2d


def tied() -> nn.Sequential:
    """The first and the last convolution have one weight."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2))
    model[3].weight = model[0].weight
    return model


def test_layers_that_share_a_weight_are_not_parted() -> None:
    with pytest.raises(ConfigError, match=r"model\.0 = 'Conv2d': must not share a parameter with model\.3"):
        tensorize(tied(), 2)
    kept = tensorize(tied(), 2, skip=["0", "3"])
    assert kept.get_parameter("0.weight") is kept.get_parameter("3.weight")
    assert isinstance(kept.get_submodule("1"), TTConv2d)
    with pytest.raises(ConfigError, match=r"model\.0 = 'Conv2d': must not share a parameter with model\.3"):
        tensorize(tied(), 2, skip=["3"])
    frames = tensorize(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)), 2)
    frames.get_submodule("1").k1 = frames.get_parameter("0.k1")
    with pytest.raises(ConfigError, match=r"model\.0 = 'TTConv2d': must not share a parameter with model\.1"):
        densify(frames)
    biases = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    biases[0].bias = biases[1].bias
    with pytest.raises(ConfigError, match=r"share a parameter with model\.1"):
        tensorize(biases, 2)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_layers_with_hooks_are_not_replaced(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    getattr(model[1], f"register_{kind}_hook")(lambda *_: None)
    with pytest.raises(ConfigError, match=r"model\.1 = 'Conv2d': must not have hooks"):
        tensorize(model, 2)
    kept = tensorize(model, 2, skip=["1"])
    assert [type(layer) for layer in kept.children()] == [TTConv2d, nn.Conv2d]
    getattr(kept.get_submodule("0"), f"register_{kind}_hook")(lambda *_: None)
    with pytest.raises(ConfigError, match=r"model\.0 = 'TTConv2d': must not have hooks"):
        densify(kept)


@pytest.mark.parametrize("rank", [0, -3, 0.0, 1.5, -0.5, math.nan, True])
def test_rank_out_of_range(rank: float) -> None:
    with pytest.raises(ValueError, match=r"rank = .*: must be"):
        tensorize(network(), rank)


@pytest.mark.parametrize(("rank", "printed"), [(192, 3.6), (256, 2.4), (320, 1.8)])
def test_compression_of_the_paper(rank: int, printed: float) -> None:
    """WRN-16-10 (table 1): 3-16, then three stages of four 3x3 convolutions with 160, 320 and 640 channels."""
    channels = [3, 16, *([160] * 4), *([320] * 4), *([640] * 4)]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Conv2d(a, b, 3, bias=False) for a, b in pairwise(channels)))
    weights = sum(p.numel() for p in model.parameters())
    own = 0
    for conv in model:
        assert isinstance(conv, nn.Conv2d)
        dense = rank >= max(conv.in_channels, conv.out_channels)
        layer = conv if dense else TTConv2d(conv.in_channels, conv.out_channels, 3, rank, bias=False, device="meta")
        own += sum(p.numel() for p in layer.parameters())
    assert round(weights / own, 1) == printed


def test_spectral_layers() -> None:
    tt = tensorize(network(), 6)
    assert list(spectral_layers(tt)) == ["0", "2.0", "3", "4", "5"]
    assert list(spectral_layers(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1)))) == ["1"]
    assert list(spectral_layers(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1)), linear=True)) == ["0", "1"]
    assert list(spectral_layers(nn.ConvTranspose2d(2, 2, 3))) == [""]


def test_layer_input_sizes_with_given_channels() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Conv2d(2, 2, 3, stride=2)

        def forward(self, images: Tensor) -> Tensor:
            first, second = images.chunk(2, dim=1)
            return torch.cat([self.branch(first), self.branch(second)], dim=1)

    assert layer_input_sizes(Split(), (9, 7), in_channels=4) == {"branch": (9, 7)}
    assert periodic_size((9, 7), (2, 3)) == (10, 9)
    assert periodic_size(8, (2, 1)) == (8, 8)


def test_sizes_of_inputs_given_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, images: Tensor) -> Tensor:
            return self.conv(input=images)  # type: ignore[no-any-return]

    assert layer_input_sizes(Named(), (8, 9)) == {"conv": (8, 9)}


def test_hooks_and_modes_are_restored_after_a_failing_pass() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 9))
    with pytest.raises(ConfigError, match=r"layer '1' at least \(9, 9\) pixels, not \(2, 2\)"):
        layer_input_sizes(model, 4)
    assert model.training
    assert not model[0]._forward_pre_hooks


class PaddedFirst(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.conv2d(nn.functional.pad(images, (1, 1, 1, 1)), self.weight, self.bias, self.stride)


class WithCoordinates(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(torch.cat([images, torch.zeros_like(images[:, :2])], dim=1))


def test_what_a_layer_does_to_its_images_first_is_its_own_business() -> None:
    small = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), PaddedFirst(4, 4, 3))
    assert layer_input_sizes(small, 4) == {"0": (4, 4), "1": (2, 2)}
    wider = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), WithCoordinates(6, 4, 3, padding=1))
    assert layer_input_sizes(wider, 4) == {"0": (4, 4), "1": (4, 4)}
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        layer_input_sizes(nn.Sequential(PaddedFirst(4, 4, 5)), 2)


def test_a_layer_called_at_several_sizes_counts_with_the_largest_on_each_axis() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, (1, 9), padding=(0, 4), bias=False)

        def forward(self, images: Tensor) -> Tensor:
            turned = images.transpose(2, 3)[..., :-1]
            return self.conv(images).sum() + self.conv(turned).sum()  # type: ignore[no-any-return]

    model = Twice()
    model.conv.weight.data[:] = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1, 0])
    assert layer_input_sizes(model, (16, 4)) == {"conv": (16, 15)}
    clip = Clip(1.0, every=1, operator="zero-padded")
    clip.bind(model, (16, 4))
    clip.project(model, 1)
    for size in ((16, 4), (4, 15)):
        assert conv_norm_bounds(model.conv.weight.detach(), size, padding=(0, 4)).upper <= 1.0


def test_orthogonal_loss(dense: "Dense") -> None:
    first, last = TTConv2d(5, 6, 3, (2, 3)), TTConv1d(4, 4, 3, 1)
    layers = nn.ModuleList([first, nn.Conv2d(3, 3, 3), last]).double()
    for seed, parameter in enumerate(layers.parameters()):
        parameter.data = dense.gaussian(*parameter.shape, seed=seed)
    total = 0.0
    for layer in (first, last):
        k1, k3 = layer.k1.detach().numpy(), layer.k3.detach().numpy()
        for gram in (k1.T @ k1, k3 @ k3.T):
            total += sum((gram[i, j] - (i == j)) ** 2 for i in range(len(gram)) for j in range(len(gram)))
    paper, code = orthogonal_loss(layers), orthogonal_loss(layers, "code")
    assert paper is not None
    assert code is not None
    assert paper.item() == pytest.approx(total / (2**2 + 3**2 + 1 + 1))
    assert code.item() == pytest.approx(total / (2 * 3**2 + 2 * 1))
    (gradient,) = torch.autograd.grad(paper, [first.k1])
    torch.testing.assert_close(gradient, 4 * first.k1 @ (first.k1.T @ first.k1 - torch.eye(2)) / 15)
    assert orthogonal_loss(nn.Conv2d(2, 2, 3)) is None
    fresh = orthogonal_loss(TTConv2d(5, 6, 3, 2))
    assert fresh is not None
    assert fresh.item() < 1e-10
    with pytest.raises(ValueError, match="normalizer = 'both'"):
        orthogonal_loss(layers, "both")
