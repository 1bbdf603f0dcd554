"""Guards the door: a body too large, not JSON, or nested too deep never reaches a route.

YAML is let in as the JSON that says the same.
"""

import json
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import problem
from service.schemas_service import ProblemField
from service.yaml_document import MAX_DEPTH, read_yaml

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
        body = await self._read(receive, headers.get(b"content-length", ""))
        refusal: _Refusal | None = None
        if body is None:
            refusal = _Refusal(413, f"the body is larger than {self.max_bytes} bytes")
        elif body and _media_type(headers.get(b"content-type", "")) in YAML_TYPES:
            try:
                body = json.dumps(read_yaml(body.decode("utf-8-sig"))).encode()
            except ValueError as error:  # UnicodeDecodeError among them
                refusal = _Refusal(400, f"the body is not YAML that can be read: {error}")
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
        if length.isdecimal() and int(length) > self.max_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
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
        value = json.loads(body, parse_int=_whole, parse_constant=_constant, object_pairs_hook=_refuse_repeated)
    except RecursionError:
        return _Refusal(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    except _RepeatedKeyError as error:
        return _Refusal(400, f"the body is not JSON: {error}", ProblemField(field=error.key, message=str(error)))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError among them
        return _Refusal(400, f"the body is not JSON: {error}")
    if _deeper_than(value, MAX_DEPTH):
        return _Refusal(400, f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        return _Refusal(400, f"the body holds {half}, half of a character; write both halves or the character itself")
    if found := _no_number(value):
        path, fix = found
        return _Refusal(400, f"{path or 'the body'}: {fix}", ProblemField(field=path or "body", message=fix))
    return None


class _NoNumber(str):
    """What Python reads as a number although it is none, or takes too long to: what would be right."""


def _constant(name: str) -> _NoNumber:
    """NaN, Infinity or -Infinity, which JSON does not have."""
    return _NoNumber(f"{name} is not a JSON number; use null or a finite number")


def _whole(digits: str) -> int | _NoNumber:
    most = sys.get_int_max_str_digits()  # Python's own guard: the time grows with the square of the digits
    if most and len(digits.lstrip("-")) > most:
        return _NoNumber(f"a number of {len(digits.lstrip('-'))} digits; write one of at most {most}")
    return int(digits)


def _no_number(value: Any, path: str = "") -> tuple[str, str] | None:
    """The path of the first of them, and what would be right."""
    if isinstance(value, _NoNumber):
        return path, str(value)
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else name, inner) for name, inner in value.items()]
    elif isinstance(value, list):
        parts = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    return next((found for at, inner in parts if (found := _no_number(inner, at))), None)


class _RepeatedKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} stands twice in one object")
        self.key = key


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(next(name for name in names if names.count(name) > 1))
    return found


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
