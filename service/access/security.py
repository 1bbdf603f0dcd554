"""Who may do what: API keys, their scopes, and what a request may see.

A key is `ttsv_<id>_<secret>`: the id is looked up, of the secret only an HMAC-SHA256 under a secret of this
installation is stored. Keys belong to a project; its members see each other's experiments and nobody else's.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SECRET = "key-secret"
"""The file of the data folder with the secret under which keys are hashed."""
_ID_BYTES = 8
_SECRET_BYTES = 32
PREFIX = "ttsv_"
"""How every key begins."""
_KEY = re.compile(rf"{PREFIX}([0-9a-f]{{16}})_([A-Za-z0-9_-]{{43}})")


class Scope(StrEnum):
    """What a key allows. `admin` allows everything, in every project."""

    READ = "read"
    SUBMIT = "submit"
    CANCEL = "cancel"
    ADMIN = "admin"


@dataclass(frozen=True)
class Principal:
    """Who sends a request. `project_id` None: not bound to a project, all of them are seen."""

    name: str
    project_id: int | None
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        """Whether the scope, or admin, is among the key's."""
        return scope in self.scopes or Scope.ADMIN in self.scopes


ANYONE = Principal("anonymous", None, frozenset(Scope))
"""Who sends requests where no keys are asked for."""


@dataclass(frozen=True)
class NewKey:
    """A key that was just made: `text` is shown once and kept nowhere."""

    id: str
    text: str
    secret_hash: str


def new_key(installation: bytes) -> NewKey:
    """A random key, its secret hashed under the installation's."""
    key_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    return NewKey(key_id, f"{PREFIX}{key_id}_{secret}", hash_secret(installation, secret))


def split_key(text: str) -> tuple[str, str] | None:
    """(id, secret) of a key's text, or None if it is no key."""
    found = _KEY.fullmatch(text)
    return (found[1], found[2]) if found else None


def hash_secret(installation: bytes, secret: str) -> str:
    """What is stored of a key's secret (hex)."""
    return hmac.new(installation, secret.encode(), hashlib.sha256).hexdigest()


def installation_secret(data_dir: Path) -> bytes:
    """The secret of this installation, 32 bytes in `data_dir/key-secret` (made at first use, readable by us alone).

    Without it no key is valid any more: `ttsv backup` takes it along.
    """
    path = data_dir / SECRET
    try:
        return path.read_bytes()
    except FileNotFoundError:
        data_dir.mkdir(parents=True, exist_ok=True)
    # Written whole under another name first, then linked: of two processes at once one wins, and both read its file.
    draft = data_dir / f"{SECRET}.{secrets.token_hex(4)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
    return path.read_bytes()
