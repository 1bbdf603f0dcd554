"""What a training process asks of the system's allocator. Torch-free."""

import ctypes
import sys
from collections.abc import Callable

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
