import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import examples
from ttsv.layers import SOC, SOCTT, Framed, FrameKind
from ttsv.layers.skew import (
    by_convolutions,
    exponential_series,
    series_norm_bound,
    skew_part,
    unfolding_across,
    unfolding_aside,
)
from ttsv.layers.soc import soc_iterations
from ttsv.spectral.bounds import conv_norm_bounds

if TYPE_CHECKING:
    from tests.ttsv.conftest import Dense


FRAMES: tuple[FrameKind, ...] = ("free", "orthonormal")


def window_norms(kernel: Tensor) -> Tensor:
    """Spectral norms of R, S, T and U of "Fantastic Four" (Singla & Feizi, ICLR 2021), from `kernel (c, c, k, k)`."""
    orders = [(2, 0, 3, 1), (3, 0, 2, 1), (0, 2, 3, 1), (2, 3, 0, 1)]
    rows = [2, 2, 1, 3]  # how many of these axes lie down
    unfoldings = [
        kernel.permute(*order).flatten(0, down - 1).flatten(1) for order, down in zip(orders, rows, strict=True)
    ]
    return torch.stack([torch.linalg.svdvals(unfolding)[0] for unfolding in unfoldings])


def operator(layer: nn.Module, channels: int, size: tuple[int, int]) -> Tensor:
    """The layer's matrix (outputs, inputs) in its present mode, its bias left out."""
    layer = copy.deepcopy(layer)
    dims = channels * math.prod(size)
    images = torch.eye(dims, dtype=torch.float64).reshape(dims, channels, *size)
    with torch.no_grad():
        outputs: Tensor = layer(images) - layer(torch.zeros_like(images))
    return outputs.flatten(1).T


def skew_operator(kernel: Tensor, size: tuple[int, int]) -> Tensor:
    channels, padding = len(kernel), kernel.shape[-1] // 2
    dims = channels * math.prod(size)
    images = torch.eye(dims, dtype=torch.float64).reshape(dims, channels, *size)
    return functional.conv2d(images, kernel, padding=padding).flatten(1).T


def norm(matrix: Tensor) -> float:
    value: float = torch.linalg.matrix_norm(matrix, 2).item()
    return value


@st.composite
def drawn_layers(draw: st.DrawFn, *, between_frames: bool = False) -> tuple[SOC | SOCTT, tuple[int, int]]:
    """Layers of 1 to 4 channels with weights whose norms their power iterations know well, badly or not at all."""
    c_in, c_out = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    stride, kernel_size = draw(st.integers(1, 2)), draw(st.sampled_from((1, 3, 5)))
    size = draw(st.integers(1, 3)) * stride, draw(st.integers(1, 3)) * stride
    correction = draw(st.sampled_from((None, 0.7, 1.0, 2.0)))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    layer: SOC | SOCTT
    if between_frames:
        rank, frames = draw(st.integers(1, 4)), draw(st.sampled_from(FRAMES))
        layer = SOCTT(c_in, c_out, kernel_size, rank, stride, correction=correction, frames=frames, dtype=torch.float64)
    else:
        layer = SOC(c_in, c_out, kernel_size, stride, correction=correction, dtype=torch.float64)
    core = layer.core if isinstance(layer, SOCTT) else layer
    with torch.no_grad():
        core.weight.add_(draw(st.sampled_from((0.0, 0.5, 5.0))) * torch.randn_like(core.weight))
        if draw(st.booleans()):
            core.refresh()
        if isinstance(layer, SOCTT) and layer.frames == "free":
            layer.k1.mul_(1.5)
    return layer.train(draw(st.booleans())), size


@examples()
@given(drawn_layers(), st.integers(1, 12))
def test_lipschitz_bound_of_drawn_layers(drawn: tuple[SOC, tuple[int, int]], terms: int) -> None:
    layer, size = drawn
    layer.eval_terms = terms
    matrix = operator(layer.eval(), layer.in_channels, size)
    assert norm(matrix) <= layer.lipschitz_bound(size)


