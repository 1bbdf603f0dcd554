"""Exact singular values of (strided, dilated, grouped, 1/2/3-d) periodic convolutions, and bounds of their norms."""

import math

import torch
from torch import Tensor

from ttsv.runtime.precision import full_precision
from ttsv.spectral.gram import Grams
from ttsv.spectral.norms import binary_scale, decomposes_in_batches, gram, periodic_norm
from ttsv.spectral.symbol import PeriodicConv, Size, fold
from ttsv.spectral.tridiagonal import hermitian_eigenvalues
from ttsv.tt.decomposition import orthogonalize

_LEAST_IN_STEP = 24
"""So many matrices, or more, take less time in step with each other than one by one on CUDA, by a count of launches: in
step, some 14 a row whatever their number; one by one, 8 microseconds a row were measured for each matrix."""


def conv_singular_values(
    kernel: Tensor, input_size: Size, *, stride: Size = 1, dilation: Size = 1, groups: int = 1
) -> Tensor:
    """Returns all singular values of the periodic convolution with `kernel (c_out, c_in / groups, k_1, ..., k_d)`.

    `input_size`, `stride`, `dilation`: one int or d of them, in pixels; every stride divides its size. A kernel
    larger than the input is folded modulo its size. float32 and float64 stay what they are; differentiable.

    Blocks are decomposed one by one, but on CUDA, and oblong ones anywhere, those of float32 kernels that ask for no
    gradient by the eigenvalues of their Gram matrices in float64, which take less time; on CUDA in step with each other
    (`ttsv.spectral.tridiagonal`) where there are many with more than a few rows. Their errors are some 1e-8 of
    the largest value: squares of values below that drown in the rounding of the largest square, and such values have
    no digits left. An SVD in float32 leaves none to values below some 1e-7 of the largest, so nothing is lost; float64
    keeps its SVD, which tells values down to some 1e-15 of the largest.

    Returns `(prod(n_i / s_i), min(c_out, prod(s_i) c_in))`, for groups `groups` times the width of one group's
    block: one row per frequency in row-major order, each descending, zeros included. Theorem 2 of the paper in
    the corrected form (see `ttsv.spectral.symbol`). Raises `ConfigError` (a `ValueError`) for what cannot be convolved.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    return periodic_singular_values(kernel, geometry)


@full_precision()
def periodic_singular_values(kernel: Tensor, geometry: PeriodicConv) -> Tensor:
    """Returns what `conv_singular_values` does, for a kernel of this geometry (`PeriodicConv.of`)."""
    kernel, geometry, _ = fold(kernel, geometry)
    groups, frequencies = geometry.groups, geometry.frequencies(kernel.device)
    sides = kernel.shape[0] // groups, kernel.shape[1] * math.prod(geometry.stride)
    differentiable = torch.is_grad_enabled() and kernel.requires_grad
    by_gram = not differentiable and _gains_by_gram(sides, kernel.dtype, kernel.device)
    decompose = _by_gram if by_gram else _by_svd
    real = geometry.is_real(frequencies.index)
    if by_gram and len(real) > 2 ** len(geometry.stride) and _in_step(len(real), min(sides), kernel.device):
        real = torch.zeros_like(real)  # the few that are take no time among the others, and as much by themselves
    parts = [decompose(kernel, geometry, frequencies.index[real == kind], kind) for kind in (True, False)]
    values = torch.cat(parts)[real.argsort(descending=True, stable=True).argsort()]
    if groups > 1:
        values = values.sort(dim=1, descending=True).values
    return values[frequencies.position]


def _gains_by_gram(sides: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the eigenvalues of Gram matrices in float64 take less time than the SVD, and lose nothing to it.

    On CUDA Hermitian matrices are decomposed as a batch (`_eigenvalues`), others of more than a few rows one by one.
    """
    oblong = max(sides) >= 1.5 * min(sides)
    return dtype == torch.float32 and (oblong or device.type == "cuda")


