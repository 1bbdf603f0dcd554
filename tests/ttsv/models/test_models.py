import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ttsv.constraints import Clip, Divide
from ttsv.errors import ConfigError
from ttsv.layers import SOC, SOCTT, FramedConv2d, OrthogonalConv2d, TTConv
from ttsv.metrics.accuracy import predict
from ttsv.models import create_model, layer_shapes, list_models, registry
from ttsv.models.build import BUILDERS
from ttsv.models.conv_shape import LAYERS
from ttsv.models.registry import name_fix
from ttsv.models.shapes import largest_rank
from ttsv.spectral.network import layer_input_sizes, spectral_layers

TORCHVISION = "torchvision:{NAME}"


class Small(NamedTuple):
    """A small network of a family, and an image that it takes."""

    name: str
    size: int
    options: dict[str, Any]

    def build(self, **options: Any) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(options.pop("seed", 0))
            given = {"num_classes": 7, "in_channels": 2, "image_size": self.size, **self.options, **options}
            return create_model(self.name, **given)

    def images(self, count: int = 2) -> Tensor:
        dims = layer_shapes(self.name, image_size=self.size)[0].dims
        generator = torch.Generator().manual_seed(1)
        return torch.rand((count, 2, *(self.size,) * dims), generator=generator)

    @property
    def kinds(self) -> tuple[str, ...]:
        two_dimensional = layer_shapes(self.name, image_size=self.size)[0].dims == 2
        return ("dense", "tt", "soc", "soc-tt") if two_dimensional else ("dense", "tt")


FAMILIES = {
    "small-cnn": Small("small-cnn", 8, {}),
    "small-cnn1d": Small("small-cnn1d", 12, {}),
    "small-cnn3d": Small("small-cnn3d", 4, {}),
    "single-conv": Small("single-conv", 6, {}),
    "wrn{6n+4}-{k}": Small("wrn10-1", 8, {}),
    "vgg11-19": Small("vgg11", 32, {}),
    "lipconvnet-{5n}": Small("lipconvnet-10", 32, {"width": 4}),
    "resnet18-34": Small("resnet18", 16, {}),
}
"""Every family that is registered: who adds one adds a line here and has its tests."""

CASES = [
    pytest.param(small, kind, id=f"{small.name}-{kind}")
    for small in FAMILIES.values()
    for kind in small.kinds
    # Square kernels of 512 channels and more take seconds: their shapes and costs are tested without weights.
    if kind not in {"vgg11": ("soc",), "resnet18": ("soc", "soc-tt")}.get(small.name, ())
]
FEW_LARGE = [
    pytest.param(*case.values, id=case.id, marks=pytest.mark.deep)
    if case.id in ("vgg11-tt", "vgg11-soc-tt", "resnet18-tt")
    else case
    for case in CASES
]
"""Millions of weights go as few do: every family's of one kind, and of every kind those of the small ones."""


@pytest.fixture(params=FAMILIES.values(), ids=lambda small: small.name)
def small(request: pytest.FixtureRequest) -> Small:
    found: Small = request.param
    return found


def test_every_family_has_a_builder_and_its_tests() -> None:
    patterns = {family.pattern for family in registry.families()} - {TORCHVISION}
    assert set(BUILDERS) == set(FAMILIES) == patterns
    for pattern, small in FAMILIES.items():
        assert registry.find(small.name)[0].pattern == pattern


