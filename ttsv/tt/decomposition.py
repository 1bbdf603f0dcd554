"""The tensor-train form of a convolution kernel: frame, core, frame (section "TT decomposed layers").

`K[o, i, t] = sum_ab k3[b, o] core[b, a, t] k1[i, a]` with `k1 (c_in, r1)`, `core (r2, r1, k_1, ..., k_d)` and
`k3 (r2, c_out)`: a 1x1 convolution to r1 channels, a small convolution, a 1x1 convolution to c_out channels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ttsv.checks import check_kernel, check_values, is_whole
from ttsv.errors import ConfigError
from ttsv.tt.ranks import merges_out_first

_ORTHONORMAL = 1e-12
"""Frames by products are taken where their errors, see `_cholesky_qr`, are no larger than this."""


class TTFactors(NamedTuple):
    """Frame `k1 (c_in, r1)`, `core (r2, r1, k_1, ..., k_d)`, frame `k3 (r2, c_out)`."""

    k1: Tensor
    core: Tensor
    k3: Tensor


def tt_ranks(rank: int | Sequence[int], c_in: int, c_out: int) -> tuple[int, int]:
    """Returns the ranks (r1, r2): `min(channels, rank)` on each side for an int, the pair itself otherwise.

    Raises `ConfigError` for a rank below 1 and for a pair that exceeds its channel counts.
    """
    if is_whole(rank):
        return min(c_in, int(rank)), min(c_out, int(rank))
    if isinstance(rank, Sequence) and len(rank) == 2:
        r1, r2 = rank
        if is_whole(r1) and is_whole(r2) and r1 <= c_in and r2 <= c_out:
            return int(r1), int(r2)
    fix = f"must be a whole number of at least 1, or a pair of them up to (c_in, c_out) = ({c_in}, {c_out})"
    raise ConfigError("rank", rank, fix)


def tt_svd(kernel: Tensor, rank: int | Sequence[int]) -> TTFactors:
    """Truncates the HOSVD of `kernel (c_out, c_in, k_1, ..., k_d)` in its two channel modes; frames are orthonormal.

    The frames are the leading left singular vectors of the two unfoldings. The squared error is at most the sum
    of the squared singular values cut off, hence at most twice that of the best approximation of these ranks;
    `tt_error` measures it. Raises `ConfigError` for a wrong shape, non-finite values and ranks out of range.
    """
    check_kernel(kernel)
    c_out, c_in = kernel.shape[:2]
    r1, r2 = tt_ranks(rank, c_in, c_out)
    frame_in = _leading(kernel.transpose(0, 1).reshape(c_in, -1), r1)
    frame_out = _leading(kernel.reshape(c_out, -1), r2)
    core = torch.einsum("ob,oi...,ia->ba...", frame_out, kernel, frame_in)
    return TTFactors(frame_in, core.contiguous(), frame_out.T.contiguous())


def _leading(unfolding: Tensor, rank: int) -> Tensor:
    """Returns the leading left singular vectors (rows, rank) of a matrix, through the triangle of its LQ factorization.

    The triangle is no wider than the matrix is tall, so vectors beyond the matrix's own rank exist too.
    """
    triangle = torch.linalg.qr(unfolding.T, mode="r").R
    vectors: Tensor = torch.linalg.svd(triangle.T, full_matrices=True).U
    return vectors[:, :rank].contiguous()


def tt_to_dense(k1: Tensor, core: Tensor, k3: Tensor) -> Tensor:
    """Returns the kernel `(c_out, c_in, k_1, ..., k_d)` of a TT convolution; contracts the cheaper side first.

    Raises `ConfigError` where shapes do not fit.
    """
    _check_shapes(k1, core, k3)
    c_in, r1 = k1.shape
    r2, c_out = k3.shape
    if merges_out_first(c_in, r1, r2, c_out):
        return row_major(torch.einsum("oa...,ia->oi...", torch.einsum("bo,ba...->oa...", k3, core), k1))
    return row_major(torch.einsum("bo,bi...->oi...", k3, torch.einsum("ba...,ia->bi...", core, k1)))


def row_major(kernel: Tensor) -> Tensor:
    """Gives a kernel the strides of a new tensor: of those that einsum leaves, convolutions make channels-last results.

    `contiguous` alone keeps any strides of axes of one tap.
    """
    return kernel.contiguous().view(-1).view(kernel.shape)


def tt_error(kernel: Tensor, k1: Tensor, core: Tensor, k3: Tensor) -> float:
    """Returns `|kernel - tt_to_dense(k1, core, k3)| / |kernel|` in the Frobenius norm; the error itself for zeros.

    Raises `ConfigError` for non-finite values, for dtypes that differ or are neither float32 nor float64, and where
    shapes do not fit.
    """
    check_kernel(kernel)
    _check_values(k1, core, k3)
    dense = tt_to_dense(k1, core, k3).detach()
    if kernel.shape != dense.shape or kernel.dtype != dense.dtype:
        fix = f"must be the factors', {tuple(dense.shape)} in {dense.dtype}"
        raise ConfigError("kernel", f"{tuple(kernel.shape)} in {kernel.dtype}", fix)
    norm, error = _length(kernel.detach()), _length(kernel.detach() - dense)
    return error / norm if norm else error


def _length(tensor: Tensor) -> float:
    """Returns the Frobenius norm, of entries whose squares would leave the range of their dtype, too."""
    largest = tensor.abs().max().double()
    scaled = tensor.double() / largest.clamp_min(torch.finfo(torch.float64).tiny)
    return float(largest * torch.linalg.vector_norm(scaled))


def orthogonalize(k1: Tensor, core: Tensor, k3: Tensor) -> TTFactors:
    """Returns the same kernel with orthonormal frames: `k1^T k1 = I`, `k3 k3^T = I` (Algorithm 1).

    `k1 = Q1 R1` and `k3^T = Q3 R3` give the core `R3 core R1^T` on its channel axes (r2, r1); Appendix B.1 of the
    paper forgets a transpose here. The triangles' diagonals are made non-negative, so that frames that are nearly
    orthonormal move little. Differentiable. Raises `ConfigError` where shapes do not fit or a rank exceeds its
    channel count.
    """
    check_factors(k1, core, k3)
    return orthogonalized([TTFactors(k1, core, k3)])[0]


def orthogonalized(factors: Sequence[TTFactors]) -> list[TTFactors]:
    """Returns what `orthogonalize` does of each of several triples that are known to fit and lie on one device."""
    parts = iter(_positive_qrs([frame for k1, _, k3 in factors for frame in (k1, k3.T)]))
    found = []
    for (_, core, _), (frame_in, triangle_in), (frame_out, triangle_out) in zip(factors, parts, parts, strict=True):
        core = torch.einsum("bc,cd...,ad->ba...", triangle_out, core, triangle_in)
        found.append(TTFactors(frame_in.contiguous(), row_major(core), frame_out.T.contiguous()))
    return found


def _positive_qrs(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns `positive_qr` of each matrix (rows, columns), rows at least columns.

    On a device that factors matrices one by one, those of one shape are factored together by products, where
    no gradient is asked for.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    if matrices and matrices[0].device.type != "cpu" and not torch.is_grad_enabled():
        places: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for place, matrix in enumerate(matrices):
            places.setdefault((matrix.shape, matrix.dtype), []).append(place)
        stacks = [_cholesky_qr(torch.stack([matrices[place] for place in group])) for group in places.values()]
        good = torch.cat([errors <= _ORTHONORMAL for *_, errors in stacks]).tolist()
        order = [place for group in places.values() for place in group]
        parts = [(q, r) for frames, triangles, _ in stacks for q, r in zip(frames, triangles, strict=True)]
        found = {place: part for place, part, holds in zip(order, parts, good, strict=True) if holds}
    return [found[place] if place in found else positive_qr(matrix) for place, matrix in enumerate(matrices)]


def _cholesky_qr(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factors `q r` (b, m, n), (b, n, n) of matrices (b, m, n), in float64 inside, and the errors (b,) of both.

    Twice by the Cholesky factor of the Gram matrix ("CholeskyQR2", Yamamoto et al. 2015): as good as Householder's QR
    for condition numbers up to some 1e7. For larger ones, and where columns depend on each other, the errors tell: by
    how much `q^T q` misses the identity and, relative to the matrix, `q r` the matrix; no numbers where it failed.
    """
    q = exact = matrices.double()
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    r = identity.expand(len(q), -1, -1)
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(q.mT @ q)
        # A pivot that fails is left as it is, below 0: a second factor would mend all but its sign.
        triangle = torch.where(failed[:, None, None] == 0, factor, math.nan).mT
        q = torch.linalg.solve_triangular(triangle, q, upper=True, left=False)
        r = triangle @ r
    missed = torch.linalg.matrix_norm(q @ r - exact) / torch.linalg.matrix_norm(exact)
    return q.to(matrices.dtype), r.to(matrices.dtype), missed + torch.linalg.matrix_norm(q.mT @ q - identity)


