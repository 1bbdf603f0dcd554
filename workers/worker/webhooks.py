"""Webhooks: who is told what happened, signed, and at public addresses alone.

A thread beside the worker tells them: a slow receiver delays no claim. Whoever may set a URL could otherwise make us
ask services of our own network: the name is resolved once and the connection goes to that very address (a second answer
of its name server changes nothing), no redirect is followed, no proxy is asked, and of the answer nothing but the
status is read.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import httpx2 as httpx
from sqlalchemy.exc import SQLAlchemyError

from service.database.engine import Database
from service.errors import UserError
from service.experiments import webhooks
from service.experiments.events import EventKind
from service.experiments.webhooks import Delivery
from service.settings import Settings

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
AT_ONCE = 20
"""Deliveries that are under way together."""
_OUTAGE_SECONDS = 10.0
_END_SECONDS = 10.0
SECONDS = 5.0
"""A delivery takes no longer, however slowly the other side answers."""
SIGNATURE, DELIVERY = "X-TTSV-Signature", "X-TTSV-Delivery"
_SHORTEST_SECRET = 16
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class NotDeliveredError(RuntimeError):
    """The address did not take it; the message says why, without the URL's path, which may be a secret."""


@dataclass(frozen=True)
class Target:
    """An address to be told, and the secret under which this is signed."""

    url: httpx.URL
    secret: bytes = field(repr=False)
    loopback: bool = False

    @property
    def endpoint(self) -> str:
        """By what the database knows it."""
        return hashlib.sha256(str(self.url).encode()).hexdigest()

    @property
    def shown(self) -> str:
        """What may stand in a log."""
        return f"{self.url.scheme}://{self.url.netloc.decode()}"


def targets(settings: Settings) -> list[Target]:
    """The addresses of the settings, none by default. Raises `UserError` where they cannot be used."""
    if settings.webhook_url is None:
        return []
    if settings.webhook_secret_file is None:
        raise UserError("TTSV_WEBHOOK_URL needs TTSV_WEBHOOK_SECRET_FILE: a file with a secret, for the signatures")
    try:
        secret = settings.webhook_secret_file.read_bytes().strip()
    except OSError as error:
        raise UserError(f"TTSV_WEBHOOK_SECRET_FILE: {error}") from None
    if len(secret) < _SHORTEST_SECRET:
        fix = f"at least {_SHORTEST_SECRET} characters, such as those of `openssl rand -hex 32`"
        raise UserError(f"TTSV_WEBHOOK_SECRET_FILE: {settings.webhook_secret_file} holds too little: {fix}")
    loopback = settings.webhook_loopback
    return [Target(_checked(text, loopback), secret, loopback) for text in settings.webhook_url.split()]


def kinds(settings: Settings) -> tuple[EventKind, ...]:
    """Of what the addresses are told."""
    return (EventKind.CLOSED, *((EventKind.TRIAL_FAILED,) if settings.webhook_trials else ()))


def _checked(text: str, loopback: bool) -> httpx.URL:
    schemes = ("https", "http") if loopback else ("https",)
    try:
        url = httpx.URL(text)
        url.host.encode("idna")  # as it is resolved
    except UnicodeError:
        raise UserError(f"TTSV_WEBHOOK_URL: {text!r}: no part of a name may be empty or longer than 63") from None
    except (httpx.InvalidURL, TypeError) as error:
        raise UserError(f"TTSV_WEBHOOK_URL: {text!r} is no URL: {error}") from None
    if url.scheme not in schemes or not url.host:
        allowed = "https://" if not loopback else "https://, or http:// to this machine"
        raise UserError(f"TTSV_WEBHOOK_URL: {url.scheme}://{url.host}: must begin with {allowed}")
    if url.userinfo:
        raise UserError("TTSV_WEBHOOK_URL: must hold no password; the signature says who sends")
    return url.copy_with(fragment=None)


def signature(secret: bytes, timestamp: int, body: bytes) -> str:
    """`t=...,v1=...`: the HMAC-SHA256 (hex) of the time (seconds since 1970), a dot and the body."""
    digest = hmac.new(secret, b"%d." % timestamp + body, hashlib.sha256).hexdigest()
    return f"t={timestamp},v1={digest}"


