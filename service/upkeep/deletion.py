"""Deleting experiments: marked by whoever asks, out of sight at once, then removed by the owner of the data folder.

First their files go, then their rows, a few trials at a time: whoever is killed on the way leaves what the next one
finishes. What webhooks are still to tell of stays until they did. What is left is an event of no experiment, and the
GPU-hours that a quota counts.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MappingProxyType

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from service.access.security import Principal
from service.database import (
    OPEN_EXPERIMENTS,
    Artifact,
    Event,
    Experiment,
    Project,
    Result,
    Trial,
    now,
)
from service.database.engine import Database
from service.errors import NotFoundError, StateError
from service.experiments import events, store, webhooks
from service.experiments.artifacts import remove_copies
from service.experiments.events import EventKind
from service.leaderboards import cell_scores
from service.queue import census
from service.upkeep.files import DataFolder
from service.upkeep.home import require_home

logger = logging.getLogger(__name__)

SETTLED_AFTER = timedelta(seconds=30)
"""Before this the processes of trials that were just cancelled may still write."""
_TRIALS_AT_ONCE = 100
_MOST_NAMED = 5

Told = Mapping[str, Collection[EventKind]]
"""The addresses that are told of events, as `Webhook` knows them, and of which kinds."""


@dataclass(frozen=True)
class Deletion:
    """What goes with an experiment. `size` is the bytes of the files in manifests; logs and checkpoints go, too.

    `shown_on` are the data sets on whose boards, and so in whose tables, its results count. `deleted`: it is marked.
    """

    id: int
    name: str
    trials: int
    results: int
    files: int
    size: int
    shown_on: Sequence[str]
    deleted: bool


def preview(session: Session, experiment_id: int, who: Principal) -> Deletion:
    """What deleting it would remove. Raises `NotFoundError`, and `StateError` where it cannot be deleted."""
    experiment = _find(session, experiment_id, who)
    if experiment.deleted_at is None:
        _refuse(session, experiment)
    return _described(session, experiment)


def mark(session: Session, experiment_id: int, who: Principal, *, force: bool = False) -> Deletion:
    """Deletes an experiment as far as anybody sees; again it changes nothing, for as long as there is a row.

    Raises `NotFoundError`, and `StateError` where it is not final, another one evaluates its networks, or a board
    shows its results, unless `force`.
    """
    experiment = _find(session, experiment_id, who, locked=True)
    if experiment.deleted_at is not None:
        return _described(session, experiment)
    _refuse(session, experiment)
    found = _described(session, experiment)
    if found.shown_on and not force:
        raise StateError(
            f"experiment {experiment.id}: its results count on the boards of {', '.join(found.shown_on)}; archive it "
            "first, or delete it with force"
        )
    experiment.deleted_at = now()
    experiment.archived_at = experiment.archived_at or now()  # which takes it off every board and table
    cell_scores.refresh_experiment(session, experiment.id)
    facts = {"trials": found.trials, "results": found.results, "files": found.files, "bytes": found.size}
    counted = census.counted(session, Experiment.id == experiment.id)._asdict()
    shown = {"project_id": experiment.project_id, "shown_on": list(found.shown_on), "force": force}
    events.record_deletion(session, who.name, experiment, **facts, **counted, **shown)
    session.flush()
    return _described(session, experiment)


def _find(session: Session, experiment_id: int, who: Principal, *, locked: bool = False) -> Experiment:
    """The experiment, even if it is marked already."""
    found = session.get(Experiment, experiment_id, with_for_update=locked or None, populate_existing=locked)
    if found is None or (who.project_id is not None and found.project_id != who.project_id):
        raise NotFoundError(f"there is no experiment {experiment_id}")
    return found


def _refuse(session: Session, experiment: Experiment) -> None:
    if experiment.state in OPEN_EXPERIMENTS:
        raise StateError(f"experiment {experiment.id} is {experiment.state.value}: cancel it first, then delete it")
    if users := _evaluated_by(session, experiment.id):
        named = ", ".join(map(str, users[:_MOST_NAMED])) + (", ..." if len(users) > _MOST_NAMED else "")
        left = select(Experiment.id).where(Experiment.id.in_(users), Experiment.deleted_at.is_(None)).limit(1)
        if session.scalar(left) is None:
            mend = ", and is being deleted: a worker does it within minutes, then ask again"
        else:
            mend = "; delete that first"
        raise StateError(f"experiment {experiment.id}: experiment {named} evaluates its networks{mend}")


def _evaluated_by(session: Session, experiment_id: int) -> Sequence[int]:
    """Other experiments whose trials take up networks of this one's; those that are marked count, until they go."""
    source = aliased(Trial)
    query = (
        select(Trial.experiment_id)
        .join(source, source.id == Trial.source_trial_id)
        .where(source.experiment_id == experiment_id, Trial.experiment_id != experiment_id)
    )
    return session.scalars(query.distinct().order_by(Trial.experiment_id)).all()


