"""What time it is: by the database's clock, where it has one of its own, so that all who use it agree.

A machine whose clock is an hour off would else look as if it were gone for an hour, or for an hour too long, and what
it stores would be of another time than what others do. Leases depend on none of this.
"""

from datetime import UTC, datetime, timedelta

_SLOW = timedelta(seconds=1)
"""An answer that took longer says less of a clock than an earlier one did."""
_ahead: timedelta | None = None
"""By how much the database's clock is ahead of this machine's, as far as that was certain when it was read last."""


def now() -> datetime:
    """This instant, as the database has it."""
    return machine_now() + (_ahead or timedelta())


def machine_now() -> datetime:
    """This instant, as this machine has it."""
    return datetime.now(UTC)


def follow(theirs: datetime, before: datetime, after: datetime) -> None:
    """Goes by a database's clock from now on, which was read between two moments of this machine's."""
    global _ahead
    if _ahead is None or after - before <= _SLOW:
        _ahead = timedelta(seconds=seconds_ahead(theirs, before, after))


def seconds_ahead(theirs: datetime, before: datetime, after: datetime) -> float:
    """By how much a clock that was read between two moments of ours is ahead, at least; negative where it is behind."""
    return max(0.0, (theirs - after).total_seconds()) or min(0.0, (theirs - before).total_seconds())
