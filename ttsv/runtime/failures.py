"""What torch raises as a `TrialError`: for lack of memory, over a GPU that failed, over a weight that is not finite."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ttsv.errors import (
    BrokenContextError,
    ConfigError,
    DivergedError,
    LibraryMemoryError,
    LostDeviceError,
    MachineMemoryError,
    OutOfMemoryError,
    TrialError,
)
from ttsv.runtime.devices import free_memory, memory_share

SINGLE_VALUE = "Expected more than 1 value per channel when training"
"""What torch's batch norm says of an image alone of which it sees one pixel."""


@contextmanager
def known_failures(model: nn.Module | None = None) -> Iterator[None]:
    """Turns what torch raises for lack of memory, for a GPU that failed, or over a weight that is not finite.

    It becomes the `TrialError` that says what to do about it; other errors stay as they are.
    """
    try:
        yield
    except TrialError:
        raise
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the trial does not fit the device: {error}") from error
    except MemoryError as error:
        raise MachineMemoryError(f"the trial does not fit the machine's memory: {error}") from error
    except (RuntimeError, ValueError) as error:
        if _NO_MACHINE_MEMORY.search(str(error)):
            raise MachineMemoryError(f"the trial does not fit the machine's memory: {error}") from error
        if (failure := _device_failure(error)) is not None:
            raise failure from error
        if SINGLE_VALUE in str(error):
            fix = "batch norm finds no variance in a single value: choose batches of more images, none left over alone"
            raise ConfigError("training.batch_size", 1, fix) from error
        if "does not have a deterministic implementation" in str(error):
            fix = f"must be false for this network on a GPU: {first_line(error)}"
            raise ConfigError("training.deterministic", True, fix) from error
        if model is not None and not all(p.isfinite().all() for p in model.parameters()):
            raise DivergedError(f"a weight is not finite: {error}") from error
        raise


_NO_MACHINE_MEMORY = re.compile("DefaultCPUAllocator|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED")
_NO_MEMORY = re.compile(
    r"(CUDA (driver )?error|Triton Error \[CUDA\]): out of memory"
    r"|CU\w+_ALLOC(ATION)?_FAILED|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUDA ran out of memory outside PyTorch's allocator"
)
"""Of a library that allocates by itself, for the handles and workspaces that are not torch's."""
_NO_ROOM_FOR_A_WAY = re.compile(
    r"unable to find an engine to execute|Unable to find a valid cuDNN algorithm"
    r"|CUDNN_STATUS_NOT_SUPPORTED|CU\w+_STATUS_NOT_INITIALIZED",
    re.I,
)
"""What cuDNN and cuBLAS say where no workspace could be had, and for other reasons too."""
_OTHER_BUILD = re.compile(r"no kernel image is available|cudaErrorNoKernelImageForDevice")
_LOST = re.compile(
    r"no CUDA-capable device|No CUDA GPUs are available|device not ready|busy or unavailable"
    r"|\bXid\b|GPU (is|has been) lost|fallen off the bus|uncorrectable|NVLink error|unknown error|driver shutting down"
    r"|system not yet initialized",
    re.I,
)
_SERVED = re.compile(
    r"\bMPS (client|server|control daemon)\b"
    r"|hardware resources required to (create MPS client|support device connections)",
    re.I,
)
"""Of a client of NVIDIA's MPS, whose server ended, gave it up, or does not take it (CUDA's errors 805 to 810)."""
_REFUSED = re.compile(r"invalid (argument|configuration|device ordinal)|STATUS_(INVALID_VALUE|BAD_PARAM|NOT_SUPPORTED)")
"""A call that was refused: a bug, after which the context goes on."""
_BROKEN = re.compile(
    r"CUDA (driver )?error:|Triton Error \[CUDA\]:|cuDNN error|CU\w+_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)"
    r"|CUFFT_(EXEC_FAILED|INTERNAL_ERROR|SETUP_FAILED)|device-side assert",
    re.I,
)
_INSIDE_A_LIBRARY = re.compile(r"CU\w+_STATUS_INTERNAL_ERROR|CUFFT_(INTERNAL_ERROR|SETUP_FAILED)")
"""What a library says where it finds no memory for its own needs, and of other failures too."""


def _device_failure(error: Exception) -> TrialError | None:
    """What an error of a GPU is for a trial; None for one that is not a GPU's."""
    line = first_line(error)
    # Below CUDA's own error torch adds advice, and (2.15) what the driver has logged, be it of earlier errors.
    text = line if isinstance(error, torch.AcceleratorError) else str(error)
    if _NO_MEMORY.search(text) or (_NO_ROOM_FOR_A_WAY.search(text) and _nearly_full()):
        return OutOfMemoryError(f"the trial does not fit the device: {line}")
    if _OTHER_BUILD.search(text):
        return ConfigError(
            "device", "cuda", f"is a GPU that this torch was not built for ({line}): install one that is"
        )
    if _SERVED.search(text):
        return BrokenContextError(
            f"the server of NVIDIA's MPS does not serve this process ({line}), as when a kernel of another process on "
            "the card failed: the trial is tried again in another process; see the daemon's log if it stays so"
        )
    if _LOST.search(text):
        return LostDeviceError(
            f"the GPU is lost ({line}): look at `nvidia-smi` and for `Xid` in `dmesg`; reset or drain the card"
        )
    if _REFUSED.search(text):
        return None
    if _INSIDE_A_LIBRARY.search(text) and _nearly_full():  # nobody can say of a context that is broken how full it is
        return LibraryMemoryError(f"the trial does not fit the device: {line}")
    if isinstance(error, torch.AcceleratorError) or _BROKEN.search(text):
        return BrokenContextError(
            f"a kernel failed, and with it this process's part of the GPU ({line}): the trial is tried again in another"
            " process; if it fails there as well, run it with CUDA_LAUNCH_BLOCKING=1 to see which one"
        )
    return None


NEVER = re.compile(r"not compiled with CUDA|driver on your system is too old")
"""What torch says of a GPU that it cannot use until another torch, or another driver, is installed."""


def why_no_card() -> str | None:
    """Why this process cannot use the GPU that it was given, in CUDA's words; None where it can."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says, at most 500 characters of it."""
    return str(error).strip().partition("\n")[0][:500]


def _nearly_full() -> bool:
    """Whether less than a sixteenth of this process's share of the current GPU is left; False where it cannot say."""
    device = torch.device("cuda")
    try:
        return free_memory(device) < memory_share(device) / 16
    except (RuntimeError, AssertionError):
        return False
