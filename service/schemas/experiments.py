"""What the API says of experiments and trials; `service.specs.grid.ExperimentSpec` is what comes in."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model

from service.specs.states import ExperimentState, TrialState
from ttsv.metrics.catalog import METRICS, in_column_order

if TYPE_CHECKING:  # clients read these schemas, and need no database for it
    from service.database import Artifact


Fingerprint = Annotated[
    str, Field(description="SHA-256 (hex) of the configuration: trials with the same one compute the same.")
]
Cell = Annotated[str, Field(description="The fingerprint without the seed: leaderboards average over a cell's trials.")]
Config = Annotated[dict[str, Any], Field(description="Every field of the trial, defaults included.")]


class Out(BaseModel):
    """Base of all answers."""

    # Built when it is first used: a command needs few of the schemas.
    model_config = ConfigDict(from_attributes=True, frozen=True, defer_build=True)


BEST_SAID: dict[str | None, str] = {
    None: "best validation accuracy",
    "held-out": "best validation accuracy",
    "test": "best test accuracy of an epoch: not for selection",
    "both": "best accuracy of an epoch, validation or test: not for selection",
}
"""What the best accuracy of an epoch is, by the images on which trials validate."""


class ExperimentProgress(Out):
    """How far an experiment is."""

    trials: dict[TrialState, int] = Field(description="How many trials are in each state.")
    epochs_done: int = Field(description="Epochs that are done, summed over trials.")
    epochs: int = Field(description="Epochs done or still planned: of trials that ended early, those they did.")
    best_accuracy: float | None = Field(
        description="Best test accuracy of a finished trial: not to choose by, or it is no test any more."
    )
    best_val_accuracy: float | None = Field(
        description="Best accuracy of any epoch so far, on the images that `validated_on` names."
    )
    seconds_left: float | None = Field(
        description="From its last epoch on, at its pace; null unless it runs and enough is done to tell."
    )
    validated_on: Literal["held-out", "test", "both"] | None = Field(
        None,
        description="As `training.validation` of its trials; `test`: `best_val_accuracy` is of test images, not to "
        "choose by; null: there is no trial yet.",
    )

    @property
    def best_said(self) -> str:
        """What `best_val_accuracy` is, in words."""
        return BEST_SAID[self.validated_on]

    @property
    def best_to_choose_by(self) -> float | None:
        """`best_val_accuracy`, where no test image is in it."""
        return self.best_val_accuracy if self.validated_on in (None, "held-out") else None


class ExperimentOut(Out):
    """An experiment with its progress."""

    id: int = Field(description="Number by which other operations name it.")
    name: str = Field(description="For people; need not be unique.")
    state: ExperimentState = Field(description="`succeeded`, `stopped`, `failed` and `cancelled` are final.")
    error: str | None = Field(description="Why it failed, and what to do; else null.")
    waiting: str | None = Field(None, description="Why none of its trials can run now; null where some can.")
    priority: int = Field(description="-1000 to 1000; higher runs first among experiments of the same owner.")
    grid_points: int = Field(description="Points of the grid, before those that are equal become one trial.")
    trial_count: int = Field(description="Trials, of which no two train the same network the same way.")
    created_at: datetime = Field(description="When it was posted.")
    started_at: datetime | None = Field(description="When a worker first claimed it.")
    finished_at: datetime | None = Field(description="When it became final; null before, and once it is queued again.")
    progress: ExperimentProgress = Field(description="How far it is.")
    spec: dict[str, Any] = Field(description="As it was stored, defaults included.")
    tags: list[str] = Field([], description="Words by which it is found.")
    owner: str | None = Field(None, description="Whose key posted it.")
    stopping: bool = Field(False, description="Running trials finish, no other begins.")
    revision: int = Field(0, description="Grows with every change that people make.")
    archived_at: datetime | None = Field(
        None, description="Since when lists and leaderboards leave it out; null: they do not."
    )


class NewExperimentOut(ExperimentOut):
    """An experiment as it was stored."""

    warnings: list[str] = Field(
        [], description="Fields that have no effect, what is lacking, and what would not fit, with why."
    )


class ExperimentUpdate(Out):
    """What a stream says of an experiment's progress."""

    id: int = Field(description="The experiment's.")
    state: ExperimentState = Field(description="Of the whole experiment.")
    error: str | None = Field(description="Why it failed, and what to do; else null.")
    waiting: str | None = Field(None, description="Why none of its trials can run now; null where some can.")
    progress: ExperimentProgress = Field(description="How far it is.")


