"""The experiments that could run trials on a worker's cluster now, and why some must wait.

Functions take a Session; callers commit. No query grows with the number of trials, nor with that of the
experiments that wait: of each person's the first are looked at.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, cast

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    bindparam,
    func,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.orm import Session, aliased

from service.database import (
    OPEN_TRIALS,
    OUT_OF_MEMORY,
    Experiment,
    ExperimentState,
    Project,
    Tally,
    Trial,
    TrialState,
    now,
)
from service.experiments import transitions
from service.queue.shares import Amount, Demand
from service.specs.spec import Resources

MOST_OF_A_PERSON = 16
"""So many of somebody's queued experiments are looked at at a time: those that were claimed make room for others."""
_GROUPS_AT_ONCE = 100
_UNLIMITED = 10_000
"""From this limit on an experiment has none."""


# Statements are made once: two decisions a second would else make hundreds of clauses anew.
_WAITING, _AT_WORK = aliased(Tally), aliased(Tally)
_CONTENDERS = (
    select(
        Experiment.id,
        Experiment.revision,
        Experiment.state,
        Experiment.priority,
        Experiment.project_id,
        Experiment.owner,
        Experiment.stopping,
        Experiment.trial_count,
        Experiment.waiting,
        Experiment.unfit_since,
        func.coalesce(Project.weight, 1.0).label("weight"),
        func.coalesce(_AT_WORK.trials, 0).label("running"),
        func.coalesce(_WAITING.trials, 0).label("queued"),
    )
    .outerjoin(Project, Project.id == Experiment.project_id)
    .outerjoin(_AT_WORK, (_AT_WORK.experiment_id == Experiment.id) & (_AT_WORK.state == TrialState.RUNNING))
    .outerjoin(_WAITING, (_WAITING.experiment_id == Experiment.id) & (_WAITING.state == TrialState.QUEUED))
    .where(
        Experiment.id.in_(bindparam("experiments", expanding=True)),
        or_(
            Experiment.state == ExperimentState.QUEUED,
            (Experiment.state == ExperimentState.RUNNING) & Experiment.id.in_(bindparam("ours", expanding=True)),
        ),
    )
    .order_by(Experiment.id)
)
_ALONE = (
    select(Trial.experiment_id, Trial.state, func.count())
    # They began before: of those that wait no others are looked at, however many there are.
    .where(Trial.experiment_id.in_(bindparam("experiments", expanding=True)))
    .where(Trial.state.in_(OPEN_TRIALS), Trial.turn < 0, Trial.failure == OUT_OF_MEMORY)
    .group_by(Trial.experiment_id, Trial.state)
)


@dataclass(frozen=True)
class Terms:
    """What a spec says of how its trials are to run; it stays as long as the experiment's revision does."""

    needs: Amount
    most: int | None
    preempt: bool
    search: int | None
    """How many trials a search may make."""


@dataclass(frozen=True)
class Contender:
    """An experiment that waits for a worker, or runs under one that asks."""

    demand: Demand
    preempt: bool
    claimed: bool
    waiting: str | None
    unfit_since: datetime | None


def amount(resources: Resources) -> Amount:
    """What a spec asks for, for each trial."""
    return Amount(resources.cpus, resources.gpus, resources.memory_gib or 0.0)


class Specs:
    """Remembers the terms of the experiments seen last, as their specs may be long."""

    def __init__(self) -> None:
        self._terms: dict[tuple[int, int], Terms] = {}

    def of(self, session: Session, revisions: Collection[tuple[int, int]]) -> Mapping[tuple[int, int], Terms]:
        """The terms of experiments at these revisions."""
        missing = {
            experiment_id for experiment_id, revision in revisions if (experiment_id, revision) not in self._terms
        }
        kept = {key: terms for key, terms in self._terms.items() if key in revisions}
        if missing:
            query = select(Experiment.id, Experiment.revision, Experiment.spec).where(Experiment.id.in_(missing))
            for experiment_id, revision, spec in session.execute(query):
                resources = Resources.model_validate(spec.get("resources", {}))
                most, search = spec.get("max_concurrent_trials"), spec.get("search")
                kept[experiment_id, revision] = Terms(
                    needs=amount(resources),
                    most=None if most is None or most >= _UNLIMITED else most,
                    preempt=spec.get("preempt", False),
                    search=None if search is None else search["trials"],
                )
        self._terms = kept
        return kept


def contenders(
    session: Session, ours: Collection[int], specs: Specs, *, most: int = MOST_OF_A_PERSON, passed: Collection[int] = ()
) -> list[Contender]:
    """Of each person's queued experiments in each project the first, and of the running ones those that are `ours`.

    No more than `most` of a person's: highest priority first, then the oldest. Those that are `passed` are left out.
    """
    wanted = {"experiments": list({*_first(session, most, passed), *ours}), "ours": list(ours)}
    rows = session.execute(_CONTENDERS, wanted).all()
    known = specs.of(session, {(row.id, row.revision) for row in rows})
    alone = _alone(session, [number for (number, _), terms in known.items() if 0 < terms.needs.gpus < 1])
    found = []
    for row in rows:
        terms = known.get((row.id, row.revision))
        if terms is None:  # it was changed between the two statements
            continue
        unborn = 0 if terms.search is None or row.stopping else max(0, terms.search - row.trial_count)
        trials = row.running + row.queued + unborn
        if terms.most is not None:
            trials = min(trials, terms.most)
        demand = Demand(
            experiment_id=row.id,
            trials=trials,
            needs=terms.needs,
            priority=row.priority,
            project_id=row.project_id,
            owner=row.owner,
            weight=row.weight,
            running=row.running,
            alone=min(trials, sum(alone[row.id].values())),
            running_alone=alone[row.id][TrialState.RUNNING],
        )
        claimed = row.state == ExperimentState.RUNNING
        found.append(Contender(demand, terms.preempt, claimed, row.waiting, row.unfit_since))
    return found


