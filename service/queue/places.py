"""Where trials run, and for whom room is made: what has a share, and fits nowhere for what stands elsewhere, has a node
cleared for it.

`shares` counts as if every trial could be put where it fits best. Ray spreads them, and none is moved once it runs: a
trial of two GPUs waits for ever where each of two nodes has one free, and whoever has the others goes on there. Pure
functions and what they remember; `workers.worker` acts on what they say.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from service.queue.shares import NEEDS, Amount, Demand, on_whole_cards

SHORT_SECONDS = 3.0
"""For so long an experiment may have fewer trials than its share before anybody asks why: one ends, the next begins."""
SAY_SECONDS = 10.0
"""After so long without a trial it says what it waits for."""
BEGIN_SECONDS = 60.0
"""So long a node is kept that has room, for a trial that does not begin."""
NOT_AGAIN_SECONDS = 300.0
"""After that none is kept for its experiment for so long: it has nothing to begin, or others use the cluster."""
MOST_AT_ONCE = 8
"""For so many more experiments a node is looked for at a time."""
_LITTLE = 1e-9


@dataclass(frozen=True)
class Place:
    """A node on which trials may run: its id, what it is called, and all that it has."""

    id: str
    host: str
    room: Amount


@dataclass(frozen=True)
class Standing:
    """A trial that runs. Its node is None until it said where; `cards` are the GPUs that it has of it."""

    experiment_id: int
    node: str | None
    needs: Amount
    cards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Why experiments that have a share run nothing, and which nodes are kept, each for which of them.

    `staying`: of experiments whose trials give way, how many of them may stay on which nodes, where not all may.
    """

    reasons: Mapping[int, str] = field(default_factory=dict)
    kept: Mapping[str, frozenset[int]] = field(default_factory=dict)
    staying: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def shunned_by(self, experiment_id: int) -> list[str]:
        """Nodes on which it must not begin a trial."""
        return sorted(node for node, whose in self.kept.items() if experiment_id not in whose)


class _Node:
    """What one node has left. Of GPUs it counts cards, as a trial that needs one has no use for two halves."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._cpus, _, self._memory = place.room
        self._cards: dict[str, float] = {}
        self._unnamed = 0.0
        self._promises: list[Amount] = []
        self.standing: list[Standing] = []

    def stand(self, trial: Standing) -> None:
        """A trial runs here."""
        self.standing.append(trial)
        cpus, gpus, memory = trial.needs
        self._cpus -= cpus
        self._memory -= memory
        for card in trial.cards:
            self._cards[card] = self._cards.get(card, 0.0) + gpus / len(trial.cards)
        if not trial.cards:
            self._unnamed += gpus

    def of(self, experiments: Collection[int]) -> list[Standing]:
        """The trials of these experiments that run here."""
        return [trial for trial in self.standing if trial.experiment_id in experiments]

    def without(self, gone: Sequence[Standing]) -> "_Node":
        """The same once these have ended."""
        found, left = _Node(self.place), list(self.standing)
        for trial in gone:
            left.remove(trial)
        for trial in left:
            found.stand(trial)
        found._promises = list(self._promises)
        return found

    def promise(self, needs: Amount) -> None:
        """What becomes free is another's."""
        self._promises.append(needs)

    def could_hold(self, needs: Amount, experiment_id: int) -> bool:
        """Whether it has room for another such trial of an experiment where nobody else is, but for what was promised.

        Where one of its own ends there the next one begins, and nothing is won.
        """
        if not needs.fits([has - mine for has, mine in zip(self.place.room, self._promised(), strict=True)]):
            return False
        others = [one for one in self.standing if one.experiment_id != experiment_id or one.needs != needs]
        return len(others) == len(self.standing) or needs.fits(self.without(others).free(needs))

    def free(self, needs: Amount) -> Amount:
        """What it has left for such a trial: of GPUs whole cards, or the largest part of one, but for promises."""
        promised, gpus = self._promised(), 0.0
        if 0 < needs.gpus < 1:
            gpus = max(self._left_of_cards(), default=0.0)
        elif needs.gpus:
            gpus = float(sum(left > 1 - _LITTLE for left in self._left_of_cards()))
        cpus, memory = self._cpus - promised.cpus, self._memory - promised.memory_gib
        return Amount(max(0.0, cpus), gpus, max(0.0, memory))

    def missing(self, needs: Amount) -> tuple[float, float, float]:
        """How much has to end here first: GPUs, CPUs, memory."""
        free = self.free(needs)
        return (
            max(0.0, needs.gpus - free.gpus),
            max(0.0, needs.cpus - free.cpus),
            max(0.0, needs.memory_gib - free.memory_gib),
        )

    def _promised(self) -> Amount:
        return Amount(*map(math.fsum, zip(*self._promises, strict=True))) if self._promises else Amount(0)

    def _left_of_cards(self) -> list[float]:
        """What each card has left, but for promises, of which the largest are counted first.

        Of whole cards the emptiest are promised, as they are the first to be free. A part of one is promised where it
        fits best; where it fits nowhere yet, what is left of the emptiest is kept for it.
        """
        unnamed = math.ceil(self._unnamed - _LITTLE)
        unused = max(0, int(self.place.room.gpus + _LITTLE) - len(self._cards) - unnamed)
        left = [max(0.0, 1 - used) for used in self._cards.values()] + [1.0] * unused
        left += [unnamed - self._unnamed] if unnamed else []
        for gpus in sorted((promise.gpus for promise in self._promises if promise.gpus), reverse=True):
            left.sort(reverse=True)
            if gpus >= 1:
                del left[: math.ceil(gpus - _LITTLE)]
            elif left:
                at = max((at for at, has in enumerate(left) if has >= gpus - _LITTLE), default=0)
                left[at] = max(0.0, left[at] - gpus)
        return left


