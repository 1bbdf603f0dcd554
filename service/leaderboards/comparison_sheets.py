"""A comparison as tables for people, and as flat rows for programs and spreadsheets."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from string import ascii_uppercase

from service.leaderboards.boards import counted_said
from service.leaderboards.metrics import Metric, Unit, unit_of
from service.leaderboards.sheets import read
from service.leaderboards.sides import CompareRow, Comparison, DifferingField, Kind, SideMeasure, Unequal
from service.leaderboards.significance import LEVEL
from service.leaderboards.text_tables import Cell, Sheet, Value
from service.leaderboards.value_texts import column_texts, exact_text

LETTERS = ascii_uppercase
"""By which the sides are called, in their order."""
_MOST_SAID = 12


def comparison_sheets(found: Comparison) -> list[Sheet]:
    """What differs, then the results: with fields that tell rows apart a table for each metric, else one of all."""
    sheets = [_differing(found)]
    if found.axes:
        sheets += [_over_rows(found, metric) for metric in found.metrics]
    else:
        sheets.append(_over_metrics(found))
    sheets[-1].notes.extend(comparison_notes(found))
    return sheets


def comparison_notes(found: Comparison) -> list[str]:
    """What the numbers mean, and what must be known of them."""
    notes = [*warnings(found), *_holes_said(found)]
    letter = LETTERS[found.baseline]
    if found.kind is Kind.TRIALS:
        notes.append(
            f"Differences to {letter}. Those of single trials have no error: how much seeds matter is not known. ± "
            "behind a share is its binomial standard error over the test images; "
            f"{'sides measured alike' if found.unequal else 'all sides'} were shown the same images, "
            "so that these errors are not independent."
        )
    else:
        notes.append(
            "Mean ± sample standard deviation over seeds (n of N different trials have the metric). Differences to "
            f"{letter} ± their standard error, p by Welch's test, two-sided; at most {len(found.sides) - 1} "
            f"{'test' if len(found.sides) == 2 else 'tests'} a row, not corrected for their number. One seed alone has "
            f"no deviation: behind a share stands its binomial standard error over the test images then. Bold: best "
            f"beyond its error ({LEVEL:.0%}); ties share it, and sides that lack seeds have none beside one with all."
        )
    if found.row_count > len(found.rows):
        notes.append(f"The first {len(found.rows)} of {found.row_count} configurations: what most sides have.")
    return notes


def warnings(found: Comparison) -> list[str]:
    """In words: what was measured unequally, and which results do not count."""
    said = []
    for one in found.unequal:
        fields = "; ".join(f"{each.field} {' against '.join(each.said)}" for each in one.fields[:_MOST_SAID])
        more = f" and {len(one.fields) - _MOST_SAID} more" if len(one.fields) > _MOST_SAID else ""
        said.append(
            f"{LETTERS[one.side]} was not measured as {LETTERS[one.other]} was "
            f"({_metrics(found, one)}): {fields}{more}. No difference is taken between them."
        )
    for letter, side in zip(LETTERS, found.sides, strict=False):
        if side.left_out:
            are = "1 result is" if side.left_out == 1 else f"{side.left_out} results are"
            said.append(f"{letter}: {are} left out, measured under other protocols.")
        if side.invalid:
            are = "1 result cannot be true and counts" if side.invalid == 1 else "results cannot be true and count"
            said.append(f"{letter}: {'' if side.invalid == 1 else f'{side.invalid} '}{are} nowhere.")
    return said


def _holes_said(found: Comparison) -> list[str]:
    """In words: what became of the trials of each side that have no result."""
    sides = zip(LETTERS, found.sides, strict=False)
    said = [f"{letter} {counted_said(side.missing)}" for letter, side in sides if side.missing]
    return [f"Trials without a result: {'; '.join(said)}."] if said else []


def _metrics(found: Comparison, one: Unequal) -> str:
    """In which metrics two sides were measured unequally."""
    has = {metric for row in found.rows for metric, measures in row.metrics.items() if measures[one.side] is not None}
    if len(has) > 1 and has <= set(one.metrics):
        return "in all metrics"
    return ", ".join(Metric(name).reading.heading for name in one.metrics)


def field_texts(one: DifferingField) -> list[str]:
    """Of each side the values of a field, as one column prints them."""
    flat = [value for values in one.values for value in values]
    texts = iter(column_texts(flat))
    found = []
    for values, count in zip(one.values, one.counts, strict=True):
        mine = [next(texts) for _ in values]
        said = ", ".join("none" if text == "-" and len(mine) > 1 else text for text in mine)
        found.append(f"{said} and {count - len(values)} more" if count > len(values) else said)
    return found


def unit_among(metric: Metric, rows: Iterable[Sequence[SideMeasure | None]]) -> Unit:
    """In what a metric is written in these rows."""
    return unit_of(metric, [one.mean for measures in rows for one in measures if one is not None])


def shown(metric: Metric, one: SideMeasure | None, trials: int | None, kind: Kind, unit: Unit) -> Cell:
    """A side's number with its error, and over how many seeds; without one of how many `trials` none has it."""
    if one is None:
        return None if trials is None or kind is Kind.TRIALS else f"0 of {trials}"
    found = read(metric, one.mean, one.binomial if one.std is None else one.std, best=one.best, unit=unit)
    return found if kind is Kind.TRIALS else replace(found, of=f"{one.seeds} of {one.trials}")


