"""The process that runs one claimed experiment: `python -m workers.driver --experiment ID --fence N`.

It ends by `os._exit` whenever the lease is lost or it is told to stop: Ray kills the actors of a driver that is gone
within a fraction of a second, and no step of a stuck Tune loop has to be waited for.
"""

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import threading
from functools import partial
from typing import NoReturn

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service import queue, store
from service.db import Database
from service.errors import LeaseLostError
from service.grid import ExperimentSpec
from service.models import TrialState
from service.queue import Lease
from service.settings import Settings
from ttsv.trial import run_trial
from workers.folder import remove_checkpoints, remove_tune_folders, tune_folder
from workers.lease import LeaseKeeper
from workers.patience import patiently
from workers.recorder import Recorder
from workers.reports import Job, RunTrial

logger = logging.getLogger(__name__)

START_SECONDS = 60
FLUSH_SECONDS = 10.0
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class Driver:
    """Passes of Ray Tune over the unfinished trials until all are final, the lease is lost, or a signal comes."""

    def __init__(self, settings: Settings, lease: Lease, run: RunTrial) -> None:
        self._settings, self._lease, self._run_trial = settings, lease, run
        self._database = Database(settings.url)
        self._recorder = Recorder(self._database, lease, self._lost, self._ended)
        self._all_ended = threading.Event()
        self._keeper = LeaseKeeper(self._database, lease, settings.beat_seconds, self._lost)

    def run(self) -> None:
        """Runs the experiment to its end."""
        self._keeper.start()
        self._recorder.open()
        for work in (self._await_signal, self._await_end):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        try:
            self._run()
        except LeaseLostError:
            self._lost()

    def _run(self) -> None:
        # Only now: threads that Ray starts must inherit the blocked signals, and the lease is being renewed already.
        from workers import tuning

        tuning.connect(os.environ["RAY_ADDRESS"])
        faulthandler.cancel_dump_traceback_later()
        spec = patiently(self._read_spec)
        if problem := tuning.shortage(spec.resources):
            patiently(lambda: self._database.write(partial(self._refuse, problem=problem)))
        last: list[tuple[int, int]] = []
        while not self._complete():
            jobs, state = patiently(lambda: self._database.write(self._next_jobs))
            if state and state == last:
                raise RuntimeError("Tune returned without having started a trial")
            last = state
            if not jobs:
                continue
            self._all_ended.clear()
            folder = tune_folder(self._settings.data_dir, self._lease.experiment_id, self._lease.fence)
            remove_tune_folders(self._settings.data_dir, self._lease.experiment_id, self._lease.fence)
            tuning.run_pass(
                jobs,
                run=self._run_trial,
                recorder=self._recorder,
                all_ended=self._all_ended.set,
                resources=spec.resources,
                max_concurrent_trials=spec.max_concurrent_trials,
                data_dir=self._settings.data_dir,
                folder=folder,
            )
            self._recorder.flush()

    def _complete(self) -> bool:
        return patiently(lambda: self._database.write(partial(queue.complete, lease=self._lease)))

    def _await_end(self) -> None:
        """Completes the experiment as soon as nothing is left to do, however long Tune takes to return."""
        while True:
            self._all_ended.wait()
            self._all_ended.clear()
            self._recorder.flush()
            with contextlib.suppress(LeaseLostError):
                if not self._complete():
                    continue
            os._exit(0)

    def _read_spec(self) -> ExperimentSpec:
        with self._database.read() as session:
            return ExperimentSpec.model_validate(store.get_experiment(session, self._lease.experiment_id).spec)

    def _next_jobs(self, session: Session) -> tuple[list[Job], list[tuple[int, int]]]:
        """What is to be run, and a mark that changes with every pass that did anything.

        No Tuner is at work now, so a trial that counts as running lost its process unnoticed.
        """
        for trial in queue.unfinished_trials(session, self._lease):
            if trial.state == TrialState.RUNNING:
                queue.lose_trial(session, self._lease, trial.id, "its process ended without a word")
        session.flush()
        trials = queue.unfinished_trials(session, self._lease)
        jobs = [Job(trial.id, self._lease.fence, trial.epoch, trial.config) for trial in trials]
        return jobs, [(trial.id, trial.attempts) for trial in trials]

    def _refuse(self, session: Session, problem: str) -> None:
        """Fails every trial: none of them could ever run here."""
        for trial in queue.unfinished_trials(session, self._lease):
            queue.start_trial(session, self._lease, trial.id)
            queue.fail_trial(session, self._lease, trial.id, "infrastructure", problem)

    def _ended(self, trial_id: int) -> None:
        """The checkpoints of a trial whose end is stored serve nothing more, and they are its largest files."""
        remove_checkpoints(self._settings.data_dir, trial_id)

    def _lost(self) -> NoReturn:
        logger.info("experiment %d is no longer ours: stopping", self._lease.experiment_id)
        os._exit(0)

    def _await_signal(self) -> None:
        """Stops at once: checkpoints are on disk, and what was reported is written before the lease is given back."""
        received = signal.Signals(signal.sigwait(_STOP_SIGNALS))
        logger.info("%s: stopping", received.name)
        self._recorder.mute()
        self._recorder.flush(FLUSH_SECONDS)
        with contextlib.suppress(LeaseLostError, SQLAlchemyError):
            self._database.write(partial(queue.release, lease=self._lease, drained=True))
        os._exit(0)


def main(run: RunTrial = run_trial) -> None:
    """The driver's process; `run` is what runs one trial."""
    # Blocked in every thread that follows; a thread of our own waits for them, so that no Ray call can hold them up.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    # A driver that cannot reach its cluster may hang inside Ray: it ends without the interpreter's help.
    faulthandler.dump_traceback_later(START_SECONDS, exit=True)
    parser = argparse.ArgumentParser(description="Runs one claimed experiment; workers start it.")
    parser.add_argument("--experiment", type=int, required=True)
    parser.add_argument("--fence", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    Driver(Settings(), Lease(arguments.experiment, arguments.fence), run).run()
    os._exit(0)  # nothing is left to do, and Ray takes half a second to say goodbye


if __name__ == "__main__":
    main()
