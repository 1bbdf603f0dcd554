"""Where a trial ran: recorded beside its result, never compared."""

import functools
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, threads and the code's git revision, JSON-ready."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        **_git(Path(__file__).parent),
    }


@functools.cache
def _git(folder: Path) -> dict[str, Any]:
    """Revision of the checkout that tracks the folder, and whether tracked files differ from it; None without one."""

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
        return {"git_revision": None, "git_dirty": None}
