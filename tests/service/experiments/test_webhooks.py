"""Which events are told, and how: the deliveries in the database, and the POST itself."""

import asyncio
import datetime as dt
import ipaddress
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from service.database import Event, Webhook, WebhookDelivery, now
from service.database.engine import Database
from service.errors import UserError
from service.experiments import actions, webhooks
from service.experiments.events import EventKind
from service.queue import leases
from service.queue.trials import hold
from service.settings import Settings
from tests.held import unfinished_trials
from tests.machinery import Claim, Submit, Table
from workers.worker import webhooks as sender
from workers.worker.webhooks import NotDeliveredError, Target, post, resolved, signature, targets

SECRET = b"0123456789abcdef"
CLOSED = (EventKind.CLOSED,)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the deliveries' clock on."""
    moved = [0.0]
    monkeypatch.setattr("service.experiments.webhooks.now", lambda: now() + timedelta(seconds=moved[0]))

    def move(seconds: float) -> None:
        moved[0] += seconds

    return move


def take(database: Database, kinds: tuple[EventKind, ...] = CLOSED, endpoint: str = "e", limit: int = 20) -> Any:
    with database.read() as session:
        expected = webhooks.has_work(session, endpoint, kinds)
    taken = database.write(lambda session: webhooks.take(session, endpoint, kinds, limit))
    assert bool(taken) == expected
    return taken


def settle(database: Database, delivery: webhooks.Delivery, delivered: bool) -> bool:
    return database.write(lambda session: webhooks.settle(session, delivery, delivered=delivered))


@pytest.fixture
def enrolled(database: Database) -> Database:
    database.write(lambda session: webhooks.enrol(session, "e"))
    return database


