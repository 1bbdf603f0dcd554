"""What goes out of the API about trials, cells or experiments beside each other."""

from typing import Any, Literal

from pydantic import Field

from service.schemas.answers import ByPath, Out
from service.schemas.trials import ColumnOut


class SideOut(Out):
    """One of those that are compared."""

    key: int | str = Field(description="The trial's or experiment's number, or the cell's fingerprint.")
    name: str = Field(description="`trial 7`, `cell 01779b46a560` or `experiment 3`.")
    about: str = Field(
        description="An experiment's name; of others the first values in `differing` that tell them apart, in words."
    )
    experiment_id: int | None = Field(description="Of a trial: the experiment whose it is.")
    states: dict[str, int] = Field(description="How many trials it has, by state; states that none is in are absent.")
    missing: dict[str, int] = Field(
        {}, description="How many different trials have no result, by what became of them, in words."
    )
    invalid: int = Field(description="Results that cannot be true: they count nowhere.")
    left_out: int = Field(description="Valid results that do not count here, as they are of other protocols.")
    drawn: list[int] = Field(
        description="Trials whose curves and spectra stand for it, by seed, at most 20: of an experiment those of the "
        "cell with the largest mean of best validation accuracies."
    )


class DifferingFieldOut(Out):
    """A field that is not the same on all sides."""

    field: str = Field(description="Of trials, dotted as in a grid; of experiments also of their specs.")
    name: str = Field(description="The shortest name that no other field has.")
    values: list[list[Any]] = Field(description="By side the different values that its trials have, the first 100.")
    counts: list[int] = Field(description="By side how many different values there are.")


class SideMeasureOut(Out):
    """A metric on one side of a row."""

    protocol: int = Field(description="Index in `protocols`: of all results of this number.")
    seeds: int = Field(description="Results that it is of.")
    trials: int = Field(description="Different trials of the side in this row, with a result or without.")
    mean: float = Field(description="Over these results.")
    std: float | None = Field(description="Sample standard deviation (n - 1); null for one result.")
    min: float = Field(description="Least of these results.")
    max: float = Field(description="Largest of these results.")
    images: int | None = Field(description="Of how many images it is the share, where the protocol says so.")
    binomial: float | None = Field(
        description="Of a single result that is a share of images: its standard error, sqrt(p (1 - p) / images)."
    )
    difference: float | None = Field(
        description="`mean` less the baseline's; null: it is the baseline, or one of both has no number under the same "
        "protocol."
    )
    error: float | None = Field(
        description="Standard error of `difference`, sqrt(s1² / n1 + s2² / n2); null where a side has a single result."
    )
    chance: float | None = Field(
        description="Two-sided p of Welch's t-test for `difference`, not corrected for the number of tests."
    )
    best: bool = Field(
        description="Whether no side under the same protocol beats it beyond both errors (Welch's t-test, 5 %), where "
        "some side is beaten; one that lacks seeds is it only where all do."
    )


class CompareRowOut(Out):
    """What the sides have in one place."""

    fields: ByPath = Field(description="By path in `axes`, what the sides share here; empty where all is one.")
    trials: list[int | None] = Field(description="By side how many different trials it has here; null: none.")
    metrics: dict[str, list[SideMeasureOut | None]] = Field(
        description="By metric, of each side its number; null: it has none. Metrics that no side has are absent."
    )


class UsedProtocolOut(Out):
    """A protocol under which numbers of the answer were measured."""

    protocol: str = Field(
        description="Its fingerprint; of mean corruption errors followed by + and the SHA-256 of their baseline."
    )
    record: dict[str, Any] = Field(description="How results were measured, part by part.")
    sides: list[int] = Field(description="The sides that have numbers under it, from 0 on.")


class UnequalFieldOut(Out):
    """A field in which two protocols differ."""

    field: str = Field(description="Of their records, dotted.")
    here: Any = Field(description="On the side that `side` names; null: the record lacks it.")
    there: Any = Field(description="On the side that `other` names; null: the record lacks it.")


class UnequalOut(Out):
    """That a side was measured otherwise than another: no difference is taken between these numbers."""

    side: int = Field(description="The side, from 0 on.")
    other: int = Field(description="The side that it was held to: the baseline, or the first that has the metric.")
    metrics: list[str] = Field(description="The metrics in which the protocols of their numbers are not the same.")
    fields: list[UnequalFieldOut] = Field(description="In what these protocols differ.")


class CompareOut(Out):
    """Trials, cells or experiments beside each other."""

    kind: Literal["trials", "cells", "experiments"] = Field(description="What is compared.")
    baseline: int = Field(description="The side to which differences are taken, from 0 on.")
    sides: list[SideOut] = Field(description="Those that are compared, in the order asked for.")
    differing: list[DifferingFieldOut] = Field(description="All fields that are not the same on all sides.")
    axes: list[ColumnOut] = Field(
        description="Fields that a side varies by itself: a row holds cells with the same values in all of them."
    )
    common: ByPath = Field(description="What all trials of all sides share, by path.")
    metrics: list[str] = Field(description="The metrics of the rows, in the order of tables.")
    protocols: list[UsedProtocolOut] = Field(description="Those of the numbers shown.")
    unequal: list[UnequalOut] = Field(description="Which sides may not be compared in what; empty: all may.")
    rows: list[CompareRowOut] = Field(description="One for trials and cells; those that most sides have come first.")
    row_count: int = Field(description="All rows.")
