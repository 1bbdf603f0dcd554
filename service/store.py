"""Every SQL statement about experiments and trials as people see them; `service.queue` has the workers' side.

Functions take a Session; callers commit.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select, text, update
from sqlalchemy.orm import Session

from service.errors import IdempotencyError, NotFoundError
from service.grid import ExperimentSpec, Plan
from service.models import (
    EPOCHS_DONE,
    OPEN_EXPERIMENTS,
    OPEN_TRIALS,
    Artifact,
    EpochPoint,
    Experiment,
    ExperimentState,
    IdempotencyKey,
    Protocol,
    Result,
    Trial,
    TrialState,
    Worker,
    now,
)


@dataclass
class Progress:
    """How far an experiment is: trials by state, epochs done and planned, the best accuracies so far."""

    trials: dict[TrialState, int] = field(default_factory=lambda: dict.fromkeys(TrialState, 0))
    epochs_done: int = 0
    epochs: int = 0
    best_accuracy: float | None = None
    best_val_accuracy: float | None = None

    def add(
        self, state: TrialState, count: int, done: int, epochs: int, accuracy: float | None, val_accuracy: float | None
    ) -> None:
        """Adds the trials of one state."""
        self.trials[state] += count
        self.epochs_done += done
        self.epochs += epochs
        self.best_accuracy = _larger(self.best_accuracy, accuracy)
        self.best_val_accuracy = _larger(self.best_val_accuracy, val_accuracy)


def _larger(a: float | None, b: float | None) -> float | None:
    return max((value for value in (a, b) if value is not None), default=None)


@dataclass(frozen=True)
class TrialDetail:
    """A trial with everything known of it."""

    trial: Trial
    points: Sequence[EpochPoint]
    result: Result | None
    protocol: dict[str, Any] | None
    artifacts: Sequence[Artifact]


def answer_once(session: Session, key: str | None, body: Any, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`answer()`, or what was answered to the same key before; raises `IdempotencyError` if the body differs."""
    if key is None:
        return answer()
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    if session.bind is not None and session.bind.dialect.name == "postgresql":
        # Two first requests at once: the second waits here for the first one's commit. (SQLite has one writer.)
        session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": key})
    if known := session.get(IdempotencyKey, key):
        if known.body_sha256 != digest:
            raise IdempotencyError(f"Idempotency-Key {key!r} was used before with another body; use a new key")
        return known.response
    response = answer()
    session.add(IdempotencyKey(key=key, body_sha256=digest, response=response))
    return response


def create_experiment(session: Session, spec: ExperimentSpec, plan: Plan) -> Experiment:
    """Inserts the experiment and all its trials."""
    experiment = Experiment(
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        priority=spec.priority,
        grid_points=plan.points,
        trial_count=len(plan.trials),
    )
    session.add(experiment)
    session.flush()
    rows = [
        {
            "experiment_id": experiment.id,
            "number": number,
            "fingerprint": planned.fingerprint,
            "cell": planned.cell,
            "config": planned.config.to_dict(),
            "dataset": planned.config.dataset,
            "model": planned.config.model,
            "layer": planned.config.layer,
            "rank": planned.config.rank,
            "lambda_ort": planned.config.lambda_ort,
            "constraint": planned.config.constraint,
            "delta": planned.config.delta,
            "seed": planned.config.seed,
            "epochs": planned.config.training.epochs,
        }
        for number, planned in enumerate(plan.trials)
    ]
    session.execute(insert(Trial), rows)
    return experiment


def get_experiment(session: Session, experiment_id: int) -> Experiment:
    """The experiment; raises `NotFoundError`."""
    experiment = session.get(Experiment, experiment_id)
    if experiment is None:
        raise NotFoundError(f"there is no experiment {experiment_id}")
    return experiment


