"""A leaderboard as tables for people, and as flat rows for programs and spreadsheets."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.leaderboards.leaderboard import Board, Leaderboard, Row, Spread
from service.leaderboards.metrics import HEADLINE, Metric
from service.leaderboards.text_tables import Cell, Measured, Sheet

FIELDS = ("model", "layer", "rank", "lambda_ort", "constraint", "delta")
"""Of a cell's configuration: the columns that say which it is."""
_MOST_SEEDS = 20


def board_sheets(found: Leaderboard, dataset: str, metric: Metric, wanted: Sequence[Metric] = ()) -> list[Sheet]:
    """One table per board; without `wanted` columns those of the headline metrics that were measured."""
    sheets = [_sheet(board, dataset, metric, wanted) for board in found.boards]
    notes = []
    if found.hole_count:
        trials = sum(hole.trials for hole in found.holes)
        more = "" if found.hole_count == len(found.holes) else " among the first of them"
        have = "cell has" if found.hole_count == 1 else "cells have"
        notes.append(f"{found.hole_count} {have} no result yet ({_trials(trials)}{more})")
    notes += [f"no result: {_said(hole.config)}; {_trials(hole.trials)}" for hole in found.holes]
    notes += [f"trial {bad.trial_id} is left out: {'; '.join(bad.reasons)}" for bad in found.invalid]
    if notes:
        title = f"{dataset}: not on the leaderboards" if sheets else f"{dataset}: no results yet"
        sheets.append(Sheet(title, ["cells without a result", "invalid results"], [True, True], [], notes))
        sheets[-1].rows.append([found.hole_count, found.invalid_count])
    return sheets


def _sheet(board: Board, dataset: str, metric: Metric, wanted: Sequence[Metric]) -> Sheet:
    measured = {name for row in board.rows for name in row.metrics}
    shown = [m for m in dict.fromkeys([metric, *(wanted or HEADLINE)]) if m in measured or m in wanted]
    best = {m: _best(board.rows, m) for m in shown}
    fields = [name for name in FIELDS if len({str(row.config.get(name)) for row in board.rows}) > 1]
    same = [name for name in FIELDS if name not in fields and board.rows and board.rows[0].config.get(name)]
    front = board.front is not None
    references = [row.paper for row in board.rows]
    papers = [m for m in shown if any(m in ref.values for found in references for ref in found)]
    compared = [m for m in shown if any(row.difference and m in row.difference for row in board.rows)]
    headings = ["#", *fields, *(m.reading.title for m in shown), *(f"paper: {m.reading.title}" for m in papers)]
    headings += [f"difference: {m.reading.title}" for m in compared]
    headings += ["seeds", *(["front"] if front else [])]
    text = {"model", "layer", "constraint", "front"}
    rows: list[list[Cell]] = []
    for row in board.rows:
        cells: list[Cell] = [row.place, *(row.config.get(name) for name in fields)]
        cells += [_measured(row.metrics.get(m), m, best[m]) for m in shown]
        cells += [_printed(row, m) for m in papers]
        cells += [_difference(row, m) for m in compared]
        cells.append(row.seeds if row.complete else f"{row.seeds} of {row.trials}")
        rows.append(cells + (["*" if row.on_front else ""] if front else []))
    notes = _notes(board, same, bool(papers))
    return Sheet(
        f"{dataset}: by {metric.reading.heading}", headings, [name not in text for name in headings], rows, notes
    )


def _trials(count: int) -> str:
    return f"{count} {'trial' if count == 1 else 'trials'}"


def _notes(board: Board, same: Sequence[str], paper: bool) -> list[str]:
    counts = sorted({row.seeds for row in board.rows})
    notes = [f"Protocol {board.protocol[:12]}; {len(board.rows)} of {board.total} rows."]
    if counts:
        number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        seeds = "seed" if counts == [1] else "seeds"
        notes.append(f"Mean ± sample standard deviation over {number} {seeds}; best means in bold.")
    if same:
        notes.append("All rows: " + ", ".join(f"{name} {_plain(board.rows[0].config[name])}" for name in same) + ".")
    lacking = [f"#{row.place} {_listed(row.missing_seeds)}" for row in board.rows if row.missing_seeds]
    if lacking:
        notes.append("Missing seeds: " + "; ".join(lacking) + ".")
    if board.unmeasured:
        notes.append(f"{board.unmeasured} cells have results without this metric.")
    if board.apart:
        notes.append("Not ranked with the first table: " + "; ".join(map(str, board.apart)) + ".")
    if paper:
        said = dict.fromkeys(note for row in board.rows for reference in row.paper for note in reference.notes)
        notes += [f"Paper: {note}." for note in said]
    return notes