@pytest.mark.parametrize(
    ("small", "kind", "rank"),
    [
        *(pytest.param(*case.values, 0.3, id=f"{case.id}-0.3") for case in CASES),
        *(
            pytest.param(small, "tt", rank, id=f"{small.name}-tt-{rank}")
            for small in FAMILIES.values()
            for rank in (1, 40)
        ),
    ],
)
def test_modules_are_the_listed_shapes(small: Small, kind: str, rank: float) -> None:
    model = small.build(layer=kind, rank=rank)
    listed = layer_shapes(small.name, in_channels=2, image_size=small.size, num_classes=7, **small.options)
    layers, largest = spectral_layers(model), largest_rank(listed, rank)
    assert list(layers) == [shape.name for shape in listed]
    sizes: dict[str, tuple[torch.Size, torch.Size]] = {}
    for name, layer in layers.items():
        layer.register_forward_hook(
            lambda _, inputs, output, name=name: sizes.update({name: (inputs[0].shape, output.shape)})
        )
    model.eval()(small.images())
    seen = dict(sizes)
    assert layer_input_sizes(model, small.size, in_channels=2) == {
        shape.name: (shape.input_size,) * shape.dims for shape in listed
    }
    for shape in listed:
        layer = layers[shape.name]
        assert seen[shape.name] == (
            (2, shape.in_channels, *(shape.input_size,) * shape.dims),
            (2, shape.out_channels, *(shape.output_size,) * shape.dims),
        )
        decomposed = isinstance(layer, TTConv | FramedConv2d)
        ranks = shape.ranks(largest) if kind.endswith("tt") else None
        assert (layer.rank if decomposed else None) == ranks
        core = layer.core if isinstance(layer, FramedConv2d) else layer
        if kind in ("soc", "soc-tt"):
            assert isinstance(core, SOC)
            assert (core.kernel_size, core.stride) == (shape.kernel_size, shape.stride)
        else:
            assert isinstance(core, TTConv if decomposed else nn.Conv1d | nn.Conv2d | nn.Conv3d)
            for field in ("kernel_size", "stride", "padding"):
                assert getattr(core, field) == (getattr(shape, field),) * shape.dims
        assert (layer.bias is not None) == shape.bias
        weights = sum(p.numel() for name, p in layer.named_parameters() if not name.endswith("bias"))
        assert weights == shape.weights(largest, kind)


@pytest.mark.parametrize(("small", "kind"), FEW_LARGE)
def test_forward_and_gradients(small: Small, kind: str) -> None:
    model = small.build(layer=kind, rank=0.3)
    logits = model(small.images(3))
    assert logits.shape == (3, 7)
    torch.autograd.backward(logits.square().sum())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.ndim == 1 or parameter.grad.abs().max() > 0, name


@pytest.mark.slow
@pytest.mark.parametrize(("small", "kind"), FEW_LARGE)
def test_seed_and_saved_weights(small: Small, kind: str) -> None:
    first, again = (small.build(layer=kind, rank=0.3, seed=5).eval() for _ in range(2))
    other = small.build(layer=kind, rank=0.3, seed=6).eval()
    state = first.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    images = small.images()
    assert not torch.equal(first(images), other(images))
    other.load_state_dict(state)
    assert torch.equal(first(images), other(images))


def test_normalisation_is_the_first_part(small: Small) -> None:
    mean, std = (0.3, 0.6), (0.2, 0.5)
    model = small.build(mean=mean, std=std).eval()
    plain = small.build(mean=(0.0,), std=(1.0,)).eval()
    images = small.images(4)
    channels = [(images[:, [i]] - mean[i]) / std[i] for i in (0, 1)]
    torch.testing.assert_close(model(images), plain(torch.cat(channels, dim=1)))


def test_pixels_of_bytes_are_those_over_255(small: Small) -> None:
    model = small.build()
    images = (small.images() * 255).to(torch.uint8)
    torch.testing.assert_close(predict(model, images), model.eval()(images.double().div(255).float()).detach())


def test_kinds_without_a_rank_and_ranks_without_frames(small: Small) -> None:
    for kind, plain in (("tt", "dense"), ("soc-tt", "soc")):
        if kind in small.kinds and small.name not in ("vgg11", "resnet18"):
            states = [small.build(layer=kind).state_dict(), small.build(layer=plain, rank=3).state_dict()]
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize("kind", ["tt", "soc-tt"])
def test_orthonormal_frames(kind: str) -> None:
    model = FAMILIES["wrn{6n+4}-{k}"].build(layer=kind, rank=5, frames="orthonormal")
    framed = [layer for layer in spectral_layers(model).values() if isinstance(layer, TTConv | FramedConv2d)]
    assert framed
    assert all(layer.frames == "orthonormal" for layer in framed)


