"""What operators see: a log line and an id for every request, and /metrics for Prometheus."""

import logging
import re
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.authentication import Reader
from service.api.http.problems import problem
from service.database.engine import Database
from service.queue import nodes
from service.queue.census import Census, take_census
from service.settings.logs import about
from service.specs.states import NodeState

router = APIRouter(tags=["health"])
access = logging.getLogger("service.access")

_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_CENSUS_SECONDS = 5.0


class Observatory:
    """The numbers of one app: requests as they are answered, and the database's at most once in 5 seconds.

    A project is shown what is its own, and the workers, which are everybody's: not even how many requests others send.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._of_projects: dict[int, CollectorRegistry] = {}
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self._requests = Counter("ttsv_http_requests", "Requests answered.", labels, registry=self.registry)
        self._seconds = Histogram(
            "ttsv_http_request_seconds",
            "Time until a request was answered; of a stream, until it ended.",
            labels[:2],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_DatabaseCollector(database))

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def report(self, project_id: int | None) -> bytes:
        """Prometheus' text: everything, or what a project may know."""
        if project_id is None:
            return generate_latest(self.registry)
        if project_id not in self._of_projects:
            registry = CollectorRegistry()
            registry.register(_DatabaseCollector(self._database, project_id))
            self._of_projects.setdefault(project_id, registry)
        return generate_latest(self._of_projects[project_id])


class _DatabaseCollector(Collector):
    """Counts the database on a scrape; what was counted less than `_CENSUS_SECONDS` ago is told again."""

    def __init__(self, database: Database, project_id: int | None = None) -> None:
        self._database = database
        self._project_id = project_id
        self._lock = threading.Lock()
        self._taken_at = float("-inf")
        self._census: Census | None = None

    def describe(self) -> Iterable[Metric]:
        return ()  # or the registry would collect at registration, before there are tables

    def collect(self) -> Iterable[Metric]:
        census = self._newest()
        yield GaugeMetricFamily("ttsv_database_up", "Whether the database answers.", value=census is not None)
        if census is None:
            return
        for name, counts in (("experiments", census.experiments), ("trials", census.trials)):
            family = GaugeMetricFamily(f"ttsv_{name}", f"{name.capitalize()} by state.", labels=["state"])
            for state, count in counts.items():
                family.add_metric([state.value], count)
            yield family
        depth = "Trials that wait in experiments that are queued or running."
        yield GaugeMetricFamily("ttsv_queue_depth", depth, value=census.queued_trials)
        spent = "GPU-seconds of all attempts that ended."
        yield CounterMetricFamily("ttsv_gpu_seconds", spent, value=census.gpu_seconds)
        lost = "Experiments taken from workers that were gone."
        yield CounterMetricFamily("ttsv_lost_leases", lost, value=census.lost_leases)
        done = "Trials that succeeded."
        yield CounterMetricFamily("ttsv_succeeded_trials", done, value=census.succeeded)
        yield GaugeMetricFamily("ttsv_workers", "Workers heard of in the last minute.", value=census.workers)
        waiting = GaugeMetricFamily("ttsv_waiting", "Experiments that run nothing, by why.", labels=["reason"])
        for reason, count in census.waiting.items():
            waiting.add_metric([reason], count)
        yield waiting
        yield from _nodes(census)

    def _newest(self) -> Census | None:
        with self._lock:
            if time.monotonic() - self._taken_at >= _CENSUS_SECONDS:
                try:
                    with self._database.read() as session:
                        self._census = take_census(session, self._project_id)
                except (DBAPIError, PoolTimeoutError):
                    self._census = None
                self._taken_at = time.monotonic()
            return self._census


