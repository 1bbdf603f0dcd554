"""Projection of convolutions onto {singular values <= delta}, and the division that stands beside it."""

import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from ttsv.checks import check_count, check_flag, check_matrix, check_positive
from ttsv.errors import ConfigError
from ttsv.precision import full_precision
from ttsv.spectral.gram import Grams
from ttsv.spectral.krylov import LeadingPairs, decomposed
from ttsv.spectral.matrix_sign import excess_shares
from ttsv.spectral.norms import (
    Algorithm,
    binary_scale,
    brought_to,
    careful_norm,
    clip_algorithm,
    exceeding,
    periodic_norm,
    power_estimates,
)
from ttsv.spectral.symbol import Frequencies, PeriodicConv, Size
from ttsv.spectral.thresholding import DOUBLE_RANGE, excess_taps, share_taps
from ttsv.tt.decomposition import TTFactors, orthogonalize

# A float32 kernel whose largest singular value exceeds this many times delta is clipped in float64: Gram matrices lose
# half the digits (see `ttsv.spectral.thresholding.DOUBLE_RANGE`).
_SINGLE_RANGE = 8.0


class MeasuredClip(NamedTuple):
    """A clipped kernel with the periodic operator's norm before and after.

    `after` is measured, but for a kernel that `rescale` multiplied and whose norm `careful_norm` does not take in
    float64: there it is delta, which bounds it.
    """

    kernel: Tensor
    before: float
    after: float


