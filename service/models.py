"""The tables."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Enum,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    TypeDecorator,
    UniqueConstraint,
    case,
    false,
    text,
    true,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from service.states import OPEN_EXPERIMENTS as OPEN_EXPERIMENTS
from service.states import OPEN_TRIALS as OPEN_TRIALS
from service.states import ExperimentState as ExperimentState
from service.states import TrialState as TrialState

Id = BigInteger().with_variant(Integer, "sqlite")  # only an INTEGER primary key counts up by itself in SQLite
Json = JSON(none_as_null=True)  # not JSONB, which forgets the order of keys: a grid's axes have one


class Timestamp(TypeDecorator[datetime]):
    """An instant in UTC; SQLite forgets the zone, so it is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuses a time without a zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Gives the zone back."""
        return value and (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC))


def now() -> datetime:
    """This instant, for display; nothing about leases depends on it."""
    return datetime.now(UTC)


def _states(states: type[StrEnum], name: str) -> Enum:
    values = lambda kind: [state.value for state in kind]  # noqa: E731
    return Enum(states, native_enum=False, length=16, values_callable=values, create_constraint=True, name=name)


class Base(DeclarativeBase):
    """Base of all tables; constraints have names, so that migrations can find them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - read by SQLAlchemy
        datetime: Timestamp,
        dict[str, Any]: Json,
        list[dict[str, Any]]: Json,
        list[str]: Json,
        ExperimentState: _states(ExperimentState, "state"),
        TrialState: _states(TrialState, "state"),
    }