class ExperimentPosted(Out):
    """What a stream says of new experiments."""

    id: int = Field(description="The number of the newest one; 0 where there is none.")


class TrialsChanged(Out):
    """What a stream says of trials: which of them began or ended to run."""

    ids: list[int] = Field(description="Their numbers; what became of them, their events and the API say.")


class DeletionOut(Out):
    """What goes with an experiment that is deleted."""

    id: int = Field(description="The experiment's.")
    name: str = Field(description="The experiment's.")
    trials: int = Field(description="Trials that go, with their epochs and events.")
    results: int = Field(description="Results that go.")
    files: int = Field(description="Files in manifests that go; logs and checkpoints go, too.")
    size: int = Field(description="Bytes of those files.")
    shown_on: list[str] = Field(description="Data sets on whose boards, and in whose tables, its results count now.")
    deleted: bool = Field(description="Whether it is deleted: files and rows go within minutes, while a worker runs.")


class Selection(RootModel[dict[str, Any]]):
    """The parts of an answer that `fields` named."""


class SelectionPage(Out):
    """A page of which `fields` named some parts."""

    items: list[dict[str, Any]] = Field(description="Items in the order asked for, each with the fields asked for.")
    next: str | None = Field(description="Cursor of the next page; null: this is the last.")


class ExperimentPage(Out):
    """In the order asked for, newest first by default."""

    items: list[ExperimentOut] = Field(description="Experiments in the order asked for.")
    next: str | None = Field(description="Cursor of the next page; null: this is the last.")


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
    common: dict[str, Any] = Field({}, description="What the trials of this page share, by path.")


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
    fields: dict[str, Any] = Field(description="Its values in `columns` and `decided`, by path.")
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


class SelectionMetrics(Out):
    """Epochs of which `fields` named some metrics."""

    items: list[dict[str, float | None]] = Field(description="Epochs in their order, each with the fields asked for.")
    next: int | None = Field(description="The epoch after which the next page begins; null: this is the last.")
    sampled: bool = Field(description="Whether `points` chose some epochs of all.")


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


