"""Convolutions in the tensor-train format: frame, core, frame."""

import math
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from ttsv.checks import check_choice
from ttsv.errors import ConfigError
from ttsv.layers.framed import Framed, FrameKind, check_frames
from ttsv.runtime.precision import at_least_single
from ttsv.spectral.geometry import CONVOLVE, Convolution, TransposedConvolution, layer_geometry
from ttsv.spectral.symbol import Sides, Size, as_tuple, output_sizes, pad, padding_sides
from ttsv.tt.decomposition import row_major, tt_svd, tt_to_dense
from ttsv.tt.ranks import cheapest_merge

_PADDING_MODES = ("zeros", "circular", "reflect", "replicate")

_COMPILED_IMAGES = 128
"""`torch.compile` merges frames as for so many images: one graph then serves every batch, to the same numbers up to
rounding, where a choice by the batch would compile it anew for each way of merging."""


class TTConv(Framed):
    """A convolution `K[o, i, t] = sum_ab k3[b, o] core[b, a, t] k1[i, a]` (eq. tt); use `TTConv1d/2d/3d`.

    Arguments as for `torch.nn.Conv*d` (sizes in pixels), without groups, and `rank`: an int (each side
    `min(channels, rank)`) or a pair (r1, r2). Parameters `k1 (c_in, r1)`, `core (r2, r1, k_1, ..., k_d)`,
    `k3 (r2, c_out)` and `bias (c_out)`. The frames start orthonormal, and stay so exactly with
    `frames="orthonormal"` (see `Framed`); the merged kernel starts with the variance of torch's default,
    `1 / (3 c_in k_1 ... k_d)`. Raises `ConfigError` for what cannot be.
    """

    groups: ClassVar[int] = 1

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        rank: int | Sequence[int],
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        frames: FrameKind = "free",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, rank, frames, device=device, dtype=dtype)
        check_choice("padding_mode", padding_mode, _PADDING_MODES)
        d = self.spatial_dims
        self.kernel_size = as_tuple("kernel_size", kernel_size, d)
        self.stride = as_tuple("stride", stride, d)
        self.dilation = as_tuple("dilation", dilation, d)
        self.padding = padding if isinstance(padding, str) else as_tuple("padding", padding, d, least=0)
        self.padding_mode = padding_mode
        self._sides = self._padded_sides()
        r1, r2 = self.rank
        self.core = nn.Parameter(torch.empty(r2, r1, *self.kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        if not self.k1.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws orthonormal frames, a uniform core and a bias as in torch."""
        self.reset_frames()
        r1, r2 = self.rank
        taps = math.prod(self.kernel_size)
        # |K|_F = |core|_F between orthonormal frames: a variance of c_out / (3 r1 r2 taps) in the core is one of
        # 1 / (3 c_in taps) in the kernel.
        bound = math.sqrt(self.out_channels / (r1 * r2 * taps))
        nn.init.uniform_(self.core, -bound, bound)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_channels * taps)
            nn.init.uniform_(self.bias, -bound, bound)

    def dense_kernel(self) -> Tensor:
        """Returns the merged kernel `(c_out, c_in, k_1, ..., k_d)`, differentiable."""
        return tt_to_dense(self.k1, self.core, self.k3)

    def forward(self, images: Tensor) -> Tensor:
        """Convolves images `(batch, c_in, n_1, ..., n_d)`, or one without the batch axis.

        Three convolutions, two with one frame merged into the core, or one with the merged kernel, whichever takes
        the fewest multiply-accumulates for this input; the result is the same up to rounding. The bias-free first 1x1
        convolution commutes with every mode of padding, so where it stays the core's input is padded.
        """
        merge_in, merge_out = self._merges(images.shape)
        convolve = CONVOLVE[self.spatial_dims]
        pointwise = (..., *(None,) * self.spatial_dims)
        hidden = images if merge_in else convolve(images, self.k1.T[pointwise])
        hidden = self._convolve(hidden, self._merged(merge_in, merge_out), self.bias if merge_out else None)
        return hidden if merge_out else convolve(hidden, self.k3.T[pointwise], self.bias)

    def spectrum(self, input_size: Size) -> Tensor:
        """Returns the nonzero singular values: those of the core between frames made orthonormal (Theorem 1)."""
        return self._framed_spectrum(self.core, layer_geometry(self, input_size))

    @classmethod
    def from_dense(cls, conv: nn.Module, rank: int | Sequence[int], *, frames: FrameKind = "free") -> Self:
        """Takes the truncated HOSVD (`ttsv.tt.tt_svd`) of a trained convolution, on its device and in its dtype.

        `ttsv.tt.tt_error(conv.weight, *factors)` gives the relative error. Raises `ConfigError` for a
        grouped convolution, or one with another number of axes. Parameters of a frozen one (`requires_grad=False`) stay
        frozen.
        """
        if not isinstance(conv, nn.Conv1d | nn.Conv2d | nn.Conv3d) or conv.weight.ndim != cls.spatial_dims + 2:
            raise ConfigError("conv", type(conv).__name__, f"must be an nn.Conv{cls.spatial_dims}d")
        check_frames(frames)
        if conv.groups != 1:
            raise ConfigError("conv.groups", conv.groups, "must be 1: a grouped convolution has no common frames")
        layer = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            rank,
            stride=conv.stride,
            padding=conv.padding,
            dilation=conv.dilation,
            bias=conv.bias is not None,
            padding_mode=conv.padding_mode,
            device="meta",
        )
        weight = conv.weight.detach()
        factors = (factor.to(weight.dtype) for factor in tt_svd(at_least_single(weight), layer.rank))
        layer.k1, layer.core, layer.k3 = (nn.Parameter(factor, conv.weight.requires_grad) for factor in factors)
        if conv.bias is not None:
            layer.bias = nn.Parameter(conv.bias.detach().clone(), conv.bias.requires_grad)
        if frames == "orthonormal":
            layer.hold_frames()
        return layer.train(conv.training)

    def extra_repr(self) -> str:
        """Names the arguments that differ from their defaults, as torch's convolutions print them."""
        one, zero = (1,) * self.spatial_dims, (0,) * self.spatial_dims
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, rank={self.rank}"
        defaults = {"stride": one, "padding": zero, "dilation": one, "padding_mode": "zeros", "frames": "free"}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)!r}"
        return text if self.bias is not None else text + ", bias=False"

    def _padded_sides(self) -> Sides:
        """Pixels of padding before and after, per axis."""
        if isinstance(self.padding, str) and self.padding not in ("same", "valid"):
            raise ConfigError("padding", self.padding, 'must be pixels, "same" or "valid"')
        if self.padding == "same" and any(s != 1 for s in self.stride):
            raise ConfigError("stride", self.stride, 'must be 1 with padding="same"')
        return padding_sides(self.padding, self.kernel_size, self.dilation)

    def _convolve(self, images: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        before = tuple(side for side, _ in self._sides)
        if self.padding_mode != "zeros" or any(a != b for a, b in self._sides):
            images = pad(images, self._sides, "constant" if self.padding_mode == "zeros" else self.padding_mode)
            before = (0,) * self.spatial_dims
        return CONVOLVE[self.spatial_dims](images, kernel, bias, self.stride, before, self.dilation)

    def _merged(self, merge_in: bool, merge_out: bool) -> Tensor:
        """Returns the core, with the chosen frames merged into it."""
        if merge_in and merge_out:
            return self.dense_kernel()
        if merge_in:
            return row_major(torch.einsum("ba...,ia->bi...", self.core, self.k1))
        return row_major(torch.einsum("bo,ba...->oa...", self.k3, self.core)) if merge_out else self.core

    def _merges(self, shape: torch.Size) -> tuple[bool, bool]:
        """Says which frames to merge, k1 and k3, for an input of this shape."""
        sizes = shape[-self.spatial_dims :]
        images = _COMPILED_IMAGES if torch.compiler.is_compiling() else math.prod(shape[: -self.spatial_dims - 1])
        results = output_sizes(sizes, self._sides, self.kernel_size, self.stride, self.dilation)
        channels = self.in_channels, self.out_channels
        pixels = images * math.prod(sizes), images * math.prod(results)
        return cheapest_merge(channels, self.rank, math.prod(self.kernel_size), pixels)[1]


class TTConv1d(TTConv):
    """A `TTConv` over signals `(batch, c_in, n)`."""

    spatial_dims = 1


class TTConv2d(TTConv):
    """A `TTConv` over images `(batch, c_in, height, width)`."""

    spatial_dims = 2


class TTConv3d(TTConv):
    """A `TTConv` over volumes `(batch, c_in, depth, height, width)`."""

    spatial_dims = 3


def layer_kernel(layer: TTConv | Convolution | TransposedConvolution) -> Tensor:
    """Returns the kernel that a layer's geometry is of: a TT layer's core, the weight of others."""
    return layer.core if isinstance(layer, TTConv) else layer.weight
