"""Networks that trials saved: read, and evaluated."""

import hashlib
import json
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ttsv.checks import check_count
from ttsv.config.evaluation import EVALUATION, EvaluationConfig
from ttsv.config.trial import TrialConfig
from ttsv.data import load_dataset
from ttsv.data.loading import Dataset
from ttsv.errors import ConfigError, DataError, DivergedError
from ttsv.evaluation.evaluated import Evaluated, evaluate_network
from ttsv.evaluation.stages import check_evaluation
from ttsv.evaluation.subject import EvaluationOptions, Subject
from ttsv.models import ModelArguments
from ttsv.results import StageProgress
from ttsv.runtime.devices import find_device
from ttsv.training.checkpoint import SavedNetwork, load_network

_TRAINING = ("train_seconds", "constraint_seconds", "step_seconds", "constraint_step_seconds")
"""What a trial notes of its training beside the network."""


def load_saved(path: Path, *, device: torch.device | None = None) -> torch.nn.Module:
    """Reads the network in `path`, a `model.safetensors` that a trial left, by that name or another.

    With a `device`, it is there, and laid out in memory as training leaves it: with channels last for images of two
    dimensions, so that every sum is rounded as it was for the trial.

    Raises `DataError` for any other file, for one that is missing, cut or altered, and for a description that does not
    fit its weights.
    """
    return load_described(path, device=device).model


def load_described(path: Path, *, device: torch.device | None = None) -> SavedNetwork:
    """Reads what `load_saved` does, and what was written of the network."""
    if path.suffix != ".safetensors":
        raise DataError(f"{path}: give the model.safetensors that a trial left")
    try:
        saved = load_network(path)
    except (RuntimeError, TypeError, KeyError) as error:
        raise DataError(f"what is said of {path} does not describe it: {error}") from error
    if device is not None:
        saved.model.to(device)
        if any(parameter.ndim == 4 for parameter in saved.model.parameters()):
            saved.model.to(memory_format=torch.channels_last)
    return saved


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
    if images is not None:
        check_count("images", images)
    place = find_device(device)
    saved = load_described(path, device=place)
    data = load_dataset(dataset, data_dir)
    _require_match(saved.arguments, data)
    folder = Path(data_dir) / "datasets"
    check_evaluation(config, data, folder)
    own_state = None
    if state is None and "autoattack" in config.attacks:
        state = own_state = _attack_state(path, data, data_dir, config, images)
    subject = Subject(
        model=saved.model,
        data=data,
        mean=saved.arguments.mean,
        std=saved.arguments.std,
        trained=None if saved.config is None else TrialConfig.from_dict(saved.config),
        said=saved.training.get("said", {}),
    )
    options = EvaluationOptions(
        config=config, folder=folder, images=images, state=state, renew_state=own_state is not None, cost=cost
    )
    try:
        found = yield from evaluate_network(subject, options)
    except DivergedError as error:
        raise DataError(f"{path}: {error}") from error
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    training = {name: saved.training.get(name) for name in _TRAINING}
    if own_state is not None:
        own_state.unlink(missing_ok=True)
    return replace(found, saved={"model_sha256": sha256}, training=training)


def _attack_state(path: Path, data: Dataset, data_dir: Path, config: EvaluationConfig, images: int | None) -> Path:
    """The file of one attack on one network: another call of the same evaluation finds it."""
    attack = {name: value for name, value in asdict(config).items() if name.startswith("attack_")}
    asked = {**attack, "batch_size": config.batch_size, "seed": config.seed, "images": images, "data": data.sha256}
    content = json.dumps(asked, sort_keys=True).encode() + path.read_bytes()
    folder = Path(data_dir) / "attacks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(content).hexdigest()[:32]}.safetensors"


def _require_match(arguments: ModelArguments, data: Dataset) -> None:
    for name, own, wanted in (
        ("num_classes", arguments.num_classes, data.info.classes),
        ("in_channels", arguments.in_channels, data.info.channels),
        ("image_size", arguments.image_size, data.info.image_size),
    ):
        if own != wanted:
            fix = f"must be a data set whose {name} is {own}, as the network's; here it is {wanted}"
            raise ConfigError("dataset", data.info.name, fix)
