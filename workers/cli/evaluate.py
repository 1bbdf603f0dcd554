"""`ttsv evaluate`: metrics of a saved network."""

import json
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.errors import plain_errors
from workers.cli.output import is_standard_output, write_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ttsv.evaluation import Evaluated
    from ttsv.results import AnyRecord, StageProgress

EVALUATIONS = ("calibration", "certified", "lipschitz", "autoattack", "pgd", "corruption", "cost")


@plain_errors
def evaluate(
    model: Annotated[Path, typer.Argument(help="The model.safetensors that a trial left.")],
    data: Annotated[str, typer.Option(help="Data set whose test images are evaluated.")],
    metrics: Annotated[
        str, typer.Option(help=f"Besides accuracy: some of {', '.join(EVALUATIONS)}, with commas between.")
    ] = "calibration,certified,lipschitz",
    images: Annotated[int | None, typer.Option(min=1, help="Only the first so many test images.")] = None,
    norm: Annotated[str, typer.Option(help="Of the attack: L2, Linf or L1 (AutoAttack only).")] = "L2",
    eps: Annotated[float, typer.Option(help="Radius of the attack, in pixels of [0, 1].")] = 0.5,
    version: Annotated[str, typer.Option(help="Of AutoAttack: standard, plus or rand.")] = "standard",
    attack_images: Annotated[int | None, typer.Option(min=1, help="Attack only the first so many.")] = None,
    radii: Annotated[
        str | None, typer.Option(help="L2 radii of certified accuracies, with commas between: 0.25,1.")
    ] = None,
    corruptions: Annotated[
        str, typer.Option(help="Published (CIFAR-10-C, CIFAR-100-C, unpacked in the data folder) or generated.")
    ] = "generated",
    corruption_images: Annotated[int | None, typer.Option(min=1, help="Corrupt only the first so many.")] = None,
    lipschitz_images: Annotated[int | None, typer.Option(min=1, help="Search around the first so many.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of the attack, part of the protocol: 256.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of attacks, corruptions and searches.")] = 0,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for all files: record, results per image, confusion matrix, plots as SVG and PNG."),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the plots alone.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything here, protocol included; - prints.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="AutoAttack keeps here what it has found, and goes on from it; by default in the data folder."
        ),
    ] = None,
    save_baseline: Annotated[
        bool,
        typer.Option("--save-baseline", help="The data set's mean corruption errors are relative to this network."),
    ] = False,
) -> None:
    """Evaluate a saved network: calibration, certificates, Lipschitz constants, attacks, corruptions, cost.

    Interrupted, the same command goes on with AutoAttack where it was.
    """
    from rich.console import Console

    from service.errors import UserError
    from service.settings import Settings
    from ttsv.config.evaluation import EVALUATION, EvaluationConfig
    from ttsv.errors import ConfigError
    from ttsv.evaluation import evaluate as evaluation

    names = [name.strip() for name in metrics.split(",") if name.strip()]
    for name in names:
        if name not in EVALUATIONS:
            raise ConfigError("metrics", name, f"must be one of {', '.join(EVALUATIONS)}")
    attacks = [name for name in ("pgd", "autoattack") if name in names]
    config = EvaluationConfig(
        attack="both" if len(attacks) == 2 else next(iter(attacks), "none"),
        attack_norm=norm,
        attack_eps=eps,
        attack_version=version,
        attack_images=attack_images,
        corruptions=corruptions if "corruption" in names else "none",
        corruption_images=corruption_images,
        certified="certified" in names,
        radii=EVALUATION.radii if radii is None else _numbers(radii),
        lipschitz="both" if "lipschitz" in names else "none",
        lipschitz_images=lipschitz_images,
        batch_size=batch_size,
        seed=seed,
    )
    if save_baseline and "corruption" not in names:
        raise UserError("--save-baseline stores corruption accuracies: name corruption among the metrics")
    # Before what takes hours, not after it.
    for folder in (out, plots, json_file and json_file.parent, state and state.parent):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    for option, file in (("--json", json_file), ("--state", state)):
        if file is not None and file.is_dir():
            raise UserError(f"{option} {file}: is a folder; name a file")
    data_dir, console = Settings().data_dir, Console(stderr=is_standard_output(json_file))
    steps = evaluation(model, data, data_dir, config, images=images, device=device, state=state, cost="cost" in names)
    try:
        found = _watched(steps, console)
    except KeyboardInterrupt:
        if "autoattack" in names:
            typer.echo("ttsv: interrupted: the same command goes on with AutoAttack where it was", err=True)
        raise
    found = replace(found, saved={"model": str(model), **found.saved})
    _write(found, json_file, out, plots)
    console.print(_table(found.record))
    for check in found.record["results"]["checks"]:
        console.print(f"checked: {check}", markup=False)
    for violation in found.violations:
        console.print(f"INVALID: {violation}", markup=False)
    if found.violations:
        raise typer.Exit(1)
    if save_baseline:
        _store_baseline(found, data_dir, str(model))


