"""Events: what happened to an experiment or a trial, and who did it.

An event is written in the transaction of what it tells, and none is ever deleted but with its experiment: that this
was deleted, by whom, and what it was, is an event of no experiment. Those of one
experiment are numbered in the order in which they happened: each is written under the lock of the experiment's row.
Over several experiments an event may become visible after one with a larger number, by as long as its transaction took.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Event, Experiment, Trial, now


class EventKind(StrEnum):
    """What can happen: the verbs of people, then what workers do with experiments, then with trials."""

    SUBMITTED = "submitted"
    CLONED = "cloned"
    REEVALUATED = "reevaluated"
    PAUSED = "paused"
    RESUMED = "resumed"
    STOPPING = "stopping"
    CANCELLED = "cancelled"
    RETRIED = "retried"
    EXTENDED = "extended"
    ARCHIVED = "archived"
    UNARCHIVED = "unarchived"
    DELETED = "deleted"
    PRUNED = "pruned"
    UPDATED = "updated"
    CLAIMED = "claimed"
    RELEASED = "released"
    REAPED = "reaped"
    CLOSED = "closed"
    TRIAL_SUGGESTED = "trial_suggested"
    TRIAL_FINISHED = "trial_finished"
    TRIAL_EARLY_STOPPED = "trial_early_stopped"
    TRIAL_FAILED = "trial_failed"
    TRIAL_LOST = "trial_lost"
    TRIAL_YIELDED = "trial_yielded"
    TRIAL_CROWDED = "trial_crowded"


def record(session: Session, kind: EventKind, actor: str, experiment: Experiment, **detail: Any) -> None:
    """Adds an event of an experiment; `detail` is JSON."""
    session.add(Event(experiment_id=experiment.id, actor=actor, kind=kind.value, detail=detail))


def of_trial(kind: EventKind, actor: str, trial: Trial, **detail: Any) -> dict[str, Any]:
    """The row of an event of a trial, with its number and attempt; `detail` is JSON."""
    facts = {"number": trial.number, "attempt": trial.attempts} | detail
    keys = {"experiment_id": trial.experiment_id, "trial_id": trial.id}
    return {**keys, "at": now(), "actor": actor, "kind": kind.value, "detail": facts}


def record_deletion(session: Session, actor: str, experiment: Experiment, **detail: Any) -> None:
    """Adds the event that outlives an experiment; `detail` is JSON."""
    facts = {"experiment": experiment.id, "name": experiment.name, "owner": experiment.owner} | detail
    session.add(Event(actor=actor, kind=EventKind.DELETED.value, detail=facts))


def list_events(
    session: Session,
    *,
    limit: int,
    after: int | None = None,
    newest_first: bool = False,
    experiment_id: int | None = None,
    project_id: int | None = None,
    kinds: Sequence[EventKind] = (),
) -> Sequence[Event]:
    """Events by their numbers: of one experiment, of a project's experiments, deleted ones too, or of all.

    Those that come after number `after` in this order; of these kinds, or where none is named of every kind.
    """
    query = select(Event).order_by(Event.id.desc() if newest_first else Event.id).limit(limit)
    if after is not None:
        query = query.where(Event.id < after if newest_first else Event.id > after)
    if experiment_id is not None:
        query = query.where(Event.experiment_id == experiment_id)
    if kinds:
        query = query.where(Event.kind.in_(kinds))
    if project_id is not None:
        of_deleted = Event.experiment_id.is_(None) & (Event.detail["project_id"].as_integer() == project_id)
        query = query.outerjoin(Experiment, Experiment.id == Event.experiment_id)
        query = query.where((Experiment.project_id == project_id) | of_deleted)
    return session.scalars(query).all()
