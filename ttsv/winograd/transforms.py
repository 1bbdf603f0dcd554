"""Transforms `L t L^T` of every tile t, and products of transformed tiles, by code made for each.

What fast convolutions do to their numbers besides products takes as long as memory does only where a tile is read
once, transformed along both axes in registers and written once; with tensors' operations each of these is a pass.
"""

from typing import NamedTuple

import torch
from llvmlite import binding
from torch import Tensor

from ttsv.winograd.codegen import LONGEST
from ttsv.winograd.jit import CompiledFunction


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


class TileProduct(CompiledFunction):
    """`target = left right` for each of a stack of matrices, or with `add` `target + left right`; float32 on the CPU.

    The rows of `right` and `target` lie side by side in memory, those of `left` anyhow. By code of our own on one
    thread of a processor with AVX-512, which it serves better than torch's at such sizes, and by torch elsewhere.
    """

    def __init__(self, *, add: bool = False) -> None:
        super().__init__("product", add)
        self._add = add

    def __call__(self, left: Tensor, right: Tensor, target: Tensor) -> None:
        """`left` (places, rows, inner), `right` (places, inner, columns), `target` (places, rows, columns)."""
        if not own_products():
            torch.baddbmm(target, left, right, beta=float(self._add), out=target)
            return
        sizes = *left.shape, right.shape[2]
        strides = *left.stride(), *right.stride()[:2], *target.stride()[:2]
        self.run(left.data_ptr(), right.data_ptr(), target.data_ptr(), *sizes, *strides)


def own_products() -> bool:
    """Whether `TileProduct` computes by its own code, on this processor with so many threads as torch has now."""
    return _WIDE and torch.get_num_threads() == 1


_WIDE = binding.get_host_cpu_features().get("avx512f", False)
