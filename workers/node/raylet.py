"""Ray's processes on this machine: `ray start --block` as a child that the kernel ends when this process ends."""

import contextlib
import errno
import logging
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from types import MappingProxyType

import psutil

from workers.node.machine import usable_instructions, without_settings
from workers.node.mps import Mps, remove_daemons
from workers.node.processes import keep_owned, kill_session, own_folder, ownerless, spawn

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
PREFIX = "ttsv-ray-"
"""How the folders of Ray's processes begin."""
_CLEAR_SECONDS = SETTLED_SECONDS = 3600.0
"""So often a folder is looked through for what nobody needs any more, which nobody touched for so long."""
_LOGS_SECONDS = 3 * 86400.0
"""So long the logs of processes are kept that have ended."""
_LOGS = "worker-*", "python-core-worker-*", "python-core-driver-*", "runtime_env_setup-*"
_OBJECT_STORE_BYTES = 83_886_080  # little more than the least Ray accepts: trials hand over numbers only
_STOP_SECONDS = 3.0
_RAY = """
import sys
sys.modules.update({"ray.serve": None, "grpc": None})
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
NvidiaGPUAcceleratorManager.get_current_node_accelerator_type = staticmethod(lambda: None)
from ray.scripts.scripts import main
main()
"""
"""The program `ray` without Ray Serve, which loads pandas: it would start later, and keep that in memory.

Without gRPC for Python it starts no server for Ray Client, a process and an open port that nobody uses. Nor does it ask
of what kind the first card is, for a label that nobody reads: where that card is lost, Ray (2.60) would not start.
"""
_FORGOTTEN = {
    # What Ray remembers of actors, processes and tasks that are gone (up to 100,000 of each): nobody asks, and a head
    # that runs small grids for months would grow by a gigabyte.
    "RAY_maximum_gcs_destroyed_actor_cached_count": "100",
    "RAY_maximum_gcs_dead_worker_cached_count": "100",
    "RAY_task_events_max_num_task_in_gcs": "100",
}


class RayProcess:
    """Ray on this machine, as a head or as a further node, as `start` is told.

    `parts` are the names of the processes without which it is gone, `token` the file with the cluster's; what it says
    goes to `log`, or into its folder. Trials are clients of `mps`, which starts before it, ends after it, and
    without which it is gone, too.
    """

    def __init__(self, parts: Set[str], token: Path, log: Path | None = None, mps: Mps | None = None) -> None:
        self._names, self._token, self._log, self._mps = parts, token, log, mps
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._deadline = 0.0
        self._parts: list[psutil.Process] = []
        self._over = threading.Event()

    def start(
        self, *flags: str, options: Mapping[str, object], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Starts in a fresh folder; first removes what killed processes left. Does not wait, but for MPS.

        `flags` and `options` of `ray start` and variables of its `environment` are added to those that all have.
        Raises `UserError` where MPS is wanted and does not start the first time.
        """
        remove_leftovers()
        if self._mps is not None:
            self._mps.start()
            if self._mps.failed():
                return
            environment = {**environment, **self._mps.environment}
        self._folder = own_folder(PREFIX)
        all_options = {
            **options,
            "dashboard-agent-listen-port": 0,
            "temp-dir": self._folder,
            "include-log-monitor": "false",
            "object-store-memory": _OBJECT_STORE_BYTES,
        }
        command = [sys.executable, "-c", _RAY, "start", *flags, "--block"]
        command += ["--disable-usage-stats", "--log-color", "false"]
        command += [f"--{name}={value}" for name, value in all_options.items()]
        env = {
            **without_settings(),  # trials hold no credentials
            **usable_instructions(),
            **token_environment(self._token),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a trial without a GPU sees none
            # Processes started in advance fit no trial: Tune gives its actors an environment of their own.
            "RAY_prestart_worker_first_driver": "0",
            **_FORGOTTEN,
            **environment,
        }
        self._parts, self._deadline = [], time.monotonic() + START_SECONDS
        self._child = spawn(command, env=env, log=self._log or self._folder / "log", death=signal.SIGTERM)
        self._over = threading.Event()
        clearing = threading.Thread(target=_keep_clear, args=(self._folder, self._over), name="clear", daemon=True)
        try:
            clearing.start()
        except RuntimeError as error:  # the machine has none for now
            self.stop()
            raise OSError(errno.EAGAIN, f"no thread can keep its folder clear: {error}") from error

    def ready(self) -> bool:
        """Whether the raylet listens."""
        if self._child is None or self._folder is None:
            return False
        if not self._parts and any(self._folder.glob("session_2*/sockets/raylet")):
            self._parts = _parts(self._child.pid, self._names)
        return bool(self._parts) and not self.failed()

    def failed(self) -> bool:
        """Whether a part of it died or it takes too long to start, or the MPS daemon of its trials ended.

        `ray start --block` exits when a part of its cluster dies by accident, but not when it ends in order, as the
        raylet does when it loses its agent: so the parts are looked at too.
        """
        if self._child is None or self._child.poll() is not None or self._has_lost_mps():
            return True
        if not self._parts:
            return time.monotonic() > self._deadline
        return not all(map(_is_alive, self._parts))

    def last_words(self) -> str:
        """Why there is no MPS, where that is so; else the end of what it said, as far as its log is still there."""
        if self._mps is not None and self._mps.failed():
            return self._mps.last_words()
        log = self._log or (self._folder and self._folder / "log")
        try:
            return "" if log is None else "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        except OSError:  # it is not there, or the disk fails, for which it may have ended
            return ""

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left, and no folder stays; nor does MPS."""
        self._over.set()
        if self._child is not None and self._folder is not None:
            self._child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_STOP_SECONDS)
            _sweep(self._folder, self._child.pid)
            self._child.wait()
        elif self._folder is not None:  # it could not be started
            _sweep(self._folder, None)
        self._child = self._folder = None
        if self._mps is not None:
            self._mps.stop()

    def _has_lost_mps(self) -> bool:
        return self._mps is not None and self._mps.failed()


