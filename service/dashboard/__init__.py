"""The pages: the same store as the API's, read by people. Plain HTML that needs no script to be read."""

from pathlib import Path

from fastapi import FastAPI

from service.dashboard import experiments, leaderboards, signing_in, spec_pages, trials
from service.dashboard.error_pages import ErrorPages
from service.dashboard.rendering import Files

FORMS = (signing_in.LOGIN,)
"""Paths that take a form, not JSON."""


def install(app: FastAPI) -> None:
    """Adds pages, style sheet and scripts, and shows errors to browsers as pages (call it last)."""
    for module in (experiments, trials, leaderboards, spec_pages, signing_in):
        app.include_router(module.router)
    app.mount("/static/swagger-ui", Files(packages=[("fastapi_offline", "static")]), name="swagger-ui")
    app.mount("/static", Files(directory=Path(__file__).parent / "static"), name="static")
    app.add_middleware(ErrorPages)
