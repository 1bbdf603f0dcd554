"""What the API says of trials: their configuration, results, epochs, spectra, files, attempts and resources."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, create_model

from service.schemas.answers import ByPath, Out
from service.specs.states import TrialState
from ttsv.metrics.catalog import METRICS, in_column_order

if TYPE_CHECKING:  # clients read these schemas, and need no database for it
    from service.database import Artifact

Fingerprint = Annotated[
    str, Field(description="SHA-256 (hex) of the configuration: trials with the same one compute the same.")
]
Cell = Annotated[str, Field(description="The fingerprint without the seed: leaderboards average over a cell's trials.")]
Config = Annotated[dict[str, Any], Field(description="Every field of the trial, defaults included.")]


def _with_numbers() -> Any:
    """A base of results: the protocol and, as columns are ordered, the catalogue's metrics."""
    fields: dict[str, Any] = {"selected_epoch": (int, Field(description="The epoch whose weights were evaluated."))}
    for name, info in METRICS.items():
        default = None if info.presence == "optional" else ...
        fields[name] = info.value_type, Field(default, description=info.in_words)
    protocol = str, Field(description="Fingerprint of how it was measured: only results of the same one are ranked.")
    return create_model("_Numbers", __base__=Out, protocol=protocol, **in_column_order(fields))


_Numbers: Any = _with_numbers()


class ResultOut(_Numbers, Out):  # type: ignore[misc] # whose fields are the catalogue's
    """What a succeeded trial is worth on the test split, under the protocol named by its fingerprint.

    Null is what its `evaluation` did not ask for, or does not apply.
    """

    valid: bool = Field(True, description="False: what it says cannot be true (`violations`), so it never ranks.")
    violations: list[str] | None = Field(None, description="What cannot be true, in words; null: nothing is known.")


class TrialOut(Out):
    """One trial of the grid, with its result if it has one."""

    id: int = Field(description="Number by which other operations name it.")
    experiment_id: int = Field(description="The experiment whose trial it is.")
    number: int = Field(description="Place in the experiment, from 0 on.")
    fingerprint: Fingerprint
    cell: Cell
    config: Config
    state: TrialState = Field(description="All but `queued` and `running` are final.")
    attempts: int = Field(description="Attempts begun, but for those that ended for no fault of the trial's.")
    node: str | None = Field(None, description="Where its newest attempt runs or ran: a host, and which of its GPUs.")
    epoch: int = Field(description="Epochs done by now.")
    epochs: int = Field(description="Epochs planned.")
    failure: str | None = Field(description="Class of what went wrong, such as `diverged` or `oom`; else null.")
    error: str | None = Field(description="What went wrong, last time or for good, and what to do; else null.")
    started_at: datetime | None = Field(description="When its newest attempt began.")
    finished_at: datetime | None = Field(description="When it became final.")
    run_seconds: float = Field(0, description="Of all attempts that ended.")
    last_report_at: datetime | None = Field(
        None, description="When its process last reported, or half a minute before; null unless it runs."
    )
    hung_after: float | None = Field(
        None,
        description="Seconds without a report after which its process is killed and it is tried again: as its spec "
        "says, or by its own pace; null unless it runs.",
    )
    best_val_accuracy: float | None = Field(
        None, description="Of any epoch, a fraction: on test images where `training.validation` says so."
    )
    source_trial_id: int | None = Field(None, description="It trains nothing and evaluates what this trial left.")
    result: ResultOut | None = Field(None, description="On the test images; null unless it succeeded.")


PASSING = ("last_report_at", "hung_after")
"""What is said of a trial only while it runs."""


class ColumnOut(Out):
    """A field in which rows differ."""

    field: str = Field(description="Dotted, as in a grid.")
    name: str = Field(description="The heading of tables for people: the shortest name that no other field has.")


