"""Skew convolutions: the skew part of a weight, two of its unfoldings, and the exponential series of its operator.

Where only memory counts: kernels are laid out taps first, `(k, k, c, c)`, each tap a matrix of its own.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_FEW_PIXELS = 16
"""Images up to this size are multiplied tap by tap on a CPU: measured in `benchmarks/README.md`."""

_tapwise = ContextVar("tapwise", default=True)


@contextmanager
def by_convolutions() -> Iterator[None]:
    """Small images take the way of large ones here, so that what is counted does not depend on the device."""
    token = _tapwise.set(False)
    try:
        yield
    finally:
        _tapwise.reset(token)


def skew_part(weight: Tensor) -> Tensor:
    """`(W - W^T) / 2` of the operator of a weight `(c, c, k, k)`, k odd: its zero-padded convolution A has `A^T = -A`.

    The result is laid out taps first.
    """
    part: Tensor = _SkewPart.apply(weight)
    return part


class _SkewPart(torch.autograd.Function):
    """A symmetric projection: its gradient is the projection of the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return _skewed(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _skewed(gradient)


def _skewed(weight: Tensor) -> Tensor:
    sides, channels = weight.shape[2:], len(weight)
    # Those of most weights do not lie one after the other: a sum with what is transposed would keep their strides.
    taps = weight.permute(2, 3, 0, 1).reshape(-1, channels, channels).contiguous()
    return (taps - taps.flip(0).mT).div_(2).view(*sides, channels, channels).permute(2, 3, 0, 1)


def unfolding_across(kernel: Tensor, vector: Tensor, *, transposed: bool = False) -> Tensor:
    """The unfolding `(k c_out, k c_in)` of a kernel `(c, c, k, k)`, or its transpose, times a vector `(k c)`."""
    taps, parts = kernel.permute(2, 3, 0, 1), vector.view(kernel.shape[2], -1)
    if transposed:
        return torch.matmul(taps.mT, parts[:, None, :, None]).sum(0).flatten()
    return torch.matmul(taps, parts[None, :, :, None]).sum(1).flatten()


def unfolding_aside(kernel: Tensor, vector: Tensor, *, transposed: bool = False) -> Tensor:
    """The unfolding `(k k c_out, c_in)` of a kernel `(c, c, k, k)` times a vector `(c)`, or its transpose's product."""
    tall = kernel.permute(2, 3, 0, 1).flatten(0, 2)
    return (tall.T if transposed else tall) @ vector


def exponential_series(images: Tensor, kernel: Tensor, terms: int) -> Tensor:
    """`sum_{j <= terms} A^j x / j!` for images `(..., c, h, w)`, A the zero-padded convolution with a skew kernel.

    Under autocast in its precision, summed in the images'. On a CPU images of few pixels go another way to the same
    sums in another order.
    """
    if _tapwise.get() and images.device.type == "cpu" and images.shape[-2:].numel() <= _FEW_PIXELS:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else images.dtype
        batch = images.reshape(-1, *images.shape[-3:]).permute(0, 2, 3, 1)
        result: Tensor = _TapwiseSeries.apply(batch, kernel.permute(2, 3, 0, 1).to(dtype), terms)[0]
        return result.permute(0, 3, 1, 2).reshape(images.shape)
    total = term = images
    for power, same in enumerate(_laid_out(kernel, images, terms), start=1):
        term = functional.conv2d(term, same, padding=kernel.shape[-1] // 2) / power
        total = total + term
    return total


def _laid_out(kernel: Tensor, images: Tensor, count: int) -> Sequence[Tensor]:
    """The kernel as convolutions of such images want it, cast and copied once for so many of them."""
    kind = images.device.type
    dtype = kernel.dtype
    # Which leaves float64 alone.
    if dtype != torch.float64 and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    # Channels last is how torch sees images whose channels lie side by side, and then it wants kernels so too.
    last = images.ndim == 4 and images.stride(1) == 1 and not images.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    if dtype == kernel.dtype:
        return (kernel.contiguous(memory_format=layout),) * count
    found: tuple[Tensor, ...] = _Cast.apply(kernel, dtype, layout, count)
    return found


class _Cast(torch.autograd.Function):
    """A kernel in less precision, so many times in the same memory; their gradients add up in the kernel's own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kernel: Tensor, dtype: torch.dtype, layout: torch.memory_format, count: int) -> tuple[Tensor, ...]:
        cast = kernel.to(dtype, memory_format=layout)
        return tuple(cast.view_as(cast) for _ in range(count))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        total = gradients[-1].to(ctx.dtype)
        for gradient in gradients[-2::-1]:  # the last term's is there first
            total = total + gradient
        return total, None, None, None


class _TapwiseSeries(torch.autograd.Function):
    """The series as products of taps with the pixels they see.

    For images this small a convolution spends its time on laying out the kernel anew, in every term and every
    gradient, and on taps that see nothing but padding. The transposed operator is the operator's negative, so the
    gradient runs the same products, and that of the kernel takes one product per tap for all terms together.
    Images `(batch, h, w, c)` and taps `(k, k, c, c)`; of the two results, the powers are for the gradient only.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, taps: Tensor, terms: int) -> tuple[Tensor, Tensor]:
        powers = _powers(images, taps, terms)
        total = images.clone()
        for power in powers[1:]:
            total += power
        return total, torch.cat(powers[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:2], output[1])
        ctx.terms = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        images, taps, powers = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated, and depends on the images by the powers
            powers = torch.cat(_powers(images, taps, ctx.terms)[:-1])
        sums, scaled = gradient, []
        for power in range(len(powers) // len(gradient), 0, -1):
            scaled.append(sums / power)
            sums = gradient - _applied(taps, scaled[-1])
        return sums, _correlated(torch.cat(scaled[::-1]), powers, taps), None


def _powers(images: Tensor, taps: Tensor, terms: int) -> list[Tensor]:
    """`A^j x / j!` for j from 0 to `terms`."""
    powers = [images]
    for power in range(1, terms + 1):
        powers.append(_applied(taps, powers[-1]).div_(power))
    return powers


def _applied(taps: Tensor, images: Tensor) -> Tensor:
    """The zero-padded convolution: taps `(k, k, c, c)`, images `(batch, h, w, c)` and the result, in their own type."""
    result = torch.zeros_like(images)
    for tap, seen, where in _overlaps(taps, images):
        part = images[seen].reshape(-1, images.shape[-1]).to(taps.dtype) @ taps[tap].T
        result[where] += part.view_as(result[where])
    return result


def _correlated(gradients: Tensor, images: Tensor, taps: Tensor) -> Tensor:
    """The gradient of the taps, `(k, k, c, c)`, from those of results `(batch, h, w, c)` of images."""
    found, channels = gradients.new_zeros(taps.shape, dtype=taps.dtype), images.shape[-1]
    for tap, seen, where in _overlaps(taps, images):
        rows = gradients[where].reshape(-1, channels).to(taps.dtype)
        found[tap] = rows.T @ images[seen].reshape(-1, channels).to(taps.dtype)
    return found


def _overlaps(taps: Tensor, images: Tensor) -> list[tuple[tuple[int, int], tuple[slice, ...], tuple[slice, ...]]]:
    """Each tap that sees pixels: its place, the pixels it sees, and those it contributes to."""
    (rows, columns), (height, width) = taps.shape[:2], images.shape[1:3]
    every = slice(None)
    found: list[tuple[tuple[int, int], tuple[slice, ...], tuple[slice, ...]]] = []
    for row in range(rows):
        for column in range(columns):
            down, right = row - rows // 2, column - columns // 2
            if abs(down) < height and abs(right) < width:
                seen = (every, _shifted(down, height), _shifted(right, width))
                found.append(((row, column), seen, (every, _shifted(-down, height), _shifted(-right, width))))
    return found


def _shifted(offset: int, size: int) -> slice:
    """Places that stay inside after a step back by the offset."""
    return slice(max(0, offset), min(size, size + offset))


_EPS = torch.finfo(torch.float64).eps
_GRID = 4096


def series_norm_bound(norm: float, terms: int) -> float:
    """A rigorous upper bound of `|T_m(A)|` for every skew A with `|A| <= norm`, `T_m(A) = sum_{j <= m} A^j / j!`.

    A skew operator has a unitary eigenbasis and imaginary eigenvalues, so this is the maximum of `|T_m(i s)|` over
    `0 <= s <= norm`. Its square is a polynomial in `x = s^2` with exactly known coefficients, `1 + c x^(m//2+1) +
    ...`. It is evaluated on a grid; between two points h apart it is at most `h^2 / 8` times a bound of its second
    derivative above the larger one. The result is within 1e-6 of the maximum for norms up to 3.

    Returns `inf` where the square overflows.
    """
    coefficients = _squared_modulus(terms)
    end = norm * norm * (1 + 4 * _EPS)
    try:
        curvature = sum(abs(c) * j * (j - 1) * end ** (j - 2) for j, c in coefficients.items() if j >= 2)
        magnitude = sum(abs(c) * end**j for j, c in coefficients.items())
    except OverflowError:
        return math.inf
    x = torch.linspace(0.0, end, _GRID + 1, dtype=torch.float64)
    square = sum(c * x**j for j, c in coefficients.items())
    assert isinstance(square, torch.Tensor)
    step = end / _GRID
    # A grid point is off by some eps, its powers by as many more as their degree.
    slack = step * step / 8 * curvature * (1 + 1e-9) + 16 * (terms + 4) * _EPS * magnitude
    return math.nextafter(math.sqrt(square.max().item() + slack), math.inf)


def _squared_modulus(terms: int) -> dict[int, float]:
    """Power -> coefficient of `|T_m(i s)|^2` as a polynomial in `s^2`, without zeros, each rounded once."""
    found: dict[int, float] = {}
    for power in range(terms + 1):
        total = sum(
            Fraction((-1) ** (a + power), math.factorial(a) * math.factorial(2 * power - a))
            for a in range(max(0, 2 * power - terms), min(terms, 2 * power) + 1)
        )
        if total:
            found[power] = float(total)
    return found
