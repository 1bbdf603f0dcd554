"""What keeps the service going: answered requests, webhooks, workers, and where they keep files."""

from datetime import datetime

from pydantic import JsonValue
from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from service.database.base import Base, Id
from service.database.clock import now
from service.specs.states import NodeState


class IdempotencyKey(Base):
    """A POST that was answered: the same key and body get the same answer again."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    body_sha256: Mapped[str] = mapped_column(String(64))
    response: Mapped[dict[str, JsonValue]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class Webhook(Base):
    """An address that is told of events (`service.experiments.webhooks`): those numbered up to `after` are settled.

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
    """A worker and when it was last heard of, for readiness and for people.

    `bf16`: whether the processor of its trials has instructions for bf16; null: not known.
    """

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    cpus: Mapped[float]
    gpus: Mapped[float]
    bf16: Mapped[bool | None]
    started_at: Mapped[datetime] = mapped_column(default=now)
    seen_at: Mapped[datetime] = mapped_column(default=now)


class Home(Base):
    """The place that keeps the files of trials: the word in its marker (`service.storage.marker`), and its name.

    One row, or none: then no API has noted it yet.
    """

    __tablename__ = "homes"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    mark: Mapped[str] = mapped_column(String(64))
    place: Mapped[str] = mapped_column(String(4096))


class ClusterNode(Base):
    """A node of a worker's cluster, or a machine that it refused (`service.queue.cluster`), and when it was there.

    `machine` is what it says of itself, null until it did.
    """

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(String(100), primary_key=True)
    worker: Mapped[str] = mapped_column(String(200), index=True)
    host: Mapped[str] = mapped_column(String(255))
    address: Mapped[str] = mapped_column(String(100))
    head: Mapped[bool]
    state: Mapped[NodeState]
    cpus: Mapped[float]
    gpus: Mapped[float]
    memory_gib: Mapped[float]
    machine: Mapped[dict[str, JsonValue] | None]
    problem: Mapped[str | None]
    joined_at: Mapped[datetime] = mapped_column(default=now)
    seen_at: Mapped[datetime] = mapped_column(default=now)
    left_at: Mapped[datetime | None]
