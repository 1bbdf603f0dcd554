"""`L t L^T` for every tile t of images, many channels at once, by code made for each matrix L.

What fast convolutions do to their numbers besides products takes as long as memory does only where a tile is read
once, transformed along both axes in registers and written once; with tensors' operations each of these is a pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ttsv.compiled import CompiledFunction
from ttsv.tile_code import LONGEST


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

    def address(self) -> int:
        """Of the first tile's first pixel."""
        return self.values.data_ptr() + 4 * self.start


class Frame(NamedTuple):
    """The image around tiles: the corner of its first tile, how far apart they are, its size; in pixels."""

    corner: tuple[int, int]
    step: int
    size: tuple[int, int]


class TileTransform(CompiledFunction):
    """`L t L^T` for L of `matrix` (rows, columns): tiles of columns x columns pixels to those of rows x rows.

    With `add` the result is added to what is there, tile after tile, so that tiles may overlap. On one
    thread: others would wait for those of the products between.
    """

    def __init__(self, matrix: Tensor, *, framed: str = "", apart: bool = False, add: bool = False) -> None:
        """`framed`: which tiles have a frame, "source", "target" or none.

        Channels lie side by side, but with `apart` those of the source may lie at any distance.
        """
        super().__init__("transform", matrix.tolist(), framed, apart, add)
        self._spare = torch.zeros(LONGEST, device="cpu", dtype=torch.float32)

    def __call__(self, source: Tiles, target: Tiles, counts: tuple[int, int, int], channels: int) -> None:
        """For so many images, rows and columns of tiles, and channels."""
        frame = source.inside or target.inside or Frame((0, 0), 0, (0, 0))
        numbers = (*counts, *source.strides, *target.strides, *frame.corner, frame.step, *frame.size)
        self.run(source.address(), target.address(), self._spare.data_ptr(), channels, *numbers)
