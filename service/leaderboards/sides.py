"""What a comparison says, as plain data: one model that the API, the text forms, the pages and the terminal show.

`service.schemas.comparisons` describes every field, of `X` at `XOut`.
"""

from dataclasses import dataclass
from enum import StrEnum

from service.leaderboards.metrics import Metric
from service.leaderboards.protocols import Difference, Record
from service.specs.columns import FieldColumn
from ttsv.config.fields import FieldValues, Json
from ttsv.results import LayerFields


class Kind(StrEnum):
    """What is compared."""

    TRIALS = "trials"
    CELLS = "cells"
    EXPERIMENTS = "experiments"

    @property
    def one(self) -> str:
        """A single one of them."""
        return self.value.removesuffix("s")


Key = int | str
"""A trial's or an experiment's number, or a cell's fingerprint."""


@dataclass(frozen=True)
class Side:
    """One of those that are compared.

    `about` says what it is among the others. `states` counts its trials, `missing` the different ones that have no
    result, by what became of them in words, `invalid` results that cannot be true, `left_out` valid ones that do not
    count here, as they are of other protocols than its numbers are. `drawn` are
    trials whose curves and spectra stand for it, in the order of their seeds: of an experiment those of its best cell.
    """

    key: Key
    name: str
    about: str
    experiment_id: int | None
    states: dict[str, int]
    missing: dict[str, int]
    invalid: int
    left_out: int
    drawn: list[int]


@dataclass(frozen=True)
class DifferingField:
    """A field that is not the same on all sides: of each side its values, the first of them, and how many they are."""

    field: str
    name: str
    values: list[list[Json]]
    counts: list[int]


@dataclass(frozen=True)
class SideMeasure:
    """A metric on one side of a row, over `seeds` results of `trials` different trials.

    `binomial` is the standard error of a share of so many `images`, of a single result alone; `difference` is to the
    baseline, with its standard error and the two-sided chance of Welch's test where both sides have a deviation.
    `best`: no side of the same protocol beats it beyond both errors, where one is beaten; a side that lacks seeds is
    it only where all do.
    """

    protocol: int
    seeds: int
    trials: int
    mean: float
    std: float | None
    min: float
    max: float
    images: int | None
    binomial: float | None
    difference: float | None
    error: float | None
    chance: float | None
    best: bool


@dataclass(frozen=True)
class CompareRow:
    """What the sides have in one place: by path the values that they share there, by metric a measure of each side.

    `trials` are those of each side, with a result or without; None: it has no such cell.
    """

    fields: FieldValues
    trials: list[int | None]
    metrics: dict[str, list[SideMeasure | None]]


@dataclass(frozen=True)
class UsedProtocol:
    """A protocol of the numbers shown, and the sides that have some under it."""

    protocol: str
    record: Record
    sides: list[int]


@dataclass(frozen=True)
class Unequal:
    """That a side was measured otherwise than another: in which metrics, and what of the protocols differs."""

    side: int
    other: int
    metrics: list[str]
    fields: list[Difference]


@dataclass(frozen=True)
class Comparison:
    """The whole answer. `common` is by path what all trials of all sides share, `row_count` of all rows."""

    kind: Kind
    baseline: int
    sides: list[Side]
    differing: list[DifferingField]
    axes: list[FieldColumn]
    common: FieldValues
    metrics: list[Metric]
    protocols: list[UsedProtocol]
    unequal: list[Unequal]
    rows: list[CompareRow]
    row_count: int


@dataclass(frozen=True)
class SideLayers:
    """The layers of the first trial that stands for a side and has a valid result, as its result records them."""

    trial: int
    layers: list[LayerFields]