class TestDeliveries:
    def test_what_becomes_final_is_told_once(self, enrolled: Database, submit: Submit) -> None:
        first, second, _open = submit(name="a"), submit(name="b"), submit(name="c")
        for experiment_id in (first, second):
            enrolled.write(lambda session, id=experiment_id: actions.cancel(session, id))  # type: ignore[misc]
        taken = take(enrolled)
        assert [(d.message["experiment"]["id"], d.message["experiment"]["name"]) for d in taken] == [
            (first, "a"),
            (second, "b"),
        ]
        message = taken[0].message
        assert message["kind"] == "closed"
        assert message["experiment"]["state"] == "cancelled"
        assert message["experiment"]["path"] == f"/v1/experiments/{first}"
        assert message["trial"] is None
        assert take(enrolled) == [], "they were taken"
        assert all(settle(enrolled, delivery, True) for delivery in taken)
        assert take(enrolled) == []

    def test_what_was_before_is_not_told(self, database: Database, submit: Submit) -> None:
        one, two = submit(), submit()
        database.write(lambda session: actions.cancel(session, one))
        database.write(lambda session: webhooks.enrol(session, "e"))
        database.write(lambda session: actions.cancel(session, two))
        database.write(lambda session: webhooks.enrol(session, "e"))  # as the next worker does
        (delivery,) = take(database)
        assert delivery.message["experiment"]["id"] == two

    def test_two_addresses_are_told_each(self, enrolled: Database, submit: Submit) -> None:
        enrolled.write(lambda session: webhooks.enrol(session, "f"))
        one = submit()
        enrolled.write(lambda session: actions.cancel(session, one))
        assert [len(take(enrolled, endpoint=endpoint)) for endpoint in ("e", "f", "unknown")] == [1, 1, 0]

    def test_failed_trials_where_asked_for(self, enrolled: Database, submit: Submit, claim: Claim) -> None:
        experiment_id = submit(seeds=1)
        lease = claim()

        def fail(session: Any) -> None:
            (trial,) = unfinished_trials(session, lease)
            with hold(session, lease) as held:
                held.start_trial(trial.id)
                held.fail_trial(trial.id, "oom", "x" * 5000)
            assert leases.complete(session, lease)

        enrolled.write(fail)
        told = take(enrolled, (EventKind.CLOSED, EventKind.TRIAL_FAILED))
        assert [delivery.message["kind"] for delivery in told] == ["trial_failed", "closed"]
        trial = told[0].message["trial"]
        assert (trial["number"], trial["failure"], len(trial["error"])) == (0, "oom", 1000)
        assert told[1].message["experiment"] == {
            "id": experiment_id,
            "name": "grid",
            "state": "failed",
            "error": "1 of 1 trials did not succeed",
            "trials": 1,
            "path": f"/v1/experiments/{experiment_id}",
        }

    def test_again_after_a_pause_that_grows(
        self, enrolled: Database, submit: Submit, clock: Callable[[float], None], table: Table
    ) -> None:
        one = submit()
        enrolled.write(lambda session: actions.cancel(session, one))
        longest, at_most = 0.0, 0.0
        for attempt in range(1, webhooks.MAX_ATTEMPTS):
            (delivery,) = take(enrolled)
            assert delivery.attempt == attempt
            assert not settle(enrolled, delivery, False)
            assert take(enrolled) == [], "it is not due yet"
            longest = min(5.0 * 2 ** (attempt - 1), 3600.0)
            (row,) = table(WebhookDelivery)
            pause = (row.due_at - webhooks.now()).total_seconds()  # type: ignore[attr-defined]
            assert longest / 2 - 5 <= pause <= longest
            clock(longest)
            at_most += longest
        assert longest == 3600
        assert 12 * 3600 < at_most / 2 < at_most < 24.5 * 3600, "as docs/webhooks.md says"
        (delivery,) = take(enrolled)
        assert settle(enrolled, delivery, False), "given up"
        clock(1e6)
        assert take(enrolled) == []

    def test_what_its_taker_never_settled_is_taken_again(
        self, enrolled: Database, submit: Submit, clock: Callable[[float], None]
    ) -> None:
        one = submit()
        enrolled.write(lambda session: actions.cancel(session, one))
        (first,) = take(enrolled)
        clock(59)
        assert take(enrolled) == []
        clock(2)
        (second,) = take(enrolled)
        assert (second.event_id, second.attempt) == (first.event_id, 2)

    def test_an_event_that_shows_up_late_is_told(
        self, enrolled: Database, submit: Submit, clock: Callable[[float], None], table: Table
    ) -> None:
        """A transaction that took long commits an event with a smaller number than those told before."""
        ids = [submit(name=str(number)) for number in range(3)]
        for experiment_id in ids:
            enrolled.write(lambda session, id=experiment_id: actions.cancel(session, id))  # type: ignore[misc]
        closed = [event for event in table(Event) if event.kind == "closed"]
        late = closed[1]
        kept = {"id": late.id, "experiment_id": late.experiment_id, "actor": "x", "kind": "closed", "detail": {}}
        enrolled.write(lambda session: session.delete(session.get_one(Event, late.id)))
        for delivery in take(enrolled):
            assert settle(enrolled, delivery, True)
        enrolled.write(lambda session: session.add(Event(**kept)))
        assert [delivery.event_id for delivery in take(enrolled)] == [late.id]
        # Later on the cursor moves, and what is over is forgotten.
        clock(3600)
        (again,) = take(enrolled)
        settle(enrolled, again, True)
        last = submit()
        enrolled.write(lambda session: actions.cancel(session, last))
        assert take(enrolled)
        (row,) = table(Webhook)
        assert row.after >= closed[-1].id
        assert late.id not in [delivery.event_id for delivery in table(WebhookDelivery)]

    def test_a_limit(self, enrolled: Database, submit: Submit) -> None:
        for experiment_id in [submit() for _ in range(3)]:
            enrolled.write(lambda session, id=experiment_id: actions.cancel(session, id))  # type: ignore[misc]
        assert [len(take(enrolled, limit=2)) for _ in range(3)] == [2, 1, 0]


