"""The pages of leaderboards and of the paper's tables."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict
from urllib.parse import quote, unquote, urlencode

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import HTMLResponse

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Db
from service.api.leaderboards import AskedBoards, answering, grouping, pivoting, sorting
from service.api.paper_tables import AskedTable
from service.dashboard.charts import Scatter, scatter
from service.dashboard.rendering import PageRoute, Show
from service.leaderboards.boards import Board, Position
from service.leaderboards.counted_results import EVERYONE
from service.leaderboards.filters import Filters, Question
from service.leaderboards.leaderboard import leaderboard, measured_datasets
from service.leaderboards.metrics import HEADLINE, Metric, unit_of
from service.leaderboards.scatter import ScatterPlot, has_front, scatter_plot
from service.leaderboards.sheets import board_sheets, configurations_said, holes_listed, holes_said
from service.paper.presets import PAPER, presets
from service.paper.reference import preset_table, references
from service.paper.sheets import table_sheet
from service.schemas.trial_tables import Shown
from service.specs.columns import columns_of
from service.specs.patterns import FINGERPRINT

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_BY_TITLE = {unit_of(metric, [size]).title: metric for metric in Metric for size in (1, 1e9)}
"""Metrics by their headings, in either unit."""
_FEW_CELLS = 2000

MOST_TAKEN = 1000
"""Rows of each protocol in a download."""


@dataclass(frozen=True)
class Download:
    """A form in which the same answer can be had from the API."""

    name: str
    href: str
    file: str


@router.get("/leaderboards")
def every(show: Show, database: Db, who: Reader) -> HTMLResponse:
    """The data sets, and the tables of the paper."""
    with database.read() as session:
        found = measured_datasets(session, who.project_id or EVERYONE)
    return show("leaderboards.html", datasets=found, tables=_tables(), figures=_figures())


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What a data set's page shows. `standing`, `mean` and `tie` say after which row a page of one board begins.

    `draw`: the scatter plot of x and y with its Pareto front; by default where few cells have to be read for it.
    """

    metric: Metric = Metric.ACCURACY
    column: Annotated[list[Metric] | None, Query(max_length=len(Metric))] = None
    x: Metric = Metric.COMPRESSION
    y: Metric | None = None
    draw: bool | None = None
    group_by: Annotated[str, Query(max_length=100)] = ""
    sort: Annotated[str, Query(max_length=100)] = ""
    pivot: Annotated[str, Query(max_length=200)] = ""
    baseline: Annotated[str | None, Query(pattern=FINGERPRINT)] = None
    limit: Annotated[int, Query(ge=1, le=200)] = 30
    columns: Annotated[str, Query(max_length=1000)] = ""
    hide: Annotated[str, Query(max_length=1000)] = ""
    standing: Annotated[int | None, Query(ge=0, le=1)] = None
    mean: Annotated[float | None, Query(allow_inf_nan=False)] = None
    tie: Annotated[int | None, Query(ge=0, le=MAX_ID)] = None

    def after(self, filters: Filters) -> Position | None:
        """Where the page before ended, if this is a page of one board."""
        if self.standing is None or self.mean is None or self.tie is None:
            return None
        return None if filters.protocol is None else Position(self.standing, self.mean, self.tie)


@router.get("/leaderboards/{dataset}")
def board(
    dataset: Annotated[str, Path(max_length=200)],
    show: Show,
    database: Db,
    who: Reader,
    filters: AskedBoards,
    wanted: Annotated[_Wanted, Depends()],
) -> HTMLResponse:
    """A data set's boards."""
    metric, x, y = wanted.metric, wanted.x, wanted.y or wanted.metric
    columns = tuple(wanted.column or ())
    fields = Shown.named(wanted.columns, wanted.hide, of_cells=True)
    question = Question(
        dataset=dataset,
        metric=metric,
        columns=columns or HEADLINE,
        filters=filters,
        limit=wanted.limit,
        after=wanted.after(filters),
        group_by=grouping(wanted.group_by, metric) if wanted.group_by else None,
        sort=sorting(wanted.sort) if wanted.sort else None,
        pivot=pivoting(wanted.pivot) if wanted.pivot else None,
        fields=fields.chosen,
        hidden=fields.hidden,
        baseline=wanted.baseline,
        scope=who.project_id or EVERYONE,
    )
    with answering(database, who, question) as session:
        found = leaderboard(session, question, references)
        cells = max(map(_cells, found.boards), default=0)
        drawn = x is not y and (cells <= _FEW_CELLS if wanted.draw is None else wanted.draw)
        plot = scatter_plot(session, question, x, y) if drawn else None
    sheets = board_sheets(found, dataset, metric, columns)
    return show(
        "leaderboard.html",
        dataset=dataset,
        found=found,
        boards=list(zip(found.boards, sheets, strict=False)),
        pivots=sheets[len(found.boards) : 2 * len(found.boards)] if question.pivot else [],
        metric=metric,
        metrics=list(Metric),
        columns=question.columns,
        by_title=_BY_TITLE,
        x=x,
        y=y,
        cells=cells,
        drawn=drawn,
        plot=plot,
        chart=_chart(plot, x, y, dataset),
        plane_source=_plane_source(question, x, y),
        plane_metrics=json.dumps({"x": _read(x), "y": _read(y)}),
        filters=filters,
        group_by=wanted.group_by,
        baseline=wanted.baseline,
        holes=holes_said(found),
        said=holes_listed(found),
        downloads=_downloads(question, columns, (x, y) if x is not y and has_front(x, y) else ()),
        most_taken=MOST_TAKEN,
    )


