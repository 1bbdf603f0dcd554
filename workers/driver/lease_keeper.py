"""Keeping a lease alive while its trials train, and noticing when it is lost."""

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from service.database.engine import Database
from service.database.outages import is_away
from service.errors import LeaseLostError
from service.queue import leases
from service.queue.leases import Lease

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""How long a cancelled experiment goes unnoticed at most."""


class LeaseKeeper:
    """A thread that renews a lease; between heartbeats it looks whether the lease still holds.

    Three outcomes: renewed; lost (`lost` is called, once, and the thread ends); unknown, because the database is
    away: train on, and ask again soon.
    """

    def __init__(self, database: Database, lease: Lease, beat_seconds: float, lost: Callable[[], None]) -> None:
        self._database, self._lease, self._lost = database, lease, lost
        self._beat_seconds = beat_seconds
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def start(self) -> None:
        """Beats for the first time, then again and again."""
        self._thread.start()

    def _keep(self) -> None:
        next_beat = 0.0
        unknown = False
        while True:
            try:
                if time.monotonic() >= next_beat:
                    self._database.write(lambda session: leases.renew(session, self._lease))
                    next_beat = time.monotonic() + self._beat_seconds
                else:
                    with self._database.read() as session:
                        if not leases.is_held(session, self._lease):
                            raise LeaseLostError(f"experiment {self._lease.experiment_id} is no longer ours")
                if unknown:
                    logger.info("the database is back")
                unknown = False
            except LeaseLostError:
                self._lost()
                return
            except SQLAlchemyError as error:
                if not unknown:
                    kind = "away" if is_away(error) else "in trouble"
                    logger.warning("the database is %s; training goes on: %s", kind, error)
                unknown = True
            time.sleep(min(LOOK_SECONDS, self._beat_seconds))
