"""An experiment's matrix as its page shows it: the form that chooses it, the table behind the picture, its data."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from service.api.matrices import AskedMatrix, written
from service.dashboard.wording import NONE, fixed, said
from service.leaderboards.matrix import Axis, Matrix, Seeds
from service.leaderboards.value_texts import column_texts
from ttsv.config.fields import FieldValue

MOST_IN_TABLE = 2500
"""Places that the table behind the picture has; more are had as CSV."""
MOST_DRAWN = 40_000
"""Places of one facet, with trials or without: of more nothing could be seen."""
_MOST_CHOICES = 60
"""Of an axis with more values none can be chosen: it would fill a menu that nobody reads."""

SEEDS = {
    Seeds.MEAN: "mean",
    Seeds.MEDIAN: "median",
    Seeds.LEAST: "least",
    Seeds.LARGEST: "largest",
    Seeds.DEVIATION: "deviation",
}
"""How the ways to put seeds together are said."""


@dataclass(frozen=True)
class Choice:
    """A condition that keeps one value of an axis, as the form sends it."""

    condition: str
    text: str
    chosen: bool


@dataclass(frozen=True)
class Chooser:
    """An axis that sets matrices apart: its values can be chosen one by one, or stand side by side."""

    name: str
    choices: list[Choice]


@dataclass(frozen=True)
class Sheet:
    """One facet as a table: its headings, and rows of a heading and texts with their states."""

    title: str
    rows: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class MatrixView:
    """What the template shows of a matrix."""

    matrix: Matrix
    choosers: list[Chooser]
    other_conditions: list[str]
    columns: list[str]
    sheets: list[Sheet]
    left_out: int
    data: str

    @property
    def too_fine(self) -> bool:
        """Whether the two fields have too many values for a picture, as what a random search draws has."""
        return len(self.matrix.x.values) * len(self.matrix.y.values) > MOST_DRAWN

    @property
    def decided(self) -> str:
        """The names of the fields that are neither x nor y nor told of each facet, as these decide them."""
        return ", ".join(axis.name for axis in self.matrix.axes if axis.field in self.matrix.decided)

    @property
    def places(self) -> int:
        """How many there are."""
        return len(self.matrix.places.trial)


def matrix_view(found: Matrix, asked: AskedMatrix, experiment_id: int) -> MatrixView:
    """A matrix as the page shows it."""
    conditions = list(asked.where or ())
    choosers, offered = [], set()
    apart = {path for facet in found.facets for path in facet.fields}
    for axis in found.axes:
        if axis.field not in apart or len(axis.values) > _MOST_CHOICES:
            continue
        asked_for = [_condition(axis, value) for value in axis.values]
        choices = [Choice(*one, one[0] in conditions) for one in zip(asked_for, _texts(axis.values), strict=True)]
        offered |= {one.condition for one in choices}
        choosers.append(Chooser(axis.name, choices))
    sheets = list(_sheets(found))
    reading = found.metric.reading
    data = {
        "experiment": experiment_id,
        **written(found),
        "reading": {
            "heading": reading.heading,
            "unit": reading.unit,
            "factor": reading.factor,
            "decimals": reading.decimals,
        },
        "texts": {
            "x": _along(found.x),
            "y": _along(found.y),
            "facets": facet_texts(found),
            "seeds": SEEDS[found.seeds],
        },
    }
    del data["axes"]
    shown = sum(len(sheet.rows) * len(found.x.values) for sheet in sheets)
    return MatrixView(
        matrix=found,
        choosers=choosers,
        other_conditions=[one for one in conditions if one not in offered],
        columns=_along(found.x),
        sheets=sheets,
        left_out=len(found.facets) * len(found.x.values) * len(found.y.values) - shown,
        data=json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")),
    )


def facet_texts(found: Matrix) -> list[str]:
    """What sets each facet apart, in words; nothing where there is one."""
    names = {axis.field: axis.name for axis in found.axes}
    texts = []
    for path in found.facets[0].fields if found.facets else ():
        values = [facet.fields[path] for facet in found.facets]
        if len(set(values)) > 1:
            texts.append([f"{names[path]} {text}" for text in _texts(values)])
    return [", ".join(own) for own in zip(*texts, strict=True)] or [""] * len(found.facets)


def place_text(found: Matrix, index: int) -> str:
    """What a table says of a place with results; the deviation is that of the mean alone."""
    places, reading = found.places, found.metric.reading
    value, deviation = places.value[index], places.deviation[index]
    if value is None:
        return NONE
    scaled = value * reading.factor
    text = fixed(scaled, reading.decimals)
    if deviation is not None and found.seeds is Seeds.MEAN:
        text += f" ± {fixed(deviation * reading.factor, reading.decimals, scaled)}"
    return f"{text} ({places.seeds[index]} of {places.trials[index]})"


def _sheets(found: Matrix) -> Sequence[Sheet]:
    """The facets as tables, as many as there is room for."""
    width, height = len(found.x.values), len(found.y.values)
    if width * height > MOST_IN_TABLE:
        return []
    room = MOST_IN_TABLE // max(1, width * height)
    grids: list[list[list[tuple[str, str]]]] = [
        [[("", "missing")] * width for _ in range(height)] for _ in found.facets[:room]
    ]
    places = found.places
    for index, facet in enumerate(places.facet):
        if facet < len(grids):
            state = places.state[index]
            if places.seeds[index]:
                text = place_text(found, index)
                text = text if state == "succeeded" else f"{text} {said(state)}"
            else:
                text = f"{said(state)} (0 of {places.trials[index]})"
            grids[facet][places.y[index]][places.x[index]] = (text, state.value)
    headings = _along(found.y)
    titles = facet_texts(found)
    return [Sheet(title, list(zip(headings, rows, strict=True))) for title, rows in zip(titles, grids, strict=False)]


def _along(axis: Axis) -> list[str]:
    """The values beside an axis; where no field lies along it there is nothing to say."""
    return _texts(axis.values) if axis.field else [""] * len(axis.values)


def _texts(values: Sequence[FieldValue]) -> list[str]:
    return ["none" if value is None else text for value, text in zip(values, column_texts(values), strict=True)]


def _condition(axis: Axis, value: FieldValue) -> str:
    """That the axis has this value, as `service.leaderboards.conditions` reads it."""
    if value is None:
        text = "none"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, tuple):
        text = json.dumps(value, separators=(",", ":"))
    else:
        text = repr(value) if isinstance(value, float) else str(value)
    return f"{axis.field}={text}"
