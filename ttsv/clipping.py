"""Projection of convolutions onto {singular values <= delta}, and the division that stands beside it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ttsv.errors import ConfigError
from ttsv.excess import DOUBLE_RANGE, excess_taps
from ttsv.grams import Grams
from ttsv.krylov import LeadingPairs
from ttsv.norms import binary_scale, periodic_norm
from ttsv.symbol import Frequencies, PeriodicConv, Size, check_values
from ttsv.tt import TTFactors, orthogonalize

# A float32 kernel whose largest singular value exceeds this many times delta is clipped in float64: Gram matrices lose
# half the digits (see `ttsv.excess.DOUBLE_RANGE`).
_SINGLE_RANGE = 8.0


class MeasuredClip(NamedTuple):
    """A clipped kernel with the periodic operator's norm before and after."""

    kernel: Tensor
    before: float
    after: float


def clip_conv(
    kernel: Tensor,
    delta: float,
    input_size: Size,
    *,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int = 1,
    rounds: int = 1,
    rescale: bool = False,
) -> Tensor:
    """A new kernel whose periodic convolution has its singular values clipped to `delta`, as far as its taps allow.

    `kernel (c_out, c_in / groups, k_1, ..., k_d)`, sizes in pixels, as for `conv_singular_values`. One round
    projects the periodic operator onto {singular values <= delta} (Sedghi et al. 2019, on the corrected blocks of
    `ttsv.symbol`) and back onto the kernel's own taps, which lifts singular values above delta again; `rounds`
    alternate. For a kernel larger than the input the change of a folded tap is spread equally over its aliases.
    `rescale` ends with a multiplication by `delta / norm` where the periodic norm still exceeds delta, so that it
    is at most delta. Nothing is said of the zero-padded operator.

    The result has the kernel's shape, dtype and device and no gradient history. Raises `ConfigError`.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    _check_clip(delta, rounds)
    kernel, _ = _alternate(kernel.detach(), delta, rounds, geometry)
    if rescale and (norm := periodic_norm(kernel, geometry)) > delta:
        kernel = kernel * (delta / norm)
    return kernel


def clip_conv_measured(
    kernel: Tensor,
    delta: float,
    input_size: Size,
    *,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int = 1,
    rounds: int = 1,
    rescale: bool = False,
) -> MeasuredClip:
    """`clip_conv`, with the norms that the periodic operator had and has."""
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    _check_clip(delta, rounds)
    clipped, before = _alternate(kernel.detach(), delta, rounds, geometry)
    after = periodic_norm(clipped, geometry)
    if before is None:
        before = after
    if rescale and after > delta:
        return MeasuredClip(clipped * (delta / after), before, delta)
    return MeasuredClip(clipped, before, after)


def clip_tt(
    k1: Tensor,
    core: Tensor,
    k3: Tensor,
    delta: float,
    input_size: Size,
    *,
    stride: Size = 1,
    dilation: Size = 1,
    rounds: int = 1,
    rescale: bool = False,
) -> TTFactors:
    """The TT convolution with orthonormal frames (QR, always) and its core clipped by `clip_conv` (Algorithm 1).

    `k1 (c_in, r1)`, `core (r2, r1, k_1, ..., k_d)`, `k3 (r2, c_out)`; the singular values of the whole operator
    are those of the core and zeros. Arguments and errors as for `clip_conv` and `ttsv.tt.orthogonalize`.
    """
    factors = orthogonalize(k1.detach(), core.detach(), k3.detach())
    clipped = clip_conv(
        factors.core, delta, input_size, stride=stride, dilation=dilation, rounds=rounds, rescale=rescale
    )
    return factors._replace(core=clipped)


def clip_matrix(weight: Tensor, delta: float) -> Tensor:
    """The nearest matrix (Frobenius norm) to `weight (rows, columns)` with singular values of at most `delta`."""
    if weight.ndim != 2 or 0 in weight.shape:
        raise ConfigError("weight.shape", tuple(weight.shape), "must be (rows, columns), neither empty")
    check_values(weight, "weight")
    _check_positive("delta", delta)
    left, values, right = torch.linalg.svd(weight.detach(), full_matrices=False)
    excess: Tensor = (left * (values - delta).clamp_min(0)) @ right
    return weight.detach() - excess


def divide_conv(
    kernel: Tensor,
    target: float,
    input_size: Size,
    *,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int = 1,
) -> Tensor:
    """The kernel divided by `max(1, norm / target)` (Gouk et al. 2020), with the exact periodic norm.

    Arguments and errors as for `clip_conv`. The result's periodic norm is at most `target`.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    _check_positive("target", target)
    norm = periodic_norm(kernel.detach(), geometry)
    return kernel.detach() * min(1.0, target / norm) if norm else kernel.detach().clone()


def _check_clip(delta: float, rounds: int) -> None:
    _check_positive("delta", delta)
    if rounds < 1:
        raise ConfigError("rounds", rounds, "must be at least 1")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(name, value, "must be a finite number above 0")


def _alternate(kernel: Tensor, delta: float, rounds: int, geometry: PeriodicConv) -> tuple[Tensor, float | None]:
    """The kernel after `rounds` of clip and truncation, and its norm before them where that exceeded delta."""
    bound = geometry.schur_bound(kernel)
    if bound <= delta:
        return kernel.clone(), None
    scale = binary_scale(kernel)
    scaled, level = kernel / scale, delta / scale
    frequencies = geometry.frequencies(kernel.device)
    leading = LeadingPairs()
    before: float | None = None
    for _ in range(rounds):
        grams = Grams(scaled, geometry, precise=bound > DOUBLE_RANGE * delta)
        leading.prepare(grams.mean)
        change, norm = _change(scaled, level, grams, leading, frequencies)
        if norm is None:
            break
        if kernel.dtype == torch.float32 and norm > _SINGLE_RANGE * level:
            precise, before = _alternate(kernel.double(), delta, rounds, geometry)
            return precise.to(kernel.dtype), before
        before = before or norm * scale
        scaled = scaled + change
    return scaled * scale, before


def _change(
    kernel: Tensor, delta: float, grams: Grams, leading: LeadingPairs, frequencies: Frequencies
) -> tuple[Tensor, float | None]:
    """What one round adds to the kernel, and the norm before it; the norm is None where it is at most delta.

    Stops where a float32 kernel turns out to exceed `_SINGLE_RANGE`: the change is of no use then.
    """
    change = torch.zeros_like(kernel)
    largest: float | None = None
    order = torch.arange(len(frequencies.index), device=kernel.device)
    for part in grams.batches(order):
        for pairs in leading.above(grams.at(frequencies.index[part]), delta * delta):
            largest = max(largest or 0.0, math.sqrt(pairs.values.max().item()))
            if kernel.dtype == torch.float32 and largest > _SINGLE_RANGE * delta:
                return change, largest
            change -= excess_taps(kernel, delta, grams, pairs, frequencies.index[part], frequencies.count[part])
    return change, largest
