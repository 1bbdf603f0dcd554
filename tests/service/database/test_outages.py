"""What means that the database is away or in trouble."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.database.engine import Database
from service.database.outages import broken_connection, is_away, is_in_trouble, is_unsure


class TestAway:
    """What means that the database is away or busy, of what the databases really say."""

    def caught(self, database: Database, work: Callable[[Connection], Any]) -> Exception:
        with pytest.raises(SQLAlchemyError) as caught, database.writer.connect() as connection:
            work(connection)
        database.close()
        return caught.value

    def test_nobody_listens(self) -> None:
        error = self.caught(Database("postgresql+psycopg://nobody@127.0.0.1:9/none"), lambda _: None)
        assert (is_away(error), is_unsure(error)) == (True, False)

    def test_a_fault_point_says_so(self) -> None:
        assert is_away(broken_connection("fault point after_commit"))

    def test_the_server_ends_the_connection(self, postgres_url: str) -> None:
        kill = text("SELECT pg_terminate_backend(pg_backend_pid())")
        error = self.caught(Database(postgres_url), lambda connection: connection.execute(kill))
        assert is_away(error)
        assert not is_unsure(error), "what was begun and not committed is not stored"

    def test_the_connection_ends_as_it_commits(self, postgres_url: str) -> None:
        database = Database(postgres_url)

        def ended(session: Session) -> None:
            mine = session.execute(text("SELECT pg_backend_pid()")).scalar()
            with database.engine.connect() as other:
                other.execute(text(f"SELECT pg_terminate_backend({mine}, 5000)"))

        with pytest.raises(SQLAlchemyError) as caught:
            database.write(ended)
        assert (is_away(caught.value), is_unsure(caught.value)) == (True, True)
        database.close()

    @pytest.mark.parametrize(
        ("state", "away"),
        [("55P03", True), ("57014", True), ("53300", True), ("57P03", True), ("53100", False), ("53200", False)],
    )
    def test_states_of_postgres(self, postgres_url: str, state: str, away: bool) -> None:
        raising = text(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END $$")
        error = self.caught(Database(postgres_url), lambda connection: connection.execute(raising))
        assert (is_away(error), is_in_trouble(error)) == (away, True)

    def test_sqlite_locked(self, sqlite_url: str) -> None:
        holder = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        impatient = create_engine(sqlite_url, connect_args={"timeout": 0, "isolation_level": None})
        with pytest.raises(SQLAlchemyError) as caught, impatient.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        assert is_away(caught.value)
        holder.close()

    @pytest.mark.parametrize("pragma", ["query_only = ON", "max_page_count = 1"])
    def test_sqlite_read_only_or_full(self, sqlite_url: str, pragma: str) -> None:
        def fill(connection: Connection) -> None:
            connection.exec_driver_sql(f"PRAGMA {pragma}")
            connection.exec_driver_sql("CREATE TABLE much AS SELECT zeroblob(10000000)")

        error = self.caught(Database(sqlite_url), fill)
        assert (is_away(error), is_in_trouble(error)) == (False, True)

    def test_a_file_of_sqlite_that_is_gone_is_made_by_nobody_and_found_again(self, sqlite_url: str) -> None:
        database, file = Database(sqlite_url), Path(sqlite_url.removeprefix("sqlite:///"))
        protocols = text("SELECT count(*) FROM protocols")
        with database.read() as session:
            session.execute(protocols)
        aside = file.rename(file.with_name("aside"))
        with pytest.raises(SQLAlchemyError) as caught, database.read() as session:
            session.execute(protocols)
        assert is_away(caught.value)
        assert not file.exists()
        shutil.copyfile(aside, file)  # as a volume that is mounted again, another file than the one that was open
        database.write(lambda session: session.execute(text("INSERT INTO protocols VALUES ('a', '{}')")))
        assert sqlite3.connect(file).execute("SELECT count(*) FROM protocols").fetchall() == [(1,)]
        database.close()

    def test_what_the_database_refuses(self, sqlite_url: str) -> None:
        twice = text("INSERT INTO protocols (fingerprint, record) VALUES ('a', '{}'), ('a', '{}')")
        error = self.caught(Database(sqlite_url), lambda connection: connection.execute(twice))
        assert not is_in_trouble(error)
