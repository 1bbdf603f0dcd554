"""The network that metrics with guarantees are about: a model's own weights in arithmetic of float64."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


@torch.no_grad()
def in_float64(model: nn.Module) -> nn.Module:
    """A copy of the model in evaluation mode and float64; the given one stays as it is.

    Weights that are made by a parametrization are taken as the model's own precision makes them.
    """
    # What a hook of torch.nn.utils.weight_norm makes has a history, which cannot be copied; the copy's makes its own.
    made_by_hooks = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    copied = copy.deepcopy(model, made_by_hooks).eval()
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
