"""What the worker of an experiment writes of its trials: only while it holds the experiment's row under its fence.

A transaction's unit of work is `with hold(session, lease) as held`: it begins by locking that row, `held` has the
writes, and at its end the scores of the cells that they touched are made anew. A stale worker writes nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypedDict

from sqlalchemy import Select, bindparam, func, inspect, select
from sqlalchemy.orm import Session, defer

from service.database import (
    OUT_OF_MEMORY,
    Artifact,
    EpochPoint,
    EpochSpectra,
    Event,
    Experiment,
    ExperimentState,
    Protocol,
    Result,
    Trial,
    TrialState,
    now,
    tallies,
)
from service.database.engine import is_among, is_postgres
from service.database.experiments import ResourceSeries, StoredSpectra
from service.database.rows import Rows, Way, write_rows
from service.experiments import epoch_points, epoch_spectra, events, transitions
from service.experiments.events import EventKind
from service.experiments.submission import next_number, trial_columns
from service.leaderboards import cell_scores, field_index
from service.queue import attempts, leases, rests
from service.queue.leases import Lease
from service.specs.planner import PlannedTrial
from ttsv.config.fields import FieldValues
from ttsv.results import EpochMetrics

MAX_DEATHS = 10
"""So often in a row the trial's own process may die without getting on, where all around it lives: then it failed.

