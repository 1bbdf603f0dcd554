"""An experiment as a matrix: a metric over two fields, a place for every cell, its seeds put together.

What an experiment varies besides the two fields sets facets apart, so that no place mixes configurations, unless these
fields decide it already; and a place takes the results of one protocol alone.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import OPEN_TRIALS, Event, Result, Trial, TrialState
from service.errors import FieldProblem, QueryError
from service.leaderboards.conditions import Condition
from service.leaderboards.corruption_baselines import BASELINE, METRIC
from service.leaderboards.metrics import Metric, spread
from service.leaderboards.source import hashable, in_order
from service.specs.columns import FieldColumn, columns_of, short_name, value_of
from ttsv.config.fields import FieldValue, FieldValues, TrialFields


class Seeds(StrEnum):
    """How the results of a cell's seeds make one number."""

    MEAN = "mean"
    MEDIAN = "median"
    LEAST = "min"
    LARGEST = "max"
    DEVIATION = "std"


class PlaceState(StrEnum):
    """What is to be said of a place: of its trials the first of these that one of them is."""

    RUNNING = "running"
    QUEUED = "queued"
    FAILED = "failed"
    DIVERGED = "diverged"
    INVALID = "invalid"
    CANCELLED = "cancelled"
    EARLY_STOPPED = "early_stopped"
    OTHER_PROTOCOL = "other_protocol"
    UNMEASURED = "unmeasured"
    SUCCEEDED = "succeeded"


_ORDER = {state: rank for rank, state in enumerate(PlaceState)}
_AGGREGATES: dict[Seeds, Callable[[Sequence[float]], float | None]] = {
    # The two in the middle are halved first: the sum of a deep network's bounds may be beyond float64.
    Seeds.MEDIAN: lambda values: statistics.median_low(values) / 2 + statistics.median_high(values) / 2,
    Seeds.LEAST: min,
    Seeds.LARGEST: max,
}
_MOST_PAIRS = 6
"""Of fields with most values: which two of them are shown unless others are named."""
_DIGITS = 7


@dataclass(frozen=True, kw_only=True)
class MatrixQuestion:
    """What is asked: `x` and `y` None: the two fields that tell most cells apart.

    All conditions of `where` must hold; `trials` None: all places, else those to which one of these trials belongs.
    """

    experiment_id: int
    metric: Metric = Metric.ACCURACY
    x: str | None = None
    y: str | None = None
    seeds: Seeds = Seeds.MEAN
    where: Sequence[Condition] = ()
    trials: Sequence[int] | None = None


@dataclass(frozen=True)
class Axis:
    """A field in which the experiment's trials differ, and its values in order."""

    field: str
    name: str
    values: list[FieldValue]


@dataclass(frozen=True)
class Places:
    """The places by column, all of one length. `trial` is the first trial of each, by which a place is known.

    `facet`, `x` and `y` are indices; `value` is the number that the seeds make, `deviation` their sample deviation,
    `seeds` how many results of `trials` trials it is of, `protocol` the index of the protocol under which they are.
    """

    trial: list[int] = field(default_factory=list)
    facet: list[int] = field(default_factory=list)
    x: list[int] = field(default_factory=list)
    y: list[int] = field(default_factory=list)
    state: list[PlaceState] = field(default_factory=list)
    value: list[float | None] = field(default_factory=list)
    deviation: list[float | None] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)
    protocol: list[int | None] = field(default_factory=list)


@dataclass(frozen=True)
class Facet:
    """One matrix of several: what all of its places share beside the two fields, by path, but for what is decided."""

    fields: FieldValues


@dataclass(frozen=True)
class Matrix:
    """A metric over two fields. `axes` are all that the experiment varies, `newest_event` was its last one then.

    `decided` are the paths of those that x, y and the facets' fields decide, as rank None does that a layer is dense.
    `protocols` are those of the places' results, the commonest first.
    """

    metric: Metric
    seeds: Seeds
    x: Axis
    y: Axis
    axes: list[Axis]
    facets: list[Facet]
    decided: list[str]
    protocols: list[str]
    places: Places
    newest_event: int


@dataclass(frozen=True)
class Patch:
    """Some places of a matrix as they are now: their `facet`, `x` and `y` are empty."""

    protocols: list[str]
    places: Places


@dataclass
class _Cell:
    """The trials of one cell: how many there are, in which states, and their numbers by protocol."""

    first: int
    trials: int = 0
    states: set[PlaceState] = field(default_factory=set)
    numbers: dict[str, list[float]] = field(default_factory=dict)


