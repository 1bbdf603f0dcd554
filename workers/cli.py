"""The console command `ttsv`: top of the arrow. Imports lazily, so that `ttsv ls` is quick."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from service.settings import Settings
from workers.data_commands import data_app
from workers.evaluate_command import evaluate
from workers.plain_errors import plain_errors
from workers.preset_commands import presets_app

app = typer.Typer(
    help="Experiments on networks with controlled singular values.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")
app.add_typer(presets_app, name="presets")
app.command()(evaluate)
console = Console()

Url = Annotated[str, typer.Option(envvar="TTSV_URL", help="The service.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
DEFAULT_URL = "http://127.0.0.1:8000"


def main() -> None:
    """Entry point of the `ttsv` command."""
    app()


@app.command()
@plain_errors
def migrate() -> None:
    """Bring the database to the newest schema."""
    from service.db import Database
    from service.migrate import migrate as run
    from service.migrate import newest

    settings = Settings()
    database = Database(settings.url)
    run(database)
    database.close()
    typer.echo(f"the database is at revision {newest()}")


@app.command()
@plain_errors
def api(
    fd: Annotated[int | None, typer.Option(hidden=True, help="Listening socket inherited from `ttsv serve`.")] = None,
) -> None:
    """Serve the API on TTSV_HOST and TTSV_PORT (the database must be migrated)."""
    import uvicorn

    from service.errors import UserError

    settings = Settings()
    try:
        settings.refuse_open_network()
    except ValueError as error:
        raise UserError(str(error)) from None
    uvicorn.run(
        "service.main:application",
        factory=True,
        fd=fd,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=5,
        server_header=False,
    )


@app.command()
@plain_errors
def worker() -> None:
    """Claim experiments and run them on Ray, until SIGTERM or Ctrl-C."""
    from service.db import Database
    from workers.poller import Worker

    settings = Settings()
    Worker(settings, Database(settings.url)).run()


@app.command()
@plain_errors
def ready(
    url: Url = DEFAULT_URL,
    worker: Annotated[
        bool, typer.Option("--worker", help="Also ask for a worker heard of in the last minute.")
    ] = False,
) -> None:
    """Fail unless the service is ready: for health checks."""
    from service.client import Client
    from service.errors import UserError
    from service.models import now

    with Client(url, retries=0, timeout=5) as client:
        seen = client.ready().worker_seen_at
    if worker and (seen is None or (now() - seen).total_seconds() > 60):
        raise UserError("no worker was heard of in the last minute")


@app.command()
@plain_errors
def serve(port: Annotated[int | None, typer.Option(help="Instead of TTSV_PORT; 0 picks a free one.")] = None) -> None:
    """Migrate, then serve the API and one worker until Ctrl-C."""
    from workers.local import LocalStack

    with LocalStack(Settings(), port=port) as stack:
        documents = f"{stack.url}/docs"
        console.print(f"API on {stack.url} ({documents}), data in {stack.settings.data_dir}", soft_wrap=True)
        console.print("Ctrl-C stops everything; what runs then goes on at the next start")
        stack.stay()


@app.command()
@plain_errors
def demo(
    spec: Annotated[Path, typer.Argument(help="The experiment to run.")] = Path("examples/quickstart.json"),
) -> None:
    """Start everything on a free port, run a grid, print its leaderboard, stop everything."""
    from workers.demo import run

    run(Settings(), _read_spec(spec), console, str(spec))


@app.command()
@plain_errors
def submit(
    spec: Annotated[Path, typer.Argument(help="A JSON file; - reads standard input.")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Post an experiment."""
    from service.client import Client

    with Client(url) as client:
        experiment = client.submit(_read_spec(spec))
    if as_json:
        _print_json(experiment)
    else:
        console.print(f"experiment {experiment.id}: {experiment.trial_count} trials; ttsv watch {experiment.id}")


