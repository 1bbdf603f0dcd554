"""A leaderboard as flat rows for programs and spreadsheets: what ranks, and what does not, with the reason."""

from collections.abc import Mapping, Sequence
from typing import Any

from service.board_sheets import FIELDS
from service.leaderboard import Board, Leaderboard, Row
from service.metric import Metric

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