def matrix(session: Session, question: MatrixQuestion) -> Matrix:
    """Answers a question about an experiment that there is. Raises `QueryError` for a field that is no axis of it."""
    newest = session.scalar(select(func.max(Event.id)).where(Event.experiment_id == question.experiment_id)) or 0
    configs = _configs(session, question)
    shape = columns_of(list(configs.values()), hidden=("seed",)) if configs else None
    fields = shape.fields if shape else []
    values = {
        cell: {column.field: hashable(value_of(config, column.field)) for column in fields}
        for cell, config in configs.items()
    }
    axes = [
        Axis(column.field, column.name, sorted({row[column.field] for row in values.values()}, key=in_order))
        for column in fields
    ]
    kept = {
        cell: row
        for cell, row in values.items()
        if all(one.field == "seed" or one.holds(value_of(configs[cell], one.field)) for one in question.where)
    }
    x, y = (_whole_axis(axes, kept.values(), name) for name in _chosen(question, fields, kept.values()))
    rest = [column.field for column in fields if column.field not in (x.field, y.field)]
    decided = _decided(list(kept.values()), [name for name in (x.field, y.field) if name], rest)
    rest = [name for name in rest if name not in decided]
    cells = _numbers(session, question, kept)
    order = _standing(session, question)
    facets = sorted({tuple(kept[cell][name] for name in rest) for cell in cells}, key=lambda row: [*map(in_order, row)])
    at_facet = {row: index for index, row in enumerate(facets)}
    at_x, at_y = ({value: index for index, value in enumerate(axis.values)} for axis in (x, y))
    places = Places()
    for name, cell in sorted(cells.items(), key=lambda item: item[1].first):
        row = kept[name]
        places.facet.append(at_facet[tuple(row[one] for one in rest)])
        places.x.append(at_x[row.get(x.field)])
        places.y.append(at_y[row.get(y.field)])
        _add(places, cell, order, question.seeds)
    return Matrix(
        metric=question.metric,
        seeds=question.seeds,
        x=x,
        y=y,
        axes=axes,
        facets=[Facet(dict(zip(rest, row, strict=True))) for row in facets],
        decided=decided,
        protocols=list(order),
        places=places,
        newest_event=newest,
    )


def patch(session: Session, question: MatrixQuestion) -> Patch:
    """The places of some trials as they are now, without where they stand."""
    cells = sorted(_numbers(session, question, None).values(), key=lambda cell: cell.first)
    order = {name: index for index, name in enumerate(sorted({name for cell in cells for name in cell.numbers}))}
    if any(len(cell.numbers) > 1 for cell in cells):
        order = _standing(session, question)
    places = Places()
    for cell in cells:
        _add(places, cell, order, question.seeds)
    return Patch(list(order), places)


def _configs(session: Session, question: MatrixQuestion) -> dict[str, TrialFields]:
    """Cell -> the configuration of its first trial, in the order of these."""
    first = select(func.min(Trial.id)).where(Trial.experiment_id == question.experiment_id).group_by(Trial.cell)
    query = select(Trial.cell, Trial.config).where(Trial.id.in_(first)).order_by(Trial.id)
    return {row[0]: row[1] for row in session.execute(query)}


def _chosen(question: MatrixQuestion, fields: Sequence[FieldColumn], rows: Iterable[FieldValues]) -> tuple[str, str]:
    """The paths of x and y, empty where there is none; raises `QueryError`."""
    names = [column.field for column in fields]
    for parameter, asked in (("x", question.x), ("y", question.y)):
        if asked is not None and asked not in names:
            fix = f"choose one of {', '.join(names)}" if names else "it varies nothing but seeds"
            why = f"all trials of this experiment have the same {asked}"
            if asked == "seed":
                why = "the seeds of a place are put together"
            raise QueryError([FieldProblem(parameter, f"{why}; {fix}")])
    if question.x is not None and question.x == question.y:
        raise QueryError([FieldProblem("y", "must be another field than x")])
    if question.x is not None and question.y is not None:
        return question.x, question.y
    rows = list(rows)
    counts = {name: len({row[name] for row in rows}) for name in names}
    likely = sorted(names, key=lambda name: -counts[name])[:_MOST_PAIRS]
    named = question.x or question.y
    pairs = [(named, name) for name in likely if name != named] if named else list(combinations(likely, 2))
    best = max(pairs, key=lambda pair: len({(row[pair[0]], row[pair[1]]) for row in rows}), default=None)
    if best is None:
        only = named or (names[0] if names else "")
        return ("", only) if question.y is not None else (only, "")
    if question.y is not None:
        return best[1], best[0]
    # A page is wider than it is high.
    return best if question.x is not None or counts[best[0]] >= counts[best[1]] else (best[1], best[0])


