"""The cells of one leaderboard as points over two metrics, with their Pareto front where both have a best end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from service.leaderboards.boards import Position
from service.leaderboards.filters import Question
from service.leaderboards.leaderboard import boards_of, source_of
from service.leaderboards.metrics import Metric
from service.leaderboards.pareto import on_front
from service.leaderboards.source import BoardKey, Entry, ScoreSource
from service.specs.columns import Columns, columns_of, value_of
from ttsv.config.fields import FieldValue

MOST_NAMED = 500
"""Cells of the front that are named; the others are drawn without a name."""
_ACROSS, _UP = 60, 40
"""Of points that lie in the same of so many fields one is drawn: on paper they are one."""


@dataclass(frozen=True)
class ScatterPoint:
    """A cell: its means in both metrics, and who it is (None: it is only drawn)."""

    x: float
    y: float
    on_front: bool
    entry: Entry | None


@dataclass(frozen=True)
class ScatterPlot:
    """The points that are drawn, of `cells` that have both metrics; `front` of them are on the front."""

    protocol: str
    points: list[ScatterPoint]
    cells: int
    front: int

    @property
    def front_cells(self) -> set[str]:
        """The cells on the front, the first `MOST_NAMED` of them."""
        return {point.entry.cell for point in self.points if point.on_front and point.entry is not None}


def has_front(x: Metric, y: Metric) -> bool:
    """Whether cells can beat each other in both metrics: of each the most or the least is best."""
    return x.has_best and y.has_best


def scatter_plot(session: Session, question: Question, x: Metric, y: Metric) -> ScatterPlot | None:
    """The cells that `plane` has, those that can be told apart; None where none has both metrics."""
    found = _measured(session, question, x, y)
    if found is None:
        return None
    source, board, across, up = found
    keys = sorted(across, key=across.__getitem__)
    xs, ys = {key: across[key].mean for key in keys}, {key: up[key].mean for key in keys}
    best: list[int] = []
    if has_front(x, y):
        front = on_front([(xs[key], ys[key]) for key in keys], [x.more_is_better, y.more_is_better])
        best = [key for key, keep in zip(keys, front, strict=True) if keep]
    named = source.entries(best[:MOST_NAMED])
    chosen = set(best)
    others = [key for key in _apart(keys, xs, ys) if key not in chosen]
    points = [ScatterPoint(xs[key], ys[key], key in chosen, named.get(key)) for key in [*others, *best]]
    return ScatterPlot(board.protocol, points, len(keys), len(best))


def _measured(
    session: Session, question: Question, x: Metric, y: Metric
) -> tuple[ScoreSource, BoardKey, dict[int, Position], dict[int, Position]] | None:
    """Of the boards with cells that have both metrics that with most rows in x: these cells in x and in y."""
    question = replace(question, metric=x, columns=(x, y), front=(x, y))
    source = source_of(session, question)
    for board in boards_of(source, question):
        across, up = source.positions(board, x), source.positions(board, y)
        if both := across.keys() & up.keys():
            return source, board, {key: across[key] for key in both}, {key: up[key] for key in both}
    return None


def _apart(keys: Sequence[int], xs: dict[int, float], ys: dict[int, float]) -> list[int]:
    """One key of each small field of the plane."""
    fields: dict[tuple[int, int], int] = {}
    left, right = min(xs[key] for key in keys), max(xs[key] for key in keys)
    low, high = min(ys[key] for key in keys), max(ys[key] for key in keys)
    for key in keys:
        field = round(_ACROSS * _share(xs[key], left, right)), round(_UP * _share(ys[key], low, high))
        fields.setdefault(field, key)
    return list(fields.values())


def _share(value: float, least: float, most: float) -> float:
    """Where a value lies between two others; halves, as the whole difference can be more than a float."""
    return (value / 2 - least / 2) / ((most / 2 - least / 2) or 1)


MOST_CELLS = 5000
"""Of a plane: the best in its first metric are kept."""


@dataclass(frozen=True)
class Scatter:
    """All cells of one leaderboard in two metrics, by column; `fields` are those in which they differ, by path.

    `seeds` of `trials` have a result. `front`: whether no other is better in both. `total` cells have both metrics, of
    which `MOST_CELLS` are here.
    """

    protocol: str
    total: int
    columns: Columns
    cell: list[str]
    x: list[float]
    x_error: list[float | None]
    y: list[float]
    y_error: list[float | None]
    seeds: list[int]
    trials: list[int]
    front: list[bool]
    fields: dict[str, list[FieldValue]]


def plane(session: Session, question: Question, x: Metric, y: Metric) -> Scatter | None:
    """The cells with both metrics of the board with most rows in x that has such; None where no board has."""
    found = _measured(session, question, x, y)
    if found is None:
        return None
    source, board, across, _ = found
    keys = sorted(across, key=across.__getitem__, reverse=x.more_is_better)
    front = set(source.front(board, (x, y)) if has_front(x, y) else ())
    shown = keys[:MOST_CELLS]
    shown += [key for key in keys[MOST_CELLS:] if key in front]
    entries = source.entries(shown)
    rows = [entries[key] for key in shown]
    configs = [{name: value for name, value in row.config.items() if name != "seed"} for row in rows]
    shape = columns_of(configs, chosen=question.fields, hidden=question.hidden, without_decided=True)
    measured = [(row.metrics[x.value], row.metrics[y.value]) for row in rows]
    told = [*shape.fields, *shape.decided]
    return Scatter(
        protocol=board.protocol,
        total=len(keys),
        columns=shape,
        cell=[row.cell for row in rows],
        x=[one.mean for one, _ in measured],
        x_error=[one.std for one, _ in measured],
        y=[other.mean for _, other in measured],
        y_error=[other.std for _, other in measured],
        seeds=[row.seeds for row in rows],
        trials=[row.trials for row in rows],
        front=[key in front for key in shown],
        fields={column.field: [value_of(config, column.field) for config in configs] for column in told},
    )
