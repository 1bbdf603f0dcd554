"""What `ttsv doctor` looks at of the machine: Ray, GPUs, versions."""

import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import urlsplit

from workers.cli.findings import Check, Finding

if TYPE_CHECKING:
    import psutil

    from service.settings import Settings
    from ttsv.runtime.provenance import EnvironmentFields

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""The versions that this code was tested with; only a checkout has them."""
_PINNED = "python -m pip install --constraint constraints.txt --editable ."
_DRIVER_SECONDS, _TORCH_SECONDS, _RAY_SECONDS = 10.0, 60.0, 3.0
_MOST_NAMES = 5
_DEVICE = Path("/dev/nvidiactl")
"""There where the kernel has NVIDIA's driver."""
_PROBE = """
import json, torch
from ttsv.runtime.devices import find_device
from ttsv.runtime.provenance import describe_environment
there = torch.cuda.is_available()
if there:
    torch.ones(2, device="cuda").sum().item()
seen = {"cuda": torch.version.cuda, "available": there, "gpus": torch.cuda.device_count()}
print(json.dumps(seen | {"environment": describe_environment(find_device("auto"))}))
"""
"""Run in a process of its own: torch takes seconds to import, and a wedged driver makes it wait for ever."""
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")
"""How the line of a traceback begins that names the error; what CUDA says goes on with advice below it."""
_NO_ROOM = re.compile(r"\bCUDA\b.*(out of memory|busy or unavailable)")
"""Of a card that is full, or, in compute mode `EXCLUSIVE_PROCESS`, another process's: that may be a trial."""


class _Seen(TypedDict):
    """What `_PROBE` says: the version of CUDA that torch is built for, and what it sees."""

    cuda: str | None
    available: bool
    gpus: int
    environment: "EnvironmentFields"


_ray, _gpus, _versions = map(Check, ("ray", "gpus", "versions"))


def look_at_ray(settings: "Settings") -> list[Finding]:
    """Ray's version, token and address of the cluster, what killed workers left, and the cluster of RAY_ADDRESS."""
    copy = os.environ.get("TTSV_TOKEN_FILE")
    tokens = [settings.data_dir / "token", *([Path(copy)] if copy else [])]
    read = (found for path in tokens for found in _token(path))
    return [*_ray_version(), *read, *_door(settings), *_leftovers(), *_elsewhere()]


def _ray_version() -> Iterator[Finding]:
    try:
        found = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        yield _ray.wrong("Ray is not installed: no trial can run", _PINNED)
        return
    pinned = _pins().get("ray", found)
    if found != pinned:
        yield _ray.wrong(f"Ray {found} is installed, {pinned} is what this code is tested with", _PINNED)
    else:
        yield _ray.ok(f"Ray {found}")


def _token(path: Path) -> Iterator[Finding]:
    try:
        status = path.stat()
    except OSError:  # it is made when a worker starts
        return
    if not status.st_size:
        says = f"{path} is empty, which ends Ray: no trial can run"
        yield _ray.wrong(
            says, f"rm {quote(str(path))}  # a worker makes another when it starts; a node needs a copy of its head's"
        )
    elif status.st_mode & 0o077:
        says = f"{path} can be read by other users, who could run programs as you on the worker's cluster"
        yield _ray.wrong(says, f"chmod 600 {quote(str(path))}")


def _door(settings: "Settings") -> Iterator[Finding]:
    """Whether nodes could join where the settings say, and a worker's cluster start there."""
    from service.errors import UserError
    from workers.node.machine import is_loopback, own_address
    from workers.node.raylet import is_taken

    if settings.head_address is None:
        return
    try:
        number = own_address(settings.head_address, "TTSV_HEAD_ADDRESS")
    except UserError as error:
        yield _ray.wrong(f"{error}: no worker starts", "ip -brief address  # those it has")
    else:
        if is_loopback(number):
            says = f"TTSV_HEAD_ADDRESS: {settings.head_address} is {number}, where no other machine reaches this one"
            yield _ray.warning(says, "ip -brief address  # export TTSV_HEAD_ADDRESS= to one of those that others reach")
    port = settings.head_port
    if os.environ.get("RAY_ADDRESS") or not is_taken(port):  # with RAY_ADDRESS whoever runs that cluster has a port
        return
    says = f"port {port}, at which nodes would join (TTSV_HEAD_PORT), is taken by"
    holder = _listening(port)
    if holder is None:
        look = f"sudo ss --listening --tcp --numeric --processes 'sport = :{port}'"
        yield _ray.warning(f"{says} a program that this user cannot see: the worker's, if that is another user's", look)
    elif not _is_head(holder, settings.data_dir / "token"):
        free = next(one for one in range(6379, 1023, -1) if one not in settings.ports and not is_taken(one))
        mend = f"export TTSV_HEAD_PORT={free}  # and start the worker again; nodes join with --head HOST:{free}"
        yield _ray.wrong(f"{says} another program ({holder.name()}, process {holder.pid}): no trial can run", mend)


