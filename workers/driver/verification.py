"""Looking for the files of a result where the API reads them, before the result counts."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime
from functools import partial
from pathlib import Path

from service.database import now
from service.storage import Store, open_kept
from workers.driver.recorder import Recorder
from workers.node.depot.home import Home
from workers.trial_process.messages import FailureReport, HinderedReport, ResultReport

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 2.0
_LOOKS = 3
"""So often in a row something must be wrong: a shared folder shows what another machine wrote a moment later."""
_THREADS = 4
_REFUSED = "may not be read"


class Verification:
    """Compares results with what is kept, aside, as Tune's loop must not wait, and has them recorded then.

    A trial whose files are not there, or others, fails; one of whose files nothing is learnt is tried again, which
    begins at its last checkpoint.
    """

    def __init__(self, home: Home, recorder: Recorder) -> None:
        """Files are kept in the home's data folder, or in its store."""
        self._store, self._recorder = open_kept(Path(home.data_dir), home.storage), recorder
        self._home = home
        self._where = home.data_dir if home.storage is None else "the store (TTSV_STORAGE)"
        self._missing_fix = "" if home.storage is not None else "have all nodes share the data folder, then "
        self._pool = ThreadPoolExecutor(_THREADS, "verification")
        self._begun = set[Future[None]]()

    def begin(self, trial_id: int, report: ResultReport, host: str) -> None:
        """Has a result of that host looked at; does not wait."""
        self._do(partial(self._verify, trial_id, report, host, now()))

    def doubt(self, trial_id: int, report: FailureReport) -> None:
        """Has a trial tried again whose process did not find the data folder, if we do not either; does not wait."""
        self._do(partial(self._record, trial_id, report, now()))

    def wait(self, seconds: float) -> None:
        """Waits until all that were begun are recorded, at most so long."""
        wait(self._begun.copy(), seconds)

    def _do(self, work: Callable[[], None]) -> None:
        looking = self._pool.submit(work)
        self._begun.add(looking)
        looking.add_done_callback(self._begun.discard)

    def _record(self, trial_id: int, report: FailureReport, at: datetime) -> None:
        there = self._home.seen(Path(self._home.data_dir))
        told = report if there else HinderedReport(f"not mounted now? {report.message}")
        self._recorder.reported(trial_id, told, at=at)

    def close(self) -> None:
        """Waits until all are recorded."""
        self._pool.shutdown()

    def _verify(self, trial_id: int, report: ResultReport, host: str, at: datetime) -> None:
        deadline, looks = time.monotonic() + PATIENCE_SECONDS, 0
        while True:
            try:
                wrong = _wrong_in(self._store, report)
                self._home.require_kept()  # else what is found may lie where a mount was, which would hide it again
            except Exception as error:  # of a server's many kinds
                logger.warning("the files of trial %d cannot be looked for: %s", trial_id, error)
                if time.monotonic() > deadline:
                    reason = f"its files could not be looked for in {self._where}: {error}"
                    self._recorder.died(trial_id, reason, charged=False, at=at)
                    return
                time.sleep(_PAUSE_SECONDS)
                continue
            looks += 1
            if wrong is None:
                self._recorder.reported(trial_id, report, at=at)
                return
            if looks == _LOOKS:
                failed = FailureReport("infrastructure", self._message(*wrong, host))
                self._recorder.reported(trial_id, failed, at=at)
                return
            time.sleep(_PAUSE_SECONDS)

    def _message(self, kind: str, wrong: str, host: str) -> str:
        fix = self._missing_fix
        if wrong == _REFUSED:
            fix = "have all nodes write as the worker's user, or files that it may read (umask 022); "
        return f"`{kind}` of {host} {wrong} in {self._where}, where it is served from; {fix}run the trial again"


def _wrong_in(store: Store, report: ResultReport) -> tuple[str, str] | None:
    """The kind of the first file that is not in the store as the manifest has it, and why. Raises `OSError`."""
    for file in report.artifacts:
        try:
            size = store.size(file["path"])
            if size is None:
                return file["kind"], "is not"
            if size != file["size"] or store.digest(file["path"]) not in (None, file["sha256"]):
                return file["kind"], "is not whole"
        except PermissionError:  # which does not pass: as often as the trial were tried again
            return file["kind"], _REFUSED
    return None
