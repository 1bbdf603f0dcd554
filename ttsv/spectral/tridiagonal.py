"""Eigenvalues of a batch of Hermitian matrices by operations on the whole batch: for devices that launch kernels.

CUDA's libraries decompose matrices of more than a few rows one by one, which leaves most of a card idle. Here each
matrix goes the way that LAPACK takes (xHETRD, then xSTEDC), in step with all others, and nothing waits for the device:

1. Householder reflections make the matrices tridiagonal, a column at a time (Golub & Van Loan, Matrix Computations,
   8.3.1), and an update of rank 2 follows each (xHETD2). Gathered for some columns (xLATRD) updates move half as much
   memory, but are a sixth more launches, which took an H200 156 ms for 124 (34 matrices of 640 rows). Moduli of the
   elements beside the diagonal are enough: a diagonal unitary matrix takes away their phases.
2. Divide and conquer (Cuppen 1981) finds the eigenvalues of the tridiagonal ones. Two halves are joined by the roots
   of a secular equation (xLAED4), all of them at once; of the halves' eigenvectors it needs no more than the first and
   the last row, so that a join takes some 100 s^2 operations at size s, and all take log2(n) joins in sequence. Sturm
   counts (Barth, Martin & Wilkinson 1967) would take n steps in sequence for each bit, or few, of the result.

What makes divide and conquer stable is Gu & Eisenstat's (1995): roots are held as distances from the nearest pole,
and eigenvectors belong to the weights of which the computed roots are the exact ones (Löwner's formula). They deflate
where poles or weights coincide or vanish; here those are moved apart by less than rounding does, `_APART`, `_FLOOR`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ttsv.spectral.norms import powers_of_two

_POINTS = 2**22
"""A pass over a secular equation evaluates as many terms (32 MiB), or more where bisection alone does: small ones are
cut into more than two parts by a pass, as launching it takes as long."""

_EXPONENT, _MANTISSA = 8, 4
"""Bits of a root's distance from its pole that are found by bisection: of its exponent, 2^-256 to 1 of half the
distance between two poles, and of its fraction."""

_MOST_BITS = 4
"""So many of them, of which each smaller number of bits is a divisor, are found by a pass at most."""

_NEWTON = 4
"""Steps from 5 bits of a fraction to the 53 of float64: 5, 10, 20, 40, 80."""

_APART = 2.0**-70
_FLOOR = 2.0**-60
"""Least distance of two poles, least component of a weight vector, and least element beside the diagonal, where
matrices have elements near 1: by less than rounding adds."""

_LEAF = 8
"""Matrices are padded so that halves are equal, and one batch, down to pieces of so many rows or fewer."""


class Pieces(NamedTuple):
    """Decomposed tridiagonal matrices: `values (b, s)`, and of their eigenvectors the first and last rows, (b, s)."""

    values: Tensor
    first: Tensor
    last: Tensor


def hermitian_eigenvalues(matrices: Tensor, *, points: int = _POINTS) -> Tensor:
    """Returns the eigenvalues (b, n), real and ascending, of Hermitian matrices (b, n, n), on their device.

    Errors are some roundings of their dtype, at worst n of them, times the largest magnitude of an eigenvalue. Each
    matrix is scaled by a power of two, so that its elements may have any size whose largest is not subnormal. Values of
    a matrix with an element that is not finite are NaN. Not differentiable; reads the upper triangle and the lower one.

    Beside the matrices it takes one and a half times their memory, and up to 32 MiB. `points`: see `_POINTS`.
    """
    real = matrices.real.dtype
    count, side = matrices.shape[:2]
    if not matrices.numel():
        return matrices.new_zeros((count, side), dtype=real)
    largest = torch.linalg.vector_norm(matrices.detach(), math.inf, dim=(-2, -1)).double()
    scale = powers_of_two(largest).clamp_min(torch.finfo(real).tiny)  # its reciprocal is a number of the dtype, too
    diagonal, beside = tridiagonalize(matrices.detach() * scale.reciprocal().to(real)[:, None, None])
    values = tridiagonal_eigenvalues(diagonal.double(), beside.double(), points) * scale[:, None]
    return values.to(real)


def tridiagonalize(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonals (b, n) and magnitudes of the elements beside them (b, n - 1) of similar tridiagonal matrices.

    `matrices (b, n, n)`, Hermitian with elements up to about 1, are overwritten. Below, rows stand for the conjugates
    of columns, as they lie in one piece: v and w, of `A - 2 (v w^H + w v^H)`.
    """
    count, side, _ = matrices.shape
    real = matrices.real.dtype
    beside = torch.empty((count, side - 1), dtype=real, device=matrices.device)
    negligible = math.sqrt(torch.finfo(real).tiny / torch.finfo(real).eps)  # squares of smaller ones lose digits
    lengths = torch.split(beside[:, :, None], 1, dim=1)
    corners = torch.split(matrices.diagonal(1, -2, -1)[:, :, None], 1, dim=1)
    space = matrices.new_empty((count, 4, side))
    for column in range(side - 2):
        row, rest = matrices[:, column : column + 1, column + 1 :], matrices[:, column + 1 :, column + 1 :]
        vectors = space[:, :, column + 1 :]  # v, w, w, v
        torch.linalg.vector_norm(row, dim=-1, keepdim=True, out=lengths[column])
        corners[column].add_(_aligned(lengths[column], corners[column]))
        # Where there is nothing to reflect, v becomes as good as 0, and the reflection the identity.
        norm = torch.threshold(torch.linalg.vector_norm(row, dim=-1, keepdim=True), negligible, 1 / negligible)
        both = vectors[:, ::3]
        torch.div(row.expand_as(both), norm, out=both)
        v = both[:, :1]
        product = torch.bmm(v, rest)
        both = vectors[:, 1:3]
        torch.addcmul(product.expand_as(both), torch.bmm(product, v.mH), v, value=-1, out=both)
        rest.baddbmm_(vectors[:, :2].mH, vectors[:, 2:], alpha=-2)
    if side > 1:
        torch.abs(corners[-1], out=lengths[-1])
    return matrices.diagonal(0, -2, -1).real.clone(), beside  # a view would keep the matrices


