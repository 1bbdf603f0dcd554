"""Each network's convolutions as plain data, torch-free: builders, costs and dry runs read the same list."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ttsv.checks import check_counts
from ttsv.errors import ConfigError
from ttsv.models import architectures  # noqa: F401 - registers the networks
from ttsv.models.conv_shape import ConvShape
from ttsv.models.registry import families, find
from ttsv.tt.ranks import absolute_rank

SMALLEST_STD = 1e-6
"""Of a normalisation, in pixels: smaller ones send what differs in rounding alone far apart."""


def list_models() -> tuple[str, ...]:
    """Returns the well-known names that `create_model` takes; their families' patterns have more (see `name_fix`)."""
    return tuple(name for family in families() for name in family.names)


def layer_shapes(
    name: str, *, in_channels: int = 3, image_size: int = 32, num_classes: int = 10, **options: Any
) -> list[ConvShape]:
    """Returns the network's convolutions in the order of the forward pass, undecomposed.

    `image_size`: pixels along each axis. Each name is that of the module in the network that `create_model` builds.
    Raises `ConfigError` for an unknown network or option, for an image that the network cannot take, and for the
    networks of torchvision, whose layers are known only once they are built.
    """
    family, numbers = find(name)
    check_counts(in_channels=in_channels, image_size=image_size, num_classes=num_classes)
    arguments = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}
    known = [option for option in family.options if option not in arguments]
    for option, value in options.items():
        if option not in known:
            raise ConfigError(option, value, f"is no option of {name}; there are {', '.join(known) or 'none'}")
    taken = _parameters(family.shapes)
    return family.shapes(**{key: value for key, value in arguments.items() if key in taken}, **numbers, **options)


@cache
def _parameters(shapes: Callable[..., object]) -> frozenset[str]:
    """What a family's list of convolutions depends on: to look takes longer than to make the list."""
    return frozenset(inspect.signature(shapes).parameters)


def largest_rank(shapes: Sequence[ConvShape], rank: float | None) -> int | None:
    """Returns a rank as a number: a fraction is one of the largest channel count among the convolutions other than 1x1.

    None stays None. Raises `ConfigError` for a rank out of range.
    """
    if rank is None:
        return None
    spatial = [shape for shape in shapes if shape.kernel_size > 1] or shapes
    return absolute_rank(rank, max((max(shape.in_channels, shape.out_channels) for shape in spatial), default=1))


def shape_compression(shapes: Sequence[ConvShape], rank: float | None, layer: str = "tt") -> float:
    """Weights of the convolutions over their weights under a largest TT rank, number or fraction, for a kind of layer.

    Equals `cost.compression(model)`. That of "soc-tt" is against the same network with "soc", and so on.
    """
    largest = largest_rank(shapes, rank)
    return sum(shape.weights(None, layer) for shape in shapes) / sum(shape.weights(largest, layer) for shape in shapes)


def shape_macs(shapes: Sequence[ConvShape], rank: float | None, layer: str = "tt") -> int:
    """Returns the convolutions' multiply-accumulates for one image under a largest TT rank, number or fraction."""
    largest = largest_rank(shapes, rank)
    return sum(shape.macs(largest, layer) for shape in shapes)
