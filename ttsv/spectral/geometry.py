"""Layers as convolutions: where each kernel is applied, which way round it may be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional

from ttsv.spectral.symbol import PeriodicConv, Sides, Size, as_tuple, padding_sides

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
TransposedConvolution = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
"""Number of spatial axes -> torch's convolution."""


@runtime_checkable
class Sliding(Protocol):
    """A layer that slides a kernel over images: torch's convolutions, and `ttsv.layers.TTConv` by its core."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str | tuple[int, ...]

    @property
    def groups(self) -> int:
        """As torch's convolutions have it."""

    @property
    def padding_mode(self) -> str:
        """As torch's convolutions have it."""


@dataclass(frozen=True)
class LayerGeometry:
    """The convolution with a layer's own kernel that has the layer's singular values; sizes in pixels.

    A transposed convolution is the adjoint of the convolution with its weight `(c_in, c_out / groups, k...)` from
    images like its output, hence has that one's singular values.

    `input_size`: of the images it is applied to, padded by `sides` as `padding_mode` says. `periodic_size`: of those
    that its periodic counterpart is applied to, the smallest that are no smaller and that the stride divides; of a
    transposed convolution, the stride times what that sees.
    """

    kernel_size: tuple[int, ...]
    input_size: tuple[int, ...]
    periodic_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sides: Sides
    padding_mode: str

    def periodic_conv(self, kernel: Tensor) -> PeriodicConv:
        """Geometry of the periodic counterpart with such a kernel. Raises `ConfigError` for what cannot be."""
        return PeriodicConv.of(
            kernel, self.periodic_size, stride=self.stride, dilation=self.dilation, groups=self.groups
        )

    @property
    def periodic_counterpart(self) -> PeriodicConv:
        """As `periodic_conv`, of kernels that are known to fit: nothing is looked at, and no device waited for."""
        return PeriodicConv(self.kernel_size, self.periodic_size, self.stride, self.dilation, self.groups)


def layer_geometry(layer: Sliding, seen: Size) -> LayerGeometry:
    """The geometry of a layer that sees images of `seen` pixels; of a TT layer that of its core."""
    size = as_tuple("input_size", seen, len(layer.kernel_size))
    sides = padding_sides(layer.padding, layer.kernel_size, layer.dilation)
    if isinstance(layer, TransposedConvolution):
        periodic = tuple(n * s for n, s in zip(size, layer.stride, strict=True))
        axes = zip(size, layer.stride, sides, layer.dilation, layer.kernel_size, layer.output_padding, strict=True)
        size = tuple((n - 1) * s - sum(p) + e * (k - 1) + more + 1 for n, s, p, e, k, more in axes)
    else:
        periodic = periodic_size(size, layer.stride)
    return LayerGeometry(
        kernel_size=tuple(layer.kernel_size),
        input_size=size,
        periodic_size=periodic,
        stride=tuple(layer.stride),
        dilation=tuple(layer.dilation),
        groups=layer.groups,
        sides=sides,
        padding_mode=layer.padding_mode,
    )


def periodic_size(input_size: Size, stride: Sequence[int]) -> tuple[int, ...]:
    """The smallest size, per axis, that is no smaller than `input_size` and that the stride divides."""
    sizes = as_tuple("input_size", input_size, len(stride))
    return tuple(-(-n // s) * s for n, s in zip(sizes, stride, strict=True))
