"""Result columns that leaderboards rank by and show: their direction, how people read them, their spread over seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import EnumType, StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from ttsv.metrics.catalog import METRICS, MetricInfo


class _Catalogued(EnumType):
    """An enumeration whose members a type checker cannot list, as the catalogue names them."""

    if TYPE_CHECKING:

        def __getattr__(cls, name: str) -> "Metric": ...


class Metric(StrEnum, metaclass=_Catalogued):
    """Numeric result columns, in the order in which tables show them."""

    _ignore_ = "each"
    for each in METRICS:
        vars()[each.upper()] = each

    @property
    def more_is_better(self) -> bool:
        """Whether the row with the largest value comes first."""
        return self.reading.best == "most"

    @property
    def has_best(self) -> bool:
        """Whether the first row is the best one. A temperature is best at 1: above, a network boasts."""
        return self.reading.best != "at 1"

    @property
    def better(self) -> str:
        """Which values are better, in words."""
        return {"most": "higher", "least": "lower", "at 1": "near 1"}[self.reading.best]

    @property
    def reading(self) -> MetricInfo:
        """What it means and how people read it."""
        return METRICS[self.value]


HEADLINE = tuple(metric for metric in Metric if metric.reading.headline)
"""What tables for people show unless other columns are asked for."""


@dataclass(frozen=True)
class Unit:
    """In what a column, or a row, has a metric: its title, what a value is multiplied by, and decimals."""

    title: str
    factor: float
    decimals: int


_SMALL = 100_000
"""Below it a count is no part of a million that tables show: small networks have parameters, too."""


def unit_of(metric: Metric, means: Iterable[float | None]) -> Unit:
    """How people read a metric beside such values: counts of small networks are not counted in millions."""
    reading = metric.reading
    if reading.unit == "millions" and all(abs(mean) < _SMALL for mean in means if mean is not None):
        return Unit(reading.heading, 1.0, 0)
    return Unit(reading.title, reading.factor, reading.decimals)


class Measure(NamedTuple):  # of which an answer has thousands: a frozen dataclass takes ten times as long to make
    """One metric over the seeds that have it; `std` is the sample deviation (n - 1), None for a single seed."""

    seeds: int
    mean: float
    std: float | None
    least: float
    largest: float


Measures = dict[str, Measure]
"""By metric; those without a value are absent."""
Stored = dict[str, list[float | None]]
"""Measures as JSON keeps them: of each the fields in their order."""


def to_stored(measures: Measures) -> Stored:
    """What the database keeps of measures."""
    return {name: list(one) for name, one in measures.items()}


def from_stored(stored: Mapping[str, Sequence[Any]], names: Iterable[str] | None = None) -> Measures:
    """Measures that the database kept: all, or those of some metrics."""
    made = tuple.__new__  # as `_make`, without asking each of thousands for its length
    if names is None:
        return {name: made(Measure, values) for name, values in stored.items()}
    return {name: made(Measure, stored[name]) for name in names if name in stored}


def measures(values: Iterable[Sequence[float | None]], metrics: Sequence[Metric] = tuple(Metric)) -> Measures:
    """Mean and spread of metrics over rows of values in their order."""
    found: Measures = {}
    for name, column in zip(metrics, zip(*values, strict=True), strict=True):
        known = [float(value) for value in column if value is not None]
        if known:
            found[name.value] = spread(known)
    return found


_LARGEST_COUNT = 10**7
"""Images times seeds of which means of shares are told apart."""


def nearest_ratio(value: float, error: float) -> float:
    """A share that is within rounding a ratio of counts, as that ratio; any other value as it is.

    Equal counts give equal means however they are summed: 350 of 359 once, and as the mean of eight seeds. (By the
    convergents of its continued fraction: ratios of so small counts lie further apart than any rounding.)
    """
    if not 0 < value < 1:
        return value
    if value <= error:
        return 0.0
    part, whole = value.as_integer_ratio()
    above, above_before, below, below_before = 0, 1, 1, 0
    while part:
        times, rest = divmod(whole, part)
        below, below_before = times * below + below_before, below
        if below > _LARGEST_COUNT:
            break
        above, above_before = times * above + above_before, above
        if -error <= (ratio := above / below) - value <= error:
            return ratio
        whole, part = part, rest
    return value


_SQUARES = 1e-140
"""Between it and its inverse numbers have squares in float64."""


def spread(values: Sequence[float]) -> Measure:
    """Mean and spread of at least one value, in two exact sums: a small spread keeps its digits.

    So has that of a deep network's bounds, whose squares are beyond float64, or even their sum.
    """
    count = len(values)
    if count == 1:
        return Measure(1, values[0], None, values[0], values[0])
    # Correctly rounded sums, and a mean that is never outside of its values: equal values do not deviate.
    least, largest = min(values), max(values)
    if largest < 1 / _SQUARES:
        total = math.fsum(values) / count
    else:  # Halves, as rounded parts of the largest number may be more than it is.
        total = 2 * min(math.fsum([value / 2 / count for value in values]), largest / 2)
    mean = min(max(nearest_ratio(total, 2 * math.ulp(largest)), least), largest)
    if _SQUARES < largest - least < 1 / _SQUARES:
        std = math.sqrt(math.fsum([(value - mean) ** 2 for value in values]) / (count - 1))
    else:  # which takes thrice as long
        root = math.sqrt(count - 1)
        std = math.hypot(*[(value - mean) / root for value in values])
    return Measure(count, mean, std, least, largest)
