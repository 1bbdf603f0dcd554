"""What `ttsv doctor` looks at of the machine: disk, Ray, GPUs, data sets, versions."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import urlsplit

from workers.cli.findings import Check, Finding, size

if TYPE_CHECKING:
    from service.settings import Settings
    from ttsv.runtime import EnvironmentFields

_LITTLE_BYTES = 5 * 2**30
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "gpfs",
    "lustre",
    "glusterfs",
    "fuse.sshfs",
    "fuse.s3fs",
)
"""How the names of file systems begin whose locks SQLite cannot rely on."""
_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
"""The versions that this code was tested with; only a checkout has them."""
_PINNED = "python -m pip install --constraint constraints.txt --editable ."
_DRIVER_SECONDS, _TORCH_SECONDS, _RAY_SECONDS, _STORE_SECONDS = 10.0, 60.0, 3.0, 10.0
_BUCKET = """
import sys
from service.storage import require_bucket
try:
    require_bucket(sys.stdin.read())
except (OSError, ValueError) as error:
    print(error)
    sys.exit(1)
"""
"""Run in a process of its own: where a store's server is silent, pyarrow tries again for a minute and a half.

A thread that waits for it could not be left behind: a program's end waits for what pyarrow has under way.
"""
_MOST_NAMES = 5
_DEVICE = Path("/dev/nvidiactl")
"""There where the kernel has NVIDIA's driver."""
_PROBE = """
import json, torch
from ttsv.runtime import describe_environment, find_device
there = torch.cuda.is_available()
if there:
    torch.ones(2, device="cuda").sum().item()
seen = {"cuda": torch.version.cuda, "available": there, "gpus": torch.cuda.device_count()}
print(json.dumps(seen | {"environment": describe_environment(find_device("auto"))}))
"""
"""Run in a process of its own: torch takes seconds to import, and a wedged driver makes it wait for ever."""


class _Seen(TypedDict):
    """What `_PROBE` says: the version of CUDA that torch is built for, and what it sees."""

    cuda: str | None
    available: bool
    gpus: int
    environment: "EnvironmentFields"


_disk, _ray, _gpus, _data, _versions = map(Check, ("disk", "ray", "gpus", "data", "versions"))


def look_at_disk(settings: "Settings") -> list[Finding]:
    """The data folder: that it can be written, its room, whether its file system suits SQLite; and the files' store."""
    from service.settings import LEAST_FREE_BYTES

    folder = settings.data_dir
    there = next(path for path in (folder, *folder.parents) if path.exists())
    shown, place = quote(str(folder)), quote(str(there))
    if not there.is_dir():
        return [
            _disk.wrong(f"{there} is in the way of the data folder {folder}: it is a file", f"mv {place} {place}.old")
        ]
    if not os.access(there, os.W_OK | os.X_OK):
        says = (
            f"{there} cannot be written" if there == folder else f"{folder} cannot be made: {there} cannot be written"
        )
        return [_disk.wrong(says, f"sudo install --directory --owner $USER {shown}")]
    findings = [*_network(settings), *_store(settings)]
    usage, system = shutil.disk_usage(there), os.statvfs(there)
    free = f"{size(usage.free)} of {size(usage.total)} free in {folder}"
    mend = f"du --human-readable --max-depth 1 {place}  # what takes the room"
    if usage.free < LEAST_FREE_BYTES:
        findings.append(_disk.wrong(f"{free}: at least {size(LEAST_FREE_BYTES)} are wanted", mend))
    elif usage.free < _LITTLE_BYTES:
        findings.append(_disk.warning(free, mend))
    elif system.f_files and not system.f_favail:
        findings.append(_disk.wrong(f"no file can be made in {folder}: its file system has as many as it can", mend))
    else:
        findings.append(_disk.ok(free if there == folder else f"{free}, which will be made"))
    return findings


def _network(settings: "Settings") -> Iterator[Finding]:
    """SQLite needs locks that hold, which the file systems of networks do not promise."""
    from sqlalchemy import make_url

    url = make_url(settings.database_url or f"sqlite:///{settings.data_dir / 'ttsv.db'}")
    if url.get_backend_name() != "sqlite" or not url.database:
        return
    file = Path(url.database).absolute()
    kind = _file_system(file)
    if kind.startswith(_NETWORK):
        says = f"{file} lies on {kind}, whose locks SQLite cannot rely on: use a local disk, or PostgreSQL"
        yield _disk.wrong(says, "export TTSV_DATABASE_URL=sqlite:////var/lib/ttsv/ttsv.db")


def _store(settings: "Settings") -> Iterator[Finding]:
    """Whether the files of trials can be kept where TTSV_STORAGE says."""
    from service.storage import without_secrets

    if settings.storage is None:
        return
    place = without_secrets(settings.storage)
    shown = f"the store of TTSV_STORAGE, {place},"
    if "://" in settings.storage:
        if (problem := _bucket_problem(settings.storage)) is not None:
            yield _disk.wrong(f"{shown} {problem}", "env | grep ^AWS_  # the keys; does its host answer?")
            return
    elif not Path(place).exists():
        yield _disk.warning(f"{shown} is not there and will be made: is it to be mounted?", f"findmnt {quote(place)}")
        return
    elif not os.access(place, os.W_OK | os.X_OK):
        yield _disk.wrong(f"{shown} cannot be written", f"sudo chown $USER {quote(place)}")
        return
    yield _disk.ok(f"{shown} is there")


