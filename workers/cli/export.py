"""`ttsv export`: an experiment's results for other programs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workers.cli.client_options import ExperimentId, connected
from workers.cli.output import is_standard_output, write_text

if TYPE_CHECKING:
    from service.client import Client


@connected
def export(
    client: "Client",
    experiment_id: ExperimentId,
    csv: Annotated[
        Path | None, typer.Option(help="Write a row per trial here, with its configuration and every metric; - prints.")
    ] = None,
    models: Annotated[Path | None, typer.Option(help="Fetch every trial's network into this folder.")] = None,
    mlflow: Annotated[
        str | None, typer.Option(help="Copy it into this MLflow: a run per trial. Again: only what is new.")
    ] = None,
    attach: Annotated[
        list[str] | None, typer.Option(help="Files that MLflow gets too, by kind (model); may be given several times.")
    ] = None,
) -> None:
    """Copy an experiment's results into a CSV file, a folder of models, or MLflow."""
    if csv is None and models is None and mlflow is None:
        raise typer.BadParameter("say where to: --csv FILE, --models FOLDER or --mlflow URI")
    printed = is_standard_output(csv)  # then nothing else may stand there
    if csv is not None:
        _write_csv(client, experiment_id, csv)
    if models is not None:
        _fetch_models(client, experiment_id, models, aside=printed)
    if mlflow is not None:
        from workers.cli.mlflow import export_experiment

        done = export_experiment(client, experiment_id, mlflow, attach=attach or ())
        said = f"MLflow experiment {done.name!r}: {done.created} runs made, {done.updated} updated, {done.same} same"
        typer.echo(said, err=printed)


def _write_csv(client: "Client", experiment_id: int, file: Path) -> None:
    from service.leaderboards.text_tables import to_csv

    frame = client.results(experiment_id).reset_index().astype(object)
    rows = frame.where(frame.notna(), None).to_numpy().tolist()
    text = to_csv([str(name) for name in frame.columns], [[_cell(value) for value in row] for row in rows])
    write_text(file, text)
    if not is_standard_output(file):
        typer.echo(f"{len(rows)} trials are in {file}")


def _cell(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(list(value)) if isinstance(value, list | tuple) else str(value)


def _fetch_models(client: "Client", experiment_id: int, folder: Path, *, aside: bool) -> None:
    """What came of it is said on standard output, or `aside`, on standard error."""
    count = evaluating = without = 0
    folder.mkdir(parents=True, exist_ok=True)
    for trial in client.trials(experiment_id, state="succeeded"):
        models = [artifact for artifact in client.artifacts(trial.id) if artifact.kind == "model"]
        for artifact in models:
            client.download(artifact, folder)
        count += len(models)
        evaluating += not models and trial.source_trial_id is not None
        without += not models and trial.source_trial_id is None
    typer.echo(f"{count} models are in {folder}", err=aside)
    if evaluating:
        typer.echo(f"ttsv: note: {evaluating} trials evaluate models of others, and left none", err=True)
    if without:
        typer.echo(f"ttsv: warning: {without} trials that succeeded have no model any more: it was pruned", err=True)
