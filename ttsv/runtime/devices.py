"""The device of a trial, what cuDNN tries on it, and the memory that its process may take and keeps."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ttsv.errors import ConfigError


def find_device(name: str) -> torch.device:
    """Returns the device of a name: auto (a GPU if there is one), cpu, cuda or cuda:N. Raises `ConfigError`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", name, "must be auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", name, f"is not here: there are cpu and {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def memory_share(device: torch.device) -> float:
    """Returns the bytes of a GPU's memory that this process may take in all. Raises as `torch.cuda` without a GPU."""
    _, total = torch.cuda.mem_get_info(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(number)  # from torch 2.10 on
    return float(share * total)


def free_memory(device: torch.device) -> float:
    """Returns the bytes of a GPU's memory that this process may still take. Raises as `torch.cuda` without a GPU."""
    free, _ = torch.cuda.mem_get_info(device)
    return min(free, memory_share(device) - torch.cuda.memory_reserved(device))


@contextmanager
def measured_convolutions(device: torch.device) -> Iterator[None]:
    """Inside, cuDNN tries its algorithms for each new shape on a GPU and keeps the fastest; another may win next time.

    What asks for deterministic algorithms inside switches it off again.
    """
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = before or device.type == "cuda"
        yield
    finally:
        torch.backends.cudnn.benchmark = before


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_WHOLE, _ALL = 1 << 30, 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees for its next tensors; False where the allocator is not glibc's.

    By default glibc gives the activations of every training step back to the system, or not, by where they happen to
    lie on its heap, and takes them anew page by page: up to a third of a step of WRN-16-10 on a CPU. Both thresholds
    are set, as one alone ends the adaptation of the other.
    """
    mallopt = _of_glibc("mallopt")
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _WHOLE) and mallopt(_TRIM_THRESHOLD, _ALL))


def return_freed_memory() -> None:
    """Gives what this process has freed and kept back to the system, where the allocator is glibc's."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
