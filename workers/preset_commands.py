"""`ttsv presets`: the paper's tables and figures."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from service.paper.presets import Protocol, Scale, preset_spec, presets
from workers.connected import connected, print_table
from workers.plain_errors import plain_errors

if TYPE_CHECKING:
    from service.client import Client

presets_app = typer.Typer(help="The paper's tables and figures as experiments.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="As `ttsv presets ls` lists it.")]
HowMuch = Annotated[Scale, typer.Option(help="smoke: every path in minutes on a CPU, and no result.")]
Which = Annotated[Protocol, typer.Option(help="What is followed where the paper's text and programs differ.")]


@presets_app.command("ls")
def list_presets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False) -> None:
    """List them."""
    if as_json:
        typer.echo(json.dumps([{"name": preset.name, "title": preset.title} for preset in presets()], indent=2))
        return
    from rich.table import Table

    table = Table("name", "what it is")
    for preset in presets():
        table.add_row(preset.name, preset.title)
    print_table(table)


@presets_app.command()
@plain_errors
def show(name: Name, scale: HowMuch = Scale.FULL, protocol: Which = Protocol.CODE) -> None:
    """Print one as a spec, to be changed and given to `ttsv submit`."""
    typer.echo(json.dumps(preset_spec(name, scale=scale, protocol=protocol), indent=2))


@presets_app.command()
@connected
def submit(
    client: "Client",
    name: Name,
    scale: HowMuch = Scale.FULL,
    protocol: Which = Protocol.CODE,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the experiment's number alone.")] = False,
) -> None:
    """Post one as it is."""
    experiment = client.submit_preset(name, scale=scale, protocol=protocol)
    if quiet:
        typer.echo(experiment.id)
    else:
        typer.echo(f"experiment {experiment.id}: {experiment.trial_count} trials; ttsv watch {experiment.id}")