class Floor:
    """What all nodes have left beside the trials that run."""

    def __init__(self, places: Sequence[Place], standing: Iterable[Standing]) -> None:
        self._nodes = {place.id: _Node(place) for place in places}
        self._counts: Counter[tuple[int, str]] = Counter()
        self._fits: dict[Amount, bool] = {}
        self._pool = [math.fsum(each) for each in zip(*(place.room for place in places), strict=True)] or [0.0] * 3
        homeless = []
        for trial in standing:
            if trial.node in self._nodes:
                self._nodes[trial.node].stand(trial)
                self._take(trial.needs)
                self._counts[trial.experiment_id, trial.node] += 1
            elif trial.node is None:
                homeless.append(trial)
        for trial in homeless:
            fitting = (node for node in self._nodes.values() if trial.needs.fits(node.free(trial.needs)))
            if (node := next(fitting, None)) is not None:
                node.stand(trial)
                self._take(trial.needs)

    def count(self, experiment_id: int, node: str) -> int:
        """How many of its trials run there."""
        return self._counts[experiment_id, node]

    def fits(self, needs: Amount, node: str | None = None) -> bool:
        """Whether such a trial could begin at once, on that node (None: anywhere)."""
        if node is not None:
            return node in self._nodes and needs.fits(self._nodes[node].free(needs))
        if needs not in self._fits:
            self._fits[needs] = any(needs.fits(one.free(needs)) for one in self._nodes.values())
        return self._fits[needs]

    def promise(self, needs: Amount, node: str, experiment_id: int) -> bool:
        """Keeps so much of a node for an experiment; whether it has so much."""
        there = self._nodes.get(node)
        if there is None or not there.could_hold(needs, experiment_id):
            return False
        there.promise(needs)
        self._take(needs)
        self._fits.clear()
        return True

    def is_apart(
        self, needs: Amount, coming: Sequence[float] = (0, 0, 0), shunned: Collection[str] = frozenset()
    ) -> bool:
        """Whether all nodes together have what no single one has, or only those that are `shunned`.

        Then more than time is missing. So much as is `coming` gives way now.
        """
        if self.fits(needs):
            return bool(shunned) and not any(self.fits(needs, node) for node in self._nodes.keys() - set(shunned))
        return needs.fits([left + more for left, more in zip(self._pool, coming, strict=True)])

    def in_the_way(self, needs: Amount, node: str, willing: Collection[int]) -> list[Standing]:
        """The trials of `willing` experiments whose ends alone make room for such a one, no more than it takes."""
        if (there := self._nodes.get(node)) is None or needs.fits(there.free(needs)):
            return []
        ending = there.of(willing)
        if not needs.fits(there.without(ending).free(needs)):
            return []
        for trial in list(ending):
            fewer = list(ending)
            fewer.remove(trial)
            if needs.fits(there.without(fewer).free(needs)):
                ending = fewer
        return ending

    def soonest(self, needs: Amount, willing: Collection[int], experiment_id: int) -> str | None:
        """The node where the least has to end before such a trial of an experiment fits; None: none will do.

        Trials of `willing` experiments, which give way at once, count less than others.
        """

        def missing(node: _Node) -> tuple[tuple[float, float, float], ...]:
            leaving = node.of(willing)
            return node.without(leaving).missing(needs) if leaving else node.missing(needs), node.missing(needs)

        able = [node for node in self._nodes.values() if node.could_hold(needs, experiment_id)]
        return min(able, key=missing).place.id if able else None

    def _take(self, needs: Amount) -> None:
        for at, wanted in enumerate(needs):
            self._pool[at] -= wanted

    def host(self, node: str) -> str:
        """What the node is called."""
        return self._nodes[node].place.host

    def lack(self, needs: Amount) -> str:
        """Why such a trial cannot begin at once."""
        free = [node.free(needs) for node in self._nodes.values()]
        for wanted, unit, there in (
            (needs.gpus, "GPU", [one.gpus for one in free]),
            (needs.cpus, "CPU", [one.cpus for one in free]),
            (needs.memory_gib, "GiB of memory", [one.memory_gib for one in free]),
        ):
            if all(one < wanted - _LITTLE for one in there):
                total = math.fsum(there)
                units = unit if wanted == 1 or unit.startswith("GiB") else f"{unit}s"
                is_free = f"{total:g} {'is' if total == 1 else 'are'} free" if total > _LITTLE else "none is free"
                apart = ", on different nodes" if total >= wanted - _LITTLE else ""
                return f"{NEEDS}{wanted:g} {units} on one node; {is_free}{apart}"
        whole = f"{needs.cpus:g} CPUs, {needs.gpus:g} GPUs and {needs.memory_gib:g} GiB of memory"
        return f"{NEEDS}{whole} on one node; each node has too little of one of them free"


