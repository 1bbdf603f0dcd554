"""Drafts of what is made of an experiment that is there: its clone, its re-evaluation, and itself with more trials.

Functions take a Session and change nothing; `submission` stores what they draft.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, TypedDict

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.access.security import ANYONE, Principal
from service.database import Artifact, Experiment, Trial, TrialState
from service.errors import FieldProblem, SpecError, StateError
from service.experiments import store
from service.experiments.events import EventKind
from service.experiments.submission import Draft
from service.specs.grid import expand_grid, factored
from service.specs.planner import Facts
from service.specs.spec import LONGEST_NAME, Additions, ExperimentSpec, PartialTrial, read_spec
from ttsv.config.evaluation import EvaluationConfig
from ttsv.config.fields import TrialFields, build
from ttsv.config.training import LOOKING_ON, TRAINING
from ttsv.config.trial import TrialConfig
from ttsv.data.catalog import dataset_info
from ttsv.errors import ConfigError


def draft_clone(
    session: Session,
    experiment_id: int,
    who: Principal = ANYONE,
    *,
    name: str | None,
    max_trials: int,
    facts: Facts = dataset_info,
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
    plan = expand_grid(spec, max_trials=max_trials, facts=facts)
    return Draft(spec, plan, EventKind.CLONED, experiment_id, sources or None)


def draft_reevaluation(
    session: Session,
    experiment_id: int,
    evaluation: Mapping[str, object],
    who: Principal = ANYONE,
    *,
    name: str | None,
    max_trials: int,
    facts: Facts = dataset_info,
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
    there, removed = _networks(session, experiment_id)
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
            # What evaluated another's network has a copy, by which it can be evaluated once the other is gone.
            sources[fingerprint] = trial_id if source is None or (source in removed and trial_id in there) else source
    if not configs:
        raise StateError(f"experiment {experiment_id} has no trial that succeeded: there is nothing to evaluate yet")
    if removed.issuperset(sources.values()):
        raise StateError(
            f"experiment {experiment_id}: the networks of all its trials were removed to make room: "
            "there is nothing to evaluate; clone it, which trains them anew"
        )
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
    plan = expand_grid(spec, max_trials=max_trials, facts=facts)
    return Draft(spec, plan, EventKind.REEVALUATED, experiment_id, sources)


def _networks(session: Session, experiment_id: int) -> tuple[set[int], set[int]]:
    """Of an experiment's trials, and those whose networks they evaluate: whose network is kept, and whose removed."""
    own, sources = (select(of).where(Trial.experiment_id == experiment_id) for of in (Trial.id, Trial.source_trial_id))
    query = select(Artifact.trial_id, Artifact.removed_at).where(Artifact.kind == "model")
    query = query.where(Artifact.trial_id.in_(own) | Artifact.trial_id.in_(sources))
    kept, removed = set[int](), set[int]()
    for trial_id, removed_at in session.execute(query):
        (kept if removed_at is None else removed).add(trial_id)
    return kept, removed


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
    session: Session,
    experiment_id: int,
    additions: Additions,
    who: Principal = ANYONE,
    *,
    max_trials: int,
    facts: Facts = dataset_info,
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
        plan = expand_grid(merged, max_trials=max_trials, facts=facts)
    except SpecError as error:
        raise _as_posted(error, grown, additions) from error
    there = frozenset(session.scalars(select(Trial.fingerprint).where(Trial.experiment_id == experiment_id)))
    return Draft(merged, plan, EventKind.EXTENDED, experiment_id, before=experiment.spec, there=there)


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
