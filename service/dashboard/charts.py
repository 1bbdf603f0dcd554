"""Charts as plain geometry that a template writes as SVG: curves over epochs, points in a plane, layers' ranges."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

_SMALL = 470, 240
_LARGE = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 38
_TICKS = 5
_MOST_TICKS = 8
_FARTHEST = 1e150
"""What lies farther from zero is drawn there, what lies nearer to it than the inverse as zero, or on a logarithmic axis
at the inverse: of numbers between them every quotient is a number.
"""


@dataclass(frozen=True)
class Tick:
    """A place on an axis and what is written there."""

    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` along the pixels from `start` to `end`; `log`: by their logarithms.

    A `whole` axis has ticks at whole numbers alone.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value, to a tenth."""
        value = _within(value, log=self.log)
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)

    @cached_property
    def ticks(self) -> list[Tick]:
        """Round values within the axis."""
        return [Tick(self.place(value), _label(value)) for value in (_powers if self.log else _steps)(self)]


@dataclass(frozen=True)
class Curve:
    """One line: `style` chooses its colour and dashes, `dots` are its points where there are few of them."""

    name: str
    path: str
    style: int
    dots: list[tuple[float, float, str]]


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis."""

    title: str
    x_title: str
    x: Axis
    y: Axis
    curves: list[Curve]
    width: int
    height: int


@dataclass(frozen=True)
class Mark:
    """One point of a plane: `text` says what it is, `href` leads to it."""

    x: float
    y: float
    text: str
    href: str | None
    front: bool


@dataclass(frozen=True)
class Scatter:
    """Points in a plane; `steps` is the line along the front."""

    x_title: str
    y_title: str
    x: Axis
    y: Axis
    marks: list[Mark]
    steps: str
    width: int
    height: int


def line_chart(
    title: str, x_title: str, xs: Sequence[float], series: Mapping[str, Sequence[float | None]], *, log: bool = False
) -> LineChart | None:
    """Curves of several series over the same places; gaps where a value is missing. None without any value."""
    known = {name: values for name, values in series.items() if any(value is not None for value in values)}
    values = [value for column in known.values() for value in column if value is not None]
    if not values or not xs:
        return None
    width, height = _SMALL
    x = replace(_axis([*xs], _LEFT, width - _RIGHT), whole=all(float(at).is_integer() for at in xs))
    y = _axis(values, height - _BOTTOM, _TOP, log=log and min(values) > 0, pad=0.05)
    curves = []
    for style, (name, column) in enumerate(known.items()):
        points = [
            (x.place(at), None if value is None else y.place(value)) for at, value in zip(xs, column, strict=True)
        ]
        dots = [
            (px, py, f"{name}, {x_title} {at:g}: {value:.4g}")
            for (px, py), at, value in zip(points, xs, column, strict=True)
            if py is not None
        ]
        curves.append(Curve(name, _path(points), style, dots if len(dots) <= 60 else []))
    return LineChart(title, x_title, x, y, curves, width, height)


def scatter(
    x_title: str,
    y_title: str,
    points: Sequence[tuple[float, float, str, str | None, bool]],
) -> Scatter | None:
    """Points (x, y, text, href, on the front); an axis over two powers of ten is logarithmic. None without points."""
    if not points:
        return None
    width, height = _LARGE
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    x = _axis(xs, _LEFT, width - _RIGHT, log=_wide(xs), pad=0.05)
    y = _axis(ys, height - _BOTTOM, _TOP, log=_wide(ys), pad=0.05)
    marks = [Mark(x.place(a), y.place(b), text, href, front) for a, b, text, href, front in points]
    front = sorted((mark.x, mark.y) for mark in marks if mark.front)
    # What is drawn last lies on top.
    return Scatter(x_title, y_title, x, y, sorted(marks, key=lambda mark: mark.front), _path([*front]), width, height)


def value_axis(values: Sequence[float], start: float, end: float, *, log: bool = False) -> Axis:
    """An axis that reaches all values, with room at its ends."""
    return _axis(values, start, end, log=log, pad=0.05)


def _wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / 30 > min(values)


def _within(value: float, *, log: bool) -> float:
    """A number of which an axis can be made: one that is positive where it is logarithmic."""
    least = 1 / _FARTHEST if log else -_FARTHEST
    return 0.0 if not log and abs(value) < 1 / _FARTHEST else min(max(value, least), _FARTHEST)


def _axis(values: Sequence[float], start: float, end: float, *, log: bool = False, pad: float = 0.0) -> Axis:
    low, high = _within(min(values), log=log), _within(max(values), log=log)
    if log:
        room = (high / low) ** pad if high > low * (1 + 1e-9) else 2.0  # of closer values the logarithms may be equal
        return Axis(low / room, high * room, start, end, log=True)
    room = (high - low) * pad if high > low else abs(high) * 0.1 or 1.0
    return Axis(low - room, high + room, start, end)


def _steps(axis: Axis) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, about `_TICKS` of them."""
    raw = (axis.high - axis.low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if axis.whole:
        step = max(1.0, step)
    first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)]


def _powers(axis: Axis) -> list[float]:
    """Powers of ten, with 2 and 5 times them where the axis spans few, and even steps where it spans hardly any."""
    low, high = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
    factors = (1, 2, 5) if high - low <= 3 else (1,)
    every = [factor * 10.0**power for power in range(low, high + 1) for factor in factors]
    found = [value for value in every if axis.low <= value <= axis.high]
    if len(found) < 2:
        return _steps(axis)
    return found[:: max(1, math.ceil(len(found) / _MOST_TICKS))]


def _label(value: float) -> str:
    return "0" if value == 0 else f"{value:.6g}".replace("e-0", "e-").replace("e+0", "e")


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    """An SVG path through points; a missing one interrupts it."""
    parts, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{x:g} {y:g}")
        pen = "L"
    return "".join(parts)
