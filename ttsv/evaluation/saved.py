"""The evaluation of a network that a trial saved."""

import hashlib
import json
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttsv.config.evaluation import EVALUATION, EvaluationConfig
from ttsv.config.trial import TrialConfig
from ttsv.data import load_dataset
from ttsv.data.loading import Dataset, as_pixels
from ttsv.errors import ConfigError, DataError, DivergedError
from ttsv.evaluation.protocol import describe_protocol
from ttsv.evaluation.saved_spectra import load_described
from ttsv.evaluation.stages import Measured, check_evaluation, measure
from ttsv.metrics import cost as cost_of
from ttsv.results import StageProgress, protocol_fingerprint
from ttsv.runtime import describe_environment, find_device, known_failures

_DEFAULTS = {"in_channels": 3, "image_size": 32, "mean": (0.5,), "std": (0.5,)}
"""Of `create_model`, for what a model.json leaves out."""

_TRAINING = ("train_seconds", "constraint_seconds", "step_seconds", "constraint_step_seconds")
"""What a trial notes of its training beside the network."""


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
    cost: bool = False,
) -> Generator[StageProgress, None, Evaluated]:
    """Evaluates the network in `path` (a trial's `model.safetensors`) on a data set's test images.

    Yields where it is and returns what `measure` gives, and a record of it: `protocol` says how it was measured,
    `results` what came out, `violations` what cannot be true of right numbers (with one, none of them may be
    used), `environment` where; `protocol_fingerprint` decides what may be compared. `images`: only so many, the first
    of the test split. `state`: the file in which AutoAttack keeps what it has found, and from which it goes on; by
    default one of its own in `data_dir/attacks`, which is removed once the evaluation is finished. `cost`: the results
    say what the network and its evaluation cost, too.

    Raises `DataError` for a damaged model or data set, and for logits that are not finite; `ConfigError` for images
    that the network does not take.
    """
    config = config.canonical()
    if images is not None and images < 1:
        raise ConfigError("images", images, "must be at least 1")
    place = find_device(device)
    model, described = load_described(path, device=place)
    arguments = _DEFAULTS | described["model"]
    data = load_dataset(dataset, data_dir)
    _require_match(arguments, data)
    folder = Path(data_dir) / "datasets"
    check_evaluation(config, data, folder)
    own_state = None
    if state is None and "autoattack" in config.attacks:
        state = own_state = _attack_state(path, data, data_dir, config, images)
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    started = time.perf_counter()
    preprocessing = {name: list(arguments[name]) for name in ("mean", "std")}
    try:
        with known_failures(model), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            measured = yield from measure(
                model,
                data,
                config,
                preprocessing=preprocessing,
                folder=folder,
                images=images,
                state=state,
                renew_state=own_state is not None,
            )
            results = measured.results
            if cost:
                yield StageProgress(stage="cost", done=0, total=1)
                results = results | {"cost": _cost(model, data, place, time.perf_counter() - started)}
                results["cost"]["training"] = {name: described.get("training", {}).get(name) for name in _TRAINING}
    except DivergedError as error:
        raise DataError(f"{path}: {error}") from error
    protocol = _protocol(described.get("config"), measured.protocol)
    record = {
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "protocol": protocol,
        "protocol_fingerprint": protocol_fingerprint(protocol),
        "results": results,
        "violations": [violation.text for violation in measured.violations],
        "environment": describe_environment(place),
    }
    if own_state is not None:
        own_state.unlink(missing_ok=True)
    return Evaluated(model=model, data=data, measured=measured, record=record)


def _protocol(trained: dict[str, Any] | None, evaluation: dict[str, Any]) -> dict[str, Any]:
    """The trial's own, where the configuration that the network was trained by is known: had the test images a say?"""
    if trained is None:
        return evaluation | {"weights": "trained in ways that are not known"}
    config = TrialConfig.from_dict(trained)
    found = describe_protocol(config, evaluation)
    return found if config.dataset == evaluation["dataset"] else found | {"trained_on": config.dataset}


def _attack_state(path: Path, data: Dataset, data_dir: Path, config: EvaluationConfig, images: int | None) -> Path:
    """The file of one attack on one network: another call of the same evaluation finds it."""
    attack = {name: value for name, value in asdict(config).items() if name.startswith("attack_")}
    asked = {**attack, "batch_size": config.batch_size, "seed": config.seed, "images": images, "data": data.sha256}
    content = json.dumps(asked, sort_keys=True).encode() + path.read_bytes()
    folder = Path(data_dir) / "attacks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(content).hexdigest()[:32]}.safetensors"


def _cost(model: nn.Module, data: Dataset, place: torch.device, seconds: float) -> dict[str, Any]:
    """What a network and its evaluation cost, JSON-ready: seconds, bytes; operations of one image."""
    info = data.info
    images = as_pixels(data.test.images[:128].to(place))
    return {
        "parameters": cost_of.parameters(model),
        "compression": cost_of.compression(model),
        "multiply_accumulates": cost_of.multiply_accumulates(model, info.image_size, in_channels=info.channels),
        "inference": [asdict(one) for one in cost_of.inference_times(model, images)],
        "evaluation_seconds": seconds,
        "peak_memory": cost_of.peak_memory(place),
        "peak_memory_of": "allocations on the GPU" if place.type == "cuda" else "the process",
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
