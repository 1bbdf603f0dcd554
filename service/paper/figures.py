"""The paper's figures made anew from results: panels of points, with what was printed and what was not run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.leaderboards.metrics import Metric
from service.leaderboards.text_tables import SHRUNK, escape_latex
from service.leaderboards.value_texts import value_text
from service.paper.presets import Scale
from service.paper.reference import RATIOS, Label, PaperTable, printed_of
from service.paper.reproduction import Reproduction, TableRow
from service.paper.sheets import title_of

NOT_RUN = "not run"
WATERMARK = "SMOKE: NO RESULT"
_PGF_MARKS = ("*", "square*", "triangle*", "diamond*")
_PGF_HOLLOW = ("o", "square", "triangle", "diamond")


@dataclass(frozen=True)
class Reference:
    """A value of the paper in the panel's unit; `source` is the table that prints it, or "predicted".

    `decimals` are those of the table; None: the panel's.
    """

    mean: float
    spread: float | None
    source: str
    decimals: int | None = None


@dataclass(frozen=True)
class Point:
    """A place of a panel. `mean` and `std` are None without a result; `status` is as `TableRow` has it.

    `where` says which configuration it is; `series` is the index of its series, `x` its position on the axis.
    """

    x: float
    series: int
    where: str
    mean: float | None
    std: float | None
    seeds: int
    status: str
    printed: tuple[Reference, ...]

    @property
    def not_run(self) -> bool:
        """Whether no trial of it was ever posted."""
        return self.status == NOT_RUN


@dataclass(frozen=True)
class Panel:
    """Points of one column of the table. `column` is its name there, `decimals` those with which it is written."""

    title: str
    column: str
    points: tuple[Point, ...]
    decimals: int


@dataclass(frozen=True)
class PaperFigure:
    """Panels over one axis. `ticks`: positions and what is written there; `reach`: the positions at both ends.

    `log`: positions are logarithms of a number, which no series is moved away from.

    `beside`: "paper" or "predicted", what hollow marks are.
    """

    name: str
    title: str
    x_title: str
    ticks: tuple[tuple[float, str], ...]
    reach: tuple[float, float]
    log: bool
    series: tuple[str, ...]
    panels: tuple[Panel, ...]
    beside: str
    smoke: bool

    @property
    def printed(self) -> bool:
        """Whether there is a hollow mark at all."""
        return any(point.printed for panel in self.panels for point in panel.points)

    @property
    def nothing(self) -> str:
        """What a panel without a value says."""
        return "nothing measured here" + ("" if self.smoke else "; no number is printed")


@dataclass(frozen=True)
class _Layout:
    """How a table becomes a figure: the label along the axis, that of the series, and that of further panels.

    `log`: positions are logarithms of the label. `none`: what a missing label is called.
    """

    x: str
    x_title: str
    series: str
    named: Callable[[Label], str]
    none: str
    log: bool = False
    facet: str | None = None


def _rank(value: Label) -> str:
    return "uncompressed" if value is None else f"rank {_short(value)} of the channels"


def _short(value: Label) -> str:
    for numerator, denominator in ((1, 2), (1, 3), (1, 4)):
        if isinstance(value, float) and math.isclose(value, numerator / denominator):
            return f"{numerator}/{denominator}"
    return value_text(value)


_LAYOUTS = {
    "figure-vgg": _Layout("rank", "rank", "method", str, "uncompressed", facet="dataset"),
    "figure-lipschitz": _Layout(
        "lambda_ort", "lambda_ort (logarithmic)", "depth", lambda depth: f"LipConvNet-{depth}", "SOC", log=True
    ),
    "figure-speedup": _Layout("channels", "channels", "rank", _rank, "none"),
    "figure-soc-speedup": _Layout("channels", "channels", "rank", _rank, "none"),
}


def paper_figure(table: PaperTable, found: Reproduction, scale: Scale) -> PaperFigure:
    """The figure that a table's numbers are of; raises `KeyError` for a table that is no figure."""
    layout = _LAYOUTS[table.name]
    values = list(dict.fromkeys(_place(row, layout) for row in found.rows))
    known = sorted(value for value in values if value is not None)
    positions: dict[float | None, float] = {}
    positions |= {value: math.log10(value) if layout.log else float(place) for place, value in enumerate(known, 1)}
    if None in values:
        positions[None] = positions[known[0]] - (0.4 if layout.log else 1.0)
    ticks = [(position, layout.none if value is None else _short(value)) for value, position in positions.items()]
    if layout.log:
        powers = range(math.ceil(math.log10(known[0])), math.floor(math.log10(known[-1])) + 1)
        ticks = [one for one in ticks if one[1] == layout.none] + [(float(power), f"1e{power}") for power in powers]
    series = list(dict.fromkeys(layout.named(row.labels[layout.series]) for row in found.rows))
    shows_printed = found.beside == "paper" and scale is Scale.FULL
    beside = [printed_of(row) if shows_printed else {} for row in table.rows]
    step = 0.08 if layout.log else 0.6 / max(len(series), 3)
    panels = []
    for column in found.columns:
        for facet in dict.fromkeys(row.labels.get(layout.facet) if layout.facet else None for row in found.rows):
            points = []
            for row, printed in zip(found.rows, beside, strict=True):
                if layout.facet and row.labels[layout.facet] != facet:
                    continue
                index = series.index(layout.named(row.labels[layout.series]))
                value = _place(row, layout)
                aside = 0.0 if layout.log and value is not None else step * (index - (len(series) - 1) / 2)
                said = [(found.beside, row.paper[column])] if column in row.paper else printed.get(column, [])
                factor = _factor(column)
                references = tuple(
                    Reference(
                        one.mean * factor, None if one.spread is None else one.spread * factor, source, one.decimals
                    )
                    for source, one in said
                )
                points.append(_point(row, column, positions[value] + aside, index, references))
            title = title_of(column) if facet is None else f"{facet}: {title_of(column)}"
            panels.append(Panel(title, column, tuple(points), _decimals(column)))
    room = 0.2 if layout.log else 0.5
    reach = min(positions.values()) - room, max(positions.values()) + room
    named, smoke = table.name.removeprefix("figure-"), scale is Scale.SMOKE
    shown = tuple(sorted(ticks)), reach, layout.log, tuple(series), tuple(panels)
    return PaperFigure(named, found.title, layout.x_title, *shown, found.beside, smoke)


