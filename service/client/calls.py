"""Requests as values: what is sent and how the answer is read, the same for the sync and the async client.

Every operation of the API is a function that makes one of these. What each is called in the OpenAPI document stands
beside it (`covers`), so that a test can tell that none is missing.
"""

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, ParamSpec, TypeVar
from urllib.parse import quote

import httpx2 as httpx
from pydantic import BaseModel

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class Call(Generic[_T]):
    """A request and how its answer is read. `repeatable`: sent twice it does no more than sent once."""

    method: str
    path: str
    read: Callable[[httpx.Response], _T]
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True

    def asking(self, **params: Any) -> "Call[_T]":
        """The same with other parameters."""
        return replace(self, params={**self.params, **query(**params)})


@dataclass(frozen=True)
class Paged(Generic[_T]):
    """A list in pages. `following` are the parameters of the page after this one, None after the last."""

    first: Call[Any]
    items: Callable[[Any], Sequence[_T]]
    following: Callable[[Any], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Text:
    """Text that is read as it comes, until the service ends it."""

    path: str
    params: Mapping[str, Any]


def covers(*operations: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Says which operations of the API a function is."""

    def mark(function: Callable[_P, _R]) -> Callable[_P, _R]:
        vars(function)["operations"] = operations
        return function

    return mark


def query(**params: Any) -> dict[str, Any]:
    """Parameters as they are written; those that are None are left out."""
    return {name: _written(value) for name, value in params.items() if value is not None}


def _written(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return [_written(one) for one in value]
    return str(value)


def segment(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe=":")


def joined(names: str | Iterable[str] | None) -> str | None:
    """Names with commas between."""
    return names if names is None or isinstance(names, str) else ",".join(names)


def idempotent(key: str | None) -> dict[str, str]:
    """The header by which a request that is sent again does nothing more."""
    return {"Idempotency-Key": key or str(uuid.uuid4())}


def parsed(kind: type[_Model]) -> Callable[[httpx.Response], _Model]:
    """Reads an answer as a schema."""
    return lambda response: kind.model_validate_json(response.content)


def parsed_list(kind: type[_Model]) -> Callable[[httpx.Response], list[_Model]]:
    """Reads a list of them."""
    return lambda response: [kind.model_validate(item) for item in response.json()]


def text(response: httpx.Response) -> str:
    """Reads an answer as it stands."""
    return response.text


def by_cursor(page: Any) -> dict[str, Any] | None:
    """The page after one that names a cursor."""
    return None if page.next is None else {"cursor": page.next}


def by_number(page: Any) -> dict[str, Any] | None:
    """The page after one that names the last number on it."""
    return None if page.next is None else {"after": page.next}
