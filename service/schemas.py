"""What goes out of the API; `service.grid.ExperimentSpec` is what comes in."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.models import ExperimentState, TrialState


class Out(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class ExperimentProgress(Out):
    """How far an experiment is. `trials` counts them by state; `seconds_left` extrapolates the pace."""

    trials: dict[TrialState, int]
    epochs_done: int
    epochs: int
    best_accuracy: float | None = Field(description="Best test accuracy of a finished trial.")
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


class ExperimentPage(Out):
    """Newest first; `next` is the cursor of the next page."""

    items: list[ExperimentOut]
    next: str | None


class ResultOut(Out):
    """What a succeeded trial is worth on the test split, under the protocol named by its fingerprint."""

    protocol: str
    accuracy: float
    loss: float
    ece: float
    max_singular_value: float = Field(description="Over all convolutions, of the periodic operator.")
    compression: float
    parameters: int
    multiply_accumulates: int = Field(description="Of one image.")
    train_seconds: float
    constraint_seconds: float
    step_seconds: float = Field(description="Mean time of an optimizer step, without the first epoch of several.")
    constraint_step_seconds: float = Field(description="The part of it that the constraint takes.")
    eval_seconds: float
    spectrum_seconds: float = Field(description="Of the exact singular values of all convolutions.")
    latency_seconds: float = Field(description="Inference of one image.")
    batch_seconds: float = Field(description="Inference of 128 images.")
    peak_memory: int | None = Field(description="Of the GPU, in bytes; null on a CPU.")
    selected_epoch: int = Field(description="The epoch whose weights were evaluated.")


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
    result: ResultOut | None = None


class TrialPage(Out):
    """In the grid's order; `next` is the cursor of the next page."""

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


class ArtifactOut(Out):
    """A file the trial left."""

    kind: str
    sha256: str
    size: int


class TrialDetailOut(TrialOut):
    """A trial with its epochs, its protocol, its layers' singular values and the files it left."""

    epoch_metrics: list[EpochOut]
    protocol: dict[str, Any] | None
    layers: list[dict[str, Any]] | None
    environment: dict[str, Any] | None
    artifacts: list[ArtifactOut]


class SpreadOut(Out):
    """One metric over seeds; `std` is the sample standard deviation (n - 1), null for one seed."""

    mean: float
    std: float | None
    min: float
    max: float


class RowOut(Out):
    """One cell of a grid: `seeds` of its `trials` have results."""

    place: int
    cell: str
    config: dict[str, Any]
    trials: int
    seeds: int
    complete: bool
    metrics: dict[str, SpreadOut]


class BoardOut(Out):
    """Rows of one protocol: only these are ranked together."""

    protocol: str
    record: dict[str, Any]
    rows: list[RowOut]


class HoleOut(Out):
    """A cell that has no result yet."""

    cell: str
    config: dict[str, Any]
    trials: int


class LeaderboardOut(Out):
    """Leaderboards of a data set, one per protocol, and the cells without a result."""

    dataset: str
    metric: str
    boards: list[BoardOut]
    holes: list[HoleOut]


class PresetOut(Out):
    """A table or figure of the paper that can be asked for by name."""

    name: str
    title: str


class ProblemField(Out):
    """One field that is wrong, and what would be right."""

    field: str
    message: str


class Problem(Out):
    """An error as RFC 9457 (`application/problem+json`) has it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: list[ProblemField] = []


class Liveness(Out):
    """The process answers."""

    status: str


class Readiness(Out):
    """Whether requests can be served: every check says `ok` or what is wrong. `workers` is for people."""

    status: str
    checks: dict[str, str]
    worker_seen_at: datetime | None
