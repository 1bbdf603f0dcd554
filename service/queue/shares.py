"""Who may run how many trials now: fair shares of a cluster among projects, their people and their experiments.

Pure functions of what is asked for and what there is; `workers.worker` acts on what they say.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, repeat
from typing import NamedTuple

NEEDS = "needs "
"""How a shortage begins."""
NO_NODE = "no node is ready for trials"
"""Said where no trial can be too large: the cluster starts, or none of its nodes fits its head."""
AT_A_TIME = " at a time here; TTSV_MAX_EXPERIMENTS"
"""How it is said that as many experiments run as may."""
HALF_LIFE_SECONDS = 6 * 3600.0
"""After so long what somebody used counts half."""


class Amount(NamedTuple):
    """What a trial reserves, or what a node has."""

    cpus: float
    gpus: float = 0.0
    memory_gib: float = 0.0

    def fits(self, room: Sequence[float]) -> bool:
        """Whether so much is left; Ray counts in ten-thousandths."""
        cpus, gpus, memory = room
        return self.cpus <= cpus + 1e-9 and self.gpus <= gpus + 1e-9 and self.memory_gib <= memory + 1e-9


@dataclass(frozen=True)
class Demand:
    """An experiment that could run trials now.

    `trials` is how many at most (those that run and those that wait, within its own limit), `running` how many do.
    Without a project and an owner nobody knows whose it is: such experiments share with each other. `weight` is the
    project's, `person_weight` the owner's in it. `alone` of the trials, and `running_alone` of those that run, have a
    whole GPU where the others have a fraction of one: they come first.
    """

    experiment_id: int
    trials: int
    needs: Amount
    priority: int = 0
    project_id: int | None = None
    owner: str | None = None
    weight: float = 1.0
    person_weight: float = 1.0
    running: int = 0
    alone: int = 0
    running_alone: int = 0

    @property
    def group(self) -> "Group":
        """Whose usage its trials add to."""
        return group_of(self.project_id, self.owner, self.experiment_id)


def on_whole_cards(needs: Amount) -> Amount:
    """The same with a whole GPU, where it is a fraction of one."""
    return needs._replace(gpus=1.0) if 0 < needs.gpus < 1 else needs


_ALL = 0
"""In place of an experiment's number, all of nobody known."""


class Group(NamedTuple):
    """A project (with the rest None), a person of it, or an experiment of nobody known."""

    project_id: int | None
    owner: str | None = None
    experiment_id: int | None = None

    @property
    def person(self) -> "Group":
        """Whoever takes turns with the other people of the project: nobody known is one of them."""
        return self if self.owner is not None else self._replace(experiment_id=_ALL)


def group_of(project_id: int | None, owner: str | None, experiment_id: int) -> Group:
    """Whose usage the trials of an experiment add to: its owner's, or where nobody knows whose it is, its own."""
    return Group(project_id, owner, None if owner is not None else experiment_id)


class Spent(NamedTuple):
    """So many seconds of trials that reserved so much, which ended so many seconds `ago`."""

    group: Group
    needs: Amount
    seconds: float
    ago: float


class Usage:
    """What groups used lately, in shares of the whole cluster times seconds; earlier use fades."""

    def __init__(self) -> None:
        self._used: dict[Group, float] = {}

    def add(self, demands: Sequence[Demand], nodes: Sequence[Amount], seconds: float) -> None:
        """Counts the trials that ran for so long."""
        faded = _faded(seconds)
        self._used = {group: used * faded for group, used in self._used.items() if used > 1e-6}
        total = _total(nodes)
        for demand in demands:
            if demand.running:
                shared = (demand.running - demand.running_alone) * _dominant(demand.needs, total)
                alone = demand.running_alone * _dominant(on_whole_cards(demand.needs), total)
                self._count(demand.group, (shared + alone) * seconds)

    def recall(self, spent: Iterable[Spent], nodes: Sequence[Amount]) -> None:
        """Counts what ended before anybody here counted."""
        total = _total(nodes)
        for one in spent:
            self._count(one.group, _dominant(one.needs, total) * one.seconds * _faded(one.ago))

    def of(self, group: Group) -> float:
        """What the group used lately."""
        return self._used.get(group, 0.0)

    def _count(self, group: Group, used: float) -> None:
        for whose in {group, group.person, Group(group.project_id)}:
            self._used[whose] = self._used.get(whose, 0.0) + used


def _faded(seconds: float) -> float:
    """What is left, so much later, of what was used once."""
    return float(0.5 ** (seconds / HALF_LIFE_SECONDS))


