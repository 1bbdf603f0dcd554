"""The composition root of a trial: data, network, constraint, training, evaluation, record."""

import time
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ttsv.config.fields import plain
from ttsv.config.trial import TrialConfig
from ttsv.constraints import Clip, Compose, Constraint, Divide, Orthogonal
from ttsv.data import load_dataset
from ttsv.data.loading import Dataset, as_pixels
from ttsv.evaluation.artifacts import write_evaluation, write_plots
from ttsv.evaluation.protocol import describe_protocol, layer_records
from ttsv.evaluation.saved_spectra import load_saved
from ttsv.evaluation.stages import check_evaluation, measure
from ttsv.metrics import cost
from ttsv.models import create_model
from ttsv.results import CHECKPOINTS, EpochMetrics, StageProgress, TrialResult
from ttsv.runtime import derived_seed, describe_environment, find_device, known_failures, random_state
from ttsv.spectral.network import model_spectra
from ttsv.training.checkpoint import Checkpoints, save_model
from ttsv.training.facts import TrainingFacts, describe_training, read_training
from ttsv.training.loop import fit, steps_per_epoch, training_splits

ATTACK_STATE = "autoattack.safetensors"
"""In the folder of checkpoints: what AutoAttack has found so far."""


def run(
    config: TrialConfig, *, data_dir: Path, folder: Path, device: str, source: Path | None
) -> Generator[EpochMetrics | StageProgress | TrialResult, None, None]:
    """What `ttsv.trial.run_trial` documents."""
    config = config.canonical()
    place = find_device(device)
    data = load_dataset(config.dataset, data_dir)
    config.check_images(data.info)
    datasets = Path(data_dir) / "datasets"
    check_evaluation(config.evaluation, data, datasets)
    arguments = model_arguments(config, data)
    (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    constraint = make_constraint(config)
    if source is None:
        model, facts = yield from _train(config, data, arguments, constraint, folder, place)
    else:
        facts = read_training(source, config, arguments, data)
        model = load_saved(source, device=place)

    started = time.perf_counter()
    with known_failures(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        measured = yield from measure(
            model,
            data,
            config.evaluation,
            preprocessing={name: arguments[name] for name in ("mean", "std")},
            folder=datasets,
            state=folder / CHECKPOINTS / ATTACK_STATE,
            renew_state=True,
        )
        take = partial(model_spectra, model, data.info.image_size, in_channels=data.info.channels)
        spectra_started = time.perf_counter()
        spectra = take()
        spectrum_seconds = time.perf_counter() - spectra_started
        _, spectrum_memory = cost.peak_allocation(take, place)  # apart: on a CPU a profiler looks on
        layers = layer_records(model, data, constraint.report(), spectra)
        times = _inference_seconds(model, data.test.images[:128].to(place))
    if source is None:
        facts = replace(facts, layers=tuple(layers))
    else:
        layers = facts.with_projections(layers)
    protocol = describe_protocol(config, measured.protocol)
    environment = describe_environment(place)
    texts = [violation.text for violation in measured.violations]
    record = {"protocol": protocol, "results": measured.results, "violations": texts, "environment": environment}
    files = {"model": save_model(folder, model, arguments, **describe_training(config, data, facts))}
    files |= write_evaluation(folder, measured, record)
    files |= write_plots(folder, measured, spectra, title=f"{config.model} on {config.dataset}")
    columns: dict[str, Any] = {**measured.columns, **facts.columns(), **times}
    yield TrialResult(
        **columns,
        max_singular_value=max(layer["largest"] for layer in layers if layer["input_size"]),
        compression=cost.compression(model),
        parameters=cost.parameters(model),
        multiply_accumulates=cost.multiply_accumulates(model, data.info.image_size, in_channels=data.info.channels),
        eval_seconds=time.perf_counter() - started,
        spectrum_seconds=spectrum_seconds,
        spectrum_memory=spectrum_memory,
        protocol=protocol,
        environment=environment,
        layers=layers,
        valid=not texts,
        violations=texts,
        evaluation=measured.results,
        artifacts=files,
    )


def _train(
    config: TrialConfig,
    data: Dataset,
    arguments: dict[str, Any],
    constraint: Constraint,
    folder: Path,
    place: torch.device,
) -> Generator[EpochMetrics, None, tuple[nn.Module, TrainingFacts]]:
    """Trains the trial's network; yields every epoch."""
    identity = {"format": 1, "trial": config.fingerprint(), "data": data.sha256, "split": data.split}
    with known_failures(), random_state(derived_seed(config.seed, "weights"), place):
        model = create_model(**arguments)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    checkpoints = Checkpoints(folder / CHECKPOINTS, identity)
    progress = yield from fit(model, data, config, constraint, device=place, checkpoints=checkpoints)
    steps = steps_per_epoch(len(training_splits(data, config.training)[0].labels), config.training)
    step_seconds, constraint_step_seconds = progress.per_step(steps)
    return model, TrainingFacts(
        train_seconds=progress.train_seconds,
        constraint_seconds=progress.constraint_seconds,
        step_seconds=step_seconds,
        constraint_step_seconds=constraint_step_seconds,
        peak_memory=torch.cuda.max_memory_allocated(place) if place.type == "cuda" else None,
        selected_epoch=progress.selected_epoch,
    )


def _inference_seconds(model: nn.Module, images: Tensor) -> dict[str, float]:
    """By column: of 1 and of 128 images, as the network is and, where it has frames to merge, with them merged."""
    names = {1: "latency_seconds", 128: "batch_seconds"}
    times = cost.inference_times(model, as_pixels(images), tuple(names))
    return {("merged_" if time.merged else "") + names[time.count]: time.seconds for time in times}


def model_arguments(config: TrialConfig, data: Dataset) -> dict[str, Any]:
    """What `create_model` takes to build the trial's network, JSON-ready."""
    return {
        "name": config.model,
        "num_classes": data.info.classes,
        "in_channels": data.info.channels,
        "image_size": data.info.image_size,
        "layer": config.layer,
        "rank": config.rank,
        "frames": config.frames,
        "mean": list(config.mean or data.info.mean),
        "std": list(config.std or data.info.std),
    }


def make_constraint(config: TrialConfig) -> Constraint:
    """The orthogonal loss with the trial's weight, and its clipping or division if it has one."""
    parts: list[Constraint] = [Orthogonal(config.lambda_ort, normalizer=config.ort_normalizer)]
    if config.constraint == "clip" and config.delta is not None:
        parts.append(Clip(config.delta, **plain(config.clipping)))
    if config.constraint == "divide":
        options = plain(config.division)
        parts.append(Divide(**options | {"power_iterations": options["power_iterations"] or "exact"}))
    return Compose(*parts)
