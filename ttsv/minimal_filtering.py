"""Few products for neighbouring results of a convolution along one axis, by the algorithm of Toom and Cook."""

from typing import NamedTuple

import torch
from torch import Tensor

from ttsv.winograd_tiles import OUT, TAPS

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
