"""Puts the pages into the application."""

from pathlib import Path

from fastapi import FastAPI

from service.dashboard import api_reference, experiments, leaderboards, signing_in, spec_pages, trials
from service.dashboard.error_pages import ErrorPages
from service.dashboard.rendering import Files

FORMS = (signing_in.LOGIN,)
"""Paths that take a form, not JSON."""


def install(app: FastAPI) -> None:
    """Adds pages, style sheet and scripts, and shows errors to browsers as pages (call it last)."""
    for module in (experiments, trials, leaderboards, spec_pages, signing_in, api_reference):
        app.include_router(module.router)
    app.mount("/static/swagger-ui", Files(packages=[("fastapi_offline", "static")]), name="swagger-ui")
    app.mount("/static", Files(directory=Path(__file__).parent / "static"), name="static")
    app.add_middleware(ErrorPages)
