"""The only writer of results: what trials report, into the database, under the lease's fence."""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy.orm import Session

from service.database import Result, now
from service.database.engine import Database
from service.database.outages import MOST_FAILURES, Backoff, broken_connection, is_away, is_in_trouble
from service.errors import LeaseLostError
from service.queue.leases import Lease
from service.queue.rests import LONGEST_OF_HINDERED
from service.queue.trials import ArtifactFile, HeldExperiment, ProtocolRecord, hold
from ttsv.results import deciding, protocol_fingerprint
from ttsv.runtime.faults import fault
from workers.trial_process.messages import (
    CrowdedReport,
    EpochReport,
    FailureReport,
    HinderedReport,
    Report,
    ResourceReport,
    ResultReport,
    StageReport,
    StartedReport,
)

logger = logging.getLogger(__name__)

_BATCH = 500
_TICK = timedelta(microseconds=1)
_NOT_OF_THE_TRIAL = {"infrastructure", "bad_data"}
"""Classes of failures, of the machine or of a data set, upon which a retry goes on from the last checkpoint."""
_NOT_SAID = {"trial_id", "protocol", "fence", "created_at"}
_RESULT_COLUMNS = tuple(column.key for column in Result.__table__.columns if column.key not in _NOT_SAID)
"""What the trial says itself: `TrialResult` has the same names."""


@dataclass(frozen=True)
class _Event:
    trial_id: int
    write: Callable[[HeldExperiment], None]
    at: datetime
    final: bool = False
    settles: bool = False


