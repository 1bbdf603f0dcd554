"""Eigenvalues of batches of Hermitian matrices in step with each other, against those that LAPACK finds one by one."""

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import deep, examples
from ttsv.spectral.singular_values import block_singular_values, conv_singular_values
from ttsv.spectral.tridiagonal import hermitian_eigenvalues, tridiagonal_eigenvalues, tridiagonalize

if TYPE_CHECKING:
    from tests.ttsv.conftest import Cards, Dense

DTYPES = [torch.float64, torch.complex128]


def unitary(side: int, dtype: torch.dtype, count: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(side)
    vectors: Tensor = torch.linalg.qr(torch.randn(count, side, side, dtype=dtype, generator=generator)).Q
    return vectors


def hermitian(values: Tensor, dtype: torch.dtype = torch.complex128, count: int = 1) -> Tensor:
    """Matrices with these eigenvalues, and the rounding of two products."""
    vectors = unitary(len(values), dtype, count)
    product = (vectors * values.double()) @ vectors.mH
    return (product + product.mH) / 2


def deviation(found: Tensor, matrices: Tensor) -> float:
    """From the eigenvalues that LAPACK finds in float64, in roundings of the matrices' dtype times the largest."""
    exact = torch.linalg.eigvalsh(matrices.to(torch.complex128))
    largest = exact.abs().amax(-1, keepdim=True)
    assert found.shape == exact.shape
    assert found.dtype == matrices.real.dtype
    assert (found.diff(dim=-1) >= 0).all()
    shares = (found.double() - exact) / torch.where(largest > 0, largest, 1)
    return float(shares.abs().max()) / torch.finfo(matrices.dtype).eps


def bound(side: int) -> float:
    """Of such deviations, to which LAPACK's own errors belong: up to 19 were seen at side 96, 42 at 640."""
    return 8 + side / 4


@st.composite
def drawn_spectra(draw: st.DrawFn) -> Tensor:
    """Up to 70 eigenvalues: any, equal ones, clusters, and such as fall off by many orders of magnitude."""
    side = draw(st.integers(1, 70))
    kind = draw(st.sampled_from(["any", "few", "clustered", "falling", "positive", "rank"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(side, generator=generator, dtype=torch.float64)
    match kind:
        case "few":
            return values[torch.randint(min(3, side), (side,), generator=generator)]
        case "clustered":
            return 1 + values * 10.0 ** -draw(st.integers(3, 17))
        case "falling":
            return torch.logspace(0, -draw(st.integers(1, 40)), side, dtype=torch.float64) * values.sign()
        case "positive":
            return values.square()
        case "rank":
            return values * (torch.arange(side) < draw(st.integers(0, side)))
        case _:
            return values


@examples(200)
@given(
    values=drawn_spectra(),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 3),
    points=st.sampled_from([1, 2**14, 2**22]),
    exponent=st.integers(-400, 400),
)
def test_drawn_matrices(values: Tensor, dtype: torch.dtype, count: int, points: int, exponent: int) -> None:
    """At any scale, and however many points a pass has."""
    matrices = hermitian(values, dtype, count) * 2.0**exponent
    before = matrices.clone()
    found = hermitian_eigenvalues(matrices, points=points)
    assert deviation(found, matrices) <= bound(len(values))
    assert torch.equal(matrices, before)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32, torch.complex64])
@pytest.mark.parametrize("side", [1, 2, 3, 5, 8, 9, 15, 33, 100, deep(192), deep(321)])
def test_sides_and_dtypes(side: int, dtype: torch.dtype) -> None:
    blocks = torch.randn(3, side, side, dtype=dtype, generator=torch.Generator().manual_seed(side))
    matrices = blocks @ blocks.mH
    assert deviation(hermitian_eigenvalues(matrices), matrices) <= bound(side)


@pytest.mark.parametrize("shape", [(0, 40, 40), (3, 0, 0), (0, 0, 0)])
def test_nothing_to_decompose(shape: tuple[int, ...]) -> None:
    found = hermitian_eigenvalues(torch.zeros(shape, dtype=torch.complex128))
    assert found.shape == shape[:2]
    assert found.dtype == torch.float64


def banded(diagonal: Tensor, beside: float) -> Tensor:
    """Tridiagonal matrices with the same number everywhere beside the diagonal."""
    places = torch.arange(len(diagonal))
    return torch.diag(diagonal) + beside * ((places[:, None] - places).abs() == 1)


# Joins of eight, five and fewer rows whose other terms cancel at a pole of a weight as good as 0.
PIECES = torch.diag(torch.tensor([2.0, 1, 2, 0, -1, 1, 0, 2, 2, 1, 1, 2, 0, 1, 0, 2, 2]))
PIECES += (beside := torch.diag(torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0]), 1)) + beside.T

