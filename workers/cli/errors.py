"""What a command says where it fails, and with which code it ends.

0: done. 1: it failed, or what was asked for is invalid or refused. 2: the command line is wrong. 3: no service answers.
75: a worker's time was over before its work.
"""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import typer

_P = ParamSpec("_P")

FAILED, UNREACHABLE = 1, 3
UNFINISHED = os.EX_TEMPFAIL


def plain_errors(command: Callable[_P, None]) -> Callable[_P, None]:
    """What the user can mend is said in one message, without a traceback."""

    @wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except Exception as error:
            from service.client import UnreachableError

            message = _message(error)
            if message is None:
                raise
            typer.echo(f"ttsv: {message}", err=True)
            raise typer.Exit(UNREACHABLE if isinstance(error, UnreachableError) else FAILED) from None

    return run


def _message(error: Exception) -> str | None:
    """What is said of it; None of what only a programmer can mend."""
    # Imported where something failed: what works starts quickly.
    from pydantic import ValidationError

    from service.client import ApiError, DamagedError
    from service.errors import ConflictError, NotFoundError, StateError, UserError
    from ttsv.errors import TrialError

    if isinstance(error, ApiError | DamagedError | NotFoundError | UserError | ConflictError | StateError | TrialError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # `| head` has read enough: no error
        return str(error)
    if isinstance(error, ValidationError):  # of the settings: all else is validated by the service
        named = [(f"TTSV_{str(e['loc'][0]).upper()}: " if e["loc"] else "", e["msg"]) for e in error.errors()]
        return "; ".join(f"{name}{message}" for name, message in named)
    from sqlalchemy.exc import SQLAlchemyError

    return _of_database(error) if isinstance(error, SQLAlchemyError) else None


def _of_database(error: Exception) -> str:
    """Which database it is, what it says, and what mends that."""
    from service.database.engine import is_damaged, is_full, said_by, shown
    from service.settings import Settings

    url = Settings().url
    says = f"the database {shown(url)}: {said_by(error)}"
    if is_damaged(error):
        return f"{says}: it is damaged; `ttsv restore --force FILE` puts a backup in its place (docs/backup.md)"
    if is_full(error):
        sqlite = url.get_backend_name() == "sqlite"
        disk = f"the disk of {Path(str(url.database)).absolute().parent}" if sqlite else "its server's disk"
        return f"{says}: make room on {disk}"
    return says
