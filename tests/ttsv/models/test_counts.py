"""Costs without torch against those of the networks that are built."""

import pytest
import torch

from ttsv.metrics import cost
from ttsv.models import create_model, list_models
from ttsv.models.counts import COUNTED_KINDS, network_cost

SIZES = {"small-cnn1d": 16, "small-cnn3d": 8, "small-cnn": 8, "single-conv": 12}
BUILT = ("small-cnn", "small-cnn1d", "small-cnn3d", "single-conv", "wrn10-2", "vgg11", "lipconvnet-5", "resnet18")
LAYERS: tuple[tuple[str, float | None], ...] = (("dense", None), ("tt", 8), ("tt", 0.3), ("soc", None), ("soc-tt", 6))


@pytest.mark.slow
@pytest.mark.parametrize("frames", ["free", "orthonormal"])
@pytest.mark.parametrize("name", BUILT)
def test_equal_those_of_the_network(name: str, frames: str) -> None:
    size = SIZES.get(name, 32)
    for layer, rank in LAYERS[:3] if name.endswith("d") else LAYERS:
        if frames == "orthonormal" and not layer.endswith("tt"):
            continue  # there are none
        shape = {"in_channels": 3, "image_size": size, "num_classes": 7}
        found = network_cost(name, layer=layer, rank=rank, **shape)
        with torch.device("meta"):
            model = create_model(name, layer=layer, rank=rank, frames=frames, **shape)  # type: ignore[arg-type]
        assert found.parameters == cost.parameters(model), (layer, rank)
        assert found.compression == cost.compression(model), (layer, rank)
        assert found.multiply_accumulates == cost.multiply_accumulates(model, size, in_channels=3), (layer, rank)


@pytest.mark.parametrize("layer", ["bcop", "cayley-tt"])
def test_what_is_known_only_of_the_built_network_is_not_guessed(layer: str) -> None:
    assert layer.removesuffix("-tt") not in COUNTED_KINDS
    found = network_cost("lipconvnet-5", layer=layer, rank=8, in_channels=3, image_size=32, num_classes=10)
    assert (found.parameters, found.multiply_accumulates) == (None, None)
    assert found.compression is not None
    assert layer in (found.reason or "")
    other = network_cost("torchvision:resnet18", layer="tt", rank=8, in_channels=3, image_size=32, num_classes=10)
    assert (other.parameters, other.compression) == (None, None)
    assert "once it is built" in (other.reason or "")


def test_every_network_is_counted() -> None:
    for name in list_models():
        size = SIZES.get(name, 32)
        found = network_cost(name, layer="tt", rank=8, in_channels=3, image_size=size, num_classes=10)
        assert found.parameters is not None
