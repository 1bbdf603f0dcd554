import platform
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import binding
from torch import Tensor

from tests.examples import examples
from ttsv.winograd import transforms
from ttsv.winograd.codegen import code_of_product
from ttsv.winograd.jit import compile_together, optimised, processor
from ttsv.winograd.transforms import TileProduct, own_products

PRODUCTS = {False: TileProduct(), True: TileProduct(add=True)}
SIZES = st.one_of(st.integers(0, 5), st.integers(10, 40), st.sampled_from([47, 64, 65]))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_together(list(PRODUCTS.values()))


@pytest.fixture(params=["own", "torch"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways on every processor: our code needs no AVX-512, it only pays there."""
    monkeypatch.setattr(transforms, "own_products", lambda: request.param == "own")


def within(values: Tensor, rows_apart: int, places_apart: int) -> tuple[Tensor, Tensor]:
    """The values with so many numbers between rows and matrices, and the memory they lie in, NaN elsewhere."""
    places, rows, columns = values.shape
    row, start = columns + rows_apart, 7
    place = rows * row + places_apart
    memory = torch.full((start + places * place + 64,), torch.nan)
    found = memory.as_strided(values.shape, (place, row, 1), start)
    return found.copy_(values), memory


@pytest.mark.usefixtures("side")
@pytest.mark.parametrize("add", [False, True])
@examples(60)
@given(
    sizes=st.tuples(st.integers(1, 3), SIZES, SIZES, SIZES),
    apart=st.tuples(st.integers(0, 3), st.integers(0, 50)),
    turned=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products_are_those_in_float64_and_nothing_else_is_written(
    add: bool, sizes: tuple[int, int, int, int], apart: tuple[int, int], turned: bool, seed: int
) -> None:
    places, rows, inner, columns = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (places, inner, rows) if turned else (places, rows, inner), (places, inner, columns)
    (left, _), (right, _) = (within(torch.randn(shape, generator=generator), *apart) for shape in shapes)
    left = left.transpose(1, 2) if turned else left
    before = torch.randn(places, rows, columns, generator=generator)
    target, memory = within(before if add else torch.full_like(before, torch.nan), *apart)
    PRODUCTS[add](left, right, target)
    expected = left.double() @ right.double() + (before.double() if add else 0.0)
    torch.testing.assert_close(target.double(), expected, rtol=1e-5, atol=1e-5)
    target.fill_(torch.nan)
    assert memory.isnan().all()


def test_own_code_is_used_on_one_thread_of_wide_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(*, wide: bool, threads: int) -> bool:
        monkeypatch.setattr(transforms, "_WIDE", wide)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return own_products()
        finally:
            torch.set_num_threads(before)

    assert used(wide=True, threads=1)
    assert not used(wide=True, threads=2)
    assert not used(wide=False, threads=1)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="an LLVM for other processors")
@pytest.mark.parametrize("cpu", ["skylake-avx512", "sapphirerapids", "znver4"])
def test_sums_stay_in_registers(cpu: str) -> None:
    """What the speed hangs on: 24 sums, none of them in memory, by instructions that round once."""
    processor()  # which readies LLVM
    machine = binding.Target.from_default_triple().create_target_machine(cpu=cpu, features="", opt=3)
    code = machine.emit_assembly(optimised(code_of_product(False), machine))
    most = max(code.split("\n.LBB"), key=lambda block: block.count("vfmadd"))
    assert most.count("vfmadd") == 24
    assert "zmm" in most
    assert not re.search(r"%[er]?sp\b", most)
