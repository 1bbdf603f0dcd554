"""Convolutions orthogonal by construction, and the activation that goes with them.

Such layers have a spectrum, but no kernel that a projection could write.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from ttsv.checks import check_counts
from ttsv.errors import ConfigError
from ttsv.spectral.geometry import periodic_size
from ttsv.spectral.network import SpectralLayer
from ttsv.spectral.symbol import Size, as_tuple


class OrthogonalConv2d(SpectralLayer):
    """Base of `SOC` and others: from images `(batch, in_channels, s h, s w)` to `(batch, out_channels, h, w)`.

    `stride` is s along both axes, by space-to-depth; `weight` what their operator is made from.
    """

    weight: Tensor
    bias: Tensor | None
    _printed: ClassVar[tuple[str, ...]] = ("kernel_size", "stride")

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, stride=stride)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride

    def extra_repr(self) -> str:
        """Names the arguments, as torch's convolutions print them."""
        named = "".join(f", {name}={getattr(self, name)}" for name in self._printed)
        return f"{self.in_channels}, {self.out_channels}{named}{'' if self.bias is not None else ', bias=False'}"

    @abstractmethod
    def singular_values(self, input_size: Size, *, frames: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Returns all singular values, its padding taken as periodic, as `ttsv.spectral.conv_singular_values` does.

        `(h w, min(out_channels, s^2 in_channels))` for images of `input_size`, `s h x s w` pixels, one row per
        frequency, each descending. With `frames`, `k1 (c_in, in_channels)` and `k3 (out_channels, c_out)`: those of
        the layer between two 1x1 convolutions, `(h w, min(c_out, s^2 c_in))`.
        """

    def spectrum(self, input_size: Size) -> Tensor:
        """Returns `singular_values` at the smallest size that the stride divides."""
        return self.singular_values(periodic_size(input_size, (self.stride,) * 2))


def framed_blocks(blocks: Tensor, frames: tuple[Tensor, Tensor] | None) -> Tensor:
    """Blocks `(..., out_channels, s^2 in_channels)` of an operator's symbol between frames (see `singular_values`)."""
    if frames is None:
        return blocks
    k1, k3 = (frame.to(blocks.dtype) for frame in frames)
    # Space-to-depth puts the components of one channel side by side.
    by_channel = blocks.reshape(*blocks.shape[:-1], k1.shape[1], -1)
    return torch.einsum("po,...pas,ia->...ois", k3, by_channel, k1).flatten(-2)


def space_to_depth_size(input_size: Size, stride: int) -> tuple[int, ...]:
    """Pixels of an image after space-to-depth. Raises `ConfigError` where the stride does not divide its sides."""
    sizes = as_tuple("input_size", input_size, 2)
    if any(n % stride for n in sizes):
        raise ConfigError("stride", stride, f"must divide the input's sides, {sizes}")
    return tuple(n // stride for n in sizes)


class MinMax(nn.Module):
    """Takes minimum and maximum of each channel of the first half and its counterpart of the second: 1-Lipschitz.

    Features are (batch, channels, ...), channels even; the result has all minima, then all maxima (the order of the
    authors of SOC; Anil et al., ICML 2019, sort neighbours). The norm is preserved, and the gradient's.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Returns features of the same shape. Raises ValueError for an odd number of channels."""
        if features.shape[1] % 2:
            raise ValueError(f"MinMax pairs the halves of the channels; {features.shape[1]} is odd")
        first, second = features.chunk(2, dim=1)
        return torch.cat([torch.minimum(first, second), torch.maximum(first, second)], dim=1)
