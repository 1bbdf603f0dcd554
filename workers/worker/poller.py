"""The worker: claims experiments, runs each in a process of its own, and takes over from workers that died."""

import contextlib
import json
import logging
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import FrameType

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.database import now
from service.database.engine import Database
from service.database.outages import Backoff
from service.errors import LeaseLostError
from service.queue import driver_reads, leases, nodes
from service.queue.cluster import Node
from service.queue.contenders import Contender, Specs, contenders, give_up_unfit, say_why
from service.queue.leases import Lease, Watched
from service.queue.shares import NEEDS, Amount, Usage, allocate, shortage
from service.settings import Settings
from workers.node.machine import local_cpus, local_gpus
from workers.node.processes import identity, is_dead, kill_session, spawn, stop
from workers.trial_process.trial_folder import remove_checkpoints, tune_folder
from workers.worker.observation import Observation
from workers.worker.ray_cluster import Cluster, Door, LocalCluster

logger = logging.getLogger(__name__)

DRIVER = (sys.executable, "-m", "workers.driver")
GRACE_SECONDS = 20.0
"""How long drivers may take to write what they know when the worker is told to stop."""
SWEEP_SECONDS = 60.0
"""Between two looks for checkpoints that nobody will resume from."""
_SWEPT_AFTER = timedelta(hours=1)
"""What was cancelled longer ago was swept, except before a worker's first look."""
_HEALTHY_SECONDS = 60.0
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class _Driver:
    """A driver's process, and what it was last told of its share."""

    lease: Lease
    child: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    told: list[str] = field(default_factory=list)

    def tell(self, slots: int, most: int) -> None:
        """Says how many trials may begin and how many may go on, where that is news."""
        share = json.dumps({"slots": slots, "most": most})
        if self.told[-1:] != [share]:
            self.told[:] = [share]
            assert self.child.stdin is not None, "drivers are spawned with a pipe"
            with contextlib.suppress(BrokenPipeError):  # it is dead, which is noticed elsewhere
                self.child.stdin.write(f"{share}\n".encode())
                self.child.stdin.flush()


