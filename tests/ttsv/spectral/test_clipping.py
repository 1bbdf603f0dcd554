import math
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.examples import examples
from ttsv.spectral.clipping import (
    ClipOptions,
    clip_conv,
    clip_matrix,
    clip_stack,
    clip_tt,
    divide_conv,
    measured,
)
from ttsv.spectral.krylov import LeadingPairs
from ttsv.spectral.norms import Algorithm, clip_algorithm
from ttsv.spectral.singular_values import conv_norm, conv_singular_values
from ttsv.spectral.symbol import PeriodicConv, Size
from ttsv.tt.decomposition import orthogonalize, tt_to_dense

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense

ALGORITHMS: tuple[Algorithm | None, ...] = (None, *get_args(Algorithm))


def relative(found: Tensor, truth: Tensor) -> float:
    error: float = torch.linalg.vector_norm(found - truth).item()
    size: float = torch.linalg.vector_norm(truth).item()
    return error / size


def measured_clip(
    kernel: Tensor,
    delta: float,
    input_size: Size,
    *,
    rounds: int = 1,
    rescale: bool = False,
    algorithm: Algorithm | None = None,
    **geometry: Any,
) -> "Measured":
    options = ClipOptions(delta, rounds, rescale, algorithm)
    return measured_alone(kernel, PeriodicConv.of(kernel, input_size, **geometry), options)


class Measured(NamedTuple):
    """A clipped kernel, and the norms that are told of it."""

    kernel: Tensor
    before: float
    after: float


def measured_stack(
    kernels: list[Tensor], geometry: PeriodicConv, deltas: list[float], options: ClipOptions
) -> list[Measured]:
    clips = clip_stack(kernels, geometry, deltas, options)
    return [Measured(clip.kernel, *norms) for clip, norms in zip(clips, measured(clips, geometry), strict=True)]


def measured_alone(kernel: Tensor, geometry: PeriodicConv, options: ClipOptions) -> Measured:
    return measured_stack([kernel], geometry, [options.delta], options)[0]


@examples(200)
@given(data=st.data())
def test_clip_is_that_of_the_dense_operator(dense: "Dense", data: st.DataObject) -> None:
    case = data.draw(dense.drawn_convolutions())
    values = dense.periodic_values(case)
    # From clips of nothing to clips of everything.
    delta = data.draw(st.floats(0.05, 1.2)) * values[0].item()
    rounds = data.draw(st.integers(1, 3))
    options = {**case.options, "rounds": rounds, "algorithm": data.draw(st.sampled_from(ALGORITHMS))}
    found = clip_conv(case.kernel, delta, case.input_size, **options)
    assert relative(found, dense.clip(case, delta, rounds)) <= 1e-8
    rescaled = measured_clip(case.kernel, delta, case.input_size, rescale=True, **options)
    norm = conv_norm(found, case.input_size, **case.options)
    assert relative(rescaled.kernel, found * min(1, delta / norm)) <= 1e-8
    assert rescaled.before == pytest.approx(values[0].item(), rel=1e-10)
    assert rescaled.after == pytest.approx(min(norm, delta), rel=1e-10)
    assert conv_norm(rescaled.kernel, case.input_size, **case.options) <= delta


