"""How Ray Tune gets its trials: one by one, as the database has them, and no more at a time than the driver may run."""

import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ray.tune.search import Searcher
from sqlalchemy.exc import SQLAlchemyError

from service.database.outages import Backoff
from service.errors import LeaseLostError
from workers.driver.hanging import turn, unlimited
from workers.trial_process.messages import (
    CrowdedReport,
    EpochReport,
    HinderedReport,
    Job,
    ResultReport,
    StageReport,
    StartedReport,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How long it goes unnoticed at most that the database has trials again, where it had none."""
PLACE_SECONDS = 5.0
"""So long a trial that was handed out may wait for room before free processes are for it, and not for later ones."""
ELSEWHERE_SECONDS = 10.0
"""So long a trial that was handed out waits for another node than that on which it was hindered last."""
STARTING_SECONDS = 600.0
"""So long a process may take from when it has room until its trial begins: to import torch may take minutes."""
HINDERED_SECONDS = 10.0
"""So long none begins on a node where one trial after the other was hindered."""
ENDLESS = 2**31
"""More trials than Tune is ever given: it wants to know how many there will be."""

NextJob = Callable[[Collection[int]], Job | None]
"""Gives the job that is to begin next, but for trials that are taken; raises `LeaseLostError`."""


class Slots:
    """How many trials a driver may have begin now. It starts with none; `unlimited` where no worker says anything.

    The nodes (ids of Ray) that are `shunned` are those on which none may begin: as the worker says, and for a while
    those where trials in a row were hindered, be it the node's doing or theirs. That costs nobody a place: who waits
    for a node has none. Some are for trials `besides`, those that go on where a node is `unfit` by now: as these end,
    none has their places on the other nodes before the worker says so.
    """

    def __init__(self) -> None:
        self._all, self._besides = 0, 0
        self._unfit: Collection[str] = ()
        self._shunned: tuple[str, ...] = ()
        self._hindering: dict[str, float] = {}
        """When a node's next trial may begin that hindered its last one."""
        self._hindered: dict[int, str] = {}
        self._changed = threading.Condition()

    @property
    def shunned(self) -> tuple[str, ...]:
        """The nodes on which none may begin now, by their ids."""
        now = time.monotonic()
        return tuple(sorted({*self._shunned, *(node for node, until in self._hindering.items() if until > now)}))

    def hindered(self, trial_id: int, node: str) -> None:
        """Notes that a trial could not go on on this node."""
        self._hindered[trial_id] = node
        self._hindering[node] = time.monotonic() + HINDERED_SECONDS if node in self._hindering else 0.0

    def hindered_on(self, trial_id: int) -> str | None:
        """The node on which a trial could not go on last; None since it did."""
        return self._hindered.get(trial_id)

    def got_on(self, trial_id: int, node: str) -> None:
        """Notes that a trial got on on this node."""
        self._hindered.pop(trial_id, None)
        self._hindering.pop(node, None)

    @property
    def count(self) -> int:
        """So many, but for those besides."""
        return max(0, self._all - self._besides)

    @property
    def limited(self) -> bool:
        """Whether a worker says how many."""
        return self._all != sys.maxsize

    def set(self, count: int, shunned: Iterable[str] = (), besides: int = 0, unfit: Iterable[str] = ()) -> None:
        """The worker decided anew."""
        with self._changed:
            self._all, self._shunned = count, tuple(shunned)
            self._besides, self._unfit = besides, frozenset(unfit)
            self._changed.notify_all()

    def has_room(self, at_work: Collection[str], nodes: Mapping[str, str]) -> bool:
        """Whether one more may begin beside those at work, of which these are on `nodes` that are known."""
        with self._changed:
            if not self._besides:  # nearly always: nobody counts a thousand whenever one of them reports
                return len(at_work) < self._all
            return len(at_work) < self._all and sum(nodes.get(one) not in self._unfit for one in at_work) < self.count

    def excess(self, at_work: Collection[str], nodes: Mapping[str, str]) -> int:
        """How many of those at work are more than may be, now that fewer may."""
        with self._changed:
            fit = sum(nodes.get(one) not in self._unfit for one in at_work) if self._besides else len(at_work)
            return max(0, len(at_work) - self._all, fit - self.count)

    def unlimited(self) -> None:
        """Nobody decides: a driver that was started by hand."""
        self.set(sys.maxsize)

    def wait(self, seconds: float) -> bool:
        """Waits until there is one, at most so long; whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count > 0, seconds)


class Feed(Searcher):
    """Hands out the trials that wait, and again those that lost their process or gave way.

    A pass of Tune ends when nothing is left to be handed out and everything that was is settled (its end is stored);
    or when no slot is left and nothing runs: then the cluster's other drivers get the actors. While the database is
    away there is nothing new, and once the lease is lost, or after `stop`, nothing more. `over` is called when nothing
    is left and nothing runs: Tune takes seconds more to end its processes and return.

    A job `alone` needs a whole card. Until it has begun nothing else is handed out: others would go on in the shares of
    cards that become free one by one, and no card ever would.
    """

    def __init__(
        self,
        next_job: NextJob,
        slots: Slots,
        over: Callable[[], None],
        *,
        metric: str | None = None,
        direction: str | None = None,
    ) -> None:
        super().__init__(metric=metric, mode=direction)
        self._next_job, self._slots, self._say_over = next_job, slots, over
        self.handed_out = 0
        self._at_work: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._starting: dict[str, float] = {}
        self._clearing: int | None = None
        self._withdrawn = Counter[int]()
        """How often each was, which took a number of an attempt each time."""
        self._taken: set[int] = set()
        self._lost: set[int] = set()
        self._settling = threading.Condition()
        self._stopped = threading.Event()
        self._empty = False
        self._look_after = 0.0
        self._outage = Backoff(first=LOOK_SECONDS)
        self._cache: Any = None
        self._nodes: dict[str, str] = {}
        """Where those at work are."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Searcher, (self.metric, self.mode))  # Tune keeps a pickled copy in its books; nobody uses it

    def stop(self) -> None:
        """Hands nothing more out."""
        self._stopped.set()

    def settled(self, trial_id: int) -> None:
        """What became of the trial is stored: where that is another try, it may be handed out again."""
        with self._settling:
            self._lost.discard(trial_id)
            self._taken.discard(trial_id)
            self._look_after = 0.0
            self._settling.notify_all()

    def began(self, trial_id: int) -> None:
        """A process was found for the trial: one alone has its card."""
        if self._clearing == trial_id:
            self._clearing = None

    def suggest(self, trial_id: str) -> Any:
        """The next trial's configuration, None while there is none, or FINISHED."""
        turn()  # Tune may ask for minutes in one of its steps, until a loss is stored
        if self._stopped.is_set():
            return Searcher.FINISHED
        with self._settling:
            if not self._at_work:
                # Tune would sleep for a second before it asks again.
                self._settling.wait_for(lambda: not self._taken, LOOK_SECONDS)
            if self._lost:
                return None  # it comes before all that never began, as soon as its loss is stored
        if not self._has_room():
            return None if self._at_work else Searcher.FINISHED
        if self._clearing is not None:
            return None  # a card is being cleared for it
        job = self._look(trial_id)
        if job is None:
            if not (self._empty and not self._at_work and not self._taken):
                return None
            self._say_over()
            return Searcher.FINISHED
        with self._settling:
            self._taken.add(job.trial_id)
        self._at_work[trial_id], self._since[trial_id] = job.trial_id, time.monotonic()
        if job.alone:
            self._clearing = job.trial_id
        self.handed_out += 1
        return {"job": asdict(job), "shunned": self.shunned_by(trial_id)}

    def excess(self) -> int:
        """How many were handed out that may not begin any more."""
        return self._slots.excess(self._at_work, self._nodes)

    def withdraw(self, trial_id: str) -> None:
        """Takes back what Tune calls so, for which no process was found: it may be handed out again."""
        taken = self._at_work.pop(trial_id)
        self._since.pop(trial_id, None)
        self._withdrawn[taken] += 1
        self.began(taken)
        self.settled(taken)

    def has_begun(self, job: Job) -> bool:
        """Whether a job is of a trial that lost a process, or gave way."""
        return job.stored_epochs > 0 or job.attempt > self._withdrawn[job.trial_id]

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Learns where a trial is, and that it gets on there."""
        report = result.get("report")
        if isinstance(report, StartedReport) and report.node is not None:
            self._nodes[trial_id] = report.node
            if report.hinders:
                self._slots.hindered(self._at_work.get(trial_id, 0), report.node)
        elif isinstance(report, EpochReport | ResultReport) or (isinstance(report, StageReport) and report.further):
            self._slots.got_on(self._at_work.get(trial_id, 0), self._nodes.get(trial_id, ""))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Has a slot again, if it still may have it."""
        self.on_trial_result(trial_id, result or {})
        ended, node = self._at_work.pop(trial_id, None), self._nodes.pop(trial_id, None)
        self._since.pop(trial_id, None)
        if ended is not None and node is not None and isinstance((result or {}).get("report"), HinderedReport):
            self._slots.hindered(ended, node)
        if ended is not None:
            self.began(ended)  # where it ended before
        with self._settling:
            again = error or isinstance((result or {}).get("report"), HinderedReport | CrowdedReport)
            if again and ended in self._taken:
                self._lost.add(ended)
        self.keep_or_give_back()
        if self._stopped.is_set() and not self._at_work:
            self._say_over()

    def waited(self, trial_id: str) -> float:
        """For how many seconds what Tune calls so has been handed out."""
        return time.monotonic() - self._since.get(trial_id, math.inf)

    def stuck(self, starting: Iterable[str]) -> list[str]:
        """Of what Tune calls so, and for which a process starts now, that for which it has for too long."""
        now = time.monotonic()
        self._starting = {one: self._starting.get(one, now) for one in starting}
        found = [one for one, since in self._starting.items() if now - since > STARTING_SECONDS]
        self._starting |= dict.fromkeys(found, now)  # they are to end now
        return found

    def shunned_by(self, trial_id: str) -> tuple[str, ...]:
        """The nodes on which what Tune calls so must not begin now."""
        shunned, node = self._slots.shunned, self._slots.hindered_on(self._at_work.get(trial_id, 0))
        if node is None or node in shunned or self.waited(trial_id) > ELSEWHERE_SECONDS:
            return shunned
        return (*shunned, node)

    def watch(self, cache: Any) -> None:
        """Gets Tune's cache of idle processes, of which it keeps one unasked."""
        self._cache = cache
        self.keep_or_give_back()

    def keep_or_give_back(self) -> None:
        """Has Tune keep a process that is free only where it may have another trial: it holds its place meanwhile."""
        if self._cache is not None:
            more = not (self._empty or self._stopped.is_set())
            self._cache._may_keep_one = more and self._has_room()

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing: the rows say what is to be run."""

    def restore(self, checkpoint_path: str) -> None:
        """Restores nothing."""

    def _has_room(self) -> bool:
        return self._slots.has_room(self._at_work, self._nodes)

    def _look(self, trial_id: str) -> Job | None:
        """The next job. Where there was none, or no answer, none is looked for at once, unless something was settled.

        Until a server that is gone is given up Tune's loop waits, and so does whatever a trial reports.
        """
        if (self._empty or self._outage.failures) and time.monotonic() < self._look_after:
            return None
        self._look_after = time.monotonic() + LOOK_SECONDS
        try:
            with self._settling:
                taken = self._taken | set(self._at_work.values())  # of which Tune may not know yet that it died
            with unlimited():
                job = self._unsure_job(trial_id) or self._next_job(taken) or self._new_job(trial_id)
        except LeaseLostError:
            self.stop()  # the keeper of the lease ends the driver
            return None
        except SQLAlchemyError as error:
            if not self._outage.failures:
                logger.warning("the next trial waits for the database: %s", error)
            self._empty = False  # nobody knows
            self._look_after = time.monotonic() + self._outage.failed()
            return None
        self._outage.succeeded()
        self._empty = job is None
        return job

    def _unsure_job(self, trial_id: str) -> Job | None:
        """A trial that may be stored already, though that was not heard: only a search has any."""
        return None

    def _new_job(self, trial_id: str) -> Job | None:
        """A trial that did not exist before: only a search has any."""
        return None
