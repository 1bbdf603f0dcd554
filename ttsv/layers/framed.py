"""Frames around a core: two 1x1 convolutions that are isometries when the frames are orthonormal.

`Stiefel` holds frames orthonormal through training: a parametrization by the QR factorization.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from ttsv.checks import check_choice, check_counts
from ttsv.layers.orthogonal import OrthogonalConv2d
from ttsv.runtime.precision import at_least_single
from ttsv.spectral.geometry import LayerGeometry, layer_geometry, periodic_size
from ttsv.spectral.network import SpectralLayer
from ttsv.spectral.singular_values import periodic_singular_values
from ttsv.spectral.symbol import Size
from ttsv.tt.decomposition import orthogonalize, positive_qr, tt_ranks

FrameKind = Literal["free", "orthonormal"]


def check_frames(frames: str) -> None:
    """Raises `ConfigError` for an unknown kind of frames."""
    check_choice("frames", frames, get_args(FrameKind))


class Framed(SpectralLayer):
    """A layer between frames `k1 (c_in, r1)` and `k3 (r2, c_out)`: base of `TTConv` and `FramedConv2d`.

    `frames="free"`: plain parameters, orthonormal at the start (`ttsv.constraints.Orthogonal` keeps them near it).
    `frames="orthonormal"`: exactly so after every step, see `ttsv.layers.framed`; `k1` and `k3` are then read
    through a parametrization. With orthonormal frames the layer has the singular values of its core, and zeros
    (Theorem 1, whatever the core and its padding).
    """

    k1: Tensor
    k3: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        rank: int | Sequence[int],
        frames: FrameKind,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels)
        check_frames(frames)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.rank = tt_ranks(rank, in_channels, out_channels)
        r1, r2 = self.rank
        # Orthonormal before they are drawn too: holding them takes a QR factorization.
        self.k1 = nn.Parameter(torch.eye(in_channels, r1, device=device, dtype=dtype))
        self.k3 = nn.Parameter(torch.eye(r2, out_channels, device=device, dtype=dtype))
        if frames == "orthonormal":
            self.hold_frames()

    @property
    def frames(self) -> FrameKind:
        """The kind of frames: free parameters, or held orthonormal."""
        held = is_held_orthonormal(self, "k1") and is_held_orthonormal(self, "k3")
        return "orthonormal" if held else "free"

    def _framed_spectrum(self, kernel: Tensor, geometry: LayerGeometry) -> Tensor:
        """The singular values of a kernel between the frames, which are made orthonormal for it."""
        k1, kernel, k3 = (at_least_single(factor) for factor in (self.k1, kernel, self.k3))
        core = orthogonalize(k1, kernel, k3).core
        return periodic_singular_values(core, geometry.periodic_conv(core))

    def hold_frames(self) -> None:
        """Holds the frames orthonormal from now on, starting from the orthonormal factors of what they are."""
        hold_orthonormal(self, "k1")
        hold_orthonormal(self, "k3")

    def reset_frames(self) -> None:
        """Draws orthonormal frames."""
        for name in ("k1", "k3"):
            held = is_held_orthonormal(self, name)
            frame = self.get_parameter(f"parametrizations.{name}.original" if held else name).detach()
            frame.copy_(nn.init.orthogonal_(at_least_single(frame)))


class FramedConv2d(Framed):
    """Any core between frames: a 1x1 convolution to r1 channels, the core, a 1x1 convolution to c_out channels.

    `core(r1, r2)` makes the module in the middle, from images `(batch, r1, height, width)` to images of r2 channels
    (without a bias: that is added here). `rank`: an int (each side `min(channels, rank)`) or a pair (r1, r2).
    Parameters `k1 (c_in, r1)`, `k3 (r2, c_out)`, `bias (c_out)` and those of `core`. Raises `ConfigError`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        rank: int | Sequence[int],
        core: Callable[[int, int], nn.Module],
        bias: bool = True,
        *,
        frames: FrameKind = "free",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, rank, frames, device=device, dtype=dtype)
        self.core = core(*self.rank)
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        if not self.k1.is_meta:
            self.reset_frames()
            if self.bias is not None:
                nn.init.uniform_(self.bias, -1 / math.sqrt(out_channels), 1 / math.sqrt(out_channels))

    @property
    def has_spectrum(self) -> bool:
        """Whether the core is an ungrouped `nn.Conv2d` or orthogonal by construction."""
        return isinstance(self.core, OrthogonalConv2d) or (isinstance(self.core, nn.Conv2d) and self.core.groups == 1)

    def spectrum(self, input_size: Size) -> Tensor:
        """Returns the nonzero singular values: the core's, with what frames that are not orthonormal make of them."""
        if isinstance(self.core, OrthogonalConv2d):
            size = periodic_size(input_size, (self.core.stride,) * 2)
            return self.core.singular_values(size, frames=self._triangles())
        assert isinstance(self.core, nn.Conv2d), "others have no spectrum"
        return self._framed_spectrum(self.core.weight, layer_geometry(self.core, input_size))

    def _triangles(self) -> tuple[Tensor, Tensor] | None:
        """What is left of the frames when their orthonormal factors are taken off; None where nothing is."""
        if self.frames == "orthonormal":
            return None
        k1, k3 = at_least_single(self.k1), at_least_single(self.k3)
        return positive_qr(k1)[1], positive_qr(k3.T)[1].T

    def forward(self, images: Tensor) -> Tensor:
        """Takes images `(batch, c_in, height, width)` to images of c_out channels, of the size that the core gives."""
        hidden = self.core(functional.conv2d(images, self.k1.T[..., None, None]))
        return functional.conv2d(hidden, self.k3.T[..., None, None], self.bias)

    def extra_repr(self) -> str:
        """Names channels, ranks and what differs from the defaults."""
        text = f"{self.in_channels}, {self.out_channels}, rank={self.rank}"
        text = text if self.bias is not None else text + ", bias=False"
        return text if self.frames == "free" else text + f", frames={self.frames!r}"