def block_singular_values(blocks: Tensor) -> Tensor:
    """Singular values (b, min(rows, columns)), descending, of blocks (b, rows, columns); not differentiable.

    On CUDA those in single precision come from Gram matrices, with the errors that `conv_singular_values` tells of.
    """
    if blocks.device.type == "cuda" and blocks.dtype in (torch.float32, torch.complex64):
        return values_by_gram(blocks)
    values: Tensor = torch.linalg.svdvals(blocks)
    return values


def values_by_gram(blocks: Tensor) -> Tensor:
    """Singular values of blocks as `block_singular_values` gives them, from Gram matrices in float64."""
    exact = blocks.to(torch.complex128 if blocks.is_complex() else torch.float64)
    return _roots(_eigenvalues(gram(exact))).to(blocks.real.dtype)


def _eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues (b, n), ascending, of Hermitian matrices (b, n, n), by what takes least time on their device."""
    count, side = matrices.shape[:2]
    if _in_step(count, side, matrices.device):
        return hermitian_eigenvalues(matrices)
    values: Tensor = torch.linalg.eigvalsh(matrices)
    return values


def _in_step(count: int, side: int, device: torch.device) -> bool:
    """Whether so many matrices with `side` rows are decomposed by `ttsv.spectral.tridiagonal`."""
    return count >= _LEAST_IN_STEP and not decomposes_in_batches(side, device)


def _roots(squares: Tensor) -> Tensor:
    """Singular values, descending, from ascending eigenvalues, of which rounding makes some negative."""
    return squares.clamp_min(0).sqrt().flip(-1)


def _by_svd(kernel: Tensor, geometry: PeriodicConv, index: Tensor, real: bool) -> Tensor:
    """Singular values at flat frequencies, one row each; in real arithmetic where all blocks are real."""
    parts = []
    for part in geometry.batches(kernel, index):
        blocks = geometry.symbol(kernel, part)
        parts.append(torch.linalg.svdvals(blocks.real if real else blocks).flatten(1))
    return torch.cat(parts)


def _by_gram(kernel: Tensor, geometry: PeriodicConv, index: Tensor, real: bool) -> Tensor:
    """As `_by_svd`, from Gram matrices in float64; the scale keeps squares in range."""
    scale = binary_scale(kernel)
    grams, groups = Grams(kernel.double() / scale, geometry), geometry.groups
    parts = []
    for part in grams.batches(index):
        matrices = grams.at(part)
        values = _roots(_eigenvalues(matrices.real if real else matrices))
        parts.append(values.reshape(len(part), groups * grams.side))
    return (torch.cat(parts) * scale).to(kernel.dtype)


def tt_singular_values(
    k1: Tensor, core: Tensor, k3: Tensor, input_size: Size, *, stride: Size = 1, dilation: Size = 1
) -> Tensor:
    """Returns the nonzero singular values of the periodic TT convolution: those of its core between orthonormal frames.

    `k1 (c_in, r1)`, `core (r2, r1, k_1, ..., k_d)`, `k3 (r2, c_out)`; the frames need not be orthonormal (QR
    first, Theorem 1 and Algorithm 1). All other singular values of the whole operator are 0. Returns
    `(prod(n_i / s_i), min(r2, prod(s_i) r1))`, otherwise as `conv_singular_values`.
    """
    return conv_singular_values(orthogonalize(k1, core, k3).core, input_size, stride=stride, dilation=dilation)


def conv_norm(kernel: Tensor, input_size: Size, *, stride: Size = 1, dilation: Size = 1, groups: int = 1) -> float:
    """Returns the largest of `conv_singular_values`, much cheaper, with a relative error of the dtype's rounding.

    Not differentiable. Arguments and errors as there; `conv_norm_bounds` gives rigorous bounds.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    return periodic_norm(kernel.detach(), geometry)
