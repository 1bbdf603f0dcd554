"""Projects and the keys of those who may use them."""

from datetime import datetime

from sqlalchemy import ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from service.database.base import Base, Id
from service.database.clock import now


class Project(Base):
    """A team: its keys share experiments and quotas. A quota that is null is none.

    `weight`: twice as much is twice the share of the cluster where others want it, too. `deleted_gpu_hours` were used
    by experiments that are deleted: a quota counts them still.
    """

    __tablename__ = "projects"
    __table_args__ = (UniqueConstraint("name"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    max_queued_trials: Mapped[int | None]
    max_gpu_hours: Mapped[float | None]
    weight: Mapped[float] = mapped_column(default=1.0, server_default="1")
    deleted_gpu_hours: Mapped[float] = mapped_column(default=0.0, server_default="0")
    created_at: Mapped[datetime] = mapped_column(default=now)


class Person(Base):
    """What an owner of a project's keys weighs beside its others; without a row it is 1."""

    __tablename__ = "people"

    project_id: Mapped[int] = mapped_column(Id, ForeignKey("projects.id", ondelete="CASCADE"), primary_key=True)
    owner: Mapped[str] = mapped_column(String(100), primary_key=True)
    weight: Mapped[float]


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
