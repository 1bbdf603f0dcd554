"""Changes of state that workers and people both make.

Functions take a Session; callers commit. The experiment must be locked.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from service.database import Experiment, ExperimentState, Trial, TrialState, Worker, now
from service.database.engine import changed_rows
from service.experiments import events
from service.experiments.events import EventKind

HEARD_WITHIN = timedelta(minutes=1)
"""A worker that was heard of less long ago is there."""
MOST_OF_A_PERSON = 16
"""So many of somebody's queued experiments are looked at at a time: those that were claimed make room for others."""
BEHIND = f"others come first: {MOST_OF_A_PERSON} or more of the same person's wait before it"


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

    `state` is QUEUED or PAUSED. `ended_at`: when these ran last, as far as is known; by default now, or where the
    worker is not there any more, when it was last heard of.
    """
    ended_at = ended_at or _silent_since(session, experiment)
    experiment.state = state
    experiment.worker = experiment.process = None
    if state == ExperimentState.QUEUED:
        line_up(session, experiment)
    for trial in running_trials(session, experiment):
        requeue_trial(trial, charged=False, ended_at=ended_at)


def _silent_since(session: Session, experiment: Experiment) -> datetime | None:
    """When the experiment's worker was last heard of, if it is not there any more: since then nothing runs."""
    silent = Worker.name == experiment.worker, Worker.seen_at < now() - HEARD_WITHIN
    return session.scalar(select(Worker.seen_at).where(*silent))


def line_up(session: Session, experiment: Experiment) -> None:
    """Says of a queued experiment that it waits for others of its owner's, where no worker looks at it before they run.

    Why the others wait, workers say.
    """
    whose = Experiment.project_id == experiment.project_id, Experiment.owner == experiment.owner
    first = (
        select(Experiment.id)
        .where(Experiment.state == ExperimentState.QUEUED, *whose)
        .order_by(Experiment.project_id, Experiment.owner, Experiment.priority.desc(), Experiment.id)
        .limit(MOST_OF_A_PERSON)
    )
    if experiment.id not in session.scalars(first).all():
        experiment.waiting = BEHIND


def line_up_all(session: Session) -> None:
    """Says so of all that are queued, and wait for nothing else that is known."""
    whose = Experiment.project_id, Experiment.owner
    place = func.row_number().over(partition_by=whose, order_by=(Experiment.priority.desc(), Experiment.id))
    queued = select(Experiment.id, place.label("place")).where(Experiment.state == ExperimentState.QUEUED).subquery()
    behind = select(queued.c.id).where(queued.c.place > MOST_OF_A_PERSON)
    session.execute(
        update(Experiment).where(Experiment.id.in_(behind), Experiment.waiting.is_(None)).values(waiting=BEHIND)
    )


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
        session,
        update(Trial)
        .where(*waiting)
        .values(state=TrialState.CANCELLED, finished_at=now(), failure=None, rests_until=None),
    )


def drop_running(session: Session, experiment: Experiment) -> int:
    """Cancels the trials that run, whose worker must be fenced off; how many."""
    running, ended_at = running_trials(session, experiment), _silent_since(session, experiment)
    for trial in running:
        end_attempt(trial, ended_at)
        trial.state, trial.finished_at, trial.failure = TrialState.CANCELLED, now(), None
    return len(running)


def close(session: Session, experiment: Experiment, state: ExperimentState, actor: str, error: str | None) -> None:
    """Makes the experiment final. Its trials must be."""
    experiment.state, experiment.error, experiment.finished_at = state, error, now()
    experiment.worker = experiment.process = experiment.waiting = experiment.unfit_since = None
    events.record(session, EventKind.CLOSED, actor, experiment, state=state.value, error=error)
