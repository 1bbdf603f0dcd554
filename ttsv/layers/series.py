"""The truncated exponential series of a skew operator, and how much longer it can make a vector."""

import math
from fractions import Fraction

import torch

_EPS = torch.finfo(torch.float64).eps
_GRID = 4096


def series_norm_bound(norm: float, terms: int) -> float:
    """A rigorous upper bound of `|T_m(A)|` for every skew A with `|A| <= norm`, `T_m(A) = sum_{j <= m} A^j / j!`.

    A skew operator has a unitary eigenbasis and imaginary eigenvalues, so this is the maximum of `|T_m(i s)|` over
    `0 <= s <= norm`. Its square is a polynomial in `x = s^2` with exactly known coefficients, `1 + c x^(m//2+1) +
    ...`. It is evaluated on a grid; between two points h apart it is at most `h^2 / 8` times a bound of its second
    derivative above the larger one. The result is within 1e-6 of the maximum for norms up to 3.

    Returns `inf` where the square overflows.
    """
    coefficients = _squared_modulus(terms)
    end = norm * norm * (1 + 4 * _EPS)
    try:
        curvature = sum(abs(c) * j * (j - 1) * end ** (j - 2) for j, c in coefficients.items() if j >= 2)
        magnitude = sum(abs(c) * end**j for j, c in coefficients.items())
    except OverflowError:
        return math.inf
    x = torch.linspace(0.0, end, _GRID + 1, dtype=torch.float64)
    square = sum(c * x**j for j, c in coefficients.items())
    assert isinstance(square, torch.Tensor)
    step = end / _GRID
    # A grid point is off by some eps, its powers by as many more as their degree.
    slack = step * step / 8 * curvature * (1 + 1e-9) + 16 * (terms + 4) * _EPS * magnitude
    return math.nextafter(math.sqrt(square.max().item() + slack), math.inf)


def _squared_modulus(terms: int) -> dict[int, float]:
    """Power -> coefficient of `|T_m(i s)|^2` as a polynomial in `s^2`, without zeros, each rounded once."""
    found: dict[int, float] = {}
    for power in range(terms + 1):
        total = sum(
            Fraction((-1) ** (a + power), math.factorial(a) * math.factorial(2 * power - a))
            for a in range(max(0, 2 * power - terms), min(terms, 2 * power) + 1)
        )
        if total:
            found[power] = float(total)
    return found
