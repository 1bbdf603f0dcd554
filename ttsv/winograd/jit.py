"""Functions in machine code for this processor, made by LLVM where they are first needed; torch-free."""

import base64
import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding

from ttsv.winograd.codegen import (
    PRODUCT_ADDRESSES,
    PRODUCT_NUMBERS,
    TRANSFORM_ADDRESSES,
    TRANSFORM_NUMBERS,
    code_of_product,
    code_of_transform,
)

_ROOT = Path(__file__).parents[2]
_PATIENCE = 60  # seconds for what takes one


class CompiledFunction:
    """A function of a kind that `ttsv.winograd.jit` knows, of addresses and whole numbers.

    Compiled by `compile_together`, or at the first call. Other threads of Python run meanwhile.
    """

    def __init__(self, kind: str, *arguments: Any) -> None:
        """`kind` and `arguments` are those of `machine_code`."""
        self.made_by = kind, *arguments
        self._signature = [ctypes.c_void_p] * KINDS[kind].addresses + [ctypes.c_int64] * KINDS[kind].numbers
        self._engine: Any = None
        self._compute: Callable[..., None] | None = None

    @property
    def compiled(self) -> bool:
        """Whether `load` was called."""
        return self._compute is not None

    def load(self, code: bytes) -> None:
        """Takes the object file made of `made_by`."""
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), processor())
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engine = engine  # which keeps the code in memory
        self._compute = ctypes.CFUNCTYPE(None, *self._signature)(engine.get_function_address("compute"))

    def run(self, *values: int) -> None:
        """With the addresses first; nothing is checked."""
        if self._compute is None:
            compile_together([self])
        assert self._compute is not None
        self._compute(*values)


def compile_together(functions: Sequence[CompiledFunction]) -> None:
    """Those that are not yet: all in one go, which takes a second for nine; one alone takes half of it."""
    with _one_at_a_time:
        missing = [function for function in functions if not function.compiled]
        if not missing:  # not even a process
            return
        for function, code in zip(missing, _machine_codes([each.made_by for each in missing]), strict=True):
            function.load(code)


_one_at_a_time = threading.Lock()


def _machine_codes(functions: list[tuple[Any, ...]]) -> list[bytes]:
    """By another process, as a compiler takes some 70 MiB; by this one where that fails."""
    places = [str(_ROOT), *filter(None, sys.path)]
    program = f"import sys; sys.path[:] = {places!r}; from ttsv.winograd.jit import main; main()"
    try:
        done = subprocess.run(
            [sys.executable or "", "-P", "-c", program],
            input=json.dumps(functions),
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE,
        )
        last = done.stdout.rpartition("\n")[2]  # what else is printed comes before
        return [base64.b64decode(code) for code in json.loads(last)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return [machine_code(*function) for function in functions]


class Kind(NamedTuple):
    """Of functions: what writes their code in LLVM's language, and how many addresses and whole numbers they take."""

    code: Callable[..., str]
    addresses: int
    numbers: int


KINDS = {
    "product": Kind(code_of_product, len(PRODUCT_ADDRESSES), len(PRODUCT_NUMBERS)),
    "transform": Kind(code_of_transform, len(TRANSFORM_ADDRESSES), len(TRANSFORM_NUMBERS)),
}


def main() -> None:
    """Reads arguments of `machine_code` as JSON, and writes what it makes of each."""
    made = [machine_code(*function) for function in json.load(sys.stdin)]
    json.dump([base64.b64encode(code).decode() for code in made], sys.stdout)


def processor() -> Any:
    """This processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )


def machine_code(kind: str, *arguments: Any) -> bytes:
    """An object file with the function "compute", of a kind of `KINDS`."""
    machine = processor()
    made: bytes = machine.emit_object(optimised(KINDS[kind].code(*arguments), machine))
    return made


def optimised(text: str, machine: Any) -> Any:
    """LLVM's module of a text in its language, for a machine."""
    module = binding.parse_assembly(text)
    module.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return module
