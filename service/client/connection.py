"""One connection to a service: how requests are sent, and sent again where they were not answered."""

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeAlias, TypeVar
from urllib.parse import quote

import httpx2 as httpx
from pydantic import BaseModel

from service.client.errors import UnreachableError, no_answer, not_understood, refusal, unsendable
from service.errors import UserError
from service.specs.documents import DocumentError, refuse_beyond_json

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Item = TypeVar("_Item", covariant=True)
_Model = TypeVar("_Model", bound=BaseModel)

Query: TypeAlias = dict[str, str | list[str]]
"""Parameters of an address, as they are written there."""

DEFAULT_URL = "http://127.0.0.1:8000"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_UNANSWERED = (200, 206, 502, 503, 504)
"""Statuses after which a request is sent again; of a success the end was missing."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Page(Protocol[_Item]):
    """A page of a list; `next` says where the next one begins, None on the last."""

    @property
    def items(self) -> Sequence[_Item]:
        """What is on it."""

    @property
    def next(self) -> str | int | None:
        """A cursor, or the last number on this page."""


def covers(*operations: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Says which operations of the OpenAPI document a method is, so that a test can tell that none is missing."""

    def mark(method: Callable[_P, _R]) -> Callable[_P, _R]:
        vars(method)["operations"] = operations
        return method

    return mark


