"""Removing the checkpoints of trials whose end is stored, aside: a store may hold whoever asks it up for minutes."""

import logging
import threading
from collections.abc import Callable
from queue import Queue

from service.storage import Store, remove_checkpoints

logger = logging.getLogger(__name__)


class Leftovers:
    """Removes them one trial after the other, in a thread of its own; what cannot be removed stays.

    Those of a later claim do: a trial may be retried by the time that a driver which stood still gets here. So do those
    of one that `is_at_work` again under this one.
    """

    def __init__(self, store: Store, fence: int, is_at_work: Callable[[int], bool]) -> None:
        self._store, self._fence, self._is_at_work = store, fence, is_at_work
        self._trials: Queue[int] = Queue()
        threading.Thread(target=self._run, name="leftovers", daemon=True).start()

    def add(self, trial_id: int) -> None:
        """Has a trial's checkpoints removed; does not wait."""
        self._trials.put(trial_id)

    def wait(self, seconds: float) -> bool:
        """Waits until all are, at most so long; whether they are."""
        with self._trials.all_tasks_done:
            return self._trials.all_tasks_done.wait_for(lambda: not self._trials.unfinished_tasks, seconds)

    def _run(self) -> None:
        while True:
            trial_id = self._trials.get()
            try:
                if not self._is_at_work(trial_id):
                    remove_checkpoints(self._store, trial_id, self._fence)
            except Exception as error:  # what a store's library raises
                logger.warning("the checkpoints of trial %d stay: %s", trial_id, error)
            self._trials.task_done()
