"""The largest singular value over all frequencies without decomposing most of the blocks."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ttsv.algorithm import decomposes_in_batches
from ttsv.folding import fold
from ttsv.grams import Grams
from ttsv.precision import full_precision
from ttsv.symbol import PeriodicConv


@full_precision()
def periodic_norm(kernel: Tensor, geometry: PeriodicConv) -> float:
    """Largest singular value of the periodic convolution, to some ten roundings of the kernel's dtype."""
    scale = binary_scale(kernel)
    kernel, geometry, _ = fold(kernel / scale, geometry)
    grams = Grams(kernel, geometry)
    parts = map(grams.at, grams.batches(geometry.frequencies(kernel.device).index))
    return scale * math.sqrt(largest_eigenvalue(parts, 32 * torch.finfo(kernel.dtype).eps))


def binary_scale(kernel: Tensor) -> float:
    """A power of two near the largest magnitude (1 for zero): dividing by it is exact and keeps squares in range."""
    largest = kernel.abs().max().item()
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest else 1.0


def gram(blocks: Tensor) -> Tensor:
    """`A A^H` or `A^H A`, whichever is smaller, for blocks A (b, rows, columns)."""
    if blocks.shape[-2] <= blocks.shape[-1]:
        return blocks @ blocks.mH
    return blocks.mH @ blocks


def exceeding(grams: Tensor, level: float) -> Tensor:
    """Indices of the Hermitian positive semidefinite `grams (b, n, n)` with an eigenvalue above `level`.

    A Cholesky factorization of `level I - gram` exists exactly where there is none; it costs a small part of an
    eigendecomposition. Decides up to rounding: `n^2` times the machine epsilon at worst, relative to `level`.
    """
    shifted = -grams
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    info: Tensor = torch.linalg.cholesky_ex(shifted).info
    return info.nonzero()[:, 0]


def largest_eigenvalue(batches: Iterable[Tensor], tolerance: float) -> float:
    """Largest eigenvalue over batches of Hermitian positive semidefinite matrices (b, n, n).

    Relative error at most `tolerance` from below, plus the rounding of `exceeding` and of the eigenvalues: a running
    maximum, started by a few power iterations, is held against each matrix by a Cholesky test; only matrices
    that exceed it have their eigenvalues computed, the most promising first. Where they cannot be decomposed as a
    batch (`ttsv.algorithm`), that is done by matrix products.
    """
    largest = 0.0
    for grams in batches:
        estimates = power_estimates(grams)
        largest = max(largest, estimates.max().item())
        rest = exceeding(grams, largest * (1 + tolerance)) if largest else estimates.new_zeros(0).long()
        while len(rest):
            rest = rest[estimates[rest].argsort(descending=True)]
            tried = -(-len(rest) // 4)
            largest = max(largest, _largest_eigenvalues(grams[rest[:tried]], tolerance).max().item())
            rest = rest[tried:]
            rest = rest[exceeding(grams[rest], largest * (1 + tolerance))]
    return largest


def _largest_eigenvalues(grams: Tensor, tolerance: float) -> Tensor:
    """Of each matrix (b, n, n) the largest eigenvalue (b,), too small by a share of at most `tolerance`."""
    if decomposes_in_batches(grams.shape[-1], grams.device):
        values: Tensor = torch.linalg.eigvalsh(grams)
        return values[:, -1]
    return eigenvalues_by_squaring(grams, tolerance)


def eigenvalues_by_squaring(grams: Tensor, tolerance: float) -> Tensor:
    """The largest eigenvalue (b,) of each Hermitian positive semidefinite matrix (b, n, n), by products alone.

    The Rayleigh quotient of the longest column of `gram^m`, m a power of 2 by repeated squaring: not above the
    eigenvalue and, as that column has at least the n-th part of the leading eigenvector, too small by a share of at
    most n / (2 e m), whatever the gap. That is at most `tolerance` after 25 products in float32, 40 for 1e-10.
    """
    side = grams.shape[-1]
    power = grams
    for _ in range(max(1, math.ceil(math.log2(side / (2 * math.e * tolerance))))):
        size = torch.linalg.matrix_norm(power).clamp_min(torch.finfo(grams.dtype).tiny)
        power = power / size[:, None, None]
        power = power @ power
    longest = power.diagonal(dim1=-2, dim2=-1).real.argmax(dim=-1)
    vectors = power[torch.arange(len(power), device=power.device), :, longest].unsqueeze(-1)
    square = torch.linalg.vector_norm(vectors, dim=(-2, -1)).square().clamp_min(torch.finfo(grams.dtype).tiny)
    quotients: Tensor = (vectors.mH @ (grams @ vectors))[:, 0, 0].real / square
    return quotients


def power_estimates(grams: Tensor, iterations: int = 4) -> Tensor:
    """Lower bounds (b,) of the largest eigenvalues: power iteration from each matrix's longest column."""
    lengths = grams.diagonal(dim1=-2, dim2=-1).real
    start = lengths.argmax(dim=-1)
    vectors = grams[torch.arange(len(grams), device=grams.device), :, start].unsqueeze(-1)
    for _ in range(iterations):
        lengths = torch.linalg.vector_norm(vectors, dim=(-2, -1), keepdim=True)
        vectors = grams @ (vectors / lengths.clamp_min(torch.finfo(lengths.dtype).tiny))
    estimates: Tensor = torch.linalg.vector_norm(vectors, dim=(-2, -1))
    return estimates