class _Way:
    """Who gives way on nodes that are kept, of the experiments whose trials do: first those over their share.

    `coming` is what these give back anyhow.
    """

    def __init__(
        self, demands: Sequence[Demand], shares: Mapping[int, int], willing: Collection[int], floor: Floor
    ) -> None:
        self.willing, self._floor = frozenset(willing), floor
        found = [demand for demand in demands if demand.experiment_id in self.willing]
        over = {demand: demand.running - shares.get(demand.experiment_id, 0) for demand in found}
        self._over = {demand.experiment_id for demand, more in over.items() if more > 0}
        self.coming = [
            math.fsum(max(0, more) * demand.needs[at] for demand, more in over.items())
            for at in range(len(Amount._fields))
        ]
        self._leaving: Counter[tuple[int, str]] = Counter()

    def make(self, demand: Demand, node: str) -> None:
        """Names those on a node whose ends make room for the next trial of an experiment."""
        mine, needs = {demand.experiment_id}, _next_needs(demand)
        for who in (self._over - mine, self.willing - mine):
            if ending := self._floor.in_the_way(needs, node, who):
                self._leaving.update((trial.experiment_id, node) for trial in ending)
                return

    def staying(self) -> dict[int, dict[str, int]]:
        """Experiment -> how many of it may stay on which nodes."""
        found: dict[int, dict[str, int]] = {}
        for (number, node), count in self._leaving.items():
            found.setdefault(number, {})[node] = max(0, self._floor.count(number, node) - count)
        return found


@dataclass
class _Kept:
    """A node that is kept for an experiment, of which so many trials ran there before; `room_since` it has room."""

    node: str
    before: int
    room_since: float | None = None


