"""Who may run how much on the worker's cluster: shares computed anew, told to drivers, and claimed."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from sqlalchemy.orm import Session

from service.database import now
from service.database.engine import Database
from service.database.experiments import ProcessIdentity
from service.experiments.transitions import BEHIND, MOST_OF_A_PERSON
from service.queue import leases, nodes
from service.queue.capacity import Floor, Place, Standing
from service.queue.cluster import Node
from service.queue.contenders import Contender, Specs, contenders, give_up_unfit, say_why, used_lately
from service.queue.nodes import Stand
from service.queue.places import Decision, Places
from service.queue.rests import ALL_REST
from service.queue.shares import AT_A_TIME, NEEDS, Amount, Demand, Usage, allocate, on_whole_cards, shortage
from service.queue.trials import ALONE
from service.queue.turns import Turns
from service.settings import Settings
from workers.worker.drivers import Drivers

LOOK_FAR_SECONDS = 5.0
"""So often those far behind in a person's queue are looked at as well: all before them may need what is taken."""
MOST_FAR = 1_000
"""So many are then, of all people together."""
PLACES_SECONDS = 1.0
"""For so long it is not asked again where trials run, while as many do."""
SHARING_SECONDS = 60.0
"""For so long a worker that was seen to share this cluster counts as one."""
IDLE_SECONDS = 60.0
"""So long a driver that may run nothing, and runs nothing, may take to give its experiment back by itself."""
MOST_KNOWN = 10_000
"""So many places of trials are remembered: with each trial come new ones."""
_ELSEWHERE = "elsewhere"
"""Where a trial runs that is on none of our nodes."""
_NOT_HERE = Standing(0, _ELSEWHERE, Amount(0))
"""What stands in another worker's cluster."""


