"""Cheap bounds and estimates of a convolution's norm, each with what it is worth; exact ones are in `ttsv.spectrum`."""

import math
from itertools import combinations

import torch
from torch import Tensor

from ttsv.bounds import convolve
from ttsv.checks import check_count
from ttsv.errors import ConfigError
from ttsv.grams import Grams
from ttsv.norms import binary_scale
from ttsv.symbol import PeriodicConv, Size, as_tuple, check_kernel


class PowerIteration:
    """Power iteration on a convolution that keeps its vector from call to call: a lower bound of the norm.

    Two iterations from a fresh vector reach 0.82 to 0.89 of the norm, as a rule; with the vector kept while the
    kernel moves slowly they come within a per cent after some tens of calls. Never more than the norm (up to
    rounding), and nothing says how much less: dividing by it does not bound anything.

    `input_size` (pixels), `stride`, `dilation`: one int or one per axis. `padding_mode="circular"` is the periodic
    operator of `ttsv.spectrum`, "zeros" the padded one with `padding` on both sides.
    """

    def __init__(
        self,
        input_size: Size,
        *,
        stride: Size = 1,
        dilation: Size = 1,
        groups: int = 1,
        padding: Size = 0,
        padding_mode: str = "zeros",
        seed: int = 0,
    ) -> None:
        if padding_mode not in ("zeros", "circular"):
            raise ConfigError("padding_mode", padding_mode, 'must be "zeros" or "circular"')
        check_count("seed", seed, least=0)
        self.input_size, self.stride, self.dilation, self.groups = input_size, stride, dilation, groups
        self.padding, self.padding_mode, self.seed = padding, padding_mode, seed
        self.vector: Tensor | None = None
        """The input image (1, c_in, n...) of norm 1 that the next call starts from."""

    def estimate(self, kernel: Tensor, iterations: int = 2) -> Tensor:
        """`|A x|`, 0-d, after `iterations` of `x <- A^T A x / |A^T A x|`; differentiable in the kernel, x held.

        `kernel (c_out, c_in / groups, k_1, ..., k_d)`, of the same shape at each call.
        """
        check_kernel(kernel, self.groups)
        check_count("iterations", iterations)
        d = kernel.ndim - 2
        shape = (1, kernel.shape[1] * self.groups, *as_tuple("input_size", self.input_size, d))
        size, pads = shape[2:], as_tuple("padding", self.padding, d, least=0)
        dilation = as_tuple("dilation", self.dilation, d)
        axes = zip(size, pads, dilation, kernel.shape[2:], strict=True)
        if self.padding_mode == "zeros" and any(n + 2 * p <= e * (k - 1) for n, p, e, k in axes):
            raise ConfigError("input_size", self.input_size, f"must hold the kernel, padding {pads} included")
        fresh = self.vector is None or self.vector.shape != shape
        if self.vector is None or fresh:
            generator = torch.Generator().manual_seed(self.seed)
            self.vector = torch.randn(shape, generator=generator, dtype=torch.float64)
        vector = self.vector.to(kernel)
        fixed = kernel.detach()
        for _ in range(iterations):
            with torch.enable_grad():
                vector = vector.requires_grad_()
                half_square = self._apply(vector, fixed).square().sum() / 2
            (vector,) = torch.autograd.grad(half_square, vector)
            length = torch.linalg.vector_norm(vector)
            if not length:  # in the null space: of a zero kernel, unless the kernel has changed since
                self.vector = None
                return kernel.sum() * 0 if fresh else self.estimate(kernel, iterations)
            vector = vector / length
        self.vector = vector
        gain: Tensor = torch.linalg.vector_norm(self._apply(vector, kernel))
        return gain

    def _apply(self, images: Tensor, kernel: Tensor) -> Tensor:
        d = kernel.ndim - 2
        stride, dilation = as_tuple("stride", self.stride, d), as_tuple("dilation", self.dilation, d)
        pads = as_tuple("padding", self.padding, d, least=0)
        if self.padding_mode == "circular":
            geometry = PeriodicConv.of(kernel, images.shape[2:], stride=stride, dilation=dilation, groups=self.groups)
            axes = zip(geometry.input_size, stride, dilation, geometry.kernel_size, strict=True)
            for axis, (n, s, e, k) in enumerate(axes, start=2):
                pixels = torch.arange(n - s + e * (k - 1) + 1, device=images.device) % n
                images = images.index_select(axis, pixels)
            pads = (0,) * d
        return convolve(images, kernel, stride, pads, dilation, self.groups)