class Places:
    """Remembers who waits for its share, and which nodes are being cleared for whom.

    One is cleared where all nodes together have what the next trial of an experiment needs, and no single one has: who
    waits for others to give places back needs none. Who has waited longest chooses first. A node is kept until a trial
    of the experiment has begun there, or its share is gone: meanwhile no other begins a trial there, and those that run
    end one by one; or at once, those of experiments whose trials give way, where that makes room.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._kept: dict[int, _Kept] = {}
        self._not_before: dict[int, float] = {}
        self._said: dict[int, tuple[str | None, float]] = {}

    def decide(
        self,
        demands: Sequence[Demand],
        shares: Mapping[int, int],
        places: Sequence[Place],
        standing: Callable[[], Iterable[Standing]],
        now: float,
        willing: Collection[int] = (),
    ) -> Decision:
        """Who is kept which node now. `standing` says what runs where; it is asked only where somebody is short.

        The trials of experiments that are `willing` give way.
        """
        asked_for = {demand.experiment_id for demand in demands}
        self._not_before = {number: at for number, at in self._not_before.items() if number in asked_for and at > now}
        short = self._short(demands, shares, now)
        numbers = {demand.experiment_id for demand in short}
        self._kept = {number: kept for number, kept in self._kept.items() if number in numbers}
        self._said = {number: said for number, said in self._said.items() if number in numbers}
        if not short:
            return Decision()
        floor = Floor(places, standing())
        waiting = [
            demand for demand in short if not demand.running and now - self._since[demand.experiment_id] >= SAY_SECONDS
        ]
        lacks = {demand.experiment_id: _lack(demand, floor) for demand in waiting}  # before anything is promised
        way = _Way(demands, shares, willing, floor)
        kept = self._keep(short, floor, way, now)
        reasons = {number: self._reason(number, lack, floor, now) for number, lack in lacks.items()}
        return Decision(
            {number: reason for number, reason in reasons.items() if reason is not None}, kept, way.staying()
        )

    def _short(self, demands: Sequence[Demand], shares: Mapping[int, int], now: float) -> list[Demand]:
        """Those that have had fewer trials than their share for a while, the longest first."""
        found = [demand for demand in demands if shares.get(demand.experiment_id, 0) > demand.running]
        since = self._since
        self._since = since = {demand.experiment_id: since.get(demand.experiment_id, now) for demand in found}
        found = [demand for demand in found if now - since[demand.experiment_id] >= SHORT_SECONDS]
        return sorted(found, key=lambda demand: (since[demand.experiment_id], demand.experiment_id))

    def _keep(self, short: Sequence[Demand], floor: Floor, way: "_Way", now: float) -> dict[str, frozenset[int]]:
        for demand in short:
            if (kept := self._kept.get(demand.experiment_id)) is not None:
                way.make(demand, kept.node)
                self._look_after(demand, kept, floor, now)
        looked_for = 0
        for demand in short:
            number, needs = demand.experiment_id, _next_needs(demand)
            if looked_for == MOST_AT_ONCE:
                break
            if number in self._kept or number in self._not_before:
                continue
            if not floor.is_apart(needs, way.coming, {kept.node for kept in self._kept.values()}):
                continue
            looked_for += 1
            node = floor.soonest(needs, way.willing, number)
            if node is not None:
                way.make(demand, node)
                floor.promise(needs, node, number)
                self._kept[number] = _Kept(node, floor.count(number, node))
        found: dict[str, frozenset[int]] = {}
        for number, kept in self._kept.items():
            found[kept.node] = found.get(kept.node, frozenset()) | {number}
        return found

    def _look_after(self, demand: Demand, kept: _Kept, floor: Floor, now: float) -> None:
        """Keeps a node further, or lets it go."""
        number, needs = demand.experiment_id, _next_needs(demand)
        count = floor.count(number, kept.node)
        begun, kept.before = count > kept.before, min(kept.before, count)
        if not floor.fits(needs, kept.node):
            kept.room_since = None
        elif kept.room_since is None:
            kept.room_since = now
        in_vain = kept.room_since is not None and now - kept.room_since > BEGIN_SECONDS
        if in_vain:
            self._not_before[number] = now + NOT_AGAIN_SECONDS
        if begun or in_vain or not floor.promise(needs, kept.node, number):
            del self._kept[number]

    def _reason(self, number: int, lack: str | None, floor: Floor, now: float) -> str | None:
        """What it waits for; said anew no more often than every few seconds, as what is free changes all the time."""
        said, at = self._said.get(number, (None, -math.inf))
        if now - at < SAY_SECONDS:
            return said
        if lack is not None and (kept := self._kept.get(number)) is not None:
            lack += f"; {floor.host(kept.node)} is kept for it while trials end there"
        self._said[number] = lack, now
        return lack


def _lack(demand: Demand, floor: Floor) -> str | None:
    needs = _next_needs(demand)
    return None if floor.fits(needs) else floor.lack(needs)


def _next_needs(demand: Demand) -> Amount:
    """What the trial needs that begins next: those that are to be alone come first."""
    return on_whole_cards(demand.needs) if demand.alone > demand.running_alone else demand.needs
