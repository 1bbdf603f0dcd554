"""The largest singular value over all frequencies without decomposing most blocks, and kernels rescaled to a norm."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ttsv.runtime.precision import full_precision
from ttsv.spectral.gram import Grams
from ttsv.spectral.symbol import PeriodicConv, fold


@full_precision()
def periodic_norm(kernel: Tensor, geometry: PeriodicConv) -> float:
    """Largest singular value of the periodic convolution, to some ten roundings of the kernel's dtype."""
    scale = binary_scale(kernel)
    kernel, geometry, _ = fold(kernel / scale, geometry)
    return scale * math.sqrt(largest_square(kernel, geometry, 32 * torch.finfo(kernel.dtype).eps))


def largest_square(kernel: Tensor, geometry: PeriodicConv, tolerance: float) -> float:
    """Largest squared singular value of a periodic convolution without folds, see `largest_eigenvalues`."""
    return float(largest_squares(kernel, geometry, tolerance, 1))


def largest_squares(
    kernel: Tensor, geometry: PeriodicConv, tolerance: float, owners: int, least: Tensor | None = None
) -> Tensor:
    """As `largest_square`, of each (owners,) of so many convolutions that are the groups of one (`stacked`).

    With a `least (owners,)` of each that is found for one that is not above it, but for the tolerance, and costs little
    more than Cholesky tests.
    """
    grams = Grams(kernel, geometry)
    # Where eigenvalues are decompositions, they come after a test anyway.
    tests = least is not None and not decomposes_in_batches(grams.side, kernel.device)
    found = kernel.new_zeros(owners) if least is None else least
    for index in grams.batches(geometry.frequencies(kernel.device).index):
        matrices = grams.at(index)
        owner = owners_of(matrices, geometry, owners)
        if tests:
            which = indices_above(matrices, found[owner] * (1 + tolerance))
            if not len(which):
                continue
            matrices, owner = matrices[which], owner[which]
        found = largest_eigenvalues(matrices, tolerance, found, owner)
    return found


