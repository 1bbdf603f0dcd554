"""Guards the door: a body too large, not JSON, or nested too deep never reaches a route.

YAML is let in as the JSON that says the same.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.problems import problem
from service.schemas.service import ProblemField
from service.specs.documents import DocumentError, read_json, yaml_as_json

YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")
"""The registered media type (RFC 9512) and two that came before it."""


@dataclass(frozen=True)
class _Refusal:
    """Why a body is not let in, and the field that is to blame where there is one."""

    status: int
    detail: str
    field: ProblemField | None = None

    def answer(self, path: str) -> JSONResponse:
        return problem(self.status, self.detail, instance=path, errors=[self.field] if self.field else [])


class BodyGuard:
    """ASGI middleware: reads the body within `max_bytes` (counted, whatever Content-Length says) and checks it.

    `forms` are the paths that take what an HTML form sends: it is counted, and read by the route.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, forms: Collection[str] = ()) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a bad body itself and hands a good one on."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            body = await self._read(receive, headers.get(b"content-length", ""))
        except ClientDisconnect:
            return  # nobody waits for an answer
        refusal: _Refusal | None = None
        if body is None:
            refusal = _Refusal(413, f"the body is larger than {self.max_bytes} bytes")
        elif body and _media_type(headers.get(b"content-type", "")) in YAML_TYPES:
            try:
                body = yaml_as_json(body, "the body")
            except DocumentError as error:
                refusal = _Refusal(400, str(error))
            else:
                # In place: who logs and counts reads from the same scope which route it was.
                scope["headers"] = _json_headers(scope["headers"], len(body))
                refusal = _check(body, "application/json")
        elif scope["path"] not in self.forms:
            refusal = _check(body, headers.get(b"content-type", ""))
        if refusal is not None:
            await refusal.answer(scope["path"])(scope, receive, send)
            return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive, length: str) -> bytes | None:
        """The whole body, None for one that is too large. Raises `ClientDisconnect` where its end never comes.

        What has come by then is not to be read: a YAML document that is cut off at a line's end is one all the same.
        """
        if length.isdecimal() and int(length) > self.max_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self.max_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _json_headers(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """The headers of a request as if it had been sent as JSON."""
    old = [(name, value) for name, value in headers if name not in (b"content-type", b"content-length")]
    return [*old, (b"content-type", b"application/json"), (b"content-length", str(length).encode())]


def _check(body: bytes, content_type: str) -> _Refusal | None:
    if not body:
        return None  # a route that wants one says so
    if _media_type(content_type) != "application/json":
        return _Refusal(415, "send the body with Content-Type: application/json or application/yaml")
    try:
        read_json(body, "the body")
    except DocumentError as error:
        blamed = error.problem
        field = ProblemField(field=blamed.field or "body", message=blamed.message) if blamed else None
        return _Refusal(400, str(error), field)
    return None
