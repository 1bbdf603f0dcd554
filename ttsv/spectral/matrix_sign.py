"""What clipping takes away, as a function of Gram matrices, by matrix products alone: the algorithm of GPUs.

With `G` a Gram matrix divided by delta squared, a block A is clipped to `A min(1, G^(-1/2)) = A max(G, I)^(-1/2)`, and

    max(G, I) = (G + I + |X|) / 2,   |X| = X sign(X),   X = G - I.

The sign, and then the inverse square root, are composed of odd polynomials of degree 5, each the best one on the
interval to which the last leads (Amsel et al. 2025, "The Polar Express").

Singular values at delta make the sign ill-conditioned, but not the result. The polynomials stay within [0, 1 + e] on
the right side of 0 and rise to `1 - e` at `gap`, so `|x|` is missed by at most `gap / 4` below the gap, as by
`x (1 - x / gap)`, and by `e |x|` above it; `max(x, 1)` by half of that; its inverse root, whose slope is at most 1/2
there, by a quarter. A perturbation of the iterate is multiplied by divided differences of the sign, which X, a factor
of the product, undoes: what rounding adds is of the order of the dtype's epsilon times the largest `|x|`. Two residuals
certify each result.
"""

import math
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Coefficients: TypeAlias = tuple[float, float, float]
"""Of x, x^3 and x^5."""

_ACCURACY = {torch.complex64: 3e-6, torch.complex128: 1e-12}
"""Error of the clipped operator, relative to delta, by the polynomials alone."""

_CERTIFIED = {torch.complex64: 1e-4, torch.complex128: 1e-10}
"""Error of the clipped operator, relative to the larger of delta and its norm, above which a result is refused."""

_RANGE = 512.0
"""Where a bound of `|x|` exceeds this (norms 20 times delta), rounding would spoil the inverse root: not attempted."""

_SAFETY = 0.01
"""Polynomials are made for intervals longer by this: outside of them, rounding errors would grow 20 times a step."""

_CUSHION = 0.03
"""... and for no smaller values than this share of the largest: the best polynomial for [0, 1] comes down to 0 inside,
where rounding would change signs."""


class Shrinkage(NamedTuple):
    """`matrices (b, n, n)`: for eigenvalues x of Gram matrices the factors `max(0, 1 - sqrt(level / x))`, same vectors.

    `certified (b,)`: those that, multiplied with a block, are off by at most 1e-4 in float32 and 1e-10 in float64, in
    the spectral norm and relative to the block's norm or delta, whichever is larger.
    """

    matrices: Tensor
    certified: Tensor


def shrinkage_factors(grams: Tensor, level: float) -> Shrinkage:
    """Shrinkage factors of singular values from Gram matrices (b, n, n), complex, with `level` delta^2.

    `A - clip(A)` is this times A for `A A^H`, A times this for `A^H A`. No decomposition; one synchronization with the
    device. Some 50 products in float32 and 85 in float64, most of them for the sign.
    """
    identity = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)
    scaled = grams / level
    shifted = scaled - identity
    square = shifted @ shifted
    fourth = square @ square
    # The spectral norm is at most the fourth root of the fourth power's Frobenius norm.
    bound = (1 + _SAFETY) * torch.linalg.matrix_norm(fourth).pow(0.25).clamp_min(1)
    attempted = bound <= _RANGE
    limit = torch.where(attempted, bound, 1).max().item()
    accuracy = _ACCURACY[grams.dtype]
    bound = bound[:, None, None]
    sign = _odd(shifted / bound, square / bound**2, fourth / bound**4, limit, accuracy)
    absolute = _hermitian(shifted @ sign)
    larger = (scaled + identity + absolute) / 2
    root = _inverse_root(larger, 1 + bound, 1 + limit, accuracy)
    # Entry by entry in the eigenbasis, |X| is off by no more than the first residual; a quarter of that reaches the
    # result. The inverse root, of h >= 1, is off by at most half of the second.
    missing = shifted - absolute @ sign
    residual = identity - root @ larger @ root
    error = torch.linalg.matrix_norm(missing @ missing.mH).sqrt() / 4 + torch.linalg.matrix_norm(residual) / 2
    certified = attempted & (error <= _CERTIFIED[grams.dtype] * (1 + bound.flatten()).sqrt())
    return Shrinkage(identity - root, certified)


