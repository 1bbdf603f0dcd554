"""The pages of the paper's figures: a picture, its files, and the table behind it."""

import re
from dataclasses import replace
from enum import StrEnum
from typing import Annotated
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Response
from fastapi.responses import HTMLResponse

from service.access.security import Principal
from service.api.http.authentication import Reader
from service.api.http.dependencies import Db
from service.api.paper_tables import AskedTable
from service.dashboard.charts import Axis, value_axis
from service.dashboard.drawing import Circle, Drawing, Path, Said, Words, text_width
from service.dashboard.rendering import HEADERS, PageRoute, Show
from service.dashboard.wording import NONE
from service.database.engine import Database
from service.leaderboards.text_tables import Measured
from service.paper.figures import (
    WATERMARK,
    Panel,
    PaperFigure,
    Point,
    Reference,
    figure_latex,
    panel_values,
    paper_figure,
    wide,
)
from service.paper.presets import Scale
from service.paper.reference import paper_table, printed_notes
from service.paper.reproduction import Reproduction

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_PANEL = 450, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 34, 68
_STRIP = 16
"""Height of what stands below a panel's points: marks of what has no result."""
_ASIDE = 5.0
"""So many pixels series stand apart there, where they stand at the same place of a measured axis."""
_HEAD = 34
_ROW = 20


class Form(StrEnum):
    """A file that a figure is had as."""

    SVG = "svg"
    PDF = "pdf"
    LATEX = "tex"


_TYPES = {Form.SVG: "image/svg+xml", Form.PDF: "application/pdf", Form.LATEX: "text/x-tex; charset=utf-8"}

Asked = Annotated[AskedTable, Depends()]


@router.get("/figures/{paper}/{name}.{form}")
def file(form: Form, database: Db, who: Reader, asked: Asked) -> Response:
    """A figure as a file."""
    _, figure = _made(asked, database, who)
    content: str | bytes = figure_latex(figure)
    if form is not Form.LATEX:
        drawing = draw(figure)
        content = drawing.pdf() if form is Form.PDF else str(drawing.svg())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{asked.paper}-{asked.name}{'-smoke' if figure.smoke else ''}.{form}")
    disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=_TYPES[form], headers=HEADERS | disposition)


@router.get("/figures/{paper}/{name}")
def show(page: Show, database: Db, who: Reader, asked: Asked) -> HTMLResponse:
    """A figure of the paper, what was measured here beside what was printed."""
    found, figure = _made(asked, database, who)
    path = f"/figures/{quote(asked.paper, safe='')}/{quote(asked.name, safe='')}"
    scale = asked.scale.value if asked.smoke else None
    given = {"experiment": asked.experiment, "scale": scale, "protocol": asked.protocol}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    drawing = draw(figure)
    return page(
        "figure.html",
        found=found,
        figure=figure,
        picture=drawing.svg(),
        sheets=drawing.sheets(),
        behind=_behind(figure),
        notes=[*found.notes, *([] if asked.smoke else printed_notes(paper_table(asked.paper, found.name)))],
        paper=asked.paper,
        scale=asked.scale,
        smoke=asked.smoke,
        files=[(form.name, f"{path}.{form}{'?' + query if query else ''}") for form in Form],
        table=f"/tables/{quote(asked.paper, safe='')}/{found.name}{'?' + query if query else ''}",
    )


def _made(asked: AskedTable, database: Database, who: Principal) -> tuple[Reproduction, PaperFigure]:
    """The numbers and the figure; raises `NotFoundError`."""
    table = replace(asked, name=f"figure-{asked.name}")
    found = table.reproduce(database, who)
    scale = Scale.SMOKE if table.smoke else Scale.FULL
    return found, paper_figure(paper_table(table.paper, table.name), found, scale)


def _behind(figure: PaperFigure) -> list[tuple[str, str, str, str, str, str]]:
    """The picture's points in words: panel, configuration, ours, the paper's, seeds, status."""
    rows = []
    for panel in figure.panels:
        for point in panel.points:
            theirs = "; ".join(
                f"{_theirs_said(one, panel)}{f' ({one.source})' if one.source != figure.beside else ''}"
                for one in point.printed
            )
            seeds = str(point.seeds) if point.mean is not None else NONE
            ours = NONE if point.mean is None else _value(point.mean, point.std, panel.decimals)
            rows.append((panel.title, point.where, ours, theirs or NONE, seeds, point.status))
    return rows