def _listening(port: int) -> "psutil.Process | None":
    """The program that listens at a port; None where this user cannot tell."""
    import psutil

    with suppress(psutil.Error):
        for found in psutil.net_connections("tcp"):
            if (
                found.status == psutil.CONN_LISTEN
                and found.laddr
                and found.laddr.port == port
                and found.pid is not None
            ):
                return psutil.Process(found.pid)
    return None


def _is_head(process: "psutil.Process", token: Path) -> bool:
    """Whether a program is of the Ray cluster of a worker with this token, or of one that such a worker left."""
    import psutil

    from workers.node.raylet import PREFIX

    try:
        held = Path(process.environ().get("RAY_AUTH_TOKEN_PATH", ""))
        return any(PREFIX in part for part in process.cmdline()) and held.resolve() == token.resolve()
    except psutil.Error:  # it ended meanwhile
        return True


def _leftovers() -> Iterator[Finding]:
    from workers.node import mps, raylet
    from workers.node.processes import ownerless

    if left := [*ownerless(raylet.PREFIX), *ownerless(mps.PREFIX)]:
        says = f"killed workers left clusters behind: {_some([str(folder) for folder in left])}"
        yield _ray.warning(says, "ttsv worker  # ends and removes them when it starts")


def _elsewhere() -> Iterator[Finding]:
    """Whether anything listens where a worker would look for a cluster that somebody else runs."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        return
    mend = f"ray status --address {quote(address)}"
    try:
        parsed = urlsplit(address if "://" in address else f"//{address}")
        with socket.create_connection((parsed.hostname or "", parsed.port or 6379), _RAY_SECONDS):
            yield _ray.ok(f"something listens at RAY_ADDRESS, {address}")
    except (OSError, ValueError) as error:
        yield _ray.wrong(f"no cluster answers at RAY_ADDRESS, {address}: {error}", mend)


def look_at_gpus(settings: "Settings | None") -> list[Finding]:
    """NVIDIA's driver and GPUs, whether torch can use them, and what the settings ask of them."""
    cards, findings = _cards()
    return [*findings, *_torch(cards), *_asked(settings), *_mps(settings)]