class Stiefel(nn.Module):
    """Parametrizes a matrix as the orthonormal factor of another: orthonormal columns if tall, rows if wide.

    For `torch.nn.utils.parametrize`: what the optimizer moves is a free matrix W of the same shape, what the layer
    reads is Q of `W = Q R` with R's diagonal positive, orthonormal to the dtype's rounding wherever W is. The loss
    does not depend on R, so its gradient never shrinks W, and weight decay, which would move a matrix
    parametrized around its starting point (`torch.nn.utils.parametrizations.orthogonal`; its Householder map even
    reads 0 once decay has touched the diagonal that stores signs), only changes the length of the steps.
    """

    def forward(self, free: Tensor) -> Tensor:
        """Returns the orthonormal factor of the free matrix, of its shape; differentiable where that has full rank.

        In half precision factored in float32, then rounded.
        """
        matrix = at_least_single(free)
        frame = positive_qr(matrix.T)[0].T if free.shape[0] < free.shape[1] else positive_qr(matrix)[0]
        return frame.to(free.dtype)

    def right_inverse(self, matrix: Tensor) -> Tensor:
        """Returns the free matrix that stands for an orthonormal one: itself. Others are orthonormalized when read."""
        return matrix


def hold_orthonormal(layer: nn.Module, name: str) -> None:
    """Parametrizes the matrix `name` of a layer by `Stiefel`, once."""
    if not is_held_orthonormal(layer, name):
        parametrize.register_parametrization(layer, name, Stiefel())


def is_held_orthonormal(layer: nn.Module, name: str) -> bool:
    """Whether the matrix `name` of a layer is what `Stiefel` makes of its parameter."""
    if not parametrize.is_parametrized(layer, name):
        return False
    maps = layer.get_submodule(f"parametrizations.{name}")
    return isinstance(maps, parametrize.ParametrizationList) and isinstance(maps[-1], Stiefel)
