"""TensorBoard's event files, by Ray Tune's own logger, in a folder that outlives the pass."""

import logging
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.logger import TBXLoggerCallback

from workers.driver.callback import job_of

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000
"""Numbers that a writer's thread may be handed at a time: more than a report has."""


class TensorBoardLogger(TBXLoggerCallback):
    """Writes the numbers of each trial's epochs and result below `folder`.

    They are a copy for people: where they cannot be written the trials go on.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return (tune.Callback, ())  # Tune keeps a pickled copy in its books; nobody uses it

    def log_trial_start(self, trial: Trial) -> None:
        """Opens the trial's file."""
        try:
            self._trial_writer[trial] = self._summary_writer_cls(
                str(self._folder / f"trial-{job_of(trial).trial_id}"), max_queue=_MOST_WAITING, flush_secs=30
            )
            self._trial_result[trial] = {}
        except OSError as error:
            logger.warning("no TensorBoard logs of %s: %s", trial, error)

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Writes the newest numbers."""
        if trial not in self._trial_writer:
            return
        try:
            if not _is_alive(self._trial_writer[trial]):
                raise OSError("its writer met a disk that was full or failed")
            super().log_trial_result(iteration, trial, result)
        except OSError as error:
            logger.warning("no further TensorBoard logs of %s: %s", trial, error)
            del self._trial_writer[trial]

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Closes the trial's file."""
        try:
            super().log_trial_end(trial, failed)
        except OSError as error:
            logger.warning("the TensorBoard logs of %s are cut short: %s", trial, error)
            del self._trial_writer[trial]


def _is_alive(writer: Any) -> bool:
    """Whether the thread lives that writes what it is handed: else Tune's loop would soon wait for it for ever."""
    return bool(writer.file_writer.event_writer._worker.is_alive())
