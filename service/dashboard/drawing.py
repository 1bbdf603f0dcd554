"""Drawings of lines, marks and words as SVG and as PDF, without a library: the service has none that draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

INKS = {
    "text": "#17202a",
    "quiet": "#55616e",
    "line": "#d8dee5",
    "water": "#f3d3cf",
    "series0": "#0072b2",
    "series1": "#c04d00",
    "series2": "#00805c",
    "series3": "#a8498a",
}
"""Colours on white paper, by role; the pages' style sheet has those of the dark scheme."""

# Widths of Helvetica's characters from the space to the tilde, in thousandths of the size (Adobe's font metrics).
_WIDTHS = [
    *(278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278),
    *(556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556),
    *(1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778),
    *(667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556),
    *(333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556),
    *(556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584),
]
_POINTS = 0.75
"""Points of a pixel."""
_ARC = 4 / 3 * (math.sqrt(2) - 1)
"""Where the handles of the Bezier curve of a quarter circle stand."""


@dataclass(frozen=True)
class Path:
    """A line through points, in pixels from the upper left corner; `closed` ones may be `filled`."""

    points: tuple[tuple[float, float], ...]
    ink: str
    width: float = 1.0
    closed: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Circle:
    """A disc, or the line around it."""

    x: float
    y: float
    radius: float
    ink: str
    filled: bool = True
    width: float = 1.5


@dataclass(frozen=True)
class Words:
    """A text whose `anchor` (start, middle, end of its base line) is at a point; `turn`: degrees, upwards."""

    x: float
    y: float
    text: str
    ink: str = "text"
    size: float = 12
    anchor: str = "start"
    turn: float = 0


@dataclass(frozen=True)
class Said:
    """Shapes that are one thing; a browser says what, under the pointer."""

    text: str
    shapes: tuple[Path | Circle | Words, ...]


