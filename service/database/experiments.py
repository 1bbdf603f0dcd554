"""Experiments, their trials, and what happened to them."""

from datetime import datetime
from typing import Any, NotRequired, TypedDict

from pydantic import JsonValue
from sqlalchemy import BigInteger, ForeignKey, Index, String, UniqueConstraint, case, false, text
from sqlalchemy.orm import Mapped, mapped_column

from service.database.base import Base, Id, Json
from service.database.clock import now
from service.specs.states import OPEN_TRIALS, ExperimentState, TrialState
from ttsv.config.fields import FieldValues, TrialFields

OUT_OF_MEMORY = "oom"
"""Class of a failure."""


class ProcessIdentity(TypedDict):
    """What tells a process from all others on its host (`boot`: its running kernel, `pids`: its namespace of pids).

    `start` is in ticks since boot.
    """

    boot: str
    pids: int
    pid: int
    start: int


class Experiment(Base):
    """A posted grid, and the lease under which a worker runs it.

    `fence` grows with every claim, reaping and cancelling and guards every write of a worker. `heartbeat` counts
    the lease's renewals; who watches it stand still may take the experiment over. `epochs_at_claim` were done
    when the last claim began, others by `progressed_at`: their pace tells the time left. `revision` grows with
    every change that people make (its ETag). `stopping`: running trials finish, no other begins. `waiting` is why
    its trials cannot run now, `unfit_since` when it was first seen that they fit no node. Without a project it was
    posted without a key. Since `deleted_at` it is as good as gone: its files are removed, then its rows.
    """

    __tablename__ = "experiments"
    __table_args__ = (
        Index("ix_experiments_state_priority_id", "state", "priority", "id"),
        Index("ix_experiments_project_id_id", "project_id", "id"),
        Index(
            "ix_experiments_deleted_at",
            "deleted_at",
            sqlite_where=text("deleted_at IS NOT NULL"),
            postgresql_where=text("deleted_at IS NOT NULL"),
        ),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    spec: Mapped[dict[str, Any]]
    state: Mapped[ExperimentState] = mapped_column(default=ExperimentState.QUEUED)
    error: Mapped[str | None]
    priority: Mapped[int] = mapped_column(default=0)
    grid_points: Mapped[int]
    trial_count: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(default=now)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    claimed_at: Mapped[datetime | None]
    epochs_at_claim: Mapped[int] = mapped_column(default=0)
    progressed_at: Mapped[datetime | None]
    fence: Mapped[int] = mapped_column(default=0)
    heartbeat: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None] = mapped_column(String(200))
    process: Mapped[ProcessIdentity | None] = mapped_column(Json)
    project_id: Mapped[int | None] = mapped_column(Id, ForeignKey("projects.id"))
    owner: Mapped[str | None] = mapped_column(String(100))
    revision: Mapped[int] = mapped_column(default=0, server_default="0")
    stopping: Mapped[bool] = mapped_column(default=False, server_default=false())
    archived_at: Mapped[datetime | None]
    waiting: Mapped[str | None]
    unfit_since: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]


Index(
    "ix_experiments_queue",
    Experiment.state,
    Experiment.project_id,
    Experiment.owner,
    Experiment.priority.desc(),
    Experiment.id,
)


