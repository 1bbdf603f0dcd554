"""Norms of the linear maps of a network, from above, with one scale per channel before and behind them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ttsv.layers import TTConv
from ttsv.spectral.bounds import conv_norm_bounds
from ttsv.spectral.symbol import padding_sides
from ttsv.tt.decomposition import orthogonalize

EPS = torch.finfo(torch.float64).eps

_PADDED = {"reflect", "replicate", "circular"}


class LinearMap(ABC):
    """The linear part of a layer, in float64."""

    @property
    @abstractmethod
    def how(self) -> str:
        """What `norm` is the norm of."""

    @abstractmethod
    def norm(self, before: Tensor | None = None, behind: Tensor | None = None) -> float:
        """An upper bound of the norm, rounding included, of `diag(behind) map diag(before)`.

        `before`, `behind`: one factor per channel of the input and of the output.
        """

    @abstractmethod
    def magnitude(self) -> float:
        """An upper bound of the Frobenius norm of `matrix()`, that of all products that make it."""

    def matrix(self) -> Tensor | None:
        """The matrix (outputs, inputs) if it has one value per channel of the output and is known without work."""
        return None


@dataclass(frozen=True)
class Matrix(LinearMap):
    """A matrix `weight (out, in)` applied to the last axis."""

    weight: Tensor
    how = "norm of the matrix"

    def norm(self, before: Tensor | None = None, behind: Tensor | None = None) -> float:
        """As `LinearMap` has it."""
        return _conv_norm(self.weight[:, :, None], (1,), before, behind)

    def magnitude(self) -> float:
        """As `LinearMap` has it."""
        return _length(self.weight)

    def matrix(self) -> Tensor:
        """The weight."""
        return self.weight


@dataclass(frozen=True)
class Convolution(LinearMap):
    """A convolution with `kernel (c_out, c_in / groups, k_1, ..., k_d)` of an input with `size` pixels.

    `sides`: pixels of padding before and after, per axis; `mode` as `padding_mode` of torch's layers.
    """

    kernel: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    sides: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    mode: str = "zeros"

    @classmethod
    def of_layer(
        cls, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d | TTConv, kernel: Tensor, size: Sequence[int]
    ) -> "Convolution":
        """The convolution that a layer applies, with a kernel in the place of its own."""
        groups = 1 if isinstance(layer, TTConv) else layer.groups
        if isinstance(layer, TTConv):  # which pads as it was made
            sides = layer._sides
        elif layer.padding_mode != "zeros":  # as torch's layers do
            made = layer._reversed_padding_repeated_twice
            sides = tuple(zip(made[::2], made[1::2], strict=True))[::-1]
        else:
            sides = padding_sides(layer.padding, kernel.shape[2:], layer.dilation)
        return cls(kernel, tuple(size), layer.stride, sides, layer.dilation, groups, layer.padding_mode)

    @property
    def output_size(self) -> tuple[int, ...]:
        """Pixels of the output."""
        axes = zip(self.size, self.sides, self.dilation, self.kernel.shape[2:], self.stride, strict=True)
        return tuple((n + sum(sides) - e * (k - 1) - 1) // s + 1 for n, sides, e, k, s in axes)

    @property
    def how(self) -> str:
        """As `LinearMap` has it."""
        return f"norm of the operator on {'x'.join(map(str, self.size))} pixels, padding_mode={self.mode!r}"

    def norm(self, before: Tensor | None = None, behind: Tensor | None = None) -> float:
        """As `LinearMap` has it."""
        bound = partial(_conv_norm, before=before, behind=behind, groups=self.groups)
        strided = partial(bound, stride=self.stride, dilation=self.dilation)
        if math.prod(self.kernel.shape[2:]) == 1 and self.mode == "zeros":
            # The same matrix at every pixel that the stride meets; padding adds outputs that nothing reaches.
            return bound(self.kernel.flatten(2), (1,))
        if self.mode == "circular" and self._periodic():
            return strided(self.kernel, self.size, padding_mode="circular")
        if self.mode in _PADDED:
            # What the padding repeats, then a convolution of the larger image.
            size = tuple(n + sum(sides) for n, sides in zip(self.size, self.sides, strict=True))
            repeated = padding_norm(self.size, self.sides, self.mode)
            return repeated * strided(self.kernel, size, padding=0)
        # The wider of two unequal sides (stride 1) adds rows to the operator, so its norm is no smaller.
        return strided(self.kernel, self.size, padding=tuple(map(max, self.sides)))

    def magnitude(self) -> float:
        """As `LinearMap` has it."""
        return _length(self.kernel)

    def matrix(self) -> Tensor | None:
        """The kernel's unfolding, if the output is a single pixel that meets no padding."""
        if self.groups > 1 or any(map(any, self.sides)) or math.prod(self.output_size) > 1:
            return None
        return self.kernel.flatten(1)

    def _periodic(self) -> bool:
        divided = all(n % s == 0 for n, s in zip(self.size, self.stride, strict=True))
        return divided and self.output_size == tuple(n // s for n, s in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True)
class Adjoint(LinearMap):
    """The adjoint of a convolution padded with zeros: a transposed convolution, whose output is its input.

    Of more outputs than that has inputs (`output_padding` from the stride on), some see what is cut off: its norm, of
    the whole, is no smaller.
    """

    convolution: Convolution

    @property
    def how(self) -> str:
        """As `LinearMap` has it."""
        return f"{self.convolution.how}, transposed"

    def norm(self, before: Tensor | None = None, behind: Tensor | None = None) -> float:
        """As `LinearMap` has it: its input is the convolution's output."""
        return self.convolution.norm(before=behind, behind=before)

    def magnitude(self) -> float:
        """As `LinearMap` has it."""
        return self.convolution.magnitude()


@dataclass(frozen=True)
class TTConvolution(LinearMap):
    """A convolution whose kernel is the core of `core` between frames `k1 (c_in, r1)` and `k3 (r2, c_out)`."""

    k1: Tensor
    core: Convolution
    k3: Tensor

    @property
    def how(self) -> str:
        """As `LinearMap` has it."""
        return f"{self.core.how}, its core with the triangles of its frames"

    def norm(self, before: Tensor | None = None, behind: Tensor | None = None) -> float:
        """As `LinearMap` has it.

        That of the core after QR factorizations of the frames: by Theorem 1 it is the merged kernel's norm, hence
        no larger than the product of the three norms, and its operator is smaller, hence bounded more closely.
        """
        k1 = self.k1 if before is None else self.k1 * before[:, None]
        k3 = self.k3 if behind is None else self.k3 * behind
        core = orthogonalize(k1, self.core.kernel, k3).core
        merged = replace(self.core, kernel=core)
        # Higham, Accuracy and Stability, theorem 19.4, for the factorizations, and the products that follow: what each
        # rounds is a share of the three sizes' product, which is no smaller than the merged kernel's norm.
        steps = 4 * (k1.numel() + k3.numel()) + 4 * sum(core.shape[:2]) + 8
        sizes = _length(k1) * _length(k3) * _taps(self.core.kernel)
        rounded = steps * EPS * sizes * padding_norm(self.core.size, self.core.sides, self.core.mode)
        return rounded_up(merged.norm() + rounded)

    def magnitude(self) -> float:
        """As `LinearMap` has it."""
        return _length(self.k1) * self.core.magnitude() * _length(self.k3)

    def matrix(self) -> Tensor | None:
        """The merged matrix, as for `Convolution`."""
        core = self.core.matrix()
        if core is None or core.shape[1] != self.k1.shape[1]:
            return None
        return self.k3.T @ core @ self.k1.T


def padding_norm(size: Sequence[int], sides: Sequence[tuple[int, int]], mode: str) -> float:
    """The norm of padding: the root of how often the pixel that is repeated most appears, 1 for constants."""
    if mode in ("zeros", "constant"):
        return 1.0
    most = 1
    for n, side in zip(size, sides, strict=True):
        places = functional.pad(torch.arange(n, dtype=torch.float64)[None, None], side, mode)
        most *= int(torch.bincount(places.flatten().long(), minlength=n).max())
    return rounded_up(math.sqrt(most))


def matrix_norm(matrix: Tensor) -> float:
    """An upper bound of the largest singular value of a matrix, rounding included."""
    return Matrix(matrix).norm() if matrix.numel() else 0.0


def rounded_up(value: float) -> float:
    """A little more than a value that a few operations in float64 have rounded."""
    return math.nextafter(value * (1 + 8 * EPS), math.inf) if value else 0.0


def _conv_norm(
    kernel: Tensor, size: tuple[int, ...], before: Tensor | None, behind: Tensor | None, groups: int = 1, **options: Any
) -> float:
    """`conv_norm_bounds` from above, with its options, of a kernel with its channels scaled."""
    scaled = kernel
    if before is not None:
        inputs = before.reshape(groups, 1, -1, *(1,) * len(size))
        scaled = (kernel.reshape(groups, -1, *kernel.shape[1:]) * inputs).reshape(kernel.shape)
    if behind is not None:
        scaled = scaled * behind.reshape(-1, *(1,) * (kernel.ndim - 1))
    upper = conv_norm_bounds(scaled, size, groups=groups, **options).upper
    if scaled is kernel:
        return upper
    # The two products round each entry; a convolution is a sum over taps, so their Frobenius norms bound the error.
    return rounded_up(upper + 2 * EPS * _taps(scaled))


def _length(tensor: Tensor) -> float:
    """The Frobenius norm."""
    length: float = torch.linalg.vector_norm(tensor).item()
    return length


def _taps(kernel: Tensor) -> float:
    """The sum over taps of the Frobenius norms of their matrices: an upper bound of the operator's norm."""
    norms: float = torch.linalg.vector_norm(kernel.flatten(2), dim=(0, 1)).sum().item()
    return norms
