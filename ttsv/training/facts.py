"""What is noted of a training beside the network that came out of it, and read where that network is evaluated anew."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ttsv.config.evaluation import EVALUATION
from ttsv.config.fields import differing
from ttsv.config.trial import TrialConfig
from ttsv.data.loading import Dataset
from ttsv.errors import DataError


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """Fields of `ttsv.results.TrialResult` that only the training knows; those of a model without a note are 0.

    `layers`: its records of the layers, for what constraints reported.
    """

    train_seconds: float = 0.0
    constraint_seconds: float = 0.0
    step_seconds: float = 0.0
    constraint_step_seconds: float = 0.0
    peak_memory: int | None = None
    selected_epoch: int = 0
    layers: tuple[dict[str, Any], ...] = ()

    def columns(self) -> dict[str, Any]:
        """The fields of a `TrialResult`, by its names."""
        return {name: value for name, value in asdict(self).items() if name != "layers"}

    def with_projections(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Records of the layers as they are, and beside them what the constraint reported when it was trained."""
        noted = {record["name"]: record for record in self.layers}
        names = ("largest_before_projection", "projection")
        known = [record | {n: noted[record["name"]][n] for n in names if record["name"] in noted} for record in records]
        return known + [record for record in self.layers if not record["input_size"]]


def describe_training(config: TrialConfig, data: Dataset, facts: TrainingFacts) -> dict[str, Any]:
    """What goes into a model's JSON file, for `read_training`."""
    return {"config": config.to_dict(), "dataset_sha256": data.sha256, "training": asdict(facts)}


def read_training(path: Path, config: TrialConfig, arguments: Mapping[str, Any], data: Dataset) -> TrainingFacts:
    """The facts in the `model.json` beside a `model.safetensors`.

    `arguments` are those of the network that the canonical `config` describes. Raises `DataError` naming what differs
    where the saved network is another one: built otherwise, trained otherwise, or on other data.
    """
    beside = path.with_name("model.json")
    try:
        found = json.loads(beside.read_bytes())
        built = dict(found["model"])
        trained = TrialConfig.from_dict(found["config"]).canonical() if "config" in found else None
        noted = found.get("training", {})
        known = {field.name: noted[field.name] for field in fields(TrainingFacts) if field.name in noted}
        facts = TrainingFacts(**known | {"layers": tuple(known.get("layers", ()))})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{beside} is no description of a trained network: {error}") from error
    for name in sorted(arguments.keys() | built.keys()):
        _require(path, name, built.get(name), arguments.get(name))
    if trained is not None:
        theirs, ours = (_trained(one) for one in (trained, config))
        for name in sorted(theirs.keys() | ours.keys()):
            _require(path, name, theirs.get(name), ours.get(name))
    if "dataset_sha256" in found:
        _require(path, "dataset_sha256", found["dataset_sha256"], data.sha256)
    return facts


def _trained(config: TrialConfig) -> dict[str, Any]:
    """What differs from the defaults, but for the evaluation."""
    return differing(replace(config, evaluation=EVALUATION))


def _require(path: Path, name: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise DataError(f"{path} is another network than the trial's: its {name} is {found!r}, wanted is {wanted!r}")