def _described(session: Session, experiment: Experiment) -> Deletion:
    mine = Trial.experiment_id == experiment.id
    files = select(func.count(), func.coalesce(func.sum(Artifact.size), 0)).select_from(Artifact)
    count, size = session.execute(
        files.join(Trial, Trial.id == Artifact.trial_id).where(mine, Artifact.removed_at.is_(None))
    ).one()
    results = select(func.count()).select_from(Result).join(Trial, Trial.id == Result.trial_id).where(mine)
    shown = select(Trial.dataset).join(Result, Result.trial_id == Trial.id).where(mine, Result.valid)
    boards = session.scalars(shown.distinct().order_by(Trial.dataset)).all() if experiment.archived_at is None else ()
    return Deletion(
        id=experiment.id,
        name=experiment.name,
        trials=session.scalar(select(func.count()).select_from(Trial).where(mine)) or 0,
        results=session.scalar(results) or 0,
        files=int(count),
        size=int(size),
        shown_on=boards,
        deleted=experiment.deleted_at is not None,
    )


def remove_marked(database: Database, folder: DataFolder, told: Told = MappingProxyType({})) -> int:
    """Removes files, then rows, of the experiments that were marked a while ago; how many are gone for good.

    One whose files cannot be removed is left for the next time, and so is one of which an address is still to be told
    (`webhooks.owed`). With the others copies of their files go.
    """
    with database.read() as session:
        marked = session.scalars(
            select(Experiment.id).where(Experiment.deleted_at < now() - SETTLED_AFTER).order_by(Experiment.id)
        ).all()
    gone = 0
    for experiment_id in marked:
        try:
            gone += _remove(database, folder, experiment_id, told)
        except (OSError, IntegrityError) as error:
            logger.warning("experiment %d is deleted, and something of it stays for now: %s", experiment_id, error)
    if gone:
        with database.read() as session:
            remove_copies(session, folder.path)
    return gone


def _remove(database: Database, folder: DataFolder, experiment_id: int, told: Told) -> bool:
    while True:
        with database.read() as session:
            require_home(session, folder)
            if _evaluated_by(session, experiment_id):  # posted in the very moment of the deletion
                logger.warning("experiment %d is deleted, and stays: others evaluate its networks", experiment_id)
                return False
            owed = webhooks.owed(told)
            free = Trial.experiment_id == experiment_id, ~exists().where(Event.trial_id == Trial.id, owed)
            some = select(Trial.id).where(*free).order_by(Trial.id)
            trials = session.scalars(some.limit(_TRIALS_AT_ONCE)).all()
            left = select(Artifact.path).where(Artifact.trial_id.in_(trials), Artifact.removed_at.is_(None)).limit(1)
            file = session.scalar(left)
            last = select(Event.id).where(Event.experiment_id == experiment_id, owed).limit(1)
            stays = not trials and session.scalar(last) is not None
        if file is not None:
            folder.require(file)
        for trial_id in trials:
            folder.remove_trial(trial_id)
        if trials:
            database.write(partial(_remove_trials, experiment_id=experiment_id, trials=trials))
            continue
        if stays:
            return False
        folder.remove_experiment(experiment_id)
        database.write(partial(_remove_experiment, experiment_id=experiment_id))
        logger.info("experiment %d is deleted, with its files", experiment_id)
        return True


def _remove_trials(session: Session, experiment_id: int, trials: Sequence[int]) -> None:
    """Deletes rows whose files are gone; the GPU-hours of their trials are still the project's."""
    experiment = session.get(Experiment, experiment_id, with_for_update=True)
    if experiment is None:
        return
    seconds = session.scalar(select(func.sum(Trial.run_seconds)).where(Trial.id.in_(trials))) or 0.0
    hours = float(seconds) * experiment.spec.get("resources", {}).get("gpus", 0) / 3600
    if hours and experiment.project_id is not None:
        more = {"deleted_gpu_hours": Project.deleted_gpu_hours + hours}
        session.execute(update(Project).where(Project.id == experiment.project_id).values(more))
    session.execute(delete(Trial).where(Trial.id.in_(trials)))


def _remove_experiment(session: Session, experiment_id: int) -> None:
    store.forget_answers(session, experiment_id)
    session.execute(delete(Experiment).where(Experiment.id == experiment_id))
