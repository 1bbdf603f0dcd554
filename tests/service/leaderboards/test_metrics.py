"""Means and spreads over seeds."""

import json
import math
import statistics
import sys

import pytest

from service.leaderboards.metrics import Measure, Metric, from_stored, measures, spread, to_stored


def test_a_small_spread_keeps_its_digits() -> None:
    losses = [1000 + k * 1e-6 for k in range(4)]
    found = spread(losses)
    assert found.std is not None
    assert math.isclose(found.std, 1e-6 * math.sqrt(5 / 3), rel_tol=1e-6)
    assert found.least <= found.mean <= found.largest


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.975])
def test_equal_values_do_not_deviate(value: float) -> None:
    assert spread([value] * 7) == Measure(7, value, 0.0, value, value)


def test_values_whose_sum_is_beyond_float64_have_a_mean() -> None:
    assert spread([1.7e308] * 3) == Measure(3, 1.7e308, 0.0, 1.7e308, 1.7e308)
    assert spread([0.0, 1.6e308] * 4).mean == 0.8e308
    assert math.isclose(spread([0.0, 1.6e308] * 4).std or 0, 0.8e308 * math.sqrt(8 / 7))


def test_the_largest_number_is_its_own_mean() -> None:
    """Where a part of it is rounded up the parts together are more than float64 has."""
    largest = sys.float_info.max
    for seeds in range(2, 12):
        assert spread([largest] * seeds) == Measure(seeds, largest, 0.0, largest, largest)


def test_metrics_without_a_value_are_absent() -> None:
    nothing: list[float | None] = [None] * (len(Metric) - 1)
    rows = [[None, *nothing], [0.25, *nothing], [0.75, *nothing]]
    assert measures(rows) == {next(iter(Metric)): Measure(2, 0.5, statistics.stdev([0.25, 0.75]), 0.25, 0.75)}


def test_the_database_keeps_lists() -> None:
    found = {"accuracy": spread([0.25, 0.75]), "loss": spread([1.5])}
    stored = to_stored(found)
    assert json.loads(json.dumps(stored)) == stored
    assert stored["loss"] == [1, 1.5, None, 1.5, 1.5]
    assert from_stored(stored) == found
