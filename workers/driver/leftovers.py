"""Removing the checkpoints of trials whose end is stored, aside: a store may hold whoever asks it up for minutes."""

import logging
import threading
from queue import Queue

from service.storage import Store, remove_checkpoints

logger = logging.getLogger(__name__)


class Leftovers:
    """Removes them one trial after the other, in a thread of its own; what cannot be removed stays.

    Those of later attempts do: a trial may be retried by the time that its turn comes, under a later claim or this one.
    """

    def __init__(self, store: Store, fence: int) -> None:
        self._store, self._fence = store, fence
        self._trials: Queue[tuple[int, int]] = Queue()
        threading.Thread(target=self._run, name="leftovers", daemon=True).start()

    def add(self, trial_id: int, attempts: int) -> None:
        """Has the checkpoints removed of a trial that ended after so many attempts of this claim; does not wait."""
        self._trials.put((trial_id, attempts))

    def wait(self, seconds: float) -> bool:
        """Waits until all are, at most so long; whether they are."""
        with self._trials.all_tasks_done:
            return self._trials.all_tasks_done.wait_for(lambda: not self._trials.unfinished_tasks, seconds)

    def _run(self) -> None:
        while True:
            trial_id, attempts = self._trials.get()
            try:
                remove_checkpoints(self._store, trial_id, self._fence, attempts)
            except Exception as error:  # what a store's library raises
                logger.warning("the checkpoints of trial %d stay: %s", trial_id, error)
            self._trials.task_done()
