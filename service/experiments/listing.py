"""SQL of the lists of experiments and trials: filters, orders, pages. Functions take a Session and write nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, select
from sqlalchemy.orm import Session, defer

from service.database import (
    OPEN_EXPERIMENTS,
    Experiment,
    ExperimentState,
    FieldIndex,
    Result,
    Tag,
    Tally,
    Trial,
    TrialState,
)
from service.database.engine import among
from service.database.pagination import Order, Orders, Page, order
from service.leaderboards import field_index
from service.leaderboards.conditions import MEASURED, Condition, Kept, of_trials
from service.specs.columns import known_field
from ttsv.config.trial import field_infos

EXPERIMENT_ORDERS: Orders = {
    "id": Experiment.id,
    "name": Experiment.name,
    "created_at": Experiment.created_at,
    "started_at": Experiment.started_at,
    "finished_at": Experiment.finished_at,
    "state": Experiment.state,
    "priority": Experiment.priority,
    "trial_count": Experiment.trial_count,
}

_TRIAL_COLUMNS = (
    "id",
    "number",
    "state",
    "model",
    "layer",
    "rank",
    "lambda_ort",
    "constraint",
    "delta",
    "seed",
    "epoch",
    "epochs",
    "attempts",
    "best_val_accuracy",
    "started_at",
    "finished_at",
    "run_seconds",
)
METRICS = tuple(MEASURED)
TRIAL_ORDERS: Orders = {name: getattr(Trial, name) for name in _TRIAL_COLUMNS} | dict(MEASURED)


@dataclass(frozen=True, kw_only=True)
class ExperimentFilter:
    """Which experiments: all conditions hold. `project_id` None: those of every project.

    `name` is part of a name, in upper or lower case; an experiment has every one of `tags`; `archived` None: either.
    """

    project_id: int | None = None
    states: Sequence[ExperimentState] = ()
    name: str | None = None
    tags: Sequence[str] = ()
    owner: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    archived: bool | None = False

    def conditions(self) -> list[ColumnElement[bool]]:
        """For a WHERE over experiments."""
        found: list[ColumnElement[bool]] = [Experiment.deleted_at.is_(None)]
        if self.project_id is not None:
            found.append(Experiment.project_id == self.project_id)
        if self.states:
            found.append(Experiment.state.in_(self.states))
        if self.name:
            found.append(Experiment.name.icontains(self.name, autoescape=True))
        found += [Experiment.id.in_(select(Tag.experiment_id).where(Tag.name == tag)) for tag in self.tags]
        if self.owner is not None:
            found.append(Experiment.owner == self.owner)
        if self.created_after is not None:
            found.append(Experiment.created_at >= self.created_after)
        if self.created_before is not None:
            found.append(Experiment.created_at < self.created_before)
        if self.archived is not None:
            found.append(Experiment.archived_at.is_not(None) if self.archived else Experiment.archived_at.is_(None))
        return found


_DELETED = select(Experiment.id).where(Experiment.deleted_at.is_not(None))
"""Few: they are on their way out."""


_INDEXED = ("dataset", "model", "layer", "constraint", "seed")
_BEYOND = ("cell", "failure")


@dataclass(frozen=True, kw_only=True)
class TrialFilter:
    """Which trials: all conditions hold. `rank` "none": those without one. `project_id` as in `ExperimentFilter`."""

    project_id: int | None = None
    experiment_id: int | None = None
    states: Sequence[TrialState] = ()
    dataset: str | None = None
    model: str | None = None
    layer: str | None = None
    constraint: str | None = None
    rank: float | str | None = None
    seed: int | None = None
    cell: str | None = None
    failure: str | None = None
    where: Sequence[Condition] = ()

    def conditions(self, kept: Kept = Trial) -> list[ColumnElement[bool]]:
        """For a WHERE over trials, or over their index, joined with them where it must be (`beyond_index`)."""
        found: list[ColumnElement[bool]] = [kept.experiment_id.not_in(_DELETED)]
        if self.project_id is not None:
            mine = select(Experiment.id).where(Experiment.project_id == self.project_id)
            found.append(kept.experiment_id.in_(mine))
        if self.states:
            found.append(Trial.state.in_(self.states))
        if self.rank is not None:
            found.append(kept.rank.is_(None) if isinstance(self.rank, str) else kept.rank == self.rank)
        plain = ("experiment_id", *_INDEXED)
        found += [getattr(kept, name) == value for name in plain if (value := getattr(self, name)) is not None]
        found += [getattr(Trial, name) == value for name in _BEYOND if (value := getattr(self, name)) is not None]
        return found + [condition.of(kept) for condition in self.where]

    @property
    def of_fields(self) -> bool:
        """Whether it chooses by fields: that is answered sooner by the index."""
        return any(getattr(self, name) is not None for name in ("rank", *_INDEXED)) or bool(self.where)

    @property
    def beyond_index(self) -> bool:
        """Whether it asks for what is not in the index."""
        return bool(self.states) or any(getattr(self, name) is not None for name in _BEYOND)


def list_experiments(
    session: Session,
    wanted: ExperimentFilter,
    *,
    limit: int,
    sort: str = "-id",
    cursor: str | None = None,
    with_spec: bool = True,
) -> Page[Experiment]:
    """Experiments in the order of `EXPERIMENT_ORDERS`; raises `QueryError`. Without `with_spec` it is not even read."""
    by = order(EXPERIMENT_ORDERS, sort, Experiment.id)
    query = select(Experiment).where(*wanted.conditions()).options(defer(Experiment.process, raiseload=True))
    if not with_spec:
        query = query.options(defer(Experiment.spec, raiseload=True))
    found = by.page(session, query, cursor, limit)
    return Page([row[0] for row in found.rows], found.next)


def experiments_by_id(
    session: Session, experiment_ids: Sequence[int], *, project_id: int | None = None
) -> Sequence[Experiment]:
    """Those that are there of the experiments that are named, by their ids, without processes and specs."""
    which = ExperimentFilter(project_id=project_id, archived=None)
    query = select(Experiment).where(Experiment.id.in_(experiment_ids), *which.conditions()).order_by(Experiment.id)
    unread = (Experiment.process, Experiment.spec)
    return session.scalars(query.options(*(defer(column, raiseload=True) for column in unread))).all()


@dataclass(frozen=True)
class Held:
    """What an owner's running trials hold, and how many more of theirs wait, over all `experiments` that are open."""

    owner: str | None
    experiments: int
    running: int
    waiting: int
    cpus: float
    gpus: float


