"""The symbol of a periodic convolution: one small matrix per frequency with the operator's singular values.

A convolution with stride s on a periodic grid of n pixels splits its *input* into prod(s) polyphase components
`x[s q + r]`, `0 <= r < s`. The Fourier transform over q makes the operator block diagonal: one block of shape
`(c_out, prod(s) c_in)` for each of the `prod(n / s)` frequencies (Theorem 2 of Senderovich et al. 2022 with the
components on the side of the input, where they lie).
"""

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ttsv.checks import check_kernel
from ttsv.errors import ConfigError

Size: TypeAlias = int | Sequence[int]
"""One number for all axes, or one per axis."""

Shifts: TypeAlias = tuple[tuple[int, ...], ...]
"""Vectors of whole pixels, one number per axis each."""

Lags: TypeAlias = Mapping[tuple[int, ...], Sequence[tuple[int, int]]]
"""Pairs of taps by the difference of their shifts."""

Sides: TypeAlias = tuple[tuple[int, int], ...]
"""Pixels of padding before and after, per axis."""

_CPU = torch.device("cpu")
_TABLE_ENTRIES = 2**18
"""Of a grid with so many frequencies times shifts (4 MiB in float64) cosines and sines are kept."""
_BLOCK_BYTES = 2**26
"""Blocks of at most this many bytes (64 MiB) are held at once, or one frequency's where that is more."""


@dataclass(frozen=True)
class Frequencies:
    """One frequency of each set whose blocks are equal up to conjugation.

    `index (h,)`: flat indices of the representatives; `count (h,)`: how many frequencies each stands for;
    `position (m,)`: for every frequency the place of its representative in `index`.
    """

    index: Tensor
    count: Tensor
    position: Tensor


