"""Rigorous bounds of the norm of the convolution that a network applies, rounding accounted for.

Everything is computed in float64 on a kernel scaled by a power of two, which is exact. The slack below uses the
usual `m eps` bounds of the rounding of sums of m products (Higham, Accuracy and Stability, chapter 3) and an
eigenvalue and Cholesky error of at most `16 n^2 eps` relative, some hundred times what LAPACK shows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ttsv.checks import check_kernel
from ttsv.errors import ConfigError
from ttsv.spectral.geometry import CONVOLVE
from ttsv.spectral.gram import Grams
from ttsv.spectral.norms import (
    binary_scale,
    decomposes_in_batches,
    gram,
    largest_eigenvalues,
    largest_square,
    power_estimates,
    powers_of_two,
)
from ttsv.spectral.symbol import PeriodicConv, Size, as_tuple, fold, output_sizes

_EPS = torch.finfo(torch.float64).eps
_TOLERANCE = 1e-10
_DOUBLINGS, _NEAR = 6, 1e-8
"""Gram matrices that are the identity but for a power's rounding are not decomposed: see `_largest_squares`."""
"""Relative error allowed in squared norms."""

_DENSE_ENTRIES = 2**22
_DENSE_WORK = 2**30
"""Operators of at most so many entries, and multiplications in their Gram matrix, are built and decomposed."""

_BASIS_ENTRIES = 2**26
_APPLICATIONS = 240
"""The Lanczos basis has at most so many entries, and all cycles together at most so many steps."""

_NOISE = 0.1

_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


class NormBounds(NamedTuple):
    """Bounds of an operator norm, `lower <= norm <= upper`, both rigorous."""

    lower: float
    upper: float


