"""The time that a database has, and that of this machine."""

from datetime import UTC, datetime, timedelta

import pytest

from service.database import clock
from service.database.engine import Database

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noon, and no database was asked."""
    monkeypatch.setattr(clock, "machine_now", lambda: NOON)
    monkeypatch.setattr(clock, "_ahead", None)


@pytest.mark.parametrize(("theirs", "ahead"), [(-3, -3), (0, 0), (1, 0), (2, 0), (7, 5)])
def test_the_time_of_the_answer_is_no_difference(theirs: int, ahead: int) -> None:
    assert clock.seconds_ahead(NOON + theirs * SECOND, NOON, NOON + 2 * SECOND) == ahead


def test_what_is_far_from_the_database_goes_by_its_clock() -> None:
    assert clock.now() == NOON
    clock.follow(NOON + timedelta(hours=1), NOON - 2 * SECOND, NOON + 2 * SECOND)
    assert clock.now() == NOON + timedelta(hours=1) - 2 * SECOND, "that is certain, and no more is known"
    clock.follow(NOON + timedelta(hours=1), NOON - SECOND / 10, NOON)
    assert clock.now() == NOON + timedelta(hours=1)
    clock.follow(NOON + timedelta(hours=1), NOON - 2 * SECOND, NOON + 2 * SECOND)
    assert clock.now() == NOON + timedelta(hours=1), "better is known"
    clock.follow(NOON, NOON, NOON)
    assert clock.now() == NOON, "somebody put it right"


def test_a_server_is_asked_with_each_connection(database_url: str) -> None:
    """SQLite has no clock of its own."""
    database = Database(database_url)
    genuine = datetime.now(UTC)
    with database.read() as session:
        session.connection()
    difference = clock.now() - (genuine if database.engine.dialect.name == "postgresql" else NOON)
    assert abs(difference) < timedelta(minutes=1)
    database.close()