class Tag(Base):
    """A word by which experiments are found."""

    __tablename__ = "tags"
    __table_args__ = (Index("ix_tags_name", "name"),)

    experiment_id: Mapped[int] = mapped_column(Id, ForeignKey("experiments.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)


class Event(Base):
    """What happened to an experiment or a trial, and who did it: a person's key, or a worker."""

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_experiment_id_id", "experiment_id", "id"),
        Index("ix_events_kind", "kind"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    experiment_id: Mapped[int | None] = mapped_column(Id, ForeignKey("experiments.id", ondelete="CASCADE"))
    trial_id: Mapped[int | None] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"), index=True)
    at: Mapped[datetime] = mapped_column(default=now)
    actor: Mapped[str] = mapped_column(String(200))
    kind: Mapped[str] = mapped_column(String(32))
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Trial(Base):
    """One cell and seed of a grid. The headline fields of `config` stand in columns of their own.

    Queued trials run in the order of `turn`, then of `number`; below zero are those that began before. `attempts`
    counts starts, without those that ended for no fault of the trial's; `deaths` its process's since it last got on,
    for which it may have to rest: until `rests_until` it cannot begin, and `rest_seconds` is its latest rest since
    then; `node` is where it runs or ran. `run_seconds` are those of all attempts that ended. With `source_trial_id` it
    trains nothing: it evaluates what that trial left. `failure` is the class of what ended it; one that is not final
    has it where it is to run `alone`.
    """

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint("experiment_id", "number"),
        UniqueConstraint("experiment_id", "fingerprint"),
        Index("ix_trials_queue", "experiment_id", "state", "turn", "number"),
        Index("ix_trials_dataset_cell", "dataset", "cell"),
        Index("ix_trials_dataset_state_cell", "dataset", "state", "cell"),
        Index(
            "ix_trials_running",
            *("experiment_id", "id", "node", "failure", "started_at"),
            sqlite_where=text("state = 'running'"),
            postgresql_where=text("state = 'running'"),
        ),
        Index(
            "ix_trials_rests_until",
            "rests_until",
            sqlite_where=text("rests_until IS NOT NULL"),
            postgresql_where=text("rests_until IS NOT NULL"),
        ),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    experiment_id: Mapped[int] = mapped_column(Id, ForeignKey("experiments.id", ondelete="CASCADE"))
    number: Mapped[int]
    fingerprint: Mapped[str] = mapped_column(String(64))
    cell: Mapped[str] = mapped_column(String(64))
    config: Mapped[TrialFields] = mapped_column(Json)
    dataset: Mapped[str] = mapped_column(String(200))
    model: Mapped[str] = mapped_column(String(200))
    layer: Mapped[str] = mapped_column(String(32))
    rank: Mapped[float | None]
    lambda_ort: Mapped[float]
    constraint: Mapped[str] = mapped_column(String(32))
    delta: Mapped[float | None]
    seed: Mapped[int] = mapped_column(BigInteger)
    epochs: Mapped[int]
    epoch: Mapped[int] = mapped_column(default=0)
    best_val_accuracy: Mapped[float | None]
    state: Mapped[TrialState] = mapped_column(default=TrialState.QUEUED)
    turn: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    attempts: Mapped[int] = mapped_column(default=0)
    deaths: Mapped[int] = mapped_column(default=0, server_default="0")
    rests_until: Mapped[datetime | None]
    rest_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")
    node: Mapped[str | None] = mapped_column(String(200))
    failure: Mapped[str | None] = mapped_column(String(32))
    error: Mapped[str | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    run_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")
    source_trial_id: Mapped[int | None] = mapped_column(Id, ForeignKey("trials.id"), index=True)

    @property
    def alone(self) -> bool:
        """Whether it is to have a card of its own: it found too little memory on one that it shared."""
        return self.state in OPEN_TRIALS and self.failure == OUT_OF_MEMORY


class FieldIndex(Base):
    """A trial's fields alone: what lists of trials are filtered and sorted by (`service.leaderboards.field_index`).

    A trial's own row is ten times as long. What has no column stands in `fields` by path, as in `Score`.
    """

    __tablename__ = "field_index"

    trial_id: Mapped[int] = mapped_column(
        Id, ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    experiment_id: Mapped[int] = mapped_column(Id, index=True)
    dataset: Mapped[str] = mapped_column(String(200))
    model: Mapped[str] = mapped_column(String(200))
    layer: Mapped[str] = mapped_column(String(32))
    rank: Mapped[float | None]
    lambda_ort: Mapped[float]
    constraint: Mapped[str] = mapped_column(String(32))
    delta: Mapped[float | None]
    seed: Mapped[int] = mapped_column(BigInteger)
    fields: Mapped[FieldValues] = mapped_column(Json)


class Tally(Base):
    """An experiment's trials of one state, counted: triggers keep it up to date (`tallies`).

    `epoch`, `epochs` and `run_seconds` are sums over these trials; the best accuracies those of any trial that ever was
    in this state and still has it, `best_accuracy` of valid results alone.
    """

    __tablename__ = "tallies"

    experiment_id: Mapped[int] = mapped_column(
        Id, ForeignKey("experiments.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    state: Mapped[TrialState] = mapped_column(primary_key=True)
    trials: Mapped[int]
    epoch: Mapped[int] = mapped_column(BigInteger)
    epochs: Mapped[int] = mapped_column(BigInteger)
    run_seconds: Mapped[float]
    best_val_accuracy: Mapped[float | None]
    best_accuracy: Mapped[float | None]


EPOCHS_DONE = case((Tally.state.in_(OPEN_TRIALS), Tally.epoch), else_=Tally.epochs)
"""Epochs of counted trials that need not be run any more: of final ones all, whether they ran them or not."""


class EpochPoint(Base):
    """What one epoch of one trial gave (`ttsv.results.EpochMetrics`)."""

    __tablename__ = "epoch_points"

    trial_id: Mapped[int] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    train_loss: Mapped[float]
    train_accuracy: Mapped[float]
    val_loss: Mapped[float]
    val_accuracy: Mapped[float]
    ort_loss: Mapped[float | None]
    lr: Mapped[float]
    seconds: Mapped[float]
    constraint_seconds: Mapped[float]


class StoredSpectra(TypedDict):
    """Layers' quantiles by column: `names`, and for each those of `ttsv.results.LayerSpectrum`."""

    names: list[str]
    values: list[list[float]]
    before: list[list[float] | None]


class EpochSpectra(Base):
    """What singular values the layers had in an epoch, where the trial asks for that (`training.spectra_every`)."""

    __tablename__ = "epoch_spectra"

    trial_id: Mapped[int] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    layers: Mapped[StoredSpectra] = mapped_column(Json)


class Environment(Base):
    """Where trials ran and with what (`ttsv.runtime.provenance`): what many attempts share, by its SHA-256."""

    __tablename__ = "environments"

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    record: Mapped[dict[str, JsonValue]]


class Pace(TypedDict):
    """When an attempt had `reported` when this was written, in seconds since it began, and its longest pause by then.

    The driver says it, as it is the one that kills an attempt that reports no more.
    """

    reported: float
    longest_pause: float


class ResourceSeries(TypedDict):
    """What an attempt's process used, a value in every column for each moment at which it was looked at.

    `interval` are the seconds between two of them, `seconds` those since the attempt began. None: it was not known, or
    there is no GPU. `pace` comes with it, so that no report is written for itself.
    """

    interval: float
    seconds: list[float]
    cpu: list[float | None]
    memory: list[float | None]
    gpu: list[float | None]
    gpu_memory: list[float | None]
    pace: NotRequired[Pace]


class Attempt(Base):
    """One start of a trial in a process: those that ended for no fault of the trial's are counted here, too.

    `place` is the host, and which of its GPUs; `resources` is what the process used over time
    (`service.queue.attempts`).
    """

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("trial_id", "started_at"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    trial_id: Mapped[int] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"))
    number: Mapped[int]
    fence: Mapped[int]
    started_at: Mapped[datetime]
    place: Mapped[str] = mapped_column(String(200))
    environment: Mapped[str | None] = mapped_column(String(64), ForeignKey("environments.fingerprint"), index=True)
    resources: Mapped[ResourceSeries | None] = mapped_column(Json)


class Artifact(Base):
    """The manifest of one file a trial left: only files listed here exist. `path` is relative to the data folder.

    Since `removed_at` it is as good as gone: retention removes it, or has done so.
    """

    __tablename__ = "artifacts"
    __table_args__ = (UniqueConstraint("trial_id", "kind"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    trial_id: Mapped[int] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(64))
    path: Mapped[str]
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)
    removed_at: Mapped[datetime | None]
