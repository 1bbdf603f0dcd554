"""HEAD: the answer that a GET would have, without its body (RFC 9110, 9.3.2)."""

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
