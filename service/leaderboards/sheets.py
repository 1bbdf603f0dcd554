"""A leaderboard as tables for people, and as flat rows for programs and spreadsheets."""

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
from service.leaderboards.text_tables import Cell, Measured, Sheet, column_texts, exact_text, value_text
from service.specs.columns import Columns, default_of, in_order, short_name, told, value_of
from ttsv.config.fields import FieldValue, FieldValues, TrialFields

FIELDS = ("model", "layer", "rank", "lambda_ort", "constraint", "delta")
"""Of a cell's configuration: the columns that a CSV file has in any case."""

_MOST_SAID = 3
"""Rarer values that are said above a table of a field that is no column of it."""

_PARTS = ("mean", "std", "min", "max")
"""Of a metric over the seeds of a cell: the columns that a CSV file has in any case."""

Value = str | int | float | bool | None
"""What a CSV file has in a place."""


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
        cells.append(str(row.seeds) if row.complete else f"{row.seeds} of {row.trials}")
        rows.append(cells + (["*" if row.on_front else ""] if front else []))
    title = f"{dataset}: by {metric.reading.heading}"
    headings = ["#", *own.headings, *headings, "seeds", *(["front"] if front else [])]
    return Sheet(title, headings, right, rows, _notes(board, bool(papers)), own.above)


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


def pivot_records(found: Leaderboard, fields: tuple[str, str]) -> tuple[list[str], list[list[Value]]]:
    """Header and rows of the matrix over two fields for CSV, in the API's units: five columns for each value across.

    A row is a value of the first field on a board. Where nothing was tried all five are empty.
    """
    pivots = [(board, board.pivot) for board in found.boards if board.pivot is not None]
    across = dict.fromkeys(value for _, pivot in pivots for value in pivot.columns)
    names = {value: f"{fields[1]}={'none' if value is None else exact_text(value)}" for value in across}
    header = ["status", "protocol", fields[0]]
    header += [f"{name} {part}" for name in names.values() for part in ("mean", "std", "seeds", "trials", "missing")]
    records: list[list[Value]] = []
    for board, pivot in pivots:
        for value, cells in zip(pivot.rows, pivot.cells, strict=True):
            there = dict(zip(pivot.columns, cells, strict=True))
            records.append(["apart" if board.apart else "ranked", board.protocol, _flat(value)])
            for one in across:
                cell = there.get(one)
                if cell is None:
                    records[-1] += [None] * 5
                else:
                    missing = counted_said(cell["missing"])
                    records[-1] += [cell["mean"], cell["std"], cell["seeds"], cell["trials"], missing]
    return header, records


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
        notes.append(f"{_unmeasured(board)} this metric.")
    if board.apart:
        notes.append("Not ranked with the first table: " + "; ".join(map(str, board.apart)) + ".")
    if paper:
        said = dict.fromkeys(note for row in board.rows for reference in row.paper for note in reference.notes)
        notes.append("Paper: what it prints of the same configuration.")
        notes += [f"Paper: {note}." for note in said]
    return notes


def _unmeasured(board: Board) -> str:
    have = "cell has" if board.unmeasured == 1 else "cells have"
    return f"{board.unmeasured} {have} results without"


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