class Project(Base):
    """A team: its keys share experiments and quotas. A quota that is null is none."""

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("name"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    max_queued_trials: Mapped[int | None]
    max_gpu_hours: Mapped[float | None]
    created_at: Mapped[datetime] = mapped_column(default=now)


class ApiKey(Base):
    """A key that opens the API: only a keyed hash of its secret is kept. `owner` is who uses it."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    project_id: Mapped[int] = mapped_column(Id, ForeignKey("projects.id", ondelete="CASCADE"), index=True)
    owner: Mapped[str] = mapped_column(String(100))
    secret_hash: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(default=now)
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class Experiment(Base):
    """A posted grid, and the lease under which a worker runs it.

    `fence` grows with every claim, reaping and cancelling and guards every write of a worker. `heartbeat` counts
    the lease's renewals; who watches it stand still may take the experiment over. `epochs_at_claim` were done
    when the last claim began: the pace since then tells the time left. `revision` grows with every change that
    people make (its ETag). `stopping`: running trials finish, no other begins. Without a project it was posted
    without a key.
    """

    __tablename__ = "experiments"
    __table_args__ = (
        Index("ix_experiments_state_priority_id", "state", "priority", "id"),
        Index("ix_experiments_project_id_id", "project_id", "id"),
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
    fence: Mapped[int] = mapped_column(default=0)
    heartbeat: Mapped[int] = mapped_column(default=0)
    fruitless_claims: Mapped[int] = mapped_column(default=0)
    worker: Mapped[str | None] = mapped_column(String(200))
    process: Mapped[dict[str, Any] | None]
    project_id: Mapped[int | None] = mapped_column(Id, ForeignKey("projects.id"))
    owner: Mapped[str | None] = mapped_column(String(100))
    revision: Mapped[int] = mapped_column(default=0, server_default="0")
    stopping: Mapped[bool] = mapped_column(default=False, server_default=false())
    archived_at: Mapped[datetime | None]


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

    `run_seconds` are those of all attempts that ended. With `source_trial_id` it trains nothing: it evaluates what that
    trial left.
    """

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint("experiment_id", "number"),
        UniqueConstraint("experiment_id", "fingerprint"),
        Index("ix_trials_experiment_id_state", "experiment_id", "state"),
        Index("ix_trials_dataset_cell", "dataset", "cell"),
        Index("ix_trials_dataset_state_cell", "dataset", "state", "cell"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    experiment_id: Mapped[int] = mapped_column(Id, ForeignKey("experiments.id", ondelete="CASCADE"))
    number: Mapped[int]
    fingerprint: Mapped[str] = mapped_column(String(64))
    cell: Mapped[str] = mapped_column(String(64))
    config: Mapped[dict[str, Any]]
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
    attempts: Mapped[int] = mapped_column(default=0)
    failure: Mapped[str | None] = mapped_column(String(32))
    error: Mapped[str | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    run_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")
    source_trial_id: Mapped[int | None] = mapped_column(Id, ForeignKey("trials.id"), index=True)


class Tally(Base):
    """An experiment's trials of one state, counted: triggers keep it up to date (`service.tally`), no code writes it.

    `epoch`, `epochs` and `run_seconds` are sums over these trials; the best accuracies those of any trial that ever was
    in this state, `best_accuracy` of valid results alone.
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


EPOCHS_DONE = case((Trial.state.in_(OPEN_TRIALS), Trial.epoch), else_=Trial.epochs)
"""Epochs of a trial that need not be run any more: of a final one all, whether it ran them or not."""


class EpochPoint(Base):
    """What one epoch of one trial gave (`ttsv.trial.EpochMetrics`)."""

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


class Protocol(Base):
    """How results were measured; results of different protocols are never ranked together."""

    __tablename__ = "protocols"

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    record: Mapped[dict[str, Any]]


class Result(Base):
    """What a succeeded trial is worth (`ttsv.trial.TrialResult`): at most one per trial.

    What the trial's `evaluation` did not ask for is null. A result with `violations` is no number to be shown: what it
    says cannot be true.
    """

    __tablename__ = "results"
    __table_args__ = (
        CheckConstraint("accuracy >= 0 AND accuracy <= 1", name="accuracy"),
        Index("ix_results_invalid", "trial_id", sqlite_where=text("valid = 0"), postgresql_where=text("NOT valid")),
    )

    trial_id: Mapped[int] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True)
    protocol: Mapped[str] = mapped_column(String(64), ForeignKey("protocols.fingerprint"), index=True)
    fence: Mapped[int]
    accuracy: Mapped[float]
    loss: Mapped[float]
    ece: Mapped[float]
    max_singular_value: Mapped[float]
    compression: Mapped[float]
    parameters: Mapped[int] = mapped_column(BigInteger)
    multiply_accumulates: Mapped[int] = mapped_column(BigInteger)
    train_seconds: Mapped[float]
    constraint_seconds: Mapped[float]
    step_seconds: Mapped[float]
    constraint_step_seconds: Mapped[float]
    eval_seconds: Mapped[float]
    spectrum_seconds: Mapped[float]
    latency_seconds: Mapped[float]
    batch_seconds: Mapped[float]
    peak_memory: Mapped[int | None] = mapped_column(BigInteger)
    selected_epoch: Mapped[int]
    top5_accuracy: Mapped[float | None]
    max_calibration_error: Mapped[float | None]
    adaptive_ece: Mapped[float | None]
    brier: Mapped[float | None]
    temperature: Mapped[float | None]
    scaled_ece: Mapped[float | None]
    scaled_loss: Mapped[float | None]
    robust_accuracy: Mapped[float | None]
    pgd_accuracy: Mapped[float | None]
    attack_seconds: Mapped[float | None]
    corruption_accuracy: Mapped[float | None]
    mce: Mapped[float | None]
    lipschitz_bound: Mapped[float | None]
    certified_36: Mapped[float | None]
    certified_72: Mapped[float | None]
    certified_108: Mapped[float | None]
    certified_255: Mapped[float | None]
    assumed_certified_36: Mapped[float | None]
    assumed_certified_72: Mapped[float | None]
    assumed_certified_108: Mapped[float | None]
    lipschitz_fgsm: Mapped[float | None]
    lipschitz_ascent: Mapped[float | None]
    merged_latency_seconds: Mapped[float | None]
    merged_batch_seconds: Mapped[float | None]
    valid: Mapped[bool] = mapped_column(default=True, server_default=true())
    violations: Mapped[list[str] | None]
    evaluation: Mapped[dict[str, Any] | None]
    layers: Mapped[list[dict[str, Any]]]
    environment: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class ScoreBoard(Base):
    """What is ranked together: one data set and protocol, within a scope: a project, or 0 for all trials there are."""

    __tablename__ = "score_boards"
    __table_args__ = (UniqueConstraint("scope", "dataset", "protocol"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    scope: Mapped[int] = mapped_column(Id)
    dataset: Mapped[str] = mapped_column(String(200))
    protocol: Mapped[str] = mapped_column(String(64), ForeignKey("protocols.fingerprint"))


class Score(Base):
    """One cell over its seeds on one board (`service.scores`): what leaderboards are read from.

    `metrics` are all its means and spreads (`service.measures`) over `seeds` results; `trial_id` is the newest
    trial among them, whose configuration is the cell's. The fields by which rows are filtered are kept here too.
    """

    __tablename__ = "scores"
    __table_args__ = (
        UniqueConstraint("cell", "board_id"),
        Index("ix_scores_filters", "board_id", "model", "layer", "constraint", "rank", "seeds"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    board_id: Mapped[int] = mapped_column(Id, ForeignKey("score_boards.id", ondelete="CASCADE"))
    cell: Mapped[str] = mapped_column(String(64))
    trial_id: Mapped[int] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"), index=True)
    model: Mapped[str] = mapped_column(String(200))
    layer: Mapped[str] = mapped_column(String(32))
    constraint: Mapped[str] = mapped_column(String(32))
    rank: Mapped[float | None]
    seeds: Mapped[int]
    metrics: Mapped[dict[str, Any]]


class ScoreRank(Base):
    """The means of `Score.metrics` in an order that an index can walk: a board's first rows are read, no others."""

    __tablename__ = "score_ranks"
    __table_args__ = (
        Index("ix_score_ranks_order", "board_id", "metric", "mean", "score_id"),
        {"sqlite_with_rowid": False},
    )

    score_id: Mapped[int] = mapped_column(Id, ForeignKey("scores.id", ondelete="CASCADE"), primary_key=True)
    metric: Mapped[str] = mapped_column(String(40), primary_key=True)
    board_id: Mapped[int] = mapped_column(Id)
    mean: Mapped[float]


class Artifact(Base):
    """The manifest of one file a trial left: only files listed here exist. `path` is relative to the data folder."""

    __tablename__ = "artifacts"
    __table_args__ = (UniqueConstraint("trial_id", "kind"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    trial_id: Mapped[int] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(64))
    path: Mapped[str]
    sha256: Mapped[str] = mapped_column(String(64))
    size: Mapped[int] = mapped_column(BigInteger)


class IdempotencyKey(Base):
    """A POST that was answered: the same key and body get the same answer again."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    body_sha256: Mapped[str] = mapped_column(String(64))
    response: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Webhook(Base):
    """An address that is told of events (`service.webhooks`): those numbered up to `after` are settled.

    `endpoint` is the SHA-256 of its URL, which may hold a secret.
    """

    __tablename__ = "webhooks"

    endpoint: Mapped[str] = mapped_column(String(64), primary_key=True)
    after: Mapped[int] = mapped_column(BigInteger)


class WebhookDelivery(Base):
    """An event that an address is told of, due at `due_at`; null: it was delivered, or given up."""

    __tablename__ = "webhook_deliveries"

    endpoint: Mapped[str] = mapped_column(
        String(64), ForeignKey("webhooks.endpoint", ondelete="CASCADE"), primary_key=True
    )
    event_id: Mapped[int] = mapped_column(
        Id, ForeignKey("events.id", ondelete="CASCADE"), primary_key=True, autoincrement=False, index=True
    )
    attempts: Mapped[int] = mapped_column(default=0)
    due_at: Mapped[datetime | None]


class Worker(Base):
    """A worker and when it was last heard of, for readiness and for people."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    cpus: Mapped[float]
    gpus: Mapped[float]
    started_at: Mapped[datetime] = mapped_column(default=now)
    seen_at: Mapped[datetime] = mapped_column(default=now)
