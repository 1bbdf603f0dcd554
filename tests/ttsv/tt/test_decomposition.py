import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from ttsv.tt.decomposition import TTFactors, orthogonalize, orthogonalized, tt_error, tt_ranks, tt_svd, tt_to_dense

if TYPE_CHECKING:
    from tests.ttsv.conftest import Cards, Dense


def definition(k1: Tensor, core: Tensor, k3: Tensor) -> Tensor:
    """Eq. tt, summed term by term."""
    kernel = torch.zeros(k3.shape[1], k1.shape[0], *core.shape[2:], dtype=core.dtype)
    for b in range(core.shape[0]):
        for a in range(core.shape[1]):
            frames = torch.outer(k3[b], k1[:, a])
            kernel += frames.reshape(*frames.shape, *(1 for _ in core.shape[2:])) * core[b, a]
    return kernel


@pytest.mark.parametrize("shapes", [((5, 2), (3, 2, 3, 2), (3, 4)), ((3, 3), (1, 3, 2), (1, 7))])
def test_merged_kernel_follows_the_definition(dense: "Dense", shapes: Any) -> None:
    factors = [dense.gaussian(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    torch.testing.assert_close(tt_to_dense(*factors), definition(*factors))
    flipped = [factors[2].T, factors[1].transpose(0, 1), factors[0].T]
    torch.testing.assert_close(tt_to_dense(*flipped), definition(*flipped))


@examples(60)
@given(data=st.data())
def test_lemma_1_frames_can_be_orthonormal(dense: "Dense", data: st.DataObject) -> None:
    core = data.draw(dense.drawn_convolutions(grouped=False)).kernel
    r2, r1 = core.shape[:2]
    k1 = dense.gaussian(r1 + data.draw(st.integers(0, 3)), r1, seed=1)
    k3 = dense.gaussian(r2, r2 + data.draw(st.integers(0, 3)), seed=2)
    if data.draw(st.booleans()):
        k1[:, -1] = k1[:, 0]
    q1, middle, q3 = orthogonalize(k1, core, k3)
    assert (q1.shape, middle.shape, q3.shape) == (k1.shape, core.shape, k3.shape)
    torch.testing.assert_close(q1.T @ q1, torch.eye(r1, dtype=torch.float64))
    torch.testing.assert_close(q3 @ q3.T, torch.eye(r2, dtype=torch.float64))
    torch.testing.assert_close(tt_to_dense(q1, middle, q3), definition(k1, core, k3))


def test_orthonormal_frames_stay(dense: "Dense") -> None:
    q1, core, q3 = orthogonalize(dense.gaussian(5, 3), dense.gaussian(2, 3, 3), dense.gaussian(2, 4))
    q1[:, 1], q3[0] = -q1[:, 1], -q3[0]
    again = orthogonalize(q1, core, q3)
    for found, expected in zip(again, (q1, core, q3), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frames_on_a_device_are_those_of_the_processor(
    dense: "Dense", card: "Cards", dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one shape together, by products; columns that depend on each other are left to Householder's QR."""
    factors = []
    for seed, (c_in, r1, r2, c_out) in enumerate(
        [(9, 4, 4, 9), (4, 4, 3, 9), (9, 4, 2, 2), (9, 4, 4, 9), (9, 4, 4, 9)]
    ):
        shapes = (c_in, r1), (r2, r1, 3, 3), (r2, c_out)
        factors.append(TTFactors(*(dense.gaussian(*shape, seed=7 * seed + i) for i, shape in enumerate(shapes))))
    factors[3].k1.copy_(1e3 * torch.linalg.qr(factors[3].k1).Q * torch.tensor([1, 1e-1, 1e-2, 1e-5]))
    factors[4].k1[:, 2] = factors[4].k1[:, 0] * 2
    factors[1].k3.zero_()
    factors = [TTFactors(*(part.to(dtype) for part in parts)) for parts in factors]
    decomposed, real = [], torch.linalg.qr

    def spy(matrix: Tensor) -> tuple[Tensor, Tensor]:
        decomposed.append(tuple(matrix.shape))
        found: tuple[Tensor, Tensor] = real(matrix)
        return found

    monkeypatch.setattr(torch.linalg, "qr", spy)
    with torch.no_grad():
        found = orthogonalized([TTFactors(*(part.to(card.device) for part in parts)) for parts in factors])
    assert (9, 3) in decomposed
    assert len(decomposed) <= 2
    eps = torch.finfo(dtype).eps
    for place, (parts, before) in enumerate(zip(found, factors, strict=True)):
        k1, core, k3 = (part.cpu() for part in parts)
        assert (k1.T @ k1 - torch.eye(k1.shape[1], dtype=dtype)).abs().max() <= 8 * eps
        assert (k3 @ k3.T - torch.eye(len(k3), dtype=dtype)).abs().max() <= 8 * eps
        expected = tt_to_dense(*before)
        assert (tt_to_dense(k1, core, k3) - expected).abs().max() <= 64 * eps * expected.abs().max()
        if place in (0, 2):  # whatever factors them, triangles with nothing negative on the diagonal are unique
            for one, other in zip((k1, core, k3), orthogonalize(*before), strict=True):
                assert (one - other).abs().max() <= 256 * eps * other.abs().max()


def test_columns_that_nearly_depend_on_each_other_turn_nothing_around_on_a_card(card: "Cards") -> None:
    """Where Cholesky's factor of their Gram matrix fails, products leave orthonormal columns of either sign."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        k1 = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        k1[:, 3] = k1[:, 0] + 1e-10 * torch.randn(12, generator=generator, dtype=torch.float64)
        factors = TTFactors(k1, torch.ones(2, 4, 1, dtype=torch.float64), torch.eye(2, 5, dtype=torch.float64))
        with torch.no_grad():
            (found,) = orthogonalized([TTFactors(*(part.to(card.device) for part in factors))])
        assert (found.k1.cpu() - orthogonalize(*factors).k1).abs().max() <= 1e-4


def test_frames_that_ask_for_a_gradient_get_one_on_a_device(dense: "Dense", card: "Cards") -> None:
    k1 = dense.gaussian(6, 3).to(card.device).requires_grad_()
    core, k3 = (dense.gaussian(*shape).to(card.device) for shape in ((2, 3, 3), (2, 5)))
    q1, middle, _ = orthogonalize(k1, core, k3)
    (q1.sum() + middle.square().sum()).backward()  # type: ignore[no-untyped-call]
    assert k1.grad is not None
    assert k1.grad.abs().sum() > 0


@pytest.mark.parametrize("padding", ["periodic", "zeros", "valid"])
@examples(40)
@given(data=st.data())
def test_theorem_1_nonzero_values_are_the_cores(dense: "Dense", data: st.DataObject, padding: str) -> None:
    core = data.draw(dense.drawn_convolutions(grouped=False, periodic=padding == "periodic"))
    reach = [e * (k - 1) for e, k in zip(core.dilation, core.kernel.shape[2:], strict=True)]
    size = core.input_size
    if padding == "valid":
        size = tuple(n + r for n, r in zip(size, reach, strict=True))
    r2, r1 = core.kernel.shape[:2]
    q1, middle, q3 = orthogonalize(
        dense.gaussian(r1 + data.draw(st.integers(0, 2)), r1, seed=1),
        core.kernel,
        dense.gaussian(r2, r2 + data.draw(st.integers(0, 2)), seed=2),
    )

    def values(kernel: Tensor) -> Tensor:
        case = dense.convolution(kernel, size, core.stride, core.dilation, 1)
        if padding == "periodic":
            return dense.periodic_values(case)
        pads = [0] * len(reach) if padding == "valid" else [-(-r // 2) for r in reach]
        found: Tensor = torch.linalg.svdvals(dense.padded_operator(case, pads))
        return found

    own, whole = values(middle), values(definition(q1, middle, q3))
    assert (whole[: len(own)] - own).abs().max() <= 1e-11 * own[0]
    assert (whole[len(own) :] <= 1e-12 * own[0]).all()


def test_truncated_hosvd_is_exact_at_full_and_at_true_rank(dense: "Dense") -> None:
    kernel = dense.gaussian(6, 4, 3, 3)
    assert tt_error(kernel, *tt_svd(kernel, 6)) < 1e-14
    low = definition(dense.gaussian(5, 2), dense.gaussian(3, 2, 3), dense.gaussian(3, 7))
    factors = tt_svd(low, (2, 3))
    assert [tuple(factor.shape) for factor in factors] == [(5, 2), (3, 2, 3), (3, 7)]
    assert tt_error(low, *factors) < 1e-14
    torch.testing.assert_close(factors.k1.T @ factors.k1, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(factors.k3 @ factors.k3.T, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(6, 5, 3, 3), (5, 8, 2), (4, 4, 2, 1, 2), (9, 2, 1), (2, 9, 3)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_error_is_within_the_bound_of_the_unfoldings(dense: "Dense", shape: tuple[int, ...], rank: int) -> None:
    kernel = dense.gaussian(*shape)
    tails = [
        torch.linalg.svdvals(kernel.transpose(0, mode).reshape(shape[mode], -1))[rank:].square().sum().item()
        for mode in (0, 1)
    ]
    norm = math.sqrt(kernel.square().sum().item())
    error = tt_error(kernel, *tt_svd(kernel, rank)) * norm
    assert math.sqrt(max(tails)) * (1 - 1e-12) - 1e-13 <= error <= math.sqrt(sum(tails)) * (1 + 1e-12) + 1e-13


def test_a_rank_may_exceed_the_channels_of_factors_that_are_merged(dense: "Dense") -> None:
    k1, core, k3 = dense.gaussian(2, 4, seed=1), dense.gaussian(3, 4, 3, seed=2), dense.gaussian(3, 5, seed=3)
    merged = tt_to_dense(k1, core, k3)
    torch.testing.assert_close(merged, torch.einsum("bo,bat,ia->oit", k3, core, k1))
    assert tt_error(merged, k1, core, k3) == 0


def test_error_of_a_zero_kernel() -> None:
    kernel = torch.zeros(3, 2, 3)
    assert tt_error(kernel, *tt_svd(kernel, 1)) == 0


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(2.0**-80, torch.float32), (2.0**80, torch.float32), (2.0**-600, torch.float64), (2.0**600, torch.float64)],
)
def test_the_error_is_relative_where_squares_leave_the_range(scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernel = torch.randn(4, 3, 3, dtype=dtype)
    k1, core, k3 = tt_svd(kernel, 1)
    expected = tt_error(kernel, k1, core, k3)
    assert expected > 0.3
    assert tt_error(kernel * scale, k1, core * scale, k3) == pytest.approx(expected, rel=1e-6)


def test_rank_beyond_the_unfolding_keeps_its_shapes(dense: "Dense") -> None:
    kernel = dense.gaussian(9, 2, 1)
    k1, core, k3 = tt_svd(kernel, 5)
    assert (k1.shape, core.shape, k3.shape) == ((2, 2), (5, 2, 1), (5, 9))
    torch.testing.assert_close(k3 @ k3.T, torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, (1, 2, 3), (0, 1), (5, 1), (1, 4)])
def test_ranks_out_of_range(rank: Any) -> None:
    with pytest.raises(ValueError, match=r"rank = .*: must be a whole number of at least 1, or a pair .* \(4, 3\)"):
        tt_ranks(rank, 4, 3)
    assert tt_ranks(10, 4, 3) == (4, 3)
    assert tt_ranks((2, 3), 4, 3) == (2, 3)


def test_kernels_that_cannot_be_decomposed() -> None:
    with pytest.raises(ValueError, match=r"kernel\.shape"):
        tt_svd(torch.ones(3, 2), 1)
    with pytest.raises(ValueError, match="kernel = "):
        tt_svd(torch.full((3, 2, 3), math.nan), 1)
