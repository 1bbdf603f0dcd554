"""What this machine has: processors, GPUs, memory, versions. Neither torch nor Ray is imported."""

import contextlib
import ipaddress
import logging
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import psutil

from service.errors import UserError
from service.queue.cluster import Gpu, Machine, Versions
from ttsv.hardware.processor import computes_bf16
from ttsv.runtime.code import code_version, package_version
from ttsv.runtime.faults import VARIABLES
from workers.node.processes import heard

logger = logging.getLogger(__name__)

_GIB = 2**30
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""Where they are mounted: those of the kernel's version 2, or those of version 1 in a folder for each controller."""
_OUR_GROUPS = Path("/proc/self/cgroup")
_OURS = ("TTSV_", "RAY_ADDRESS", "PGPASS", "PGSERVICE", "PGSSL")
"""How variables begin that are ours alone: libpq takes a password from PGPASSWORD, PGPASSFILE or PGSERVICEFILE."""
_KEPT = ("TTSV_REVISION", *VARIABLES)
"""Those of them that trials have as well; fault points are theirs, too."""
_DRIVER = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_DRIVER_SECONDS = 20.0
"""So long nvidia-smi is waited for: it starts cards that nobody uses, each of which may take some seconds."""
_PRODUCT_SECONDS = 60.0
_BF16_PRODUCT = """
import resource, torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
matrix = torch.ones(64, 64, dtype=torch.bfloat16)
matrix @ matrix
"""


def own_address(address: str, setting: str) -> str:
    """The number of an address at which others reach this machine. Raises `UserError` where it is none of its own."""
    try:
        number = socket.gethostbyname(address)
        with socket.socket() as tried:
            tried.bind((number, 0))
    except OSError as error:
        raise UserError(f"{setting}: {address} is no address of this machine ({error.strerror})") from None
    return number


def is_loopback(number: str) -> bool:
    """Whether an address is one at which only this machine reaches itself, as /etc/hosts often has for its name."""
    return ipaddress.ip_address(number).is_loopback


def local_cpus() -> int:
    """CPUs this process may use, at most what its control group and those around it allow."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for group in _groups("cpu"):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                quota, period = map(int, " ".join((group / name).read_text() for name in files).split())
                count = min(count, max(1, quota // period)) if quota > 0 else count
    return count


def local_gpus(environment: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that a process in this environment may use, by UUID or by what the environment calls them."""
    return _shown(environment, _listed_gpus())


@cache
def usable_instructions() -> dict[str, str]:
    """What trials' environment needs so that torch keeps to instructions that this machine lets them use.

    Some virtual machines show AMX and trap it: a product in bf16 would end every process that computes one by SIGILL.
    Where a processor shows AMX, a child tries such a product, once per worker and for some seconds; an
    ONEDNN_MAX_CPU_ISA that is set already is obeyed.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not _shows_amx():
        return {}
    command, env = [sys.executable, "-c", _BF16_PRODUCT], without_settings()
    try:
        child = subprocess.run(command, capture_output=True, check=False, timeout=_PRODUCT_SECONDS, env=env)
    except subprocess.TimeoutExpired:
        return {}
    if child.returncode != -signal.SIGILL:
        return {}
    logger.warning("this machine shows AMX and lets no process use it: trials compute without")
    return {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


def without_settings() -> dict[str, str]:
    """Our environment for processes that hold no credentials, but for the image's revision, and for fault points.

    Nothing of our settings is in it, nor what opens a database.
    """
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_OURS)}


def _shows_amx() -> bool:
    with contextlib.suppress(OSError):
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return False


def describe(folder: Path, environment: Mapping[str, str] = os.environ) -> Machine:
    """What this machine has, of its GPUs those that `environment` shows, of its disks the one of `folder`.

    That may still be to be made.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    listed = _listed_gpus()
    return Machine(
        versions=versions(),
        gpus=tuple(listed[name] for name in _shown(environment, listed) if name in listed),
        memory_gib=round(memory_bytes() / _GIB, 1),
        free_disk_gib=round(shutil.disk_usage(there).free / _GIB, 1),
        bf16=computes_bf16({**environment, **usable_instructions()}),
    )


