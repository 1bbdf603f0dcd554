"""The worker: claims experiments, runs each in a process of its own, and takes over from workers that died."""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType

from sqlalchemy.exc import SQLAlchemyError

from service.database.engine import Database
from service.database.outages import Backoff
from service.errors import LeaseLostError, UserError
from service.experiments.transitions import HEARD_WITHIN
from service.queue import leases, nodes
from service.queue.cluster import Node
from service.queue.leases import Lease, Watched
from service.settings import Settings
from service.upkeep.home import problem_of
from workers.node.cards import Cards
from workers.node.machine import local_cpus
from workers.node.mps import Mps
from workers.node.processes import died, identity, is_dead, stop
from workers.node.pulse import beat
from workers.node.raylet import PREFIX
from workers.worker.drivers import DRIVER, LONGEST_PAUSE, Drivers, most_drivers
from workers.worker.job_time import Allocation
from workers.worker.observation import Observation
from workers.worker.ray_cluster import STUCK, Cluster, Door, LocalCluster
from workers.worker.scheduler import Scheduler

logger = logging.getLogger(__name__)

GRACE_SECONDS = 20.0
"""How long drivers may take to write what they know when the worker is told to stop."""
_MANY_ENDS = 2
"""So often a cluster may end before it is ready until it is said that no trial can run: a start may take a minute."""
AWAY_SECONDS = 120.0
"""So long the place of the trials' files may be another one than the API's, as a mount that is made anew is."""
STRAY_SECONDS = 10.0
"""How long a driver may take to leave whose lease is lost, as by a cancelling: it looks every second."""


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
        allocation: Allocation | None = None,
    ) -> None:
        self._settings, self._database = settings, database
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self._identity = identity()
        # Of neighbours that were killed; to be asked before what they left is removed.
        self._dead = {f"{socket.gethostname()}-{pid}" for pid in died(PREFIX)} - {self.name}
        self._cpus = settings.worker_cpus or local_cpus()
        # Of a cluster that somebody else runs this machine offers no card.
        elsewhere = cluster is None and "RAY_ADDRESS" in os.environ
        self._cards = Cards(0 if elsewhere else settings.worker_gpus, os.environ)
        try:
            self._cluster = cluster or self._choose_cluster()
        except UserError:
            self._cards.close()
            raise
        self._cluster_backoff = Backoff(first=1, longest=LONGEST_PAUSE)
        self._refusal = ""
        self._drivers = Drivers(settings, self._cluster, driver)
        self._most = settings.max_experiments or most_drivers()
        self._scheduler = Scheduler(settings, database, self._drivers, self.name, self._identity, most=self._most)
        self._away_since: float | None = None
        self._ended: list[Lease] = []
        self._greet_after = self._heard_until = self._files_after = 0.0
        self._nodes_after = 0.0
        self._nodes: Sequence[Node] = ()
        self._strays: dict[Lease, float] = {}
        self._standstill = Standstill(longest_step=max(1.0, 2 * settings.poll_seconds))
        self._outage = Backoff(first=settings.poll_seconds)
        self._allocation, self._busy = allocation or Allocation(), time.monotonic()
        self._stopping = False
        self._wake_reader, self._wake_writer = os.pipe()

    def run(self) -> bool:
        """Works until SIGTERM or SIGINT, then lets the drivers write what they know, and leaves nothing behind.

        No longer than its allocation: True where that ended while there was something to do.
        """
        logger.info(
            "worker %s: %d CPUs, %d GPUs, %d experiments at a time",
            self.name,
            self._cpus,
            self._cards.count,
            self._most,
        )
        with self._signals():
            try:
                self._start_cluster()
                while not self._stopping:
                    began = time.monotonic()
                    pause = self._turn()
                    beat()
                    if self._allocation.is_idle(self._busy):
                        break
                    if self._allocation.is_over():
                        return self._busy >= began
                    self._sleep(pause)
                return False
            finally:
                self._drain()

    def _choose_cluster(self) -> Cluster:
        settings = self._settings
        observation = Observation(settings.data_dir, shared=settings.shared_data, storage=settings.storage)
        if address := os.environ.get("RAY_ADDRESS"):
            if settings.worker_mps:
                raise UserError(
                    f"TTSV_WORKER_MPS = true, and RAY_ADDRESS = {address}: whoever starts that cluster starts MPS for "
                    "it; unset one of the two"
                )
            return Cluster(address, observation)
        return LocalCluster(
            settings.data_dir,
            cpus=self._cpus,
            gpus=self._cards.count,
            environment=self._cards.environment,
            door=Door.of(settings),
            observation=observation,
            mps=Mps(self._cards.names) if settings.worker_mps else None,
        )

    def _turn(self) -> float:
        """One round of everything; how long to pause after it."""
        self._mind_cluster()
        self._ended += self._drivers.collect()
        try:
            self._release_ended(drained=False)
            self._greet()
            self._mind_files()
            self._reap()
            if self._dead:  # only now: what they ran ended when they were last heard of
                self._database.write(partial(nodes.bury, workers=self._dead))
                self._dead.clear()
            self._share()
            self._record_nodes()  # last: whoever shares the cluster is told by having written its nodes since
        except SQLAlchemyError as error:
            self._standstill.interrupt()
            self._busy = time.monotonic()  # who cannot look does not know of nothing to do
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
            logs, said = self._settings.data_dir / "logs", self._refusal or self._cluster.last_words()
            logger.error("the Ray cluster is gone; starting another (see %s)%s", logs, said and f": {said}")
            for driver in self._drivers:
                driver.kill()
            self._cluster.stop()
            pause = self._cluster_backoff.failed()
            if self._cluster_backoff.failures == _MANY_ENDS:
                logger.error("%s, so that no trial can run%s", STUCK, said and f": {said}")
            self._sleep(pause)
            self._start_cluster()

    def _start_cluster(self) -> None:
        """Begins to start it; where the machine refuses, as for want of a port or of room, it counts as failed."""
        self._refusal = ""
        try:
            self._cluster.start()
        except OSError as error:
            self._refusal = str(error)
            logger.error("the Ray cluster cannot be started, trying again: %s", error)

    def _release_ended(self, *, drained: bool) -> None:
        """Gives back what ended drivers still hold: those that completed or released hold nothing."""
        while self._ended:
            lease = self._ended[0]
            with contextlib.suppress(LeaseLostError):
                self._database.write(partial(leases.release, lease=lease, drained=drained))
            self._ended.pop(0)

    def _greet(self) -> None:
        """Says that we are there: with every beat, and before it is too late to be heard by the clock on the wall.

        Where that jumped ahead, or the machine slept, nobody was heard of for long, nor saw what fits a node: this
        comes to light here, before anything is decided.
        """
        if time.monotonic() >= self._greet_after or time.time() > self._heard_until:
            gpus, bf16 = self._cards.count, self._cluster.bf16()
            self._database.write(partial(leases.greet, worker=self.name, cpus=self._cpus, gpus=gpus, bf16=bf16))
            self._greet_after = time.monotonic() + self._settings.beat_seconds
            self._heard_until = time.time() + HEARD_WITHIN.total_seconds() / 2

    def _mind_files(self) -> None:
        """Looks, as often as it greets, whether files would be left where the API does not read them.

        Nothing begins while they would. Raises `UserError` where that lasts: what runs is given back. A bucket is
        looked at only when we start: none is unmounted, and its server may be silent for longer than we may be.
        """
        if time.monotonic() < self._files_after or "://" in (self._settings.storage or ""):
            return
        self._files_after = time.monotonic() + self._settings.beat_seconds
        try:
            problem = problem_of(self._database, self._settings)
        except OSError:  # of the disk: what is there cannot be told
            return
        if problem is None:
            self._away_since = None
            return
        if self._away_since is None:
            self._away_since = time.monotonic()
            logger.error("nothing begins here: %s", problem)
        elif time.monotonic() - self._away_since > AWAY_SECONDS:
            raise UserError(problem)

    def _record_nodes(self) -> None:
        """Says which nodes the cluster has: when something changed, and with every beat."""
        seen = self._cluster.nodes() if self._cluster.ready() else None
        if seen is None or (seen == self._nodes and time.monotonic() < self._nodes_after):
            return
        self._database.write(partial(nodes.record, worker=self.name, seen=seen))
        self._nodes, self._nodes_after = seen, time.monotonic() + self._settings.beat_seconds

    def _reap(self) -> None:
        """Requeues experiments of dead workers; kills drivers of our own whose heartbeat stands still.

        And those that do not leave though their lease is lost: no heartbeat tells of them any more. Drivers that are
        still starting, and compute, have their leases renewed for them.
        """
        with self._database.read() as session:
            running = leases.watch(session)
        held, moment = {Lease(seen.experiment_id, seen.fence) for seen in running}, time.monotonic()
        strays = [stray for stray in self._drivers if stray.lease not in held]
        self._strays = {stray.lease: self._strays.get(stray.lease, moment) for stray in strays}
        for stray in strays:
            if moment - self._strays[stray.lease] >= STRAY_SECONDS:
                logger.error("the driver of experiment %d holds nothing: killing it", stray.lease.experiment_id)
                stray.kill()
        for seen, seconds in self._standstill.look(running):
            expired = seconds >= self._settings.lease_seconds
            driver = self._drivers.of(Lease(seen.experiment_id, seen.fence))
            if driver is not None:
                if expired:
                    logger.error("the driver of experiment %d gives no sign of life: killing it", seen.experiment_id)
                    stop(driver.child, grace=0)
                elif seconds >= self._settings.beat_seconds and driver.is_starting(seen.heartbeat) and driver.gets_on():
                    driver.beats += 1
                    with contextlib.suppress(LeaseLostError):
                        self._database.write(partial(leases.renew, lease=driver.lease))
                continue
            # A claim of our own without a driver: the database's answer to it never arrived.
            unknown = self._identity is not None and seen.process == self._identity
            gone = expired or unknown or is_dead(seen.process)
            if gone and self._database.write(partial(leases.reap, seen=seen, by=self.name)):
                logger.warning("experiment %d is queued again: %s is gone", seen.experiment_id, seen.worker)

    def _share(self) -> None:
        """Divides the cluster anew, while it is there and we are wanted.

        Until then, and until each of its nodes has said what it is, nobody knows of nothing to do.
        """
        wanted = self._cluster.ready() and not self._stopping and self._away_since is None
        seen = self._cluster.nodes() if wanted else None
        for driver in self._drivers if self._away_since is not None else ():
            driver.tell(0, sys.maxsize)  # what runs goes on, and may outlast the absence
        if seen is None or self._scheduler.share(seen) or any(node.unknown for node in seen):
            self._busy = time.monotonic()

    def _drain(self) -> None:
        """Stops the drivers, gives back what they hold without spending an attempt, stops the cluster."""
        logger.info("worker %s: stopping", self.name)
        self._ended += self._drivers.drain(GRACE_SECONDS)
        self._cluster.stop()
        self._cards.close()
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
