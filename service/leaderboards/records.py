"""A leaderboard as flat rows for programs and spreadsheets."""

from collections.abc import Sequence

from service.leaderboards.boards import Board, Leaderboard, Row, counted_said, missing_said
from service.leaderboards.metrics import Metric
from service.leaderboards.text_tables import Value
from service.leaderboards.value_texts import exact_text
from service.specs.columns import in_order, value_of
from ttsv.config.fields import FieldValue, TrialFields

FIELDS = ("model", "layer", "rank", "lambda_ort", "constraint", "delta")
"""Of a cell's configuration: the columns that a CSV file has in any case."""

_PARTS = ("mean", "std", "min", "max")
"""Of a metric over the seeds of a cell: the columns that a CSV file has in any case."""


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
            reason = f"{board.unmeasured_said} the ranked metric"
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
    return value if value is None or isinstance(value, str | int | float) else exact_text(value)


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