def _best(rows: Sequence[Row], metric: Metric) -> float | None:
    means = [row.metrics[metric]["mean"] for row in rows if metric in row.metrics and metric.has_best]
    return (max if metric.more_is_better else min)(means, default=None)


def _measured(spread: Spread | None, metric: Metric, best: float | None) -> Cell:
    if spread is None:
        return None
    return _read(metric, spread["mean"], spread["std"], best=spread["mean"] == best)


def _printed(row: Row, metric: Metric) -> Cell:
    value = next((ref.values[metric] for ref in row.paper if metric in ref.values), None)
    return None if value is None else _read(metric, value.mean, value.spread)


def _difference(row: Row, metric: Metric) -> Cell:
    change = (row.difference or {}).get(metric)
    return None if change is None else _read(metric, change.mean, change.error)


def _read(metric: Metric, mean: float, std: float | None, *, best: bool = False) -> Measured:
    """A value in the unit in which people read the metric."""
    return Measured(mean, std, metric.reading.decimals, best).times(metric.reading.factor)


def _said(config: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_plain(config[name])}" for name in FIELDS if config.get(name) is not None)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds[:_MOST_SEEDS])) + (", ..." if len(seeds) > _MOST_SEEDS else "")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


Value = str | int | float | bool | None


def board_records(found: Leaderboard, wanted: Sequence[Metric] = ()) -> tuple[list[str], list[list[Value]]]:
    """Header and rows for CSV, all numbers in the API's units.

    The column `status` is `ranked` or, on a board beside the first, `apart`: one row per cell and board. Then come
    `unmeasured` (cells of a board that lack the ranked metric), `no result` (a cell without any) and `invalid` (a
    result that cannot be true), whose numbers are empty. `reason` says why a row is not simply ranked.
    """
    measured = {name for board in found.boards for row in board.rows for name in row.metrics}
    metrics = [m for m in Metric if m in (wanted or measured)]
    papers = {name for board in found.boards for row in board.rows for ref in row.paper for name in ref.values}
    printed = [m for m in metrics if m in papers]
    header = ["status", "reason", "protocol", "place", "cell", *FIELDS, "seeds", "trials", "missing_seeds", "on_front"]
    header += [f"{m}_{part}" for m in metrics for part in ("mean", "std", "min", "max")]
    header += [f"paper_{m}" for m in printed]
    header += [f"{m}_{part}" for m in metrics for part in ("difference", "difference_error")]
    records = [_of_row(board, row, metrics, printed) for board in found.boards for row in board.rows]
    records += _not_ranked(found)
    return header, [[record.get(name) for name in header] for record in records]


def _of_row(board: Board, row: Row, metrics: Sequence[Metric], printed: Sequence[Metric]) -> dict[str, Value]:
    record: dict[str, Value] = {
        "status": "apart" if board.apart else "ranked",
        "reason": "; ".join(map(str, board.apart)),
        "protocol": board.protocol,
        "place": row.place,
        "seeds": row.seeds,
        "trials": row.trials,
        "missing_seeds": " ".join(map(str, row.missing_seeds)),
        "on_front": row.on_front,
        **_cell(row.cell, row.config),
    }
    for m in metrics:
        if spread := row.metrics.get(m):
            record |= {f"{m}_{part}": spread[part] for part in ("mean", "std", "min", "max")}
        if change := (row.difference or {}).get(m):
            record |= {f"{m}_difference": change.mean, f"{m}_difference_error": change.error}
    for m in printed:
        record[f"paper_{m}"] = next((ref.values[m].mean for ref in row.paper if m in ref.values), None)
    return record


def _not_ranked(found: Leaderboard) -> list[dict[str, Value]]:
    records: list[dict[str, Value]] = []
    for board in found.boards:
        if board.unmeasured:
            reason = f"{board.unmeasured} cells have results without the ranked metric"
            records.append({"status": "unmeasured", "reason": reason, "protocol": board.protocol})
    records += [
        {"status": "no result", "seeds": 0, "trials": hole.trials, **_cell(hole.cell, hole.config)}
        for hole in found.holes
    ]
    for bad in found.invalid:
        reason = f"trial {bad.trial_id}: {'; '.join(bad.reasons)}"
        record: dict[str, Value] = {"status": "invalid", "reason": reason, "protocol": bad.protocol}
        records.append(record | _cell(bad.cell, bad.config))
    for status, more in (
        ("no result", found.hole_count - len(found.holes)),
        ("invalid", found.invalid_count - len(found.invalid)),
    ):
        if more:
            records.append({"status": status, "reason": f"{more} more, which are not listed"})
    return records


def _cell(cell: str, config: Mapping[str, Any]) -> dict[str, Value]:
    return {"cell": cell} | {name: config.get(name) for name in FIELDS}
