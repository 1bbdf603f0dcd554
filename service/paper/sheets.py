"""A table of the paper as a table for people and as flat rows for programs."""

from service.leaderboards.metrics import Measure, Metric
from service.leaderboards.sheets import read
from service.leaderboards.significance import SAID, unbeaten
from service.leaderboards.text_tables import Cell, Measured, Sheet, Value
from service.leaderboards.value_texts import value_text
from service.paper.reference import RATIOS, Label
from service.paper.reproduction import Reproduction, TableRow


def table_sheet(found: Reproduction) -> Sheet:
    """Each column twice where the paper prints it: ours and the paper's."""
    printed = [column for column in found.columns if any(column in row.paper for row in found.rows)]
    headings = [label.replace("_", " ") for label in found.labels]
    numeric = [label not in ("method", "dataset", "layer") for label in found.labels]
    for column in found.columns:
        headings += [title_of(column), *([found.beside] if column in printed else [])]
        numeric += [True, *([True] if column in printed else [])]
    best = {column: _best(found, column) for column in found.columns}
    rows: list[list[Cell]] = []
    for index, row in enumerate(found.rows):
        cells: list[Cell] = [row.labels[label] for label in found.labels]
        for column in found.columns:
            cells.append(_ours(row, column, best=index in best[column]))
            if column in printed:
                cells.append(_theirs(row, column))
        rows.append([*cells, row.status])
    notes = list(found.notes)
    if found.protocols:
        names = list(found.protocols.values())
        named = names[0][:12] if len(names) == 1 else ", ".join(f"{p[:12]} ({d})" for d, p in found.protocols.items())
        notes.insert(0, f"protocol {named}; mean ± sample standard deviation over seeds")
        notes.insert(1, f"of ours: {SAID[0].lower()}{SAID[1:]}")
    if found.other_protocols:
        notes.append(f"results under {len(found.other_protocols)} other protocols are not shown")
    for row in found.rows:
        named = ", ".join(f"{name} {value_text(value)}" for name, value in row.labels.items())
        notes += [f"{named}: {note}" for note in row.notes]
    return Sheet(f"{found.name}: {found.title}", [*headings, "status"], [*numeric, False], rows, notes)


def table_records(found: Reproduction) -> tuple[list[str], list[list[Value]]]:
    """Header and rows for CSV, all numbers in the API's units."""
    metrics = [column for column in found.columns if column not in RATIOS]
    ratios = [column for column in found.columns if column in RATIOS]
    printed = [column for column in found.columns if any(column in row.paper for row in found.rows)]
    header = [*found.labels, "status", "seeds", "trials"]
    header += [f"{metric}_{part}" for metric in metrics for part in ("mean", "std")]
    header += ratios
    header += [f"{found.beside}_{column}_{part}" for column in printed for part in ("mean", "std")]
    rows: list[list[Value]] = []
    for row in found.rows:
        values: list[Value] = [*(row.labels[label] for label in found.labels), row.status, row.seeds, row.trials]
        for metric in metrics:
            spread = row.metrics.get(metric)
            values += [None, None] if spread is None else [spread["mean"], spread["std"]]
        values += [getattr(row, ratio) for ratio in ratios]
        for column in printed:
            value = row.paper.get(column)
            values += [None, None] if value is None else [value.mean, value.spread]
        rows.append(values)
    return header, rows


def title_of(column: str) -> str:
    """What a table or a figure of the paper calls a column."""
    return column.replace("_", " ") if column in RATIOS else Metric(column).reading.title


def _read(column: str, mean: float, std: float | None, *, best: bool = False, decimals: int | None = None) -> Measured:
    """A value in the unit in which people read its column."""
    if column in RATIOS:
        return Measured(mean, std, 1 if decimals is None else decimals, best)
    return read(Metric(column), mean, std, best=best, decimals=decimals)


def _mean(row: TableRow, column: str) -> float | None:
    if column in RATIOS:
        ratio: float | None = getattr(row, column)
        return ratio
    return row.metrics[column]["mean"] if column in row.metrics else None


_APART = ("dataset", "channels")
"""Labels of rows that were measured on images of their own: no number of one is better than another's."""


def _best(found: Reproduction, column: str) -> list[int]:
    """Which rows are best beyond their errors, each among those of the same images; ratios have none."""
    if column in RATIOS:
        return []
    together: dict[tuple[Label, ...], list[int]] = {}
    for index, row in enumerate(found.rows):
        together.setdefault(tuple(row.labels.get(label) for label in _APART), []).append(index)
    best = []
    for places in together.values():
        among = unbeaten([_measure(found.rows[place], column) for place in places], Metric(column))
        best += [places[one] for one in among]
    return best


def _measure(row: TableRow, column: str) -> Measure | None:
    """What was measured of a complete row."""
    spread = row.metrics.get(column) if row.status == "complete" else None
    return spread and Measure(spread["seeds"], spread["mean"], spread["std"], spread["min"], spread["max"])


def _ours(row: TableRow, column: str, *, best: bool) -> Cell:
    mean = _mean(row, column)
    if mean is None:
        return None
    std = row.metrics[column]["std"] if column in row.metrics else None
    return _read(column, mean, std, best=best)


def _theirs(row: TableRow, column: str) -> Cell:
    value = row.paper.get(column)
    return None if value is None else _read(column, value.mean, value.spread, decimals=value.decimals)
