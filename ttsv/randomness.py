"""Random numbers that follow from a trial's seed alone."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def derived_seed(seed: int, *purpose: str | int) -> int:
    """A seed (64 bits) for one purpose: independent streams from one trial's seed."""
    return int.from_bytes(hashlib.sha256(repr((seed, *purpose)).encode()).digest()[:8], "little", signed=True)


def derived_generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator on the CPU for one purpose: what it draws is the same on any device."""
    return torch.Generator().manual_seed(derived_seed(seed, *purpose))


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of `count` images in an epoch: it follows from trial seed and epoch, on any device."""
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