def difference(metric: Metric, one: SideMeasure | None, unit: Unit) -> Cell:
    """A side's difference to the baseline with its error, and its chance."""
    if one is None or one.difference is None:
        return None
    found = read(metric, one.difference, one.error, unit=unit)
    return found if one.chance is None else replace(found, of=f"p {chance_text(one.chance)}")


def chance_text(chance: float) -> str:
    """A probability as people write it."""
    return "< 0.001" if chance < 0.001 else f"{chance:.3f}" if chance < 0.1 else f"{chance:.2f}"


def measures_of(found: Comparison, row: CompareRow, metric: Metric) -> Sequence[SideMeasure | None]:
    """Of each side what it has of a metric in a row."""
    return row.metrics.get(metric.value) or [None] * len(found.sides)


def _headings(found: Comparison) -> list[str]:
    named = [f"{letter}: {side.name}" for letter, side in zip(LETTERS, found.sides, strict=False)]
    return named + [f"{LETTERS[side]} - {LETTERS[found.baseline]}" for side in _others(found)]


def _others(found: Comparison) -> list[int]:
    return [side for side in range(len(found.sides)) if side != found.baseline]


def _cells(found: Comparison, row: CompareRow, metric: Metric, unit: Unit) -> list[Cell]:
    measures = measures_of(found, row, metric)
    cells = [shown(metric, one, trials, found.kind, unit) for one, trials in zip(measures, row.trials, strict=True)]
    return cells + [difference(metric, measures[side], unit) for side in _others(found)]


def _differing(found: Comparison) -> Sheet:
    named = [f"{letter}: {side.name}" for letter, side in zip(LETTERS, found.sides, strict=False)]
    rows: list[list[Cell]] = [[one.name, *field_texts(one)] for one in found.differing]
    if found.kind is Kind.EXPERIMENTS:
        rows.insert(0, ["name", *(side.about for side in found.sides)])
    return Sheet("What differs", ["field", *named], [False] * (1 + len(named)), rows, [])


def _over_metrics(found: Comparison) -> Sheet:
    headings = _headings(found)
    rows: list[list[Cell]] = []
    for metric in found.metrics:
        unit = unit_among(metric, [found.rows[0].metrics[metric.value]])
        rows.append([unit.title, *_cells(found, found.rows[0], metric, unit)])
    return Sheet("Results", ["metric", *headings], [False, *(True for _ in headings)], rows, [])


def _over_rows(found: Comparison, metric: Metric) -> Sheet:
    headings = [axis.name for axis in found.axes]
    numeric = [
        all(row.fields[axis.field] is None or type(row.fields[axis.field]) in (int, float) for row in found.rows)
        for axis in found.axes
    ]
    unit = unit_among(metric, [row.metrics.get(metric.value, ()) for row in found.rows])
    rows: list[list[Cell]] = [
        [*(row.fields[axis.field] for axis in found.axes), *_cells(found, row, metric, unit)] for row in found.rows
    ]
    more = _headings(found)
    return Sheet(unit.title, [*headings, *more], [*numeric, *(True for _ in more)], rows, [])


def comparison_records(found: Comparison) -> tuple[list[str], list[list[Value]]]:
    """Header and rows for CSV, all numbers in the API's units: a row for each side, metric and place that it has.

    Where none of its trials has the metric there are no numbers.
    """
    axes = [axis.field for axis in found.axes]
    header = ["side", "key", "about", *axes, "metric", "protocol", "seeds", "trials", "mean", "std", "min", "max"]
    header += ["images", "binomial", "difference", "error", "chance", "best"]
    rows: list[list[Value]] = []
    for row in found.rows:
        places = [row.fields[path] for path in axes]
        fields = [one if one is None or isinstance(one, str | int | float) else exact_text(one) for one in places]
        for metric in found.metrics:
            sides = zip(LETTERS, found.sides, measures_of(found, row, metric), row.trials, strict=False)
            for letter, side, one, trials in sides:
                if one is None:
                    if trials is not None:
                        lacking: list[Value] = [letter, side.key, side.about, *fields, metric, None, 0, trials]
                        rows.append(lacking + [None] * (len(header) - len(lacking)))
                    continue
                numbers = [one.mean, one.std, one.min, one.max, one.images, one.binomial]
                numbers += [one.difference, one.error, one.chance]
                protocol = found.protocols[one.protocol].protocol
                told = [letter, side.key, side.about, *fields, metric, protocol, one.seeds, one.trials]
                rows.append([*told, *numbers, one.best])
    return header, rows
