"""The processes that run one experiment each: started, told of their shares, and seen to their end."""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from service.database.outages import Backoff
from service.queue.leases import Lease
from service.settings import Settings
from ttsv.runtime.faults import fault
from workers.node.machine import local_cpus, memory_bytes
from workers.node.processes import cpu_seconds, kill_session, spawn, stop
from workers.trial_process.trial_folder import tune_folder
from workers.worker.ray_cluster import Cluster

logger = logging.getLogger(__name__)

DRIVER = (sys.executable, "-m", "workers.driver")
LONGEST_PAUSE = 60.0
"""Between the deaths of a driver and its next start, in seconds."""
START_SECONDS = 300.0
"""For so long a driver may start, and while it computes has its lease renewed for it: imports can take longer."""
_HEALTHY_SECONDS = 60.0
_BYTES = 250 * 10**6
"""What a driver has in memory; 90 MB of it all share."""
_OF_A_CORE = 16
"""Each computes for 2.7 seconds to start, and then for a fiftieth of the time where its trial has an epoch a second."""
_LEAST = 8


def most_drivers() -> int:
    """How many drivers this machine holds beside all else: by a quarter of its memory, and by its cores."""
    return max(_LEAST, min(memory_bytes() // 4 // _BYTES, _OF_A_CORE * local_cpus()))


@dataclass(eq=False)
class Driver:
    """A driver's process, what it was last told of its share, and whether its end was asked for.

    `beats`: how often its lease was renewed for it.
    """

    lease: Lease
    child: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    told: str | None = None
    unwanted: bool = False
    beats: int = 0
    _computed: float = 0.0
    _line: bytes = b""
    _next: bytes = b""

    def tell(
        self,
        slots: int,
        most: int,
        shunned: Sequence[str] = (),
        staying: Mapping[str, int] | None = None,
        *,
        besides: int = 0,
        unfit: Sequence[str] = (),
    ) -> None:
        """Says how many trials may begin, on which nodes none may, and how many may go on, where that is news.

        `staying`: how many at most on which nodes. `besides`: so many of the slots are for trials on nodes that are
        `unfit`. It waits for nobody: what a driver that stands still has no room for is said once it has, the newest
        alone.
        """
        share: dict[str, object] = {"slots": slots, "most": most}
        share |= ({"shunned": list(shunned)} if shunned else {}) | ({"staying": dict(staying)} if staying else {})
        share |= {"besides": besides, "unfit": list(unfit)} if besides else {}
        line = json.dumps(share)
        if self.told != line:
            self.told, self._next = line, f"{line}\n".encode()
        self._say()

    def _say(self) -> None:
        assert self.child.stdin is not None, "drivers are spawned with a pipe"
        pipe = self.child.stdin.fileno()
        os.set_blocking(pipe, False)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is dead, which is noticed elsewhere
            while self._line or self._next:
                if not self._line:
                    self._line, self._next = self._next, b""
                self._line = self._line[os.write(pipe, self._line) :]

    def is_starting(self, heartbeat: int) -> bool:
        """Whether it has not renewed its lease itself yet, as the heartbeat tells, and may take longer to."""
        return heartbeat <= self.beats and time.monotonic() - self.started < START_SECONDS

    def gets_on(self) -> bool:
        """Whether it has computed since this was last asked: not while it is stopped, or waits for a lost disk."""
        before, self._computed = self._computed, cpu_seconds(self.child.pid)
        return self._computed > before

    def end(self) -> None:
        """Asks it to write what it knows and to give its experiment back."""
        self.unwanted = True
        self.child.terminate()

    def kill(self) -> None:
        """Ends it at once, because of what is not its fault."""
        self.unwanted = True
        stop(self.child, grace=0)


class Drivers:
    """A worker's drivers. `command` runs one experiment, on the cluster."""

    def __init__(self, settings: Settings, cluster: Cluster, command: Sequence[str] = DRIVER) -> None:
        self._settings, self._cluster, self._command = settings, cluster, command
        self._drivers: dict[Lease, Driver] = {}
        self._troubles: dict[int, _Trouble] = {}
        self._refused: list[Lease] = []

    def __iter__(self) -> Iterator[Driver]:
        return iter(list(self._drivers.values()))

    def __len__(self) -> int:
        return len(self._drivers)

    def of(self, lease: Lease) -> Driver | None:
        """The driver that holds a lease."""
        return self._drivers.get(lease)

    def start(self, lease: Lease) -> Driver | None:
        """Runs the experiment of a lease; call it in a thread that lives as long as the driver is wanted.

        None where the machine refuses, such as for want of room on its disk: `collect` gives the lease back.
        """
        number, fence = str(lease.experiment_id), str(lease.fence)
        log = self._settings.data_dir / "logs" / f"experiment-{number}-{fence}.log"
        command = [*self._command, "--experiment", number, "--fence", fence]
        try:
            fault("after_claim")
            child = spawn(command, env=self._environment(), log=log, death=signal.SIGTERM, stdin=subprocess.PIPE)
        except OSError as error:
            pause = self._trouble_of(lease.experiment_id).failed()
            logger.error("no driver can be started for experiment %s: %s; another try in %.1f s", number, error, pause)
            self._refused.append(lease)
            return None
        self._drivers[lease] = driver = Driver(lease, child)
        logger.info("running experiment %s (fence %s, log %s)", number, fence, log)
        return driver

    def collect(self) -> list[Lease]:
        """What drivers had that ended meanwhile, or had none; after a death or a refusal the next comes more slowly."""
        ended = [driver for driver in self if driver.child.poll() is not None]
        for driver in ended:
            self._clean_up(driver)
            code, number = driver.child.returncode, driver.lease.experiment_id
            if code == 0 or time.monotonic() - driver.started > _HEALTHY_SECONDS:
                self._troubles.pop(number, None)
            if code != 0 and not driver.unwanted:
                pause = self._trouble_of(number).failed()
                logger.error("the driver of experiment %d ended with code %d; another in %.1f s", number, code, pause)
        return self._without_driver() + [driver.lease for driver in ended]

    def drain(self, grace: float) -> list[Lease]:
        """Lets all write what they know, for so many seconds, and ends them; what they had."""
        ended = list(self)
        for driver in ended:
            driver.end()
        deadline = time.monotonic() + grace
        for driver in ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.child.wait(max(0.0, deadline - time.monotonic()))
            driver.kill()
            self._clean_up(driver)
        return self._without_driver() + [driver.lease for driver in ended]

    def trouble(self, experiment_id: int) -> str | None:
        """Why an experiment's next driver must wait, or None."""
        trouble = self._troubles.get(experiment_id)
        if trouble is None or time.monotonic() >= trouble.until:
            return None
        times = "once" if trouble.deaths == 1 else f"{trouble.deaths} times"
        return f"its driver died or could not start {times} (see the worker's logs) and is started again soon"

    def _without_driver(self) -> list[Lease]:
        refused, self._refused = self._refused, []
        return refused

    def _trouble_of(self, experiment_id: int) -> "_Trouble":
        return self._troubles.setdefault(experiment_id, _Trouble())

    def _clean_up(self, driver: Driver) -> None:
        lease = driver.lease
        del self._drivers[lease]
        if driver.child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                driver.child.stdin.close()
        kill_session(driver.child.pid)
        shutil.rmtree(tune_folder(self._settings.data_dir, lease.experiment_id, lease.fence), ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        """Our environment, with our settings in place of what it says of them."""
        names = {field: f"TTSV_{field.upper()}" for field in Settings.model_fields}
        env = {name: value for name, value in os.environ.items() if name not in names.values()}
        values = {names[field]: value for field, value in self._settings.model_dump(mode="json").items()}
        env |= {  # lists of names are read with commas between them
            name: ",".join(value) if isinstance(value, list) else str(value)
            for name, value in values.items()
            if value is not None
        }
        return env | self._cluster.env() | {"RAY_ADDRESS": self._cluster.address}


class _Trouble:
    """Deaths of an experiment's drivers, one after another: nobody's fault but theirs, and no reason to hurry."""

    def __init__(self) -> None:
        self._backoff = Backoff(first=1, longest=LONGEST_PAUSE)
        self.deaths, self.until = 0, 0.0

    def failed(self) -> float:
        """Counts one; how long to wait."""
        pause = self._backoff.failed()
        self.deaths, self.until = self.deaths + 1, time.monotonic() + pause
        return pause
