"""The activation of Lipschitz networks."""

import torch
from torch import Tensor, nn


class MinMax(nn.Module):
    """Minimum and maximum of each channel of the first half with its counterpart of the second: 1-Lipschitz.

    Takes and gives (batch, channels, ...), channels even: all minima, then all maxima (the order of the authors of
    SOC; Anil et al., ICML 2019, sort neighbours). Preserves the norm, and the gradient's.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Of the same shape. Raises ValueError for an odd number of channels."""
        if features.shape[1] % 2:
            raise ValueError(f"MinMax pairs the halves of the channels; {features.shape[1]} is odd")
        first, second = features.chunk(2, dim=1)
        return torch.cat([torch.minimum(first, second), torch.maximum(first, second)], dim=1)
