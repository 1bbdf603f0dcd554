"""SQL of attempts at trials: where each ran and with what, what it used over time, and how long it is silent.

Functions take a Session; callers commit, and hold the experiment where they write.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import JsonValue
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from service.database import Attempt, Environment, Experiment, Trial, TrialState, now
from service.database.engine import upsert
from service.database.experiments import Pace, ResourceSeries
from ttsv.config.fields import digest

MOST_PLACE = 200
"""So many characters of where a trial runs are kept: many cards that are named by UUID are longer."""

MOST_ATTEMPTS = 50
"""So many of a trial are kept, the newest: one whose process dies for ever leaves no more."""
LEAST_HUNG_SECONDS = 1800.0
"""Half an hour without a word is nothing yet: an epoch or an attack may take so long."""
HUNG_PAUSES = 10
"""So many times its longest pause so far."""
TOLD_AFTER = timedelta(seconds=30)
"""So much later than a report it is known at most: the time between two that tell of the use of resources."""
_NO_REPORT: Pace = {"reported": 0.0, "longest_pause": 0.0}


@dataclass(frozen=True)
class AttemptDetail:
    """An attempt, with the record of its environment; None where it never said."""

    number: int
    started_at: datetime
    place: str
    environment: Mapping[str, JsonValue] | None = None
    resources: ResourceSeries | None = None


@dataclass(frozen=True)
class Silence:
    """When a running trial last reported, and the seconds without a report after which it is killed and tried again."""

    last_report_at: datetime
    hung_after: float

    @property
    def is_long(self) -> bool:
        """Whether a good part of that time is up: who looks for what is stuck wants to see it."""
        return (now() - self.last_report_at).total_seconds() > self.hung_after / 4


def hung_seconds(asked: float | None, longest_pause: float) -> float:
    """Seconds without a report after which an attempt counts as hung: as a spec asks, or by its own pace."""
    return asked or max(LEAST_HUNG_SECONDS, HUNG_PAUSES * longest_pause)


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
    # Not those that began before: that is said by the clock of another driver, maybe of another machine.
    others = Attempt.trial_id == trial.id, Attempt.started_at != trial.started_at
    number = select(func.coalesce(func.max(Attempt.number), 0) + 1).where(*others).scalar_subquery()
    values = {"fence": fence, "place": place[:MOST_PLACE], "environment": fingerprint}
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


def silences(session: Session, trials: Iterable[Trial]) -> dict[int, Silence]:
    """Trial -> how long it is silent and may be, of those among these trials that run (`silences_since`)."""
    running = {
        trial.id: (trial.experiment_id, trial.started_at)
        for trial in trials
        if trial.state is TrialState.RUNNING and trial.started_at is not None
    }
    return silences_since(session, running)


def silences_since(session: Session, running: Mapping[int, tuple[int, datetime]]) -> dict[int, Silence]:
    """Trial -> how long it is silent and may be, of trials of experiments whose newest attempts began then.

    A report is known where the use of resources came with it (`ResourceSeries.pace`): every half minute, and after each
    longer pause. So the last one may be half a minute later than said, and no pause is missed that makes the limit. A
    trial that lives has not used the limit up: where that is shorter than what is not known yet, it reported since.
    """
    if not running:
        return {}
    experiments = {experiment_id for experiment_id, _ in running.values()}
    limits = select(Experiment.id, Experiment.spec["hung_after"].as_float()).where(Experiment.id.in_(experiments))
    asked: dict[int, float | None] = dict(session.execute(limits).all())
    newest = (Trial.id == Attempt.trial_id) & (Trial.started_at == Attempt.started_at)
    told = select(Attempt.trial_id, Attempt.resources["pace"]).join(Trial, newest).where(Attempt.trial_id.in_(running))
    paces: dict[int, Pace | None] = dict(session.execute(told).all())
    found = {}
    for trial_id, (experiment_id, began) in running.items():
        pace = paces.get(trial_id) or _NO_REPORT
        limit = hung_seconds(asked.get(experiment_id), pace["longest_pause"])
        reported = began + timedelta(seconds=pace["reported"])
        since = min(reported + TOLD_AFTER, now() - timedelta(seconds=limit))
        found[trial_id] = Silence(max(reported, since), limit)
    return found
