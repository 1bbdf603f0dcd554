"""Frames around a core: two 1x1 convolutions that are isometries when the frames are orthonormal."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.checks import check_counts
from ttsv.errors import ConfigError
from ttsv.layers.stiefel import hold_orthonormal, is_held_orthonormal
from ttsv.precision import at_least_single
from ttsv.tt import tt_ranks

FrameKind = Literal["free", "orthonormal"]


def check_frames(frames: str) -> None:
    """Raises `ConfigError` for an unknown kind of frames."""
    if frames not in get_args(FrameKind):
        raise ConfigError("frames", frames, f"must be one of {', '.join(get_args(FrameKind))}")


class Framed(nn.Module):
    """A layer between frames `k1 (c_in, r1)` and `k3 (r2, c_out)`: base of `TTConv` and `FramedConv2d`.

    `frames="free"`: plain parameters, orthonormal at the start (`ttsv.constraints.Orthogonal` keeps them near it).
    `frames="orthonormal"`: exactly so after every step, see `ttsv.layers.stiefel`; `k1` and `k3` are then read
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
        """Whether the frames are free parameters or held orthonormal."""
        held = is_held_orthonormal(self, "k1") and is_held_orthonormal(self, "k3")
        return "orthonormal" if held else "free"

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

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, c_in, height, width)` to images with c_out channels, of the size that the core gives."""
        hidden = self.core(functional.conv2d(images, self.k1.T[..., None, None]))
        return functional.conv2d(hidden, self.k3.T[..., None, None], self.bias)

    def extra_repr(self) -> str:
        """Channels, ranks and what differs from the defaults."""
        text = f"{self.in_channels}, {self.out_channels}, rank={self.rank}"
        text = text if self.bias is not None else text + ", bias=False"
        return text if self.frames == "free" else text + f", frames={self.frames!r}"
