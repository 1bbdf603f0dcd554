"""Actions on experiments: `ttsv pause`, `resume`, `stop`, `cancel`, `retry` and so on, and `ttsv events`."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.client_options import ExperimentId, Json, connected, print_json, print_warnings

if TYPE_CHECKING:
    from service.client import Client
    from service.schemas.experiments import ExperimentOut, NewExperimentOut

actions_app = typer.Typer()

Name = Annotated[str | None, typer.Option(help="By default the experiment's own, and behind it what this is.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the new experiment's number alone.")]
Values = Annotated[
    list[str],
    typer.Argument(help="PATH=VALUE, or PATH=VALUE,VALUE: dotted paths, values as in JSON.", metavar="PATH=..."),
]


def _action(name: str, help: str) -> None:
    """Adds a command that calls the client's method of its name, with nothing but the experiment."""

    def command(client: "Client", experiment_id: ExperimentId, as_json: Json = False) -> None:
        _say(getattr(client, name)(experiment_id), as_json)

    actions_app.command(name, help=help)(connected(command))


_action(
    "pause", "Take an experiment off the queue at once; its trials go on from their checkpoints after `ttsv resume`."
)
_action("resume", "Put a paused experiment back into the queue.")
_action("stop", "Drop the trials that wait and let those that run finish.")
_action("cancel", "Cancel what is not final; running trials are killed.")


@actions_app.command()
@connected
def retry(
    client: "Client",
    experiment_id: ExperimentId,
    diverged: Annotated[bool, typer.Option("--diverged", help="Also those that diverged.")] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Also those that were cancelled or dropped.")] = False,
    as_json: Json = False,
) -> None:
    """Run the failed trials again, and only those."""
    states = ["failed", *(["diverged"] if diverged else []), *(["cancelled"] if cancelled else [])]
    _say(client.retry(experiment_id, states), as_json)


@actions_app.command()
@connected
def extend(
    client: "Client",
    experiment_id: ExperimentId,
    values: Values = [],  # noqa: B006 - typer reads the default and never changes it
    repeat: Annotated[int | None, typer.Option(help="So many seeds of each trial, instead of fewer.")] = None,
    as_json: Json = False,
) -> None:
    """Add values to the axes of a grid (`ttsv extend 7 seed=3,4 rank=16`); what is there is not run again."""
    grid: dict[str, list[Any]] = {}
    for path, text in map(_split, values):
        grid.setdefault(path, []).extend(_list(path, text))
    _say_drafted(client.extend(experiment_id, grid=grid, repeat=repeat), as_json)


@actions_app.command()
@connected
def clone(
    client: "Client", experiment_id: ExperimentId, name: Name = None, quiet: Quiet = False, as_json: Json = False
) -> None:
    """Post an experiment's spec once more."""
    _say_drafted(client.clone(experiment_id, name=name), as_json, quiet)


