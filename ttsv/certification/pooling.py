"""How much pooling, padding and interpolation can enlarge a difference of two images, in the L2 norm."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ttsv.certification.linear_maps import EPS, padding_norm, rounded_up
from ttsv.certification.reach import Affine, Reach
from ttsv.certification.trace import Rule, Trace, Traced
from ttsv.spectral.symbol import Size, as_tuple


def adaptive_max_pooling_bound(size: Sequence[int], outputs: Sequence[int]) -> float:
    """As of `_max_pooled`, for windows from `floor(i n / o)` to `ceil((i + 1) n / o)`."""
    most = 1
    for n, o in zip(size, outputs, strict=True):
        windows = [torch.arange(i * n // o, -(-(i + 1) * n // o)) for i in range(o)]
        most *= most_frequent(torch.cat(windows))
    return rounded_up(math.sqrt(most))


def adaptive_average_pooling_norm(size: Sequence[int], outputs: Sequence[int]) -> float:
    """As of `_average_pooled`, for pooling to `outputs` pixels per axis; over all of n x n pixels 1 / n."""
    product = 1.0
    for n, o in zip(size, outputs, strict=True):
        basis = torch.eye(n, dtype=torch.float64)[:, None]
        product *= _norm(functional.adaptive_avg_pool1d(basis, o).flatten(1))
    return rounded_up(product)


def _norm(matrix: Tensor) -> float:
    norm: float = torch.linalg.matrix_norm(matrix, 2).item()
    return norm * (1 + 16 * sum(matrix.shape) * EPS)


def most_frequent(places: Tensor) -> int:
    """How often the place that occurs most often occurs, at least 1."""
    return max(1, int(torch.bincount(places).max())) if len(places) else 1


def _source(features: Traced, axes: int) -> Reach | Affine:
    """The reach before something that acts on the last axes; one bound for all channels where theirs is among them.

    torch takes a tensor of one axis less than images of so many axes for a single image: its second axis is of pixels.
    """
    return features.reach if features.ndim >= axes + 2 else Reach(features.reach.total)


def _max_pooled(axes: int) -> Rule:
    """By the root of how many windows see the pixel that most of them see; 1 for windows without overlap.

    A maximum moves by no more than its window's largest difference, hence its L2 norm; each pixel counts once in every
    window that sees it.
    """

    def rule(
        trace: Trace,
        result: Tensor,
        features: Traced,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        dilation: Size = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Reach:
        kernel = as_tuple("kernel_size", kernel_size, axes)
        steps, spread = as_tuple("stride", stride or kernel, axes), as_tuple("dilation", dilation, axes)
        pads = as_tuple("padding", padding, axes, least=0)
        sizes = features.shape[-axes:], result.shape[-axes:]
        most = 1
        for n, o, k, s, p, e in zip(*sizes, kernel, steps, pads, spread, strict=True):
            starts = torch.arange(o) * s - p
            places = (starts[:, None] + e * torch.arange(k)).flatten()
            most *= most_frequent(places[(places >= 0) & (places < n)])
        bound = rounded_up(math.sqrt(most))
        return trace.channelwise(_source(features, axes), bound, "the root of how many windows see a pixel", "max_pool")

    return rule


def _average_pooled(axes: int) -> Rule:
    """By the norm of a Kronecker product of one matrix per axis, each decomposed; for disjoint k x k windows 1 / k."""

    def rule(
        trace: Trace,
        _: Tensor,
        features: Traced,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Reach:
        kernel = as_tuple("kernel_size", kernel_size, axes)
        steps = as_tuple("stride", stride or kernel, axes)
        pads = as_tuple("padding", padding, axes, least=0)
        norm, divisor = (1.0, None) if divisor_override is None else (1 / abs(divisor_override), 1)
        for n, k, s, p in zip(features.shape[-axes:], kernel, steps, pads, strict=True):
            basis = torch.eye(n, dtype=torch.float64).reshape(n, 1, n, 1)
            sums = functional.avg_pool2d(basis, (k, 1), (s, 1), (p, 0), ceil_mode, count_include_pad, divisor)
            norm *= _norm(sums.flatten(1))
        return trace.channelwise(_source(features, axes), rounded_up(norm), "norm of the pooling's matrix", "avg_pool")

    return rule


def _adaptively_pooled(axes: int, bound: Callable[[Sequence[int], Sequence[int]], float]) -> Rule:
    def rule(trace: Trace, result: Tensor, features: Traced, output_size: Any, return_indices: bool = False) -> Reach:
        factor = bound(features.shape[-axes:], result.shape[-axes:])
        return trace.channelwise(_source(features, axes), factor, "norm of the pooling's windows", "adaptive_pool")

    return rule


def _interpolated(
    trace: Trace,
    result: Tensor,
    features: Traced,
    size: Size | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Reach:
    """Of every mode the weights are products of one factor per axis: a Kronecker product of what torch does to each.

    Places that are read several times count so often, as in enlarging; places that are skipped do not.
    """
    if antialias:
        raise trace.refuse(
            "interpolate() with antialias", "has no rule: torch's is no product where an axis has one pixel"
        )
    axes = features.ndim - 2
    scales = [scale_factor] * axes if isinstance(scale_factor, int | float) else scale_factor
    norm = 1.0
    for axis, (n, o) in enumerate(zip(features.shape[2:], result.shape[2:], strict=True)):

        def alone(own: Any, other: Any, axis: int = axis) -> tuple[Any, ...]:
            return tuple(own if place == axis else other for place in range(axes))

        basis = torch.eye(n, dtype=torch.float64, device=trace.device).reshape(n, 1, *alone(n, 1))
        rows = functional.interpolate(
            basis,
            None if size is None else alone(o, 1),
            None if scales is None else alone(scales[axis], 1.0),
            mode,
            align_corners,
            recompute_scale_factor,
        )
        norm *= _norm(rows.flatten(1))
    return trace.channelwise(features.reach, rounded_up(norm), f"norm of the {mode} interpolation", "interpolation")


def _padded(
    trace: Trace, result: Tensor, features: Traced, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Reach:
    if mode == "constant":
        return Reach(features.reach.total)
    axes = len(pad) // 2
    sides = [(pad[2 * axis], pad[2 * axis + 1]) for axis in reversed(range(axes))]
    norm = padding_norm(features.shape[-axes:], sides, mode)
    return trace.channelwise(_source(features, axes), norm, "the root of how often a pixel is repeated", "padding")


POOLINGS: dict[str, Rule] = {
    **{f"max_pool{axes}d": _max_pooled(axes) for axes in (1, 2, 3)},
    **{f"avg_pool{axes}d": _average_pooled(axes) for axes in (1, 2, 3)},
    **{f"adaptive_avg_pool{axes}d": _adaptively_pooled(axes, adaptive_average_pooling_norm) for axes in (1, 2, 3)},
    **{f"adaptive_max_pool{axes}d": _adaptively_pooled(axes, adaptive_max_pooling_bound) for axes in (1, 2, 3)},
    "interpolate": _interpolated,
    "pad": _padded,
}
"""Name of a function of torch -> its rule, with torch's arguments."""
