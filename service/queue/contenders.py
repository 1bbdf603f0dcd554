"""The experiments that could run trials on a worker's cluster now, and why some must wait.

Functions take a Session; callers commit. No query grows with the number of trials, nor with that of the
experiments that wait: of each person's the first are looked at.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from operator import itemgetter
from typing import Any, cast

from sqlalchemy import (
    CTE,
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    any_,
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
    Event,
    Experiment,
    ExperimentState,
    Person,
    Project,
    Tally,
    Trial,
    TrialState,
    now,
)
from service.database.engine import is_among, is_postgres
from service.experiments import transitions
from service.experiments.events import EventKind
from service.experiments.transitions import MOST_OF_A_PERSON
from service.queue import rests
from service.queue.shares import Amount, Demand, Spent, group_of
from service.specs.spec import Resources

_UNLIMITED = 10_000
"""From this limit on an experiment has none."""
MOST_RECALLED = 10_000
"""So many events, the newest, are read to see what was used before a worker began."""
_HANDOVERS = EventKind.RELEASED, EventKind.REAPED, EventKind.PAUSED
_MOST_KNOWN = 10_000
"""So many experiments' terms are remembered: with each that is posted come new ones."""


@dataclass(frozen=True)
class Terms:
    """What a spec says of how its trials are to run; it stays as long as the experiment's revision does."""

    needs: Amount
    most: int | None
    preempt: bool
    search: bool
    """Whether trials are made while it runs: so many as its grid has points."""


@dataclass(frozen=True)
class Contender:
    """An experiment that waits for a worker, or runs under one that asks.

    Of its trials those are left out of `demand` that rest, the first of them until `rests_until`.
    """

    demand: Demand
    preempt: bool
    claimed: bool
    waiting: str | None
    unfit_since: datetime | None
    rests_until: datetime | None = None


def amount(resources: Resources) -> Amount:
    """What a spec asks for, for each trial."""
    return Amount(resources.cpus, resources.gpus, resources.memory_gib or 0.0)


class Specs:
    """Remembers the terms of the experiments that were seen, as their specs may be long."""

    def __init__(self) -> None:
        self._terms: dict[tuple[int, int], Terms] = {}

    def of(self, session: Session, revisions: Collection[tuple[int, int]]) -> Mapping[tuple[int, int], Terms]:
        """The terms of experiments at these revisions."""
        missing = {
            experiment_id for experiment_id, revision in revisions if (experiment_id, revision) not in self._terms
        }
        if missing:
            if len(self._terms) > _MOST_KNOWN:
                self._terms = {key: terms for key, terms in self._terms.items() if key in revisions}
            query = select(Experiment.id, Experiment.revision, Experiment.spec).where(Experiment.id.in_(missing))
            for experiment_id, revision, spec in session.execute(query):
                resources = Resources.model_validate(spec.get("resources", {}))
                most = spec.get("max_concurrent_trials")
                self._terms[experiment_id, revision] = Terms(
                    needs=amount(resources),
                    most=None if most is None or most >= _UNLIMITED else most,
                    preempt=spec.get("preempt", False),
                    search=spec.get("search") is not None,
                )
        return {key: self._terms[key] for key in revisions if key in self._terms}


def contenders(
    session: Session, ours: Collection[int], specs: Specs, *, most: int = MOST_OF_A_PERSON
) -> list[Contender]:
    """Of each person's queued experiments in each project the first, and of the running ones those that are `ours`.

    No more than `most` of a person's: highest priority first, then the oldest.
    """
    asked = {"ours": list(ours), "most": most}
    rows = session.connection().execute(_contending(postgres=is_postgres(session)), asked).all()
    known = specs.of(session, {(number, revision) for number, revision, *_ in rows})
    alone = _alone(session, [number for (number, _), terms in known.items() if 0 < terms.needs.gpus < 1])
    resting = _resting(session)
    found = []
    # By their order, as the name of each column would be looked up in each of hundreds of rows.
    for number, revision, state, priority, project, owner, stopping, made, points, waiting, since, *rest in rows:
        terms = known.get((number, revision))
        if terms is None:  # it was changed between the two statements
            continue
        weight, persons, running, queued = rest
        asleep, rests_until = resting.get(number, (0, None))
        trials = running + max(0, queued - asleep)
        if terms.search and not stopping:
            trials += max(0, points - made)
        if terms.most is not None:
            trials = min(trials, terms.most)
        whole = running_whole = 0
        if (apart := alone.get(number)) is not None:
            whole = min(trials, apart.total())
            running_whole = min(running, apart[TrialState.RUNNING])  # more may run since the first statement
        demand = Demand(
            experiment_id=number,
            trials=trials,
            needs=terms.needs,
            priority=priority,
            project_id=project,
            owner=owner,
            weight=weight,
            person_weight=persons,
            running=running,
            alone=whole,
            running_alone=running_whole,
        )
        found.append(Contender(demand, terms.preempt, state == ExperimentState.RUNNING, waiting, since, rests_until))
    return found


