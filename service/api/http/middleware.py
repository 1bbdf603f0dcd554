"""What stands around every route: hosts that are refused, HEAD, answers that go out compressed, and what comes after.

A web page could send requests here under a name of its own (DNS rebinding). HEAD is the answer that a GET would have,
without its body (RFC 9110, 9.3.2).
"""

import gc
import re

import anyio
from starlette.datastructures import Headers
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.problem_types import UNKNOWN_HOST
from service.api.http.problems import problem
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
                await problem(400, detail, kind=UNKNOWN_HOST, instance=scope["path"])(scope, receive, send)
                return
        await self.app(scope, receive, send)


_FOUND = ("route", "path_params")
"""What routing leaves for those who log and count."""


class HeadAsGet:
    """ASGI middleware: asks for what a GET would give, sends its status and headers, and hangs up.

    Streams are told so too: they end. `Range` is of GET alone, and left out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers HEAD, and hands on what else is asked."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        # From version 2.4 on a stream would wait for an error on sending instead of a message that nobody listens.
        spoken = {"version": "3.0", "spec_version": "2.3"}
        asked = {**scope, "method": "GET", "headers": headers, "asgi": spoken}
        begun = anyio.Event()

        async def gone() -> Message:
            await begun.wait()
            return {"type": "http.disconnect"}

        async def head_alone(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                begun.set()

        try:
            await self.app(asked, gone, head_alone)
        finally:
            scope.update({name: asked[name] for name in _FOUND if name in asked})


_AS_THEY_ARE = (*DEFAULT_EXCLUDED_CONTENT_TYPES, "text/plain", "application/octet-stream")
"""Types that are not compressed: those that are already, and logs, which are followed line by line."""
_FILES = "/v1/artifacts/"


class Compression(GZipMiddleware):
    """ASGI middleware: compresses pages, scripts and JSON for who takes gzip; never a stream of events.

    Trials' files stay as they are: a download that broke off goes on at a byte.
    """

    def __init__(self, app: ASGIApp) -> None:
        # Level 5 makes a leaderboard's answer a seventh smaller, and takes twice as long.
        super().__init__(app, minimum_size=1000, compresslevel=1, exclude_content_types=_AS_THEY_ARE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on, and compresses what comes back."""
        if scope["type"] == "http" and scope["path"].startswith(_FILES):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


_YOUNG = 5_000
_OLDER = 20
"""New objects, and looks through the younger ones, after which it is time to look for cycles: as `gc` counts them."""


class CollectionAfterAnswers:
    """ASGI middleware: looks for cyclic garbage when an answer is out, and not while the next is made.

    The answer of a large board makes more objects than the collector's own thresholds wait for, all of them in use:
    to look through them takes milliseconds and frees nothing. After it there are few.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on, and collects after it."""
        try:
            await self.app(scope, receive, send)
        finally:
            young, *older = gc.get_count()
            if young > _YOUNG:
                gc.collect(2 if older[1] > _OLDER else 1 if older[0] > _OLDER else 0)