ODD = {
    "zero": torch.zeros(40, 40),
    "identity": torch.eye(41),
    "diagonal": torch.diag(torch.linspace(-1, 1, 45)),
    "ones": torch.ones(65, 65),
    "one element": torch.diag((torch.arange(40) == 3).float()),
    "exchange": torch.eye(48).flip(0),
    "second differences": banded(torch.full((50,), 2.0), -1.0),
    "Wilkinson": banded((torch.arange(43) - 21.0).abs(), 1.0),
    "glued": torch.kron(torch.eye(6), banded((torch.arange(7) - 3.0).abs(), 1.0)),
    "pieces with common eigenvalues": PIECES,
    "bordered": torch.zeros(40, 40).index_fill(0, torch.tensor(0), 1.0).index_fill(1, torch.tensor(0), 1.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ODD)
def test_odd_matrices(name: str, dtype: torch.dtype) -> None:
    """Nothing to reflect, first elements that are 0, equal eigenvalues, and such as agree to all digits."""
    matrices = ODD[name].to(dtype)[None]
    assert deviation(hermitian_eigenvalues(matrices), matrices) <= bound(matrices.shape[-1])


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("orders", [20, 150, 300])
def test_rows_of_many_orders_of_magnitude(orders: int, flipped: bool) -> None:
    """Squares of the small ones underflow: they are not reflected, and lose nothing that counts."""
    sizes = torch.logspace(0, -orders, 60, dtype=torch.float64)
    matrices = hermitian(torch.linspace(1, 2, 60)) * sizes * sizes[:, None]
    if flipped:
        matrices = matrices.flip(-1, -2)
    assert deviation(hermitian_eigenvalues(matrices), matrices) <= bound(60)


@pytest.mark.parametrize(("dtype", "double"), [(torch.float32, torch.float64), (torch.complex64, torch.complex128)])
def test_zeros_and_small_numbers_in_single_precision(dtype: torch.dtype, double: torch.dtype) -> None:
    """A power of two near them has a reciprocal in float64 alone."""
    one = hermitian(torch.linspace(-1, 2, 36), double).to(dtype)
    found = hermitian_eigenvalues(torch.cat([0 * one, one, 1e-37 * one]))
    assert torch.equal(found[0], torch.zeros(36))
    assert deviation(found[1:], torch.cat([one, 1e-37 * one])) <= bound(36)


def test_rank_one() -> None:
    vectors = torch.randn(4, 50, 1, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    found = hermitian_eigenvalues(vectors @ vectors.mH)
    square = torch.linalg.vector_norm(vectors, dim=(1, 2)).square()
    assert (found[:, -1] / square - 1).abs().max() <= 1e-14
    assert (found[:, :-1] / square[:, None]).abs().max() <= 1e-14


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-150, 1.0, 1e150, 1e300])
def test_each_matrix_has_its_own_scale(scale: float) -> None:
    one = hermitian(torch.linspace(-1, 2, 36))
    found = hermitian_eigenvalues(torch.cat([one, one * scale]))
    assert torch.equal(found[0], hermitian_eigenvalues(one)[0])
    assert deviation(found[1:], one * scale) <= bound(36)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 30), (39, 39)])
