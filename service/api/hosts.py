"""Refuses requests that a web page sends here under a name of its own (DNS rebinding)."""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import problem
from service.settings import Settings

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@\s]+))(?::\d{1,5})?")


class HostGuard:
    """ASGI middleware: the Host header must name this service.

    A browser sends any page's requests to the address that the page's own name resolves to, with that name as Host. So
    a service on loopback answers to loopback's names, TTSV_HOST and TTSV_ALLOWED_HOSTS only. On other addresses, where
    keys are asked for or a proxy decides, it answers to every name unless TTSV_ALLOWED_HOSTS lists some.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        listed = {name.lower().strip("[]") for name in settings.allowed_hosts}
        checked = settings.on_loopback or listed
        self.allowed = listed | {settings.host.lower(), *_LOOPBACK} if checked and "*" not in listed else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on, or answers that it has the wrong name."""
        if scope["type"] == "http" and self.allowed is not None:
            host = Headers(scope=scope).get("host", "")
            match = _HOST.fullmatch(host)
            name = (match[1] or match[2]).lower() if match else ""
            if name.rstrip(".") not in self.allowed:
                detail = f"Host: {host[:200]!r} is no name of this service; add it to TTSV_ALLOWED_HOSTS if it is one"
                await problem(400, detail, instance=scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)
