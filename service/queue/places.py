"""Where trials run, and for whom room is made: what has a share, and fits nowhere for what stands elsewhere, has a node
cleared for it.

`shares` counts as if every trial could be put where it fits best. Ray spreads them, and none is moved once it runs: a
trial of two GPUs waits for ever where each of two nodes has one free, and whoever has the others goes on there. And
where all have their shares there may be room that these left to nobody: it is lent. Pure functions and what they
remember; `workers.worker` acts on what they say.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from service.queue.capacity import Floor, Place, Standing
from service.queue.shares import Amount, Demand, allocate, on_whole_cards

STARTING = "there is room for it: its processes start, or its trials' `error` says what keeps them"
"""Said where nothing lacks."""
SHORT_SECONDS = 3.0
"""For so long an experiment may have fewer trials than its share before anybody asks why: one ends, the next begins."""
SAY_SECONDS = 10.0
"""After so long without a trial it says what it waits for."""
LATE_SECONDS = 20.0
"""After so long without a trial a node is kept for one though there seems to be room: processes start sooner."""
BEGIN_SECONDS = 60.0
"""So long a node is kept that has room, for a trial that does not begin."""
NOT_AGAIN_SECONDS = 300.0
"""After that none is kept for its experiment for so long: it has nothing to begin, or others use the cluster."""
MOST_AT_ONCE = 8
"""For so many more experiments a node is looked for at a time; so many are lent room, or may be on their way."""


@dataclass(frozen=True)
class Decision:
    """Why experiments that have a share run nothing, and which nodes are kept, each for which of them.

    `staying`: of experiments whose trials give way, how many of them may stay on which nodes, where not all may.
    `lent`: how many trials more than its share an experiment may run, where that takes nothing from anybody.
    """

    reasons: Mapping[int, str] = field(default_factory=dict)
    kept: Mapping[str, frozenset[int]] = field(default_factory=dict)
    staying: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    lent: Mapping[int, int] = field(default_factory=dict)

    def shunned_by(self, experiment_id: int) -> list[str]:
        """Nodes on which it must not begin a trial."""
        return sorted(node for node, whose in self.kept.items() if experiment_id not in whose)


class _Way:
    """Who gives way on nodes that are kept, of the experiments whose trials do, but for those under their share.

    First what they have over what may go on, which is `coming` anyhow; others only where they fit elsewhere, as two
    experiments would else stop each other's trials for ever. Those that are `moving` are under theirs for that.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        shares: Mapping[int, int],
        willing: Mapping[int, int],
        moving: Collection[int],
        floor: Floor,
    ) -> None:
        self._floor = floor
        found = [demand for demand in demands if demand.experiment_id in willing]
        short = {one.experiment_id for one in found if one.running < shares.get(one.experiment_id, 0)}
        self._willing = (willing.keys() - short) | short.intersection(moving)
        self._over = {one.experiment_id: max(0, one.running - willing[one.experiment_id]) for one in found}
        self.coming = [
            math.fsum(self._over[demand.experiment_id] * demand.needs[at] for demand in found)
            for at in range(len(Amount._fields))
        ]
        self._leaving = defaultdict[str, list[Standing]](list)

    def of(self, experiment_id: int) -> Collection[int]:
        """Who gives way to an experiment."""
        return self._willing - {experiment_id}

    def make(self, demand: Demand, node: str, kept: Collection[str]) -> bool:
        """Names those on a node whose ends make room for the next trial of an experiment; whether there are any.

        Nodes that are `kept` take none of them.
        """
        leaving, over, moving = self._leaving[node], Counter(self._over), list[Standing]()
        willing = self.of(demand.experiment_id)
        ending = self._floor.in_the_way(_next_needs(demand), node, willing, over, leaving) if willing else []
        for trial in ending:
            if over[trial.experiment_id] > 0:
                over[trial.experiment_id] -= 1
            else:
                moving.append(trial)
        if not self._floor.go_on(moving, {node, *kept}):
            return False
        leaving += ending
        self._over = over
        return bool(ending)

    def staying(self) -> dict[int, dict[str, int]]:
        """Experiment -> how many of it may stay on which nodes."""
        found: dict[int, dict[str, int]] = {}
        for node, leaving in self._leaving.items():
            for number, count in Counter(trial.experiment_id for trial in leaving).items():
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

    Room is lent where every trial that has a share runs, or has room, or a node that is kept for it; whose trial ends
    there has the next one follow it. While one waits for others to end nothing is lent, and what was is given back: it
    would wait for those that begin there, too.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._kept: dict[int, _Kept] = {}
        self._not_before: dict[int, float] = {}
        self._said: dict[int, tuple[str | None, float]] = {}
        self._moving: Collection[int] = ()
        self._spare_since: float | None = None
        self._lent: dict[int, tuple[int, float]] = {}
        """How many trials more than its share an experiment was lent, and when so many ran last."""

    def decide(
        self,
        demands: Sequence[Demand],
        shares: Mapping[int, int],
        places: Sequence[Place],
        standing: Callable[[], Iterable[Standing]],
        now: float,
        willing: Mapping[int, int] | None = None,
        hungry: Sequence[Demand] = (),
    ) -> Decision:
        """Who is kept which node now, and who is lent room.

        `standing` says what runs where; it is asked only where somebody is short, or of those that are `hungry` could
        use what is left. The trials of experiments that are `willing` give way; so many of each go on but for that.
        """
        asked_for = {demand.experiment_id for demand in demands}
        self._not_before = {number: at for number, at in self._not_before.items() if number in asked_for and at > now}
        short = self._short(demands, shares, now)
        numbers = {demand.experiment_id for demand in short}
        self._kept = {number: kept for number, kept in self._kept.items() if number in numbers}
        self._said = {number: said for number, said in self._said.items() if number in numbers}
        moving, self._moving = self._moving, ()
        lent, self._lent = self._lent, {}
        spare = self._has_spare(hungry, shares, places, now)
        lends = spare or lent or any(one.running > shares.get(one.experiment_id, 0) for one in hungry)
        if not (short or lends) or not places:  # while no node is known, nobody can say what it lacks
            return Decision()
        floor = _floor(places, standing(), demands)
        waiting = [
            demand for demand in short if not demand.running and now - self._since[demand.experiment_id] >= SAY_SECONDS
        ]
        lacks = {demand.experiment_id: _lack(demand, floor) for demand in waiting}  # before anything is promised
        way = _Way(demands, shares, willing or {}, moving, floor)
        kept = self._keep(short, floor, way, now)
        reasons = {number: self._reason(number, lack, floor, now) for number, lack in lacks.items()}
        staying = way.staying()
        self._moving = staying.keys()
        told = {number: reason for number, reason in reasons.items() if reason is not None}
        return Decision(told, kept, staying, self._lend(hungry, shares, floor, lent, now, spare=spare))

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
                way.make(demand, kept.node, self._nodes())
                self._look_after(demand, kept, floor, now)
        looked_for = 0
        for demand in short:
            number, needs = demand.experiment_id, _next_needs(demand)
            if looked_for == MOST_AT_ONCE:
                break
            if number in self._kept or number in self._not_before:
                continue
            late = not demand.running and now - self._since[number] >= LATE_SECONDS
            if not (floor.is_apart(needs, way.coming, self._nodes()) or (late and floor.fits(needs))):
                continue
            looked_for += 1
            if (node := self._choose(demand, floor, way)) is not None:
                floor.promise(needs, node, number)
                self._kept[number] = _Kept(node, floor.count(number, node))
        found: dict[str, frozenset[int]] = {}
        for number, kept in self._kept.items():
            found[kept.node] = found.get(kept.node, frozenset()) | {number}
        return found

    def _choose(self, demand: Demand, floor: Floor, way: "_Way") -> str | None:
        """The node where others give way at once, or else the least has to end; None: none will do.

        Of the first such one whose trials have room elsewhere: else those would be the next to wait.
        """
        number, needs = demand.experiment_id, _next_needs(demand)
        if willing := way.of(number):
            for node in floor.soonest(needs, willing, number)[:MOST_AT_ONCE]:
                if way.make(demand, node, self._nodes()):
                    return node
        nodes = floor.soonest(needs, (), number)
        moving = (node for node in nodes[:MOST_AT_ONCE] if floor.can_move(needs, node, number, self._nodes()))
        return next(moving, nodes[0] if nodes else None)

    def _has_spare(
        self, hungry: Sequence[Demand], shares: Mapping[int, int], places: Sequence[Place], now: float
    ) -> bool:
        """Whether all nodes together have had room for a while for what has no share of it."""
        left = [math.fsum(place.room[at] for place in places) for at in range(len(Amount._fields))]
        for demand in hungry:
            left = [has - demand.running * wanted for has, wanted in zip(left, demand.needs, strict=True)]
        if not any(demand.needs.fits(left) for demand in hungry if _more(demand, shares)):
            self._spare_since = None
        elif self._spare_since is None:
            self._spare_since = now
        return self._spare_since is not None and now - self._spare_since >= SHORT_SECONDS

    def _lend(
        self,
        hungry: Sequence[Demand],
        shares: Mapping[int, int],
        floor: Floor,
        before: Mapping[int, tuple[int, float]],
        now: float,
        *,
        spare: bool,
    ) -> dict[int, int]:
        """Who may run how many trials more than its share: those that run already, those that follow one that has just
        ended, and what has room beside all others.

        None where a trial that has a share waits for others to end.
        """
        coming = [one for one in hungry for _ in range(shares.get(one.experiment_id, 0) - one.running)]
        if len(coming) > MOST_AT_ONCE:
            return {}
        kept = self._nodes()
        for demand in coming:
            has_room = floor.put(Standing(demand.experiment_id, None, _next_needs(demand)), kept)
            if not has_room and demand.experiment_id not in self._kept:
                return {}
        found, more = dict[int, int](), list[Demand]()
        for one in hungry:
            share, further = shares.get(one.experiment_id, 0), _more(one, shares)
            over = max(0, min(one.running, one.trials) - share)  # beyond its own limit it is lent nothing
            count, at = before.get(one.experiment_id, (0, now))
            if over >= count or now - at >= SHORT_SECONDS:
                count, at = over, now
            if count:
                self._lent[one.experiment_id] = count, at
            following = min(count - over, further)
            following = sum(floor.put(Standing(one.experiment_id, None, one.needs), kept) for _ in range(following))
            found[one.experiment_id] = over + following
            more.append(replace(one, trials=further - following, running=0))
        if spare:
            for number, count in allocate(more, floor.rests(kept), most_experiments=MOST_AT_ONCE).items():
                found[number] += count
        return {number: count for number, count in found.items() if count}

    def _nodes(self) -> set[str]:
        return {kept.node for kept in self._kept.values()}

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
        lack = lack or STARTING
        self._said[number] = lack, now
        return lack


def _floor(places: Sequence[Place], standing: Iterable[Standing], demands: Sequence[Demand]) -> Floor:
    """The nodes with what stands there, and with what runs by now and has not said where."""
    stands = list(standing)
    counts = Counter(map(itemgetter(0), stands))
    for one in demands:
        stands += [Standing(one.experiment_id, None, one.needs)] * (one.running - counts[one.experiment_id])
    return Floor(places, stands)


def _more(demand: Demand, shares: Mapping[int, int]) -> int:
    """How many trials it could run beyond its share and those that run; one that is to be alone is lent no card."""
    return 0 if demand.alone else demand.trials - max(demand.running, shares.get(demand.experiment_id, 0))


def _lack(demand: Demand, floor: Floor) -> str | None:
    needs = _next_needs(demand)
    return None if floor.fits(needs) else floor.lack(needs)


def _next_needs(demand: Demand) -> Amount:
    """What the trial needs that begins next: those that are to be alone come first."""
    return on_whole_cards(demand.needs) if demand.alone > demand.running_alone else demand.needs
