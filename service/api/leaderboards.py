"""/v1/leaderboards."""

import difflib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import Field
from sqlalchemy.orm import Session

from service.access.security import Principal
from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Cursor, Db
from service.api.http.examples import kept
from service.api.http.formats import AskedFormat, forms
from service.api.http.problems import RESPONSES, refusals
from service.api.http.query_filters import FieldColumns, HiddenFields, Rank
from service.api.http.responses import Answer
from service.api.openapi_examples.leaderboards import LEADERBOARD, LEADERBOARD_TEXT, PLANE
from service.database.engine import Database
from service.database.pagination import decoded, encoded
from service.errors import FieldProblem, NotFoundError, QueryError
from service.experiments import store
from service.leaderboards.boards import Leaderboard, Position
from service.leaderboards.conditions import condition
from service.leaderboards.counted_results import EVERYONE
from service.leaderboards.filters import Filters, Question
from service.leaderboards.leaderboard import leaderboard
from service.leaderboards.metrics import HEADLINE, Metric
from service.leaderboards.records import board_records, pivot_records
from service.leaderboards.scatter import plane
from service.leaderboards.sheets import board_sheets, measured_metrics
from service.paper.reference import references
from service.schemas.leaderboards import LeaderboardOut, PlaneOut
from service.schemas.trial_tables import Shown
from service.specs.columns import cell_field
from service.specs.patterns import FIELD, FINGERPRINT, METRICS, ORDER, PRINTABLE, TWO_FIELDS
from ttsv.data.catalog import DatasetName

router = APIRouter(prefix="/v1/leaderboards", tags=["leaderboards"], responses=RESPONSES | refusals(406))

