"""What a training process asks of the system's allocator. Torch-free."""

import ctypes
import mmap
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_WHOLE, _ALL = 1 << 30, 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees for its next tensors; False where the allocator is not glibc's.

    By default glibc gives the activations of every training step back to the system, or not, by where they happen to
    lie on its heap, and takes them anew page by page: up to a third of a step of WRN-16-10 on a CPU. Both thresholds
    are set, as one alone ends the adaptation of the other. The heap's next GiB is asked for in large pages, which
    saves looking up where the small ones lie: some 2 % of a step.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None or not (mallopt(_MMAP_THRESHOLD, _WHOLE) and mallopt(_TRIM_THRESHOLD, _ALL)):
        return False
    _prefer_large_pages()
    return True


def _prefer_large_pages() -> None:
    """For what the heap takes next: it grows by untouched memory, which it keeps when that is freed at once."""
    malloc, free, madvise = map(_of_glibc, ("malloc", "free", "madvise"))
    if malloc is None or free is None or madvise is None:
        return
    malloc.restype, free.restype = ctypes.c_void_p, None
    size = _WHOLE - mmap.PAGESIZE
    address = malloc(ctypes.c_size_t(size))
    if address is None:  # a limit on addresses: it goes without
        return
    free(ctypes.c_void_p(address))
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - 2 * mmap.PAGESIZE), mmap.MADV_HUGEPAGE)


def return_freed_memory() -> None:
    """Gives what this process has freed and kept back to the system, where the allocator is glibc's."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_glibc(name: str) -> Any | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
