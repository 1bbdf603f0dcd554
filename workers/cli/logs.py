"""`ttsv logs` and `ttsv artifacts`: what trials wrote and left."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.client_options import Json, TrialId, connected, print_json, print_table

if TYPE_CHECKING:
    from service.client import Client

logs_app = typer.Typer()
artifacts_app = typer.Typer(help="The files that trials left: models, plots, results per image.", no_args_is_help=True)


@logs_app.command()
@connected
def logs(
    client: "Client",
    number: Annotated[int, typer.Argument(help="The trial's number.", metavar="TRIAL")],
    experiment: Annotated[
        bool, typer.Option("--experiment", help="It is an experiment's: the log of the process that runs it.")
    ] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, max=100_000, help="So many lines of its end.")] = 1000,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until the end.")] = False,
) -> None:
    """Print the log of a trial."""
    some = False
    if follow:
        following = client.follow_experiment_log if experiment else client.follow_trial_log
        for piece in following(number, tail=tail):
            typer.echo(piece, nl=False)
            some = True
    if not some:  # of what never wrote one it is said
        log = client.experiment_log if experiment else client.trial_log
        typer.echo(log(number, tail=tail), nl=False)


@artifacts_app.command("ls")
@connected
def list_artifacts(client: "Client", trial_id: TrialId, as_json: Json = False) -> None:
    """List the files of a trial."""
    from workers.cli.tables import artifacts_table

    found = client.artifacts(trial_id)
    if as_json:
        print_json(found)
    else:
        print_table(artifacts_table(found))


@artifacts_app.command()
@connected
def get(
    client: "Client",
    trial_id: TrialId,
    kinds: Annotated[
        list[str] | None, typer.Argument(help="As `ttsv artifacts ls` lists them; all by default.", metavar="KIND...")
    ] = None,
    to: Annotated[Path, typer.Option(help="The folder to put them into; it is made if there is none.")] = Path(),
) -> None:
    """Fetch files of a trial, check their SHA-256, and print where they are."""
    from service.errors import UserError

    found = {artifact.kind: artifact for artifact in client.artifacts(trial_id)}
    for kind in kinds or found:
        if kind not in found:
            raise UserError(f"trial {trial_id} left no {kind!r}; there are {', '.join(found) or 'no files'}")
    to.mkdir(parents=True, exist_ok=True)
    for kind in kinds or found:
        typer.echo(client.download(found[kind], to))
