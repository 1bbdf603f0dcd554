"""`ttsv data`: the data sets of this machine."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.client_options import Json, console, print_table
from workers.cli.errors import plain_errors

if TYPE_CHECKING:
    from ttsv.data.catalog import DatasetInfo
    from ttsv.data.shared import Listed
    from ttsv.data.source import Progress

_MOST_BARS = 10
"""Shown at once, the newest: a published set has fewer files, a folder of images thousands."""

data_app = typer.Typer(help="Data sets on this machine.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="As `ttsv data list` shows it, or synthetic:..., npz:NAME, folder:NAME.")]


@data_app.command("list")
@plain_errors
def data_list(as_json: Json = False) -> None:
    """List the data sets, and which of them are here."""
    from service.settings import Settings
    from ttsv.data import list_datasets

    found = list_datasets(Settings().data_dir)
    if as_json:
        typer.echo(json.dumps([_plain(listed) for listed in found], indent=2))
    else:
        _show(found)
    problems = [listed.problem for listed in found if listed.problem is not None]
    for problem in problems:
        typer.echo(f"ttsv: {problem}", err=True)
    if problems:
        raise typer.Exit(1)


@data_app.command("fetch")
@plain_errors
def data_fetch(name: Name) -> None:
    """Download a data set into the data folder and verify it."""
    from service.settings import Settings
    from ttsv.data import fetch_dataset

    settings = Settings()
    with _progress() as progress:
        fetch_dataset(name, settings.data_dir, progress)
    typer.echo(f"{name} is in {settings.data_dir}")


@data_app.command("verify")
@plain_errors
def data_verify(name: Name) -> None:
    """Check a data set's files against the published checksums and against what they were at first use."""
    from service.settings import Settings
    from ttsv.data import verify_dataset

    sha256 = verify_dataset(name, Settings().data_dir)
    typer.echo(f"{name}: every file is as published, or as at its first use (content SHA-256 {sha256})")


@data_app.command("sync")
@plain_errors
def data_sync(
    head: Annotated[str, typer.Option(envvar="TTSV_HEAD", help="The head, HOST or HOST:PORT (6379).")],
    token_file: Annotated[
        Path, typer.Option(envvar="TTSV_TOKEN_FILE", help="The cluster's token: a copy of the head's.")
    ],
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; by default all that the head has.")] = None,
) -> None:
    """Copy data sets from the head to this machine, a node of its cluster, and verify them.

    What an earlier attempt brought is not copied again. Trials do the same at first use. The machine must have joined:
    run `ttsv node` first. One that does not come keeps none of the others from coming.
    """
    from service.errors import UserError
    from service.settings import Settings
    from service.storage import trouble_of
    from ttsv.errors import TrialError
    from workers.cli.nodes import head_address
    from workers.node.depot.data_sets import bring_data_set
    from workers.node.raylet import token_environment, token_problem
    from workers.node.scratch import node_data

    settings, address = Settings(), head_address(head)
    if (words := token_problem(token_file)) is not None:
        raise UserError(words)
    os.environ.update(token_environment(token_file.absolute()))
    from workers.node.depot.remote import join_head  # brings Ray, which reads the environment when it is imported

    there = join_head(address)
    explicit = "data_dir" in settings.model_fields_set
    data_dir = settings.data_dir if explicit else node_data(there.home.data_dir)
    wanted = names or there.data_sets()
    if not wanted:
        typer.echo("the head has no data sets that need files")
    failed = []
    for name in wanted:
        try:
            with _progress(before=f"{name}: the head reads it") as progress:
                came = bring_data_set(name, data_dir, there, progress or (lambda file, done, total: None))
        except (TrialError, OSError) as error:
            if trouble_of(error) is not None:  # a full disk, or the head is away: no set would come
                raise
            typer.echo(f"ttsv: {error}", err=True)
            failed.append(name)
            continue
        typer.echo(f"{name} is in {data_dir}, the same as on the head" if came else f"{name} was in {data_dir} already")
    if failed:
        raise UserError(f"{len(failed)} of {len(wanted)} data sets did not come: {', '.join(failed)}")


@contextmanager
def _progress(before: str | None = None) -> "Iterator[Progress | None]":
    """Bars on a terminal, nothing elsewhere. `before`: what is said until the first file comes."""
    screen = console()
    if not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    with Bars(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=screen
    ) as bars:
        tasks = dict[str, TaskID]()
        waiting = [] if before is None else [bars.add_task(before, total=None)]

        def show(file: str, done: int, total: int | None) -> None:
            while waiting:
                bars.remove_task(waiting.pop())
            if file not in tasks:
                if len(tasks) == _MOST_BARS:  # to draw all takes ever longer
                    bars.remove_task(tasks.pop(next(iter(tasks))))
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done)

        try:
            yield show
        finally:
            while waiting:  # no file had to come
                bars.remove_task(waiting.pop())


def _show(found: "list[Listed]") -> None:
    from rich.table import Table

    table = Table("data set", "images", "classes", "state", box=None)
    for name, info, sha256, problem in found:
        shape = "x".join(map(str, _shape(info))) if info else "-"
        state = f"ready, content {sha256[:12]}" if sha256 else "made at first use"
        if problem is not None:
            state = "cannot be looked at"
        elif not sha256 and info is None:
            state = "not used yet"
        elif not sha256 and info and not info.embedded:
            state = f"ttsv data fetch {name}"
        table.add_row(name, shape, str(info.classes) if info else "-", state)
    print_table(table)


def _plain(listed: "Listed") -> dict[str, object]:
    info = listed.info
    return {
        "name": listed.name,
        "ready": listed.sha256 is not None,
        "sha256": listed.sha256,
        "classes": info.classes if info else None,
        "shape": _shape(info) if info else None,
        "source": info.source if info else None,
    }


def _shape(info: "DatasetInfo") -> list[int]:
    return [info.channels, *[info.image_size] * info.dims]
