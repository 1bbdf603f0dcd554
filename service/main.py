"""The application: `create_app(settings)`."""

import asyncio
import contextlib
import functools
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from service import dashboard
from service.access.keys import refuse_without_keys
from service.api import (
    artifacts,
    comparisons,
    curves,
    events,
    experiment_actions,
    experiments,
    health,
    keys,
    leaderboards,
    logs,
    matrices,
    nodes,
    paper_tables,
    presets,
    stream,
    trials,
)
from service.api.http import observability, problems
from service.api.http.body import BodyGuard
from service.api.http.dependencies import known_parameters_only
from service.api.http.middleware import CollectionAfterAnswers, Compression, HeadAsGet, HostGuard
from service.api.http.observability import Observatory, RequestObserver
from service.database.engine import Database
from service.experiments.subscriptions import Subscriptions
from service.queue import leases
from service.settings import Settings
from service.upkeep import orphans

logger = logging.getLogger(__name__)

MISS_SECONDS = 15.0
"""So often it is looked whether a worker is there."""
LAST_LOOK_SECONDS = 2.0
"""So long that may still take when the API ends: in its thread it would go on with a database that is closed."""


def create_app(settings: Settings) -> FastAPI:
    """The API on the settings' database, which `ttsv migrate` has brought up to date.

    Raises `UserError` if the settings would open it to a network without keys.
    """
    settings.refuse_open_network()
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    database = Database(settings.url)
    try:
        refuse_without_keys(database, settings)
    except BaseException:
        database.close()
        raise

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        over = asyncio.Event()
        removing = asyncio.create_task(_remove_orphans(settings, database))
        missing = asyncio.create_task(_miss_workers(database, over))
        yield
        over.set()
        await asyncio.wait([missing], timeout=LAST_LOOK_SECONDS)
        for task in (removing, missing):
            task.cancel()
        await app.state.subscriptions.close()
        database.close()

    app = FastAPI(
        title="ttsv",
        version=version("ttsv"),
        summary="Experiments on networks with controlled singular values: specs in, leaderboards out.",
        description="Every answer has X-Request-ID: the request's own if it had one. The service's log has it too.",
        lifespan=lifespan,
        docs_url=None,  # a page of ours, which loads nothing from elsewhere
        redoc_url=None,
        routes=_router().routes,
    )
    app.state.settings = settings
    app.state.database = database
    app.state.subscriptions = Subscriptions(database)
    app.state.observatory = Observatory(database)
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyGuard, max_bytes=settings.max_body_bytes, forms=dashboard.FORMS)
    app.add_middleware(HostGuard, settings=settings)
    app.add_middleware(RequestObserver, observatory=app.state.observatory)  # the outermost of the API
    problems.install(app)
    app.add_middleware(dashboard.ErrorPages)
    app.add_middleware(Compression)
    app.add_middleware(CollectionAfterAnswers)  # the outermost of all
    return app


async def _remove_orphans(settings: Settings, database: Database) -> None:
    """Looks now and then for what lies in the API's own data folder and belongs to no row any more."""
    while True:
        await asyncio.sleep(orphans.LOOK_SECONDS)
        try:
            # In a thread of those that answer, which end when they idle: asyncio's own would stay.
            await run_in_threadpool(orphans.remove_orphans, database, settings)
        except Exception:  # an outage, or a disk that cannot be read, must not end this for the API's life
            logger.exception("what has no row any more stays for now")


async def _miss_workers(database: Database, over: asyncio.Event) -> None:
    """Looks now and then whether a worker is there, as nobody else would say that none is; until that is `over`.

    Not at once: a worker that starts with the API has yet to greet, and claims pass over rows that are being changed.
    """
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), MISS_SECONDS)
        if over.is_set():
            return
        try:
            await run_in_threadpool(_say_if_missed, database)
        except Exception:  # an outage must not end this for the API's life
            logger.debug("nobody knows whether a worker is there", exc_info=True)


def _say_if_missed(database: Database) -> None:
    with database.look() as session:
        missed = leases.are_workers_missed(session)
    if missed:
        database.write(leases.miss_workers)


@functools.cache
def _router() -> APIRouter:
    """All operations and pages, which hold nothing of an application: FastAPI takes 0.2 s to look through them."""
    router = APIRouter(responses=problems.ANY_OTHER)
    for module in (
        experiments,
        experiment_actions,
        events,
        matrices,
        curves,
        comparisons,
        trials,
        artifacts,
        logs,
        stream,
        leaderboards,
        paper_tables,
        presets,
        nodes,
        keys,
    ):
        router.include_router(_summarised(module.router), dependencies=[Depends(known_parameters_only)])
    router.include_router(_summarised(stream.all_router), dependencies=[Depends(known_parameters_only)])
    for open_to_all in (health, observability):
        router.include_router(_summarised(open_to_all.router))
    dashboard.install(router)
    return router


def _summarised(router: APIRouter) -> APIRouter:
    """Its operations are listed by the first sentence of their description, in place of the function's name."""
    for route in router.routes:
        if isinstance(route, APIRoute) and route.description:
            route.summary = route.description.splitlines()[0].partition(". ")[0].rstrip(".:")
    return router


def application() -> FastAPI:
    """The application with the environment's settings: `uvicorn --factory service.main:application`."""
    app = create_app(Settings())
    # What was imported and built stays as long as the process: collections that look through it take 0.1 s each.
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)  # of streams that never end: else after answers (`CollectionAfterAnswers`)
    return app
