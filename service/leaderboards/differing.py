"""What tells the sides of a comparison apart: the fields in which they differ, and the names that these make."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from service.leaderboards.sides import DifferingField, Side
from service.leaderboards.value_texts import column_texts
from service.specs.columns import FieldColumn, flat
from ttsv.config.fields import FieldValue, Json

MOST_VALUES = 100
"""Values of a field that are named of each side."""
_OF_TRIALS = ("spec_version", "base", "grid", "variants", "trials", "repeat")
_OF_PEOPLE = ("name", "notes", "tags", "priority")


def differing_fields(
    fields: Sequence[FieldColumn], told: Sequence[Mapping[str, list[FieldValue]]]
) -> list[DifferingField]:
    """The fields that do not have the same values on all sides."""
    found = []
    for one in fields:
        values = [side[one.field] for side in told]
        if any(mine != values[0] for mine in values):
            shown: list[list[Json]] = [[*mine[:MOST_VALUES]] for mine in values]
            found.append(DifferingField(one.field, one.name, shown, [*map(len, values)]))
    return found


def spec_fields(specs: Sequence[Mapping[str, Json]]) -> list[DifferingField]:
    """What differs in specs besides the trials that they ask for, and what is said for people."""
    flats = [
        dict(flat({name: part for name, part in spec.items() if name not in (*_OF_TRIALS, *_OF_PEOPLE)}))
        for spec in specs
    ]
    paths = dict.fromkeys(path for one in flats for path in one)
    return [
        DifferingField(path, path, [[one.get(path)] for one in flats], [1] * len(flats))
        for path in paths
        if any(one.get(path) != flats[0].get(path) for one in flats)
    ]


def named(sides: Sequence[Side], differing: Sequence[DifferingField]) -> list[Side]:
    """The sides, those without a name of their own by the first fields that tell them apart."""
    texts = [column_texts([mine[0] if mine else None for mine in one.values]) for one in differing]
    told = [(one.name, column) for one, column in zip(differing, texts, strict=True)]
    naming: list[tuple[str, list[str]]] = []
    for one in told:
        if _kinds([*naming, one], len(sides)) > _kinds(naming, len(sides)):
            naming.append(one)
    said = [", ".join(f"{name} {_said(column[side])}" for name, column in naming) for side in range(len(sides))]
    return [replace(side, about=side.about or said[number]) for number, side in enumerate(sides)]


def _kinds(columns: Sequence[tuple[str, list[str]]], sides: int) -> int:
    """How many sides are told apart by these columns."""
    return len({tuple(column[side] for _, column in columns) for side in range(sides)})


def _said(text: str) -> str:
    return "none" if text == "-" else text
