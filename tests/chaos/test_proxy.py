"""The proxy before the database does to a real server's clients what it says."""

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from tests.chaos.proxy import Proxy


@pytest.fixture
def proxy(postgres_url: str) -> Iterator[Proxy]:
    url = make_url(postgres_url)
    directory = url.query["host"]
    assert isinstance(directory, str)
    proxy = Proxy(str(Path(directory) / f".s.PGSQL.{url.port or 5432}"))
    yield proxy
    proxy.close()


@pytest.fixture
def address(proxy: Proxy, postgres_url: str) -> str:
    url = make_url(postgres_url)
    return f"host=127.0.0.1 port={proxy.port} user={url.username} dbname={url.database}"


def test_forwards(address: str) -> None:
    with psycopg.connect(address) as connection:
        assert connection.execute("SELECT 40 + 2").fetchone() == (42,)


def test_a_commit_whose_reply_is_swallowed_has_happened(proxy: Proxy, address: str) -> None:
    with psycopg.connect(address) as connection:
        connection.execute("CREATE TABLE noted (word TEXT)")
    proxy.swallow = 1
    connection = psycopg.connect(address)
    connection.execute("INSERT INTO noted VALUES ('COMMIT is a word')")  # no COMMIT yet
    assert proxy.swallow == 1
    with pytest.raises(psycopg.OperationalError):
        connection.commit()
    assert (proxy.swallow, proxy.swallowed) == (0, 1)
    with psycopg.connect(address) as other:
        assert other.execute("SELECT word FROM noted").fetchall() == [("COMMIT is a word",)]


def test_a_cut_ends_every_connection_and_refuses_new_ones(proxy: Proxy, address: str) -> None:
    connection = psycopg.connect(address)
    proxy.cut(0.5)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(address)
    time.sleep(0.6)
    psycopg.connect(address).close()


def test_silence_is_no_answer_and_then_a_reset(proxy: Proxy, address: str) -> None:
    connection = psycopg.connect(address)
    proxy.fall_silent(0.6)
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    assert time.monotonic() - began > 0.4
    psycopg.connect(address).close()
