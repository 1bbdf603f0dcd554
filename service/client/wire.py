"""How requests travel: blocking, or by asyncio. What both do with them is written once (`service.client.session`)."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import httpx2 as httpx

_T = TypeVar("_T")


class Answer(Protocol):
    """An answer whose body is read as it comes."""

    @property
    def head(self) -> httpx.Response:
        """Status and headers; the body too, once `whole` has read it."""

    async def whole(self) -> httpx.Response:
        """Reads the body to its end."""

    def bytes(self) -> AsyncIterator[bytes]:
        """The body in pieces."""

    def text(self) -> AsyncIterator[str]:
        """The body in pieces of text."""

    def lines(self) -> AsyncIterator[str]:
        """The body line by line."""


class Wire(Protocol):
    """A connection to the service."""

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Sends a request and reads the whole answer."""

    def stream(self, path: str, **options: Any) -> Any:
        """An asynchronous context manager around an `Answer` to a GET."""

    async def sleep(self, seconds: float) -> None:
        """Waits."""


class AsyncWire:
    """By asyncio."""

    def __init__(self, **options: Any) -> None:
        self.http = httpx.AsyncClient(**options)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Sends a request and reads the whole answer."""
        return await self.http.request(method, path, **options)

    @asynccontextmanager
    async def stream(self, path: str, **options: Any) -> AsyncIterator[Answer]:
        """The answer to a GET, read as it comes."""
        async with self.http.stream("GET", path, **options) as response:
            yield _AsyncAnswer(response)

    async def sleep(self, seconds: float) -> None:
        """Waits while others go on."""
        await asyncio.sleep(seconds)


class BlockingWire:
    """Its methods are coroutines that never wait for one another: `run` and `iterate` drive them without a loop."""

    def __init__(self, **options: Any) -> None:
        self.http = httpx.Client(**options)

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Sends a request and reads the whole answer."""
        return self.http.request(method, path, **options)

    @asynccontextmanager
    async def stream(self, path: str, **options: Any) -> AsyncIterator[Answer]:
        """The answer to a GET, read as it comes."""
        with self.http.stream("GET", path, **options) as response:
            yield _BlockingAnswer(response)

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


class _AsyncAnswer:
    def __init__(self, response: httpx.Response) -> None:
        self.head = response

    async def whole(self) -> httpx.Response:
        await self.head.aread()
        return self.head

    def bytes(self) -> AsyncIterator[bytes]:
        return self.head.aiter_bytes()

    def text(self) -> AsyncIterator[str]:
        return self.head.aiter_text()

    def lines(self) -> AsyncIterator[str]:
        return self.head.aiter_lines()


class _BlockingAnswer:
    def __init__(self, response: httpx.Response) -> None:
        self.head = response

    async def whole(self) -> httpx.Response:
        self.head.read()
        return self.head

    async def bytes(self) -> AsyncIterator[bytes]:
        for piece in self.head.iter_bytes():
            yield piece

    async def text(self) -> AsyncIterator[str]:
        for piece in self.head.iter_text():
            yield piece

    async def lines(self) -> AsyncIterator[str]:
        for line in self.head.iter_lines():
            yield line


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """What a coroutine over a `BlockingWire` returns."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    raise AssertionError("a blocking wire never waits")


def iterate(items: AsyncGenerator[_T]) -> Generator[_T]:
    """The items of an asynchronous generator over a `BlockingWire`."""

    async def following() -> _T:
        return await anext(items)

    try:
        while True:
            try:
                item = run(following())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run(_closed(items))


async def _closed(items: AsyncGenerator[Any]) -> None:
    await items.aclose()
