"""What the API says of a spec that was not posted: what it would become, and what that would cost."""

from pydantic import Field

from service.schemas.answers import ByPath, Out
from service.schemas.trials import Cell, ColumnOut, Config, Fingerprint
from ttsv.metrics.catalog import METRICS

SHOWN = 1000
"""Trials that are listed; the totals are those of all."""


class DryTrialOut(Out):
    """A trial that would be made. What is null is not known: `reasons` says why."""

    number: int = Field(description="Place in the experiment, from 0 on.")
    fingerprint: Fingerprint
    cell: Cell
    config: Config
    parameters: int | None = Field(description="That are trained.")
    compression: float | None = Field(description=METRICS["compression"].in_words)
    multiply_accumulates: int | None = Field(description="Of one image.")
    steps: int | None = Field(description="Of the optimizer, over all epochs.")
    seconds: float | None = Field(description="Of training, without evaluation.")
    basis: str | None = Field(description="How `seconds` came about.")
    memory_gib: float | None = Field(
        None, description="The most that it has on a GPU at any moment, in GiB, without CUDA's own."
    )
    memory_basis: str | None = Field(None, description="How `memory_gib` came about.")
    reasons: list[str] = Field(description="Why something is null.")


class DryTotals(Out):
    """Over all trials, one after another; null where one of them is not known."""

    steps: int | None = Field(description="Of the optimizer, over all trials and epochs.")
    seconds: float | None = Field(description="Of training, one trial after another.")


class DryRange(Out):
    """From the least to the largest of the trials' values that are known."""

    least: float = Field(description="The smallest of them.")
    largest: float = Field(description="The largest of them.")


class DryRanges(Out):
    """How far trials lie apart; null where nothing is known of any."""

    parameters: DryRange | None = Field(description="That are trained.")
    compression: DryRange | None = Field(description=METRICS["compression"].in_words)
    seconds: DryRange | None = Field(description="Of training, without evaluation.")


class DryMemory(Out):
    """What the trial with the largest known memory takes of a GPU, and the fraction of one that is enough."""

    gib: float = Field(description="Its `memory_gib`.")
    basis: str = Field(description="How that came about.")
    needed_gib: float = Field(
        description="What its process takes of a card: that, what the allocator holds over it, and a CUDA context."
    )
    card_gib: float | None = Field(description="The smallest GPU of the nodes that are there; null: none is known.")
    gpus: float | None = Field(
        description="A fraction for `resources.gpus` that is enough there, 1/n for the most trials side by side; null "
        "without a known card, where the spec asks for no GPU or for several, or where none is enough."
    )


class DryRunOut(Out):
    """What a spec would become. A search finds its trials only while it runs: it lists none."""

    grid_points: int = Field(description="Points of the grid, before those that are equal become one trial.")
    trial_count: int = Field(description="Trials that would be made.")
    totals: DryTotals = Field(description="What all trials together would cost.")
    ranges: DryRanges | None = Field(None, description="The least and the largest of all trials.")
    memory: DryMemory | None = Field(None, description="Of a GPU, the largest trial's; null: not known of any.")
    reasons: list[str] = Field([], description="Why something is null of some trial, each reason once.")
    notes: list[str] = Field([], description="What might be chosen otherwise; nothing of the spec is changed.")
    warnings: list[str] = Field(
        [], description="Fields that have no effect, what is lacking, and what would not fit, with why."
    )
    trials: list[DryTrialOut] = Field(description=f"The first {SHOWN}; none with `summary`.")
    columns: list["ColumnOut"] = Field(
        [], description="The fields in which all trials differ, not only those that are listed; none with `summary`."
    )
    decided: list["ColumnOut"] = Field([], description="Fields that differ too, but follow from one of `columns`.")
    common: ByPath = Field({}, description="What all trials share, by path; empty with `summary`.")
