"""Projection of convolutions onto {singular values <= delta}, and the division that stands beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from ttsv.checks import check_count, check_flag, check_positive
from ttsv.errors import ConfigError
from ttsv.runtime.precision import full_precision
from ttsv.spectral.clamping import clamp_matrix
from ttsv.spectral.gram import Grams
from ttsv.spectral.krylov import LeadingPairs, eigenpairs_above
from ttsv.spectral.matrix_sign import shrinkage_factors
from ttsv.spectral.norms import (
    Algorithm,
    clip_algorithm,
    indices_above,
    largest_eigenvalues,
    norms_to_rescale,
    owners_of,
    power_estimates,
    power_of_two,
    rescale_to_norm,
    stacked,
    stored_norm,
    stored_norms,
    surely_below,
)
from ttsv.spectral.symbol import Frequencies, PeriodicConv, Size
from ttsv.spectral.thresholding import DOUBLE_RANGE, soft_threshold_by_factors, soft_threshold_by_pairs
from ttsv.tt.decomposition import TTFactors, orthogonalize

# A float32 kernel whose largest singular value exceeds this many times delta is clipped in float64: Gram matrices lose
# half the digits (see `ttsv.spectral.thresholding.DOUBLE_RANGE`).
_SINGLE_RANGE = 8.0


@dataclass(frozen=True)
class ClipOptions:
    """How a kernel is clipped; `clip_conv` says what each option means. Raises `ConfigError` for a wrong value."""

    delta: float
    rounds: int = 1
    rescale: bool = False
    algorithm: Algorithm | None = None

    def __post_init__(self) -> None:
        check_positive("delta", self.delta)
        # One of numpy's numbers would bring its precision along.
        object.__setattr__(self, "delta", float(self.delta))
        check_count("rounds", self.rounds)
        check_flag("rescale", self.rescale)
        if self.algorithm is not None and self.algorithm not in get_args(Algorithm):
            fix = f"must be None or one of {', '.join(get_args(Algorithm))}"
            raise ConfigError("algorithm", self.algorithm, fix)


class Clipped(NamedTuple):
    """A clipped kernel, and of the periodic operator's norm before and after what is known already.

    `before` is 0 where that was at most delta: then it is the norm after, too. `after` is None where it is not measured
    yet, and delta for a kernel that `rescale` multiplied and whose norm `stored_norm` does not take in float64: there
    delta bounds it.
    """

    kernel: Tensor
    before: float
    after: float | None


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
    """Returns a new kernel whose periodic convolution has singular values clipped to `delta`, as its taps allow.

    `kernel (c_out, c_in / groups, k_1, ..., k_d)`, sizes in pixels, as for `conv_singular_values`. One round
    projects the periodic operator onto {singular values <= delta} (Sedghi et al. 2019, on the corrected blocks of
    `ttsv.spectral.symbol`) and back onto the kernel's own taps, which lifts singular values above delta again; `rounds`
    alternate. For a kernel larger than the input the change of a folded tap is spread equally over its aliases.
    `rescale` ends with a multiplication by `delta / norm` (less some roundings) where the periodic norm still
    exceeds delta, or may by rounding, so that the norm of the kernel as it is stored is at most delta. Nothing is said
    of the zero-padded operator. `algorithm` is chosen by `ttsv.spectral.norms.clip_algorithm` unless it is given; all
    give the same result up to rounding: in float32 to some 1e-6 of delta while the norm is a few times delta, to
    1e-4 of the norm at worst.

    The result has the kernel's shape, dtype and device and no gradient history. Raises `ConfigError`.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    return clip_kernel(kernel, geometry, ClipOptions(delta, rounds, rescale, algorithm))


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
    """Makes the frames of a TT convolution orthonormal (QR, always) and clips its core (Algorithm 1).

    `k1 (c_in, r1)`, `core (r2, r1, k_1, ..., k_d)`, `k3 (r2, c_out)`; the singular values of the whole operator
    are those of the core and zeros. Arguments and errors as for `clip_conv` and `ttsv.tt.orthogonalize`.
    """
    with torch.no_grad(), full_precision():
        factors = orthogonalize(k1, core, k3)
    geometry = PeriodicConv.of(factors.core, input_size, stride=stride, dilation=dilation)
    return factors._replace(core=clip_kernel(factors.core, geometry, ClipOptions(delta, rounds, rescale, algorithm)))


