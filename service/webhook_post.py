"""The sending of a webhook: signed, and to public addresses alone.

Whoever may set a URL could otherwise make us ask services of our own network. The name is resolved once and the
connection goes to that very address (a second answer of its name server changes nothing), no redirect is followed, no
proxy is asked, and of the answer nothing but the status is read.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from service.settings import Settings

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
    """The addresses of the settings, none by default. Raises `ValueError` where they cannot be used."""
    if settings.webhook_url is None:
        return []
    if settings.webhook_secret_file is None:
        raise ValueError("TTSV_WEBHOOK_URL needs TTSV_WEBHOOK_SECRET_FILE: a file with a secret, for the signatures")
    try:
        secret = settings.webhook_secret_file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"TTSV_WEBHOOK_SECRET_FILE: {error}") from None
    if len(secret) < _SHORTEST_SECRET:
        fix = f"at least {_SHORTEST_SECRET} characters, such as those of `openssl rand -hex 32`"
        raise ValueError(f"TTSV_WEBHOOK_SECRET_FILE: {settings.webhook_secret_file} holds too little: {fix}")
    loopback = settings.webhook_loopback
    return [Target(_checked(text, loopback), secret, loopback) for text in settings.webhook_url.split()]


def _checked(text: str, loopback: bool) -> httpx.URL:
    schemes = ("https", "http") if loopback else ("https",)
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"TTSV_WEBHOOK_URL: {text!r} is no URL: {error}") from None
    if url.scheme not in schemes or not url.host:
        allowed = "https://" if not loopback else "https://, or http:// to this machine"
        raise ValueError(f"TTSV_WEBHOOK_URL: {url.scheme}://{url.host}: must begin with {allowed}")
    if url.userinfo:
        raise ValueError("TTSV_WEBHOOK_URL: must hold no password; the signature says who sends")
    return url.copy_with(fragment=None)


def signature(secret: bytes, timestamp: int, body: bytes) -> str:
    """`t=...,v1=...`: the HMAC-SHA256 (hex) of the time (seconds since 1970), a dot and the body."""
    digest = hmac.new(secret, b"%d." % timestamp + body, hashlib.sha256).hexdigest()
    return f"t={timestamp},v1={digest}"


async def post(target: Target, message: dict[str, Any], *, tls: ssl.SSLContext | None = None) -> None:
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
    except OSError as error:
        raise NotDeliveredError(f"{host}: {error.strerror or error}") from None
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
