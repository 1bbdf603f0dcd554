"""The page of the pool: nodes and their GPUs, what runs where, what waits and why, who has how much of it."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse
from sqlalchemy.orm import Session

from service.api.http.authentication import Reader
from service.api.http.dependencies import Db
from service.api.http.responses import experiments_out
from service.api.nodes import nodes_out
from service.dashboard.rendering import PageRoute, Show
from service.dashboard.wording import ago
from service.database import OPEN_EXPERIMENTS
from service.database.engine import Database
from service.experiments import store
from service.experiments.listing import ExperimentFilter, held_by_owners, list_experiments
from service.queue.attempts import Silence
from service.queue.cluster import GPUS
from service.schemas.experiments import ExperimentOut
from service.schemas.service import NodeOut, NodeTrialOut
from service.specs.states import NodeState

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_MOST = 200
"""Experiments that have a row, and as many as one stream tells of."""


@dataclass(frozen=True)
class Slot:
    """A GPU of a node, or its CPUs: what it is, and which trials run there."""

    name: str
    trials: list[NodeTrialOut] = field(default_factory=list)

    @property
    def groups(self) -> list["Group"]:
        """The trials by their experiments."""
        found: dict[int, list[NodeTrialOut]] = {}
        for trial in self.trials:
            found.setdefault(trial.experiment_id, []).append(trial)
        return [Group(experiment_id, trials) for experiment_id, trials in found.items()]


@dataclass(frozen=True)
class Group:
    """Trials of one experiment that run in one place."""

    experiment_id: int
    trials: list[NodeTrialOut]

    @property
    def since(self) -> str:
        """When the first and the last of them began, in words; nothing where that is not known."""
        begun = [trial.since for trial in self.trials if trial.since is not None]
        if not begun:
            return ""
        first, last = ago(min(begun)), ago(max(begun))
        return first if first == last else f"{first} to {last}"

    @property
    def stuck(self) -> list[tuple[int, Silence]]:
        """Those that have reported nothing for long, and how long they may; whose time is up first comes first."""
        told = [
            (trial.id, Silence(trial.last_report_at, trial.hung_after))
            for trial in self.trials
            if trial.last_report_at is not None and trial.hung_after is not None
        ]
        long = [one for one in told if one[1].is_long]
        return sorted(long, key=lambda one: one[1].last_report_at + timedelta(seconds=one[1].hung_after))


@router.get("/pool")
def pool(show: Show, database: Db, who: Reader) -> HTMLResponse:
    """The machines, and what wants them."""
    return show("pool.html", **_held(database, who.project_id))


@router.get("/pool/changes")
def changes(
    show: Show,
    database: Db,
    who: Reader,
    experiment: Annotated[list[int] | None, Query(max_length=_MOST)] = None,
) -> HTMLResponse:
    """What of the page changes with experiments: what runs where, their rows, and who holds how much."""
    held = _held(database, who.project_id)
    wanting = [one for one in held["wanting"] if one.id in (experiment or ())]
    return show("pool_changes.html", **held | {"wanting": wanting})


def _held(database: Database, project_id: int | None) -> dict[str, Any]:
    """What the page shows."""
    with database.read() as session:
        nodes = nodes_out(session, project_id)
        wanting = open_experiments(session, project_id)
        held = held_by_owners(session, project_id=project_id)
        newest = store.newest_experiment(session, project_id=project_id)
    there = [(node, slots(node)) for node in nodes if node.state is NodeState.ALIVE]
    return {
        "there": there,
        "away": [node for node in nodes if node.state is not NodeState.ALIVE],
        "wanting": wanting,
        "open_count": sum(one.experiments for one in held),
        "newest": newest,
        "shares": sorted(held, key=lambda one: (-one.gpus, -one.cpus, -one.running, one.owner or "")),
        "cpus": sum(node.cpus for node, _ in there),
        "gpus": sum(node.gpus for node, _ in there),
    }


def open_experiments(session: Session, project_id: int | None) -> list[ExperimentOut]:
    """The experiments that run or wait, those of the highest priority first and no more than have a row."""
    which = ExperimentFilter(project_id=project_id, states=OPEN_EXPERIMENTS)
    found = list_experiments(session, which, limit=_MOST, sort="-priority")
    return experiments_out(session, found.rows)


def slots(node: NodeOut) -> list[Slot]:
    """The node's GPUs in order with their trials; then its CPUs, if anything runs there, or there is no GPU."""
    named = [gpu.name for gpu in node.machine.gpus] if node.machine is not None else []
    count = max(len(named), int(node.gpus))
    found = [Slot(f"GPU {index}: {named[index]}" if index < len(named) else f"GPU {index}") for index in range(count)]
    cpu, unknown = Slot("CPUs"), Slot("GPUs")
    for trial in node.trials:
        _, _, cards = trial.place.partition(GPUS)
        there = [found[int(card)] for card in cards.split(", ") if card.isdecimal() and int(card) < count]
        for slot in there or [unknown if cards else cpu]:
            slot.trials.append(trial)
    found += [unknown] if unknown.trials else []
    return [*found, *([cpu] if cpu.trials or not found else [])]
