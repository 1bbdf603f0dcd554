"""Where a trial ran and with what: packages, processors, driver, host, and the code as it lay there. JSON-ready."""

import contextlib
import functools
import os
import platform
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch

MOST_DIFF_BYTES = 64 * 2**10
"""Of a dirty tree's difference so much is kept, from its beginning."""
_MOST_UNTRACKED = 100
_GIT_SECONDS = 10.0
_TELLING = ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
"""Variables of the environment that change numbers."""
_HERE = Path(__file__).parent
REVISION = "TTSV_REVISION"
"""The variable of the environment by which an image, which has no checkout, says of which revision its code is."""
_IS_REVISION = re.compile(r"[0-9a-f]{7,64}")
"""An image that was built without being told says `unknown`."""


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


class ChangeFields(TypedDict):
    """How tracked files differ from the revision (the first `MOST_DIFF_BYTES`; is there more?), and those untracked."""

    git_diff: str | None
    git_diff_cut: bool
    git_untracked: list[str]


class ProvenanceFields(EnvironmentFields, ChangeFields):
    """Where a process runs, JSON-ready. `packages` are those installed, with versions; `gpus` those that it sees."""

    host: str
    packages: dict[str, str]
    cpu: str
    cpus: int | None
    gpus: list[str]
    gpu_driver: str | None
    cuda: str | None
    variables: dict[str, str]


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
        **_revision(_HERE),
    }


@functools.cache
def provenance() -> ProvenanceFields:
    """The record of this process: `describe_environment` of the device that it would use, and all around it."""
    seen = torch.cuda.is_available()
    return {
        **describe_environment(torch.device("cuda" if seen else "cpu")),
        "host": socket.gethostname(),
        "packages": _packages(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if seen else [],
        "gpu_driver": _driver(),
        "cuda": torch.version.cuda,
        "variables": {name: os.environ[name] for name in _TELLING if name in os.environ},
        **_changes(_HERE),
    }


def _packages() -> dict[str, str]:
    """Name -> version; of a package that is there twice the one that Python finds.

    The names of folders say both: to read every package's metadata takes most of a second.
    """
    found: dict[str, str] = {}
    for place in dict.fromkeys(sys.path):
        with contextlib.suppress(OSError), os.scandir(place or ".") as entries:
            for entry in entries:
                name, dash, version = entry.name.removesuffix(".dist-info").partition("-")
                if dash and entry.name.endswith(".dist-info"):
                    found.setdefault(name.lower().replace("_", "-"), version)
    return dict(sorted(found.items()))


def _cpu() -> str:
    """The processor's model."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found is not None:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The version of NVIDIA's driver; None without one."""
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found is not None else None
    return None


@functools.cache
def _revision(folder: Path) -> RevisionFields:
    """Revision of the checkout that tracks the folder, and whether tracked files differ from it; else the image's."""
    try:
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)  # not merely installed below some checkout
        changed, _ = _git(folder, "status", "--porcelain", "--untracked-files=no")
        return {"git_revision": _git(folder, "rev-parse", "HEAD")[0].strip(), "git_dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        told = os.environ.get(REVISION, "")
        return {"git_revision": told if _IS_REVISION.fullmatch(told) else None, "git_dirty": None}


def _changes(folder: Path) -> ChangeFields:
    """How the checkout that tracks a folder differs from its revision; nothing where none tracks it, or it does not."""
    empty: ChangeFields = {"git_diff": None, "git_diff_cut": False, "git_untracked": []}
    try:
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        diff, cut = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv")
        untracked, _ = _git(folder, "ls-files", "--others", "--exclude-standard", "--full-name", ":/")
    except (OSError, subprocess.SubprocessError):
        return empty
    names = untracked.splitlines()[:_MOST_UNTRACKED]
    return {"git_diff": diff or None, "git_diff_cut": cut, "git_untracked": names}


def _git(folder: Path, *arguments: str) -> tuple[str, bool]:
    """The beginning of what git says, and whether there is more. Raises `subprocess.SubprocessError`, `OSError`."""
    command = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        timer = threading.Timer(_GIT_SECONDS, child.kill)
        timer.start()
        try:
            assert child.stdout is not None, "it is a pipe"
            found = child.stdout.read(MOST_DIFF_BYTES + 1)
            cut = len(found) > MOST_DIFF_BYTES
            if cut:
                child.kill()
            if child.wait() != 0 and not cut:
                raise subprocess.CalledProcessError(child.returncode, command)
        finally:
            timer.cancel()
    return found[:MOST_DIFF_BYTES].decode(errors="replace").replace("\0", "\ufffd"), cut
