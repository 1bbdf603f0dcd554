"""What can be wrong with a request, in terms of the experiment model; `service.api` gives it HTTP form."""

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


class QueryError(SpecError):
    """A question that has no answer: a field, an order or a cursor that does not exist."""


class NotFoundError(LookupError):
    """No such experiment, trial, data set or preset."""


class GoneError(LookupError):
    """What is asked for was there and is not any more, or is not what it was."""


class StorageAwayError(RuntimeError):
    """The store of trials' files does not answer."""


class ConflictError(ValueError):
    """A name that is taken: `field` says which field's."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class QuotaError(RuntimeError):
    """The project may not have more of what was asked for; the message says of what, and what to do.

    `retry_after`: seconds after which it is worth asking again.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KeyRefusedError(PermissionError):
    """No key, or none that is valid."""


class SecretMissingError(RuntimeError):
    """The secret under which valid keys are hashed is not there: a key under another one would part from them."""


class ScopeError(PermissionError):
    """A valid key that does not allow this."""


class StateError(RuntimeError):
    """The experiment's state does not allow the action; the message says what it is and what would."""


class PreconditionError(RuntimeError):
    """If-Match named another revision: somebody changed it meanwhile."""


class IdempotencyError(ValueError):
    """The Idempotency-Key was used before with another body."""


class LeaseLostError(RuntimeError):
    """The experiment is no longer this worker's: cancelled, or claimed anew. Stop quietly, write nothing."""


class UserError(RuntimeError):
    """Something the person at the terminal can mend; the message says how."""
