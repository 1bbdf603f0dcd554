"""Changes of state that workers and people both make.

Functions take a Session; callers commit. The experiment must be locked.
"""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from service.database import Experiment, ExperimentState, Trial, TrialState, now
from service.database.engine import changed_rows
from service.experiments import events
from service.experiments.events import EventKind


def running_trials(session: Session, experiment: Experiment) -> Sequence[Trial]:
    """The experiment's trials that run now, as the database has them."""
    query = select(Trial).where(Trial.experiment_id == experiment.id, Trial.state == TrialState.RUNNING)
    return session.scalars(query.order_by(Trial.number).execution_options(populate_existing=True)).all()


def end_attempt(trial: Trial, at: datetime | None = None) -> None:
    """Counts the time of the attempt that ended `at` some moment; by default now, as where its end was just noticed."""
    if trial.started_at is not None:
        trial.run_seconds += max(0.0, ((at or now()) - trial.started_at).total_seconds())


def requeue(
    session: Session, experiment: Experiment, state: ExperimentState, *, ended_at: datetime | None = None
) -> None:
    """Takes the experiment from its worker and its running trials back into the queue, whoever wanted it or died.

    `state` is QUEUED or PAUSED. `ended_at`: when these ran last, as far as is known; by default now.
    """
    experiment.state = state
    experiment.worker = experiment.process = None
    for trial in running_trials(session, experiment):
        requeue_trial(trial, charged=False, ended_at=ended_at)


def requeue_trial(trial: Trial, *, charged: bool, ended_at: datetime | None = None) -> None:
    """Lets a running trial wait again, before all that never began. `charged`: its own process died of it.

    The death of a node, cluster, driver, worker or database is no fault of the trial's, nor is giving way.
    """
    end_attempt(trial, ended_at)
    trial.state = TrialState.QUEUED
    trial.turn = min(trial.turn, -1)
    if not charged:
        trial.attempts -= 1


def drop_queued(session: Session, experiment: Experiment) -> int:
    """Cancels the trials that wait; how many."""
    waiting = Trial.experiment_id == experiment.id, Trial.state == TrialState.QUEUED
    return changed_rows(
        session, update(Trial).where(*waiting).values(state=TrialState.CANCELLED, finished_at=now(), failure=None)
    )


def drop_running(session: Session, experiment: Experiment) -> int:
    """Cancels the trials that run, whose worker must be fenced off; how many."""
    running = running_trials(session, experiment)
    for trial in running:
        end_attempt(trial)
        trial.state, trial.finished_at, trial.failure = TrialState.CANCELLED, now(), None
    return len(running)


def close(session: Session, experiment: Experiment, state: ExperimentState, actor: str, error: str | None) -> None:
    """Makes the experiment final. Its trials must be."""
    experiment.state, experiment.error, experiment.finished_at = state, error, now()
    experiment.worker = experiment.process = experiment.waiting = experiment.unfit_since = None
    events.record(session, EventKind.CLOSED, actor, experiment, state=state.value, error=error)
