"""Errors as pages for browsers; everybody else gets the problem document."""

import json
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.problems import MEDIA_TYPE
from service.dashboard.rendering import HEADERS, html


class ErrorPages:
    """ASGI middleware: to who asks for text/html a problem document is shown as a page, and 401 as the login page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on and looks at what comes back."""
        if scope["type"] != "http" or not _is_browser(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = bytearray()

        async def look(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                if Headers(raw=message["headers"]).get("content-type", "").startswith(MEDIA_TYPE):
                    start = message
                    return
            elif start is not None and message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    await _page(scope, start, bytes(body))(scope, receive, send)
                return
            await send(message)

        await self.app(scope, receive, look)


def _is_browser(headers: Headers) -> bool:
    return "text/html" in headers.get("accept", "").lower()


def _page(scope: Scope, start: Message, body: bytes) -> Response:
    problem = json.loads(body)
    status: int = start["status"]
    given = Headers(raw=start["headers"])
    if status == 401 and scope["method"] in ("GET", "HEAD"):
        asked = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        response: Response = RedirectResponse(f"/login?next={quote(asked, safe='')}", status_code=303, headers=HEADERS)
    else:
        again = given.get("retry-after") if status == 503 and scope["method"] in ("GET", "HEAD") else None
        response = html("error.html", status=status, problem=problem, again=again, keys_required=False, who=None)
    for name in ("x-request-id", "retry-after", "www-authenticate", "allow"):
        if name in given:
            response.headers[name] = given[name]
    return response
