"""The watchdog over the processes that are at work on trials now: it ends them from outside."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class _Attempt:
    actor: Any
    began: float = field(default_factory=time.monotonic)


class Watchdog:
    """Kills the process of an attempt that takes longer than `timeout_seconds`, hung steps included.

    `timed_out` is called with the trial before. A timer of its own watches: Tune's loop learns nothing of a trial that
    says nothing.
    """

    def __init__(self, timeout_seconds: float | None, timed_out: Callable[[int], None]) -> None:
        self._timeout, self._timed_out = timeout_seconds, timed_out
        self._running: dict[int, _Attempt] = {}
        self._killed: set[int] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def start(self) -> None:
        """Starts the timer, if there is a limit."""
        if self._timeout is not None:
            threading.Thread(target=self._watch, args=(self._timeout,), name="timeout", daemon=True).start()

    def close(self) -> None:
        """Ends the timer."""
        self._over.set()

    def began(self, trial_id: int, actor: Any) -> None:
        """A process (Ray's handle of its actor) works on the trial."""
        with self._lock:
            self._running[trial_id] = _Attempt(actor)

    def ended(self, trial_id: int) -> bool:
        """The attempt is over; whether it ended by itself and was not killed from here."""
        with self._lock:
            self._running.pop(trial_id, None)
            return trial_id not in self._killed

    def kill(self, trial_id: int) -> None:
        """Kills the process at work on the trial, if there is one."""
        with self._lock:
            attempt = self._running.pop(trial_id, None)
            if attempt is not None:
                self._killed.add(trial_id)
        if attempt is not None:
            ray.kill(attempt.actor)

    def _watch(self, timeout: float) -> None:
        while not self._over.wait(LOOK_SECONDS):
            latest = time.monotonic() - timeout
            with self._lock:
                overdue = [trial_id for trial_id, attempt in self._running.items() if attempt.began < latest]
            for trial_id in overdue:
                logger.warning("trial %d took longer than %g s: killing it", trial_id, timeout)
                self._timed_out(trial_id)
                self.kill(trial_id)
