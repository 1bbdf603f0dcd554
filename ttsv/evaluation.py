"""Metrics of a saved network on a data set, with the protocol under which they were measured."""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ttsv.data import load_dataset
from ttsv.data.loading import Dataset, as_pixels
from ttsv.environment import describe_environment
from ttsv.errors import ConfigError, DataError
from ttsv.metrics.accuracy import accuracy, cross_entropy, predict
from ttsv.metrics.calibration import calibration_record
from ttsv.metrics.certified import RADII, assumed_certified_accuracy, certificates
from ttsv.metrics.lipschitz import empirical_lipschitz
from ttsv.saved import load_saved

METRICS = ("calibration", "certified", "lipschitz")
HISTOGRAM_BINS = 50
LIPSCHITZ_RADIUS = 0.5
_DEFAULTS = {"in_channels": 3, "image_size": 32, "mean": (0.5,), "std": (0.5,)}
"""Of `create_model`, for what a model.json leaves out."""


def evaluate(
    path: Path,
    dataset: str,
    data_dir: Path,
    *,
    metrics: Collection[str] = METRICS,
    images: int | None = None,
    radii: Sequence[float] = RADII,
    progress: Callable[[str], None] = lambda _step: None,
) -> dict[str, Any]:
    """Evaluates the network in `path` (a trial's `model.safetensors`) on a data set's test images; JSON-ready.

    `results` has accuracy and loss and, as asked for: `calibration` (raw, and with the temperature fitted on the
    validation images); `certified` (accuracy at L2 `radii` in pixels from a rigorous bound, with every layer's factor,
    and beside it the paper's, which assumes a 1-Lipschitz network behind the normalisation); `lipschitz` (empirical
    constants by FGSM as in the paper and by gradient ascent, in pixels and in normalised coordinates). `images`: only
    so many, the first of the test split. `protocol` says how it was measured, `violations` what cannot be true of
    correct numbers: with one, none of them may be used. `progress` is told what begins.

    Raises `DataError` for a damaged model or data set, `ConfigError` for images that the network does not take.
    """
    for name in metrics:
        if name not in METRICS:
            raise ConfigError("metrics", name, f"must be one of {', '.join(METRICS)}")
    if images is not None and images < 1:
        raise ConfigError("images", images, "must be at least 1")
    model = load_saved(path)
    arguments = _DEFAULTS | json.loads(path.with_name("model.json").read_bytes())["model"]
    data = load_dataset(dataset, data_dir)
    _require_match(arguments, data)
    pixels, labels = as_pixels(data.test.images)[:images], data.test.labels[:images]
    progress("accuracy")
    logits = predict(model, pixels)
    if not logits.isfinite().all():
        raise DataError(f"{path}: the network's logits are not finite")
    results: dict[str, Any] = {"accuracy": accuracy(logits, labels), "loss": cross_entropy(logits, labels)}
    if "calibration" in metrics:
        progress("calibration")
        validation = predict(model, data.validation.images)
        record = calibration_record(
            logits, labels, validation_logits=validation, validation_labels=data.validation.labels
        )
        results["calibration"] = asdict(record)
    if "certified" in metrics:
        progress("certified")
        results["certified"] = _certified(model, pixels, labels, logits, radii, min(arguments["std"]))
    if "lipschitz" in metrics:
        progress("lipschitz")
        results["lipschitz"] = [
            _empirical(model, pixels, labels, space, method)
            for space in ("pixels", "normalised")
            for method in ("fgsm", "ascent")
        ]
    protocol = {
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "dataset": dataset,
        "dataset_sha256": data.sha256,
        "split": {**data.split, "evaluated": "test"},
        "images": len(labels),
        "preprocessing": {"pixels": "[0, 1]", "mean": list(arguments["mean"]), "std": list(arguments["std"])},
        "certificates": "rigorous bound, float64",
        "empirical_lipschitz": {"radius": LIPSCHITZ_RADIUS},
        "precision": "float32",
        "environment": describe_environment(torch.device("cpu")),
    }
    return {"protocol": protocol, "results": results, "violations": violations(results)}


def violations(results: dict[str, Any]) -> list[str]:
    """What cannot be true of correct numbers: certified images that are wrong, constants above their bound."""
    found = []
    if certified := results.get("certified"):
        found += [
            f"certified accuracy {value} at radius {radius} is above the accuracy {results['accuracy']}"
            for radius, value in certified["accuracy"].items()
            if value > results["accuracy"]
        ]
        found += [
            f"empirical Lipschitz constant {one['maximum']} ({one['method']}) is above the bound {certified['bound']}"
            for one in results.get("lipschitz", ())
            if one["space"] == "pixels" and one["maximum"] > certified["bound"]
        ]
    if calibration := results.get("calibration"):
        ece = calibration["raw"]["ece"]
        found += [] if 0 <= ece <= 1 else [f"ECE {ece} is outside [0, 1]"]
    return found


def _certified(
    model: nn.Module, pixels: Tensor, labels: Tensor, logits: Tensor, radii: Sequence[float], std: float
) -> dict[str, Any]:
    found = certificates(model, pixels, labels)
    assumed = assumed_certified_accuracy(logits, labels, radii, 1 / std)
    return {
        "bound": float(found.bound),
        "accuracy": {f"{radius:.15g}": float((found.radii > radius).double().mean()) for radius in radii},
        "median_radius": float(found.radii.median()),
        "factors": [asdict(factor) for factor in found.bound.factors],
        "assumed_1_lipschitz": {f"{radius:.15g}": value for radius, value in assumed.items()},
    }


def _empirical(model: nn.Module, pixels: Tensor, labels: Tensor, space: Any, method: Any) -> dict[str, Any]:
    found = empirical_lipschitz(model, pixels, labels, radius=LIPSCHITZ_RADIUS, space=space, method=method)
    counts, edges = found.histogram(HISTOGRAM_BINS)
    return {
        "space": space,
        "method": method,
        "maximum": found.maximum,
        "mean": float(found.values.mean()),
        "histogram": {"counts": counts, "edges": edges},
    }


def _require_match(arguments: dict[str, Any], data: Dataset) -> None:
    for name, wanted in (
        ("num_classes", data.info.classes),
        ("in_channels", data.info.channels),
        ("image_size", data.info.image_size),
    ):
        if arguments[name] != wanted:
            fix = f"must be a data set whose {name} is {arguments[name]}, as the network's; here it is {wanted}"
            raise ConfigError("dataset", data.info.name, fix)
