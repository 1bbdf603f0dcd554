"""What the API says of projects and keys."""

from datetime import datetime

from service.schemas import Out
from service.security import Scope


class ProjectOut(Out):
    """A team with what it has used."""

    id: int
    name: str
    max_queued_trials: int | None
    max_gpu_hours: float | None
    created_at: datetime
    open_trials: int
    gpu_hours: float


class KeyOut(Out):
    """A key without its secret."""

    id: str
    project_id: int
    owner: str
    scopes: list[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class NewKeyOut(KeyOut):
    """A key that was just made: `key` is shown this once."""

    key: str


class MeOut(Out):
    """Who the key belongs to, and what it allows. `project_id` null: all projects."""

    name: str
    project_id: int | None
    scopes: list[Scope]
