"""What can be wrong with a request, in terms of the experiment model; `service.api.problems` gives it HTTP form."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldProblem:
    """One field of a request (`grid.rank[1]`) and what would be right."""

    field: str
    message: str


class SpecError(ValueError):
    """A spec that cannot be run. `problems` names every field found wrong."""

    def __init__(self, problems: list[FieldProblem]) -> None:
        super().__init__("; ".join(f"{p.field}: {p.message}" for p in problems))
        self.problems = problems


class NotFoundError(LookupError):
    """No such experiment, trial, data set or preset."""


class IdempotencyError(ValueError):
    """The Idempotency-Key was used before with another body."""


class LeaseLostError(RuntimeError):
    """The experiment is no longer this worker's: cancelled, or claimed anew. Stop quietly, write nothing."""


class UserError(RuntimeError):
    """Something the person at the terminal can mend; the message says how."""
