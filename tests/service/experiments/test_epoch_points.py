"""Selections of epochs: real ones, bounded, first and last kept, peaks kept."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.experiments.epoch_points import thin

values = st.none() | st.floats(-1e6, 1e6)


@given(
    points=st.lists(st.tuples(values, values), max_size=60),
    count=st.integers(3, 20),
)
def test_any_curve(points: list[tuple[float | None, float | None]], count: int) -> None:
    every = [{"epoch": 2 * number + 1, "a": a, "b": b} for number, (a, b) in enumerate(points)]
    found = thin(every, ["a", "b"], count)
    assert len(found) == min(count, len(every))
    assert [point for point in every if point in found] == found, "epochs as they are, in their order"
    assert found[:1] == every[:1]
    assert found[-1:] == every[-1:]


def reference(curve: list[tuple[float, float]], count: int) -> list[float]:
    """Steinarsson's program for one curve, by the book; the abscissae kept."""
    every = (len(curve) - 2) / (count - 2)
    kept, last = [curve[0]], 0
    for bucket in range(count - 2):
        start, end = int(bucket * every) + 1, int((bucket + 1) * every) + 1
        after = curve[end : min(int((bucket + 2) * every) + 1, len(curve))]
        x = sum(p[0] for p in after) / len(after)
        y = sum(p[1] for p in after) / len(after)
        a = curve[last]
        areas = [abs((a[0] - x) * (p[1] - a[1]) - (a[0] - p[0]) * (y - a[1])) for p in curve[start:end]]
        last = start + areas.index(max(areas))
        kept.append(curve[last])
    return [p[0] for p in [*kept, curve[-1]]]


@pytest.mark.parametrize(("length", "count"), [(10, 3), (100, 12), (102, 12), (1002, 102)])
def test_one_metric_as_by_the_book(length: int, count: int) -> None:
    rng = random.Random(length)
    curve = [(float(x), math.sin(x / 9) + rng.random()) for x in range(length)]
    every: list[dict[str, Any]] = [{"epoch": x, "a": y} for x, y in curve]
    # The book cuts at rounded multiples of a fraction; these lengths make both cut at the same places.
    assert [point["epoch"] for point in thin(every, ["a"], count)] == reference(curve, count)


def test_a_peak_of_any_metric_is_kept() -> None:
    every: list[dict[str, Any]] = [{"epoch": x, "a": 0.0, "b": 1e-6 * (x % 2)} for x in range(1, 1001)]
    every[400]["a"] = 1000.0
    every[700]["b"] = 1.0
    kept = {point["epoch"] for point in thin(every, ["a", "b"], 20)}
    assert {401, 701} <= kept
