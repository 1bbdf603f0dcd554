"""Kernels larger than a periodic grid, added up to what they are on it."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ttsv.symbol import PeriodicConv


class Folded(NamedTuple):
    """A kernel without two taps on the same pixel, its geometry, and what rounding may change of the norm."""

    kernel: Tensor
    geometry: PeriodicConv
    error: float


def fold(kernel: Tensor, geometry: PeriodicConv) -> Folded:
    """The same periodic operator with the taps that read the same pixel added up.

    Along an axis of n pixels with dilation e, tap t reads what tap `t mod n / gcd(n, e)` reads. The sums are
    compensated (Ogita, Rump & Oishi, SIAM J. Sci. Comput. 2005, algorithm Sum2): of a terms, relative to the result
    one rounding, and `(a eps)^2` of the taps' magnitudes, so that what cancels is gone. `error` bounds the norm of the
    operator that is lost. Differentiable; a kernel that has nothing to fold is returned as it is.
    """
    axes = zip(geometry.input_size, geometry.dilation, strict=True)
    periods = tuple(n // math.gcd(n, e) for n, e in axes)
    sizes = tuple(map(min, geometry.kernel_size, periods))
    if sizes == geometry.kernel_size:
        return Folded(kernel, geometry, 0.0)
    copies = tuple(-(-k // m) for k, m in zip(geometry.kernel_size, sizes, strict=True))
    missing = [a * m - k for a, m, k in zip(copies, sizes, geometry.kernel_size, strict=True)]
    # functional.pad takes the last axis first.
    padded = functional.pad(kernel, [pixels for after in reversed(missing) for pixels in (0, after)])
    split = padded.reshape(*kernel.shape[:2], *(side for pair in zip(copies, sizes, strict=True) for side in pair))
    d = len(sizes)
    terms = split.movedim(list(range(2, 2 + 2 * d, 2)), list(range(d))).flatten(0, d - 1)
    eps = torch.finfo(kernel.dtype).eps
    folded, around = _compensated_sum(terms), replace(geometry, kernel_size=sizes)
    error = eps * around.schur_bound(folded) + 2 * (len(terms) * eps) ** 2 * geometry.schur_bound(kernel)
    return Folded(folded, around, error)


def _compensated_sum(terms: Tensor) -> Tensor:
    """The sum over the first axis."""
    total, lost = terms[0], torch.zeros_like(terms[0])
    for term in terms[1:]:
        summed = total + term
        added = summed - total
        lost = lost + ((total - (summed - added)) + (term - added))
        total = summed
    return total + lost
