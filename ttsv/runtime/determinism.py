"""The same numbers from the same seed: seeds and generators for each purpose, and algorithms that give equal bits."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from ttsv.errors import ConfigError


def derived_seed(seed: int, *purpose: str | int) -> int:
    """Returns a seed (64 bits) for one purpose: independent streams from one trial's seed."""
    return int.from_bytes(hashlib.sha256(repr((seed, *purpose)).encode()).digest()[:8], "little", signed=True)


def derived_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Returns a generator on the CPU for one purpose: what it draws is the same on any device."""
    return torch.Generator().manual_seed(derived_seed(seed, *purpose))


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """Returns the order of `count` images in an epoch: it follows from trial seed and epoch, on any device."""
    return torch.randperm(count, generator=derived_generator(seed, "order", epoch))


@contextmanager
def random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's random numbers follow from the seed; afterwards they go on as if nothing had been."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def deterministic_algorithms(wanted: bool = True) -> Iterator[None]:
    """Has torch and cuDNN compute the same bits each time, if `wanted`; else changes nothing. Settings are restored.

    What has no such algorithm raises a `RuntimeError` inside. For CUDA see `require_determinism`, too.
    """
    if not wanted:
        yield
        return
    cudnn, filling = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    chosen = cudnn.deterministic, cudnn.benchmark, filling.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        # Fresh memory need not be filled: nothing here reads what it has not written.
        cudnn.deterministic, cudnn.benchmark, filling.fill_uninitialized_memory = True, False, False
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark, filling.fill_uninitialized_memory = chosen


CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable of the environment that cuBLAS reads once, when it is first used."""
DETERMINISTIC_WORKSPACE = ":4096:8"
"""Its value under which cuBLAS gives the same bits each time; as much memory as it takes by itself on newer GPUs."""


def require_determinism(device: torch.device) -> None:
    """Has cuBLAS give the same bits each time, where the device is a GPU; to be called before that is used.

    Raises `ConfigError` where it is too late.
    """
    if device.type != "cuda" or os.environ.get(CUBLAS_WORKSPACE) in (DETERMINISTIC_WORKSPACE, ":16:8"):
        return
    if CUBLAS_WORKSPACE in os.environ or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        fix = f"needs {CUBLAS_WORKSPACE}={DETERMINISTIC_WORKSPACE} in the environment, before the GPU is first used"
        raise ConfigError("training.deterministic", True, fix)
    os.environ[CUBLAS_WORKSPACE] = DETERMINISTIC_WORKSPACE