def owners_of(matrices: Tensor, geometry: PeriodicConv, owners: int) -> Tensor:
    """Which (b,) of so many convolutions that are the groups of one `Grams.at` formed each of the matrices of."""
    order = torch.arange(len(matrices), device=matrices.device)
    return (order % geometry.groups).div(geometry.groups // owners, rounding_mode="floor")


def binary_scale(kernel: Tensor) -> float:
    """A power of two near the largest magnitude (1 for zero): dividing by it is exact and keeps squares in range."""
    return power_of_two(kernel.abs().max().item())


def power_of_two(largest: float) -> float:
    """The largest power of two up to a number above 0; 1 for 0."""
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest else 1.0


def powers_of_two(largest: Tensor) -> Tensor:
    """As `power_of_two` of each number in float64, which is not waited for; the smallest normal number for less."""
    exponents: Tensor = torch.bitwise_and(largest.view(torch.int64), 0x7FF << 52)
    return exponents.view(torch.float64).clamp_min(torch.finfo(torch.float64).tiny)


def gram(blocks: Tensor) -> Tensor:
    """`A A^H` or `A^H A`, whichever is smaller, for blocks A (b, rows, columns)."""
    if blocks.shape[-2] <= blocks.shape[-1]:
        return blocks @ blocks.mH
    return blocks.mH @ blocks


def indices_above(grams: Tensor, level: float | Tensor) -> Tensor:
    """Indices of the Hermitian positive semidefinite `grams (b, n, n)` with an eigenvalue above `level`, or one each.

    A Cholesky factorization of `level I - gram` exists exactly where there is none; it costs a small part of an
    eigendecomposition. Decides up to rounding: `n^2` times the machine epsilon at worst, relative to `level`.
    """
    return _failures(grams, level).nonzero()[:, 0]


def _failures(grams: Tensor, level: float | Tensor) -> Tensor:
    """Not 0 (b,) where `indices_above` finds an eigenvalue above the level; the device is not waited for."""
    shifted = -grams
    shifted.diagonal(dim1=-2, dim2=-1).add_(level if isinstance(level, float) else level[:, None])
    info: Tensor = torch.linalg.cholesky_ex(shifted).info
    return info


def largest_eigenvalues(
    grams: Tensor, tolerance: float, least: Tensor | None = None, owners: Tensor | None = None
) -> Tensor:
    """Largest eigenvalue (m,) over the Hermitian positive semidefinite matrices `grams (b, n, n)` of each of m owners.

    `owners (b,)` says whose each matrix is, `least (m,)` what the owners' values are raised from; without these all
    belong to one, whose is raised from 0. The relative error is at most `tolerance` from below, plus the rounding of
    `indices_above` and of the eigenvalues: a running maximum, started by power iterations, is held against each matrix
    by a Cholesky test; only matrices that exceed it have their eigenvalues computed, the most promising first. Where
    they cannot be decomposed as a batch (`decomposes_in_batches`), that is done by matrix products, for which one takes
    as long as a few: there the most promising matrix of each owner goes before the first test, of which then few
    are left, and few are not divided further.
    """
    found = grams.real.new_zeros(1) if least is None else least
    owners = torch.zeros(len(grams), dtype=torch.int64, device=grams.device) if owners is None else owners
    batched = decomposes_in_batches(grams.shape[-1], grams.device)
    estimates = power_estimates(grams, 4 if batched else 12)
    found = found.scatter_reduce(0, owners, estimates, "amax")
    tiny = torch.finfo(found.dtype).tiny

    def raised(which: Tensor) -> Tensor:
        return found.scatter_reduce(0, owners[which], _eigenvalues(grams[which], tolerance), "amax")

    if batched:
        exceed = _failures(grams, (found[owners] * (1 + tolerance)).clamp_min(tiny))
    else:
        everyone = torch.arange(len(found), device=grams.device)
        best = torch.where(owners == everyone[:, None], estimates, -1).argmax(dim=1)
        found = raised(best)
        exceed = _failures(grams, (found[owners] * (1 + tolerance)).clamp_min(tiny)).index_fill(0, best, 0)
    rest = exceed.nonzero()[:, 0]
    few = 0 if batched else 1 + _FEW_ROWS // grams.shape[-1]
    while len(rest):
        rest = rest[(estimates[rest] / found[owners[rest]]).argsort(descending=True)]
        tried = max(-(-len(rest) // 4), min(len(rest), few))
        found = raised(rest[:tried])
        rest = rest[tried:]
        if len(rest):
            rest = rest[indices_above(grams[rest], found[owners[rest]] * (1 + tolerance))]
    return found


def stacked(kernels: Sequence[Tensor], geometry: PeriodicConv) -> tuple[Tensor, PeriodicConv]:
    """Several kernels of one geometry as the groups of one convolution, which has the blocks of all of them."""
    return torch.cat(list(kernels)), replace(geometry, groups=len(kernels) * geometry.groups)


def _eigenvalues(grams: Tensor, tolerance: float) -> Tensor:
    """Of each matrix (b, n, n) the largest eigenvalue (b,), too small by a share of at most `tolerance`."""
    if decomposes_in_batches(grams.shape[-1], grams.device):
        values: Tensor = torch.linalg.eigvalsh(grams)
        return values[:, -1]
    return eigenvalues_by_squaring(grams, tolerance)


def eigenvalues_by_squaring(grams: Tensor, tolerance: float) -> Tensor:
    """The largest eigenvalue (b,) of each Hermitian positive semidefinite matrix (b, n, n), by products alone.

    The Rayleigh quotient of the longest column of `gram^m`, m a power of 2 by repeated squaring: not above the
    eigenvalue and, as that column has at least the n-th part of the leading eigenvector, too small by a share of at
    most n / (2 e m), whatever the gap. That is at most `tolerance` after 25 products in float32, 40 for 1e-10.
    """
    side = grams.shape[-1]
    tiny = torch.finfo(grams.dtype).tiny
    # Of a matrix of Frobenius norm 1 the eighth power's is at least n^-4, whose square float32 still holds.
    apart = 3 if side <= _LONG_SIDE else 1
    power = grams
    for step in range(max(1, math.ceil(math.log2(side / (2 * math.e * tolerance))))):
        if step % apart == 0:
            power = power / torch.linalg.matrix_norm(power, keepdim=True).clamp_min(tiny)
        power = power @ power
    longest = power.diagonal(dim1=-2, dim2=-1).real.argmax(dim=-1)
    vectors = power[torch.arange(len(power), device=power.device), :, longest].unsqueeze(-1)
    vectors = _normalized(vectors)
    quotients: Tensor = (vectors.mH @ (grams @ vectors))[:, 0, 0].real
    return quotients


def power_estimates(grams: Tensor, iterations: int = 4) -> Tensor:
    """Lower bounds (b,) of the largest eigenvalues: at least two power iterations from each matrix's longest column.

    A step makes a vector longer by no less than the first one did and, as that began with the longest column, by no
    more than n times that: divided by it, vectors are brought back to length 1 after some steps only.
    """
    start = grams.diagonal(dim1=-2, dim2=-1).real.argmax(dim=-1)
    vectors = grams[torch.arange(len(grams), device=grams.device), :, start].unsqueeze(-1)
    vectors = grams @ _normalized(vectors)
    growth = _lengths(vectors)
    vectors = vectors / growth
    apart = _STEPS_APART if grams.shape[-1] <= _LONG_SIDE else 1
    for step in range(1, iterations - 1):
        vectors = (grams @ vectors) / growth
        if step % apart == 0:
            vectors = _normalized(vectors)
    estimates: Tensor = torch.linalg.vector_norm(grams @ _normalized(vectors), dim=(-2, -1))
    return estimates.nan_to_num(0.0)  # of what rounding left of zeros steps may be as long as they like


def _normalized(vectors: Tensor) -> Tensor:
    """Vectors (b, n, 1) brought to length 1; zeros stay."""
    return vectors / _lengths(vectors)


def _lengths(vectors: Tensor) -> Tensor:
    """The lengths (b, 1, 1) of vectors (b, n, 1), but not 0."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-2, keepdim=True)
    return lengths.clamp_min(torch.finfo(lengths.dtype).tiny)


_LONG_SIDE = 4096
_STEPS_APART = 4
"""Matrices of at most so many rows have powers, and vectors, brought back to length 1 after several steps only."""

_FEW_ROWS = 2**13
"""So many rows of matrices are few for a device that takes products alone."""

# Rescaled kernels stay this many roundings of their dtype below delta: `periodic_norm` may be `_ERROR` too small, and
# entries are rounded.
_MARGIN = 24
_ERROR = 16

# Up to so many multiplications (frequencies times the cube of the blocks' side) a norm is measured in float64.
_CHEAP_WORK = 2**20


@full_precision()
def stored_norm(kernel: Tensor, geometry: PeriodicConv) -> float:
    """Returns `periodic_norm` of the kernel as it is stored, taken in float64 where that is cheap or the kernel folds.

    Taps of a folded kernel that fall on the same pixel may cancel, and with them most digits of the dtype.
    """
    if not _in_float64(kernel, geometry):
        return periodic_norm(kernel, geometry)
    scale = binary_scale(kernel)
    folded, geometry, error = fold(kernel.detach().double() / scale, geometry)
    return scale * (math.sqrt(largest_square(folded, geometry, 32 * torch.finfo(torch.float64).eps)) + error)


@full_precision()
def stored_norms(stack: Tensor, geometry: PeriodicConv, owners: int, *, above: float = 0.0) -> list[float]:
    """Returns `stored_norm` of each of so many convolutions that are the groups of one, which does not fold.

    Those up to `above` are hardly measured: 0 is said of them.
    """
    dtype = torch.float64 if _in_float64(stack, replace(geometry, groups=geometry.groups // owners)) else stack.dtype
    parts = stack.detach().double().reshape(owners, -1)
    scales = powers_of_two(parts.abs().amax(dim=1))
    scaled = (parts / scales[:, None]).to(dtype).reshape(stack.shape)
    # Of what is nearly 0 the square would be infinite.
    least = (above / scales).square().clamp_max(torch.finfo(dtype).max / 4).to(dtype) if above else None
    squares = largest_squares(scaled, geometry, 32 * torch.finfo(dtype).eps, owners, least)
    norms = squares.double().sqrt() * scales
    found: list[float] = (norms if least is None else norms.where(squares > least, 0)).tolist()
    return found


def norms_to_rescale(
    stack: Tensor, geometry: PeriodicConv, deltas: Sequence[float], *, clipped: bool = True
) -> list[float]:
    """Returns `stored_norms` of convolutions, as many as deltas, that are above these, or may be but for rounding.

    Those of which a clip found nothing to be `clipped` are tested only where float64 is to tell.
    """
    exact = _in_float64(stack, replace(geometry, groups=geometry.groups // len(deltas)))
    if not clipped and not exact:
        return [0.0] * len(deltas)
    # What is not above this is known to `_ERROR` only, which the rest of the way to delta covers.
    above = min(deltas) * surely_below(torch.float64 if exact else stack.dtype) ** 2
    return stored_norms(stack, geometry, len(deltas), above=above)


def surely_below(dtype: torch.dtype) -> float:
    """The share of delta up to which a norm that is measured in a dtype is not above delta, however it is rounded."""
    return 1 - _ERROR * torch.finfo(dtype).eps


def rescale_to_norm(
    kernel: Tensor, delta: float, geometry: PeriodicConv, norm: float | None = None
) -> tuple[Tensor, float]:
    """Multiplies the kernel, where need be, until its periodic norm is at most delta; returns it and that norm.

    `norm` is what `stored_norm` says of the kernel. Where that is not taken in float64 the result is not measured
    again: the margin covers what rounding may do, and the norm returned is the bound delta.
    """
    norm = stored_norm(kernel, geometry) if norm is None else norm
    eps = torch.finfo(kernel.dtype).eps
    if not _in_float64(kernel, geometry):
        if norm <= delta * surely_below(kernel.dtype):
            return kernel, norm
        if norm <= delta * (1 + _ERROR * eps) and geometry.schur_bound(kernel) <= delta:
            return kernel, norm
        return kernel * (min(1.0, delta / norm) * (1 - _MARGIN * eps)), delta
    margin = _MARGIN * eps
    while norm > delta:
        # Rounding the taps of a kernel that folds is no small matter where they cancel.
        lifted = norm + (eps * geometry.schur_bound(kernel) if geometry.folds else 0.0)
        kernel = scale_down(kernel, delta / lifted * (1 - margin))
        norm = stored_norm(kernel, geometry)
        margin = widened(margin)
    return kernel, norm


def widened(margin: float) -> float:
    """Returns twice a margin, at most 1: rounding takes back what a small one takes off subnormal numbers, but not
    for ever.
    """
    return min(1.0, 2 * margin)


def scale_down(kernel: Tensor, factor: float) -> Tensor:
    """Returns the kernel times a factor below 1; zeros where rounding leaves the kernel itself (subnormal numbers)."""
    found = kernel * factor
    return torch.zeros_like(kernel) if torch.equal(found, kernel) else found


def _in_float64(kernel: Tensor, geometry: PeriodicConv) -> bool:
    work = math.prod(geometry.output_size) * geometry.groups * geometry.gram_side(kernel) ** 3
    return geometry.folds or work <= _CHEAP_WORK


# Which algorithm works on the Gram matrices of a symbol follows from their side and the device that holds them.
#
# `eigh` decomposes each matrix. `krylov` (`ttsv.spectral.krylov`) finds the few eigenpairs above delta squared, and
# decomposes where there are many. `sign` (`ttsv.spectral.matrix_sign`) multiplies matrices, some 50 times in float32
# and 85 in float64, and decomposes where rounding spoils the result. All leave out what a Cholesky test shows to need
# no work.
#
# | device | side | clip | norm |
# | --- | --- | --- | --- |
# | CPU | below 96 | eigh | power iteration, Cholesky tests, eigenvalues of few matrices |
# | CPU | 96 and more | krylov | the same |
# | CUDA | to 32 | eigh | the same |
# | CUDA | above 32 | sign | the same, with repeated squaring for eigenvalues |
#
# A complex product takes a fifth or sixth of a decomposition's time on a CPU: 50 of them never pay. On CUDA matrices
# with more than 32 rows are decomposed one by one: on an H200 one of complex128 with 192 rows takes 1.7 ms, and a
# product of 1028 of complex64 1.1 ms. `benchmarks/clipping.py --device cuda` measures all three for each shape.
Algorithm = Literal["eigh", "krylov", "sign"]

LEAST_KRYLOV_SIDE = 96
BATCHED_SIDE = 32
"""CUDA's libraries decompose matrices of at most so many rows as a batch, whatever their version."""


def clip_algorithm(side: int, device: torch.device) -> Algorithm:
    """How `ttsv.spectral.clipping` clips blocks whose Gram matrices have `side` rows, unless told: the table above."""
    if decomposes_in_batches(side, device):
        return "krylov" if device.type == "cpu" and side >= LEAST_KRYLOV_SIDE else "eigh"
    return "sign"


def decomposes_in_batches(side: int, device: torch.device) -> bool:
    """Whether decomposing a batch of matrices with `side` rows takes no more than the work in it."""
    return device.type == "cpu" or side <= BATCHED_SIDE
