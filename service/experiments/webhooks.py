"""Which events an address is still to be told of. Functions take a Session; callers commit.

At least once: an event is told again until the address took it, and twice where an answer was lost. Events of several
experiments may become visible out of the order of their numbers, so a cursor alone would miss some:
`Webhook.after` stays behind by longer than any transaction lasts, and the events past it are compared one by one with
the deliveries there are.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict

from sqlalchemy import ColumnElement, ScalarSelect, and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.orm import Session

from service.database import Event, Experiment, Trial, Webhook, WebhookDelivery, now
from service.database.engine import upsert
from service.experiments.events import EventKind

MAX_ATTEMPTS = 34
"""Of one delivery: over twelve hours, and at most a day; then it is given up."""
_SETTLED_AFTER = timedelta(minutes=10)
"""No transaction lasts so long: events this old are all visible."""
_TAKEN_FOR = timedelta(minutes=1)
"""A delivery that was taken and not heard of again is due again after this."""
_ABANDONED_AFTER = timedelta(days=1)
"""A delivery that nobody took for so long belongs to an address of which no worker knows any more."""
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 3600.0
_LONGEST_ERROR = 1000


class ExperimentMessage(TypedDict):
    """The experiment that an event is about, as it was after it."""

    id: int
    name: str
    state: str
    error: str | None
    trials: int
    path: str


class TrialMessage(TypedDict):
    """The trial that an event is about; `failure` is the class of what went wrong."""

    id: int
    number: int
    failure: str | None
    error: str | None
    path: str


class Message(TypedDict):
    """What an address is told of an event."""

    id: int
    kind: str
    at: str
    experiment: ExperimentMessage | None
    trial: TrialMessage | None


@dataclass(frozen=True)
class Delivery:
    """An event to be sent, for the `attempt`th time."""

    endpoint: str
    event_id: int
    attempt: int
    message: Message


def enrol(session: Session, endpoint: str) -> None:
    """Begins to tell an address of what happens from now on; one that is known goes on where it was."""
    newest = session.scalar(select(func.max(Event.id))) or 0
    session.execute(upsert(session)(Webhook).values(endpoint=endpoint, after=newest).on_conflict_do_nothing())


def has_work(session: Session, endpoint: str, kinds: Collection[EventKind]) -> bool:
    """Whether `take` would find anything: a look that locks nothing."""
    after = session.scalar(select(Webhook.after).where(Webhook.endpoint == endpoint))
    if after is None:
        return False
    new = exists().where(*_untold(endpoint, after, kinds))
    due = exists().where(WebhookDelivery.endpoint == endpoint, WebhookDelivery.due_at <= now())
    return bool(session.scalar(select(new | due)))


def take(session: Session, endpoint: str, kinds: Collection[EventKind], limit: int) -> list[Delivery]:
    """What is due now, oldest first. Nobody else is given it for a minute: say by then what came of it (`settle`)."""
    after = session.scalar(select(Webhook.after).where(Webhook.endpoint == endpoint).with_for_update())
    if after is None:
        return []
    moment = now()
    found = select(Event.id).where(*_untold(endpoint, after, kinds))
    rows = [
        {"endpoint": endpoint, "event_id": event_id, "attempts": 0, "due_at": moment}
        for event_id in session.scalars(found)
    ]
    if rows:
        session.execute(insert(WebhookDelivery), rows)
    _settle_old(session, endpoint, after)
    query = (
        select(WebhookDelivery, Event, Experiment, Trial)
        .join(Event, Event.id == WebhookDelivery.event_id)
        .outerjoin(Experiment, Experiment.id == Event.experiment_id)
        .outerjoin(Trial, Trial.id == Event.trial_id)
        .where(WebhookDelivery.endpoint == endpoint, WebhookDelivery.due_at <= moment)
        .order_by(WebhookDelivery.event_id)
        .limit(limit)
    )
    taken = []
    for delivery, event, experiment, trial in session.execute(query):
        delivery.attempts += 1
        delivery.due_at = moment + _TAKEN_FOR
        taken.append(Delivery(endpoint, event.id, delivery.attempts, _message(event, experiment, trial)))
    return taken


def settle(session: Session, delivery: Delivery, *, delivered: bool) -> bool:
    """Writes what came of a delivery; whether it is over: delivered, or given up after `MAX_ATTEMPTS`."""
    over = delivered or delivery.attempt >= MAX_ATTEMPTS
    pause = min(_FIRST_PAUSE * 2 ** (delivery.attempt - 1), _LONGEST_PAUSE) * random.uniform(0.5, 1)
    this = (WebhookDelivery.endpoint == delivery.endpoint, WebhookDelivery.event_id == delivery.event_id)
    due = None if over else now() + timedelta(seconds=pause)
    session.execute(update(WebhookDelivery).where(*this).values(due_at=due))
    return over


def owed(told: Mapping[str, Collection[EventKind]]) -> ColumnElement[bool]:
    """Of an event: whether an address is still to be told of it.

    Those that are `told` of these kinds of events have until they took it, or it was given up; others a day from when
    it was due.
    """
    known = or_(WebhookDelivery.endpoint.in_(told), WebhookDelivery.due_at > now() - _ABANDONED_AFTER)
    due = exists().where(WebhookDelivery.event_id == Event.id, WebhookDelivery.due_at.is_not(None), known)
    after = {name: select(Webhook.after).where(Webhook.endpoint == name).scalar_subquery() for name in told}
    return or_(due, *(and_(*_untold(name, after[name], kinds)) for name, kinds in told.items()))


def _untold(endpoint: str, after: int | ScalarSelect[int], kinds: Collection[EventKind]) -> Sequence[Any]:
    told = exists().where(WebhookDelivery.endpoint == endpoint, WebhookDelivery.event_id == Event.id)
    return Event.id > after, Event.kind.in_(kinds), ~told


def _settle_old(session: Session, endpoint: str, after: int) -> None:
    """Moves `after` on, and forgets the deliveries up to it that are over."""
    settled = session.scalar(select(func.max(Event.id)).where(Event.id > after, Event.at < now() - _SETTLED_AFTER))
    if settled is None:
        return
    session.execute(update(Webhook).where(Webhook.endpoint == endpoint).values(after=settled))
    over = (WebhookDelivery.endpoint == endpoint, WebhookDelivery.event_id <= settled, WebhookDelivery.due_at.is_(None))
    session.execute(delete(WebhookDelivery).where(*over))


def _message(event: Event, experiment: Experiment | None, trial: Trial | None) -> Message:
    """What is sent: small whatever the experiment holds, and with no part of its spec."""
    about_experiment: ExperimentMessage | None = None
    if experiment is not None:
        about_experiment = {
            "id": experiment.id,
            "name": experiment.name,
            "state": event.detail.get("state", experiment.state.value),
            "error": _short(experiment.error if trial else event.detail.get("error")),
            "trials": experiment.trial_count,
            "path": f"/v1/experiments/{experiment.id}",
        }
    about_trial: TrialMessage | None = None
    if trial is not None:
        about_trial = {
            "id": trial.id,
            "number": trial.number,
            "failure": event.detail.get("failure"),
            "error": _short(trial.error),
            "path": f"/v1/trials/{trial.id}",
        }
    return {
        "id": event.id,
        "kind": event.kind,
        "at": event.at.isoformat(),
        "experiment": about_experiment,
        "trial": about_trial,
    }


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 4]} ..."