def token_environment(token: Path) -> dict[str, str]:
    """Authentication by token: Ray listens on every address of the machine."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}


def token_problem(token: Path) -> str | None:
    """In words why a copy of the cluster's token is of no use, with what mends it; None where Ray can read one.

    Ray itself would end whichever process reads it, by a traceback of its own.
    """
    try:
        wrong = None if token.read_bytes().strip() else "is empty"
    except FileNotFoundError:
        return f"{token}: no such file; copy the file `token` of the head's data folder here"
    except OSError as error:
        wrong = f"cannot be read ({error.strerror})"
    fix = "copy the file `token` of the head's data folder here, for this user to read"
    return None if wrong is None else f"{token} {wrong}: {fix}"


def port_options(ports: range) -> dict[str, int]:
    """Options of `ray start` by which other machines need no more than these ports of this one: two, and one a process.

    `ports` has a step of 1.
    """
    manager, objects = server_ports(ports)
    return {
        "node-manager-port": manager,
        "object-manager-port": objects,
        "min-worker-port": ports[2],
        "max-worker-port": ports[-1],
    }


def server_ports(ports: range) -> tuple[int, int]:
    """Those of the ports at which Ray's two servers listen; without them it does not start."""
    return ports[0], ports[1]


def taken_port(ports: Iterable[int]) -> int | None:
    """The first of the ports at which a program listens; None where there is none."""
    return next(filter(is_taken, ports), None)


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different. (The system gives them above 32767, clear of Ray's own range.)"""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("", 0))
        return [free.getsockname()[1] for free in sockets]


def remove_leftovers() -> None:
    """Ends and removes what processes of Ray, and of MPS, leave whose owners died without a chance to do so."""
    for folder in ownerless(PREFIX):
        logger.info("removing %s, which a killed worker left", folder)
        _sweep(folder, None)
    remove_daemons()


def clear(folder: Path) -> None:
    """Removes what Tune and Ray leave in their folder for as long as that is there: it may be for months.

    The folders of trials that ended, but for those of claims whose driver lives and of processes that stand in one; and
    the logs of processes that ended days ago.
    """
    commands, places = list[list[str]](), list[Path]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            commands.append(process.cmdline())
            places.append(Path(process.cwd()))
    claims = {f"{_after('--experiment', command)}-{_after('--fence', command)}" for command in commands}
    settled, ended = time.time() - SETTLED_SECONDS, time.time() - _LOGS_SECONDS
    for claim in folder.glob("session_2*/artifacts/*/*"):
        if claim.name in claims or any(place.is_relative_to(claim) for place in places):
            continue
        with contextlib.suppress(OSError):
            if max(path.stat().st_mtime for path in (claim, *claim.iterdir())) < settled:
                shutil.rmtree(claim, ignore_errors=True)
                claim.parent.rmdir()  # unless it has another one
    for name in _LOGS:
        for log in folder.glob(f"session_2*/logs/{name}"):
            with contextlib.suppress(OSError):
                if log.stat().st_mtime < ended:
                    log.unlink()


def _after(word: str, command: list[str]) -> str:
    """What follows a word of a command; nothing where it has no such word."""
    at = command.index(word) + 1 if word in command else len(command)
    return command[at] if at < len(command) else ""


def _keep_clear(folder: Path, over: threading.Event) -> None:
    while not over.wait(_CLEAR_SECONDS):
        try:
            keep_owned(folder)
            clear(folder)
        except Exception:  # whatever goes wrong with it, the node stays
            logger.exception("%s cannot be cleared", folder)


def is_taken(port: int) -> bool:
    """Whether a program of this machine listens at a port, on any address."""
    with socket.socket() as tried:
        # As Ray does: connections of a server that has ended hold its port for a minute.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError:
            return True
    return False


def _parts(parent: int, names: Set[str]) -> list[psutil.Process]:
    """The processes of these names, once they all run."""
    with contextlib.suppress(psutil.Error):
        parts = [child for child in psutil.Process(parent).children() if child.name() in names]
        if len(parts) == len(names):
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
