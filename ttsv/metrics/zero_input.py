"""An image by which a network is followed: of the right shape, whatever it shows."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ttsv.errors import ConfigError
from ttsv.layers.spectral import spectral_layers, zero_image
from ttsv.symbol import Size, as_tuple


def zero_input(model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> Tensor:
    """As `ttsv.layers.spectral.zero_image`; without a convolution the first linear layer is taken to see all pixels."""
    linear = next((module for module in model.modules() if isinstance(module, nn.Linear)), None)
    if spectral_layers(model) or (in_channels is None and linear is None):
        return zero_image(model, input_size, in_channels=in_channels)
    size = as_tuple("input_size", input_size, len(input_size) if isinstance(input_size, Sequence) else 2)
    if in_channels is None and linear is not None:
        in_channels, rest = divmod(linear.in_features, math.prod(size))
        if rest or not in_channels:
            fix = f"must divide the {linear.in_features} inputs of the first linear layer, or give in_channels"
            raise ConfigError("input_size", input_size, fix)
    return next(model.parameters(), torch.zeros(0)).new_zeros(1, in_channels or 1, *size)
