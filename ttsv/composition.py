"""The composition root of a trial: data, network, constraint, training, evaluation, record."""

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from ttsv.checkpoint import Checkpoints, save_model
from ttsv.config import TrialConfig
from ttsv.constraints import Clip, Compose, Constraint, Divide, Orthogonal
from ttsv.data import load_dataset
from ttsv.data.loading import Dataset, as_pixels
from ttsv.environment import describe_environment
from ttsv.errors import ConfigError, DivergedError
from ttsv.failures import known_failures
from ttsv.fields import plain
from ttsv.metrics import cost
from ttsv.metrics.accuracy import accuracy, cross_entropy, predict
from ttsv.metrics.calibration import expected_calibration_error
from ttsv.models import create_model
from ttsv.randomness import derived_seed, random_state
from ttsv.records import ECE_BINS, describe_protocol, layer_records
from ttsv.results import CHECKPOINTS, EpochMetrics, TrialResult
from ttsv.training import fit, steps_per_epoch, training_splits


def run(
    config: TrialConfig, *, data_dir: Path, folder: Path, device: str
) -> Generator[EpochMetrics | TrialResult, None, None]:
    """What `ttsv.trial.run_trial` documents."""
    config = config.canonical()
    place = find_device(device)
    data = load_dataset(config.dataset, data_dir)
    identity = {"format": 1, "trial": config.fingerprint(), "data": data.sha256, "split": data.split}
    checkpoints = Checkpoints(folder / CHECKPOINTS, identity)
    arguments = model_arguments(config, data)
    with known_failures(), random_state(derived_seed(config.seed, "weights"), place):
        model = create_model(**arguments)
    constraint = make_constraint(config)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    progress = yield from fit(model, data, config, constraint, device=place, checkpoints=checkpoints)

    started = time.perf_counter()
    test = data.test.to(place)
    with known_failures(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        logits = predict(model, test.images)
        spectra_started = time.perf_counter()
        layers = layer_records(model, data, constraint.report())
        spectrum_seconds = time.perf_counter() - spectra_started
        latency, batch_seconds = (cost.inference_seconds(model, as_pixels(test.images), count) for count in (1, 128))
    if not logits.isfinite().all():
        raise DivergedError("the trained network's logits are not finite")
    steps = steps_per_epoch(len(training_splits(data, config.training)[0].labels), config.training)
    step_seconds, constraint_step_seconds = progress.per_step(steps)
    yield TrialResult(
        accuracy=accuracy(logits, test.labels),
        loss=cross_entropy(logits, test.labels),
        ece=expected_calibration_error(logits, test.labels, bins=ECE_BINS),
        max_singular_value=max(layer["largest"] for layer in layers if layer["input_size"]),
        compression=cost.compression(model),
        parameters=cost.parameters(model),
        multiply_accumulates=cost.multiply_accumulates(model, data.info.image_size, in_channels=data.info.channels),
        train_seconds=progress.train_seconds,
        constraint_seconds=progress.constraint_seconds,
        step_seconds=step_seconds,
        constraint_step_seconds=constraint_step_seconds,
        eval_seconds=time.perf_counter() - started,
        spectrum_seconds=spectrum_seconds,
        latency_seconds=latency,
        batch_seconds=batch_seconds,
        peak_memory=torch.cuda.max_memory_allocated(place) if place.type == "cuda" else None,
        selected_epoch=progress.selected_epoch,
        protocol=describe_protocol(config, data),
        environment=describe_environment(place),
        layers=layers,
        artifacts={"model": save_model(folder, model, arguments, config=config.to_dict())},
    )


def find_device(name: str) -> torch.device:
    """The device of a name: auto (a GPU if there is one), cpu, cuda or cuda:N. Raises `ConfigError`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", name, "must be auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", name, f"is not here: there are cpu and {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


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
    parts: list[Constraint] = [Orthogonal(config.lambda_ort, normalizer=config.ort_normalizer)]  # type: ignore[arg-type]
    if config.constraint == "clip" and config.delta is not None:
        parts.append(Clip(config.delta, **plain(config.clipping)))
    if config.constraint == "divide":
        options = plain(config.division)
        parts.append(Divide(**options | {"power_iterations": options["power_iterations"] or "exact"}))
    return Compose(*parts)
