"""Functions in machine code for this processor, made where they are first needed."""

import base64
import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import binding

from ttsv.compiler import KINDS, machine_code, processor

_ROOT = Path(__file__).parents[1]
_PATIENCE = 60  # seconds for what takes one


class CompiledFunction:
    """A function of a kind that `ttsv.compiler` knows, of addresses and whole numbers.

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
    program = f"import sys; sys.path[:] = {places!r}; from ttsv.compiler import main; main()"
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
