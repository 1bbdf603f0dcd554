"""A client of a running service, and that service's database."""

import time
from collections.abc import Iterator

import pytest

from service.client import Client
from service.database.engine import Database


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server) as client:
        yield client


@pytest.fixture
def stored(sqlite_url: str) -> Iterator[Database]:
    """The server's database."""
    database = Database(sqlite_url)
    yield database
    database.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between two tries are a hundredth, and between two looks at a log that is followed a tenth."""
    sleep = time.sleep
    monkeypatch.setattr("service.client.connection.time.sleep", lambda seconds: sleep(seconds / 100))
    monkeypatch.setattr("service.api.logs._LOOK_SECONDS", 0.05)
