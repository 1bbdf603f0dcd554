import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ttsv.errors import ConfigError
from ttsv.layers import TTConv2d, spectral_layers
from ttsv.metrics import cost
from ttsv.models import create_model, layer_shapes, list_models, shapes
from ttsv.models.build import BUILDERS
from ttsv.models.shapes import ConvShape, network, shape_compression

MODELS = list_models()


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(name: str, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return create_model(name, **{"num_classes": 7, "in_channels": 2, "image_size": 8, **options})


def test_every_network_has_a_builder() -> None:
    assert set(BUILDERS) == set(MODELS)


@pytest.mark.parametrize("rank", [None, 1, 8, 40, 64])
def test_modules_are_the_listed_shapes(name: str, rank: int | None) -> None:
    model = build(name, layer="tt", rank=rank).eval()
    listed = layer_shapes(name, in_channels=2, image_size=8)
    layers = spectral_layers(model)
    assert list(layers) == [shape.name for shape in listed]
    seen: dict[str, torch.Size] = {}
    for layer_name, layer in layers.items():
        layer.register_forward_hook(
            lambda _, inputs, __, layer_name=layer_name: seen.update({layer_name: inputs[0].shape})
        )
    model(torch.rand(3, 2, 8, 8))
    for shape in listed:
        layer = layers[shape.name]
        assert isinstance(layer, nn.Conv2d | TTConv2d)
        assert layer.in_channels == shape.in_channels
        assert layer.out_channels == shape.out_channels
        assert tuple(layer.kernel_size) == (shape.kernel_size,) * 2
        assert tuple(layer.stride) == (shape.stride,) * 2
        assert tuple(layer.padding) == (shape.padding,) * 2
        assert seen[shape.name] == (3, shape.in_channels, shape.input_size, shape.input_size)
        ranks = shape.ranks(rank)
        assert (layer.rank if isinstance(layer, TTConv2d) else None) == ranks
        weights = sum(parameter.numel() for parameter in layer.parameters())
        assert weights == shape.weights(rank)


@given(rank=st.one_of(st.none(), st.integers(1, 80)), channels=st.integers(1, 3))
def test_compression_from_shapes_is_that_of_the_model(rank: int | None, channels: int) -> None:
    for name in MODELS:
        model = build(name, in_channels=channels, layer="tt", rank=rank)
        listed = layer_shapes(name, in_channels=channels, image_size=8)
        assert shape_compression(listed, rank) == cost.compression(model)


def test_small_cnn_compression() -> None:
    # 288 + 18,432 + 36,864 weights; at rank 8: 1 + 72 + 256, 256 + 576 + 512, 512 + 576 + 512.
    assert cost.compression(build("small-cnn", in_channels=1)) == 1
    compressed = build("small-cnn", in_channels=1, layer="tt", rank=8)
    assert cost.compression(compressed) == pytest.approx(55_584 / 3_273)


@given(c_in=st.integers(1, 64), c_out=st.integers(1, 64), kernel=st.integers(1, 5), rank=st.integers(1, 70))
def test_weights_of_a_shape(c_in: int, c_out: int, kernel: int, rank: int) -> None:
    shape = ConvShape(
        name="conv", in_channels=c_in, out_channels=c_out, kernel_size=kernel, stride=1, padding=0, input_size=8
    )
    dense = nn.Conv2d(c_in, c_out, kernel, bias=False)
    assert shape.weights() == dense.weight.numel()
    ranks = shape.ranks(rank)
    assert (ranks is None) == (rank >= max(c_in, c_out))
    if ranks is not None:
        layer = TTConv2d(c_in, c_out, kernel, rank, bias=False)
        assert layer.rank == ranks
        assert shape.weights(rank) == cost.parameters(layer)


def test_normalisation_is_the_first_part(name: str) -> None:
    mean, std = (0.3, 0.6), (0.2, 0.5)
    model = build(name, mean=mean, std=std).eval()
    plain = build(name, mean=(0.0,), std=(1.0,)).eval()
    pixels = torch.rand(4, 2, 8, 8)
    normalised = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(model(pixels), plain(normalised))
    assert model(pixels).shape == (4, 7)


def test_rank_is_ignored_without_tt(name: str) -> None:
    assert not any(isinstance(m, TTConv2d) for m in build(name, layer="dense", rank=3).modules())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"layer": "cp"}, "layer"),
        ({"layer": "tt", "rank": 0}, "rank"),
        ({"num_classes": 0}, "num_classes"),
        ({"in_channels": 0}, "in_channels"),
        ({"image_size": 7}, "image_size"),
        ({"image_size": 0}, "image_size"),
        ({"mean": (0.1, 0.2, 0.3)}, "mean"),
        ({"mean": ()}, "mean"),
        ({"std": (0.5, 0.0)}, "std"),
        ({"std": (float("nan"),)}, "std"),
        ({"depth": 3}, "depth"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        build("small-cnn", **options)
    assert error.value.field == field


def test_unknown_network() -> None:
    for call in (lambda: layer_shapes("big-cnn"), lambda: build("big-cnn")):
        with pytest.raises(ConfigError, match="model = 'big-cnn': must be one of small-cnn"):
            call()


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_NETWORKS", dict(shapes._NETWORKS))
    register = network("tiny")
    register(lambda **_: [])
    with pytest.raises(ValueError, match="'tiny' is registered twice"):
        register(lambda **_: [])


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys; from ttsv.models import layer_shapes, list_models; "
        "[layer_shapes(name) for name in list_models()]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
