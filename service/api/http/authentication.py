"""Who sends a request, and whether its key allows it: what every route under /v1 depends on."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from sqlalchemy.exc import SQLAlchemyError

from service.access import keys
from service.access.security import (
    ANYONE,
    PREFIX,
    SECRET,
    Principal,
    Scope,
    hash_secret,
    installation_secret,
    split_key,
)
from service.api.http.dependencies import Config, Db
from service.database.engine import Database
from service.errors import KeyRefusedError, ScopeError
from service.settings import Settings

logger = logging.getLogger(__name__)

COOKIE = "ttsv_key"
"""Where the pages keep a key that was typed in; to change something it serves the pages of this service alone."""

_SAFE = ("GET", "HEAD")

_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="key",
    description="A key made by `ttsv keys create`. None is needed where the service listens on loopback only.",
)


def _principal(
    wanted: SecurityScopes,
    request: Request,
    database: Db,
    settings: Config,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)] = None,
) -> Principal:
    """Raises `KeyRefusedError` without a valid key, `ScopeError` where it does not allow this.

    Where none is asked for, one that is sent counts all the same: whoever sends it means its project. What does not
    begin as ours do, such as the token of a proxy in front, is left alone there.
    """
    sent = credentials.credentials if credentials else None
    if not settings.keys_required and (sent is None or not sent.startswith(PREFIX)):
        if request.method not in _SAFE and "origin" in request.headers and not sent_from_our_pages(request):
            # Without keys this is all that keeps a page on another site from cancelling what its reader runs here.
            raise ScopeError("another site's page sent this request; only this service's own pages may")
        return ANYONE
    text = sent
    if text is None and (request.method in _SAFE or sent_from_our_pages(request)):
        text = request.cookies.get(COOKIE)
    if text is None:
        raise KeyRefusedError("send a key: Authorization: Bearer ttsv_...; an admin makes one by `ttsv keys create`")
    found = principal_of(text, database, settings)
    request.state.key = text
    missing = [scope for scope in wanted.scopes if not found.may(Scope(scope))]
    if missing:
        raise ScopeError(f"the key does not have the scope {missing[0]}; it has {', '.join(sorted(found.scopes))}")
    return found


def principal_of(text: str, database: Database, settings: Settings) -> Principal:
    """Whose key this is; raises `KeyRefusedError`."""
    parts = split_key(text)
    if parts is None:
        raise KeyRefusedError("this is no key: a key is ttsv_<16 hex digits>_<43 characters>, as it was shown once")
    key_id, secret = parts
    with database.read() as session:
        # Another secret is not made for it: with the old one put back all keys are valid again.
        if not (settings.data_dir / SECRET).exists() and keys.lacks_secret(session, settings.data_dir):
            raise KeyRefusedError(
                f"no key is valid without {SECRET} in the service's data folder: `ttsv doctor` says so"
            )
        found = keys.authenticate(session, key_id, hash_secret(installation_secret(settings.data_dir), secret))
        mark = found is not None and keys.needs_mark(session, key_id)
    if found is None:
        raise KeyRefusedError("the key is unknown, revoked or expired")
    if mark:
        try:
            database.write(lambda session: keys.mark_used(session, key_id))
        except SQLAlchemyError as error:
            # Where nothing can be stored, as on a standby or a full disk, what there is can still be read.
            logger.warning("when key %s was used last is not noted: %s", key_id, error)
    return found


class Watch:
    """Whether the key that opened a stream still opens it, as somebody may take it back, or its time be over.

    It is asked for again before something is sent, no more often than every `AGAIN_SECONDS`. While the database is away
    nobody can have taken it back.
    """

    AGAIN_SECONDS = 5.0

    def __init__(self, request: Request, database: Db, settings: Config) -> None:
        self._database, self._settings = database, settings
        self._request = request
        self._looked_at = time.monotonic()
        self._holds = True

    async def holds(self, aside: Callable[[Callable[[], bool]], Awaitable[bool]]) -> bool:
        """Whether it does; `aside` runs what reads the database."""
        if self._holds and time.monotonic() - self._looked_at >= self.AGAIN_SECONDS:
            self._holds = await aside(self._look)
            self._looked_at = time.monotonic()
        return self._holds

    def _look(self) -> bool:
        text: str | None = getattr(self._request.state, "key", None)
        if text is None:  # none was asked for
            return True
        try:
            return principal_of(text, self._database, self._settings).may(Scope.READ)
        except KeyRefusedError:
            return False
        except SQLAlchemyError:
            return True


Watched = Annotated[Watch, Depends()]


def sent_from_our_pages(request: Request) -> bool:
    """Whether a browser says that a page of this very service sends the request.

    Browsers put Origin on every request that could change something, and no script can alter it. Where it names us the
    cookie is as good as the header: it is SameSite=Strict besides, and hidden from scripts, which a key kept for them
    in sessionStorage would not be. The scheme is left out: behind a proxy that ends TLS we see another one.
    """
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")


KeyHolder = Annotated[Principal, Security(_principal)]
"""Whoever has a key, whatever it allows."""
Reader = Annotated[Principal, Security(_principal, scopes=[Scope.READ])]
Submitter = Annotated[Principal, Security(_principal, scopes=[Scope.SUBMIT])]
Canceller = Annotated[Principal, Security(_principal, scopes=[Scope.CANCEL])]
Admin = Annotated[Principal, Security(_principal, scopes=[Scope.ADMIN])]
