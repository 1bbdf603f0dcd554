"""Networks that take pixels in [0, 1]. Importing this package loads no torch; `create_model` does.

Layers, spectral, tt, checks and errors may be imported, once a network is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ttsv.models.conv_shape import ConvShape
from ttsv.models.shapes import layer_shapes, list_models

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ConvShape", "ModelArguments", "create_model", "layer_shapes", "list_models", "per_channel"]


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The arguments of `create_model` but the options that networks have of their own."""

    name: str
    num_classes: int
    in_channels: int = 3
    image_size: int = 32
    layer: str = "dense"
    rank: float | None = None
    frames: str = "free"
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)


def per_channel(values: Sequence[float], channels: int) -> list[float]:
    """Returns the mean or the std of every channel, of which a single value is that of all."""
    return list(values) * channels if len(values) == 1 else list(values)


def create_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    layer: str = "dense",
    rank: float | None = None,
    mean: Sequence[float] = (0.5,),
    std: Sequence[float] = (0.5,),
    frames: str = "free",
    **options: Any,
) -> "nn.Module":
    """Builds a network that takes pixels in [0, 1]; the normalisation (mean, std per channel) is its first part.

    `name`: one of `list_models()` or like `wrn{6n+4}-{k}`, `lipconvnet-{5n}`, or `torchvision:NAME` for a classifier of
    torchvision, untrained (dense or tt). `image_size`: pixels along each axis.

    `layer`: what the convolutions are, of `ttsv.models.conv_shape.LAYERS`. Those that end in "tt" have frames around
    cores of largest TT rank `rank`: a whole number, or a fraction in (0, 1] of the largest channel count among the
    convolutions other than 1x1 (of torchvision's networks: among all); a layer whose rank reaches both channel counts
    is not decomposed. Without a rank they are the kind of layer without frames ("tt" is dense, "soc-tt" is soc), and
    other kinds ignore a rank.
    `frames`: "free" or "orthonormal" (see `ttsv.layers.TTConv`). `options`: the network's own, as for `layer_shapes`
    (`width` of a LipConvNet's first stage).

    Raises `ConfigError` for an unknown name or layer, for values out of range, for an image that the network
    cannot take, and where a convolution has no counterpart of the kind asked for.
    """
    from ttsv.models.build import build_model

    arguments = ModelArguments(
        name=name,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        layer=layer,
        rank=rank,
        frames=frames,
        mean=mean,
        std=std,
    )
    return build_model(arguments, options)
