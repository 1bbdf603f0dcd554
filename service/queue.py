"""The workers' side of the database: claims, leases and fenced writes.

An experiment is claimed whole. Every claim, reaping and cancelling makes its `fence` grow, and every write of a
worker first locks the experiment's row under the fence it was given: a stale worker can write nothing. Whether a
lease still lives is told by its heartbeat counter, which the reaper watches on its own monotonic clock
(`workers.poller`), so no clock has to agree with another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.errors import LeaseLostError
from service.models import (
    EPOCHS_DONE,
    OPEN_TRIALS,
    Artifact,
    EpochPoint,
    Experiment,
    ExperimentState,
    Protocol,
    Result,
    Trial,
    TrialState,
    Worker,
    now,
)

MAX_ATTEMPTS = 5
"""Starts of one trial that may end with its process lost; then the trial failed."""
MAX_FRUITLESS_CLAIMS = 3
"""Claims in a row that may end without a new epoch; then the experiment failed."""


@dataclass(frozen=True)
class Lease:
    """The right to run one experiment: what a claim gives."""

    experiment_id: int
    fence: int


@dataclass(frozen=True)
class Watched:
    """A running experiment as a reaper sees it: when (fence, heartbeat) stands still, its worker is gone."""

    experiment_id: int
    fence: int
    heartbeat: int
    worker: str
    process: dict[str, Any] | None


@dataclass(frozen=True)
class ArtifactFile:
    """A file that is on disk already, to be entered into the manifest."""

    kind: str
    path: str
    sha256: str
    size: int


def greet(session: Session, worker: str, cpus: float, gpus: float) -> None:
    """Says that a worker is there; called again and again."""
    insert = _insert(session)(Worker).values(name=worker, cpus=cpus, gpus=gpus)
    values = {"seen_at": now(), "cpus": cpus, "gpus": gpus}
    session.execute(insert.on_conflict_do_update(index_elements=[Worker.name], set_=values))


def part(session: Session, worker: str) -> None:
    """Takes a worker off the list."""
    session.execute(delete(Worker).where(Worker.name == worker))


def claim(session: Session, worker: str, process: dict[str, Any] | None) -> Lease | None:
    """Takes the first queued experiment (highest priority, then oldest), or None.

    `process` identifies the worker's process on its host (`workers.processes`), so that a neighbour can tell at
    once that it died. An experiment whose last claims all ended without a new epoch fails here instead.
    """
    queued = (
        select(Experiment.id)
        .where(Experiment.state == ExperimentState.QUEUED)
        .order_by(Experiment.priority.desc(), Experiment.id)
        .limit(1)
        .with_for_update(skip_locked=True)  # SQLite has no such clause: BEGIN IMMEDIATE serves there
    )
    while (experiment_id := session.scalar(queued)) is not None:
        experiment = session.get_one(Experiment, experiment_id, populate_existing=True)
        experiment.fence += 1
        if experiment.fruitless_claims >= MAX_FRUITLESS_CLAIMS:
            reason = f"{MAX_FRUITLESS_CLAIMS} claims in a row ended without a finished epoch: see the workers' logs"
            _close(session, experiment, reason)
            session.flush()
            continue
        experiment.state = ExperimentState.RUNNING
        experiment.fruitless_claims += 1
        experiment.started_at = experiment.started_at or now()
        experiment.claimed_at = now()
        done = session.scalar(select(func.sum(EPOCHS_DONE)).where(Trial.experiment_id == experiment.id))
        experiment.epochs_at_claim = int(done or 0)
        experiment.worker, experiment.process = worker, process
        return Lease(experiment.id, experiment.fence)
    return None


def renew(session: Session, lease: Lease) -> None:
    """A heartbeat; raises `LeaseLostError`."""
    changed = session.execute(update(Experiment).where(*_ours(lease)).values(heartbeat=Experiment.heartbeat + 1))
    if changed.rowcount != 1:  # type: ignore[attr-defined]
        raise _lost(lease)


def is_held(session: Session, lease: Lease) -> bool:
    """Whether the lease still holds: a cheap look between heartbeats."""
    return session.scalar(select(Experiment.id).where(*_ours(lease))) is not None


def watch(session: Session) -> list[Watched]:
    """All running experiments, for the reaper."""
    query = select(Experiment.id, Experiment.fence, Experiment.heartbeat, Experiment.worker, Experiment.process).where(
        Experiment.state == ExperimentState.RUNNING
    )
    return [Watched(*row) for row in session.execute(query)]


def reap(session: Session, seen: Watched) -> bool:
    """Puts an experiment whose worker is gone back into the queue, if it still is as it was seen."""
    experiment = session.scalar(
        select(Experiment)
        .where(
            Experiment.id == seen.experiment_id,
            Experiment.fence == seen.fence,
            Experiment.heartbeat == seen.heartbeat,
            Experiment.state == ExperimentState.RUNNING,
        )
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if experiment is None:
        return False
    experiment.fence += 1
    _requeue(session, experiment, spend=True)
    return True


def release(session: Session, lease: Lease, *, drained: bool) -> None:
    """Gives the experiment back. `drained`: the worker was asked to stop, so no attempt is spent.

    Raises `LeaseLostError`.
    """
    _requeue(session, _hold(session, lease), spend=not drained)


def unfinished_trials(session: Session, lease: Lease) -> Sequence[Trial]:
    """Trials that are still to be run, in the grid's order; raises `LeaseLostError`. Locks nothing."""
    if not is_held(session, lease):
        raise _lost(lease)
    query = select(Trial).where(Trial.experiment_id == lease.experiment_id, Trial.state.in_(OPEN_TRIALS))
    return session.scalars(query.order_by(Trial.number)).all()


