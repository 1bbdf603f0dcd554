"""`ttsv keys`: projects and their keys, straight in the database: whoever can write there is trusted already."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.client_options import LONGEST_DAYS, print_table
from workers.cli.errors import plain_errors

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from service.database.engine import Database

keys_app = typer.Typer(help="Keys that open the API to others, and the projects they belong to.", no_args_is_help=True)

Project = Annotated[str, typer.Argument(help="The project's name; it is made if there is none.")]


@keys_app.command()
@plain_errors
def create(
    project: Project,
    owner: Annotated[str, typer.Option(help="Who uses the key.")],
    scope: Annotated[str, typer.Option(help="Some of read, submit, cancel, admin, with commas between.")] = (
        "read,submit,cancel"
    ),
    days: Annotated[
        float | None, typer.Option(min=0.01, max=LONGEST_DAYS, help="Valid so long; for ever by default.")
    ] = None,
) -> None:
    """Make a key and print it, this once."""
    from service.access import keys
    from service.access.security import SECRET, Scope, installation_secret, new_key
    from service.database import now
    from service.errors import UserError
    from service.settings import Settings

    _refuse_unfit("PROJECT", project)
    _refuse_unfit("--owner", owner)
    known = [s.value for s in Scope]
    chosen = [name.strip() for name in scope.split(",")]
    if wrong := [name for name in chosen if name not in known]:
        raise UserError(f"--scope {wrong[0]}: must be one of {', '.join(known)}")
    expires = None if days is None else now() + timedelta(days=days)
    with _database() as database:
        folder = Settings().data_dir
        with database.read() as session:
            if keys.lacks_secret(session, folder):
                raise UserError(
                    f"the database has keys, and {folder / SECRET}, under which they are hashed, is not there: a key "
                    "under another secret would open nothing where the API runs. Run it there, in its environment, or "
                    "put the file back from a backup; if it is lost, `ttsv keys revoke` those there are first"
                )
        key = new_key(installation_secret(folder))

        def work(session: "Session") -> None:
            found = keys.project_named(session, project) or keys.create_project(session, project)
            keys.add_key(session, found.id, key, owner=owner, scopes={Scope(s) for s in chosen}, expires_at=expires)

        database.write(work)
    typer.echo(key.text)
    typer.echo("It is shown this once. Clients send it as Authorization: Bearer ..., `ttsv` reads TTSV_KEY.", err=True)


@keys_app.command("ls")
@plain_errors
def list_keys() -> None:
    """List keys, without their secrets."""
    from rich.table import Table

    from service.access import keys

    table = Table("id", "project", "owner", "scopes", "made", "used", "until")
    with _database(new=False) as database, database.read() as session:
        names = {project.id: project.name for project in keys.list_projects(session)}
        for row in keys.list_keys(session):
            until = "revoked" if row.revoked_at else _day(row.expires_at)
            columns = (row.id, names[row.project_id], row.owner, " ".join(row.scopes))
            table.add_row(*columns, _day(row.created_at), _day(row.last_used_at), until)
    print_table(table)


@keys_app.command()
@plain_errors
def revoke(key_id: Annotated[str, typer.Argument(help="As `ttsv keys ls` lists it.")]) -> None:
    """Make a key useless at once."""
    from service.access import keys

    with _database(new=False) as database:
        database.write(lambda session: keys.revoke_key(session, key_id))
    typer.echo(f"key {key_id} opens nothing any more")


@keys_app.command()
@plain_errors
def project(
    name: Project,
    max_queued_trials: Annotated[
        int | None, typer.Option(min=0, max=10_000_000, help="Trials that may wait or run.")
    ] = None,
    max_gpu_hours: Annotated[float | None, typer.Option(min=0, max=1e9, help="GPU-hours in all.")] = None,
    weight: Annotated[float, typer.Option(min=0.001, max=1000, help="Of its share of the cluster.")] = 1.0,
) -> None:
    """Make a project, or set its quotas and weight anew (quotas left out are none)."""
    from service.access import keys

    _refuse_unfit("PROJECT", name)
    with _database() as database:

        def work(session: "Session") -> None:
            found = keys.project_named(session, name) or keys.create_project(session, name)
            keys.update_project(
                session,
                found.id,
                name,
                max_queued_trials=max_queued_trials,
                max_gpu_hours=max_gpu_hours,
                weight=weight,
            )

        database.write(work)
    typer.echo(f"project {name}: {max_queued_trials} trials, {max_gpu_hours} GPU-hours (None: no limit)")


@keys_app.command()
@plain_errors
def people(project: Annotated[str, typer.Argument(help="The project's name.")]) -> None:
    """List who has a key of a project, with what each weighs."""
    from rich.table import Table

    from service.access import keys

    table = Table("owner", "weight")
    with _database(new=False) as database, database.read() as session:
        for row in keys.list_people(session, _project_id(session, project)):
            table.add_row(row.owner, f"{row.weight:g}")
    print_table(table)


@keys_app.command()
@plain_errors
def person(
    project: Annotated[str, typer.Argument(help="The project's name.")],
    owner: Annotated[str, typer.Argument(help="Who has a key of it.")],
    weight: Annotated[float, typer.Option(min=0.001, max=1000, help="Of the project's share, beside its others.")],
) -> None:
    """Set what a person weighs beside the others of a project (who was given no weight weighs 1)."""
    from service.access import keys

    with _database(new=False) as database:
        database.write(lambda session: keys.weigh(session, _project_id(session, project), owner, weight))
    typer.echo(f"{owner} of project {project}: weight {weight:g}")


def _project_id(session: "Session", name: str) -> int:
    """Of the project of that name; raises `UserError` where there is none."""
    from service.access import keys
    from service.errors import UserError

    if (found := keys.project_named(session, name)) is None:
        raise UserError(f"PROJECT {name!r}: there is none; `ttsv keys ls` has their names")
    return found.id


def _refuse_unfit(what: str, name: str) -> None:
    """Raises `UserError` for a name that the API would not take either."""
    from service.errors import UserError
    from service.specs.patterns import LONGEST_NAME, NAME, WORDS

    if not name or len(name) > LONGEST_NAME:
        raise UserError(f"{what}: must have 1 to {LONGEST_NAME} characters, not {len(name)}")
    if re.fullmatch(NAME, name) is None:
        raise UserError(f"{what} {name!r}: {WORDS[NAME]}")


@contextmanager
def _database(*, new: bool = True) -> "Iterator[Database]":
    """The settings' database; a `new` one is made where there is none, as a key can be the first thing there is.

    One of an older version is refused: workers and APIs may be at work on it.
    """
    from service.database.engine import Database
    from service.settings import Settings
    from service.upkeep.migrate import migrate, refuse_absent, refuse_unmigrated
    from service.upkeep.restore import refuse_half_restored
    from service.upkeep.rows import revision_of

    refuse_half_restored(Settings())
    if not new:
        refuse_absent(Settings().url)
    with closing(Database(Settings().url)) as database:
        if new:
            with database.engine.connect() as connection:
                new = revision_of(connection) is None
        (migrate if new else refuse_unmigrated)(database)
        yield database


def _day(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment:%Y-%m-%d}"
