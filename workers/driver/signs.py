"""The driver's look for signs of life of trials that report nothing while an epoch, or a batch of an attack, lasts."""

import contextlib
import threading
from collections.abc import Callable
from typing import cast

from service.database.experiments import ResourceSeries
from workers.driver.watchdog import Watchdog
from workers.node.notes import Shelf
from workers.trial_process.messages import ResourceReport
from workers.trial_process.signs import SIGN_SECONDS, Sign


class SignReader:
    """Tells the watchdog which silent trials got on, and hands on what they have used meanwhile.

    A thread of its own looks, which a head that does not answer may hold up. It takes away the signs of trials that do
    not run any more: whoever is killed leaves the last one.
    """

    def __init__(self, watchdog: Watchdog, shelf: Shelf[Sign], used: Callable[[int, ResourceReport], None]) -> None:
        self._watchdog, self._shelf, self._used = watchdog, shelf, used
        self._seen: set[int] = set()
        self._over = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._read, name="signs", daemon=True).start()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()

    def _read(self) -> None:
        while not self._over.wait(SIGN_SECONDS):
            with contextlib.suppress(Exception):  # Ray's, of many kinds, while its head is away
                self.look()

    def look(self) -> None:
        """Looks once. Raises what Ray raises."""
        running = self._watchdog.running()
        for trial_id in self._seen - running.keys():
            self._shelf.remove(str(trial_id))
            self._seen.discard(trial_id)
        for trial_id, job in running.items():
            self._seen.add(trial_id)  # it may be killed before its sign is ever read
            if self._watchdog.silence(trial_id) < SIGN_SECONDS / 2:
                continue
            sign = self._shelf.get(str(trial_id))
            if sign is None or job is None or (sign.fence, sign.attempt) != (job.fence, job.attempt):
                continue
            if self._watchdog.got_on(trial_id, sign.headway) and sign.used is not None:
                series = cast(ResourceSeries, sign.used)
                pace = self._watchdog.pace(trial_id, reports=False)
                self._used(trial_id, ResourceReport({**series, "pace": pace}))
