"""What time it is: by the database's clock, where it has one of its own, so that all who use it agree.

A machine whose clock is an hour off would else look as if it were gone for an hour, or for an hour too long, and what
it stores would be of another time than what others do; and one that is put right would be off from then on. Leases
depend on none of this.
"""

import time
from datetime import UTC, datetime, timedelta

_SLOW = timedelta(seconds=1)
"""An answer that took longer says less of a clock than an earlier one did."""
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that nobody sets, and that goes on while the machine sleeps, where there is one."""
_booted: datetime | None = None
"""When the steady clock began, as the database has it, as far as that was certain when its clock was read last."""


def now() -> datetime:
    """This instant, as the database has it."""
    return machine_now() if _booted is None else _booted + steady()


def machine_now() -> datetime:
    """This instant, as this machine has it."""
    return datetime.now(UTC)


def steady() -> timedelta:
    """This instant by a clock that only ever goes on."""
    return timedelta(seconds=time.clock_gettime(_STEADY))


def follow(theirs: datetime, before: datetime, after: datetime) -> None:
    """Goes by a database's clock from now on, which was read between two moments of this machine's."""
    global _booted
    if _booted is None or after - before <= _SLOW:
        _booted = _machine_booted() + timedelta(seconds=seconds_ahead(theirs, before, after))


def _machine_booted() -> datetime:
    """When the steady clock began, as this machine has it: read again if this process stood still meanwhile."""
    while True:
        began = steady()
        found = machine_now() - began
        if steady() - began < _SLOW:
            return found


def seconds_ahead(theirs: datetime, before: datetime, after: datetime) -> float:
    """By how much a clock that was read between two moments of ours is ahead, at least; negative where it is behind."""
    return max(0.0, (theirs - after).total_seconds()) or min(0.0, (theirs - before).total_seconds())
