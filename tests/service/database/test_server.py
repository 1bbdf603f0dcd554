"""What a database says of itself."""

from pathlib import Path

from sqlalchemy import text

from service.database.engine import Database, sqlite_driver
from service.database.server import Server, damage, describe


def test_describe(database: Database) -> None:
    with database.read() as session:
        server = describe(session)
        shown = session.scalars(text("SELECT version()" if server.name == "PostgreSQL" else "SELECT 1")).one()
    if server.name == "SQLite":
        assert server == Server("SQLite", sqlite_driver.sqlite_version_info, None)
        assert server.shown == f"SQLite {sqlite_driver.sqlite_version}"
    else:
        assert shown.startswith(f"{server.shown} ")
        assert server.ahead is not None
        assert abs(server.ahead) < 1


def test_damage(database: Database) -> None:
    with database.read() as session:
        assert damage(session) is None


def test_damage_of_a_file(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.read() as session:
        root = session.scalars(text("SELECT rootpage FROM sqlite_master WHERE name = 'projects'")).one()
        size = session.scalars(text("PRAGMA page_size")).one()
    database.close()
    with Path(sqlite_url.removeprefix("sqlite:///")).open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(bytes([13, 0, 0, 0, 0, 255, 255]))  # an empty leaf that says its content begins elsewhere
    database = Database(sqlite_url)
    with database.read() as session:
        found = damage(session)
    database.close()
    assert found is not None
    assert f"page {root}" in found
    assert "\n" not in found