def clip_matrix(weight: Tensor, delta: float) -> Tensor:
    """Returns the nearest matrix (Frobenius norm) to `weight (rows, columns)` with singular values up to `delta`."""
    return clamp_matrix(weight, 0.0, delta)


def divide_conv(
    kernel: Tensor, target: float, input_size: Size, *, stride: Size = 1, dilation: Size = 1, groups: int = 1
) -> Tensor:
    """Returns the kernel divided by `max(1, norm / target)` (Gouk et al. 2020), with the exact periodic norm.

    Arguments and errors as for `clip_conv`. The result's periodic norm is at most `target`.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    check_positive("target", target)
    return rescale_to_norm(kernel.detach().clone(), float(target), geometry)[0]


@full_precision()
def clip_kernel(kernel: Tensor, geometry: PeriodicConv, options: ClipOptions) -> Tensor:
    """Returns what `clip_conv` does, for a kernel of this geometry (`PeriodicConv.of`)."""
    clipped, _ = _alternate(kernel.detach(), geometry, options)
    return rescale_to_norm(clipped, options.delta, geometry)[0] if options.rescale else clipped


@full_precision()
def clip_stack(
    kernels: Sequence[Tensor], geometry: PeriodicConv, deltas: Sequence[float], options: ClipOptions
) -> list[Clipped]:
    """Clips several kernels of one shape, dtype and geometry as `clip_kernel` does, each to its own delta.

    All are decomposed together, as the groups of one convolution, and clipped to the least delta: those that differ by
    more than roundings are not meant to be clipped so. Where the norm of one kernel asks for float64, all take it.
    """
    stack, around = stacked([kernel.detach() for kernel in kernels], geometry)
    clipped, above = _alternate(stack, around, replace(options, delta=min(deltas)), owners=len(kernels))
    parts = clipped.chunk(len(kernels))
    if geometry.folds:  # Gram matrices of taps that cancel have lost the digits that are left of the norm
        above = [norm and stored_norm(kernel, geometry) for kernel, norm in zip(kernels, above, strict=True)]
    if not options.rescale:
        return [Clipped(part, before, None) for part, before in zip(parts, above, strict=True)]
    if geometry.folds:
        norms = [stored_norm(part, geometry) for part in parts]
    else:
        norms = norms_to_rescale(clipped, around, deltas, clipped=any(above))
    found = []
    for part, delta, before, norm in zip(parts, deltas, above, norms, strict=True):
        kernel, after = rescale_to_norm(part, delta, geometry, norm)
        found.append(Clipped(kernel, before, after or None))
    return found


@full_precision()
def measured(clips: Sequence[Clipped], geometry: PeriodicConv) -> list[tuple[float, float]]:
    """Returns the norms before and after of each of the clips that `clip_stack` made of kernels of this geometry."""
    unknown = [clip.kernel for clip in clips if clip.after is None]
    if geometry.folds:
        norms = iter([stored_norm(kernel, geometry) for kernel in unknown])
    else:
        norms = iter(stored_norms(*stacked(unknown, geometry), len(unknown)) if unknown else [])
    afters = [next(norms) if clip.after is None else clip.after for clip in clips]
    return [(clip.before or after, after) for clip, after in zip(clips, afters, strict=True)]


def _algorithm(kernel: Tensor, geometry: PeriodicConv, options: ClipOptions) -> Algorithm:
    return options.algorithm or clip_algorithm(geometry.gram_side(kernel), kernel.device)


def _alternate(
    kernel: Tensor, geometry: PeriodicConv, options: ClipOptions, *, owners: int = 0
) -> tuple[Tensor, list[float]]:
    """The kernel after the rounds of clip and truncation, and the norms before them of what exceeded delta.

    These are of each of the `owners` kernels that are stacked in it, and 0 of one that is not above delta; without
    owners nothing is measured. Of the Gram matrices, those that are clipped tell them: all others have nothing above.
    """
    delta, algorithm = options.delta, _algorithm(kernel, geometry, options)
    above = [0.0] * owners
    # In one read, as the device is waited for.
    rows, columns, largest = torch.cat([geometry.schur_sums(kernel), kernel.abs().max().reshape(1)]).tolist()
    bound = math.sqrt(rows) * math.sqrt(columns)
    if bound <= delta:
        return kernel.clone(), above
    scale = power_of_two(largest)
    scaled, level = kernel / scale, delta / scale
    frequencies = geometry.frequencies(kernel.device)
    leading = None if algorithm == "sign" else LeadingPairs(iterates=algorithm == "krylov")
    for turn in range(options.rounds):
        grams = Grams(scaled, geometry, precise=bound > DOUBLE_RANGE * delta)
        if leading is not None:
            leading.prepare(grams.mean)
        change, norms = _change(scaled, level, grams, leading, frequencies, owners=0 if turn else owners)
        if not any(norms):
            break
        if kernel.dtype == torch.float32 and max(norms) > _SINGLE_RANGE * level:
            options = replace(options, algorithm=algorithm)
            precise, above = _alternate(kernel.double(), geometry, options, owners=owners)
            return precise.to(kernel.dtype), above
        if owners and not turn:
            above = [norm * scale for norm in norms]
        scaled = scaled + change
    return scaled * scale, above


def _change(
    kernel: Tensor,
    delta: float,
    grams: Grams,
    leading: LeadingPairs | None,
    frequencies: Frequencies,
    *,
    owners: int,
) -> tuple[Tensor, list[float]]:
    """What one round adds to the kernel, and the norm before it of each of its owners that exceeds delta, else 0.

    By "sign", which finds no eigenvalues, norms are estimates from below for no `owners`, who are taken for one then.
    Stops where a float32 kernel turns out to exceed `_SINGLE_RANGE`: the change is of no use then.
    """
    change, squares = torch.zeros_like(kernel), kernel.new_zeros(max(1, owners))
    level = delta * delta
    # What is not above this needs no rescaling either.
    least = (delta * surely_below(kernel.dtype)) ** 2
    most = _SINGLE_RANGE**2 * level if kernel.dtype == torch.float32 else math.inf
    tolerance = 32 * torch.finfo(kernel.dtype).eps
    order = torch.arange(len(frequencies.index), device=kernel.device)
    for part in grams.batches(order):
        index, count = frequencies.index[part], frequencies.count[part]
        matrices = grams.at(index)
        owner = owners_of(matrices, grams.geometry, len(squares))
        if leading is None:
            which = indices_above(matrices, least)
            if not len(which):
                continue
            chosen = matrices[which]
            if owners:
                squares = largest_eigenvalues(chosen, tolerance, squares, owner[which])
            else:
                squares = squares.scatter_reduce(0, owner[which], power_estimates(chosen), "amax")
            if squares.max().item() > most:
                return change, squares.sqrt().tolist()
            factors, certified = shrinkage_factors(chosen, level)
            # Those that are refused change nothing here, and are waited for once.
            factors = torch.where(certified[:, None, None], factors, 0)
            change -= soft_threshold_by_factors(kernel, grams, factors, which, index, count)
            pairs_above = eigenpairs_above(matrices, which[~certified], least)
        else:
            pairs_above = leading.above(matrices, least)
        for pairs in pairs_above:
            squares = squares.scatter_reduce(0, owner[pairs.which], pairs.values.amax(dim=1), "amax")
            if squares.max().item() > most:
                return change, squares.sqrt().tolist()
            change -= soft_threshold_by_pairs(kernel, delta, grams, pairs, index, count)
    return change, squares.sqrt().tolist()
