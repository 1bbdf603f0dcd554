"""What a search may try: the `search` part of a spec."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue

from service.errors import FieldProblem
from service.specs.columns import nearest_said
from service.specs.json_schema import LARGEST, value_fix, value_schema
from service.specs.validation_errors import shown
from ttsv.config.fields import FieldInfo, FieldValues
from ttsv.config.trial import field_infos

_MOST_CHOICES = 1000


def _space_schema() -> JsonSchemaValue:
    """JSON schema: dotted paths, each with one way of drawing a value."""
    number = {"type": "number"}
    whole = {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}

    def only(kind: str, said: str, items: JsonSchemaValue, least: int, most: int) -> JsonSchemaValue:
        values = {"type": "array", "description": said, "items": items, "minItems": least, "maxItems": most}
        return {"type": "object", "properties": {kind: values}, "required": [kind], "additionalProperties": False}

    ranges = [
        only("uniform", "any number between the two", number, 2, 2),
        only("loguniform", "the same, its logarithm evenly", number, 2, 2),
        only("int", "any whole number from one to the other", whole, 2, 2),
    ]
    return {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": {
            path: {
                "description": info.doc,
                "anyOf": [*ranges, only("choice", "one of these", value_schema(info), 1, _MOST_CHOICES)],
            }
            for path, info in field_infos().items()
        },
    }


Space: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By dotted path one way of drawing a value, which stands beside its bounds or choices (`Domain`)."""
Metric = Literal["val_accuracy", "val_loss"]
"""What trials are compared by while they train."""


class Search(BaseModel):
    """Trials found by Ray Tune's searchers instead of being listed.

    Every trial gets its number, and its row, before it runs. A point that was tried before is not tried again, so a
    small space may give fewer trials than asked for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    algorithm: Literal["random", "optuna"] = Field(
        description="random: independent points; optuna: its tree-structured Parzen estimator, which learns from them."
    )
    trials: int = Field(ge=1, le=10_000, description="So many at most.")
    metric: Metric = Field("val_accuracy", description="Of a trial's last epoch.")
    mode: Literal["max", "min"] | None = Field(None, description="null: max of an accuracy, min of a loss.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Of the search, not of the trials.")
    space: Annotated[dict[str, dict[str, Any]], WithJsonSchema(_space_schema())] = Field(
        description="What is varied, by dotted path: uniform [low, high], loguniform [low, high], int [low, high] "
        "(both included) or choice [values]."
    )

    @property
    def direction(self) -> Literal["max", "min"]:
        """Whether more is better."""
        return self.mode or best_direction(self.metric)


def best_direction(metric: str) -> Literal["max", "min"]:
    """Whether more of a metric is better."""
    return "min" if metric.endswith("loss") else "max"


@dataclass(frozen=True)
class Domain:
    """How the values of one field are drawn: `kind` with its bounds, or `values` of a choice."""

    kind: str
    values: tuple[Any, ...]

    def draw(self, source: random.Random) -> Any:
        """One value."""
        if self.kind == "choice":
            return source.choice(self.values)
        low, high = self.values
        match self.kind:
            case "int":
                return source.randint(low, high)
            case "loguniform":
                return min(max(math.exp(source.uniform(math.log(low), math.log(high))), low), high)
            case _:
                return source.uniform(low, high)


def domains(space: Space) -> dict[str, Domain]:
    """Path -> how its values are drawn, of a space without problems."""
    return {path: Domain(kind, tuple(values)) for path, drawn in space.items() for kind, values in drawn.items()}


def space_problems(space: Space, base: FieldValues) -> list[FieldProblem]:
    """What is wrong with a space over a base (by dotted path)."""
    problems = []
    if not space:
        problems.append(FieldProblem("search.space", "is empty; name a field to be varied"))
    for path, drawn in space.items():
        info = field_infos().get(path)
        if info is None:
            fix: str | None = f"unknown; {nearest_said(path)}a field is one of {', '.join(field_infos())}"
        elif path in base:
            fix = f"is set in base too; remove it here or base.{path}"
        else:
            fix = _domain_fix(info, drawn)
        if fix is not None:
            problems.append(FieldProblem(f"search.space.{path}", fix))
    return problems


def _domain_fix(info: FieldInfo, drawn: Mapping[str, Any]) -> str | None:
    """What would be right for one field's domain, or None."""
    if len(drawn) != 1 or next(iter(drawn)) not in ("uniform", "loguniform", "int", "choice"):
        ways = "{uniform: [low, high]}, {loguniform: [low, high]}, {int: [low, high]}, {choice: [...]}"
        return f"must be one of {ways}, not {shown(drawn)}"
    ((kind, values),) = drawn.items()
    if kind == "choice":
        if not isinstance(values, list) or not 1 <= len(values) <= _MOST_CHOICES:
            return f"choice must be a list of 1 to {_MOST_CHOICES} values, not {shown(values)}"
        return next((fix for value in values if (fix := value_fix(info, value))), None)
    if not isinstance(values, list) or len(values) != 2 or not all(type(v) in (int, float) for v in values):
        return f"{kind} must be two numbers, [low, high], not {shown(values)}"
    low, high = values
    if kind == "int" and not (type(low) is int and type(high) is int and max(-low, high) <= LARGEST):
        beyond = next((fix for value in values if type(value) is int and (fix := value_fix(info, value))), None)
        return beyond or f"int must be two whole numbers within ±{LARGEST}, not {shown(values)}"
    if not all(abs(v) < 2**1000 for v in values) or not low < high:
        return f"{kind} must be finite, the first number below the second, not {shown(values)}"
    if kind == "loguniform" and low <= 0:
        return f"loguniform must lie above 0, not {shown(values)}; use uniform"
    # Between its bounds a field takes all numbers of a kind or none, so one inside stands for all. A half is never
    # taken for a whole number.
    inside = low if kind == "int" else (low + high) / 2
    if kind != "int" and float(inside).is_integer():
        inside = (low + inside) / 2 if not ((low + inside) / 2).is_integer() else low + (high - low) / 3
    return next((fix for value in (low, high, inside) if (fix := value_fix(info, value))), None)
