"""The largest singular value over all frequencies without decomposing most of the blocks."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ttsv.grams import Grams
from ttsv.symbol import PeriodicConv


def periodic_norm(kernel: Tensor, geometry: PeriodicConv) -> float:
    """Largest singular value of the periodic convolution, to some ten roundings of the kernel's dtype."""
    scale = binary_scale(kernel)
    kernel = kernel / scale
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

    Relative error at most `tolerance` from below, plus the rounding of `exceeding` and of `eigvalsh`: a running
    maximum, started by a few power iterations, is held against each matrix by a Cholesky test; only matrices
    that exceed it have their eigenvalues computed, the most promising first.
    """
    largest = 0.0
    for grams in batches:
        estimates = _power_estimates(grams)
        largest = max(largest, estimates.max().item())
        rest = exceeding(grams, largest * (1 + tolerance)) if largest else estimates.new_zeros(0).long()
        while len(rest):
            rest = rest[estimates[rest].argsort(descending=True)]
            tried = -(-len(rest) // 4)
            largest = max(largest, torch.linalg.eigvalsh(grams[rest[:tried]]).max().item())
            rest = rest[tried:]
            rest = rest[exceeding(grams[rest], largest * (1 + tolerance))]
    return largest


def _power_estimates(grams: Tensor, iterations: int = 4) -> Tensor:
    """Lower bounds (b,) of the largest eigenvalues: power iteration from each matrix's longest column."""
    lengths = grams.diagonal(dim1=-2, dim2=-1).real
    start = lengths.argmax(dim=-1)
    vectors = grams[torch.arange(len(grams), device=grams.device), :, start].unsqueeze(-1)
    for _ in range(iterations):
        lengths = torch.linalg.vector_norm(vectors, dim=(-2, -1), keepdim=True)
        vectors = grams @ (vectors / lengths.clamp_min(torch.finfo(lengths.dtype).tiny))
    estimates: Tensor = torch.linalg.vector_norm(vectors, dim=(-2, -1))
    return estimates