def _bucket_problem(place: str) -> str | None:
    """Why there is no such bucket to be read, or None. The place may hold a key, so it is in no command line."""
    command = [sys.executable, "-c", _BUCKET]
    try:
        done = subprocess.run(command, input=place, capture_output=True, text=True, check=False, timeout=_STORE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"does not answer within {_STORE_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    said = (done.stdout or done.stderr).strip().splitlines() or [f"it ended with {done.returncode}"]
    return f"cannot be read: {said[-1]}"


def _file_system(path: Path) -> str:
    """The type of the file system that a path lies on; empty where it is not known."""
    import psutil

    above = {str(folder) for folder in path.parents}
    mounts = [part for part in psutil.disk_partitions(all=True) if part.mountpoint in above]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""


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
        mode = path.stat().st_mode
    except OSError:  # it is made when a worker starts
        return
    if mode & 0o077:
        says = f"{path} can be read by other users, who could run programs as you on the worker's cluster"
        yield _ray.wrong(says, f"chmod 600 {quote(str(path))}")


def _door(settings: "Settings") -> Iterator[Finding]:
    """Whether nodes could join where the settings say."""
    from service.errors import UserError
    from workers.node.machine import own_address

    if settings.head_address is not None:
        try:
            own_address(settings.head_address, "TTSV_HEAD_ADDRESS")
        except UserError as error:
            yield _ray.wrong(f"{error}: no worker starts", "ip -brief address  # those it has")


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
    if shutil.which("nvidia-smi") is None:
        if _DEVICE.exists():
            says = f"{_DEVICE} is there and nvidia-smi is not: GPUs cannot be counted, and no trial is given one"
            return [], [_gpus.wrong(says, "sudo apt-get install nvidia-utils-580  # of the driver's own version")]
        return [], [_gpus.ok("no nvidia-smi: trials compute on the CPU")]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        says = "does not answer" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        return [], [_gpus.wrong(f"nvidia-smi: {says}", "sudo dmesg | grep -i -e nvrm -e xid; sudo reboot")]
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        says = f"nvidia-smi finds no GPU: {' '.join((done.stdout + done.stderr).split())[:300]}"
        return [], [_gpus.wrong(says, "sudo modprobe nvidia || sudo reboot")]
    *_, driver = lines[0].split(", ")
    kinds = [", ".join(line.split(", ")[:-1]) for line in lines]
    shown = "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    return lines, [_gpus.ok(f"{shown}; driver {driver}")]


def _torch(cards: list[str]) -> Iterator[Finding]:
    """What torch says in a process of its own; the run's environment is told among the versions."""
    by_hand = "python -c 'import torch; print(torch.cuda.is_available())'"
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TORCH_SECONDS)
    except subprocess.TimeoutExpired:
        yield _gpus.wrong(f"torch says nothing for {_TORCH_SECONDS:.0f} s", by_hand)
        return
    words = " ".join(done.stderr.split())
    try:
        seen: _Seen = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        yield _gpus.wrong(f"torch cannot compute: {last}", by_hand if cards else _PINNED)
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


def look_at_data(settings: "Settings", *, deep: bool) -> list[Finding]:
    """The data sets of the data folder, by size and times; `deep` reads them and compares checksums."""
    from ttsv.data.catalog import DATASETS, dataset_info
    from ttsv.data.own import own_names
    from ttsv.data.source import fetch_command

    folder = settings.data_dir / "datasets"
    findings, missing = [], []
    for name in [*DATASETS, *own_names(folder)]:
        finding = _data_set(name, folder, deep=deep)
        info = dataset_info(name)
        if finding is not None:
            findings.append(finding)
        elif info is not None and not info.embedded:
            missing.append(name)
    if missing:
        findings.append(_data.ok(f"not here: {', '.join(missing)} (where trials need them: {fetch_command('NAME')})"))
    return findings


def _data_set(name: str, folder: Path, *, deep: bool) -> Finding | None:
    """What is to be said of a data set; None where nobody used it yet."""
    from ttsv.data import verify_dataset
    from ttsv.data.content import ContentRecord
    from ttsv.data.shared import find_shared
    from ttsv.errors import DataError

    verify = f"ttsv data verify {quote(name)}"
    try:
        if ContentRecord.find(name, folder) is None:
            return None
        if deep:
            sha256 = verify_dataset(name, folder.parent)
            return _data.ok(f"{name}: every file has its checksum (content SHA-256 {sha256[:12]})")
        copy = find_shared(name, folder)
    except DataError as error:
        return _data.wrong(f"{name}: {error}", verify)
    if copy is None:
        return _data.warning(f"{name}: its copy is gone, or its files are not those of its first use", verify)
    return _data.ok(f"{name}: as at its first use, by size and times (content SHA-256 {copy.sha256[:12]})")


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
