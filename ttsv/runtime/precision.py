"""The precision numbers are computed in: float32 as float32 has it, and float64 for metrics with guarantees."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_CUDA: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # type: ignore[attr-defined]
_ONEDNN: tuple[Any, ...] = (
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    torch.backends.mkldnn.rnn,  # type: ignore[attr-defined]
)
"""Whatever computes float32 in less: `torch.backends.cudnn.conv` does on a GPU unless it is told not to."""


@contextmanager
def full_precision() -> Iterator[None]:
    """No TensorFloat-32 and no bfloat16 inside products and convolutions of float32, on CUDA and the CPU.

    A decorator as well. TensorFloat-32 keeps 10 bits: singular values would be off by 1e-3. The settings are the
    process's and are restored. An autocast around is off inside.
    """
    with _restored(*_CUDA, *_ONEDNN) as settings, ExitStack() as autocasts:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                autocasts.enter_context(without_autocast(device))
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield


@contextmanager
def training_precision(*, tf32: bool) -> Iterator[None]:
    """Lets a GPU compute products and convolutions of float32 in TensorFloat-32, if `tf32`; else changes nothing.

    Inside `full_precision`, which stays what it is: entered again inside, it holds. The settings are restored.
    """
    if not tf32:
        yield
        return
    with _restored(*_CUDA) as settings, _tf32_in_the_older_setting():
        for setting in settings:
            setting.fp32_precision = "tf32"
        yield


@contextmanager
def _tf32_in_the_older_setting() -> Iterator[None]:
    """Tells torch's older setting of products too: where the two differ, `torch.compile` refuses to go on.

    Afterwards it is as before, or left where it could not be read, as it differed then.
    """
    products = torch.backends.cuda.matmul
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions call the older one deprecated
        try:
            before = products.allow_tf32
        except RuntimeError:
            before = None
        products.allow_tf32 = True
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if before is not None:
                products.allow_tf32 = before


@contextmanager
def _restored(*settings: Any) -> Iterator[tuple[Any, ...]]:
    """Gives the settings back as they were."""
    before = [setting.fp32_precision for setting in settings]
    try:
        yield settings
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Switches autocast off inside, for what must not be rounded where a network is trained in mixed precision."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # such as on the meta device


def at_least_single(weight: Tensor) -> Tensor:
    """Returns float16 and bfloat16 as float32, as they have no factorizations, and other tensors as they are."""
    return weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight


@torch.no_grad()
@full_precision()
def in_float64(model: nn.Module) -> nn.Module:
    """Returns a copy of the model in evaluation mode and float64; the given one stays as it is.

    Weights that are made by a parametrization are taken as the model's own precision makes them, TensorFloat-32 apart.
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
    """Returns the dtype of the pixels that a model takes: its first float weight's or buffer's, float32 without one."""
    floats = (tensor for tensor in model.state_dict().values() if tensor.is_floating_point())
    return next(floats, torch.zeros(0, dtype=torch.float32)).dtype
