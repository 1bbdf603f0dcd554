"""How long trials rest that lost their process again and again, and which of them do."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from sqlalchemy import bindparam, or_

from service.database import Trial, now
from service.database.base import Timestamp

ALL_REST = "what is left of it rests"
"""How it is said that an experiment has no other trials that could run."""
FIRST_SECONDS, LONGEST_SECONDS = 15.0, 300.0
"""So long a trial rests at first and at most: each time twice as long, until it gets on."""
RESTLESS_DEATHS = 4
"""So often in a row its process may die before a trial rests, whatever it died of."""
LONGEST_OF_HINDERED = 120.0
"""So long at most where its machine could not keep its files: a disk may have room again at any moment."""
LONGEST_OF_DEATHS = 60.0
"""So long at most then: where it was somebody else's doing, that is over in a moment."""


def put_to_rest(trial: Trial, *, charged: bool, longest: float) -> float:
    """Has a trial that waits again rest for as long as it has to, `longest` at most; for how many seconds.

    `charged`: it may have been its own doing that its process died, which its `deaths` count already. Nobody can tell:
    where somebody kills processes, as the kernel for another's memory, a trial would soon have died as often as it may.
    """
    if charged and trial.deaths > RESTLESS_DEATHS:
        longest = max(longest, LONGEST_OF_DEATHS)
    seconds = min(max(FIRST_SECONDS, 2 * trial.rest_seconds), longest)
    if seconds:
        trial.rests_until = now() + timedelta(seconds=seconds)
        trial.rest_seconds = max(trial.rest_seconds, seconds)
    return seconds


_MOMENT, _LATEST = (bindparam(name, type_=Timestamp) for name in ("moment", "latest"))
RESTS = (Trial.rests_until > _MOMENT) & (Trial.rests_until <= _LATEST)
"""That a trial which waits must not begin at the `moments` that a statement is executed with."""
READY = or_(Trial.rests_until.is_(None), Trial.rests_until <= _MOMENT, Trial.rests_until > _LATEST)
"""That it may."""


def moments() -> Mapping[str, datetime]:
    """Now, and the latest at which a rest may end: one that a clock gave which went ahead of time is none."""
    moment = now()
    return {"moment": moment, "latest": moment + timedelta(seconds=LONGEST_SECONDS)}


def until(trial: Trial) -> datetime | None:
    """When a trial that rests may begin again; None where it does not rest."""
    moment, latest = moments().values()
    return trial.rests_until if trial.rests_until is not None and moment < trial.rests_until <= latest else None