@dataclass(frozen=True)
class Drawing:
    """Shapes on a page of so many pixels; later ones lie above. Between `cuts`, heights, a sheet of paper ends."""

    width: float
    height: float
    title: str
    shapes: tuple[Path | Circle | Words | Said, ...]
    cuts: tuple[float, ...] = ()

    def svg(self) -> Markup:
        """A picture that stands in a page, which may give its classes other colours, or alone."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        head = Markup('<svg xmlns="http://www.w3.org/2000/svg" {} role="img" aria-label="{}" {}>').format(
            Markup(size), self.title, Markup('font-family="Helvetica, Arial, sans-serif"')
        )
        paper = Markup('<rect class="paper" width="100%" height="100%" fill="#ffffff"/>')
        shapes = Markup("\n").join(map(_svg, self.shapes))
        return head + paper + Markup('<g id="drawn">') + shapes + Markup("</g></svg>\n")

    def sheets(self) -> Markup:
        """Its parts between the cuts, for paper alone: each shows some of the picture that stands in the same page."""
        parts = [
            Markup('<svg viewBox="0 {:g} {:g} {:g}"><use href="#drawn"/></svg>').format(begin, self.width, end - begin)
            for begin, end in pairwise((0, *self.cuts, self.height))
        ]
        return Markup("\n").join(parts)

    def pdf(self) -> bytes:
        """One page of vectors; words are in Helvetica, which every reader has and no file carries."""
        wide, high = self.width * _POINTS, self.height * _POINTS
        body = [f"{_POINTS} 0 0 {-_POINTS} 0 {high:g} cm 1 J 1 j".encode()]
        for shape in self.shapes:
            body += [_pdf(one) for one in (shape.shapes if isinstance(shape, Said) else (shape,))]
        stream = b"\n".join(body)
        page = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {wide:g} {high:g}] /Contents 4 0 R"
        font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
        objects = [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            (page + " /Resources << /Font << /F 5 0 R >> >> >>").encode(),
            b"<< /Length %d >>\nstream\n%b\nendstream" % (len(stream), stream),
            font,
            b"<< /Title (%b) >>" % _pdf_text(self.title),
        ]
        file, places = b"%PDF-1.4\n", []
        for number, content in enumerate(objects, 1):
            places.append(len(file))
            file += b"%d 0 obj\n%b\nendobj\n" % (number, content)
        table = b"".join(b"%010d 00000 n \n" % place for place in places)
        count, start = len(objects) + 1, len(file)
        file += b"xref\n0 %d\n0000000000 65535 f \n%b" % (count, table)
        return file + b"trailer\n<< /Size %d /Root 1 0 R /Info 6 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (count, start)


def text_width(text: str, size: float) -> float:
    """How wide a text is in Helvetica, in the unit of its size."""
    known = (_WIDTHS[ord(one) - 32] if 32 <= ord(one) < 127 else 556 for one in text)
    return sum(known) * size / 1000


def _svg(shape: Path | Circle | Words | Said) -> Markup:
    if isinstance(shape, Said):
        inner = Markup("").join(map(_svg, shape.shapes))
        return Markup("<g><title>{}</title>").format(shape.text) + inner + Markup("</g>")
    if isinstance(shape, Words):
        x, y, turn = f"{shape.x:.1f}", f"{shape.y:.1f}", ""
        if shape.turn:
            turn = f' transform="rotate({-shape.turn:g} {x} {y})"'
        place = f'x="{x}" y="{y}" font-size="{shape.size:g}" text-anchor="{shape.anchor}"{turn}'
        colour = f'class="fill-{shape.ink}" fill="{INKS[shape.ink]}"'
        return Markup(f"<text {colour} {place}>{escape(shape.text)}</text>")
    line = f'class="stroke-{shape.ink}" stroke="{INKS[shape.ink]}" stroke-width="{shape.width:g}" fill="none"'
    if shape.filled:
        line = f'class="fill-{shape.ink}" fill="{INKS[shape.ink]}"'
    if isinstance(shape, Circle):
        return Markup(f'<circle {line} cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}"/>')
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in shape.points)
    return Markup(f'<path {line} d="M{steps}{"Z" if shape.closed else ""}"/>')


def _pdf(shape: Path | Circle | Words) -> bytes:
    red, green, blue = (int(INKS[shape.ink][at : at + 2], 16) / 255 for at in (1, 3, 5))
    colour = f"{red:.3f} {green:.3f} {blue:.3f}"
    if isinstance(shape, Words):
        share = {"start": 0.0, "middle": 0.5, "end": 1.0}[shape.anchor] * text_width(shape.text, shape.size)
        cos, sin = math.cos(math.radians(shape.turn)), math.sin(math.radians(shape.turn))
        place = f"{cos:.4f} {-sin:.4f} {-sin:.4f} {-cos:.4f} {shape.x - share * cos:.2f} {shape.y + share * sin:.2f} Tm"
        return f"{colour} rg BT /F {shape.size:g} Tf {place} (".encode() + _pdf_text(shape.text) + b") Tj ET"
    if isinstance(shape, Circle):
        path, closed = _round(shape.x, shape.y, shape.radius), True
    else:
        path, closed = _straight(shape.points), shape.closed
    if shape.filled:
        return f"{colour} rg {path} f".encode()
    return f"{colour} RG {shape.width:g} w {path} {'s' if closed else 'S'}".encode()


def _straight(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f} {y:.2f} {'l' if index else 'm'}" for index, (x, y) in enumerate(points))


def _round(x: float, y: float, radius: float) -> str:
    parts = [f"{x + radius:.2f} {y:.2f} m"]
    for a, b in ((1, 0), (0, 1), (-1, 0), (0, -1)):  # from (a, b) to (-b, a)
        corners = ((a - _ARC * b, b + _ARC * a), (-b + _ARC * a, a + _ARC * b), (-b, a))
        parts.append(" ".join(f"{x + radius * u:.2f} {y + radius * v:.2f}" for u, v in corners) + " c")
    return " ".join(parts)


def _pdf_text(text: str) -> bytes:
    plain = text.encode("cp1252", "replace")
    return plain.replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)")
