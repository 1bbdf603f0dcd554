"""What a trial yields, as plain data: torch-free, so that those who only record results stay light."""

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

from ttsv.config.fields import digest
from ttsv.metrics.catalog import METRICS, MetricInfo

CHECKPOINTS = "checkpoints"
"""Folder, inside a trial's, of what a later attempt resumes from; once the trial's end is recorded it can go."""


SPECTRUM_SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""The quantiles by which a layer's singular values are kept over training: least, largest, and what lies between."""


AnyRecord: TypeAlias = Mapping[str, Any]
"""How something was measured, or what was measured, JSON-ready: parts by name, which readers take apart."""


class SpectrumFields(TypedDict):
    """A `LayerSpectrum` as JSON has it."""

    name: str
    values: list[float]
    before: list[float] | None


@dataclass(frozen=True, kw_only=True)
class LayerSpectrum:
    """Quantiles of a layer's singular values, at `SPECTRUM_SHARES`, in an epoch of training.

    `values` are those right after the epoch's last projection, `before` right before it; without a projection in the
    epoch `values` are those at its end, and `before` is None. Of the weights that are trained, not of their average.
    """

    name: str
    values: tuple[float, ...]
    before: tuple[float, ...] | None

    @classmethod
    def from_dict(cls, data: SpectrumFields) -> "LayerSpectrum":
        """Inverse of `asdict`, from JSON too."""
        before = data["before"]
        return cls(name=data["name"], values=tuple(data["values"]), before=None if before is None else tuple(before))


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """What one epoch of training gave; `epoch` counts from 1. Losses are means over images, accuracies in [0, 1].

    `train_*` are means over the epoch's batches while the weights change, `train_loss` without the orthogonal loss;
    `val_*` are measured after the epoch on the validation split; `ort_loss` is the orthogonal loss after
    the epoch (eq. orthloss, unweighted, None without free frames); `lr` is the rate of the epoch's first step;
    `seconds` are those of its steps, `constraint_seconds` the part spent on the constraint (the last, forced
    projection is not among them). `spectra`: those of the layers, where `training.spectra_every` asks for them.
    """

    epoch: int
    epochs: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    ort_loss: float | None
    lr: float
    seconds: float
    constraint_seconds: float
    spectra: tuple[LayerSpectrum, ...] | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "EpochMetrics":
        """Inverse of `asdict`, from JSON too. Raises `TypeError` or `KeyError` for what is none."""
        found = data.get("spectra")
        return cls(**data | {"spectra": None if found is None else tuple(map(LayerSpectrum.from_dict, found))})


@dataclass(frozen=True, kw_only=True)
class StageProgress:
    """Where an evaluation is: `done` of `total` parts of a stage, `seconds_left` of it (None: unknown)."""

    stage: str
    done: int
    total: int
    seconds_left: float | None = None


def _number(info: MetricInfo) -> tuple[str, Any, Any]:
    """A field: a metric that not every result states is None by default."""
    return info.name, info.value_type, field(default=None) if info.presence == "optional" else field()


_Numbers: Any = make_dataclass("_Numbers", map(_number, METRICS.values()), frozen=True, kw_only=True)


def _documented(definition: str, *, protocol: str = "", source: str = "") -> dict[str, str]:
    """A field's metadata, for the documents: as `ttsv.metrics.catalog.MetricInfo` has them of a metric."""
    return {"definition": definition, "protocol": protocol, "source": source}


class NormsFields(TypedDict):
    """What a projection reported of a layer (`ttsv.constraints.LayerNorms`), as JSON has it."""

    before: float
    after: float
    smallest: float | None
    measure: str


class LayerFields(TypedDict):
    """The record of a layer (`ttsv.training.record.LayerRecord`), as JSON has it; older ones have no `quantiles`."""

    name: str
    kind: str
    shape: dict[str, list[int]]
    input_size: list[int]
    largest: float
    smallest: float | None
    largest_before_projection: float | None
    projection: NormsFields | None
    quantiles: NotRequired[list[float] | None]


def machine_name(environment: Mapping[str, Any]) -> str:
    """What times were taken on, by a result's environment, or one of before machines were recorded."""
    device = environment.get("device_name") or environment.get("device") or "a machine that nobody recorded"
    threads = environment.get("threads") if environment.get("device") == "cpu" else None
    return str(device) if threads is None else f"{device}, {threads} thread{'s' * (threads != 1)}"


@dataclass(frozen=True, kw_only=True)
class TrialResult(_Numbers):  # type: ignore[misc] # whose fields are the catalogue's
    """What a finished trial is worth, on the test split, with the protocol under which it was measured.

    Its numbers are the metrics of `ttsv.metrics.catalog`; what the trial's `evaluation` did not ask for is None. With
    a violation the result is not `valid`, and none of its numbers may be used. `protocol`, `evaluation` (the whole
    record) and `environment` are JSON-ready.

    `layers` has one record per convolution (name, kind, shape, input size, largest and smallest singular value,
    largest before the last projection, what that projection reported) and, with an empty input size, one per other
    layer that was projected. `artifacts` maps a kind ("model", see `ttsv.evaluation.artifacts` for others) to the file
    written under the trial's folder.
    """

    selected_epoch: int = field(metadata=_documented("The epoch whose weights were evaluated.", protocol="weights"))
    protocol: AnyRecord = field(
        metadata=_documented(
            "How all this was measured; its fingerprint decides what ranks together.",
            source="[protocols](protocols.md)",
        )
    )
    environment: Mapping[str, object] = field(
        metadata=_documented("Device, versions, git revision, threads: where it was evaluated, and `trained_on`.")
    )
    layers: list[LayerFields] = field(
        metadata=_documented(
            "One record per convolution: kind, shape, the size it sees, largest and smallest singular value, what the"
            " last projection reached."
        )
    )
    valid: bool = field(
        default=True,
        metadata=_documented(
            "False where something cannot be true of right numbers; such a result ranks nowhere.",
            source="[certificates](certificates.md#lower-bounds-keep-it-honest)",
        ),
    )
    violations: list[str] = field(default_factory=list, metadata=_documented("What cannot be true, in words."))
    evaluation: AnyRecord = field(
        default_factory=dict,
        metadata=_documented(
            "The whole record of the evaluation: histograms, tables by kind and severity, counts per attack, seconds"
            " per stage."
        ),
    )
    artifacts: dict[str, Path] = field(
        default_factory=dict, metadata=_documented("Files: network, predictions, confusion matrix, plots.")
    )


TRAINING = "training"
"""The part of a protocol that says in words what was done to the network that is compared: it decides nothing."""


def deciding(protocol: Mapping[str, object]) -> Mapping[str, object]:
    """The parts of a protocol that decide what may be compared: all but what is said of the training."""
    return {name: part for name, part in protocol.items() if name != TRAINING}


def protocol_fingerprint(protocol: Mapping[str, object]) -> str:
    """SHA-256 (hex) of a JSON-ready protocol, the same for any order of its keys: equal ones may be compared."""
    return digest(deciding(protocol))
