"""Trials, epochs and leaderboards as pandas DataFrames. pandas is imported when one is made."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from service.leaderboards.boards import counted_said
from service.leaderboards.value_texts import exact_text
from service.schemas.leaderboards import BoardOut, PivotCellOut, PivotOut
from service.schemas.trial_tables import EVERY, Shown
from service.schemas.trials import EpochOut, ResultOut, TrialOut
from service.specs.columns import columns_of, value_of
from ttsv.metrics.catalog import METRICS

if TYPE_CHECKING:
    import pandas as pd

RESULT_COLUMNS = tuple(ResultOut.model_fields)
_TRIAL_COLUMNS = (
    "id",
    "experiment_id",
    "number",
    "state",
    "attempts",
    "epoch",
    "epochs",
    "run_seconds",
    "best_val_accuracy",
    "failure",
    "error",
    "started_at",
    "finished_at",
    "cell",
    "fingerprint",
    "source_trial_id",
)

# What counts something stays whole beside missing values.
_WHOLE = (*(name for name, info in METRICS.items() if info.whole), "selected_epoch", "source_trial_id")

_PLACE = {"mean": "float", "std": "float", "seeds": "Int64", "trials": "Int64", "missing": "object"}
"""What a place of a matrix has, and as which kind of column."""


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by dotted path, as in a grid: `training.lr`."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def result_frame(trials: Iterable[TrialOut], shown: Shown = EVERY) -> "pd.DataFrame":
    """One row per trial, indexed by its id: what it is, its flattened configuration, and every metric of its result.

    `shown` chooses among the fields of the configuration. `attrs["columns"]` are those in which trials differ,
    `attrs["common"]` has what they share. Metrics are missing where a trial has no result, or one that cannot be true
    (`valid`, `violations`), or its evaluation did not ask for them; fractions are in [0, 1].
    """
    import pandas as pd

    rows, configs, names = [], [], dict.fromkeys(shown.chosen)
    for trial in trials:
        own = {name: getattr(trial, name) for name in _TRIAL_COLUMNS} | {"state": trial.state.value}
        # Strings tell a data frame too little of lists (`milestones`): they stay what they are.
        config = {path: value_of(trial.config, path) for path in shown.chosen} or dict(flat(trial.config))
        names |= dict.fromkeys(config)
        result = {} if trial.result is None else trial.result.model_dump()
        if trial.result is not None and not trial.result.valid:  # else means over seeds would take its numbers in
            result |= dict.fromkeys(METRICS)
        rows.append(own | config | result)
        configs.append(trial.config)
    fields = [name for name in names if name not in shown.hidden]
    frame = pd.DataFrame(rows, columns=[*_TRIAL_COLUMNS, *fields, *RESULT_COLUMNS])
    frame = frame.astype(dict.fromkeys(_WHOLE, "Int64")).set_index("id")
    shape = columns_of(configs, hidden=shown.hidden)
    return _told(frame, [column.field for column in shape.fields], shape.common)


def board_frame(board: BoardOut) -> "pd.DataFrame":
    """One row per cell shown, indexed by it: its place, the fields in which rows differ by short name, how many of its
    trials have results, and of each metric the mean under its name and the deviation as `accuracy_std`. A metric that
    some of a row's results lack has the number of those that have it, too, as `accuracy_seeds`.

    `attrs["columns"]` names these fields, `attrs["common"]` has what the rows share.
    """
    import pandas as pd

    rows, differing = [], [*board.columns, *board.decided]
    for row in board.rows:
        own = {column.name: row.fields[column.field] for column in differing}
        counts = {"cell": row.cell, "place": row.place, **own, "seeds": row.seeds, "trials": row.trials}
        means = {name: one.mean for name, one in row.metrics.items()}
        others = {f"{name}_std": one.std for name, one in row.metrics.items()}
        rows.append(counts | means | others | {f"{name}_seeds": one.seeds for name, one in row.metrics.items()})
    names = ["cell", "place", *(column.name for column in differing), "seeds", "trials"]
    metrics = dict.fromkeys(name for row in board.rows for name in row.metrics)
    lacking = {name for row in board.rows for name, one in row.metrics.items() if one.seeds < row.seeds}
    names += [name for one in metrics for name in (one, f"{one}_std", *([f"{one}_seeds"] if one in lacking else []))]
    frame = pd.DataFrame(rows, columns=names).astype({f"{name}_seeds": "Int64" for name in lacking}).set_index("cell")
    return _told(frame, [column.name for column in differing], board.common)


def pivot_frame(pivot: PivotOut) -> "pd.DataFrame":
    """A row for each value of one field, and for each of the other five columns: mean, std, seeds, trials, missing.

    `frame.xs("mean", axis=1, level=1)` is the matrix. Numbers are missing where nothing was measured; `missing` says
    what became of the trials of cells without a result. A field without a value is `none`, a list its text.
    """
    import pandas as pd

    down, across = ([_label(one) for one in values] for values in (pivot.rows, pivot.columns))
    columns = pd.MultiIndex.from_product([across, _PLACE], names=[pivot.across.name, None])
    rows = [[value for cell in cells for value in _of_place(cell)] for cells in pivot.cells]
    frame = pd.DataFrame(rows, index=pd.Index(down, name=pivot.down.name), columns=columns)
    return frame.astype({column: kind for column in columns if (kind := _PLACE[column[1]]) != "object"})


def _of_place(cell: PivotCellOut | None) -> list[Any]:
    if cell is None:
        return [None] * len(_PLACE)
    return [cell.mean, cell.std, cell.seeds, cell.trials, counted_said(cell.missing)]


def _label(value: Any) -> Any:
    """A field's value as an index can have it."""
    return "none" if value is None else exact_text(value) if isinstance(value, list) else value


def _told(frame: "pd.DataFrame", columns: list[str], common: Mapping[str, Any]) -> "pd.DataFrame":
    """The frame with what tells its rows apart, and what they share."""
    frame.attrs |= {"columns": columns, "common": dict(common)}
    return frame


def epoch_frame(epochs: Iterable[EpochOut]) -> "pd.DataFrame":
    """One row per epoch, indexed by its number."""
    import pandas as pd

    columns = list(EpochOut.model_fields)
    return pd.DataFrame([epoch.model_dump() for epoch in epochs], columns=columns).set_index("epoch")
