"""The client: one method per operation of the API."""

from collections.abc import Callable, Iterator
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
from service.client.wire import BlockingWire, iterate, run
from service.schemas.experiments import ArtifactOut, EventOut, ExperimentOut, ExperimentUpdate

if TYPE_CHECKING:
    import pandas as pd

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Does(Generic[_P, _T]):
    """A method that makes a request of its arguments and has the client's session carry it out."""

    def __init__(self, make: Callable[_P, Any], carry_out: Callable[[Session, Any], _T]) -> None:
        self._make, self._carry_out = make, carry_out

    def __get__(self, client: "Client | None", owner: type) -> Callable[_P, _T]:
        def method(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            assert client is not None, "a method of an object, not of its class"
            return self._carry_out(client.session, self._make(*args, **kwargs))

        return update_wrapper(method, self._make)


def _one(make: Callable[_P, Call[_T]]) -> _Does[_P, _T]:
    return _Does(make, lambda session, call: run(session.send(call)))


def _many(make: Callable[_P, Paged[_T]]) -> _Does[_P, Iterator[_T]]:
    return _Does(make, lambda session, paged: iterate(session.pages(paged)))


def _text(make: Callable[_P, Text]) -> _Does[_P, Iterator[str]]:
    return _Does(make, lambda session, text: iterate(session.text(text)))


class Client:
    """Talks to one service. Requests that were not answered are sent again: each is safe to repeat.

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
        self._wire = BlockingWire(**line.options)
        self.session = Session(line, self._wire)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._wire.http.close()

    @covers("streamExperiment")
    def follow(
        self, experiment_id: int, *, after: int = 0, events: bool = True
    ) -> Iterator[ExperimentUpdate | EventOut]:
        """An experiment's progress whenever it changes and, with `events`, each event past number `after` once.

        Ends when the experiment is final. A stream that breaks is taken up where it was, `retries` times in a row.
        """
        return iterate(self.session.follow(experiment_id, after, events))

    def watch(self, experiment_id: int, *, every: float = 1.0) -> Iterator[ExperimentOut]:
        """The experiment whenever it changes, until it is final; the last one given is.

        By server-sent events; where these do not come through it is asked for `every` so many seconds.
        """
        return iterate(self.session.watch(experiment_id, every))

    @covers("getArtifact")
    def download(self, artifact: ArtifactOut, target: str | Path) -> Path:
        """Fetches a file of a trial into a file or folder, and checks its SHA-256; the path where it is.

        A download that broke off, in an earlier call too, goes on where it was. Raises `DamagedError`.
        """
        return run(self.session.download(artifact, target))

    def results(
        self, experiment_id: int | None = None, *, dataset: str | None = None, state: str | None = None
    ) -> "pd.DataFrame":
        """One row per trial of an experiment, or of a data set over all experiments, indexed by the trial's id.

        Columns: its state, its configuration by dotted path (`training.lr`) and every metric of its result, NaN where
        it has none.
        """
        return run(self.session.results(experiment_id, dataset, state))

    def metrics(self, trial_id: int) -> "pd.DataFrame":
        """One row per epoch of a trial, indexed by its number."""
        return run(self.session.metrics(trial_id))
