"""Code in LLVM's language for products of matrices and for transforms `L t L^T` of tiles t; torch-free.

`VectorCode` puts functions over float32 numbers in memory together from instructions on vectors.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

_FLOAT, _INT, _SHORT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_POINTER, _BYTES = ir.PointerType(_FLOAT), ir.PointerType(ir.IntType(8))
_ONCE = ("contract",)
LINE = 16
"""Numbers that caches fetch together."""


class VectorCode:
    """A function of addresses of float32 numbers and of whole numbers, in the making; values are LLVM's.

    `build` adds instructions at its end, `given` has the arguments by name. `product`, `plus` and `minus` are of two
    vectors: sums of products are rounded once where the processor can.
    """

    def __init__(self, addresses: Sequence[str], numbers: Sequence[str]) -> None:
        kinds = [_POINTER] * len(addresses) + [_INT] * len(numbers)
        self._module = ir.Module()
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), kinds), "compute")
        self.given = dict(zip((*addresses, *numbers), function.args, strict=True))
        self.build = ir.IRBuilder(function.append_basic_block())
        operations = self.build.fmul, self.build.fadd, self.build.fsub
        self.product, self.plus, self.minus = (functools.partial(of_two, flags=_ONCE) for of_two in operations)

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
        at.add_incoming(start or number(0), before)
        build.cbranch(build.icmp_signed("<", at, end), body, after)
        build.position_at_end(body)
        yield at
        at.add_incoming(build.add(at, number(step)), build.block)
        build.branch(head)
        build.position_at_end(after)

    def in_parts(self, count: Any, sizes: Sequence[int], body: Callable[[Any, int], None]) -> None:
        """Calls `body` with the start and the size of parts, so that all of `count` gets covered.

        As many of the first size as there is room for, then of the next; the last is one.
        """
        build, done = self.build, number(0)
        for size in sizes:
            parts = build.udiv(build.sub(count, done), number(size))
            end = build.add(done, build.mul(parts, number(size)))
            with self.loop(end, start=done, step=size) as start:
                body(start, size)
            done = end

    def variable(self, value: Any) -> Any:
        """The address of a number or vector that `build` may load and store; it stays in a register where it can."""
        with self.build.goto_entry_block():
            found = self.build.alloca(value.type)
        self.build.store(value, found)
        return found

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
            value = build.load(self.place(address, build.mul(apart, number(lane))), typ=_FLOAT)
            found = build.insert_element(found, value, ir.Constant(_SHORT, lane))
        return found

    def everywhere(self, address: Any, width: int) -> Any:
        """A vector of the number at the address."""
        kind = ir.VectorType(_FLOAT, width)
        one = self.build.load(address, typ=_FLOAT)
        first = self.build.insert_element(ir.Constant(kind, ir.Undefined), one, ir.Constant(_SHORT, 0))
        lanes = ir.Constant(ir.VectorType(_SHORT, width), [0] * width)
        return self.build.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)

    def zeros(self, width: int) -> Any:
        """A vector of them."""
        return ir.Constant(ir.VectorType(_FLOAT, width), [0.0] * width)

    def store(self, value: Any, address: Any) -> None:
        """Side by side."""
        self.build.store(value, self.build.bitcast(address, ir.PointerType(value.type))).align = 4

    def expect(self, address: Any, numbers: int, *, written: bool = False) -> None:
        """Begins to fetch so many numbers, to be read or written; the address need not be one."""
        kinds = [_BYTES, _SHORT, _SHORT, _SHORT]
        name = "llvm.prefetch.p0"
        fetch = self._module.globals.get(name) or ir.Function(self._module, ir.FunctionType(ir.VoidType(), kinds), name)
        settings = [ir.Constant(_SHORT, value) for value in (int(written), 3, 1)]  # to be kept near; data
        for first in range(0, numbers, LINE):
            line = self.build.bitcast(self.place(address, number(first)), _BYTES)
            self.build.call(fetch, [line, *settings])

    def scaled(self, value: Any, factor: float) -> Any:
        """The product with a constant."""
        return value if factor == 1 else self.product(value, ir.Constant(value.type, [factor] * value.type.count))


def number(value: int) -> Any:
    """A whole number in LLVM's language."""
    return ir.Constant(_INT, value)