def _first(session: Session, most: int, passed: Collection[int]) -> list[int]:
    """The first queued experiments of each person in each project; each by a few steps in one index."""
    people, found = _people(session), list[int]()
    for begin in range(0, len(people), _GROUPS_AT_ONCE):
        some = people[begin : begin + _GROUPS_AT_ONCE]
        known = tuple((project is not None, owner is not None) for project, owner in some)
        named: dict[str, object] = {
            f"project_{at}": project for at, (project, _) in enumerate(some) if project is not None
        }
        named |= {f"owner_{at}": owner for at, (_, owner) in enumerate(some) if owner is not None}
        found += session.scalars(_firsts(known), {**named, "most": most, "passed": list(passed)})
    return found


@lru_cache
def _firsts(known: tuple[tuple[bool, bool], ...]) -> CompoundSelect[Any]:
    """The statement for so many people, of whom it is known whether each has a project and a name."""
    waiting = Experiment.state == ExperimentState.QUEUED, Experiment.id.not_in(bindparam("passed", expanding=True))
    firsts = [
        select(Experiment.id)
        .where(
            *waiting, _is(Experiment.project_id, f"project_{at}", of_one), _is(Experiment.owner, f"owner_{at}", named)
        )
        .order_by(Experiment.priority.desc(), Experiment.id)
        .limit(bindparam("most", type_=Integer))
        .subquery()
        for at, (of_one, named) in enumerate(known)
    ]
    return union_all(*(select(first.c.id) for first in firsts))


def _is(column: Any, name: str, known: bool) -> ColumnElement[bool]:
    return cast("ColumnElement[bool]", column == bindparam(name) if known else column.is_(None))


def _people(session: Session) -> list[tuple[int | None, str | None]]:
    """Who may have queued experiments: (project, owner), without either too. Steps from owner to owner."""
    of_projects, of_none = _walks()
    found: list[tuple[int | None, str | None]] = [(row[0], row[1]) for row in session.execute(of_projects)]
    # Each walk ends with no owner: who that is was nobody known.
    return [*found, *((None, owner) for owner in session.scalars(of_none))]


@cache
def _walks() -> tuple[Select[Any], Select[Any]]:
    """The statements that step from owner to owner, in each project and without one."""

    def owners(*where: ColumnElement[bool]) -> Any:
        query = select(Experiment.owner).where(Experiment.state == ExperimentState.QUEUED, *where)
        return query.order_by(Experiment.owner).limit(1)

    named, nobodys = Experiment.owner.is_not(None), Experiment.project_id.is_(None)
    first = owners(Experiment.project_id == Project.id, named).correlate(Project).scalar_subquery()
    steps = select(Project.id.label("project"), first.label("owner")).cte(recursive=True)
    later = Experiment.project_id == steps.c.project, Experiment.owner > steps.c.owner
    following = select(steps.c.project, owners(*later).correlate(steps).scalar_subquery())
    steps = steps.union_all(following.where(steps.c.owner.is_not(None)))

    alone = select(owners(nobodys, named).scalar_subquery().label("owner")).cte(recursive=True)
    following = select(owners(nobodys, Experiment.owner > alone.c.owner).correlate(alone).scalar_subquery())
    alone = alone.union_all(following.where(alone.c.owner.is_not(None)))
    return select(steps.c.project, steps.c.owner), select(alone.c.owner)


def _alone(session: Session, experiments: Collection[int]) -> Mapping[int, Counter[TrialState]]:
    """Experiment -> how many of its trials wait or run, by state, that are to have a card of their own."""
    found: defaultdict[int, Counter[TrialState]] = defaultdict(Counter)
    if experiments:
        for number, state, count in session.execute(_ALONE, {"experiments": list(experiments)}):
            found[number][state] = count
    return found


def say_why(session: Session, reasons: Mapping[int, str | None], unfit: Collection[int]) -> None:
    """Notes why experiments wait (None: they do not), and since when those fit no node that are `unfit`."""
    for experiment_id, reason in reasons.items():
        since = func.coalesce(Experiment.unfit_since, now()) if experiment_id in unfit else None
        where = Experiment.id == experiment_id, Experiment.state.in_((ExperimentState.QUEUED, ExperimentState.RUNNING))
        session.execute(update(Experiment).where(*where).values(waiting=reason, unfit_since=since))


def give_up_unfit(session: Session, experiment_id: int, worker: str, reason: str) -> None:
    """Fails a queued experiment that fitted no node for as long as the operator allows, and all its trials."""
    experiment = session.scalar(
        select(Experiment)
        .where(Experiment.id == experiment_id, Experiment.state == ExperimentState.QUEUED)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if experiment is None:
        return
    session.execute(
        update(Trial)
        .where(Trial.experiment_id == experiment_id, Trial.state.in_(OPEN_TRIALS))
        .values(state=TrialState.FAILED, failure="infrastructure", error=reason, finished_at=now())
    )
    experiment.fence += 1
    transitions.close(session, experiment, ExperimentState.FAILED, worker, reason)
