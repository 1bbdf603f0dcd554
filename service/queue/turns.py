"""Whose turn it is out of turn: who has waited for long, and would for ever.

By shares alone nobody waits for ever whose trials are as large as others'. One that needs all of a node finds a part of
it taken whenever somebody else comes first: somebody of another project, which always used less, as others of one's own
have what nobody wants; or who used less than a person whose own later experiments, of smaller trials, run meanwhile.
Pure functions of what is asked for, and what they remember; `workers.worker` acts on what they say.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from service.queue.shares import Demand, Usage

OVERDUE_SECONDS = 3600.0
"""So long a person's first experiment runs nothing before its turn comes before all others, and so long it lasts."""


class Turns:
    """Remembers since when those that come first of their people have run nothing, and whose turn that made it."""

    def __init__(self) -> None:
        self._idle_since: dict[int, float] = {}
        self._first: int | None = None
        self._until = math.inf

    def first(self, demands: Sequence[Demand], usage: Usage, now: float) -> int | None:
        """The experiment of which one trial comes before all others; None: no turn is overdue.

        It is one of who used less than is due to them, or runs later experiments of theirs in its place, and has waited
        longest. Its turn is over once its trial has ended or run for as long as anybody waits: what gives way does.
        """
        asking = [demand for demand in demands if demand.trials > 0]
        heads = _heads(asking, usage)
        self._idle_since = {
            one.experiment_id: self._idle_since.get(one.experiment_id, now) for one in heads if not one.running
        }
        self._first = self._still_first(asking, now)
        if self._first is None:
            overdue = {number for number, since in self._idle_since.items() if now - since >= OVERDUE_SECONDS}
            if overdue and (overdue := overdue & _deserving(asking, heads, usage)):
                self._first = min(overdue, key=lambda number: (self._idle_since[number], number))
        return self._first

    def _still_first(self, asking: Sequence[Demand], now: float) -> int | None:
        one = next((demand for demand in asking if demand.experiment_id == self._first), None)
        began = self._until < math.inf
        if one is None or now > self._until or (began and not one.running):
            self._until = math.inf
            return None
        if one.running and not began:
            self._until = now + OVERDUE_SECONDS
        return self._first


def _heads(asking: Sequence[Demand], usage: Usage) -> list[Demand]:
    """The experiment of each person that comes before their others, be it that it runs or waits."""
    found: dict[object, Demand] = {}

    def place(one: Demand) -> tuple[float, ...]:
        return -one.priority, usage.of(one.group) if one.owner is None else 0.0, one.experiment_id

    for one in sorted(asking, key=place):
        found.setdefault(one.group.person, one)
    return list(found.values())


def _deserving(asking: Sequence[Demand], heads: Sequence[Demand], usage: Usage) -> set[int]:
    """The first experiments of people who used less than is due to them, or of whom others run."""
    projects = {one.project_id: one.weight for one in asking}
    within = defaultdict[int | None, float](float)
    for one in heads:
        within[one.project_id] += one.person_weight
    weights = {
        one: one.weight / math.fsum(projects.values()) * one.person_weight / within[one.project_id] for one in heads
    }
    used = {one: usage.of(one.group.person) for one in heads}
    total = math.fsum(used.values())
    running = Counter(one.group.person for one in asking if one.running)
    return {one.experiment_id for one in heads if used[one] < total * weights[one] or running[one.group.person]}
