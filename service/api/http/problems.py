"""Errors as RFC 9457 problem documents: the only place where an exception becomes an HTTP status."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic.json_schema import JsonSchemaValue
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from service.api.http.examples import Example, Responses, headers_of
from service.api.http.problem_types import DATABASE_FULL, DATABASE_UNSURE, PROBLEM_TYPES, READ_ONLY, ProblemType
from service.database.engine import is_full, is_read_only
from service.database.outages import is_unsure
from service.errors import ConflictError, FieldProblem, IdempotencyError, PreconditionError, QuotaError, SpecError
from service.schemas.service import Problem, ProblemField
from service.settings.logs import request_id
from service.specs.validation_errors import wrong_fields

EXAMPLE: Example = {
    "type": "/problems#invalid-request",
    "title": "Unprocessable Entity",
    "status": 422,
    "detail": "grid.rank[0]: must be at least 1, or null, not 0",
    "instance": "/v1/experiments",
    "errors": [{"field": "grid.rank[0]", "message": "must be at least 1, or null, not 0"}],
    "request_id": "3f6c1f0e9b2a4b1d8c7e5a4d3b2c1f0e",
}

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_METHODS = ("DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT")
_READS = ("GET", "HEAD", "OPTIONS")
_READ_ONLY = (
    "the database is read-only; nothing was stored: make its file, its folder and the disk under them writable for the "
    "service, then send the request again"
)
_UNSURE = (
    "the connection to the database broke as the change was stored, and it is not known whether it is: look before "
    "sending it again, unless with the Idempotency-Key that it had"
)
MAX_ERRORS = 100
"""A body can hold thousands of wrong values; so many of them are named."""


def problem(
    status: int,
    detail: str,
    *,
    kind: str | None = None,
    instance: str | None = None,
    errors: Sequence[ProblemField] = (),
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """A problem document, of the kind of this name (`problem_types`) or the first with its status."""
    types = (known.uri for known in PROBLEM_TYPES if known.status == status and kind in (known.name, None))
    body = Problem(
        type=next(types, "about:blank"),
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=instance,
        errors=list(errors)[:MAX_ERRORS],
        request_id=request_id(),
    )
    return JSONResponse(body.model_dump(), status_code=status, media_type=MEDIA_TYPE, headers=headers)


def _schema() -> JsonSchemaValue:
    """The document's JSON schema in one piece: a reference inside would not be found from the OpenAPI document."""
    schema = Problem.model_json_schema()
    schema["properties"]["errors"]["items"] = schema.pop("$defs")[ProblemField.__name__]
    return schema


_CONTENT = {MEDIA_TYPE: {"schema": _schema(), "example": EXAMPLE}}


_HEADERS = {401: ("WWW-Authenticate",), 416: ("Content-Range",), 429: ("Retry-After",)}


def refusals(*codes: int) -> Responses:
    """What the OpenAPI document says of errors with these statuses."""
    return {
        code: {"description": HTTPStatus(code).phrase, "content": _CONTENT} | headers_of(*_HEADERS.get(code, ()))
        for code in codes
    }


ANY_OTHER: Responses = {
    "default": {"description": "Any other error", "content": _CONTENT} | headers_of("Allow", "Retry-After")
}
"""What it says of what any route may answer: a body that cannot be read, a wrong Host, a database that is away."""

RESPONSES = refusals(401, 403, 404, 422)
"""What the OpenAPI document says of errors."""


_HEADERS_TO_BLAME = {PreconditionError: "If-Match", IdempotencyError: "Idempotency-Key"}


def _refused(kind: ProblemType, request: Request, error: Exception) -> JSONResponse:
    """A refusal, which names the field or header that is to blame where there is one."""
    field = error.field if isinstance(error, ConflictError) else _HEADERS_TO_BLAME.get(type(error))
    fields = [] if field is None else [ProblemField(field=field, message=str(error))]
    headers = {"WWW-Authenticate": "Bearer"} if kind.status == 401 else {}
    if isinstance(error, QuotaError):
        headers["Retry-After"] = str(error.retry_after)
    path = request.url.path
    return problem(kind.status, str(error), kind=kind.name, instance=path, errors=fields, headers=headers)


def install(app: FastAPI) -> None:
    """Turns every error of the app into a problem document."""

    @app.exception_handler(SpecError)
    def _spec(request: Request, error: SpecError) -> JSONResponse:
        return _answer(request, error.problems)

    @app.exception_handler(RequestValidationError)
    def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return _answer(request, wrong_fields(error.errors(), error.body))

    for kind in PROBLEM_TYPES:
        if kind.error is not None:
            app.exception_handler(kind.error)(partial(_refused, kind))

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 204:
            return Response(status_code=204)
        path, detail, headers = request.url.path, str(error.detail), dict(error.headers or {})
        if error.status_code == 404:
            detail = f"there is nothing at {path}; /docs lists what there is"
        elif error.status_code == 405:
            headers["Allow"] = ", ".join(_allowed(request)) or headers.get("Allow", "")
            detail = f"{path} takes {headers['Allow']}, not {request.method}"
        return problem(error.status_code, detail, instance=path, headers=headers)

    @app.exception_handler(DBAPIError)
    @app.exception_handler(PoolTimeoutError)  # no connection became free
    def _database(request: Request, error: DBAPIError | PoolTimeoutError) -> JSONResponse:
        if isinstance(error, IntegrityError | DataError):  # the service's own mistake: sent again, it comes again
            raise error
        log.error("database error on %s %s: %s", request.method, request.url.path, error)
        if is_read_only(error):  # without Retry-After: waiting alone mends nothing
            return problem(503, _READ_ONLY, kind=READ_ONLY, instance=request.url.path)
        if is_unsure(error) and request.method not in _READS:
            return problem(503, _UNSURE, kind=DATABASE_UNSURE, instance=request.url.path, headers={"Retry-After": "5"})
        full = is_full(error)
        what = "the database has no room left on its disk" if full else "the database does not answer"
        detail = f"{what}; nothing was stored, so the request can be sent again"
        kind = DATABASE_FULL if full else None
        return problem(503, detail, kind=kind, instance=request.url.path, headers={"Retry-After": "5"})


def _answer(request: Request, problems: Iterable[FieldProblem]) -> JSONResponse:
    fields = [ProblemField(field=problem.field, message=problem.message) for problem in problems]
    return problem(422, summary(fields), instance=request.url.path, errors=fields)


def _allowed(request: Request) -> list[str]:
    """The methods that a route takes at the request's path: the router itself names those of the first route alone."""
    scopes = [{**request.scope, "method": method} for method in _METHODS]
    routes = request.app.routes
    taken = {scope["method"] for scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in routes)}
    return sorted(taken | {"HEAD"} if "GET" in taken else taken)


def summary(fields: Sequence[ProblemField | FieldProblem]) -> str:
    """What is wrong in a sentence: of one field all, of several their names."""
    if len(fields) == 1:
        return f"{fields[0].field}: {fields[0].message}"
    more = ", ..." if len(fields) > 10 else ""
    return f"{len(fields)} fields are wrong: " + ", ".join(field.field for field in fields[:10]) + more
