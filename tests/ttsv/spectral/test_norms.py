from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from ttsv.spectral import norms
from ttsv.spectral.norms import (
    eigenvalues_by_squaring,
    largest_eigenvalues,
    power_estimates,
    stacked,
    stored_norm,
    stored_norms,
)
from ttsv.spectral.symbol import PeriodicConv

if TYPE_CHECKING:
    from tests.ttsv.conftest import Cards, Dense


def hermitian(dense: "Dense", count: int, side: int, *, seed: int, dtype: torch.dtype = torch.complex128) -> Tensor:
    """Positive semidefinite matrices (count, side, side) of all sizes, of which some share their largest value."""
    parts = dense.gaussian(count, side, side, 2, seed=seed)
    frames = torch.linalg.qr(torch.view_as_complex(parts)).Q
    values = dense.gaussian(count, side, seed=seed + 1).abs() ** 3
    values[::3, :2] = 4.0
    found: Tensor = ((frames * values.unsqueeze(-2)) @ frames.mH).to(dtype)
    return found


@pytest.mark.parametrize("batched", [True, False])
@examples(80)
@given(data=st.data())
def test_largest_eigenvalues_are_each_owners(dense: "Dense", batched: bool, data: st.DataObject) -> None:
    count, side, owners = (data.draw(st.integers(1, most)) for most in (40, 9, 4))
    matrices = hermitian(dense, count, side, seed=data.draw(st.integers(0, 9)))
    if data.draw(st.booleans()):
        matrices[data.draw(st.integers(0, count - 1))] = 0
    matrices = matrices * 10.0 ** data.draw(st.integers(-60, 60))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, owners - 1), min_size=count, max_size=count)))
    values = torch.linalg.eigvalsh(matrices)[:, -1]
    known = data.draw(st.lists(st.sampled_from((0.0, 0.5, 2.0)), min_size=owners, max_size=owners))
    least = torch.tensor(known, dtype=torch.float64) * values.max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "decomposes_in_batches", lambda side, device: batched)
        # Few matrices for whom nothing is few: the rounds that follow the first are gone through, too.
        patch.setattr(norms, "_FEW_ROWS", data.draw(st.sampled_from((0, 2**13))))
        found = largest_eigenvalues(matrices, 1e-9, least, owner)
    expected = least.scatter_reduce(0, owner, values.clamp_min(0), "amax")
    assert (found <= expected * (1 + 1e-12)).all()
    assert (found >= expected * (1 - 1e-9 - 1e-12)).all()


def test_by_products_few_matrices_are_raised_to_powers(dense: "Dense", monkeypatch: pytest.MonkeyPatch) -> None:
    """The most promising one, and those that still exceed it: not a share of all."""
    taken = []

    def spy(grams: Tensor, tolerance: float) -> Tensor:
        taken.append(len(grams))
        return eigenvalues_by_squaring(grams, tolerance)

    monkeypatch.setattr(norms, "decomposes_in_batches", lambda side, device: False)
    monkeypatch.setattr(norms, "eigenvalues_by_squaring", spy)
    matrices = hermitian(dense, 200, 12, seed=3)
    found = largest_eigenvalues(matrices, 1e-9, matrices.real.new_zeros(2), torch.arange(200) % 2)
    expected = torch.linalg.eigvalsh(matrices)[:, -1].reshape(-1, 2).amax(dim=0)
    torch.testing.assert_close(found, expected)
    assert taken[0] == 2
    assert sum(taken) <= 10


@pytest.mark.parametrize("iterations", [2, 4, 12])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_power_estimates_are_lower_bounds(dense: "Dense", dtype: torch.dtype, iterations: int) -> None:
    matrices = hermitian(dense, 30, 7, seed=1)
    # What rounding leaves of zeros: steps lengthen some vectors without a bound.
    noise = dense.gaussian(6, 7, 7, seed=2) * 1e-17
    noise[0, :, :3] = 0
    noise[1] = torch.diag(torch.tensor([1e-30, -1.0, -1.0, 0, 0, 0, 0])) * 1e-8
    matrices = torch.cat([matrices, noise + noise.mT, torch.zeros(1, 7, 7)]).to(dtype)
    largest = torch.linalg.matrix_norm(matrices, 2)
    found = power_estimates(matrices, iterations)
    eps = torch.finfo(dtype).eps
    assert found.isfinite().all()
    assert (found <= largest * (1 + 16 * eps)).all()
    assert (found[:30] >= 0.6 * largest[:30]).all()


@examples(60)
@given(data=st.data())
def test_stored_norms_of_a_stack_are_those_of_each(dense: "Dense", data: st.DataObject) -> None:
    case = data.draw(dense.drawn_convolutions())
    geometry = PeriodicConv.of(case.kernel, case.input_size, **case.options)
    if geometry.folds:
        return
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64)))
    decades = st.integers(-40, 30) if dtype == torch.float32 else st.integers(-310, 150)
    sizes = [10.0**decade for decade in data.draw(st.lists(decades, min_size=1, max_size=4))]
    kernels = [(size * dense.gaussian(*case.kernel.shape, seed=seed)).to(dtype) for seed, size in enumerate(sizes)]
    kernels.append(torch.zeros_like(kernels[0]))
    stack, around = stacked(kernels, geometry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "_CHEAP_WORK", data.draw(st.sampled_from((0, 2**20))))
        found = stored_norms(stack, around, len(kernels))
        expected = [stored_norm(kernel, geometry) for kernel in kernels]
    assert found == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-12, abs=0)


def test_norms_of_a_stack_on_a_device(dense: "Dense", card: "Cards") -> None:
    """Of more rows than are decomposed as a batch there, and with many values near the largest, as clips leave them."""
    frames = [torch.linalg.qr(dense.gaussian(40, 40, seed=seed)).Q for seed in range(3)]
    kernels = [(scale * frame[:, :, None, None]).float() for scale, frame in zip((1.0, 0.5, 1e-3), frames, strict=True)]
    kernels = [
        kernel + 0.01 * scale * dense.gaussian(40, 40, 3, 3, seed=9).float()
        for kernel, scale in zip(kernels, (1.0, 0.5, 1e-3), strict=True)
    ]
    geometry = PeriodicConv.of(kernels[0], 8)
    stack, around = stacked([kernel.to(card.device) for kernel in kernels], geometry)
    found = stored_norms(stack, around, 3)
    expected = [stored_norm(kernel.double(), geometry) for kernel in kernels]
    assert found == pytest.approx(expected, rel=8e-6)