def list_experiments(
    session: Session, *, limit: int, after: int | None = None, state: ExperimentState | None = None
) -> Sequence[Experiment]:
    """Newest first, those older than experiment `after`."""
    query = select(Experiment).order_by(Experiment.id.desc()).limit(limit)
    if after is not None:
        query = query.where(Experiment.id < after)
    if state is not None:
        query = query.where(Experiment.state == state)
    return session.scalars(query).all()


def progress(session: Session, experiment_ids: Sequence[int]) -> dict[int, Progress]:
    """Progress of several experiments in one statement."""
    query = (
        select(
            Trial.experiment_id,
            Trial.state,
            func.count(),
            func.sum(EPOCHS_DONE),
            func.sum(Trial.epochs),
            func.max(Result.accuracy),
            func.max(Trial.best_val_accuracy),
        )
        .outerjoin(Result, Result.trial_id == Trial.id)
        .where(Trial.experiment_id.in_(experiment_ids))
        .group_by(Trial.experiment_id, Trial.state)
    )
    found = {i: Progress() for i in experiment_ids}
    for experiment_id, state, count, epochs_done, epochs, accuracy, val_accuracy in session.execute(query):
        found[experiment_id].add(state, count, int(epochs_done), int(epochs), accuracy, val_accuracy)
    return found


def list_trials(
    session: Session, experiment_id: int, *, limit: int, after: int | None = None, state: TrialState | None = None
) -> list[tuple[Trial, Result | None]]:
    """Trials with their results in the grid's order, those numbered above `after`; raises `NotFoundError`."""
    get_experiment(session, experiment_id)
    conditions: list[ColumnElement[bool]] = [Trial.experiment_id == experiment_id]
    if after is not None:
        conditions.append(Trial.number > after)
    if state is not None:
        conditions.append(Trial.state == state)
    query = select(Trial, Result).outerjoin(Result, Result.trial_id == Trial.id).where(*conditions)
    return [(trial, result) for trial, result in session.execute(query.order_by(Trial.number).limit(limit))]


def get_trial(session: Session, trial_id: int) -> TrialDetail:
    """A trial with its epoch points, result and artifacts; raises `NotFoundError`."""
    trial = session.get(Trial, trial_id)
    if trial is None:
        raise NotFoundError(f"there is no trial {trial_id}")
    points = session.scalars(select(EpochPoint).where(EpochPoint.trial_id == trial_id).order_by(EpochPoint.epoch)).all()
    result = session.get(Result, trial_id)
    protocol = session.get(Protocol, result.protocol) if result else None
    artifacts = session.scalars(select(Artifact).where(Artifact.trial_id == trial_id).order_by(Artifact.kind)).all()
    return TrialDetail(trial, points, result, protocol.record if protocol else None, artifacts)


def cancel_experiment(session: Session, experiment_id: int) -> Experiment:
    """Cancels what is not final yet; a final experiment stays as it is. Raises `NotFoundError`.

    The fence grows, so that whatever its worker still writes is refused and the worker stops.
    """
    changed = session.execute(
        update(Experiment)
        .where(Experiment.id == experiment_id, Experiment.state.in_(OPEN_EXPERIMENTS))
        .values(state=ExperimentState.CANCELLED, fence=Experiment.fence + 1, finished_at=now())
    )
    if changed.rowcount:  # type: ignore[attr-defined]
        session.execute(
            update(Trial)
            .where(Trial.experiment_id == experiment_id, Trial.state.in_(OPEN_TRIALS))
            .values(state=TrialState.CANCELLED, finished_at=now())
        )
    return get_experiment(session, experiment_id)


def last_worker_sign(session: Session) -> datetime | None:
    """When any worker was last heard of."""
    return session.scalar(select(func.max(Worker.seen_at)))


def database_head(session: Session) -> str | None:
    """The migration the database stands at; raises `sqlalchemy.exc.DBAPIError` where it was never migrated."""
    head: str | None = session.scalar(text("SELECT version_num FROM alembic_version"))
    return head