def used_lately(session: Session, specs: Specs) -> list[Spent]:
    """What trials used that ended lately, by the newest events of the pool: each when it last ended.

    So did those whose experiment was taken from its worker, or paused, of which no event of theirs tells.
    """
    told = select(Event.experiment_id, Event.trial_id, Event.kind, Event.at).order_by(Event.id.desc())
    newest = told.limit(MOST_RECALLED).subquery()
    ended = select(newest.c.trial_id, func.max(newest.c.at).label("at")).group_by(newest.c.trial_id).subquery()
    handed = select(newest.c.experiment_id, func.max(newest.c.at).label("at")).where(newest.c.kind.in_(_HANDOVERS))
    left = handed.group_by(newest.c.experiment_id).subquery()
    columns = Experiment.id, Experiment.revision, Experiment.project_id, Experiment.owner, Trial.id, Trial.run_seconds
    trials = select(*columns).join(Experiment, Experiment.id == Trial.experiment_id).where(Trial.run_seconds > 0)
    began = or_(Trial.state == TrialState.RUNNING, (Trial.state == TrialState.QUEUED) & (Trial.turn < 0))
    found = [
        *session.execute(trials.add_columns(left.c.at).join(left, left.c.experiment_id == Experiment.id).where(began)),
        *session.execute(trials.add_columns(ended.c.at).join(ended, ended.c.trial_id == Trial.id)),
    ]
    moment, rows = now(), {row[4]: row for row in sorted(found, key=itemgetter(6))}
    known = specs.of(session, {(number, revision) for number, revision, *_ in rows.values()})
    return [
        Spent(group_of(project, owner, number), known[number, revision].needs, seconds, (moment - at).total_seconds())
        for number, revision, project, owner, _, seconds, at in rows.values()
        if (number, revision) in known
    ]


# Statements are made once: two decisions a second would else make hundreds of clauses anew. On PostgreSQL they have the
# same text whatever is asked for, so that the server plans them once.


@cache
def _contending(*, postgres: bool) -> Select[*tuple[Any, ...]]:
    """The rows of each person's first queued experiments in each project, and of those that are `ours`.

    It steps from owner to owner in each project and without one, and takes a few steps in one index for each: ordered
    by all of its columns, as PostgreSQL does not see that those without a project are in order by the rest. A walk
    ends with no owner: who that is was nobody known.
    """
    in_projects, of_none = _walks()
    waiting, first = aliased(Experiment), aliased(Experiment)

    def firsts(*whose: ColumnElement[bool]) -> Select[Any]:
        query = select(waiting.id).where(waiting.state == ExperimentState.QUEUED, *whose)
        query = query.order_by(waiting.project_id, waiting.owner, waiting.priority.desc(), waiting.id)
        return query.limit(bindparam("most", type_=Integer))

    def of_each(person: Any, *whose: ColumnElement[bool]) -> Select[Any]:
        is_first = _is_one(first.id, firsts(*whose).correlate(person), postgres=postgres)
        return select(first.id).select_from(person).join(first, is_first)

    nobodys, unknown = waiting.project_id.is_(None), waiting.owner.is_(None)
    ids = union_all(
        of_each(in_projects, waiting.project_id == in_projects.c.project, waiting.owner == in_projects.c.owner),
        of_each(Project, waiting.project_id == Project.id, unknown),
        of_each(of_none, nobodys, waiting.owner == of_none.c.owner),
        select(firsts(nobodys, unknown).subquery().c.id),
        select(first.id).where(
            first.state.in_((ExperimentState.QUEUED, ExperimentState.RUNNING)),
            is_among(first.id, "ours", postgres=postgres),
        ),
    )
    return (
        select(
            Experiment.id,
            Experiment.revision,
            Experiment.state,
            Experiment.priority,
            Experiment.project_id,
            Experiment.owner,
            Experiment.stopping,
            Experiment.trial_count,
            Experiment.grid_points,
            Experiment.waiting,
            Experiment.unfit_since,
            func.coalesce(Project.weight, 1.0).label("weight"),
            _person_weight().label("person_weight"),
            _counted(TrialState.RUNNING).label("running"),
            _counted(TrialState.QUEUED).label("queued"),
        )
        .outerjoin(Project, Project.id == Experiment.project_id)
        .where(_is_one(Experiment.id, ids, postgres=postgres))
        .order_by(Experiment.id)
    )


