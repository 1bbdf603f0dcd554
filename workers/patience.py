"""Living through a database that is away."""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

_T = TypeVar("_T")
_LONGEST_PAUSE = 10.0

logger = logging.getLogger(__name__)


def is_away(error: SQLAlchemyError) -> bool:
    """Whether the database could not be reached, or was busy: the same may succeed later."""
    if isinstance(error, DBAPIError):
        return isinstance(error, OperationalError) or error.connection_invalidated
    return isinstance(error, PoolTimeoutError)


class Backoff:
    """Pauses that grow with every failure in a row, with full jitter."""

    def __init__(self, first: float = 0.25, longest: float = _LONGEST_PAUSE) -> None:
        self._first, self._longest = first, longest
        self.failures = 0

    def failed(self) -> float:
        """Counts a failure; how long to pause now."""
        self.failures += 1
        limit: float = min(self._longest, self._first * 2 ** min(self.failures - 1, 16))
        return random.uniform(0.1, 1) * limit

    def succeeded(self) -> None:
        """Starts anew."""
        self.failures = 0


def patiently(work: Callable[[], _T]) -> _T:
    """Repeats `work` until the database is there; every other error passes through."""
    backoff = Backoff()
    while True:
        try:
            return work()
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            pause = backoff.failed()
            if backoff.failures == 1:
                logger.warning("the database is away, trying again: %s", error)
            time.sleep(pause)
