"""Loops over float32 numbers on CPUs, as vector code that LLVM makes for this processor.

For what tensors' operations do in several passes over memory and could be done in one.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import binding, ir

_WIDTHS = (16, 4, 1)
"""Channels at once: first as many times the first as there is room for, then of what is left."""
LONGEST = _WIDTHS[0]
_FLOAT, _INT = ir.FloatType(), ir.IntType(64)
_POINTER = ir.PointerType(_FLOAT)
_WORTH_A_THREAD = 1 << 16
"""Numbers: what handing them to another thread takes is little beside."""


class VectorCode:
    """A function of addresses of float32 numbers and of whole numbers, in the making; values are LLVM's.

    `build` adds instructions at its end, `given` has the arguments by name. Sums of products are rounded once where
    the processor can.
    """

    def __init__(self, addresses: Sequence[str], numbers: Sequence[str]) -> None:
        self._module, self._kinds = ir.Module(), [_POINTER] * len(addresses) + [_INT] * len(numbers)
        function = ir.Function(self._module, ir.FunctionType(ir.VoidType(), self._kinds), "compute")
        self.given = dict(zip((*addresses, *numbers), function.args, strict=True))
        self.build = ir.IRBuilder(function.append_basic_block())

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

    def each_vector(self, count: Any, body: Callable[[Any, int], None]) -> None:
        """Calls `body` with the first of some neighbouring channels and how many they are, so that all get covered."""
        done: Any = number(0)
        for width in _WIDTHS:
            end = self.build.and_(count, number(-width))
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
            value = build.load(self.place(address, build.mul(apart, number(lane))), typ=_FLOAT)
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

    def compiled(self) -> Callable[..., None]:
        """The function, called with addresses and numbers in their order; it lets other threads run meanwhile."""
        self.build.ret_void()
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
        )
        module = binding.parse_assembly(str(self._module))
        module.verify()
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(module, passes)
        engine = binding.create_mcjit_compiler(module, machine)
        engine.finalize_object()
        kinds = [ctypes.c_void_p if kind is _POINTER else ctypes.c_int64 for kind in self._kinds]
        function: Any = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address("compute"))
        function.engine = engine  # which keeps the code in memory
        compiled: Callable[..., None] = function
        return compiled


_ONCE = ("contract",)


def number(value: int) -> Any:
    """A whole number in LLVM's language."""
    return ir.Constant(_INT, value)


def share_channels(channels: int, numbers: int, run: Callable[[slice], None]) -> None:
    """Calls `run` for parts of the channels, on as many of torch's threads as so many numbers are worth.

    Each channel is computed as it is by one thread.
    """
    vectors = -(-channels // LONGEST)
    count = max(1, min(torch.get_num_threads(), numbers // _WORTH_A_THREAD, vectors))
    ends = [min(channels, LONGEST * (vectors * (i + 1) // count)) for i in range(count)]
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if len(parts) == 1:
        run(parts[0])
    else:
        list(_threads().map(run, parts))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "ttsv-vectors")


os.register_at_fork(after_in_child=_threads.cache_clear)