def start_trial(session: Session, lease: Lease, trial_id: int) -> None:
    """Marks a trial as running and counts the attempt; raises `LeaseLostError`."""
    _hold(session, lease)
    if trial := _trial(session, lease, trial_id, TrialState.QUEUED):
        trial.state, trial.started_at = TrialState.RUNNING, now()
        trial.attempts += 1


def add_epoch(session: Session, lease: Lease, trial_id: int, point: dict[str, Any]) -> None:
    """Stores one epoch's metrics (`EpochMetrics` as a dict without `epochs`); the same epoch again replaces them.

    Only an epoch that the trial never reached before is progress. Raises `LeaseLostError`.
    """
    experiment = _hold(session, lease)
    trial = _trial(session, lease, trial_id, TrialState.RUNNING)
    if trial is None:
        return
    accuracy, best = point["val_accuracy"], trial.best_val_accuracy
    trial.best_val_accuracy = accuracy if best is None else max(accuracy, best)
    if point["epoch"] > trial.epoch:
        trial.epoch = point["epoch"]
        experiment.fruitless_claims = 0
    insert = _insert(session)(EpochPoint).values(trial_id=trial_id, **point)
    key = [EpochPoint.trial_id, EpochPoint.epoch]
    session.execute(insert.on_conflict_do_update(index_elements=key, set_=point))


def finish_trial(
    session: Session,
    lease: Lease,
    trial_id: int,
    result: dict[str, Any],
    protocol: tuple[str, dict[str, Any]],
    artifacts: Sequence[ArtifactFile] = (),
) -> None:
    """Stores the result, its protocol (fingerprint, record), the manifest and the final state in one transaction.

    Again for a trial that succeeded already (a lost reply to COMMIT) it changes nothing. Raises `LeaseLostError`.
    """
    experiment = _hold(session, lease)
    trial = _trial(session, lease, trial_id, TrialState.RUNNING)
    if trial is None:
        return
    trial.state, trial.error, trial.finished_at = TrialState.SUCCEEDED, None, now()
    fingerprint, record = protocol
    known = _insert(session)(Protocol).values(fingerprint=fingerprint, record=record)
    session.execute(known.on_conflict_do_nothing())
    session.add(Result(trial_id=trial_id, protocol=fingerprint, fence=lease.fence, **result))
    session.add_all(
        Artifact(trial_id=trial_id, kind=file.kind, path=file.path, sha256=file.sha256, size=file.size)
        for file in artifacts
    )
    experiment.fruitless_claims = 0


