"""The evaluation of a network that a trial saved."""

import hashlib
import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttsv.data import load_dataset
from ttsv.data.loading import Dataset
from ttsv.device import find_device
from ttsv.environment import describe_environment
from ttsv.errors import ConfigError, DataError, DivergedError
from ttsv.evaluation.stages import Measured, check_evaluation, measure
from ttsv.evaluation_config import EVALUATION, EvaluationConfig
from ttsv.failures import known_failures
from ttsv.results import StageProgress
from ttsv.saved import load_saved

_DEFAULTS = {"in_channels": 3, "image_size": 32, "mean": (0.5,), "std": (0.5,)}
"""Of `create_model`, for what a model.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A saved network, evaluated; `record` is JSON-ready."""

    model: nn.Module
    data: Dataset
    measured: Measured
    record: dict[str, Any]


def evaluate(
    path: Path,
    dataset: str,
    data_dir: Path,
    config: EvaluationConfig = EVALUATION,
    *,
    images: int | None = None,
    device: str = "cpu",
    state: Path | None = None,
) -> Generator[StageProgress, None, Evaluated]:
    """Evaluates the network in `path` (a trial's `model.safetensors`) on a data set's test images.

    Yields where it is and returns what `measure` gives, and a record of it: `protocol` says how it was measured,
    `results` what came out, `violations` what cannot be true of right numbers (with one, none of them may be
    used), `environment` where. `images`: only so many, the first of the test split; `state`: the file from which
    AutoAttack goes on, if it is there.

    Raises `DataError` for a damaged model or data set, and for logits that are not finite; `ConfigError` for images
    that the network does not take.
    """
    config = config.canonical()
    if images is not None and images < 1:
        raise ConfigError("images", images, "must be at least 1")
    place = find_device(device)
    model = load_saved(path, device=place)
    arguments = _DEFAULTS | json.loads(path.with_name("model.json").read_bytes())["model"]
    data = load_dataset(dataset, data_dir)
    _require_match(arguments, data)
    folder = Path(data_dir) / "datasets"
    check_evaluation(config, data, folder)
    preprocessing = {name: list(arguments[name]) for name in ("mean", "std")}
    try:
        with known_failures(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            measured = yield from measure(
                model, data, config, preprocessing=preprocessing, folder=folder, images=images, state=state
            )
    except DivergedError as error:
        raise DataError(f"{path}: {error}") from error
    record = {
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "protocol": measured.protocol,
        "results": measured.results,
        "violations": [violation.text for violation in measured.violations],
        "environment": describe_environment(place),
    }
    return Evaluated(model=model, data=data, measured=measured, record=record)


def _require_match(arguments: dict[str, Any], data: Dataset) -> None:
    for name, wanted in (
        ("num_classes", data.info.classes),
        ("in_channels", data.info.channels),
        ("image_size", data.info.image_size),
    ):
        if arguments[name] != wanted:
            fix = f"must be a data set whose {name} is {arguments[name]}, as the network's; here it is {wanted}"
            raise ConfigError("dataset", data.info.name, fix)
