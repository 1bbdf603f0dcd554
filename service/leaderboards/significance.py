"""Which means are best beyond their errors: Welch's t-test, from means and spreads alone."""

import math
from collections.abc import Sequence
from functools import cache

from service.leaderboards.metrics import Measure, Metric

LEVEL = 0.05
"""Two-sided: with so probable a difference by chance two means are not told apart."""
SAID = "Bold: best beyond its error (Welch's t-test of the spreads, 5 %); ties share it, one seed alone has no error."
"""What tables say of their bold numbers."""


def unbeaten(measured: Sequence[Measure | None], metric: Metric) -> list[int]:
    """Which of a column's means no other beats beyond both errors, or at the printed digits; none where none is beaten.

    A mean of one seed has no error: nobody can say that it is best, nor that another is where it leads.
    """
    known = {index: one for index, one in enumerate(measured) if one is not None}
    if not known or not metric.has_best:
        return []
    best = (max if metric.more_is_better else min)(one.mean for one in known.values())
    leaders = [one for one in known.values() if one.mean == best]
    reading = metric.reading
    form, factor = f".{reading.decimals}f", reading.factor
    shown = format(best * factor, form)
    tested = {index: one for index, one in known.items() if one.std is not None}
    if any(leader.std is None for leader in leaders):
        return []
    found = [
        index
        for index, one in tested.items()
        if format(one.mean * factor, form) == shown or not all(_differ(one, leader) for leader in leaders)
    ]
    return found if len(found) < len(tested) else []


def _differ(one: Measure, other: Measure) -> bool:
    """Whether two means are told apart; the chance itself is computed only where cruder bounds leave it open."""
    t2, freedom = _statistic(one, other)
    if t2 <= _critical(10_000):
        return False
    return t2 > _critical(max(1, min(10_000, int(freedom)))) or _chance(t2, freedom) < LEVEL


@cache
def _critical(freedom: int) -> float:
    """The square of t that is exceeded by chance as often as the level says."""
    low, high = 0.0, 200.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(middle, freedom) >= LEVEL else (low, middle)
    return low


def chance(one: Measure, other: Measure) -> float:
    """The two-sided p of Welch's t-test for two means of two seeds or more each (Welch 1947).

    Values that do not deviate at all differ for certain where their means do.
    """
    return _chance(*_statistic(one, other))


def _statistic(one: Measure, other: Measure) -> tuple[float, float]:
    """The square of Welch's t, and its degrees of freedom."""
    assert one.std is not None
    assert other.std is not None
    errors = one.std**2 / one.seeds, other.std**2 / other.seeds
    error = sum(errors)
    if one.mean == other.mean:
        return 0.0, 1.0
    if error <= 0:
        return math.inf, 1.0
    t2 = (one.mean - other.mean) ** 2 / error
    freedom = error**2 / (errors[0] ** 2 / (one.seeds - 1) + errors[1] ** 2 / (other.seeds - 1))
    return t2, freedom


def _chance(t2: float, freedom: float) -> float:
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t2))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Press et al., Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Lentz's method; it needs some dozens of steps."""
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    found = d
    for m in range(1, 300):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / ((1 + step * d) or tiny), (1 + step / c) or tiny
            found *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return found