def versions() -> Versions:
    """The versions of this interpreter's packages; `none` for one that is not installed."""
    return Versions(
        package=code_version(),
        python=platform.python_version(),
        ray=package_version("ray"),
        torch=package_version("torch").partition("+")[0],
    )


def card_devices() -> dict[str, Path]:
    """UUID -> the device file of a card, as the driver says; of a container, of the cards that it was given."""
    return {
        said["GPU UUID"]: _DEVICES / f"nvidia{said['Device Minor']}"
        for said in _said_by_driver()
        if _is_named(said) and said.get("Device Minor", "").isdecimal()
    }


def _is_named(said: Mapping[str, str]) -> bool:
    """Whether the driver says which card it is: one that nobody opened yet, or that does not start, has "?" there."""
    return said.get("GPU UUID", "").startswith("GPU-") and "?" not in said["GPU UUID"]


def _said_by_driver() -> list[dict[str, str]]:
    """What the driver itself says of each card, in the order of their bus ids."""
    said = []
    for file in sorted(_DRIVER.glob("*/information")):
        with contextlib.suppress(OSError):
            lines = (line.partition(":") for line in file.read_text(errors="replace").splitlines())
            said.append({name.strip(): value.strip() for name, _, value in lines})
    return said


def _listed_gpus() -> dict[str, Gpu]:
    """UUID -> GPU of those that the NVIDIA driver lists, in the order of their numbers, which is that of the bus.

    Without nvidia-smi, as in a container that lacks it, or where it fails or does not answer, nobody knows how much
    memory they have; nor does nvidia-smi of those that share the processor's.
    """
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
        try:
            listing = heard(query, _DRIVER_SECONDS)
            listing.check_returncode()
            rows = [[cell.strip() for cell in line.split(",")] for line in listing.stdout.splitlines()]
            return {uuid: Gpu(name, _gib_of(mebibytes)) for uuid, name, mebibytes in rows}
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            logger.warning("nvidia-smi does not say which GPUs there are: %s", error)
    said = _said_by_driver()
    named = [one for one in said if _is_named(one)]
    if len(named) < len(said):
        logger.warning(
            "the driver has no UUID of %d of %d cards, which no trial is given: run nvidia-smi as root, which starts "
            "them or says what ails them, then this again",
            len(said) - len(named),
            len(said),
        )
    return {one["GPU UUID"]: Gpu(one.get("Model", "GPU"), 0.0) for one in named}


def _gib_of(mebibytes: str) -> float:
    """As nvidia-smi says it; 0 where it has none to say ("[N/A]"). Raises `ValueError` for other words."""
    return 0.0 if mebibytes in ("[N/A]", "[Not Supported]") else round(float(mebibytes) / 1024, 1)


def _shown(environment: Mapping[str, str], listed: Mapping[str, Gpu]) -> list[str]:
    """The UUIDs of what CUDA_VISIBLE_DEVICES shows of the listed: numbers, or beginnings of UUIDs.

    What is not listed, as a part of a card is not, stays as it is called there.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(listed)
    shown = []
    for device in map(str.strip, visible.split(",")):
        if device not in ("", "-1"):
            by_number = list(listed)[int(device) : int(device) + 1] if device.isdecimal() else []
            shown += by_number or [uuid for uuid in listed if uuid.startswith(device)] or [device]
    return shown


def memory_bytes() -> int:
    """The machine's memory, at most what our control group and those around it allow."""
    total = psutil.virtual_memory().total
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                total = min(total, int((group / name).read_text()))
    return total


def _groups(controller: str) -> list[Path]:
    """Control groups that hold this process, each with those around it, in either version of the kernel's.

    A container sees its own one where all others have their root. A job of Slurm is in one further down, which is
    where its limits stand.
    """
    roots = {"": _CONTROL_GROUPS, controller: _CONTROL_GROUPS / controller}
    found = list(roots.values())
    with contextlib.suppress(OSError, ValueError):
        for line in _OUR_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in {*controllers.split(",")} & roots.keys():
                parts = Path(path.lstrip("/")).parts
                if ".." not in parts:  # out of what this process can see
                    found += [roots[name].joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return found