def _decided(rows: Sequence[FieldValues], given: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of `names` whose values follow from those of the given fields and of the other names, in every row.

    Of two that decide each other the one with fewer values goes. A field with one value decides and follows nothing.
    """
    counts = {name: len({row[name] for row in rows}) for name in names}
    decided: list[str] = []
    for name in sorted((name for name in names if counts[name] > 1), key=counts.__getitem__):
        others = [*given, *(other for other in names if counts[other] > 1 and other not in (name, *decided))]
        seen: dict[tuple[FieldValue, ...], FieldValue] = {}
        if all(seen.setdefault(tuple(row[other] for other in others), row[name]) == row[name] for row in rows):
            decided.append(name)
    return [name for name in names if name in decided]


def _whole_axis(axes: Sequence[Axis], rows: Iterable[FieldValues], name: str) -> Axis:
    """The axis of a field with the values that these rows have; without a field one of a single value, None."""
    if not name:
        return Axis("", "", [None])
    there = {row[name] for row in rows}
    axis = next(axis for axis in axes if axis.field == name)
    return Axis(name, short_name(name), [value for value in axis.values if value in there])


def _numbers(session: Session, question: MatrixQuestion, kept: Mapping[str, FieldValues] | None) -> dict[str, _Cell]:
    """The cells that are meant, with their trials; `kept` None: those that `question.trials` name."""
    baseline = [BASELINE] if question.metric is METRIC else []
    column = getattr(Result, question.metric.value)
    query = (
        select(Trial.id, Trial.cell, Trial.state, Result.protocol, Result.valid, column, *baseline)
        .outerjoin(Result, Result.trial_id == Trial.id)
        .where(Trial.experiment_id == question.experiment_id)
        .order_by(Trial.id)
    )
    query = query.where(*(one.of(Trial) for one in question.where if kept is None or one.field == "seed"))
    if question.trials is not None:
        named = Trial.id.in_(question.trials), Trial.experiment_id == question.experiment_id
        asked = session.execute(select(Trial.dataset, Trial.cell).where(*named).distinct()).all()
        datasets, names = {row[0] for row in asked}, {row[1] for row in asked}
        query = query.where(Trial.dataset.in_(datasets), Trial.cell.in_(names))  # which an index finds
    found: dict[str, _Cell] = {}
    for trial_id, name, state, protocol, valid, value, *baselines in session.connection().execute(query):
        if kept is not None and name not in kept:
            continue
        cell = found.get(name)
        if cell is None:
            cell = found[name] = _Cell(trial_id)
        cell.trials += 1
        if protocol is None or state in OPEN_TRIALS:
            cell.states.add(PlaceState.UNMEASURED if state is TrialState.SUCCEEDED else PlaceState(state.value))
        elif not valid:
            cell.states.add(PlaceState.INVALID)
        elif value is None:
            cell.states.add(PlaceState.UNMEASURED)
        else:
            cell.numbers.setdefault(under(protocol, *baselines), []).append(float(value))
    return found


def _standing(session: Session, question: MatrixQuestion) -> dict[str, int]:
    """Protocol -> its rank by how many of the experiment's results with the metric are under it, whatever is asked."""
    key: list[Any] = [Result.protocol, *([BASELINE] if question.metric is METRIC else [])]
    query = (
        select(func.count(), *key)
        .join(Trial, Trial.id == Result.trial_id)
        .where(Trial.experiment_id == question.experiment_id, Result.valid)
        .where(getattr(Result, question.metric.value).is_not(None))
        .group_by(*key)
    )
    counts = {under(protocol, *baseline): count for count, protocol, *baseline in session.execute(query)}
    return {name: rank for rank, name in enumerate(sorted(counts, key=lambda name: (-counts[name], name)))}


def under(protocol: str, baseline: str | None = None) -> str:
    """A protocol as it is named here: errors relative to unequal baselines are as unequal as protocols are."""
    return protocol if baseline is None else f"{protocol}+{baseline}"


def _add(places: Places, cell: _Cell, order: Mapping[str, int], seeds: Seeds) -> None:
    """Adds what is said of a cell, under the commonest of its protocols, to all columns but those of its place."""
    places.trial.append(cell.first)
    places.trials.append(cell.trials)
    if not cell.numbers:
        places.state.append(min(cell.states, key=_ORDER.__getitem__))
        places.value.append(None)
        places.deviation.append(None)
        places.seeds.append(0)
        places.protocol.append(None)
        return
    chosen = min(cell.numbers, key=order.__getitem__)
    numbers = cell.numbers[chosen]
    others = {PlaceState.OTHER_PROTOCOL} if len(cell.numbers) > 1 else set()
    found = spread(numbers)
    value: float | None = found.mean
    if seeds is Seeds.DEVIATION:
        value = found.std
    elif seeds is not Seeds.MEAN:
        value = _AGGREGATES[seeds](numbers)
    places.state.append(min({*cell.states, *others, PlaceState.SUCCEEDED}, key=_ORDER.__getitem__))
    places.value.append(_short(value))
    places.deviation.append(_short(found.std))
    places.seeds.append(len(numbers))
    places.protocol.append(order[chosen])


def _short(value: float | None) -> float | None:
    """As many digits as a picture and a table of it show."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")
