"""Optimizers and the schedules of their learning rates."""

import inspect
import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ttsv.config.training import TrainingConfig
from ttsv.errors import ConfigError

_WARM_SHARE, _START, _END = 0.3, 25.0, 1e4
_GRADIENT_BYTES = 8 << 20

Moments: TypeAlias = Mapping[str, Mapping[str, Tensor | float]]
"""Place of a parameter -> what an optimizer has gathered about it, by torch's names."""


class _Uncompiled(Optimizer):
    """Optimizers without torch's wrappers for `torch.compile`, which nothing here is given to.

    The first call of any of them would import the compiler: 2 s of each process that trains.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class _SGD(_Uncompiled, SGD):
    step = torch.no_grad()(inspect.unwrap(SGD.step))


class _Adam(_Uncompiled, Adam):
    step = torch.no_grad()(inspect.unwrap(Adam.step))


class _AdamW(_Uncompiled, AdamW):
    step = torch.no_grad()(inspect.unwrap(AdamW.step))


def make_optimizer(model: nn.Module, training: TrainingConfig) -> Optimizer:
    """The optimizer of a training configuration over all of the model's parameters, fused.

    On a GPU its steps may be part of a CUDA graph: its rate is a number there, in float32, that each replay reads.
    """
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    lr = torch.full((), training.lr, device=device) if on_gpu else training.lr
    if training.optimizer == "sgd":
        sgd = _SGD(
            model.parameters(),
            lr=lr,
            momentum=training.momentum,
            nesterov=training.nesterov and training.momentum > 0,
            weight_decay=training.weight_decay,
            fused=True,
        )
        if training.momentum:
            # torch leaves it uninitialised where the first step of a fused SGD is skipped, as in float16 it may be.
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    kind = _AdamW if training.optimizer == "adamw" else _Adam
    return kind(
        model.parameters(),
        lr=lr,
        eps=training.eps,
        amsgrad=training.amsgrad,
        weight_decay=training.weight_decay,
        fused=True,
        capturable=on_gpu,
    )


def learning_rate(training: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """The rate of optimizer step `step`, counted from 0 over the whole training.

    `constant`: lr. `cosine`: lr (1 + cos(pi step / steps)) / 2, Loshchilov and Hutter, SGDR (2017), without
    restarts. `multistep`: lr gamma^m after m milestones, in epochs. `onecycle`: from lr / 25 up to lr over the first
    30 % of the steps, then down to lr / 250,000, both along half a cosine (Smith and Topin, Super-convergence (2019),
    as in torch's OneCycleLR).
    """
    steps = training.epochs * steps_per_epoch
    match training.schedule:
        case "cosine":
            return _half_cosine(training.lr, 0.0, step / steps)
        case "multistep":
            passed = sum(step >= milestone * steps_per_epoch for milestone in training.milestones)
            return training.lr * training.gamma**passed
        case "onecycle":
            start, peak = training.lr / _START, _WARM_SHARE * steps - 1
            if step <= peak:
                return _half_cosine(start, training.lr, step / peak)
            return _half_cosine(training.lr, start / _END, (step - peak) / (steps - 1 - peak))
    return training.lr


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the rate of all parameters, where it lies."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def backward_and_step(loss: Tensor, optimizer: Optimizer) -> None:
    """The backward pass of `loss` and a step; there must be no gradients before, and are none afterwards.

    Parameters are stepped, and their gradients freed, within the pass, as soon as those are whole and come to
    8 MiB: they hardly ever lie in memory beside the activations. The numbers are those of one step after the pass.

    Raises `ConfigError` where they would not be: some parameter has its gradient more than once, or its values are
    needed by another way than itself, after it was stepped. Parameters have been stepped by then.
    """
    whole: list[Tensor] = []
    stepped: set[Tensor] = set()

    def step() -> None:
        optimizer.step()
        # Fused optimizers write behind autograd's back, which would go on with the new values.
        torch.autograd.graph.increment_version(whole)
        optimizer.zero_grad()
        stepped.update(whole)
        whole.clear()

    def take(parameter: Tensor) -> None:
        if parameter in stepped:
            raise _not_in_parts("has a gradient in two parts, as of reentrant checkpoints")
        whole.append(parameter)
        if sum(parameter.nbytes for parameter in whole) > _GRADIENT_BYTES:
            step()

    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in trained]
    try:
        torch.autograd.backward(loss)
    except RuntimeError as error:
        if stepped and "modified by an inplace operation" in str(error):
            raise _not_in_parts("is used beside itself, as by `detach` or `data`") from error
        raise
    finally:
        for hook in hooks:
            hook.remove()
    step()


def _not_in_parts(why: str) -> ConfigError:
    fix = "must use each weight through itself alone, once backward; or set training.clip_gradient, if only to 1e30"
    return ConfigError("model", f"a weight that {why}", fix)


def moments(optimizer: Optimizer) -> Moments:
    """What the optimizer has gathered about each parameter: all of its state that no configuration gives."""
    return {str(index): values for index, values in optimizer.state_dict()["state"].items()}


def restore_moments(optimizer: Optimizer, saved: Moments) -> None:
    """Takes up saved `moments`, in the memory layout of the parameters, which fused optimizers rely on."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for index, values in saved.items():
        like = parameters[int(index)]
        state[int(index)] = {
            name: torch.empty_like(like).copy_(value)
            if isinstance(value, Tensor) and value.shape == like.shape
            else value
            for name, value in values.items()
        }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
