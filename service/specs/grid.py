"""From a posted spec to its trials, and from trials back to a spec: pure functions."""

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from service.errors import FieldProblem, SpecError
from service.specs.columns import nearest_said
from service.specs.faults import REQUIRED, Faults, errors
from service.specs.json_schema import value_fix
from service.specs.patterns import NAME, WORDS
from service.specs.planner import CellCount, Facts, GridCount, Plan, PlannedCell, PlannedTrial, Planner
from service.specs.search import best_direction, domains, space_problems
from service.specs.spec import ExperimentSpec, PartialTrial, Resources
from service.specs.validation_errors import shown
from ttsv.config.fields import FieldValue, FieldValues, Json, JsonObject
from ttsv.config.trial import field_infos
from ttsv.data.catalog import dataset_info
from ttsv.errors import ConfigError

__all__ = [
    "Plan",
    "PlannedTrial",
    "Resources",
    "count_grid",
    "expand_grid",
    "search_base",
]


@dataclass(frozen=True)
class _Parts:
    """A spec's base, axes, variants and listed trials, their fields by dotted path."""

    spec: ExperimentSpec
    base: FieldValues
    grid: Mapping[str, Sequence[FieldValue]]
    variants: Sequence[FieldValues]
    trials: Sequence[FieldValues]


_LEAST_SHARE = 0.0001
"""Of a core or a GPU: Ray counts in ten-thousandths, and starts no trial that reserves less."""
_PROBES = 32
"""Points of a search space that are tried when it is posted."""


def expand_grid(spec: ExperimentSpec, *, max_trials: int, facts: Facts = dataset_info) -> Plan:
    """Expands a spec. Points that train the same network the same way become one trial; a search has none yet.

    Raises `SpecError` naming every wrong field; a spec of more than `max_trials` points is refused before it is
    expanded. `facts`: what is known of data sets where the trials are to run.
    """
    parts, points, wrong = _checked(spec, max_trials)
    if spec.search is not None:
        wrong.refuse()
        probed = _probe(spec, parts.base, facts)
        return Plan([], points, _idle(spec, probed), probed.unreached(), probed.unbuilt)

    planner = _planner(spec, facts)
    planned: dict[str, PlannedTrial] = {}
    for fields in _points(parts):
        try:
            trial = planner.plan(fields)
        except ConfigError:
            wrong.look_at(planner, fields)
            if wrong.are_enough:
                break
        else:
            planned.setdefault(trial.fingerprint, trial)
    wrong.refuse()
    return Plan(list(planned.values()), points, _idle(spec, planner), planner.unreached(), planner.unbuilt)


def count_grid(spec: ExperimentSpec, *, max_trials: int, facts: Facts = dataset_info) -> GridCount:
    """Counts what `expand_grid` would list: each cell is planned once, whatever its seeds. Raises the same."""
    parts, points, wrong = _checked(spec, max_trials)
    if spec.search is not None:
        wrong.refuse()
        probed = _probe(spec, parts.base, facts)
        return GridCount([], points, _idle(spec, probed), probed.unreached(), probed.unbuilt)

    planner = _planner(spec, facts)
    cells: dict[str, PlannedCell] = {}
    seeds: dict[str, set[int]] = {}
    for fields, own in _seeded(parts):
        try:
            cell = planner.cell(fields)
        except ConfigError:
            wrong.look_at(planner, fields)
        else:
            cells[cell.digest] = cell
            seeds.setdefault(cell.digest, set()).update(own)
        for seed in _too_large(own):
            wrong.look_at(planner, {**fields, "seed": seed})
        if wrong.are_enough:
            break
    wrong.refuse()
    counts = [CellCount(cell.config, len(seeds[digest])) for digest, cell in cells.items()]
    return GridCount(counts, points, _idle(spec, planner), planner.unreached(), planner.unbuilt)


def _too_large(seeds: Sequence[int]) -> Sequence[int]:
    """The seeds of `repeat` that are no seeds: those of an axis were looked at by themselves."""
    info = field_infos()["seed"]
    return [seed for seed in seeds if value_fix(info, seed)] if seeds and value_fix(info, seeds[-1]) else ()


def _idle(spec: ExperimentSpec, planner: Planner) -> tuple[str, ...]:
    """Fields that have no effect in any trial that was planned: those of trials, and when ASHA first compares them.

    A trial that has run to its end is stopped no more, whatever it would be compared by then.
    """
    late = spec.scheduler.type == "asha" and spec.scheduler.grace_epochs >= planner.most_epochs
    return (*planner.idle(), *(("scheduler.grace_epochs",) if late else ()))


