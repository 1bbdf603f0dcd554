"""Retention: which networks and checkpoints make room, while results and records stay.

A network is marked as removed, then its file goes; one whose mark was made and whose file is there still goes the next
time. Nothing that a board shows is taken unless that is asked for, and never what a trial that is to run needs.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from service.database import (
    OPEN_EXPERIMENTS,
    OPEN_TRIALS,
    Artifact,
    Experiment,
    Result,
    Trial,
    now,
)
from service.database.engine import Database
from service.errors import UserError
from service.experiments import events
from service.experiments.actions import RETRIED_BY_DEFAULT
from service.experiments.artifacts import remove_copies
from service.experiments.events import EventKind
from service.queue.driver_reads import NETWORKS
from service.upkeep.files import DataFolder

logger = logging.getLogger(__name__)

RETRIED_WITHIN = timedelta(days=7)
"""For so long somebody may look why a trial failed, and have it retried."""
_AT_ONCE = 100
_GIB = 2**30


@dataclass(frozen=True)
class Rules:
    """What goes: networks older than `days`, all but the `best` of each experiment by accuracy, then the oldest until
    all networks together have at most `gib`. None: no such rule. `force`: also what boards show.
    """

    days: float | None = None
    best: int | None = None
    gib: float | None = None
    force: bool = False

    @property
    def some(self) -> bool:
        """Whether there is any rule."""
        return (self.days, self.best, self.gib) != (None, None, None)


@dataclass(frozen=True)
class Network:
    """A network's file, the trial that left it, and why it goes."""

    artifact_id: int
    trial_id: int
    experiment_id: int
    path: str
    size: int
    finished_at: datetime | None
    accuracy: float | None
    reason: str


@dataclass(frozen=True)
class Checkpoints:
    """A trial's checkpoints, of all its attempts, and why they go."""

    trial_id: int
    experiment_id: int
    size: int
    finished_at: datetime | None
    reason: str


@dataclass(frozen=True)
class Plan:
    """What is to go: networks, and the checkpoints of trials from which nobody resumes.

    `spared` networks of `spared_size` bytes the rules name, and boards show. `too_much` bytes of networks would be left
    beyond the limit of `Rules.gib`, as all that is left is shown, or is needed by what runs or waits.
    """

    networks: Sequence[Network]
    checkpoints: Sequence[Checkpoints] = ()
    spared: int = 0
    spared_size: int = 0
    too_much: int = 0

    @property
    def size(self) -> int:
        """Bytes of everything that goes."""
        return sum(one.size for one in self.networks) + sum(one.size for one in self.checkpoints)


def plan(session: Session, folder: DataFolder, rules: Rules) -> Plan:
    """What the rules would remove now. Raises `UserError` without any, and `OSError` where files cannot be reached."""
    if not rules.some:
        raise UserError("no rule is given: name --older-than DAYS, --best K or --size GIB")
    rows = session.execute(_networks()).all()
    shown = frozenset[int]() if rules.force else frozenset(session.scalars(_shown()))
    reasons = _reasons(rows, rules)
    chosen = [row for row in rows if row.id in reasons]
    spared = [row for row in chosen if row.trial_id in shown]
    going = {row.id: row for row in chosen if row.trial_id not in shown}
    too_much = 0
    if rules.gib is not None:
        left = int(session.scalar(_all_bytes()) or 0) - sum(row.size for row in going.values())
        for row in sorted(rows, key=lambda row: (row.finished_at is not None, row.finished_at, row.id)):
            if left <= rules.gib * _GIB:
                break
            if row.id in going:
                continue
            if row.trial_id in shown:
                spared += [] if row.id in reasons else [row]
                continue
            reasons[row.id] = f"all networks together have more than {rules.gib:g} GiB"
            going[row.id] = row
            left -= row.size
        too_much = max(0, math.ceil(left - rules.gib * _GIB)) if math.isfinite(rules.gib) else 0
    networks = [_network(row, reasons[row.id]) for row in going.values()]
    if networks:  # what could not be done is not promised either
        folder.require(networks[0].path)
    checkpoints = _checkpoints(session, folder, rules)
    return Plan(networks, checkpoints, len(spared), sum(row.size for row in spared), too_much)