def allocate(
    demands: Sequence[Demand],
    nodes: Sequence[Amount],
    *,
    most_experiments: int,
    usage: Usage | None = None,
    firm: bool = False,
    first: int | None = None,
) -> dict[int, int]:
    """Experiment -> how many of its trials may run now; who gets none is absent.

    The nodes are filled trial by trial. The next one goes to the project whose share is smallest for its weight, a
    share being that of the resource of which the project has most (dominant resource fairness, Ghodsi et al., NSDI
    2011); within a project likewise to a person; of that person's experiments to the one of highest priority, then the
    oldest. Equal shares are told apart by `usage`, so that turns are taken where there are fewer slots than people;
    without it who runs now goes first, so that nothing changes hands without a reason. So are, where weights differ,
    the trials that are due in part: of three to one on two slots the second is. A trial fits where one node has all
    that it needs. No more than `most_experiments` get anything. `firm`: the trials alone that are due to everybody as a
    whole, whose turn it may be. Before all others one trial is offered to the experiment that is `first`.
    """
    room, everybody = _Room(nodes, most_experiments), _Party(0)
    cost = cache(partial(_dominant, total=_total(nodes)))
    wanting = sorted((demand for demand in demands if demand.trials > 0), key=lambda demand: demand.experiment_id)
    leaves = [everybody.admit(demand, cost, usage) for demand in wanting]
    for demand in wanting if first is not None else ():
        if demand.experiment_id == first:
            everybody.offer_to((demand.project_id, demand.owner, first), room)
    everybody.line_up(1.0)
    if firm:
        everybody.confine(1.0)
    top: _Party | _Leaf = everybody
    while isinstance(top, _Party) and len(top.queue) == 1 and not firm:
        top = top.queue[0][1]  # where there is nobody else it is always its turn
    while not top.over:
        top.offer(room)
    return {leaf.demand.experiment_id: leaf.got for leaf in leaves if leaf.got}


def shortage(needs: Amount, nodes: Sequence[Amount]) -> str | None:
    """Why no node could ever run such a trial, or None."""
    if not nodes:
        return NO_NODE
    if any(needs.fits(node) for node in nodes):
        return None
    for wanted, name, has in (
        (needs.gpus, "GPUs", [node.gpus for node in nodes]),
        (needs.cpus, "CPUs", [node.cpus for node in nodes]),
        (needs.memory_gib, "GiB of memory", [node.memory_gib for node in nodes]),
    ):
        if wanted > (most := max(has)):
            unit = {"GPUs": "GPU", "CPUs": "CPU"}.get(name, name) if wanted == 1 else name
            return f"{NEEDS}{wanted:g} {unit} on one node; the largest has {most:g}"
    whole = f"{needs.cpus:g} CPUs, {needs.gpus:g} GPUs and {needs.memory_gib:g} GiB of memory"
    return f"{NEEDS}{whole} on one node; each node has too little of one of them"


class _Room:
    """What the nodes have left, and for how many experiments more.

    Of GPUs it counts cards, as a trial that needs a part of one has no use for two smaller parts. What once did not
    fit on a node never will, as nodes only fill: so each shape goes on where it last found room.
    """

    def __init__(self, nodes: Sequence[Amount], experiments: int) -> None:
        # The smallest first, so that whoever comes first leaves the large ones to those that need them.
        nodes = sorted(nodes, key=lambda node: (node.gpus, node.cpus, node.memory_gib))
        self._left = [[node.cpus, math.floor(node.gpus + 1e-9), node.memory_gib] for node in nodes]
        rests = [node.gpus - left[1] for node, left in zip(nodes, self._left, strict=True)]
        self._parts = [[rest] if rest > 1e-9 else [] for rest in rests]
        """What cards have left that are in use in part."""
        self._next: dict[Amount, int] = {}
        self._experiments = experiments

    def take(self, needs: Amount, first_of_all: bool) -> bool:
        """Takes it from the first node that has it; whether one had. `first_of_all`: the experiment has nothing yet."""
        if first_of_all and not self._experiments:
            return False
        cpus, gpus, memory = needs
        first, whole = self._next.get(needs, 0), not 0 < gpus < 1
        for at in range(first, len(self._left)):
            left = self._left[at]
            # As `Amount.fits`, without a call for each of thousands.
            if cpus <= left[0] + 1e-9 and memory <= left[2] + 1e-9:
                if whole and gpus <= left[1] + 1e-9:
                    left[1] -= gpus
                elif whole or not self._take_part(at, gpus):
                    continue
                left[0] -= cpus
                left[2] -= memory
                if at != first:
                    self._next[needs] = at
                self._experiments -= first_of_all
                return True
        self._next[needs] = len(self._left)
        return False

    def _take_part(self, at: int, gpus: float) -> bool:
        """Takes so much of a node's card where it fits best, a whole one last, as Ray does; whether one had it."""
        parts, left, best = self._parts[at], self._left[at], 0.0
        for part in parts:
            if gpus <= part + 1e-9 and not 0 < best <= part:
                best = part
        if best:
            parts.remove(best)
        elif left[1] >= 1:
            left[1] -= 1
            best = 1.0
        else:
            return False
        if (rest := best - gpus) > 1e-9:
            parts.append(rest)
        return True


