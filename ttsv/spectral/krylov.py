"""Eigenpairs of Hermitian matrices above a level, without decomposing whole matrices where there are few.

A Chebyshev-filtered block Krylov space from a good starting block gives the few eigenpairs above the level; a Cholesky
factorization of what is left after deflation shows that there are no others. Matrices for which either fails are
decomposed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ttsv.spectral.norms import indices_above

_BLOCK = 8
_STEPS = {torch.complex64: 4, torch.complex128: 7}
_DEGREE = 3
"""The space has _STEPS blocks of _BLOCK columns; polynomials of _DEGREE lead from one to the next."""

_TOLERANCE = {torch.complex64: 4e-6, torch.complex128: 1e-11}

_EDGE = 0.6
"""Eigenvalues up to this share of the level are damped."""


class Eigenpairs(NamedTuple):
    """Of m of the matrices (`which`, indices): `values (m, k)` and orthonormal `vectors (m, n, k)`.

    All pairs with a value above the level are among them. Others may be, with their values or with zeros.
    """

    which: Tensor
    values: Tensor
    vectors: Tensor


class LeadingPairs:
    """Finds eigenpairs above a level in batches of similar matrices, and remembers whether iterating paid.

    One for the rounds of a clip: the starting block, kept from round to round, is the leading subspace of the
    matrices' mean, which a smooth symbol shares with most of its frequencies. Without `iterates` all are decomposed.
    """

    def __init__(self, *, iterates: bool = True) -> None:
        self._start: Tensor | None = None
        self.iterates = iterates

    def prepare(self, mean: Tensor | None) -> None:
        """Takes the mean (groups, n, n), real, of the matrices to come; without one they are decomposed.

        So are matrices that have fewer rows than a Krylov space has columns.
        """
        if mean is None or mean.shape[-1] < _BLOCK * max(_STEPS.values()) or not self.iterates:
            self.iterates = False
            return
        if self._start is None:
            generator = torch.Generator().manual_seed(0)
            shape = (*mean.shape[:2], _BLOCK)
            self._start = torch.randn(shape, generator=generator, dtype=mean.dtype).to(mean.device)
        for _ in range(3):
            self._start = torch.linalg.qr(mean @ self._start).Q

    def above(self, matrices: Tensor, level: float) -> Iterator[Eigenpairs]:
        """Pairs of the Hermitian positive semidefinite matrices (b, n, n) that have values above `level`.

        Exact up to rounding where a matrix is decomposed; otherwise values up to `level (1 + t)` may be missing,
        with t = `_TOLERANCE` of the dtype (4e-6 in float32, 1e-11 in float64).
        """
        if not self.iterates or self._start is None:
            yield from eigenpairs_above(matrices, indices_above(matrices, level), level)
            return
        start = self._start.repeat(len(matrices) // len(self._start), 1, 1).to(matrices.dtype)
        likely = torch.linalg.eigvalsh(start.mH @ (matrices @ start))[:, -1] > level
        rest = (~likely).nonzero()[:, 0]
        if len(rest):
            likely[rest[indices_above(matrices[rest], level)]] = True
        which = likely.nonzero()[:, 0]
        if not len(which):
            return
        chosen = matrices if len(which) == len(matrices) else matrices[which]
        found = _iterated(chosen, start[which], level)
        left = chosen if len(found.which) == len(chosen) else chosen[found.which]
        left = left - (found.vectors * found.values.unsqueeze(-2)) @ found.vectors.mH
        kept = torch.ones(len(left), dtype=torch.bool, device=left.device)
        kept[indices_above(left, level * (1 + _TOLERANCE[matrices.dtype]))] = False
        done = found.which[kept]
        if len(done):
            yield Eigenpairs(which[done], found.values[kept], found.vectors[kept])
        self.iterates = 2 * len(done) >= len(which)
        failed = torch.ones(len(which), dtype=torch.bool, device=which.device)
        failed[done] = False
        yield from eigenpairs_above(matrices, which[failed], level)


def eigenpairs_above(matrices: Tensor, which: Tensor, level: float) -> Iterator[Eigenpairs]:
    """All pairs above `level` of the matrices at `which`, by whole decompositions; nothing where there are none."""
    if not len(which):
        return
    values, vectors = torch.linalg.eigh(matrices[which])
    # Eigenvalues ascend: only the last columns exceed the level anywhere.
    kept = max(1, int((values > level).sum(dim=1).max()))
    yield Eigenpairs(which, values[:, -kept:], vectors[..., -kept:])


def _iterated(matrices: Tensor, start: Tensor, level: float) -> Eigenpairs:
    """Ritz pairs above the level, others with value 0, of the matrices where all of them have small residuals."""
    block, steps = start.shape[-1], _STEPS[matrices.dtype]
    basis = matrices.new_empty((*matrices.shape[:2], block * steps))
    basis[..., :block] = start
    for step in range(1, steps):
        known = basis[..., : step * block]
        following = _filtered(matrices, known[..., -block:], _EDGE * level)
        for _ in range(2):
            following = torch.linalg.qr(following - known @ (known.mH @ following)).Q
        basis[..., step * block : (step + 1) * block] = following
    images = matrices @ basis
    values, ritz = torch.linalg.eigh(basis.mH @ images)
    # More than half the space: too many for it.
    few = (values > level).sum(dim=1) <= block * steps // 2
    count = max(1, int((values[few] > level).sum(dim=1).max())) if few.any() else 1
    values, ritz = values[:, -count:], ritz[..., -count:]
    vectors = basis @ ritz
    residuals = torch.linalg.vector_norm(images @ ritz - vectors * values.unsqueeze(-2), dim=1)
    above = values > level
    small = (residuals <= 2.5 * _TOLERANCE[matrices.dtype] * values[:, -1:]) | ~above
    which = (few & small.all(dim=1)).nonzero()[:, 0]
    return Eigenpairs(which, (values * above)[which], vectors[which])


def _filtered(matrices: Tensor, vectors: Tensor, edge: float) -> Tensor:
    """The Chebyshev polynomial that stays within 1 on [0, edge] and grows fastest above, applied to vectors."""
    before, here = vectors, torch.baddbmm(vectors, matrices, vectors, beta=-1, alpha=2 / edge)
    for _ in range(_DEGREE - 1):
        before, here = here, torch.baddbmm(before, matrices, here, beta=-1, alpha=4 / edge).sub_(here, alpha=2)
    return here