def _aligned(lengths: Tensor, directions: Tensor) -> Tensor:
    """Numbers of these magnitudes with the phases of others, 1 for those of zeros."""
    if directions.is_complex():
        return torch.polar(lengths, directions.angle())
    return torch.copysign(lengths, directions)


def tridiagonal_eigenvalues(diagonal: Tensor, beside: Tensor, points: int = _POINTS) -> Tensor:
    """Eigenvalues (b, n), ascending, of real tridiagonal matrices with elements near 1 or smaller, in float64.

    `diagonal (b, n)`; `beside (b, n - 1)`: magnitudes of the elements beside it.
    """
    side = diagonal.shape[-1]
    pieces = 1
    while side > _LEAF * pieces:
        pieces *= 2
    padding = -side % pieces
    # A bound of all eigenvalues, so that what stands for nothing comes last.
    above = diagonal.abs().amax(-1, keepdim=True) + 2 * pad(beside, (0, 1)).amax(-1, keepdim=True) + 1
    beside = pad(beside, (0, padding)).clamp_min(_FLOOR)
    diagonal = torch.cat([diagonal, (2 * above).expand(-1, padding)], dim=-1)
    # Each element beside the diagonal is torn: b at the corners of two pieces goes to their join.
    torn = diagonal - pad(beside, (0, 1)) - pad(beside, (1, 0))
    return _decompose(torn, beside, points, values_only=True).values.sort(dim=-1).values[:, :side]


def _decompose(torn: Tensor, beside: Tensor, points: int, *, values_only: bool = False) -> Pieces:
    """Decomposes matrices, given the diagonals (b, s) that are left of them and what is beside these (b, s - 1)."""
    count, side = torn.shape
    if side == 1:
        return Pieces(torn, torch.ones_like(torn), torch.ones_like(torn))
    half = side // 2
    upper, lower = beside[:, : half - 1], beside[:, half:]
    if side % 2:
        pieces = _decompose(torn[:, :half], upper, points), _decompose(torn[:, half:], lower, points)
    else:
        both = _decompose(torn.reshape(2 * count, half), torch.stack([upper, lower], 1).flatten(0, 1), points)
        pieces = Pieces(*(part[0::2] for part in both)), Pieces(*(part[1::2] for part in both))
    return _joined(*pieces, beside[:, half - 1 : half], points, values_only=values_only)