@dataclass(frozen=True)
class PeriodicConv:
    """Geometry of a periodic convolution with d spatial axes: all tuples have length d.

    Output q reads input `(stride q + dilation t) mod input_size` through tap t. Padding would only shift the
    grid, which changes no singular value. Built by `PeriodicConv.of`, which checks.
    """

    kernel_size: tuple[int, ...]
    input_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls, kernel: Tensor, input_size: Size, *, stride: Size = 1, dilation: Size = 1, groups: int = 1
    ) -> "PeriodicConv":
        """Geometry of `kernel (c_out, c_in / groups, k_1, ..., k_d)`; raises `ConfigError` for what cannot be."""
        check_kernel(kernel, groups)
        d = kernel.ndim - 2
        size, strides = as_tuple("input_size", input_size, d), as_tuple("stride", stride, d)
        if any(n % s for n, s in zip(size, strides, strict=True)):
            fix = f"must divide input_size = {size} on every axis"
            raise ConfigError("stride", stride if isinstance(stride, int) else strides, fix)
        return cls(tuple(kernel.shape[2:]), size, strides, as_tuple("dilation", dilation, d), groups)

    @property
    def output_size(self) -> tuple[int, ...]:
        """Pixels of the output, which is also the grid of frequencies."""
        return tuple(n // s for n, s in zip(self.input_size, self.stride, strict=True))

    @property
    def folds(self) -> bool:
        """Whether several taps of the kernel read the same pixel."""
        axes = zip(self.kernel_size, self.input_size, self.dilation, strict=True)
        return any(k > n // math.gcd(n, e) for k, n, e in axes)

    def gram_side(self, kernel: Tensor) -> int:
        """Rows of the smaller Gram matrices of the blocks: `min(c_out / groups, prod(stride) c_in / groups)`."""
        return min(kernel.shape[0] // self.groups, kernel.shape[1] * math.prod(self.stride))

    def frequencies(self, device: torch.device) -> Frequencies:
        """Representatives of all frequencies under conjugation.

        The kernel is real, so the blocks of f and -f are conjugate; along an axis with a single tap they do not
        depend on f at all.
        """
        return _frequencies(self.output_size, tuple(k == 1 for k in self.kernel_size), device)

    def is_real(self, index: Tensor) -> Tensor:
        """Whether the blocks at flat frequencies `index`, as `frequencies` gives them, are real: f and -f agree."""
        axes = zip(_coordinates(self.output_size, index.device)[index].unbind(1), self.output_size, strict=True)
        return torch.stack([2 * places % n == 0 for places, n in axes], dim=1).all(dim=1)

    def batches(self, kernel: Tensor, index: Tensor) -> Iterator[Tensor]:
        """Splits flat frequency indices so that the blocks of each part stay within the memory budget."""
        entries = kernel.shape[0] * kernel.shape[1] * math.prod(self.stride)
        per_frequency = 2 * kernel.element_size() * entries
        yield from torch.split(index, max(1, _BLOCK_BYTES // per_frequency))

    def symbol(self, kernel: Tensor, index: Tensor) -> Tensor:
        """Blocks `(f, groups, c_out / groups, prod(stride) c_in / groups)`, complex, at flat frequencies `index`.

        Differentiable in the kernel. Columns are ordered by polyphase component, then input channel.
        """
        c_out, c_in = kernel.shape[:2]
        taps = kernel.reshape(c_out * c_in, -1).T
        cosine, sine = self.phases(index, kernel.dtype)
        components = []
        for used in self.taps_by_component(kernel.device):
            real, imaginary = cosine[:, used] @ taps[used], sine[:, used] @ taps[used]
            blocks = torch.complex(real, imaginary)
            components.append(blocks.reshape(len(index), self.groups, c_out // self.groups, c_in))
        return components[0] if len(components) == 1 else torch.cat(components, dim=-1)

    def taps(self, blocks: Tensor, index: Tensor, count: Tensor) -> Tensor:
        """What blocks at representative frequencies add to the kernel's taps `(c_out, c_in / groups, k...)`.

        The inverse Fourier transform, at the kernel's own taps only; blocks that are left out count as zero. Taps
        that fall on the same pixel (a kernel larger than the input, folded) share its value equally.
        """
        real_dtype = blocks.real.dtype
        c_out, c_in = blocks.shape[1] * blocks.shape[2], blocks.shape[3] // math.prod(self.stride)
        weight = count.to(real_dtype)[:, None] / math.prod(self.output_size)
        cosine, sine = (weight * phase for phase in self.phases(index, real_dtype))
        taps = blocks.new_empty((math.prod(self.kernel_size), c_out * c_in), dtype=real_dtype)
        components = blocks.reshape(len(index), c_out, -1, c_in).unbind(dim=2)
        for used, part in zip(self.taps_by_component(blocks.device), components, strict=True):
            part = part.reshape(len(index), -1)
            taps[used] = cosine[:, used].T @ part.real + sine[:, used].T @ part.imag
        taps /= self.aliases(taps.device).to(taps)[:, None]
        return taps.T.reshape(c_out, c_in, *self.kernel_size)

    def schur_bound(self, kernel: Tensor) -> float:
        """Upper bound of the norm of any (zero-padded, strided ...) convolution with this kernel, cheap and loose.

        Root of the largest absolute row sum times the largest absolute column sum (Schur's test).
        """
        rows, columns = self.schur_sums(kernel).tolist()
        return math.sqrt(rows) * math.sqrt(columns)

    def schur_sums(self, kernel: Tensor) -> Tensor:
        """The largest absolute row sum and the largest absolute column sum (2,), of which the bound is made."""
        magnitude = kernel.detach().abs().flatten(2).sum(2, dtype=torch.float64)  # rounded in float32, it may be below
        columns = magnitude.reshape(self.groups, -1, magnitude.shape[1]).sum(1)
        return torch.stack([magnitude.sum(1).max(), columns.max()])

    def phases(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (f, taps), of the angle by which each tap turns at each frequency."""
        return self.turns(index, _shifts(self.kernel_size, self.stride, self.dilation), dtype)

    def turns(self, index: Tensor, shifts: Shifts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (f, shifts), by which shifts on the output grid turn at each flat frequency.

        They lie on the device of `index`, which is not waited for once what is kept of these shifts is there.
        """
        if math.prod(self.output_size) * len(shifts) > _TABLE_ENTRIES:
            return _turned(self.output_size, index, _shifts_on(shifts, index.device), dtype)
        cosine, sine = _turns(self.output_size, shifts, dtype, index.device)
        return cosine[index], sine[index]

    def lags(self, rows_are_outputs: bool) -> Lags:
        """Pairs of taps in one polyphase component by the difference of their shifts on the output grid.

        One of each two opposite lags, 0 first. Empty where the Gram matrices couple several components: on the
        side of the inputs with strides.
        """
        if not rows_are_outputs and math.prod(self.stride) > 1:
            return {}
        return _lags(self.kernel_size, self.stride, self.dilation)

    def taps_by_component(self, device: torch.device) -> list[Tensor]:
        """For each polyphase component the flat indices of the taps that read it."""
        return list(_taps_by_component(self.kernel_size, self.stride, self.dilation, device))

    def aliases(self, device: torch.device) -> Tensor:
        """For each tap the number of taps that read the same pixel."""
        return _aliases(self.kernel_size, self.input_size, self.dilation, device)


# What follows is counted on the processor and copied to a device once, as that waits for it: for each geometry, of
# which a network has few. No caller writes into it. It is plain also where the first caller is in inference mode.


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _frequencies(grid: tuple[int, ...], single: tuple[bool, ...], device: torch.device) -> Frequencies:
    """Those of a grid, along whose axes the kernel has a `single` tap or several."""
    coordinates = _coordinates(grid, _CPU)
    coordinates[:, torch.tensor(single)] = 0
    smallest = torch.minimum(_flat(coordinates, grid), _flat(-coordinates, grid))
    index, position, count = torch.unique(smallest, return_inverse=True, return_counts=True)
    return Frequencies(index.to(device), count.to(device), position.to(device))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _taps_by_component(
    kernel_size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], device: torch.device
) -> tuple[Tensor, ...]:
    component = _components(kernel_size, stride, dilation)
    return tuple((component == r).nonzero()[:, 0].to(device) for r in range(math.prod(stride)))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _aliases(
    kernel_size: tuple[int, ...], input_size: tuple[int, ...], dilation: tuple[int, ...], device: torch.device
) -> Tensor:
    pixel = _flat(_coordinates(kernel_size, _CPU) * torch.tensor(dilation), input_size)
    _, inverse, counts = torch.unique(pixel, return_inverse=True, return_counts=True)
    aliases: Tensor = counts[inverse]
    return aliases.to(device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _turns(grid: tuple[int, ...], shifts: Shifts, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """What `_turned` says of all frequencies of a grid, to be looked up: a few additions by many launches."""
    cosine, sine = _turned(grid, torch.arange(math.prod(grid)), _shifts_on(shifts, _CPU), dtype)
    return cosine.to(device), sine.to(device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _shifts_on(shifts: Shifts, device: torch.device) -> Tensor:
    """Shifts (m, d) on a device."""
    return torch.tensor(shifts, device=device)


def _turned(grid: tuple[int, ...], index: Tensor, shifts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (f, m), by which shifts (m, d) turn at flat frequencies `index` of a grid."""
    places = _coordinates(grid, index.device)[index]
    axes = zip(places.unbind(1), shifts.unbind(1), grid, strict=True)
    turns = [(at[:, None] * shift % n).double() / n for at, shift, n in axes]
    angles = 2 * math.pi * torch.stack(turns, dim=-1).sum(-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@functools.lru_cache(maxsize=64)
def _shifts(kernel_size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Shifts:
    """For each tap the whole strides by which it reads ahead of its component's first pixel."""
    taps = product(*map(range, kernel_size))
    return tuple(tuple(t * e // s for t, e, s in zip(tap, dilation, stride, strict=True)) for tap in taps)


@functools.lru_cache(maxsize=64)
def _lags(kernel_size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Lags:
    """Of all pairs of taps, see `PeriodicConv.lags`."""
    components = _components(kernel_size, stride, dilation).tolist()
    shifts = _shifts(kernel_size, stride, dilation)
    zero = (0,) * len(stride)
    pairs: dict[tuple[int, ...], list[tuple[int, int]]] = {zero: []}
    for t, u in product(range(len(shifts)), repeat=2):
        lag = tuple(a - b for a, b in zip(shifts[t], shifts[u], strict=True))
        if components[t] == components[u] and lag >= zero:
            pairs.setdefault(lag, []).append((t, u))
    return pairs


TABLES = [_frequencies, _taps_by_component, _aliases, _turns, _shifts_on]
"""All that is kept of geometries on devices."""


def forget_tables() -> None:
    """Frees what is kept of geometries, so that whatever comes next makes it anew, as in a process of its own."""
    for table in TABLES:
        table.cache_clear()


def _components(kernel_size: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """For each tap the polyphase component that it reads."""
    offsets = _coordinates(kernel_size, _CPU) * torch.tensor(dilation)
    return _flat(offsets % torch.tensor(stride), stride)


def _coordinates(sizes: Sequence[int], device: torch.device) -> Tensor:
    """All grid points (prod(sizes), d) in row-major order."""
    axes = torch.meshgrid([torch.arange(size, device=device) for size in sizes], indexing="ij")
    return torch.stack([axis.flatten() for axis in axes], dim=1)


def _flat(coordinates: Tensor, sizes: Sequence[int]) -> Tensor:
    """Row-major indices (p,) of grid points (p, d), taken modulo the sizes."""
    flat = torch.zeros(len(coordinates), dtype=torch.int64)
    for axis, size in enumerate(sizes):
        flat = flat * size + coordinates[:, axis] % size
    return flat


def as_tuple(name: str, value: Size, d: int, *, least: int = 1) -> tuple[int, ...]:
    """`value` once per axis as ints of at least `least`; raises `ConfigError` naming the argument otherwise."""
    fix = f"must be a whole number of at least {least}, or {d} of them"
    try:
        values = tuple(map(operator.index, value)) if isinstance(value, Sequence) else (operator.index(value),) * d
    except TypeError:
        raise ConfigError(name, value, fix) from None
    truths = any(isinstance(v, bool) for v in (value if isinstance(value, Sequence) else (value,)))
    if truths or len(values) != d or any(v < least for v in values):
        raise ConfigError(name, value, fix)
    return values


def output_sizes(
    input_size: Sequence[int], sides: Sides, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Pixels per axis of what a convolution makes of images of `input_size`, padded by `sides`."""
    axes = zip(input_size, sides, kernel_size, stride, dilation, strict=True)
    return tuple((n + sum(pads) - e * (k - 1) - 1) // s + 1 for n, pads, k, s, e in axes)


def pad(images: Tensor, sides: Sides, mode: str = "constant") -> Tensor:
    """Images `(..., n_1, ..., n_d)` with so many pixels more before and after, per axis; modes as torch has them."""
    # functional.pad takes the last axis first.
    return functional.pad(images, [pixels for side in reversed(sides) for pixels in side], mode)


def padding_sides(padding: str | Sequence[int], kernel_size: Sequence[int], dilation: Sequence[int]) -> Sides:
    """Pixels of padding as torch's convolutions have them: "same", "valid" or one number per axis."""
    if padding == "same":
        totals = (e * (k - 1) for e, k in zip(dilation, kernel_size, strict=True))
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(padding, str):
        return ((0, 0),) * len(kernel_size)
    return tuple((pixels, pixels) for pixels in padding)


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
    missing = tuple((0, a * m - k) for a, m, k in zip(copies, sizes, geometry.kernel_size, strict=True))
    padded = pad(kernel, missing)
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
