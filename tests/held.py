"""What a worker writes, as work on a session: `database.write(under(lease, HeldExperiment.start_trial, trial_id))`.

And what it has to run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import OPEN_TRIALS, Trial, TrialState
from service.database.engine import Database
from service.queue.leases import Lease
from service.queue.trials import HeldExperiment, hold
from ttsv.results import EpochMetrics

P = ParamSpec("P")
T = TypeVar("T")


def write(database: Database, function: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """One call in one transaction."""
    return database.write(lambda session: function(session, *args, **kwargs))


def under(
    lease: Lease, write: Callable[Concatenate[HeldExperiment, P], T], *args: P.args, **kwargs: P.kwargs
) -> Callable[[Session], T]:
    """One write in a unit of work of its own."""

    def work(session: Session) -> T:
        with hold(session, lease) as held:
            return write(held, *args, **kwargs)

    return work


def reported(point: Mapping[str, Any]) -> EpochMetrics:
    """One epoch's metrics as a trial reports them, of a row's columns."""
    return EpochMetrics(epochs=3, **point)


def unfinished_trials(session: Session, lease: Lease) -> Sequence[Trial]:
    """The trials of a lease's experiment that are not final, in the order in which they are to begin."""
    query = select(Trial).where(Trial.experiment_id == lease.experiment_id, Trial.state.in_(OPEN_TRIALS))
    return session.scalars(query.order_by(Trial.turn, Trial.number)).all()


def waiting_trials(database: Database) -> list[Trial]:
    """The trials that wait, of all experiments, in the order in which they begin."""
    with database.read() as session:
        waiting = select(Trial).where(Trial.state == TrialState.QUEUED)
        return list(session.scalars(waiting.order_by(Trial.experiment_id, Trial.turn, Trial.number)))
