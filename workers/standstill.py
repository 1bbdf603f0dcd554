"""How long heartbeats have stood still, by the watcher's own clock."""

import time
from collections.abc import Callable, Sequence

from service.queue.leases import Watched


class Standstill:
    """Watches the heartbeats of running experiments.

    Only time between two successive looks counts, and of each such interval no more than `longest_step`: while the
    database was away, this process was stopped or the machine slept, nobody's heartbeat could be seen, so that time
    is held against no one.
    """

    def __init__(self, longest_step: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_step, self._clock = longest_step, clock
        self._last_look: float | None = None
        self._still: dict[tuple[int, int, int], float] = {}

    def look(self, running: Sequence[Watched]) -> list[tuple[Watched, float]]:
        """Each running experiment with the seconds for which its heartbeat has stood still."""
        now = self._clock()
        step = 0.0 if self._last_look is None else min(now - self._last_look, self._longest_step)
        self._last_look = now
        before = self._still
        self._still = {key: before[key] + step if key in before else 0.0 for key in map(_sign, running)}
        return [(seen, self._still[_sign(seen)]) for seen in running]

    def interrupt(self) -> None:
        """A look failed: the time until the next one does not count."""
        self._last_look = None


def _sign(seen: Watched) -> tuple[int, int, int]:
    return seen.experiment_id, seen.fence, seen.heartbeat
