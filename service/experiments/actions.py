"""What people do with an experiment that is there; `service.experiments.submission` has what makes or enlarges one.

Every action can be repeated: where the experiment is as asked already, nothing changes. Where its state does not allow
the action it raises `StateError`, and `NotFoundError` where there is no such experiment that `who` asks may see. What
changes something grows the `revision` and leaves an event under their name. Functions take a Session; callers commit.
"""

from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from service.access.keys import check_quota
from service.access.security import ANYONE, Principal
from service.database import (
    OPEN_EXPERIMENTS,
    EpochPoint,
    EpochSpectra,
    Experiment,
    ExperimentState,
    Tag,
    Trial,
    TrialState,
    now,
    tallies,
)
from service.errors import PreconditionError, StateError
from service.experiments import events, store, transitions
from service.experiments.events import EventKind
from service.leaderboards import cell_scores
from service.specs.spec import Changes

RETRIED_BY_DEFAULT = (TrialState.FAILED,)
"""Not the diverged ones, as the same seed would diverge again, and not those that somebody cancelled."""
RESUMED_BY_RETRY = ("crashed", "infrastructure", "bad_data")
"""Failures of the machine or of a data set: what was trained stays, and a retry goes on from the last checkpoint.

None is taken that was trained on other data, as its identity says on which.
"""

_ENDED_AS = {
    ExperimentState.FAILED: TrialState.FAILED,
    ExperimentState.CANCELLED: TrialState.CANCELLED,
    ExperimentState.STOPPED: TrialState.CANCELLED,
}
"""The state of the trials that an experiment dropped as it ended so."""


def pause(session: Session, experiment_id: int, who: Principal = ANYONE) -> Experiment:
    """Takes a queued or running experiment off the queue at once, until `resume`.

    Running trials wait again, without an attempt spent; of each the last epoch that has a checkpoint is kept. The fence
    grows, so that the worker notices.
    """
    experiment = _lock(session, experiment_id, who)
    if experiment.state == ExperimentState.PAUSED:
        return experiment
    _require(experiment, OPEN_EXPERIMENTS, "paused")
    if experiment.state == ExperimentState.RUNNING:
        transitions.requeue(session, experiment, ExperimentState.PAUSED)
    experiment.state = ExperimentState.PAUSED
    experiment.waiting = experiment.unfit_since = None
    experiment.fence += 1
    return note(session, experiment, EventKind.PAUSED, who)


def resume(session: Session, experiment_id: int, who: Principal = ANYONE) -> Experiment:
    """Puts a paused experiment back into the queue; one that is queued or running stays as it is."""
    experiment = _lock(session, experiment_id, who)
    _require(experiment, OPEN_EXPERIMENTS, "resumed")
    if experiment.state != ExperimentState.PAUSED:
        return experiment
    experiment.state = ExperimentState.QUEUED
    transitions.line_up(session, experiment)
    return note(session, experiment, EventKind.RESUMED, who)


def stop(session: Session, experiment_id: int, who: Principal = ANYONE) -> Experiment:
    """Drops the trials that wait and lets those that run finish; the experiment is then `stopped`.

    Where none runs it is at once. If the worker dies meanwhile the next one still finishes what was running.
    """
    experiment = _lock(session, experiment_id, who)
    asked = experiment.stopping and experiment.state != ExperimentState.PAUSED
    if experiment.state == ExperimentState.STOPPED or (asked and experiment.state in OPEN_EXPERIMENTS):
        return experiment
    _require(experiment, OPEN_EXPERIMENTS, "stopped")
    running = len(transitions.running_trials(session, experiment))
    dropped = transitions.drop_queued(session, experiment)
    experiment.stopping = True
    note(session, experiment, EventKind.STOPPING, who, dropped=dropped, running=running)
    if not running:
        experiment.fence += 1
        transitions.close(session, experiment, ExperimentState.STOPPED, who.name, None)
    return experiment


def cancel(session: Session, experiment_id: int, who: Principal = ANYONE) -> Experiment:
    """Cancels what is not final yet; running trials are killed.

    The fence grows, so that whatever its worker still writes is refused and the worker stops.
    """
    experiment = _lock(session, experiment_id, who)
    if experiment.state == ExperimentState.CANCELLED:
        return experiment
    _require(experiment, OPEN_EXPERIMENTS, "cancelled")
    dropped = transitions.drop_running(session, experiment) + transitions.drop_queued(session, experiment)
    experiment.fence += 1
    note(session, experiment, EventKind.CANCELLED, who, dropped=dropped)
    transitions.close(session, experiment, ExperimentState.CANCELLED, who.name, None)
    return experiment


