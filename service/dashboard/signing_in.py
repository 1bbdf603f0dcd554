"""The pages that need no key: the API's reference and its problems, and the login.

Its cookie keeps a key where no script reads it.
"""

from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from service.access.security import Principal
from service.api.http.authentication import COOKIE, principal_of, sent_from_our_pages
from service.api.http.dependencies import Config, Db
from service.api.http.problem_types import PAGE, PROBLEM_TYPES
from service.dashboard.operations import operations
from service.dashboard.rendering import HEADERS, html
from service.database.engine import Database
from service.errors import KeyRefusedError
from service.settings import Settings

router = APIRouter(include_in_schema=False)

LOGIN = "/login"


@router.get(LOGIN)
def ask(settings: Config, next: str = "/") -> Response:
    """Asks for a key."""
    return _form(_local(next), None, required=settings.keys_required)


@router.post(LOGIN)
async def login(request: Request, database: Db, settings: Config) -> Response:
    """Checks the key and keeps it: for this site's own requests alone, and hidden from scripts."""
    if not sent_from_our_pages(request):
        return _form("/", "This form was sent from another site.", status=403)
    try:
        form = parse_qs((await request.body()).decode("utf-8", errors="replace"), max_num_fields=10)
    except ValueError:
        return _form("/", "This form has more fields than the page that sends it.", status=400)
    after = _local(form.get("next", ["/"])[0])
    key = form.get("key", [""])[0].strip()
    try:
        # In a thread: while the database keeps it waiting, others are answered.
        await run_in_threadpool(principal_of, key, database, settings)
    except KeyRefusedError as error:
        return _form(after, str(error), status=401)
    response = RedirectResponse(after, status_code=303, headers=HEADERS)
    secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, key, httponly=True, samesite="strict", secure=secure, path="/")
    return response


@router.post("/logout")
def logout(request: Request) -> Response:
    """Forgets the key."""
    if not sent_from_our_pages(request):
        return _form("/", "This form was sent from another site.", status=403)
    response = RedirectResponse(LOGIN, status_code=303, headers=HEADERS)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


@router.get("/docs")
def reference(request: Request, database: Db, settings: Config) -> Response:
    """Every operation, with an example."""
    return _open_page("operations.html", request, database, settings, operations=operations(request.app.openapi()))


@router.get("/docs/try")
def swagger(request: Request, database: Db, settings: Config) -> Response:
    """Swagger UI over /openapi.json, all of it served here; to send takes a key."""
    return _open_page("api.html", request, database, settings)


def _open_page(template: str, request: Request, database: Database, settings: Settings, **values: Any) -> Response:
    """A page that needs no key, and knows who brought one."""
    who: Principal | None = None
    if settings.keys_required and (key := request.cookies.get(COOKIE)) is not None:
        with suppress(KeyRefusedError):
            who = principal_of(key, database, settings)
    return html(template, keys_required=settings.keys_required, who=who, **values)


@router.get(PAGE)
def problems() -> Response:
    """What can be wrong with a request and what to do: the `type` of every problem document leads here."""
    return html("problems.html", types=PROBLEM_TYPES, keys_required=False, who=None)


def _form(after: str, error: str | None, *, status: int = 200, required: bool = True) -> Response:
    return html("login.html", status=status, next=after, error=error, required=required, keys_required=False, who=None)


def _local(path: str) -> str:
    """A page of ours, wherever the parameter points: `//elsewhere` and `/\\elsewhere` are other sites."""
    plain = path.isprintable() and path.startswith("/") and not path.startswith(("//", "/\\"))
    return path if plain and not path.startswith(LOGIN) else "/"
