"""The geometry of the pages' charts, and the scatter plot of a leaderboard against brute force."""

import math
import random
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.dashboard.charts import line_chart, scatter
from service.dashboard.trials import curves, layer_ranges
from service.dashboard.wording import ago, duration, fixed, measured, short, size
from service.database import now
from service.database.engine import Database
from service.experiments import submission
from service.experiments.submission import Draft
from service.leaderboards import scatter as planes
from service.leaderboards.filters import Question
from service.leaderboards.leaderboard import MeasuredDataset, measured_datasets
from service.leaderboards.metrics import Metric
from service.queue.leases import Lease
from service.specs.columns import flat
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from ttsv.results import LayerFields

VALUES = st.floats(-1e12, 1e12, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-9)

ANY = st.one_of(st.floats(allow_nan=False), st.sampled_from([1e308, 1.7e308, 1e-300, 5e-324, 1e-308]))


def places(path: str) -> list[tuple[str, float, float]]:
    """A path's commands with their coordinates."""
    found = re.findall(r"([ML])(-?[\d.e+]+) (-?[\d.e+]+)", path)
    return [(command, float(x), float(y)) for command, x, y in found]


class TestLines:
    @given(st.lists(st.one_of(st.none(), VALUES), min_size=1, max_size=40))
    def test_every_value_lies_within_and_in_order(self, values: list[float | None]) -> None:
        chart = line_chart("loss", "epoch", [float(i) for i in range(1, len(values) + 1)], {"training": values})
        known = [value for value in values if value is not None]
        if not known:
            assert chart is None
            return
        assert chart is not None
        found = places(chart.curves[0].path)
        assert len(found) == len(known)
        assert all(0 <= x <= chart.width and 0 <= y <= chart.height for _, x, y in found)
        assert [x for _, x, _ in found] == sorted(x for _, x, _ in found)
        for (_, _, y), value in zip(found, known, strict=True):
            for (_, _, y2), value2 in zip(found, known, strict=True):
                assert value >= value2 or y >= y2  # upwards on a page is less
        assert found[0][0] == "M"
        gaps = sum(before is None and after is not None for before, after in pairwise(values))
        assert sum(command == "M" for command, _, _ in found) == gaps + (values[0] is not None)
        assert len(chart.curves[0].dots) == len(known)

    @given(VALUES, VALUES)
    def test_ticks_are_round_and_within(self, a: float, b: float) -> None:
        chart = line_chart("loss", "epoch", [1.0, 2.0], {"training": [a, b]})
        assert chart is not None
        ticks = chart.y.ticks
        assert len(ticks) <= 12
        assert all(chart.y.end <= tick.at <= chart.y.start for tick in ticks)

    def test_powers_of_ten_are_evenly_apart(self) -> None:
        chart = line_chart("x", "epoch", [1, 2, 3, 4, 5], {"x": [1e-4, 1e-2, 1, 1e2, 1e4]}, log=True)
        assert chart is not None
        heights = [y for _, _, y in places(chart.curves[0].path)]
        assert all(abs((a - b) - (heights[0] - heights[1])) < 0.3 for a, b in pairwise(heights))
        labels = [float(tick.label) for tick in chart.y.ticks]
        assert all(math.log10(label).is_integer() for label in labels)
        wide = line_chart("x", "epoch", [1, 2], {"x": [3e-15, 0.01]}, log=True)
        assert wide is not None
        assert 3 <= len(wide.y.ticks) <= 8
        flat_line = line_chart("x", "epoch", [1, 2], {"x": [0.0, 5.0]}, log=True)
        assert flat_line is not None
        assert not flat_line.y.log  # zero has no logarithm

    def test_what_a_trial_did_not_measure_has_no_chart(self, epoch_point: Callable[..., dict[str, Any]]) -> None:
        titles = [chart.title for chart in curves([epoch_point(1), epoch_point(2)], {})]
        assert titles == ["Accuracy (%)", "Loss (nats)", "Learning rate"]
        assert "Orthogonal loss" in [chart.title for chart in curves([epoch_point(1, ort_loss=0.5)], {})]
        assert curves([], {}) == []


class TestScatter:
    def test_the_front_lies_on_top(self) -> None:
        points = [(1.0, 0.9, "a", "/a", True), (2.0, 0.5, "b", None, False), (40.0, 0.8, "c", "/c", True)]
        chart = scatter("compression", "accuracy", points)
        assert chart is not None
        assert chart.x.log
        assert not chart.y.log
        assert [mark.text for mark in chart.marks] == ["b", "a", "c"]
        assert len(places(chart.steps)) == 2
        assert scatter("x", "y", []) is None

    @given(st.lists(st.tuples(ANY, ANY), min_size=1, max_size=20))
    def test_numbers_of_any_size_have_a_place_and_ticks(self, points: list[tuple[float, float]]) -> None:
        chart = scatter("compression", "loss", [(x, y, "", None, True) for x, y in points])
        assert chart is not None
        assert all(0 <= mark.x <= chart.width and 0 <= mark.y <= chart.height for mark in chart.marks)
        assert max(len(chart.x.ticks), len(chart.y.ticks)) <= 12


def _layer(smallest: float, largest: float, before: float | None = None) -> LayerFields:
    return {
        "name": "conv",
        "kind": "Conv2d",
        "shape": {},
        "input_size": [8, 8],
        "largest": largest,
        "smallest": smallest,
        "largest_before_projection": before,
        "projection": None,
    }


