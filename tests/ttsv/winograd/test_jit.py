import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from tests.examples import deep
from ttsv.winograd import jit
from ttsv.winograd.jit import CompiledFunction, compile_together, machine_code

SIZES = (1, 30, 20, 33)


def product() -> CompiledFunction:
    return CompiledFunction("product", False)


def computes(function: CompiledFunction) -> bool:
    places, rows, inner, columns = SIZES
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    target = torch.full((rows, columns), torch.nan)
    strides = (0, inner, 1, 0, columns, 0, columns)
    function.run(left.data_ptr(), right.data_ptr(), target.data_ptr(), places, rows, inner, columns, *strides)
    return torch.allclose(target.double(), left.double() @ right.double(), atol=1e-5)


def test_is_compiled_at_the_first_call() -> None:
    function = product()
    assert not function.compiled
    assert computes(function)
    assert function.compiled


def test_several_are_compiled_together_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [product(), CompiledFunction("transform", [[1.0]], "", False, False), product()]
    compile_together(functions[:2])
    monkeypatch.setattr(functions[0], "load", None)
    compile_together(functions)
    assert computes(functions[0])
    assert computes(functions[2])


@pytest.mark.slow
@pytest.mark.parametrize("python", ["", deep(None), "/no/such/file", "/bin/false", deep("/bin/true"), "/bin/cat"])
def test_code_is_made_here_where_another_process_makes_none(
    python: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counting(*args: Any) -> bytes:
        made.append(args)
        return machine_code(*args)

    monkeypatch.setattr(jit, "machine_code", counting)
    assert computes(product())
    assert not made
    monkeypatch.setattr(sys, "executable", python)
    assert computes(product())
    assert len(made) == 1


def test_files_in_the_working_directory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jit, "machine_code", None)
    assert computes(product())


def test_threads_that_come_first_together_share_one_code(monkeypatch: pytest.MonkeyPatch) -> None:
    function, made = product(), []
    compute = jit._machine_codes

    def counting(functions: list[tuple[Any, ...]]) -> list[bytes]:
        made.append(functions)
        return compute(functions)

    monkeypatch.setattr(jit, "_machine_codes", counting)
    start = Barrier(6)

    def run(_: int) -> bool:
        start.wait()
        return all(computes(function) for _ in range(50))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(run, range(6)))
    assert made == [[function.made_by]]
