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
    monkeypatch.setattr(clock, "steady", lambda: timedelta(hours=5))
    monkeypatch.setattr(clock, "_booted", None)


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


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_machine_whose_clock_is_put_right_still_goes_by_the_database(
    monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    clock.follow(NOON, NOON, NOON)
    monkeypatch.setattr(clock, "machine_now", lambda: NOON + timedelta(hours=hours))
    monkeypatch.setattr(clock, "steady", lambda: timedelta(hours=5, minutes=1))
    assert clock.now() == NOON + timedelta(minutes=1)


def test_who_stood_still_as_the_clock_was_read_reads_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by a debugger, say, between two clocks: it would take the time of that for a difference."""
    moments, steady = [NOON, NOON + 61 * SECOND], [0, 61, 61, 61, 62]
    monkeypatch.setattr(clock, "machine_now", lambda: moments.pop(0))
    monkeypatch.setattr(clock, "steady", lambda: steady.pop(0) * SECOND)
    clock.follow(NOON, NOON, NOON)
    assert clock.now() == NOON + 62 * SECOND


def test_a_server_is_asked_with_each_connection(database_url: str) -> None:
    """SQLite has no clock of its own."""
    database = Database(database_url)
    genuine = datetime.now(UTC)
    with database.read() as session:
        session.connection()
    difference = clock.now() - (genuine if database.engine.dialect.name == "postgresql" else NOON)
    assert abs(difference) < timedelta(minutes=1)
    database.close()