def held_by_owners(session: Session, *, project_id: int | None = None) -> list[Held]:
    """What each owner of open experiments holds, from the counts that the database keeps."""
    which = ExperimentFilter(project_id=project_id, states=OPEN_EXPERIMENTS)
    running, waiting = (
        case((Tally.state == one, Tally.trials), else_=0) for one in (TrialState.RUNNING, TrialState.QUEUED)
    )
    needs = (func.coalesce(Experiment.spec[("resources", name)].as_float(), 0.0) for name in ("cpus", "gpus"))
    sums = (func.coalesce(func.sum(amount), 0) for amount in (running, waiting, *(running * need for need in needs)))
    query = (
        select(Experiment.owner, func.count(Experiment.id.distinct()), *sums)
        .outerjoin(Tally, Tally.experiment_id == Experiment.id)
        .where(*which.conditions())
        .group_by(Experiment.owner)
    )
    return [
        Held(owner, experiments, int(runs), int(waits), float(cpus), float(gpus))
        for owner, experiments, runs, waits, cpus, gpus in session.execute(query)
    ]


def trial_order(sort: str, kept: Kept = Trial) -> Order:
    """Trials by a column of theirs or of valid results, or by any field of their configurations; raises `QueryError`.

    `sort` names it, with `-` before it for the largest first. Fields are read where they are `kept`.
    """
    name = sort.removeprefix("-")
    identity = Trial.id if kept is Trial else FieldIndex.trial_id
    if name in TRIAL_ORDERS:
        inside = {one: getattr(kept, one) for one in _TRIAL_COLUMNS if one in kept.__table__.c}
        return order({**TRIAL_ORDERS, **inside, "id": identity}, sort, identity)
    path = known_field(name, "sort", also=TRIAL_ORDERS)
    missing = type(None) in field_infos()[path].types
    return Order(sort[: sort.startswith("-")] + path, of_trials(path, kept), identity, missing)