def _cards() -> tuple[list[str], list[Finding]]:
    """Every GPU as nvidia-smi describes it, and what is to be said of them."""
    from workers.node.processes import heard

    if shutil.which("nvidia-smi") is None:
        if _DEVICE.exists():
            mend = "sudo apt-get install nvidia-utils-580  # of the driver's own version"
            return _unlisted(f"{_DEVICE} is there and nvidia-smi is not", mend)
        return [], [_gpus.ok("no nvidia-smi: trials compute on the CPU")]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = heard(query, _DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        says = "does not answer" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        return _unlisted(f"nvidia-smi: {says}", "sudo dmesg | grep -i -e nvrm -e xid; sudo reboot")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        says = f"nvidia-smi finds no GPU: {' '.join((done.stdout + done.stderr).split())[:300]}"
        return _unlisted(says, "sudo modprobe nvidia || sudo reboot")
    *_, driver = lines[0].split(", ")
    kinds = [", ".join(line.split(", ")[:-1]) for line in lines]
    shown = "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return lines, [_gpus.ok(f"{shown}; driver {driver}")]


def _unlisted(says: str, mend: str) -> tuple[list[str], list[Finding]]:
    """The GPUs that a worker offers all the same where nvidia-smi lists none."""
    from workers.node.machine import local_gpus

    cards = local_gpus(os.environ)
    if not cards:
        return [], [_gpus.wrong(f"{says}: GPUs cannot be counted, and no trial is given one", mend)]
    offered = f"trials are given GPUs all the same, {len(cards)} of them, whose memory is not known"
    return cards, [_gpus.warning(f"{says}: {offered}", mend)]


def _torch(cards: list[str]) -> Iterator[Finding]:
    """What torch says in a process of its own; the run's environment is told among the versions."""
    from workers.node.processes import heard

    by_hand = "python -c 'import torch; print(torch.cuda.is_available())'"
    try:
        done = heard([sys.executable, "-c", _PROBE], _TORCH_SECONDS)
    except subprocess.TimeoutExpired:
        yield _gpus.wrong(f"torch says nothing for {_TORCH_SECONDS:.0f} s", by_hand)
        return
    words = " ".join(done.stderr.split())
    try:
        seen: _Seen = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        reason = next(filter(_ERROR.match, reversed(lines)), lines[-1])
        if _NO_ROOM.search(reason):
            says = f"torch finds no room on a GPU, as where trials compute there: {reason}"
            yield _gpus.warning(says, "nvidia-smi  # who has it; without any, look for Xid in dmesg")
        else:
            yield _gpus.wrong(f"torch cannot compute: {reason}", by_hand if cards else _PINNED)
        return
    cuda, version = seen["cuda"], seen["environment"]["torch"]
    if cards and cuda is None:
        yield _gpus.wrong(f"torch {version} is built without CUDA: no trial can use the GPUs", _PINNED)
    elif cards and not seen["available"]:
        says = f"torch {version}, built for CUDA {cuda}, can use no GPU: {words[-300:] or 'it says not why'}"
        yield _gpus.wrong(says, "sudo apt-get install --only-upgrade cuda-drivers && sudo reboot")
    elif cards and seen["gpus"] < len(cards):
        hidden = f"torch sees {seen['gpus']} of {len(cards)} GPUs (CUDA_VISIBLE_DEVICES)"
        yield _gpus.warning(hidden, "unset CUDA_VISIBLE_DEVICES")
    elif cards:
        yield _gpus.ok(f"torch {version} computes on them with CUDA {cuda}")
    yield from _environment(seen["environment"])


def _environment(environment: "EnvironmentFields") -> Iterator[Finding]:
    revision = environment["git_revision"]
    code = "no git checkout"
    if revision is not None:
        code = f"git {revision[:12]}" + (", with changes that are not committed" if environment["git_dirty"] else "")
    says = f"Python {environment['python']}, torch {environment['torch']}, ttsv {_own_version()} ({code})"
    yield _versions.ok(f"{says} on {environment['platform']}")


def _asked(settings: "Settings | None") -> Iterator[Finding]:
    """Whether a worker would offer what is not there."""
    from workers.node.machine import local_cpus, local_gpus

    if settings is None:
        return
    gpus = len(local_gpus(os.environ))
    for what, wanted, there in (("GPUs", settings.worker_gpus, gpus), ("CPUs", settings.worker_cpus, local_cpus())):
        if wanted is not None and wanted > there:
            name = f"TTSV_WORKER_{what.upper()}"
            offers = f"{name} = {wanted}, and there are {there}: trials would be started for which there are no {what}"
            yield (_gpus.wrong if what == "GPUs" else _gpus.warning)(offers, f"unset {name}")


def _mps(settings: "Settings | None") -> Iterator[Finding]:
    """Whether NVIDIA's MPS is asked for, installed, and answers."""
    from ttsv.hardware.mps import PROGRAM
    from workers.node.mps import PREFIX, is_answering, serving_elsewhere
    from workers.node.processes import owned

    asked, installed = settings is not None and settings.worker_mps, shutil.which(PROGRAM) is not None
    if not installed:
        if asked:
            says = f"TTSV_WORKER_MPS = true, and {PROGRAM} is not installed: no worker starts"
            yield _gpus.wrong(says, "sudo apt-get install nvidia-compute-utils-580  # of the driver's own version")
        return
    for folder in owned(PREFIX):
        if is_answering(folder):
            yield _gpus.ok(f"MPS: the daemon of a worker or node answers in {folder}")
        else:
            says = f"MPS: the daemon of a worker or node does not answer in {folder}"
            yield _gpus.warning(says, f"tail {quote(str(folder / 'log'))}/*.log")
    if (pipes := serving_elsewhere(os.environ)) is not None:
        says = f"MPS: a daemon that is not ours answers in {pipes}: trials are its clients"
        yield _gpus.ok(says if asked else f"{says}, although TTSV_WORKER_MPS is not set")
    elif asked and not owned(PREFIX):
        yield _gpus.ok("MPS is asked for and installed: a worker starts it")


def look_at_versions() -> list[Finding]:
    """Whether the packages that are installed are those that this code was tested with, and whether it is itself."""
    if _own_version() is None:
        return [_versions.wrong("the package ttsv is not installed: `ttsv` may be another one's command", _PINNED)]
    pins = _pins()
    if not pins:
        return [_versions.ok("no constraints.txt beside the code: versions of packages are not compared")]
    installed = {name: _public(name) for name in pins}
    other = [f"{name} {found} ({pins[name]})" for name, found in installed.items() if found not in (None, pins[name])]
    if other:
        says = f"{len(other)} packages are not of the version this code is tested with: {_some(other)}"
        return [_versions.warning(says, _PINNED)]
    return [_versions.ok(f"{sum(map(bool, installed.values()))} packages are as in constraints.txt")]


def _pins() -> dict[str, str]:
    """Package -> version of constraints.txt; none without that file."""
    try:
        lines = _CONSTRAINTS.read_text().splitlines()
    except OSError:
        return {}
    return {name: found for name, equal, found in (line.partition("==") for line in lines) if equal}


def _public(package: str) -> str | None:
    """The installed version without what a builder added, as torch's `+cu130`; None where it is not installed."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_version() -> str | None:
    return _public("ttsv")


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
