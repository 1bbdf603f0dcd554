"""Experiments at the terminal: `ttsv submit`, `ls`, `show`, `trial`, `watch`, and `ttsv presets`."""

import json
import sys
from codecs import BOM_UTF8
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.errors import UserError
from service.paper.presets import Scale, preset_spec, presets
from service.paper.recipes import Protocol
from service.specs.documents import read_json, yaml_as_json
from service.specs.states import ExperimentState, TrialState
from workers.cli.client_options import (
    ExperimentId,
    Json,
    TrialId,
    connected,
    console,
    print_json,
    print_table,
    print_warnings,
)
from workers.cli.errors import plain_errors

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from service.client import Client
    from service.schemas.dry_runs import DryRunOut
    from service.schemas.experiments import ExperimentOut
    from ttsv.config.fields import TrialFields

experiments_app = typer.Typer()
presets_app = typer.Typer(help="The paper's tables and figures as experiments.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="As `ttsv presets ls` lists it.")]
HowMuch = Annotated[Scale, typer.Option(help="smoke: every path in minutes on a CPU, and no result.")]
Which = Annotated[Protocol, typer.Option(help="What is followed where the paper's text and programs differ.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the experiment's number alone.")]


FieldNames = Annotated[str | None, typer.Option("--columns", help="Fields shown, by commas; else those that differ.")]
HiddenNames = Annotated[str | None, typer.Option("--hide", help="Fields that are not shown.")]


class Archived(StrEnum):
    """Whether archived experiments are listed."""

    FALSE = "false"
    TRUE = "true"
    ANY = "any"


@experiments_app.command()
@connected
def submit(
    client: "Client",
    spec: Annotated[Path, typer.Argument(help="A JSON or YAML file; - reads standard input.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing; say what it would become.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it, as `ttsv watch` does.")] = False,
    tag: Annotated[list[str], typer.Option(help="One more tag; may be given several times.")] = [],  # noqa: B006
    quiet: Quiet = False,
    columns: FieldNames = None,
    hide: HiddenNames = None,
    as_json: Json = False,
) -> None:
    """Post an experiment."""
    found = read_spec(spec)
    if tag:
        found = _tagged(found, tag)
    if dry_run:
        would = client.dry_run(found)
        if as_json:
            print_json(would)
        else:
            _show_dry_run(would, columns, hide)
            print_warnings(would.warnings)
        return
    experiment = client.submit(found)
    print_warnings(experiment.warnings)
    if quiet or not as_json:
        _say_posted(experiment, quiet)
    elif not watch:
        print_json(experiment)
    if watch:
        _watch(client, experiment.id, as_json, columns, hide)


@experiments_app.command("ls")
@connected
def list_experiments(
    client: "Client",
    state: Annotated[list[ExperimentState], typer.Option(help="Only these; may be given several times.")] = [],  # noqa: B006
    tag: Annotated[list[str], typer.Option(help="Only with this tag; several: with all of them.")] = [],  # noqa: B006
    name: Annotated[str | None, typer.Option(help="Part of the name.")] = None,
    owner: Annotated[str | None, typer.Option(help="Whose key posted it.")] = None,
    archived: Annotated[Archived, typer.Option(help="Archived ones, the others, or any.")] = Archived.FALSE,
    sort: Annotated[str | None, typer.Option(help="A field; - before it: largest first.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    as_json: Json = False,
) -> None:
    """List experiments, newest first."""
    from workers.cli.tables import experiments_table

    found = client.experiments(
        state=[one.value for one in state] or None,
        tag=tag or None,
        name=name,
        owner=owner,
        archived=archived.value,
        sort=sort,
        specs=as_json,
        page_size=min(limit, 1000),
    )
    experiments = list(islice(found, limit))
    if as_json:
        print_json(experiments)
    else:
        print_table(experiments_table(experiments))


@experiments_app.command()
@connected
def show(
    client: "Client",
    experiment_id: ExperimentId,
    state: Annotated[list[TrialState], typer.Option(help="Only trials of these states.")] = [],  # noqa: B006
    where: Annotated[
        list[str],
        typer.Option(
            help="Only trials that meet a condition on a field or a result: lr<=0.1; may be given several times."
        ),
    ] = [],  # noqa: B006
    sort: Annotated[
        str | None, typer.Option(help="A field of the spec or a result; - before it: largest first.")
    ] = None,
    columns: FieldNames = None,
    hide: HiddenNames = None,
    resources: Annotated[
        bool, typer.Option("--resources", help="Also what the trials used: CPU, memory, GPU, memory on it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show an experiment and its trials."""
    from workers.cli.tables import (
        progress_line,
        resources_table,
        show_errors,
        show_silences,
        shown_fields,
        trials_table,
    )

    shown = shown_fields(columns, hide)
    experiment = client.experiment(experiment_id)
    states = [one.value for one in state] or None
    trials = list(client.trials(experiment_id, state=states, where=where or None, sort=sort))
    used = [(one.id, attempt) for one in trials for attempt in client.resources(one.id)] if resources else []
    if as_json:
        print_json([experiment, *trials, *(attempt for _, attempt in used)])
        return
    typer.echo(f"{experiment.id} {experiment.name}")
    typer.echo(progress_line(experiment))
    if experiment.error:
        typer.echo(experiment.error)
    print_table(trials_table(trials, shown))
    show_silences(console(), trials)
    show_errors(console(), trials)
    if resources:
        print_table(resources_table(used))


@experiments_app.command()
@connected
def trial(client: "Client", trial_id: TrialId, as_json: Json = False) -> None:
    """Show a trial with its epochs."""
    from workers.cli.tables import epochs_table, resources_table, show_errors, show_silences, trials_table

    found = client.trial(trial_id)
    if as_json:
        print_json(found)
        return
    print_table(trials_table([found]))
    show_silences(console(), [found])
    show_errors(console(), [found])
    if used := [(trial_id, attempt) for attempt in client.resources(trial_id)]:
        print_table(resources_table(used))
    print_table(epochs_table(found))


@experiments_app.command()
@connected
def watch(
    client: "Client",
    experiment_id: ExperimentId,
    columns: FieldNames = None,
    hide: HiddenNames = None,
    as_json: Json = False,
) -> None:
    """Follow an experiment until it is final; fails unless every trial succeeded.

    Below its progress stand the trials that began last, by the fields in which they differ.
    """
    _watch(client, experiment_id, as_json, columns, hide)


def _tagged(spec: dict[str, object], tags: Sequence[str]) -> dict[str, object]:
    """The spec with these tags besides its own."""
    from service.specs.versions import upgrade

    try:
        newest = upgrade(spec)  # the first version has none
        own: Any = newest.get("tags", ())  # whatever the file says
        return newest | {"tags": list(dict.fromkeys([*own, *tags]))}
    except (ValueError, TypeError) as error:
        raise UserError(f"tags: {error}") from None


_WATCHED = 12
"""Trials that are shown while an experiment is watched."""
_COMPARED = 1000
"""Trials that are read once, beside those, for the fields in which an experiment's trials differ."""


def _watch(
    client: "Client", experiment_id: int, as_json: bool, columns: str | None = None, hide: str | None = None
) -> None:
    """With JSON, a line whenever something changes."""
    from workers.cli.tables import LiveLine, shown_fields, trials_table

    shown = shown_fields(columns, hide)
    configs: dict[int, TrialFields] = {}

    def newest(screen: "Console | None") -> "Table | None":
        """Those that began last, then those that wait, by the fields in which the experiment's trials differ.

        Few rows would be told apart by other fields each time, and one of them might seem to decide another.
        """
        if not configs:
            every = islice(client.trials(experiment_id, page_size=_COMPARED), _COMPARED)
            configs.update((one.id, one.config) for one in every)
        trials = list(islice(client.trials(experiment_id, sort="-started_at", page_size=_WATCHED), _WATCHED))
        configs.update((one.id, one.config) for one in trials)
        return trials_table(trials, shown, [*configs.values()], screen) if trials else None

    if as_json:
        for experiment in client.watch(experiment_id):
            typer.echo(experiment.model_dump_json(exclude={"spec"}))
    else:
        with LiveLine(console(), newest) as line:
            for experiment in client.watch(experiment_id):
                line.show(experiment)
    if experiment.state != ExperimentState.SUCCEEDED:
        raise typer.Exit(1)


def _say_posted(experiment: "ExperimentOut", quiet: bool) -> None:
    number = experiment.id
    typer.echo(number if quiet else f"experiment {number}: {experiment.trial_count} trials; ttsv watch {number}")


def _which(would: "DryRunOut") -> str:
    return "the trial" if would.trial_count == 1 else "the largest trial"


def _show_dry_run(would: "DryRunOut", columns: str | None, hide: str | None) -> None:
    from workers.cli.tables import dry_run_table, duration, shown_fields

    seconds, steps = would.totals.seconds, would.totals.steps
    if would.trials:
        print_table(dry_run_table(would, shown_fields(columns, hide)))
    typer.echo(f"{would.grid_points} grid points, {would.trial_count} different trials; nothing was stored")
    typer.echo(f"steps of all trials: {'unknown' if steps is None else steps}")
    typer.echo(f"training, one trial after another: {'unknown' if seconds is None else duration(seconds)}")
    if would.memory is not None:
        typer.echo(f"GPU memory of {_which(would)}: {would.memory.gib:.2f} GiB, {would.memory.basis}")
    for note in would.notes:
        typer.echo(note)
    for reason in sorted({reason for trial in would.trials for reason in trial.reasons}):
        typer.echo(reason)


@presets_app.command("ls")
@plain_errors
def list_presets(as_json: Json = False) -> None:
    """List them."""
    if as_json:
        typer.echo(json.dumps([{"name": preset.name, "title": preset.title} for preset in presets()], indent=2))
        return
    from rich.table import Table

    table = Table("name", "what it is")
    for preset in presets():
        table.add_row(preset.name, preset.title)
    print_table(table)


@presets_app.command("show")
@plain_errors
def show_preset(name: Name, scale: HowMuch = Scale.FULL, protocol: Which = Protocol.CODE) -> None:
    """Print one as a spec, to be changed and given to `ttsv submit`."""
    typer.echo(json.dumps(preset_spec(name, scale=scale, protocol=protocol), indent=2))


@presets_app.command("submit")
@connected
def submit_preset(
    client: "Client",
    name: Name,
    scale: HowMuch = Scale.FULL,
    protocol: Which = Protocol.CODE,
    quiet: Quiet = False,
) -> None:
    """Post one as it is."""
    experiment = client.submit_preset(name, scale=scale, protocol=protocol)
    print_warnings(experiment.warnings)
    _say_posted(experiment, quiet)


def read_spec(path: Path) -> dict[str, object]:
    """The spec in a file, read as the API reads it; `-` is standard input.

    Raises `UserError` with the file's name and what is wrong.
    """
    what = "the spec"
    try:
        document = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        spec = read_json(yaml_as_json(document, what) if _is_yaml(path, document) else document, what)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(spec, dict):
        raise UserError(f"{path}: a spec is an object of names and values")
    return spec


def _is_yaml(path: Path, document: bytes) -> bool:
    """By the file's name, where it says so; else all that is no JSON object is YAML."""
    suffix = path.suffix.lower()
    if suffix in (".json", ".yaml", ".yml"):
        return suffix != ".json"
    return not document.removeprefix(BOM_UTF8).lstrip().startswith(b"{")
