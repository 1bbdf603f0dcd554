"""Where the service is, and when a request is sent again."""

import os
import random

import httpx2 as httpx

from service.client.errors import UnreachableError, no_answer, refusal

DEFAULT_URL = "http://127.0.0.1:8000"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_UNANSWERED = (200, 206, 502, 503, 504)
"""Statuses after which a request is sent again; of a success the end was missing."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Line:
    """Where the service is, with which key it is asked, and how patiently.

    Without `url` and `key` those of the environment (`TTSV_URL`, `TTSV_KEY`) are taken.
    """

    def __init__(self, url: str | None, key: str | None, retries: int, timeout: float) -> None:
        self.url = (url or os.environ.get("TTSV_URL") or DEFAULT_URL).rstrip("/")
        self.retries = retries
        key = key or os.environ.get("TTSV_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Loading trusted certificates takes longer than most requests: not where there is nothing to verify.
        verify = not self.url.startswith("http://")
        self.options = {"base_url": self.url, "timeout": timeout, "headers": headers, "verify": verify}
        # The service says something every quarter of a minute, whatever happens.
        self.streaming = httpx.Timeout(timeout, read=max(60.0, timeout))

    def pause_after(
        self, outcome: httpx.Response | httpx.TransportError, attempt: int, *, repeatable: bool = True
    ) -> float:
        """How long to wait before the request is sent again. Raises `ApiError` where it is not.

        What is not repeatable is sent again only if it never left.
        """
        if isinstance(outcome, httpx.TransportError):
            if attempt >= self.retries or not (repeatable or isinstance(outcome, _NEVER_SENT)):
                raise self.no_answer(outcome) from outcome
            return pause(attempt)
        if outcome.status_code not in _UNANSWERED or attempt >= self.retries or not repeatable or _lasts(outcome):
            raise refusal(outcome)
        return max(pause(attempt), _retry_after(outcome))

    def no_answer(self, error: Exception) -> UnreachableError:
        """The error where nobody answers."""
        return no_answer(self.url, error)


def pause(attempt: int) -> float:
    """Grows with every attempt, and differs between clients: they do not come back all at once."""
    return float(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.5))


def _lasts(response: httpx.Response) -> bool:
    """Whether the service itself cannot serve until somebody mends it: else it says when to come again."""
    kind = response.headers.get("Content-Type", "")
    return (
        response.status_code == 503
        and kind.startswith("application/problem+json")
        and "Retry-After" not in response.headers
    )


def _retry_after(response: httpx.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return min(float(value), _LONGEST_PAUSE) if value.isdecimal() else 0.0