class Connection:
    """Sends requests to the service; its arguments are those of `service.client.Client`.

    Raises `UserError` for an address that is none, and for a key that cannot be sent.
    """

    def __init__(
        self, url: str | None = None, *, key: str | None = None, retries: int = 4, timeout: float = 30
    ) -> None:
        self.url = (url or os.environ.get("TTSV_URL") or DEFAULT_URL).rstrip("/")
        key = key or os.environ.get("TTSV_KEY")
        if key and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise UserError("the key (TTSV_KEY, --key): must be as it was printed: letters, digits, - and _ alone")
        _refuse_no_address(self.url)
        self._retries = retries
        # The service says something every quarter of a minute, whatever happens.
        self._streaming = httpx.Timeout(timeout, read=max(60.0, timeout))
        self._http = httpx.Client(
            base_url=self.url,
            timeout=timeout,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # Loading trusted certificates takes longer than most requests: not where there is nothing to verify.
            verify=not self.url.startswith("http://"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def _send(
        self,
        method: str,
        path: str,
        *,
        params: Query | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> httpx.Response:
        """Sends a request until it is answered. `repeatable`: sent twice it does no more than sent once."""
        try:
            refuse_beyond_json(json, "the body")
        except DocumentError as error:
            raise unsendable(error) from None
        attempt = 0
        while True:
            outcome: httpx.Response | httpx.TransportError
            try:
                outcome = self._http.request(method, path, params=params, json=json, headers=headers)
                if outcome.is_success:
                    return outcome
            except httpx.TransportError as error:
                outcome = error
            time.sleep(self._pause_after(outcome, attempt, repeatable=repeatable))
            attempt += 1

    def _answer(self, kind: type[_Model], method: str, path: str, /, **options: Any) -> _Model:
        """An answer of a kind; `options` are those of sending."""
        answer = self._send(method, path, **options)
        with self._understood():
            return kind.model_validate_json(answer.content)

    def _get(self, kind: type[_Model], path: str, /, **params: Any) -> _Model:
        """Asks for an answer of a kind."""
        return self._answer(kind, "GET", path, params=query(**params))

    def _list(self, kind: type[_Model], path: str) -> list[_Model]:
        """Asks for a list that stands alone in its answers: what follows is named by the header Link."""
        found: list[_Model] = []
        asked: Query = {}
        while True:
            answer = self._send("GET", path, params=asked)
            with self._understood():
                found += [kind.model_validate(item) for item in answer.json()]
            if "next" not in answer.links:
                return found
            # Not the address itself: a proxy may have another than the service knows of.
            asked = dict(httpx.URL(answer.links["next"]["url"]).params)

    def _text(self, path: str, /, **params: Any) -> str:
        """Asks for text."""
        answer = self._send("GET", path, params=query(**params))
        with self._understood():
            if "html" in answer.headers.get("Content-Type", ""):
                raise ValueError("a page for browsers")
            return answer.text

    def _post(self, kind: type[_Model], path: str, body: Any = None, /, **options: Any) -> _Model:
        """Posts a body; `options` are those of sending."""
        return self._answer(kind, "POST", path, json=body, **options)

    def _pages(
        self, read: Callable[[bytes], Page[_Item]], path: str, following: str = "cursor", /, **params: object
    ) -> Iterator[_Item]:
        """The items of a list; pages are fetched as they are needed, by the parameter that `following` names."""
        asked = query(**params)
        while True:
            answer = self._send("GET", path, params=asked)
            with self._understood():
                page = read(answer.content)
            yield from page.items
            if page.next is None:
                return
            asked |= {following: str(page.next)}

    @contextmanager
    def _stream(
        self, path: str, *, params: Query | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """The answer to a GET, to be read as it comes; a refusal has been read."""
        with self._http.stream("GET", path, params=params, headers=headers, timeout=self._streaming) as response:
            if not response.is_success:
                response.read()
            yield response

    def _pieces(self, path: str, /, **params: Any) -> Iterator[str]:
        """Text as it comes. A connection that breaks is an error: where to go on is not known."""
        try:
            with self._stream(path, params=query(**params)) as answer:
                if not answer.is_success:
                    raise refusal(answer)
                yield from answer.iter_text()
        except httpx.TransportError as error:
            raise self._no_answer(error) from error

    def _pause_after(
        self, outcome: httpx.Response | httpx.TransportError, attempt: int, *, repeatable: bool = True
    ) -> float:
        """How many seconds to wait before the request is sent again. Raises `ApiError` where it is not.

        What is not repeatable is sent again only if it never left.
        """
        if isinstance(outcome, httpx.TransportError):
            if attempt >= self._retries or not (repeatable or isinstance(outcome, _NEVER_SENT)):
                raise self._no_answer(outcome) from outcome
            return pause(attempt)
        if outcome.status_code not in _UNANSWERED or attempt >= self._retries or not repeatable or _lasts(outcome):
            raise refusal(outcome)
        return max(pause(attempt), _retry_after(outcome))

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Says of an answer that is none of this service's, as of a proxy or another program, whose it is."""
        try:
            yield
        except (ValueError, TypeError) as error:
            raise not_understood(self.url, error) from error

    def _no_answer(self, error: Exception) -> UnreachableError:
        return no_answer(self.url, error)


def _refuse_no_address(url: str) -> None:
    """Raises `UserError` for what can be no address of a service."""
    try:
        address = httpx.URL(url)
        address.host.encode("idna")
        why = "" if address.scheme in ("http", "https") and address.host else "not of the web"
    except (httpx.InvalidURL, UnicodeError) as error:
        why = str(error)
    if why:
        raise UserError(f"the address {url!r} (TTSV_URL, --url): {why}; write http://HOST:PORT")


def of_paper(name: str) -> str:
    """PAPER/NAME as a path: nothing in it leads elsewhere. Of a name alone the service says what there is."""
    paper, slash, rest = name.partition("/")
    parts = (paper, rest) if slash else ("", name)
    return "/".join(quote(part, safe=":") if part.strip(".") else "-" for part in parts)


def query(**params: object) -> Query:
    """Parameters as they are written; those that are None are left out."""
    return {
        name: list(map(_written, value)) if isinstance(value, list | tuple) else _written(value)
        for name, value in params.items()
        if value is not None
    }


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, datetime) else str(value)


def checked(kind: type, asked: Mapping[str, object]) -> dict[str, object]:
    """What was asked for; raises `TypeError` for a name that the typed dictionary `kind` does not have."""
    if unknown := sorted(asked.keys() - kind.__annotations__.keys()):
        raise TypeError(f"there is no {unknown[0]!r}; there are {', '.join(kind.__annotations__)}")
    return dict(asked)


def idempotent(key: str | None) -> dict[str, str]:
    """The header by which a request that is sent again does nothing more."""
    return {"Idempotency-Key": key or str(uuid.uuid4())}


def pause(attempt: int) -> float:
    """Grows with every attempt, and differs between clients: they do not come back all at once."""
    return float(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.5))


def _lasts(response: httpx.Response) -> bool:
    """Whether the service itself cannot serve until somebody mends it: else it says when to come again."""
    kind = response.headers.get("Content-Type", "")
    return (
        response.status_code == 503
        and kind.startswith("application/problem+json")
        and "Retry-After" not in response.headers
    )


def _retry_after(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return min(float(value), _LONGEST_PAUSE) if value.isdecimal() else 0.0