def test_examples_of_the_api(dense: "Dense") -> None:
    kernel = dense.sine(3, 2, 3, 3)
    clipped = measured_clip(kernel, 1.5, (4, 4))
    assert clipped.before == pytest.approx(10.542015, abs=1e-6)
    assert clipped.kernel[0, 0, 0, 0].item() == pytest.approx(0.251926, abs=1e-6)
    assert clipped.kernel.norm().item() == pytest.approx(1.261332, abs=1e-6)
    assert clipped.after == pytest.approx(2.323690, abs=1e-6)
    rescaled = clip_conv(kernel, 1.5, (4, 4), rounds=5, rescale=True)
    assert rescaled[0, 0, 0, 0].item() == pytest.approx(0.191497, abs=1e-6)
    assert rescaled.norm().item() == pytest.approx(0.889825, abs=1e-6)
    assert conv_norm(rescaled, 4) == pytest.approx(1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("delta", [1e-6, 1e-3, 0.1, 1.0, 2.5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("algorithm", ["eigh", "sign"])
def test_a_delta_far_below_the_norm(
    dense: "Dense", algorithm: Algorithm, dtype: torch.dtype, delta: float, stride: int
) -> None:
    """Gram matrices lose such values; the result must not."""
    kernel = dense.gaussian(4, 4, 3, 3, dtype=dtype)
    case = dense.convolution(kernel.double(), (6, 6), (stride, stride), (1, 1), 1)
    found = clip_conv(kernel, delta, 6, stride=stride, algorithm=algorithm)
    assert found.dtype == dtype
    assert relative(found, dense.clip(case, delta)) <= (1e-5 if dtype == torch.float32 else 1e-8)


@pytest.mark.parametrize(("dtype", "decades"), [(torch.float32, 4), (torch.float64, 7)])
@pytest.mark.parametrize("algorithm", ["eigh", "sign"])
def test_values_near_a_small_delta(dense: "Dense", algorithm: Algorithm, dtype: torch.dtype, decades: int) -> None:
    """Singular values from 1 down past delta: a Gram matrix resolves those near delta worst."""
    left, right = (torch.linalg.qr(dense.gaussian(12, 12, seed=seed)).Q for seed in (1, 2))
    weight = (left * torch.logspace(0, -decades, 12, dtype=torch.float64)) @ right
    kernel = weight[:, :, None].to(dtype)
    case = dense.convolution(kernel.double(), (3,), (1,), (1,), 1)
    delta = 10.0 ** (1 - decades)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-8
    assert relative(clip_conv(kernel, delta, 3, algorithm=algorithm), dense.clip(case, delta)) <= tolerance


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("algorithm", ["eigh", "sign"])
def test_scale_of_float32_weights(dense: "Dense", algorithm: Algorithm, scale: float) -> None:
    kernel = dense.gaussian(4, 4, 3, dtype=torch.float32)
    expected = clip_conv(kernel, 1.5, 6)
    assert relative(clip_conv(kernel * scale, 1.5 * scale, 6, algorithm=algorithm) / scale, expected) <= 2e-6


@examples(100)
@given(data=st.data())
def test_kernels_of_one_geometry_are_clipped_together_as_each_by_itself(dense: "Dense", data: st.DataObject) -> None:
    case = data.draw(dense.drawn_convolutions())
    geometry = PeriodicConv.of(case.kernel, case.input_size, **case.options)
    count = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.sampled_from((0.0, 1e-3, 0.5, 1.0, 2.0)), min_size=count, max_size=count))
    kernels = [size * dense.gaussian(*case.kernel.shape, seed=seed) for seed, size in enumerate(sizes)]
    delta = data.draw(st.floats(0.05, 1.2)) * dense.periodic_values(case)[0].item()
    rounds, rescale = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    options = ClipOptions(delta, rounds, rescale, data.draw(st.sampled_from(("eigh", "sign"))))
    # Thresholds as roundings of frames leave them; the least is everybody's.
    deltas = [delta * (1 + place * 1e-14) for place in range(count)]
    found = measured_stack(kernels, geometry, deltas, options)
    for kernel, one in zip(kernels, found, strict=True):
        alone = measured_alone(kernel, geometry, options)
        scale = max(torch.linalg.vector_norm(alone.kernel).item(), delta)
        assert torch.linalg.vector_norm(one.kernel - alone.kernel) <= 1e-8 * scale
        assert one.before == pytest.approx(alone.before, rel=1e-9, abs=1e-12)
        assert one.after == pytest.approx(alone.after, rel=1e-9, abs=1e-12)
        assert not rescale or conv_norm(one.kernel, case.input_size, **case.options) <= deltas[-1]


def test_a_stack_in_float32_takes_float64_where_one_kernel_asks_for_it(dense: "Dense") -> None:
    kernels = [(size * dense.gaussian(6, 6, 3, 3, seed=place)).float() for place, size in enumerate((0.05, 5.0))]
    geometry, options = PeriodicConv.of(kernels[0], 8), ClipOptions(1.0, rescale=True, algorithm="sign")
    for kernel, one in zip(kernels, measured_stack(kernels, geometry, [1.0, 1.0], options), strict=True):
        exact = measured_alone(kernel.double(), geometry, options)
        assert one.kernel.dtype == torch.float32
        assert relative(one.kernel, exact.kernel.float()) <= 4e-6  # what a rescale leaves
        assert conv_singular_values(one.kernel.double(), 8).max().item() <= 1


@pytest.mark.parametrize("algorithm", ["eigh", "sign"])
@pytest.mark.parametrize("seed", range(20))
def test_rescaled_float32_kernels_are_below_delta_in_exact_arithmetic(
    dense: "Dense", algorithm: Algorithm, seed: int
) -> None:
    kernel = dense.gaussian(20, 24, 3, 3, seed=seed, dtype=torch.float32)
    found = measured_clip(kernel, 1.0, 8, rescale=True, algorithm=algorithm)
    norm = conv_singular_values(found.kernel.double(), 8).max().item()
    assert 1 - 6e-6 <= norm <= 1
    assert found.after == pytest.approx(norm, rel=1e-12)
    assert conv_singular_values(found.kernel, 8).max().item() <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "size", "options", "share"),
    [
        ((4, 5, 3, 3), (1, 1), {}, 0.2),
        ((2, 2, 4, 3), (1, 3), {"dilation": (1, 2), "groups": 2}, 0.001),
        ((3, 3, 3), (2,), {"stride": 2}, 1e-6),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rescaled_kernels_that_fold_are_below_delta(
    shape: tuple[int, ...], size: tuple[int, ...], options: dict[str, Any], share: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for _ in range(30):
        kernel = torch.randn(shape, dtype=dtype)
        delta = share * kernel.norm().item()
        found = measured_clip(kernel, delta, size, rescale=True, **options)
        norm = conv_singular_values(found.kernel.double(), size, **options).max().item()
        assert norm <= delta
        assert found.after == pytest.approx(norm, rel=1e-9)
        assert found.after <= delta
        divided = divide_conv(kernel, delta, size, **options).double()
        assert conv_singular_values(divided, size, **options).max().item() <= delta


def test_a_large_rescaled_kernel_is_bounded_and_left_by_a_second_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttsv.spectral.norms._CHEAP_WORK", 0)
    torch.manual_seed(0)
    found = measured_clip(torch.randn(8, 8, 3, 3), 1.0, 8, rescale=True)
    assert found.after == 1.0
    assert conv_singular_values(found.kernel.double(), 8).max().item() <= 1
    assert torch.equal(clip_conv(found.kernel, 1.0, 8, rescale=True), found.kernel)


def test_the_algorithm_depends_on_side_and_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 1)
    assert [clip_algorithm(side, cpu) for side in (1, 32, 33, 95, 96, 640)] == ["eigh"] * 4 + ["krylov"] * 2
    assert [clip_algorithm(side, cuda) for side in (1, 32, 33, 95, 96, 640)] == ["eigh"] * 2 + ["sign"] * 4


@pytest.mark.parametrize(("algorithm", "iterates"), [("eigh", [False]), ("krylov", [True]), ("sign", [])])
def test_the_algorithm_that_is_asked_for_computes(
    dense: "Dense", monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm, iterates: list[bool]
) -> None:
    """All give the same result: only what they make on the way tells them apart."""
    made = []

    def watched(**options: bool) -> LeadingPairs:
        made.append(options["iterates"])
        return LeadingPairs(**options)

    monkeypatch.setattr("ttsv.spectral.clipping.LeadingPairs", watched)
    clip_conv(dense.gaussian(4, 3, 3), 0.5, 6, algorithm=algorithm)
    assert made == iterates


def test_nothing_to_clip_returns_a_copy(dense: "Dense") -> None:
    kernel = dense.gaussian(2, 3, 3).requires_grad_()
    for delta in (1.0001 * conv_norm(kernel, 5), 1e300):
        clipped = clip_conv(kernel, delta, 5, rounds=3, rescale=True)
        assert torch.equal(clipped, kernel)
        assert clipped.data_ptr() != kernel.data_ptr()
        assert not clipped.requires_grad
    assert torch.equal(clip_conv(torch.zeros(2, 2, 3), 1.0, 5, rescale=True), torch.zeros(2, 2, 3))


def test_taps_beyond_the_input_share_the_change_equally(dense: "Dense") -> None:
    kernel = dense.sine(2, 2, 5)
    change = clip_conv(kernel, 0.5, 2) - kernel
    torch.testing.assert_close(change[..., 0], change[..., 2])
    torch.testing.assert_close(change[..., 0], change[..., 4])
    torch.testing.assert_close(change[..., 1], change[..., 3])
    # A kernel that covers the input loses nothing to truncation.
    assert conv_norm(kernel + change, 2) == pytest.approx(0.5)


def test_rounds_bring_the_norm_down(dense: "Dense") -> None:
    kernel = dense.gaussian(8, 8, 3, 3)
    norms = [measured_clip(kernel, 2.0, 8, rounds=rounds).after for rounds in (1, 5, 30)]
    assert norms[0] > norms[1] > norms[2] > 2.0
    assert norms[2] < 1.02 * 2.0


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_batches_of_frequencies_change_nothing(
    dense: "Dense", monkeypatch: pytest.MonkeyPatch, share: float, algorithm: Algorithm
) -> None:
    """Those with nothing to clip neither."""
    kernel = dense.gaussian(4, 2, 3, 3)
    options: dict[str, Any] = {"groups": 2, "stride": 2, "algorithm": algorithm}
    delta = share * conv_norm(kernel, 6, groups=2, stride=2)
    whole = clip_conv(kernel, delta, 6, **options)
    assert not torch.equal(whole, kernel)
    monkeypatch.setattr("ttsv.spectral.gram._PART_BYTES", 1)
    torch.testing.assert_close(clip_conv(kernel, delta, 6, **options), whole, rtol=1e-12, atol=1e-12)


@examples(40)
@given(data=st.data())
def test_clip_tt_clips_the_whole_operator(dense: "Dense", data: st.DataObject) -> None:
    core = data.draw(dense.drawn_convolutions(grouped=False))
    r2, r1 = core.kernel.shape[:2]
    k1 = dense.gaussian(r1 + data.draw(st.integers(0, 2)), r1, seed=1)
    k3 = dense.gaussian(r2, r2 + data.draw(st.integers(0, 2)), seed=2)
    kernel = tt_to_dense(k1, core.kernel, k3)
    whole = dense.convolution(kernel, core.input_size, core.stride, core.dilation, 1)
    options: dict[str, Any] = {"stride": core.stride, "dilation": core.dilation}
    delta = data.draw(st.floats(0.1, 1.2)) * dense.periodic_values(whole)[0].item()
    clipped = clip_tt(k1, core.kernel, k3, delta, core.input_size, **options)
    assert all(factor.is_contiguous() for factor in clipped)
    torch.testing.assert_close(clipped.k1.T @ clipped.k1, torch.eye(r1, dtype=torch.float64))
    torch.testing.assert_close(clipped.k3 @ clipped.k3.T, torch.eye(r2, dtype=torch.float64))
    # Between orthonormal frames, clipping the core and clipping the whole operator are the same (Theorem 1).
    assert relative(tt_to_dense(*clipped), dense.clip(whole, delta)) <= 1e-8
    rescaled = clip_tt(k1, core.kernel, k3, delta, core.input_size, rescale=True, **options)
    assert conv_norm(tt_to_dense(*rescaled), core.input_size, **options) <= delta * (1 + 1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clip_tt_clips_its_core_as_it_is_asked_to(dense: "Dense", algorithm: Algorithm | None) -> None:
    """By this algorithm, whose roundings are its own, and without stride or dilation where none is named."""
    k1, core, k3 = dense.gaussian(5, 4, seed=1), dense.gaussian(4, 4, 3, 3), dense.gaussian(4, 6, seed=2)
    factors = orthogonalize(k1, core, k3)
    delta = 0.5 * conv_norm(factors.core, 8)
    cores = {one: clip_conv(factors.core, delta, 8, algorithm=one) for one in get_args(Algorithm)}
    assert not torch.equal(cores["sign"], cores["eigh"])
    clipped = clip_tt(k1, core, k3, delta, 8, algorithm=algorithm)
    assert torch.equal(clipped.core, cores[algorithm or clip_algorithm(4, core.device)])


def test_clip_matrix(dense: "Dense") -> None:
    weight = dense.gaussian(5, 3)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(clip_matrix(weight, 1.0), (left * values.clamp(max=1.0)) @ right)
    for shape in ((3,), (0, 3), (2, 2, 2)):
        with pytest.raises(ValueError, match=r"weight\.shape = .*: must be \(rows, columns\)"):
            clip_matrix(torch.ones(shape), 1.0)
    with pytest.raises(ValueError, match="weight = "):
        clip_matrix(weight * math.nan, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(share=st.floats(1e-8, 0.9), shape=st.tuples(st.integers(1, 6), st.integers(1, 6)), seed=st.integers(0, 99))
def test_a_clipped_matrix_has_no_larger_norm(
    dtype: torch.dtype, share: float, shape: tuple[int, int], seed: int
) -> None:
    """However far the norm was above delta: what was cut off leaves no rounding of its own behind."""
    weight = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    delta = share * torch.linalg.matrix_norm(weight.double(), 2).item()
    norm = torch.linalg.matrix_norm(clip_matrix(weight, delta).double(), 2).item()
    assert norm <= delta * (1 + 8 * torch.finfo(dtype).eps)


def test_a_matrix_with_nothing_to_clip_is_copied(dense: "Dense") -> None:
    weight = dense.gaussian(4, 3)
    found = clip_matrix(weight, 100.0)
    assert torch.equal(found, weight)
    assert found.data_ptr() != weight.data_ptr()


def test_numbers_of_numpy_are_taken_as_they_are(dense: "Dense") -> None:
    kernel, delta = dense.gaussian(4, 3, 3, 3), np.float32(1.1)
    exact = float(delta)
    for algorithm in ALGORITHMS:
        found = clip_conv(kernel, delta, 6, algorithm=algorithm)  # type: ignore[arg-type]
        assert torch.equal(found, clip_conv(kernel, exact, 6, algorithm=algorithm))
    assert torch.equal(divide_conv(kernel, delta, 6), divide_conv(kernel, exact, 6))  # type: ignore[arg-type]


def test_divide_conv(dense: "Dense") -> None:
    kernel = dense.gaussian(4, 3, 3, 3)
    before = conv_singular_values(kernel, 6, stride=2)
    divided = divide_conv(kernel, 1.5, 6, stride=2)
    torch.testing.assert_close(conv_singular_values(divided, 6, stride=2), before * (1.5 / before.max()))
    torch.testing.assert_close(divide_conv(kernel, 100.0, 6, stride=2), kernel)
    assert not divide_conv(torch.zeros(2, 2, 3), 1.0, 4).any()
    with pytest.raises(ValueError, match=r"target = 0\.0: must be a finite number above 0"):
        divide_conv(kernel, 0.0, 6)


def test_divide_conv_with_dilation_and_groups(dense: "Dense") -> None:
    kernel = dense.gaussian(4, 2, 3, 3)
    options: dict[str, Any] = {"dilation": (2, 3), "groups": 2}
    target = conv_norm(kernel, 6, **options) / 3
    torch.testing.assert_close(divide_conv(kernel, target, 6, **options), kernel / 3)


@pytest.mark.parametrize("delta", [0.0, -1.0, math.nan, math.inf])
def test_delta_out_of_range(delta: float) -> None:
    kernel = torch.ones(2, 2, 3)
    with pytest.raises(ValueError, match=r"delta = .*: must be a finite number above 0"):
        clip_conv(kernel, delta, 4)
    with pytest.raises(ValueError, match="delta = "):
        clip_matrix(kernel[0], delta)


def test_other_arguments_out_of_range() -> None:
    kernel = torch.ones(2, 2, 3)
    with pytest.raises(ValueError, match="rounds = 0: must be at least 1"):
        clip_conv(kernel, 1.0, 4, rounds=0)
    with pytest.raises(ValueError, match="rescale = 1: "):
        clip_conv(kernel, 1.0, 4, rescale=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="algorithm = 'svd': must be None or one of eigh, krylov, sign"):
        clip_conv(kernel, 1.0, 4, algorithm="svd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"stride = 3: must divide input_size = \(4,\)"):
        clip_conv(kernel, 1.0, 4, stride=3)
    with pytest.raises(ValueError, match="kernel = "):
        clip_conv(kernel / 0, 1.0, 4)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("level", [0.47354054, 0.1])
def test_norms_a_rounding_above_delta_do_not_stay_there(
    monkeypatch: pytest.MonkeyPatch, level: float, batched: bool
) -> None:
    """Of constant kernels, whose norm Schur's bound is; their sums round in float32, and float32 tests the result."""
    monkeypatch.setattr("ttsv.spectral.norms.decomposes_in_batches", lambda *_: batched)
    for roundings in range(1, 5):
        kernel = torch.full((64, 64, 3, 3), level)
        delta = kernel[0].double().sum().item() / (1 + roundings * 2**-23)
        (clip,) = clip_stack([kernel], PeriodicConv.of(kernel, 8), [delta], ClipOptions(delta, rescale=True))
        assert delta * (1 - 1e-5) <= conv_singular_values(clip.kernel.double(), 8).max().item() <= delta
