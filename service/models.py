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
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class ExperimentState(StrEnum):
    """`succeeded`: every trial did. `failed`: all trials are final and some did not succeed."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TrialState(StrEnum):
    """`diverged` is apart from `failed`: the same seed would diverge again."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    DIVERGED = "diverged"
    CANCELLED = "cancelled"


OPEN_TRIALS = (TrialState.QUEUED, TrialState.RUNNING)
OPEN_EXPERIMENTS = (ExperimentState.QUEUED, ExperimentState.RUNNING)

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
        ExperimentState: _states(ExperimentState, "state"),
        TrialState: _states(TrialState, "state"),
    }


class Experiment(Base):
    """A posted grid, and the lease under which a worker runs it.

    `fence` grows with every claim, reaping and cancelling and guards every write of a worker. `heartbeat` counts
    the lease's renewals; who watches it stand still may take the experiment over. `epochs_at_claim` were done
    when the last claim began: the pace since then tells the time left.
    """

    __tablename__ = "experiments"
    __table_args__ = (
        Index("ix_experiments_state_priority_id", "state", "priority", "id"),
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


class Trial(Base):
    """One cell and seed of a grid. The headline fields of `config` stand in columns of their own."""

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint("experiment_id", "number"),
        UniqueConstraint("experiment_id", "fingerprint"),
        Index("ix_trials_experiment_id_state", "experiment_id", "state"),
        Index("ix_trials_dataset_cell", "dataset", "cell"),
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
    """What a succeeded trial is worth (`ttsv.trial.TrialResult`): at most one per trial."""

    __tablename__ = "results"
    __table_args__ = (CheckConstraint("accuracy >= 0 AND accuracy <= 1", name="accuracy"),)

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
    layers: Mapped[list[dict[str, Any]]]
    environment: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)


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


class Worker(Base):
    """A worker and when it was last heard of, for readiness and for people."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    cpus: Mapped[float]
    gpus: Mapped[float]
    started_at: Mapped[datetime] = mapped_column(default=now)
    seen_at: Mapped[datetime] = mapped_column(default=now)
