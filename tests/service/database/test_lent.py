"""PostgreSQL databases that tests have one after the other: the next one's is as a new one."""

from typing import Any

import pytest
from sqlalchemy import select, text

from service.database import Experiment
from service.database.engine import Database
from tests.machinery import PostgresServer


@pytest.fixture
def url(postgres: PostgresServer, postgres_template: str) -> str:
    return postgres.lend(postgres_template)


def said(url: str, statement: str) -> None:
    database = Database(url)
    database.write(lambda session: session.execute(text(statement)))
    database.close()


def inserted(url: str) -> int:
    """The id of an experiment that is stored, and seen to be alone."""
    database = Database(url)
    experiment: dict[str, Any] = {"name": "a", "spec": {}, "state": "queued", "grid_points": 1, "trial_count": 1}

    def work(session: Any) -> int:
        session.add(Experiment(**experiment))
        session.flush()
        (found,) = session.scalars(select(Experiment.id))
        return int(found)

    number = database.write(work)
    database.close()
    return number


def test_what_was_stored_is_gone_and_ids_begin_anew(url: str, postgres: PostgresServer, postgres_template: str) -> None:
    for _ in range(3):
        assert inserted(url) == 1
        postgres.take_back(url, postgres_template)
        assert postgres.lend(postgres_template) == url
    assert postgres._made.__wrapped__(postgres, url) == postgres._made(postgres_template)
    postgres.drop(url)


def test_a_connection_that_was_left_open_is_ended(url: str, postgres: PostgresServer, postgres_template: str) -> None:
    left = Database(url)
    with left.engine.connect() as connection:
        connection.execute(text("SELECT 1 FROM experiments"))
        postgres.take_back(url, postgres_template)
        connection.invalidate()
    left.close()
    assert postgres.lend(postgres_template) == url
    postgres.drop(url)


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TABLE further (id integer)",
        "ALTER TABLE trials ADD COLUMN further integer",
        "ALTER TABLE trials DISABLE TRIGGER USER",
        "DROP INDEX {index}",
        "CREATE FUNCTION further() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "UPDATE alembic_version SET version_num = '0001'",
        "DELETE FROM alembic_version",
        "ANALYZE alembic_version",
        "DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET lock_timeout = 1', current_database()); END$$",
    ],
)
def test_one_that_is_another_by_now_is_not_lent_again(
    url: str, postgres: PostgresServer, postgres_template: str, change: str
) -> None:
    database = Database(url)
    with database.read() as session:
        query = "SELECT min(indexrelid::regclass::text) FROM pg_index WHERE indrelid >= 16384 AND NOT indisunique"
        index = session.scalar(text(query))
    database.close()
    said(url, change.format(index=index))
    postgres.take_back(url, postgres_template)
    lent = postgres.lend(postgres_template)
    assert lent != url
    assert inserted(lent) == 1
    postgres.drop(lent)