def fail_trial(session: Session, lease: Lease, trial_id: int, failure: str, error: str) -> None:
    """Ends a trial for a reason that would come again: `failure` is its class, `error` says what to do.

    Raises `LeaseLostError`.
    """
    experiment = _hold(session, lease)
    if trial := _trial(session, lease, trial_id, TrialState.RUNNING):
        trial.state = TrialState.DIVERGED if failure == "diverged" else TrialState.FAILED
        trial.failure, trial.error, trial.finished_at = failure, _storable(error), now()
        experiment.fruitless_claims = 0


def lose_trial(session: Session, lease: Lease, trial_id: int, error: str) -> None:
    """The trial's process died. It is queued again, or fails after `MAX_ATTEMPTS`. Raises `LeaseLostError`."""
    _hold(session, lease)
    trial = _trial(session, lease, trial_id, TrialState.RUNNING)
    if trial is None:
        return
    error = _storable(error)
    if trial.attempts < MAX_ATTEMPTS:
        trial.state = TrialState.QUEUED
        trial.error = error
    else:
        trial.state, trial.finished_at = TrialState.FAILED, now()
        trial.failure = "crashed"
        trial.error = f"the trial's process was lost {trial.attempts} times; the last time: {error}"


def complete(session: Session, lease: Lease) -> bool:
    """Ends the experiment if all its trials are final, and says whether they are; raises `LeaseLostError`."""
    experiment = _hold(session, lease)
    states = select(Trial.state, func.count()).where(Trial.experiment_id == experiment.id).group_by(Trial.state)
    counts: dict[TrialState, int] = {row[0]: row[1] for row in session.execute(states)}
    if any(counts.get(state) for state in OPEN_TRIALS):
        return False
    bad = sum(count for state, count in counts.items() if state != TrialState.SUCCEEDED)
    _close(session, experiment, f"{bad} of {experiment.trial_count} trials did not succeed" if bad else None)
    return True


def _ours(lease: Lease) -> tuple[Any, ...]:
    return (
        Experiment.id == lease.experiment_id,
        Experiment.fence == lease.fence,
        Experiment.state == ExperimentState.RUNNING,
    )


def _hold(session: Session, lease: Lease) -> Experiment:
    """Locks the experiment's row under the lease's fence until the transaction ends."""
    # What the session may have loaded before the lock was its own is read again.
    query = select(Experiment).where(*_ours(lease)).with_for_update().execution_options(populate_existing=True)
    experiment = session.scalar(query)
    if experiment is None:
        raise _lost(lease)
    return experiment


def _lost(lease: Lease) -> LeaseLostError:
    return LeaseLostError(f"experiment {lease.experiment_id} under fence {lease.fence}")


def _storable(text: str) -> str:
    """Without what PostgreSQL or UTF-8 cannot hold: NUL, and the halves that stand for a file name's odd bytes."""
    return text.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()


def _trial(session: Session, lease: Lease, trial_id: int, expected: TrialState) -> Trial | None:
    """The trial if it belongs to the lease's experiment and is in the expected state. The experiment must be held."""
    mine = (Trial.id == trial_id, Trial.experiment_id == lease.experiment_id, Trial.state == expected)
    return session.scalar(select(Trial).where(*mine).execution_options(populate_existing=True))


def _requeue(session: Session, experiment: Experiment, *, spend: bool) -> None:
    experiment.state = ExperimentState.QUEUED
    experiment.worker = experiment.process = None
    if not spend:
        experiment.fruitless_claims = max(0, experiment.fruitless_claims - 1)
    session.execute(
        update(Trial)
        .where(Trial.experiment_id == experiment.id, Trial.state == TrialState.RUNNING)
        .values(state=TrialState.QUEUED, attempts=Trial.attempts if spend else Trial.attempts - 1)
    )


def _close(session: Session, experiment: Experiment, error: str | None) -> None:
    experiment.state = ExperimentState.FAILED if error else ExperimentState.SUCCEEDED
    experiment.error = error
    experiment.finished_at = now()
    experiment.worker = experiment.process = None
    session.execute(
        update(Trial)
        .where(Trial.experiment_id == experiment.id, Trial.state.in_(OPEN_TRIALS))
        .values(state=TrialState.FAILED, failure="infrastructure", error=error, finished_at=now())
    )


def _insert(session: Session) -> Any:
    return postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
