"""Clips by matrix products alone, against singular value decompositions."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from ttsv.spectral import matrix_sign
from ttsv.spectral.clipping import clip_conv
from ttsv.spectral.krylov import Eigenpairs, eigenpairs_above
from ttsv.spectral.matrix_sign import Coefficients, odd_polynomials, shrinkage_factors
from ttsv.spectral.norms import eigenvalues_by_squaring
from ttsv.spectral.singular_values import conv_norm

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense

COMPLEX = {torch.complex64: 1e-4, torch.complex128: 1e-10}


def composed(polynomials: tuple[Coefficients, ...], x: Tensor) -> Tensor:
    for a, b, c in polynomials:
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("tolerance", [1e-3, 1e-7, 1e-12])
@pytest.mark.parametrize("least", [2.0**-k for k in (1, 2, 4, 8, 16, 24, 40)])
def test_compositions_end_near_one(least: float, tolerance: float) -> None:
    polynomials = odd_polynomials(least, tolerance)
    above = torch.logspace(math.log10(least), 0, 100_001, dtype=torch.float64)
    assert (composed(polynomials, above) - 1).abs().max() <= 2 * tolerance
    below = composed(polynomials, torch.linspace(0, least, 10_001, dtype=torch.float64)[1:])
    assert (below > 0).all()
    assert (below <= 1 + tolerance).all()
    # Each multiplies small values by 4, at the end the deviation by its square; a third order step may overshoot.
    assert len(polynomials) <= math.log(1 / least, 3.9) + math.log2(math.log2(1 / tolerance)) + 1


@pytest.mark.parametrize("least", [0.5, 0.1, 0.04])
def test_the_first_polynomial_is_the_best(least: float) -> None:
    """Chebyshev: the best of three coefficients deviates by as much, with alternating signs, at four points."""
    ((a, b, c), *_) = odd_polynomials(least, 1e-9)
    upper = 1 + min(0.01, (1 - least) / 10)
    x = torch.linspace(least, upper, 2001, dtype=torch.float64)
    deviation = composed(((a, b, c),), x) - 1
    inside = deviation[1:-1]
    turns = ((inside - deviation[:-2]) * (deviation[2:] - inside) <= 0).nonzero()[:, 0] + 1
    extrema = deviation[torch.cat([torch.tensor([0]), turns, torch.tensor([len(x) - 1])])]
    assert len(extrema) == 4
    largest = deviation.abs().max().item()
    assert (extrema * torch.tensor([-1.0, 1.0, -1.0, 1.0])).tolist() == pytest.approx([largest] * 4, rel=1e-3)


@st.composite
def spectra(draw: st.DrawFn) -> Tensor:
    """Singular values relative to delta: spread out, in numbers next to 1 on both sides, at 1 and at 0."""
    spread = draw(st.lists(st.floats(0, draw(st.sampled_from([0.9, 1.5, 3.0, 7.0]))), min_size=1, max_size=20))
    close = draw(st.integers(0, 30))
    distance = 10.0 ** -draw(st.integers(1, 16))
    near = 1 + distance * torch.linspace(-1, 1, close, dtype=torch.float64)
    exact = torch.ones(draw(st.integers(0, 5)), dtype=torch.float64)
    return torch.cat([torch.tensor(spread, dtype=torch.float64), near, exact])


def block(dense: "Dense", values: Tensor, dtype: torch.dtype) -> Tensor:
    """Complex, with these singular values."""
    n = len(values)
    frames = [
        torch.linalg.qr(torch.complex(dense.gaussian(n, n, seed=s), dense.gaussian(n, n, seed=s + 1))).Q for s in (1, 3)
    ]
    matrix: Tensor = (frames[0] * values) @ frames[1]
    return matrix.to(dtype)


def by_svd(block: Tensor, delta: float) -> Tensor:
    left, values, right = torch.linalg.svd(block.to(torch.complex128), full_matrices=False)
    excess: Tensor = (left * (values - delta).clamp_min(0)) @ right
    return excess


@pytest.mark.parametrize("dtype", COMPLEX)
@examples(100)
@given(values=spectra(), delta=st.sampled_from([0.5, 1.0, 1e3]))
def test_the_excess_is_that_of_the_decomposition(
    dense: "Dense", dtype: torch.dtype, values: Tensor, delta: float
) -> None:
    matrix = block(dense, delta * values, dtype)
    expected = by_svd(matrix, delta)
    for rows in (True, False):
        gram = matrix @ matrix.mH if rows else matrix.mH @ matrix
        shares, certified = shrinkage_factors(gram[None], delta * delta)
        found = shares[0] @ matrix if rows else matrix @ shares[0]
        assert certified.tolist() == [True]
        error = torch.linalg.matrix_norm(found.to(torch.complex128) - expected, 2).item()
        assert error <= COMPLEX[dtype] * delta


@pytest.mark.parametrize(("dtype", "bound"), [(torch.complex64, 1e-5), (torch.complex128, 1e-11)])
def test_many_values_at_delta(dense: "Dense", dtype: torch.dtype, bound: float) -> None:
    """Where the sign itself is anything, half of the values being within 1e-6 of delta."""
    near = 1 + 1e-6 * dense.gaussian(48)
    matrix = block(dense, torch.cat([near, torch.linspace(0, 3, 48, dtype=torch.float64)]), dtype)
    shares, certified = shrinkage_factors((matrix @ matrix.mH)[None], 1.0)
    assert certified.all()
    assert torch.linalg.matrix_norm((shares[0] @ matrix).to(torch.complex128) - by_svd(matrix, 1.0), 2) <= bound


def test_blocks_of_one_batch_keep_apart(dense: "Dense") -> None:
    """One that needs nothing, one that is clipped, and one too large to be certified."""
    shape = torch.linspace(0, 1, 40, dtype=torch.float64)
    blocks = torch.stack([block(dense, scale * shape, torch.complex128) for scale in (0.9, 3.0, 1e3, 1e200)])
    shares, certified = shrinkage_factors(blocks @ blocks.mH, 1.0)
    assert certified.tolist() == [True, True, False, False]
    for some, matrix in zip(shares[:2], blocks[:2], strict=True):
        assert torch.linalg.matrix_norm(some @ matrix - by_svd(matrix, 1.0), 2) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_not_certified_is_decomposed(
    dense: "Dense", groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = dense.gaussian(8, 4, 3, 3, dtype=dtype)
    expected = clip_conv(kernel, 2.0, 6, groups=groups, algorithm="eigh")
    decompositions = []

    def spy(matrices: Tensor, which: Tensor, level: float) -> Iterator[Eigenpairs]:
        decompositions.append(len(which))
        return eigenpairs_above(matrices, which, level)

    monkeypatch.setattr("ttsv.spectral.clipping.eigenpairs_above", spy)
    found = clip_conv(kernel, 2.0, 6, groups=groups, algorithm="sign")
    torch.testing.assert_close(found, expected)
    assert sum(decompositions) == 0
    # Too few steps for values near delta.
    monkeypatch.setattr(matrix_sign, "odd_polynomials", lambda *arguments: odd_polynomials(*arguments)[:2])
    found = clip_conv(kernel, 2.0, 6, groups=groups, algorithm="sign")
    torch.testing.assert_close(found, expected)
    assert sum(decompositions) > 0


@examples(100)
@given(data=st.data())
def test_largest_eigenvalues_by_squaring(dense: "Dense", data: st.DataObject) -> None:
    side = data.draw(st.integers(1, 12))
    scale = 10.0 ** data.draw(st.integers(-100, 100))
    tolerance = data.draw(st.sampled_from([1e-3, 1e-10, 1e-14]))
    # Gaps of all sizes below the largest.
    values = 1 - torch.tensor(data.draw(st.lists(st.floats(0, 1), min_size=side, max_size=side))) ** 8
    matrix = block(dense, values.double().sqrt(), torch.complex128)
    grams = torch.stack([matrix @ matrix.mH, torch.zeros_like(matrix)]) * scale
    found = eigenvalues_by_squaring(grams, tolerance)
    largest = torch.linalg.eigvalsh(grams)[0, -1].item()
    assert largest * (1 - tolerance - 1e-13) <= found[0].item() <= largest * (1 + 1e-13)
    assert found[1].item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_without_decompositions(dense: "Dense", dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = dense.gaussian(40, 36, 3, 3, dtype=dtype)
    expected = conv_norm(kernel.double(), 8, stride=2)
    monkeypatch.setattr("ttsv.spectral.norms.decomposes_in_batches", lambda side, device: False)
    monkeypatch.setattr("torch.linalg.eigvalsh", None)
    assert conv_norm(kernel, 8, stride=2) == pytest.approx(expected, rel=3e-6 if dtype == torch.float32 else 1e-13)
