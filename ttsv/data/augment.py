"""Augmentation of a batch on its device: flip, pad and crop, drawn per image.

What is random is drawn beforehand on the CPU, for a whole epoch at once, so that every device sees the same.
Applying the draws is one gather: no loop over the images, and nothing that waits for a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ttsv.checks import check_choice, check_count


@dataclass(frozen=True)
class Draws:
    """What is random about `count` images; `draws[slice]` are those of some of them.

    `flips` (count,), bool: whether the image is flipped. `corners` (count, d), int64, each 0 to twice the pad: where
    the crop begins in the padded image, along each of the d spatial axes (for d = 2: top, left).
    """

    flips: Tensor
    corners: Tensor

    def to(self, device: torch.device) -> "Draws":
        """The same on a device."""
        return Draws(self.flips.to(device), self.corners.to(device))

    def __getitem__(self, chosen: slice) -> "Draws":
        return Draws(self.flips[chosen], self.corners[chosen])


@dataclass(frozen=True)
class Augmentation:
    """Flips each image left to right (along its last axis) with probability 1/2, pads it, crops it at random.

    `pad` pixels are added on every side before a crop back to the size. `padding` says what they are: `zeros`, or
    `symmetric`, the image mirrored at its edge with the edge pixel repeated (and again, where `pad` exceeds the size).
    Zeros are black **pixels**: the normalisation is part of the model, so that it sees -mean / std there, as in the
    paper's programs, which pad before they normalise (zeros, 4, for VGG and LipConvNet; symmetric, 4, for WRN).

    Raises `ConfigError` for a negative pad or another padding.
    """

    flip: bool = False
    pad: int = 0
    padding: str = "zeros"

    def __post_init__(self) -> None:
        check_count("augmentation.pad", self.pad, least=0)
        check_choice("augmentation.padding", self.padding, ("zeros", "symmetric"))

    def draw(self, count: int, size: Sequence[int], generator: torch.Generator) -> Draws:
        """Draws for `count` images of spatial size `size`, from a generator on the CPU."""
        flips = torch.rand(count, generator=generator) < 0.5
        corners = torch.randint(0, 2 * self.pad + 1, (count, len(size)), generator=generator)
        return Draws(flips & self.flip, corners)

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """The augmented images, of the shape and type of `images` (count, channels, size...), uint8 or floats.

        The draws lie on the images' device. Without a flip and a pad, `images` itself is given back.
        """
        if not (self.flip or self.pad):
            return images
        size, device = images.shape[2:], images.device
        padded = [n + 2 * self.pad for n in size]
        zeros = self.pad > 0 and self.padding == "zeros"
        source = functional.pad(images, [self.pad] * (2 * len(size))) if zeros else images
        # Position of every pixel's source in the flattened source image, summed up axis by axis.
        flat = torch.zeros((len(images), *[1] * len(size)), dtype=torch.int64, device=device)
        for axis, n in enumerate(size):
            position = draws.corners[:, axis, None] + torch.arange(n, device=device)
            if axis == len(size) - 1:
                position = torch.where(draws.flips[:, None], padded[axis] - 1 - position, position)
            if not zeros:
                position = _mirrored(position - self.pad, n)
            position = position * math.prod(source.shape[axis + 3 :])
            flat = flat + position.reshape(-1, *[n if other == axis else 1 for other in range(len(size))])
        index = flat.flatten(1)[:, None].expand(-1, images.shape[1], -1)
        return source.flatten(2).gather(2, index).view(images.shape)


def _mirrored(position: Tensor, size: int) -> Tensor:
    """Where in an axis of `size` pixels a position left or right of it lies, mirrored at its edges."""
    folded = position.remainder(2 * size)
    return torch.minimum(folded, 2 * size - 1 - folded)
