"""`ttsv backup` and `ttsv restore`: database and data folder into one file, and back, without the service's help."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.client_options import Json, console, print_json
from workers.cli.errors import plain_errors
from workers.cli.findings import size

if TYPE_CHECKING:
    from service.upkeep.archive import Missing
    from service.upkeep.backup import Progress, Say

_SHOWN = 20


@plain_errors
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file; it is readable by you alone.")],
    as_json: Json = False,
) -> None:
    """Write database and files into one file, while service and workers go on.

    It has the database as it is at one moment, the files that it names then, newest checkpoints, own data sets, and the
    secret of keys. Ends with 1 where a file that the database names is missing or damaged; the backup is written.
    """
    from service.database.engine import Database
    from service.settings import Settings
    from service.upkeep.backup import back_up
    from service.upkeep.home import refuse_elsewhere
    from service.upkeep.migrate import refuse_absent
    from service.upkeep.restore import refuse_half_restored

    settings = Settings()
    refuse_absent(settings.url)
    refuse_half_restored(settings)
    with closing(Database(settings.url)) as database, _shown(as_json) as say:
        refuse_elsewhere(database, settings)
        manifest = back_up(settings, database, file.absolute(), say)
    if as_json:
        print_json(manifest)
    else:
        rows = sum(table.rows for table in manifest.tables)
        what = f"{rows} rows, {len(manifest.files)} files, {size(file.stat().st_size)}"
        typer.echo(f"{file}: {what}, as of {manifest.made_at}")
    _say_missing(manifest.missing)
    if any(not one.expected for one in manifest.missing):
        raise typer.Exit(1)


@plain_errors
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `ttsv backup` wrote.")],
    force: Annotated[
        bool, typer.Option("--force", help="Over what is there: its files are moved aside, a PostgreSQL's rows go.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put a backup into an empty installation; service and workers must not run.

    Everything is verified first, and restored whole or not at all. The database may be of the other kind. What ran when
    the backup was made waits again, with its checkpoint.
    """
    import json

    from service.settings import Settings
    from service.upkeep.restore import restore as run

    settings = Settings()
    with _shown(as_json) as say:
        done = run(settings, file.absolute(), force=force, say=say)
    if as_json:
        found = {"manifest": done.manifest.model_dump(mode="json"), "requeued": done.requeued}
        aside = {"aside": done.aside and str(done.aside), "aside_in_store": done.aside_in_store}
        typer.echo(json.dumps(found | aside, indent=2))
    else:
        typer.echo(f"restored: the installation of {done.manifest.made_at}; {done.requeued} experiments wait again")
        if done.aside is not None:
            typer.echo(f"what was there is in {done.aside}: remove it when nothing is missed")
        if done.aside_in_store is not None:
            typer.echo(f"what the store had of trials is in {done.aside_in_store}: remove it when nothing is missed")
    _say_missing(done.manifest.missing)


def _say_missing(missing: "list[Missing]") -> None:
    for one in missing[:_SHOWN]:
        typer.echo(f"ttsv: {'note' if one.expected else 'warning'}: {one.path} is not in it: {one.reason}", err=True)
    if len(missing) > _SHOWN:
        typer.echo(f"ttsv: and {len(missing) - _SHOWN} more; --json lists all", err=True)


@contextmanager
def _shown(quiet: bool) -> "Iterator[Say]":
    """A bar in a terminal; elsewhere a line every few seconds, on standard error."""
    if quiet:
        yield lambda _progress: None
    elif console().is_terminal:
        with _bar() as say:
            yield say
    else:
        yield _lines()


@contextmanager
def _bar() -> "Iterator[Say]":
    from rich import progress

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(30), progress.TaskProgressColumn())
    with progress.Progress(*columns, console=console(), transient=True) as bar:
        tasks: dict[str, progress.TaskID] = {}

        def say(at: "Progress") -> None:
            if at.stage not in tasks:
                tasks[at.stage] = bar.add_task(at.stage, total=at.total)
            bar.update(tasks[at.stage], completed=at.done, total=at.total)

        yield say


def _lines(every: float = 5.0, clock: Callable[[], float] = time.monotonic) -> "Say":
    last = clock()

    def say(at: "Progress") -> None:
        nonlocal last
        if clock() - last >= every:
            last = clock()
            of = "" if not at.total else f" of {at.total} ({100 * at.done // at.total} %)"
            print(f"{at.stage}: {at.done}{of}", file=sys.stderr)

    return say
