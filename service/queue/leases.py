"""Claims of experiments, and the leases under which workers run them.

An experiment is claimed whole. Every claim, reaping, pause and cancelling makes its `fence` grow, and every write of a
worker first locks the experiment's row under the fence it was given: a stale worker can write nothing. Whether a
lease still lives is told by its heartbeat counter, which the reaper watches on its own monotonic clock
(`workers.worker.poller`), so no clock has to agree with another.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, bindparam, delete, func, select, update
from sqlalchemy.orm import Session, load_only

from service.database import EPOCHS_DONE, OPEN_TRIALS, Experiment, ExperimentState, Tally, TrialState, Worker, now
from service.database.engine import changed_rows, upsert
from service.database.experiments import ProcessIdentity
from service.database.outages import broken_connection
from service.errors import LeaseLostError
from service.experiments import events, transitions
from service.experiments.events import EventKind
from service.experiments.transitions import HEARD_WITHIN
from ttsv.runtime.faults import fault

FORGOTTEN_AFTER = timedelta(days=1)
"""A worker unseen for so long was killed: it is taken off the list."""
NOBODY = "no worker is there"
"""Why an experiment waits that nobody could run."""
_MISSES: ColumnElement[bool] = Experiment.state.in_(
    (ExperimentState.QUEUED, ExperimentState.RUNNING)
) & Experiment.waiting.is_distinct_from(NOBODY)

# Made once, as are all statements that are executed for every trial: making one takes as long as executing it.
HELD: ColumnElement[bool] = (
    (Experiment.id == bindparam("lease_experiment"))
    & (Experiment.fence == bindparam("lease_fence"))
    & (Experiment.state == ExperimentState.RUNNING)
)
"""That the lease still holds whose `parameters` a statement is executed with."""
_IS_HELD = select(Experiment.id).where(HELD)
_IS_STOPPING = select(Experiment.stopping).where(HELD)
_BEAT = update(Experiment).where(HELD).values(heartbeat=Experiment.heartbeat + 1)
# What the session may have loaded before the lock was its own is read again: of the row what is wanted for every trial.
_WANTED = (
    *(Experiment.fence, Experiment.state, Experiment.stopping, Experiment.worker),
    *(Experiment.trial_count, Experiment.grid_points),
)
_LOCK = select(Experiment).where(HELD).options(load_only(*_WANTED)).with_for_update(key_share=True)
_LOCK = _LOCK.execution_options(populate_existing=True)


@dataclass(frozen=True)
class Lease:
    """The right to run one experiment: what a claim gives."""

    experiment_id: int
    fence: int

    @property
    def parameters(self) -> dict[str, int]:
        """What statements about `HELD` are executed with."""
        return {"lease_experiment": self.experiment_id, "lease_fence": self.fence}


@dataclass(frozen=True)
class Watched:
    """A running experiment as a reaper sees it: when (fence, heartbeat) stands still, its worker is gone."""

    experiment_id: int
    fence: int
    heartbeat: int
    worker: str | None
    process: ProcessIdentity | None


def greet(session: Session, worker: str, cpus: float, gpus: float, bf16: bool | None = None) -> None:
    """Says that a worker is there; called again and again. Takes those off the list that were killed long ago.

    `bf16`: whether its processor has instructions for that, if it is known. Where no worker was heard of lately, not
    even this one, nobody saw what fits a node: the time in which an experiment fits none begins anew.
    """
    if not _is_anybody_there(session):
        session.execute(update(Experiment).where(Experiment.unfit_since.is_not(None)).values(unfit_since=None))
        session.execute(update(Experiment).where(Experiment.waiting == NOBODY).values(waiting=None))
        transitions.line_up_all(session)
    insert = upsert(session)(Worker).values(name=worker, cpus=cpus, gpus=gpus, bf16=bf16)
    values = {"seen_at": now(), "cpus": cpus, "gpus": gpus, "bf16": bf16}
    session.execute(insert.on_conflict_do_update(index_elements=[Worker.name], set_=values))
    session.execute(delete(Worker).where(Worker.seen_at < now() - FORGOTTEN_AFTER))


def part(session: Session, worker: str) -> None:
    """Takes a worker off the list. What waits waits for a worker where it was the last, and for no larger node."""
    session.execute(delete(Worker).where(Worker.name == worker))
    miss_workers(session)


def miss_workers(session: Session) -> None:
    """Says of all experiments that are open that they wait for a worker, if none is there: also of what one left.

    To be asked now and then by whoever lives on: who was killed says nothing, and what is posted then meets nobody.
    """
    if are_workers_missed(session):
        session.execute(update(Experiment).where(_MISSES).values(waiting=NOBODY, unfit_since=None))


def are_workers_missed(session: Session) -> bool:
    """Whether `miss_workers` would change anything."""
    unsaid = session.scalar(select(Experiment.id).where(_MISSES).limit(1)) is not None
    return unsaid and not _is_anybody_there(session)


def _is_anybody_there(session: Session) -> bool:
    """Whether a worker was heard of lately."""
    return session.scalar(select(Worker.name).where(Worker.seen_at >= now() - HEARD_WITHIN).limit(1)) is not None


def claim(
    session: Session, worker: str, process: ProcessIdentity | None, experiment_id: int | None = None
) -> Lease | None:
    """Takes that experiment if it is queued, or the first that is (highest priority, then oldest); None if none is.

    `process` identifies the worker's process on its host (`workers.node.processes`), so that a neighbour can tell at
    once that it died.
    """
    queued = select(Experiment.id).where(Experiment.state == ExperimentState.QUEUED)
    if experiment_id is not None:
        queued = queued.where(Experiment.id == experiment_id)
    queued = queued.order_by(Experiment.priority.desc(), Experiment.id).limit(1)
    # SQLite has no such clause: BEGIN IMMEDIATE serves there. `key_share`, as everywhere: no key is changed, and
    # who adds a row that refers to the experiment neither hides it from a claim nor waits for a lease's writes.
    found = session.scalar(queued.with_for_update(skip_locked=True, key_share=True))
    if found is None:
        return None
    experiment = session.get_one(Experiment, found, populate_existing=True)
    experiment.fence += 1
    experiment.heartbeat = 0
    experiment.state = ExperimentState.RUNNING
    experiment.started_at = experiment.started_at or now()
    experiment.claimed_at = now()
    done = session.scalar(select(func.sum(EPOCHS_DONE)).where(Tally.experiment_id == experiment.id))
    experiment.epochs_at_claim = int(done or 0)
    experiment.worker, experiment.process = worker, process
    experiment.waiting = experiment.unfit_since = None
    events.record(session, EventKind.CLAIMED, worker, experiment, fence=experiment.fence)
    return Lease(experiment.id, experiment.fence)


def renew(session: Session, lease: Lease) -> None:
    """A heartbeat; raises `LeaseLostError`."""
    if changed_rows(session, _BEAT, lease.parameters) != 1:
        raise lost(lease)


def is_held(session: Session, lease: Lease) -> bool:
    """Whether the lease still holds: a cheap look between heartbeats."""
    return session.scalar(_IS_HELD, lease.parameters) is not None


def is_stopping(session: Session, lease: Lease) -> bool:
    """Whether the experiment was asked to stop: running trials finish, no other begins. False once it is lost."""
    return bool(session.scalar(_IS_STOPPING, lease.parameters))


def watch(session: Session) -> list[Watched]:
    """All running experiments, for the reaper."""
    query = select(Experiment.id, Experiment.fence, Experiment.heartbeat, Experiment.worker, Experiment.process).where(
        Experiment.state == ExperimentState.RUNNING
    )
    return [Watched(*row) for row in session.execute(query)]


def reap(session: Session, seen: Watched, by: str = "reaper") -> bool:
    """Puts an experiment whose worker is gone back into the queue, if it still is as it was seen.

    `by` is the worker that found it so.
    """
    experiment = session.scalar(
        select(Experiment)
        .where(
            Experiment.id == seen.experiment_id,
            Experiment.fence == seen.fence,
            Experiment.heartbeat == seen.heartbeat,
            Experiment.state == ExperimentState.RUNNING,
        )
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    )
    if experiment is None:
        return False
    experiment.fence += 1
    ended_at = _last_sign(session, experiment, by)
    transitions.requeue(session, experiment, ExperimentState.QUEUED, ended_at=ended_at)
    events.record(session, EventKind.REAPED, by, experiment, worker=seen.worker, fence=seen.fence)
    return True


def _last_sign(session: Session, experiment: Experiment, by: str) -> datetime | None:
    """When the worker that is gone was last heard of, as after that nothing ran: a machine may have been off for days.

    Of one that is off the list by now, or whose name the next one has, when the experiment last got on, or was claimed.
    """
    query = select(Worker.seen_at).where(Worker.name == experiment.worker, Worker.name != by)
    return session.scalar(query) or max(filter(None, (experiment.progressed_at, experiment.claimed_at)), default=None)


def release(session: Session, lease: Lease, *, drained: bool) -> None:
    """Gives the experiment back. `drained`: in order, as the worker was asked to stop or others were to run.

    Raises `LeaseLostError`.
    """
    experiment = lock(session, lease)
    worker = actor(experiment)
    transitions.requeue(session, experiment, ExperimentState.QUEUED, ended_at=now())
    events.record(session, EventKind.RELEASED, worker, experiment, fence=lease.fence, drained=drained)


def complete(session: Session, lease: Lease) -> bool:
    """Ends the experiment if all its trials are final, and says whether they are; raises `LeaseLostError`.

    Trials that a search has yet to make are not: its driver may be told to stop as the last one that runs ends. An
    experiment that was asked to stop is `stopped`. Else it succeeded if every trial did or was stopped early by its
    scheduler.
    """
    experiment = lock(session, lease)
    states = select(Tally.state, Tally.trials).where(Tally.experiment_id == experiment.id)
    counts: dict[TrialState, int] = {row[0]: row[1] for row in session.execute(states)}
    if any(counts.get(state) for state in OPEN_TRIALS):
        return False
    unmade = 0 if experiment.stopping else experiment.grid_points - experiment.trial_count
    if unmade > 0 and experiment.spec.get("search") is not None:  # a grid's are duplicates
        return False
    fault("before_complete", broken_connection)
    worker = actor(experiment)
    good = (TrialState.SUCCEEDED, TrialState.EARLY_STOPPED)
    bad = sum(count for state, count in counts.items() if state not in good)
    if experiment.stopping:
        transitions.close(session, experiment, ExperimentState.STOPPED, worker, None)
    elif bad:
        reason = f"{bad} of {experiment.trial_count} trials did not succeed"
        transitions.close(session, experiment, ExperimentState.FAILED, worker, reason)
    else:
        transitions.close(session, experiment, ExperimentState.SUCCEEDED, worker, None)
    return True


def lock(session: Session, lease: Lease) -> Experiment:
    """The experiment, its row locked under the lease's fence until the transaction ends; raises `LeaseLostError`."""
    experiment = session.scalar(_LOCK, lease.parameters)
    if experiment is None:
        raise lost(lease)
    return experiment


def lost(lease: Lease) -> LeaseLostError:
    """The error of a lease that holds no more."""
    return LeaseLostError(f"experiment {lease.experiment_id} under fence {lease.fence}")


def actor(experiment: Experiment) -> str:
    """The worker that runs it, as events name it."""
    return experiment.worker or "worker"
