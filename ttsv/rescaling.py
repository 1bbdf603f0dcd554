"""Kernels multiplied until their periodic norm is at most a bound."""

import math

import torch
from torch import Tensor

from ttsv.folding import fold
from ttsv.grams import Grams
from ttsv.norms import binary_scale, largest_eigenvalue, periodic_norm
from ttsv.precision import full_precision
from ttsv.symbol import PeriodicConv

# Rescaled kernels stay this many roundings of their dtype below delta: `periodic_norm` may be `_ERROR` too small, and
# entries are rounded.
_MARGIN = 24
_ERROR = 16

# Up to so many multiplications (frequencies times the cube of the blocks' side) a norm is measured in float64.
_CHEAP_WORK = 2**20


@full_precision()
def careful_norm(kernel: Tensor, geometry: PeriodicConv) -> float:
    """`periodic_norm` of the kernel as it is stored, in float64 where that is cheap or the kernel folds.

    Taps of a folded kernel that fall on the same pixel may cancel, and with them most digits of the dtype.
    """
    if not _in_float64(kernel, geometry):
        return periodic_norm(kernel, geometry)
    scale = binary_scale(kernel)
    folded, geometry, error = fold(kernel.detach().double() / scale, geometry)
    grams = Grams(folded, geometry)
    parts = map(grams.at, grams.batches(geometry.frequencies(kernel.device).index))
    return scale * (math.sqrt(largest_eigenvalue(parts, 32 * torch.finfo(torch.float64).eps)) + error)


def brought_to(kernel: Tensor, delta: float, geometry: PeriodicConv, norm: float | None = None) -> tuple[Tensor, float]:
    """The kernel multiplied, where need be, until its periodic norm is at most delta, and that norm.

    `norm` is what `careful_norm` says of the kernel. Where that is not taken in float64 the result is not measured
    again: the margin covers what rounding may do, and the norm returned is the bound delta.
    """
    norm = careful_norm(kernel, geometry) if norm is None else norm
    eps = torch.finfo(kernel.dtype).eps
    if not _in_float64(kernel, geometry):
        if norm <= delta * (1 - _ERROR * eps) or geometry.schur_bound(kernel) <= delta:
            return kernel, norm
        return kernel * (min(1.0, delta / norm) * (1 - _MARGIN * eps)), delta
    while norm > delta:
        # Rounding the taps of a kernel that folds is no small matter where they cancel.
        lifted = norm + (eps * geometry.schur_bound(kernel) if geometry.folds else 0.0)
        kernel = multiplied(kernel, delta / lifted * (1 - _MARGIN * eps))
        norm = careful_norm(kernel, geometry)
    return kernel, norm


def multiplied(kernel: Tensor, factor: float) -> Tensor:
    """The kernel times a factor below 1; zeros where that is rounded to the kernel itself, as of subnormal numbers."""
    found = kernel * factor
    return torch.zeros_like(kernel) if torch.equal(found, kernel) else found


def _in_float64(kernel: Tensor, geometry: PeriodicConv) -> bool:
    side = min(kernel.shape[0] // geometry.groups, kernel.shape[1] * math.prod(geometry.stride))
    return geometry.folds or math.prod(geometry.output_size) * geometry.groups * side**3 <= _CHEAP_WORK