def _hermitian(matrices: Tensor) -> Tensor:
    return (matrices + matrices.mH) / 2


def _odd(matrices: Tensor, square: Tensor, fourth: Tensor, limit: float, accuracy: float) -> Tensor:
    """Their sign but for eigenvalues near 0; squares and fourth powers are given. `limit`: what 1 stands for.

    A sixteenth of the gap, a quarter of other deviations are the error of the result.
    """
    first, *others = odd_polynomials(_power_below(16 * accuracy / limit), _power_below(4 * accuracy / limit))
    a, b, c = first
    sign = torch.baddbmm(matrices, matrices, b * square + c * fourth, beta=a)
    for a, b, c in others:
        square = sign @ sign
        sign = torch.baddbmm(sign, sign, torch.baddbmm(square, square, square, beta=b, alpha=c), beta=a)
    return sign


def _inverse_root(matrices: Tensor, bound: Tensor, limit: float, accuracy: float) -> Tensor:
    """`matrices^(-1/2)` for eigenvalues from 1 to `bound (b, 1, 1)`, at most `limit`: coupled iteration."""
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    root, inverse = matrices / bound, identity.expand_as(matrices)
    polynomials = odd_polynomials(_power_below(limit**-0.5), _power_below(accuracy))
    for step, (a, b, c) in enumerate(polynomials):
        product = inverse @ root if step else root
        factor = a * identity + torch.baddbmm(product, product, product, beta=b, alpha=c)
        inverse = inverse @ factor if step else factor
        if step + 1 < len(polynomials):
            root = root @ factor
    return _hermitian(inverse) / bound.sqrt()


def _power_below(value: float) -> float:
    """The next power of two, so that few compositions are ever made."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1)


@lru_cache(maxsize=256)
def odd_polynomials(least: float, tolerance: float) -> tuple[Coefficients, ...]:
    """Odd polynomials of degree 5 whose composition, first to last, is within `tolerance` of 1 on [least, 1].

    Each is the best one on the interval to which the last leads, which would make the composition the best of its
    length (Amsel et al. 2025, theorem 4.1), but for what `_SAFETY` and `_CUSHION` add against rounding. Between 0 and
    `least` the composition is positive and at most 1.
    """
    lower, upper = least, 1.0
    polynomials: list[Coefficients] = []
    while max(1 - lower, upper - 1) > tolerance or not polynomials:
        upper *= 1 + min(_SAFETY, (1 - lower / upper) / 10)
        a, b, c = _best_polynomial(max(lower, _CUSHION * upper), upper)
        polynomials.append((a, b, c))
        lower, upper = (x * (a + x * x * (b + x * x * c)) for x in (lower, upper))
        # Newton and Schulz's polynomial takes both ends below 1, its maximum.
        upper = max(upper, 1.0)
    return tuple(polynomials)


def _best_polynomial(lower: float, upper: float) -> Coefficients:
    """The odd polynomial of degree 5 that is closest to 1 on [lower, upper], by Remez's exchange of its extrema."""
    if lower > 0.999 * upper:
        # Newton and Schulz's, of third order at 1: too close to the best to tell them apart.
        return 15 / 8, -10 / 8, 3 / 8
    inner = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    error = math.inf
    while True:
        points = torch.tensor([lower, *inner, upper], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, deviation = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        if abs(deviation) >= error * (1 - 1e-9) and error < math.inf:
            return a, b, c
        error = abs(deviation)
        # Extrema: a + 3 b x^2 + 5 c x^4 = 0.
        spread = math.sqrt(9 * b * b - 20 * a * c)
        inner = math.sqrt((-3 * b - spread) / (10 * c)), math.sqrt((-3 * b + spread) / (10 * c))
