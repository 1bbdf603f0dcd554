"""Experiments that are made, and experiments that grow: a draft is stored with its trials.

What costs time, validating and expanding, is drafted first (of another experiment by `drafts`); `submit` stores it in
one short transaction. Functions take a Session; callers commit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.access.keys import check_quota
from service.access.security import ANYONE, Principal
from service.database import Experiment, Trial, TrialState
from service.database.rows import Rows, write_rows
from service.errors import StateError
from service.experiments import actions, events, store, transitions
from service.experiments.events import EventKind
from service.leaderboards import cell_scores, field_index
from service.specs.planner import Plan, PlannedTrial
from service.specs.spec import ExperimentSpec
from ttsv.config.fields import TrialFields


@dataclass(frozen=True)
class Draft:
    """A valid spec with its trials, as a new experiment's or, larger than `before`, in place of that of `origin`.

    `kind` says how it came about, `origin` from which experiment. `sources`, of a re-evaluation: trial to evaluate, by
    fingerprint. `there`: fingerprints of the trials that it had when it was drafted.
    """

    spec: ExperimentSpec
    plan: Plan
    kind: EventKind = EventKind.SUBMITTED
    origin: int | None = None
    sources: Mapping[str, int] | None = None
    before: Mapping[str, object] | None = None
    there: frozenset[str] = frozenset()

    @property
    def fresh(self) -> Plan:
        """The plan without the trials that were there."""
        return replace(self.plan, trials=[trial for trial in self.plan.trials if trial.fingerprint not in self.there])


def submit(session: Session, draft: Draft, who: Principal = ANYONE) -> Experiment:
    """Stores a draft, with an event: a new experiment and all its trials, or those that the extended one lacks.

    The latter are numbered after the last, and a final experiment is queued again; where none is lacking nothing
    changes. Raises `QuotaError`; of an extension also `NotFoundError`, and `StateError` where no trial may be added or
    the spec was changed since it was drafted.
    """
    if draft.before is not None:
        return _extend(session, draft, who)
    # A search has no trial yet; its first one comes with it.
    check_quota(session, who, 1 if draft.spec.search else len(draft.plan.trials))
    if draft.sources and draft.origin is not None:
        store.get_experiment(session, draft.origin, project_id=who.project_id, locked=True)  # not deleted since
    experiment = Experiment(
        name=draft.spec.name,
        spec=draft.spec.model_dump(mode="json"),
        priority=draft.spec.priority,
        grid_points=draft.plan.points,
        trial_count=len(draft.plan.trials),
        project_id=who.project_id,
        owner=None if who == ANYONE else who.name,
    )
    session.add(experiment)
    session.flush()
    transitions.line_up(session, experiment)
    actions.set_tags(session, experiment, draft.spec.tags)
    turns = turns_of(draft.plan.trials, draft.spec.order)
    _insert_trials(session, experiment.id, draft.plan.trials, turns, draft.sources)
    cell_scores.recount(session, experiment, _cells(draft.plan.trials))
    detail = {"trials": len(draft.plan.trials)} | ({"source": draft.origin} if draft.origin is not None else {})
    events.record(session, draft.kind, who.name, experiment, **detail)
    return experiment


def _extend(session: Session, draft: Draft, who: Principal) -> Experiment:
    assert draft.origin is not None
    experiment = store.get_experiment(session, draft.origin, project_id=who.project_id, locked=True)
    actions.refuse_growth(experiment)
    if experiment.spec != draft.before:
        raise StateError(f"experiment {experiment.id} was changed at the same moment; send the request again")
    known = set(session.scalars(select(Trial.fingerprint).where(Trial.experiment_id == experiment.id)))
    fresh = [planned for planned in draft.plan.trials if planned.fingerprint not in known]
    if not fresh:
        return experiment
    check_quota(session, who, len(fresh))
    seeds = select(Trial.cell, func.count()).where(Trial.experiment_id == experiment.id).group_by(Trial.cell)
    there: dict[str, int] = {row[0]: row[1] for row in session.execute(seeds)}
    _insert_trials(
        session,
        experiment.id,
        fresh,
        turns_of(fresh, draft.spec.order, there),
        first=next_number(session, experiment.id),
    )
    cell_scores.recount(session, experiment, _cells(fresh))
    experiment.spec = draft.spec.model_dump(mode="json")
    experiment.trial_count += len(fresh)
    experiment.grid_points = draft.plan.points
    actions.reopen(session, experiment)
    return actions.note(session, experiment, draft.kind, who, trials=len(fresh))


class TrialColumns(TypedDict):
    """The columns that a trial's configuration decides."""

    fingerprint: str
    cell: str
    config: TrialFields
    dataset: str
    model: str
    layer: str
    rank: float | None
    lambda_ort: float
    constraint: str
    delta: float | None
    seed: int
    epochs: int


