"""What goes out of the API about leaderboards and the paper's tables."""

from typing import Annotated, Any, Literal

from pydantic import Field

from service.schemas.answers import ByPath, Out
from service.schemas.trials import Cell, ColumnOut

CellConfig = Annotated[dict[str, Any], Field(description="Every field of the cell's trials but the seed.")]
Protocol = Annotated[str, Field(description="Fingerprint of how it was measured.")]


class MissingOut(Out):
    """A trial that adds nothing to its cell, and why."""

    trial_id: int = Field(description="Of several that compute the same: one that is not final, else the newest.")
    seed: int = Field(description="The trial's.")
    state: str = Field(description="The trial's, or `invalid` (its result cannot be true), or `other_protocol`.")
    failure: str | None = Field(None, description="Class of what went wrong.")


class SpreadOut(Out):
    """One metric over the seeds of a cell."""

    seeds: int = Field(description="Results that have this metric.")
    mean: float = Field(description="Over these results.")
    std: float | None = Field(description="Sample standard deviation (n - 1); null for one seed.")
    min: float = Field(description="Least of these results.")
    max: float = Field(description="Largest of these results.")


class ChangeOut(Out):
    """What sets a row apart from the baseline in one metric."""

    mean: float = Field(description="The row's mean less the baseline's.")
    error: float | None = Field(description="Standard error of `mean`, from both spreads; null: one has a single seed.")


class GroupOut(Out):
    """The cells of a board of which a row is the best."""

    field: str = Field(description="The field that `group_by` names, dotted.")
    value: Any = Field(description="The value of `field` that these cells share.")
    cells: int = Field(description="Cells of the group that have the ranked metric, the row's among them.")


class PrintedOut(Out):
    """A value that the paper prints, or that its formulas predict."""

    mean: float = Field(description="In the unit of our metric: a fraction where the paper prints percent.")
    spread: float | None = Field(description="What the paper prints behind ±, in the same unit; null: nothing.")
    comparable: bool = Field(description="False: ours is measured in another way.")
    decimals: int | None = Field(None, description="With which it is printed, in the unit of tables for people.")


class PaperReferenceOut(Out):
    """A row of the paper's tables that a cell corresponds to."""

    table: str = Field(description="Name of the table, such as `table2`.")
    row: dict[str, Any] = Field(description="The printed row's labels, by name.")
    values: dict[str, PrintedOut] = Field(description="The printed row's values, by metric or ratio (`speedup`).")
    notes: list[str] = Field(description="In what the two were got differently, in words.")


class RowOut(Out):
    """One cell of a grid."""

    place: int = Field(description="From 1 on within the board; equal means share one, `complete` rows stand first.")
    cell: Cell
    config: CellConfig
    trials: int = Field(description="Its different trials, with a result or without.")
    seeds: int = Field(description="Its trials that have a valid result under this protocol.")
    complete: bool = Field(description="Whether every trial has the ranked metric under this protocol.")
    missing_seeds: list[int] = Field(description="Of trials without a result under this protocol.")
    metrics: dict[str, SpreadOut] = Field(description="Metrics that no seed has are absent.")
    group: GroupOut | None = Field(None, description="Of which it is the best; null without `group_by`.")
    on_front: bool | None = Field(
        None,
        description="Whether it has all metrics of `pareto` and no other cell beats it in them; null without `pareto`.",
    )
    difference: dict[str, ChangeOut] | None = Field(
        None, description="By metric, to the cell that `baseline` names; null where none is, or not on the board."
    )
    paper: list[PaperReferenceOut] = Field([], description="The paper's rows that it corresponds to.")
    fields: ByPath = Field({}, description="Its values in the board's `columns` and `decided`, by path.")
    missing: list[MissingOut] = Field([], description="The trials without a result under this protocol, and why.")
    best: list[str] = Field(
        [],
        description="Metrics in which no row shown beats it beyond both errors (Welch's t-test, 5 %), "
        "where some row is beaten.",
    )


class DifferenceOut(Out):
    """A field in which two protocols differ."""

    field: str = Field(description="Of their records, dotted.")
    here: Any = Field(description="Its value on this board; null: the record lacks it.")
    there: Any = Field(description="Its value on the first board; null: the record lacks it.")


