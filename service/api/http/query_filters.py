"""Which experiments and trials a list shall hold: the query parameters."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import BeforeValidator, Field, WithJsonSchema

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID
from service.database import ExperimentState, TrialState
from service.errors import FieldProblem, QueryError
from service.experiments.listing import EXPERIMENT_ORDERS, TRIAL_ORDERS, ExperimentFilter, TrialFilter
from service.leaderboards.conditions import MEASURED, condition
from service.schemas.trial_tables import Shown
from service.specs.columns import known_field
from service.specs.patterns import FIELDS, ORDER, PRINTABLE
from service.specs.validation_errors import shown

_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)")
_YEARS = range(1970, 9000)


def _instant(text: Any) -> datetime:
    fix = "must be an instant with its zone, such as 2026-11-21T03:30:31Z"
    if not isinstance(text, str) or not _INSTANT.fullmatch(text):
        raise ValueError(fix)
    try:
        found = datetime.fromisoformat(text.upper())
    except ValueError:
        raise ValueError(fix) from None
    if found.year not in _YEARS:
        raise ValueError(f"{fix}; the year in {_YEARS.start} to {_YEARS.stop - 1}")
    return found.astimezone(UTC)


Instant = Annotated[datetime, BeforeValidator(_instant), WithJsonSchema({"type": "string", "format": "date-time"})]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE)]
Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=PRINTABLE)]


_RANK = re.compile(r"[0-9]{1,7}(\.[0-9]{1,20})?")


def _rank(text: Any) -> float | str:
    if isinstance(text, str) and _RANK.fullmatch(text):
        return float(text)
    if text != "none":
        raise ValueError(f"must be a number such as 8 or 0.25, or none (not decomposed), not {shown(text)}")
    return "none"


Rank = Annotated[
    float | str,
    BeforeValidator(_rank),
    WithJsonSchema({"type": "string", "pattern": rf"^(none|{_RANK.pattern})$"}),
]
"""Of a cell or trial: a number, or `none`."""


class Archived(StrEnum):
    """Whether archived experiments are wanted."""

    FALSE = "false"
    TRUE = "true"
    ANY = "any"


def _sort(names: Iterable[str]) -> Any:
    every = [sign + name for name in names for sign in ("", "-")]
    text = "The order; - before it: largest first. Rows without a value come last, equal ones by their id."
    return Query(max_length=64, description=text, json_schema_extra={"enum": every})


ExperimentSort = Annotated[str, _sort(EXPERIMENT_ORDERS)]
TrialSort = Annotated[
    str,
    Query(
        max_length=100,
        pattern=ORDER,
        description=f"The order; - before it: largest first. One of {', '.join(TRIAL_ORDERS)}, or any field of the "
        "spec. Rows without a value, or with an invalid result's, come last, equal ones by their id.",
        examples=["-accuracy", "training.lr"],
    ),
]


_ARCHIVED = {Archived.FALSE: False, Archived.TRUE: True, Archived.ANY: None}


@dataclass(frozen=True, kw_only=True)
class _Experiments:
    """The query parameters of `ExperimentFilter`."""

    states: Annotated[
        list[ExperimentState], Query(alias="state", default_factory=list, max_length=7, description="Any of these.")
    ]
    tags: Annotated[list[Tag], Query(alias="tag", default_factory=list, max_length=10, description="All of these.")]
    name: Annotated[Text | None, Query(description="Part of the name, in upper or lower case.")] = None
    owner: Annotated[Text | None, Query(description="Whose key posted it.")] = None
    created_after: Annotated[Instant | None, Query(description="At this instant or later.")] = None
    created_before: Annotated[Instant | None, Query(description="Before this instant.")] = None
    archived: Annotated[Archived, Query(description="Those that were archived, or the others.")] = Archived.FALSE


def _experiments(who: Reader, asked: Annotated[_Experiments, Depends()]) -> ExperimentFilter:
    return ExperimentFilter(project_id=who.project_id, **vars(asked) | {"archived": _ARCHIVED[asked.archived]})


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """The query parameters of `TrialFilter`."""

    states: Annotated[
        list[TrialState], Query(alias="state", default_factory=list, max_length=7, description="Any of these.")
    ]
    dataset: Annotated[Text | None, Query(description="Only on this data set.", examples=["digits"])] = None
    model: Annotated[Text | None, Query(description="Only of this network.", examples=["small-cnn"])] = None
    layer: Annotated[Text | None, Query(description="Only of this kind of layer.", examples=["tt"])] = None
    constraint: Annotated[Text | None, Query(description="Only under this constraint.", examples=["clip"])] = None
    rank: Annotated[Rank | None, Query(description="`none`: trials without a rank.")] = None
    seed: Annotated[int | None, Query(ge=0, le=MAX_ID, description="Only with this seed.")] = None
    cell: Annotated[Text | None, Query(description="Fingerprint of the configuration without its seed.")] = None
    failure: Annotated[Text | None, Query(description="Class of what went wrong.", examples=["diverged"])] = None
    where: Annotated[
        list[Annotated[str, Field(max_length=2000)]] | None,
        Query(
            max_length=20,
            description="A condition on any field, or on a number of the result; several must all hold. =, !=, <, <=, "
            ">, >=, in, not in.",
            examples=[["training.lr<=0.1", "rank in (192, 256)", "accuracy>=0.9"]],
        ),
    ] = None


_FACTS = ("state", "failure", "cell")
"""What a trial is beside its fields: parameters of their own."""


def _field(name: str, where: str) -> str:
    """The path of a field, or the name of what was measured; raises `QueryError`, of a fact with its parameter."""
    if name in _FACTS:
        fix = f"{name} is no field of the spec, but a parameter of its own: {name}=..."
        raise QueryError([FieldProblem(where, fix)])
    return name if name in MEASURED else known_field(name, where, also=MEASURED)


def _trials(who: Reader, asked: Annotated[_Trials, Depends()]) -> TrialFilter:
    # Raises `QueryError`. A trial has a seed and a data set, too, which a leaderboard's rows share.
    where = tuple(condition(text, field_named=_field) for text in asked.where or ())
    return TrialFilter(project_id=who.project_id, **vars(asked) | {"where": where})


FieldColumns = Annotated[
    str | None,
    Query(
        max_length=1000,
        pattern=FIELDS,
        description="Fields that say which trial or cell a row is, separated by commas; by default those that differ.",
        examples=["lr,rank"],
    ),
]
HiddenFields = Annotated[
    str | None, Query(max_length=1000, pattern=FIELDS, description="Fields that are not shown, separated by commas.")
]


def _shown(columns: FieldColumns = None, hide: HiddenFields = None) -> Shown:
    return Shown.named(columns, hide)


WhichExperiments = Annotated[ExperimentFilter, Depends(_experiments)]
WhichTrials = Annotated[TrialFilter, Depends(_trials)]
ShownFields = Annotated[Shown, Depends(_shown)]