def _checked(spec: ExperimentSpec, max_trials: int) -> tuple[_Parts, int, Faults]:
    """What of a spec's parts is right by itself, how many points it has, and what is wrong.

    Raises `SpecError` where the points are too many to be looked at.
    """
    parts, problems = _read(spec)
    points = _count(spec)
    if points > max_trials:
        many = FieldProblem(_source(spec), f"{_sum(spec)} points; at most {max_trials} are allowed")
        raise SpecError([*problems, many])
    faults = Faults(problems)
    return _right(parts, faults), points, faults


def field_problems(spec: ExperimentSpec) -> list[FieldProblem]:
    """What is wrong with the fields of a spec by themselves."""
    return _read(spec)[1]


def datasets(spec: ExperimentSpec) -> set[str]:
    """The data sets of all trials of a spec, whatever else is wrong with it; of a search those that it may draw."""
    parts, _ = _read(spec)
    drawn = spec.search.space.get("dataset", {}).get("choice", ()) if spec.search else parts.grid.get("dataset", ())
    laid = [*(parts.variants or [{}] if _has_grid(spec) else ()), *parts.trials]
    named = [{**parts.base, **fields}.get("dataset") for fields in laid]
    return {one for one in (*named, *drawn) if isinstance(one, str) and not value_fix(field_infos()["dataset"], one)}


def _right(parts: _Parts, faults: Faults) -> _Parts:
    """The parts without what is wrong by itself; where too much is wrong they have no point."""
    infos = field_infos()

    def right(item: str, fields: FieldValues) -> FieldValues | None:
        if faults.hopeless & {item, "base", "grid"}:
            return None
        return {path: value for path, value in fields.items() if not value_fix(infos[path], value)}

    variants = [right(f"variants[{index}]", fields) for index, fields in enumerate(parts.variants)]
    trials = [right(f"trials[{index}]", fields) for index, fields in enumerate(parts.trials)]
    grid: dict[str, list[FieldValue]]
    grid = {
        path: [value for value in values if not value_fix(infos[path], value)]
        for path, values in parts.grid.items()
        if path in infos
    }
    base = right("base", parts.base)
    kept = [one for one in variants if one is not None]
    if base is None or (variants and not kept):
        grid = {"dataset": []}  # of whose product nothing is left
    listed = [one for one in trials if one is not None]
    return replace(parts, base=base or {}, grid=grid, variants=kept, trials=listed)


def _read(spec: ExperimentSpec) -> tuple[_Parts, list[FieldProblem]]:
    """A spec's parts, and what is wrong with their fields by themselves."""
    problems: list[FieldProblem] = []
    base = _flatten(spec.base, "base", problems)
    variants = [_flatten(variant, f"variants[{index}]", problems) for index, variant in enumerate(spec.variants)]
    trials = [_flatten(trial, f"trials[{index}]", problems) for index, trial in enumerate(spec.trials)]
    parts = _Parts(spec, base, spec.grid, variants, trials)
    _check_axes(parts, problems)
    # Here and not where they are read: workers read what was stored before, too.
    if not re.search(NAME, spec.name):
        problems.append(FieldProblem("name", WORDS[NAME]))
    shares = {"cpus": spec.resources.cpus, "gpus": spec.resources.gpus}
    problems += [
        FieldProblem(f"resources.{name}", f"must be at least {_LEAST_SHARE:g}, not {share:g}")
        for name, share in shares.items()
        if 0 < share < _LEAST_SHARE
    ]
    if spec.repeat > 1 and "seed" in spec.grid:
        problems.append(FieldProblem("repeat", "gives each trial its seeds; remove it, or the axis grid.seed"))
    if spec.search is not None:
        _check_search(spec, base, problems)
    else:
        _check_required(parts, problems)
    return parts, problems


def search_base(spec: ExperimentSpec) -> FieldValues:
    """What all trials of a search share, by dotted path."""
    return _flatten(spec.base, "base", [])


def _has_grid(spec: ExperimentSpec) -> bool:
    """Whether there is a product of variants and axes: of `base` alone it is one unless the trials are listed."""
    return bool(spec.grid or spec.variants or not spec.trials)


def _sizes(spec: ExperimentSpec) -> list[int]:
    return ([len(spec.variants)] if spec.variants else []) + [len(values) for values in spec.grid.values()]


