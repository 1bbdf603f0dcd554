from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.examples import examples
from ttsv.errors import ConfigError
from ttsv.winograd import convolution, tiles
from ttsv.winograd.convolution import WinogradConvolutions, winograd_convolution, winograd_may_pay, winograd_pays
from ttsv.winograd.tiles import minimal_filtering


@pytest.fixture(autouse=True)
def one_thread_of_wide_vectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where it pays for most shapes, whatever this processor is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(convolution, "own_products", lambda: torch.get_num_threads() == 1)
    yield
    torch.set_num_threads(threads)


ONE: Any = np.int64(1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(compute: Callable[[Tensor, Tensor], Tensor], images: Tensor, kernel: Tensor) -> list[Tensor]:
    images, kernel = (tensor.detach().clone().requires_grad_() for tensor in (images, kernel))
    result = compute(images, kernel)
    downstream = drawn(*result.shape, seed=9).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, (images, kernel), downstream)]


def relative_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        (float((a.double() - b).norm() / b.norm().clamp_min(1e-30))) if b.norm() else float(a.abs().max())
        for a, b in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize("stride", [1, 2])
def test_transforms_are_those_of_the_algorithm(stride: int) -> None:
    """Against the sum itself, in float64: exact but for rounding."""
    output, kernel, images = minimal_filtering(stride)
    g, d = drawn(3).double(), drawn(3 + 3 * stride).double()
    expected = torch.stack([(g * d[i : i + 3]).sum() for i in range(0, 4 * stride, stride)])
    torch.testing.assert_close(output @ ((kernel @ g) * (images @ d)), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocks",
    [(4608, 43_000, 8 << 20), (1, 1, 1), (200, 70, 8 << 20), (4608, 43_000, 1)],
    ids=["whole", "least", "tiles", "channels"],
)
@examples(25)
@given(
    batch=st.integers(1, 5),
    channels=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    size=st.tuples(st.integers(3, 11), st.integers(3, 11)),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    stride=st.sampled_from([1, 2]),
    last=st.booleans(),
)
def test_equals_the_convolution_of_float64_with_its_gradients(
    blocks: tuple[int, int, int],
    batch: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    padding: tuple[int, int],
    stride: int,
    last: bool,
) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    images = drawn(batch, channels[0], *size, seed=1).contiguous(memory_format=layout)
    kernel = drawn(channels[1], channels[0], 3, 3, seed=2).contiguous(memory_format=layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "_AT_ONCE", blocks[0])
        patch.setattr(tiles, "_IMAGE_BLOCK", blocks[1])
        patch.setattr(tiles, "_KERNEL_BLOCK", blocks[2])
        found = with_gradients(lambda x, k: winograd_convolution(x, k, padding, stride), images, kernel)
    exact = with_gradients(
        lambda x, k: functional.conv2d(x, k, stride=stride, padding=padding), images.double(), kernel.double()
    )
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in exact]
    largest = [tensor.abs().max() for tensor in exact]
    for a, b, most in zip(found, exact, largest, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=float(1e-5 * most.clamp_min(1.0)))


def test_error_of_a_wide_layer() -> None:
    """As the module says: some 2e-6, far below that of bf16."""
    images, kernel = drawn(4, 320, 16, 16, seed=1), drawn(320, 320, 3, 3, seed=2)
    exact = with_gradients(lambda x, k: functional.conv2d(x, k, padding=1), images.double(), kernel.double())
    found = with_gradients(lambda x, k: winograd_convolution(x, k, (1, 1)), images, kernel)
    less = with_gradients(lambda x, k: functional.conv2d(x, k, padding=1), images.bfloat16(), kernel.bfloat16())
    assert max(relative_errors(found, exact)) < 4e-6
    assert min(relative_errors(less, exact)) > 1e-3


def test_needs_no_gradient_of_what_is_frozen() -> None:
    images, kernel = drawn(1, 2, 6, 6), drawn(3, 2, 3, 3, seed=1).requires_grad_()
    torch.autograd.backward(winograd_convolution(images, kernel).sum())
    assert images.grad is None
    exact = torch.autograd.grad(functional.conv2d(images, kernel).sum(), kernel)[0]
    torch.testing.assert_close(kernel.grad, exact, rtol=1e-4, atol=1e-4)
    images.requires_grad_()
    torch.autograd.backward(winograd_convolution(images, kernel.detach()).sum())
    exact = torch.autograd.grad(functional.conv2d(images, kernel.detach()).sum(), images)[0]
    torch.testing.assert_close(images.grad, exact, rtol=1e-4, atol=1e-4)


def test_gradients_are_not_differentiated_again() -> None:
    """Not even where they are constant, as autograd would take them for such in other variables too."""
    images, kernel = drawn(1, 2, 6, 6), drawn(3, 2, 3, 3, seed=1).requires_grad_()
    total = winograd_convolution(images.requires_grad_(), kernel).sum()
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(total, images, create_graph=True)


