"""Means and spreads over seeds."""

import math
from collections.abc import Iterable, Sequence

from service.metric import Metric

Measures = dict[str, list[float]]
"""Metric -> [seeds, mean, sample deviation (null for one seed), least, largest]; metrics without a value are absent."""


def measures(values: Iterable[Sequence[float | None]], metrics: Sequence[Metric] = tuple(Metric)) -> Measures:
    """Mean and spread of metrics over rows of values in their order."""
    found: Measures = {}
    for name, column in zip(metrics, zip(*values, strict=True), strict=True):
        known = [float(value) for value in column if value is not None]
        if known:
            found[name.value] = spread(known)
    return found


def spread(values: Sequence[float]) -> list[float]:
    """[count, mean, sample deviation or None, least, largest], in two exact sums: a small spread keeps its digits."""
    count = len(values)
    if count == 1:
        # A list, as JSON keeps it; only its third is ever null, and all who read that ask first.
        return [1, values[0], None, values[0], values[0]]  # type: ignore[list-item]
    # Correctly rounded sums, and a mean that is never outside of its values: equal values do not deviate.
    least, largest = min(values), max(values)
    mean = min(max(math.fsum(values) / count, least), largest)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return [count, mean, std, least, largest]
