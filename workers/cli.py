"""The console command `ttsv`: top of the arrow. Commands import what they need when they run: `ttsv ls` is quick."""

import typer

from workers.board_commands import boards_app
from workers.data_commands import data_app
from workers.evaluate_command import evaluate
from workers.experiment_commands import experiments_app
from workers.export_command import export
from workers.key_commands import keys_app
from workers.log_commands import artifacts_app, logs_app
from workers.preset_commands import presets_app
from workers.serve_commands import serve_app
from workers.spectrum_command import spectrum
from workers.verb_commands import verbs_app

app = typer.Typer(
    help="Experiments on networks with controlled singular values.",
    epilog="Ends with 0: done; 1: failed, invalid or refused; 2: wrong command line; 3: no service answers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(serve_app)
app.add_typer(experiments_app)
app.add_typer(logs_app)
app.add_typer(artifacts_app, name="artifacts")
app.add_typer(verbs_app)
app.add_typer(boards_app)
app.command()(export)
app.command()(spectrum)
app.command()(evaluate)
app.add_typer(presets_app, name="presets")
app.add_typer(data_app, name="data")
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Entry point of the `ttsv` command."""
    app()


if __name__ == "__main__":
    main()
