"""`L t L^T` for every tile t of images, many channels at once, by code made for each matrix L.

What fast convolutions do to their numbers besides products takes as long as memory does only where a tile is read
once, transformed along both axes in registers and written once; with tensors' operations each of these is a pass.
"""

import base64
import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llvmlite import binding
from torch import Tensor

from ttsv.tile_code import ADDRESSES, LONGEST, NUMBERS, machine_code, processor

_ROOT = Path(__file__).parents[1]
_PATIENCE = 60  # seconds for what takes one


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


class TileTransform:
    """`L t L^T` for L of `matrix` (rows, columns): tiles of columns x columns pixels to those of rows x rows.

    With `add` the result is added to what is there, tile after tile, so that tiles may overlap. On one
    thread: others would wait for those of the products between. Compiled by `compile_transforms`, or at the first call.
    """

    def __init__(self, matrix: Tensor, *, framed: str = "", apart: bool = False, add: bool = False) -> None:
        """`framed`: which tiles have a frame, "source", "target" or none.

        Channels lie side by side, but with `apart` those of the source may lie at any distance.
        """
        self._spare = torch.zeros(LONGEST, device="cpu", dtype=torch.float32)
        self.made_by = matrix.tolist(), framed, apart, add
        self.compute: Callable[..., None] | None = None
        self.engine: Any = None

    def __call__(self, source: Tiles, target: Tiles, counts: tuple[int, int, int], channels: int) -> None:
        """For so many images, rows and columns of tiles, and channels."""
        frame = source.inside or target.inside or Frame((0, 0), 0, (0, 0))
        numbers = (*counts, *source.strides, *target.strides, *frame.corner, frame.step, *frame.size)

        if self.compute is None:
            compile_transforms([self])
        assert self.compute is not None
        self.compute(source.address(), target.address(), self._spare.data_ptr(), channels, *numbers)


def compile_transforms(transforms: Sequence[TileTransform]) -> None:
    """Those that are not yet: all in one go, which takes a second for six or seven; one alone takes half of it."""
    arguments = [ctypes.c_void_p] * len(ADDRESSES) + [ctypes.c_int64] * len(NUMBERS)
    with _one_at_a_time:
        missing = [transform for transform in transforms if transform.compute is None]
        for transform, code in zip(missing, _machine_codes([each.made_by for each in missing]), strict=True):
            engine = binding.create_mcjit_compiler(binding.parse_assembly(""), processor())
            engine.add_object_file(binding.ObjectFileRef.from_data(code))
            engine.finalize_object()
            transform.engine = engine  # which keeps the code in memory
            transform.compute = ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address("compute"))


_one_at_a_time = threading.Lock()


def _machine_codes(transforms: list[tuple[Any, ...]]) -> list[bytes]:
    """By another process, as a compiler takes some 70 MiB; by this one where that fails."""
    places = [str(_ROOT), *filter(None, sys.path)]
    program = f"import sys; sys.path[:] = {places!r}; from ttsv.tile_code import main; main()"
    try:
        done = subprocess.run(
            [sys.executable or "", "-P", "-c", program],
            input=json.dumps(transforms),
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE,
        )
        last = done.stdout.rpartition("\n")[2]  # what else is printed comes before
        return [base64.b64decode(code) for code in json.loads(last)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return [machine_code(*transform) for transform in transforms]