@pytest.mark.parametrize(
    "kind", [kind for kind in LAYERS if kind.partition("-")[0] in ("bcop", "aoc", "aol", "cayley")]
)
def test_other_orthogonal_layers(kind: str) -> None:
    """In every network whose strides they can have, at the listed places, with the listed number of weights."""
    small_stride_1x1 = kind.startswith(("aoc", "aol"))
    for small in (FAMILIES["wrn{6n+4}-{k}"], Small("lipconvnet-5", 32, {"width": 4})):
        if small.name == "lipconvnet-5" and small_stride_1x1:
            with pytest.raises(
                ConfigError, match=r"needs kernels no smaller than their strides; layer5\.0\.conv has 1x1"
            ):
                small.build(layer=kind, rank=4)
            continue
        model = small.build(layer=kind, rank=4)
        listed = layer_shapes(small.name, in_channels=2, image_size=small.size, num_classes=7, **small.options)
        layers = spectral_layers(model)
        assert list(layers) == [shape.name for shape in listed]
        assert model(small.images()).shape == (2, 7)
        for shape in listed:
            layer = layers[shape.name]
            assert isinstance(layer, FramedConv2d) == (kind.endswith("tt") and shape.ranks(4) is not None)
            if isinstance(layer, OrthogonalConv2d | nn.Conv2d):
                assert layer.weight.numel() == shape.weights(4, kind)


