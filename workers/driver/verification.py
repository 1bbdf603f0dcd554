"""Looking for the files of a result where the API reads them, before the result counts."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

from service.storage import Store
from workers.driver.recorder import Recorder
from workers.trial_process.messages import FailureReport, ResultReport

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 2.0
_THREADS = 4


class Verification:
    """Compares results with a store, aside, as Tune's loop must not wait for a server, and has them recorded then.

    A trial whose files are not there, or others, fails; one of whose files nothing is learnt is tried again, which
    begins at its last checkpoint.
    """

    def __init__(self, store: Store, recorder: Recorder) -> None:
        self._store, self._recorder = store, recorder
        self._pool = ThreadPoolExecutor(_THREADS, "verification")

    def begin(self, trial_id: int, report: ResultReport) -> None:
        """Has a result looked at; does not wait."""
        self._pool.submit(self._verify, trial_id, report)

    def close(self) -> None:
        """Waits until all are recorded."""
        self._pool.shutdown()

    def _verify(self, trial_id: int, report: ResultReport) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                wrong = missing_in(self._store, report)
            except Exception as error:  # of a server's many kinds
                logger.warning("the files of trial %d cannot be looked for: %s", trial_id, error)
                if time.monotonic() > deadline:
                    self._recorder.died(trial_id, f"its files could not be looked for: {error}", charged=False)
                    return
                time.sleep(_PAUSE_SECONDS)
                continue
            if wrong is None:
                self._recorder.reported(trial_id, report)
            else:
                message = f"{wrong} in the store (TTSV_STORAGE), where it is served from; run the trial again"
                self._recorder.reported(trial_id, FailureReport("infrastructure", message))
            return


def missing_in(store: Store, report: ResultReport) -> str | None:
    """The first file of a result, in words, that is not in the store as the manifest has it. Raises `OSError`."""
    for file in report.artifacts:
        try:
            size = store.size(file["path"])
            if size is None:
                return f"`{file['kind']}` is not"
            if size != file["size"] or store.digest(file["path"]) not in (None, file["sha256"]):
                return f"`{file['kind']}` is not whole"
        except PermissionError:  # which does not pass: as often as the trial were tried again
            return f"`{file['kind']}` may not be read"
    return None
