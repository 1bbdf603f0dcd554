import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from ttsv.spectral.clamping import clamp_conv, clamp_matrix
from ttsv.spectral.clipping import clip_conv, clip_matrix
from ttsv.spectral.singular_values import conv_singular_values

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense


@examples(60)
@given(st.data())
def test_one_round_is_the_projection_of_the_dense_operator(dense: "Dense", data: st.DataObject) -> None:
    """Read off at the kernel's own taps; kernels no larger than the input, so that each tap has its own pixel."""
    case = data.draw(dense.drawn_convolutions(grouped=False))
    reach = [e * (k - 1) for e, k in zip(case.dilation, case.kernel.shape[2:], strict=True)]
    assume(all(n > r for n, r in zip(case.input_size, reach, strict=True)))
    before = dense.periodic_operator(case)
    left, values, right = torch.linalg.svd(before, full_matrices=False)
    # Singular vectors of zeros are no one's: the dense ones need not respect the shifts of the grid.
    assume(values[-1] > 1e-3 * values[0])
    floor, delta = values.median().item() * 0.9, values.median().item() * 1.2
    after = (left * values.clamp(floor, delta)) @ right
    c_out, c_in = case.kernel.shape[:2]
    rows = after.reshape(c_out, -1, c_in, *case.input_size)[:, 0]
    kernel = torch.empty_like(case.kernel)
    for tap in torch.cartesian_prod(*(torch.arange(k) for k in kernel.shape[2:])).reshape(-1, kernel.ndim - 2).tolist():
        pixel = tuple(e * t for e, t in zip(case.dilation, tap, strict=True))
        kernel[(..., *tap)] = rows[(..., *pixel)]
    found = clamp_conv(case.kernel, floor, delta, case.input_size, stride=case.stride, dilation=case.dilation)
    torch.testing.assert_close(found, kernel, rtol=1e-8, atol=1e-9)


def limits(kernel: Tensor, size: int = 8, stride: int = 1) -> tuple[float, float]:
    values = conv_singular_values(kernel, size, stride=stride)
    return values.min().item(), values.max().item()


@pytest.mark.slow
@pytest.mark.parametrize(("c_out", "stride"), [(12, 1), (8, 2)])
def test_rounds_approach_both_limits(dense: "Dense", c_out: int, stride: int) -> None:
    kernel = dense.gaussian(c_out, 6, 3, 3) / math.sqrt(54)
    assert limits(kernel, stride=stride)[0] < 0.45
    assert limits(kernel, stride=stride)[1] > 1.5
    once, often = (clamp_conv(kernel, 0.5, 1.0, 8, stride=stride, rounds=rounds) for rounds in (1, 200))
    low, high = limits(often, stride=stride)
    assert low > 0.49
    assert high < 1.01
    assert limits(once, stride=stride)[1] > high
    assert often.dtype == torch.float64
    single = clamp_conv(kernel.float().requires_grad_(), 0.5, 1.0, 8, stride=stride, rounds=200)
    assert single.dtype == torch.float32
    assert not single.requires_grad
    torch.testing.assert_close(single.double(), often, rtol=0, atol=1e-4)


def test_without_a_floor_it_is_the_clip(dense: "Dense") -> None:
    kernel = dense.gaussian(4, 6, 3, 3)
    torch.testing.assert_close(clamp_conv(kernel, 0.0, 2.0, 8, rounds=3), clip_conv(kernel, 2.0, 8, rounds=3))
    grouped = dense.gaussian(4, 3, 3, 3)
    torch.testing.assert_close(clamp_conv(grouped, 0.0, 2.0, 8, groups=2), clip_conv(grouped, 2.0, 8, groups=2))
    inside = clamp_conv(kernel, 0.0, 1e3, 8)
    torch.testing.assert_close(inside, kernel)
    matrix = dense.gaussian(5, 3)
    torch.testing.assert_close(clamp_matrix(matrix, 0.0, 1.0), clip_matrix(matrix, 1.0))


def test_matrices(dense: "Dense") -> None:
    for shape in ((5, 3), (3, 5)):
        matrix = dense.gaussian(*shape)
        values = torch.linalg.svdvals(matrix)
        floor, delta = values[1].item() * 1.01, values[1].item() * 1.02
        found = clamp_matrix(matrix, floor, delta)
        torch.testing.assert_close(
            torch.linalg.svdvals(found), torch.tensor([delta, floor, floor], dtype=torch.float64)
        )
        torch.testing.assert_close(
            torch.linalg.matrix_norm(found - matrix), (values.clamp(floor, delta) - values).square().sum().sqrt()
        )


@pytest.mark.parametrize(
    ("floor", "delta", "message"),
    [
        (-0.1, 1.0, r"floor = -0\.1: must be at least 0 and at most delta = 1\.0"),
        (1.1, 1.0, r"floor = 1\.1"),
        (math.nan, 1.0, "floor = nan"),
        (0.0, 0.0, r"delta = 0\.0: must be a finite number above 0"),
        (0.5, math.inf, "delta = inf"),
    ],
)
def test_limits_that_cannot_be(floor: float, delta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clamp_conv(torch.ones(2, 2, 3), floor, delta, 4)
    with pytest.raises(ValueError, match=message):
        clamp_matrix(torch.ones(2, 2), floor, delta)


def test_other_arguments_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="rounds = 0"):
        clamp_conv(torch.ones(2, 2, 3), 0.1, 1.0, 4, rounds=0)
    with pytest.raises(ValueError, match="stride = 3"):
        clamp_conv(torch.ones(2, 2, 3), 0.1, 1.0, 4, stride=3)
    with pytest.raises(ValueError, match="1 of 4 values not finite"):
        clamp_matrix(torch.tensor([[1.0, math.nan], [1.0, 1.0]]), 0.1, 1.0)
    with pytest.raises(ValueError, match=r"weight\.shape = \(2,\)"):
        clamp_matrix(torch.ones(2), 0.1, 1.0)