class Scheduler:
    """Divides one cluster among the experiments that could use it. `worker` claims them, as the process that it is.

    No more than `most` of them have a driver at a time.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        drivers: Drivers,
        worker: str,
        process: ProcessIdentity | None,
        *,
        most: int,
    ) -> None:
        self._settings, self._database, self._drivers = settings, database, drivers
        self._worker, self._process, self._most = worker, process, most
        self._specs, self._usage, self._recalled = Specs(), Usage(), False
        self._shared_at = time.monotonic()
        self._crowds, self._look_far_at = 0, 0.0
        """How many people have more experiments that wait than are looked at each time."""
        self._places, self._turns = Places(), Turns()
        self._stands, self._running, self._stands_after = list[Stand](), Counter[int](), 0.0
        """What ran where when it was read last, and how much of each experiment."""
        self._known: dict[Stand, Standing] = {}
        """What stands on which node, by what its row says: so while nodes and needs stay as they are."""
        self._known_of: object = None
        self._sharing: dict[str, float] = {}
        self._idle_since: dict[int, float] = {}
        self._leaving: list[int] = []
        """Whose drivers begin nothing more, as others are due one: until they are gone, whoever is due by then."""

    def share(self, seen: Sequence[Node]) -> bool:
        """Divides the nodes anew: drivers are told their shares, and experiments claimed that have one now.

        Nodes that are there and do not fit are shunned, and those that are kept for others.

        Whether there is anything to do, now or soon: what fits no node is nothing.
        """
        places = [
            Place(node.id, node.host, Amount(node.cpus, node.gpus, node.memory_gib)) for node in seen if node.fits
        ]
        unfit = sorted(node.id for node in seen if node.alive and not node.fits)
        room = [place.room for place in places]
        drivers = {driver.lease.experiment_id: driver for driver in self._drivers}
        with self._database.look() as session:  # what is decided is for the next moment in any case
            found = contenders(session, drivers.keys(), self._specs, most=self._how_far())
            others = nodes.others(session, self._worker, [node.id for node in seen if node.id])
            sharing = self._sharing_now(others.sharing)
            left = self._left(session, places, seen, sharing) if sharing else room
            if room and not self._recalled:
                self._usage.recall(used_lately(session, self._specs), room)
                self._recalled = True
        far = self._far_behind(found)
        rooms = {**others.rooms, **dict.fromkeys(sharing, room)}
        elapsed, self._shared_at = time.monotonic() - self._shared_at, time.monotonic()
        claimed = [one.demand for one in found if one.claimed]
        self._usage.add(claimed, room, elapsed)
        waits = {one.demand.experiment_id: self._hindrance(one, room) for one in found}
        away = self._on_unfit(claimed, seen, unfit) if unfit else {}
        here = [replace(one, demand=_without(one.demand, away)) for one in found] if away else found
        demands = [one.demand for one in here if waits[one.demand.experiment_id] is None]
        first = self._turns.first(demands, self._usage, time.monotonic())
        share_out = partial(allocate, nodes=left, usage=self._usage, first=first)
        due = share_out(demands, most_experiments=self._most)
        limited = len(due) == self._most < len(demands)
        everybodys = share_out(demands, most_experiments=len(demands)) if limited else due
        able = self._able(demands, due, drivers, share_out)
        late = due.keys() - {demand.experiment_id for demand in able}
        shares = share_out(able, most_experiments=self._most) if late else dict(due)
        keeping: dict[int, int] = {}
        if any(one.preempt for one in found):
            holding, firm = (allocate(demands, left, most_experiments=self._most, firm=firm) for firm in (False, True))
            keeping = going_on(here, {**due, **shares}, holding, firm)
        ours = [one.demand for one in here if one.claimed]
        known = [place for place in places if place.id]
        standing = partial(self._standing, claimed, seen, unfit)
        decision = self._places.decide(ours, shares, known, standing, time.monotonic(), keeping, able)
        for number, more in decision.lent.items():
            shares[number] = shares.get(number, 0) + more
            keeping |= {number: max(keeping[number], shares[number])} if number in keeping else {}
        self._make_room(found, shares)
        self._end_idle(found, shares)
        for one, fitting in zip(found, here, strict=True):
            number = one.demand.experiment_id
            slots = shares.get(number, 0)
            shunned = [*unfit, *decision.shunned_by(number)]
            if (driver := drivers.get(number)) is not None:
                besides = one.demand.running - fitting.demand.running
                most = keeping[number] + besides if number in keeping else sys.maxsize
                all_slots, staying = min(slots + besides, one.demand.trials), decision.staying.get(number)
                driver.tell(all_slots, most, shunned, staying, besides=besides, unfit=unfit)
            elif slots and len(self._drivers) < self._most:
                self._claim(number, slots, shunned)
            elif not one.demand.trials and not one.claimed and one.rests_until is None:
                self._database.write(partial(self._complete, experiment_id=number))
            else:
                slots = 0
            if waits[number] is None and one.demand.trials and not slots and not one.demand.running:
                fits = number in everybodys or number in shares
                waits[number] = _too_many(self._most) if fits else BEHIND if number in far else _behind(shares)
        waits |= decision.reasons
        self._say_why(found, self._said(found, waits, room, rooms), decision)
        soon = (one.rests_until or self._drivers.trouble(one.demand.experiment_id) for one in found)
        return bool(shares) or bool(drivers) or any(soon)

    def _able(
        self,
        demands: Sequence[Demand],
        due: Mapping[int, int],
        drivers: Collection[int],
        share_out: Callable[..., Mapping[int, int]],
    ) -> Sequence[Demand]:
        """Those that may have trials now: all, while a driver can be started for whoever has none.

        Else what is due to those without one goes to those that run. For each of them one that nothing is due to begins
        nothing more and leaves, who has run longest first; at most half of them at a time, as drivers take long to
        start, and no place is to stay empty meanwhile.
        """
        free = max(0, self._most - len(self._drivers))
        coming = [one for one in demands if one.experiment_id in due and one.experiment_id not in drivers]
        late = max(0, len(coming) - free)
        if free and not late:
            self._leaving = []
            return demands
        leaving = [number for number in self._leaving if number in drivers]
        leaving += [number for number in drivers if number not in due and number not in leaving]
        self._leaving = leaving[: min(late, max(1, self._most // 2))]
        able = {*drivers, *share_out(coming, most_experiments=free)} - {*self._leaving}
        return [demand for demand in demands if demand.experiment_id in able]

    def _sharing_now(self, seen: Collection[str]) -> Collection[str]:
        """The workers that have this cluster too, as with one `RAY_ADDRESS`; each is seen as such now and then."""
        now = time.monotonic()
        self._sharing |= dict.fromkeys(seen, now)
        self._sharing = {name: at for name, at in self._sharing.items() if now - at < SHARING_SECONDS}
        return self._sharing.keys()

    def _left(
        self, session: Session, places: Sequence[Place], seen: Sequence[Node], sharing: Collection[str]
    ) -> list[Amount]:
        """What the nodes have beside the trials of the workers that share them."""
        theirs = [stand for stand in self._newest_stands(session) if stand[2] in sharing]
        needs = nodes.needs_of(session, {number for number, *_ in theirs})
        where = nodes.nodes_of((stand[1:3] for stand in theirs), [one for one in seen if one.alive])
        return Floor(places, map(partial(_stands, needs), theirs, where)).rests(())

    def _on_unfit(
        self, ours: Sequence[Demand], seen: Sequence[Node], unfit: Sequence[str]
    ) -> Mapping[int, tuple[int, int]]:
        """Experiment -> how many of its trials, and of these how many alone, run on nodes that fit no more.

        They go on there, and are in nobody's way.
        """
        demands, found = {demand.experiment_id: demand for demand in ours}, dict[int, tuple[int, int]]()
        for number, node, needs, _ in self._standing(ours, seen):
            if node in unfit and number in demands:
                trials, alone = found.get(number, (0, 0))
                found[number] = trials + 1, alone + (needs != demands[number].needs)
        return found

    def _standing(self, ours: Sequence[Demand], seen: Sequence[Node], unfit: Sequence[str] = ()) -> list[Standing]:
        """What runs where in this cluster, but for nodes that are `unfit`: trials of ours, and of the workers that
        share it."""
        there = [node for node in seen if node.alive]
        needs = {demand.experiment_id: demand.needs for demand in ours}
        context = [(node.id, node.host) for node in there], needs.copy(), set(self._sharing)
        if self._known_of != context or len(self._known) > MOST_KNOWN:
            self._known, self._known_of = {}, context
        known = self._known
        with self._database.look() as session:
            stands = self._newest_stands(session, ours)
            found = list(map(known.get, stands))  # a thousand, of which nearly all are known
            new = [stand for stand, each in zip(stands, found, strict=True) if each is None]
            here = [stand for stand in new if stand[0] in needs or stand[2] in self._sharing]
            needs |= nodes.needs_of(session, {number for number, *_ in here} - needs.keys())
        known |= dict.fromkeys(new, _NOT_HERE)
        for stand, node in zip(here, nodes.nodes_of((stand[1:3] for stand in here), there), strict=True):
            known[stand] = _stands(needs, stand, node)
        standing = [each for each in map(known.__getitem__, stands) if each is not _NOT_HERE]
        return [each for each in standing if each.node not in unfit] if unfit else standing

    def _newest_stands(self, session: Session, ours: Sequence[Demand] = ()) -> list[Stand]:
        """What runs where; asked again also where of `ours` more or fewer run by now: who ended has left room."""
        counts = self._running
        changed = any(counts[demand.experiment_id] != demand.running for demand in ours)
        if changed or time.monotonic() >= self._stands_after:
            self._stands = nodes.stands(session)
            self._running = Counter(map(itemgetter(0), self._stands))
            self._stands_after = time.monotonic() + PLACES_SECONDS
        return self._stands

    def _hindrance(self, one: Contender, room: Sequence[Amount]) -> str | None:
        """Why the experiment could run nothing now even if it were alone."""
        if (reason := _misfit(one, room)) is not None:
            return reason
        if one.rests_until is not None and not one.demand.trials:
            return f"{ALL_REST} until {one.rests_until:%H:%M:%S} UTC, as its trials' `error` says"
        return None if one.claimed else self._drivers.trouble(one.demand.experiment_id)

    def _how_far(self) -> int:
        """How many of a person's queued experiments to look at now."""
        if not self._crowds or time.monotonic() < self._look_far_at:
            return MOST_OF_A_PERSON
        self._look_far_at = time.monotonic() + LOOK_FAR_SECONDS
        return max(MOST_OF_A_PERSON, MOST_FAR // self._crowds)

    def _far_behind(self, found: Sequence[Contender]) -> Collection[int]:
        """Those that are looked at now and then only, as so many come before them in a person's queue."""
        queued = sorted(
            (one.demand for one in found if not one.claimed), key=lambda one: (-one.priority, one.experiment_id)
        )
        before, far = Counter[tuple[int | None, str | None]](), set[int]()
        for demand in queued:
            person = demand.project_id, demand.owner
            if before[person] >= MOST_OF_A_PERSON:
                far.add(demand.experiment_id)
            before[person] += 1
        self._crowds = sum(count >= MOST_OF_A_PERSON for count in before.values())
        return far

    def _said(
        self,
        found: Sequence[Contender],
        waits: Mapping[int, str | None],
        room: Sequence[Amount],
        others: Mapping[str, Sequence[Amount]],
    ) -> Mapping[int, str | None]:
        """Of the reasons for which experiments wait here those that are ours to tell.

        Of one that no cluster has room for every worker tells the same. Else it is for the workers that have room, and
        where there are several for the first by name.
        """
        everywhere = [*room, *(node for nodes in others.values() for node in nodes)]
        said = dict(waits)
        for one in found:
            number = one.demand.experiment_id
            if one.claimed or not others:
                continue
            fits = {name for name, nodes in others.items() if _misfit(one, nodes) is None}
            if _misfit(one, room) is None:
                fits.add(self._worker)
            if not fits:
                said[number] = _misfit(one, everywhere)
            elif min(fits) != self._worker:
                del said[number]
        return said

    def _make_room(self, found: Sequence[Contender], shares: Mapping[int, int]) -> None:
        """Where there is no room for another driver, those that have nothing to run give their experiments back."""
        if len(self._drivers) < self._most:
            return
        idle = {one.demand.experiment_id for one in found if one.demand.running == 0} - shares.keys()
        for driver in self._drivers:
            if driver.lease.experiment_id in idle:
                driver.end()

    def _end_idle(self, found: Sequence[Contender], shares: Mapping[int, int]) -> None:
        """Has experiments given back that may run nothing for long, and run nothing.

        A driver does that by itself between two passes. In one it may have handed out a trial that never begins, as
        where the only node left on which it fits.
        """
        now, before = time.monotonic(), self._idle_since
        idle = {one.demand.experiment_id for one in found if one.claimed and not one.demand.running} - shares.keys()
        self._idle_since = {number: before.get(number, now) for number in idle}
        for driver in self._drivers:
            if now - self._idle_since.get(driver.lease.experiment_id, now) > IDLE_SECONDS:
                driver.end()

    def _say_why(self, found: Sequence[Contender], waits: Mapping[int, str | None], decision: Decision) -> None:
        """Writes down what is news of who waits for what, and gives up what never fitted."""
        patience = self._settings.unfit_seconds or math.inf
        news: dict[int, str | None] = {}
        unfit = set()
        for one in found:
            number = one.demand.experiment_id
            if number not in waits:
                continue
            reason = waits[number]
            misfit = reason is not None and reason.startswith(NEEDS) and number not in decision.reasons
            if misfit:
                unfit.add(number)
            if reason != one.waiting or misfit != (one.unfit_since is not None):
                news[number] = reason
            elif misfit and not one.claimed and _waited(one) > patience:
                why = f"{reason}, and has for {patience:g} s (TTSV_UNFIT_SECONDS); ask for less, or add a node"
                self._database.write(partial(give_up_unfit, experiment_id=number, worker=self._worker, reason=why))
        if news:
            self._database.write(partial(say_why, reasons=news, unfit=unfit))

    def _claim(self, experiment_id: int, slots: int, shunned: Sequence[str]) -> None:
        claim = partial(leases.claim, worker=self._worker, process=self._process, experiment_id=experiment_id)
        lease = self._database.write(claim)
        if lease is not None and (driver := self._drivers.start(lease)) is not None:
            driver.tell(slots, sys.maxsize, shunned)

    def _complete(self, session: Session, experiment_id: int) -> None:
        """Ends an experiment of which nothing is left to do; whoever had it could not."""
        lease = leases.claim(session, self._worker, self._process, experiment_id)
        if lease is not None and not leases.complete(session, lease):
            leases.release(session, lease, drained=True)  # something was added meanwhile


def going_on(
    found: Sequence[Contender], shares: Mapping[int, int], holding: Mapping[int, int], firm: Mapping[int, int]
) -> dict[int, int]:
    """Of experiments whose trials give way how many go on: as many as their shares, or those without turns, have.

    All that run within its own limit, where nobody lacks what is due to it as a whole: turns are taken as trials end,
    and experiments whose turns come and go would else stop each other's trials for ever.
    """
    running = {one.demand.experiment_id: one.demand.running for one in found}
    lacking = any(min(shares.get(number, 0), due) > running[number] for number, due in firm.items())
    return {
        one.demand.experiment_id: max(
            shares.get(one.demand.experiment_id, 0),
            holding.get(one.demand.experiment_id, 0),
            0 if lacking else min(one.demand.running, one.demand.trials),
        )
        for one in found
        if one.preempt
    }


def _without(demand: Demand, away: Mapping[int, tuple[int, int]]) -> Demand:
    """What is asked of the nodes that fit: of its own limit it has so many trials fewer as run on others."""
    trials, alone = away.get(demand.experiment_id, (0, 0))
    trials = min(trials, demand.running)  # some may have ended since
    alone = min(alone, trials, demand.running_alone)
    left = max(0, demand.trials - trials)
    return replace(
        demand,
        trials=left,
        running=demand.running - trials,
        alone=min(left, demand.alone - alone),
        running_alone=demand.running_alone - alone,
    )


def _misfit(one: Contender, room: Sequence[Amount]) -> str | None:
    """Why no node of these could ever run what the experiment has to run next, or None."""
    if (reason := shortage(one.demand.needs, room)) is not None:
        return reason
    if one.demand.alone and (reason := shortage(on_whole_cards(one.demand.needs), room)) is not None:
        return f"{reason} (for a trial {ALONE})"
    return None


def _stands(needs: Mapping[int, Amount], stand: Stand, node: str | None) -> Standing:
    """What stands there, on that node of ours if it is one."""
    number, place, _, alone = stand
    where = node or (None if place is None else _ELSEWHERE)
    return Standing(number, where, on_whole_cards(needs[number]) if alone else needs[number], nodes.cards_of(place))


def _waited(one: Contender) -> float:
    """For how many seconds an experiment has fitted no node."""
    return 0.0 if one.unfit_since is None else (now() - one.unfit_since).total_seconds()


def _too_many(most: int) -> str:
    """Why an experiment must wait for which there is room."""
    return f"{most} experiment{'s run' if most > 1 else ' runs'}{AT_A_TIME}"


def _behind(shares: Mapping[int, int]) -> str:
    """Why an experiment that fits must wait."""
    first = ", ".join(str(number) for number in sorted(shares)[:5]) + (", ..." if len(shares) > 5 else "")
    return f"others come first: the cluster is shared by experiments {first}" if shares else "the cluster is full"