class Receiver:
    """An HTTP server that keeps what it is sent."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None], tls: ssl.SSLContext | None = None) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.got.append((self.path, dict(self.headers.items()), body))
                answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def status(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


@pytest.fixture
def receive() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def receive(answer: Callable[[BaseHTTPRequestHandler], None] | None = None, **more: Any) -> Receiver:
        made.append(Receiver(answer or status(204), **more))
        return made[-1]

    yield receive
    for receiver in made:
        receiver.close()


def target(url: str, *, loopback: bool = True) -> Target:
    return Target(httpx.URL(url), SECRET, loopback)


class TestPost:
    def test_the_documented_check_accepts_it(self, receive: Callable[..., Receiver]) -> None:
        """The snippet is taken from the page as it stands there."""
        page = (Path(__file__).parents[3] / "docs/webhooks.md").read_text()
        (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        namespace: dict[str, Any] = {}
        exec(snippet, namespace)
        is_genuine = namespace["is_genuine"]
        receiver = receive()
        message = {"id": 7, "kind": "closed", "name": "é"}
        asyncio.run(post(target(f"http://localhost:{receiver.port}/hook?x=1"), message))
        ((path, headers, body),) = receiver.got
        assert path == "/hook?x=1"
        assert json.loads(body) == message
        assert headers["Host"] == f"localhost:{receiver.port}"
        assert headers["X-TTSV-Delivery"] == "7"
        header = headers["X-TTSV-Signature"]
        assert is_genuine(SECRET, header, body)
        assert not is_genuine(SECRET, header, body + b" ")
        assert not is_genuine(b"another secret..", header, body)
        assert not is_genuine(SECRET, signature(SECRET, int(time.time()) - 301, body), body)
        assert not is_genuine(SECRET, "", body)

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (status(500), "it answered 500"),
            (status(302, Location="/elsewhere"), "it answered 302: redirects are not followed"),
        ],
    )
    def test_what_is_no_success(self, receive: Callable[..., Receiver], answer: Any, reason: str) -> None:
        receiver = receive(answer)
        with pytest.raises(NotDeliveredError, match=f"^{reason}$"):
            asyncio.run(post(target(f"http://127.0.0.1:{receiver.port}"), {"id": 1}))
        assert len(receiver.got) == 1

    def test_a_dripping_answer_is_not_waited_for(
        self, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sender, "SECONDS", 0.3)

        def drip(handler: BaseHTTPRequestHandler) -> None:
            for byte in b"HTTP/1.1 200 OK\r\n":
                try:
                    handler.wfile.write(bytes([byte]))
                except OSError:
                    return
                time.sleep(0.5)

        receiver = receive(drip)
        began = time.monotonic()
        with pytest.raises(NotDeliveredError, match="no answer within"):
            asyncio.run(post(target(f"http://127.0.0.1:{receiver.port}"), {"id": 1}))
        assert time.monotonic() - began < 5

    def test_nobody_there(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(NotDeliveredError, match="ConnectError"):
            asyncio.run(post(target(f"http://127.0.0.1:{port}"), {"id": 1}))

    def test_the_certificate_is_that_of_the_name(self, receive: Callable[..., Receiver], tmp_path: Path) -> None:
        """The connection goes to an address, and the name is what TLS asks for and what must be certified."""
        server, trusted = certificate("localhost", tmp_path)
        receiver = receive(tls=server)
        asyncio.run(post(target(f"https://localhost:{receiver.port}"), {"id": 1}, tls=trusted))
        assert len(receiver.got) == 1
        for url, context in (
            (f"https://127.0.0.1:{receiver.port}", trusted),
            (f"https://localhost:{receiver.port}", None),
        ):
            with pytest.raises(NotDeliveredError, match="CERTIFICATE_VERIFY_FAILED"):
                asyncio.run(post(target(url), {"id": 1}, tls=context))
        assert len(receiver.got) == 1


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
            "224.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1%1", "fc00::1", "::ffff:127.0.0.1",
            "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1",
        ],
    )  # fmt: skip
    def test_not_public(self, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
        answers(monkeypatch, address)
        with pytest.raises(NotDeliveredError, match="not a public address"):
            asyncio.run(resolved(target("https://example.com", loopback=False)))

    @pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
    def test_public(self, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
        answers(monkeypatch, "10.0.0.1", address)
        assert asyncio.run(resolved(target("https://example.com", loopback=False))) == address

    def test_http_never_leaves_the_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers(monkeypatch, "8.8.8.8")
        with pytest.raises(NotDeliveredError, match="not an address of this machine"):
            asyncio.run(resolved(target("http://example.com")))

    @pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..example"])
    def test_no_name_at_all(self, host: str) -> None:
        with pytest.raises(NotDeliveredError, match="label empty or too long"):
            asyncio.run(resolved(target(f"https://{host}", loopback=False)))

    def test_a_name_that_changes_its_mind(
        self, monkeypatch: pytest.MonkeyPatch, receive: Callable[..., Receiver]
    ) -> None:
        """The name is asked for once; the connection goes to the first answer."""
        receiver = receive()
        asked = answers(monkeypatch, "127.0.0.1")
        asyncio.run(post(target(f"http://rebound.example:{receiver.port}"), {"id": 1}))
        assert asked == ["rebound.example"]
        assert receiver.got[0][1]["Host"] == f"rebound.example:{receiver.port}"

    def test_no_proxy_is_asked(self, monkeypatch: pytest.MonkeyPatch, receive: Callable[..., Receiver]) -> None:
        receiver, proxy = receive(), receive()
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        asyncio.run(post(target(f"http://127.0.0.1:{receiver.port}"), {"id": 1}))
        assert (len(receiver.got), len(proxy.got)) == (1, 0)


def answers(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """What names resolve to from now on; the names that were asked for. Addresses resolve to themselves."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def fake(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            asked.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", fake)
    return asked