def _networks() -> Any:
    """Networks that are there, of final trials of final experiments, and that no trial is still to evaluate."""
    query = (
        select(Artifact.id, Artifact.trial_id, Artifact.path, Artifact.size)
        .add_columns(Trial.experiment_id, Trial.finished_at, Result.accuracy, Result.valid)
        .join(Trial, Trial.id == Artifact.trial_id)
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .outerjoin(Result, Result.trial_id == Trial.id)
        .where(*_removable(), *_final(), Experiment.deleted_at.is_(None))
    )
    return query.order_by(Trial.experiment_id, Artifact.id)


def _all_bytes() -> Select[int]:
    """Bytes of all networks that are there, also of those that cannot go now."""
    query = select(func.sum(Artifact.size)).join(Trial, Trial.id == Artifact.trial_id)
    query = query.join(Experiment, Experiment.id == Trial.experiment_id)
    return query.where(Artifact.kind.in_(NETWORKS), Artifact.removed_at.is_(None), Experiment.deleted_at.is_(None))


def _removable() -> list[ColumnElement[bool]]:
    user = aliased(Trial)
    needed = select(user.source_trial_id).where(user.source_trial_id.is_not(None), user.state.in_(OPEN_TRIALS))
    return [Artifact.kind.in_(NETWORKS), Artifact.removed_at.is_(None), Artifact.trial_id.not_in(needed)]


def _final() -> list[ColumnElement[bool]]:
    return [Trial.state.not_in(OPEN_TRIALS), Experiment.state.not_in(OPEN_EXPERIMENTS)]


def _shown() -> Any:
    """Trials whose results some board shows: one of a single experiment shows also what a newer one repeated."""
    return (
        select(Trial.id)
        .join(Result, Result.trial_id == Trial.id)
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .where(Result.valid, Experiment.archived_at.is_(None))
    )


def _reasons(rows: Sequence[Row[Any]], rules: Rules) -> dict[int, str]:
    """Artifact -> why it goes by age or rank."""
    found: dict[int, str] = {}
    if rules.best is not None:
        for _, group in groupby(rows, key=lambda row: row.experiment_id):
            ranked = sorted(group, key=lambda row: (not row.valid, -(row.accuracy or 0.0), row.trial_id, row.id))
            best = set([*dict.fromkeys(row.trial_id for row in ranked)][: rules.best])  # of which one may have left two
            worse = [row for row in ranked if row.trial_id not in best]
            found |= {row.id: f"not among the best {rules.best} of its experiment" for row in worse}
    if rules.days is not None:
        before = now() - timedelta(days=rules.days)
        old = [row for row in rows if row.finished_at is not None and row.finished_at < before]
        found |= {row.id: f"older than {rules.days:g} days" for row in old}
    return found


def _network(row: Row[Any], reason: str) -> Network:
    return Network(
        artifact_id=row.id,
        trial_id=row.trial_id,
        experiment_id=row.experiment_id,
        path=row.path,
        size=row.size,
        finished_at=row.finished_at,
        accuracy=row.accuracy,
        reason=reason,
    )


def _checkpoints(session: Session, folder: DataFolder, rules: Rules) -> list[Checkpoints]:
    """The checkpoints that final trials left; `days` spares those of a trial that may be retried.

    Without `days` those of failed trials stay for `RETRIED_WITHIN`: a retry goes on from them.
    """
    there = folder.checkpointed()
    if rules.days is None:
        unwanted = or_(Trial.state.not_in(RETRIED_BY_DEFAULT), Trial.finished_at < now() - RETRIED_WITHIN)
        reason = "nobody resumes from them"
    else:
        unwanted = Trial.finished_at < now() - timedelta(days=rules.days)
        reason = f"older than {rules.days:g} days"
    found: list[Checkpoints] = []
    for first in range(0, len(there), _AT_ONCE):
        some = there[first : first + _AT_ONCE]
        final = select(Trial.id, Trial.experiment_id, Trial.finished_at)
        final = final.join(Experiment, Experiment.id == Trial.experiment_id)
        final = final.where(Trial.id.in_(some), *_final(), unwanted).order_by(Trial.id)
        for trial_id, experiment_id, finished_at in session.execute(final):
            try:
                size = folder.checkpoint_bytes(trial_id)
            except OSError as error:  # which keeps no other trial's from going
                logger.warning("checkpoints of trial %d stay for now: %s", trial_id, error)
            else:
                found.append(Checkpoints(trial_id, experiment_id, size, finished_at, reason))
    return found


