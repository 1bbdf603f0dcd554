"""The Pareto front: the points that no other point beats in every respect."""

from collections.abc import Sequence
from operator import ge, mul


def on_front(points: Sequence[Sequence[float]], more_is_better: Sequence[bool]) -> list[bool]:
    """For each point whether no other is at least as good in every respect and better in one; equal points stay both.

    Exact; O(n log n) for two respects, O(n times the front) for more.
    """
    signs = [1 if more else -1 for more in more_is_better]
    turned = [tuple(map(mul, signs, point)) for point in points]
    # In descending order no later point can beat an earlier one.
    order = sorted(range(len(points)), key=lambda index: turned[index], reverse=True)
    return _sweep(turned, order) if len(more_is_better) == 2 else _compare(turned, order)


def _sweep(points: Sequence[tuple[float, ...]], order: Sequence[int]) -> list[bool]:
    """Two respects: a point stays if it is better in the second than all that are before it in the first."""
    kept = [False] * len(points)
    best: tuple[float, ...] | None = None
    for index in order:
        kept[index] = best is None or points[index] == best or points[index][1] > best[1]
        if kept[index]:
            best = points[index]
    return kept


def _compare(points: Sequence[tuple[float, ...]], order: Sequence[int]) -> list[bool]:
    kept = [False] * len(points)
    front: list[tuple[float, ...]] = []
    for index in order:
        point = points[index]
        for at, other in enumerate(front):
            if all(map(ge, other, point)) and other != point:
                # Who beats one beats many: half as far from the head it is asked sooner.
                front[at], front[at // 2] = front[at // 2], other
                break
        else:
            kept[index] = True
            front.append(point)
    return kept
