"""What a driver reads of the trials it runs; `service.queue.trials` has what it writes of them.

Functions take a Session, and lock nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache

from sqlalchemy import Select, bindparam, exists, func, or_, select
from sqlalchemy.orm import Session, load_only

from service.database import Artifact, EpochPoint, Event, Experiment, Trial, TrialState, now
from service.database.engine import is_among, is_postgres
from service.experiments.events import EventKind
from service.queue import leases, rests
from service.queue.leases import Lease
from ttsv.config.fields import FieldValues

MODEL = "model"
"""Kind of the artifact that a re-evaluation takes up."""
NETWORKS = MODEL, "best-model"
"""Kinds of the artifacts that are networks: of the last epoch, and of the best one (`training.keep_best`)."""
_FOR_GOOD = TrialState.SUCCEEDED, TrialState.EARLY_STOPPED


_NEXT = (
    *(Trial.id, Trial.number, Trial.epoch, Trial.config, Trial.source_trial_id),
    *(Trial.state, Trial.failure),
)
"""What its driver has to know of the trial that is to begin next."""


@dataclass(frozen=True)
class Curve:
    """One metric of a trial's epochs, in order: (epoch, value)."""

    trial_id: int
    points: list[tuple[int, float]]


@dataclass(frozen=True)
class Tried:
    """A point that a search tried. `value` is the metric after the newest epoch, None before the first."""

    trial_id: int
    fingerprint: str
    state: TrialState
    point: FieldValues
    value: float | None


def next_trial(session: Session, lease: Lease, taken: Collection[int]) -> Trial | None:
    """The trial that is to begin next, but for those that were `taken` already, or rest; raises `LeaseLostError`."""
    asked = {**lease.parameters, **rests.moments(), "taken": list(taken)}
    trial = session.scalar(_next(postgres=is_postgres(session)), asked)
    if trial is None and not leases.is_held(session, lease):
        raise leases.lost(lease)
    return trial


@cache
def _next(*, postgres: bool) -> Select[Trial]:
    return (
        select(Trial)
        .where(exists().where(leases.HELD), Trial.experiment_id == bindparam("lease_experiment"))
        # What is taken still waits in the database for as long as its start was not written: few, and the first of all.
        .where(Trial.state == TrialState.QUEUED, ~is_among(Trial.id, "taken", postgres=postgres))
        .where(rests.READY)
        .order_by(Trial.turn, Trial.number)
        .limit(1)
        .options(load_only(*_NEXT))
    )


def rest_seconds(session: Session, lease: Lease) -> float:
    """For how many seconds all that waits rests; 0 where one could begin, or none waits. Raises `LeaseLostError`."""
    if next_trial(session, lease, ()) is not None:
        return 0.0
    waiting = Trial.experiment_id == lease.experiment_id, Trial.state == TrialState.QUEUED
    until = session.scalar(select(func.min(Trial.rests_until)).where(*waiting))
    return 0.0 if until is None else max(0.0, (until - now()).total_seconds())


def running_trials(session: Session, lease: Lease) -> Sequence[Trial]:
    """Trials that count as running."""
    running = Trial.experiment_id == lease.experiment_id, Trial.state == TrialState.RUNNING
    return session.scalars(select(Trial).where(*running).order_by(Trial.number)).all()


def model_path(session: Session, trial_id: int) -> str | None:
    """Path, relative to the data folder, of the network that a trial left; None where it left none, or it is gone."""
    there = Artifact.trial_id == trial_id, Artifact.kind == MODEL, Artifact.removed_at.is_(None)
    return session.scalar(select(Artifact.path).where(*there))


def model_removed_at(session: Session, trial_id: int) -> datetime | None:
    """When the network that a trial left was removed to make room; None where it was not."""
    return session.scalar(select(Artifact.removed_at).where(Artifact.trial_id == trial_id, Artifact.kind == MODEL))


def cancelled_trials(
    session: Session, since: datetime | None = None, lately: datetime | None = None
) -> Sequence[tuple[int, int]]:
    """The cancelled trials of experiments that became final `since` then (None: ever), with the fence as it is now.

    Of those that never began, of which a large grid may have thousands, only where it became final `lately` (None:
    since then). Whoever runs one again does so under a later fence.
    """
    query = (
        select(Trial.id, Experiment.fence)
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .where(Experiment.finished_at.is_not(None), Trial.state == TrialState.CANCELLED)
    )
    if since is not None:
        query = query.where(Experiment.finished_at > since)
    if lately is not None:
        query = query.where(or_(Trial.started_at.is_not(None), Experiment.finished_at > lately))
    return [(trial_id, fence) for trial_id, fence in session.execute(query)]


def last_ended(session: Session, lease: Lease, most: int) -> Sequence[int]:
    """The trials of the experiment that ended last and that nobody can have run again, from files that they left."""
    query = select(Trial.id).where(Trial.experiment_id == lease.experiment_id, Trial.state.in_(_FOR_GOOD))
    return session.scalars(query.order_by(Trial.finished_at.desc()).limit(most)).all()


def curves(session: Session, lease: Lease, metric: str) -> list[Curve]:
    """A metric's course over the epochs of every trial of the experiment that has any."""
    query = (
        select(EpochPoint.trial_id, EpochPoint.epoch, getattr(EpochPoint, metric))
        .join(Trial, Trial.id == EpochPoint.trial_id)
        .where(Trial.experiment_id == lease.experiment_id)
        .order_by(EpochPoint.trial_id, EpochPoint.epoch)
    )
    found: dict[int, Curve] = {}
    for trial_id, epoch, value in session.execute(query):
        found.setdefault(trial_id, Curve(trial_id, [])).points.append((epoch, value))
    return list(found.values())


def planned_trials(session: Session, lease: Lease) -> int:
    """How many trials the experiment is to have: of a search's that ended early, no more than it has."""
    return session.scalars(select(Experiment.grid_points).where(Experiment.id == lease.experiment_id)).one()


def tried(session: Session, lease: Lease, metric: str) -> list[Tried]:
    """Every point that the search tried so far, in its order."""
    suggested = Event.kind == EventKind.TRIAL_SUGGESTED.value
    query = (
        select(Trial.id, Trial.fingerprint, Trial.state, Event.detail, getattr(EpochPoint, metric))
        .outerjoin(Event, (Event.trial_id == Trial.id) & suggested)
        .outerjoin(EpochPoint, (EpochPoint.trial_id == Trial.id) & (EpochPoint.epoch == Trial.epoch))
        .where(Trial.experiment_id == lease.experiment_id)
        .order_by(Trial.number)
    )
    return [
        Tried(trial_id, fingerprint, state, (detail or {}).get("point", {}), value)
        for trial_id, fingerprint, state, detail, value in session.execute(query)
    ]