def _joined(upper: Pieces, lower: Pieces, coupling: Tensor, points: int, *, values_only: bool) -> Pieces:
    """The matrix of two pieces on its diagonal, plus `coupling (b, 1)` times `u u^T`, u being 1 where they meet.

    In the basis of their eigenvectors that is `diag(poles) + coupling z z^T`; its eigenvalues are the roots of
    `1 + sum_i weight_i / (pole_i - x)`, with weights `coupling z_i^2`: one above each pole.
    """
    poles, order = torch.cat([upper.values, lower.values], dim=-1).sort(dim=-1)
    z = torch.cat([upper.last, lower.first], dim=-1).gather(-1, order)
    weights = coupling * z.square().clamp_min(_FLOOR**2)
    side = poles.shape[-1]
    places = torch.arange(side, device=poles.device)
    half, behind_middle = _intervals(poles, places, weights)
    # From the nearer pole all distances are exact to a few roundings; those from the pole behind are turned around.
    nearest = places + behind_middle
    sense = 1 - 2 * behind_middle.to(poles.dtype)
    distances = _differences(poles, nearest).mul_(sense[:, None])
    beyond = _roots_from_poles(distances, weights, half, -sense, points)
    values = poles.gather(-1, nearest) + sense * beyond
    if values_only:
        return Pieces(values, values, values)
    distances -= beyond[:, None]
    # Löwner's formula: the weights for which these roots are exact.
    between = _differences(poles, places)
    between.diagonal(dim1=-2, dim2=-1).fill_(1)
    exact = torch.copysign(between.reciprocal_().mul_(distances).prod(-1).abs().sqrt(), z)
    vectors = exact[:, :, None] / distances
    ends = torch.stack(
        [
            pad(upper.first, (0, side - upper.first.shape[-1])).gather(-1, order),
            pad(lower.last, (side - lower.last.shape[-1], 0)).gather(-1, order),
        ],
        dim=1,
    )
    first, last = (ends @ vectors / torch.linalg.vector_norm(vectors, dim=-2, keepdim=True)).unbind(1)
    return Pieces(values, first, last)


def _intervals(poles: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the distance from each pole to the next (b, s), and whether the root between them is in the second half.

    No root is further above the last pole than the sum of weights: that is its half, and the root in the first one.
    """
    between = _differences(poles, places)
    half = torch.cat([between.diagonal(-1, -2, -1) / 2, weights.sum(-1, keepdim=True)], dim=-1)
    between -= half[:, None]
    sums = torch.div(weights[:, :, None], between, out=between).sum(-2)
    return half, (sums < -1) & (places < len(places) - 1)


def _differences(poles: Tensor, origins: Tensor) -> Tensor:
    """`pole_i - pole_origin(j)`, (b, s, s), of ascending poles (b, s), no two of them closer than `_APART`.

    `origins`: (b, s), or (s,) for all. What moves poles apart is added to differences, as poles would not show it.
    """
    places = torch.arange(poles.shape[-1], device=poles.device)
    steps = places[:, None] - origins[..., None, :]
    return (poles[:, :, None] - poles.gather(-1, origins.expand_as(poles))[:, None]).add_(steps, alpha=_APART)


def _roots_from_poles(distances: Tensor, weights: Tensor, half: Tensor, level: Tensor, points: int) -> Tensor:
    """The places x (b, s), from 0 to about `half`, at which `sum_i weight_i / (distance_ij - x_j)` is at its `level`.

    The sum rises with x, from a pole at 0; others lie below 0, and beyond twice `half`. Bisection finds the root's
    power of two and four further bits. That close, the slope changes by less than an eighth, whatever the weights, and
    each step of Newton's method doubles the bits that are right, 5 at first.
    """
    share, width = _bisected(distances, weights, half, level, points)
    lowest, highest = half * share, half * (share + width)
    x = half * (share + width / 2)
    gaps, terms = torch.empty_like(distances), torch.empty_like(distances)
    for _ in range(_NEWTON):
        torch.sub(distances, x[:, None], out=gaps)
        torch.div(weights[:, :, None], gaps, out=terms)
        excess = terms.sum(-2) - level
        # Where other terms cancel, their rounding may be more than the nearest pole's own: no root is beyond its pole.
        x = (x - excess / terms.div_(gaps).sum(-2)).clamp(lowest, highest)
    return x


def _bisected(distances: Tensor, weights: Tensor, half: Tensor, level: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """Shares (b, s) of `half` between which those places lie: from where, and how much further.

    Their bits are found from the first on, as positive numbers have the order of their bits.
    """
    count, side = half.shape
    bits = 1
    while bits < _MOST_BITS and 2 ** (bits + 1) * count * side**2 <= points:
        bits += 1
    unknown = _EXPONENT + _MANTISSA
    found = torch.full_like(half, 2.0 ** -(2**_EXPONENT)).view(torch.int64)[:, None]
    parts = torch.arange(1, 2**bits, device=half.device)[:, None]
    distances, half, level = distances[:, None], half[:, None, None], level[:, None]
    terms = torch.empty((count, 2**bits - 1, side, side), dtype=half.dtype, device=half.device)
    for last in range(unknown - bits, -1, -bits):
        tried = torch.add(found, parts, alpha=2 ** (last + 52 - _MANTISSA))
        torch.addcmul(distances, half, tried.view(torch.float64)[:, :, None], value=-1, out=terms)
        torch.div(weights[:, None, :, None], terms, out=terms)
        passed = terms.sum(-2) < level
        found = torch.add(found, passed.sum(1, keepdim=True), alpha=2 ** (last + 52 - _MANTISSA))
    found = found[:, 0]
    share = found.view(torch.float64)
    return share, (found + 2 ** (52 - _MANTISSA)).view(torch.float64) - share
