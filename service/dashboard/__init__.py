"""The pages: the same store as the API's, read by people. Plain HTML that needs no script to be read.

Whatever the API may import may be imported, and the API's own resources; nothing imports the pages but the application.
"""

from pathlib import Path

from fastapi import APIRouter

from service.dashboard import compare, experiments, figures, leaderboards, pool, signing_in, spec_pages, trials
from service.dashboard.error_pages import ErrorPages
from service.dashboard.rendering import Files

__all__ = ["FORMS", "ErrorPages", "install"]

FORMS = (signing_in.LOGIN, spec_pages.FORM)
"""Paths that take a form, not JSON."""


def install(router: APIRouter) -> None:
    """Adds pages, style sheet and scripts; `ErrorPages`, a middleware, shows errors to browsers as pages."""
    for module in (experiments, trials, compare, leaderboards, figures, pool, spec_pages, signing_in):
        router.include_router(module.router)
    router.mount("/static/swagger-ui", Files(packages=[("fastapi_offline", "static")]), name="swagger-ui")
    router.mount("/static", Files(directory=Path(__file__).parent / "static"), name="static")
