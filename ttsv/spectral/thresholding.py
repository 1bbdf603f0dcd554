"""Soft-thresholding: clipping takes `U max(S - delta, 0) V^H` away from the blocks, here found by Gram matrices."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ttsv.spectral.clamping import clamping_change
from ttsv.spectral.gram import Grams
from ttsv.spectral.krylov import Eigenpairs
from ttsv.spectral.symbol import PeriodicConv

# A Gram matrix loses half the digits: for a largest singular value of x delta, those near delta come out with an
# error of about eps x^2 / 2, relative to delta. Beyond this x, float64 is clipped by the SVD.
DOUBLE_RANGE = 1e3

_FEW = 16
"""Up to so many values at a frequency the blocks are never formed."""


def soft_threshold_by_pairs(
    kernel: Tensor, delta: float, grams: Grams, pairs: Eigenpairs, index: Tensor, count: Tensor
) -> Tensor:
    """What the soft-thresholded operator has at the kernel's taps, from eigenpairs of `grams.at(index)`.

    `index (f,)` holds flat frequencies, `count (f,)` how many each stands for; the result has the kernel's shape.
    """
    geometry, groups = grams.geometry, grams.geometry.groups
    precise = kernel.dtype == torch.float64 and math.sqrt(pairs.values.max().item()) > DOUBLE_RANGE * delta
    few = pairs.values.shape[1] <= _FEW and not precise
    if groups == 1 and few and grams.rows_are_outputs:
        return _few_taps(kernel, delta, geometry, pairs, index[pairs.which], count[pairs.which])
    if groups == 1 and few and math.prod(geometry.stride) == 1:
        mirrored = pairs._replace(vectors=pairs.vectors.conj())
        found = _few_taps(kernel.transpose(0, 1), delta, geometry, mirrored, index[pairs.which], count[pairs.which])
        return found.transpose(0, 1)

    def threshold(blocks: Tensor) -> Tensor:
        return -clamping_change(blocks, 0.0, delta) if precise else _by_pairs(blocks, pairs, delta)

    return _block_taps(kernel, geometry, threshold, pairs.which, index, count)


def soft_threshold_by_factors(
    kernel: Tensor, grams: Grams, factors: Tensor, which: Tensor, index: Tensor, count: Tensor
) -> Tensor:
    """As `soft_threshold_by_pairs`, from shrinkage factors (m, n, n) of the matrices `which` of `grams.at(index)`."""

    def threshold(blocks: Tensor) -> Tensor:
        return factors @ blocks if grams.rows_are_outputs else blocks @ factors

    return _block_taps(kernel, grams.geometry, threshold, which, index, count)


def _block_taps(
    kernel: Tensor,
    geometry: PeriodicConv,
    threshold: Callable[[Tensor], Tensor],
    which: Tensor,
    index: Tensor,
    count: Tensor,
) -> Tensor:
    """The taps' part of `threshold` of the blocks `which`, counted as Gram matrices are: groups vary fastest."""
    groups = geometry.groups
    if groups == 1:
        blocks = geometry.symbol(kernel, index[which])
        return geometry.taps(threshold(blocks[:, 0]).unsqueeze(1), index[which], count[which])
    rows, place = torch.unique(which // groups, return_inverse=True)
    blocks = geometry.symbol(kernel, index[rows])
    member = which % groups
    changes = torch.zeros_like(blocks)
    changes[place, member] = threshold(blocks[place, member])
    return geometry.taps(changes, index[rows], count[rows])


def _factors(values: Tensor, delta: float) -> Tensor:
    """`max(0, 1 - delta / sigma)` of each singular value, from their squares."""
    return 1 - delta / values.clamp_min(delta * delta).sqrt()


def _by_pairs(blocks: Tensor, pairs: Eigenpairs, delta: float) -> Tensor:
    factors = _factors(pairs.values, delta).unsqueeze(-2)
    if blocks.shape[-2] <= blocks.shape[-1]:
        return (pairs.vectors * factors) @ (pairs.vectors.mH @ blocks)
    return (blocks @ pairs.vectors) @ (pairs.vectors * factors).mH


def _few_taps(
    kernel: Tensor, delta: float, geometry: PeriodicConv, pairs: Eigenpairs, index: Tensor, count: Tensor
) -> Tensor:
    """From left singular vectors U (f, c_out, k): `U factors U^H A` in two real products over all frequencies.

    The first multiplies the vectors with every tap; phases turn the products into `U^H A` per component and back
    into what each tap gets; the second multiplies those with the vectors again.
    """
    c_out, c_in = kernel.shape[:2]
    f, _, k = pairs.vectors.shape
    taps = kernel.reshape(c_out, c_in, -1).permute(0, 2, 1)
    columns = pairs.vectors.permute(1, 0, 2).reshape(c_out, -1)
    both = torch.cat([columns.real, columns.imag], dim=1)
    products = (both.T @ taps.reshape(c_out, -1)).reshape(2, f, k, -1, c_in)
    cosine, sine = (phase[:, None, :, None] for phase in geometry.phases(index, kernel.dtype))
    # U^H z with z = cosine + i sine, tap by tap.
    real = cosine * products[0] + sine * products[1]
    imaginary = sine * products[0] - cosine * products[1]
    weight = _factors(pairs.values, delta) * (count.to(kernel.dtype) / math.prod(geometry.output_size))[:, None]
    for used in geometry.taps_by_component(kernel.device):
        row = weight[:, :, None] * real[:, :, used].sum(dim=2)
        column = weight[:, :, None] * imaginary[:, :, used].sum(dim=2)
        row, column = row.unsqueeze(2), column.unsqueeze(2)
        # Times the conjugate phase; the second factor is U again, of which the real part of the product is taken.
        products[0][:, :, used] = cosine[:, :, used] * row + sine[:, :, used] * column
        products[1][:, :, used] = sine[:, :, used] * row - cosine[:, :, used] * column
    found = (both @ products.reshape(2 * f * k, -1)).reshape(c_out, -1, c_in).permute(0, 2, 1)
    return (found / geometry.aliases(found.device).to(found)).reshape(kernel.shape)
