"""What Tune's events mean: for the recorder, for the timer, and for the end of a pass."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial

from workers.driver.recorder import Recorder
from workers.driver.timeouts import Attempts
from workers.trial_process.messages import EpochReport, Job

_REASON_CHARACTERS = 2000
_NAMES = re.compile(r"\s+\w+: ")
"""A line in which Ray names what has died: its class, its numbers."""


class Listener(tune.Callback):
    """Hands Tune's events on. It runs in Tune's control loop: it must not wait, and must not fail.

    `expected` says how many trials the pass has, or None as long as nobody knows; `all_ended` is called when so many
    have ended.
    """

    def __init__(
        self,
        recorder: Recorder,
        attempts: Attempts,
        expected: Callable[[], int | None],
        all_ended: Callable[[], None],
    ) -> None:
        self._recorder, self._attempts = recorder, attempts
        self._expected, self._all_ended = expected, all_ended
        self._over = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (tune.Callback, ())  # Tune keeps a pickled copy in its books; nobody uses it

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        """A process was found for the trial."""
        trial_id = job_of(trial).trial_id
        self._attempts.began(trial_id, trial.temporary_state.ray_actor)
        self._recorder.started(trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: object
    ) -> None:
        """The trial reported. If that was an epoch and Tune is done with it, its scheduler stopped it."""
        trial_id, report = job_of(trial).trial_id, result["report"]
        self._recorder.reported(trial_id, report)
        if result["done"]:
            self._attempts.ended(trial_id)
            if isinstance(report, EpochReport):
                self._recorder.stopped_early(trial_id)
            self._count_end()

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        """The trial's process died (what a trial raises itself it reports)."""
        trial_id = job_of(trial).trial_id
        if self._attempts.ended(trial_id):
            self._recorder.died(trial_id, reason_of(trial))
        self._count_end()

    def _count_end(self) -> None:
        self._over += 1
        if self._over == self._expected():
            self._all_ended()


def job_of(trial: Trial) -> Job:
    """What Tune's trial is to us."""
    return Job(**trial.config["job"])


def reason_of(trial: Trial) -> str:
    """What Ray knows about the death of a trial's process."""
    try:
        text = Path(trial.error_file).read_text()
    except (OSError, TypeError):
        return "the process died, and Ray does not say why"
    _, _, last = text.rpartition("Failure # ")
    reason = last.partition("\n")[2].partition(" Some common causes")[0]  # the rest is advice about Ray
    lines = (line.strip() for line in reason.splitlines() if not _NAMES.match(line))
    return " ".join(filter(None, lines))[-_REASON_CHARACTERS:]
