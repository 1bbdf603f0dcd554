"""The machine code of `ttsv.tile_transforms`, by LLVM; torch-free, as it is made in a process of its own."""

import base64
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir

_WIDTHS = (16, 4, 1)
"""Channels at once: first as many times the first as there is room for, then of what is left."""
LONGEST = _WIDTHS[0]
_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_POINTER = ir.PointerType(_FLOAT)
_ONCE = ("contract",)

_AXES = ("image", "row", "column", "y", "x", "channel")
ADDRESSES = ("source", "target", "spare")
NUMBERS = (
    "channels",
    *("images", "rows", "columns"),
    *(f"{side}_{axis}" for side in ("source", "target") for axis in _AXES),
    *("top", "left", "step", "height", "width"),
)


def main() -> None:
    """Reads arguments of `machine_code` as JSON, and writes what it makes of each."""
    made = [machine_code(*transform) for transform in json.load(sys.stdin)]
    json.dump([base64.b64encode(code).decode() for code in made], sys.stdout)


def processor() -> Any:
    """This processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )


def machine_code(matrix: list[list[float]], framed: str, apart: bool, add: bool) -> bytes:
    """An object file with the function "compute" for a transform as `TileTransform` describes it."""
    code = _code(matrix, framed, apart, add)
    machine = processor()
    module = binding.parse_assembly(code)
    module.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    made: bytes = machine.emit_object(module)
    return made


class _Code:
    """A function of addresses of float32 numbers and of whole numbers, in the making; values are LLVM's.

    `build` adds instructions at its end, `given` has the arguments by name. Sums of products are rounded once where
    the processor can.
    """

    def __init__(self, addresses: Sequence[str], numbers: Sequence[str]) -> None:
        kinds = [_POINTER] * len(addresses) + [_INT] * len(numbers)
        self._module = ir.Module()
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), kinds), "compute")
        self.given = dict(zip((*addresses, *numbers), function.args, strict=True))
        self.build = ir.IRBuilder(function.append_basic_block())

    def text(self) -> str:
        """The finished function in LLVM's language."""
        self.build.ret_void()
        return str(self._module)

    @contextmanager
    def loop(self, end: Any, *, start: Any = None, step: int = 1) -> Iterator[Any]:
        """What is built within runs for every number from `start` (0) to before `end`."""
        build, before = self.build, self.build.block
        head, body, after = (build.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        at = build.phi(_INT)
        at.add_incoming(start or _number(0), before)
        build.cbranch(build.icmp_signed("<", at, end), body, after)
        build.position_at_end(body)
        yield at
        at.add_incoming(build.add(at, _number(step)), build.block)
        build.branch(head)
        build.position_at_end(after)

    def each_vector(self, count: Any, body: Callable[[Any, int], None]) -> None:
        """Calls `body` with the first of some neighbouring channels and how many they are, so that all get covered."""
        done: Any = _number(0)
        for width in _WIDTHS:
            end = self.build.and_(count, _number(-width))
            with self.loop(end, start=done, step=width) as channel:
                body(channel, width)
            done = end

    def sum(self, *values: Any) -> Any:
        """Of whole numbers."""
        return functools.reduce(self.build.add, values)

    def place(self, address: Any, offset: Any) -> Any:
        """The address so many numbers further on."""
        return self.build.gep(address, [offset], source_etype=_FLOAT)

    def load(self, address: Any, width: int, apart: Any = None) -> Any:
        """So many numbers, side by side or some numbers apart."""
        build, kind = self.build, ir.VectorType(_FLOAT, width)
        if apart is None:
            found = build.load(build.bitcast(address, ir.PointerType(kind)), typ=kind)
            found.align = 4
            return found
        found = ir.Constant(kind, ir.Undefined)
        for lane in range(width):
            value = build.load(self.place(address, build.mul(apart, _number(lane))), typ=_FLOAT)
            found = build.insert_element(found, value, ir.Constant(ir.IntType(32), lane))
        return found

    def store(self, value: Any, address: Any) -> None:
        """Side by side."""
        self.build.store(value, self.build.bitcast(address, ir.PointerType(value.type))).align = 4

    def scaled(self, value: Any, factor: float) -> Any:
        """The product with a constant."""
        return value if factor == 1 else self.product(value, ir.Constant(value.type, [factor] * value.type.count))

    def product(self, a: Any, b: Any) -> Any:
        """Of vectors."""
        return self.build.fmul(a, b, flags=_ONCE)

    def plus(self, a: Any, b: Any) -> Any:
        """Of vectors."""
        return self.build.fadd(a, b, flags=_ONCE)

    def minus(self, a: Any, b: Any) -> Any:
        """Of vectors."""
        return self.build.fsub(a, b, flags=_ONCE)


def _code(matrix: list[list[float]], framed: str, apart: bool, add: bool) -> str:
    """Goes through images, rows, columns and channels; within, everything is unrolled."""
    code = _Code(ADDRESSES, NUMBERS)
    build, given = code.build, code.given
    rows, columns = range(len(matrix)), range(len(matrix[0]))
    edge = columns if framed == "source" else rows

    def inside(place: Any, corner: str, size: str) -> list[Any]:
        """Whether each of a tile's rows or columns of pixels lies in the image: from 0 up, as unsigned numbers."""
        first = build.add(build.mul(place, given["step"]), given[corner])
        return [build.icmp_unsigned("<", build.add(first, _number(k)), given[size]) for k in edge]

    def tile(starts: dict[str, Any], visible: tuple[list[Any], list[Any]] | None, width: int) -> None:
        def address(side: str, y: int, x: int) -> Any:
            steps = [build.mul(given[f"{side}_{axis}"], _number(k)) for axis, k in (("y", y), ("x", x))]
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
    return code.text()


def _times(code: _Code, matrix: list[list[float]], values: list[Any]) -> list[Any]:
    """The matrix times a column of vectors."""
    return [_sum(code, [(c, v) for c, v in zip(row, values, strict=True) if c]) for row in matrix]


def _sum(code: _Code, terms: list[tuple[float, Any]]) -> Any:
    total = None
    for factor, value in sorted(terms, key=lambda term: term[0] != 1):
        scaled = code.scaled(value, abs(factor))
        if total is None:
            total = scaled if factor > 0 else code.build.fneg(scaled)
        else:
            total = (code.plus if factor > 0 else code.minus)(total, scaled)
    return total


def _number(value: int) -> Any:
    """A whole number in LLVM's language."""
    return ir.Constant(_INT, value)
