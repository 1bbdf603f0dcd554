"""What a worker writes, as work on a session: `database.write(under(lease, HeldExperiment.start_trial, trial_id))`."""

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from service.queue.leases import Lease
from service.queue.trials import HeldExperiment, hold
from ttsv.results import EpochMetrics

P = ParamSpec("P")
T = TypeVar("T")


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
