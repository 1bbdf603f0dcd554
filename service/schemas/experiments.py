"""What the API says of experiments and trials; `service.specs.grid.ExperimentSpec` is what comes in."""

from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model

from service.specs.states import ExperimentState, TrialState
from ttsv.metrics.catalog import METRICS, in_column_order

if TYPE_CHECKING:  # clients read these schemas, and need no database for it
    from service.database import Artifact


class Out(BaseModel):
    """Base of all answers."""

    # Built when it is first used: a command needs few of the schemas.
    model_config = ConfigDict(from_attributes=True, frozen=True, defer_build=True)


class ExperimentProgress(Out):
    """How far an experiment is. `trials` counts them by state; `seconds_left`: from its last epoch on, at its pace.

    `epochs` is how many are done and still planned: of trials that ended early, those they did.
    """

    trials: dict[TrialState, int]
    epochs_done: int
    epochs: int
    best_accuracy: float | None = Field(
        description="Best test accuracy of a finished trial: not to choose by, or it is no test any more."
    )
    best_val_accuracy: float | None = Field(description="Best validation accuracy of any epoch so far.")
    seconds_left: float | None


class ExperimentOut(Out):
    """An experiment with its progress. `grid_points` counts the grid's points, `trial_count` those that differ."""

    id: int
    name: str
    state: ExperimentState
    error: str | None
    priority: int
    grid_points: int
    trial_count: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: ExperimentProgress
    spec: dict[str, Any]
    tags: list[str] = []
    owner: str | None = Field(None, description="Whose key posted it.")
    stopping: bool = Field(False, description="Running trials finish, no other begins.")
    revision: int = Field(0, description="Grows with every change that people make.")
    archived_at: datetime | None = None


class NewExperimentOut(ExperimentOut):
    """An experiment as it was stored."""

    warnings: list[str] = Field([], description="Fields of the spec that have no effect, and why.")


class ExperimentUpdate(Out):
    """What a stream says of an experiment's progress."""

    id: int
    state: ExperimentState
    error: str | None
    progress: ExperimentProgress


class Selection(RootModel[dict[str, Any]]):
    """The parts of an answer that `fields` named."""


class SelectionPage(Out):
    """A page of which `fields` named some parts."""

    items: list[dict[str, Any]]
    next: str | None


class ExperimentPage(Out):
    """In the order asked for, newest first by default; `next` is the cursor of the next page."""

    items: list[ExperimentOut]
    next: str | None


def _with_numbers() -> Any:
    """A base of results: the protocol and, as columns are ordered, the catalogue's metrics."""
    fields: dict[str, Any] = {"selected_epoch": (int, Field(description="The epoch whose weights were evaluated."))}
    for name, info in METRICS.items():
        default = None if info.presence == "optional" else ...
        fields[name] = info.value_type, Field(default, description=info.in_schema or None)
    return create_model("_Numbers", __base__=Out, protocol=(str, ...), **in_column_order(fields))


_Numbers: Any = _with_numbers()


class ResultOut(_Numbers, Out):  # type: ignore[misc] # whose fields are the catalogue's
    """What a succeeded trial is worth on the test split, under the protocol named by its fingerprint."""

    valid: bool = Field(True, description="False: what it says cannot be true (`violations`), so it never ranks.")
    violations: list[str] | None = None


class TrialOut(Out):
    """One trial of the grid, with its result if it has one."""

    id: int
    experiment_id: int
    number: int
    fingerprint: str
    cell: str
    config: dict[str, Any]
    state: TrialState
    attempts: int
    epoch: int
    epochs: int
    failure: str | None
    error: str | None
    started_at: datetime | None
    finished_at: datetime | None
    run_seconds: float = Field(0, description="Of all attempts that ended.")
    best_val_accuracy: float | None = None
    source_trial_id: int | None = Field(None, description="It trains nothing and evaluates what this trial left.")
    result: ResultOut | None = None


class TrialPage(Out):
    """In the order asked for, the grid's by default; `next` is the cursor of the next page."""

    items: list[TrialOut]
    next: str | None


class EpochOut(Out):
    """One epoch. Losses are means over images, accuracies fractions; `ort_loss` is null without frames."""

    epoch: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    ort_loss: float | None
    lr: float
    seconds: float
    constraint_seconds: float


class MetricsPage(Out):
    """Epochs in their order. `next`: the epoch after which the next page begins; `sampled`: not all are there."""

    items: list[EpochOut]
    next: int | None
    sampled: bool


class SelectionMetrics(Out):
    """Epochs of which `fields` named some metrics."""

    items: list[dict[str, float | None]]
    next: int | None
    sampled: bool


class ArtifactOut(Out):
    """A file the trial left. `url` is where it is had; `name` is proposed for saving it."""

    id: int
    kind: str
    name: str
    media_type: str
    sha256: str
    size: int
    url: str

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

    items: list[ArtifactOut]


class ResultDetailOut(ResultOut):
    """A result with the protocol's record, what its evaluations recorded, and where it ran."""

    trial_id: int
    protocol_record: dict[str, Any]
    evaluation: dict[str, Any] | None
    environment: dict[str, Any]
    created_at: datetime


class SpectraOut(Out):
    """Singular values of a trial's layers; `max_singular_value` is the largest over all convolutions."""

    trial_id: int
    max_singular_value: float
    layers: list[dict[str, Any]]


class TrialDetailOut(TrialOut):
    """A trial with its epochs, its protocol, its layers' singular values and the files it left."""

    epoch_metrics: list[EpochOut]
    protocol: dict[str, Any] | None
    layers: list[dict[str, Any]] | None
    environment: dict[str, Any] | None
    artifacts: list[ArtifactOut]


class EventOut(Out):
    """Something that happened; `actor` is who did it: the name of a key's owner, or of a worker."""

    id: int
    experiment_id: int | None
    trial_id: int | None
    at: datetime
    actor: str
    kind: str
    detail: dict[str, Any]


class EventPage(Out):
    """In the order asked for, oldest first by default; `next` is `after` for the next page, null where there is none
    yet."""

    items: list[EventOut]
    next: int | None


class SelectionEvents(Out):
    """Events of which `fields` named some parts."""

    items: list[dict[str, Any]]
    next: int | None


class PresetOut(Out):
    """A table or figure of the paper that can be asked for by name."""

    name: str
    title: str


SHOWN = 1000
"""Trials that are listed; the totals are those of all."""


class DryTrialOut(Out):
    """A trial that would be made. What is null is not known: `reasons` says why."""

    number: int
    fingerprint: str
    cell: str
    config: dict[str, Any]
    parameters: int | None = Field(description="That are trained.")
    compression: float | None
    multiply_accumulates: int | None = Field(description="Of one image.")
    steps: int | None = Field(description="Of the optimizer, over all epochs.")
    seconds: float | None = Field(description="Of training, without evaluation.")
    basis: str | None = Field(description="How `seconds` came about.")
    reasons: list[str]


class DryTotals(Out):
    """Over all trials, one after another; null where one of them is not known."""

    steps: int | None
    seconds: float | None


class DryRunOut(Out):
    """What a spec would become. A search finds its trials only while it runs: it lists none."""

    grid_points: int
    trial_count: int
    totals: DryTotals
    warnings: list[str] = Field([], description="Fields of the spec that have no effect, and why.")
    trials: list[DryTrialOut] = Field(description=f"The first {SHOWN}.")