def _place(row: TableRow, layout: _Layout) -> float | None:
    """What a row has along x: numbers alone, or nothing."""
    value = row.labels[layout.x]
    assert not isinstance(value, str), layout.x
    return value


def _point(row: TableRow, column: str, x: float, series: int, printed: tuple[Reference, ...]) -> Point:
    mean, std, seeds, status = None, None, row.seeds, row.status
    if column in RATIOS:
        mean = getattr(row, column)
    elif (spread := row.metrics.get(column)) is not None:
        mean, seeds = spread["mean"], spread["seeds"]
        std = spread["std"] if seeds > 1 else None
    factor = _factor(column)
    if mean is None and status == "complete":
        status = "not measured"
    where = ", ".join(f"{name} {'none' if value is None else _said(value)}" for name, value in row.labels.items())
    mean = None if mean is None else mean * factor
    return Point(x, series, where, mean, None if std is None else std * factor, seeds, status, printed)


def _said(value: Label) -> str:
    return _short(value) if isinstance(value, float) else str(value)


def _factor(column: str) -> float:
    return 1.0 if column in RATIOS else Metric(column).reading.factor


def _decimals(column: str) -> int:
    return 1 if column in RATIOS else Metric(column).reading.decimals


def figure_latex(figure: PaperFigure) -> str:
    """The figure's numbers for LaTeX: an axis of pgfplots for each panel, with points that were not run as comments."""
    lines = [
        f"% {figure.title}",
        "% needs \\usepackage{pgfplots}; filled marks: ours, mean +- sample standard deviation over seeds; hollow: "
        + ("printed in the paper" if figure.beside == "paper" else "predicted by the paper's formulas"),
    ]
    if figure.smoke:
        lines.append(f"% {WATERMARK}: small networks on synthetic images")
    at = ",".join(f"{position:.6g}" for position, _ in figure.ticks)
    labels = ",".join(f"{{{escape_latex(text)}}}" for _, text in figure.ticks)
    for panel in figure.panels:
        title = f"{WATERMARK}; {panel.title}" if figure.smoke else panel.title
        options = f"title={{{escape_latex(title)}}}, xlabel={{{escape_latex(figure.x_title)}}}"
        options += f", xtick={{{at}}}, xticklabels={{{labels}}}, xmin={figure.reach[0]:g}, xmax={figure.reach[1]:g}"
        values = panel_values(panel)
        if wide(values):
            options += ", ymode=log"
        elif not values:
            options += ", ymin=0, ymax=1, ytick=\\empty"
        # Each in a paragraph of its own: two in one line run off the page.
        lines += [
            "",
            f"\\noindent{SHRUNK}",
            "\\begin{tikzpicture}",
            f"\\begin{{axis}}[{options}, legend pos=outer north east]",
        ]
        for index, name in enumerate(figure.series):
            mine = [point for point in panel.points if point.series == index]
            for point in mine:
                if point.mean is None:
                    lines.append(f"% {point.where}: {point.status}")
            ours = [(point.x, point.mean, point.std) for point in mine if point.mean is not None]
            theirs = [(point.x, one.mean, one.spread) for point in mine for one in point.printed]
            beside = f"{name}, {figure.beside}"
            for mark, said, found in ((_PGF_MARKS, name, ours), (_PGF_HOLLOW, beside, theirs)):
                if not found:
                    continue
                bars = "error bars/.cd, y dir=both, y explicit"
                lines.append(f"\\addplot[only marks, mark={mark[index % len(mark)]}, {bars}] coordinates {{")
                lines += [f"  ({x:.6g},{mean:.8g}) +- (0,{spread or 0:.8g})" for x, mean, spread in found]
                lines += ["};", f"\\addlegendentry{{{escape_latex(said)}}}"]
        if not values:  # of an axis without a point pgfplots takes none of the ends that it is given
            lines.append(
                f"\\addplot[draw=none, forget plot] coordinates {{({figure.reach[0]:g},0) ({figure.reach[1]:g},1)}};"
            )
            lines.append(f"\\node[font=\\footnotesize] at (axis description cs:0.5,0.5) {{{figure.nothing}}};")
        lines += ["\\end{axis}", "\\end{tikzpicture}}"]
    return "\n".join(lines) + "\n"


def panel_values(panel: Panel) -> list[float]:
    """Every value that stands in a panel, the ends of its deviations aside."""
    ours = [point.mean for point in panel.points if point.mean is not None]
    return ours + [one.mean for point in panel.points for one in point.printed]


def wide(values: Sequence[float]) -> bool:
    """Whether values are drawn by their logarithms."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > 30
