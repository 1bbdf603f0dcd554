"""Living through a database that is away."""

import logging
import random
import time
from collections.abc import Callable
from sqlite3 import SQLITE_BUSY, SQLITE_CANTOPEN, SQLITE_LOCKED, SQLITE_PROTOCOL
from typing import TypeVar

from sqlalchemy.exc import DBAPIError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

_T = TypeVar("_T")
_LONGEST_PAUSE = 10.0
MOST_FAILURES = 20
"""Failures in a row, over a minute or two, after which trouble that is no absence counts as lasting."""
_SQLITE_BUSY = {SQLITE_BUSY, SQLITE_LOCKED, SQLITE_CANTOPEN, SQLITE_PROTOCOL}
_POSTGRES_BUSY = {
    "40001",  # serialization failure
    "40P01",  # deadlock
    "53300",  # too many connections
    "55P03",  # lock not available
    "57014",  # statement timeout
    "57P01",  # shut down
    "57P02",  # crash shutdown
    "57P03",  # cannot connect now
}

logger = logging.getLogger(__name__)


def is_away(error: Exception) -> bool:
    """Whether the database could not be reached, or was busy: the same may succeed later, however long that takes."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, PoolTimeoutError)
    if error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError):
        return False
    if (code := getattr(error.orig, "sqlite_errorcode", None)) is not None:
        return code & 0xFF in _SQLITE_BUSY
    state = getattr(error.orig, "sqlstate", None)  # none: no server answered
    return state is None or state.startswith("08") or state in _POSTGRES_BUSY


def is_in_trouble(error: Exception) -> bool:
    """Whether it is the database that fails, not what it was asked: away, out of memory or of disk, read-only."""
    return is_away(error) or isinstance(error, OperationalError | InternalError)


def is_unsure(error: Exception) -> bool:
    """Whether the connection broke as a transaction was committed: it may be stored, and may not."""
    return isinstance(error, DBAPIError) and error.connection_invalidated and error.statement is None


def broken_connection(words: str) -> OperationalError:
    """The error of a connection that broke, as SQLAlchemy raises it: what fault points raise where it is written."""
    return OperationalError(None, None, ConnectionError(words), connection_invalidated=True)


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
    """Repeats `work` until the database is there, and while it is in trouble; every other error passes through."""
    backoff = Backoff()
    while True:
        try:
            return work()
        except SQLAlchemyError as error:
            if not is_away(error) and (backoff.failures >= MOST_FAILURES or not is_in_trouble(error)):
                raise
            pause = backoff.failed()
            if backoff.failures == 1:
                logger.warning("the database is away or in trouble, trying again: %s", error)
            time.sleep(pause)
