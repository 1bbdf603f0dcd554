"""Tiles of Winograd's convolutions: where they lie, in what blocks they are computed, the matrices between them.

The matrices follow from the algorithm of Toom and Cook: few products for neighbouring results along one axis.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ttsv.winograd.transforms import Frame, Tiles

OUT, TAPS = 4, 3  # pixels of a tile and of the kernel, along each axis
_IMAGE_BLOCK = 43_000  # tiles times channels: 6 MiB of transformed images with a stride of 1
_KERNEL_BLOCK = 8 << 20  # bytes of transformed kernels, where they are many


def window(stride: int) -> int:
    """Pixels that a tile of results depends on, along each axis."""
    return stride * (OUT - 1) + TAPS


class Part(NamedTuple):
    """Of a batch: the same rows of tiles of some images, where there are several all rows."""

    images: slice
    rows: slice


class Grid:
    """The tiles that cover the results of a convolution: `rows` times `columns` for each image.

    Each depends on `window` pixels along each axis, as many as there are `places` along each.
    """

    def __init__(self, shape: Sequence[int], padding: tuple[int, ...], stride: int) -> None:
        """`shape` of the images: (batch, channels, height, width)."""
        self.batch, self.padding, self.stride = shape[0], padding, stride
        self.window = window(stride)
        self.places = self.window**2
        self.size = tuple((n + 2 * p - TAPS) // stride + 1 for n, p in zip(shape[2:], padding, strict=True))
        self.rows, self.columns = (-(-n // OUT) for n in self.size)
        self.tiles = self.batch * self.rows * self.columns
        self.whole = Part(slice(0, self.batch), slice(0, self.rows))

    def blocks(self, c_in: int, c_out: int) -> tuple[list[Part], list[slice]]:
        """Of images, and of the results' channels: one of the two lists is one long."""
        few_images = self.tiles * max(c_in, c_out) <= 2 * _IMAGE_BLOCK
        if few_images and 4 * self.places * c_in * c_out > 2 * _KERNEL_BLOCK:
            return [self.whole], _slices(0, c_out, _KERNEL_BLOCK // (4 * self.places * c_in))
        return self.split(self.whole, _IMAGE_BLOCK // max(1, c_in, c_out)), [slice(0, c_out)]

    def split(self, part: Part, tiles: int) -> list[Part]:
        """Into parts of at most so many tiles, but at least a row, in the order of the tiles."""
        (first, last), (top, bottom) = ((each.start, each.stop) for each in part)
        rows = tiles // max(1, self.columns)
        if bottom - top <= rows:
            return [Part(several, part.rows) for several in _slices(first, last, rows // max(1, bottom - top))]
        return [Part(slice(i, i + 1), some) for i in range(first, last) for some in _slices(top, bottom, rows)]

    def counts(self, part: Part) -> tuple[int, int, int]:
        """Images, rows and columns of tiles of a part."""
        return part.images.stop - part.images.start, part.rows.stop - part.rows.start, self.columns

    def of_images(self, pixels: Tensor, part: Part) -> Tiles:
        """What tiles of results depend on, in (batch, height, width, c_in); they overlap."""
        return _framed(pixels, part, OUT * self.stride, self.padding)

    def of_results(self, pixels: Tensor, part: Part) -> Tiles:
        """In (batch, height, width, channels)."""
        return _framed(pixels, part, OUT, (0, 0))

    def transformed(self, values: Tensor) -> Tiles:
        """In (places, tiles, channels)."""
        place, tile, _ = values.stride()
        image, row = self.rows * self.columns * tile, self.columns * tile
        return Tiles(values, 0, (image, row, tile, self.window * place, place, 1))


def _framed(pixels: Tensor, part: Part, step: int, padding: tuple[int, ...]) -> Tiles:
    values = pixels[part.images]
    image, y, x, _ = values.stride()
    top, left = part.rows.start * step - padding[0], -padding[1]
    frame = Frame((top, left), step, (values.shape[1], values.shape[2]))
    return Tiles(values, top * y + left * x, (image, step * y, step * x, y, x, 1), frame)


def kernel_tiles(taps: Tensor) -> Tiles:
    """In (channels, 3, 3, other channels): images of one tile."""
    channel, y, x, other = taps.stride()
    return Tiles(taps, 0, (channel, 0, 0, y, x, other))


def transformed_kernel_tiles(values: Tensor) -> Tiles:
    """In (places, channels, other channels)."""
    place, channel, _ = values.stride()
    return Tiles(values, 0, (channel, 0, 0, math.isqrt(len(values)) * place, place, 1))


def _slices(start: int, stop: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


_POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)


class Filtering(NamedTuple):
    """For 4 neighbouring results of a convolution along one axis, in float64: `output ((kernel g) * (images d))`."""

    output: Tensor  # (4, places)
    kernel: Tensor  # (places, taps)
    images: Tensor  # (places, places)


def minimal_filtering(stride: int) -> Filtering:
    """Of three taps. With a stride of 2 every other pixel meets the outer taps, and those between the middle one."""
    if stride == 1:
        return _toom_cook(TAPS)
    outer = _toom_cook(2)
    count = len(outer.images)
    one = torch.eye(OUT, dtype=torch.float64)
    kernel, images = (one.new_zeros(count + OUT, columns) for columns in (TAPS, count + OUT))
    kernel[:count, ::2], images[:count, ::2] = outer.kernel, outer.images
    kernel[count:, 1], images[count:, 1::2] = 1, one
    return Filtering(torch.cat([outer.output, one], 1), kernel, images)


def _toom_cook(taps: int) -> Filtering:
    """For neighbouring pixels; the last point is at infinity.

    Row i of `images` has the coefficients of the product of `x - p_j` over the other points, row i of `kernel` the
    powers of p_i over that product's value at p_i.
    """
    count = OUT + taps - 1
    points = torch.tensor(_POINTS[: count - 1], dtype=torch.float64)
    output, kernel, images = (points.new_zeros(shape) for shape in ((OUT, count), (count, taps), (count, count)))
    for i, point in enumerate(points):
        others = torch.cat([points[:i], points[i + 1 :]])
        output[:, i] = point ** torch.arange(OUT)
        kernel[i] = point ** torch.arange(taps) / (point - others).prod()
        images[i, : count - 1] = _coefficients(others)
    output[-1, -1] = kernel[-1, -1] = 1
    images[-1] = _coefficients(points)
    return Filtering(output, kernel, images)


def _coefficients(roots: Tensor) -> Tensor:
    """Of the product of `x - root`, from the constant one up."""
    found, zero = roots.new_ones(1), roots.new_zeros(1)
    for root in roots:
        found = torch.cat([zero, found]) - root * torch.cat([found, zero])
    return found
