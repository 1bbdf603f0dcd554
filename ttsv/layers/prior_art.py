"""Other people's ways to control singular values, to compare with: thin adapters around maintained libraries.

BCOP, AOC and AOL come from orthogonium (float32 only; the first two up to the end of a Björck iteration), spectral
normalisation from torch. All but `Cayley` are `nn.Conv2d` with a parametrized weight, hence spectral layers, which
projections refuse to write. Convolutions pad by `k // 2` so that an odd kernel keeps the size.
"""

import math
from typing import Literal

import torch
from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d, FastBlockConv2d
from orthogonium.layers.conv.AOL import AOLConv2D
from orthogonium.legacy.cayley_ortho_conv import cayley_func
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from ttsv.errors import ConfigError
from ttsv.tt import positive_qr

Padding = Literal["circular", "zeros"]


def bcop(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    bias: bool = True,
    *,
    padding_mode: Padding = "circular",
) -> nn.Module:
    """Block convolution orthogonal parametrization (Li et al., NeurIPS 2019), stride by space-to-depth.

    All singular values are 1, to about 1e-5, with circular padding; zero padding keeps the norm at 1 at most, not the
    small values. orthogonium's `FastBlockConv2d`.
    """
    if stride > 1 and kernel_size % 2 == 0:
        raise ConfigError("kernel_size", kernel_size, "must be odd with a stride")
    conv: nn.Module = FastBlockConv2d(
        stride * stride * in_channels,
        out_channels,
        kernel_size,
        padding=kernel_size // 2,
        bias=bias,
        padding_mode=padding_mode,
    )
    return conv if stride == 1 else nn.Sequential(nn.PixelUnshuffle(stride), conv)


def aoc(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    bias: bool = True,
    *,
    padding_mode: Padding = "circular",
) -> nn.Module:
    """Adaptive orthogonal convolution (Boissin et al., 2025): BCOP with strides proper, from orthogonium.

    Singular values as for `bcop`. Raises `ConfigError` where the kernel is smaller than the stride.
    """
    if kernel_size < stride:
        raise ConfigError("kernel_size", kernel_size, f"must be at least the stride, {stride}")
    conv: nn.Module = AdaptiveOrthoConv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        bias=bias,
        padding_mode=padding_mode,
    )
    return conv


def aol(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    bias: bool = True,
    *,
    padding_mode: Padding = "zeros",
) -> nn.Module:
    """Almost orthogonal Lipschitz layers (Prach & Lampert, ECCV 2022), from orthogonium.

    The norm is at most 1 up to float32 rounding, whatever the padding, and may be far less; the other singular values
    are not controlled.
    """
    conv: nn.Module = AOLConv2D(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        bias=bias,
        padding_mode=padding_mode,
    )
    return conv


class Cayley(nn.Module):
    """Orthogonal convolution by the Cayley transform at every frequency (Trockman & Kolter, ICLR 2021).

    Periodic, with the map of orthogonium's `cayley_func` and a stride by space-to-depth; unlike the library's own
    layer it takes rectangular images, images of changing size, and float64. All singular values are 1 up to
    rounding. Its operator is global: it has no kernel of k x k taps, hence is no spectral layer.

    Parameters `weight (c_out, s^2 c_in, k, k)`, the scale `alpha` and `bias (c_out)`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        shape = out_channels, stride * stride * in_channels, kernel_size, kernel_size
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.alpha = nn.Parameter(torch.linalg.vector_norm(self.weight.detach()))
        self.bias = nn.Parameter(torch.zeros(out_channels, device=device, dtype=dtype)) if bias else None

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, c_in, s h, s w)` to images `(batch, c_out, h, w)`; h and w at least k."""
        s, k = self.stride, self.kernel_size
        if any(n % s or n // s < k for n in images.shape[-2:]):
            fix = f"must be multiples of the stride, {s}, and hold {k} pixels after it"
            raise ConfigError("images.shape", tuple(images.shape), fix)
        images = functional.pixel_unshuffle(images, s)
        height, width = images.shape[-2:]
        weight = self.alpha * self.weight / torch.linalg.vector_norm(self.weight)
        taps = functional.pad(weight, (0, width - k, 0, height - k)).roll((-(k // 2), -(k // 2)), (2, 3))
        blocks = cayley_func(torch.fft.rfft2(taps).conj().permute(2, 3, 0, 1).flatten(0, 1))
        columns = torch.fft.rfft2(images).permute(2, 3, 1, 0).flatten(0, 1)
        rows = (blocks @ columns).unflatten(0, (height, -1)).permute(3, 2, 0, 1)
        outputs: Tensor = torch.fft.irfft2(rows, (height, width))
        return outputs if self.bias is None else outputs + self.bias[:, None, None]

    def extra_repr(self) -> str:
        """Arguments, as torch's convolutions print them."""
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        return text if self.bias is not None else text + ", bias=False"


def spectral_normalized(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, bias: bool = True
) -> nn.Module:
    """Spectral normalisation (Miyato et al., ICLR 2018) as torch has it: of the unfolding, not of the operator.

    The `(c_out, c_in k k)` unfolding has norm 1 as far as one warm power iteration per training pass knows; the
    zero-padded convolution has at most k times that.
    """
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=bias)
    return parametrizations.spectral_norm(conv)


class UnfoldedSVD(nn.Module):
    """Parametrizes a kernel by its unfolding's decomposition `(c_out, c_in k k) = U diag(s) V^T`, rank r.

    From free matrices `(c_out, r)` and `(c_in k k, r)`, whose orthonormal factors are U and V, and `s (r)`.
    """

    def __init__(self, shape: torch.Size, rank: int) -> None:
        super().__init__()
        self.shape = shape
        self.rank = rank

    def forward(self, left: Tensor, values: Tensor, right: Tensor) -> Tensor:
        """The kernel."""
        matrix: Tensor = (positive_qr(left)[0] * values) @ positive_qr(right)[0].T
        return matrix.reshape(self.shape)

    def right_inverse(self, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The leading r singular triples."""
        left, values, right = torch.linalg.svd(kernel.flatten(1), full_matrices=False)
        return left[:, : self.rank], values[: self.rank], right[: self.rank].T


def svd_unfolded(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    bias: bool = True,
    *,
    rank: int | None = None,
) -> nn.Module:
    """A convolution whose unfolding is parametrized by its singular value decomposition, of full rank or `rank`.

    As in Liu et al. and Obukhov et al. (spectral tensor train parametrization, AISTATS 2021): `original1` of the
    weight's parametrization holds the singular values of the `(c_out, c_in k k)` unfolding, free to be penalised or
    clamped. The zero-padded convolution's norm is at most k times the largest of their magnitudes.
    """
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=bias)
    full = min(out_channels, in_channels * kernel_size * kernel_size)
    if rank is not None and not 1 <= rank <= full:
        raise ConfigError("rank", rank, f"must be at least 1 and at most {full}, or None")
    parametrize.register_parametrization(conv, "weight", UnfoldedSVD(conv.weight.shape, rank or full))
    return conv
