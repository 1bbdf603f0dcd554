"""The page that lays trials, cells or experiments beside each other."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query
from fastapi.responses import RedirectResponse, Response
from sqlalchemy.orm import Session

from service.access.security import Principal
from service.api.comparisons import AskedComparison
from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Db
from service.dashboard.rendering import HEADERS, PageRoute, Show, named_numbers, words_of
from service.dashboard.wording import NONE
from service.errors import FieldProblem, NotFoundError, QueryError
from service.experiments.listing import trials_by_id
from service.leaderboards.comparison import MOST, compare, side_layers
from service.leaderboards.comparison_sheets import (
    LETTERS,
    comparison_notes,
    difference,
    field_texts,
    measures_of,
    shown,
    unit_among,
    warnings,
)
from service.leaderboards.metrics import Metric, Unit
from service.leaderboards.sides import CompareRow, Comparison, Kind, Side, SideLayers
from service.leaderboards.text_tables import Cell
from service.leaderboards.value_texts import column_texts
from service.specs.columns import validated_on

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_CELL = re.compile(r"[0-9a-f]{64}")
_MOST_LAYERS = 200
_Number = Annotated[int, Query(ge=1, le=MAX_ID)]
_Cell = Annotated[str, Query(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What the page compares: lists separated by commas, or boxes that were checked, which become such a list."""

    trials: Annotated[str | None, Query(max_length=4000)] = None
    cells: Annotated[str | None, Query(max_length=4000)] = None
    experiments: Annotated[str | None, Query(max_length=4000)] = None
    trial: Annotated[list[_Number] | None, Query(max_length=200)] = None
    cell: Annotated[list[_Cell] | None, Query(max_length=200)] = None
    experiment: Annotated[list[_Number] | None, Query(max_length=200)] = None
    baseline: Annotated[str | None, Query(pattern=r"^([0-9]{1,18}|[0-9a-f]{64})$")] = None
    metric: Metric = Metric.ACCURACY

    @property
    def checked(self) -> bool:
        """Whether boxes were."""
        return any((self.trial, self.cell, self.experiment))

    def lists(self) -> dict[Kind, str]:
        """By kind what is named, separated by commas, right or wrong."""
        found = {}
        for kind in Kind:
            keys = [*words_of(getattr(self, kind)), *map(str, getattr(self, kind.one) or ())]
            if keys:
                found[kind] = ",".join(dict.fromkeys(keys))
        return found


def _checked(lists: Mapping[Kind, str]) -> None:
    """Raises `QueryError` where something that was written is no key of its kind."""
    for kind, text in lists.items():
        if kind is not Kind.CELLS:
            named_numbers(text, kind)
        elif wrong := [word for word in text.split(",") if not _CELL.fullmatch(word)]:
            fix = "write their fingerprints, of 64 digits and letters a to f, with commas between"
            raise QueryError([FieldProblem(kind, f"{wrong[0][:80]!r} is none of a cell: {fix}")])


@dataclass(frozen=True)
class _Heading:
    """A side above its column, with where it leads; whether differences are to it."""

    letter: str
    side: Side
    href: str
    baseline: bool


@dataclass(frozen=True)
class _Layer:
    """A layer as a row: of each side its smallest and largest singular value, if it has such a layer."""

    name: str
    ranges: list[tuple[float | None, float | None] | None]


@router.get("/compare")
def page(show: Show, who: Reader, database: Db, chosen: Annotated[_Chosen, Depends()]) -> Response:
    """Two to ten trials, cells or experiments beside each other; without any, where to name them."""
    lists = chosen.lists()
    if chosen.checked:
        given = {kind.value: text for kind, text in lists.items()}
        given |= {} if chosen.baseline is None else {"baseline": chosen.baseline}
        return RedirectResponse(f"/compare?{urlencode(given, safe=',')}", status_code=303, headers=HEADERS)
    values: dict[str, object] = {"lists": {kind.value: lists.get(kind, "") for kind in Kind}, "most": MOST}
    values |= {"metrics": list(Metric), "metric": chosen.metric, "problem": None, "found": None}
    if not lists:
        return show("compare.html", **values)
    try:
        _checked(lists)
        with database.read() as session:
            found = _compared(session, who, chosen, lists)
            layers = side_layers(session, found.sides)
            drawn = trials_by_id(session, [trial for side in found.sides for trial in side.drawn])
            images = validated_on(trial.config for trial, _ in drawn)
    except (QueryError, NotFoundError) as error:
        status = 422 if isinstance(error, QueryError) else 404
        return show("compare.html", **values | {"status": status, "problem": str(error)})
    # As the API reads them, whatever stood between, and without what is of sides that are no more.
    values["asked"] = {kind.value: text for kind, text in lists.items()} | {"baseline": found.sides[found.baseline].key}
    return show("compare.html", **values | _view(found, layers, chosen.metric, images))


