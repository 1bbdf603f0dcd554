"""Where a trial ran and with what: packages, processors, driver, host, and the code as it lay there. JSON-ready."""

import contextlib
import functools
import importlib.machinery
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

from ttsv.runtime.code import code_version

MOST_DIFF_BYTES = 64 * 2**10
"""Of a dirty tree's difference so much is kept, from its beginning."""
_MOST_UNTRACKED = 100
_GIT_SECONDS = 10.0
_TELLING = ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")
"""Variables of the environment that change numbers."""
_ROOT = Path(__file__).parents[2]
"""The folder that has our packages: a checkout's, or where packages are installed."""
_THIS = Path(__file__).relative_to(_ROOT).as_posix()
_PACKAGES = ("ttsv", "service", "workers")
_IMPORTED = tuple(importlib.machinery.all_suffixes())
_PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv")
REVISION = "TTSV_REVISION"
"""The variable of the environment by which an image, which has no checkout, says of which revision its code is."""
_IS_REVISION = re.compile(r"[0-9a-f]{7,64}")
"""An image that was built without being told says `unknown`."""


class RevisionFields(TypedDict):
    """The code's git revision, and whether tracked files differ from it, or it has more files that can be imported.

    Without a checkout that tracks the code the revision is what the image says of itself, and None where none does;
    whether files differ nobody knows then: None.
    """

    git_revision: str | None
    git_dirty: bool | None


class DeviceFields(TypedDict):
    """What computes, JSON-ready: its type, the model of the GPU or of the processor, and how many threads torch has."""

    device: str
    device_name: str
    threads: int


class EnvironmentFields(RevisionFields, DeviceFields):
    """Versions, device, threads and the code's git revision, JSON-ready.

    `ttsv` is what nodes of a cluster compare, the package's version with a digest of its code, also where no git is:
    `0.1.0+3fa9c2d41b77`; None where the code cannot be read.
    """

    ttsv: str | None
    python: str
    torch: str
    numpy: str
    platform: str


class ChangeFields(TypedDict):
    """How the code differs from the revision (the first `MOST_DIFF_BYTES`; is there more?), and what is untracked.

    The difference is that of all tracked files, then what of our packages can be imported and is untracked.
    """

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
    return {
        "ttsv": _code(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # whoever unpickles torch's own class imports torch for it
        "numpy": np.__version__,
        "platform": platform.platform(),
        **describe_device(device),
        **_revision(_ROOT),
    }


def describe_device(device: torch.device) -> DeviceFields:
    """Returns what of this machine computes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    return {"device": device.type, "device_name": name, "threads": torch.get_num_threads()}


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
        **_changes(_ROOT),
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


@functools.cache
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


def _code() -> str | None:
    with contextlib.suppress(OSError):  # of a checkout that changes under us: no result is worth less for that
        return code_version()
    return None


@functools.cache
def _revision(root: Path) -> RevisionFields:
    """Revision of the checkout that tracks the code, and whether the code is another one; else the image's."""
    try:
        _git(root, "ls-files", "--error-unmatch", _THIS)  # not merely installed below some checkout
        changed, _ = _git(root, "status", "--porcelain", "--untracked-files=no")
        dirty = bool(changed or _untracked_code(root))
        return {"git_revision": _git(root, "rev-parse", "HEAD")[0].strip(), "git_dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        told = os.environ.get(REVISION, "")
        return {"git_revision": told if _IS_REVISION.fullmatch(told) else None, "git_dirty": None}


def _changes(root: Path) -> ChangeFields:
    """How the checkout that tracks the code differs from its revision; nothing where none tracks it, or it does not."""
    empty: ChangeFields = {"git_diff": None, "git_diff_cut": False, "git_untracked": []}
    try:
        _git(root, "ls-files", "--error-unmatch", _THIS)
        diff, cut = _git(root, "diff", "HEAD", *_PLAIN)
        untracked, _ = _git(root, "ls-files", "--others", "--exclude-standard", "--full-name", ":/")
        for name in _untracked_code(root):
            if cut or len(diff) > MOST_DIFF_BYTES:
                break
            with contextlib.suppress(subprocess.SubprocessError):  # it went meanwhile
                added, cut = _git(root, "diff", "--no-index", *_PLAIN, "--", os.devnull, name, differs=True)
                diff += added
    except (OSError, subprocess.SubprocessError):
        return empty
    names = untracked.splitlines()[:_MOST_UNTRACKED]
    kept = diff.encode()[:MOST_DIFF_BYTES].decode(errors="ignore")
    return {"git_diff": kept or None, "git_diff_cut": cut or kept != diff, "git_untracked": names}


def _untracked_code(root: Path) -> list[str]:
    """Files of our packages that can be imported and that no revision has, whether ignored or not.

    Names that git would quote are none that `import` knows.
    """
    caches = ":(exclude,glob)**/__pycache__/**"  # of which nothing is imported without its source
    found, _ = _git(root, "-c", "core.quotePath=false", "ls-files", "--others", "--", *_PACKAGES, caches)
    return [name for name in found.splitlines() if name.endswith(_IMPORTED)]


def _git(root: Path, *arguments: str, differs: bool = False) -> tuple[str, bool]:
    """The beginning of what git says, and whether there is more; `differs`: it may end with 1.

    Raises `subprocess.SubprocessError`, `OSError`.
    """
    # Another user's checkout, too: what is in it runs here anyway.
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "-c", "safe.directory=*", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        timer = threading.Timer(_GIT_SECONDS, child.kill)
        timer.start()
        try:
            assert child.stdout is not None, "it is a pipe"
            found = child.stdout.read(MOST_DIFF_BYTES + 1)
            cut = len(found) > MOST_DIFF_BYTES
            if cut:
                child.kill()
            if child.wait() not in ((0, 1) if differs else (0,)) and not cut:
                raise subprocess.CalledProcessError(child.returncode, command)
        finally:
            timer.cancel()
    return found[:MOST_DIFF_BYTES].decode(errors="replace").replace("\0", "\ufffd"), cut
