"""What Tune's events mean: for the recorder, for the watchdog and for the log."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial

from service.queue import rests
from service.storage.store import TROUBLE
from ttsv.errors import LostDeviceError
from ttsv.runtime.faults import fault
from workers.driver import hanging
from workers.driver.recorder import Recorder
from workers.driver.verification import Verification
from workers.driver.watchdog import Watchdog
from workers.node.depot.remote import AwayError
from workers.trial_process.messages import (
    NOT_TAKEN,
    UNABLE,
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

_REASON_CHARACTERS = 2000
_NAMES = re.compile(r"\s+\w+: ")
"""A line in which Ray names what has died: its class, its numbers."""
_NODE_DIED = re.compile(
    r"(its|the actor's) (node|owner) (has|is) d(ied|ead)|node was (forcibly )?(terminated|preempted)"
    r"|local raylet (has )?died|actor \w+ is unavailable|placement group was removed",
    re.I,
)
"""What Ray says where the process died with all around it, or cannot be reached: a raylet's death shows so at first."""

_KILLED = "killed by `ray.kill`"
"""What Ray says of a process that was killed from here for an earlier trial, whose last word was under way."""

_GPU_LOST = f"{LostDeviceError.__name__}: "
"""What a process says last whose card failed: the next trial would have fared no better there."""

_DISK = re.compile(rf"Error: \[Errno ({'|'.join(map(str, sorted(TROUBLE)))})\]")
"""What ends a process that finds no room for Ray's own files: what its trial raises it reports."""
_MEMORY = re.compile(r"memory usage threshold|running low on memory|Ray killed (this|\d+) worker", re.I)
"""What Ray says where its memory monitor ended the process, before the kernel would end any."""
_MEMORY_THEN = re.compile(r"[\d.]+ ?GB (used )?/ [\d.]+ ?GB")
_MEMORY_OF_WORKER = re.compile(r"Granted time: ([^|]+?) *\|[^|]*\| *Memory used: ([\d.]+) ?GiB")
_SHORT_OF_MEMORY = (
    "its machine ran short of memory, and Ray ended it; it may need more than others: have `resources.memory_gib` "
    "reserve what it needs, or let fewer run at a time (max_concurrent_trials)"
)
_OF_OTHERS = "Top 10 memory users"
"""Behind it Ray lists command lines, those of other people too."""


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
        if self._watchdog.ended(trial_id):
            said = reason_of(trial)
            reason, longest_rest = said[-_REASON_CHARACTERS:], 0.0
            unheld = any(words in said for words in (NOT_TAKEN, UNABLE, _KILLED, _GPU_LOST)) or _NODE_DIED.search(said)
            charged = not unheld
            if _MEMORY.search(said):
                charged, reason = self._needs_too_much(said), _short_of_memory(said)
                longest_rest = rests.LONGEST_SECONDS
            elif _GPU_LOST in said or _DISK.search(said):
                charged, longest_rest = False, rests.LONGEST_OF_HINDERED
            logger.warning("trial %d lost its process: %s", trial_id, reason)
            self._recorder.died(trial_id, reason, charged=charged, longest_rest=longest_rest)

    def _needs_too_much(self, said: str) -> bool:
        """Whether a trial whose machine ran short of memory may be the one that needs too much.

        Ray ends whoever began last, and the next to begin again if that was not enough. Where that one had no more than
        is reserved for it, somebody else filled the machine, maybe a trial with a larger reservation. Else it may be
        the one, and would be killed for ever: it is charged, as for the kernel's killing, but so slowly that ten times
        in a row last for half an hour.
        """
        began = [(granted, float(gib)) for granted, gib in _MEMORY_OF_WORKER.findall(said)]
        return not began or max(began)[1] > self._memory_gib


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


def _short_of_memory(said: str) -> str:
    """What became of the process, and what to do; what Ray says is long, and names what others run."""
    then = _MEMORY_THEN.search(said)
    return f"{_SHORT_OF_MEMORY}{'' if then is None else f': {then[0]}'}"


def reason_of(trial: Trial) -> str:
    """What Ray knows about the death of a trial's process, in one line."""
    try:
        text = Path(trial.error_file).read_text()
    except (OSError, TypeError):
        return "the process died, and Ray does not say why"
    _, _, last = text.rpartition("Failure # ")
    reason = last.partition("\n")[2].partition(" Some common causes")[0]  # the rest is advice about Ray
    lines = (line.strip() for line in reason.partition(_OF_OTHERS)[0].splitlines() if not _NAMES.match(line))
    return " ".join(filter(None, lines))