class Worker:
    """Call `run` in the main thread: the kernel ends the children together with the thread that started them.

    `driver` is the command that runs one experiment; `cluster` is by default the one that `RAY_ADDRESS` names, or a
    local one.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        *,
        driver: Sequence[str] = DRIVER,
        cluster: Cluster | None = None,
    ) -> None:
        self._settings, self._database, self._driver_command = settings, database, driver
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self._identity = identity()
        self._cpus = settings.worker_cpus or local_cpus()
        self._gpus = local_gpus(os.environ) if settings.worker_gpus is None else settings.worker_gpus
        self._cluster = cluster or self._choose_cluster()
        self._cluster_backoff = Backoff(first=1, longest=_LONGEST_PAUSE)
        self._drivers: list[_Driver] = []
        self._ended: list[Lease] = []
        self._troubled: dict[int, _Trouble] = {}
        self._specs, self._usage = Specs(), Usage()
        self._shared_at = time.monotonic()
        self._greet_after = 0.0
        self._nodes_after = 0.0
        self._nodes: Sequence[Node] = ()
        self._sweep_after = 0.0
        self._swept = False
        self._standstill = Standstill(longest_step=max(1.0, 2 * settings.poll_seconds))
        self._outage = Backoff(first=settings.poll_seconds)
        self._stopping = False
        self._wake_reader, self._wake_writer = os.pipe()

    def run(self) -> None:
        """Works until SIGTERM or SIGINT, then lets the drivers write what they know, and leaves nothing behind."""
        logger.info("worker %s: %d CPUs, %d GPUs", self.name, self._cpus, self._gpus)
        with self._signals():
            try:
                self._cluster.start()
                while not self._stopping:
                    self._sleep(self._turn())
            finally:
                self._drain()

    def _choose_cluster(self) -> Cluster:
        settings = self._settings
        observation = Observation(settings.data_dir, shared=settings.shared_data)
        if address := os.environ.get("RAY_ADDRESS"):
            return Cluster(address, observation)
        door = Door.of(settings)
        return LocalCluster(settings.data_dir, cpus=self._cpus, gpus=self._gpus, door=door, observation=observation)

    def _turn(self) -> float:
        """One round of everything; how long to pause after it."""
        self._mind_cluster()
        self._collect()
        try:
            self._release_ended(drained=False)
            self._greet()
            self._record_nodes()
            self._reap()
            self._share()
            self._sweep()
        except SQLAlchemyError as error:
            self._standstill.interrupt()
            pause = self._outage.failed()
            if self._outage.failures == 1:
                logger.warning("the database does not answer, trying again: %s", error)
            return pause
        if self._outage.failures:
            logger.info("the database is back")
        self._outage.succeeded()
        return self._settings.poll_seconds

    def _mind_cluster(self) -> None:
        """Drivers of a dead cluster would hang for a minute: they are killed, and a fresh cluster starts."""
        if self._cluster.ready():
            self._cluster_backoff.succeeded()
        elif self._cluster.failed():
            logger.error("the Ray cluster is gone; starting another (see %s)", self._settings.data_dir / "logs")
            for driver in self._drivers:
                stop(driver.child, grace=0)
            self._cluster.stop()
            self._sleep(self._cluster_backoff.failed())
            self._cluster.start()

    def _collect(self) -> None:
        """Notices drivers that ended, and keeps the pace of claims down while they die young."""
        for driver in [driver for driver in self._drivers if driver.child.poll() is not None]:
            self._drivers.remove(driver)
            self._clean_up(driver)
            code, number = driver.child.returncode, driver.lease.experiment_id
            if code == 0 or time.monotonic() - driver.started > _HEALTHY_SECONDS:
                self._troubled.pop(number, None)
            if code != 0:
                pause = self._troubled.setdefault(number, _Trouble()).failed()
                logger.error("the driver of experiment %d ended with code %d; another in %.1f s", number, code, pause)

    def _clean_up(self, driver: _Driver) -> None:
        if driver.child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                driver.child.stdin.close()
        kill_session(driver.child.pid)
        lease = driver.lease
        shutil.rmtree(tune_folder(self._settings.data_dir, lease.experiment_id, lease.fence), ignore_errors=True)
        self._ended.append(lease)

    def _release_ended(self, *, drained: bool) -> None:
        """Gives back what ended drivers still hold: those that completed or released hold nothing."""
        while self._ended:
            lease = self._ended[0]
            with contextlib.suppress(LeaseLostError):
                self._database.write(partial(leases.release, lease=lease, drained=drained))
            self._ended.pop(0)

    def _greet(self) -> None:
        if time.monotonic() >= self._greet_after:
            greet = partial(leases.greet, worker=self.name, cpus=self._cpus, gpus=self._gpus, bf16=self._cluster.bf16())
            self._database.write(greet)
            self._greet_after = time.monotonic() + self._settings.beat_seconds

    def _record_nodes(self) -> None:
        """Says which nodes the cluster has: when something changed, and with every beat."""
        seen = self._cluster.nodes() if self._cluster.ready() else None
        if seen is None or (seen == self._nodes and time.monotonic() < self._nodes_after):
            return
        self._database.write(partial(nodes.record, worker=self.name, seen=seen))
        self._nodes, self._nodes_after = seen, time.monotonic() + self._settings.beat_seconds

    def _sweep(self) -> None:
        """Removes what cancelled trials would have resumed from; whoever ran them was killed in the middle of it."""
        if time.monotonic() < self._sweep_after:
            return
        since = now() - _SWEPT_AFTER if self._swept else None
        with self._database.read() as session:
            trial_ids = driver_reads.cancelled_trials(session, since)
        for trial_id in trial_ids:
            remove_checkpoints(self._settings.data_dir, trial_id)
        self._sweep_after, self._swept = time.monotonic() + SWEEP_SECONDS, True

    def _reap(self) -> None:
        """Requeues experiments of dead workers; kills drivers of our own whose heartbeat stands still."""
        with self._database.read() as session:
            running = leases.watch(session)
        ours = {driver.lease: driver for driver in self._drivers}
        for seen, seconds in self._standstill.look(running):
            expired = seconds >= self._settings.lease_seconds
            driver = ours.get(Lease(seen.experiment_id, seen.fence))
            if driver is not None:
                if expired:
                    logger.error("the driver of experiment %d gives no sign of life: killing it", seen.experiment_id)
                    stop(driver.child, grace=0)
                continue
            # A claim of our own without a driver: the database's answer to it never arrived.
            unknown = self._identity is not None and seen.process == self._identity
            gone = expired or unknown or is_dead(seen.process)
            if gone and self._database.write(partial(leases.reap, seen=seen, by=self.name)):
                logger.warning("experiment %d is queued again: %s is gone", seen.experiment_id, seen.worker)

    def _share(self) -> None:
        """Divides the cluster anew: drivers are told their shares, and experiments claimed that have one now."""
        seen = self._cluster.nodes() if self._cluster.ready() and not self._stopping else None
        if seen is None:
            return
        room = [Amount(node.cpus, node.gpus, node.memory_gib) for node in seen if node.alive]
        drivers = {driver.lease.experiment_id: driver for driver in self._drivers}
        with self._database.read() as session:
            found = contenders(session, drivers.keys(), self._specs)
        elapsed, self._shared_at = time.monotonic() - self._shared_at, time.monotonic()
        self._usage.add([one.demand for one in found if one.claimed], room, elapsed)
        waits = {one.demand.experiment_id: self._hindrance(one, room) for one in found}
        demands = [one.demand for one in found if waits[one.demand.experiment_id] is None]
        most = self._settings.max_experiments
        shares = allocate(demands, room, most_experiments=most, usage=self._usage)
        holding = allocate(demands, room, most_experiments=most) if any(one.preempt for one in found) else {}
        self._make_room(found, shares)
        for one in found:
            number = one.demand.experiment_id
            slots = shares.get(number, 0)
            if (driver := drivers.get(number)) is not None:
                driver.tell(slots, max(slots, holding.get(number, 0)) if one.preempt else sys.maxsize)
            elif slots and len(self._drivers) < 2 * most:
                self._claim(number, slots)
            elif not one.demand.trials and not one.claimed:
                self._database.write(partial(self._complete, experiment_id=number))
            if waits[number] is None and one.demand.trials and not slots and not one.demand.running:
                waits[number] = _behind(shares)
        self._say_why(found, waits)

    def _hindrance(self, one: Contender, room: Sequence[Amount]) -> str | None:
        """Why the experiment could run nothing now even if it were alone."""
        if (reason := shortage(one.demand.needs, room)) is not None:
            return reason
        trouble = self._troubled.get(one.demand.experiment_id)
        if trouble is not None and not one.claimed and time.monotonic() < trouble.until:
            return f"its driver died {trouble.deaths} times (see the worker's logs) and is started again soon"
        return None

    def _make_room(self, found: Sequence[Contender], shares: Mapping[int, int]) -> None:
        """Where there are many drivers, those that have nothing to run give their experiments back."""
        if len(self._drivers) < self._settings.max_experiments:
            return
        idle = {one.demand.experiment_id for one in found if one.demand.running == 0} - shares.keys()
        for driver in self._drivers:
            if driver.lease.experiment_id in idle:
                driver.child.terminate()

    def _say_why(self, found: Sequence[Contender], waits: Mapping[int, str | None]) -> None:
        """Writes down what is news of who waits for what, and gives up what never fitted."""
        patience = self._settings.unfit_seconds or math.inf
        news: dict[int, str | None] = {}
        unfit = set()
        for one in found:
            number, reason = one.demand.experiment_id, waits[one.demand.experiment_id]
            misfit = reason is not None and reason.startswith(NEEDS)
            if misfit:
                unfit.add(number)
            if reason != one.waiting or misfit != (one.unfit_since is not None):
                news[number] = reason
            elif misfit and not one.claimed and _waited(one) > patience:
                why = f"{reason}, and has for {patience:g} s (TTSV_UNFIT_SECONDS); ask for less, or add a node"
                self._database.write(partial(give_up_unfit, experiment_id=number, worker=self.name, reason=why))
        if news:
            self._database.write(partial(say_why, reasons=news, unfit=unfit))

    def _claim(self, experiment_id: int, slots: int) -> None:
        claim = partial(leases.claim, worker=self.name, process=self._identity, experiment_id=experiment_id)
        lease = self._database.write(claim)
        if lease is not None:
            self._start_driver(lease)
            self._drivers[-1].tell(slots, sys.maxsize)

    def _complete(self, session: Session, experiment_id: int) -> None:
        """Ends an experiment of which nothing is left to do; whoever had it could not."""
        lease = leases.claim(session, self.name, self._identity, experiment_id)
        if lease is not None and not leases.complete(session, lease):
            leases.release(session, lease, drained=True)  # something was added meanwhile

    def _start_driver(self, lease: Lease) -> None:
        number, fence = str(lease.experiment_id), str(lease.fence)
        log = self._settings.data_dir / "logs" / f"experiment-{number}-{fence}.log"
        command = [*self._driver_command, "--experiment", number, "--fence", fence]
        child = spawn(command, env=self._driver_environment(), log=log, death=signal.SIGTERM, stdin=subprocess.PIPE)
        self._drivers.append(_Driver(lease, child))
        logger.info("running experiment %s (fence %s, log %s)", number, fence, log)

    def _driver_environment(self) -> dict[str, str]:
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

    def _drain(self) -> None:
        """Stops the drivers, gives back what they hold without spending an attempt, stops the cluster."""
        logger.info("worker %s: stopping", self.name)
        for driver in self._drivers:
            driver.child.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for driver in self._drivers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.child.wait(max(0.0, deadline - time.monotonic()))
            stop(driver.child, grace=0)
            self._clean_up(driver)
        self._drivers = []
        self._cluster.stop()
        try:
            self._release_ended(drained=True)
            self._database.write(partial(leases.part, worker=self.name))
            self._database.write(partial(nodes.record, worker=self.name, seen=()))
        except SQLAlchemyError as error:
            logger.warning("the database is away; other workers will find this one's leases: %s", error)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        os.write(self._wake_writer, b".")

    def _sleep(self, seconds: float) -> None:
        """Pauses until a signal comes, at most so long."""
        select.select([self._wake_reader], [], [], seconds)


def _waited(one: Contender) -> float:
    """For how many seconds an experiment has fitted no node."""
    return 0.0 if one.unfit_since is None else (now() - one.unfit_since).total_seconds()


class _Trouble:
    """Deaths of an experiment's drivers, one after another: nobody's fault but theirs, and no reason to hurry."""

    def __init__(self) -> None:
        self._backoff = Backoff(first=1, longest=_LONGEST_PAUSE)
        self.deaths, self.until = 0, 0.0

    def failed(self) -> float:
        """Counts one; how long to wait."""
        pause = self._backoff.failed()
        self.deaths, self.until = self.deaths + 1, time.monotonic() + pause
        return pause


def _behind(shares: Mapping[int, int]) -> str:
    """Why an experiment that fits must wait."""
    first = ", ".join(str(number) for number in sorted(shares)[:5]) + (", ..." if len(shares) > 5 else "")
    return f"others come first: the cluster is shared by experiments {first}" if shares else "the cluster is full"


class Standstill:
    """Watches the heartbeats of running experiments.

    Only time between two successive looks counts, and of each such interval no more than `longest_step`: while the
    database was away, this process was stopped or the machine slept, nobody's heartbeat could be seen, so that time
    is held against no one.
    """

    def __init__(self, longest_step: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_step, self._clock = longest_step, clock
        self._last_look: float | None = None
        self._still: dict[tuple[int, int, int], float] = {}

    def look(self, running: Sequence[Watched]) -> list[tuple[Watched, float]]:
        """Each running experiment with the seconds for which its heartbeat has stood still."""
        now = self._clock()
        step = 0.0 if self._last_look is None else min(now - self._last_look, self._longest_step)
        self._last_look = now
        before = self._still
        self._still = {key: before[key] + step if key in before else 0.0 for key in map(_sign, running)}
        return [(seen, self._still[_sign(seen)]) for seen in running]

    def interrupt(self) -> None:
        """A look failed: the time until the next one does not count."""
        self._last_look = None


def _sign(seen: Watched) -> tuple[int, int, int]:
    return seen.experiment_id, seen.fence, seen.heartbeat