class AttemptOut(Out):
    """One start of a trial, and with what it ran."""

    number: int = Field(description="Counts every start, also those that ended for no fault of the trial's.")
    started_at: datetime = Field(description="When it began.")
    place: str = Field(description="The host, and which of its GPUs.")
    environment: dict[str, Any] | None = Field(
        description="Packages, processor, GPUs, driver, host, revision of the code, and how it differed (`git_diff`)."
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


class EventOut(Out):
    """Something that happened."""

    id: int = Field(description="Grows with time: what comes `after` it is later.")
    experiment_id: int | None = Field(description="The experiment to which it happened.")
    trial_id: int | None = Field(description="The trial to which it happened; null: to the experiment as a whole.")
    at: datetime = Field(description="When it happened.")
    actor: str = Field(description="Who did it: the name of a key's owner, or of a worker.")
    kind: str = Field(description="What happened, such as `submitted` or `trial_finished`.")
    detail: dict[str, Any] = Field(description="What there is to say of it, by kind.")


class EventPage(Out):
    """In the order asked for, oldest first by default."""

    items: list[EventOut] = Field(description="Events in the order asked for.")
    next: int | None = Field(description="`after` of the next page; null where there is none yet.")


class SelectionEvents(Out):
    """Events of which `fields` named some parts."""

    items: list[dict[str, Any]] = Field(description="Events in the order asked for, each with the fields asked for.")
    next: int | None = Field(description="`after` of the next page; null where there is none yet.")


class PresetOut(Out):
    """A table or figure of the paper that can be asked for by name."""

    name: str = Field(description="By which it is asked for: `paper/table`.")
    title: str = Field(description="What the table or figure shows.")


SHOWN = 1000
"""Trials that are listed; the totals are those of all."""


class DryTrialOut(Out):
    """A trial that would be made. What is null is not known: `reasons` says why."""

    number: int = Field(description="Place in the experiment, from 0 on.")
    fingerprint: Fingerprint
    cell: Cell
    config: Config
    parameters: int | None = Field(description="That are trained.")
    compression: float | None = Field(description=METRICS["compression"].in_words)
    multiply_accumulates: int | None = Field(description="Of one image.")
    steps: int | None = Field(description="Of the optimizer, over all epochs.")
    seconds: float | None = Field(description="Of training, without evaluation.")
    basis: str | None = Field(description="How `seconds` came about.")
    memory_gib: float | None = Field(
        None, description="The most that it has on a GPU at any moment, in GiB, without CUDA's own."
    )
    memory_basis: str | None = Field(None, description="How `memory_gib` came about.")
    reasons: list[str] = Field(description="Why something is null.")


class DryTotals(Out):
    """Over all trials, one after another; null where one of them is not known."""

    steps: int | None = Field(description="Of the optimizer, over all trials and epochs.")
    seconds: float | None = Field(description="Of training, one trial after another.")


class DryRange(Out):
    """From the least to the largest of the trials' values that are known."""

    least: float = Field(description="The smallest of them.")
    largest: float = Field(description="The largest of them.")


class DryRanges(Out):
    """How far trials lie apart; null where nothing is known of any."""

    parameters: DryRange | None = Field(description="That are trained.")
    compression: DryRange | None = Field(description=METRICS["compression"].in_words)
    seconds: DryRange | None = Field(description="Of training, without evaluation.")


class DryMemory(Out):
    """What the trial with the largest known memory takes of a GPU, and the fraction of one that is enough."""

    gib: float = Field(description="Its `memory_gib`.")
    basis: str = Field(description="How that came about.")
    needed_gib: float = Field(
        description="What its process takes of a card: that, what the allocator holds over it, and a CUDA context."
    )
    card_gib: float | None = Field(description="The smallest GPU of the nodes that are there; null: none is known.")
    gpus: float | None = Field(
        description="A fraction for `resources.gpus` that is enough there, 1/n for the most trials side by side; null "
        "without a known card, where the spec asks for no GPU or for several, or where none is enough."
    )


class DryRunOut(Out):
    """What a spec would become. A search finds its trials only while it runs: it lists none."""

    grid_points: int = Field(description="Points of the grid, before those that are equal become one trial.")
    trial_count: int = Field(description="Trials that would be made.")
    totals: DryTotals = Field(description="What all trials together would cost.")
    ranges: DryRanges | None = Field(None, description="The least and the largest of all trials.")
    memory: DryMemory | None = Field(None, description="Of a GPU, the largest trial's; null: not known of any.")
    reasons: list[str] = Field([], description="Why something is null of some trial, each reason once.")
    notes: list[str] = Field([], description="What might be chosen otherwise; nothing of the spec is changed.")
    warnings: list[str] = Field(
        [], description="Fields that have no effect, what is lacking, and what would not fit, with why."
    )
    trials: list[DryTrialOut] = Field(description=f"The first {SHOWN}; none with `summary`.")
    columns: list["ColumnOut"] = Field(
        [], description="The fields in which all trials differ, not only those that are listed; none with `summary`."
    )
    decided: list["ColumnOut"] = Field([], description="Fields that differ too, but follow from one of `columns`.")
    common: dict[str, Any] = Field({}, description="What all trials share, by path; empty with `summary`.")