def _nodes(census: Census) -> Iterable[Metric]:
    """How many nodes there are by state, and of those that are there what they have, and what runs there since when."""
    by_state = GaugeMetricFamily(
        "ttsv_nodes", "Nodes by state; what left or was refused counts a day.", labels=["state"]
    )
    for state in NodeState:
        by_state.add_metric([state.value], sum(row.state is state for row in census.nodes))
    yield by_state
    whose = ["node", "host"]
    cpus = GaugeMetricFamily("ttsv_node_cpus", "CPUs that a node gives to trials.", labels=whose)
    gpus = GaugeMetricFamily("ttsv_node_gpus", "GPUs that a node gives to trials.", labels=whose)
    joined = GaugeMetricFamily("ttsv_node_joined_seconds", "When a node joined, as Unix time.", labels=whose)
    running = GaugeMetricFamily("ttsv_node_running_trials", "Trials that run on a node.", labels=whose)
    since = GaugeMetricFamily(
        "ttsv_node_running_since_seconds",
        "When the first of an experiment's trials began that run on a node, as Unix time.",
        labels=[*whose, "experiment"],
    )
    memory = GaugeMetricFamily("ttsv_node_memory_bytes", "Memory that a node gives to trials.", labels=whose)
    disk = GaugeMetricFamily("ttsv_node_free_disk_bytes", "What a node's disk has left.", labels=whose)
    clock = GaugeMetricFamily(
        "ttsv_node_clock_seconds", "How far a node's clock is ahead of its worker's.", labels=whose
    )
    gpu_memory = GaugeMetricFamily("ttsv_node_gpu_memory_bytes", "Memory of a GPU.", labels=[*whose, "gpu", "name"])
    for row in census.nodes:
        if row.state is not NodeState.ALIVE:
            continue
        labels = [row.id, row.host]
        joined.add_metric(labels, row.joined_at.timestamp())
        cpus.add_metric(labels, row.cpus)
        gpus.add_metric(labels, row.gpus)
        running.add_metric(labels, census.at_work.get(row.id, 0))
        for experiment_id, began in census.since.get(row.id, {}).items():
            since.add_metric([*labels, str(experiment_id)], began.timestamp())
        memory.add_metric(labels, row.memory_gib * 2**30)
        if (machine := nodes.machine_of(row)) is None:
            continue
        disk.add_metric(labels, machine.free_disk_gib * 2**30)
        if machine.clock_seconds is not None:
            clock.add_metric(labels, machine.clock_seconds)
        for number, gpu in enumerate(machine.gpus):
            gpu_memory.add_metric([*labels, str(number), gpu.name], gpu.memory_gib * 2**30)
    yield from (joined, cpus, gpus, running, since, memory, disk, clock, gpu_memory)


class RequestObserver:
    """ASGI middleware, the outermost: gives each request an id, counts it, logs it, and answers for what went wrong.

    `X-Request-ID` is taken over if it is a plain word, and made otherwise.
    """

    def __init__(self, app: ASGIApp, observatory: Observatory) -> None:
        self.app = app
        self.observatory = observatory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        status, start = 0, time.perf_counter()

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        with about(request_id=request_id):
            try:
                await self.app(scope, receive, note)
            except Exception:
                access.exception("error on %s %s", scope["method"], scope["path"])
                if status != 0:
                    raise  # half an answer is out: the connection must break
                detail = "an error of the service; its log has the details"
                await problem(500, detail, instance=scope["path"])(scope, receive, note)
            finally:
                self._done(scope, status, time.perf_counter() - start)

    def _done(self, scope: Scope, status: int, seconds: float) -> None:
        status = status or 499  # whoever asked is gone
        self.observatory.count(_method(scope), _route(scope), status, seconds)
        ids = {name: scope.get("path_params", {}).get(name) for name in ("experiment_id", "trial_id")}
        extra = ids | {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "milliseconds": round(1000 * seconds, 2),
        }
        access.info("%s %s %d %.1f ms", scope["method"], scope["path"], status, 1000 * seconds, extra=extra)


def _method(scope: Scope) -> str:
    """The method, if it is one: whoever asks cannot make labels without end."""
    known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    return scope["method"] if scope["method"] in known else "other"


def _route(scope: Scope) -> str:
    """The route's template, not the path: there are few of them."""
    return getattr(scope.get("route"), "path", None) or "none"


def _observatory(request: Request) -> Observatory:
    found: Observatory = request.app.state.observatory
    return found


@router.get(
    "/metrics",
    operation_id="getServiceMetrics",
    response_class=Response,
    responses={
        200: {
            "description": "In Prometheus' text format",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": 'ttsv_trials{state="running"} 2.0\n'}},
        }
    },
)
def metrics(observatory: Annotated[Observatory, Depends(_observatory)], who: Reader) -> Response:
    """Requests, experiments and trials by state, queue depth, GPU-seconds, lost leases and workers, for Prometheus.

    A project's key is told of its own experiments and trials, and of no requests; an admin's of everything.
    """
    return Response(observatory.report(who.project_id), media_type=CONTENT_TYPE_LATEST)
