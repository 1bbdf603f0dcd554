"""Pages as answers: templates, and the headers that keep scripts of others out."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.datastructures import QueryParams
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.staticfiles import StaticFiles

from service.access.security import Scope
from service.api.http.authentication import Reader
from service.api.http.dependencies import Config
from service.dashboard.wording import FILTERS
from service.specs.columns import short_name, told, validates_on_test

PageSize = Annotated[int, Query(ge=1, le=200)]
"""Rows of a list on one page."""

HEADERS = {
    # No script and no style but our files', no frame around us, nothing from elsewhere: a name that somebody chose
    # can do nothing, even where it got past the templates' escaping.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "private, no-cache",
    "Vary": "Accept, Authorization, Cookie",
}


class PageRoute(APIRoute):
    """A route of a page. A form sends its empty fields too (`name=&tag=x`): they are left out of the address."""

    def get_route_handler(self) -> Any:
        """The route's handler, behind a redirect to the same address without empty parameters."""
        handle = super().get_route_handler()

        async def without_empty_fields(request: Request) -> Response:
            given = request.query_params.multi_items()
            filled = [(name, value) for name, value in given if value != ""]
            if len(filled) < len(given):
                return RedirectResponse(f"?{urlencode(filled)}" if filled else request.url.path, status_code=303)
            answer: Response = await handle(request)
            return answer

        return without_empty_fields


class Files(StaticFiles):
    """The style sheet and the scripts, taken for nothing else."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """The file, to be asked for again only when it changed."""
        response = super().file_response(*args, **options)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-cache"
        return response


class Shower:
    """How a page is answered: `show("trial.html", title=..., ...)`."""

    def __init__(self, request: Request, settings: Config, who: Reader) -> None:
        self._common: Mapping[str, Any] = {
            "who": who,
            "may_submit": who.may(Scope.SUBMIT),
            "may_cancel": who.may(Scope.CANCEL),
            "keys_required": settings.keys_required,
            "query": request.query_params,
            "with_query": partial(with_query, request.query_params),
        }

    def __call__(self, template: str, **values: Any) -> HTMLResponse:
        """The page, for who asks."""
        return html(template, **self._common, **values)


Show = Annotated[Shower, Depends(Shower)]


def html(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A page with its headers."""
    return HTMLResponse(_environment().get_template(template).render(values), status_code=status, headers=HEADERS)


def with_query(query: QueryParams, **changes: Any) -> str:
    """The address of the same page with other parameters; None takes one away."""
    kept = [(name, value) for name, value in query.multi_items() if name not in changes]
    return "?" + urlencode(kept + [(name, str(value)) for name, value in changes.items() if value is not None])


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("service.dashboard"),
        autoescape=True,  # every file, whatever its name ends in
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    of_fields = {"validates_on_test": validates_on_test, "told": told, "short_name": short_name}
    environment.filters |= FILTERS | of_fields
    return environment