def board_records(
    found: Leaderboard, wanted: Sequence[Metric] = (), *, chosen: Sequence[str] = (), hidden: Sequence[str] = ()
) -> tuple[list[str], list[list[Value]]]:
    """Header and rows for CSV, all numbers in the API's units. Columns are the fields that are `chosen`, if any are.

    Else those by which rows differ, that others decide, and that all share and say something: no caption has them here.
    Without those that are `hidden`. `status` is `ranked` or, on a board beside the first, `apart`: one row
    per cell and board. Then come `unmeasured` (cells of a board that lack the ranked metric), `no result` (a cell
    without any) and `invalid` (a result that cannot be true), whose numbers are empty. `reason` says why a row is not
    simply ranked. A metric that some of a row's results lack has a column that says of how many seeds it is.
    """
    measured = {name for board in found.boards for row in board.rows for name in row.metrics}
    metrics = [m for m in Metric if m in (wanted or measured)]
    lacking = {
        name
        for board in found.boards
        for row in board.rows
        for name, one in row.metrics.items()
        if one["seeds"] < row.seeds
    }
    papers = {name for board in found.boards for row in board.rows for ref in row.paper for name in ref.values}
    printed = [m for m in metrics if m in papers]
    differing = [column.field for column in (*found.columns, *found.decided)]
    every = dict.fromkeys(chosen or ("dataset", *FIELDS, *in_order({*differing, *found.shape.notable_paths})))
    fields = [path for path in every if path not in hidden]
    header = ["status", "reason", "protocol", "place", "cell", *fields, "seeds", "trials", "missing_seeds", "on_front"]
    header.append("best")
    header += [f"{m}_{part}" for m in metrics for part in (*_PARTS, *(["seeds"] if m in lacking else []))]
    header += [f"paper_{m}" for m in printed]
    header += [f"{m}_{part}" for m in metrics for part in ("difference", "difference_error")]
    records = [_of_row(board, row, metrics, printed, fields) for board in found.boards for row in board.rows]
    records += _not_ranked(found, fields)
    return header, [[record.get(name) for name in header] for record in records]


def _of_row(
    board: Board, row: Row, metrics: Sequence[Metric], printed: Sequence[Metric], fields: Sequence[str]
) -> dict[str, Value]:
    record: dict[str, Value] = {
        "status": "apart" if board.apart else "ranked",
        "reason": "; ".join([*map(str, board.apart), *filter(None, [missing_said(row.missing)])]),
        "protocol": board.protocol,
        "place": row.place,
        "seeds": row.seeds,
        "trials": row.trials,
        "missing_seeds": " ".join(map(str, row.missing_seeds)),
        "on_front": row.on_front,
        "best": " ".join(row.best),
        **_cell(row.cell, row.config, fields),
    }
    for m in metrics:
        if spread := row.metrics.get(m):
            record |= {f"{m}_{part}": spread[part] for part in ("mean", "std", "min", "max", "seeds")}
        if change := (row.difference or {}).get(m):
            record |= {f"{m}_difference": change.mean, f"{m}_difference_error": change.error}
    for m in printed:
        record[f"paper_{m}"] = next((ref.values[m].mean for ref in row.paper if m in ref.values), None)
    return record


def _not_ranked(found: Leaderboard, fields: Sequence[str]) -> list[dict[str, Value]]:
    records: list[dict[str, Value]] = []
    for board in found.boards:
        if left := board.total - len(board.rows):
            reason = f"{left} of the {board.total} rows of this protocol"
            records.append({"status": "not listed", "reason": reason, "protocol": board.protocol})
        if board.unmeasured:
            reason = f"{_unmeasured(board)} the ranked metric"
            records.append({"status": "unmeasured", "reason": reason, "protocol": board.protocol})
    records += [
        {
            "status": "no result",
            "reason": missing_said(hole.missing),
            "seeds": 0,
            "trials": hole.trials,
            "missing_seeds": " ".join(str(one.seed) for one in hole.missing),
            **_cell(hole.cell, hole.config, fields),
        }
        for hole in found.holes
    ]
    for bad in found.invalid:
        reason = f"trial {bad.trial_id}: {'; '.join(bad.reasons)}"
        record: dict[str, Value] = {"status": "invalid", "reason": reason, "protocol": bad.protocol}
        records.append(record | _cell(bad.cell, bad.config, fields))
    for status, more in (
        ("no result", found.hole_count - len(found.holes)),
        ("invalid", found.invalid_count - len(found.invalid)),
    ):
        if more:
            records.append({"status": status, "reason": f"{more} more, which are not listed"})
    return records


def _cell(cell: str, config: TrialFields, fields: Sequence[str]) -> dict[str, Value]:
    found: dict[str, Value] = {"cell": cell}
    for path in fields:
        value = value_of(config, path)
        found[path] = _flat(value)
    return found


def _flat(value: FieldValue) -> Value:
    """A field's value as CSV has it."""
    return value if value is None or isinstance(value, str | int | float) else value_text(value)
