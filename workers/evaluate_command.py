"""`ttsv evaluate`: metrics of a saved network."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from service.settings import Settings
from workers.plain_errors import plain_errors


@plain_errors
def evaluate(
    model: Annotated[Path, typer.Argument(help="The model.safetensors that a trial left.")],
    data: Annotated[str, typer.Option(help="Data set whose test images are evaluated.")],
    metrics: Annotated[
        str, typer.Option(help="Besides accuracy: some of calibration, certified and lipschitz, with commas between.")
    ] = "calibration,certified,lipschitz",
    images: Annotated[int | None, typer.Option(min=1, help="Only the first so many test images.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything here, protocol included.")] = None,
) -> None:
    """Evaluate a saved network: accuracy, calibration, certificates, Lipschitz constants."""
    from service.errors import UserError
    from ttsv.evaluation import evaluate as run

    console = Console()
    with console.status("reading") as status:
        record = run(
            model,
            data,
            Settings().data_dir,
            metrics=[name for name in metrics.split(",") if name],
            images=images,
            progress=status.update,
        )
    if json_file is not None:
        try:
            json_file.write_text(json.dumps({"model": str(model), **record}, indent=1) + "\n")
        except OSError as error:
            raise UserError(str(error)) from None
    console.print(_table(record))
    for violation in record["violations"]:
        console.print(f"INVALID: {violation}", markup=False)
    if record["violations"]:
        raise typer.Exit(1)


def _table(record: dict[str, Any]) -> Table:
    results = record["results"]
    table = Table("metric", "value", title=f"{record['protocol']['dataset']}, {record['protocol']['images']} images")
    table.columns[1].justify = "right"
    table.add_row("accuracy", f"{results['accuracy']:.2%}")
    table.add_row("loss", f"{results['loss']:.4f}")
    if calibration := results.get("calibration"):
        table.add_row(f"ECE, {calibration['bins']} bins", f"{calibration['raw']['ece']:.2%}")
        table.add_row(f"ECE at temperature {calibration['temperature']:.3f}", f"{calibration['scaled']['ece']:.2%}")
        table.add_row("Brier score", f"{calibration['raw']['brier']:.4f}")
    if certified := results.get("certified"):
        table.add_row("Lipschitz bound, pixels", f"{certified['bound']:.4g}")
        for radius, value in certified["accuracy"].items():
            table.add_row(f"certified at L2 {float(radius):.3f}", f"{value:.2%}")
        for radius, value in certified["assumed_1_lipschitz"].items():
            table.add_row(f"assuming L = 1 (the paper's p.r.) at {float(radius):.3f}", f"{value:.2%}")
    for one in results.get("lipschitz", ()):
        table.add_row(f"empirical Lipschitz, {one['method']}, {one['space']}", f"{one['maximum']:.4g}")
    return table
