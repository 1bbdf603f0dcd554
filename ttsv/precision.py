"""float32 products as float32 has them, whatever a program has allowed for its training."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


@contextmanager
def full_precision() -> Iterator[None]:
    """No TensorFloat-32 and no bfloat16 inside matrix products of float32, on CUDA and the CPU; a decorator as well.

    TensorFloat-32 keeps 10 bits: singular values would be off by 1e-3. The settings are the process's and are restored.
    """
    settings = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """The own types of tensors, for what must not be rounded where a network is trained in mixed precision."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # such as on the meta device


def at_least_single(weight: Tensor) -> Tensor:
    """The same numbers in float32 where they are in half precision (float16, bfloat16), which has no factorizations."""
    return weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
