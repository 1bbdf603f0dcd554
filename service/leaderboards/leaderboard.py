"""Leaderboards: the cells of a data set, ranked by their means over seeds, one board per protocol."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import Experiment, Protocol, Score, ScoreBoard, Trial
from service.errors import NotFoundError
from service.leaderboards.board_pages import BoardPage, page_of
from service.leaderboards.boards import (
    Board,
    Change,
    Leaderboard,
    PaperReference,
    Pivot,
    PivotCell,
    Row,
    spreads,
)
from service.leaderboards.corruption_baselines import IN_RECORD, baseline_of, without_baseline
from service.leaderboards.corruption_baselines import METRIC as ERROR
from service.leaderboards.filters import OneCell, Question
from service.leaderboards.materialized import StoredScores
from service.leaderboards.metrics import Measures, Metric
from service.leaderboards.missing import (
    MOST_LISTED,
    SeenTrials,
    find_holes,
    find_invalid,
    hole_places,
    invalid_condition,
)
from service.leaderboards.on_demand import ChosenTrials
from service.leaderboards.protocols import Record, differences
from service.leaderboards.significance import unbeaten
from service.leaderboards.source import BoardKey, Cell, Entry, Rivals, ScoreSource, in_order
from service.specs.columns import FieldColumn, columns_of, short_name
from ttsv.config.fields import FieldValue, TrialFields
from ttsv.results import protocol_fingerprint

References = Callable[[TrialFields, Record], list[PaperReference]]
"""From a cell's configuration and its protocol's record to the printed rows that it corresponds to."""


Place = tuple[FieldValue, FieldValue]
"""Of a matrix: the values of its two fields."""
_LARGEST_SUMMED = 1e290
"""Means up to it are added up whatever the count of their results."""


def leaderboard(
    session: Session, question: Question, references: References = lambda _config, _record: []
) -> Leaderboard:
    """Answers a question, each row with its `references` to printed numbers.

    Raises `NotFoundError` for a baseline that is on no board.
    """
    source = source_of(session, question)
    keys = boards_of(source, question)
    baselines = {} if question.baseline is None else _baselines(session, question, question.baseline)
    if question.baseline is not None and not any(board.protocol in baselines for board in keys):
        raise NotFoundError(f"cell {question.baseline!r} is on no leaderboard of {question.dataset} that was asked for")
    pages = [page_of(source, board, question) for board in keys]
    entries = source.entries([key for page in pages for key, _ in page.order])
    seen = SeenTrials(session, question, {entry.cell for entry in entries.values() if entry.seeds < entry.trials})
    is_invalid = invalid_condition(session)
    unmeasured = hole_places(session, question, question.pivot, is_invalid) if question.pivot and keys else {}
    boards = [
        _board(source, page, keys[0], question, entries, seen, references, baselines, unmeasured) for page in pages
    ]
    holes, hole_count = find_holes(session, question, is_invalid)
    invalid, invalid_count = find_invalid(session, question, is_invalid)
    shape = boards[0].shape if len(boards) == 1 and not holes and not invalid else None
    if shape is None:
        configs = [row.config for board in boards for row in board.rows]
        configs += [hole.config for hole in holes] + [bad.config for bad in invalid]
        shape = columns_of(configs, chosen=question.fields, hidden=question.hidden, without_decided=True)
    return Leaderboard(boards, holes, hole_count, invalid, invalid_count, shape.fields, shape.common, shape.decided)


def source_of(session: Session, question: Question) -> ScoreSource:
    """Where the rows that a question is about are read from."""
    return (ChosenTrials if question.filters.choose_trials else StoredScores)(session, question)


def boards_of(source: ScoreSource, question: Question) -> list[BoardKey]:
    """The boards that answer a question, those with most rows first.

    Boards of one baseline of mean corruption errors answer those who ask for these, and stand for a board all of whose
    cells they have.
    """
    boards = source.boards(question.metric)
    asked = ERROR in (*question.shown, *question.front) or question.filters.protocol is not None
    replaced: dict[str, int] = {}
    for board in boards if asked else ():
        if baseline_of(board.record) is not None:
            own = protocol_fingerprint(without_baseline(board.record))
            replaced[own] = max(board.cells, replaced.get(own, 0))
    kept = [
        board
        for board in boards
        if (asked if baseline_of(board.record) is not None else board.cells > replaced.get(board.protocol, 0))
    ]
    return sorted(kept, key=lambda board: (-board.ranked, -board.cells, board.protocol))


def _board(
    source: ScoreSource,
    page: BoardPage,
    first: BoardKey,
    question: Question,
    entries: Mapping[int, Entry],
    seen: SeenTrials,
    references: References,
    baselines: Mapping[str, Entry],
    unmeasured: Mapping[Place, Mapping[str, int]],
) -> Board:
    board = page.board
    unmeasured = unmeasured if board is first else {}
    front = source.front(board, question.front) if question.front else None
    on_it = set(front or ())
    baseline = baselines.get(board.protocol)
    columns = [metric.value for metric in question.shown]
    rows: list[Row] = []
    mine = [entries[key] for key, _ in page.order]
    configs = [_of_cell(entry) for entry in mine]
    shape = columns_of(configs, chosen=question.fields, hidden=question.hidden, without_decided=True)
    baseline_error = baseline_of(board.record)
    own = board.protocol if baseline_error is None else protocol_fingerprint(without_baseline(board.record))
    missing = [seen.missing(entry.cell, own, baseline_error) for entry in mine]
    best = _best(mine, question, _rivals(source, page, question))
    place, shared = page.place, page.order[0][1].shared if page.order else None
    for index, (key, position) in enumerate(page.order):
        entry, config = mine[index], configs[index]
        if page.places is not None:
            place = page.places[key]
        elif position.shared != shared:
            place, shared = page.first + index, position.shared
        rows.append(
            Row(
                place=place,
                cell=entry.cell,
                config=config,
                trials=entry.trials,
                seeds=entry.seeds,
                complete=_is_complete(entry, question.metric.value),
                missing_seeds=[one.seed for one in missing[index]],
                metrics=spreads(entry.metrics, columns),
                group=page.groups.get(key),
                on_front=None if front is None else key in on_it,
                difference=None if baseline is None else changes_from(baseline.metrics, entry.metrics, columns),
                paper=references(config, board.record),
                fields=shape.of(config),
                missing=missing[index],
                best=best[index],
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
        pivot=None if question.pivot is None else _pivot(source, board, question.pivot, question.metric, unmeasured),
        columns=shape.fields,
        common=shape.common,
        decided=shape.decided,
        baseline=None if baseline is None else _of_cell(baseline),
    )


def _of_cell(entry: Entry) -> TrialFields:
    """What all seeds share of a configuration."""
    return {name: value for name, value in entry.config.items() if name != "seed"}


def _rivals(source: ScoreSource, page: BoardPage, question: Question) -> Rivals:
    """The rows beside those of a page with which these are compared: none where all are shown."""
    judged = [metric for metric in question.shown if metric.has_best]
    if not page.order or not judged or len(page.order) == page.total:
        return Rivals(complete=False, measured={})
    if not question.group_by:
        return source.rivals(page.board, question.metric, judged)
    found = source.entries(page.others).values()
    complete = any(_is_complete(entry, question.metric.value) for entry in found)
    measured = {
        m.value: [
            entry.metrics[m.value]
            for entry in found
            if m.value in entry.metrics and (not complete or _is_complete(entry, m.value))
        ]
        for m in judged
    }
    return Rivals(complete, measured)


def _is_complete(entry: Entry, metric: str) -> bool:
    """Whether all trials of the cell have the metric."""
    return metric in entry.metrics and entry.metrics[metric].seeds == entry.trials


def _best(entries: Sequence[Entry], question: Question, others: Rivals) -> list[list[str]]:
    """Of each row shown the metrics in which none beats it. An incomplete row is no match for complete ones.

    What is bold depends on the board, not on the page of it: `others` are rows that the page may not show.
    """
    # An incomplete row takes part only where all are.
    complete = others.complete or any(_is_complete(entry, question.metric.value) for entry in entries)
    found: list[list[str]] = [[] for _ in entries]
    for metric in question.shown:
        name = metric.value
        rivals = [index for index, entry in enumerate(entries) if not complete or _is_complete(entry, name)]
        # A row of the page that is among the others beats nobody twice, and itself never.
        measured = [*[entries[index].metrics.get(name) for index in rivals], *others.measured.get(name, ())]
        for which in unbeaten(measured, metric, len(rivals)):
            found[rivals[which]].append(name)
    return found


def _pivot(
    source: ScoreSource,
    board: BoardKey,
    fields: tuple[str, str],
    metric: Metric,
    unmeasured: Mapping[Place, Mapping[str, int]],
) -> Pivot:
    """The matrix of a metric over two fields; what differs besides is averaged over, seed by seed.

    Cells that have results without the metric are in no place, nor counted there; of those that have no result the
    trials are counted in the places that `unmeasured` says.
    """
    measured = source.places(board, fields, metric)
    found = {place: _pooled(measured.get(place, ()), unmeasured.get(place, {})) for place in {**measured, **unmeasured}}
    down, across = (sorted({place[axis] for place in found}, key=in_order) for axis in (0, 1))
    cells = [[found.get((row, column)) for column in across] for row in down]
    names = [FieldColumn(name, short_name(name)) for name in fields]
    return Pivot(names[0], names[1], down, across, cells)


def _pooled(rows: Sequence[Cell], missing: Mapping[str, int]) -> PivotCell:
    """Mean and deviation over all results of several cells, from theirs; `missing` are trials of others."""
    lacking = sum(missing.values())
    if not rows:
        return {"mean": None, "std": None, "seeds": 0, "trials": lacking, "cells": 0, "missing": dict(missing)}
    if len(rows) == 1 and not missing:  # as in most places of a large matrix
        _, trials, (seeds, mean, std, _) = rows[0]
        return {"mean": mean, "std": std, "seeds": seeds, "trials": trials, "cells": 1, "missing": {}}
    measured = [one for _, _, one in rows]
    count = sum([one[0] for one in measured])
    largest = max([one[1] for one in measured])
    if largest < _LARGEST_SUMMED:
        mean = math.fsum([some * one for some, one, _, _ in measured]) / count
    else:  # whose sum may be beyond float64, as those of a deep network's bounds
        half = math.fsum([some / count * (one / 2) for some, one, _, _ in measured])
        mean = 2 * min(half, largest / 2)
    std = None
    if count > 1:  # each part divided first, as none of them is beyond float64 then
        within = [math.sqrt((some - 1) / (count - 1)) * (std or 0.0) for some, _, std, _ in measured]
        between = [math.sqrt(some / (count - 1)) * (one - mean) for some, one, _, _ in measured]
        std = math.hypot(*within, *between)
    trials = sum([row[1] for row in rows]) + lacking
    return {
        "mean": mean,
        "std": std,
        "seeds": count,
        "trials": trials,
        "cells": len(rows),
        "missing": dict(missing),
    }


def _baselines(session: Session, question: Question, cell: str) -> dict[str, Entry]:
    """What a cell has, by protocol, whether or not the filters leave it among the rows.

    Of the experiment or the tag that was asked for where it has results there, else of all that are to be seen.
    """
    asked = question.filters
    everywhere = OneCell(cell=cell, protocol=asked.protocol)
    chosen = replace(everywhere, experiment_id=asked.experiment_id, tag=asked.tag)
    found: dict[str, Entry] = {}
    for filters in dict.fromkeys((everywhere, chosen)):
        source = source_of(session, replace(question, filters=filters, front=()))
        keys = {board.protocol: source.find(board, cell) for board in source.boards(question.metric)}
        entries = source.entries([key for key in keys.values() if key is not None])
        found |= {protocol: entries[key] for protocol, key in keys.items() if key is not None}
    return found


def changes_from(baseline: Measures, metrics: Measures, names: Iterable[str]) -> dict[str, Change]:
    """By metric that both have: what lies between two means, with its standard error where both have a deviation."""
    found = {}
    for name in names:
        if name not in metrics or name not in baseline:
            continue
        ours, theirs = metrics[name], baseline[name]
        error = None
        if ours.std is not None and theirs.std is not None:
            error = math.hypot(ours.std / math.sqrt(ours.seeds), theirs.std / math.sqrt(theirs.seeds))
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
    of_baselines = select(Protocol.fingerprint).where(IN_RECORD.is_not(None))
    query = (
        select(ScoreBoard.dataset, func.count(ScoreBoard.id.distinct()), func.count(Score.id))
        .join(Score, Score.board_id == ScoreBoard.id)
        .where(ScoreBoard.scope == scope, ScoreBoard.protocol.not_in(of_baselines))
        .group_by(ScoreBoard.dataset)
    )
    found = {dataset: MeasuredDataset(dataset, boards, cells) for dataset, boards, cells in session.execute(query)}
    names = sorted({*found, *tried_datasets(session, scope)})
    return [found.get(name, MeasuredDataset(name, 0, 0)) for name in names]


def tried_datasets(session: Session, scope: int) -> Iterator[str]:
    """The data sets of all trials: one step along the index for each, however many trials it has."""
    query = select(Trial.dataset).order_by(Trial.dataset).limit(1)
    if scope:
        query = query.join(Experiment).where(Experiment.project_id == scope)
    name = session.scalar(query)
    while name is not None:
        yield name
        name = session.scalar(query.where(Trial.dataset > name))
