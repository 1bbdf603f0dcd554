"""What the nodes of a cluster have left beside the trials that run, and what has to end there before another fits.

Pure functions and plain data: `places` asks it, and decides who is kept which node.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from service.queue.shares import NEEDS, Amount

_LITTLE = 1e-9


@dataclass(frozen=True)
class Place:
    """A node on which trials may run: its id, what it is called, and all that it has."""

    id: str
    host: str
    room: Amount


class Standing(NamedTuple):
    """A trial that runs. Its node is None until it said where; `cards` are the GPUs that it has of it."""

    experiment_id: int
    node: str | None
    needs: Amount
    cards: tuple[str, ...] = ()


class _Node:
    """What one node has left. Of GPUs it counts cards, as a trial that needs one has no use for two halves."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._cpus, _, self._memory = place.room
        self._cards: dict[str, float] = {}
        self._unnamed = 0.0
        self._promises: list[Amount] = []
        self.standing: list[Standing] = []

    def stand(self, trials: Sequence[Standing]) -> Amount:
        """Trials run here; all that they take."""
        self.standing += trials
        taken_cpus = taken_gpus = taken_memory = 0.0
        used = self._cards
        for _, _, (cpus, gpus, memory), cards in trials:
            taken_cpus += cpus
            taken_gpus += gpus
            taken_memory += memory
            if not cards:
                self._unnamed += gpus
            elif len(cards) == 1:
                used[cards[0]] = used.get(cards[0], 0.0) + gpus
            else:
                for card in cards:
                    used[card] = used.get(card, 0.0) + gpus / len(cards)
        self._cpus -= taken_cpus
        self._memory -= taken_memory
        return Amount(taken_cpus, taken_gpus, taken_memory)

    def take_in(self, trial: Standing) -> None:
        """A trial comes here whose cards nobody knows: a part of one is where it fits best, as Ray has it."""
        cards: tuple[str, ...] = ()
        if 0 < (gpus := trial.needs.gpus) < 1:
            fitting = [(used, card) for card, used in self._cards.items() if used + gpus <= 1 + _LITTLE]
            cards = (max(fitting)[1] if fitting else f"another after {len(self._cards)}",)
        self.stand([trial._replace(cards=cards)])

    def of(self, experiments: Collection[int]) -> list[Standing]:
        """The trials of these experiments that run here."""
        return [trial for trial in self.standing if trial.experiment_id in experiments]

    def without(self, gone: Sequence[Standing]) -> "_Node":
        """The same once these have ended."""
        found, left = _Node(self.place), list(self.standing)
        for trial in gone:
            left.remove(trial)
        found.stand(left)
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

    def rest(self) -> Amount:
        """What it has left, but for promises: whole cards, and the largest part of one."""
        left = self._left_of_cards()
        whole = sum(card > 1 - _LITTLE for card in left)
        part = max((card for card in left if _LITTLE < card <= 1 - _LITTLE), default=0.0)
        return self.free(Amount(0))._replace(gpus=whole + part)

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
        self._fits: dict[Amount, bool] = {}
        self._pool = [math.fsum(each) for each in zip(*(place.room for place in places), strict=True)] or [0.0] * 3
        self._standing = by_node = defaultdict[str | None, list[Standing]](list)
        for trial in standing:
            by_node[trial.node].append(trial)
        for name in self._nodes.keys() & by_node.keys():
            self._take(self._nodes[name].stand(by_node[name]))
        for trial in by_node[None]:
            self.put(trial)

    def put(self, trial: Standing, shunned: Collection[str] = frozenset()) -> bool:
        """Puts a trial that is to run, or runs nobody knows where, on the first node that has room; whether one has."""
        nodes = (node for name, node in self._nodes.items() if name not in shunned)
        node = next((node for node in nodes if trial.needs.fits(node.free(trial.needs))), None)
        if node is not None:
            node.take_in(trial)
            self._take(trial.needs)
            self._fits.clear()
        return node is not None

    def rests(self, shunned: Collection[str]) -> list[Amount]:
        """What each node has left, but for those that are `shunned`."""
        return [node.rest() for name, node in self._nodes.items() if name not in shunned]

    def count(self, experiment_id: int, node: str) -> int:
        """How many of its trials run there."""
        return sum(trial.experiment_id == experiment_id for trial in self._standing.get(node, ()))

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

    def in_the_way(
        self,
        needs: Amount,
        node: str,
        willing: Collection[int],
        over: Mapping[int, int] | None = None,
        leaving: Sequence[Standing] = (),
    ) -> list[Standing]:
        """The trials of `willing` experiments whose ends alone make room for such a one, no more than it takes.

        Some are `leaving` already, for others. Those come first of which experiments have so many `over` their share.
        """
        there = self._nodes.get(node)
        if there is None or needs.fits((there := there.without(leaving)).free(needs)):
            return []
        more, staying, ending = Counter(over), list[Standing](), list[Standing]()
        for trial in reversed(there.of(willing)):
            (ending if more[trial.experiment_id] > 0 else staying).append(trial)
            more[trial.experiment_id] -= 1
        ending = [*reversed(staying), *reversed(ending)]
        if not needs.fits(there.without(ending).free(needs)):
            return []
        for trial in list(ending):
            fewer = list(ending)
            fewer.remove(trial)
            if needs.fits(there.without(fewer).free(needs)):
                ending = fewer
        return ending

    def go_on(self, trials: Sequence[Standing], shunned: Collection[str]) -> bool:
        """Whether all of these, which leave their node, fit on others, but for those that are `shunned`."""
        nodes = [node.without([]) for name, node in self._nodes.items() if name not in shunned] if trials else []
        for trial in trials:
            fitting = (node for node in nodes if trial.needs.fits(node.free(trial.needs)))
            if (node := next(fitting, None)) is None:
                return False
            node.take_in(trial)
        return True

    def can_move(self, needs: Amount, node: str, experiment_id: int, shunned: Collection[str]) -> bool:
        """Whether what has to end on a node for such a trial of an experiment fits on others that are not `shunned`."""
        others = {trial.experiment_id for trial in self._nodes[node].standing} - {experiment_id}
        return self.go_on(self.in_the_way(needs, node, others), {node, *shunned})

    def soonest(self, needs: Amount, willing: Collection[int], experiment_id: int) -> list[str]:
        """The nodes that can hold such a trial of an experiment, those first where the least has to end before it fits.

        Trials of `willing` experiments, which give way at once, count less than others.
        """

        def missing(node: _Node) -> tuple[tuple[float, float, float], ...]:
            leaving = node.of(willing)
            return node.without(leaving).missing(needs) if leaving else node.missing(needs), node.missing(needs)

        able = [node for node in self._nodes.values() if node.could_hold(needs, experiment_id)]
        return [node.place.id for node in sorted(able, key=missing)]

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
