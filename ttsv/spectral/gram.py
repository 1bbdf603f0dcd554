"""Gram matrices of the blocks of a symbol, at any frequencies, from sums that are formed once.

With taps K_t and phases z_t(f) the block's Gram matrix is `sum_tu z_t conj(z_u) K_t K_u^T` over the pairs of taps in
one polyphase component. Pairs with the same lag share their phase, so the products are summed per lag once (45 real
ones for 3x3 taps, of which half are mirrored) instead of multiplying complex blocks at every frequency.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ttsv.spectral.symbol import TABLES, Lags, PeriodicConv

_PART_BYTES = 2**24
"""Gram matrices of at most this many bytes (16 MiB) are held at once, or one frequency's where that is more."""

_DEVICE_PART_BYTES = 3 * 2**27
"""As much (384 MiB) on other devices than the CPU: many matrices keep them busy, and each part is waited for.

Clipping holds some ten times as much for a while."""


class Grams:
    """`A A^H` or `A^H A`, whichever is smaller, for the blocks A of a periodic convolution.

    `side`: rows of each; `groups` of them at each frequency. Rounding is relative to the largest matrix over all
    frequencies; `precise`: to each matrix itself, by multiplying blocks.
    """

    def __init__(self, kernel: Tensor, geometry: PeriodicConv, *, precise: bool = False) -> None:
        self.geometry = geometry
        self.groups = geometry.groups
        components = math.prod(geometry.stride)
        c_out, c_in = kernel.shape[0] // geometry.groups, kernel.shape[1]
        self.rows_are_outputs = c_out <= components * c_in
        self.side = geometry.gram_side(kernel)
        self._dtype = kernel.dtype
        self._kernel = kernel
        pairs = geometry.lags(self.rows_are_outputs)
        count = sum(len(pair) for pair in pairs.values())
        frequencies = math.prod(geometry.output_size)
        self._by_lag = not precise and bool(pairs) and count <= 2 * components * frequencies
        if self._by_lag:
            self._sum_lags(pairs)

    def _sum_lags(self, pairs: Lags) -> None:
        """Products summed by lag: those that turn with the cosine and those that turn with the sine."""
        taps = self._kernel.reshape(self.groups, -1, self._kernel.shape[1], math.prod(self.geometry.kernel_size))
        taps = taps.permute(3, 0, 1, 2) if self.rows_are_outputs else taps.permute(3, 0, 2, 1)
        taps = taps.contiguous()
        self._lags = tuple(pairs)
        bytes_of_pair = self._dtype.itemsize * self.groups * self.side * (self.side + 2 * taps.shape[-1])
        most = max(1, _budget(taps.device) // bytes_of_pair)
        sums = []
        for members, weights in _chunks(tuple(map(tuple, pairs.values())), most, self._dtype, taps.device):
            first, second = taps[members]
            sums.append(weights @ (first @ second.mT).flatten(1))
        total = torch.cat(sums).reshape(len(pairs), self.groups, self.side, self.side)
        self._even = total + total.mT
        self._odd = total[1:] - total[1:].mT
        if not self.rows_are_outputs:
            self._odd.neg_()

    @property
    def mean(self) -> Tensor | None:
        """Their mean over all frequencies (groups, side, side), real; None where it would have to be formed."""
        return self._even[0] if self._by_lag else None

    def batches(self, index: Tensor) -> Iterator[Tensor]:
        """Splits flat frequency indices so that the matrices, and the blocks, of each part stay within the budget."""
        other = self._kernel.shape[1] * math.prod(self.geometry.stride)
        blocks = self.side * max(self.side, other if self.rows_are_outputs else len(self._kernel) // self.groups)
        per_frequency = 2 * self._dtype.itemsize * self.groups * blocks
        yield from torch.split(index, max(1, _budget(index.device) // per_frequency))

    def at(self, index: Tensor) -> Tensor:
        """The matrices (f groups, side, side), complex, at f flat frequency indices; groups vary fastest."""
        if not self._by_lag:
            blocks = self.geometry.symbol(self._kernel, index).flatten(0, 1)
            return blocks @ blocks.mH if self.rows_are_outputs else blocks.mH @ blocks
        cosine, sine = self.geometry.turns(index, self._lags, self._dtype)
        grams = torch.empty(
            (len(index) * self.groups, self.side, self.side), dtype=self._dtype.to_complex(), device=index.device
        )
        shape = (len(index), *self._even.shape[1:])
        parts = torch.view_as_real(grams).reshape(*shape, 2)
        parts[..., 0] = (cosine @ self._even.flatten(1)).reshape(shape)
        parts[..., 1] = (sine[:, 1:] @ self._odd.flatten(1)).reshape(shape)
        return grams


def _budget(device: torch.device) -> int:
    """Bytes that are worked on at once."""
    return _PART_BYTES if device.type == "cpu" else _DEVICE_PART_BYTES


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _chunks(
    lags: tuple[tuple[tuple[int, int], ...], ...], most: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Whole lags with at most so many pairs of taps, or one: the taps (2, pairs) and how they are summed (lags, pairs).

    Pairs of the first lag, none, whose sum is symmetric, count half: its mirror image is added to each sum.
    """
    chunks: list[list[tuple[tuple[int, int], ...]]] = []
    for pairs in lags:
        if not chunks or sum(map(len, chunks[-1])) + len(pairs) > most:
            chunks.append([])
        chunks[-1].append(pairs)
    found = []
    for chunk in chunks:
        members = torch.tensor([pair for pairs in chunk for pair in pairs]).T
        lag = torch.tensor([place for place, pairs in enumerate(chunk) for _ in pairs])
        weights = (torch.arange(len(chunk))[:, None] == lag).to(dtype)
        if chunk[0] is lags[0]:
            weights[0] /= 2
        found.append((members.to(device), weights.to(device)))
    return tuple(found)


TABLES.append(_chunks)
