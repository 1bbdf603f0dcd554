"""Processes: children that die with us, and telling for certain that a process is gone.

`python -m workers.node.processes PARENT SIGNAL COMMAND...` becomes COMMAND with that death signal set; `spawn` uses
it, because code between fork and exec (`preexec_fn`) can deadlock where threads run.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from service.database.experiments import ProcessIdentity

_PR_SET_PDEATHSIG = 1
_OWNER = "owner.json"


def die_with_parent(parent: int, death: signal.Signals) -> None:
    """Has the kernel send us `death` when the thread that started us ends; nothing on systems other than Linux.

    Exits at once if the parent, a process id, is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death))
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def identity() -> "ProcessIdentity | None":
    """This process's; None without Linux's /proc."""
    try:
        start = _start_ticks(os.getpid())
        assert start is not None, "we are no zombie"
        boot, pids = _host()
        return {"boot": boot, "pids": pids, "pid": os.getpid(), "start": start}
    except OSError:
        return None


def is_dead(process: "ProcessIdentity | None") -> bool:
    """Whether the process with that identity has certainly ended. False for a process of another host."""
    if process is None:
        return False
    try:
        if (process["boot"], process["pids"]) != _host():
            return False
        return bool(_start_ticks(process["pid"]) != process["start"])
    except FileNotFoundError:
        return Path("/proc/self").exists()
    except (OSError, KeyError):
        return False


def cpu_seconds(pid: int) -> float:
    """What a process has computed since it started; 0 where that is not known, as of one that ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    death: signal.Signals,
    pass_fds: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Starts a command in its own session; it gets `death` when the calling thread ends. Output goes to `log`.

    Call it from a thread that lives as long as the child is wanted, such as the main thread.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [*_launcher(death), *command],
            env=dict(env),
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def ask(command: Sequence[str], text: bytes, *, env: Mapping[str, str], seconds: float) -> bytes:
    """What a command answers to a text; it dies with the calling thread. Raises `subprocess.SubprocessError`."""
    return subprocess.run(
        [*_launcher(signal.SIGKILL), *command],
        input=text,
        env=dict(env),
        capture_output=True,
        check=True,
        timeout=seconds,
    ).stdout


def heard(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """What a command says until it ends. One that takes longer is killed: `subprocess.TimeoutExpired`.

    Nobody waits then until it is gone, as `subprocess.run` does: what a driver holds in the kernel may never be.
    """
    with contextlib.ExitStack() as pipes:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for pipe in (child.stdout, child.stderr):
            assert pipe is not None
            pipes.enter_context(pipe)
        try:
            output, errors = child.communicate(timeout=seconds)
        except BaseException:
            child.kill()
            threading.Thread(target=child.wait, name="heard", daemon=True).start()  # else it may stay as a zombie
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


def stop(child: subprocess.Popen[bytes], grace: float) -> None:
    """SIGTERM to a spawned child; what is left of its session after `grace` seconds gets SIGKILL."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    kill_session(child.pid)
    child.wait()


def kill_session(session: int | None, marks: Sequence[str] = (), patience: float = 5.0) -> None:
    """SIGKILL to every process of a session, and to every one with a mark in its command line, until none is left."""
    _kill_all(lambda: _members(session, marks), patience)


def kill_programs(name: str, variable: str, value: str, patience: float = 5.0) -> None:
    """SIGKILL to every program whose name begins so, of those that were started with that variable."""
    _kill_all(lambda: _programs(name, variable, value), patience)


def own_folder(prefix: str) -> Path:
    """Makes a folder for this process among the system's temporary ones; `ownerless` has it once the process is gone.

    Its path is short, as Unix sockets may be put into it, whose own paths end at 107 characters. Raises `OSError`, and
    leaves nothing then.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        _sign(folder)
    except OSError:  # such as for want of room on the disk: nobody could tell whose it was
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def keep_owned(folder: Path) -> None:
    """Has `ownerless` know a folder of this process for longer than old temporary files are kept. Raises `OSError`."""
    try:
        os.utime(folder / _OWNER)
    except FileNotFoundError:  # as where the machine slept for days
        _sign(folder)


def owned(prefix: str) -> list[Path]:
    """The folders of such processes of this user as live, or are not known to have ended."""
    return [folder for folder, dead in _folders(prefix) if not dead]


def ownerless(prefix: str) -> list[Path]:
    """The folders of processes, of this user, that died without a chance to remove them."""
    return [folder for folder, dead in _folders(prefix) if dead]


def _sign(folder: Path) -> None:
    (folder / _OWNER).write_text(json.dumps(identity()))


def died(prefix: str) -> list[int]:
    """The numbers of the processes of `ownerless` folders, but for those that another process has by now."""
    found = []
    for folder in ownerless(prefix):
        with contextlib.suppress(OSError, ValueError):  # somebody else removed it
            found.append(int(json.loads((folder / _OWNER).read_text())["pid"]))
    return [pid for pid in found if not psutil.pid_exists(pid)]


def _folders(prefix: str) -> Iterator[tuple[Path, bool]]:
    """Every folder with whether its owner is dead."""
    for owner in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*/{_OWNER}")):
        with contextlib.suppress(OSError, ValueError):
            if owner.stat().st_uid == os.getuid():
                yield owner.parent, is_dead(json.loads(owner.read_text()))


def _kill_all(found: Callable[[], list[psutil.Process]], patience: float) -> None:
    deadline = time.monotonic() + patience
    while processes := found():
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)  # not psutil's wait: it would take a child's exit status away from its Popen


def _programs(name: str, variable: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if not process.name().startswith(name) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def _members(session: int | None, marks: Sequence[str]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getsid(process.pid) == session or any(mark in part for part in process.cmdline() for mark in marks):
                found.append(process)
    return found


def _host() -> tuple[str, int]:
    """Where a pid means something: the running kernel and the pid namespace. Raises `OSError` without Linux's /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, Path("/proc/self/ns/pid").stat().st_ino


def _start_ticks(pid: int) -> int | None:
    """When the process started, in ticks since boot; None for a zombie. Raises `FileNotFoundError`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError as error:  # it ended between open and read
        raise FileNotFoundError(pid) from error
    return None if fields[0] in "ZX" else int(fields[19])


def _launcher(death: signal.Signals) -> list[str]:
    return [sys.executable, "-m", __name__, str(os.getpid()), death.name]


def _launch() -> None:
    parent, death, *command = sys.argv[1:]
    die_with_parent(int(parent), signal.Signals[death])
    os.execvp(command[0], command)


if __name__ == "__main__":
    _launch()
