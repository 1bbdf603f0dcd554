"""Experiments that are made from a spec or from another experiment, and experiments that grow.

What costs time, validating and expanding, is drafted first (`draft_...`, which only read); `submit` stores a draft in
one short transaction. Functions take a Session; callers commit.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypedDict

from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json
from sqlalchemy import func, insert, select, text
from sqlalchemy.orm import Session

from service.access.keys import check_quota
from service.access.security import ANYONE, Principal
from service.database import Experiment, Trial, TrialState
from service.database.engine import is_postgres
from service.errors import FieldProblem, SpecError, StateError
from service.experiments import actions, events, store
from service.experiments.events import EventKind
from service.leaderboards import cell_scores, field_index
from service.specs.grid import expand_grid, factored
from service.specs.planner import Plan, PlannedTrial
from service.specs.spec import LONGEST_NAME, Additions, ExperimentSpec, PartialTrial
from service.specs.validation_errors import wrong_fields
from ttsv.config.evaluation import EvaluationConfig
from ttsv.config.fields import TrialFields, build
from ttsv.config.training import LOOKING_ON, TRAINING
from ttsv.config.trial import TrialConfig
from ttsv.errors import ConfigError


@dataclass(frozen=True)
class Draft:
    """A valid spec with its trials, as a new experiment's or, larger than `before`, in place of that of `origin`.

    `kind` says how it came about, `origin` from which experiment. `sources`, of a re-evaluation: trial to evaluate, by
    fingerprint.
    """

    spec: ExperimentSpec
    plan: Plan
    kind: EventKind = EventKind.SUBMITTED
    origin: int | None = None
    sources: Mapping[str, int] | None = None
    before: Mapping[str, object] | None = None


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
    actions.set_tags(session, experiment, draft.spec.tags)
    turns = turns_of(draft.plan.trials, draft.spec.order)
    _insert_trials(session, experiment.id, draft.plan.trials, turns, draft.sources)
    cell_scores.recount(session, experiment)
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
    cell_scores.recount(session, experiment)
    experiment.spec = draft.spec.model_dump(mode="json")
    experiment.trial_count += len(fresh)
    experiment.grid_points = draft.plan.points
    actions.reopen(experiment)
    return actions.note(session, experiment, draft.kind, who, trials=len(fresh))


def draft_clone(
    session: Session, experiment_id: int, who: Principal = ANYONE, *, name: str | None, max_trials: int
) -> Draft:
    """The same spec once more, by default as `NAME (clone)`, the next one as `NAME (clone 2)`.

    Of a re-evaluation it evaluates the same networks.

    Raises `NotFoundError`.
    """
    experiment = store.get_experiment(session, experiment_id, project_id=who.project_id)
    spec = read_spec(experiment.spec | {"name": name or _named_after(session, experiment, "clone")})
    query = select(Trial.fingerprint, Trial.source_trial_id)
    found = session.execute(query.where(Trial.experiment_id == experiment_id, Trial.source_trial_id.is_not(None)))
    sources = {fingerprint: source for fingerprint, source in found if source is not None}
    plan = expand_grid(spec, max_trials=max_trials)
    return Draft(spec, plan, EventKind.CLONED, experiment_id, sources or None)


def draft_reevaluation(
    session: Session,
    experiment_id: int,
    evaluation: Mapping[str, object],
    who: Principal = ANYONE,
    *,
    name: str | None,
    max_trials: int,
) -> Draft:
    """The trials that have succeeded by now, each with `evaluation` laid over its own: nothing is trained.

    By default it is called `NAME (re-evaluated)`. The spec lists the trials: posted as it is, it would train them anew.
    Trials that differ in their evaluation alone become
    one. Raises `NotFoundError`, `StateError` without any such trial, and `SpecError` naming the wrong field.
    """
    experiment = store.get_experiment(session, experiment_id, project_id=who.project_id)
    try:
        build(EvaluationConfig, dict(evaluation))  # which is wrong of any trial, where it is wrong of none yet
    except ConfigError as error:
        raise _wrong(error) from error
    query = (
        select(Trial.id, Trial.source_trial_id, Trial.config)
        .where(Trial.experiment_id == experiment_id, Trial.state == TrialState.SUCCEEDED)
        .order_by(Trial.number)
    )
    configs: dict[str, TrialFields] = {}
    sources: dict[str, int] = {}
    for trial_id, source, config in session.execute(query):
        own = config.get("evaluation")
        merged = {**config, "evaluation": {**(own if isinstance(own, Mapping) else {}), **evaluation}}
        try:
            parsed = TrialConfig.from_dict(merged).canonical()
        except ConfigError as error:
            raise _wrong(error) from error
        fingerprint = parsed.fingerprint()
        if fingerprint not in configs:
            configs[fingerprint] = parsed.to_dict()
            sources[fingerprint] = source or trial_id
    if not configs:
        raise StateError(f"experiment {experiment_id} has no trial that succeeded: there is nothing to evaluate yet")
    base, trials = factored(list(configs.values()))
    if isinstance(training := base.get("training"), dict):
        for unknown in LOOKING_ON:  # to a driver of a version before, as `kept` says
            if unknown in training and training[unknown] == getattr(TRAINING, unknown):
                del training[unknown]
    kept = ("resources", "timeout_seconds", "hung_after", "max_concurrent_trials", "order", "preempt", "priority")
    kept_words = ("tags", "notes")
    spec = read_spec(
        {key: experiment.spec[key] for key in (*kept, *kept_words) if key in experiment.spec}
        | {"name": name or _named_after(session, experiment, "re-evaluated"), "base": base, "trials": trials}
    )
    plan = expand_grid(spec, max_trials=max_trials)
    return Draft(spec, plan, EventKind.REEVALUATED, experiment_id, sources)


def _wrong(error: ConfigError) -> SpecError:
    return SpecError([FieldProblem(error.field, f"{error.fix}, not {json.dumps(error.value)}")])


def _named_after(session: Session, experiment: Experiment, what: str) -> str:
    """`NAME (what)`, or `NAME (what 2)` and so on where another of the project is called so; within a name's length."""
    origin = re.sub(rf" \({what}(?: \d+)?\)$", "", experiment.name)
    of_project = Experiment.project_id.is_not_distinct_from(experiment.project_id)
    taken = set(session.scalars(select(Experiment.name).where(of_project, Experiment.name.contains(f" ({what}"))))
    additions = (f" ({what})" if number == 1 else f" ({what} {number})" for number in count(1))
    names = (origin[: LONGEST_NAME - len(addition)] + addition for addition in additions)
    return next(name for name in names if name not in taken)


