"""What goes out of the API about leaderboards and the paper's tables."""

from typing import Any, Literal

from pydantic import Field

from service.schemas.experiments import Out


class ColumnOut(Out):
    """A field in which rows differ: its dotted path, and a short name that no other field has."""

    field: str = Field(description="Dotted, as in a grid.")
    name: str = Field(description="The heading of tables for people.")


class MissingOut(Out):
    """A trial that adds nothing to its cell, and why."""

    trial_id: int
    seed: int
    state: str = Field(description="The trial's, or `invalid` (its result cannot be true), or `other_protocol`.")
    failure: str | None = Field(None, description="Class of what went wrong.")


class SpreadOut(Out):
    """One metric over seeds; `std` is the sample standard deviation (n - 1), null for one seed."""

    seeds: int = Field(description="Results that have this metric.")
    mean: float
    std: float | None
    min: float
    max: float


class ChangeOut(Out):
    """A row's mean less the baseline's; `error` is its standard error from both spreads, null where one is unknown."""

    mean: float
    error: float | None


class GroupOut(Out):
    """The row is the best of so many `cells` whose `field` has this value."""

    field: str
    value: Any
    cells: int


class PrintedOut(Out):
    """A value of the paper, in our units; not `comparable`: measured in another way."""

    mean: float
    spread: float | None
    comparable: bool
    decimals: int | None = Field(None, description="With which it is printed, in the unit of tables for people.")


class PaperReferenceOut(Out):
    """A row of the paper's tables that a cell corresponds to. `notes` say how the two were got differently."""

    table: str
    row: dict[str, Any]
    values: dict[str, PrintedOut]
    notes: list[str]


class RowOut(Out):
    """One cell of a grid: `seeds` of its `trials` have valid results."""

    place: int
    cell: str
    config: dict[str, Any]
    trials: int
    seeds: int
    complete: bool
    missing_seeds: list[int] = Field(description="Of trials without a result under this protocol.")
    metrics: dict[str, SpreadOut] = Field(description="Metrics that no seed has are absent.")
    group: GroupOut | None = None
    on_front: bool | None = Field(None, description="Whether no other cell is better in all metrics of `pareto`.")
    difference: dict[str, ChangeOut] | None = Field(None, description="To the cell that `baseline` names.")
    paper: list[PaperReferenceOut] = Field([], description="The paper's rows that it corresponds to.")
    fields: dict[str, Any] = Field({}, description="Its values in the board's columns, by path.")
    missing: list[MissingOut] = Field([], description="The trials without a result under this protocol, and why.")
    best: list[str] = Field(
        [],
        description="Metrics in which no row shown beats it beyond both errors (Welch's t-test, 5 %), "
        "where some row is beaten.",
    )


class DifferenceOut(Out):
    """A field in which two protocols differ."""

    field: str
    here: Any
    there: Any


class PivotCellOut(Out):
    """The ranked metric over all results of the `cells` that share two fields' values."""

    mean: float
    std: float | None = Field(description="Sample deviation over the results; null for one.")
    seeds: int = Field(description="Results there are, of all cells together.")
    trials: int = Field(description="Trials of all cells together.")
    cells: int


class PivotOut(Out):
    """A matrix over two fields."""

    down: ColumnOut
    across: ColumnOut
    rows: list[Any] = Field(description="Values of `down`.")
    columns: list[Any] = Field(description="Values of `across`.")
    cells: list[list[PivotCellOut | None]] = Field(description="By row; null: nothing was measured there.")


class BoardOut(Out):
    """Rows of one protocol: only these are ranked together."""

    protocol: str
    record: dict[str, Any]
    rows: list[RowOut]
    total: int = Field(description="Rows of all pages.")
    unmeasured: int = Field(description="Cells with results that lack the ranked metric.")
    apart: list[DifferenceOut] = Field(description="Why not on the first board: fields here, and there.")
    front: list[str] | None = Field(None, description="Cells on the Pareto front, the first hundred of them.")
    next: str | None = Field(None, description="The cursor of this board's next page; name its protocol too.")
    columns: list[ColumnOut] = Field([], description="The fields in which the rows shown differ, or those asked for.")
    common: dict[str, Any] = Field({}, description="What the rows shown share, by path.")
    pivot: PivotOut | None = Field(None, description="The matrix that `pivot` asks for, over all rows of the board.")


class HoleOut(Out):
    """A cell that has no valid result."""

    cell: str
    config: dict[str, Any]
    trials: int
    missing: list[MissingOut] = Field([], description="Its trials, and why each has none.")


class InvalidOut(Out):
    """A result that cannot be true, and why: it counts nowhere."""

    trial_id: int
    cell: str
    config: dict[str, Any]
    protocol: str
    reasons: list[str]


class LeaderboardOut(Out):
    """Leaderboards of a data set, one per protocol, the cells without a result and the results that do not count."""

    dataset: str
    metric: str
    boards: list[BoardOut]
    holes: list[HoleOut] = Field(description="The first hundred.")
    hole_count: int = 0
    invalid: list[InvalidOut] = Field([], description="The first hundred.")
    invalid_count: int = 0
    columns: list[ColumnOut] = Field([], description="The fields that tell apart all rows, holes and invalid results.")
    common: dict[str, Any] = Field({}, description="What all of these share, by path.")


class TableRowOut(Out):
    """A row as printed and as measured. `status`: complete, or what is missing."""

    labels: dict[str, Any]
    status: str
    cell: str | None
    seeds: int
    trials: int
    metrics: dict[str, SpreadOut]
    speedup: float | None = Field(description="Time of the uncompressed network's row over that of this one.")
    memory_saving: float | None = Field(None, description="Its memory over that of this one.")
    paper: dict[str, PrintedOut]
    notes: list[str]


class TableOut(Out):
    """A table of the paper, its numbers beside ours, which are of one protocol per data set."""

    name: str
    title: str
    labels: list[str]
    columns: list[str]
    protocols: dict[str, str] = Field(description="Data set: protocol. None of those of which nothing was measured.")
    other_protocols: list[str]
    rows: list[TableRowOut]
    beside: Literal["paper", "predicted"] = Field(
        "paper", description="What the values in `paper` are: printed, or predicted by the paper's formulas."
    )
    notes: list[str]