Not fewer: whoever kills processes at random, as a machine short of memory does, meets the same trial again and again.
"""

ALONE = "alone after out of memory on a shared card"
"""Why such a trial waits for a whole card, or has one."""


_CHANGING = (
    *("id", "state", "turn", "epoch", "best_val_accuracy", "attempts", "deaths", "node", "failure", "error"),
    *("started_at", "finished_at", "run_seconds", "rests_until", "rest_seconds"),
)
"""The columns of a trial that workers write."""


@cache
def _trials(*, postgres: bool) -> Select[Trial]:
    return (
        select(Trial)
        .where(Trial.experiment_id == bindparam("of_experiment"), is_among(Trial.id, "trials", postgres=postgres))
        .options(defer(Trial.config))
        .execution_options(populate_existing=True)
    )


@dataclass(frozen=True)
class ArtifactFile:
    """A file that is on disk already, to be entered into the manifest."""

    kind: str
    path: str
    sha256: str
    size: int


@dataclass(frozen=True)
class ProtocolRecord:
    """How a result was measured, and the fingerprint of that."""

    fingerprint: str
    record: Mapping[str, object]


class _NewSpectra(TypedDict):
    """A row of `EpochSpectra` that is to be written."""

    trial_id: int
    epoch: int
    layers: StoredSpectra


class HeldExperiment:
    """A running experiment whose row one transaction has locked under a lease's fence (`hold`), and its trials.

    Nobody else may write these trials meanwhile, so each is read once, and what becomes of them is written together.
    Trials of other experiments, and those in another state than a write expects, stay as they are. `touched` are the
    cells (data set, cell) whose results changed. Every method raises `LeaseLostError` where the transaction itself has
    given the experiment away since.
    """

    def __init__(self, session: Session, lease: Lease) -> None:
        self._session, self._lease = session, lease
        self._locked = leases.lock(session, lease)
        self._over = False
        self.moment: datetime | None = None
        """When what is written next became of a trial; by default now. The database may have been away since."""
        self._trials: dict[int, Trial] = {}
        self._progressed_at: datetime | None = None
        self._points: dict[tuple[int, int], dict[str, float | None]] = {}
        self._spectra: dict[tuple[int, int], _NewSpectra] = {}
        self._protocols: dict[str, Mapping[str, object]] = {}
        self._results: list[Mapping[str, object]] = []
        self._artifacts: list[Mapping[str, object]] = []
        self._events: list[Mapping[str, object]] = []
        self.touched: set[tuple[str, str]] = set()
        self.grew = False
        """Whether those cells that were touched have other trials now."""

    @property
    def experiment(self) -> Experiment:
        """Its row, for as long as the lease holds and the block lasts."""
        if self._over:
            raise RuntimeError("the unit of work is over: what is written now would not be scored")
        # Since it was locked nobody but this transaction can have changed it.
        if self._locked.fence != self._lease.fence or self._locked.state is not ExperimentState.RUNNING:
            raise leases.lost(self._lease)
        return self._locked

    def read_trials(self, trial_ids: Iterable[int]) -> None:
        """Reads those trials in one statement that were not read yet; writes read theirs one by one."""
        experiment_id = self.experiment.id
        if missing := [trial_id for trial_id in trial_ids if trial_id not in self._trials]:
            query = _trials(postgres=is_postgres(self._session))
            for trial in self._session.scalars(query, {"of_experiment": experiment_id, "trials": missing}).all():
                self._session.expunge(trial)  # which would write each by itself
                self._trials[trial.id] = trial

    def add_trial(self, planned: PlannedTrial, point: FieldValues | None = None) -> int:
        """The id of a searcher's trial: queued after the last one, or there already with this fingerprint.

        A new one's event has the `point` that the search tries: where the trial's canonical configuration says nothing
        of a value that has no effect, the event does. In an experiment that is stopping it is cancelled from the start.
        """
        experiment = self.experiment
        known = select(Trial.id).where(Trial.experiment_id == experiment.id, Trial.fingerprint == planned.fingerprint)
        if (trial_id := self._session.scalar(known)) is not None:
            return trial_id
        number = next_number(self._session, experiment.id)
        columns = trial_columns(planned)
        trial = Trial(experiment_id=experiment.id, number=number, **columns)
        if experiment.stopping:
            trial.state, trial.finished_at = TrialState.CANCELLED, now()
        self._session.add(trial)
        experiment.trial_count += 1
        self.touched.add((trial.dataset, trial.cell))
        self.grew = True
        self._session.flush()
        field_index.enter(self._session, [{"trial_id": trial.id, "experiment_id": experiment.id, **columns}])
        if point is not None:
            self._tell(EventKind.TRIAL_SUGGESTED, trial, point=point)
        return trial.id

    def end_search(self) -> None:
        """No trial will be added any more: of the search's space there is no other point than those that were tried."""
        self.experiment.grid_points = self.experiment.trial_count

    def start_trial(self, trial_id: int, at: datetime | None = None, later: Collection[datetime] = ()) -> bool:
        """Marks a queued trial as running and counts the attempt that began at that moment; whether it may run.

        Said again (a lost reply to COMMIT) it changes nothing, though the attempt's end may be stored by then, and
        attempts that began `later`. A trial that is final, as it was cancelled meanwhile, may not run.
        """
        trial = self._trial(trial_id, TrialState.QUEUED)
        if trial is None:
            return self._trial(trial_id, TrialState.RUNNING) is not None
        if trial.started_at is None or trial.started_at not in (at, *later):
            trial.state, trial.started_at, trial.node = TrialState.RUNNING, at or now(), None
            trial.rests_until = None
            trial.attempts += 1
        return True

    def place_trial(
        self,
        trial_id: int,
        node: str,
        environment: Mapping[str, object] | None = None,
        *,
        began: datetime | None = None,
    ) -> None:
        """Says where the trial runs, and with what; `began` as in `lose_trial`."""
        if trial := self._attempt(trial_id, began):
            trial.node = node[: attempts.MOST_PLACE]
            attempts.begin(self._session, trial, self._lease.fence, node, environment)

    def record_resources(self, trial_id: int, resources: ResourceSeries, *, began: datetime | None = None) -> None:
        """Stores what the trial's process has used of its machine until now; `began` as in `lose_trial`."""
        if trial := self._attempt(trial_id, began):
            attempts.record_resources(self._session, trial, resources)

    def progress(self, trial_id: int, *, began: datetime | None = None) -> None:
        """The trial got on within its evaluation: what its process died of before does not count.

        `began` as in `lose_trial`.
        """
        if trial := self._attempt(trial_id, began):
            trial.deaths, trial.rest_seconds = 0, 0.0
            self._got_on()

    def add_epoch(self, trial_id: int, metrics: EpochMetrics) -> None:
        """Stores one epoch's metrics; the same epoch again replaces them.

        Only an epoch that the trial never reached before is progress.
        """
        trial = self._trial(trial_id, TrialState.RUNNING)
        if trial is None:
            return
        accuracy, best = metrics.val_accuracy, trial.best_val_accuracy
        if metrics.epoch <= trial.epoch:  # trained again, on a GPU maybe to another accuracy
            best = self._best_of_others(trial_id, metrics.epoch)
        trial.best_val_accuracy = accuracy if best is None else max(accuracy, best)
        if metrics.epoch > trial.epoch:
            trial.epoch, trial.deaths, trial.rest_seconds = metrics.epoch, 0, 0.0
            self._got_on()
        point = {column: getattr(metrics, column) for column in epoch_points.METRICS}
        self._points[trial_id, metrics.epoch] = {"trial_id": trial_id, "epoch": metrics.epoch, **point}
        if metrics.spectra:
            layers = epoch_spectra.stored(metrics.spectra)
            self._spectra[trial_id, metrics.epoch] = {"trial_id": trial_id, "epoch": metrics.epoch, "layers": layers}

    def _best_of_others(self, trial_id: int, epoch: int) -> float | None:
        """The best validation accuracy of a trial's other epochs, stored or about to be."""
        told = {number: point["val_accuracy"] for (trial, number), point in self._points.items() if trial == trial_id}
        stored = select(func.max(EpochPoint.val_accuracy)).where(
            EpochPoint.trial_id == trial_id, EpochPoint.epoch.not_in([*told, epoch])
        )
        found = [self._session.scalar(stored), *(value for number, value in told.items() if number != epoch)]
        return max((value for value in found if value is not None), default=None)

    def finish_trial(
        self,
        trial_id: int,
        result: Mapping[str, object],
        protocol: ProtocolRecord,
        artifacts: Sequence[ArtifactFile] = (),
    ) -> None:
        """Stores the result, its protocol, the manifest and the final state together.

        Again for a trial that succeeded already (a lost reply to COMMIT) it changes nothing.
        """
        trial = self._trial(trial_id, TrialState.RUNNING)
        if trial is None:
            return
        self._end(trial, TrialState.SUCCEEDED)
        trial.failure = trial.error = None
        self._protocols[protocol.fingerprint] = vars(protocol)
        keys = {"trial_id": trial_id, "protocol": protocol.fingerprint, "fence": self._lease.fence}
        self._results.append({**keys, "created_at": now(), **result})
        self._artifacts += [{"trial_id": trial_id, **vars(file)} for file in artifacts]
        self._got_on()
        self.touched.add((trial.dataset, trial.cell))
        self._tell(EventKind.TRIAL_FINISHED, trial)

    def early_stop_trial(self, trial_id: int) -> None:
        """Ends a trial that its scheduler found worse than its siblings: it keeps its epochs and has no result."""
        if trial := self._trial(trial_id, TrialState.RUNNING):
            self._end(trial, TrialState.EARLY_STOPPED)
            trial.failure = trial.error = None
            self._got_on()
            self._tell(EventKind.TRIAL_EARLY_STOPPED, trial, epoch=trial.epoch)

    def fail_trial(self, trial_id: int, failure: str, error: str) -> None:
        """Ends a trial for a reason that would come again: `failure` is its class, `error` says what to do."""
        if trial := self._trial(trial_id, TrialState.RUNNING):
            self._end(trial, TrialState.DIVERGED if failure == "diverged" else TrialState.FAILED)
            trial.failure, trial.error = failure, _storable(error)
            self._got_on()
            self._tell(EventKind.TRIAL_FAILED, trial, failure=failure)

    def lose_trial(
        self,
        trial_id: int,
        error: str,
        *,
        charged: bool = True,
        longest_rest: float = 0.0,
        began: datetime | None = None,
    ) -> None:
        """The trial's process died: it is queued again, and may have to rest, for so many seconds at most.

        `charged`: alone, on a node that lives; the trial fails when it died so `MAX_DEATHS` times without getting on.
        `began`: the attempt that this is about, if it is known; said again once the next one runs it changes nothing.
        """
        trial = self._attempt(trial_id, began)
        if trial is None:
            return
        error = _storable(error)
        self._tell(EventKind.TRIAL_LOST, trial)
        trial.deaths += charged
        if trial.deaths < MAX_DEATHS:
            transitions.requeue_trial(trial, charged=charged, ended_at=self.moment)
            seconds = rests.put_to_rest(trial, charged=charged, longest=longest_rest)
            trial.error = f"{error}; after that it rests for {seconds:.0f} s" if seconds else error
        else:
            self._end(trial, TrialState.FAILED)
            trial.failure = "crashed"
            trial.error = (
                f"the trial's process died {trial.deaths} times in a row without getting on; the last time: {error}"
            )
            self._tell(EventKind.TRIAL_FAILED, trial, failure=trial.failure)

    def crowd_trial(self, trial_id: int, error: str, *, began: datetime | None = None) -> None:
        """The trial found too little memory on a card that it shared: it is queued again, to run alone, and once.

        Nothing is held against it: what was missing others may have had. `began` as in `lose_trial`.
        """
        trial = self._attempt(trial_id, began)
        if trial is None:
            return
        if trial.alone:
            self.fail_trial(trial_id, OUT_OF_MEMORY, error)
            return
        self._tell(EventKind.TRIAL_CROWDED, trial)
        transitions.requeue_trial(trial, charged=False, ended_at=self.moment)
        trial.failure, trial.error = OUT_OF_MEMORY, _storable(f"{ALONE}: {error}")

    def yield_trial(self, trial_id: int, *, began: datetime | None = None) -> None:
        """The trial gives way to others, and goes on later; `began` as in `lose_trial`."""
        if trial := self._attempt(trial_id, began):
            transitions.requeue_trial(trial, charged=False, ended_at=self.moment)
            self._tell(EventKind.TRIAL_YIELDED, trial)

    def _write(self) -> None:
        """Writes what changed."""
        experiment_id = self.experiment.id
        changed = [trial for trial in self._trials.values() if inspect(trial).modified]
        progressed = [{"id": experiment_id, "progressed_at": self._progressed_at}]
        write_rows(
            self._session.connection(),
            Rows(Experiment, progressed if self._progressed_at else (), Way.CHANGE),
            Rows(Trial, [{name: getattr(trial, name) for name in _CHANGING} for trial in changed], Way.CHANGE),
            Rows(EpochPoint, [*self._points.values()], Way.REPLACE),
            Rows(EpochSpectra, [*self._spectra.values()], Way.REPLACE),
            Rows(Protocol, [self._protocols[key] for key in sorted(self._protocols)], Way.ADD_MISSING),
            Rows(Result, self._results),
            Rows(Artifact, self._artifacts),
            Rows(Event, self._events),
        )
        tallies.lower_bests(self._session, experiment_id, [best for trial in changed for best in _fallen_best(trial)])

    def _trial(self, trial_id: int, expected: TrialState) -> Trial | None:
        """The trial if it belongs to the experiment and is in the expected state."""
        self.read_trials([trial_id])
        trial = self._trials.get(trial_id)
        return trial if trial is not None and trial.state is expected else None

    def _attempt(self, trial_id: int, began: datetime | None) -> Trial | None:
        """The trial if it runs, and runs the attempt that began then."""
        trial = self._trial(trial_id, TrialState.RUNNING)
        return trial if trial is not None and began in (None, trial.started_at) else None

    def _got_on(self) -> None:
        """More is done than before."""
        self._progressed_at = now()

    def _end(self, trial: Trial, state: TrialState) -> None:
        at = self.moment or now()
        trial.state, trial.finished_at = state, at if trial.started_at is None else max(at, trial.started_at)
        transitions.end_attempt(trial, trial.finished_at)

    def _tell(self, kind: EventKind, trial: Trial, **detail: Any) -> None:
        self._events.append(events.of_trial(kind, leases.actor(self.experiment), trial, **detail))


@contextmanager
def hold(session: Session, lease: Lease) -> Iterator[HeldExperiment]:
    """Locks the lease's experiment until the transaction ends; at the block's end all is written, and scores follow.

    Raises `LeaseLostError`, also at the end of a block that itself gave the experiment away: then nothing is written.
    """
    held = HeldExperiment(session, lease)
    try:
        yield held
        held._write()
    finally:
        held._over = True
    if held.touched:
        cell_scores.refresh_cells(session, held.touched, counted=not held.grew)


def _fallen_best(trial: Trial) -> Iterator[float]:
    """The best validation accuracy that is stored of the trial, if it fell since."""
    for stored in inspect(trial).attrs.best_val_accuracy.history.deleted or ():
        if stored is not None and trial.best_val_accuracy is not None and trial.best_val_accuracy < stored:
            yield stored


def _storable(text: str) -> str:
    """Without what PostgreSQL or UTF-8 cannot hold: NUL, and the halves that stand for a file name's odd bytes."""
    return text.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()
