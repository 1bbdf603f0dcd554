"""What a command says where it fails."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer

_P = ParamSpec("_P")


def plain_errors(command: Callable[_P, None]) -> Callable[_P, None]:
    """What the user can mend is said in one message, without a traceback."""

    @wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        from pydantic import ValidationError
        from sqlalchemy.exc import SQLAlchemyError

        from service.client import ApiError
        from service.errors import NotFoundError, UserError
        from ttsv.errors import TrialError

        try:
            command(*args, **kwargs)
        except (ApiError, NotFoundError, UserError, TrialError) as error:
            message = str(error)
        except ValidationError as error:  # of the settings: all else is validated by the service
            message = "; ".join(f"TTSV_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
        except SQLAlchemyError as error:
            message = f"the database at TTSV_DATABASE_URL: {str(error).partition(chr(10))[0]}"
        else:
            return
        typer.echo(f"ttsv: {message}", err=True)
        raise typer.Exit(1) from None

    return run