def draft_extension(
    session: Session, experiment_id: int, additions: Additions, who: Principal = ANYONE, *, max_trials: int
) -> Draft:
    """The experiment's spec with the additions.

    Raises `NotFoundError`, and `SpecError` for what would change trials that there are. What is wrong with the
    additions is said by their own numbers.
    """
    experiment = store.get_experiment(session, experiment_id, project_id=who.project_id)
    if session.scalar(select(Trial.id).where(Trial.experiment_id == experiment_id, Trial.source_trial_id.is_not(None))):
        raise StateError(f"experiment {experiment_id} re-evaluates others' trials: extend those, and re-evaluate them")
    spec = read_spec(experiment.spec)
    if spec.search is not None:
        raise SpecError([FieldProblem("grid", "this experiment is a search: it has no grid to extend; post another")])
    grown = _merged(spec, additions)
    try:
        merged = read_spec({**experiment.spec, **grown})
        plan = expand_grid(merged, max_trials=max_trials)
    except SpecError as error:
        raise _as_posted(error, grown, additions) from error
    return Draft(merged, plan, EventKind.EXTENDED, experiment_id, before=experiment.spec)


class _Grown(TypedDict):
    """The parts of a spec that additions may make larger."""

    grid: dict[str, list[Any]]
    variants: list[PartialTrial]
    trials: list[PartialTrial]
    repeat: int


