"""Which means are best beyond their errors: Welch's t-test, from means and spreads alone."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import islice

from service.leaderboards.metrics import Measure, Metric, unit_of

LEVEL = 0.05
"""Two-sided: with so probable a difference by chance two means are not told apart."""
_MOST_FREEDOM = 10_000
"""Degrees of freedom beyond which Student's distribution is as good as normal."""
_SHARES = 64
"""Parts of an error by which degrees of freedom are bounded."""
_SMALL, _LEAST_ERROR = 2.0**-400, 2.0**-960
"""Squares of differences between values below the one may be below float64; that of an error is taken to be the other
there, so that no rounding tells them apart."""
_STEPS = 64
"""In so many steps they double, at each of which the critical value is known: hardly a test lies between two."""
SAID = "Bold: best beyond its error (Welch's t-test of the spreads, 5 %); ties share it, one seed alone has no error."
"""What tables say of their bold numbers."""


def unbeaten(measured: Sequence[Measure | None], metric: Metric, judged: int | None = None) -> list[int]:
    """Which of a column's means no other beats beyond both errors, or at the printed digits; none where none is beaten.

    Of the first ones, where so many are `judged`: the others are there to beat, and to be beaten.

    A mean of one seed has no error: nobody can say that it is best, nor that another is where it leads.
    """
    known = [index for index, one in enumerate(measured) if one is not None]
    if not metric.has_best or not known:
        return []
    # Column by column: a page of a board has thousands of values.
    counts, means, stds, *_ = zip(*filter(None, measured), strict=True)
    best = (max if metric.more_is_better else min)(means)
    if None in stds and any(std is None for mean, std in zip(means, stds, strict=True) if mean == best):
        return []
    judged = len(measured) if judged is None else judged
    found, some_beaten = _judged(known, (counts, means, stds), metric, judged)
    return found if some_beaten else []


_Columns = tuple[Sequence[int], Sequence[float], Sequence[float | None]]
"""The seeds, means and deviations of measures."""


def _judged(known: Sequence[int], columns: _Columns, metric: Metric, judged: int) -> tuple[list[int], bool]:
    """Which of several seeds no other beats, of those that stand before `judged`; and whether any of all is beaten.

    `known` says where each stands.
    """
    counts, means, stds = columns
    sign = -1 if metric.more_is_better else 1
    unit = unit_of(metric, means)
    scale = _scale(means, stds)
    form, factor = f".{unit.decimals}f", sign * unit.factor / scale
    # Means further apart than the last digit printed, which tells most without printing them.
    visible = 1.001 * 10.0**-unit.decimals / abs(factor)
    visible *= visible  # which may be beyond all numbers, as a power may not

    texts: dict[float, str] = {}

    def printed(mean: float) -> str:
        if (text := texts.get(mean)) is None:
            text = texts[mean] = format(mean * factor, form)
        return text

    # Plain tuples, and printed only where it decides: a page of a board has forty columns.
    signed = sign * scale
    rows: list[_Row] = [
        (signed * mean, (error := std * scale) * error / seeds, seeds - 1, index)
        for index, seeds, mean, std in zip(known, counts, means, stds, strict=True)
        if std is not None
    ]
    small = set[int]()
    if min(means) * scale < _SMALL:
        # They are compared with larger ones here, and once more with each other alone.
        sizes = {index: max(abs(mean), std or 0.0) for index, mean, std in zip(known, means, stds, strict=True)}
        small = {row[-1] for row in rows if sizes[row[-1]] * scale < _SMALL}
        rows = [(row[0], max(row[1], _LEAST_ERROR), *row[2:]) if row[-1] in small else row for row in rows]
        if not any(sizes[index] for index in small):
            small.clear()
    rows.sort()
    # What is printed rises as the means do: nothing between two that are printed alike is printed otherwise.
    if printed(rows[0][0]) == printed(rows[-1][0]):
        return [row[-1] for row in rows], False
    found, some_beaten = [], False
    first, first_error, first_freedom, _ = rows[0]
    leading = {first_freedom: [rows[0]]}
    bounds: dict[int, tuple[float, float]] = {}
    for place, (mean, error, freedom, index) in enumerate(rows):
        if freedom not in leading:
            leading[freedom] = []
            bounds.clear()
        if index < judged or not some_beaten:
            if freedom not in bounds:
                least = min(_bounds(other, freedom)[0] for other in leading)
                bounds[freedom] = least, _bounds(first_freedom, freedom)[1]
            # Of most rows the first one tells by the cruder bounds: it is furthest from them.
            least, most = bounds[freedom]
            apart = (mean - first) * (mean - first)
            if apart > least * error and (
                (apart > visible and apart > most * (first_error + error))
                or _is_beaten(rows[place], islice(rows, place), leading.values(), printed, visible)
            ):
                some_beaten = True
            elif index < judged:
                found.append(index)
        front = leading[freedom]
        if not front or error < front[-1][1]:
            front.append(rows[place])
    if len(small) > 1:
        kept = [place for place, index in enumerate(known) if index in small]
        those = [counts[place] for place in kept], [means[place] for place in kept], [stds[place] for place in kept]
        alone, some_small = _judged([known[place] for place in kept], those, metric, judged)
        beaten = small.difference(alone)
        found = [index for index in found if index not in beaten]
        some_beaten = some_beaten or some_small
    return sorted(found), some_beaten


