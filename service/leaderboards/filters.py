"""What is asked of a leaderboard: which trials it is about, and how its rows are ranked and shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, select

from service.database import Experiment, Score, Tag, Trial
from service.leaderboards.boards import Position
from service.leaderboards.conditions import Condition
from service.leaderboards.counted_results import EVERYONE
from service.leaderboards.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class Filters:
    """None: no filter. `rank` "none" asks for cells that are not decomposed; all conditions of `where` must hold.

    `experiment_id` and `tag` choose among trials, so that other seeds of a cell may be left out; the others choose
    whole cells. `min_seeds` is of results under one protocol.
    """

    experiment_id: int | None = None
    tag: str | None = None
    model: str | None = None
    layer: str | None = None
    constraint: str | None = None
    rank: float | str | None = None
    where: Sequence[Condition] = ()
    protocol: str | None = None
    min_seeds: int = 1

    @property
    def choose_trials(self) -> bool:
        """Whether other seeds of a cell may be left out, so that stored scores do not serve."""
        return self.experiment_id is not None or self.tag is not None

    def of_cells(self, kept: type[Trial] | type[Score] = Trial) -> list[ColumnElement[bool]]:
        """Conditions on a cell's trial, or on its score: there those that its columns answer."""
        named = {"model": self.model, "layer": self.layer, "constraint": self.constraint}
        found: list[ColumnElement[bool]] = [
            getattr(kept, name) == value for name, value in named.items() if value is not None
        ]
        if self.rank is not None:
            found.append(kept.rank.is_(None) if self.rank == "none" else kept.rank == self.rank)
        return found + [condition.of(kept) for condition in self.where if kept is Trial or condition.on_column]

    def of_trials(self, dataset: str, scope: int) -> list[ColumnElement[bool]]:
        """Conditions on trials joined with their experiments: those of the data set that are to be seen."""
        return [Trial.dataset == dataset, *self.of_cells(), *self.of_experiments(scope)]

    def of_experiments(self, scope: int) -> list[ColumnElement[bool]]:
        """The part of these conditions that does not say what is trained."""
        found: list[ColumnElement[bool]] = [Experiment.archived_at.is_(None)]
        if scope:
            found.append(Experiment.project_id == scope)
        if self.experiment_id is not None:
            found.append(Trial.experiment_id == self.experiment_id)
        if self.tag is not None:
            tagged = select(Tag.experiment_id).where(Tag.name == self.tag)
            found.append(Trial.experiment_id.in_(tagged))
        return found


@dataclass(frozen=True, kw_only=True)
class OneCell(Filters):
    """Besides: only this cell."""

    cell: str

    def of_cells(self, kept: type[Trial] | type[Score] = Trial) -> list[ColumnElement[bool]]:
        """Conditions on a cell's trial, or on its score: there those that its columns answer."""
        return [kept.cell == self.cell, *super().of_cells(kept)]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a data set's leaderboards.

    `columns` are the metrics that rows have beside the ranked one (none named: all of them). `fields` are the columns
    that say which cell a row is (none named: those in which the rows differ), `hidden` fields are not shown.
    `limit` rows of every board, those after `after` (of one board: its protocol must be among the filters). `group_by`
    leaves the best cell of every group of a field's values; `sort` orders the rows by a field (`-` before it: largest
    first), not by the metric; `pivot` asks for a matrix over two fields besides. `front` marks the cells that no other
    beats in all of these metrics. `baseline` is the cell to which differences are taken. `scope` is a project, or 0.
    """

    dataset: str
    metric: Metric = Metric.ACCURACY
    columns: tuple[Metric, ...] = ()
    filters: Filters = field(default_factory=Filters)
    limit: int = 100
    after: Position | None = None
    group_by: str | None = None
    sort: str | None = None
    pivot: tuple[str, str] | None = None
    fields: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    front: tuple[Metric, ...] = ()
    baseline: str | None = None
    scope: int = EVERYONE

    @property
    def shown(self) -> list[Metric]:
        """The metrics of every row, in the order of tables."""
        return [m for m in Metric if not self.columns or m == self.metric or m in self.columns]

    def of_trials(self) -> list[ColumnElement[bool]]:
        """Conditions on trials joined with their experiments."""
        return self.filters.of_trials(self.dataset, self.scope)
