"""The page of the API's operations: Swagger UI over /openapi.json, all of it served here."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from service.access.security import Principal
from service.api.http.authentication import COOKIE, principal_of
from service.api.http.dependencies import Config, Db
from service.dashboard.rendering import html
from service.errors import KeyRefusedError

router = APIRouter(include_in_schema=False)


@router.get("/docs")
def reference(request: Request, database: Db, settings: Config) -> HTMLResponse:
    """Every operation, with an example. Open to all, as /openapi.json is; to send a request takes a key."""
    who: Principal | None = None
    if settings.keys_required and (key := request.cookies.get(COOKIE)) is not None:
        try:
            who = principal_of(key, database, settings)
        except KeyRefusedError:
            who = None
    return html("api.html", keys_required=settings.keys_required, who=who)