_Error = tuple[float, float, int]
"""A mean, the square of its standard error, and its degrees of freedom."""
_Row = tuple[float, float, int, int]
"""An `_Error` of several seeds, less of which is better, and where it stands in the column."""


def _is_beaten(
    row: _Row,
    before: Iterable[_Row],
    leading: Collection[Sequence[_Row]],
    printed: Callable[[float], str],
    visible: float,
) -> bool:
    """Whether one of the rows before it, best first, is better beyond both errors, and printed otherwise.

    Of means whose squared distance is `visible` the latter is certain.

    `leading` are those of them, by their degrees of freedom, than which no better one has a smaller error. Where these
    are too near by the cruder bound, so are the others, which are nearer: a thousand rows alike are not compared each
    with each.
    """
    mean, error, freedom, _ = row
    close = math.inf
    for front in filter(None, leading):
        least, most = _bounds(front[0][2], freedom)
        close = min(close, least * error)
        for better in front:
            apart, squared = (better[0] - mean) ** 2, better[1] + error
            if apart <= least * error:
                break  # those that follow are nearer
            if (apart > most * squared or _is_far(apart, squared, better, row)) and (
                apart > visible or printed(better[0]) != printed(mean)
            ):
                return True
    for better in before:
        apart = (better[0] - mean) ** 2
        if apart <= close:
            return False
        if _is_far(apart, better[1] + error, better, row) and (apart > visible or printed(better[0]) != printed(mean)):
            return True
    return False


def _scale(means: Iterable[float], stds: Iterable[float | None]) -> float:
    """The power of two that brings the largest of the values near 1: a deep network's bound has no square in float64.

    Nothing is rounded by it.
    """
    largest = max(max(map(abs, means)), max(filter(None, stds), default=0.0))
    return math.ldexp(1.0, -max(-1000, min(1000, math.frexp(largest)[1])))


def _error_of(one: Measure, scale: float) -> _Error:
    assert one.std is not None
    return one.mean * scale, (one.std * scale) ** 2 / one.seeds, one.seeds - 1


def _is_far(apart: float, error: float, one: _Error | _Row, other: _Error | _Row) -> bool:
    """Whether means so far apart, squared, are told apart: more than nothing, `error` being their errors together."""
    if error <= 0:
        return True
    share = one[1] / error  # as in `_freedom`, without a call: a page of a board asks thousands of times
    rest = 1 - share
    t2, freedom = apart / error, 1 / (share * share / one[2] + rest * rest / other[2])
    step = math.floor(_step(freedom))
    if t2 > _critical(step)[1]:
        return True
    return t2 > _critical(step + 1)[0] and _chance(t2, freedom) < LEVEL


@cache
def _bounds(one: int, other: int) -> tuple[float, float]:
    """Two bounds for means of such degrees of freedom.

    The squared difference, in squared errors of `other`, up to which none of its means differs from one of any error:
    a larger one makes the difference less significant, but may bring degrees of freedom. And the square of t beyond
    which all differ.
    """
    most, fewest = (min(_MOST_FREEDOM, freedom) for freedom in (one + other, min(one, other)))
    least = math.inf
    for part in range(_SHARES):
        # Where the first has such a part of both errors, or up to the next, the degrees of freedom are most at one end
        # of it, or within it all that there are.
        low, high = part / _SHARES, (part + 1) / _SHARES
        within = low <= one / (one + other) <= high
        freedom = most if within else min(most, max(_freedom(low, one, other), _freedom(high, one, other)))
        least = min(least, _critical(math.floor(_step(freedom)) + 1)[0] / (1 - low))
    # A little wider than it must be, as both sides are rounded.
    return least * (1 - 1e-9), _critical(math.floor(_step(fewest)))[1] * (1 + 1e-9)


def _step(freedom: float) -> float:
    """Where degrees of freedom stand among those whose critical value is known."""
    return _STEPS * math.log2(min(_MOST_FREEDOM, freedom))


@cache
def _critical(step: int) -> tuple[float, float]:
    """Bounds of the square of t that is exceeded by chance as often as the level says, after so many steps from 1."""
    freedom, low, high = 2.0 ** (step / _STEPS), 0.0, 200.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if _chance(middle, freedom) >= LEVEL else (low, middle)
    return low, high


def chance(one: Measure, other: Measure) -> float:
    """The two-sided p of Welch's t-test for two means of two seeds or more each (Welch 1947).

    Values that do not deviate at all differ for certain where their means do.
    """
    scale = _scale((one.mean, other.mean), (one.std, other.std))
    first, second = _error_of(one, scale), _error_of(other, scale)
    apart, error = first[0] - second[0], first[1] + second[1]
    if apart == 0:
        return 1.0
    if error <= 0:
        return 0.0
    return _chance(apart**2 / error, _freedom(first[1] / error, first[2], second[2]))


def _freedom(share: float, one: int, other: int) -> float:
    """Welch's degrees of freedom where the first has this share of the squared error.

    The error's own square may be too small for a number.
    """
    return 1 / (share * share / one + (1 - share) ** 2 / other)


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
