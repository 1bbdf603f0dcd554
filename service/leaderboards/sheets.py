"""A leaderboard as tables for people."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from service.leaderboards.boards import (
    Board,
    Leaderboard,
    Pivot,
    PivotCell,
    Row,
    Spread,
    counted_said,
    missing_said,
)
from service.leaderboards.metrics import HEADLINE, Metric, Unit, unit_of
from service.leaderboards.significance import SAID
from service.leaderboards.text_tables import Cell, Measured, Sheet
from service.leaderboards.value_texts import column_texts, value_text
from service.specs.columns import Columns, default_of, short_name, told, value_of
from ttsv.config.fields import FieldValues, TrialFields

_MOST_SAID = 3
"""Rarer values that are said above a table of a field that is no column of it."""


def board_sheets(found: Leaderboard, dataset: str, metric: Metric, wanted: Sequence[Metric] = ()) -> list[Sheet]:
    """One table per board; without `wanted` columns those of the headline metrics that were measured."""
    sheets = [_sheet(board, dataset, metric, wanted) for board in found.boards]
    sheets += [_matrix(board, board.pivot, dataset, metric) for board in found.boards if board.pivot is not None]
    notes = []
    if found.hole_count:
        have = "cell has" if found.hole_count == 1 else "cells have"
        notes.append(f"{found.hole_count} {have} no result ({holes_said(found)})")
    notes += [f"no result: {said}" for said in holes_listed(found)]
    notes += [f"trial {bad.trial_id} is left out: {'; '.join(bad.reasons)}" for bad in found.invalid]
    if notes:
        title = f"{dataset}: not on the leaderboards" if sheets else f"{dataset}: no cell has a result"
        configs = [hole.config for hole in found.holes] + [row.config for board in found.boards for row in board.rows]
        said = (decided_said if sheets else shared_said)(found.shape, configs)
        above = "" if any(said in sheet.above for sheet in sheets) else said
        sheets.append(Sheet(title, ["cells without a result", "invalid results"], [True, True], [], notes, above))
        sheets[-1].rows.append([found.hole_count, found.invalid_count])
    return sheets


def measured_metrics(found: Leaderboard) -> tuple[Metric, ...]:
    """Every metric that a row has."""
    measured = {name for board in found.boards for row in board.rows for name in row.metrics}
    return tuple(metric for metric in Metric if metric in measured)


def holes_listed(found: Leaderboard) -> list[str]:
    """Which cells have no result, and why."""
    ranked = [row.config for board in found.boards for row in board.rows]
    said = configurations_said(found.shape, [hole.config for hole in found.holes] + ranked)
    return [f"{one}: {missing_said(hole.missing)}" for one, hole in zip(said, found.holes, strict=False)]


def configurations_said(shape: Columns, configs: Sequence[TrialFields]) -> list[str]:
    """What each configuration is among those of a table, its numbers as there; of a single one what is shared."""
    if not shape.fields:
        return [_listed(shape.notable)] * len(configs)
    texts = [[f"{one.name} {text}" for text in _texts(configs, one.field)] for one in shape.fields]
    return [", ".join(own) for own in zip(*texts, strict=True)]


def shared_said(shape: Columns, configs: Sequence[TrialFields]) -> str:
    """What all rows of a table have in common, without what is as everywhere; and what follows from its columns."""
    shared = f"All rows: {_listed(shape.notable)}." if shape.notable else ""
    return " ".join(filter(None, (shared, decided_said(shape, configs))))


def decided_said(shape: Columns, configs: Sequence[TrialFields]) -> str:
    """Which fields are no columns, as those that are decide them: with their values, where these are few."""
    if not shape.decided:
        return ""
    columns = {one.name: _texts(configs, one.field) for one in shape.fields if one.field != "seed"}
    said = [f"{one.name}{_values_said(one.field, configs, columns)}" for one in shape.decided]
    return f"Decided by the other fields: {', '.join(said)}."


def _values_said(path: str, configs: Sequence[TrialFields], columns: Mapping[str, Sequence[str]]) -> str:
    """A field's values, by those of the column with the fewest that decides it: `8 with layer tt, else none`."""
    values = _texts(configs, path)
    for name, texts in sorted(columns.items(), key=lambda column: len(set(column[1]))):
        pairs = dict.fromkeys(zip(texts, values, strict=True))
        if len(pairs) > len(set(texts)):
            continue  # it does not decide
        found: dict[str, list[str]] = {}
        for text, value in pairs:
            found.setdefault(value, []).append(text)
        usual = value_text(default_of(path)) if default_of(path) is not None else "none"
        most = max(found, key=lambda value: (len(found[value]), value == usual))
        others = {value: with_ for value, with_ in found.items() if value != most}
        if sum(map(len, others.values())) > _MOST_SAID:
            return ""
        said = [f"{value} with {name} {' or '.join(with_)}" for value, with_ in others.items()]
        return f" ({', '.join(said)}{', else ' if said else ''}{most})"
    return ""