class PivotCellOut(Out):
    """A place of a matrix: all cells of the board that share two fields' values and have the ranked metric.

    On the first board cells that have no result at all are counted, too.
    """

    mean: float | None = Field(description="Of the ranked metric, over the results that have it; null: there is none.")
    std: float | None = Field(description="Sample deviation over these results; null for one.")
    seeds: int = Field(description="Results of `mean`: valid ones under this protocol that have the metric.")
    trials: int = Field(
        description="Trials of all cells together, with a result or without; those in `missing` among them."
    )
    cells: int = Field(description="How many cells with a result it has.")
    missing: dict[str, int] = Field(
        {}, description="Trials of cells that have no result on any board, by what became of them; on the first board."
    )


class PivotOut(Out):
    """A matrix over two fields."""

    down: ColumnOut = Field(description="The field whose values its rows have.")
    across: ColumnOut = Field(description="The field whose values its columns have.")
    rows: list[Any] = Field(description="Values of `down`.")
    columns: list[Any] = Field(description="Values of `across`.")
    cells: list[list[PivotCellOut | None]] = Field(description="By row; null: nothing was measured there.")


class BoardOut(Out):
    """Rows of one protocol: only these are ranked together."""

    protocol: Protocol
    record: dict[str, Any] = Field(description="How its results were measured, part by part.")
    rows: list[RowOut] = Field(description="Those of this page, in the order asked for, best first by default.")
    total: int = Field(description="Rows of all pages; with `group_by` the groups.")
    unmeasured: int = Field(description="Cells with results that lack the ranked metric.")
    apart: list[DifferenceOut] = Field(description="Why not on the first board: fields here, and there.")
    front: list[str] | None = Field(
        None, description="Cells on the Pareto front, the first hundred of them, best first; null without `pareto`."
    )
    next: str | None = Field(None, description="The cursor of this board's next page; name its protocol too.")
    columns: list[ColumnOut] = Field([], description="The fields in which the rows shown differ, or those asked for.")
    common: ByPath = Field({}, description="What the rows shown share, by path.")
    decided: list[ColumnOut] = Field(
        [], description="Fields that differ too, but follow from one of `columns`; named, they are columns."
    )
    pivot: PivotOut | None = Field(None, description="The matrix that `pivot` asks for, over all rows of the board.")
    baseline: CellConfig | None = Field(None, description="The cell to which differences are; null without one here.")


class HoleOut(Out):
    """A cell that has no valid result."""

    cell: Cell
    config: CellConfig
    trials: int = Field(description="Its different trials.")
    missing: list[MissingOut] = Field([], description="Its trials, the first thousand, and why each has none.")


class InvalidOut(Out):
    """A result that cannot be true: it counts nowhere."""

    trial_id: int = Field(description="The trial whose result it is.")
    cell: Cell
    config: CellConfig
    protocol: Protocol
    reasons: list[str] = Field(description="What cannot be true, in words.")


class LeaderboardOut(Out):
    """Leaderboards of a data set, one per protocol, the cells without a result and the results that do not count."""

    dataset: str = Field(description="The data set that was asked for.")
    metric: str = Field(description="The metric by which rows are ranked.")
    boards: list[BoardOut] = Field(description="One per protocol, that with most rows first.")
    holes: list[HoleOut] = Field(description="The first hundred.")
    hole_count: int = Field(0, description="All cells without a valid result.")
    invalid: list[InvalidOut] = Field([], description="The first hundred.")
    invalid_count: int = Field(0, description="All results that cannot be true.")
    columns: list[ColumnOut] = Field([], description="The fields that tell apart all rows, holes and invalid results.")
    common: ByPath = Field({}, description="What all of these share, by path.")
    decided: list[ColumnOut] = Field([], description="Fields that differ too, but follow from one of `columns`.")


class TableRowOut(Out):
    """A row as printed and as measured."""

    labels: dict[str, Any] = Field(description="What the paper's row is called, by the names in the table's `labels`.")
    status: str = Field(description="`complete`, or in words what is missing.")
    cell: str | None = Field(description="Whose results are ours; null: none has any under the table's protocol.")
    seeds: int = Field(description="Results of `cell` that count here.")
    trials: int = Field(description="Different trials of `cell`; where that is null, of all cells that belong here.")
    metrics: dict[str, SpreadOut] = Field(description="Ours, by metric; those that no seed has are absent.")
    speedup: float | None = Field(description="Time of the uncompressed network's row over that of this one.")
    memory_saving: float | None = Field(None, description="Its memory over that of this one.")
    paper: dict[str, PrintedOut] = Field(description="Theirs, by the names in the table's `columns`.")
    notes: list[str] = Field(description="In what the two differ, in words, but for what the table's `notes` say.")


