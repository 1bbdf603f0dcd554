"""Functions over float32 numbers in memory, put together from LLVM's instructions on vectors; torch-free."""

import functools
from collections.abc import Callable, Iterator, Sequence
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

    def product(self, a: Any, b: Any) -> Any:
        """Of vectors."""
        return self.build.fmul(a, b, flags=_ONCE)

    def plus(self, a: Any, b: Any) -> Any:
        """Of vectors."""
        return self.build.fadd(a, b, flags=_ONCE)

    def minus(self, a: Any, b: Any) -> Any:
        """Of vectors."""
        return self.build.fsub(a, b, flags=_ONCE)


def number(value: int) -> Any:
    """A whole number in LLVM's language."""
    return ir.Constant(_INT, value)