@pytest.mark.parametrize("constraint", [Clip(1.0), Divide(conv=1.0)])
class TestProjections:
    @pytest.mark.parametrize(("kind", "named"), [("soc", "SOC"), ("soc-tt", "SOC"), ("cayley", "Cayley")])
    def test_a_network_that_is_orthogonal_by_construction_is_refused(
        self, kind: str, named: str, constraint: Clip | Divide
    ) -> None:
        model = FAMILIES["lipconvnet-{5n}"].build(layer=kind, rank=4)
        with pytest.raises(ConfigError, match=rf"model\.layer1\.0\.conv = '{named}': is orthogonal by construction"):
            constraint.bind(model, 32)

    def test_its_layers_are_left_alone_beside_others(self, constraint: Clip | Divide) -> None:
        model = nn.Sequential(SOC(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), SOCTT(4, 4, 3, 2)).eval()
        nn.init.constant_(model.get_submodule("1").get_parameter("weight"), 1.0)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        constraint.bind(model, 4)
        constraint.project(model, 1, force=True)
        changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
        assert changed == ["1.weight"]
        assert list(constraint.report().layers) == ["1"]
        assert list(layer_input_sizes(model, 4)) == ["0", "1", "2"]

    def test_a_linear_layer_beside_them_is_enough(self, constraint: Clip | Divide) -> None:
        model = FAMILIES["small-cnn"].build(layer="soc")
        both: Clip | Divide = Clip(1.0, linear=True) if isinstance(constraint, Clip) else Divide(linear=1.0)
        both.bind(model, 8)
        both.project(model, 1, force=True)
        assert list(both.report().layers) == ["head"]
        with pytest.raises(ConfigError, match=r"model\.conv1 = 'SOC'"):
            constraint.bind(model, 8)

    def test_frames_around_a_convolution_are_refused(self, constraint: Clip | Divide) -> None:
        model = nn.Sequential(FramedConv2d(4, 4, 2, lambda a, b: nn.Conv2d(a, b, 3)))
        with pytest.raises(ConfigError, match=r"model\.0 = 'FramedConv2d': .* TTConv2d is that"):
            constraint.bind(model, 4)


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("small-cnn", {"layer": "cp"}, "layer"),
        ("small-cnn", {"layer": "tt", "rank": 0}, "rank"),
        ("small-cnn", {"layer": "tt", "rank": 1.5}, "rank"),
        ("small-cnn", {"layer": "dense", "rank": 0.0}, "rank"),
        ("small-cnn", {"frames": "stiff"}, "frames"),
        ("small-cnn", {"num_classes": 0}, "num_classes"),
        ("small-cnn", {"in_channels": 0}, "in_channels"),
        ("small-cnn", {"image_size": 7}, "image_size"),
        ("small-cnn", {"image_size": 0}, "image_size"),
        ("small-cnn", {"mean": (0.1, 0.2, 0.3)}, "mean"),
        ("small-cnn", {"mean": ()}, "mean"),
        ("small-cnn", {"std": (0.5, 0.0)}, "std"),
        ("small-cnn", {"std": (float("nan"),)}, "std"),
        ("small-cnn", {"std": (1e-50,)}, "std"),
        ("small-cnn", {"std": 0.5}, "std"),
        ("small-cnn", {"mean": "0"}, "mean"),
        ("small-cnn", {"mean": ("0",)}, "mean"),
        ("small-cnn", {"num_classes": "10"}, "num_classes"),
        ("small-cnn", {"num_classes": True}, "num_classes"),
        ("small-cnn", {"in_channels": 3.0}, "in_channels"),
        ("small-cnn", {"image_size": 32.0}, "image_size"),
        ("small-cnn", {"image_size": (32, 32)}, "image_size"),
        ("torchvision:alexnet", {"image_size": None}, "image_size"),
        ("small-cnn", {"depth": 3}, "depth"),
        ("small-cnn1d", {"layer": "soc"}, "layer"),
        ("small-cnn3d", {"layer": "bcop-tt", "rank": 2}, "layer"),
        ("wrn10-1", {"depth": 16}, "depth"),
        ("wrn10-1", {"image_size": 10}, "image_size"),
        ("vgg11", {"image_size": 8}, "image_size"),
        ("lipconvnet-5", {"image_size": 28}, "image_size"),
        ("lipconvnet-5", {"width": 3}, "width"),
        ("lipconvnet-5", {"width": "32"}, "width"),
        ("resnet18", {"image_size": 9, "layer": "soc"}, "layer"),
        ("resnet18", {"image_size": 0}, "image_size"),
        ("torchvision:alexnet", {"layer": "soc"}, "layer"),
        ("torchvision:alexnet", {"image_size": 16}, "image_size"),
        ("torchvision:alexnet", {"width": 16}, "width"),
        ("torchvision:big_cnn", {}, "model"),
    ],
)
def test_wrong_arguments_are_named(name: str, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Small(name, 32, {}).build(**options)
    assert error.value.field == field


def test_the_sizes_that_work_are_named() -> None:
    for name, size, right in (
        ("vgg11", 8, "at least 32"),
        ("lipconvnet-5", 8, "a multiple of 32"),
        ("wrn10-1", 6, "of 4"),
    ):
        with pytest.raises(ConfigError, match=f"image_size = {size}: must be .*{right} for {name}"):
            layer_shapes(name, image_size=size)


@pytest.mark.parametrize(
    "name",
    [
        *("big-cnn", "wrn17-2", "wrn4-2", "wrn16-0", "wrn16", "lipconvnet-7", "lipconvnet-0", "vgg12", "xsmall-cnn"),
        *("lipconvnet-1000", f"wrn{'1' * 5000}-1", "wrn16-1000"),
    ],
)
def test_unknown_network(name: str) -> None:
    for call in (lambda: layer_shapes(name), lambda: create_model(name, num_classes=2)):
        with pytest.raises(ConfigError, match=rf"model = '{name}': must be one of small-cnn, .* like wrn\{{6n\+4\}}-"):
            call()
    assert name_fix(name) is not None


def test_known_names() -> None:
    for name in (*list_models(), "wrn34-3", "lipconvnet-50", "torchvision:resnet50"):
        assert name_fix(name) is None
    issue = {"wrn16-10", "vgg11", "vgg13", "vgg16", "vgg19", "small-cnn", "resnet18", "resnet34"}
    assert issue | {f"lipconvnet-{depth}" for depth in range(5, 41, 5)} <= set(list_models())
    with pytest.raises(ConfigError, match="has no list of shapes"):
        layer_shapes("torchvision:resnet50")


def test_a_pattern_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    register = registry.network("tiny")
    register(lambda **_: [])
    with pytest.raises(ValueError, match="'tiny' is registered twice"):
        register(lambda **_: [])


def test_importing_the_package_and_listing_every_shape_imports_no_torch() -> None:
    code = (
        "import sys; from ttsv.models import layer_shapes, list_models; from ttsv.models.shapes import shape_macs; "
        "[shape_macs(layer_shapes(name), 0.25) for name in list_models()]; "
        "sys.exit('torch' in sys.modules or 'torchvision' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
