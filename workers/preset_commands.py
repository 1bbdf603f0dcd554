"""`ttsv presets`: the paper's tables and figures."""

import json
from typing import Annotated

import typer
from rich.console import Console

from service.presets import Protocol, Scale, preset_spec, presets
from workers.plain_errors import plain_errors

presets_app = typer.Typer(help="The paper's tables and figures as experiments.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="As `ttsv presets ls` lists it.")]
HowMuch = Annotated[Scale, typer.Option(help="smoke: every path in minutes on a CPU, and no result.")]
Which = Annotated[Protocol, typer.Option(help="What is followed where the paper's text and programs differ.")]
Url = Annotated[str, typer.Option(envvar="TTSV_URL", help="The service.")]


@presets_app.command("ls")
def list_presets() -> None:
    """List them."""
    from rich.table import Table

    table = Table("name", "what it is")
    for preset in presets():
        table.add_row(preset.name, preset.title)
    Console().print(table)


@presets_app.command()
@plain_errors
def show(name: Name, scale: HowMuch = Scale.FULL, protocol: Which = Protocol.CODE) -> None:
    """Print one as a spec, to be changed and given to `ttsv submit`."""
    typer.echo(json.dumps(preset_spec(name, scale=scale, protocol=protocol), indent=2))


@presets_app.command()
@plain_errors
def submit(
    name: Name, scale: HowMuch = Scale.FULL, protocol: Which = Protocol.CODE, url: Url = "http://127.0.0.1:8000"
) -> None:
    """Post one as it is."""
    from service.client import Client

    with Client(url) as client:
        experiment = client.submit_preset(name, scale=scale, protocol=protocol)
    typer.echo(f"experiment {experiment.id}: {experiment.trial_count} trials; ttsv watch {experiment.id}")
