"""A trial's process and its machine: device, random numbers, memory, what torch raises, where it ran."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from ttsv.errors import (
    BrokenContextError,
    ConfigError,
    DivergedError,
    LostDeviceError,
    OutOfMemoryError,
    TrialError,
)

REVISION = "TTSV_REVISION"
"""The variable of the environment by which an image, which has no checkout, says of which revision its code is."""


class RevisionFields(TypedDict):
    """The code's git revision, and whether tracked files differ from it.

    Without a checkout that tracks the code the revision is what the image says of itself, and None where none does;
    whether files differ nobody knows then: None.
    """

    git_revision: str | None
    git_dirty: bool | None


class EnvironmentFields(RevisionFields):
    """Versions, device, threads and the code's git revision, JSON-ready."""

    python: str
    torch: str
    numpy: str
    platform: str
    device: str
    device_name: str
    threads: int


def describe_environment(device: torch.device) -> EnvironmentFields:
    """Returns versions, device, threads and the code's git revision."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # whoever unpickles torch's own class imports torch for it
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        **_git(Path(__file__).parent),
    }


_IS_REVISION = re.compile(r"[0-9a-f]{7,64}")
"""An image that was built without being told says `unknown`."""


@functools.cache
def _git(folder: Path) -> RevisionFields:
    """Revision of the checkout that tracks the folder, and whether tracked files differ from it; else the image's."""

    def git(*arguments: str) -> str:
        run = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not merely installed below some checkout
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"git_revision": git("rev-parse", "HEAD"), "git_dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        told = os.environ.get(REVISION, "")
        return {"git_revision": told if _IS_REVISION.fullmatch(told) else None, "git_dirty": None}


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
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(f"the trial does not fit the device: {error}") from error
    except (RuntimeError, ValueError) as error:
        if "DefaultCPUAllocator" in str(error):
            raise OutOfMemoryError(f"the trial does not fit the machine's memory: {error}") from error
        if (failure := _device_failure(error)) is not None:
            raise failure from error
        if SINGLE_VALUE in str(error):
            fix = "batch norm finds no variance in a single value: choose batches of more images, none left over alone"
            raise ConfigError("training.batch_size", 1, fix) from error
        if "does not have a deterministic implementation" in str(error):
            fix = f"must be false for this network on a GPU: {_first_line(error)}"
            raise ConfigError("training.deterministic", True, fix) from error
        if model is not None and not all(p.isfinite().all() for p in model.parameters()):
            raise DivergedError(f"a weight is not finite: {error}") from error
        raise


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


_NO_MEMORY = re.compile(
    r"CUDA (driver )?error: out of memory|CU\w+_ALLOC(ATION)?_FAILED|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
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
    r"CUDA (driver )?error:|cuDNN error|CU\w+_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)|device-side assert", re.I
)


def _device_failure(error: Exception) -> TrialError | None:
    """What an error of a GPU is for a trial; None for one that is not a GPU's."""
    text, line = str(error), _first_line(error)
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
    if isinstance(error, torch.AcceleratorError) or _BROKEN.search(text):
        return BrokenContextError(
            f"a kernel failed, and with it this process's part of the GPU ({line}): the trial is tried again in another"
            " process; if it fails there as well, run it with CUDA_LAUNCH_BLOCKING=1 to see which one"
        )
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:500]


def _nearly_full() -> bool:
    """Whether the current GPU has less than a sixteenth of its memory free; False where it cannot say."""
    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):
        return False
    return free < total / 16


def why_no_card() -> str | None:
    """Why this process cannot use the GPU that it was given, in CUDA's words; None where it can."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _first_line(error)
    return None


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
