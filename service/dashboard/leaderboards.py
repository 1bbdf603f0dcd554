"""The pages of leaderboards and of the paper's tables."""

from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import HTMLResponse

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Db
from service.api.leaderboards import asked_filters
from service.dashboard.charts import Scatter, scatter
from service.dashboard.rendering import PageRoute, Show
from service.dashboard.wording import short
from service.errors import NotFoundError
from service.experiments import store
from service.leaderboards.cell_scores import EVERYONE
from service.leaderboards.filters import Filters, GroupBy
from service.leaderboards.leaderboard import Board, Question, leaderboard, standings
from service.leaderboards.metrics import HEADLINE, Metric
from service.leaderboards.scatter import Plane, plane
from service.leaderboards.sheets import board_sheets
from service.leaderboards.source import Position
from service.paper.presets import PAPER, Scale, presets
from service.paper.reference import paper_table, references
from service.paper.reproduction import reproduce
from service.paper.sheets import table_sheet
from ttsv.data.catalog import DatasetName

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_HEX = r"^[0-9a-f]{64}$"
_BY_TITLE = {metric.reading.title: metric for metric in Metric}
_FEW_CELLS = 2000
_ID = Annotated[int | None, Query(ge=1, le=MAX_ID)]


@dataclass(frozen=True)
class Download:
    """A form in which the same answer can be had from the API."""

    name: str
    href: str


@router.get("/leaderboards")
def every(show: Show, database: Db, who: Reader) -> HTMLResponse:
    """The data sets, and the tables of the paper."""
    with database.read() as session:
        found = standings(session, who.project_id or EVERYONE)
    return show("leaderboards.html", standings=found, tables=_tables())


