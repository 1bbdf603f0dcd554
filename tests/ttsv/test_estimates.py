import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttsv.estimates import PowerIteration, gram_iteration, window_norms
from ttsv.spectrum import conv_norm

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense


def test_window_norms_are_those_of_the_four_unfoldings(dense: "Dense") -> None:
    kernel = dense.gaussian(3, 2, 3, 4)
    r = torch.stack([torch.cat([kernel[:, :, a, b] for b in range(4)], dim=1) for a in range(3)]).flatten(0, 1)
    s = torch.stack([torch.cat([kernel[:, :, a, b] for a in range(3)], dim=1) for b in range(4)]).flatten(0, 1)
    unfoldings = [r, s, kernel.flatten(1), kernel.permute(2, 3, 0, 1).flatten(0, 2)]
    assert [tuple(matrix.shape) for matrix in unfoldings] == [(9, 8), (12, 6), (3, 24), (36, 2)]
    expected = torch.stack([torch.linalg.matrix_norm(matrix, 2) for matrix in unfoldings])
    torch.testing.assert_close(window_norms(kernel), expected)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_window_norms_times_the_root_of_the_taps_bound_the_norm(dense: "Dense", data: st.DataObject) -> None:
    periodic = data.draw(st.booleans())
    case = data.draw(dense.drawn_convolutions(periodic=periodic))
    half = [e * (k - 1) for e, k in zip(case.dilation, case.kernel.shape[2:], strict=True)]
    operator = dense.periodic_operator(case) if periodic else dense.padded_operator(case, half)
    norms = window_norms(case.kernel)
    assert norms.shape == (2 ** (case.kernel.ndim - 2),)
    bound = norms.min().item() * math.sqrt(math.prod(case.kernel.shape[2:]))
    assert torch.linalg.matrix_norm(operator, 2).item() <= bound * (1 + 1e-12)


def test_gradient_of_window_norms(dense: "Dense") -> None:
    assert torch.autograd.gradcheck(window_norms, dense.gaussian(2, 3, 3, 2).requires_grad_())


def test_window_norms_of_what_is_no_kernel() -> None:
    with pytest.raises(ValueError, match=r"kernel\.shape = \(3, 3\)"):
        window_norms(torch.ones(3, 3))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_power_iteration_is_a_lower_bound_that_a_kept_vector_closes(dense: "Dense", data: st.DataObject) -> None:
    periodic = data.draw(st.booleans())
    case = data.draw(dense.drawn_convolutions(periodic=periodic))
    pads = [e * (k - 1) for e, k in zip(case.dilation, case.kernel.shape[2:], strict=True)]
    operator = dense.periodic_operator(case) if periodic else dense.padded_operator(case, pads)
    truth = torch.linalg.matrix_norm(operator, 2).item()
    mode = "circular" if periodic else "zeros"
    power = PowerIteration(case.input_size, padding=0 if periodic else pads, padding_mode=mode, **case.options)
    estimates = [power.estimate(case.kernel, 5).item() for _ in range(20)]
    assert max(estimates) <= truth * (1 + 1e-12)
    assert all(after >= before * (1 - 1e-12) for before, after in pairwise(estimates))
    assert estimates[-1] >= 0.98 * truth


def test_gradient_of_power_iteration_is_that_of_the_norm(dense: "Dense") -> None:
    kernel = dense.gaussian(3, 2, 3, 3).requires_grad_()
    power = PowerIteration(6, padding_mode="circular")
    power.estimate(kernel, 500).backward()  # type: ignore[no-untyped-call]
    assert kernel.grad is not None
    # Norms are homogeneous: the gradient's product with the kernel is the norm.
    assert (kernel.grad * kernel).sum().item() == pytest.approx(conv_norm(kernel, 6), rel=1e-6)
    assert power.vector is not None
    assert power.vector.shape == (1, 2, 6, 6)


def test_power_iteration_leaves_the_null_space_of_the_next_kernel() -> None:
    power = PowerIteration(4)
    for channel in (0, 1):
        kernel = torch.zeros(2, 2, 1, 1)
        kernel[channel, channel] = channel + 2
        assert power.estimate(kernel, 60).item() == pytest.approx(channel + 2)


def test_power_iteration_of_zero_and_of_wrong_arguments() -> None:
    power = PowerIteration(4)
    assert power.estimate(torch.zeros(2, 2, 3)) == 0
    assert power.estimate(torch.ones(2, 2, 3)) > 0
    with pytest.raises(ValueError, match="iterations = 0: must be at least 1"):
        power.estimate(torch.ones(2, 2, 3), 0)
    with pytest.raises(ValueError, match="padding_mode = 'same': must be"):
        PowerIteration(4, padding_mode="same")


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_gram_iteration_is_an_upper_bound_as_close_as_it_says(dense: "Dense", data: st.DataObject) -> None:
    case = data.draw(dense.drawn_convolutions())
    truth = dense.periodic_values(case)[0].item()
    side = min(case.kernel.shape[0] // case.groups, case.kernel.shape[1] * math.prod(case.stride))
    for iterations in (0, 3, 6):
        bound = gram_iteration(case.kernel, case.input_size, iterations=iterations, **case.options)
        assert truth * (1 - 1e-10) <= bound <= truth * side ** (1 / 2 ** (iterations + 2)) * (1 + 1e-10)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_gram_iteration_of_small_and_large_float32_weights(dense: "Dense", scale: float) -> None:
    kernel = dense.gaussian(4, 3, 3, dtype=torch.float32)
    assert gram_iteration(kernel * scale, 6) == pytest.approx(gram_iteration(kernel, 6) * scale, rel=1e-5)
    assert gram_iteration(torch.zeros(2, 2, 3), 6) < 1e-15
    with pytest.raises(ValueError, match="iterations = -1: must be at least 0"):
        gram_iteration(kernel, 6, iterations=-1)