class Recorder:
    """Takes reports without waiting and writes them from a thread of its own, what has queued up in one transaction.

    While the database is away reports are kept and tried again: every write changes nothing the second time. When
    the lease is lost `lost` is called and nothing is written any more. So too when the database fails for good: what
    was not written goes with the lease, and whoever claims next runs those trials on from their checkpoints.
    `ended` is called with each trial whose final report is stored, but for failures of the machine, `settled` with
    those too, and with those that are to be tried again,
    `refused` with each that began although it is final: it was cancelled meanwhile.
    """

    def __init__(
        self,
        database: Database,
        lease: Lease,
        lost: Callable[[], None],
        ended: Callable[[int], None] = lambda _trial_id: None,
        refused: Callable[[int], None] = lambda _trial_id: None,
        settled: Callable[[int], None] = lambda _trial_id: None,
    ) -> None:
        self._database, self._lease = database, lease
        self._lost, self._ended, self._refused, self._settled = lost, ended, refused, settled
        self._events: deque[_Event] = deque()
        self._moments: defaultdict[int, list[datetime]] = defaultdict(list)
        self._at_work: set[int] = set()
        self._used_until: dict[int, float] = {}
        """Up to which second of the attempt at work its use of resources was told."""
        self._changed = threading.Condition()
        self._muted = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def open(self) -> None:
        """Starts the writer."""
        self._thread.start()

    def started(self, trial_id: int) -> None:
        """A process began to work on the trial."""
        # Its moment tells the attempt from others, whenever and however often this is written.
        moments = self._moments[trial_id]
        if trial_id not in self._at_work:
            moments.append(max(now(), moments[-1] + _TICK) if moments else now())
            self._at_work.add(trial_id)
            self._used_until.pop(trial_id, None)
        place = len(moments)
        self._put(trial_id, lambda held: self._start(held, trial_id, moments[place - 1], moments[place:]))

    def reported(self, trial_id: int, report: Report, *, at: datetime | None = None) -> None:
        """The trial's process says something, or said it `at` some moment: that is when it ends if this is its end."""
        began = self._began(trial_id)
        match report:
            case EpochReport():
                self._put(trial_id, lambda held: _add_epochs(held, trial_id, report))
            case ResultReport():
                self._put(trial_id, lambda held: _finish(held, trial_id, report), final=True, at=at)
            case FailureReport(failure, message):
                final = failure not in _NOT_OF_THE_TRIAL
                fail = partial(HeldExperiment.fail_trial, trial_id=trial_id, failure=failure, error=message)
                self._put(trial_id, fail, final=final, settles=True, at=at)
            case CrowdedReport(message):
                self._put(trial_id, lambda held: held.crowd_trial(trial_id, message, began=began), settles=True)
            case HinderedReport(message):
                self._put(
                    trial_id,
                    lambda held: held.lose_trial(
                        trial_id, message, charged=False, longest_rest=LONGEST_OF_HINDERED, began=began
                    ),
                    settles=True,
                    at=at,
                )
            case StartedReport():
                place, environment = report.place, report.environment
                self._put(trial_id, lambda held: held.place_trial(trial_id, place, environment, began=began))
            case ResourceReport(series):
                if self._goes_back(trial_id, max(series["seconds"], default=0.0)):
                    return  # a sign may hold less than a later report has told already
                self._put(trial_id, lambda held: held.record_resources(trial_id, series, began=began))
            case StageReport(further=True):
                self._put(trial_id, lambda held: held.progress(trial_id, began=began))
            case StageReport():
                pass  # an earlier attempt was there, and died

    def stopped_early(self, trial_id: int, report: EpochReport) -> None:
        """The trial's scheduler stopped it upon these epochs.

        They are stored together: a driver that finds the epochs compares the trial there no more.
        """
        self._put(trial_id, lambda held: _stop(held, trial_id, report), final=True)

    def died(
        self,
        trial_id: int,
        reason: str,
        *,
        charged: bool = True,
        longest_rest: float = 0.0,
        at: datetime | None = None,
    ) -> None:
        """The trial's process died, perhaps before it could begin; `charged`: on a node that lives.

        `longest_rest`: so long at most it may have to rest for that. `at`: when that was, if not now.
        """
        self.started(trial_id)
        began = self._began(trial_id)
        self._put(
            trial_id,
            lambda held: held.lose_trial(trial_id, reason, charged=charged, longest_rest=longest_rest, began=began),
            settles=True,
            at=at,
        )

    def gave_way(self, trial_id: int) -> None:
        """The trial's process was ended for others."""
        began = self._began(trial_id)
        self._put(trial_id, lambda held: held.yield_trial(trial_id, began=began), settles=True)

    def forget(self, trial_id: int) -> None:
        """Nothing is at work on the trial, though nobody said so: what begins next is another attempt."""
        self._at_work.discard(trial_id)

    def mute(self) -> None:
        """Takes no more reports; what was taken is still written."""
        with self._changed:
            self._muted = True

    def flush(self, seconds: float | None = None) -> bool:
        """Waits until all is written, at most so long; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._events, seconds)

    def _began(self, trial_id: int) -> datetime | None:
        """When the attempt that is at work began."""
        return self._moments[trial_id][-1] if trial_id in self._at_work else None

    def _start(self, held: HeldExperiment, trial_id: int, began: datetime, later: Sequence[datetime]) -> None:
        if not held.start_trial(trial_id, began, later):
            self._refused(trial_id)

    def _goes_back(self, trial_id: int, until: float) -> bool:
        """Whether a series of what the attempt uses ends before one that was told.

        One that ends with it comes with a newer pace: after a day the process looks every nine minutes at what it uses.
        """
        if until < self._used_until.get(trial_id, 0.0):
            return True
        self._used_until[trial_id] = until
        return False

    def _put(
        self,
        trial_id: int,
        write: Callable[[HeldExperiment], None],
        *,
        final: bool = False,
        settles: bool = False,
        at: datetime | None = None,
    ) -> None:
        moment = at or now()
        with self._changed:
            if settles or final:
                self._at_work.discard(trial_id)
            if not self._muted:
                self._events.append(_Event(trial_id, write, moment, final, settles or final))
                self._changed.notify_all()

    def _run(self) -> None:
        backoff, stuck = Backoff(), 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events)
                batch = [self._events[index] for index in range(min(_BATCH, len(self._events)))]
            try:
                self._write(batch)
                backoff.succeeded()
                stuck = 0
            except LeaseLostError:
                self._lost()
                return
            except Exception as error:
                with self._changed:
                    waiting = [event.trial_id for event in self._events]  # not those of the batch that are stored
                stuck = 0 if is_away(error) else stuck + 1
                if stuck >= MOST_FAILURES:
                    trials = sorted(set(waiting))
                    logger.exception("the database fails for good; given up with reports of trials %s", trials)
                    self._lost()
                    return
                pause = backoff.failed()
                logger.warning("%d events wait for the database: %s", len(waiting), error)
                time.sleep(pause)

    def _write(self, batch: list[_Event]) -> None:
        """Writes a batch; where it cannot be written whole, each event for itself."""
        try:
            self._store(batch)
            self._forget(len(batch))
        except Exception as error:
            if _concerns_all(error):
                raise
            for event in batch:
                self._write_alone(event)
                self._forget(1)

    def _store(self, events: Sequence[_Event]) -> None:
        def work(session: Session) -> None:
            with hold(session, self._lease) as held:
                held.read_trials({event.trial_id for event in events})
                for event in events:
                    held.moment = event.at
                    event.write(held)
            fault("before_commit", broken_connection)

        self._database.write(work)
        fault("after_commit", broken_connection)

    def _write_alone(self, event: _Event) -> None:
        """Writes one event; if the database refuses what it says, the trial failed."""
        try:
            self._store([event])
        except Exception as error:
            if _concerns_all(error):
                raise
            logger.exception("trial %d: what it reported cannot be stored", event.trial_id)
            reason = f"what the trial reported could not be stored: {error}"
            failed = replace(event, write=lambda held: held.fail_trial(event.trial_id, "error", reason))
            self._store([failed])

    def _forget(self, count: int) -> None:
        """Drops what is stored, once its consequences are drawn."""
        for index in range(count):
            event = self._events[index]
            if event.final:
                self._ended(event.trial_id)
            if event.settles:
                self._settled(event.trial_id)
        with self._changed:
            for _ in range(count):
                self._events.popleft()
            self._changed.notify_all()


def _concerns_all(error: Exception) -> bool:
    """Whether no event could be written now, whatever it says."""
    return isinstance(error, LeaseLostError) or is_in_trouble(error)


def _add_epochs(held: HeldExperiment, trial_id: int, report: EpochReport) -> None:
    for metrics in report.points:
        held.add_epoch(trial_id, metrics)


def _stop(held: HeldExperiment, trial_id: int, report: EpochReport) -> None:
    _add_epochs(held, trial_id, report)
    held.early_stop_trial(trial_id)


def _finish(held: HeldExperiment, trial_id: int, report: ResultReport) -> None:
    result = report.result
    columns = {name: getattr(result, name) for name in _RESULT_COLUMNS}
    protocol = ProtocolRecord(protocol_fingerprint(result.protocol), deciding(result.protocol))
    files = [ArtifactFile(**fields) for fields in report.artifacts]
    held.finish_trial(trial_id, columns, protocol, files)