@examples()
@given(drawn_layers(between_frames=True))
def test_lipschitz_bound_between_frames(drawn: tuple[SOCTT, tuple[int, int]]) -> None:
    layer, size = drawn
    matrix = operator(layer.eval(), layer.in_channels, size)
    assert norm(matrix) <= layer.lipschitz_bound(size)


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_bound_with_exact_frames_is_one_in_evaluation_and_half_a_per_cent_more_in_training(kernel_size: int) -> None:
    torch.manual_seed(0)
    layer = SOCTT(12, 16, kernel_size, 8, stride=2, frames="orthonormal", dtype=torch.float64).eval()
    assert 1 <= layer.lipschitz_bound(8) < 1 + 1e-8
    assert 1 + 1e-5 < layer.lipschitz_bound(8, terms=5) < 1.005
    with torch.no_grad():
        layer.get_parameter("parametrizations.k1.original").mul_(3)
    assert layer.lipschitz_bound(8) < 1 + 1e-8
    free = SOCTT(12, 16, kernel_size, 8, stride=2, dtype=torch.float64)
    with torch.no_grad():
        free.k1.mul_(3)
        free.k3.mul_(0.5)
    assert free.lipschitz_bound(8) == pytest.approx(1.5, rel=1e-8)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_skew_part_lies_taps_first(layout: torch.memory_format) -> None:
    weight = torch.randn(4, 4, 3, 3).contiguous(memory_format=layout)
    assert skew_part(weight).permute(2, 3, 0, 1).is_contiguous()


def test_stale_norms_are_paid_for_in_the_bound() -> None:
    torch.manual_seed(0)
    layer = SOC(4, 4, 3, correction=3.0, dtype=torch.float64).eval()
    layer.across, layer.aside = torch.zeros_like(layer.across), torch.zeros_like(layer.aside)
    layer.across[0] = layer.aside[0] = 1e-2
    measured = norm(operator(layer, 4, (5, 5)))
    assert measured > 1e3
    assert measured <= layer.lipschitz_bound(5)
    layer.refresh()
    assert layer.lipschitz_bound(5) < 100
    with torch.no_grad():
        layer.weight.fill_(1e60)
        layer.weight[0].neg_()
    layer.across, layer.aside = layer.across * 1e-60, layer.aside * 1e-60
    assert layer.lipschitz_bound(5) == math.inf