class TrialPage(Out):
    """In the order asked for, the grid's by default."""

    items: list[TrialOut] = Field(description="Trials in the order asked for.")
    next: str | None = Field(description="Cursor of the next page; null: this is the last.")
    columns: list[ColumnOut] = Field(
        [], description="The fields in which the trials of this page differ, or those asked for."
    )
    decided: list[ColumnOut] = Field([], description="Fields that differ too, but follow from one of `columns`.")
    common: ByPath = Field({}, description="What the trials of this page share, by path.")


class EpochOut(Out):
    """What one epoch of training gave."""

    epoch: int = Field(description="Number of the epoch, from 1 on.")
    train_loss: float = Field(description="Mean over the epoch's batches, without the orthogonal loss; nats.")
    train_accuracy: float = Field(description="Mean over the epoch's batches; a fraction.")
    val_loss: float = Field(
        description="Mean cross-entropy after the epoch, of the images that `training.validation` names; nats."
    )
    val_accuracy: float = Field(description="Of the same images after the epoch; a fraction.")
    ort_loss: float | None = Field(description="Orthogonal loss after the epoch, unweighted; null without free frames.")
    lr: float = Field(description="Learning rate of the epoch's first step.")
    seconds: float = Field(description="Time of the epoch's steps, in seconds.")
    constraint_seconds: float = Field(description="The part of `seconds` that the constraint took.")


class MetricsPage(Out):
    """Epochs of a trial: a page of them, or some of all."""

    items: list[EpochOut] = Field(description="Epochs in their order.")
    next: int | None = Field(description="The epoch after which the next page begins; null: this is the last.")
    sampled: bool = Field(description="Whether `points` chose some epochs of all.")


class CurveOut(Out):
    """A trial's epochs by column."""

    trial: int = Field(description="The trial's number.")
    experiment_id: int = Field(description="The experiment whose trial it is.")
    number: int = Field(description="From 0 on, within the experiment.")
    cell: Cell
    seed: int = Field(description="Of its initial weights and of the order of images.")
    state: TrialState = Field(description="What became of it by now.")
    epochs: int = Field(description="How many are planned.")
    best_val_accuracy: float | None = Field(description="Of any epoch so far.")
    validated_on: Literal["held-out", "test"] = Field(
        "held-out", description="Of which images `val_accuracy` and `val_loss` are, as `training.validation`."
    )
    fields: ByPath = Field(description="Its values in `columns` and `decided`, by path.")
    epoch: list[int] = Field(description="The epochs, in their order.")
    values: list[list[float | None]] = Field(
        description="By metric, in the order of `metrics`: a value for each epoch."
    )


class CurvesOut(Out):
    """The epochs of many trials."""

    metrics: list[str] = Field(description="The metrics that were asked for.")
    columns: list["ColumnOut"] = Field(description="The fields beside the seed in which the trials differ.")
    decided: list["ColumnOut"] = Field([], description="Fields that differ too, but follow from one of `columns`.")
    curves: list[CurveOut] = Field(description="One per trial, in the order asked for, or the best cell first.")


class ArtifactOut(Out):
    """A file the trial left."""

    id: int = Field(description="Number by which it is downloaded.")
    kind: str = Field(description="What it is, such as `model`; a trial has one of each kind.")
    name: str = Field(description="File name proposed for saving it.")
    media_type: str = Field(description="What its download has as Content-Type.")
    sha256: str = Field(description="SHA-256 (hex) of its bytes, and their ETag.")
    size: int = Field(description="In bytes.")
    url: str = Field(description="Path of this service where it is had.")

    @classmethod
    def of(cls, artifact: "Artifact") -> Self:
        """An artifact as the API shows it."""
        from service.experiments.artifacts import file_name, media_type

        return cls(
            id=artifact.id,
            kind=artifact.kind,
            name=file_name(artifact),
            media_type=media_type(artifact),
            sha256=artifact.sha256,
            size=artifact.size,
            url=f"/v1/artifacts/{artifact.id}",
        )


class ArtifactList(Out):
    """All files of a trial, by kind."""

    items: list[ArtifactOut] = Field(description="Every file, by kind.")