class _NewTrial(TrialColumns):
    """A row that is to be inserted."""

    experiment_id: int
    number: int
    turn: int


class _Reevaluation(_NewTrial):
    """A row of a trial that evaluates what another one left."""

    source_trial_id: int


def trial_columns(planned: PlannedTrial) -> TrialColumns:
    """The columns that a trial's configuration decides."""
    config = planned.config
    return {
        "fingerprint": planned.fingerprint,
        "cell": planned.cell,
        "config": config.kept(),
        "dataset": config.dataset,
        "model": config.model,
        "layer": config.layer,
        "rank": config.rank,
        "lambda_ort": config.lambda_ort,
        "constraint": config.constraint,
        "delta": config.delta,
        "seed": config.seed,
        "epochs": config.training.epochs,
    }


def turns_of(planned: Sequence[PlannedTrial], order: str, there: Mapping[str, int] | None = None) -> list[int]:
    """Each trial's turn: trials of one turn run as they are numbered.

    `there` counts the trials that a cell has already. A mixed order is the same for the same trials.
    """
    if order == "random":
        return [int(trial.fingerprint[:12], 16) for trial in planned]
    if order == "grid":
        return [0] * len(planned)
    seen = Counter(there or {})
    turns = []
    for trial in planned:
        turns.append(seen[trial.cell])
        seen[trial.cell] += 1
    return turns


def _insert_trials(
    session: Session,
    experiment_id: int,
    planned: Sequence[PlannedTrial],
    turns: Sequence[int],
    sources: Mapping[str, int] | None = None,
    *,
    first: int = 0,
) -> None:
    """Queues trials, numbered from `first` on.

    `sources`, by fingerprint, makes re-evaluations of them: such a trial has no epochs.
    """
    rows: Sequence[_NewTrial] = [
        {"experiment_id": experiment_id, "number": number, "turn": turn, **trial_columns(trial)}
        for number, (trial, turn) in enumerate(zip(planned, turns, strict=True), first)
    ]
    if sources is not None:
        again: list[_Reevaluation] = [
            {**row, "source_trial_id": sources[row["fingerprint"]], "epochs": 0} for row in rows
        ]
        rows = again
    if not rows:
        return
    fresh = {"state": TrialState.QUEUED, "attempts": 0, "deaths": 0, "epoch": 0, "run_seconds": 0.0}
    write_rows(session.connection(), Rows(Trial, [{**row, **fresh} for row in rows]))
    new = select(Trial.number, Trial.id).where(Trial.experiment_id == experiment_id, Trial.number >= first)
    ids = dict(session.execute(new).all())
    field_index.enter(session, ({"trial_id": ids[row["number"]], **row} for row in rows))


def _cells(planned: Sequence[PlannedTrial]) -> set[tuple[str, str]]:
    return {(trial.config.dataset, trial.cell) for trial in planned}


def next_number(session: Session, experiment_id: int) -> int:
    """The number after the last trial's. The experiment must be locked."""
    last = session.scalar(select(func.max(Trial.number)).where(Trial.experiment_id == experiment_id))
    return 0 if last is None else last + 1