def list_trials(
    session: Session,
    wanted: TrialFilter,
    *,
    limit: int,
    sort: str = "number",
    cursor: str | None = None,
    with_config: bool = True,
    with_result: bool = True,
) -> Page[tuple[Trial, Result | None]]:
    """Trials with their results in the order that `trial_order` knows; raises `QueryError`.

    What `with_config` and `with_result` leave out is not read; layers and environments never are.
    """
    by = trial_order(sort)
    # What is asked of fields the index answers, once every trial is in it, and leads to results by the shortest way. (A
    # cell's few trials have an index of theirs, and so have some of the orders.)
    of_trials_alone = set(_TRIAL_COLUMNS) - set(FieldIndex.__table__.c.keys())
    kept: Kept = Trial
    if (wanted.of_fields or sort.removeprefix("-") not in of_trials_alone) and wanted.cell is None:
        kept = FieldIndex if field_index.is_whole(session) else Trial
        by = trial_order(sort, kept)
    query: Select[Any] = select(by.identity).where(*wanted.conditions(kept))
    of = getattr(by.column, "class_", None)
    if kept is FieldIndex and (wanted.beyond_index or of is Trial):
        query = query.join(Trial, Trial.id == by.identity)
    if of is Result:
        # An invalid result says nothing by which a trial might come first.
        query = query.outerjoin(Result, and_(Result.trial_id == by.identity, Result.valid))
    # Numbers first: of a hundred thousand trials in an order that no index has a database would carry whole rows along.
    found = by.page(session, query, cursor, limit)
    numbers = [row[0] for row in found.rows]
    rows = {
        trial.id: (trial, result)
        for trial, result in _trials(session, numbers, with_config=with_config, with_result=with_result)
    }
    return Page([rows[number] for number in numbers if number in rows], found.next)


def _trials(
    session: Session, numbers: Sequence[int], *, with_config: bool, with_result: bool
) -> Iterator[tuple[Trial, Result | None]]:
    """Trials in any order."""
    query: Select[Any] = select(Trial).where(among(session, Trial.id, numbers))
    if with_result:
        heavy = (Result.layers, Result.environment, Result.evaluation)
        query = query.add_columns(Result).outerjoin(Result, Result.trial_id == Trial.id)
        query = query.options(*(defer(column, raiseload=True) for column in heavy))
    if not with_config:
        query = query.options(defer(Trial.config, raiseload=True))
    for row in session.execute(query) if numbers else ():
        yield row[0], row[1] if with_result else None


def trials_by_id(
    session: Session, trial_ids: Sequence[int], *, experiment_id: int | None = None, project_id: int | None = None
) -> Sequence[tuple[Trial, Result | None]]:
    """Those that are there of the trials that are named, with their results, by their ids."""
    heavy = (Result.layers, Result.environment, Result.evaluation)
    which = TrialFilter(experiment_id=experiment_id, project_id=project_id)
    query = (
        select(Trial, Result)
        .outerjoin(Result, Result.trial_id == Trial.id)
        .where(Trial.id.in_(trial_ids), *which.conditions())
        .options(*(defer(column, raiseload=True) for column in heavy))
        .order_by(Trial.id)
    )
    return [(row[0], row[1]) for row in session.execute(query)]


def tags_of(session: Session, experiment_ids: Sequence[int]) -> dict[int, list[str]]:
    """Every experiment's tags, in alphabetical order."""
    found: dict[int, list[str]] = {i: [] for i in experiment_ids}
    query = select(Tag.experiment_id, Tag.name).where(Tag.experiment_id.in_(experiment_ids)).order_by(Tag.name)
    for experiment_id, name in session.execute(query):
        found[experiment_id].append(name)
    return found
