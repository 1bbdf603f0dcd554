"""SQL of the nodes of workers' clusters. Functions take a Session; callers commit."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.orm import Session

from service.database import ClusterNode, Experiment, ExperimentState, Trial, TrialState, now
from service.database.engine import upsert
from service.queue.cluster import Machine, Node, machine_as_json, machine_from_json
from service.queue.shares import Amount
from service.specs.states import NodeState

SEEN_WITHIN = timedelta(minutes=1)
"""A node of which no worker said anything for longer is not there any more: its worker was killed."""
FORGOTTEN_AFTER = timedelta(days=1)
"""So long nodes that left and machines that were refused are shown."""


def record(session: Session, worker: str, seen: Sequence[Node]) -> None:
    """Says which nodes a worker sees in its cluster; those that it saw before and not now have left.

    A machine that joins is not refused any more. Nodes without an id, which nobody has seen yet, are left out.
    """
    seen = [node for node in seen if node.id]
    moment = now()
    for node in seen:
        values = {
            "worker": worker,
            "host": node.host[:255],
            "address": node.address[:100],
            "head": node.head,
            "state": node.state,
            "cpus": node.cpus,
            "gpus": node.gpus,
            "memory_gib": node.memory_gib,
            "machine": None if node.machine is None else json.loads(machine_as_json(node.machine)),
            "problem": node.problem,
            "seen_at": moment,
        }
        insert = upsert(session)(ClusterNode).values(id=node.id, left_at=None, joined_at=moment, **values)
        # One that left stays as it was: told of once more, it is no later.
        there = None if node.state is not NodeState.LEFT else ClusterNode.state != NodeState.LEFT
        left = {"left_at": moment if node.state is NodeState.LEFT else None}
        session.execute(insert.on_conflict_do_update(index_elements=[ClusterNode.id], set_=values | left, where=there))
    present = [node.id for node in seen]
    gone = update(ClusterNode).where(
        ClusterNode.worker == worker, ClusterNode.state == NodeState.ALIVE, ClusterNode.id.not_in(present)
    )
    session.execute(gone.values(state=NodeState.LEFT, left_at=moment))
    joined = [node.host for node in seen if node.alive]
    session.execute(delete(ClusterNode).where(ClusterNode.state == NodeState.REFUSED, ClusterNode.host.in_(joined)))
    session.execute(delete(ClusterNode).where(ClusterNode.seen_at < moment - FORGOTTEN_AFTER))


def listed(session: Session, limit: int) -> list[ClusterNode]:
    """Nodes that are there by host, heads first, then those that left or were refused, the newest first.

    One whose worker is not heard of any more has left, when it was last seen.
    """
    rows = session.scalars(
        select(ClusterNode)
        .order_by(ClusterNode.state != NodeState.ALIVE, ClusterNode.seen_at.desc(), ClusterNode.id)
        .limit(limit)
    ).all()
    for row in rows:
        session.expunge(row)
        if row.state is NodeState.ALIVE and row.seen_at < now() - SEEN_WITHIN:
            row.state, row.left_at = NodeState.LEFT, row.seen_at
    there = sorted((row for row in rows if row.state is NodeState.ALIVE), key=lambda row: (not row.head, row.host))
    away = (row for row in rows if row.state is not NodeState.ALIVE)
    return [*there, *sorted(away, key=lambda row: row.seen_at, reverse=True)]


@dataclass(frozen=True)
class AtWork:
    """A trial that runs on a node, since its newest attempt began; `place` is the host and which of its GPUs."""

    id: int
    experiment_id: int
    place: str
    since: datetime | None


def at_work(session: Session, project_id: int | None) -> dict[str, list[AtWork]]:
    """Host -> the trials that run there; of a project (None: of all) those that its people may see."""
    query = (
        select(Trial.id, Trial.experiment_id, Trial.node, Trial.started_at)
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .where(Experiment.state == ExperimentState.RUNNING, Trial.state == TrialState.RUNNING, Trial.node.is_not(None))
        .order_by(Trial.id)
    )
    if project_id is not None:
        query = query.where(Experiment.project_id == project_id)
    found: dict[str, list[AtWork]] = {}
    for trial_id, experiment_id, place, since in session.execute(query):
        trial = AtWork(trial_id, experiment_id, place or "", since)
        found.setdefault(trial.place.partition(", GPU ")[0], []).append(trial)
    return found


def rooms_of_others(session: Session, worker: str) -> dict[str, list[Amount]]:
    """What the nodes have for trials that other workers see in their clusters, by worker."""
    query = select(ClusterNode.worker, ClusterNode.cpus, ClusterNode.gpus, ClusterNode.memory_gib)
    found: dict[str, list[Amount]] = {}
    for name, *room in session.execute(query.where(*_there(), ClusterNode.worker != worker)):
        found.setdefault(name, []).append(Amount(*room))
    return found


def gpus_there(session: Session) -> float:
    """GPUs of all nodes that are there and fit."""
    return float(session.scalar(select(func.sum(ClusterNode.gpus)).where(*_there())) or 0)


def smallest_card(session: Session) -> float | None:
    """GiB of the GPU with the least memory on nodes that are there, fit and give GPUs to trials; None: none known."""
    rows = session.scalars(select(ClusterNode).where(*_there(), ClusterNode.gpus > 0))
    machines = [machine for row in rows if (machine := machine_of(row)) is not None]
    return min((gpu.memory_gib for machine in machines for gpu in machine.gpus if gpu.memory_gib > 0), default=None)


def _there() -> tuple[ColumnElement[bool], ...]:
    """Nodes on which trials may run."""
    return (
        ClusterNode.state == NodeState.ALIVE,
        ClusterNode.seen_at >= now() - SEEN_WITHIN,
        ClusterNode.problem.is_(None),
    )


def machine_of(row: ClusterNode) -> Machine | None:
    """What the node said of itself."""
    return None if row.machine is None else machine_from_json(json.dumps(row.machine))
