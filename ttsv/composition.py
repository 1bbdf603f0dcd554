"""The composition root of a trial: data, network, constraint, training, evaluation, record."""

import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ttsv.checkpoint import Checkpoints, save_model
from ttsv.config import TrialConfig
from ttsv.constraints import Clip, Compose, Constraint, ConstraintReport, Orthogonal
from ttsv.data import load_dataset
from ttsv.data.loading import Dataset
from ttsv.environment import describe_environment
from ttsv.errors import ConfigError, DivergedError
from ttsv.layers import TTConv, layer_input_sizes, spectral_layers
from ttsv.metrics import cost
from ttsv.metrics.accuracy import accuracy, cross_entropy, predict
from ttsv.metrics.calibration import expected_calibration_error
from ttsv.models import create_model
from ttsv.results import CHECKPOINTS, EpochMetrics, TrialResult
from ttsv.spectrum import model_spectra
from ttsv.training import derived_seed, fit, known_failures, random_state

ECE_BINS = 15


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
    progress = yield from fit(model, data, config, constraint, device=place, checkpoints=checkpoints)

    started = time.perf_counter()
    test = data.test.to(place)
    with known_failures(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        logits = predict(model, test.images)
        layers = layer_records(model, data, constraint.report())
    if not logits.isfinite().all():
        raise DivergedError("the trained network's logits are not finite")
    yield TrialResult(
        accuracy=accuracy(logits, test.labels),
        loss=cross_entropy(logits, test.labels),
        ece=expected_calibration_error(logits, test.labels, bins=ECE_BINS),
        max_singular_value=max(layer["largest"] for layer in layers if layer["input_size"]),
        compression=cost.compression(model),
        parameters=cost.parameters(model),
        train_seconds=progress.train_seconds,
        constraint_seconds=progress.constraint_seconds,
        eval_seconds=time.perf_counter() - started,
        protocol=describe_protocol(data),
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
        "mean": list(data.info.mean),
        "std": list(data.info.std),
    }


def make_constraint(config: TrialConfig) -> Constraint:
    """The orthogonal loss with the trial's weight, and its clipping if it has one."""
    parts: list[Constraint] = [Orthogonal(config.lambda_ort)]
    if config.constraint == "clip" and config.delta is not None:
        clipping = config.clipping
        parts.append(Clip(config.delta, every=clipping.every, rounds=clipping.rounds, rescale=clipping.rescale))
    return Compose(*parts)


def layer_records(model: nn.Module, data: Dataset, report: ConstraintReport) -> list[dict[str, Any]]:
    """One JSON-ready record per convolution and other projected layer, as `TrialResult.layers` documents."""
    size, channels = data.info.image_size, data.info.channels
    layers = spectral_layers(model)
    sizes = layer_input_sizes(model, size, in_channels=channels)
    records = []
    for name, values in model_spectra(model, size, in_channels=channels).items():
        layer, norms = layers[name], report.layers.get(name)
        factors = ("k1", "core", "k3") if isinstance(layer, TTConv) else ("weight",)
        records.append(
            {
                "name": name,
                "kind": parametrize.type_before_parametrizations(layer).__name__,
                "shape": {factor: list(getattr(layer, factor).shape) for factor in factors},
                "input_size": list(sizes[name]),
                "largest": values.max().item(),
                "smallest": values.min().item(),
                "largest_before_projection": None if norms is None else norms.before,
                "projection": None if norms is None else asdict(norms),
            }
        )
    for name, norms in report.layers.items():
        if name not in sizes:
            layer = model.get_submodule(name)
            records.append(
                {
                    "name": name,
                    "kind": type(layer).__name__,
                    "shape": {"weight": list(layer.get_parameter("weight").shape)},
                    "input_size": [],
                    "largest": norms.after,
                    "smallest": norms.smallest,
                    "largest_before_projection": norms.before,
                    "projection": asdict(norms),
                }
            )
    return records


def describe_protocol(data: Dataset) -> dict[str, Any]:
    """How a result was measured, JSON-ready: results of equal protocols may be compared."""
    return {
        "dataset": data.info.name,
        "dataset_sha256": data.sha256,
        "split": {**data.split, "evaluated": "test"},
        "preprocessing": {"pixels": "[0, 1]", "mean": list(data.info.mean), "std": list(data.info.std)},
        "metrics": {
            "accuracy": "top-1",
            "loss": "mean cross-entropy, nats",
            "ece": {"bins": ECE_BINS, "edges": "equal width, right-closed"},
            "singular_values": "periodic",
        },
        "weights": "last epoch",
        "precision": "float32",
    }
