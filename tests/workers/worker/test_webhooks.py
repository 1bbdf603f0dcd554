"""The thread that tells webhooks, against a real receiver."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from service.experiments import actions
from service.settings import Settings
from workers.worker import webhooks
from workers.worker.webhooks import WebhookSender

pytestmark = pytest.mark.here

if TYPE_CHECKING:
    from tests.workers.conftest import Lab


class Receiver:
    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(outer.answers.pop(0) if outer.answers else 200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/token-of-a-chat"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()
    receiver.thread.join()


def settings(lab: Lab, url: str, **more: Any) -> Settings:
    secret = lab.data_dir / "secret"
    secret.write_text("0123456789abcdef")
    return Settings(data_dir=lab.data_dir, webhook_url=url, webhook_secret_file=secret, webhook_loopback=True, **more)


def test_one_worker_after_another(
    lab: Lab, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What happens while none runs is told by the next; what was refused is sent again; nothing comes twice."""
    monkeypatch.setattr(webhooks, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr("service.experiments.webhooks._FIRST_PAUSE", 0.1)
    caplog.set_level(logging.INFO)
    one, two, three = (lab.post([seed]) for seed in range(3))
    told = settings(lab, receiver.url)
    with WebhookSender(told, lab.database):
        lab.wait_for(lambda: _enrolled(lab))
        receiver.answers = [500]
        lab.database.write(lambda session: actions.cancel(session, one))
        lab.wait_for(lambda: len(receiver.got) == 2)
    lab.database.write(lambda session: actions.cancel(session, two))
    with WebhookSender(told, lab.database), WebhookSender(told, lab.database):
        lab.database.write(lambda session: actions.cancel(session, three))
        lab.wait_for(lambda: len(receiver.got) >= 4)
    told_of = [message["experiment"]["id"] for message in receiver.got]
    assert told_of[:2] == [one, one]
    assert sorted(told_of[2:]) == [two, three]  # by two senders at once, in either order
    (record,) = [record for record in caplog.records if "it answered 500" in record.message]
    assert "tried again later" in record.message
    assert "token-of-a-chat" not in caplog.text


def test_an_address_in_trouble_keeps_no_other_waiting(
    lab: Lab, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is: the second address hears of the event, and the first one's trouble is in the log."""

    async def post(target: webhooks.Target, message: dict[str, Any]) -> None:
        if target.url.host == "localhost":
            raise RuntimeError("nobody foresaw this")
        await told(target, message)

    told = webhooks.post
    monkeypatch.setattr(webhooks, "post", post)
    monkeypatch.setattr(webhooks, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(webhooks, "_OUTAGE_SECONDS", 60)
    one = lab.post([0])
    with WebhookSender(settings(lab, f"http://localhost:9 {receiver.url}"), lab.database):
        lab.wait_for(lambda: _enrolled(lab, 2))
        lab.database.write(lambda session: actions.cancel(session, one))
        lab.wait_for(lambda: receiver.got, 10)
        lab.wait_for(lambda: "nobody foresaw this; tried again later" in caplog.text, 10)
    assert [message["experiment"]["id"] for message in receiver.got] == [one]


def test_nothing_is_configured(lab: Lab) -> None:
    before = threading.active_count()
    with WebhookSender(Settings(data_dir=lab.data_dir), lab.database):
        assert threading.active_count() == before


def _enrolled(lab: Lab, addresses: int = 1) -> bool:
    from service.database import Webhook

    with lab.database.read() as session:
        return session.query(Webhook).count() == addresses
