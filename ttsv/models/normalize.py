"""The first part of every network: pixels in [0, 1] to normalised coordinates."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """`(x - mean) / std` per channel, for images (batch, channels, n_1, ..., n_dims) with pixels in [0, 1].

    `mean`, `std`: one value for all channels or one per channel; std above 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], dims: int = 2) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(tuple(mean)).reshape(-1, *(1,) * dims))
        self.register_buffer("std", torch.tensor(tuple(std)).reshape(-1, *(1,) * dims))

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised images, of the same shape."""
        return (pixels - self.mean) / self.std
