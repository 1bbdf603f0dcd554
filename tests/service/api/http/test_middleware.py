"""What stands around every route, tried with applications that answer nothing."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.middleware import CollectionAfterAnswers


class Node:
    """An object that may be part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def by_hand() -> Iterator[None]:
    """Only what is asked for is collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("by_hand")
class TestCollectionAfterAnswers:
    def test_many_cycles_of_an_answer_are_gone_after_it(self) -> None:
        seen: list[weakref.ref[Node]] = []

        async def application(_scope: Scope, _receive: Receive, _send: Send) -> None:
            seen.extend(weakref.ref(Node()) for _ in range(6_000))
            assert all(one() for one in seen)

        ask(application)
        assert not any(one() for one in seen)

    def test_a_small_answer_is_no_reason(self) -> None:
        seen: list[weakref.ref[Node]] = []

        async def application(_scope: Scope, _receive: Receive, _send: Send) -> None:
            seen.append(weakref.ref(Node()))

        ask(application)
        assert seen[0]() is not None

    def test_what_outlived_many_looks_is_found_in_the_end(self) -> None:
        old = Node()
        gone = weakref.ref(old)
        for generation in (0, 1):
            gc.collect(generation)  # it is in the oldest by now
        del old

        async def application(_scope: Scope, _receive: Receive, _send: Send) -> None:
            for _ in range(6_000):
                Node()

        answers = 0
        while gone() is not None and answers < 1000:
            ask(application)
            answers += 1
        assert 21 < answers < 1000

    def test_a_failure_passes_through(self) -> None:
        async def application(_scope: Scope, _receive: Receive, _send: Send) -> None:
            raise RuntimeError("no answer")

        with pytest.raises(RuntimeError, match="no answer"):
            ask(application)


def ask(application: ASGIApp) -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_message: Message) -> None:
        pass

    asyncio.run(CollectionAfterAnswers(application)({"type": "http"}, receive, send))