class TestLayers:
    def test_ranges_are_on_one_scale(self) -> None:
        first, second = layer_ranges([_layer(0.0, 1.0, before=4.0), _layer(1.0, 2.0)])
        assert (first.start, first.width, first.before) == (0, 250, 1000)
        assert (second.start, second.width, second.before) == (250, 250, None)
        assert [found.width for found in layer_ranges([_layer(0.0, 0.0)])] == [4]


class TestWords:
    def test_people_read_percent_units_and_spans(self) -> None:
        assert measured(0.12345, Metric.ACCURACY) == "12.35 %"
        assert measured(0.0123, Metric.STEP_SECONDS) == "12.30 ms"
        assert measured(None, Metric.ACCURACY) == "\u2013"
        assert measured(3.4e38, Metric.LOSS) == "3.400e+38 nats"
        assert measured(1.24e-7, Metric.LOSS) == "1.2e-7 nats"
        assert measured(0.000_04, Metric.ACCURACY) == "0.004 %"
        assert [fixed(2e-9, 2, mean) for mean in (0.1, 1e-9)] == ["0.00", "2.0e-9"]
        assert [duration(seconds) for seconds in (0.25, 59, 61, 3599.7, 90_000, 1e6)] == [
            "0.2 s",
            "59 s",
            "1 min 1 s",
            "1 h",
            "25 h",
            "11 d 13 h",
        ]
        assert [size(count) for count in (0, 1023, 1024, 5 * 2**30)] == ["0 bytes", "1023 bytes", "1.0 KiB", "5.0 GiB"]
        assert ago(now()) == "0 s ago"
        assert short("x" * 100) == "x" * 59 + "…"
        assert flat({"a": {"b": 1, "c": {}}, "d": [2]}) == [("a.b", 1), ("a.c", {}), ("d", [2])]


class TestScatterPlot:
    def test_the_front_is_that_of_brute_force(
        self,
        database: Database,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
    ) -> None:
        rng = random.Random(0)
        submit(seeds=1, **{"training.lr": [0.01 * n for n in range(1, 21)]})
        lease = claim()
        values = [(round(rng.random(), 1), round(rng.random(), 1)) for _ in range(20)]
        for trial, (accuracy, ece) in enumerate(values, 1):
            finish(lease, trial, accuracy, ece=ece)
        with database.read() as session:
            found = planes.scatter_plot(session, Question(dataset="digits"), Metric.ACCURACY, Metric.ECE)
            absent = planes.scatter_plot(session, Question(dataset="digits"), Metric.ACCURACY, Metric.MCE)
            nowhere = planes.scatter_plot(session, Question(dataset="cifar10"), Metric.ACCURACY, Metric.ECE)
        assert absent is None
        assert nowhere is None
        assert found is not None

        def beaten(a: tuple[float, float]) -> bool:
            return any(b != a and b[0] >= a[0] and b[1] <= a[1] for b in values)

        front = [value for value in values if not beaten(value)]
        assert found.cells == 20
        assert sorted((p.x, p.y) for p in found.points if p.on_front) == sorted(front)
        assert found.front == len(front)
        assert len(found.front_cells) == len(front)
        assert {(p.x, p.y) for p in found.points} == set(values)

    def test_points_in_one_place_are_drawn_once(
        self,
        database: Database,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
    ) -> None:
        submit(seeds=1, **{"training.lr": [0.01 * n for n in range(1, 7)]})
        lease = claim()
        for trial in range(1, 7):
            finish(lease, trial, 0.9 if trial == 1 else 0.5 + trial * 1e-9, ece=0.01 if trial == 1 else 0.02)
        with database.read() as session:
            found = planes.scatter_plot(session, Question(dataset="digits"), Metric.ACCURACY, Metric.ECE)
        assert found is not None
        assert found.cells == 6
        assert len(found.points) < 6
        assert [point.on_front for point in found.points][-1]

    def test_the_largest_numbers_and_the_least_have_their_places(
        self,
        database: Database,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
    ) -> None:
        submit(seeds=1, **{"training.lr": [0.01 * n for n in range(1, 6)]})
        lease = claim()
        values = [(1e308, -1e308), (-1e308, 1e308), (1e-300, 5e-324), (0.0, 1e-300), (2.0, 3.0)]
        for trial, (loss, compression) in enumerate(values, 1):
            finish(lease, trial, loss=loss, compression=compression)
        with database.read() as session:
            found = planes.scatter_plot(session, Question(dataset="digits"), Metric.LOSS, Metric.COMPRESSION)
        assert found is not None
        assert found.cells == 5
        assert {(1e308, -1e308), (-1e308, 1e308)} <= {(point.x, point.y) for point in found.points}


@pytest.mark.parametrize("measured", [0, 1, 3])
def test_data_sets_count_what_was_measured(
    database: Database,
    submit: Callable[..., int],
    claim: Callable[..., Lease],
    finish: Callable[..., None],
    measured: int,
) -> None:
    submit(seeds=1, **{"training.lr": [0.1, 0.2, 0.3]})
    spec = ExperimentSpec(name="x", base={"dataset": "synthetic:1x8x8:2:40", "model": "small-cnn"})
    plan = expand_grid(spec, max_trials=1)
    database.write(lambda session: submission.submit(session, Draft(spec, plan)).id)
    lease = claim()
    for trial in range(1, measured + 1):
        finish(lease, trial)
    with database.read() as session:
        found = measured_datasets(session, 0)
        none = measured_datasets(session, 7)
    assert found == [
        MeasuredDataset("digits", min(measured, 1), measured),
        MeasuredDataset("synthetic:1x8x8:2:40", 0, 0),
    ]
    assert none == []