@router.get("/tables/{paper}/{name}")
def table(show: Show, database: Db, who: Reader, asked: Annotated[AskedTable, Depends()]) -> HTMLResponse:
    """A table of the paper, what was printed beside what was measured."""
    found = asked.reproduce(database, who)
    scale = asked.scale.value if asked.smoke else None
    chosen = {"experiment": asked.experiment, "scale": scale, "protocol": asked.protocol}
    return show(
        "table.html",
        found=found,
        sheet=table_sheet(found),
        printed=any(row.paper for row in found.rows),
        paper=asked.paper,
        scale=asked.scale,
        smoke=asked.smoke,
        downloads=_forms(f"/v1/tables/{quote(asked.paper, safe='')}/{quote(asked.name, safe='')}", chosen),
    )


def _cells(board: Board) -> int:
    """How many cells with the ranked metric a board has, of which a group shows one."""
    return sum(row.group.cells for row in board.rows if row.group) or board.total


def _tables() -> list[tuple[str, str]]:
    """Address and title of every table of the paper."""
    tables = filter(None, map(preset_table, presets()))
    return [(f"/tables/{PAPER}/{table.name}", f"{table.name}: {table.title}") for table in tables]


def _figures() -> list[tuple[str, str]]:
    """Address and title of every figure of the paper."""
    tables = filter(None, map(preset_table, presets()))
    figures = [(name, table.title) for table in tables if (name := table.name.removeprefix("figure-")) != table.name]
    return [(f"/figures/{PAPER}/{name}", title) for name, title in figures]


def _chart(plot: ScatterPlot | None, x: Metric, y: Metric, dataset: str) -> Scatter | None:
    if plot is None:
        return None
    points = []
    configs = [point.entry.config for point in plot.points if point.entry is not None]
    # A cell's seed is that of one of its trials.
    named = iter(configurations_said(columns_of(configs, hidden=("seed",)), configs))
    for point in plot.points:
        scaled = point.x * x.reading.factor, point.y * y.reading.factor
        told = zip((x, y), scaled, strict=True)
        text = ", ".join(f"{one.reading.title} {value:.{one.reading.decimals}f}" for one, value in told)
        href = None
        if point.entry is not None:
            text = f"{next(named)}: {text}"
            if point.entry.seeds < point.entry.trials:
                text += f", {point.entry.seeds} of {point.entry.trials} seeds"
            href = "/trials?" + urlencode({"dataset": dataset, "cell": point.entry.cell})
        points.append((*scaled, text, href, point.on_front))
    return scatter(x.reading.title, y.reading.title, points)


class _Read(TypedDict):
    """How the picture writes a metric."""

    heading: str
    unit: str
    factor: float
    decimals: int
    best: str


def _read(metric: Metric) -> _Read:
    """How the picture writes a metric."""
    reading = metric.reading
    return {
        "heading": reading.heading,
        "unit": reading.unit,
        "factor": reading.factor,
        "decimals": reading.decimals,
        "best": metric.better,
    }


def _plane_source(question: Question, x: Metric, y: Metric) -> str:
    """Where the picture's numbers are had: of the same cells as the table's."""
    chosen: dict[str, object] = {"x": x.value, "y": y.value, **_chosen_filters(question)}
    given = {name: value for name, value in chosen.items() if value not in (None, [])}
    return f"/v1/leaderboards/{quote(question.dataset, safe='')}/plane?{urlencode(given, doseq=True)}"


def _chosen_filters(question: Question) -> dict[str, object]:
    """The filters that are not at their defaults, as the API names them."""
    every = vars(Filters())
    filters = {name: value for name, value in vars(question.filters).items() if value not in ((), every[name])}
    where = [str(one) for one in filters.pop("where", ())]
    return {"experiment": filters.pop("experiment_id", None), **filters, "where": where}


def _downloads(question: Question, columns: Sequence[Metric], front: Sequence[Metric]) -> list[Download]:
    chosen: dict[str, object] = {
        "metric": question.metric.value,
        "metrics": ",".join(columns) or None,
        "pareto": ",".join(front) or None,
        "columns": ",".join(question.fields) or None,
        "hide": ",".join(question.hidden) or None,
        "group_by": question.group_by,
        "sort": question.sort,
        "pivot": ",".join(question.pivot) if question.pivot else None,
        "baseline": question.baseline,
        **_chosen_filters(question),
        "limit": MOST_TAKEN,
    }
    return _forms(f"/v1/leaderboards/{quote(question.dataset, safe='')}", chosen)


def _forms(path: str, chosen: Mapping[str, object]) -> list[Download]:
    given = {name: value for name, value in chosen.items() if value not in (None, [])}
    forms = {"CSV": ("csv", "csv"), "Markdown": ("markdown", "md"), "LaTeX": ("latex", "tex"), "JSON": ("json", "json")}
    file = re.sub(r"[^A-Za-z0-9._-]+", "-", unquote(path.removeprefix("/v1/")).replace("/", "-"))
    return [
        Download(name, f"{path}?{urlencode(given | {'format': form}, doseq=True)}", f"{file}.{ending}")
        for name, (form, ending) in forms.items()
    ]
