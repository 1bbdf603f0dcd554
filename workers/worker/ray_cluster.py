"""The Ray cluster of one worker: a local one that lives and dies with it, or one that runs elsewhere already."""

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

from service.queue.shares import Amount
from ttsv.processor import computes_bf16
from workers.worker.processes import identity, is_dead, kill_session, spawn

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
_PREFIX = "ttsv-ray-"
_OWNER = "owner.json"
_OBJECT_STORE_BYTES = 83_886_080  # little more than the least Ray accepts: trials hand over numbers only
_FOR_TRIALS = 0.8
"""The share of main memory that trials may reserve."""
_STOP_SECONDS = 3.0
_PARTS = {"gcs_server", "raylet"}
_BF16_PRODUCT = """
import resource, torch
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
matrix = torch.ones(64, 64, dtype=torch.bfloat16)
matrix @ matrix
"""


class Cluster:
    """Where drivers find Ray: at an address (`RAY_ADDRESS`) at which somebody else runs it, who starts and stops it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def start(self) -> None:
        """Begins to start; does not wait."""

    def ready(self) -> bool:
        """Whether drivers can connect. Elsewhere it is taken for granted: a driver that cannot ends, and gives back."""
        return True

    def failed(self) -> bool:
        """Whether it is gone, or did not come up in time; of one that runs elsewhere we cannot tell."""
        return False

    def capacity(self) -> Sequence[Amount] | None:
        """What each node has for trials; None while nobody knows."""
        return [Amount(math.inf, math.inf, math.inf)]

    def stop(self) -> None:
        """Ends it; nothing of it is left."""

    def env(self) -> dict[str, str]:
        """What a driver's environment needs to connect, beyond the worker's own."""
        return {}

    def bf16(self) -> bool | None:
        """Whether trials' processor has instructions for bf16; None where others run it, on machines of their own."""
        return None


class LocalCluster(Cluster):
    """`ray start --head --block` as a child that the kernel ends when this worker ends, however that happens."""

    def __init__(self, data_dir: Path, *, cpus: int, gpus: int) -> None:
        super().__init__("")
        self._cpus, self._gpus = cpus, gpus
        self._memory = int(_FOR_TRIALS * psutil.virtual_memory().total)
        self._token = data_dir / "token"
        self._log = data_dir / "logs" / f"ray-{os.getpid()}.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._deadline = 0.0
        self._parts: list[psutil.Process] = []

    def start(self) -> None:
        """Starts on fresh ports and a fresh folder; first removes what killed workers left."""
        _write_token(self._token)
        _remove_leftovers()
        # Short, because Ray puts Unix sockets into it, whose paths end at 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        (self._folder / _OWNER).write_text(json.dumps(identity()))
        port, client_port = _free_ports(2)
        options = {
            "port": port,
            "ray-client-server-port": client_port,
            "dashboard-agent-listen-port": 0,
            "temp-dir": self._folder,
            "num-cpus": self._cpus,
            "num-gpus": self._gpus,
            "memory": self._memory,
            "include-dashboard": "false",
            "include-log-monitor": "false",
            "object-store-memory": _OBJECT_STORE_BYTES,
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--no-monitor"]
        command += ["--disable-usage-stats", "--log-color", "false"]
        command += [f"--{name}={value}" for name, value in options.items()]
        env = {
            **_without_settings(),  # trials hold no credentials
            **usable_instructions(),
            **self.env(),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a trial without a GPU sees none
            # Processes started in advance fit no trial: Tune gives its actors an environment of their own.
            "RAY_prestart_worker_first_driver": "0",
        }
        self.address = f"127.0.0.1:{port}"
        self._parts, self._deadline = [], time.monotonic() + START_SECONDS
        self._child = spawn(command, env=env, log=self._log, death=signal.SIGTERM)

    def ready(self) -> bool:
        """Whether the raylet listens."""
        if self._child is None or self._folder is None:
            return False
        if not self._parts and any(self._folder.glob("session_2*/sockets/raylet")):
            self._parts = _parts(self._child.pid)
        return bool(self._parts) and not self.failed()

    def failed(self) -> bool:
        """Whether a part of it died or it takes too long to start.

        `ray start --block` exits when a part of its cluster dies by accident, but not when it ends in order, as the
        raylet does when it loses its agent: so the parts are looked at too.
        """
        if self._child is None or self._child.poll() is not None:
            return True
        if not self._parts:
            return time.monotonic() > self._deadline
        return not all(map(_is_alive, self._parts))

    def capacity(self) -> Sequence[Amount]:
        """This machine."""
        return [Amount(self._cpus, self._gpus, self._memory / 2**30)]

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left, and no folder stays."""
        if self._child is None or self._folder is None:
            return
        self._child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_STOP_SECONDS)
        _sweep(self._folder, self._child.pid)
        self._child.wait()
        self._child = self._folder = None

    def env(self) -> dict[str, str]:
        """Authentication by token: Ray listens on every address of the machine."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def bf16(self) -> bool | None:
        """Whether this machine's processor has instructions for bf16 that it lets trials use."""
        return computes_bf16({**os.environ, **usable_instructions()})


def local_cpus() -> int:
    """CPUs this process may use, at most what its control group allows."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count


def local_gpus(environment: Mapping[str, str]) -> int:
    """NVIDIA GPUs this process may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


@cache
def usable_instructions() -> dict[str, str]:
    """What trials' environment needs so that torch keeps to instructions that this machine lets them use.

    Some virtual machines show AMX and trap it: a product in bf16 would end every process that computes one by SIGILL.
    Where a processor shows AMX, a child tries such a product, once per worker and for some seconds; an
    ONEDNN_MAX_CPU_ISA that is set already is obeyed.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not _shows_amx():
        return {}
    command, env = [sys.executable, "-c", _BF16_PRODUCT], _without_settings()
    try:
        child = subprocess.run(command, capture_output=True, check=False, timeout=START_SECONDS, env=env)
    except subprocess.TimeoutExpired:
        return {}
    if child.returncode != -signal.SIGILL:
        return {}
    logger.warning("this machine shows AMX and lets no process use it: trials compute without")
    return {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


def _without_settings() -> dict[str, str]:
    """Our environment for processes that hold no credentials: nothing of our settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TTSV_", "RAY_ADDRESS"))}


def _shows_amx() -> bool:
    with contextlib.suppress(OSError):
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return False


def _write_token(path: Path) -> None:
    """Creates the token, readable by its owner only, unless it is there; several workers may try at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
        file.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(fresh)
    finally:
        fresh.unlink()


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, all different. (The system gives them above 32767, clear of Ray's own range.)"""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("", 0))
        return [free.getsockname()[1] for free in sockets]


def _parts(parent: int) -> list[psutil.Process]:
    """The processes without which there is no cluster, once they all run."""
    with contextlib.suppress(psutil.Error):
        parts = [child for child in psutil.Process(parent).children() if child.name() in _PARTS]
        if len(parts) == len(_PARTS):
            return parts
    return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _sweep(folder: Path, session: int | None) -> None:
    kill_session(session, marks=[str(folder)])
    shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers() -> None:
    """Ends and removes clusters of workers that died without a chance to do so."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):
            if owner.stat().st_uid == os.getuid() and is_dead(json.loads(owner.read_text())):
                logger.info("removing %s, which a killed worker left", owner.parent)
                _sweep(owner.parent, None)