def _value(mean: float, spread: float | None, decimals: int) -> str:
    return Measured(mean, spread, decimals).said


def _theirs_said(one: Reference, panel: Panel) -> str:
    return _value(one.mean, one.spread, panel.decimals if one.decimals is None else one.decimals)


def draw(figure: PaperFigure) -> Drawing:
    """The figure as one picture: two panels in a row, what marks mean above them."""
    width, height = _PANEL
    columns = min(2, len(figure.panels))
    keys, bottom = _keys(figure, columns * width)
    rows = -(-len(figure.panels) // columns)
    total = bottom + rows * height
    shapes: list[Path | Circle | Words | Said] = []
    if figure.smoke:
        for row in range(rows):
            place = columns * width / 2, bottom + (row + 0.62) * height
            shapes.append(Words(*place, WATERMARK, "water", 64, "middle", 12))
    shapes += [Words(12, 22, figure.title, size=16), *keys]
    for index, panel in enumerate(figure.panels):
        shapes += _panel(figure, panel, index % columns * width, bottom + index // columns * height)
    title = f"{figure.title}{': ' + WATERMARK if figure.smoke else ''}; the table below has its numbers"
    cuts = tuple(bottom + row * height for row in range(1, rows))
    return Drawing(columns * width, total, title, tuple(shapes), cuts)


def _keys(figure: PaperFigure, width: float) -> tuple[list[Path | Circle | Words], float]:
    """What marks mean, in as many rows as it takes, and where they end."""
    x, y = 18.0, _HEAD + 8.0
    shapes: list[Path | Circle | Words] = []
    meaning = "printed in the paper" if figure.beside == "paper" else "predicted by the paper's formulas"
    entries: list[tuple[list[Path | Circle], str]] = []
    for index, name in enumerate(figure.series):
        entries.append(([_mark(0, 0, index, filled=True)], f"{name}, ours"))
    if figure.printed:
        entries.append(([_mark(0, 0, 0, filled=False, ink="text")], meaning))
    entries.append((_cross(0, 0, "text"), "not run"))
    entries.append((_dash(0, 0, "text"), "no result yet"))
    for marks, text in entries:
        wanted = 1.12 * text_width(text, 12) + 44  # in the browser's own type words may be wider
        if x + wanted > width:
            x, y = 18.0, y + _ROW
        shapes += [_moved(mark, x, y - 4) for mark in marks]
        shapes.append(Words(x + 11, y, text))
        x += wanted
    return shapes, y + 14


def _panel(figure: PaperFigure, panel: Panel, left: float, top: float) -> list[Path | Circle | Words | Said]:
    width, height = _PANEL
    start, end = left + _LEFT, left + width - _RIGHT
    low, high = top + height - _BOTTOM, top + _TOP
    x = Axis(*figure.reach, start, end)
    shapes: list[Path | Circle | Words | Said] = []
    values = [value for point in panel.points for value in _reached(point)]
    log = wide(panel_values(panel))
    logarithmic = ", logarithmic" if log else ""
    shapes.append(Words(left + 12, top + 18, f"{panel.title}{logarithmic}", size=13))
    y = value_axis(values, low - 4, high + 4, log=log) if values else None
    for tick in y.ticks if y else ():
        shapes.append(Path(((start, tick.at), (end, tick.at)), "line"))
        shapes.append(Words(start - 7, tick.at + 4, tick.label, "quiet", 11, "end"))
    for position, text in figure.ticks:
        shapes.append(Words(x.place(position), low + _STRIP + 16, text, "quiet", 11, "middle"))
        if figure.ticks[0][0] <= position:
            place = x.place(position)
            shapes.append(Path(((place, low + _STRIP), (place, low + _STRIP + 4)), "quiet"))
    shapes.append(Words((start + end) / 2, low + _STRIP + 34, figure.x_title, "text", 12, "middle"))
    shapes.append(Path(((start, high), (start, low + _STRIP), (end, low + _STRIP)), "quiet"))
    shapes.append(Path(((start, low), (end, low)), "line"))
    shapes.append(Words(start - 7, low + 12, "none", "quiet", 11, "end"))
    if y is None:
        middle = (start + end) / 2, (low + high) / 2
        shapes.append(Words(*middle, figure.nothing, "quiet", 12, "middle"))
    else:
        shapes += [_theirs(figure, panel, point, x, y) for point in panel.points if point.printed]
    for point in panel.points:
        aside = (point.series - (len(figure.series) - 1) / 2) * _ASIDE if figure.log else 0.0
        shapes.append(_ours(panel, point, x, y, low + _STRIP / 2, aside))
    return shapes


def _reached(point: Point) -> list[float]:
    """All values that a panel has to reach for a point, ends of deviations among them where they are above zero."""
    found = []
    pairs = [(point.mean, point.std), *((one.mean, one.spread) for one in point.printed)]
    for mean, spread in pairs:
        if mean is not None:
            found += [mean, mean + (spread or 0), mean if (spread or 0) >= mean else mean - (spread or 0)]
    return found


def _ours(panel: Panel, point: Point, x: Axis, y: Axis | None, strip: float, aside: float) -> Said:
    """The measured value with its deviation, or a mark in the strip of what has none, so far `aside`."""
    at, ink = x.place(point.x), _ink(point.series)
    if point.mean is None or y is None:
        mark = (_cross if point.not_run else _dash)(at + aside, strip, ink)
        return Said(f"{point.where}: {point.status}", tuple(mark))
    shapes: list[Path | Circle] = _bar(at, point.mean, point.std, y, ink)
    shapes.append(_mark(at, y.place(point.mean), point.series, filled=True))
    seeds = f"{point.seeds} {'seed' if point.seeds == 1 else 'seeds'}"
    return Said(
        f"{point.where}: {_value(point.mean, point.std, panel.decimals)}, ours ({seeds}; {point.status})", tuple(shapes)
    )


def _theirs(figure: PaperFigure, panel: Panel, point: Point, x: Axis, y: Axis) -> Said:
    at, ink = x.place(point.x), _ink(point.series)
    shapes: list[Path | Circle] = []
    texts = []
    for one in point.printed:
        shapes += _bar(at, one.mean, one.spread, y, ink)
        shapes.append(_mark(at, y.place(one.mean), point.series, filled=False))
        source = "predicted" if figure.beside != "paper" else f"printed in {one.source}"
        texts.append(f"{_theirs_said(one, panel)}, {source}")
    return Said(f"{point.where}: {'; '.join(texts)}", tuple(shapes))


def _bar(at: float, mean: float, spread: float | None, y: Axis, ink: str) -> list[Path | Circle]:
    """The deviation to both sides, within the panel."""
    if not spread:
        return []
    low, high = y.place(max(y.low, mean - spread)), y.place(min(y.high, mean + spread))
    ends = [Path(((at - 3, end), (at + 3, end)), ink) for end in (low, high)]
    return [Path(((at, low), (at, high)), ink, 1.2), *ends]


def _ink(series: int) -> str:
    return f"series{series % 4}"


def _mark(x: float, y: float, series: int, *, filled: bool, ink: str | None = None) -> Path | Circle:
    """The mark of a series: each has a form of its own; hollow ones are larger, to be seen around filled ones."""
    size = 4.0 if filled else 6.0
    role = ink or _ink(series)
    if series % 4 == 0:
        return Circle(x, y, size, role, filled)
    corners = {
        1: ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        2: ((0, -1.25), (1.2, 0.95), (-1.2, 0.95)),
        3: ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
    }[series % 4]
    return Path(tuple((x + size * a, y + size * b) for a, b in corners), role, 1.5, closed=True, filled=filled)


def _cross(x: float, y: float, ink: str) -> list[Path | Circle]:
    return [Path(((x - 4, y + sign * 4), (x + 4, y - sign * 4)), ink, 1.6) for sign in (1, -1)]


def _dash(x: float, y: float, ink: str) -> list[Path | Circle]:
    return [Path(((x - 4, y), (x + 4, y)), ink, 2.4)]


def _moved(shape: Path | Circle, x: float, y: float) -> Path | Circle:
    if isinstance(shape, Circle):
        return replace(shape, x=shape.x + x, y=shape.y + y)
    return replace(shape, points=tuple((a + x, b + y) for a, b in shape.points))
