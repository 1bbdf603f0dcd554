"""Means and spreads over seeds."""

import math
import statistics

import pytest

from service.leaderboards.metrics import Metric, measures, spread


def test_a_small_spread_keeps_its_digits() -> None:
    losses = [1000 + k * 1e-6 for k in range(4)]
    _, mean, std, low, high = spread(losses)
    assert math.isclose(std, 1e-6 * math.sqrt(5 / 3), rel_tol=1e-6)
    assert low <= mean <= high


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.975])
def test_equal_values_do_not_deviate(value: float) -> None:
    assert spread([value] * 7) == [7, value, 0.0, value, value]


def test_metrics_without_a_value_are_absent() -> None:
    nothing: list[float | None] = [None] * (len(Metric) - 1)
    rows = [[None, *nothing], [0.25, *nothing], [0.75, *nothing]]
    assert measures(rows) == {next(iter(Metric)): [2, 0.5, statistics.stdev([0.25, 0.75]), 0.25, 0.75]}