def prune(database: Database, folder: DataFolder, planned: Plan, *, force: bool = False, actor: str = "ttsv") -> Plan:
    """Removes what was planned, but for what is needed or shown by now; what went."""
    finish(database, folder)
    gone: list[Network] = []
    if planned.networks:
        folder.require(planned.networks[0].path)
    for first in range(0, len(planned.networks), _AT_ONCE):
        some = planned.networks[first : first + _AT_ONCE]
        marked = database.write(partial(_mark, networks=some, force=force, actor=actor))
        gone += [network for network in marked if _may_remove(folder, network.path)]
    checkpoints: list[Checkpoints] = []
    for one in planned.checkpoints:
        trial_id = one.trial_id
        final = select(Experiment.fence).join(Trial, Trial.experiment_id == Experiment.id)
        final = final.where(Trial.id == trial_id, *_final())
        with database.read() as session:
            fence = session.scalar(final)
        if fence is None:
            continue  # retried meanwhile, or may be under this fence; from now on that takes another claim
        try:
            folder.remove_checkpoints(trial_id, fence)
        except PermissionError as error:
            logger.warning("checkpoints of trial %d stay for now: %s", trial_id, error)
            continue
        checkpoints.append(one)
    if gone:
        with database.read() as session:
            remove_copies(session, folder.path)
    return replace(planned, networks=gone, checkpoints=checkpoints)


def _may_remove(folder: DataFolder, path: str) -> bool:
    """Removes a file; one that we may not remove keeps no other from going. Raises `OSError` of any other kind."""
    try:
        folder.remove(path)
    except PermissionError as error:
        logger.warning("%s stays for now: %s", path, error)
        return False
    return True


def _mark(session: Session, networks: Sequence[Network], *, force: bool, actor: str) -> list[Network]:
    """Marks what may still go, under the locks of its experiments."""
    there = {}
    for number in sorted({one.experiment_id for one in networks}):
        experiment = session.get(Experiment, number, with_for_update=True, populate_existing=True)
        if experiment is None or experiment.deleted_at is not None:
            continue
        if experiment.state not in OPEN_EXPERIMENTS:  # it may have been extended, or retried
            there[number] = experiment
    asked = select(Artifact.id).where(Artifact.id.in_([one.artifact_id for one in networks]), *_removable())
    if not force:
        asked = asked.where(Artifact.trial_id.not_in(_shown()))
    free = set(session.scalars(asked))
    marked = [one for one in networks if one.artifact_id in free and one.experiment_id in there]
    going = [one.artifact_id for one in marked]
    session.execute(update(Artifact).where(Artifact.id.in_(going)).values(removed_at=now()))
    for number, group in _by_experiment(marked):
        facts = {"networks": len(group), "bytes": sum(one.size for one in group), "force": force}
        events.record(session, EventKind.PRUNED, actor, there[number], **facts)
    return marked


def _by_experiment(networks: Iterable[Network]) -> list[tuple[int, list[Network]]]:
    ordered = sorted(networks, key=lambda one: one.experiment_id)
    return [(number, list(group)) for number, group in groupby(ordered, key=lambda one: one.experiment_id)]


def finish(database: Database, folder: DataFolder) -> int:
    """Removes the files of networks that were marked by somebody who was killed then; how many there were."""
    with database.read() as session:
        marked = session.scalars(select(Artifact.path).where(Artifact.removed_at.is_not(None))).all()
    return sum(_may_remove(folder, path) for path in folder.there(marked))
