"""The network that metrics with guarantees are about: a model's own weights in arithmetic of float64."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize


@torch.no_grad()
def in_float64(model: nn.Module) -> nn.Module:
    """A copy of the model in evaluation mode and float64; the given one stays as it is.

    Weights that are made by a parametrization are taken as the model's own precision makes them.
    """
    copied = copy.deepcopy(model).eval()
    for module in list(copied.modules()):
        if parametrize.is_parametrized(module):
            made = {name: getattr(module, name) for name in module.parametrizations}  # type: ignore[union-attr] # a dict
            # Not by remove_parametrizations(): that takes the attribute from the class, which the given model shares.
            del module.parametrizations
            module.__class__ = parametrize.type_before_parametrizations(module)
            for name, value in made.items():
                module.register_parameter(name, nn.Parameter(value))
    return copied.double()


def own_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the pixels that a model takes: that of its first weight or buffer of floats, float32 without one."""
    floats = (tensor for tensor in model.state_dict().values() if tensor.is_floating_point())
    return next(floats, torch.zeros(0, dtype=torch.float32)).dtype