def _compared(session: Session, who: Principal, chosen: _Chosen, lists: Mapping[Kind, str]) -> Comparison:
    """All metrics in one table; of experiments that vary something the one that is chosen, over what they vary."""
    named: dict[str, Any] = {kind.value: text for kind, text in lists.items()}
    if any(chosen.baseline in text.split(",") for text in lists.values()):
        named["baseline"] = chosen.baseline  # else it is of what was compared before others were named
    if Kind.EXPERIMENTS in lists:
        asked = AskedComparison(**named, metrics=chosen.metric.value)
        found = compare(session, asked.question(who))
        if found.axes:
            return found
    return compare(session, AskedComparison(**named, metrics="all").question(who))


def _view(
    found: Comparison, layers: Sequence[SideLayers | None], metric: Metric, images: str | None
) -> dict[str, object]:
    headings = [
        _Heading(LETTERS[index], side, _address(found.kind, side), index == found.baseline)
        for index, side in enumerate(found.sides)
    ]
    over = metric if found.axes else None
    told = warnings(found)
    sides = [
        {
            "name": f"{LETTERS[index]}: {side.about or side.name}",
            "trials": side.drawn,
            "layers_of": None if (mine := layers[index]) is None else mine.trial,
        }
        for index, side in enumerate(found.sides)
    ]
    return {
        "found": found,
        "headings": headings,
        "differing": [(one.name, field_texts(one)) for one in found.differing],
        "trials_differ": any(side.states != found.sides[0].states for side in found.sides),
        "common": list(found.common.items()),
        "rows": _over_rows(found, metric) if over else _over_metrics(found),
        "over": over,
        "over_title": _over_title(found, metric),
        "warnings": told[: len(found.unequal)],
        "counted": told[len(found.unequal) :],
        "notes": [note for note in comparison_notes(found) if note not in told],
        "layers": _layers(layers),
        "chosen_trials": ",".join(str(trial) for side in found.sides for trial in side.drawn),
        "curves_on": images,
        "sides_data": json.dumps(sides, ensure_ascii=False, allow_nan=False),
        "drawn_cells": found.kind is Kind.EXPERIMENTS and bool(found.axes),
    }


def _over_title(found: Comparison, metric: Metric) -> str:
    return unit_among(metric, [row.metrics.get(metric.value, ()) for row in found.rows]).title


def _address(kind: Kind, side: Side) -> str:
    if kind is Kind.CELLS:
        return f"/trials/{side.drawn[0]}/cell"
    return f"/{kind}/{side.key}"


_Pair = tuple[Cell, Cell]
"""A number as a cell of a table, and its difference to the baseline."""


@dataclass(frozen=True)
class _Measured:
    """A row's metric, by its title in the row's unit."""

    title: str
    definition: str


def _pairs(found: Comparison, row: CompareRow, metric: Metric, unit: Unit) -> list[_Pair]:
    measures = measures_of(found, row, metric)
    return [
        (shown(metric, one, trials, found.kind, unit), difference(metric, one, unit))
        for one, trials in zip(measures, row.trials, strict=True)
    ]


def _over_metrics(found: Comparison) -> list[tuple[_Measured | list[str], list[_Pair]]]:
    rows: list[tuple[_Measured | list[str], list[_Pair]]] = []
    for row in found.rows:  # one, or none where nobody has a trial yet
        for metric in found.metrics:
            unit = unit_among(metric, [row.metrics[metric.value]])
            rows.append((_Measured(unit.title, metric.reading.definition), _pairs(found, row, metric, unit)))
    return rows


def _over_rows(found: Comparison, metric: Metric) -> list[tuple[_Measured | list[str], list[_Pair]]]:
    columns = [column_texts([row.fields[axis.field] for row in found.rows]) for axis in found.axes]
    unit = unit_among(metric, [row.metrics.get(metric.value, ()) for row in found.rows])
    rows: list[tuple[_Measured | list[str], list[_Pair]]] = []
    for number, row in enumerate(found.rows):
        texts = [NONE if column[number] == "-" else column[number] for column in columns]
        rows.append((texts, _pairs(found, row, metric, unit)))
    return rows


def _layers(sides: Sequence[SideLayers | None]) -> list[_Layer]:
    """The layers of all sides by name, in the order of the first that has them."""
    known = [{} if side is None else {str(one.get("name", "")): one for one in side.layers} for side in sides]
    names = list(dict.fromkeys(name for mine in known for name in mine))[:_MOST_LAYERS]
    return [
        _Layer(
            name,
            [(mine[name].get("smallest"), mine[name].get("largest")) if name in mine else None for mine in known],
        )
        for name in names
    ]
