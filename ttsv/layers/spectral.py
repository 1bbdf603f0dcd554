"""Which layers of a model have a spectrum that can be controlled, and the size of the input that each sees."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ttsv.errors import ConfigError
from ttsv.layers.tt_conv import TTConv
from ttsv.symbol import Size, as_tuple

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


def spectral_layers(model: nn.Module, *, linear: bool = False) -> dict[str, nn.Module]:
    """Name -> layer of every convolution (`nn.Conv1d/2d/3d`, `TTConv1d/2d/3d`), in the model's order.

    `linear=True` adds `nn.Linear`. A model that is itself such a layer has the name "". A layer that the model
    holds twice is listed once, under its first name.
    """
    kinds = TTConv | Convolution | nn.Linear if linear else TTConv | Convolution
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def periodic_size(input_size: Size, stride: Sequence[int]) -> tuple[int, ...]:
    """The smallest size, per axis, that is no smaller than `input_size` and that the stride divides."""
    sizes = as_tuple("input_size", input_size, len(stride))
    return tuple(-(-n // s) * s for n, s in zip(sizes, stride, strict=True))


def layer_input_sizes(
    model: nn.Module, input_size: Size, *, in_channels: int | None = None, linear: bool = False
) -> dict[str, tuple[int, ...]]:
    """Name -> size in pixels of the input of every spectral layer that a forward pass reaches (linear layers: `()`).

    The pass runs over one zero image `(1, in_channels, *input_size)`, in evaluation mode and without gradients;
    each module's mode is restored and no statistics change. `in_channels` defaults to those of the first
    convolution. A layer that is called several times counts with its largest input. Raises `ConfigError` where
    the model has no convolution to tell its axes from.
    """
    layers = spectral_layers(model, linear=linear)
    first = next((layer for layer in layers.values() if isinstance(layer, TTConv | Convolution)), None)
    if first is None:
        raise ConfigError("model", type(model).__name__, "must have a convolution")
    channels = first.in_channels if in_channels is None else in_channels
    size = as_tuple("input_size", input_size, len(first.kernel_size))
    weight = next(first.parameters())
    seen: dict[str, tuple[int, ...]] = {}

    def recorder(name: str, axes: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found = tuple(inputs[0].shape[inputs[0].ndim - axes :])
            if math.prod(found) >= math.prod(seen.get(name, found)):
                seen[name] = found

        return record

    hooks = [
        layer.register_forward_pre_hook(recorder(name, 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)))
        for name, layer in layers.items()
        if isinstance(layer, TTConv | Convolution | nn.Linear)
    ]
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            model(weight.new_zeros(1, channels, *size))
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return {name: seen[name] for name in layers if name in seen}