def _person_weight() -> ColumnElement[float]:
    """What an experiment's owner weighs in its project: one step in an index as well."""
    weight = select(Person.weight).where(Person.project_id == Experiment.project_id, Person.owner == Experiment.owner)
    return func.coalesce(weight.correlate(Experiment).scalar_subquery(), 1.0)


def _counted(state: TrialState) -> ColumnElement[int]:
    """How many trials of an experiment are in a state: one step in an index, however the rest is planned."""
    count = select(Tally.trials).where(Tally.experiment_id == Experiment.id, Tally.state == state)
    return func.coalesce(count.correlate(Experiment).scalar_subquery(), 0)


def _is_one(column: Any, query: Select[Any] | CompoundSelect[Any], *, postgres: bool) -> ColumnElement[bool]:
    """That a column has one of the numbers that a query gives, which is executed first, however the rest is planned."""
    numbers = query.scalar_subquery()
    return cast("ColumnElement[bool]", column == any_(func.array(numbers)) if postgres else column.in_(numbers))


def _walks() -> tuple[CTE, CTE]:
    """Who may have queued experiments: the owners in each project, and without one."""

    def owners(*where: ColumnElement[bool]) -> Any:
        query = select(Experiment.owner).where(Experiment.state == ExperimentState.QUEUED, *where)
        return query.order_by(Experiment.project_id, Experiment.owner).limit(1)

    named, nobodys = Experiment.owner.is_not(None), Experiment.project_id.is_(None)
    first = owners(Experiment.project_id == Project.id, named).correlate(Project).scalar_subquery()
    steps = select(Project.id.label("project"), first.label("owner")).cte(recursive=True)
    later = Experiment.project_id == steps.c.project, Experiment.owner > steps.c.owner
    following = select(steps.c.project, owners(*later).correlate(steps).scalar_subquery())
    steps = steps.union_all(following.where(steps.c.owner.is_not(None)))

    alone = select(owners(nobodys, named).scalar_subquery().label("owner")).cte(recursive=True)
    following = select(owners(nobodys, Experiment.owner > alone.c.owner).correlate(alone).scalar_subquery())
    return steps, alone.union_all(following.where(alone.c.owner.is_not(None)))


def _alone(session: Session, experiments: Collection[int]) -> Mapping[int, Counter[TrialState]]:
    """Experiment -> how many of its trials wait or run, by state, that are to have a card of their own."""
    found: defaultdict[int, Counter[TrialState]] = defaultdict(Counter)
    if experiments:
        query = _counting_alone(postgres=is_postgres(session))
        asked = {"experiments": list(experiments), **rests.moments()}
        for number, state, count in session.connection().execute(query, asked):
            found[number][state] = count
    return found


@cache
def _counting_alone(*, postgres: bool) -> Select[*tuple[Any, ...]]:
    return (
        select(Trial.experiment_id, Trial.state, func.count())
        # They began before: of those that wait no others are looked at, however many there are.
        .where(is_among(Trial.experiment_id, "experiments", postgres=postgres))
        .where(Trial.state.in_(OPEN_TRIALS), Trial.turn < 0, Trial.failure == OUT_OF_MEMORY)
        .where(rests.READY)
        .group_by(Trial.experiment_id, Trial.state)
    )


def _resting(session: Session) -> Mapping[int, tuple[int, datetime]]:
    """Experiment -> how many of its trials rest, and until when the first does."""
    found: defaultdict[int, list[datetime]] = defaultdict(list)
    for number, until in session.connection().execute(_RESTING, rests.moments()):
        found[number].append(until)
    return {number: (len(ends), min(ends)) for number, ends in found.items()}


# Those of all experiments: for minutes at most, after deaths, they are few. Grouped, SQLite would walk through all.
_RESTING: Select[int, Any] = select(Trial.experiment_id, Trial.rests_until).where(
    rests.RESTS, Trial.state == TrialState.QUEUED
)


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
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    )
    if experiment is None:
        return
    session.execute(
        update(Trial)
        .where(Trial.experiment_id == experiment_id, Trial.state.in_(OPEN_TRIALS))
        .values(state=TrialState.FAILED, failure="infrastructure", error=reason, finished_at=now(), rests_until=None)
    )
    experiment.fence += 1
    transitions.close(session, experiment, ExperimentState.FAILED, worker, reason)