class TableOut(Out):
    """A table of the paper, its numbers beside ours, which are of one protocol per data set."""

    name: str = Field(description="As in its address.")
    title: str = Field(description="What it shows.")
    labels: list[str] = Field(description="Names of the labels by which its rows are told apart, in their order.")
    columns: list[str] = Field(description="Names of its metrics and ratios (`speedup`, `memory_saving`), in order.")
    protocols: dict[str, str] = Field(description="Data set: protocol. None of those of which nothing was measured.")
    other_protocols: list[str] = Field(description="Under which its cells have results that are not shown.")
    rows: list[TableRowOut] = Field(description="In the paper's order.")
    beside: Literal["paper", "predicted"] = Field(
        "paper", description="What the values in `paper` are: printed, or predicted by the paper's formulas."
    )
    notes: list[str] = Field(description="What is true of all rows that were measured, in words.")


class AxisOut(Out):
    """A field in which the trials of an experiment differ."""

    field: str = Field(description="Its path; empty where there is none.")
    name: str = Field(description="Its shortest name.")
    values: list[Any] = Field(description="Its values in order, null first.")


class FacetOut(Out):
    """One matrix of several."""

    fields: ByPath = Field(description="What its places share beside x and y, by path.")


class PlacesOut(Out):
    """The places of a matrix by column, all of one length."""

    trial: list[int] = Field(description="The first trial of each: by it a place is known.")
    facet: list[int] = Field([], description="Index in `facets`.")
    x: list[int] = Field([], description="Index in the values of `x`.")
    y: list[int] = Field([], description="Index in the values of `y`.")
    state: list[str] = Field(
        description="`succeeded` where all trials have a result, else what one of them is: `running`, `queued`, "
        "`failed`, `diverged`, `invalid`, `cancelled`, `early_stopped`, `other_protocol` or `unmeasured`."
    )
    value: list[float | None] = Field(description="What the results of the seeds make; null: there is none.")
    deviation: list[float | None] = Field(description="Sample standard deviation over seeds; null for one.")
    seeds: list[int] = Field(description="Results that `value` is of.")
    trials: list[int] = Field(description="Trials of the place.")
    protocol: list[int | None] = Field(description="Index in `protocols`: of all results of `value`.")


class MatrixOut(Out):
    """A metric over two fields of an experiment."""

    experiment_id: int = Field(description="The experiment's.")
    metric: str = Field(description="The metric that the places show.")
    seeds: str = Field(description="How seeds are put together: `mean`, `median`, `min`, `max` or `std`.")
    x: AxisOut | None = Field(None, description="The field along x. Left out with `trials`.")
    y: AxisOut | None = Field(None, description="The field along y. Left out with `trials`.")
    axes: list[AxisOut] = Field([], description="All fields in which its trials differ. Left out with `trials`.")
    facets: list[FacetOut] = Field([], description="The matrices side by side. Left out with `trials`.")
    decided: list[str] = Field([], description="Axes that x, y and the facets decide. Left out with `trials`.")
    protocols: list[str] = Field(description="Fingerprints of how results were measured, the commonest first.")
    places: PlacesOut = Field(description="Its places; with `trials` without `facet`, `x` and `y`.")
    newest_event: int | None = Field(None, description="The experiment's last event then. Left out with `trials`.")


class PlaneOut(Out):
    """All cells of one board in two metrics, by column."""

    dataset: str = Field(description="The data set that was asked for.")
    x_metric: str = Field(description="The metric along x.")
    y_metric: str = Field(description="The metric along y.")
    protocol: str | None = Field(description="Under which they were measured; null: no cell has both metrics.")
    total: int = Field(description="Cells that have both metrics; of more than 5000 the best in x and the front.")
    columns: list[ColumnOut] = Field(description="The fields in which the cells differ.")
    decided: list[ColumnOut] = Field([], description="Fields that differ too, but follow from one of `columns`.")
    cell: list[str] = Field(description="The fingerprint of each cell.")
    x: list[float] = Field(description="Means over seeds.")
    x_error: list[float | None] = Field(description="Sample standard deviations; null for one seed.")
    y: list[float] = Field(description="Means over seeds.")
    y_error: list[float | None] = Field(description="Sample standard deviations; null for one seed.")
    seeds: list[int] = Field(description="Results of each cell.")
    trials: list[int] = Field([], description="Different trials of each, with a result or without.")
    front: list[bool] = Field(description="Whether no other cell is better in both; with a temperature always false.")
    fields: dict[str, list[Any]] = Field(description="By path, the values in `columns` and `decided`.")
