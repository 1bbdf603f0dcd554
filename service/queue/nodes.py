"""SQL of the nodes of workers' clusters. Functions take a Session; callers commit."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from sqlalchemy import BindParameter, ColumnElement, Select, and_, bindparam, delete, exists, func, select, update
from sqlalchemy.orm import Session, aliased

from service.database import OUT_OF_MEMORY, ClusterNode, Experiment, ExperimentState, Trial, TrialState, Worker, now
from service.database.engine import driver_rows, upsert
from service.experiments.transitions import HEARD_WITHIN
from service.queue.cluster import GPUS, Machine, Node, machine_as_json, machine_from_json, named
from service.queue.shares import Amount
from service.specs.spec import Resources
from service.specs.states import NodeState

SEEN_WITHIN = timedelta(minutes=1)
"""A node of which no worker said anything for longer is not there any more: its worker was killed."""
FORGOTTEN_AFTER = timedelta(days=1)
"""So long nodes that left and machines that were refused are shown."""


def record(session: Session, worker: str, seen: Sequence[Node]) -> None:
    """Says which nodes a worker sees in its cluster; those that it saw before and not now have left.

    A machine from which a node joins later is not refused any more. Nodes without an id, which nobody has seen yet, are
    left out.
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
    joined = aliased(ClusterNode)
    since = (joined.state == NodeState.ALIVE, joined.host == ClusterNode.host, joined.joined_at > ClusterNode.joined_at)
    session.execute(delete(ClusterNode).where(ClusterNode.state == NodeState.REFUSED, exists().where(*since)))
    session.execute(delete(ClusterNode).where(ClusterNode.seen_at < moment - FORGOTTEN_AFTER))


def bury(session: Session, workers: Collection[str]) -> None:
    """Takes workers that are known to be dead off the list; their nodes left when they were last seen."""
    left = update(ClusterNode).where(ClusterNode.worker.in_(workers), ClusterNode.state == NodeState.ALIVE)
    session.execute(left.values(state=NodeState.LEFT, left_at=ClusterNode.seen_at))
    session.execute(delete(Worker).where(Worker.name.in_(workers)))


def last_sign(session: Session) -> datetime | None:
    """When a node on which trials can run was last seen."""
    fits = ClusterNode.state == NodeState.ALIVE, ClusterNode.problem.is_(None)
    return session.scalar(select(func.max(ClusterNode.seen_at)).where(*fits))


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


class AtWork(NamedTuple):
    """A trial that runs, since its newest attempt began; `place` is the host and which of its GPUs, None until it says.

    `worker` is whose experiment it is.
    """

    id: int
    experiment_id: int
    place: str | None
    since: datetime | None
    worker: str | None = None


Stand = tuple[int, str | None, str | None, bool]
"""A trial that runs, as a worker knows it: its experiment, place and worker (as in `AtWork`), and whether it has a
whole card where the others of its experiment share them."""


def host_of(place: str | None) -> str:
    """Where a trial runs, without the GPUs."""
    return (place or "").partition(GPUS)[0]


def cards_of(place: str | None) -> tuple[str, ...]:
    """A trial's GPUs there, as Ray calls them: by number, or by UUID."""
    names = (place or "").partition(GPUS)[2]
    return tuple(names.split(", ")) if names else ()


class _Seen(Protocol):
    """A node, as a worker sees it or as a row has it."""

    @property
    def id(self) -> str: ...
    @property
    def host(self) -> str: ...


_NodeSeen = TypeVar("_NodeSeen", bound=_Seen)


def at_work(session: Session, project_id: int | None = None) -> list[AtWork]:
    """The trials that run; of a project (None: of all) those that its people may see."""
    query = _running(Trial.id, Trial.experiment_id, Trial.node, Trial.started_at, Experiment.worker)
    if project_id is not None:
        query = query.where(Experiment.project_id == project_id)
    return [AtWork(*row) for row in session.execute(query)]


def stands(session: Session) -> list[Stand]:
    """The trials that run, those that are newest at the end.

    They are the driver's rows of a statement that is made once: a worker asks for a thousand of them twice a second.
    """
    return cast("list[Stand]", driver_rows(session, _standing()))


@cache
def _standing() -> Select[*tuple[Any, ...]]:
    alone = and_(Trial.failure.is_not(None), Trial.failure == OUT_OF_MEMORY)
    return _running(Trial.experiment_id, Trial.node, Experiment.worker, alone)


def _running(*columns: Any) -> Select[*tuple[Any, ...]]:
    # As a word of the statement, as the index of trials that run has it: of a parameter no database knows that it is.
    state = bindparam("running", TrialState.RUNNING, Trial.state.type, literal_execute=True)
    return (
        select(*columns)
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .where(Experiment.state == ExperimentState.RUNNING, Trial.state == state)
        .order_by(Trial.id)
    )


