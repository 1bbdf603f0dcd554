"""The console command `ttsv`: top of the arrow. Commands import what they need when they run: `ttsv ls` is quick."""

import os
import sys
from io import TextIOWrapper
from pathlib import Path

import typer

from workers.cli.actions import actions_app
from workers.cli.backup import backup, restore
from workers.cli.boards import boards_app
from workers.cli.data import data_app
from workers.cli.doctor import doctor
from workers.cli.evaluate import evaluate
from workers.cli.experiments import experiments_app, presets_app
from workers.cli.export import export
from workers.cli.keys import keys_app
from workers.cli.logs import artifacts_app, logs_app
from workers.cli.nodes import nodes_app
from workers.cli.prune import prune
from workers.cli.serve import serve_app
from workers.cli.spectrum import spectrum

app = typer.Typer(
    help="Experiments on networks with controlled singular values.",
    epilog="Ends with 0: done; 1: failed, invalid or refused; 2: wrong command line; 3: no service answers; "
    "75: a worker's time was over before its work.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(serve_app)
app.command()(doctor)
app.command()(backup)
app.command()(restore)
app.add_typer(experiments_app)
app.add_typer(logs_app)
app.add_typer(artifacts_app, name="artifacts")
app.add_typer(actions_app)
app.add_typer(boards_app)
app.add_typer(nodes_app)
app.command()(prune)
app.command()(export)
app.command()(spectrum)
app.command()(evaluate)
app.add_typer(presets_app, name="presets")
app.add_typer(data_app, name="data")
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Entry point of the `ttsv` command."""
    _prepare_streams()
    app()


def _prepare_streams() -> None:
    """Lets no name or sign end a command: what a stream's encoding lacks is escaped, what is closed swallows all."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
