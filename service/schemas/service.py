"""What the service says of itself: what is wrong with a request, whether it is up, its projects and keys."""

from datetime import datetime

from pydantic import Field

from service.access.security import Scope
from service.schemas.experiments import Out


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
    errors: list[ProblemField] = Field([])
    request_id: str | None = Field(None, description="Under which the service's log has the request.")


class Liveness(Out):
    """The process answers."""

    status: str


class Readiness(Out):
    """Whether requests can be served: every check says `ok` or what is wrong. `workers` is for people."""

    status: str
    checks: dict[str, str]
    worker_seen_at: datetime | None


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
