"""Other people's ways to control singular values, to compare with: thin adapters around maintained libraries.

BCOP, AOC and AOL come from orthogonium (float32 only; the first two up to the end of a Björck iteration), spectral
normalisation from torch. All are spectral layers, which projections refuse to write: `nn.Conv2d` with a parametrized
weight or, `Cayley` and BCOP with a stride, `OrthogonalConv2d`. Convolutions pad by `k // 2` so that an odd kernel
keeps the size. Under autocast images are convolved in its precision, but kernels are made without it.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import torch
from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d, FastBlockConv2d
from orthogonium.layers.conv.AOC.rko_conv import RKOParametrizer
from orthogonium.layers.conv.AOL import AOLConv2D
from orthogonium.reparametrizers import BatchedPowerIteration
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from ttsv.checks import check_count, check_counts
from ttsv.errors import ConfigError
from ttsv.layers.orthogonal import OrthogonalConv2d, framed_blocks, space_to_depth_size
from ttsv.runtime.precision import without_autocast
from ttsv.spectral.singular_values import block_singular_values, conv_singular_values
from ttsv.spectral.symbol import Size
from ttsv.tt.decomposition import positive_qr

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
    check_counts(in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, stride=stride)
    if stride > 1 and kernel_size % 2 == 0:
        raise ConfigError("kernel_size", kernel_size, "must be odd with a stride")
    channels = stride * stride * in_channels, out_channels
    conv = _keeping_size(FastBlockConv2d, *channels, kernel_size, bias=bias, padding_mode=padding_mode)
    assert isinstance(conv, nn.Conv2d)
    return conv if stride == 1 else SpaceToDepthConv2d(conv, in_channels, stride)


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
    channels = in_channels, out_channels
    conv = _strided(AdaptiveOrthoConv2d, *channels, kernel_size, stride, bias=bias, padding_mode=padding_mode)
    for module in conv.modules():
        if isinstance(module, RKOParametrizer):  # which views the weight as a matrix: not possible in channels_last
            module.register_forward_pre_hook(_contiguous)
    return conv


def _contiguous(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in inputs)


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
    return _strided(AOLConv2D, in_channels, out_channels, kernel_size, stride, bias=bias, padding_mode=padding_mode)


def _strided(
    layer: Callable[..., nn.Module], in_channels: int, out_channels: int, kernel_size: int, stride: int, **options: Any
) -> nn.Module:
    """A layer of orthogonium that takes strides itself. Raises `ConfigError` where the kernel is smaller than one."""
    check_counts(in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, stride=stride)
    if kernel_size < stride:
        raise ConfigError("kernel_size", kernel_size, f"must be at least the stride, {stride}")
    return _keeping_size(layer, in_channels, out_channels, kernel_size, stride=stride, **options)


def _keeping_size(
    layer: Callable[..., nn.Module], in_channels: int, out_channels: int, kernel_size: int, **options: Any
) -> nn.Module:
    """A layer of orthogonium, padded so that an odd kernel keeps the size, its kernel made without autocast."""
    conv = layer(in_channels, out_channels, kernel_size, padding=kernel_size // 2, **options)
    parametrize_without_autocast(conv)
    for module in conv.modules():
        if isinstance(module, BatchedPowerIteration):
            vectors = _Vectors()
            module.register_forward_pre_hook(vectors.note)
            module.register_forward_hook(vectors.restore)
    return conv


class _Vectors:
    """What a power iteration of orthogonium goes on from, which it moves in evaluation, too.

    Whoever looked at a network would change it: each pass would give other numbers, and so would its saved weights.
    """

    def __init__(self) -> None:
        self._noted: tuple[Tensor, ...] = ()

    def note(self, iteration: nn.Module, _: tuple[Tensor, ...]) -> None:
        """Before a pass: in evaluation they are kept."""
        self._noted = () if iteration.training else tuple(vector.detach() for vector in _vectors(iteration))

    def restore(self, iteration: nn.Module, _: tuple[Tensor, ...], __: Tensor) -> None:
        """After it."""
        for vector, before in zip(_vectors(iteration), self._noted, strict=False):
            vector.data = before
        self._noted = ()


def _vectors(iteration: nn.Module) -> Iterator[Tensor]:
    for name in ("u", "v"):
        yield cast("Tensor", iteration.get_parameter(f"parametrizations.{name}.original"))


class SpaceToDepthConv2d(OrthogonalConv2d):
    """A stride for a convolution without one: `conv`, an `nn.Conv2d` from `s^2 in_channels`, behind space-to-depth."""

    def __init__(self, conv: nn.Conv2d, in_channels: int, stride: int) -> None:
        super().__init__(in_channels, conv.out_channels, conv.kernel_size[0], stride)
        self.conv = conv

    @property
    def weight(self) -> Tensor:  # type: ignore[override] # made anew by the parametrization
        """The kernel `(out_channels, s^2 in_channels, k, k)`."""
        return self.conv.weight

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override] # the convolution's parameter
        """The bias `(out_channels)`, if there is one."""
        return self.conv.bias

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, in_channels, s h, s w)` to images `(batch, out_channels, h, w)`."""
        outputs: Tensor = self.conv(functional.pixel_unshuffle(images, self.stride))
        return outputs

    @torch.no_grad()
    def singular_values(self, input_size: Size, *, frames: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """As `OrthogonalConv2d` has it: those of the kernel."""
        sizes = space_to_depth_size(input_size, self.stride)
        taps_last = framed_blocks(self.weight.permute(2, 3, 0, 1), frames)
        return conv_singular_values(taps_last.permute(2, 3, 0, 1), sizes)


class Cayley(OrthogonalConv2d):
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
        super().__init__(in_channels, out_channels, kernel_size, stride)
        shape = out_channels, stride * stride * in_channels, kernel_size, kernel_size
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.alpha = nn.Parameter(torch.linalg.vector_norm(self.weight.detach()))
        self.bias = nn.Parameter(torch.zeros(out_channels, device=device, dtype=dtype)) if bias else None

    def forward(self, images: Tensor) -> Tensor:
        """Images `(batch, c_in, s h, s w)` to images `(batch, c_out, h, w)`."""
        height, width = space_to_depth_size(images.shape[-2:], self.stride)
        images = functional.pixel_unshuffle(images, self.stride)
        columns = torch.fft.rfft2(images).permute(2, 3, 1, 0).flatten(0, 1)
        rows = (self._blocks(height, width) @ columns).unflatten(0, (height, -1)).permute(3, 2, 0, 1)
        outputs: Tensor = torch.fft.irfft2(rows, (height, width))
        return outputs if self.bias is None else outputs + self.bias[:, None, None]

    @torch.no_grad()
    def singular_values(self, input_size: Size, *, frames: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """As `OrthogonalConv2d` has it: 1, up to rounding, without frames."""
        height, width = space_to_depth_size(input_size, self.stride)
        values = block_singular_values(framed_blocks(self._blocks(height, width), frames))
        half = values.reshape(height, -1, values.shape[-1])
        # A real operator has equal values at opposite frequencies: row 0 is its own, the others swap.
        opposite = half[:, 1 : (width + 1) // 2].flip(1)
        opposite = torch.cat([opposite[:1], opposite[1:].flip(0)])
        return torch.cat([half, opposite], dim=1).flatten(0, 1)

    def _blocks(self, height: int, width: int) -> Tensor:
        """The operator at each frequency of `rfft2`, `(height (width // 2 + 1), c_out, s^2 c_in)`."""
        k = self.kernel_size
        weight = self.alpha * self.weight / torch.linalg.vector_norm(self.weight)
        # A kernel larger than the image wraps around it.
        rows = [functional.pad(part, (0, 0, 0, height - part.shape[2])) for part in torch.split(weight, height, 2)]
        folded = torch.stack(rows).sum(0)
        columns = [functional.pad(part, (0, width - part.shape[3])) for part in torch.split(folded, width, 3)]
        taps = torch.stack(columns).sum(0).roll((-(k // 2), -(k // 2)), (2, 3))
        return _cayley(torch.fft.rfft2(taps).conj().permute(2, 3, 0, 1).flatten(0, 1))


def _cayley(matrices: Tensor) -> Tensor:
    """The map of orthogonium's `cayley_func` of matrices (count, rows, columns): it makes each of them orthogonal.

    Without a look at whether the inverses could be taken, for which a GPU would be waited at each: they can, as what is
    inverted is the identity and a matrix whose symmetric part has no negative eigenvalue.
    """
    if matrices.shape[2] > matrices.shape[1]:
        return _cayley(matrices.transpose(1, 2)).transpose(1, 2)
    square, rest = matrices[:, : matrices.shape[2]], matrices[:, matrices.shape[2] :]
    identity = torch.eye(matrices.shape[2], dtype=matrices.dtype, device=matrices.device)
    skew = square - square.mH + rest.mH @ rest
    inverse: Tensor = torch.linalg.inv_ex(identity + skew).inverse
    return torch.cat((inverse @ (identity - skew), -2 * rest @ inverse), dim=1)


def spectral_normalized(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, bias: bool = True
) -> nn.Module:
    """Spectral normalisation (Miyato et al., ICLR 2018) as torch has it: of the unfolding, not of the operator.

    The `(c_out, c_in k k)` unfolding has norm 1 as far as one warm power iteration per training pass knows; the
    zero-padded convolution has at most k times that.
    """
    return parametrizations.spectral_norm(_plain(in_channels, out_channels, kernel_size, stride, bias))


def _plain(in_channels: int, out_channels: int, kernel_size: int, stride: int, bias: bool) -> nn.Conv2d:
    """Torch's convolution, padded so that an odd kernel keeps the size."""
    check_counts(in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, stride=stride)
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=bias)


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
    conv = _plain(in_channels, out_channels, kernel_size, stride, bias)
    full = min(out_channels, in_channels * kernel_size * kernel_size)
    if rank is not None:
        check_count("rank", rank)
        if rank > full:
            raise ConfigError("rank", rank, f"must be at most {full}, or None")
    parametrize.register_parametrization(conv, "weight", UnfoldedSVD(conv.weight.shape, rank or full))
    parametrize_without_autocast(conv)
    return conv


def parametrize_without_autocast(conv: nn.Module) -> None:
    """Lets mixed precision be for the convolution alone: in bf16 iterations towards orthogonality may diverge."""
    for module in conv.modules():
        if type(module) is parametrize.ParametrizationList:
            module.__class__ = _WithoutAutocast


class _WithoutAutocast(parametrize.ParametrizationList):
    def forward(self) -> Tensor:
        """The kernel, in its parameters' own type."""
        with without_autocast(next(self.parameters()).device.type):
            found: Tensor = super().forward()
        return found
