"""What commands that ask the service share: where it is, the key, and how they print."""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from workers.cli.errors import plain_errors

if TYPE_CHECKING:  # imported where they are needed, so that `ttsv --help` is quick
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

    from service.client import Client

_P = ParamSpec("_P")

LONGEST_DAYS = 100_000
"""Of what is counted in days: dates end some thousand years from now, and TTSV_RETENTION_DAYS has the same limit."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
ExperimentId = Annotated[int, typer.Argument(help="The experiment's number.", metavar="EXPERIMENT")]
TrialId = Annotated[int, typer.Argument(help="The trial's number.", metavar="TRIAL")]

_URL = Annotated[
    str | None, typer.Option("--url", envvar="TTSV_URL", help="The service; by default http://127.0.0.1:8000.")
]
_KEY = Annotated[
    str | None, typer.Option("--key", envvar="TTSV_KEY", help="Better in the environment, where `ps` does not show it.")
]


def connected(command: "Callable[Concatenate[Client, _P], None]") -> Callable[..., None]:
    """A command that gets a client as its first argument, made from `--url` and `--key`, which it has in addition."""
    return asking()(command)


def asking(**patience: Any) -> "Callable[[Callable[Concatenate[Client, _P], None]], Callable[..., None]]":
    """The same for a command that waits for the service in its own way: `retries`, `timeout` of the client."""

    def decorated(command: "Callable[Concatenate[Client, _P], None]") -> Callable[..., None]:
        own = inspect.signature(command)
        _, *parameters = own.parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        shown = [parameter.replace(kind=keyword) for parameter in parameters]
        shown += [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in _OPTIONS.items()]

        @plain_errors
        @wraps(command)
        def run(*args: Any, **kwargs: Any) -> None:
            from service.client import Client

            with Client(kwargs.pop("url"), key=kwargs.pop("key"), **patience) as client:
                command(client, *args, **kwargs)

        run.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return run

    return decorated


_OPTIONS: Mapping[str, Any] = {"url": _URL, "key": _KEY}


def console() -> "Console":
    """The terminal; wide enough for everything where it is none. What people named is no markup, whatever it says."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else max(Console().width, 160)
    return Console(width=width, markup=False, emoji=False)


def print_json(value: "BaseModel | Sequence[BaseModel]") -> None:
    """One answer, or a list of them."""
    if isinstance(value, Sequence):
        typer.echo(json.dumps([item.model_dump(mode="json") for item in value], indent=2))
    else:
        typer.echo(value.model_dump_json(indent=2))


def print_warnings(warnings: Iterable[str]) -> None:
    """What is said of a spec, beside what is asked for."""
    for warning in warnings:
        typer.echo(f"ttsv: warning: {warning}", err=True)


def print_table(table: "Table") -> None:
    """As a table in a terminal; else a line per row, whole, with tabs between: for `cut`, `awk` and `grep`."""
    screen = console()
    if screen.is_terminal:
        print_whole(screen, table)
        return
    if table.title:
        typer.echo(str(table.title))
    headings = [str(column.header) for column in table.columns]
    for row in [headings, *zip(*(column.cells for column in table.columns), strict=True)]:
        typer.echo("\t".join(" ".join(str(cell).split()) for cell in row))


def print_whole(screen: "Console", table: "Table") -> None:
    """Prints a table with every cell whole: what is wider than the terminal runs on in its next line."""
    if table.title:  # above it, at the terminal's width: rich breaks it at the table's, which may be a word's
        screen.print(table.title, style="table.title")
        table.title = None
    before = screen.width
    screen.width = max(before, whole_width(screen, table))
    screen.print(table)
    screen.width = before


def whole_width(screen: "Console", table: "Table") -> int:
    """How wide a table is with every cell whole."""
    return screen.measure(table, options=screen.options.update(max_width=_WIDEST)).maximum


_WIDEST = 100_000