class _Leaf:
    """An experiment on its turn."""

    __slots__ = ("_alone", "_cost", "_cost_alone", "_known", "_share", "_used", "demand", "got", "key", "over")

    def __init__(self, demand: Demand, cost: Callable[[Amount], float], used: float | None) -> None:
        self.demand, self._used, self._known = demand, used, demand.owner is not None
        self._alone = on_whole_cards(demand.needs)
        self._cost = self._cost_alone = cost(demand.needs)
        if self._alone is not demand.needs:
            self._cost_alone = cost(self._alone)
        self._share, self.got = 0.0, 0
        self.over = False
        self.key = self._place()
        """Its place in a queue: by priority, then by age; of nobody known, by share between those."""

    def next_cost(self) -> float:
        """The share that its next trial would take."""
        return self._cost_alone if self.got < self.demand.alone else self._cost

    def most(self) -> float:
        """The share that all its trials would take."""
        return self._taken(self.demand.trials, min(self.demand.alone, self.demand.trials))

    def running(self) -> float:
        """The share that those take that run."""
        return self._taken(self.demand.running, self.demand.running_alone)

    def _taken(self, trials: int, alone: int) -> float:
        return alone * self._cost_alone + (trials - alone) * self._cost

    def offer(self, room: _Room) -> float:
        """Takes one trial if it can; the share that it took."""
        demand, got = self.demand, self.got
        if not room.take(self._alone if got < demand.alone else demand.needs, not got):
            self.over = True
            return 0.0
        cost = self.next_cost()
        self._share += cost
        self.got = got = got + 1
        self.over = got >= demand.trials
        if not self._known:
            self.key = self._place()
        return cost

    def _place(self) -> tuple[float, ...]:
        demand = self.demand
        if self._known:
            return -demand.priority, demand.experiment_id
        tie = float(self.got >= demand.running) if self._used is None else self._used
        return -demand.priority, self._share, tie, demand.experiment_id


