import math
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from ttsv.spectral.bounds import (
    NormBounds,
    _containing,
    _ZeroPadded,
    conv_norm_bounds,
    matrix_norm_bound,
    matrix_norm_bounds,
)
from ttsv.spectral.singular_values import conv_norm, conv_singular_values
from ttsv.spectral.symbol import PeriodicConv

if TYPE_CHECKING:
    from tests.ttsv.conftest import Cards, Dense, Drawn

SHARP = torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64)


def largest(operator: Tensor) -> float:
    values: Tensor = torch.linalg.svdvals(operator)
    return values[0].item()


def assert_holds(bounds: NormBounds, truth: float, lower: float) -> None:
    # The dense norm is itself good to a few roundings only.
    assert bounds.upper >= truth * (1 - 1e-14)
    assert lower * truth <= bounds.lower <= truth * (1 + 1e-14)


def smallest_admissible(case: "Drawn") -> tuple[int, ...]:
    axes = zip(case.input_size, case.dilation, case.kernel.shape[2:], case.stride, strict=True)
    return tuple(math.ceil((n + e * (k - 1)) / s) * s for n, e, k, s in axes)


def draw_padding(data: st.DataObject, case: "Drawn") -> tuple[int, ...] | None:
    """Any padding that leaves an output: less than valid needs none, more than full reads zeros only."""
    axes = list(zip(case.input_size, case.dilation, case.kernel.shape[2:], strict=True))
    half = all(n + 2 * (e * (k - 1) // 2) > e * (k - 1) for n, e, k in axes)
    if half and data.draw(st.booleans()):
        return None
    least = [max(0, math.ceil((e * (k - 1) + 1 - n) / 2)) for n, e, k in axes]
    return tuple(p + data.draw(st.integers(0, 2)) for p in least)


@examples(150)
@given(data=st.data())
def test_circular_bounds_hold_and_agree(dense: "Dense", data: st.DataObject) -> None:
    case = data.draw(dense.drawn_convolutions())
    bounds = conv_norm_bounds(case.kernel, case.input_size, padding_mode="circular", **case.options)
    truth = largest(dense.periodic_operator(case))
    assert_holds(bounds, truth, 0.999999)
    assert bounds.upper <= 1.000001 * truth


@pytest.mark.slow
@pytest.mark.parametrize("small", [True, False], ids=["decomposed", "iterated"])
@examples(150)
@given(data=st.data())
def test_zero_padded_bounds_hold(dense: "Dense", data: st.DataObject, small: bool) -> None:
    case = data.draw(dense.drawn_convolutions(periodic=False))
    padding = draw_padding(data, case)
    half = [e * (k - 1) // 2 for e, k in zip(case.dilation, case.kernel.shape[2:], strict=True)]
    truth = largest(dense.padded_operator(case, half if padding is None else padding))
    with pytest.MonkeyPatch.context() as patch:
        if not small:
            patch.setattr("ttsv.spectral.bounds._DENSE_ENTRIES", 0)
        bounds = conv_norm_bounds(case.kernel, case.input_size, padding=padding, **case.options)
    assert_holds(bounds, truth, 0.999999 if small else 0.99)
    if small:
        assert bounds.upper <= 1.000001 * truth
    periodic = conv_norm(case.kernel, smallest_admissible(case), **case.options)
    assert bounds.upper <= periodic * (1 + 1e-8)


@pytest.mark.parametrize(("c", "n", "stride", "seed"), [(6, 12, 1, 0), (8, 14, 2, 1), (3, 31, 3, 2)])
def test_bounds_of_larger_operators(dense: "Dense", c: int, n: int, stride: int, seed: int) -> None:
    case = dense.convolution(dense.gaussian(c, c, 3, 3, seed=seed), (n, n), (stride, stride), (1, 1), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ttsv.spectral.bounds._DENSE_ENTRIES", 0)
        bounds = conv_norm_bounds(case.kernel, case.input_size, stride=stride)
    assert_holds(bounds, largest(dense.padded_operator(case, (1, 1))), 0.99)
    assert bounds.upper <= 1.1 * bounds.lower


def test_a_short_basis_takes_more_cycles(dense: "Dense", monkeypatch: pytest.MonkeyPatch) -> None:
    case = dense.convolution(dense.gaussian(6, 6, 3, 3), (12, 12), (1, 1), (1, 1), 1)
    monkeypatch.setattr("ttsv.spectral.bounds._DENSE_ENTRIES", 0)
    monkeypatch.setattr("ttsv.spectral.bounds._BASIS_ENTRIES", 0)
    truth = largest(dense.padded_operator(case, (1, 1)))
    assert_holds(conv_norm_bounds(case.kernel, 12), truth, 0.99)


def test_a_short_basis_finds_the_one_large_value_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """63 channels keep 0.985 of everything, one is blurred: by nearly nothing where images vary slowly."""
    monkeypatch.setattr("ttsv.spectral.bounds._BASIS_ENTRIES", 0)
    kernel = torch.zeros(64, 8, 3, 3, dtype=torch.float64)
    kernel[range(64), [channel % 8 for channel in range(64)], 1, 1] = 0.985
    blur = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
    kernel[0, 0] = torch.outer(blur, blur)
    truth = ((1 + math.cos(math.pi / 41)) / 2) ** 2  # of a tridiagonal Toeplitz matrix, squared
    assert_holds(conv_norm_bounds(kernel, 40, groups=8), truth, 0.9999)


@pytest.mark.parametrize(
    ("shape", "size", "stride", "dilation", "groups"),
    [
        ((8, 4, 3, 3), (40, 31), (2, 1), (1, 2), 2),
        ((6, 8, 3, 5), (60, 60), (2, 3), (2, 1), 1),
        ((4, 4, 5), (300,), (2,), (1,), 1),
        ((4, 3, 3, 2, 3), (40, 38, 36), (1, 2, 1), (1, 1, 1), 2),
    ],
)
def test_the_faded_wave_is_a_direction_of_large_gain(
    dense: "Dense", shape: Any, size: Any, stride: Any, dilation: Any, groups: int
) -> None:
    kernel = dense.gaussian(*shape)
    periodic = PeriodicConv(kernel.shape[2:], size, stride, dilation, groups)
    pads = tuple(e * (k - 1) // 2 for e, k in zip(dilation, kernel.shape[2:], strict=True))
    operator = _ZeroPadded(kernel, periodic, pads)
    wave = operator.wave()
    containing = _containing(periodic, 0)
    norm = conv_norm(kernel, containing.input_size, stride=stride, dilation=dilation, groups=groups)
    assert 0.98 * norm * wave.norm() <= operator.apply(wave).norm() <= norm * wave.norm()


def test_the_periodic_norm_at_the_same_size_is_no_bound() -> None:
    kernel = torch.outer(SHARP, SHARP)[None, None]
    bounds = conv_norm_bounds(kernel, 3)
    assert bounds.lower <= 11.656854249492381 <= bounds.upper <= 13.090170
    assert conv_norm(kernel, 3) == pytest.approx(9)


def test_the_smallest_admissible_size_is_not_always_the_tightest(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.outer(SHARP, SHARP)[None, None]
    monkeypatch.setattr("ttsv.spectral.bounds._DENSE_ENTRIES", 0)
    assert conv_norm_bounds(kernel, 3).upper == pytest.approx(13.090169943749475)
    at_four = conv_norm_bounds(kernel, 4)
    assert conv_norm(kernel, 6) == pytest.approx(16)
    assert at_four.lower <= at_four.upper < 15.3


@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("scale", [0.0, 1e-310, 1e-30, 1e30, 1e307])
def test_scale_of_the_weights(dense: "Dense", mode: str, scale: float) -> None:
    kernel = dense.gaussian(2, 2, 3)
    one = conv_norm_bounds(kernel, 5, padding_mode=mode)
    bounds = conv_norm_bounds(kernel * scale, 5, padding_mode=mode)
    assert bounds.lower == pytest.approx(one.lower * scale, rel=1e-9, abs=1e-320)
    assert bounds.upper == pytest.approx(one.upper * scale, rel=1e-9, abs=1e-320)


@pytest.mark.parametrize("size", [1.0, 2.0**-28, 0.0])
@pytest.mark.parametrize(("pixels", "dilation"), [((2, 4), (1, 2)), ((3, 5), (1, 2)), ((1, 1), (1, 1))])
def test_aliases_that_cancel_leave_no_slack(
    dense: "Dense", pixels: tuple[int, int], dilation: tuple[int, int], size: float
) -> None:
    """Taps of some 1e6 that add up on the grid to whole numbers up to 9 times `size`."""
    periods = [n // math.gcd(n, e) for n, e in zip(pixels, dilation, strict=True)]
    generator = torch.Generator().manual_seed(3)
    sums = size * torch.randint(-9, 10, (2, 3, *periods), generator=generator).double()
    kernel = torch.randint(-(10**6), 10**6, (2, 3, 5, 7), generator=generator).double()
    kernel[:, :, -periods[0] :, -periods[1] :] = 0  # one tap for each pixel
    for i, j in product(range(periods[0]), range(periods[1])):
        last = 4 - (4 - i) % periods[0], 6 - (6 - j) % periods[1]
        others = kernel[:, :, i :: periods[0], j :: periods[1]].sum(dim=(2, 3))
        # Only as exact as float64 has it: what is left is at most one rounding of the others.
        kernel[(..., *last)] = sums[:, :, i, j] - others
        sums[:, :, i, j] = kernel[(..., *last)] + others
    truth = largest(dense.periodic_operator(dense.convolution(sums, pixels, (1, 1), dilation, 1)))
    bounds = conv_norm_bounds(kernel, pixels, dilation=dilation, padding_mode="circular")
    assert bounds.lower <= truth <= bounds.upper
    # What a convolution in float64 makes of taps that cancel is rounding, and bounded as well.
    rounded = largest(dense.periodic_operator(dense.convolution(kernel, pixels, (1, 1), dilation, 1)))
    assert bounds.lower <= rounded <= bounds.upper
    rounding = kernel[0].numel() * 2.3e-16 * kernel.abs().sum().item()
    assert bounds.upper <= 1.000001 * truth + rounding
    assert bounds.lower >= 0.999999 * truth - rounding
    values = conv_singular_values(kernel, pixels, dilation=dilation)
    assert values.max().item() == pytest.approx(truth, rel=1e-12, abs=1e-20)
    assert conv_norm(kernel, pixels, dilation=dilation) == pytest.approx(truth, rel=1e-12, abs=1e-20)


def test_float32_kernels_are_bounded_as_they_are(dense: "Dense") -> None:
    kernel = dense.gaussian(3, 3, 3, dtype=torch.float32)
    case = dense.convolution(kernel.double(), (7,), (1,), (1,), 1)
    assert_holds(conv_norm_bounds(kernel, 7), largest(dense.padded_operator(case, (1,))), 0.999999)


def test_circular_with_an_even_kernel_is_the_periodic_operator(dense: "Dense") -> None:
    kernel = dense.gaussian(2, 2, 4)
    bounds = conv_norm_bounds(kernel, 6, padding_mode="circular")
    assert bounds.lower <= conv_norm(kernel, 6) <= bounds.upper
    assert conv_norm_bounds(kernel, 6, stride=2, padding=1, padding_mode="circular").upper == pytest.approx(
        conv_norm(kernel, 6, stride=2)
    )


def test_the_containing_operator_is_admissible() -> None:
    geometry = PeriodicConv((3, 4), (5, 7), (2, 3), (1, 2), 1)
    assert _containing(geometry, 0).input_size == (8, 15)
    assert _containing(geometry, 2).input_size == (12, 21)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_size": 4, "padding_mode": "reflect"}, "padding_mode = 'reflect': must be"),
        ({"input_size": 5, "stride": 2, "padding_mode": "circular"}, "stride = 2: must divide"),
        ({"input_size": 4, "padding": 0, "padding_mode": "circular"}, r"padding = 0: must leave \(4, 4\) outputs"),
        ({"input_size": 4, "padding": -1}, "padding = -1: must be a whole number of at least 0"),
        ({"input_size": 2, "padding": 0}, "input_size = 2: must hold the kernel"),
        ({"input_size": (2, 2, 2)}, r"input_size = \(2, 2, 2\)"),
    ],
)
def test_errors_name_argument_value_and_fix(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conv_norm_bounds(torch.ones(2, 2, 3, 3), **arguments)


def test_bounds_of_many_matrices_are_those_of_each(dense: "Dense") -> None:
    """Bit for bit: those of one side are decomposed together."""
    shapes = [(5, 3), (9, 3), (3, 7), (4, 4), (2, 6), (5, 3), (1, 1)]
    matrices = [10.0 ** (3 * seed - 9) * dense.gaussian(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    matrices += [torch.zeros(3, 2), dense.gaussian(6, 3, seed=9).float()]
    found = matrix_norm_bounds(matrices)
    assert found == [matrix_norm_bound(matrix) for matrix in matrices]
    for matrix, bound in zip(matrices, found, strict=True):
        norm = torch.linalg.matrix_norm(matrix.double(), 2).item()
        assert norm <= bound <= norm * (1 + 1e-7)
    assert matrix_norm_bounds([]) == []


def test_frames_on_a_device_are_not_decomposed_and_their_bounds_hold(
    dense: "Dense", card: "Cards", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames as float32 stores them, of several shapes and one of another length; others are decomposed."""
    shapes = [(90, 40), (40, 70), (90, 40), (48, 48)]
    frames = [
        torch.linalg.qr(dense.gaussian(max(shape), min(shape), seed=seed)).Q.float()
        for seed, shape in enumerate(shapes)
    ]
    frames = [frame if frame.shape == shape else frame.T for frame, shape in zip(frames, shapes, strict=True)]
    frames[2] = frames[2] * 1e-3
    norms = [torch.linalg.matrix_norm(frame.double(), 2).item() for frame in frames]
    decomposed, real = [], torch.linalg.eigvalsh

    def spy(grams: torch.Tensor) -> torch.Tensor:
        decomposed.append(tuple(grams.shape))
        found: torch.Tensor = real(grams)
        return found

    monkeypatch.setattr(torch.linalg, "eigvalsh", spy)
    found = matrix_norm_bounds([frame.to(card.device) for frame in frames])
    assert not decomposed
    others = [dense.gaussian(40, 36, seed=5), frames[0] + 1e-4 * dense.gaussian(90, 40, seed=6), torch.zeros(33, 40)]
    found += matrix_norm_bounds([other.to(card.device) for other in others])
    assert sorted(decomposed) == [(1, 33, 33), (1, 36, 36), (1, 40, 40)]
    norms += [torch.linalg.matrix_norm(other.double(), 2).item() for other in others]
    for norm, bound in zip(norms, found, strict=True):
        assert norm <= bound <= norm * (1 + 3e-8)
