"""The workers' side of the database: claims and leases (`service.queue.leases`), and what they write of trials.

Every write of a trial first locks its experiment's row under the lease's fence: a stale worker writes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import OPEN_TRIALS, Artifact, EpochPoint, Experiment, Protocol, Result, Trial, TrialState, now
from service.database.engine import upsert
from service.experiments import events, transitions
from service.experiments.events import EventKind
from service.experiments.submission import next_number, trial_columns
from service.leaderboards import cell_scores
from service.queue import leases
from service.queue.leases import Lease
from service.specs.grid import PlannedTrial

MAX_ATTEMPTS = 5
"""Starts of one trial that may end with its process lost; then the trial failed."""


@dataclass(frozen=True)
class ArtifactFile:
    """A file that is on disk already, to be entered into the manifest."""

    kind: str
    path: str
    sha256: str
    size: int


def unfinished_trials(session: Session, lease: Lease) -> Sequence[Trial]:
    """Trials that are still to be run, in the grid's order; raises `LeaseLostError`. Locks nothing."""
    if not leases.is_held(session, lease):
        raise leases.lost(lease)
    query = select(Trial).where(Trial.experiment_id == lease.experiment_id, Trial.state.in_(OPEN_TRIALS))
    return session.scalars(query.order_by(Trial.number)).all()


def add_trial(session: Session, lease: Lease, planned: PlannedTrial) -> int:
    """The id of a searcher's trial: queued after the last one, or there already with this fingerprint.

    In an experiment that is stopping it is cancelled from the start. Raises `LeaseLostError`.
    """
    experiment = leases.hold(session, lease)
    known = select(Trial.id).where(Trial.experiment_id == experiment.id, Trial.fingerprint == planned.fingerprint)
    if (trial_id := session.scalar(known)) is not None:
        return trial_id
    number = next_number(session, experiment.id)
    trial = Trial(experiment_id=experiment.id, number=number, **trial_columns(planned))
    if experiment.stopping:
        trial.state, trial.finished_at = TrialState.CANCELLED, now()
    session.add(trial)
    experiment.trial_count += 1
    session.flush()
    return trial.id


def start_trial(session: Session, lease: Lease, trial_id: int) -> bool:
    """Marks a queued trial as running and counts the attempt; whether it may run. Raises `LeaseLostError`.

    A trial that is final, as it was cancelled meanwhile, may not.
    """
    leases.hold(session, lease)
    if trial := _trial(session, lease, trial_id, TrialState.QUEUED):
        trial.state, trial.started_at = TrialState.RUNNING, now()
        trial.attempts += 1
        return True
    return _trial(session, lease, trial_id, TrialState.RUNNING) is not None


def add_epoch(session: Session, lease: Lease, trial_id: int, point: dict[str, Any]) -> None:
    """Stores one epoch's metrics (`EpochMetrics` as a dict without `epochs`); the same epoch again replaces them.

    Only an epoch that the trial never reached before is progress. Raises `LeaseLostError`.
    """
    experiment = leases.hold(session, lease)
    trial = _trial(session, lease, trial_id, TrialState.RUNNING)
    if trial is None:
        return
    accuracy, best = point["val_accuracy"], trial.best_val_accuracy
    trial.best_val_accuracy = accuracy if best is None else max(accuracy, best)
    if point["epoch"] > trial.epoch:
        trial.epoch = point["epoch"]
        _got_on(experiment)
    insert = upsert(session)(EpochPoint).values(trial_id=trial_id, **point)
    key = [EpochPoint.trial_id, EpochPoint.epoch]
    with session.no_autoflush:
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
    experiment = leases.hold(session, lease)
    trial = _trial(session, lease, trial_id, TrialState.RUNNING)
    if trial is None:
        return
    _end(trial, TrialState.SUCCEEDED)
    trial.error = None
    fingerprint, record = protocol
    protocols = leases.held(session, lease).protocols
    if fingerprint not in protocols:
        known = upsert(session)(Protocol).values(fingerprint=fingerprint, record=record)
        with session.no_autoflush:
            session.execute(known.on_conflict_do_nothing())
        protocols.add(fingerprint)
    session.add(Result(trial_id=trial_id, protocol=fingerprint, fence=lease.fence, **result))
    session.add_all(
        Artifact(trial_id=trial_id, kind=file.kind, path=file.path, sha256=file.sha256, size=file.size)
        for file in artifacts
    )
    _got_on(experiment)
    cell_scores.touch(session, trial.dataset, trial.cell)
    events.record_trial(session, EventKind.TRIAL_FINISHED, leases.actor(experiment), trial)


def early_stop_trial(session: Session, lease: Lease, trial_id: int) -> None:
    """Ends a trial that its scheduler found worse than its siblings: it keeps its epochs and has no result.

    Raises `LeaseLostError`.
    """
    experiment = leases.hold(session, lease)
    if trial := _trial(session, lease, trial_id, TrialState.RUNNING):
        _end(trial, TrialState.EARLY_STOPPED)
        trial.error = None
        _got_on(experiment)
        events.record_trial(session, EventKind.TRIAL_EARLY_STOPPED, leases.actor(experiment), trial, epoch=trial.epoch)


def fail_trial(session: Session, lease: Lease, trial_id: int, failure: str, error: str) -> None:
    """Ends a trial for a reason that would come again: `failure` is its class, `error` says what to do.

    Raises `LeaseLostError`.
    """
    experiment = leases.hold(session, lease)
    if trial := _trial(session, lease, trial_id, TrialState.RUNNING):
        _end(trial, TrialState.DIVERGED if failure == "diverged" else TrialState.FAILED)
        trial.failure, trial.error = failure, _storable(error)
        _got_on(experiment)
        events.record_trial(session, EventKind.TRIAL_FAILED, leases.actor(experiment), trial, failure=failure)


def lose_trial(session: Session, lease: Lease, trial_id: int, error: str) -> None:
    """The trial's process died. It is queued again, or fails after `MAX_ATTEMPTS`. Raises `LeaseLostError`."""
    experiment = leases.hold(session, lease)
    trial = _trial(session, lease, trial_id, TrialState.RUNNING)
    if trial is None:
        return
    error = _storable(error)
    worker = leases.actor(experiment)
    events.record_trial(session, EventKind.TRIAL_LOST, worker, trial)
    if trial.attempts < MAX_ATTEMPTS:
        transitions.end_attempt(trial)
        trial.state = TrialState.QUEUED
        trial.error = error
    else:
        _end(trial, TrialState.FAILED)
        trial.failure = "crashed"
        trial.error = f"the trial's process was lost {trial.attempts} times; the last time: {error}"
        events.record_trial(session, EventKind.TRIAL_FAILED, worker, trial, failure=trial.failure)


def _got_on(experiment: Experiment) -> None:
    """More of its epochs are done than before."""
    experiment.fruitless_claims, experiment.progressed_at = 0, now()


def _end(trial: Trial, state: TrialState) -> None:
    transitions.end_attempt(trial)
    trial.state, trial.finished_at = state, now()


def _storable(text: str) -> str:
    """Without what PostgreSQL or UTF-8 cannot hold: NUL, and the halves that stand for a file name's odd bytes."""
    return text.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()


def _trial(session: Session, lease: Lease, trial_id: int, expected: TrialState) -> Trial | None:
    """The trial if it belongs to the lease's experiment and is in the expected state."""
    trial = leases.load_trials(session, lease, [trial_id]).get(trial_id)
    return trial if trial is not None and trial.state is expected else None