class ResultDetailOut(ResultOut):
    """A result with the protocol's record, what its evaluations recorded, and where it ran."""

    trial_id: int = Field(description="The trial whose result it is.")
    protocol_record: dict[str, Any] = Field(description="How it was measured, whose fingerprint is `protocol`.")
    evaluation: dict[str, Any] | None = Field(
        description="Histograms, tables, counts, seconds per stage; null where none was kept."
    )
    environment: dict[str, Any] = Field(description="Device, versions, git revision, threads: where it was computed.")
    created_at: datetime = Field(description="When it was stored.")


class SpectraOut(Out):
    """Singular values of a trial's layers."""

    trial_id: int = Field(description="The trial whose layers these are.")
    max_singular_value: float = Field(description=METRICS["max_singular_value"].in_words)
    layers: list[dict[str, Any]] = Field(
        description="Of each layer: name, kind, shape, input size, largest and smallest singular value."
    )


class LayerSpectraOut(Out):
    """A layer's singular values over the epochs of training."""

    name: str = Field(description="The layer's, as in `layers` of the spectra.")
    values: list[list[float] | None] = Field(
        description="By epoch, quantiles right after its last projection; at its end, where there was none."
    )
    before: list[list[float] | None] = Field(
        description="By epoch, quantiles right before its last projection; null where there was none."
    )


class EpochSpectraOut(Out):
    """Singular values of a trial's layers while it trained."""

    trial_id: int = Field(description="The trial whose layers these are.")
    shares: list[float] = Field(description="Of which the quantiles are: 0 is the least value, 1 the largest.")
    epochs: list[int] = Field(description="Those that were looked at (`training.spectra_every`), in their order.")
    layers: list[LayerSpectraOut] = Field(description="The network's convolutions, in its order.")


class TrialDetailOut(TrialOut):
    """A trial with its epochs, its protocol, its layers' singular values and the files it left."""

    epoch_metrics: list[EpochOut] = Field(
        description="In their order; of more than 1000, so many that draw the same curves."
    )
    protocol: dict[str, Any] | None = Field(description="How its result was measured; null without one.")
    layers: list[dict[str, Any]] | None = Field(description="As `spectra` has them; null without a result.")
    environment: dict[str, Any] | None = Field(description="Where its result was computed; null without one.")
    artifacts: list[ArtifactOut] = Field(description="The files it left, by kind.")
    rests_until: datetime | None = Field(
        None, description="When it may begin again after deaths of its process, as `error` says; else null."
    )


class AttemptOut(Out):
    """One start of a trial, and with what it ran."""

    number: int = Field(description="Counts every start, also those that ended for no fault of the trial's.")
    started_at: datetime = Field(description="When it began.")
    place: str = Field(description="The host, and which of its GPUs.")
    environment: dict[str, Any] | None = Field(
        description="Packages, processor, GPUs, driver, host, version of the code with its digest (`ttsv`), its"
        " revision, and how it differed (`git_diff`)."
    )


class AttemptList(Out):
    """A trial's attempts, the newest 50."""

    items: list[AttemptOut] = Field(description="The oldest first.")


class ResourcePoint(Out):
    """What a trial's process used at one moment. What is null is not known, or there is no GPU."""

    seconds: float = Field(description="Since the attempt began.")
    cpu: float | None = Field(description="Percent of one core, since the point before: 200 are two cores.")
    memory: float | None = Field(description="Resident memory, in MiB.")
    gpu: float | None = Field(description="Percent of the GPU that was busy, with whatever else computed on it.")
    gpu_memory: float | None = Field(description="Memory that the process holds on the GPU, in MiB.")


class AttemptResources(Out):
    """What one attempt used over time."""

    number: int = Field(description="The attempt's.")
    started_at: datetime = Field(description="When it began.")
    place: str = Field(description="The host, and which of its GPUs.")
    interval: float | None = Field(description="Seconds between two points: it doubles where there are 300.")
    points: list[ResourcePoint] = Field(description="In their order; none of an attempt of less than a second.")


class ResourceList(Out):
    """What a trial used of its machines."""

    items: list[AttemptResources] = Field(description="Its attempts, the oldest first.")