def _count(spec: ExperimentSpec) -> int:
    """How many points a spec has, duplicates too; of a search how many it may try."""
    if spec.search is not None:
        return spec.search.trials
    return (math.prod(_sizes(spec)) * _has_grid(spec) + len(spec.trials)) * spec.repeat


def _source(spec: ExperimentSpec) -> str:
    """The field that most of the points come from."""
    if spec.search is not None:
        return "search.trials"
    return "grid" if spec.grid else "variants" if spec.variants else "trials" if spec.trials else "repeat"


def _sum(spec: ExperimentSpec) -> str:
    """The count and how it comes about."""
    product = " x ".join(map(str, _sizes(spec) if _has_grid(spec) else [])) or str(int(_has_grid(spec)))
    if spec.search is not None:
        product = str(spec.search.trials)
    elif spec.trials:
        product += f" + {len(spec.trials)}"
    if spec.repeat > 1:
        product = f"({product}) x {spec.repeat}" if spec.trials else f"{product} x {spec.repeat}"
    return f"{product} = {_count(spec)}"


def _points(parts: _Parts) -> Iterator[FieldValues]:
    """The fields of every point."""
    repeat = parts.spec.repeat
    for fields in itertools.chain(_product(parts), ({**parts.base, **trial} for trial in parts.trials)):
        if repeat == 1:
            yield fields
        else:
            first = _seed(fields)
            for seed in range(first, first + repeat):
                yield {**fields, "seed": seed}


def _product(parts: _Parts, without: str = "") -> Iterator[FieldValues]:
    """The product of variants and axes, one of which may be left out."""
    if not _has_grid(parts.spec):
        return
    grid = {path: values for path, values in parts.grid.items() if path != without}
    for variant in parts.variants or [{}]:
        shared = {**parts.base, **variant}
        for combination in itertools.product(*grid.values()):
            yield shared | dict(zip(grid, combination, strict=True))


def _seeded(parts: _Parts) -> Iterator[tuple[FieldValues, Sequence[int]]]:
    """The fields of every point but for the seed, in the points' order, each with its seeds."""
    axis = cast("Sequence[int] | None", parts.grid.get("seed"))
    for fields in _product(parts, without="seed"):
        yield _apart(fields, axis, parts.spec.repeat)
    for trial in parts.trials:
        yield _apart({**parts.base, **trial}, None, parts.spec.repeat)


def _apart(fields: FieldValues, axis: Sequence[int] | None, repeat: int) -> tuple[FieldValues, Sequence[int]]:
    rest = {path: value for path, value in fields.items() if path != "seed"}
    first = _seed(fields)
    return rest, axis if axis is not None else range(first, first + repeat)


def _seed(fields: FieldValues) -> int:
    """That of a point whose values were checked."""
    return cast(int, fields.get("seed", 0))


def _check_axes(parts: _Parts, problems: list[FieldProblem]) -> None:
    infos = field_infos()
    for path, values in parts.spec.grid.items():
        where = f"grid.{path}"
        if path not in infos:
            problems.append(FieldProblem(where, f"unknown; {nearest_said(path)}an axis is one of {', '.join(infos)}"))
        elif not values:
            problems.append(FieldProblem(where, "an empty axis gives an empty grid; list a value or remove the axis"))
        elif path in parts.base:
            problems.append(FieldProblem(where, f"is set in base too; remove it here or base.{path}"))
        elif places := [index for index, variant in enumerate(parts.variants) if path in variant]:
            fix = f"is set in variants[{places[0]}] too; remove it here or variants[{places[0]}].{path}"
            problems.append(FieldProblem(where, fix))
        else:
            fixes = [value_fix(infos[path], value) for value in values]
            problems += [FieldProblem(f"{where}[{index}]", fix) for index, fix in enumerate(fixes) if fix]


def _check_required(parts: _Parts, problems: list[FieldProblem]) -> None:
    spec, variants = parts.spec, parts.variants
    for path in REQUIRED:
        in_grid = path in spec.grid or not _has_grid(spec) or (variants and all(path in v for v in variants))
        if path not in parts.base and not (in_grid and all(path in trial for trial in parts.trials)):
            where = "in every trial" if spec.trials else "in every variant or as an axis"
            problems.append(FieldProblem(f"base.{path}", f"is required, here, {where}; {_choices(path)}"))


