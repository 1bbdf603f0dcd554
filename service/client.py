"""A typed client of the API: what `ttsv` and notebooks use."""

import random
import time
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2 as httpx
from pydantic import BaseModel

from service.models import OPEN_EXPERIMENTS
from service.schemas import (
    ExperimentOut,
    ExperimentPage,
    LeaderboardOut,
    Problem,
    Readiness,
    TrialDetailOut,
    TrialOut,
    TrialPage,
)

_Answer = TypeVar("_Answer", bound=BaseModel)


class ApiError(RuntimeError):
    """The API refused a request; `problem` is its document."""

    def __init__(self, problem: Problem) -> None:
        lines = [f"{problem.status} {problem.title}: {problem.detail}"]
        if len(problem.errors) > 1:
            lines += [f"  {error.field}: {error.message}" for error in problem.errors]
        super().__init__("\n".join(lines))
        self.problem = problem


class Client:
    """Talks to one service. Requests that were not answered are sent again: each is safe to repeat.

    `retries` is how often; a connection error or a 503 counts as not answered. Use as a context manager.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", *, retries: int = 4, timeout: float = 30) -> None:
        self.url = url.rstrip("/")
        self.retries = retries
        self._http = httpx.Client(base_url=self.url, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def submit(self, spec: dict[str, Any], *, idempotency_key: str | None = None) -> ExperimentOut:
        """Posts an experiment; sent again after a lost answer it is still stored once."""
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        return self._ask(ExperimentOut, "POST", "/v1/experiments", json=spec, headers=headers)

    def submit_preset(
        self, name: str, *, scale: str = "full", protocol: str = "code", idempotency_key: str | None = None
    ) -> ExperimentOut:
        """Posts one of the paper's tables or figures by its name."""
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        params = {"scale": scale, "protocol": protocol}
        return self._ask(ExperimentOut, "POST", f"/v1/presets/{name}", params=params, headers=headers)

    def experiment(self, experiment_id: int) -> ExperimentOut:
        """One experiment with its progress."""
        return self._ask(ExperimentOut, "GET", f"/v1/experiments/{experiment_id}")

    def experiments(self, *, state: str | None = None) -> Iterator[ExperimentOut]:
        """All experiments, newest first; pages are fetched as they are needed."""
        for page in self._pages(ExperimentPage, "/v1/experiments", state=state):
            yield from page.items

    def trials(self, experiment_id: int, *, state: str | None = None) -> Iterator[TrialOut]:
        """An experiment's trials in the grid's order; pages are fetched as they are needed."""
        for page in self._pages(TrialPage, f"/v1/experiments/{experiment_id}/trials", state=state, limit="1000"):
            yield from page.items

    def trial(self, trial_id: int) -> TrialDetailOut:
        """One trial with its epochs, protocol and layers."""
        return self._ask(TrialDetailOut, "GET", f"/v1/trials/{trial_id}")

    def cancel(self, experiment_id: int) -> ExperimentOut:
        """Cancels what is not final."""
        return self._ask(ExperimentOut, "POST", f"/v1/experiments/{experiment_id}/cancel")

    def leaderboard(
        self, dataset: str, *, metric: str = "accuracy", experiment_id: int | None = None
    ) -> LeaderboardOut:
        """The leaderboards of a data set, one per protocol."""
        params = {"metric": metric} | ({"experiment": str(experiment_id)} if experiment_id is not None else {})
        return self._ask(LeaderboardOut, "GET", f"/v1/leaderboards/{dataset}", params=params)

    def ready(self) -> Readiness:
        """Whether the service is ready, and when a worker was last heard of."""
        return self._ask(Readiness, "GET", "/readyz")

    def watch(self, experiment_id: int, *, every: float = 1.0) -> Iterator[ExperimentOut]:
        """The experiment again and again until it is final; the last one given is."""
        while True:
            experiment = self.experiment(experiment_id)
            yield experiment
            if experiment.state not in OPEN_EXPERIMENTS:
                return
            time.sleep(every)

    def _pages(self, kind: type[_Answer], path: str, **params: str | None) -> Iterator[_Answer]:
        query = {name: value for name, value in params.items() if value is not None}
        while True:
            page = self._ask(kind, "GET", path, params=query)
            yield page
            cursor: str | None = getattr(page, "next")  # noqa: B009 - every page has it
            if cursor is None:
                return
            query["cursor"] = cursor

    def _ask(self, kind: type[_Answer], method: str, path: str, **request: Any) -> _Answer:
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            try:
                response = self._http.request(method, path, **request)
            except httpx.TransportError as error:
                if last:
                    problem = Problem(
                        title="No answer",
                        status=503,
                        detail=f"{self.url} does not answer ({error}); is `ttsv serve` up?",
                    )
                    raise ApiError(problem) from error
            else:
                if response.is_success:
                    return kind.model_validate_json(response.content)
                if response.status_code != 503 or last:
                    raise ApiError(_problem(response))
            time.sleep(random.uniform(0.1, 0.3) * 2**attempt)
        raise AssertionError("unreachable")


def _problem(response: httpx.Response) -> Problem:
    try:
        return Problem.model_validate_json(response.content)
    except ValueError:  # a proxy's page, or /readyz saying what is not ready
        return Problem(title=response.reason_phrase, status=response.status_code, detail=response.text[:500])