_PLANE_COLUMNS = ("cell", "x", "x_error", "y", "y_error", "seeds", "trials", "front")
Text = Annotated[str | None, Field(max_length=200, pattern=PRINTABLE)]
ShownMetrics = Annotated[
    str | None,
    Query(
        max_length=1000,
        pattern=METRICS,
        description=f"Metrics to be shown, separated by commas; all: every one; by default {', '.join(HEADLINE)}.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class AskedFilters(Filters):
    """The filters of a request."""

    experiment_id: Annotated[
        int | None, Query(alias="experiment", ge=1, le=MAX_ID, description="Only this experiment's trials.")
    ] = None
    tag: Annotated[str | None, Query(max_length=64, pattern=PRINTABLE, description="Of experiments.")] = None
    model: Annotated[Text, Query(description="Only of this network.")] = None
    layer: Annotated[Text, Query(description="Only of this kind of layer.")] = None
    constraint: Annotated[Text, Query(description="Only under this constraint.")] = None
    rank: Annotated[Rank | None, Query(description="`none`: not decomposed.")] = None
    protocol: Annotated[str | None, Query(pattern=FINGERPRINT, description="Only this protocol's board.")] = None
    min_seeds: Annotated[int, Query(ge=1, le=1_000_000, description="Cells with as many results at least.")] = 1
    where: Annotated[
        list[Annotated[str, Field(max_length=2000)]] | None,
        Query(
            max_length=20,
            description="A condition on any field of a cell; several must all hold. =, !=, <, <=, >, >=, in, not in.",
            examples=[["training.lr<=0.1", "rank in (192, 256)"]],
        ),
    ] = None  # type: ignore[assignment] # texts as they come in, conditions once they are read

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", tuple(map(condition, self.where or ())))  # raises QueryError


AskedBoards = Annotated[AskedFilters, Depends()]


@dataclass(frozen=True, kw_only=True)
class _Ranking:
    """What rows are ranked by, what they show, and which of them are wanted."""

    metric: Annotated[Metric, Query(description="What the rows are ranked by.")] = Metric.ACCURACY
    metrics: ShownMetrics = None
    columns: FieldColumns = None
    hide: HiddenFields = None
    group_by: Annotated[
        str | None,
        Query(max_length=100, pattern=FIELD, description="Only the best cell of every value of this field."),
    ] = None
    sort: Annotated[
        str | None,
        Query(
            max_length=100,
            pattern=ORDER,
            description="In the order of this field, not of the metric; - before it: largest first.",
        ),
    ] = None
    pivot: Annotated[
        str | None,
        Query(
            max_length=200,
            pattern=TWO_FIELDS,
            description="Two fields: the metric as a matrix over both, seeds of all cells in a place together.",
            examples=["rank,lambda_ort"],
        ),
    ] = None
    pareto: Annotated[
        str | None,
        Query(
            max_length=1000,
            pattern=METRICS,
            description="Two or more metrics: marks the cells that no other beats in all of them.",
            examples=["accuracy,compression"],
        ),
    ] = None
    baseline: Annotated[
        str | None, Query(pattern=FINGERPRINT, description="A cell: every row's differences to it are given.")
    ] = None
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many rows of every board.")] = 100
    cursor: Cursor = None

    def question(self, dataset: str, filters: Filters, scope: int) -> Question:
        """The question to the leaderboards; raises `QueryError`."""
        front = metrics_named("pareto", self.pareto)
        if len(front) == 1:
            raise QueryError([FieldProblem("pareto", "name two metrics or more, separated by commas")])
        _refuse_without_best("pareto", front, "no cell beats another in it; leave it out")
        if self.cursor is not None and filters.protocol is None:
            raise QueryError([FieldProblem("cursor", "a cursor is of one board: name its protocol too")])
        shown = () if self.metrics == "all" else metrics_named("metrics", self.metrics)
        group_by = None if self.group_by is None else grouping(self.group_by, self.metric)
        sort = None if self.sort is None else sorting(self.sort)
        after = None if self.cursor is None else _decoded(self.cursor, _order(self.metric, group_by, sort))
        fields = Shown.named(self.columns, self.hide, of_cells=True)
        return Question(
            dataset=dataset,
            metric=self.metric,
            columns=HEADLINE if self.metrics is None else shown,
            filters=filters,
            limit=self.limit,
            after=after,
            group_by=group_by,
            sort=sort,
            pivot=None if self.pivot is None else pivoting(self.pivot),
            fields=fields.chosen,
            hidden=fields.hidden,
            front=front,
            baseline=self.baseline,
            scope=scope,
        )


@contextmanager
def answering(database: Database, who: Principal, question: Question) -> Iterator[Session]:
    """A session that answers a question. Raises `NotFoundError` where there is no such data set or experiment."""
    if fix := DatasetName().fix(question.dataset):
        raise NotFoundError(f"there is no data set {question.dataset!r}: the name {fix}")
    with database.read() as session:
        if question.filters.experiment_id is not None:
            store.get_experiment(session, question.filters.experiment_id, project_id=who.project_id)
        yield session


@router.get(
    "/{dataset}",
    operation_id="getLeaderboard",
    responses=forms(LEADERBOARD, LEADERBOARD_TEXT),
    response_model=LeaderboardOut,
)
def show(
    dataset: Annotated[str, Path(max_length=200, description="The data set.", examples=["digits"])],
    database: Db,
    who: Reader,
    ranking: Annotated[_Ranking, Depends()],
    asked: Annotated[AskedFormat, Depends()],
    filters: AskedBoards,
) -> Response:
    """Cells ranked by the mean over their seeds, one board per protocol: other protocols' numbers are shown apart.

    Complete cells stand before those that lack seeds. Equal means share a place and stand in an order of their cells,
    whatever is asked for. A trial that ran more than once counts with its newest result; early-stopped trials, invalid
    results and archived experiments do not count. As JSON, CSV, Markdown or LaTeX, by `format` or Accept.
    """
    question = ranking.question(dataset, filters, who.project_id or EVERYONE)
    with answering(database, who, question) as session:
        found = leaderboard(session, question, references)
    chosen = () if ranking.metrics in (None, "all") else (ranking.metric, *question.columns)
    wanted = tuple(metric for metric in Metric if metric in chosen)
    return asked.answer(
        lambda: _plain(found, question),
        lambda: board_sheets(
            found, dataset, ranking.metric, measured_metrics(found) if ranking.metrics == "all" else wanted
        ),
        lambda: (
            pivot_records(found, question.pivot)
            if question.pivot
            else board_records(found, wanted, chosen=question.fields, hidden=question.hidden)
        ),
    )


@router.get(
    "/{dataset}/plane",
    operation_id="getPlane",
    responses=kept(PLANE),
    response_model=PlaneOut,
)
def show_plane(
    dataset: Annotated[str, Path(max_length=200, description="The data set.", examples=["digits"])],
    answer: Answer,
    database: Db,
    who: Reader,
    filters: AskedBoards,
    x: Annotated[Metric, Query(description="The metric along x.")] = Metric.COMPRESSION,
    y: Annotated[Metric, Query(description="The metric along y.")] = Metric.ACCURACY,
) -> Response:
    """All cells of the board with most rows in x that has both metrics, or of a protocol's, with their Pareto front."""
    if x is y:
        raise QueryError([FieldProblem("y", "must be another metric than x")])
    question = Question(dataset=dataset, metric=x, filters=filters, scope=who.project_id or EVERYONE)
    with answering(database, who, question) as session:
        found = plane(session, question, x, y)
    about = {"dataset": dataset, "x_metric": x, "y_metric": y}
    if found is None:
        columns: dict[str, object] = {name: [] for name in _PLANE_COLUMNS}
        return answer(about | {"protocol": None, "total": 0, "columns": [], "decided": [], "fields": {}} | columns)
    named, decided = (
        [{"field": one.field, "name": one.name} for one in some]
        for some in (found.columns.fields, found.columns.decided)
    )
    return answer(about | vars(found) | {"columns": named, "decided": decided})


def _plain(found: Leaderboard, question: Question) -> dict[str, object]:
    """The answer as `LeaderboardOut` has it."""
    order = _order(question.metric, question.group_by, question.sort)
    boards = [vars(b) | {"next": None if b.next is None else encoded([order, *b.next])} for b in found.boards]
    return {"dataset": question.dataset, "metric": question.metric, **vars(found), "boards": boards}


def metrics_named(field: str, names: str | None) -> tuple[Metric, ...]:
    """The metrics that a parameter names; raises `QueryError`."""
    listed = list(dict.fromkeys(names.split(","))) if names else []
    if unknown := [name for name in listed if name not in set(Metric)]:
        near = difflib.get_close_matches(unknown[0].lower(), list(Metric), 1)
        nearest = "".join(f" the nearest is {name};" for name in near)
        fix = f"there is no metric {unknown[0]!r};{nearest} there are {', '.join(Metric)}"
        if "all" in unknown and field == "metrics":
            fix = "`all` stands alone: it has every metric"
        raise QueryError([FieldProblem(field, fix)])
    return tuple(Metric(name) for name in listed)


def grouping(name: str, metric: Metric) -> str:
    """The field of whose values only the best cell is asked for, by path; raises `QueryError`."""
    field = cell_field(name, "group_by")
    _refuse_without_best("group_by", [metric], "no cell of a group is the best; rank by another metric")
    return field


def _refuse_without_best(field: str, metrics: Sequence[Metric], fix: str) -> None:
    """Raises `QueryError` for a metric of which neither the most nor the least is best."""
    for metric in metrics:
        if not metric.has_best:
            raise QueryError([FieldProblem(field, f"{metric} is better {metric.better}, not higher or lower: {fix}")])


def sorting(name: str) -> str:
    """The order that a parameter names, by the field's path; raises `QueryError`."""
    return name[: name.startswith("-")] + cell_field(name.removeprefix("-"), "sort")


def pivoting(names: str) -> tuple[str, str]:
    """The two fields of a matrix, by path; raises `QueryError`."""
    found = [cell_field(name.strip(), "pivot") for name in names.split(",")]
    if len(found) != 2 or found[0] == found[1]:
        raise QueryError([FieldProblem("pivot", "name two different fields, separated by a comma")])
    return found[0], found[1]


def _order(metric: Metric, group_by: str | None, sort: str | None) -> str:
    """What a cursor says of the order whose position it is: in another it would name other rows."""
    return " ".join([metric.value, *([f"of {group_by}"] if group_by else []), *([f"by {sort}"] if sort else [])])


def _decoded(cursor: str, order: str) -> Position:
    """Where the page before ended; raises `QueryError`."""
    try:
        found, standing, mean, tie = decoded(cursor)
        ints = type(standing) is int and standing in (0, 1) and type(tie) is int and 0 <= tie <= MAX_ID
        if found == order and ints and type(mean) is float and math.isfinite(mean):
            return Position(standing, mean, tie)
    except (ValueError, TypeError):
        pass
    raise QueryError([FieldProblem("cursor", "not a cursor of this leaderboard; take `next` of the page before")])
