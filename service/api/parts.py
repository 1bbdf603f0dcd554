"""What routes share: the database of the running app, and cursors."""

import base64
from typing import Annotated

from fastapi import Depends, Query, Request, Response
from pydantic import AfterValidator

from service.db import Database
from service.settings import Settings


def _database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


Db = Annotated[Database, Depends(_database)]
Config = Annotated[Settings, Depends(_settings)]

MAX_ID = 2**63 - 1


def _cursor_text(text: str) -> str:
    decode_cursor(text)
    return text


def encode_cursor(position: int) -> str:
    """Opaque to clients: where a page ended."""
    return base64.urlsafe_b64encode(f"v1:{position}".encode()).decode().rstrip("=")


def decode_cursor(text: str | None) -> int | None:
    """Where the page before ended; raises ValueError."""
    if text is None:
        return None
    try:
        version, _, position = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().partition(":")
    except ValueError:  # binascii.Error and UnicodeError among them
        version, position = "", ""
    if version != "v1" or not position.isdecimal() or len(position) > 19 or int(position) > MAX_ID:
        raise ValueError("not a cursor; take `next` of the page before")
    return int(position)


Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many items.")]
Cursor = Annotated[
    str | None,
    AfterValidator(lambda text: text if text is None else _cursor_text(text)),
    Query(description="`next` of the page before."),
]


def link_next(response: Response, request_url: str, cursor: str | None) -> None:
    """Says in the Link header where the next page is."""
    if cursor is not None:
        response.headers["Link"] = f'<{request_url}>; rel="next"'
