"""Leaderboards: the cells of a data set, ranked by their means over seeds, one board per protocol."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import Experiment, Score, ScoreBoard, Trial
from service.errors import NotFoundError
from service.leaderboards.filters import GroupBy, Position, Question
from service.leaderboards.materialized import StoredScores
from service.leaderboards.metrics import Measures, Metric
from service.leaderboards.missing import (
    MOST_LISTED,
    Hole,
    Invalid,
    SeenTrials,
    find_holes,
    find_invalid,
    invalid_condition,
)
from service.leaderboards.on_demand import ChosenTrials
from service.leaderboards.protocols import Difference, differences
from service.leaderboards.source import BoardKey, Entry, ScoreSource


class Spread(TypedDict):  # of which an answer has thousands: an object takes thrice as long to write
    """One metric over the seeds of a cell; `std` is the sample deviation (n - 1), None for a single seed."""

    seeds: int
    mean: float
    std: float | None
    min: float
    max: float


def spreads(measures: Measures, names: Iterable[str]) -> dict[str, Spread]:
    """Those of the named metrics that have a value."""
    return {
        name: {"seeds": one.seeds, "mean": one.mean, "std": one.std, "min": one.least, "max": one.largest}
        for name in names
        if (one := measures.get(name)) is not None
    }


@dataclass(frozen=True)
class Change:
    """A row's mean less the baseline's, and its standard error from both spreads; None where either has one seed."""

    mean: float
    error: float | None


@dataclass(frozen=True)
class Group:
    """The row is the best of so many `cells` whose `field` has this value."""

    field: str
    value: Any
    cells: int


@dataclass(frozen=True)
class Printed:
    """A printed value in our units (fractions, not percent), and whether ours is measured in the same way."""

    mean: float
    spread: float | None
    comparable: bool


@dataclass(frozen=True)
class PaperReference:
    """A printed row beside ours: values by metric, and in words how they were got differently."""

    table: str
    row: dict[str, Any]
    values: dict[str, Printed]
    notes: list[str] = field(default_factory=list)


References = Callable[[dict[str, Any], dict[str, Any]], list[PaperReference]]
"""From a cell's configuration and its protocol's record to the printed rows that it corresponds to."""


@dataclass(frozen=True)
class Row:
    """One cell: all its trials, of which `seeds` have results; `complete` if every trial has one.

    `place` counts from 1 within a board; equal means share a place. `config` is the cell's trial without its seed.
    `missing_seeds` are those of trials without a result under the board's protocol.
    """

    place: int
    cell: str
    config: dict[str, Any]
    trials: int
    seeds: int
    complete: bool
    missing_seeds: list[int]
    metrics: dict[str, Spread]
    group: Group | None = None
    on_front: bool | None = None
    difference: dict[str, Change] | None = None
    paper: list[PaperReference] = field(default_factory=list)


@dataclass(frozen=True)
class Board:
    """Rows measured under one protocol: only these may be ranked together.

    `total` counts its rows (with grouping: its groups), `unmeasured` its cells without the ranked metric. `apart` says
    in what its protocol differs from the first board's. `front` names the cells on the Pareto front, best first.
    `next` is where the next page begins.
    """

    protocol: str
    record: dict[str, Any]
    rows: list[Row]
    total: int
    unmeasured: int
    apart: list[Difference]
    front: list[str] | None = None
    next: Position | None = None


@dataclass(frozen=True)
class Leaderboard:
    """All boards of a data set (most rows first), the cells that no board shows and the results that none counts."""

    boards: list[Board]
    holes: list[Hole]
    hole_count: int
    invalid: list[Invalid]
    invalid_count: int


@dataclass(frozen=True)
class _Page:
    """Which rows of a board are shown, by their keys and best first; `first` stands in place `place`."""

    board: BoardKey
    order: list[tuple[int, Position]]
    total: int
    following: Position | None
    place: int
    first: int
    groups: dict[int, Group]


def leaderboard(
    session: Session, question: Question, references: References = lambda _config, _record: []
) -> Leaderboard:
    """Answers a question, each row with its `references` to printed numbers.

    Raises `NotFoundError` for a baseline that is on no board.
    """
    source = source_of(session, question)
    keys = sorted(source.boards(question.metric), key=lambda board: (-board.ranked, -board.cells, board.protocol))
    if question.baseline is not None and all(source.find(board, question.baseline) is None for board in keys):
        raise NotFoundError(f"cell {question.baseline!r} is on no leaderboard of {question.dataset} with these filters")
    pages = [_page(source, board, question) for board in keys]
    entries = source.entries([key for page in pages for key, _ in page.order])
    seen = SeenTrials(session, question, ((entry.cell, entry.seeds) for entry in entries.values()))
    boards = [_board(source, page, keys[0], question, entries, seen, references) for page in pages]
    is_invalid = invalid_condition(session)
    holes, hole_count = find_holes(session, question, is_invalid)
    invalid, invalid_count = find_invalid(session, question, is_invalid)
    return Leaderboard(boards, holes, hole_count, invalid, invalid_count)


def source_of(session: Session, question: Question) -> ScoreSource:
    """Where the rows that a question is about are read from."""
    return (ChosenTrials if question.filters.choose_trials else StoredScores)(session, question)


def _page(source: ScoreSource, board: BoardKey, question: Question) -> _Page:
    metric, limit = question.metric, question.limit
    if question.group_by:
        groups = _groups(source, board, question.group_by, metric)
        positions = source.positions(board, metric)
        order = [(key, positions[key]) for key in groups]
        return _Page(board, order[:limit], len(groups), None, 1, 1, groups)
    order = list(source.ranked(board, metric, limit + 1, question.after).items())
    following = order[limit - 1][1] if len(order) > limit else None
    better, upto = source.ahead(board, metric, order[0][1]) if question.after is not None and order else (0, 1)
    return _Page(board, order[:limit], board.ranked, following, better + 1, upto, {})


def _board(
    source: ScoreSource,
    page: _Page,
    first: BoardKey,
    question: Question,
    entries: Mapping[int, Entry],
    seen: SeenTrials,
    references: References,
) -> Board:
    board = page.board
    front = source.front(board, question.front) if question.front else None
    on_it = set(front or ())
    baseline = _baseline(source, board, question.baseline)
    columns = [metric.value for metric in question.shown]
    rows: list[Row] = []
    place, mean = page.place, page.order[0][1].mean if page.order else None
    for index, (key, position) in enumerate(page.order):
        entry = entries[key]
        if position.mean != mean:
            place, mean = page.first + index, position.mean
        missing, trials = seen.missing(entry.cell, board.protocol)
        config = {name: value for name, value in entry.config.items() if name != "seed"}
        rows.append(
            Row(
                place=place,
                cell=entry.cell,
                config=config,
                trials=trials,
                seeds=entry.seeds,
                complete=not missing,
                missing_seeds=missing,
                metrics=spreads(entry.metrics, columns),
                group=page.groups.get(key),
                on_front=None if front is None else key in on_it,
                difference=None if baseline is None else _differences(entry.metrics, baseline, columns),
                paper=references(config, board.record),
            )
        )
    cells = source.cells(front[:MOST_LISTED]) if front else {}
    return Board(
        protocol=board.protocol,
        record=board.record,
        rows=rows,
        total=page.total,
        unmeasured=board.cells - board.ranked,
        apart=[] if board is first else differences(board.record, first.record),
        front=None if front is None else [cells[key] for key in front[:MOST_LISTED]],
        next=page.following,
    )


def _groups(source: ScoreSource, board: BoardKey, field: GroupBy, metric: Metric) -> dict[int, Group]:
    """The best cell of each group, best first."""
    values, positions = source.groups(board, field), source.positions(board, metric)
    order = sorted(positions, key=positions.__getitem__, reverse=metric.more_is_better)
    best: dict[Any, int] = {}
    counts: dict[Any, int] = {}
    for key in order:
        best.setdefault(values[key], key)
        counts[values[key]] = counts.get(values[key], 0) + 1
    return {key: Group(field, value, counts[value]) for value, key in best.items()}


def _baseline(source: ScoreSource, board: BoardKey, cell: str | None) -> Measures | None:
    key = None if cell is None else source.find(board, cell)
    return None if key is None else source.entries([key])[key].metrics


def _differences(metrics: Measures, baseline: Measures, names: Iterable[str]) -> dict[str, Change]:
    found = {}
    for name in names:
        if name not in metrics or name not in baseline:
            continue
        ours, theirs = metrics[name], baseline[name]
        error = None
        if ours.std is not None and theirs.std is not None:
            error = math.sqrt(ours.std**2 / ours.seeds + theirs.std**2 / theirs.seeds)
        found[name] = Change(ours.mean - theirs.mean, error)
    return found


@dataclass(frozen=True)
class MeasuredDataset:
    """A data set: its protocols (boards) and the cells that stand on them; none: there are trials, but no result."""

    dataset: str
    boards: int
    cells: int


def measured_datasets(session: Session, scope: int) -> list[MeasuredDataset]:
    """Data sets by name, of a project or (`scope` 0) of all."""
    query = (
        select(ScoreBoard.dataset, func.count(ScoreBoard.id.distinct()), func.count(Score.id))
        .join(Score, Score.board_id == ScoreBoard.id)
        .where(ScoreBoard.scope == scope)
        .group_by(ScoreBoard.dataset)
    )
    found = {dataset: MeasuredDataset(dataset, boards, cells) for dataset, boards, cells in session.execute(query)}
    names = sorted({*found, *_names(session, scope)})
    return [found.get(name, MeasuredDataset(name, 0, 0)) for name in names]


def _names(session: Session, scope: int) -> Iterator[str]:
    """The data sets of all trials: one step along the index for each, however many trials it has."""
    query = select(Trial.dataset).order_by(Trial.dataset).limit(1)
    if scope:
        query = query.join(Experiment).where(Experiment.project_id == scope)
    name = session.scalar(query)
    while name is not None:
        yield name
        name = session.scalar(query.where(Trial.dataset > name))