def test_what_is_not_finite_stays_in_its_matrix(place: tuple[int, int], value: float) -> None:
    matrices = hermitian(torch.linspace(-1, 2, 40), count=3)
    matrices[1, place[0], place[1]] = matrices[1, place[1], place[0]] = value
    found = hermitian_eigenvalues(matrices)
    assert found[1].isnan().all()
    assert deviation(found[::2], matrices[::2]) <= bound(40)


@examples(100)
@given(data=st.data(), side=st.integers(1, 60))
def test_drawn_tridiagonal_matrices(data: st.DataObject, side: int) -> None:
    """Elements of any size up to 1, zeros and equal ones among them."""
    numbers = st.sampled_from([0.0, 1.0, 0.5, 1e-8, 1e-16, 1e-20, 1e-300]) | st.floats(0, 1)
    diagonal = torch.tensor(data.draw(st.lists(numbers, min_size=side, max_size=side)), dtype=torch.float64)
    beside = torch.tensor(data.draw(st.lists(numbers, min_size=side - 1, max_size=side - 1)), dtype=torch.float64)
    matrix = torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
    assert deviation(tridiagonal_eigenvalues(diagonal[None], beside[None]), matrix[None]) <= bound(side)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tridiagonal_matrices_are_similar(dtype: torch.dtype) -> None:
    matrices = hermitian(torch.linspace(-1, 1, 30), dtype, 2)
    diagonal, beside = tridiagonalize(matrices.clone())
    assert diagonal.shape == (2, 30)
    assert beside.shape == (2, 29)
    similar = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    assert (beside >= 0).all()
    assert deviation(torch.linalg.eigvalsh(similar), matrices) <= bound(30)


class TestOnACard:
    """A pretended one refuses what lies elsewhere."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_nothing_waits(self, card: "Cards", dtype: torch.dtype) -> None:
        matrices = hermitian(torch.linspace(-1, 2, 35), dtype, 2)
        there, found = matrices.to(card.device), list[Tensor]()
        assert card.synchronizations(lambda: found.append(hermitian_eigenvalues(there))) == 0
        assert deviation(found[0].cpu(), matrices) <= bound(35)

    @pytest.mark.parametrize("c_out", [36, 40])
    def test_singular_values_of_many_blocks(
        self, dense: "Dense", card: "Cards", monkeypatch: pytest.MonkeyPatch, c_out: int
    ) -> None:
        """All of a convolution's frequencies, those with real blocks among them, are one batch."""
        seen = list[torch.Size]()

        def noted(matrices: Tensor) -> Tensor:
            seen.append(matrices.shape)
            return hermitian_eigenvalues(matrices)

        monkeypatch.setattr("ttsv.spectral.singular_values.hermitian_eigenvalues", noted)
        kernel = dense.gaussian(c_out, 36, 3, 3, dtype=torch.float32)
        found = conv_singular_values(kernel.to(card.device), (8, 6)).cpu()
        exact = conv_singular_values(kernel.double(), (8, 6))
        assert (found - exact).abs().max() <= 2e-7 * exact.max()
        assert seen[-1] == (26, 36, 36)
        blocks = dense.gaussian(30, 40, 36, dtype=torch.float32)
        values = block_singular_values(blocks.to(card.device)).cpu()
        exact = torch.linalg.svdvals(blocks.double())
        assert (values - exact).abs().max() <= 2e-7 * exact.max()
        assert seen[-1] == (30, 36, 36)
        before = len(seen)
        conv_singular_values(kernel.to(card.device), 3)
        block_singular_values(blocks[:, :32].to(card.device))
        assert len(seen) == before  # few, and small ones, are left to CUDA's libraries
