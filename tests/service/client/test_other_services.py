"""An address at which something else answers, one that is none, and a key that cannot be sent."""

from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import pytest

from service.client import Client, UnreachableError
from service.errors import UserError


def answering(content: bytes, kind: str) -> Client:
    client = Client("http://elsewhere")
    answer = httpx.Response(200, content=content, headers={"Content-Type": kind})
    client._http = httpx.Client(base_url=client.url, transport=httpx.MockTransport(lambda _: answer))
    return client


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.trial(1),
        lambda client: list(client.experiments()),
        lambda client: client.keys(),
        lambda client: client.cancel(1),
    ],
    ids=["answer", "pages", "list", "action"],
)
@pytest.mark.parametrize("content", [b"<html>", b"[]1", b"[1]", b"3"])
def test_what_is_no_answer_of_this_service(ask: Callable[[Client], Any], content: bytes) -> None:
    with answering(content, "application/json") as client, pytest.raises(UnreachableError) as caught:
        ask(client)
    assert "http://elsewhere answers, but not as this service does" in str(caught.value)


def test_a_page_for_browsers_is_no_table() -> None:
    with answering(b"<html>", "text/html; charset=utf-8") as client, pytest.raises(UnreachableError, match="browsers"):
        client.leaderboard_text("digits", format="csv")


def test_an_address_that_is_none() -> None:
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:abc .*--url.*Invalid port"):
        Client("http://127.0.0.1:abc")


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a ", "\x7f"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str) -> None:
    with pytest.raises(UserError, match="--key") as caught:
        Client("http://elsewhere", key=key)
    assert key not in str(caught.value)
