"""A typed client of the API: what `ttsv` and notebooks use.

Schemas, specs and what they rest on may be imported, no other room of the service: it knows the API by HTTP alone.
"""

from service.client.access import Access
from service.client.boards import Boards
from service.client.errors import (
    ApiError,
    ChangedError,
    ConflictError,
    DamagedError,
    ForbiddenError,
    InvalidError,
    KeyRefusedError,
    MissingError,
    QuotaError,
    UnreachableError,
)
from service.client.experiments import Experiments
from service.client.trials import Trials

__all__ = [
    "ApiError",
    "ChangedError",
    "Client",
    "ConflictError",
    "DamagedError",
    "ForbiddenError",
    "InvalidError",
    "KeyRefusedError",
    "MissingError",
    "QuotaError",
    "UnreachableError",
]


class Client(Experiments, Trials, Boards, Access):
    """Talks to one service. Requests that were not answered are sent again: each is safe to repeat.

    `url` and `key` are by default those of `TTSV_URL` and `TTSV_KEY`. `retries` is how often a request is sent again
    where no connection, no answer, or a 502, 503 or 504 came; `timeout` is in seconds. Use as a context manager.
    Methods raise `ApiError`.
    """
