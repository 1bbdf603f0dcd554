"""The watchdog over the processes that are at work on trials now: it ends them from outside."""

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import ray

from service.database.experiments import Pace
from service.queue.attempts import hung_seconds
from workers.driver import hanging
from workers.trial_process.messages import Job

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
YIELD_SECONDS = 8.0
"""A trial that is to give way does so at its next report, with a checkpoint of it, but no later than this."""
LEAVE_SECONDS = 2.0
"""So long the process of a trial that gives way has at least for that checkpoint."""
MOST_STEP = 5.0
"""So much of the time between two looks counts at most: for longer this machine, or its container, stood still."""


class Verdict(Enum):
    """Why a process is killed."""

    TIMEOUT = "took longer than it may"
    HUNG = "says nothing"
    YIELD = "gives way"


@dataclass
class _Attempt:
    """When it `began`, `reported` last, and was `heard` of, by a report or by a sign of life, whose `headway` it is.

    Those are in seconds in which it could be heard. While it `waits` for files its time stands still. One that is
    `leaving` was asked to end by itself, and what it did is stored once it has `left`.
    """

    actor: Any
    job: Job | None
    began: float
    reported: float
    heard: float
    node: str | None = None
    waits: bool = False
    headway: int | None = None
    longest_pause: float = 0.0
    yields_at: float | None = None
    leaving: bool = False
    left: bool = False


