"""What the service says of itself: what is wrong with a request, and whether it is up."""

from datetime import datetime

from pydantic import Field

from service.schemas import Out


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