@app.command("ls")
@plain_errors
def list_experiments(url: Url = DEFAULT_URL, limit: int = 20, as_json: Json = False) -> None:
    """List experiments, newest first."""
    from itertools import islice

    from service.client import Client
    from workers.display import experiments_table

    with Client(url) as client:
        found = list(islice(client.experiments(), limit))
    if as_json:
        _print_json(found)
    else:
        console.print(experiments_table(found))


@app.command()
@plain_errors
def show(experiment_id: int, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show an experiment and its trials."""
    from service.client import Client
    from workers.display import progress_line, show_errors, trials_table

    with Client(url) as client:
        experiment, trials = client.experiment(experiment_id), list(client.trials(experiment_id))
    if as_json:
        _print_json([experiment, *trials])
        return
    console.print(f"{experiment.id} {experiment.name}", markup=False)
    console.print(progress_line(experiment))
    if experiment.error:
        console.print(experiment.error, markup=False)
    console.print(trials_table(trials))
    show_errors(console, trials)


@app.command()
@plain_errors
def trial(trial_id: int, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show a trial with its epochs."""
    from service.client import Client
    from workers.display import show_trial

    with Client(url) as client:
        found = client.trial(trial_id)
    if as_json:
        _print_json(found)
    else:
        show_trial(console, found)


@app.command()
@plain_errors
def watch(experiment_id: int, url: Url = DEFAULT_URL) -> None:
    """Follow an experiment until it is final; fails unless every trial succeeded."""
    from service.client import Client
    from service.models import ExperimentState
    from workers.display import LiveLine

    with Client(url) as client, LiveLine(console) as line:
        for experiment in client.watch(experiment_id):
            line.show(experiment)
    if experiment.state != ExperimentState.SUCCEEDED:
        raise typer.Exit(1)


@app.command()
@plain_errors
def cancel(experiment_id: int, url: Url = DEFAULT_URL) -> None:
    """Cancel what is not final; running trials are killed."""
    from service.client import Client

    with Client(url) as client:
        console.print(f"experiment {experiment_id} is {client.cancel(experiment_id).state.value}")


@app.command()
@plain_errors
def leaderboard(
    dataset: str,
    metric: str = "accuracy",
    experiment: Annotated[int | None, typer.Option(help="Only this experiment's trials.")] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Rank the cells of a data set by their mean over seeds."""
    from service.client import Client
    from workers.display import show_leaderboard

    with Client(url) as client:
        found = client.leaderboard(dataset, metric=metric, experiment_id=experiment)
    if as_json:
        _print_json(found)
    else:
        show_leaderboard(console, found)


@app.command()
@plain_errors
def spectrum(
    model: Annotated[Path, typer.Argument(help="The model.safetensors that a trial left.")],
    input_size: Annotated[int | None, typer.Option(min=1, help="Pixels a side, instead of the trial's.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every singular value here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw every layer's spectrum here, .png or .svg.")] = None,
) -> None:
    """Show the singular values of every layer of a saved network."""
    from service.errors import UserError
    from ttsv.saved import saved_spectra
    from workers.spectra import spectra_table

    spectra = saved_spectra(model, input_size)
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(spectra.to_json(), indent=1) + "\n")
        if plot is not None:
            from ttsv.plots import plot_spectra

            plot_spectra({layer.name: layer.values for layer in spectra.layers}, plot, str(model))
    except OSError as error:
        raise UserError(str(error)) from None
    # The table is wide: on a narrow terminal, or into a file, its lines are kept whole.
    (console if console.width >= 160 else Console(width=160)).print(spectra_table(spectra))


def _read_spec(path: Path) -> dict[str, Any]:
    from service.errors import UserError

    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        spec = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(spec, dict):
        raise UserError(f"{path}: a spec is a JSON object")
    return spec


def _print_json(value: Any) -> None:
    plain = (
        [item.model_dump(mode="json") for item in value] if isinstance(value, list) else value.model_dump(mode="json")
    )
    typer.echo(json.dumps(plain, indent=2))


if __name__ == "__main__":
    main()
