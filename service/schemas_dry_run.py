"""What a dry run answers."""

from typing import Any

from pydantic import Field

from service.schemas import Out

SHOWN = 1000
"""Trials that are listed; the totals are those of all."""


class DryTrialOut(Out):
    """A trial that would be made. What is null is not known: `reasons` says why."""

    number: int
    fingerprint: str
    cell: str
    config: dict[str, Any]
    parameters: int | None = Field(description="That are trained.")
    compression: float | None
    multiply_accumulates: int | None = Field(description="Of one image.")
    steps: int | None = Field(description="Of the optimizer, over all epochs.")
    seconds: float | None = Field(description="Of training, without evaluation.")
    basis: str | None = Field(description="How `seconds` came about.")
    reasons: list[str]


class DryTotals(Out):
    """Over all trials, one after another; null where one of them is not known."""

    steps: int | None
    seconds: float | None


class DryRunOut(Out):
    """What a spec would become. A search finds its trials only while it runs: it lists none."""

    grid_points: int
    trial_count: int
    totals: DryTotals
    warnings: list[str] = Field([], description="Fields of the spec that have no effect, and why.")
    trials: list[DryTrialOut] = Field(description=f"The first {SHOWN}.")
