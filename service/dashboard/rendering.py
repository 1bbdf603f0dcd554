"""Pages as answers: templates, and the headers that keep scripts of others out."""

import gzip
import os
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.datastructures import Headers, QueryParams
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope as ASGIScope

from service.access.security import Scope
from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Config
from service.dashboard.wording import FILTERS
from service.errors import FieldProblem, QueryError
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

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: ASGIScope, status_code: int = 200
    ) -> Response:
        """The file, to be asked for again only when it changed; compressed, for who takes that, once for all."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-cache"
        asked = Headers(scope=scope)
        plain = "gzip" not in asked.get("Accept-Encoding", "") or "Range" in asked
        if plain or not isinstance(response, FileResponse) or stat_result.st_size < _LEAST_COMPRESSED:
            return response
        kept = {
            name: value for name, value in response.headers.items() if name not in ("content-length", "accept-ranges")
        }
        kept |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        return Response(_compressed(os.fspath(full_path), stat_result.st_mtime_ns), headers=kept)


_LEAST_COMPRESSED = 1000


@lru_cache(200)
def _compressed(path: str, _changed: int) -> bytes:
    return gzip.compress(Path(path).read_bytes(), mtime=0)


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


def words_of(text: str | None) -> list[str]:
    """What somebody wrote in a field for several: words with commas between, or spaces."""
    return (text or "").replace(",", " ").split()


def named_numbers(text: str | None, field: str) -> list[int]:
    """The numbers that somebody wrote in a field, each once. Raises `QueryError` where something else stands there."""
    words = words_of(text)
    for word in words:
        if not (word.isascii() and word.isdecimal() and 1 <= int(word[:20]) <= MAX_ID):
            fix = f"write the ids of {field} with commas between, such as 7, 8"
            raise QueryError([FieldProblem(field, f"{word[:80]!r} is no id: {fix}")])
    return list(dict.fromkeys(map(int, words)))


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
