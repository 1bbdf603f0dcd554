"""Means and spreads, and that they come back from the database as they were."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects import sqlite

from service.measures import Measures, PackedMeasures, measures, spread
from service.metric import Metric

_DIALECT = sqlite.dialect()
_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
_SPREADS = st.tuples(st.integers(1, 10**9), _NUMBERS, st.none() | _NUMBERS, _NUMBERS, _NUMBERS).map(list)


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


@given(st.dictionaries(st.sampled_from([metric.value for metric in Metric]), _SPREADS))
def test_packed_and_unpacked(found: Measures) -> None:
    column = PackedMeasures()
    packed = column.process_bind_param(found, _DIALECT)
    assert packed is not None
    assert len(packed) == 40 * len(found)
    assert column.process_result_value(packed, _DIALECT) == found


def test_a_metric_that_there_is_no_more_is_left_out() -> None:
    column = PackedMeasures()
    packed = column.process_bind_param({"accuracy": [2, 0.5, 0.1, 0.4, 0.6]}, _DIALECT)
    assert packed is not None
    stranger = b"\0\0\0\0" + packed[4:]
    assert column.process_result_value(stranger + packed, _DIALECT) == {"accuracy": [2, 0.5, 0.1, 0.4, 0.6]}
