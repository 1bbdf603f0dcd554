"""Everything on one machine: migrates, then keeps the API and one worker running as children."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from service.access.keys import refuse_without_keys
from service.database.engine import Database
from service.database.outages import Backoff
from service.errors import UserError
from service.settings import Settings
from service.settings.logs import errors_in
from service.upkeep.home import refuse_lost
from service.upkeep.migrate import migrate
from service.upkeep.restore import refuse_half_restored
from workers.node.processes import spawn, stop
from workers.worker.ray_cluster import STUCK

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 600.0
"""How long a machine may refuse to start a child again before its siblings are ended, too."""
_LONGEST_PAUSE = 30.0
_GRACE_SECONDS = 30.0
_HEALTHY_SECONDS = 30.0
_MAX_QUICK_RESTARTS = 5


class Child:
    """A process that is started again when it ends, unless it keeps ending at once and nobody kills it.

    Where the machine refuses to start it again, such as for want of memory or of room on the disk, that is tried for
    `PATIENCE_SECONDS`, while its siblings go on. The first start raises `OSError` then.
    """

    def __init__(self, name: str, start: Callable[[Path], subprocess.Popen[bytes]], log: Path) -> None:
        self.name = name
        self.log = log
        self._start = start
        self._quick = 0
        self._backoff = Backoff(first=0.5, longest=_LONGEST_PAUSE)
        self._refused_since: float | None = None
        self._launch_after = 0.0
        self._launch()

    def _launch(self) -> None:
        self.process = self._start(self.log)
        self._started_at = time.monotonic()

    def tend(self) -> None:
        """Starts it again if it ended; raises `UserError` if that does not help, with the log's end where there is one.

        To be called again and again; it does not wait for a machine that refuses.
        """
        code = self.process.poll()
        if code is None or time.monotonic() < self._launch_after:
            return
        if self._refused_since is None:
            self._count(code)
        try:
            self._launch()
        except OSError as error:
            self._put_off(error)
        else:
            self._refused_since = None
            self._backoff.succeeded()

    def stop(self, grace: float) -> None:
        """Ends it, and after so many seconds what is left of its session."""
        if self._refused_since is None:  # else it ended long ago, and its number may be another process's by now
            stop(self.process, grace)

    def _count(self, code: int) -> None:
        """Counts one that ended; gives up where too many did at once. Who was killed did not end for what is wrong."""
        lived = time.monotonic() - self._started_at
        self._quick = 0 if lived > _HEALTHY_SECONDS else self._quick + (code != -signal.SIGKILL)
        if self._quick >= _MAX_QUICK_RESTARTS:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise UserError(f"the {self.name} ended {self._quick} times at once; the end of {self.log}:\n{tail}")
        if lived < 1:
            time.sleep(0.5)

    def _put_off(self, error: OSError) -> None:
        """Lets the next try wait, longer each time; gives up after too long."""
        now = time.monotonic()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since >= PATIENCE_SECONDS:
            raise UserError(
                f"the {self.name} ended, and could not be started again for {PATIENCE_SECONDS:g} s: {error}; make room "
                "(memory, processes, disk), then start this again"
            ) from error
        pause = self._backoff.failed()
        self._launch_after = now + pause
        logger.error("the %s cannot be started, trying again in %.1f s: %s", self.name, pause, error)


class LocalStack:
    """The API and a worker, as a context manager; nothing is left when it ends, not even after a SIGKILL.

    It listens before the API runs, so a client may connect at once, and a restarted API keeps its address. `port`
    overrides the settings' (0: a free one); a default port that is taken gives way to a free one.
    Use it from the main thread: the children end with the thread that started them.
    """

    def __init__(self, settings: Settings, *, port: int | None = None) -> None:
        self.settings = settings
        self._port = port
        self._log = settings.data_dir / "logs" / "worker.log"
        self._read = 0
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        self.settings.refuse_open_network()
        refuse_half_restored(self.settings)
        with closing(Database(self.settings.url)) as database:
            refuse_lost(database, self.settings)
            migrate(database)
            refuse_without_keys(database, self.settings)
        self._socket = self._listen()
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        # SIGTERM ends us like Ctrl-C, through the `with` block's end.
        self._previous = signal.signal(signal.SIGTERM, _exit)
        self._read = self._log.stat().st_size if self._log.exists() else 0
        try:
            self._children.append(Child("API", self._start_api, self._log.with_name("api.log")))
            self._children.append(Child("worker", self._start_worker, self._log))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        signal.signal(signal.SIGTERM, self._previous)

    def tend(self) -> None:
        """Starts again what ended; to be called every now and then."""
        for child in self._children:
            child.tend()

    def complaints(self) -> list[str]:
        """What the worker, which lives, has said since the last call of a cluster that does not start."""
        try:
            with self._log.open("rb") as file:
                if self._log.stat().st_size < self._read:  # whoever keeps logs short emptied it
                    self._read = 0
                file.seek(self._read)
                lines = file.read()
        except OSError:  # it was moved away, or the disk fails: the worker goes on
            return []
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read += len(whole)
        return [said for said in errors_in(whole.decode(errors="replace")) if said.startswith(STUCK)]

    def stay(self, say: Callable[[str], object]) -> None:
        """Tends until Ctrl-C or SIGTERM, and says what the worker complains of."""
        try:
            while True:
                self.tend()
                for complaint in self.complaints():
                    say(f"the worker tries again and again: {complaint} (see {self._log})")
                time.sleep(0.5)
        except KeyboardInterrupt:
            return

    def stop(self) -> None:
        """Ends worker and API in this order: running trials are released, to go on at the next start."""
        # A second Ctrl-C shall not leave the ending half done; it is bounded by the grace period anyway.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            while self._children:
                self._children.pop().stop(_GRACE_SECONDS)
            self._socket.close()
        finally:
            signal.signal(signal.SIGINT, previous)

    def _listen(self) -> socket.socket:
        port = self.settings.port if self._port is None else self._port
        family = socket.AF_INET6 if ":" in self.settings.host else socket.AF_INET
        try:
            return socket.create_server((self.settings.host, port), family=family, backlog=2048)
        except OSError as error:
            if self._port is None and "port" not in self.settings.model_fields_set:
                return socket.create_server((self.settings.host, 0), family=family, backlog=2048)
            raise UserError(
                f"cannot listen on {self.settings.host}:{port} ({error.strerror}); --port 0 picks one"
            ) from None

    def _start(self, log: Path, *command: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        env = os.environ | {"TTSV_DATA_DIR": str(self.settings.data_dir)}
        python = [sys.executable, "-m", "workers.cli"]
        return spawn([*python, *command], env=env, log=log, death=signal.SIGTERM, pass_fds=pass_fds)

    def _start_api(self, log: Path) -> subprocess.Popen[bytes]:
        listening = self._socket.fileno()
        return self._start(log, "api", "--fd", str(listening), pass_fds=[listening])

    def _start_worker(self, log: Path) -> subprocess.Popen[bytes]:
        return self._start(log, "worker")


def _exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)
