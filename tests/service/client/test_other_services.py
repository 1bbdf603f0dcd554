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


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:abc", "Invalid port"),
        ("http://a\nb", "non-printable"),
        (f"http://{'a' * 80}.com", "too long"),
        ("127.0.0.1:8000", "not of the web"),
        ("localhost:8000", "not of the web"),
        ("http://", "not of the web"),
    ],
)
def test_an_address_that_is_none(url: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"--url\): .*{why}.*; write http://HOST:PORT"):
        Client(url)


@pytest.mark.parametrize("url", ["http://[::1]:8000", "https://ü.example/ttsv", "HTTP://LOCALHOST:8000/"])
def test_an_address_that_is_one(url: str) -> None:
    with Client(url) as client:
        assert client.url == url.rstrip("/")


@pytest.mark.parametrize("key", ["schlüssel", "a\nb", "a ", "\x7f"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str) -> None:
    with pytest.raises(UserError, match="--key") as caught:
        Client("http://elsewhere", key=key)
    assert key not in str(caught.value)
