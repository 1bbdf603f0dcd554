"""The client for asyncio: one method per operation of the API."""

from collections.abc import AsyncIterator, Callable, Coroutine
from functools import update_wrapper
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from service.client import access as on_access
from service.client import boards as on_boards
from service.client import experiments as on_experiments
from service.client import trials as on_trials
from service.client.calls import Call, Paged, Text, covers
from service.client.sending import Line
from service.client.session import Session
from service.client.wire import AsyncWire
from service.schemas.experiments import ArtifactOut, EventOut, ExperimentOut, ExperimentUpdate

if TYPE_CHECKING:
    import pandas as pd

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Does(Generic[_P, _T]):
    """A method that makes a request of its arguments and has the client's session carry it out."""

    def __init__(self, make: Callable[_P, Any], carry_out: Callable[[Session, Any], _T]) -> None:
        self._make, self._carry_out = make, carry_out

    def __get__(self, client: "AsyncClient | None", owner: type) -> Callable[_P, _T]:
        def method(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            assert client is not None, "a method of an object, not of its class"
            return self._carry_out(client.session, self._make(*args, **kwargs))

        return update_wrapper(method, self._make)


def _one(make: Callable[_P, Call[_T]]) -> _Does[_P, Coroutine[Any, Any, _T]]:
    return _Does(make, lambda session, call: session.send(call))


def _many(make: Callable[_P, Paged[_T]]) -> _Does[_P, AsyncIterator[_T]]:
    return _Does(make, lambda session, paged: session.pages(paged))


def _text(make: Callable[_P, Text]) -> _Does[_P, AsyncIterator[str]]:
    return _Does(make, lambda session, text: session.text(text))


class AsyncClient:
    """Talks to one service by asyncio, as `Client` does without.

    Requests that were not answered are sent again: each is safe to repeat. Lists are asynchronous iterators.

    `url` and `key` are by default those of `TTSV_URL` and `TTSV_KEY`. `retries` is how often a request is sent again
    where no connection, no answer, or a 502, 503 or 504 came. Use as a context manager. Methods raise `ApiError`.
    """

    submit = _one(on_experiments.submit)
    dry_run = _one(on_experiments.dry_run)
    submit_preset = _one(on_experiments.submit_preset)
    dry_run_preset = _one(on_experiments.dry_run_preset)
    experiment = _one(on_experiments.experiment)
    experiments = _many(on_experiments.experiments)
    pause = _one(on_experiments.pause)
    resume = _one(on_experiments.resume)
    stop = _one(on_experiments.stop)
    cancel = _one(on_experiments.cancel)
    archive = _one(on_experiments.archive)
    unarchive = _one(on_experiments.unarchive)
    retry = _one(on_experiments.retry)
    extend = _one(on_experiments.extend)
    clone = _one(on_experiments.clone)
    reevaluate = _one(on_experiments.reevaluate)
    update = _one(on_experiments.update)
    events = _many(on_experiments.events)
    trials = _many(on_trials.trials)
    trial = _one(on_trials.trial)
    result = _one(on_trials.result)
    spectra = _one(on_trials.spectra)
    epochs = _many(on_trials.epochs)
    artifacts = _one(on_trials.artifacts)
    trial_log = _one(on_trials.trial_log)
    experiment_log = _one(on_trials.experiment_log)
    follow_trial_log = _text(on_trials.follow_trial_log)
    follow_experiment_log = _text(on_trials.follow_experiment_log)
    leaderboard = _one(on_boards.leaderboard)
    leaderboard_text = _one(on_boards.leaderboard_text)
    board_rows = _many(on_boards.board_rows)
    table = _one(on_boards.table)
    table_text = _one(on_boards.table_text)
    presets = _one(on_boards.presets)
    preset = _one(on_boards.preset)
    me = _one(on_access.me)
    projects = _one(on_access.projects)
    create_project = _one(on_access.create_project)
    update_project = _one(on_access.update_project)
    keys = _one(on_access.keys)
    create_key = _one(on_access.create_key)
    revoke_key = _one(on_access.revoke_key)
    alive = _one(on_access.alive)
    ready = _one(on_access.ready)
    service_metrics = _one(on_access.service_metrics)

    def __init__(
        self, url: str | None = None, *, key: str | None = None, retries: int = 4, timeout: float = 30
    ) -> None:
        line = Line(url, key, retries, timeout)
        self.url = line.url
        self._wire = AsyncWire(**line.options)
        self.session = Session(line, self._wire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._wire.http.aclose()

    @covers("streamExperiment")
    def follow(
        self, experiment_id: int, *, after: int = 0, events: bool = True
    ) -> AsyncIterator[ExperimentUpdate | EventOut]:
        """An experiment's progress whenever it changes and, with `events`, each event past number `after` once.

        Ends when the experiment is final. A stream that breaks is taken up where it was, `retries` times in a row.
        """
        return self.session.follow(experiment_id, after, events)

    def watch(self, experiment_id: int, *, every: float = 1.0) -> AsyncIterator[ExperimentOut]:
        """The experiment whenever it changes, until it is final; the last one given is.

        By server-sent events; where these do not come through it is asked for `every` so many seconds.
        """
        return self.session.watch(experiment_id, every)

    @covers("getArtifact")
    async def download(self, artifact: ArtifactOut, target: str | Path) -> Path:
        """Fetches a file of a trial into a file or folder, and checks its SHA-256; the path where it is.

        A download that broke off, in an earlier call too, goes on where it was. Raises `DamagedError`.
        """
        return await self.session.download(artifact, target)

    async def results(
        self, experiment_id: int | None = None, *, dataset: str | None = None, state: str | None = None
    ) -> "pd.DataFrame":
        """One row per trial of an experiment, or of a data set over all experiments, indexed by the trial's id.

        Columns: its state, its configuration by dotted path (`training.lr`) and every metric of its result, NaN where
        it has none.
        """
        return await self.session.results(experiment_id, dataset, state)

    async def metrics(self, trial_id: int) -> "pd.DataFrame":
        """One row per epoch of a trial, indexed by its number."""
        return await self.session.metrics(trial_id)
