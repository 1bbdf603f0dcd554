"""What processes beside a test do: a restore that dies at a moment of it, a service that has a database open."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from service.database.engine import Database
from service.settings import Settings
from service.upkeep import restore, target
from service.upkeep.archive import Reader
from service.upkeep.moves import Journal, Move

Function = Callable[..., Any]


def restore_and_die(settings: Settings, file: Path, moment: str) -> None:
    """Restores over what is there until the moment, a place and how often it is passed before; then SIGKILL."""
    name, _, number = moment.partition(" ")
    places: dict[str, tuple[Any, str, Callable[[Function], Function]]] = {
        "extract": (Reader, "extract", _at(int(number or 0))),
        "rows": (target, "bring_up", _at(0)),
        "move": (Move, "do", _at(int(number or 0))),
        "moved": (Journal, "begin", _after),
        "end": (Journal, "end", _at(0)),
    }
    where, function, how = places[name]
    setattr(where, function, how(getattr(where, function)))
    restore.restore(settings, file, force=True)


def keep_open(settings: Settings, said: Connection) -> None:
    """Opens the database, says so, and keeps it open."""
    connection = Database(settings.url).engine.connect()
    connection.exec_driver_sql("SELECT 1")
    said.send("open")
    time.sleep(600)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at(number: int) -> Callable[[Function], Function]:
    seen = 0

    def wrapped(genuine: Function) -> Function:
        def call(*given: Any) -> Any:
            nonlocal seen
            if seen == number:
                _die()
            seen += 1
            return genuine(*given)

        return call

    return wrapped


def _after(genuine: Function) -> Function:
    def call(*given: Any) -> None:
        genuine(*given)
        _die()

    return call
