"""Leaderboards: aggregation over seeds, in one SELECT over typed columns."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session, aliased

from service.models import Protocol, Result, Trial


class Metric(StrEnum):
    """Result columns that a leaderboard shows and ranks by."""

    ACCURACY = "accuracy"
    LOSS = "loss"
    ECE = "ece"
    MAX_SINGULAR_VALUE = "max_singular_value"
    COMPRESSION = "compression"
    PARAMETERS = "parameters"
    MULTIPLY_ACCUMULATES = "multiply_accumulates"
    TRAIN_SECONDS = "train_seconds"
    CONSTRAINT_SECONDS = "constraint_seconds"
    STEP_SECONDS = "step_seconds"
    CONSTRAINT_STEP_SECONDS = "constraint_step_seconds"
    EVAL_SECONDS = "eval_seconds"
    SPECTRUM_SECONDS = "spectrum_seconds"
    LATENCY_SECONDS = "latency_seconds"
    BATCH_SECONDS = "batch_seconds"

    @property
    def more_is_better(self) -> bool:
        """Whether the best row has the largest value."""
        return self in (Metric.ACCURACY, Metric.COMPRESSION)


@dataclass(frozen=True)
class Spread:
    """One metric over the seeds of a cell; `std` is the sample deviation (n - 1), None for a single seed."""

    mean: float
    std: float | None
    min: float
    max: float


@dataclass(frozen=True)
class Row:
    """One cell: all its trials, of which `seeds` have results; `complete` if every trial has one.

    `place` counts from 1 within a board; equal means share a place. `config` is the cell's trial without its seed.
    """

    place: int
    cell: str
    config: dict[str, Any]
    trials: int
    seeds: int
    complete: bool
    metrics: dict[str, Spread]


@dataclass(frozen=True)
class Board:
    """Rows measured under one protocol: only these may be ranked together."""

    protocol: str
    record: dict[str, Any]
    rows: list[Row]


@dataclass(frozen=True)
class Hole:
    """A cell none of whose trials has a result."""

    cell: str
    config: dict[str, Any]
    trials: int


@dataclass(frozen=True)
class Leaderboard:
    """All boards of a data set (most rows first), and the cells that no board shows."""

    boards: list[Board]
    holes: list[Hole]


def leaderboard(
    session: Session, dataset: str, *, metric: Metric = Metric.ACCURACY, experiment_id: int | None = None
) -> Leaderboard:
    """Ranks the cells of a data set by the mean of `metric` over their seeds, best first.

    A trial that was run more than once (the same fingerprint in several experiments) counts once per protocol: its
    newest result.
    """
    boards: dict[str, Board] = {}
    holes: list[Hole] = []
    for row in session.execute(_query(dataset, experiment_id)).mappings():
        config = {name: value for name, value in row["config"].items() if name != "seed"}
        if row["protocol"] is None:
            holes.append(Hole(row["cell"], config, row["trials"]))
            continue
        spreads = {name.value: _spread(row, name) for name in Metric}
        complete = row["seeds"] == row["trials"]
        board = boards.setdefault(row["protocol"], Board(row["protocol"], row["record"], []))
        board.rows.append(Row(0, row["cell"], config, row["trials"], row["seeds"], complete, spreads))
    ranked = [Board(b.protocol, b.record, _ranked(b.rows, metric)) for b in boards.values()]
    ranked.sort(key=lambda board: (-len(board.rows), board.protocol))
    return Leaderboard(ranked, holes)


def _query(dataset: str, experiment_id: int | None) -> Select[Any]:
    mine = [Trial.dataset == dataset]
    if experiment_id is not None:
        mine.append(Trial.experiment_id == experiment_id)
    names = [metric.value for metric in Metric]
    columns = [getattr(Result, name) for name in names]
    newest = func.row_number().over(partition_by=(Trial.fingerprint, Result.protocol), order_by=Result.trial_id.desc())
    runs = (
        select(Trial.cell, Result.protocol, *columns, newest.label("age"))
        .join(Result, Result.trial_id == Trial.id)
        .where(*mine)
        .subquery()
    )
    # Two passes for the deviation: a sum of squares minus a squared mean would lose the digits of a small spread.
    by_cell = (runs.c.cell, runs.c.protocol)
    means = [func.avg(runs.c[name]).over(partition_by=by_cell).label(f"{name}_centre") for name in names]
    centred = select(*runs.c, *means).where(runs.c.age == 1).subquery()
    aggregates = []
    for name in names:
        value = centred.c[name]
        off = value - centred.c[f"{name}_centre"]
        aggregates += [
            func.avg(value).label(f"{name}_mean"),
            func.sum(off * off).label(f"{name}_squares"),
            func.min(value).label(f"{name}_min"),
            func.max(value).label(f"{name}_max"),
        ]
    scores = (
        select(centred.c.cell, centred.c.protocol, func.count().label("seeds"), *aggregates)
        .group_by(centred.c.cell, centred.c.protocol)
        .subquery()
    )
    cells = (
        select(
            Trial.cell, func.count(Trial.fingerprint.distinct()).label("trials"), func.min(Trial.id).label("example")
        )
        .where(*mine)
        .group_by(Trial.cell)
        .subquery()
    )
    example = aliased(Trial)
    return (
        select(
            cells.c.cell, cells.c.trials, example.config, Protocol.record, *[c for c in scores.c if c.name != "cell"]
        )
        .join(example, example.id == cells.c.example)
        .outerjoin(scores, scores.c.cell == cells.c.cell)
        .outerjoin(Protocol, Protocol.fingerprint == scores.c.protocol)
        .order_by(cells.c.example, scores.c.protocol)
    )


def _spread(row: Any, name: str) -> Spread:
    seeds = row["seeds"]
    std = math.sqrt(float(row[f"{name}_squares"]) / (seeds - 1)) if seeds > 1 else None
    return Spread(float(row[f"{name}_mean"]), std, float(row[f"{name}_min"]), float(row[f"{name}_max"]))


def _ranked(rows: list[Row], metric: Metric) -> list[Row]:
    ordered = sorted(rows, key=lambda row: row.metrics[metric].mean, reverse=metric.more_is_better)
    ranked: list[Row] = []
    for position, row in enumerate(ordered, start=1):
        tied = ranked and ranked[-1].metrics[metric].mean == row.metrics[metric].mean
        place = ranked[-1].place if tied else position
        ranked.append(Row(place, row.cell, row.config, row.trials, row.seeds, row.complete, row.metrics))
    return ranked