def test_settings_of_any_whole_numbers() -> None:
    images, kernel = drawn(1, 2, 9, 9), drawn(3, 2, 3, 3, seed=1)
    found = winograd_convolution(images, kernel, (ONE, ONE), 2 * ONE)
    assert torch.equal(found, winograd_convolution(images, kernel, (1, 1), 2))


def test_whatever_the_default_type_is() -> None:
    images, kernel = drawn(1, 2, 6, 6), drawn(3, 2, 3, 3)
    expected = with_gradients(winograd_convolution, images, kernel)
    torch.set_default_dtype(torch.float64)
    try:
        found = winograd_convolution(images, kernel)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected[0])


@pytest.mark.parametrize(
    ("images", "kernel", "padding", "name"),
    [
        (drawn(1, 2, 6, 6).double(), drawn(3, 2, 3, 3), (0, 0), "images, kernel"),
        (drawn(1, 2, 6, 6), drawn(3, 4, 3, 3), (0, 0), "images, kernel"),
        (drawn(1, 2, 6, 6), drawn(3, 2, 5, 5), (0, 0), "images, kernel"),
        (drawn(2, 6, 6), drawn(3, 2, 3, 3), (0, 0), "images, kernel"),
        (drawn(1, 2, 6, 6), drawn(3, 2, 3, 3), (0, -1), "padding"),
        (drawn(1, 2, 2, 6), drawn(3, 2, 3, 3), (0, 0), "padding"),
    ],
)
def test_refuses_what_it_cannot_convolve(images: Tensor, kernel: Tensor, padding: tuple[int, int], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        winograd_convolution(images, kernel, padding)
    assert refused.value.field == name


def test_refuses_other_strides() -> None:
    with pytest.raises(ConfigError, match="must be 1 or 2"):
        winograd_convolution(drawn(1, 2, 9, 9), drawn(3, 2, 3, 3), (0, 0), 3)


# --- where it is taken ---


class Counted:
    """Counts the convolutions that are computed the fast way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        compute = convolution.winograd_convolution

        def counting(*args: Any) -> Tensor:
            self.count += 1
            return compute(*args)

        monkeypatch.setattr(convolution, "winograd_convolution", counting)


WIDE = drawn(8, 96, 16, 32, seed=1), drawn(96, 96, 3, 3, seed=2)


@pytest.mark.parametrize(
    ("convolve", "taken"),
    [
        (lambda x, k: functional.conv2d(x, k, padding=1), False),  # by keyword: not as layers call it
        (lambda x, k: functional.conv2d(x, k, None, 1, 1), True),
        (lambda x, k: functional.conv2d(x, k, None, ONE, [1]), True),
        (lambda x, k: functional.conv2d(x, k, None, [ONE], [ONE, ONE]), True),
        (lambda x, k: functional.conv2d(x, k, torch.arange(96.0), (1, 1), (1, 1), (1, 1), 1), True),
        (lambda x, k: functional.conv2d(x[..., :7, :7], k), False),  # four tiles for 5 by 5 pixels
        (lambda x, k: functional.conv2d(functional.pad(x, (1, 1, 1, 1)), k), True),
        (lambda x, k: functional.conv2d(x, k, None, 2, 1), False),  # few tiles for so many numbers of the kernel
        (lambda x, k: functional.conv2d(x.repeat(4, 1, 2, 1), k, None, 2, 1), True),
        (lambda x, k: functional.conv2d(x.repeat(4, 1, 2, 1), k, None, (2, 1), 1), False),
        (lambda x, k: functional.conv2d(x.repeat(4, 1, 2, 1), k, None, 3, 1), False),
        (lambda x, k: functional.conv2d(x.double(), k.double(), torch.arange(96.0).double(), 1, 1), False),
        (lambda x, k: functional.conv2d(x, k, None, 1, 1, 2), False),
        (lambda x, k: functional.conv2d(x, k[:, :48], None, 1, 1, 1, 2), False),
        (lambda x, k: functional.conv2d(x, k, None, 1, "same"), False),
        (lambda x, k: functional.conv2d(x, k, None, 1, 3), True),
        (lambda x, k: functional.conv2d(x[0], k, None, 1, 1), False),
        (lambda x, k: functional.conv2d(x[:0], k, None, 1, 1), False),
        (lambda x, k: functional.conv2d(x[:1, ..., :8, :8], k, None, 1, 1), False),
        (lambda x, k: functional.conv2d(x[:, :8], k[:, :8], None, 1, 1), False),
        (lambda x, k: functional.conv2d(x[:, :, :3, :3], k, None, 1, 0), False),
        (lambda x, k: functional.conv2d(x.double(), k.double(), None, 1, 1), False),
        (lambda x, k: functional.conv2d(x.bfloat16(), k.bfloat16(), None, 1, 1), False),
    ],
)
def test_takes_the_convolutions_that_it_is_for(
    convolve: Callable[[Tensor, Tensor], Tensor], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    expected = convolve(*WIDE)
    with WinogradConvolutions():
        found = convolve(*WIDE)
    assert counted.count == int(taken)
    assert torch.equal(found, expected) is not taken or not len(found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    with WinogradConvolutions(), torch.autocast("cpu", torch.bfloat16):
        assert convolve(*WIDE).dtype == (torch.float64 if expected.dtype == torch.float64 else torch.bfloat16)
    assert counted.count == int(taken)


@pytest.mark.parametrize("bias", [torch.zeros(1), torch.zeros(96, dtype=torch.float64)], ids=["shape", "type"])
def test_a_bias_that_torch_refuses_is_refused(bias: Tensor) -> None:
    with WinogradConvolutions(), pytest.raises(RuntimeError):
        functional.conv2d(*WIDE, bias, 1, 1)


def test_tensors_without_memory_are_left_to_torch() -> None:
    convolution._steps(1)
    with FakeTensorMode(), WinogradConvolutions():
        found = functional.conv2d(torch.randn(WIDE[0].shape), torch.randn(WIDE[1].shape), None, 1, 1)
    assert found.shape == WIDE[0].shape


def test_checkpoints_that_compute_anew() -> None:
    images, kernel = WIDE[0].clone().requires_grad_(), WIDE[1]
    with WinogradConvolutions():
        found = checkpoint(lambda x: functional.conv2d(x, kernel, None, 1, 1), images, use_reentrant=False)
        torch.autograd.backward(found.sum())
    exact = torch.autograd.grad(functional.conv2d(images, kernel, None, 1, 1).sum(), images)[0]
    torch.testing.assert_close(images.grad, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("settings", [(None, (1, 1, 7), 1), (None, 1, (1, 1, 9)), (None, 1, ())])
def test_settings_that_torch_refuses_are_refused(settings: tuple[Any, ...]) -> None:
    with WinogradConvolutions(), pytest.raises((RuntimeError, TypeError)):
        functional.conv2d(*WIDE, *settings)


def test_no_channels_have_no_result() -> None:
    assert winograd_convolution(torch.rand(2, 0, 8, 8), torch.rand(0, 0, 3, 3)).shape == (2, 0, 6, 6)


def test_no_images_have_no_gradient() -> None:
    kernel = drawn(8, 8, 3, 3).requires_grad_()
    found = winograd_convolution(torch.rand(0, 8, 8, 8), kernel, (1, 1))
    assert found.shape == (0, 8, 8, 8)
    torch.autograd.backward(found.sum())
    assert kernel.grad is not None
    assert not kernel.grad.any()


def pays(batch: int, c_in: int, c_out: int, size: int, *, padding: int = 1, stride: int = 1) -> bool:
    shapes = torch.empty(batch, c_in, size, size), torch.empty(c_out, c_in, 3, 3)
    return winograd_pays(*shapes, (padding, padding), stride)


def test_pays_for_many_channels_and_tiles() -> None:
    assert pays(16, 160, 160, 32)
    assert pays(16, 640, 640, 8)
    assert pays(16, 192, 192, 8)
    assert pays(16, 16, 160, 32)
    assert not pays(16, 16, 128, 32)
    assert pays(16, 64, 64, 32)
    assert not pays(1, 64, 64, 8)
    assert not pays(16, 32, 32, 32)
    assert not pays(1, 640, 640, 8)
    assert not pays(128, 512, 512, 2)  # one tile for four pixels
    assert pays(128, 512, 512, 7)
    assert pays(1, 128, 128, 128)
    assert pays(1, 128, 128, 256)  # by rows of tiles


def test_pays_for_fewer_with_a_stride() -> None:
    assert pays(16, 160, 192, 32, stride=2)
    assert pays(16, 160, 320, 32, stride=2)
    assert not pays(16, 64, 64, 32, stride=2)
    assert not pays(16, 192, 192, 8, stride=2)


def test_pays_for_fewer_with_the_products_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "own_products", lambda: False)
    assert pays(16, 160, 160, 32)
    assert pays(16, 64, 64, 32)
    assert not pays(16, 16, 160, 32)
    assert not pays(1, 64, 64, 16)
    assert not pays(128, 512, 512, 5)  # four tiles for 25 pixels
    assert not pays(64, 640, 640, 64, stride=2)


def test_pays_less_where_products_have_more_threads() -> None:
    """Transforms stay on one."""
    found = []
    for count in (1, 2, 16):
        torch.set_num_threads(count)
        found.append([pays(16, channels, channels, 32) for channels in (64, 160)])
    assert found == [[True, True], [False, True], [False, False]]


def test_may_pay_where_a_kernel_is_wide() -> None:
    assert winograd_may_pay(nn.Sequential(nn.Linear(3, 4), nn.Conv2d(96, 96, 3)))
    assert not winograd_may_pay(nn.Conv2d(16, 64, 3))
    assert not winograd_may_pay(nn.Conv2d(512, 512, 1))
    assert not winograd_may_pay(nn.Conv1d(512, 512, 3))
    assert not winograd_may_pay(nn.Linear(512, 512))
