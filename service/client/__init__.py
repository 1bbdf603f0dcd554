"""A typed client of the API, blocking (`Client`) or by asyncio (`AsyncClient`): what `ttsv` and notebooks use."""

from service.client.asynchronous import AsyncClient
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
from service.client.sync import Client

__all__ = [
    "ApiError",
    "AsyncClient",
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