@actions_app.command()
@connected
def reevaluate(
    client: "Client",
    experiment_id: ExperimentId,
    values: Values,
    name: Name = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Evaluate an experiment's networks anew (`ttsv reevaluate 7 attack=autoattack`), training nothing."""
    from service.errors import UserError

    evaluation = dict[str, Any]()
    for path, text in map(_split, values):
        if path in evaluation:
            raise UserError(f"{path} is given twice: an evaluation has one value of it")
        several = _list(path, text)
        evaluation[path] = several if len(several) > 1 else _value(path, text)
    _say_drafted(client.reevaluate(experiment_id, evaluation, name=name), as_json, quiet)


_action("archive", "Leave a final experiment out of lists and leaderboards.")
_action("unarchive", "Take an experiment out of the archive.")


@actions_app.command()
@connected
def delete(
    client: "Client",
    experiment_id: ExperimentId,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; say what would go.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what boards and tables show now.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a final experiment with its trials, results and files, for good. Says first what goes, and asks."""
    from service.errors import UserError
    from workers.cli.findings import size

    found = client.delete(experiment_id, dry_run=True)
    refused = bool(found.shown_on) and not force and not found.deleted
    if not as_json:
        what = f"{found.trials} trials, {found.results} results, {found.files} files ({size(found.size)})"
        typer.echo(f"experiment {found.id} {found.name}: {what}")
        if dry_run and found.deleted:
            typer.echo("it is deleted already; a worker removes its files within minutes")
        if found.shown_on:
            without = ": it is deleted with --force alone, or after `ttsv archive`" if refused else ""
            typer.echo(f"its results count on the boards of {', '.join(found.shown_on)}{without}")
    if not dry_run:
        if refused:  # before anybody is asked
            raise UserError(f"experiment {found.id}: boards show its results; archive it first, or say --force")
        if not yes and not found.deleted:
            typer.confirm("delete all of it for good?", abort=True, err=True)
        found = client.delete(experiment_id, force=force)
        if not as_json:
            typer.echo(f"experiment {found.id} is deleted; a worker removes its files within minutes")
    if as_json:
        print_json(found)


@actions_app.command()
@connected
def update(
    client: "Client",
    experiment_id: ExperimentId,
    name: Annotated[str | None, typer.Option(help="Another name.")] = None,
    notes: Annotated[str | None, typer.Option(help="Other notes.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Instead of its tags; may be given several times.")] = None,
    priority: Annotated[int | None, typer.Option(min=-1000, max=1000, help="Higher runs first.")] = None,
    at_a_time: Annotated[
        int | None, typer.Option("--at-a-time", min=1, max=10_000, help="Trials at a time; 10000 is no limit.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Change an experiment's name, notes, tags, priority or how many trials run at a time."""
    changed = client.update(
        experiment_id, name=name, notes=notes, tags=tag or None, priority=priority, max_concurrent_trials=at_a_time
    )
    _say(changed, as_json)


@actions_app.command()
@connected
def events(
    client: "Client",
    experiment_id: Annotated[int | None, typer.Argument(help="By default all of them.", metavar="EXPERIMENT")] = None,
    as_json: Json = False,
) -> None:
    """List who did what, and when, oldest first."""
    for event in client.events(experiment_id):
        if as_json:
            typer.echo(event.model_dump_json())
            continue
        # What was deleted has events no more, and is named by the one that tells of it.
        number = event.experiment_id or event.detail.get("experiment")
        about = f" (experiment {number}" + (f", trial {event.trial_id})" if event.trial_id else ")") if number else ""
        typer.echo(f"{event.at:%Y-%m-%d %H:%M:%S} UTC  {event.actor}: {event.kind}{about} {json.dumps(event.detail)}")


def _say_drafted(experiment: "NewExperimentOut", as_json: bool, quiet: bool = False) -> None:
    print_warnings(experiment.warnings)
    _say(experiment, as_json, quiet)


def _say(experiment: "ExperimentOut", as_json: bool, quiet: bool = False) -> None:
    if quiet:
        typer.echo(experiment.id)
        return
    if as_json:
        print_json(experiment)
        return
    counts = ", ".join(f"{count} {state.value}" for state, count in experiment.progress.trials.items() if count)
    stopping = ", stopping" if experiment.stopping and not experiment.finished_at else ""
    archived = ", archived" if experiment.archived_at else ""
    typer.echo(f"experiment {experiment.id} is {experiment.state.value}{stopping}{archived}: {counts or 'no trials'}")


def _split(text: str) -> tuple[str, str]:
    from service.errors import UserError

    path, equals, value = text.partition("=")
    if not equals or not path or not value:
        raise UserError(f"{text!r}: write PATH=VALUE, as in seed=3,4")
    return path, value


def _list(path: str, text: str) -> list[Any]:
    """`3,4` or `[3, 4]`: values as in JSON; a word that is no JSON is itself."""
    whole = _value(path, text)
    if isinstance(whole, list):
        return whole
    return [_value(path, part) for part in text.split(",")] if whole is text else [whole]


def _value(path: str, text: str) -> Any:
    from service.errors import UserError
    from service.specs.documents import DocumentError, NotJsonError, read_json

    try:
        return read_json(text, "the value")
    except NotJsonError:
        return text
    except DocumentError as error:
        raise UserError(f"{path}: {error}") from None
