"""What is noted of a training beside the network that came out of it, and read where that network is evaluated anew."""

import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from ttsv.config.evaluation import EVALUATION
from ttsv.config.fields import TrialFields
from ttsv.config.training import TrainingConfig
from ttsv.config.trial import TrialConfig
from ttsv.constraints import LayerNorms
from ttsv.data.loading import Dataset
from ttsv.errors import DataError
from ttsv.models import ModelArguments, per_channel
from ttsv.results import LayerFields


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """What `ttsv.results.TrialResult.layers` keeps of one layer.

    `shape`: that of each factor by name. `input_size`: pixels along each axis; empty for a layer that is no
    convolution. `largest` and `smallest`: singular values; `quantiles`: all of them in short, at `SPECTRUM_SHARES` of
    `ttsv.results`. `projection`: what the last projection reported.
    """

    name: str
    kind: str
    shape: dict[str, list[int]]
    input_size: list[int]
    largest: float
    smallest: float | None
    largest_before_projection: float | None
    projection: LayerNorms | None
    quantiles: list[float] | None = None

    def to_dict(self) -> LayerFields:
        """As results keep it."""
        return cast(LayerFields, asdict(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "LayerRecord":
        """Inverse of `to_dict`; what another version notes besides is left out.

        Raises `DataError` naming what lacks.
        """
        if missing := [one.name for one in fields(cls) if one.name not in data and one.default is MISSING]:
            raise DataError(f"the record of a layer lacks {', '.join(missing)}")
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        if (projection := data["projection"]) is not None:
            names = projection.keys() & {field.name for field in fields(LayerNorms)}
            known["projection"] = LayerNorms(**{name: projection[name] for name in names})
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """Fields of `ttsv.results.TrialResult` that only the training knows; those of a model without a note are 0.

    `layers`: its records of the layers, for what constraints reported. `said`: what a protocol says of the training, by
    subject, in words. `trained_on`: the machines that its seconds are of.
    """

    train_seconds: float = 0.0
    constraint_seconds: float = 0.0
    step_seconds: float = 0.0
    constraint_step_seconds: float = 0.0
    peak_memory: int | None = None
    selected_epoch: int = 0
    layers: tuple[LayerRecord, ...] = ()
    said: dict[str, str] = field(default_factory=dict)
    trained_on: tuple[str, ...] = ()

    def columns(self) -> dict[str, float | int | None]:
        """The fields of a `TrialResult`, by its names."""
        others = "layers", "said", "trained_on"
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}

    def with_projections(self, records: Iterable[LayerRecord]) -> tuple[LayerRecord, ...]:
        """Records of the layers as they are, and beside them what the constraint reported when it was trained."""
        noted = {record.name: record for record in self.layers}
        known = [_with_projection(record, noted.get(record.name, record)) for record in records]
        return (*known, *(record for record in self.layers if not record.input_size))


def _with_projection(record: LayerRecord, noted: LayerRecord) -> LayerRecord:
    return replace(record, largest_before_projection=noted.largest_before_projection, projection=noted.projection)


def best_epoch(training: TrainingConfig) -> str:
    """The words by which a protocol names the best epoch: on what, and by what."""
    images = "test" if training.validation == "test" else "validation"
    by = " by certified accuracy (assumed, radius 36/255)" if training.best_by == "certified" else ""
    return f"best epoch on the {images} images{by}"


def describe_training(config: TrialConfig, data: Dataset, facts: TrainingFacts) -> dict[str, Any]:
    """What goes into a model's JSON file, for `read_training`."""
    return {"config": config.kept(), "dataset_sha256": data.sha256, "training": asdict(facts)}


def read_training(path: Path, config: TrialConfig, arguments: ModelArguments, data: Dataset) -> TrainingFacts:
    """The facts in the `model.json` beside a `model.safetensors`.

    `arguments` are those of the network that the canonical `config` describes. Raises `DataError` naming what differs
    where the saved network is another one: built otherwise, trained otherwise, or on other data.
    """
    beside = path.with_name("model.json")
    try:
        found = json.loads(beside.read_bytes())
        built = dict(found["model"])
        trained = TrialConfig.from_dict(found["config"]).canonical() if "config" in found else None
        for name in ("mean", "std"):  # networks of before may have one value for all channels
            if name in built:
                built[name] = per_channel(built[name], arguments.in_channels)
        noted = found.get("training", {})
        known = {field.name: noted[field.name] for field in fields(TrainingFacts) if field.name in noted}
        known["layers"] = tuple(map(LayerRecord.from_dict, known.get("layers", ())))
        known["trained_on"] = tuple(known.get("trained_on", ()))
        facts = TrainingFacts(**known)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{beside} is no description of a trained network: {error}") from error
    wanted = asdict(arguments)
    for name in sorted(wanted.keys() | built.keys()):
        _require(path, name, built.get(name), wanted.get(name))
    if trained is not None:
        theirs, ours = (_trained(one) for one in (trained, config))
        for name in sorted(theirs.keys() | ours.keys()):
            _require(path, name, theirs.get(name), ours.get(name))
    if "dataset_sha256" in found:
        _require(path, "dataset_sha256", found["dataset_sha256"], data.sha256)
    return facts


def _trained(config: TrialConfig) -> TrialFields:
    """What differs from the defaults, but for the evaluation."""
    return replace(config, evaluation=EVALUATION).deciding()


def _require(path: Path, name: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise DataError(f"{path} is another network than the trial's: its {name} is {found!r}, wanted is {wanted!r}")
