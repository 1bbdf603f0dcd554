"""Dense operators in float64, built by applying torch's own convolutions to a basis, and drawn convolutions."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.pretended import PretendedCards

# The tests' tensors are small: threads that wait for each other cost more than they give, the more so beside others.
torch.set_num_threads(1)

CONVOLVE: dict[int, Callable[..., Tensor]] = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}


@dataclass(frozen=True)
class Drawn:
    """A convolution with random weights; sizes are d-tuples."""

    kernel: Tensor
    input_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def options(self) -> dict[str, Any]:
        return {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def drawn_convolutions(draw: st.DrawFn, *, grouped: bool = True, periodic: bool = True) -> Drawn:
    """1/2/3-d, strides 1 to 3, dilation, groups, kernels that may exceed the input (periodic ones only)."""
    d = draw(st.integers(1, 3))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(d))
    outputs = tuple(draw(st.integers(1, (7, 3, 2)[d - 1])) for _ in range(d))
    kernel_size = tuple(draw(st.integers(1, (5, 4, 3)[d - 1])) for _ in range(d))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(d))
    groups = draw(st.integers(1, 2)) if grouped else 1
    c_out, c_in = draw(st.integers(1, 4 - d + 1)), draw(st.integers(1, 4 - d + 1))
    if periodic:
        size = tuple(m * s for m, s in zip(outputs, stride, strict=True))
    else:
        size = tuple(draw(st.integers(1, (9, 5, 3)[d - 1])) for _ in range(d))
    kernel = gaussian(groups * c_out, c_in, *kernel_size, seed=draw(st.integers(0, 2**31)))
    return Drawn(kernel, size, stride, dilation, groups)


def basis(channels: int, size: Sequence[int]) -> Tensor:
    dims = channels * math.prod(size)
    return torch.eye(dims, dtype=torch.float64).reshape(dims, channels, *size)


def periodic_operator(case: Drawn) -> Tensor:
    """Matrix (outputs, inputs): each axis is indexed modulo its size, then convolved without padding."""
    images = basis(case.kernel.shape[1] * case.groups, case.input_size)
    axes = zip(case.input_size, case.stride, case.dilation, case.kernel.shape[2:], strict=True)
    for axis, (n, s, e, k) in enumerate(axes, start=2):
        images = images.index_select(axis, torch.arange(n - s + e * (k - 1) + 1) % n)
    convolve = CONVOLVE[case.kernel.ndim]
    return convolve(images, case.kernel, None, case.stride, 0, case.dilation, case.groups).flatten(1).T


def padded_operator(case: Drawn, padding: Sequence[int]) -> Tensor:
    """Matrix (outputs, inputs) of the zero-padded convolution."""
    images = basis(case.kernel.shape[1] * case.groups, case.input_size)
    convolve = CONVOLVE[case.kernel.ndim]
    return convolve(images, case.kernel, None, case.stride, tuple(padding), case.dilation, case.groups).flatten(1).T


def dense_clip(case: Drawn, delta: float, rounds: int = 1) -> Tensor:
    """Clips the dense periodic operator and reads the kernel off the rows of output pixel 0."""
    kernel = case.kernel.clone()
    c_out, c_in = kernel.shape[:2]
    for _ in range(rounds):
        before = periodic_operator(Drawn(kernel, case.input_size, case.stride, case.dilation, case.groups))
        left, values, right = torch.linalg.svd(before, full_matrices=False)
        change = (left * values.clamp(max=delta)) @ right - before
        change = change.reshape(c_out, -1, case.groups * c_in, *case.input_size)[:, 0]
        pixels = [
            tuple(e * t % n for e, t, n in zip(case.dilation, tap, case.input_size, strict=True))
            for tap in product(*map(range, kernel.shape[2:]))
        ]
        flat = kernel.flatten(2)
        for tap, pixel in enumerate(pixels):
            for o in range(c_out):
                group = o // (c_out // case.groups)
                channels = slice(group * c_in, (group + 1) * c_in)
                flat[o, :, tap] += change[(o, channels, *pixel)] / pixels.count(pixel)
        kernel = flat.reshape(kernel.shape)
    return kernel


class Dense:
    """The oracle as a fixture: test folders are no packages, hence cannot import each other."""

    drawn_convolutions = staticmethod(drawn_convolutions)
    gaussian = staticmethod(gaussian)
    periodic_operator = staticmethod(periodic_operator)
    padded_operator = staticmethod(padded_operator)
    clip = staticmethod(dense_clip)
    convolution = Drawn

    @staticmethod
    def periodic_values(case: Drawn) -> Tensor:
        """All singular values, descending."""
        values: Tensor = torch.linalg.svdvals(periodic_operator(case))
        return values

    @staticmethod
    def sine(*shape: int) -> Tensor:
        """`sin(1), sin(2), ...`: the weights of the examples in the API's description."""
        return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).sin().reshape(shape)


class Cards:
    """Graphics cards, real ones or pretended, as a fixture."""

    def __init__(self, *, real: bool) -> None:
        self.real = real
        self.device = torch.device("cuda", 0)

    @staticmethod
    def synchronizations(work: Callable[[], object]) -> int:
        """How often torch sees `work` wait for the card."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing" in str(warning.message) for warning in caught)


GPU = pytest.param(
    True,
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    id="gpu",
)


@pytest.fixture(params=[pytest.param(False, id="pretended"), GPU])
def card(request: pytest.FixtureRequest) -> Iterator[Cards]:
    """A card for each test: in every run a pretended one, so that what is written for a real one has run before."""
    if request.param:
        yield Cards(real=True)
        return
    with PretendedCards():
        yield Cards(real=False)


@pytest.fixture(scope="session")
def dense() -> Dense:
    return Dense()