class _Party:
    """Everybody, a project or a person: whoever of its members has the smallest key is next."""

    __slots__ = (
        *("_confined", "_due", "_members", "_oldest", "_running", "_share", "_turn", "_used", "_weight", "_weights"),
        *("key", "over", "queue"),
    )

    def __init__(self, oldest: int, weight: float = 1.0, used: float | None = None) -> None:
        self._oldest, self._weight, self._used = oldest, weight, used
        self._members: dict[object, _Party | _Leaf] = {}
        self._weights: set[float] = set()
        """Those of its members that are parties."""
        self._share, self._running = 0.0, 0.0
        self._due, self._turn = math.inf, False
        """The share that is due to it where weights differ, and whether it is its turn to go beyond it by a part of a
        trial."""
        self.queue: list[tuple[tuple[float, ...], _Party | _Leaf]] = []
        self._confined = False
        self.over = False
        """Whether nobody of it takes any more."""
        self.key: tuple[float, ...] = ()
        """Its place in a queue; what age tells apart is never equal."""

    def admit(self, demand: Demand, cost: Callable[[Amount], float], usage: Usage | None) -> _Leaf:
        """Adds an experiment to its project and person; older ones come first. `cost`: the share that a trial takes."""
        number = demand.experiment_id

        def used(group: Group) -> float | None:
            return None if usage is None else usage.of(group)

        project = self._member(demand.project_id, lambda: _Party(number, demand.weight, used(Group(demand.project_id))))
        person = project._member(demand.owner, lambda: _Party(number, demand.person_weight, used(demand.group.person)))
        leaf = person._members[number] = _Leaf(demand, cost, None if demand.owner is not None else used(demand.group))
        for party in (self, project, person):
            party._running += leaf.running()
        return leaf

    def _member(self, name: object, make: "Callable[[], _Party]") -> "_Party":
        if name not in self._members:
            self._members[name] = made = make()
            self._weights.add(made._weight)
        member = self._members[name]
        assert isinstance(member, _Party)
        return member

    def line_up(self, due: float) -> None:
        """Begins, with so much of the cluster due to all of it."""
        parties = [member for member in self._members.values() if isinstance(member, _Party)]
        within = any(len(party._weights) > 1 for party in parties)
        for party, share in _dues(parties, due) if within else zip(parties, repeat(due)):
            party.line_up(share)
        if len(self._weights) > 1:
            _entitle(parties, due)
        self._queue_up()
        self.over, self.key = not self.queue, self._place()

    def _queue_up(self) -> None:
        self.queue = [(member.key, member) for member in self._members.values() if not member.over]
        heapq.heapify(self.queue)

    def confine(self, due: float) -> None:
        """Has nobody go beyond what is due to it of this share."""
        parties = [member for member in self._members.values() if isinstance(member, _Party)]
        if not parties:
            return
        self._confined = True
        _entitle(parties, due)
        for party in parties:
            party._turn = False
            party.confine(party._due)
            party.key = party._place()
        self._queue_up()

    def offer(self, room: _Room) -> float:
        """Offers one trial to the member whose turn it is; the share that it took."""
        queue = self.queue
        before, member = queue[0]
        if self._confined and before[0] > 0:  # so are all others
            self.over = True
            return 0.0
        taken = member.offer(room)
        if member.over:
            heapq.heappop(queue)
            self.over = not queue
        elif (len(queue) > 1 or self._confined) and (now := member.key) is not before:
            heapq.heapreplace(queue, (now, member))
        if taken:
            self._share += taken
            self.key = self._place()
        return taken

    def offer_to(self, names: Sequence[object], room: _Room) -> float:
        """Offers one trial to an experiment, by the names of its parties and its own, before all `line_up`; the share
        that it took."""
        member = self._members[names[0]]
        taken = member.offer(room) if isinstance(member, _Leaf) else member.offer_to(names[1:], room)
        self._share += taken
        return taken

    def next_cost(self) -> float:
        """The share that its next trial would take."""
        return self.queue[0][1].next_cost() if self.queue else 0.0

    def most(self) -> float:
        """The share that all trials that its members ask for would take."""
        return math.fsum(member.most() for member in self._members.values())

    def _place(self) -> tuple[float, ...]:
        tie = float(self._share >= self._running - 1e-9) if self._used is None else self._used
        share, used = self._share / self._weight, tie / self._weight
        if self._due == math.inf or self._share + self.next_cost() <= self._due + 1e-9:
            return 0, share, used, self._oldest
        if self._used is None and self._share >= self._due - 1e-9:
            return 2, share, used, self._oldest
        if self._turn:
            return 0, share, used, self._oldest
        return 1, used, share, self._oldest


def _dues(parties: Sequence[_Party], left: float) -> Iterator[tuple[_Party, float]]:
    """What is due to each of what is `left`: as much for its weight, or all that it asks for."""
    asking = sorted(((one.most(), one) for one in parties), key=lambda row: row[0] / row[1]._weight)
    # Added up from the last one on: of a small weight nothing would be left once a large one was taken off their sum.
    weights = list(accumulate(party._weight for _, party in reversed(asking)))
    for (most, party), weight in zip(asking, reversed(weights), strict=True):
        due = min(most, left * party._weight / weight)
        left -= due
        yield party, due


def _entitle(parties: Sequence[_Party], left: float) -> None:
    """Tells parties what is due to each of what is `left`: as much for its weight, or all that it asks for.

    Trials that are due to them in part go to those that used least for their weight or, where nothing is known of that,
    to those that run them. One that is larger than all these parts takes from what is due to others: it is its turn
    while it used less than all did in the mean.
    """
    mean = math.fsum(party._used or 0.0 for party in parties) / math.fsum(party._weight for party in parties)
    parts, split = 0.0, list[tuple[float, int, float, _Party]]()
    for party, due in _dues(parties, left):
        party._due, cost = due, party.next_cost()
        whole = math.floor(party._due / cost + 1e-9) if cost > 0 else 0
        if (part := party._due - whole * cost) > 1e-9:
            used = party._used if party._used is not None else -float(party._running > whole * cost + 1e-9)
            parts += part
            split.append((used / party._weight, party._oldest, cost, party))
    left = parts
    for used, _, cost, party in sorted(split, key=lambda row: row[:2]):
        party._turn = cost <= left + 1e-9 or (cost > parts + 1e-9 and used < mean)
        left -= cost * party._turn
    for party in parties:
        party.key = party._place()


def _total(nodes: Sequence[Amount]) -> Amount:
    return Amount(*(math.fsum(each) for each in zip(*nodes, strict=True))) if nodes else Amount(0)


def _dominant(needs: Amount, total: Amount) -> float:
    """The share of the whole cluster that a trial takes of the resource of which it takes most."""
    return max(wanted / there for wanted, there in zip(needs, total, strict=True) if there > 0) if any(total) else 0.0