@full_precision()
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
    algorithm: Algorithm | None = None,
) -> Tensor:
    """A new kernel whose periodic convolution has its singular values clipped to `delta`, as far as its taps allow.

    `kernel (c_out, c_in / groups, k_1, ..., k_d)`, sizes in pixels, as for `conv_singular_values`. One round
    projects the periodic operator onto {singular values <= delta} (Sedghi et al. 2019, on the corrected blocks of
    `ttsv.spectral.symbol`) and back onto the kernel's own taps, which lifts singular values above delta again; `rounds`
    alternate. For a kernel larger than the input the change of a folded tap is spread equally over its aliases.
    `rescale` ends with a multiplication by `delta / norm` (less some roundings) where the periodic norm still
    exceeds delta, or may by rounding, so that that of the kernel as it is stored is at most delta. Nothing is said
    of the zero-padded operator. `algorithm` is chosen by `ttsv.spectral.norms.clip_algorithm` unless it is given; all
    give the same result up to rounding: in float32 to some 1e-6 of delta while the norm is a few times delta, to
    1e-4 of the norm at worst.

    The result has the kernel's shape, dtype and device and no gradient history. Raises `ConfigError`.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    algorithm = _checked(kernel, delta, rounds, rescale, geometry, algorithm)
    kernel, _ = _alternate(kernel.detach(), delta, rounds, geometry, algorithm)
    return brought_to(kernel, delta, geometry)[0] if rescale else kernel


@full_precision()
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
    algorithm: Algorithm | None = None,
) -> MeasuredClip:
    """`clip_conv`, with the norms that the periodic operator had and has."""
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    algorithm = _checked(kernel, delta, rounds, rescale, geometry, algorithm)
    clipped, before = _alternate(kernel.detach(), delta, rounds, geometry, algorithm)
    after = careful_norm(clipped, geometry)
    if before is None:
        before = after
    elif algorithm == "sign":  # which finds no eigenvalues
        before = periodic_norm(kernel.detach(), geometry)
    if rescale:
        clipped, after = brought_to(clipped, delta, geometry, after)
    return MeasuredClip(clipped, before, after)


@torch.no_grad()
@full_precision()
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
    algorithm: Algorithm | None = None,
) -> TTFactors:
    """The TT convolution with orthonormal frames (QR, always) and its core clipped by `clip_conv` (Algorithm 1).

    `k1 (c_in, r1)`, `core (r2, r1, k_1, ..., k_d)`, `k3 (r2, c_out)`; the singular values of the whole operator
    are those of the core and zeros. Arguments and errors as for `clip_conv` and `ttsv.tt.decomposition.orthogonalize`.
    """
    factors = orthogonalize(k1, core, k3)
    clipped = clip_conv(
        factors.core,
        delta,
        input_size,
        stride=stride,
        dilation=dilation,
        rounds=rounds,
        rescale=rescale,
        algorithm=algorithm,
    )
    return factors._replace(core=clipped)


@full_precision()
def clip_matrix(weight: Tensor, delta: float) -> Tensor:
    """The nearest matrix (Frobenius norm) to `weight (rows, columns)` with singular values of at most `delta`."""
    check_matrix(weight)
    check_positive("delta", delta)
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
    check_positive("target", target)
    return brought_to(kernel.detach().clone(), target, geometry)[0]


def _checked(
    kernel: Tensor, delta: float, rounds: int, rescale: bool, geometry: PeriodicConv, algorithm: Algorithm | None
) -> Algorithm:
    """The algorithm that is asked for, or chosen."""
    check_positive("delta", delta)
    check_count("rounds", rounds)
    check_flag("rescale", rescale)
    if algorithm is None:
        side = min(kernel.shape[0] // geometry.groups, kernel.shape[1] * math.prod(geometry.stride))
        return clip_algorithm(side, kernel.device)
    if algorithm not in get_args(Algorithm):
        raise ConfigError("algorithm", algorithm, f"must be None or one of {', '.join(get_args(Algorithm))}")
    return algorithm


def _alternate(
    kernel: Tensor, delta: float, rounds: int, geometry: PeriodicConv, algorithm: Algorithm
) -> tuple[Tensor, float | None]:
    """The kernel after `rounds` of clip and truncation, and its norm before them where that exceeded delta.

    By "sign" the norm is an estimate from below.
    """
    bound = geometry.schur_bound(kernel)
    if bound <= delta:
        return kernel.clone(), None
    scale = binary_scale(kernel)
    scaled, level = kernel / scale, delta / scale
    frequencies = geometry.frequencies(kernel.device)
    leading = None if algorithm == "sign" else LeadingPairs(iterates=algorithm == "krylov")
    before: float | None = None
    for _ in range(rounds):
        grams = Grams(scaled, geometry, precise=bound > DOUBLE_RANGE * delta)
        if leading is not None:
            leading.prepare(grams.mean)
        change, norm = _change(scaled, level, grams, leading, frequencies)
        if norm is None:
            break
        if kernel.dtype == torch.float32 and norm > _SINGLE_RANGE * level:
            precise, before = _alternate(kernel.double(), delta, rounds, geometry, algorithm)
            return precise.to(kernel.dtype), before
        before = before or norm * scale
        scaled = scaled + change
    return scaled * scale, before


def _change(
    kernel: Tensor, delta: float, grams: Grams, leading: LeadingPairs | None, frequencies: Frequencies
) -> tuple[Tensor, float | None]:
    """What one round adds to the kernel, and the norm before it; the norm is None where it is at most delta.

    Stops where a float32 kernel turns out to exceed `_SINGLE_RANGE`: the change is of no use then.
    """
    change = torch.zeros_like(kernel)
    largest: float | None = None
    most = _SINGLE_RANGE * delta if kernel.dtype == torch.float32 else math.inf
    level = delta * delta
    order = torch.arange(len(frequencies.index), device=kernel.device)
    for part in grams.batches(order):
        index, count = frequencies.index[part], frequencies.count[part]
        matrices = grams.at(index)
        if leading is None:
            which = exceeding(matrices, level)
            if not len(which):
                continue
            chosen = matrices[which]
            largest = max(largest or 0.0, math.sqrt(power_estimates(chosen).max().item()))
            if largest > most:
                return change, largest
            shares, certified = excess_shares(chosen, level)
            done = which[certified]
            if len(done):
                change -= share_taps(kernel, grams, shares[certified], done, index, count)
            pairs_above = decomposed(matrices, which[~certified], level)
        else:
            pairs_above = leading.above(matrices, level)
        for pairs in pairs_above:
            largest = max(largest or 0.0, math.sqrt(pairs.values.max().item()))
            if largest > most:
                return change, largest
            change -= excess_taps(kernel, delta, grams, pairs, index, count)
    return change, largest
