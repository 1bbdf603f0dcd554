"""From a network's name and shapes to its modules."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ttsv.errors import ConfigError
from ttsv.layers import TTConv2d
from ttsv.models.normalize import Normalize
from ttsv.models.shapes import ConvShape, layer_shapes
from ttsv.models.small_cnn import SmallCNN

ConvFactory = Callable[[ConvShape], nn.Module]
Builder = Callable[[Sequence[ConvShape], ConvFactory, nn.Module, int], nn.Module]

BUILDERS: dict[str, Builder] = {"small-cnn": SmallCNN}
"""Network -> what builds it from its shapes, a maker of convolutions, the normalisation and the class count."""


def build_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int,
    image_size: int,
    layer: str,
    rank: int | None,
    mean: Sequence[float],
    std: Sequence[float],
    **options: Any,
) -> nn.Module:
    """What `ttsv.models.create_model` documents."""
    shapes = layer_shapes(name, in_channels=in_channels, image_size=image_size, **options)
    if num_classes < 1:
        raise ConfigError("num_classes", num_classes, "must be at least 1")
    normalize = _normalization(mean, std, in_channels)
    return BUILDERS[name](shapes, _conv_factory(layer, rank), normalize, num_classes)


def _normalization(mean: Sequence[float], std: Sequence[float], channels: int) -> Normalize:
    for field, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels) or not all(map(math.isfinite, values)):
            raise ConfigError(field, values, f"must be one finite number, or one per channel ({channels})")
    if min(std) <= 0:
        raise ConfigError("std", std, "must be above 0")
    return Normalize(mean, std)


def _conv_factory(layer: str, rank: int | None) -> ConvFactory:
    if layer not in _LAYERS:
        raise ConfigError("layer", layer, f"must be one of {', '.join(_LAYERS)}")
    if rank is not None and rank < 1:
        raise ConfigError("rank", rank, "must be at least 1, or null")
    return _LAYERS[layer](rank)


def _dense(shape: ConvShape) -> nn.Module:
    return nn.Conv2d(
        shape.in_channels,
        shape.out_channels,
        shape.kernel_size,
        stride=shape.stride,
        padding=shape.padding,
        bias=False,
    )


def _tt(shape: ConvShape, rank: int | None) -> nn.Module:
    ranks = shape.ranks(rank)
    if ranks is None:
        return _dense(shape)
    return TTConv2d(
        shape.in_channels,
        shape.out_channels,
        shape.kernel_size,
        ranks,
        stride=shape.stride,
        padding=shape.padding,
        bias=False,
    )


_LAYERS: dict[str, Callable[[int | None], ConvFactory]] = {
    "dense": lambda rank: _dense,
    "tt": lambda rank: functools.partial(_tt, rank=rank),
}
"""Kind of layer -> what makes its convolutions, given the largest rank."""
