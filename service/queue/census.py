"""SQL of what there is and what happened: numbers for Prometheus, and what an operator looks at.

Functions take a Session.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.orm import Session

from service.database import ClusterNode, Event, Experiment, ExperimentState, Tally, TrialState, Worker, now
from service.experiments.events import EventKind
from service.experiments.transitions import HEARD_WITHIN
from service.queue import nodes
from service.queue.places import STARTING
from service.queue.rests import ALL_REST
from service.queue.shares import AT_A_TIME, NEEDS, NO_NODE

_MOST_NODES = 1000
WAITING = {
    "turn": ("others come first", "the cluster is full"),
    "limit": (AT_A_TIME,),
    "places": (NEEDS,),
    "rest": (ALL_REST,),
    "driver": ("its driver",),
    "start": (STARTING,),
    "worker": ("no worker", NO_NODE),
}
"""How reasons begin or end for which experiments wait, by class; besides: `unfit` (no node has room) and `other`."""


@dataclass(frozen=True)
class Census:
    """Experiments and trials by state, archived ones too; `queued_trials` are those of experiments that may run.

    `gpu_seconds` are those of all attempts that ended, a fraction of a GPU counting as such; they, `lost_leases` and
    `succeeded` have those of deleted experiments. `waiting` are experiments that run nothing, by the class of their
    reason (`WAITING`); `at_work` trials that run, by node, and `since` by node and experiment when the first of them
    began.
    """

    experiments: Mapping[ExperimentState, int]
    trials: Mapping[TrialState, int]
    queued_trials: int
    gpu_seconds: int
    lost_leases: int
    succeeded: int
    workers: int
    nodes: Sequence[ClusterNode]
    waiting: Mapping[str, int]
    at_work: Mapping[str, int]
    since: Mapping[str, Mapping[int, datetime]]


@dataclass(frozen=True)
class Sign:
    """What a worker last said of itself, and when; `started_at`: when it did so first."""

    worker: str
    cpus: float
    gpus: float
    seen_at: datetime
    started_at: datetime


@dataclass(frozen=True)
class OpenExperiment:
    """An experiment that is queued or running. `waiting`: why its trials cannot run now; `unfit`: no node has room."""

    id: int
    name: str
    state: ExperimentState
    waiting: str | None
    unfit: bool


def last_signs(session: Session) -> list[Sign]:
    """Every worker on the list, by name."""
    query = select(Worker.name, Worker.cpus, Worker.gpus, Worker.seen_at, Worker.started_at).order_by(Worker.name)
    return [Sign(*row) for row in session.execute(query)]


def open_experiments(session: Session) -> list[OpenExperiment]:
    """Those that are queued or running, the oldest first."""
    unfit = Experiment.unfit_since.is_not(None)
    query = select(Experiment.id, Experiment.name, Experiment.state, Experiment.waiting, unfit)
    query = query.where(Experiment.state.in_((ExperimentState.QUEUED, ExperimentState.RUNNING))).order_by(Experiment.id)
    return [OpenExperiment(*row) for row in session.execute(query)]


def unfit_for_bf16(session: Session) -> bool:
    """Whether workers are there, and the processor of every one is known to lack instructions for bf16."""
    seen = session.scalars(select(Worker.bf16).where(Worker.seen_at >= now() - HEARD_WITHIN)).all()
    return bool(seen) and all(has is False for has in seen)


def waiting_for(reason: str, *, unfit: bool) -> str:
    """The class of a reason."""
    if unfit:
        return "unfit"
    return next((name for name, said in WAITING.items() if reason.startswith(said) or reason.endswith(said)), "other")


class Counted(NamedTuple):
    """What of experiments may never become less, as Prometheus counts it: a rate over it would else have all of it."""

    gpu_seconds: float
    lost_leases: int
    succeeded: int


def counted(session: Session, *which: ColumnElement[bool]) -> Counted:
    """That of these experiments."""
    gpus = Experiment.spec["resources"]["gpus"].as_float()
    succeeded = case((Tally.state == TrialState.SUCCEEDED, Tally.trials), else_=0)
    tallied = select(func.sum(Tally.run_seconds * gpus), func.sum(succeeded))
    spent, trials = session.execute(tallied.join(Experiment, Experiment.id == Tally.experiment_id).where(*which)).one()
    lost = select(func.count()).select_from(Event).join(Experiment, Experiment.id == Event.experiment_id)
    lost = lost.where(Event.kind == EventKind.REAPED.value, *which)
    return Counted(float(spent or 0), session.scalar(lost) or 0, int(trials or 0))


def _counted_of_deleted(session: Session, project_id: int | None) -> Counted:
    """That of experiments that are deleted, as the events say that outlive them."""
    said = Event.detail["gpu_seconds"].as_float(), *(Event.detail[name].as_integer() for name in Counted._fields[1:])
    query = select(*map(func.sum, said)).where(Event.kind == EventKind.DELETED.value)
    if project_id is not None:
        query = query.where(Event.detail["project_id"].as_integer() == project_id)
    spent, *counts = session.execute(query).one()
    return Counted(float(spent or 0), *(int(count or 0) for count in counts))


def take_census(session: Session, project_id: int | None = None) -> Census:
    """Counts everything, or what belongs to a project (workers are everybody's); no trial is read."""
    mine = () if project_id is None else (Experiment.project_id == project_id,)
    experiments = dict.fromkeys(ExperimentState, 0)
    by_state = select(Experiment.state, func.count()).where(*mine).group_by(Experiment.state)
    for state, count in session.execute(by_state):
        experiments[state] = count
    trials = dict.fromkeys(TrialState, 0)
    tallied = select(Tally.state, func.sum(Tally.trials)).group_by(Tally.state)
    if mine:
        tallied = tallied.join(Experiment, Experiment.id == Tally.experiment_id).where(*mine)
    for trial_state, count in session.execute(tallied):
        trials[trial_state] = int(count)
    waiting = (
        select(func.sum(Tally.trials))
        .join(Experiment, Experiment.id == Tally.experiment_id)
        .where(
            Tally.state == TrialState.QUEUED,
            Experiment.state.in_((ExperimentState.QUEUED, ExperimentState.RUNNING)),
            *mine,
        )
    )
    there, deleted = counted(session, Experiment.deleted_at.is_(None), *mine), _counted_of_deleted(session, project_id)
    unfit = Experiment.unfit_since.is_not(None)
    why = select(Experiment.waiting, unfit, func.count()).where(Experiment.waiting.is_not(None), *mine)
    why = why.where(Experiment.state.in_((ExperimentState.QUEUED, ExperimentState.RUNNING)))
    reasons = dict.fromkeys(("unfit", *WAITING, "other"), 0)
    for reason, misfit, count in session.execute(why.group_by(Experiment.waiting, unfit)):
        reasons[waiting_for(reason or "", unfit=misfit)] += count
    rows = nodes.listed(session, _MOST_NODES)
    running = nodes.running_on(session, rows, project_id)
    seen = select(func.count()).where(Worker.seen_at >= now() - HEARD_WITHIN)
    return Census(
        experiments=experiments,
        trials=trials,
        queued_trials=int(session.scalar(waiting) or 0),
        # PostgreSQL adds up in any order: of the last digits a sum may be less than the one before.
        gpu_seconds=round(there.gpu_seconds + deleted.gpu_seconds),
        lost_leases=there.lost_leases + deleted.lost_leases,
        succeeded=there.succeeded + deleted.succeeded,
        workers=session.scalar(seen) or 0,
        nodes=rows,
        waiting=reasons,
        at_work={node: len(trials) for node, trials in running.items()},
        since={node: _first_began(trials) for node, trials in running.items()},
    )


def _first_began(trials: Sequence[nodes.AtWork]) -> Mapping[int, datetime]:
    """Experiment -> when the first of its trials began, of these."""
    found: dict[int, datetime] = {}
    for trial in trials:
        if trial.since is not None:
            found[trial.experiment_id] = min(trial.since, found.get(trial.experiment_id, trial.since))
    return found