async def post(target: Target, message: Mapping[str, object], *, tls: ssl.SSLContext | None = None) -> None:
    """Sends a message, whose `id` tells the receiver whether it has it already. Raises `NotDeliveredError`.

    `tls` is by default what the operating system trusts.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    headers = {
        "Host": target.url.netloc.decode(),
        "Content-Type": "application/json",
        "User-Agent": "ttsv",
        DELIVERY: str(message["id"]),
        SIGNATURE: signature(target.secret, int(time.time()), body),
    }
    try:
        async with asyncio.timeout(SECONDS):
            address = await resolved(target)
            async with (
                httpx.AsyncClient(
                    verify=tls or True, trust_env=False, follow_redirects=False, timeout=SECONDS
                ) as client,
                client.stream(
                    "POST",
                    target.url.copy_with(host=address),
                    content=body,
                    headers=headers,
                    extensions={"sni_hostname": target.url.raw_host.decode()},  # whose certificate is asked for
                ) as response,
            ):
                status = response.status_code
    except TimeoutError:
        raise NotDeliveredError(f"no answer within {SECONDS:g} s") from None
    except (httpx.HTTPError, OSError) as error:
        raise NotDeliveredError(f"{type(error).__name__}: {error}") from None
    if not 200 <= status < 300:
        raise NotDeliveredError(
            f"it answered {status}" + (": redirects are not followed" if status // 100 == 3 else "")
        )


async def resolved(target: Target) -> str:
    """The address to connect to. Raises `NotDeliveredError` where the name has none that is allowed."""
    host, port = target.url.host, target.url.port or {"http": 80, "https": 443}[target.url.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise NotDeliveredError(f"{host}: {getattr(error, 'strerror', None) or error}") from None
    addresses = [str(sockaddr[0]) for *_, sockaddr in found]
    for address in addresses:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if target.loopback and parsed.is_loopback:
            return address
        if target.url.scheme == "https" and _is_public(parsed):
            return address
    wanted = "an address of this machine" if target.url.scheme == "http" else "a public address"
    raise NotDeliveredError(f"{host} is {', '.join(addresses)}: not {wanted}")


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether it is on the internet; an IPv6 address that stands for an IPv4 one is judged by that."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if address.teredo is not None:
            embedded = address.teredo[1]
        if address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return _is_public(embedded)
    return address.is_global and not address.is_multicast and not address.is_reserved


class WebhookSender:
    """As a context manager; without addresses in the settings it does nothing. Raises `UserError` for wrong ones.

    Several workers share the deliveries by the database. What was not delivered at the end is due for the next worker.
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._targets = targets(settings)
        self._kinds = kinds(settings)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._targets:
            for name in ("httpx2", "httpcore2"):  # their lines have the whole URL, which may be a secret
                logging.getLogger(name).setLevel(logging.WARNING)
            # A daemon: an answer that never comes keeps no worker from ending.
            self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        logger.info("webhooks to %s", ", ".join(target.shown for target in self._targets))
        enrolled = False
        while not self._ending.is_set():
            pause = LOOK_SECONDS
            try:
                if not enrolled:
                    for target in self._targets:
                        self._database.write(partial(webhooks.enrol, endpoint=target.endpoint))
                    enrolled = True
                for target in self._targets:
                    self._deliver(target)
            except SQLAlchemyError as error:
                logger.warning("webhooks wait for the database: %s", error)
                pause = _OUTAGE_SECONDS
            except Exception:  # whatever it was, what comes after it is to be told
                logger.exception("webhooks: an unexpected error")
                pause = _OUTAGE_SECONDS
            self._ending.wait(pause)

    def _deliver(self, target: Target) -> None:
        """Sends what is due to one address."""
        with self._database.read() as session:
            if not webhooks.has_work(session, target.endpoint, self._kinds):
                return
        take = partial(webhooks.take, endpoint=target.endpoint, kinds=self._kinds, limit=AT_ONCE)
        deliveries = self._database.write(take)
        problems = asyncio.run(_send(target, deliveries))
        for delivery, problem in zip(deliveries, problems, strict=True):
            over = self._database.write(partial(webhooks.settle, delivery=delivery, delivered=problem is None))
            if problem is not None:
                level, then = (logging.ERROR, "given up") if over else (logging.WARNING, "tried again later")
                what = f"event {delivery.event_id} to {target.shown}, attempt {delivery.attempt}"
                logger.log(level, "webhook: %s: %s; %s", what, problem, then)


async def _send(target: Target, deliveries: Sequence[Delivery]) -> list[str | None]:
    """What went wrong with each."""

    async def one(delivery: Delivery) -> str | None:
        try:
            await post(target, delivery.message)
        except NotDeliveredError as error:
            return str(error)
        except Exception as error:  # whatever it was, the other deliveries go on, and this one is given up some day
            logger.exception("webhooks: an unexpected error")
            return f"{type(error).__name__}: {error}"
        return None

    return list(await asyncio.gather(*map(one, deliveries)))