def nodes_of(
    places: Iterable[tuple[str | None, str | None]],
    seen: Iterable[_NodeSeen],
    worker_of: Callable[[_NodeSeen], str | None] = lambda _: None,
) -> list[str | None]:
    """The node that each of the trials runs on, of which these are places and workers; None of those that did not say
    where, or are elsewhere.

    A trial names its node where its host has several of one cluster (`named`). Where it does not, as there was one when
    it began, it is on the first of its host: of the worker that runs it, if that is known to have one there.
    """
    by_name: dict[str, _NodeSeen] = {}
    by_host: dict[str, dict[str | None, _NodeSeen]] = {}
    for node in seen:
        by_name[named(node.host, node.id)] = node
        of_host = by_host.setdefault(node.host, {})
        of_host.setdefault(worker_of(node), node)
    known: dict[tuple[str, str | None], str | None] = {}
    found = []
    for place, worker in places:
        where = host, worker = host_of(place), worker
        if where not in known:
            of_host = by_host.get(host, {})
            first = next(iter(of_host.values()), None)
            there = by_name.get(host) or of_host.get(worker) or first
            known[where] = None if there is None else there.id
        found.append(known[where])
    return found


def by_node(
    trials: Sequence[AtWork], seen: Iterable[_NodeSeen], worker_of: Callable[[_NodeSeen], str | None] = lambda _: None
) -> dict[str, list[AtWork]]:
    """Node -> the trials that run there (`nodes_of`); those on none of them are left out."""
    found: dict[str, list[AtWork]] = {}
    where = nodes_of(((trial.place, trial.worker) for trial in trials), seen, worker_of)
    for trial, node in zip(trials, where, strict=True):
        if node is not None:
            found.setdefault(node, []).append(trial)
    return found


def running_on(session: Session, rows: Iterable[ClusterNode], project_id: int | None) -> dict[str, list[AtWork]]:
    """Node -> the trials that run there, of the nodes that are there; of a project (None: of all) its own."""
    there = sorted((row for row in rows if row.state is NodeState.ALIVE), key=lambda row: row.joined_at)
    return by_node(at_work(session, project_id), there, lambda row: row.worker)


@dataclass(frozen=True)
class Others:
    """What other workers see: the room that their nodes have, by worker, and who of them sees nodes of ours as its own.

    Those share the cluster; of whose a node is, its row has who wrote it last.
    """

    rooms: Mapping[str, Sequence[Amount]]
    sharing: frozenset[str]


def others(session: Session, worker: str, ours: Collection[str]) -> Others:
    """What workers other than this one see, of which nodes (ids) are `ours`."""
    rooms: dict[str, list[Amount]] = {}
    sharing, ours = set(), frozenset(ours)
    asked = {"worker": worker, "since": now() - SEEN_WITHIN}
    for node, name, *room in session.connection().execute(_others(), asked):
        if node in ours:
            sharing.add(name)
        else:
            rooms.setdefault(name, []).append(Amount(*room))
    return Others(rooms, frozenset(sharing))


@cache
def _others() -> Select[*tuple[Any, ...]]:
    return select(ClusterNode.id, ClusterNode.worker, ClusterNode.cpus, ClusterNode.gpus, ClusterNode.memory_gib).where(
        *_there(bindparam("since", type_=ClusterNode.seen_at.type)), ClusterNode.worker != bindparam("worker")
    )


def needs_of(session: Session, experiments: Collection[int]) -> dict[int, Amount]:
    """What each trial of experiments reserves."""
    if not experiments:
        return {}
    asked, usual = Experiment.spec["resources"], Resources()
    columns = [asked[name].as_float() for name in ("cpus", "gpus", "memory_gib")]
    found = session.execute(select(Experiment.id, *columns).where(Experiment.id.in_(experiments)))
    return {number: Amount(cpus or usual.cpus, gpus or 0.0, memory or 0.0) for number, cpus, gpus, memory in found}


def gpus_there(session: Session) -> float:
    """GPUs of all nodes that are there and fit, or of all workers that are there, whichever are more.

    A worker says what it offers before its cluster is up and has nodes.
    """
    of_nodes = session.scalar(select(func.sum(ClusterNode.gpus)).where(*_there()))
    of_workers = session.scalar(select(func.sum(Worker.gpus)).where(Worker.seen_at >= now() - HEARD_WITHIN))
    return float(max(of_nodes or 0, of_workers or 0))


def smallest_card(session: Session) -> float | None:
    """GiB of the GPU with the least memory on nodes that are there, fit and give GPUs to trials; None: none known."""
    rows = session.scalars(select(ClusterNode).where(*_there(), ClusterNode.gpus > 0))
    machines = [machine for row in rows if (machine := machine_of(row)) is not None]
    return min((gpu.memory_gib for machine in machines for gpu in machine.gpus if gpu.memory_gib > 0), default=None)


def without_bf16(session: Session) -> list[str]:
    """Hosts of the nodes that are there, fit, and are known to have a processor without instructions for bf16."""
    rows = session.scalars(select(ClusterNode).where(*_there()).order_by(ClusterNode.host))
    return [row.host for row in rows if (machine := machine_of(row)) is not None and machine.bf16 is False]


def _there(since: BindParameter[datetime] | None = None) -> tuple[ColumnElement[bool], ...]:
    """Nodes on which trials may run, seen `since` then (None: lately)."""
    return (
        ClusterNode.state == NodeState.ALIVE,
        ClusterNode.seen_at >= (now() - SEEN_WITHIN if since is None else since),
        ClusterNode.problem.is_(None),
    )


def machine_of(row: ClusterNode) -> Machine | None:
    """What the node said of itself."""
    return None if row.machine is None else machine_from_json(json.dumps(row.machine))