def retry(
    session: Session,
    experiment_id: int,
    states: Collection[TrialState] = RETRIED_BY_DEFAULT,
    who: Principal = ANYONE,
) -> Experiment:
    """Queues the trials of these states again, with their attempts counted anew; a final experiment is queued again.

    `states` are of FAILED, DIVERGED and CANCELLED. Trials of which checkpoints are kept go on from the last one, and
    others begin anew, without the epochs of the training that is gone. Trials that succeeded keep their results. A
    search that ended so before it had made all its trials makes the rest: cancelled is one that was stopped, too. One
    that ended otherwise makes none any more. Raises `QuotaError`.
    """
    experiment = _lock(session, experiment_id, who)
    _refuse_archived(experiment, "retried")
    _refuse_stopping(experiment, "retried")
    asked = (Trial.experiment_id == experiment.id, Trial.state.in_(states))
    trials = session.scalar(select(func.count()).where(*asked)) or 0
    unmade = 0
    if experiment.spec.get("search") is not None and experiment.state not in OPEN_EXPERIMENTS:
        unmade = max(0, experiment.grid_points - experiment.trial_count)
    goes_on = unmade > 0 and _ENDED_AS.get(experiment.state) in states
    if not trials and not goes_on:
        return experiment
    check_quota(session, who, trials or 1)  # a search counts as the trial that it begins with
    if unmade and not goes_on:
        experiment.grid_points = experiment.trial_count
    fresh = {
        "state": TrialState.QUEUED,
        "attempts": 0,
        "deaths": 0,
        "rest_seconds": 0.0,
        "rests_until": None,
        "failure": None,
        "error": None,
        "finished_at": None,
    }
    anew = func.coalesce(Trial.failure.not_in(RESUMED_BY_RETRY), True)
    for entity in (EpochPoint, EpochSpectra):
        session.execute(delete(entity).where(entity.trial_id.in_(select(Trial.id).where(*asked, anew))))
    session.execute(update(Trial).where(*asked, anew).values(epoch=0, best_val_accuracy=None))
    session.execute(update(Trial).where(*asked).values(**fresh))
    tallies.lower_bests(session, experiment.id)
    reopen(session, experiment)
    return note(session, experiment, EventKind.RETRIED, who, trials=trials, states=sorted(states))


def archive(session: Session, experiment_id: int, who: Principal = ANYONE) -> Experiment:
    """Leaves a final experiment out of lists and leaderboards, until `unarchive`."""
    experiment = _lock(session, experiment_id, who)
    if experiment.archived_at is not None:
        return experiment
    final = [state for state in ExperimentState if state not in OPEN_EXPERIMENTS]
    _require(experiment, final, "archived")
    experiment.archived_at = now()
    cell_scores.refresh_experiment(session, experiment_id)
    return note(session, experiment, EventKind.ARCHIVED, who)


def unarchive(session: Session, experiment_id: int, who: Principal = ANYONE) -> Experiment:
    """Takes an experiment out of the archive."""
    experiment = _lock(session, experiment_id, who)
    if experiment.archived_at is None:
        return experiment
    experiment.archived_at = None
    cell_scores.refresh_experiment(session, experiment_id)
    return note(session, experiment, EventKind.UNARCHIVED, who)


def change(
    session: Session,
    experiment_id: int,
    fields: Changes,
    who: Principal = ANYONE,
    *,
    expected: Callable[[int], bool] = lambda _revision: True,
) -> Experiment:
    """Changes what `Changes` names, in the experiment and in its spec.

    Raises `PreconditionError` if the revision is not an `expected` one, unless all is as asked already: then
    the request was sent again.
    """
    experiment = _lock(session, experiment_id, who)
    news = {name: value for name, value in fields.items() if experiment.spec.get(name) != value}
    if not news:
        return experiment
    if not expected(experiment.revision):
        raise PreconditionError(
            f"experiment {experiment.id} is at revision {experiment.revision}, and If-Match names another: somebody "
            "changed it meanwhile; look at it, then send the change again"
        )
    experiment.spec = experiment.spec | news
    experiment.name = experiment.spec["name"]
    experiment.priority = experiment.spec["priority"]
    if "tags" in news:
        set_tags(session, experiment, fields["tags"])
    return note(session, experiment, EventKind.UPDATED, who, fields=sorted(news))


def set_tags(session: Session, experiment: Experiment, tags: Collection[str]) -> None:
    """Makes these the experiment's tags."""
    session.execute(delete(Tag).where(Tag.experiment_id == experiment.id))
    if tags:
        session.execute(insert(Tag), [{"experiment_id": experiment.id, "name": name} for name in sorted(set(tags))])


def reopen(session: Session, experiment: Experiment) -> None:
    """Queues a final experiment again, as it has trials to run; another one takes them as it comes to them."""
    if experiment.state not in OPEN_EXPERIMENTS:
        experiment.state, experiment.stopping = ExperimentState.QUEUED, False
        experiment.error = experiment.finished_at = None
        transitions.line_up(session, experiment)


def refuse_growth(experiment: Experiment) -> None:
    """Raises `StateError` where no trial may be added."""
    _refuse_archived(experiment, "extended")
    _refuse_stopping(experiment, "extended")
    _require(experiment, [state for state in ExperimentState if state != ExperimentState.CANCELLED], "extended")


def note(session: Session, experiment: Experiment, kind: EventKind, who: Principal, **detail: Any) -> Experiment:
    """Counts a change that somebody made, and tells it."""
    experiment.revision += 1
    events.record(session, kind, who.name, experiment, **detail)
    return experiment


def _lock(session: Session, experiment_id: int, who: Principal) -> Experiment:
    return store.get_experiment(session, experiment_id, project_id=who.project_id, locked=True)


def _require(experiment: Experiment, allowed: Collection[ExperimentState], done: str) -> None:
    if experiment.state not in allowed:
        raise StateError(
            f"experiment {experiment.id} is {experiment.state.value}: it can be {done} while it is "
            f"{', '.join(state.value for state in ExperimentState if state in allowed)}"
        )


def _refuse_archived(experiment: Experiment, done: str) -> None:
    if experiment.archived_at is not None:
        raise StateError(f"experiment {experiment.id} is archived: it can be {done} once it is unarchived")


def _refuse_stopping(experiment: Experiment, done: str) -> None:
    if experiment.stopping and experiment.state in OPEN_EXPERIMENTS:
        raise StateError(
            f"experiment {experiment.id} is {experiment.state.value} and was asked to stop: it can be {done} once it "
            "has stopped"
        )
