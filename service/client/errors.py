"""What a client raises: one class for each thing a caller may want to do about it."""

import json

import httpx2 as httpx

from service.schemas.service import Problem, ProblemField
from service.specs.documents import DocumentError


class ApiError(RuntimeError):
    """The API refused a request; `problem` is its document."""

    def __init__(self, problem: Problem) -> None:
        lines = [f"{problem.status} {problem.title}: {problem.detail}"]
        if len(problem.errors) > 1:
            lines += [f"  {error.field}: {error.message}" for error in problem.errors]
        super().__init__("\n".join(lines))
        self.problem = problem


class InvalidError(ApiError):
    """What was sent is wrong; `problem.errors` names every field (400, 413, 415, 422)."""


class KeyRefusedError(ApiError):
    """No key was sent, or none that is valid (401)."""


class ForbiddenError(ApiError):
    """The key does not allow this (403)."""


class MissingError(ApiError):
    """There is no such thing, or not any more (404, 410)."""


class ConflictError(ApiError):
    """The state of the experiment does not allow this, or a name is taken (409)."""


class ChangedError(ApiError):
    """Somebody changed it meanwhile: it is not at the `revision` that was named (412)."""


class QuotaError(ApiError):
    """The project may not have more of what was asked for (429)."""


class UnreachableError(ApiError):
    """Nobody answers, or the service cannot now (502, 503, 504), however often it was asked."""


class DamagedError(RuntimeError):
    """What was downloaded is not what the service said it would be."""


_CLASSES: dict[int, type[ApiError]] = {
    **dict.fromkeys((400, 413, 415, 422), InvalidError),
    401: KeyRefusedError,
    403: ForbiddenError,
    **dict.fromkeys((404, 410), MissingError),
    409: ConflictError,
    412: ChangedError,
    429: QuotaError,
    **dict.fromkeys((502, 503, 504), UnreachableError),
}


def refusal(response: httpx.Response) -> ApiError:
    """The error that an answer is; its body must have been read."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValueError:  # a proxy's page, or /readyz saying what is not ready
        problem = Problem(title=response.reason_phrase, status=response.status_code, detail=_shown(response))
    return _CLASSES.get(problem.status, ApiError)(problem)


def unsendable(error: DocumentError) -> InvalidError:
    """The error where what is to be sent cannot be said in JSON: the one that the API would answer with."""
    blamed = error.problem
    fields = [ProblemField(field=blamed.field or "body", message=blamed.message)] if blamed else []
    return InvalidError(Problem(title="Bad Request", status=400, detail=str(error), errors=fields))


def no_answer(url: str, error: Exception) -> UnreachableError:
    """The error where no answer came."""
    detail = f"{url} does not answer ({error or type(error).__name__}); is `ttsv serve` up?"
    return UnreachableError(Problem(title="No answer", status=503, detail=detail))


def not_understood(url: str, error: Exception) -> UnreachableError:
    """The error where what came is no answer of this service."""
    why = str(error).partition("\n")[0]
    detail = f"{url} answers, but not as this service does ({why}); does the address name it, and in this version?"
    return UnreachableError(Problem(title="No answer", status=502, detail=detail))


def _shown(response: httpx.Response) -> str:
    """What an answer says that is no problem document."""
    try:
        checks = json.loads(response.content)["checks"]
        return "; ".join(f"{name}: {state}" for name, state in checks.items() if state != "ok")
    except (ValueError, KeyError, TypeError, AttributeError):
        return response.text[:500]