@router.get("/leaderboards/{dataset}")
def board(
    dataset: Annotated[str, Path(max_length=200)],
    show: Show,
    database: Db,
    who: Reader,
    filters: Annotated[Filters, Depends(asked_filters)],
    metric: Metric = Metric.ACCURACY,
    column: Annotated[list[Metric] | None, Query(max_length=len(Metric))] = None,
    x: Metric = Metric.COMPRESSION,
    y: Metric | None = None,
    draw: bool | None = None,
    group_by: GroupBy | None = None,
    baseline: Annotated[str | None, Query(pattern=_HEX)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 30,
    mean: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    tie: Annotated[int | None, Query(ge=0, le=MAX_ID)] = None,
) -> HTMLResponse:
    """A data set's boards. `mean` and `tie` say after which row the page of one protocol's board begins.

    `draw`: the plane of x and y with its Pareto front; by default where few cells have to be read for it.
    """
    if fix := DatasetName().fix(dataset):
        raise NotFoundError(f"there is no data set {dataset!r}: the name {fix}")
    y = y or metric
    paged = mean is not None and tie is not None and filters.protocol is not None and group_by is None
    question = Question(
        dataset=dataset,
        metric=metric,
        columns=tuple(column or HEADLINE),
        filters=filters,
        limit=limit,
        after=Position(mean, tie) if paged and mean is not None and tie is not None else None,
        group_by=group_by,
        baseline=baseline,
        scope=who.project_id or EVERYONE,
    )
    with database.read() as session:
        if filters.experiment_id is not None:
            store.get_experiment(session, filters.experiment_id, project_id=who.project_id)
        found = leaderboard(session, question, references)
        cells = max(map(_cells, found.boards), default=0)
        drawn = x is not y and (cells <= _FEW_CELLS if draw is None else draw)
        points = plane(session, question, x, y) if drawn else None
    sheets = board_sheets(found, dataset, metric, tuple(column or ()))
    return show(
        "leaderboard.html",
        dataset=dataset,
        found=found,
        boards=list(zip(found.boards, sheets, strict=False)),
        metric=metric,
        metrics=list(Metric),
        columns=list(column or HEADLINE),
        by_title=_BY_TITLE,
        x=x,
        y=y,
        cells=cells,
        drawn=drawn,
        plane=points,
        scatter=_scatter(points, x, y, dataset),
        filters=filters,
        group_by=group_by,
        groups=list(GroupBy),
        baseline=baseline,
        downloads=_downloads(dataset, question, column, (x, y) if x is not y else ()),
    )


@router.get("/tables/{paper}/{name}")
def table(
    paper: Annotated[str, Path(max_length=64)],
    name: Annotated[str, Path(max_length=64)],
    show: Show,
    database: Db,
    who: Reader,
    experiment: _ID = None,
    scale: Scale = Scale.FULL,
    protocol: Annotated[str | None, Query(pattern=_HEX)] = None,
) -> HTMLResponse:
    """A table of the paper, what was printed beside what was measured."""
    wanted = paper_table(paper, name)
    smoke = scale is Scale.SMOKE and experiment is not None
    with database.read() as session:
        if experiment is not None:
            store.get_experiment(session, experiment, project_id=who.project_id)
        found = reproduce(
            session,
            wanted,
            experiment_id=experiment,
            smoke=smoke,
            protocol=protocol,
            scope=who.project_id or EVERYONE,
        )
    chosen = {"experiment": experiment, "scale": scale.value if smoke else None, "protocol": protocol}
    return show(
        "table.html",
        found=found,
        sheet=table_sheet(found),
        paper=paper,
        scale=scale,
        smoke=smoke,
        experiment=experiment,
        downloads=_forms(f"/v1/tables/{quote(paper, safe='')}/{quote(name, safe='')}", chosen),
    )


def _cells(board: Board) -> int:
    """How many cells with the ranked metric a board has, of which a group shows one."""
    return sum(row.group.cells for row in board.rows if row.group) or board.total


def _tables() -> list[tuple[str, str]]:
    """Address and title of every table of the paper."""
    found = []
    for preset in presets():
        try:
            table = paper_table(PAPER, preset.name.removeprefix(f"{PAPER}/"))
        except NotFoundError:
            continue
        found.append((f"/tables/{PAPER}/{table.name}", f"{table.name}: {table.title}"))
    return found


def _scatter(found: Plane | None, x: Metric, y: Metric, dataset: str) -> Scatter | None:
    if found is None:
        return None
    points = []
    for point in found.points:
        scaled = point.x * x.reading.factor, point.y * y.reading.factor
        text = f"{x.reading.title} {scaled[0]:.4g}, {y.reading.title} {scaled[1]:.4g}"
        href = None
        if point.entry is not None:
            text = f"{_named(point.entry.config)}: {text}"
            href = "/trials?" + urlencode({"dataset": dataset, "cell": point.entry.cell})
        points.append((*scaled, text, href, point.on_front))
    return scatter(x.reading.title, y.reading.title, points)


def _named(config: dict[str, Any]) -> str:
    names = ("model", "layer", "rank", "lambda_ort", "constraint", "delta")
    return ", ".join(f"{name} {short(config[name])}" for name in names if config.get(name) not in (None, "none", 0))


def _downloads(
    dataset: str, question: Question, column: list[Metric] | None, front: tuple[Metric, ...]
) -> list[Download]:
    filters = question.filters
    chosen: dict[str, Any] = {
        "metric": question.metric.value,
        "metrics": ",".join(column) if column else None,
        "pareto": ",".join(front) or None,
        "group_by": question.group_by,
        "baseline": question.baseline,
        "experiment": filters.experiment_id,
        "tag": filters.tag,
        "model": filters.model,
        "layer": filters.layer,
        "constraint": filters.constraint,
        "rank": filters.rank,
        "protocol": filters.protocol,
        "min_seeds": filters.min_seeds if filters.min_seeds > 1 else None,
        "limit": 1000,
    }
    return _forms(f"/v1/leaderboards/{quote(dataset, safe='')}", chosen)


def _forms(path: str, chosen: dict[str, Any]) -> list[Download]:
    given = {name: value for name, value in chosen.items() if value is not None}
    forms = {"CSV": "csv", "Markdown": "markdown", "LaTeX": "latex", "JSON": "json"}
    return [Download(name, f"{path}?{urlencode(given | {'format': form})}") for name, form in forms.items()]
