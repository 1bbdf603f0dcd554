"""Alternating timings, peak memory of a fresh process, a float64 reference and what a record says of its machine."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def alternate(sides: Sequence[Callable[[], object] | None], repeats: int) -> list[list[float] | None]:
    """Wall-clock seconds of each side, by turns; warm up before."""
    seconds: list[list[float] | None] = [None if side is None else [] for side in sides]
    for _ in range(repeats):
        for side, taken in zip(sides, seconds, strict=True):
            if side is not None and taken is not None:
                start = time.perf_counter()
                side()
                taken.append(time.perf_counter() - start)
    return seconds


def median(seconds: list[float] | None) -> float | None:
    return None if seconds is None else statistics.median(seconds)


def ratio(theirs: float | None, ours: float) -> float | None:
    return None if theirs is None else theirs / ours


def polyphase(kernel: Tensor, size: int, stride: int) -> Tensor:
    """Half the symbol (n/s, n/(2s) + 1, c_out, s^2 c_in) by FFT in the kernel's dtype, independent of the library's."""
    c_out, c_in, k, _ = kernel.shape
    image = kernel.new_zeros(c_out, c_in, size, size)
    image[..., :k, :k] = kernel
    grid = size // stride
    components = image.reshape(c_out, c_in, grid, stride, grid, stride).permute(0, 3, 5, 1, 2, 4)
    blocks: Tensor = torch.fft.rfft2(components.reshape(c_out, -1, grid, grid)).permute(2, 3, 0, 1)
    return blocks


def reference_clip(kernel: Tensor, delta: float, size: int, stride: int) -> Tensor:
    """One clip in float64 by singular value decompositions, truncated to the kernel's taps."""
    c_out, c_in, k, _ = kernel.shape
    grid = size // stride
    blocks = polyphase(kernel.double(), size, stride)
    changes = torch.empty_like(blocks)
    for row in range(len(blocks)):
        left, values, right = torch.linalg.svd(blocks[row], full_matrices=False)
        changes[row] = (left * (values - delta).clamp_min(0).unsqueeze(-2)) @ right
    taps = torch.fft.irfft2(changes.permute(2, 3, 0, 1), s=(grid, grid))
    image = taps.reshape(c_out, stride, stride, c_in, grid, grid).permute(0, 3, 4, 1, 5, 2)
    clipped: Tensor = kernel.double() - image.reshape(c_out, c_in, size, size)[..., :k, :k]
    return clipped


def reference_values(kernel: Tensor, size: int, stride: int) -> Tensor:
    """Singular values at half of the frequencies in float64, in one row."""
    values: Tensor = torch.linalg.svdvals(polyphase(kernel.double(), size, stride))
    return values.flatten()


def peak_mebibytes() -> float:
    """The highest resident size of this process so far; Linux only."""
    return _status("VmHWM")


def resident_mebibytes() -> float:
    return _status("VmRSS")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def in_fresh_process(script: str, arguments: Sequence[str]) -> Any:
    """The JSON that a benchmark prints when run on its own with these arguments, on one thread."""
    command = [sys.executable, script, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)


def circumstances(command: str) -> dict[str, Any]:
    """Date, machine, load, versions, threads and the command of a record."""
    return {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {_processor()}, {os.cpu_count()} processors",
        "load": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
