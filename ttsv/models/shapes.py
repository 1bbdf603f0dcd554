"""Each network's convolutions as plain data, torch-free: builders, costs and dry runs read the same list."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ttsv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ConvShape:
    """One convolution: `name` in the network, channels, square kernel, stride, padding, and the side of its input."""

    name: str
    in_channels: int
    out_channels: int
    kernel_size: int
    stride: int
    padding: int
    input_size: int

    def ranks(self, rank: int | None) -> tuple[int, int] | None:
        """TT ranks (r1, r2) under a largest rank, or None where the layer stays dense.

        `r1 = min(in_channels, rank)`, `r2 = min(out_channels, rank)`; a rank that reaches both channel counts
        would only add two square frames, so such a layer is not decomposed.
        """
        if rank is None or (rank >= self.in_channels and rank >= self.out_channels):
            return None
        return min(self.in_channels, rank), min(self.out_channels, rank)

    def weights(self, rank: int | None = None) -> int:
        """Number of weights, without bias: dense, or of frame, core and frame under a largest rank."""
        ranks = self.ranks(rank)
        area = self.kernel_size**2
        if ranks is None:
            return self.out_channels * self.in_channels * area
        r1, r2 = ranks
        return self.in_channels * r1 + r2 * r1 * area + r2 * self.out_channels


ShapeList = Callable[..., list[ConvShape]]
_NETWORKS: dict[str, ShapeList] = {}


def network(name: str) -> Callable[[ShapeList], ShapeList]:
    """Registers a function of `in_channels`, `image_size` and the network's own options as network `name`."""

    def register(function: ShapeList) -> ShapeList:
        if name in _NETWORKS:
            raise ValueError(f"network {name!r} is registered twice")
        _NETWORKS[name] = function
        return function

    return register


def list_models() -> tuple[str, ...]:
    """Names that `create_model` takes."""
    return tuple(_NETWORKS)


def layer_shapes(
    name: str,
    *,
    in_channels: int = 3,
    image_size: int = 32,
    **options: Any,
) -> list[ConvShape]:
    """The network's convolutions in the order of the forward pass, undecomposed.

    Each name is that of the module in the network that `create_model` builds. Raises `ConfigError` for an unknown
    network or option and for an image that the network cannot take.
    """
    if name not in _NETWORKS:
        raise ConfigError("model", name, f"must be one of {', '.join(_NETWORKS)}")
    if in_channels < 1:
        raise ConfigError("in_channels", in_channels, "must be at least 1")
    known = inspect.signature(_NETWORKS[name]).parameters
    for option, value in options.items():
        if option not in known:
            raise ConfigError(option, value, f"is no option of {name}; there are {', '.join(known)}")
    return _NETWORKS[name](in_channels=in_channels, image_size=image_size, **options)


def shape_compression(shapes: Sequence[ConvShape], rank: int | None) -> float:
    """Weights of the convolutions over their weights under a largest TT rank; equals `cost.compression(model)`."""
    return sum(shape.weights() for shape in shapes) / sum(shape.weights(rank) for shape in shapes)


@network("small-cnn")
def _small_cnn(*, in_channels: int, image_size: int) -> list[ConvShape]:
    """Three 3x3 convolutions; strides 1, 2, 2 take an 8x8 digit to 2x2."""
    if image_size < 4 or image_size % 4:
        raise ConfigError("image_size", image_size, "must be a positive multiple of 4 for small-cnn")
    widths = (in_channels, 32, 64, 64)
    strides = (1, 2, 2)
    shapes, size = [], image_size
    for index, stride in enumerate(strides):
        shapes.append(
            ConvShape(
                name=f"conv{index + 1}",
                in_channels=widths[index],
                out_channels=widths[index + 1],
                kernel_size=3,
                stride=stride,
                padding=1,
                input_size=size,
            )
        )
        size //= stride
    return shapes
