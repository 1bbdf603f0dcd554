import re

import pytest
import torch

from ttsv.errors import (
    BrokenContextError,
    ConfigError,
    DeviceError,
    LibraryMemoryError,
    LostDeviceError,
    MachineMemoryError,
    OutOfMemoryError,
    TrialError,
)
from ttsv.runtime.failures import known_failures

ACCELERATOR = getattr(torch, "AcceleratorError", RuntimeError)
ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfMemoryError, "does not fit"),
        (ACCELERATOR(f"CUDA error: out of memory{ADVICE}"), OutOfMemoryError, "CUDA error: out of memory"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            OutOfMemoryError,
            "CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), OutOfMemoryError, "does not fit the device"),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"), OutOfMemoryError, "does not fit the device"),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), OutOfMemoryError, "does not fit the device"),
        *(
            (RuntimeError(says), OutOfMemoryError, "does not fit the device")
            for says in (
                "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
                "CUDA driver error: out of memory",
                "Triton Error [CUDA]: out of memory",
                "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes",
            )
        ),
        *(
            (error, MachineMemoryError, "does not fit the machine's memory")
            for error in (
                MemoryError("Unable to allocate 2 GiB"),
                RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
                ),
                RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
            )
        ),
        (ACCELERATOR(f"CUDA error: device-side assert triggered{ADVICE}"), BrokenContextError, "CUDA_LAUNCH_BLOCKING"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), BrokenContextError, "another process"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"),
            BrokenContextError,
            "another process",
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), BrokenContextError, "another process"),
        (ACCELERATOR("CUDA error: misaligned address"), BrokenContextError, "misaligned address"),
        (ACCELERATOR(f"CUDA error: unspecified launch failure{ADVICE}"), BrokenContextError, "CUDA_LAUNCH_BLOCKING"),
        (RuntimeError("CUDA driver error: an illegal memory access was encountered"), BrokenContextError, "a kernel"),
        (RuntimeError("CUDA driver error: unspecified launch failure"), BrokenContextError, "a kernel failed"),
        *(
            (RuntimeError(says), BrokenContextError, "a kernel failed")
            for says in (
                "cuFFT error: CUFFT_EXEC_FAILED",
                "cuFFT error: CUFFT_INTERNAL_ERROR",
                "cuFFT error: CUFFT_SETUP_FAILED",
                "Triton Error [CUDA]: an illegal memory access was encountered",
            )
        ),
        (ACCELERATOR("CUDA error: device not ready"), LostDeviceError, "Xid"),
        (ACCELERATOR("CUDA error: no CUDA-capable device is detected"), LostDeviceError, "the GPU is lost"),
        (ACCELERATOR("CUDA error: uncorrectable ECC error encountered"), LostDeviceError, "the GPU is lost"),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), LostDeviceError, "is lost"),
        *(
            (RuntimeError(f"Unexpected error from cudaGetDeviceCount(). Error {code}"), BrokenContextError, code)
            for code in (
                "805: MPS client failed to connect to the MPS control daemon or the MPS server",
                "806: the remote procedural call between the MPS server and the MPS client failed",
                "807: MPS server is not ready to accept new MPS client requests",
                "808: the hardware resources required to create MPS client have been exhausted",
                "809: the hardware resources required to support device connections have been exhausted",
                "810: the MPS client has been terminated by the server",
            )
        ),
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device"),
            ConfigError,
            "built for",
        ),
        (
            RuntimeError("adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set"),
            ConfigError,
            "training.deterministic = True: must be false for this network on a GPU: adaptive_avg_pool2d",
        ),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, Exception) else "",
)
def test_what_a_gpu_says_is_a_class_of_failure(error: Exception, kind: type[TrialError], says: str) -> None:
    with pytest.raises(TrialError) as found, known_failures(torch.nn.Linear(2, 2)):
        raise error
    assert type(found.value) is kind
    assert says in str(found.value)
    assert "asynchronously" not in str(found.value), "torch's advice is for those who have the process at hand"
    assert isinstance(found.value, DeviceError) == (kind in (BrokenContextError, LostDeviceError))


def test_what_the_driver_logged_of_another_error_is_not_this_one() -> None:
    logged = "\n[1127.10:42] CUDA error: out of memory in cuMemAlloc\n[1127.10:43] Xid 31: MPS client, unknown error"
    with pytest.raises(BrokenContextError, match="a kernel failed"), known_failures():
        raise ACCELERATOR(f"CUDA error: device-side assert triggered{ADVICE}{logged}")


@pytest.mark.parametrize(
    "says", ["GET was unable to find an engine to execute this computation", "CUBLAS_STATUS_NOT_INITIALIZED"]
)
@pytest.mark.parametrize(
    ("free", "share", "kept", "kind"),
    [
        (0, 1.0, 0, OutOfMemoryError),
        (1 << 33, 1.0, 0, RuntimeError),
        (14 << 30, 0.125, 1_950 << 20, OutOfMemoryError),
        (14 << 30, 0.125, 1_900 << 20, RuntimeError),
        (100 << 20, 0.125, 0, OutOfMemoryError),
    ],
    ids=["full card", "free card", "share used up", "share not used up", "card filled by others"],
)
def test_what_has_no_workspace_lacks_memory_where_there_is_little(
    monkeypatch: pytest.MonkeyPatch, says: str, free: int, share: float, kept: int, kind: type[Exception]
) -> None:
    """Of a card of 16 GiB, or of a process's share of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 1 << 34))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: share, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: kept)
    with pytest.raises(kind, match=says), known_failures():
        raise RuntimeError(says)


@pytest.mark.parametrize(
    "says",
    [
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm(handle)`",
        "cuFFT error: CUFFT_INTERNAL_ERROR",
        "cuFFT error: CUFFT_SETUP_FAILED",
    ],
)
@pytest.mark.parametrize(
    ("free", "kind"),
    [(100 << 20, LibraryMemoryError), (1 << 33, BrokenContextError), (None, BrokenContextError)],
    ids=["full card", "free card", "broken context"],
)
def test_a_library_that_fails_lacks_memory_where_there_is_little(
    monkeypatch: pytest.MonkeyPatch, says: str, free: int | None, kind: type[TrialError]
) -> None:
    """Of a card of 16 GiB; of a context that is broken nobody can say how much of it is left."""

    def left(*_: object) -> tuple[int, int]:
        if free is None:
            raise ACCELERATOR("CUDA error: an illegal memory access was encountered")
        return free, 1 << 34

    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    with pytest.raises(TrialError, match=r"_INTERNAL_ERROR|_SETUP_FAILED") as found, known_failures():
        raise RuntimeError(says)
    assert type(found.value) is kind


@pytest.mark.parametrize(
    "says",
    [
        "mat1 and mat2 shapes cannot be multiplied",
        "CUDA error: invalid argument",
        "CUBLAS_STATUS_INVALID_VALUE",
        "cuFFT error: CUFFT_INVALID_SIZE",
        "Triton Error [CUDA]: invalid argument",
    ],
)
def test_a_bug_stays_what_it_is(says: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(says)) as found, known_failures():
        raise RuntimeError(says)
    assert type(found.value) is RuntimeError
