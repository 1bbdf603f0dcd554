"""`L t L^T` for every tile t of images, many channels at once: straight vector code that LLVM makes for each matrix L.

What fast convolutions do to their numbers besides products takes as long as memory does only where a tile is read
once, transformed along both axes in registers and written once; with tensors' operations each of these is a pass.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from llvmlite import binding, ir
from torch import Tensor

_WIDTHS = (16, 4, 1)
"""Channels at once: first as many times the first as there is room for, then of what is left."""
_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_POINTER = ir.PointerType(_FLOAT)
_WORTH_A_THREAD = 1 << 16
"""Numbers of results: what handing them to another thread takes is little beside."""


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
        self._spare = torch.zeros(_WIDTHS[0], device="cpu", dtype=torch.float32)
        self._run, self._engine = _compiled(_Code(matrix.tolist(), framed, apart, add).text())

    def __call__(self, source: Tiles, target: Tiles, counts: tuple[int, int, int], channels: int) -> None:
        """For so many images, rows and columns of tiles, and channels."""
        frame = source.inside or target.inside or Frame((0, 0), 0, (0, 0))
        numbers = (*counts, *source.strides, *target.strides, *frame.corner, frame.step, *frame.size)

        def run(part: slice) -> None:
            addresses = source.of_channel(part.start), target.of_channel(part.start)
            self._run(*addresses, self._spare.data_ptr(), part.stop - part.start, *numbers)

        numbers_made = counts[0] * counts[1] * counts[2] * self._pixels * channels
        parts = _shares(channels, min(torch.get_num_threads(), numbers_made // _WORTH_A_THREAD))
        if len(parts) == 1:
            run(parts[0])
        else:
            list(_threads().map(run, parts))


def _shares(channels: int, threads: int) -> list[slice]:
    """Of the channels, for each thread: whole vectors."""
    vectors = -(-channels // _WIDTHS[0])
    count = max(1, min(threads, vectors))
    ends = [min(channels, _WIDTHS[0] * (vectors * (i + 1) // count)) for i in range(count)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "ttsv-tiles")


os.register_at_fork(after_in_child=_threads.cache_clear)


class _Code:
    """LLVM's language for one transform.

    The function goes through images, rows, columns and channels; within, everything is unrolled.
    """

    _ADDRESSES = ("source", "target", "spare")
    _NUMBERS = (
        "channels",
        *("images", "rows", "columns"),
        *(f"source_{axis}" for axis in ("image", "row", "column", "y", "x", "channel")),
        *(f"target_{axis}" for axis in ("image", "row", "column", "y", "x", "channel")),
        *("top", "left", "step", "height", "width"),
    )

    def __init__(self, matrix: list[list[float]], framed: str, apart: bool, add: bool) -> None:
        self.matrix, self.framed, self.apart, self.add = matrix, framed, apart, add
        self.module = ir.Module()
        kinds = [_POINTER] * len(self._ADDRESSES) + [_INT] * len(self._NUMBERS)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), "transform")
        self.given = dict(zip(self._ADDRESSES + self._NUMBERS, function.args, strict=True))
        self.builder = ir.IRBuilder(function.append_basic_block())

    def text(self) -> str:
        build, given = self.builder, self.given
        with self._loop("images") as image, self._loop("rows") as row, self._loop("columns") as column:
            place = {"image": image, "row": row, "column": column}
            starts = {
                side: functools.reduce(build.add, [build.mul(place[k], given[f"{side}_{k}"]) for k in place])
                for side in ("source", "target")
            }
            edge = len(self.matrix[0] if self.framed == "source" else self.matrix)
            inside = (
                self._inside(row, edge, "top", "height") if self.framed else [],
                self._inside(column, edge, "left", "width") if self.framed else [],
            )
            done: Any = _number(0)
            for width in _WIDTHS:
                end = build.and_(given["channels"], _number(-width))
                with self._loop("", done, end, width) as channel:
                    here = {side: build.mul(channel, given[f"{side}_channel"]) for side in starts}
                    self._tile({side: build.add(starts[side], here[side]) for side in starts}, inside, width)
                done = end
        build.ret_void()
        return str(self.module)

    @contextmanager
    def _loop(self, name: str, start: Any = None, end: Any = None, step: int = 1) -> Iterator[Any]:
        build, before = self.builder, self.builder.block
        head, body, after = (build.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        at = build.phi(_INT)
        at.add_incoming(start or _number(0), before)
        build.cbranch(build.icmp_signed("<", at, end or self.given[name]), body, after)
        build.position_at_end(body)
        yield at
        at.add_incoming(build.add(at, _number(step)), build.block)
        build.branch(head)
        build.position_at_end(after)

    def _inside(self, place: Any, edge: int, corner: str, size: str) -> list[Any]:
        """Whether each of a tile's rows or columns of pixels lies in the image: from 0 up, as unsigned numbers."""
        build, given = self.builder, self.given
        first = build.add(build.mul(place, given["step"]), given[corner])
        return [build.icmp_unsigned("<", build.add(first, _number(k)), given[size]) for k in range(edge)]

    def _tile(self, starts: dict[str, Any], inside: tuple[list[Any], list[Any]], width: int) -> None:
        build, kind = self.builder, ir.VectorType(_FLOAT, width)
        rows, columns = range(len(self.matrix)), range(len(self.matrix[0]))

        def address(side: str, y: int, x: int) -> Any:
            steps = [build.mul(self.given[f"{side}_{axis}"], _number(k)) for axis, k in (("y", y), ("x", x))]
            found = build.gep(self.given[side], [functools.reduce(build.add, steps, starts[side])], source_etype=_FLOAT)
            if side == self.framed:
                found = build.select(build.and_(inside[0][y], inside[1][x]), found, self.given["spare"])
            return found

        def load(side: str, y: int, x: int) -> Any:
            if side == "source" and self.apart:
                return self._gathered(address(side, y, x), kind)
            found = build.load(build.bitcast(address(side, y, x), ir.PointerType(kind)), typ=kind)
            found.align = 4
            return found

        halves = [self._products([load("source", y, x) for y in columns], kind) for x in columns]
        for y in rows:
            for x, found in enumerate(self._products([half[y] for half in halves], kind)):
                total = build.fadd(found, load("target", y, x)) if self.add else found
                build.store(total, build.bitcast(address("target", y, x), ir.PointerType(kind))).align = 4

    def _gathered(self, first: Any, kind: Any) -> Any:
        build, found = self.builder, ir.Constant(kind, ir.Undefined)
        for lane in range(kind.count):
            step = build.mul(self.given["source_channel"], _number(lane))
            value = build.load(build.gep(first, [step], source_etype=_FLOAT), typ=_FLOAT)
            found = build.insert_element(found, value, ir.Constant(ir.IntType(32), lane))
        return found

    def _products(self, values: list[Any], kind: Any) -> list[Any]:
        """The matrix times a vector of vectors; rounding once per product and sum where the processor can."""
        return [self._sum([(c, v) for c, v in zip(row, values, strict=True) if c], kind) for row in self.matrix]

    def _sum(self, terms: list[tuple[float, Any]], kind: Any) -> Any:
        build, flags = self.builder, ("contract",)
        total = None
        for factor, value in sorted(terms, key=lambda term: term[0] != 1):
            scaled = value if abs(factor) == 1 else build.fmul(value, _filled(abs(factor), kind), flags=flags)
            if total is None:
                total = scaled if factor > 0 else build.fneg(scaled)
            else:
                total = (build.fadd if factor > 0 else build.fsub)(total, scaled, flags=flags)
        return total


def _number(value: int) -> Any:
    return ir.Constant(_INT, value)


def _filled(value: float, kind: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _compiled(code: str) -> tuple[Any, Any]:
    """The function of some code, for this processor, and what keeps it in memory."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    module = binding.parse_assembly(code)
    module.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    kinds = [ctypes.c_void_p] * len(_Code._ADDRESSES) + [ctypes.c_int64] * len(_Code._NUMBERS)
    return ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address("transform")), engine