def conv_norm_bounds(
    kernel: Tensor,
    input_size: Size,
    *,
    stride: Size = 1,
    dilation: Size = 1,
    groups: int = 1,
    padding: Size | None = None,
    padding_mode: str = "zeros",
) -> NormBounds:
    """Returns bounds around the norm of the convolution with `kernel (c_out, c_in / groups, k_1, ..., k_d)`.

    Sizes are in pixels, an int or one per axis; `padding=None` means `dilation (k - 1) // 2`.

    `padding_mode="circular"`: the periodic operator; the bounds agree to about 1e-8. Every stride divides its
    size, and a `padding` that is given leaves `input_size / stride` outputs. Of a kernel larger than the image the
    rounding that a convolution in float64 leaves where taps on one pixel cancel counts as well.

    `padding_mode="zeros"`: small operators are decomposed, with bounds as close. For others `upper` is the least
    periodic norm at a few sizes N that the stride divides, from `n + dilation (k - 1)` on: the zero-padded
    operator is a submatrix of each. `lower` is the gain of the best direction found by a restarted Lanczos
    iteration from that of the periodic operator, as a rule within 0.1 % of the norm.

    Not differentiable. Raises `ConfigError` (a `ValueError`) for what cannot be convolved.
    """
    check_kernel(kernel, groups)
    d = kernel.ndim - 2
    exact = kernel.detach().to(torch.float64)
    if padding_mode not in ("zeros", "circular"):
        raise ConfigError("padding_mode", padding_mode, 'must be "zeros" or "circular"')
    scale = binary_scale(exact)
    exact = exact / scale
    pads = None if padding is None else as_tuple("padding", padding, d, least=0)
    if padding_mode == "circular":
        periodic = PeriodicConv.of(exact, input_size, stride=stride, dilation=dilation, groups=groups)
        if pads is not None and _outputs(periodic, pads) != periodic.output_size:
            raise ConfigError("padding", padding, f"must leave {periodic.output_size} outputs in circular mode")
        bounds = _periodic_bounds(exact, periodic)
    else:
        geometry = PeriodicConv(
            tuple(kernel.shape[2:]),
            as_tuple("input_size", input_size, d),
            as_tuple("stride", stride, d),
            as_tuple("dilation", dilation, d),
            groups,
        )
        if pads is None:
            pads = tuple(e * (k - 1) // 2 for e, k in zip(geometry.dilation, geometry.kernel_size, strict=True))
        if min(_outputs(geometry, pads)) < 1:
            raise ConfigError("input_size", input_size, f"must hold the kernel, padding {pads} included")
        bounds = _zero_padded_bounds(exact, geometry, pads)
    lower = math.nextafter(max(bounds.lower, 0.0) * scale, 0.0)
    return NormBounds(lower, math.nextafter(bounds.upper * scale, math.inf) if bounds.upper else 0.0)


def matrix_norm_bound(matrix: Tensor) -> float:
    """Returns a rigorous upper bound of a matrix's largest singular value, within some 1e-8; float64 inside."""
    return matrix_norm_bounds([matrix])[0]


def matrix_norm_bounds(matrices: Sequence[Tensor]) -> list[float]:
    """Returns `matrix_norm_bound` of each; those of one shape, on one device, are taken together.

    The device is waited for once, and once more where matrices are decomposed.
    """
    if not matrices:
        return []
    places: dict[tuple[int, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        places.setdefault(tuple(sorted(matrix.shape)), []).append(place)
    bounds = [0.0] * len(matrices)
    for (side, inner), group in places.items():
        tall = [matrices[place].detach() for place in group]
        exact = torch.stack([matrix if len(matrix) == inner else matrix.mT for matrix in tall]).double()
        scales = powers_of_two(exact.abs().amax(dim=(1, 2)))
        exact = exact / scales[:, None, None]
        sizes = torch.linalg.vector_norm(exact, dim=(1, 2))
        squares = _largest_squares(exact.mT @ exact)
        found = torch.stack([squares, sizes, scales], dim=1).tolist()
        for place, (square, size, scale) in zip(group, found, strict=True):
            bounds[place] = scale * _from_gram(square, side, inner, size).upper
    return bounds


def _largest_squares(grams: Tensor) -> Tensor:
    """Of each Gram matrix (b, n, n) the largest eigenvalue (b,), or a bound of it that is too large by some 1e-8.

    Those of frames are near the identity, `c (I + E)` with a small E: at most `c (1 + |E^m|^(1/m))`, m = 64, with
    Frobenius's norm. A device that decomposes matrices one by one is spared that where all are.
    """
    side = grams.shape[-1]
    if not decomposes_in_batches(side, grams.device):
        mean = grams.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
        power = grams / mean[:, None, None] - torch.eye(side, dtype=grams.dtype, device=grams.device)
        size = torch.linalg.matrix_norm(power)
        power = power / size.clamp_min(torch.finfo(size.dtype).tiny)[:, None, None]
        for _ in range(_DOUBLINGS):
            power = power @ power
        deviation = size * torch.linalg.matrix_norm(power) ** 0.5**_DOUBLINGS
        # The Frobenius norm of a power is at most sqrt(n) times its spectral norm.
        excess = deviation * (side ** (0.5 / 2**_DOUBLINGS) - 1)
        if bool((excess <= _NEAR).all()):
            found: Tensor = mean * (1 + deviation)
            return found
    values: Tensor = torch.linalg.eigvalsh(grams)
    return values[:, -1]


def convolve(
    images: Tensor,
    kernel: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """Returns the zero-padded convolution of images (b, c_in, n_1, ..., n_d), d = 1, 2 or 3, without bias."""
    return CONVOLVE[len(stride)](images, kernel, None, stride, padding, dilation, groups)


def _outputs(geometry: PeriodicConv, pads: tuple[int, ...]) -> tuple[int, ...]:
    """Pixels of the output of a convolution with this padding on both sides."""
    sides = tuple((p, p) for p in pads)
    return output_sizes(geometry.input_size, sides, geometry.kernel_size, geometry.stride, geometry.dilation)


def _periodic_bounds(kernel: Tensor, geometry: PeriodicConv) -> NormBounds:
    given = kernel
    kernel, around, lost = fold(given, geometry)
    if around != geometry:  # where aliases cancel, a convolution in float64 is left with rounding: that counts, too
        lost += given[0].numel() * _EPS * geometry.schur_bound(given)
    geometry = around
    square = largest_square(kernel, geometry, _TOLERANCE)
    rows = kernel.shape[0] // geometry.groups
    columns = kernel.shape[1] * math.prod(geometry.stride)
    magnitude = torch.linalg.vector_norm(kernel.abs().flatten(2).sum(2)).item()
    # An entry of a Gram matrix is a sum over pairs of taps and their channels, with phases good to 128 eps; in the sum
    # of absolute values each pair's product is bounded by the magnitudes.
    taps = math.prod(geometry.kernel_size)
    inner = taps * max(rows, columns) + taps * taps + 128
    bounds = _from_gram(square, min(rows, columns), inner, magnitude)
    return NormBounds(bounds.lower - lost, bounds.upper + lost)


def _from_gram(square: float, side: int, inner: int, frobenius: float) -> NormBounds:
    """Bounds of matrices' norm from the largest eigenvalue of their Gram matrices, known up to rounding.

    `side` is that of the Gram matrices, sums of `inner` products; `frobenius` bounds the matrices' own norm.
    """
    decomposition = 16 * side * side * _EPS
    product = (2 * inner + 8) * _EPS * frobenius * frobenius
    upper = math.sqrt(square * (1 + _TOLERANCE) * (1 + decomposition) + product)
    lower = math.sqrt(max(square * (1 - decomposition) - product, 0.0))
    return NormBounds(lower, upper)


def _zero_padded_bounds(kernel: Tensor, geometry: PeriodicConv, pads: tuple[int, ...]) -> NormBounds:
    operator = _ZeroPadded(kernel, geometry, pads)
    rows, columns = operator.rows, operator.columns
    work = rows * columns * min(rows, columns) * geometry.groups
    if rows * columns * geometry.groups <= _DENSE_ENTRIES and work <= _DENSE_WORK:
        matrices = operator.matrices()
        square = float(largest_eigenvalues(gram(matrices), _TOLERANCE))
        frobenius = torch.linalg.vector_norm(matrices, dim=(1, 2)).max().item()
        return _from_gram(square, min(rows, columns), max(rows, columns), frobenius)
    upper = geometry.schur_bound(kernel) * (1 + 4 * kernel.numel() * _EPS)
    lower = 0.0
    for extra in range(3):
        upper = min(upper, _periodic_bounds(kernel, _containing(geometry, extra)).upper)
        lower = lower or operator.gain(0.999 * upper)
        if lower >= 0.99 * upper:
            break
    return NormBounds(lower, upper)


def _containing(geometry: PeriodicConv, extra: int) -> PeriodicConv:
    """A periodic convolution of which the zero-padded one is a submatrix, `extra` strides above the smallest."""
    axes = zip(geometry.input_size, geometry.dilation, geometry.kernel_size, geometry.stride, strict=True)
    sizes = tuple((-(-(n + e * (k - 1)) // s) + extra) * s for n, e, k, s in axes)
    return replace(geometry, input_size=sizes)


class _ZeroPadded:
    """The zero-padded convolution and its adjoint; `rows`, `columns` count one group's outputs and inputs."""

    def __init__(self, kernel: Tensor, geometry: PeriodicConv, pads: tuple[int, ...]) -> None:
        self.kernel, self.geometry, self.pads = kernel, geometry, pads
        self.outputs = _outputs(geometry, pads)
        self.rows = kernel.shape[0] // geometry.groups * math.prod(self.outputs)
        self.columns = kernel.shape[1] * math.prod(geometry.input_size)
        axes = zip(geometry.input_size, self.outputs, pads, geometry.dilation, geometry.kernel_size, strict=True)
        reached = (
            (o - 1) * s - 2 * p + e * (k - 1) + 1 for (_, o, p, e, k), s in zip(axes, geometry.stride, strict=True)
        )
        self.unread = tuple(n - r for n, r in zip(geometry.input_size, reached, strict=True))

    def apply(self, images: Tensor) -> Tensor:
        g = self.geometry
        return convolve(images, self.kernel, g.stride, self.pads, g.dilation, g.groups)

    def adjoint(self, images: Tensor) -> Tensor:
        g = self.geometry
        arguments = (self.kernel, None, g.stride, self.pads, self.unread, g.groups, g.dilation)
        return _TRANSPOSED[len(g.stride)](images, *arguments)

    def matrices(self) -> Tensor:
        """One dense matrix per group, (groups, side, other side) with the smaller side first."""
        g = self.geometry
        if self.rows <= self.columns:
            shape, transform = (self.kernel.shape[0] // g.groups, *self.outputs), self.adjoint
        else:
            shape, transform = (self.kernel.shape[1], *g.input_size), self.apply
        side = min(self.rows, self.columns)
        basis = torch.eye(side, dtype=self.kernel.dtype, device=self.kernel.device).reshape(side, *shape)
        images = transform(basis.repeat(1, g.groups, *(1 for _ in g.stride)))
        return images.reshape(side, g.groups, -1).transpose(0, 1)

    def wave(self) -> Tensor:
        """A direction (1, c_in, *input_size) of large gain: a periodic operator's best at one frequency, faded out.

        By half a sine on each axis, 0 just outside the image: the larger the image, the less its edges count.
        """
        kernel, periodic = self.kernel, _containing(self.geometry, 0)
        index = periodic.frequencies(kernel.device).index
        grams = Grams(kernel, periodic)
        best = int(torch.cat([power_estimates(grams.at(part)) for part in grams.batches(index)]).argmax())
        at, group = index[best // periodic.groups, None], best % periodic.groups
        vector = torch.linalg.svd(periodic.symbol(kernel, at)[0, group], full_matrices=False).Vh[0].conj()
        vector = vector * vector[vector.abs().argmax()].conj().sgn()  # real where the block is
        image = vector.reshape(*periodic.stride, -1).movedim(-1, 0)
        places = torch.unravel_index(at, periodic.output_size)
        axes = zip(self.geometry.input_size, periodic.output_size, periodic.stride, self.pads, places, strict=True)
        for axis, (n, grid, stride, pad, place) in enumerate(axes, start=1):
            pixels = torch.arange(n, device=kernel.device)
            turns = place * ((pixels + pad) // stride) % grid
            fade = torch.sin(math.pi / (n + 1) * (pixels + 1).to(kernel.dtype))
            along = torch.polar(fade, 2 * math.pi / grid * turns.to(kernel.dtype))
            shape = (-1, *(1 for _ in places[axis:]))
            image = image.index_select(axis, (pixels + pad) % stride) * along.reshape(shape)
        images = kernel.new_zeros(1, periodic.groups, *image.shape)
        images[0, group] = image.real
        return images.flatten(1, 2)

    def gain(self, enough: float) -> float:
        """A lower bound of the norm: the gain `|A x| / |x|` of a direction found by restarted Lanczos on `A^T A`.

        From `wave` and some noise, so that no direction is missing. Stops when a cycle adds less than 5e-6 a step, or
        at `enough`.
        """
        start = self.wave()
        steps = max(4, min(20, _BASIS_ENTRIES // start.numel()))
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(start.numel(), dtype=start.dtype, generator=generator).to(start.device)
        parts = functional.normalize(start.flatten(), dim=0), functional.normalize(noise, dim=0)
        vector: Tensor = (parts[0] + _NOISE * parts[1]).reshape(start.shape)
        # A tap's product and the sum over taps and channels, each way.
        slack = (self.kernel[0].numel() + 8) * _EPS * self.geometry.schur_bound(self.kernel)
        gain = 0.0
        for _ in range(_APPLICATIONS // steps):
            before, vector = gain, self._lanczos(vector, steps)
            length = torch.linalg.vector_norm(vector).item()
            gain = torch.linalg.vector_norm(self.apply(vector)).item() / length
            if gain >= enough or gain - before <= 5e-6 * steps * gain:
                break
        return gain * (1 - 8 * vector.numel() * _EPS) - slack

    def _lanczos(self, start: Tensor, steps: int) -> Tensor:
        """The best direction of the Krylov space of `A^T A` from `start`."""
        basis = torch.empty((steps, start.numel()), dtype=start.dtype, device=start.device)
        images = torch.empty_like(basis)
        vector = start.flatten()
        for step in range(steps):
            length = torch.linalg.vector_norm(vector)
            if length <= 1e-12 * torch.linalg.vector_norm(images[step - 1]) and step:
                basis, images = basis[:step], images[:step]
                break
            basis[step] = vector / length
            images[step] = self.adjoint(self.apply(basis[step].reshape(start.shape))).flatten()
            vector = images[step].clone()
            for _ in range(2):
                vector -= basis[: step + 1].T @ (basis[: step + 1] @ vector)
        ritz: Tensor = torch.linalg.eigh(basis @ images.T).eigenvectors[:, -1]
        return (ritz @ basis).reshape(start.shape)