@pytest.mark.parametrize("terms", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("norm", [0.0, 1e-3, 0.7, 1.4, 2.1, 3.0, 10.0])
def test_series_norm_bound_is_the_maximum_on_the_imaginary_axis(terms: int, norm: float) -> None:
    points = 1j * torch.linspace(0, norm, 100_001, dtype=torch.float64)
    maximum = sum(points**power / math.factorial(power) for power in range(terms + 1)).abs().max().item()  # type: ignore[union-attr]
    assert maximum * (1 - 1e-14) <= series_norm_bound(norm, terms) <= maximum * (1 + 5e-5)
    if norm <= 3:
        assert series_norm_bound(norm, terms) <= maximum * (1 + 1e-6)


@examples()
@given(drawn_layers())
def test_the_operator_is_skew_and_the_series_its_exponential(drawn: tuple[SOC, tuple[int, int]]) -> None:
    layer, (height, width) = drawn
    layer.eval().eval_terms = 60
    with torch.no_grad():
        skew = skew_operator(layer.scaled_kernel(), (height, width))
    torch.testing.assert_close(skew.T, -skew, rtol=0, atol=1e-13)
    if norm(skew) > 5:
        return
    exponential = torch.linalg.matrix_exp(skew)
    square = SOC(len(layer.weight), len(layer.weight), layer.kernel_size, bias=False, dtype=torch.float64).eval()
    square.load_state_dict({name: t for name, t in layer.state_dict().items() if name != "bias"})
    square.correction, square.eval_terms = layer.correction, 60
    torch.testing.assert_close(operator(square, len(layer.weight), (height, width)), exponential, rtol=0, atol=1e-12)


def test_terms_of_training_and_evaluation() -> None:
    torch.manual_seed(0)
    layer = SOC(3, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        skew = skew_operator(layer.eval().scaled_kernel(), (4, 4))
    powers = [torch.eye(len(skew), dtype=torch.float64)]
    for power in range(1, 13):
        powers.append(powers[-1] @ skew / power)
    torch.testing.assert_close(operator(layer, 3, (4, 4)), sum(powers))
    layer.train()
    layer._iterate = lambda skew, iterations: None  # type: ignore[method-assign] # the norms as they are
    torch.testing.assert_close(operator(layer, 3, (4, 4)), sum(powers[:6]))


@pytest.mark.parametrize(("c_in", "c_out", "stride"), [(2, 9, 2), (3, 5, 2), (4, 2, 1), (2, 5, 1)])
def test_stride_and_channels(c_in: int, c_out: int, stride: int) -> None:
    """Space-to-depth, channels of zeros behind, a square convolution, the first channels out."""
    torch.manual_seed(0)
    layer = SOC(c_in, c_out, 3, stride, dtype=torch.float64).eval()
    channels = max(stride**2 * c_in, c_out)
    assert layer.weight.shape == (channels, channels, 3, 3)
    square = SOC(channels, channels, 3, bias=False, dtype=torch.float64).eval()
    square.load_state_dict({name: t for name, t in layer.state_dict().items() if name != "bias"})
    images = torch.randn(2, c_in, 4, 6, dtype=torch.float64)
    blocks = torch.zeros(2, channels, 4 // stride, 6 // stride, dtype=torch.float64)
    for c in range(c_in):
        for i in range(stride):
            for j in range(stride):
                blocks[:, (c * stride + i) * stride + j] = images[:, c, i::stride, j::stride]
    assert layer.bias is not None
    torch.testing.assert_close(layer(images), square(blocks)[:, :c_out] + layer.bias[:, None, None])
    torch.testing.assert_close(layer(images[0]), layer(images)[0])


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_scale_is_the_correction_over_the_least_window_norm(kernel_size: int) -> None:
    torch.manual_seed(0)
    layer = SOC(6, 6, kernel_size, dtype=torch.float64)
    layer.refresh(3000)
    skew = layer.skew_kernel().detach()
    norms = window_norms(skew)
    torch.testing.assert_close(norms[0], norms[1])
    torch.testing.assert_close(norms[2], norms[3])
    correction = 1.0 if kernel_size == 1 else 0.7
    torch.testing.assert_close(layer.scaled_kernel(), skew * correction / norms.min(), rtol=1e-6, atol=0)
    core = SOCTT(8, 8, kernel_size, 6).core
    assert core.correction == 0.7
    assert SOCTT(8, 8, kernel_size, 6, correction=None).core.correction == correction


@pytest.mark.parametrize("iterations", [1, 50])
def test_a_training_pass_takes_as_many_steps_of_the_power_iterations_as_it_is_told(iterations: int) -> None:
    """`(M^T M)^n v / |...|` of two unfoldings M as matrices."""
    torch.manual_seed(0)
    layer = SOC(5, 5, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn_like(layer.weight))
    skew = layer.skew_kernel().detach()
    unfoldings = skew.permute(2, 0, 3, 1).reshape(15, 15), skew.flatten(1).T
    starts = layer.across.clone(), layer.aside.clone()
    layer.iterations = iterations
    layer(torch.randn(1, 5, 4, 4, dtype=torch.float64))
    for found, matrix, start in zip((layer.across, layer.aside), unfoldings, starts, strict=True):
        wanted = torch.linalg.matrix_power(matrix.T @ matrix, iterations) @ start
        torch.testing.assert_close(found.flatten(), wanted / wanted.norm(), rtol=1e-9, atol=1e-12)


def test_the_authors_schedule_of_power_iterations() -> None:
    steps = [soc_iterations("code", step) for step in range(401)]
    assert [step for step, count in enumerate(steps) if count == 50] == [0, 200, 400]
    assert sorted(set(steps)) == [1, 50]
    assert {soc_iterations("one", step) for step in range(401)} == {1}


@pytest.mark.slow
def test_training_follows_the_norms_and_evaluation_changes_nothing() -> None:
    torch.manual_seed(0)
    layer = SOC(4, 4, 3)
    images = torch.randn(1, 4, 4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.randn_like(layer.weight))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.eval()(images)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    layer.train()
    for _ in range(300):
        layer(images)
    least = window_norms(layer.scaled_kernel().detach()).min().item()
    assert least == pytest.approx(0.7, rel=1e-3)
    (layer(images) + layer(images)).square().sum().backward()  # twice in one graph, as in a network that shares it
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().max() > 0


@pytest.mark.slow
def test_gradients() -> None:
    torch.manual_seed(0)
    layer = SOCTT(3, 4, 3, 2, frames="orthonormal", dtype=torch.float64).eval()
    images = torch.randn(1, 3, 3, 3, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def forward(*values: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (images,))
        return result

    inputs = tuple(p.detach().clone().requires_grad_() for _, p in layer.named_parameters())
    assert torch.autograd.gradcheck(forward, inputs)


@pytest.mark.parametrize("pixels", [(1, 2), (3, 2), (3, 6)], ids=str)
def test_gradients_of_gradients(pixels: tuple[int, int]) -> None:
    """On few pixels, which go a way of their own, and on more: a penalty of a gradient differentiates it again."""
    torch.manual_seed(0)
    kernel = skew_part(torch.randn(2, 2, 3, 3, dtype=torch.float64)).requires_grad_()
    images = torch.randn(2, 2, *pixels, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, taps: exponential_series(x, taps, 3), (images, kernel))


def test_singular_values(dense: "Dense") -> None:
    """Against the series of the dense periodic operator, cut to the channels in use."""
    torch.manual_seed(0)
    for c_in, c_out, stride in ((3, 3, 1), (4, 2, 1), (2, 5, 1), (1, 3, 2)):
        layer = SOC(c_in, c_out, 3, stride, dtype=torch.float64).eval()
        kernel = layer.scaled_kernel().detach()
        pixels = (2, 3)
        # Centred taps: the oracle reads its pixel first, which turns the operator by a shift of the grid.
        skew = dense.periodic_operator(dense.convolution(kernel, pixels, (1, 1), (1, 1), 1))
        shift = torch.eye(6, dtype=torch.float64).reshape(6, *pixels).roll((1, 1), (1, 2)).reshape(6, 6)
        skew = torch.kron(torch.eye(len(kernel), dtype=torch.float64), shift.T.contiguous()) @ skew
        torch.testing.assert_close(skew, -skew.T, rtol=0, atol=1e-14)
        series, power = torch.eye(len(skew), dtype=torch.float64), torch.eye(len(skew), dtype=torch.float64)
        for j in range(1, 13):
            power = power @ skew / j
            series = series + power
        cut = series[: c_out * 6, : stride * stride * c_in * 6]
        values = layer.singular_values((2 * stride, 3 * stride))
        assert values.shape == (6, min(c_out, stride**2 * c_in))
        assert (values.diff(dim=1) <= 1e-12).all()
        torch.testing.assert_close(values.flatten().sort().values, torch.linalg.svdvals(cut).sort().values)


def test_a_zero_weight_is_the_identity() -> None:
    layer = SOC(2, 2, 3, bias=False).eval()
    nn.init.zeros_(layer.weight)
    images = torch.randn(1, 2, 4, 4)
    torch.testing.assert_close(layer(images), images)
    assert layer.lipschitz_bound(4) == pytest.approx(1.0)


def test_the_operators_norm_stays_where_the_series_is_good() -> None:
    """What the correction of 0.7 is for: the window norm times k bounds the operator's."""
    torch.manual_seed(0)
    layer = SOC(8, 8, 3, dtype=torch.float64)
    layer.refresh(1000)
    assert conv_norm_bounds(layer.scaled_kernel(), 8).upper <= 3 * 0.7 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel_size": 4}, "kernel_size = 4: must be odd"),
        ({"kernel_size": 0}, "kernel_size = 0"),
        ({"stride": 0}, "stride = 0"),
        ({"in_channels": 0}, "in_channels = 0"),
        ({"eval_terms": 0}, "eval_terms = 0"),
        ({"correction": 0.0}, r"correction = 0\.0"),
        ({"correction": math.inf}, "correction = inf"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOC(**({"in_channels": 2, "out_channels": 2, "kernel_size": 3} | arguments))  # type: ignore[arg-type]


def test_sizes_that_the_stride_does_not_divide() -> None:
    layer = SOC(2, 2, 3, stride=2)
    with pytest.raises(ValueError, match=r"stride = 2: must divide the input's sides, \(4, 5\)"):
        layer(torch.zeros(1, 2, 4, 5))
    with pytest.raises(ValueError, match="stride = 2: must divide"):
        layer.lipschitz_bound(5)
    with pytest.raises(ValueError, match="rank = 0"):
        SOCTT(2, 2, 3, 0)
    with pytest.raises(ValueError, match="frames = 'stiff': must be one of free, orthonormal"):
        SOCTT(2, 2, 3, 2, frames="stiff")  # type: ignore[arg-type]
    assert isinstance(SOCTT(4, 4, 3, 2), Framed)


def test_repr() -> None:
    assert repr(SOC(3, 8, 3, stride=2, bias=False)) == (
        "SOC(3, 8, kernel_size=3, stride=2, correction=0.7, train_terms=5, eval_terms=12, bias=False)"
    )
    assert "SOCTT(\n  3, 8, rank=(2, 2)\n" in repr(SOCTT(3, 8, 3, 2))


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 4), (3, 5), (4, 4)])
@pytest.mark.parametrize("side", [1, 3, 5])
def test_small_images_go_another_way_to_the_same_series(shape: tuple[int, int], side: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 4, *shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, side, side, dtype=torch.float64, requires_grad=True)

    def by_convolutions(images: Tensor, weight: Tensor) -> Tensor:
        kernel = (weight - weight.transpose(0, 1).flip(2, 3)) / 2
        total = term = images
        for power in range(1, 6):
            term = functional.conv2d(term, kernel, padding=side // 2) / power
            total = total + term
        return total

    found = exponential_series(images, skew_part(weight), 5)
    expected = by_convolutions(images, weight)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(found, (images, weight), direction),
        torch.autograd.grad(expected, (images, weight), direction),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(exponential_series(images[0], skew_part(weight), 5), expected[0])


def test_the_small_way_is_taken_and_keeps_to_autocast() -> None:
    torch.manual_seed(0)
    images, kernel = torch.randn(2, 8, 2, 2), skew_part(0.1 * torch.randn(8, 8, 3, 3))
    exact = exponential_series(images.double(), kernel.double(), 5)
    single = exponential_series(images, kernel, 5)
    with torch.autocast("cpu", torch.bfloat16):
        half = exponential_series(images, kernel, 5)
    assert half.dtype == single.dtype == torch.float32
    errors = [((found - exact).abs().max() / exact.abs().max()).item() for found in (single, half)]
    assert errors[0] < 1e-6
    assert 1e-4 < errors[1] < 2e-2


def term_by_term(images: Tensor, weight: Tensor, terms: int) -> Tensor:
    """The series by its definition: every term's convolution casts and lays out the kernel for itself."""
    kernel = (weight - weight.transpose(0, 1).flip(2, 3)) / 2
    total = term = images
    for power in range(1, terms + 1):
        term = functional.conv2d(term, kernel, padding=weight.shape[-1] // 2) / power
        total = total + term
    return total


@examples(40)
@given(
    side=st.sampled_from((1, 3, 5)),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)),
    last=st.tuples(st.booleans(), st.booleans()),
    precision=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
    terms=st.integers(1, 6),
)
def test_a_kernel_laid_out_once_gives_the_numbers_of_one_laid_out_for_every_term(
    side: int, shape: tuple[int, int, int, int], last: tuple[bool, bool], precision: torch.dtype, terms: int
) -> None:
    torch.manual_seed(0)
    layouts = [torch.channels_last if one else torch.contiguous_format for one in last]
    dtype = torch.float64 if precision == torch.float64 else torch.float32
    images, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[1], shape[1], side, side, dtype=dtype) / 4
    given = [tensor.contiguous(memory_format=layout) for tensor, layout in zip((images, weight), layouts, strict=True)]
    direction = torch.randn_like(images)

    def series(found: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        # In float64 autocast is on as well: it leaves that alone.
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != torch.float32), by_convolutions():
            result = found(*leaves)
        return result, *torch.autograd.grad(result, leaves, direction)

    found = series(lambda images, weight: exponential_series(images, skew_part(weight), terms))
    expected = series(lambda images, weight: term_by_term(images, weight, terms))
    for got, wanted in zip(found, expected, strict=True):
        # A kernel laid out otherwise is, on some processors, summed in another order.
        rounding = 8 * torch.finfo(precision).eps * max(1.0, wanted.abs().max().item())
        assert (got - wanted).abs().max() <= rounding


def test_the_kernel_is_cast_and_laid_out_once_for_all_terms() -> None:
    class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves its subclassing untyped
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            copies = torch.ops.aten._to_copy.default, torch.ops.aten.clone.default
            if func in copies and found.shape == (6, 6, 3, 3):
                self.seen += 1
            return found

    images = torch.randn(2, 6, 7, 7).contiguous(memory_format=torch.channels_last)
    kernel = skew_part(torch.randn(6, 6, 3, 3, requires_grad=True))
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), Copies() as copies:  # type: ignore[no-untyped-call]
            exponential_series(images, kernel, 5)
        assert copies.seen == 1


@pytest.mark.parametrize("side", [1, 3, 5])
def test_unfoldings_times_vectors(side: int) -> None:
    torch.manual_seed(0)
    kernel = torch.randn(4, 4, side, side, dtype=torch.float64)
    across = kernel.permute(2, 0, 3, 1).reshape(4 * side, 4 * side)
    aside = kernel.permute(2, 3, 0, 1).reshape(side * side * 4, 4)
    for matrix, product in ((across, unfolding_across), (aside, unfolding_aside)):
        right, left = (torch.randn(size, dtype=torch.float64) for size in reversed(matrix.shape))
        torch.testing.assert_close(product(kernel, right), matrix @ right)
        torch.testing.assert_close(product(kernel, left, transposed=True), matrix.T @ left)
