"""The Pareto front against its definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.leaderboards import pareto
from service.leaderboards.pareto import on_front

Point = tuple[float, ...]
coordinates = st.integers(-2, 3).map(float)  # few values: many ties


def best_by_definition(points: list[Point], more: list[bool]) -> list[bool]:
    turned = [tuple(v if m else -v for v, m in zip(point, more, strict=True)) for point in points]

    def beats(a: Point, b: Point) -> bool:
        return a != b and all(x >= y for x, y in zip(a, b, strict=True))

    return [not any(beats(other, point) for other in turned) for point in turned]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[Point], list[bool]]:
    respects = draw(st.integers(2, 4))
    points = draw(st.lists(st.tuples(*[coordinates] * respects), max_size=20))
    return points, draw(st.lists(st.booleans(), min_size=respects, max_size=respects))


@given(drawn())
def test_is_its_definition(case: tuple[list[Point], list[bool]]) -> None:
    points, more = case
    assert on_front(points, more) == best_by_definition(points, more)


def test_who_beats_many_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    front = [(1000.0 - k, float(k), 0.0) for k in range(1000)]
    beaten = [(0.5, 998.5, float(-k)) for k in range(1, 2000)]  # by the last of them alone
    compared = 0

    def counted(a: float, b: float) -> bool:
        nonlocal compared
        compared += 1
        return a >= b

    monkeypatch.setattr(pareto, "ge", counted)
    before = len(front) ** 2  # at most two comparisons of each pair of the front
    assert on_front(front + beaten, [True] * 3) == [True] * len(front) + [False] * len(beaten)
    assert compared < before + 5 * len(beaten) + 10 * len(front)


def test_two_respects_of_many_points_are_quick() -> None:
    points = [(float(k), float(-k)) for k in range(100_000)]
    assert all(on_front(points, [True, True]))
    assert sum(on_front(points, [True, False])) == 1
