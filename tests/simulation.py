"""Pools that are drawn and simulated: how much of them stays empty, and for how long who has a share waits.

    python -m tests.simulation [--pools N] [--seconds N] [--seed N] [--trials SHORTEST LONGEST] [--giving] [--record]

Each has one to four nodes and two to six endless grids, whose trials take so many seconds each; with `--giving` the
trials of every other grid give way. It says how much of the time a place was empty that somebody could have used, and
for how long at once while nobody with a share waited; the mean and the longest of the waits, of each pool the longest,
in lengths of its longest trial; and how many trials gave way after the first quarter. Ends with code 1 where a place
stayed empty for longer than a look and a beginning take, though nobody waited.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from service.queue import places
from service.queue.capacity import Place, Standing
from service.queue.contenders import Contender
from service.queue.places import Decision, Places
from service.queue.shares import Amount, Demand, Usage, allocate
from workers.worker.scheduler import going_on

RECORDS = Path(__file__).with_name("simulations.jsonl")
ONE_GPU, TWO_GPUS = Amount(1, 1), Amount(1, 2)
NODES = [Amount(8, 1), Amount(8, 2), Amount(16, 4)]
NEEDS = [Amount(1), Amount(6), ONE_GPU, TWO_GPUS, Amount(4, 3), Amount(2, 4)]
MOST = [1, 2, 5, 99]
OWNERS = [None, "ada", "bob"]
LENT_SECONDS = int(places.SHORT_SECONDS) + 2
"""After so long idle room is lent at the latest; what did not fit as others began, once these were heard of."""
CHECKPOINT_SECONDS = 2
"""From the word that a trial is to give way to its next checkpoint."""


@dataclass
class Grid:
    """An endless one; its trials take so many ticks each."""

    number: int
    needs: Amount
    ticks: int
    most: int = 99
    priority: int = 0
    owner: str | None = None
    gives_way: bool = False
    begun: int = 0
    short_for: int = 0
    longest_short: int = 0


@dataclass(eq=False)
class Run:
    """A trial on a node, until a tick; `stops`: how often it gave way."""

    grid: Grid
    node: str
    ends: int
    begun: int = -9
    stops: int = 0
    asked_at: int | None = None


class Pool:
    """Nodes, what runs there, and a worker that divides them each tick, which is a second.

    A trial begins on the node that has most left; one that ends is followed at once by the next of its grid on the same
    node, unless that is shunned or its share has none for it. Grids ask in the order in which they are given. The
    worker hears of an end at once, and of a beginning a second later. Who gives way goes on later with what is left.
    """

    def __init__(self, nodes: list[Place], *grids: Grid, mend: bool = True) -> None:
        self.nodes, self.grids, self.mend = nodes, list(grids), mend
        self.runs: list[Run] = []
        self.stopped: list[tuple[int, Run]] = []
        """What gave way, and when."""
        self.places, self.usage = Places(), Usage()
        self.now = 0
        self.decision = Decision()
        self.shares: dict[int, int] = {}
        self.due: dict[int, int] | None = None
        """Their shares, where it is not asked for them."""
        self._left_off: list[Run] = []

    def running(self, grid: Grid) -> int:
        return sum(run.grid is grid for run in self.runs)

    def standing(self) -> list[Standing]:
        return [Standing(run.grid.number, run.node, run.grid.needs) for run in self.runs if self._heard_of(run)]

    def left(self, node: Place) -> Amount:
        taken = [run.grid.needs for run in self.runs if run.node == node.id]
        return Amount(*(has - sum(each) for has, each in zip(node.room, zip(*taken, strict=True), strict=True)))

    def free(self, node: Place) -> Amount:
        return self.left(node) if any(run.node == node.id for run in self.runs) else node.room

    def tick(self) -> None:
        self.now += 1
        heard = Counter(one.experiment_id for one in self.standing())
        demands = [
            Demand(grid.number, grid.most, grid.needs, grid.priority, 1, grid.owner, running=heard[grid.number])
            for grid in self.grids
        ]
        room = [node.room for node in self.nodes]
        self.usage.add(demands, room, 1)
        shares = allocate(demands, room, most_experiments=99, usage=self.usage)
        self.shares = shares if self.due is None else self.due
        giving = self._giving(demands, room)
        decide = partial(self.places.decide, demands, self.shares, self.nodes, self.standing, self.now, giving)
        self.decision = decide(hungry=demands if self.mend else ())
        self.shares = dict(Counter(self.shares) + Counter(self.decision.lent))
        self._give_way({number: max(most, self.shares.get(number, 0)) for number, most in giving.items()})
        by_id = {node.id: node for node in self.nodes}
        for run in [run for run in self.runs if run.ends <= self.now]:
            self.runs.remove(run)
            self._begin(run.grid, by_id[run.node])
        for grid in self.grids:
            while any(self._begin(grid, node) for node in sorted(self.nodes, key=self.free, reverse=True)):
                pass
            if self.shares.get(grid.number, 0) > 0 and not self.running(grid):
                grid.short_for += 1
                grid.longest_short = max(grid.longest_short, grid.short_for)
            else:
                grid.short_for = 0

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick()

    def idle(self) -> bool:
        """Whether a node has room for a trial that somebody could run."""
        more = [grid.needs for grid in self.grids if self.running(grid) < grid.most]
        return any(needs.fits(self.free(node)) for needs in more for node in self.nodes)

    def waits(self) -> bool:
        """Whether somebody runs less than his share: what is lent is none."""
        lent = self.decision.lent
        owed = {grid.number: self.shares.get(grid.number, 0) - lent.get(grid.number, 0) for grid in self.grids}
        return any(self.running(grid) < owed[grid.number] for grid in self.grids)

    def longest_wait(self) -> float:
        """For how long somebody had a share and no trial, in lengths of the longest trial."""
        return max(grid.longest_short for grid in self.grids) / max(grid.ticks for grid in self.grids)

    def _heard_of(self, run: Run) -> bool:
        return run.begun < self.now - 1

    def _begin(self, grid: Grid, node: Place) -> bool:
        allowed = self.running(grid) < self.shares.get(grid.number, 0)
        shunned = self.mend and node.id in self.decision.shunned_by(grid.number)
        if not allowed or shunned or not grid.needs.fits(self.free(node)):
            return False
        earlier = next((run for run in self._left_off if run.grid is grid), None)
        if earlier is None:
            run = Run(grid, node.id, self.now + grid.ticks, self.now)
            grid.begun += 1
        else:
            self._left_off.remove(earlier)
            run = Run(grid, node.id, self.now + earlier.ends, self.now, earlier.stops)
        self.runs.append(run)
        return True

    def _giving(self, demands: Sequence[Demand], room: Sequence[Amount]) -> Mapping[int, int]:
        """Of the grids that give way, how many of their trials go on."""
        willing = {grid.number for grid in self.grids if grid.gives_way}
        if not willing:
            return {}
        holding, firm = (allocate(demands, room, most_experiments=99, firm=firm) for firm in (False, True))
        found = [
            Contender(demand, demand.experiment_id in willing, claimed=True, waiting=None, unfit_since=None)
            for demand in demands
        ]
        return going_on(found, self.shares, holding, firm)

    def _give_way(self, going: Mapping[int, int]) -> None:
        """Who began last is asked first, and stops at its next checkpoint, if it is still asked then."""
        for grid in self.grids:
            mine = sorted(
                (run for run in self.runs if run.grid is grid and self._heard_of(run)), key=lambda run: -run.begun
            )
            asked = mine[: max(0, self.running(grid) - going.get(grid.number, sys.maxsize))]
            for node, stay in self.decision.staying.get(grid.number, {}).items():
                there = [run for run in mine if run.node == node]
                asked += there[: max(0, len(there) - stay)]
            for run in mine:
                run.asked_at = (run.asked_at or self.now) if run in asked else None
                if run.asked_at is not None and self.now - run.asked_at >= CHECKPOINT_SECONDS and run.ends > self.now:
                    self.runs.remove(run)
                    left_off = Run(grid, run.node, run.ends - self.now, stops=run.stops + 1)
                    self._left_off.append(left_off)
                    self.stopped.append((self.now, left_off))


def drawn(seed: int, shortest: int, longest: int, *, giving: bool) -> Pool:
    """The pool of a seed; with `giving`, trials of about every other of its grids give way."""
    rng = random.Random(seed)
    nodes = [Place(name, name, rng.choice(NODES)) for name in "abcd"[: rng.randint(1, 4)]]
    grids = [
        Grid(
            number,
            rng.choice(NEEDS),
            ticks=rng.randint(shortest, longest),
            most=rng.choice(MOST),
            priority=rng.randint(0, 1),
            owner=rng.choice(OWNERS),
        )
        for number in range(1, rng.randint(2, 6) + 1)
    ]
    for grid in grids:
        grid.gives_way = giving and rng.random() < 0.5
    return Pool(nodes, *grids)


def simulated(pool: Pool, seconds: int) -> tuple[float, int]:
    """How much of the time a place was empty that somebody could use, and for how long while nobody waited."""
    idle = for_nobody = longest = 0
    for _ in range(seconds):
        pool.tick()
        empty = pool.idle()
        idle += empty
        for_nobody = for_nobody + 1 if empty and not pool.waits() else 0
        longest = max(longest, for_nobody)
    return idle / seconds, longest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=300, help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=600, help="of each, simulated (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first; the next has the next (default: %(default)s)"
    )
    parser.add_argument("--trials", type=int, nargs=2, default=(3, 20), help="seconds they take (default: 3 20)")
    parser.add_argument("--giving", action="store_true", help="trials of every other grid give way")
    parser.add_argument("--record", action="store_true", help=f"add the figures to {RECORDS.name}")
    asked = parser.parse_args()
    pools = [drawn(asked.seed + each, *asked.trials, giving=asked.giving) for each in range(asked.pools)]
    empty, for_nobody = zip(*(simulated(pool, asked.seconds) for pool in pools), strict=True)
    waits = [pool.longest_wait() for pool in pools]
    late = [[run for at, run in pool.stopped if at > asked.seconds // 4] for pool in pools]
    figures: dict[str, Any] = {
        **{name: value for name, value in vars(asked).items() if name != "record"},
        "empty": round(mean(empty), 4),
        "pools more than a tenth empty": sum(part > 0.1 for part in empty),
        "longest empty for nobody": max(for_nobody),
        "wait mean": round(mean(waits), 3),
        "wait longest": round(max(waits), 2),
        "trials begun": sum(grid.begun for pool in pools for grid in pool.grids),
    }
    if asked.giving:
        figures |= {
            "gave way after a quarter": sum(map(len, late)),
            "oftenest one trial": max((run.stops for pool in pools for _, run in pool.stopped), default=0),
        }
    print(json.dumps(figures))
    if asked.record:
        with RECORDS.open("a") as records:
            records.write(f"{json.dumps(figures)}\n")
    return int(max(for_nobody) > LENT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