def _merged(spec: ExperimentSpec, additions: Additions) -> _Grown:
    """The parts of the spec that become larger. Raises `SpecError`."""
    problems = [
        FieldProblem(
            f"grid.{axis}",
            f"is no axis of this experiment ({', '.join(spec.grid) or 'it has none'}), and a new one would change the "
            "trials there are; add variants or trials, or post another experiment",
        )
        for axis in additions.grid
        if axis not in spec.grid
    ]
    repeat = additions.repeat or spec.repeat
    if repeat < spec.repeat:
        problems.append(FieldProblem("repeat", f"is {spec.repeat} now and can only grow, not {repeat}"))
    if problems:
        raise SpecError(problems)
    grid = {axis: _joined(values, additions.grid.get(axis, [])) for axis, values in spec.grid.items()}
    variants, trials = spec.variants, spec.trials
    # Where nothing is named `base` alone is a trial: it stays one.
    base_alone = not (spec.grid or spec.variants or spec.trials)
    if additions.variants:
        variants = _joined(variants or ([{}] if spec.grid or base_alone else []), additions.variants)
    if additions.trials:
        trials = _joined(trials or ([{}] if base_alone and not variants else []), additions.trials)
    return {"grid": grid, "variants": variants, "trials": trials, "repeat": repeat}


_ITEM = re.compile(r"\b(grid\.[A-Za-z0-9_.]+|variants|trials)\[(\d+)\]")
"""An item of a part that additions may make larger."""


def _as_posted(error: SpecError, grown: _Grown, additions: Additions) -> SpecError:
    """The same problems, items numbered as in the additions; those of the experiment itself are called so."""
    lists: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
        **{f"grid.{axis}": (values, additions.grid.get(axis, ())) for axis, values in grown["grid"].items()},
        "variants": (grown["variants"], additions.variants),
        "trials": (grown["trials"], additions.trials),
    }

    def renumbered(found: re.Match[str]) -> str:
        whole, added = lists.get(found[1], ((), ()))
        item = int(found[2])
        key = _key(whole[item]) if item < len(whole) else None
        place = next((index for index, value in enumerate(added) if _key(value) == key), None)
        return f"the experiment's {found[0]}" if place is None else f"{found[1]}[{place}]"

    return SpecError(
        [
            FieldProblem(_ITEM.sub(renumbered, problem.field), _ITEM.sub(renumbered, problem.message))
            for problem in error.problems
        ]
    )


def _key(value: Any) -> str:
    """Tells items of a list apart: 1, 1.0 and true are three."""
    return json.dumps(value, sort_keys=True)


def _joined(values: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """The list with what it does not hold yet."""
    joined = list(values)
    known = set(map(_key, values))
    for value in more:
        text = _key(value)
        if text not in known:
            known.add(text)
            joined.append(value)
    return joined


def read_spec(document: Mapping[str, object]) -> ExperimentSpec:
    """The spec that a document is: a stored one, one made of it, or one from outside. Raises `SpecError`."""
    try:
        return ExperimentSpec.model_validate(document)
    except ValidationError as error:
        found: list[ErrorDetails] = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise SpecError(wrong_fields(found, document)) from error


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
    if is_postgres(session):
        _insert_document(session, rows)
    else:
        session.execute(insert(Trial), rows)
    new = select(Trial.number, Trial.id).where(Trial.experiment_id == experiment_id, Trial.number >= first)
    ids = dict(session.execute(new).all())
    field_index.enter(session, ({"trial_id": ids[row["number"]], **row} for row in rows))


def _insert_document(session: Session, rows: Sequence[_NewTrial]) -> None:
    """All rows as one JSON document in one statement: of ten thousand it takes half the time, and triggers run once."""
    fresh = {"state": TrialState.QUEUED.value, "attempts": 0, "deaths": 0, "epoch": 0, "run_seconds": 0.0}
    names = ", ".join(f'"{name}"' for name in {**rows[0], **fresh})
    document = to_json([{**row, **fresh} for row in rows]).decode()
    session.execute(
        text(
            f"INSERT INTO trials ({names}) SELECT {names} "
            "FROM json_populate_recordset(NULL::trials, CAST(:document AS json))"
        ),
        {"document": document},
    )


def next_number(session: Session, experiment_id: int) -> int:
    """The number after the last trial's. The experiment must be locked."""
    last = session.scalar(select(func.max(Trial.number)).where(Trial.experiment_id == experiment_id))
    return 0 if last is None else last + 1