@torch.no_grad()
def gram_iteration(
    kernel: Tensor,
    input_size: Size,
    *,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int = 1,
    iterations: int = 6,
) -> float:
    """An upper bound of the periodic convolution's norm by squaring Gram matrices (Delattre et al., ICML 2023).

    The largest over all frequencies of `|G^(2^t)|_F ^ (1 / 2^(t + 1))`, G the block's Gram matrix of side m and
    t = `iterations`: at most `m ^ (1 / 2^(t + 2))` times the norm (2.6 % above it for m = 640, t = 6), deterministic,
    from matrix products alone. Rounding is not accounted for; `ttsv.bounds` does that and is tighter. Arguments and
    errors as for `ttsv.spectrum.conv_singular_values`.
    """
    geometry = PeriodicConv.of(kernel, input_size, stride=stride, dilation=dilation, groups=groups)
    check_count("iterations", iterations, least=0)
    scale = binary_scale(kernel)
    grams = Grams(kernel / scale, geometry)
    largest = -math.inf
    for part in grams.batches(geometry.frequencies(kernel.device).index):
        matrices = grams.at(part)
        logarithm = torch.zeros(len(matrices), dtype=torch.float64, device=kernel.device)
        for _ in range(iterations):
            norms = _frobenius(matrices)
            logarithm = 2 * (logarithm + norms.double().log())
            matrices = matrices / norms[:, None, None]
            matrices = matrices @ matrices
        logarithm = (logarithm + _frobenius(matrices).double().log()) / 2 ** (iterations + 1)
        largest = max(largest, logarithm.max().item())
    return scale * math.exp(largest)


def _frobenius(matrices: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2))
    return norms.clamp_min(torch.finfo(norms.dtype).tiny)


def window_norms(kernel: Tensor) -> Tensor:
    """Spectral norms of the unfoldings of `kernel (c_out, c_in / groups, k_1, ..., k_d)`, `(2^d,)`; differentiable.

    Each spatial axis lies on the side of the rows or on that of the columns. For two axes, in the order of
    "Fantastic Four" (Singla & Feizi, ICLR 2021): R `(k_1 c_out, k_2 c_in)`, S `(k_2 c_out, k_1 c_in)`,
    T `(c_out, k_1 k_2 c_in)` (that of spectral normalisation), U `(k_1 k_2 c_out, c_in)`; for one axis T, U.

    Each, times `sqrt(k_1 ... k_d)`, is an upper bound of the norm of the convolution with this kernel, whatever
    its input size, stride, dilation and padding by zeros or by wrapping (for groups too, where one group's share
    of the rows would be tighter). Exact (singular value decompositions), which Gram or power iteration are not.
    A bound within a few per cent for kernels that act like one tap, up to that square root too large for others.
    """
    check_kernel(kernel)
    axes = range(kernel.ndim - 2)
    mixed = [rows for number in range(1, len(axes)) for rows in combinations(axes, number)]
    norms = [torch.linalg.svdvals(_unfolding(kernel, rows))[0] for rows in (*mixed, (), tuple(axes))]
    return torch.stack(norms)


def _unfolding(kernel: Tensor, rows: tuple[int, ...]) -> Tensor:
    """The matrix with output channels and the spatial axes `rows` down, input channels and the others across."""
    down = [axis + 2 for axis in rows]
    across = [axis for axis in range(2, kernel.ndim) if axis not in down]
    height = kernel.shape[0]
    for axis in down:
        height *= kernel.shape[axis]
    return kernel.permute(*down, 0, *across, 1).reshape(height, -1)