def _check_search(spec: ExperimentSpec, base: FieldValues, problems: list[FieldProblem]) -> None:
    assert spec.search is not None
    given = (("grid", spec.grid), ("variants", spec.variants), ("trials", spec.trials), ("repeat", spec.repeat > 1))
    problems += [
        FieldProblem(name, "does not go with a search, which finds the trials itself; remove it, or `search`")
        for name, value in given
        if value
    ]
    problems += space_problems(spec.search.space, base)
    problems += [
        FieldProblem(f"base.{path}", f"is required, here or in search.space; {_choices(path)}")
        for path in REQUIRED
        if path not in base and path not in spec.search.space
    ]
    better = best_direction(spec.search.metric)
    if spec.search.mode not in (None, better):
        problems.append(FieldProblem("search.mode", f"must be {better} for {spec.search.metric}, or null"))


def _probe(spec: ExperimentSpec, base: FieldValues, facts: Facts) -> Planner:
    """Has planned some points of the space. Raises `SpecError` where one has fields that do not go together."""
    assert spec.search is not None
    source, planner = random.Random(0), _planner(spec, facts)
    space = domains(spec.search.space)
    found: dict[tuple[str, str], FieldProblem] = {}
    for _ in range(_PROBES):
        point = {path: domain.draw(source) for path, domain in space.items()}
        for error in errors(planner, {**base, **point}):
            where = f"search.space.{error.field}" if error.field in space else error.field
            problem = FieldProblem(where, f"{error.fix}, not {shown(error.value)}, at the point {shown(point)}")
            found.setdefault((where, error.fix), problem)
    if found:
        raise SpecError([*found.values()])
    return planner


def _planner(spec: ExperimentSpec, facts: Facts) -> Planner:
    chooser = "search" if spec.search else "scheduler" if spec.scheduler.type == "asha" else None
    return Planner(chooser, facts, cards=spec.resources.gpus > 0)


def _choices(path: str) -> str:
    check = field_infos()[path].check
    return (check and check.fix(None)) or ""


def _flatten(part_of_spec: PartialTrial, where: str, problems: list[FieldProblem]) -> FieldValues:
    """Nested fields as dotted paths; unknown ones and wrong values as problems."""
    infos = field_infos()
    parts = {path.partition(".")[0] for path in infos if "." in path}
    known = sorted(parts | {path for path in infos if "." not in path})
    flat: dict[str, FieldValue] = {}
    for key, value in part_of_spec.items():
        if key in infos and "." not in key:
            flat[key] = value
        elif key in parts:
            names = [path.partition(".")[2] for path in infos if path.startswith(f"{key}.")]
            if not isinstance(value, dict):
                problems.append(FieldProblem(f"{where}.{key}", f"must be an object with {', '.join(names)}"))
                continue
            for name, inner in value.items():
                if name in names:
                    flat[f"{key}.{name}"] = inner
                else:
                    near = nearest_said(name, {one: f"{key}.{one}" for one in names})
                    fix = f"unknown; {near}the fields here are {', '.join(names)}"
                    problems.append(FieldProblem(f"{where}.{key}.{name}", fix))
        elif key in infos:
            part, _, name = key.partition(".")
            problems.append(FieldProblem(f"{where}.{key}", f"is a field of {part} here: write {part}: {{{name}: ...}}"))
        else:
            near = nearest_said(key, {one: one for one in known})
            problems.append(FieldProblem(f"{where}.{key}", f"unknown; {near}the fields are {', '.join(known)}"))
    fixes = {path: value_fix(infos[path], value) for path, value in flat.items()}
    problems += [FieldProblem(f"{where}.{path}", fix) for path, fix in fixes.items() if fix]
    return flat


def factored(configs: Sequence[Mapping[str, Json]]) -> tuple[JsonObject, list[JsonObject]]:
    """(base, trials): the fields that all configurations share, and the others of each. Objects are shared by part."""
    base: JsonObject = {}
    trials: list[JsonObject] = [{} for _ in configs]
    for name in configs[0]:
        values = [config[name] for config in configs]
        parts = [value for value in values if isinstance(value, dict)]
        if len(parts) == len(values):
            shared, rests = factored(parts)
            if shared:
                base[name] = shared
            for trial, rest in zip(trials, rests, strict=True):
                if rest:
                    trial[name] = rest
        elif all(value == values[0] and type(value) is type(values[0]) for value in values):
            base[name] = values[0]
        else:
            for trial, value in zip(trials, values, strict=True):
                trial[name] = value
    return base, trials