class Watchdog:
    """Kills processes of attempts: that take too long, hung steps included, say nothing, or are to give way.

    `judge` is called with the trial, the verdict and the seconds that decided it, before the process ends. A timer of
    its own watches: Tune's loop learns nothing of a trial that says nothing. While that loop waits for the database
    each trial stands still at its next report, and so does its time.
    """

    def __init__(
        self, timeout: float | None, hung_after: float | None, judge: Callable[[int, Verdict, float], None]
    ) -> None:
        self._timeout, self._hung_after, self._judge = timeout, hung_after, judge
        self._running: dict[int, _Attempt] = {}
        self._killed: set[int] = set()
        self._unkilled: list[_Attempt] = []
        self._most, self._staying = sys.maxsize, dict[str, int]()
        self._moment, self._counted, self._unheard = time.monotonic(), 0.0, 0.0
        self._lock = threading.Lock()
        self._over, self._look = threading.Event(), threading.Event()

    def start(self) -> None:
        """Starts the timer."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Ends the timer."""
        self._over.set()
        self._look.set()

    def began(self, trial_id: int, actor: Any, job: Job | None = None) -> None:
        """A process (Ray's handle of its actor) works on the trial; `job` tells this attempt from others."""
        with self._lock:
            self._killed.discard(trial_id)
            now = self._heard_seconds()
            self._running[trial_id] = _Attempt(actor, job, began=now, reported=now, heard=now)
            self._choose()  # it may have been handed out before fewer might run

    def heard(self, trial_id: int, node: str | None = None, *, waits: bool = False) -> None:
        """The trial reported, perhaps on which node it is, or that it `waits`; one that is to give way does so now."""
        with self._lock:
            attempt = self._running.get(trial_id)
            if attempt is None:
                return
            now = self._heard_seconds()
            attempt.longest_pause = max(attempt.longest_pause, now - attempt.reported)
            attempt.began += now - attempt.reported if attempt.waits else 0.0
            attempt.waits = waits
            attempt.reported = attempt.heard = now
            if node is not None and node != attempt.node:
                attempt.node = node
                self._choose()
            if attempt.yields_at is None or attempt.leaving:
                return
            attempt.leaving = True
            attempt.yields_at = max(attempt.yields_at, self._now() + LEAVE_SECONDS)
        attempt.actor.give_way.remote().future().add_done_callback(partial(self._has_left, attempt))

    def has_spoken(self, trial_id: int) -> bool:
        """Whether the process said that it is at work on the trial: before that nothing of this one ran in it."""
        with self._lock:
            attempt = self._running.get(trial_id)
            return attempt is not None and attempt.node is not None

    def running(self) -> dict[int, Job | None]:
        """The jobs that are at work, by trial."""
        with self._lock:
            return {trial_id: attempt.job for trial_id, attempt in self._running.items()}

    def silence(self, trial_id: int) -> float:
        """For how many seconds nothing was heard of the trial; 0 where it does not run."""
        with self._lock:
            attempt = self._running.get(trial_id)
            return 0.0 if attempt is None else self._heard_seconds() - attempt.heard

    def got_on(self, trial_id: int, headway: int) -> bool:
        """The trial has got on so often; whether that is news, and a sign of life. None gives way upon it.

        What was done since the last report is in no checkpoint yet.
        """
        with self._lock:
            attempt = self._running.get(trial_id)
            if attempt is None or attempt.headway == headway:
                return False
            attempt.headway, attempt.heard = headway, self._heard_seconds()
            return True

    def pace(self, trial_id: int, *, reports: bool = True) -> Pace:
        """How the trial's reports come, if it `reports` now: by this it is judged, and others can say so.

        Else it is a sign of life that came now, which ends no pause.
        """
        with self._lock:
            now = self._heard_seconds()
            attempt = self._running.get(trial_id)
            if attempt is None:  # it was killed just now
                return {"reported": 0.0, "longest_pause": 0.0}
            longest = max(attempt.longest_pause, now - attempt.reported if reports else 0.0)
            return {"reported": round(now - attempt.began, 1), "longest_pause": round(longest, 1)}

    def ended(self, trial_id: int) -> bool:
        """The attempt is over; whether it ended by itself and was not killed from here. To be asked once of each."""
        with self._lock:
            if self._running.pop(trial_id, None) is not None:
                self._choose()  # another may go on in its place
            killed = trial_id in self._killed
            self._killed.discard(trial_id)
            return not killed

    def kill(self, trial_id: int) -> None:
        """Kills the process at work on the trial, if there is one."""
        if (attempt := self._condemn(trial_id)) is not None:
            self._kill(attempt)

    def allow(self, most: int, staying: Mapping[str, int] | None = None) -> None:
        """No more than so many may run from now on, and of those on some nodes no more than so many.

        Those that began last give way, which loses the least.
        """
        with self._lock:
            self._most, self._staying = most, dict(staying or {})
            self._choose()

    def _choose(self) -> None:
        """Says who gives way."""
        there = (attempt for attempt in self._running.values() if not attempt.leaving)
        newest_last = sorted(there, key=lambda attempt: attempt.began)
        stay: list[_Attempt] = []
        places = Counter(self._staying)
        for attempt in newest_last:
            if attempt.node is None or attempt.node not in places:
                stay.append(attempt)
            elif places[attempt.node] > 0:
                places[attempt.node] -= 1
                stay.append(attempt)
        latest = self._now() + YIELD_SECONDS
        for attempt in newest_last:
            goes = not any(attempt is one for one in stay[: self._most])
            attempt.yields_at = (attempt.yields_at or latest) if goes else None

    def _has_left(self, attempt: _Attempt, _answer: object) -> None:
        # In a thread of Ray's, which must not wait for Ray: the timer kills what has left.
        attempt.left = True
        self._look.set()

    def _watch(self) -> None:
        while not self._over.is_set():
            self._look.wait(LOOK_SECONDS)
            self._look.clear()
            with self._lock:
                unkilled, self._unkilled = self._unkilled, []
            for attempt in unkilled:
                self._kill(attempt)
            for trial_id, verdict, seconds in self._verdicts():
                self._end(trial_id, verdict, seconds)

    def _verdicts(self) -> list[tuple[int, Verdict, float]]:
        found = []
        with self._lock:
            now, heard = self._now(), self._heard_seconds()
            for trial_id, attempt in self._running.items():
                hung = hung_seconds(self._hung_after, attempt.longest_pause)
                spent = (attempt.reported if attempt.waits else heard) - attempt.began
                if self._timeout is not None and spent > self._timeout:
                    found.append((trial_id, Verdict.TIMEOUT, self._timeout))
                elif heard - attempt.heard > hung:
                    found.append((trial_id, Verdict.HUNG, hung))
                elif attempt.left or (attempt.yields_at is not None and now > attempt.yields_at):
                    found.append((trial_id, Verdict.YIELD, 0.0))
        return found

    def _now(self) -> float:
        """The seconds that were counted until now: what a paused container's clock goes on by is not among them."""
        moment = time.monotonic()
        step = min(moment - self._moment, MOST_STEP)
        self._counted += step
        self._unheard += step if hanging.is_waiting() else 0.0
        self._moment = moment
        return self._counted

    def _heard_seconds(self) -> float:
        """Those of them in which Tune's loop could hear trials, to half a second."""
        return self._now() - self._unheard

    def _end(self, trial_id: int, verdict: Verdict, seconds: float) -> None:
        attempt = self._condemn(trial_id)
        if attempt is not None:  # it did not end by itself meanwhile, nor upon another verdict
            logger.warning("trial %d %s: killing its process", trial_id, verdict.value)
            self._judge(trial_id, verdict, seconds)
            self._kill(attempt)

    def _kill(self, attempt: _Attempt) -> None:
        """Kills its process; where Ray cannot do so now, at the next look, as it has its place for as long as it lives.

        Raises nothing: who asks is the timer, without which nothing would be watched, or writes results.
        """
        try:
            ray.kill(attempt.actor)
        except Exception as error:  # Ray's, of many kinds
            logger.warning("a process cannot be killed, trying again: %s", error)
            with self._lock:
                self._unkilled.append(attempt)

    def _condemn(self, trial_id: int) -> _Attempt | None:
        """The attempt that is to be killed, by whoever asks first."""
        with self._lock:
            attempt = self._running.pop(trial_id, None)
            if attempt is not None:
                self._killed.add(trial_id)
            return attempt