def certificate(name: str, folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate of its own for the name, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    moment = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(moment - timedelta(days=1))
        .not_valid_after(moment + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    private = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / "server.pem"
    file.write_bytes(private + made.public_bytes(form))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cadata=made.public_bytes(form).decode())


class TestTargets:
    @pytest.fixture
    def secret(self, tmp_path: Path) -> Path:
        path = tmp_path / "secret"
        path.write_bytes(SECRET + b"\n")
        return path

    def test_none_by_default(self) -> None:
        assert targets(Settings()) == []

    def test_several(self, secret: Path) -> None:
        settings = Settings(webhook_url="https://a.example/x#y https://b.example:8443", webhook_secret_file=secret)
        found = targets(settings)
        assert [str(target.url) for target in found] == ["https://a.example/x", "https://b.example:8443"]
        assert {target.secret for target in found} == {SECRET}
        assert [target.shown for target in found] == ["https://a.example", "https://b.example:8443"]
        assert "0123456789" not in repr(found)

    @pytest.mark.parametrize(
        ("url", "loopback", "reason"),
        [
            ("http://example.com", False, "must begin with https://"),
            ("http://127.0.0.1:8080", False, "must begin with https://"),
            ("ftp://example.com", True, "must begin with https://, or http:// to this machine"),
            ("https://", True, "must begin with"),
            ("example.com/hook", False, "must begin with https://"),
            ("https://user:pass@example.com", False, "must hold no password"),
            ("https://" + "a" * 64 + ".example/hook", False, "no part of a name may be empty or longer than 63"),
            ("https://a..example", False, "no part of a name may be empty or longer than 63"),
        ],
    )
    def test_refused(self, secret: Path, url: str, loopback: bool, reason: str) -> None:
        settings = Settings(webhook_url=url, webhook_secret_file=secret, webhook_loopback=loopback)
        with pytest.raises(UserError, match=f"^TTSV_WEBHOOK_URL: .*{reason}"):
            targets(settings)

    def test_a_secret_is_needed(self, tmp_path: Path) -> None:
        short = tmp_path / "short"
        short.write_text("short")
        for file, reason in ((None, "needs TTSV_WEBHOOK_SECRET_FILE"), (short, "too little"), (tmp_path / "x", "x")):
            with pytest.raises(UserError, match=reason):
                targets(Settings(webhook_url="https://example.com", webhook_secret_file=file))
