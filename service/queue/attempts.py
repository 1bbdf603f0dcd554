"""SQL of attempts at trials: where each ran and with what, and what it used of its machine over time.

Functions take a Session; callers commit, and hold the experiment where they write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from service.database import Attempt, Environment, Trial
from service.database.engine import upsert
from service.database.experiments import ResourceSeries
from ttsv.config.fields import digest

MOST_ATTEMPTS = 50
"""So many of a trial are kept, the newest: one whose process dies for ever leaves no more."""


@dataclass(frozen=True)
class AttemptDetail:
    """An attempt, with the record of its environment; None where it never said."""

    number: int
    started_at: datetime
    place: str
    environment: Mapping[str, JsonValue] | None = None
    resources: ResourceSeries | None = None


def begin(session: Session, trial: Trial, fence: int, place: str, environment: Mapping[str, object] | None) -> None:
    """Writes down where the attempt runs that began last; said again it changes nothing."""
    if trial.started_at is None:
        return
    fingerprint = None
    if environment is not None:
        fingerprint = digest(dict(environment))
        if session.scalar(select(Environment.fingerprint).where(Environment.fingerprint == fingerprint)) is None:
            new = upsert(session)(Environment).values(fingerprint=fingerprint, record=dict(environment))
            session.execute(new.on_conflict_do_nothing())
    earlier = Attempt.trial_id == trial.id, Attempt.started_at < trial.started_at
    number = select(func.coalesce(func.max(Attempt.number), 0) + 1).where(*earlier).scalar_subquery()
    values = {"fence": fence, "place": place[:200], "environment": fingerprint}
    insert = upsert(session)(Attempt).values(
        trial_id=trial.id, started_at=trial.started_at, number=number, resources=None, **values
    )
    key = [Attempt.trial_id, Attempt.started_at]
    insert = insert.on_conflict_do_update(index_elements=key, set_=values).returning(Attempt.number)
    last: int = session.scalars(insert).one()
    if last > MOST_ATTEMPTS:
        session.execute(delete(Attempt).where(Attempt.trial_id == trial.id, Attempt.number <= last - MOST_ATTEMPTS))


def record_resources(session: Session, trial: Trial, resources: ResourceSeries) -> None:
    """Writes what the attempt that runs has used until now, in place of what it said before."""
    mine = Attempt.trial_id == trial.id, Attempt.started_at == trial.started_at
    session.execute(update(Attempt).where(*mine).values(resources=resources))


def listed(session: Session, trial_id: int, *, resources: bool = False) -> Sequence[AttemptDetail]:
    """A trial's attempts, the oldest first: with their environments, or with what they used."""
    mine = select(Attempt.number, Attempt.started_at, Attempt.place).where(Attempt.trial_id == trial_id)
    mine = mine.order_by(Attempt.number)
    if resources:
        used = session.execute(mine.add_columns(Attempt.resources)).all()
        return [AttemptDetail(number, at, place, resources=series) for number, at, place, series in used]
    joined = mine.outerjoin(Environment, Environment.fingerprint == Attempt.environment)
    found = session.execute(joined.add_columns(Environment.record)).all()
    return [AttemptDetail(number, at, place, record) for number, at, place, record in found]
