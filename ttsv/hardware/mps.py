"""NVIDIA's Multi-Process Service (MPS), by which kernels of several processes run side by side on one GPU.

Its control daemon starts a server when a first client comes. A process is a client where its environment names the
daemon's folder of pipes; nothing in the process itself is to be done for it.
"""

import contextlib
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
FOREGROUND = (PROGRAM, "-f")
"""The command of a daemon that stays a child of whoever starts it."""
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Where a process looks for a daemon if its environment names none."""
_PROTOCOL = "CUDA_MPS_PROTOCOL_VERSION"
_SHOWN = "CUDA_VISIBLE_DEVICES"
_LOOK_SECONDS = 0.1


def environment(pipes: Path, logs: Path | None, cards: Sequence[str]) -> dict[str, str]:
    """What daemon and clients have in common. `cards` are UUIDs: a server gives the cards it was shown new numbers."""
    found = {PIPES: str(pipes), _SHOWN: ",".join(cards)}
    return found if logs is None else {**found, LOGS: str(logs)}


def control_environment(base: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of the control program: `base` with `own`, and commands in the words of version 2."""
    return {name: value for name, value in base.items() if name != _PROTOCOL} | dict(own)


def told(command: str, env: Mapping[str, str], seconds: float) -> bool:
    """Whether a daemon, that of the environment, took a command."""
    try:
        done = subprocess.run(
            [PROGRAM],
            input=f"{command}\n",
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "cannot find mps control daemon" not in done.stdout.lower()


def answers(env: Mapping[str, str], seconds: float = 5.0) -> bool:
    """Whether a daemon answers."""
    return told("get_server_list", env, seconds)


def comes_up(daemon: "subprocess.Popen[bytes]", env: Mapping[str, str], seconds: float) -> bool:
    """Waits until a daemon that was just started answers; False where it ends before, or takes longer."""
    deadline = time.monotonic() + seconds
    while daemon.poll() is None and (left := deadline - time.monotonic()) > 0:
        if answers(env, left):
            return daemon.poll() is None
        time.sleep(_LOOK_SECONDS)
    return False


def quit_daemon(daemon: "subprocess.Popen[bytes]", env: Mapping[str, str], seconds: float) -> None:
    """Tells a daemon to end with its servers, and waits for it at most so long."""
    if daemon.poll() is None and told("quit", env, seconds):
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(seconds)
