"""What a network costs."""

import math

from torch import nn

from ttsv.layers import TTConv, spectral_layers


def parameters(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def compression(model: nn.Module) -> float:
    """Convolution weights of the same network uncompressed over those of this one; 1 where nothing is decomposed.

    Biases, linear layers and normalisation are left out, as in the paper's columns. Raises ValueError for a model
    without a convolution.
    """
    original = own = 0
    for layer in spectral_layers(model).values():
        if isinstance(layer, TTConv):
            original += layer.in_channels * layer.out_channels * math.prod(layer.kernel_size)
            own += layer.k1.numel() + layer.core.numel() + layer.k3.numel()
        else:
            assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            original += layer.weight.numel()
            own += layer.weight.numel()
    if own == 0:
        raise ValueError("the model has no convolution")
    return original / own
