"""SQL of what a database says of itself, and not of experiments. Functions take a Session."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

from service.database.clock import machine_now, seconds_ahead
from service.database.engine import is_postgres, sqlite_driver


@dataclass(frozen=True)
class Server:
    """PostgreSQL or SQLite: its name, its version as numbers, and by how many seconds its clock is ahead of ours.

    SQLite has no clock of its own.
    """

    name: str
    version: tuple[int, ...]
    ahead: float | None

    @property
    def shown(self) -> str:
        """Name and version for people."""
        return f"{self.name} {'.'.join(map(str, self.version))}"


def describe(session: Session) -> Server:
    """Asks the database what it is; the time that the answer takes is not taken for a difference of clocks."""
    if not is_postgres(session):
        return Server("SQLite", sqlite_driver.sqlite_version_info, None)
    number = int(session.scalars(text("SHOW server_version_num")).one())
    before = machine_now()
    theirs: datetime = session.scalars(text("SELECT clock_timestamp()")).one()
    return Server("PostgreSQL", divmod(number, 10_000), seconds_ahead(theirs, before, machine_now()))


def damage(session: Session) -> str | None:
    """The first fault that SQLite finds in its file, all of which it reads; None: none, or PostgreSQL."""
    if is_postgres(session):
        return None
    found: str = session.scalars(text("PRAGMA quick_check(1)")).one()
    return None if found == "ok" else found.splitlines()[-1]