def positive_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Factors `matrix = q r`: orthonormal columns in q, no negative entry on the diagonal of r; differentiable."""
    q, r = torch.linalg.qr(matrix)
    sign = torch.where(r.diagonal() < 0, -1.0, 1.0).to(r.dtype)
    return q * sign, sign[:, None] * r


def check_factors(k1: Tensor, core: Tensor, k3: Tensor) -> None:
    """Raises `ConfigError` unless the three factors fit, are finite and have ranks within the channel counts."""
    _check_values(k1, core, k3)
    _check_shapes(k1, core, k3)
    if len(k1) < k1.shape[1]:
        raise ConfigError("k1.shape", tuple(k1.shape), "must be (c_in, r1) with c_in at least r1")
    if k3.shape[1] < len(k3):
        raise ConfigError("k3.shape", tuple(k3.shape), "must be (r2, c_out) with c_out at least r2")


def _check_values(k1: Tensor, core: Tensor, k3: Tensor) -> None:
    """Raises `ConfigError` unless the three factors are finite and of one dtype, float32 or float64."""
    check_kernel(core, name="core")
    for name, frame in (("k1", k1), ("k3", k3)):
        check_values(frame, name)
        if frame.dtype != core.dtype:
            raise ConfigError(f"{name}.dtype", frame.dtype, f"must be the core's, {core.dtype}")


def _check_shapes(k1: Tensor, core: Tensor, k3: Tensor) -> None:
    """Raises `ConfigError` unless the three factors fit."""
    if core.ndim not in (3, 4, 5):
        raise ConfigError("core.shape", tuple(core.shape), "must be (r2, r1, k_1, ..., k_d) with d = 1, 2 or 3")
    r2, r1 = core.shape[:2]
    if k1.ndim != 2 or k1.shape[1] != r1:
        raise ConfigError("k1.shape", tuple(k1.shape), f"must be (c_in, r1) with r1 = {r1} as in the core")
    if k3.ndim != 2 or len(k3) != r2:
        raise ConfigError("k3.shape", tuple(k3.shape), f"must be (r2, c_out) with r2 = {r2} as in the core")