# Many products of matrices. A few rows of the result at a time, and two vectors of its columns, are summed in
# registers: for each number of the left factor, in all lanes of one, two of the right factor's are read. The right
# factor's strip of columns stays in the first cache, the left factor in the second, so that neither is copied to
# another order first. Meanwhile the next rows of the left one (where they lie side by side), the next columns of the
# right one and the result's place are fetched.

PRODUCT_ADDRESSES = ("left", "right", "target")
PRODUCT_NUMBERS = (
    *("places", "rows", "inner", "columns"),
    *("left_place", "left_row", "left_inner"),
    *("right_place", "right_inner"),
    *("target_place", "target_row"),
)
_ROWS, _COLUMNS = (12, 4, 1), (32, 16, 4, 1)
"""Of the result at once: of 32 registers of 16 numbers the sums take 24."""


def code_of_product(add: bool) -> str:
    """For every place `target = left right`, or with `add` `target + left right`."""
    code = VectorCode(PRODUCT_ADDRESSES, PRODUCT_NUMBERS)
    build, given = code.build, code.given

    with code.loop(given["places"]) as place:
        left, right, target = (
            code.place(given[side], build.mul(place, given[f"{side}_place"])) for side in PRODUCT_ADDRESSES
        )

        def strip(column: Any, columns: int) -> None:
            def block(row: Any, rows: int) -> None:
                start = code.place(left, build.mul(row, given["left_row"]))
                found = code.place(target, build.add(build.mul(row, given["target_row"]), column))
                _block(code, start, code.place(right, column), found, rows, columns, add)

            code.in_parts(given["rows"], _ROWS, block)

        code.in_parts(given["columns"], _COLUMNS, strip)
    return code.text()


def _block(code: VectorCode, left: Any, right: Any, target: Any, rows: int, columns: int, add: bool) -> None:
    """So many rows and columns of one product; the addresses are those of the first numbers that it needs."""
    build, given = code.build, code.given
    found = [code.place(target, build.mul(given["target_row"], number(row))) for row in range(rows)]
    for address in found:
        code.expect(address, columns, written=True)
    next_left = code.place(left, build.mul(given["left_row"], number(rows)))
    sums = [code.variable(code.zeros(columns)) for _ in found]
    with code.loop(given["inner"]) as inner:
        code.expect(code.place(next_left, build.mul(inner, number(LINE))), LINE)
        here = code.place(right, build.mul(inner, given["right_inner"]))
        code.expect(code.place(here, number(columns)), columns)
        factors = code.load(here, columns)
        start = code.place(left, build.mul(inner, given["left_inner"]))
        for row, total in enumerate(sums):
            factor = code.everywhere(code.place(start, build.mul(given["left_row"], number(row))), columns)
            build.store(code.plus(build.load(total), code.product(factor, factors)), total)
    for address, total in zip(found, sums, strict=True):
        value = build.load(total)
        code.store(code.plus(value, code.load(address, columns)) if add else value, address)


_WIDTHS = (16, 4, 1)
"""Channels at once."""
LONGEST = _WIDTHS[0]

_AXES = ("image", "row", "column", "y", "x", "channel")
TRANSFORM_ADDRESSES = ("source", "target", "spare")
TRANSFORM_NUMBERS = (
    "channels",
    *("images", "rows", "columns"),
    *(f"{side}_{axis}" for side in ("source", "target") for axis in _AXES),
    *("top", "left", "step", "height", "width"),
)


def code_of_transform(matrix: list[list[float]], framed: str, apart: bool, add: bool) -> str:
    """Goes through images, rows, columns and channels; within, everything is unrolled."""
    code = VectorCode(TRANSFORM_ADDRESSES, TRANSFORM_NUMBERS)
    build, given = code.build, code.given
    rows, columns = range(len(matrix)), range(len(matrix[0]))
    edge = columns if framed == "source" else rows

    def inside(place: Any, corner: str, size: str) -> list[Any]:
        """Whether each of a tile's rows or columns of pixels lies in the image: from 0 up, as unsigned numbers."""
        first = build.add(build.mul(place, given["step"]), given[corner])
        return [build.icmp_unsigned("<", build.add(first, number(k)), given[size]) for k in edge]

    def tile(starts: Mapping[str, Any], visible: tuple[list[Any], list[Any]] | None, width: int) -> None:
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