def _texts(configs: Sequence[TrialFields], path: str) -> list[str]:
    """A field of each, in words."""
    values = [value_of(config, path) for config in configs]
    return ["none" if value is None else text for value, text in zip(values, column_texts(values), strict=True)]


def configuration_sheet(shape: Columns, configs: Sequence[TrialFields]) -> Sheet:
    """The columns alone, a row for each configuration; above, what all share."""
    rows: list[list[Cell]] = [[value_of(config, column.field) for column in shape.fields] for config in configs]
    numeric = [
        all(row[index] is None or type(row[index]) in (int, float) for row in rows)
        for index in range(len(shape.fields))
    ]
    return Sheet("", [column.name for column in shape.fields], numeric, rows, [], shared_said(shape, configs))


def _sheet(board: Board, dataset: str, metric: Metric, wanted: Sequence[Metric]) -> Sheet:
    measured = {name for row in board.rows for name in row.metrics}
    shown = [m for m in dict.fromkeys([metric, *(wanted or HEADLINE)]) if m in measured or m in wanted]
    own = configuration_sheet(board.shape, [row.config for row in board.rows])
    front = board.front is not None
    references = [row.paper for row in board.rows]
    papers = [m for m in shown if any(m in ref.values for found in references for ref in found)]
    compared = [m for m in shown if any(row.difference and m in row.difference for row in board.rows)]
    units = {m: unit_of(m, [row.metrics[m]["mean"] for row in board.rows if m in row.metrics]) for m in shown}
    headings = []
    for m in shown:
        headings += [units[m].title, *(["paper"] if m in papers else [])]
    headings += [f"difference: {units[m].title}" for m in compared]
    right = [True, *own.numeric, *(True for _ in headings), True, *([False] if front else [])]
    rows: list[list[Cell]] = []
    for row, fields in zip(board.rows, own.rows, strict=True):
        cells: list[Cell] = [row.place, *fields]
        for m in shown:
            cells += [_measured(row, m, units[m]), *([_printed(row, m)] if m in papers else [])]
        cells += [_difference(row, m, units[m]) for m in compared]
        cells.append(str(row.seeds) if row.seeds == row.trials else f"{row.seeds} of {row.trials}")
        rows.append(cells + (["*" if row.on_front else ""] if front else []))
    title = f"{dataset}: by {metric.reading.heading}"
    headings = ["#", *own.headings, *headings, "seeds", *(["front"] if front else [])]
    # What rows of one page share, those of others need not.
    above = own.above if len(board.rows) == board.total else own.above.replace("All rows:", "All rows shown:")
    return Sheet(title, headings, right, rows, _notes(board, bool(papers)), above)


def _matrix(board: Board, pivot: Pivot, dataset: str, metric: Metric) -> Sheet:
    """A metric over two fields."""
    places = [cell for cells in pivot.cells for cell in cells if cell is not None]
    unit = unit_of(metric, [cell["mean"] for cell in places])
    lacking = any(cell["missing"] for cell in places)
    rows: list[list[Cell]] = []
    several = False
    for value, cells in zip(pivot.rows, pivot.cells, strict=True):
        rows.append([value])
        for cell in cells:
            several = several or (cell is not None and cell["cells"] > 1)
            rows[-1].append(None if cell is None else _place(metric, cell, unit))
    across = [f"{pivot.across.name} {text}" for text in column_texts(pivot.columns)]
    title = f"{dataset}: {unit.title} by {pivot.down.name} and {pivot.across.name}"
    notes = [
        f"Protocol {board.protocol[:12]}. Mean ± sample standard deviation over seeds (n of N seeds).",
        "N counts the trials of cells that have results with this metric"
        + (", and those of cells that have none yet: behind N stands what became of them." if lacking else "."),
    ]
    if several:
        notes.append("A place takes the seeds of all its cells together, whatever else they differ in.")
    numbers = all(value is None or type(value) in (int, float) for value in pivot.rows)
    return Sheet(title, [pivot.down.name, *across], [numbers, *(True for _ in across)], rows, notes)


