"""What Tune's events mean: for the recorder, for the watchdog and for the log."""

import logging
from collections.abc import Callable
from typing import Any

from ray import tune
from ray.tune.experiment import Trial

from ttsv.runtime.faults import fault
from workers.driver import hanging
from workers.driver.deaths import death_of
from workers.driver.recorder import Recorder
from workers.driver.verification import Verification
from workers.driver.watchdog import Watchdog
from workers.node.depot.remote import AwayError
from workers.trial_process.messages import (
    CrowdedReport,
    EpochReport,
    FailureReport,
    HinderedReport,
    Job,
    Report,
    ResourceReport,
    ResultReport,
    StageReport,
    StartedReport,
)

logger = logging.getLogger(__name__)


class TuneCallback(tune.Callback):
    """Hands Tune's events on. It runs in Tune's control loop: it must not wait, and must not fail."""

    def __init__(
        self,
        recorder: Recorder,
        watchdog: Watchdog,
        verification: Verification,
        began: Callable[[int], None] = lambda _trial_id: None,
        memory_gib: float = 0.0,
    ) -> None:
        """`began` is told of each trial that does; `memory_gib` is reserved for each."""
        self._recorder, self._watchdog, self._verification = recorder, watchdog, verification
        self._began, self._memory_gib = began, memory_gib

    def __reduce__(self) -> tuple[Any, ...]:
        return (tune.Callback, ())  # Tune keeps a pickled copy in its books; nobody uses it

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: object) -> None:
        """Tune's loop turns."""
        hanging.turn()

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        """A process was found for the trial."""
        job = job_of(trial)
        trial_id = job.trial_id
        logger.info("trial %d begins", trial_id)
        self._began(trial_id)
        self._watchdog.began(trial_id, trial.temporary_state.ray_actor, job)
        self._recorder.started(trial_id)
        fault("after_start")

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: object
    ) -> None:
        """The trial reported. If that was an epoch and Tune is done with it, its scheduler stopped it."""
        trial_id, report = job_of(trial).trial_id, result["report"]
        if result["done"] and not self._watchdog.ended(trial_id):
            # What it was killed for is recorded: a trial that waits again keeps its checkpoints.
            logger.warning("trial %d was killed just before it %s", trial_id, _end(report))
            return
        if isinstance(report, ResourceReport):
            report = ResourceReport({**report.series, "pace": self._watchdog.pace(trial_id)})
        if isinstance(report, ResultReport):
            self._verification.begin(trial_id, report, result.get("hostname", "its node"))  # which records the end
        elif isinstance(report, FailureReport) and report.failure == AwayError.failure:
            self._verification.doubt(trial_id, report)  # likewise
        elif isinstance(report, EpochReport) and result["done"]:
            self._recorder.stopped_early(trial_id, report)
        else:
            self._recorder.reported(trial_id, report)
        if result["done"]:
            logger.info("trial %d %s", trial_id, _end(report))
        else:
            node = report.node if isinstance(report, StartedReport) else None
            self._watchdog.heard(trial_id, node, waits=isinstance(report, StageReport) and report.waits)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        """The trial's process died (what a trial raises itself it reports)."""
        trial_id = job_of(trial).trial_id
        began = self._watchdog.has_spoken(trial_id)
        if self._watchdog.ended(trial_id):
            reason, charged, longest_rest = death_of(trial, self._memory_gib, began=began)
            logger.warning("trial %d lost its process: %s", trial_id, reason)
            self._recorder.died(trial_id, reason, charged=charged, longest_rest=longest_rest)


def job_of(trial: Trial) -> Job:
    """What Tune's trial is to us."""
    return Job(**trial.config["job"])


def _end(report: Report) -> str:
    """What became of a trial, by its last report."""
    match report:
        case ResultReport(result):
            return f"succeeded: accuracy {result.accuracy:.4f}"
        case FailureReport(failure, message):
            return f"failed ({failure}): {message.strip().rpartition(chr(10))[2]}"
        case CrowdedReport(message):
            return f"is to run again alone: {message}"
        case HinderedReport(message):
            return f"is to run again: {message}"
        case EpochReport(points):
            return f"was stopped by its scheduler after epoch {points[-1].epoch}"
    return "ended without a word"