def _numbers(text: str) -> tuple[float, ...]:
    from ttsv.errors import ConfigError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError("radii", text, "must be numbers with commas between, such as 0.25,1") from None


def _watched(steps: "Generator[StageProgress, None, Evaluated]", console: "Console") -> "Evaluated":
    """Runs the evaluation to its end under a bar for each stage."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from ttsv.metrics.accuracy import run_to_end

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(step: "StageProgress") -> None:
            left = "" if step.seconds_left is None else f"about {step.seconds_left:.0f} s left"
            if step.stage not in tasks:
                tasks[step.stage] = bars.add_task(step.stage, left=left)
            bars.update(tasks[step.stage], completed=step.done, total=step.total, left=left)

        return run_to_end(steps, show)


def _write(found: "Evaluated", json_file: Path | None, out: Path | None, plots: Path | None) -> None:
    """Writes the record, all files and the plots, each where it was asked for."""
    title = found.subject.data.info.name
    if json_file is not None:
        write_text(json_file, json.dumps(found.record, indent=1, allow_nan=False) + "\n")
    if out is not None:
        found.write(out, title=title)
        found.draw(out, title=title, suffix=".png")
    if plots is not None:
        for suffix in (".svg", ".png"):
            found.draw(plots, title=title, suffix=suffix)


def _store_baseline(found: "Evaluated", data_dir: Path, model: str) -> None:
    from ttsv.evaluation.baseline import Baseline

    record = found.measured.evidence.corruption
    assert record is not None
    Baseline.store(data_dir / "datasets", found.subject.data.info.name, record, model)


def _table(record: "AnyRecord") -> "Table":
    from rich.table import Table

    results = record["results"]
    title = f"{record['protocol']['dataset']}, {results['images']} images"
    caption = f"protocol {record['protocol_fingerprint'][:12]}"
    table = Table("metric", "value", title=title, caption=caption)
    table.columns[1].justify = "right"
    for name, value in _rows(results):
        table.add_row(name, value)
    return table


def _rows(results: "AnyRecord") -> Iterator[tuple[str, str]]:
    yield "accuracy", f"{results['accuracy']:.2%}"
    yield "loss", f"{results['loss']:.4f}"
    calibration = results["calibration"]
    yield f"ECE, {calibration['bins']} bins", f"{calibration['raw']['ece']:.2%}"
    if calibration["scaled"]:
        yield f"ECE at temperature {calibration['temperature']:.3f}", f"{calibration['scaled']['ece']:.2%}"
    yield "Brier score", f"{calibration['raw']['brier']:.4f}"
    for attack in results.get("attacks", {}).values():
        threat = f"{attack['norm']} {attack['eps']:g}, {attack['images']} images"
        yield f"accuracy under {attack['attack']}, {threat}", f"{attack['robust_accuracy']:.2%}"
    if certified := results.get("certified"):
        bound = "none: " + certified["why"] if certified["bound"] is None else f"{certified['bound']:.4g}"
        yield "Lipschitz bound, pixels", bound
        for radius, value in certified.get("accuracy", {}).items():
            yield f"certified at L2 {float(radius):.3f}", f"{value:.2%}"
        for radius, value in certified.get("assumed_1_lipschitz", {}).items():
            yield f"assuming L = 1 (the paper's p.r.) at {float(radius):.3f}", f"{value:.2%}"
        if refuted := certified.get("assumption_refuted_by"):
            yield "but L is not 1: empirical constant, normalised", f"{refuted:.4g}"
    for one in results.get("lipschitz", ()):
        yield f"empirical Lipschitz, {one['method']}, {one['space']}", f"{one['maximum']:.4g}"
    if corruptions := results.get("corruptions"):
        kind, images = (corruptions["protocol"][name] for name in ("corruptions", "images"))
        if not corruptions["protocol"].get("publishers_files", True):
            kind = "unknown files in place of published"
        yield f"accuracy under {kind} corruptions, {images} images each", f"{corruptions['mean']:.2%}"
        if corruptions.get("mce") is not None:
            yield "mean corruption error", f"{corruptions['mce']:.4f}"
        elif corruptions.get("why_no_mce"):
            yield "mean corruption error", f"none: {corruptions['why_no_mce']}"
    if cost := results.get("cost"):
        yield "parameters", f"{cost['parameters']:,}"
        yield "compression", f"{cost['compression']:.3g}"
        yield "multiply-accumulates of one image", f"{cost['multiply_accumulates']:,}"
        for one in cost["inference"]:
            merged, count = ", merged" if one["merged"] else "", one["count"]
            yield f"inference of {count} at once{merged}", f"{one['images_per_second']:,.0f} images/s"
        for name, key in (("optimizer step, when trained", "step"), ("of it the constraint", "constraint_step")):
            if (seconds := cost["training"][f"{key}_seconds"]) is not None:
                yield name, f"{1000 * seconds:.3g} ms"
        yield "evaluation", f"{cost['evaluation_seconds']:.1f} s"
        yield f"peak memory of {cost['peak_memory_of']}", f"{cost['peak_memory'] / 2**20:.0f} MiB"
