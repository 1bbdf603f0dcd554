"""The application: `create_app(settings)`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from service.api import experiments, health, leaderboards, presets, problems, trials
from service.api.body import BodyGuard
from service.db import Database
from service.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The API on the settings' database, which `ttsv migrate` has brought up to date.

    Raises ValueError if the settings would open it to a network.
    """
    settings.refuse_open_network()
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    database = Database(settings.url)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        database.close()

    app = FastAPI(
        title="ttsv",
        version=version("ttsv"),
        summary="Experiments on networks with controlled singular values: specs in, leaderboards out.",
        lifespan=lifespan,
    )
    app.state.settings = settings
    app.state.database = database
    app.add_middleware(BodyGuard, max_bytes=settings.max_body_bytes)
    problems.install(app)
    for module in (experiments, trials, leaderboards, presets, health):
        app.include_router(module.router)
    return app


def application() -> FastAPI:
    """The application with the environment's settings: `uvicorn --factory service.main:application`."""
    return create_app(Settings())