def _place(metric: Metric, cell: PivotCell, unit: Unit) -> Cell:
    """What stands in a place: the measured value with n of N, and why the others are missing."""
    of, missing = f"{cell['seeds']} of {cell['trials']}", cell["missing"]
    if missing:
        # All of them: their number is said already.
        of += f", {next(iter(missing)) if cell['trials'] in missing.values() else counted_said(missing)}"
    return of if cell["mean"] is None else replace(read(metric, cell["mean"], cell["std"], unit=unit), of=of)


def holes_said(found: Leaderboard) -> str:
    """How many trials the cells without a result have, and how many of them are queued, running, diverged, failed."""
    trials = sum(hole.trials for hole in found.holes)
    states = Counter(one.said for hole in found.holes for one in hole.missing)
    listed = ", ".join(f"{count} {said}" for said, count in states.most_common())
    first = "cell" if len(found.holes) == 1 else f"{len(found.holes)} cells"
    of = "" if found.hole_count == len(found.holes) else f" of the first {first}"
    return f"{trials} {'trial' if trials == 1 else 'trials'}{of}: {listed}"


def _notes(board: Board, paper: bool) -> list[str]:
    counts = sorted({row.seeds for row in board.rows})
    notes = [f"Protocol {board.protocol[:12]}; {len(board.rows)} of {board.total} rows."]
    if counts:
        number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        seeds = "seed" if counts == [1] else "seeds"
        notes.append(f"Mean ± sample standard deviation over {number} {seeds}. {SAID}")
    if board.baseline is not None:
        cell = _listed({short_name(path): value for path, value in told(board.baseline).items()})
        notes.append(f"Differences ± their standard error are to: {cell}.")
    groups = [row.group for row in board.rows if row.group is not None]
    if groups:
        values = ["none" if one.value is None else one.value for one in groups]
        of = ", ".join(f"{text} (of {one.cells})" for text, one in zip(column_texts(values), groups, strict=True))
        notes.append(f"Each row is the best cell of a value of {short_name(groups[0].field)}: {of}.")
    named = configurations_said(board.shape, [row.config for row in board.rows])
    lacking = [f"{one}: {missing_said(row.missing)}" for one, row in zip(named, board.rows, strict=True) if row.missing]
    if lacking or any(one["seeds"] < row.trials for row in board.rows for one in row.metrics.values()):
        notes.append("Rows that lack seeds (k of N) of what is ranked have places behind complete ones.")
    if lacking:
        notes.append("Missing: " + "; ".join(lacking) + ".")
    if board.unmeasured:
        notes.append(f"{board.unmeasured_said} this metric.")
    if board.apart:
        notes.append("Not ranked with the first table: " + "; ".join(map(str, board.apart)) + ".")
    if paper:
        said = dict.fromkeys(note for row in board.rows for reference in row.paper for note in reference.notes)
        notes.append("Paper: what it prints of the same configuration.")
        notes += [f"Paper: {note}." for note in said]
    return notes


def _measured(row: Row, metric: Metric, unit: Unit) -> Cell:
    """A row's number, and of how many seeds it is where its other results lack it."""
    spread: Spread | None = row.metrics.get(metric)
    if spread is None:
        return None
    found = read(metric, spread["mean"], spread["std"], best=metric in row.best, unit=unit)
    return found if spread["seeds"] == row.seeds else replace(found, of=f"{spread['seeds']} of {row.trials}")


def _printed(row: Row, metric: Metric) -> Cell:
    value = next((ref.values[metric] for ref in row.paper if metric in ref.values), None)
    return None if value is None else read(metric, value.mean, value.spread, decimals=value.decimals)


def _difference(row: Row, metric: Metric, unit: Unit) -> Cell:
    change = (row.difference or {}).get(metric)
    return None if change is None else read(metric, change.mean, change.error, unit=unit)


def read(
    metric: Metric,
    mean: float,
    std: float | None,
    *,
    best: bool = False,
    decimals: int | None = None,
    unit: Unit | None = None,
) -> Measured:
    """A value in a unit, by default that in which people read the metric, with its decimals unless others are given."""
    unit = unit or Unit(metric.reading.title, metric.reading.factor, metric.reading.decimals)
    return Measured(mean, std, unit.decimals if decimals is None else decimals, best).times(unit.factor)


def _listed(values: FieldValues) -> str:
    return ", ".join(f"{name} {value_text(value)}" for name, value in values.items())
