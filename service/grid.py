"""From a posted spec to its trials: pure functions."""

import itertools
import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from service.errors import FieldProblem, SpecError
from ttsv.config import TrialConfig, field_infos
from ttsv.errors import ConfigError
from ttsv.fields import FieldInfo

_NO_NUL = r"^[^\x00]*$"  # PostgreSQL's text cannot hold it
_LARGEST = 2**53 - 1  # beyond it, whoever reads JSON's numbers as doubles sees another number
PRINTABLE = r"^[^\x00-\x1f\x7f]*$"


def _field_schema(info: FieldInfo) -> dict[str, Any]:
    schema = info.schema()
    if int in info.types:
        schema.setdefault("maximum", _LARGEST)
    return schema


def _base_schema() -> dict[str, Any]:
    """JSON schema of a partial trial: nested objects, no required fields."""
    schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    for path, info in field_infos().items():
        part, _, name = path.rpartition(".")
        parent = schema
        if part:
            empty = {"type": "object", "properties": {}, "additionalProperties": False}
            parent = schema["properties"].setdefault(part, empty)
        parent["properties"][name] = _field_schema(info)
    return schema


def _grid_schema() -> dict[str, Any]:
    """JSON schema of the axes: each a non-empty list of one field's values."""
    axes = {
        path: {
            "type": "array",
            "minItems": 1,
            "items": {k: v for k, v in _field_schema(info).items() if k != "default"},
        }
        for path, info in field_infos().items()
    }
    return {"type": "object", "properties": axes, "additionalProperties": False}


class Resources(BaseModel):
    """What Ray reserves for one trial. A GPU fraction shares a GPU between trials; its memory is not divided."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cpus: float = Field(1, gt=0, le=1024, allow_inf_nan=False)
    gpus: float = Field(0, ge=0, le=1024, allow_inf_nan=False)


class ExperimentSpec(BaseModel):
    """What is posted: the trials are the product of the variants (without any: of `base` alone) and the grid's axes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    spec_version: Literal[1] = 1
    name: str = Field(min_length=1, max_length=200, pattern=PRINTABLE, description="For people; need not be unique.")
    base: Annotated[dict[str, Any], WithJsonSchema(_base_schema())] = Field(
        default={}, description="Fields that all trials share."
    )
    grid: Annotated[dict[str, list[Any]], WithJsonSchema(_grid_schema())] = Field(
        default={}, description="Axes by dotted path (`rank`, `training.lr`), each a list of values."
    )
    variants: list[Annotated[dict[str, Any], WithJsonSchema(_base_schema())]] = Field(
        default=[],
        max_length=10_000,
        description="Partial trials, each laid over `base`: the grid multiplies every one of them.",
    )
    resources: Resources = Resources()
    max_concurrent_trials: int | None = Field(None, ge=1, le=10_000, description="At most so many at a time.")
    priority: int = Field(0, ge=-1000, le=1000, description="Higher is claimed first.")
    notes: str = Field("", max_length=10_000, pattern=_NO_NUL)


@dataclass(frozen=True)
class PlannedTrial:
    """A trial before it has a row: canonical, with its two fingerprints."""

    config: TrialConfig
    fingerprint: str
    cell: str


@dataclass(frozen=True)
class Plan:
    """The trials of a spec, each once; `points` counts duplicates too.

    In the order of the variants and, within each, of the grid (last axis fastest).
    """

    trials: list[PlannedTrial]
    points: int


def expand_grid(spec: ExperimentSpec, *, max_trials: int) -> Plan:
    """Expands a spec. Grid points that train the same network the same way become one trial.

    Raises `SpecError` naming every wrong field; a grid above `max_trials` points is refused before it is expanded.
    """
    infos = field_infos()
    problems: list[FieldProblem] = []
    base = _flatten(spec.base, "base", problems)
    sizes = [len(spec.variants)] if spec.variants else []
    sizes += [len(values) for values in spec.grid.values()]
    points = math.prod(sizes)
    if points > max_trials:
        product = " x ".join(map(str, sizes))
        problems.append(FieldProblem("grid", f"{product} = {points} points; at most {max_trials} are allowed"))
        raise SpecError(problems)
    variants = [_flatten(variant, f"variants[{index}]", problems) for index, variant in enumerate(spec.variants)]
    for path, values in spec.grid.items():
        where = f"grid.{path}"
        if path not in infos:
            problems.append(FieldProblem(where, f"unknown; an axis is one of {', '.join(infos)}"))
        elif not values:
            problems.append(FieldProblem(where, "an empty axis gives an empty grid; list a value or remove the axis"))
        elif path in base:
            problems.append(FieldProblem(where, f"is set in base too; remove it here or base.{path}"))
        elif places := [index for index, variant in enumerate(variants) if path in variant]:
            fix = f"is set in variants[{places[0]}] too; remove it here or variants[{places[0]}].{path}"
            problems.append(FieldProblem(where, fix))
        else:
            for index, value in enumerate(values):
                _try_parse(path, value, f"{where}[{index}]", problems)
    problems += [
        FieldProblem(f"base.{path}", f"is required, here, in every variant or as an axis; {_choices(path)}")
        for path in ("dataset", "model")
        if path not in base and path not in spec.grid and not (variants and all(path in v for v in variants))
    ]
    if problems:
        raise SpecError(problems)

    trials: dict[str, PlannedTrial] = {}
    checked: set[tuple[Any, ...]] = set()
    for variant, combination in itertools.product(variants or [{}], itertools.product(*spec.grid.values())):
        fields = base | variant | dict(zip(spec.grid, combination, strict=True))
        try:
            config = TrialConfig.from_dict(_nest(fields)).canonical()
            if (images := (config.dataset, config.model, config.mean, config.std)) not in checked:
                config.check_images()
                checked.add(images)
        except ConfigError as error:  # of fields that do not go together
            raise SpecError([FieldProblem(error.field, f"{error.fix}, not {_shown(error.value)}")]) from error
        fingerprint = config.fingerprint()
        if fingerprint not in trials:
            trials[fingerprint] = PlannedTrial(config, fingerprint, config.cell())
    return Plan(list(trials.values()), points)


def _choices(path: str) -> str:
    check = field_infos()[path].check
    return (check and check.fix(None)) or ""


def _try_parse(path: str, value: Any, where: str, problems: list[FieldProblem]) -> None:
    info = field_infos()[path]
    if int in info.types and type(value) is int and abs(value) > _LARGEST:
        problems.append(FieldProblem(where, f"must be within ±{_LARGEST}, not {_shown(value)}"))
        return
    try:
        info.parse(value)
    except ConfigError as error:
        problems.append(FieldProblem(where, f"{error.fix}, not {_shown(value)}"))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _flatten(part_of_spec: dict[str, Any], where: str, problems: list[FieldProblem]) -> dict[str, Any]:
    """Nested fields as dotted paths; unknown ones and wrong values as problems."""
    infos = field_infos()
    parts = {path.partition(".")[0] for path in infos if "." in path}
    flat: dict[str, Any] = {}
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
                    fix = f"unknown; the fields here are {', '.join(names)}"
                    problems.append(FieldProblem(f"{where}.{key}.{name}", fix))
        else:
            known = ", ".join(sorted(parts | {path for path in infos if "." not in path}))
            problems.append(FieldProblem(f"{where}.{key}", f"unknown; the fields are {known}"))
    for path, value in flat.items():
        _try_parse(path, value, f"{where}.{path}", problems)
    return flat


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        part, _, name = path.rpartition(".")
        (nested.setdefault(part, {}) if part else nested)[name] = value
    return nested
