"""`L t L^T` for every tile t of images, many channels at once, by code made for each matrix L.

What fast convolutions do to their numbers besides products takes as long as memory does only where a tile is read
once, transformed along both axes in registers and written once; with tensors' operations each of these is a pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ttsv.vector_code import LONGEST, VectorCode, number, share_channels


class Tiles(NamedTuple):
    """Square tiles in a float32 tensor on the CPU, at equal distances.

    `strides`, in numbers, lead to the next image, row and column of tiles, row and column of pixels, and channel;
    `start` to the first pixel of the first tile, which may lie outside of the tensor where `inside` says so.
    """

    values: Tensor
    start: int
    strides: tuple[int, int, int, int, int, int]
    inside: "Frame | None" = None
    """Pixels outside are read as zero, and not written; None: there are none."""

    def of_channel(self, channel: int) -> int:
        """The address of the first tile's first pixel."""
        return self.values.data_ptr() + 4 * (self.start + channel * self.strides[-1])


class Frame(NamedTuple):
    """The image around tiles: the corner of its first tile, how far apart they are, its size; in pixels."""

    corner: tuple[int, int]
    step: int
    size: tuple[int, int]


class TileTransform:
    """`L t L^T` for L of `matrix` (rows, columns): tiles of columns x columns pixels to those of rows x rows.

    With `add` the result is added to what is there, tile after tile, so that tiles may overlap. Compiled when made,
    within 0.2 seconds; the same numbers whatever the number of threads.
    """

    def __init__(self, matrix: Tensor, *, framed: str = "", apart: bool = False, add: bool = False) -> None:
        """`framed`: which tiles have a frame, "source", "target" or none.

        Channels lie side by side, but with `apart` those of the source may lie at any distance.
        """
        self._pixels = len(matrix) ** 2
        self._spare = torch.zeros(LONGEST, device="cpu", dtype=torch.float32)
        self._run = _compiled(matrix.tolist(), framed, apart=apart, add=add)

    def __call__(self, source: Tiles, target: Tiles, counts: tuple[int, int, int], channels: int) -> None:
        """For so many images, rows and columns of tiles, and channels."""
        frame = source.inside or target.inside or Frame((0, 0), 0, (0, 0))
        numbers = (*counts, *source.strides, *target.strides, *frame.corner, frame.step, *frame.size)

        def run(part: slice) -> None:
            addresses = source.of_channel(part.start), target.of_channel(part.start)
            self._run(*addresses, self._spare.data_ptr(), part.stop - part.start, *numbers)

        share_channels(channels, counts[0] * counts[1] * counts[2] * channels * self._pixels, run)


_AXES = ("image", "row", "column", "y", "x", "channel")
_ADDRESSES = ("source", "target", "spare")
_NUMBERS = (
    "channels",
    *("images", "rows", "columns"),
    *(f"{side}_{axis}" for side in ("source", "target") for axis in _AXES),
    *("top", "left", "step", "height", "width"),
)


def _compiled(matrix: list[list[float]], framed: str, *, apart: bool, add: bool) -> Callable[..., None]:
    """Goes through images, rows, columns and channels; within, everything is unrolled."""
    code = VectorCode(_ADDRESSES, _NUMBERS)
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

        code.each_vector(given["channels"], channels)
    return code.compiled()


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
