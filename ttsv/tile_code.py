"""The code of `ttsv.tile_transforms`: `L t L^T` for every tile t."""

from typing import Any

from ttsv.vector_code import VectorCode, number

_WIDTHS = (16, 4, 1)
"""Channels at once."""
LONGEST = _WIDTHS[0]

_AXES = ("image", "row", "column", "y", "x", "channel")
ADDRESSES = ("source", "target", "spare")
NUMBERS = (
    "channels",
    *("images", "rows", "columns"),
    *(f"{side}_{axis}" for side in ("source", "target") for axis in _AXES),
    *("top", "left", "step", "height", "width"),
)


def code_of_transform(matrix: list[list[float]], framed: str, apart: bool, add: bool) -> str:
    """Goes through images, rows, columns and channels; within, everything is unrolled."""
    code = VectorCode(ADDRESSES, NUMBERS)
    build, given = code.build, code.given
    rows, columns = range(len(matrix)), range(len(matrix[0]))
    edge = columns if framed == "source" else rows

    def inside(place: Any, corner: str, size: str) -> list[Any]:
        """Whether each of a tile's rows or columns of pixels lies in the image: from 0 up, as unsigned numbers."""
        first = build.add(build.mul(place, given["step"]), given[corner])
        return [build.icmp_unsigned("<", build.add(first, number(k)), given[size]) for k in edge]

    def tile(starts: dict[str, Any], visible: tuple[list[Any], list[Any]] | None, width: int) -> None:
        def address(side: str, y: int, x: int) -> Any:
            steps = [build.mul(given[f"{side}_{axis}"], number(k)) for axis, k in (("y", y), ("x", x))]
            found = code.place(given[side], code.sum(starts[side], *steps))
            if visible and side == framed:
                found = build.select(build.and_(visible[0][y], visible[1][x]), found, given["spare"])
            return found

        step = given["source_channel"] if apart else None
        pixels = [[code.load(address("source", y, x), width, step) for y in columns] for x in columns]
        halves = [_times(code, matrix, column) for column in pixels]
        for y in rows:
            for x, found in enumerate(_times(code, matrix, [half[y] for half in halves])):
                target = address("target", y, x)
                code.store(code.plus(found, code.load(target, width)) if add else found, target)

    with code.loop(given["images"]) as image, code.loop(given["rows"]) as row, code.loop(given["columns"]) as column:
        visible = (inside(row, "top", "height"), inside(column, "left", "width")) if framed else None
        starts = {
            side: code.sum(
                *(build.mul(at, given[f"{side}_{axis}"]) for axis, at in zip(_AXES, (image, row, column), strict=False))
            )
            for side in ("source", "target")
        }

        def channels(first: Any, width: int) -> None:
            here = {side: build.mul(first, given[f"{side}_channel"]) for side in starts}
            tile({side: build.add(start, here[side]) for side, start in starts.items()}, visible, width)

        code.in_parts(given["channels"], _WIDTHS, channels)
    return code.text()


def _times(code: VectorCode, matrix: list[list[float]], values: list[Any]) -> list[Any]:
    """The matrix times a column of vectors."""
    return [_sum(code, [(c, v) for c, v in zip(row, values, strict=True) if c]) for row in matrix]


def _sum(code: VectorCode, terms: list[tuple[float, Any]]) -> Any:
    total = None
    for factor, value in sorted(terms, key=lambda term: term[0] != 1):
        scaled = code.scaled(value, abs(factor))
        if total is None:
            total = scaled if factor > 0 else code.build.fneg(scaled)
        else:
            total = (code.plus if factor > 0 else code.minus)(total, scaled)
    return total
