"""The process that runs one claimed experiment: `python -m workers.driver.__main__ --experiment ID --fence N`.

It ends by `os._exit` whenever the lease is lost or it is told to stop: Ray kills the actors of a driver that is gone
within a fraction of a second, and no step of a stuck Tune loop has to be waited for.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.database.engine import Database
from service.database.outages import patiently
from service.errors import LeaseLostError
from service.experiments import store
from service.queue import driver_reads, leases, rests
from service.queue.leases import Lease
from service.queue.trials import hold
from service.settings import Settings
from service.settings.logs import configure_logging
from service.specs.grid import search_base
from service.specs.planner import PlannedTrial
from service.specs.spec import Asha, ExperimentSpec
from service.storage import open_kept
from service.upkeep.home import known_mark
from ttsv.config.fields import FieldValues
from ttsv.trial import run_trial
from workers.driver.hanging import ended_if_hung
from workers.driver.lease_keeper import LeaseKeeper
from workers.driver.leftovers import Leftovers
from workers.driver.recorder import Recorder
from workers.node.depot.home import Home, light_beacon
from workers.trial_process.messages import Job, RunTrial
from workers.trial_process.trial_folder import remove_tune_folders, tune_folder

if TYPE_CHECKING:
    from workers.driver.feed import Feed, Slots
    from workers.driver.search import SearchTrials
    from workers.driver.tuner import Passes

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

CONNECT_SECONDS = 60
FLUSH_SECONDS = 10.0
VERIFY_SECONDS = 5.0
"""So long a result that came is looked at yet before the experiment is given back: to have it again may take hours."""
LEFTOVERS_SECONDS = 60.0
"""So long an experiment's end waits for a store that does not answer: `ttsv prune` removes what stays."""
LOOK_SECONDS = 1.0
"""How long it goes unnoticed at most that the experiment is to stop."""
IDLE_SECONDS = 30.0
"""How long a driver that may run nothing waits for a slot: another one costs seconds to start, this one memory."""
_MOST_FRUITLESS = 3
_SWEPT = 100
"""More trials than end at once."""
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class Driver:
    """Passes of Ray Tune over the unfinished trials until all are final, the lease is lost, or a signal comes.

    The worker says on standard input how many trials may run: lines of JSON, `slots` that may begin, none of them on a
    node that is `shunned`, and `most` that may go on, on some nodes no more than are `staying` there. Of the slots some
    are for those `besides`, on nodes that are `unfit`. A driver that may run none, and runs none, gives the experiment
    back after a while. A search is unfinished until as many trials were made as it was asked for, or there is no other.
    """

    def __init__(self, settings: Settings, lease: Lease, run: RunTrial) -> None:
        self._settings, self._lease, self._run_trial = settings, lease, run
        self._database = Database(settings.url)
        kept = open_kept(settings.data_dir, settings.storage)
        self._leftovers = Leftovers(kept, lease.fence)
        self._recorder = Recorder(self._database, lease, self._lost, self._ended, self._refused, self._settled)
        self._over = threading.Event()
        self._keeper = LeaseKeeper(self._database, lease, settings.beat_seconds, self._lost)
        self._passes: Passes | None = None
        self._slots: Slots | None = None
        self._feed: Feed | None = None
        self._attempts: Counter[int] = Counter()

    def run(self) -> None:
        """Runs the experiment to its end."""
        logger.info("experiment %d begins, fence %d", self._lease.experiment_id, self._lease.fence)
        self._keeper.start()
        self._recorder.open()
        for work in (self._await_signal, self._await_end, self._await_stop):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        try:
            self._run()
        except LeaseLostError:
            self._lost()

    def _run(self) -> None:
        # Only now: threads that Ray starts must inherit the blocked signals, and the lease is being renewed already.
        with ended_if_hung():
            from workers.driver import feed, tuner

        slots = self._slots = feed.Slots()
        with ended_if_hung(CONNECT_SECONDS):  # inside Ray, who cannot reach its cluster
            tuner.connect(os.environ["RAY_ADDRESS"])
        gc.freeze()  # what was imported stays: to look through it for garbage holds all results up, half a second once
        self._sweep()
        spec = patiently(self._read_spec)
        passes = self._passes = tuner.Passes(self._run_trial, self._recorder)
        threading.Thread(target=self._listen, args=(slots, passes), name="slots", daemon=True).start()
        fruitless = 0
        while True:
            self._write(self._tidy)
            search = patiently(partial(self._make_search, spec))
            if search is None and self._complete():
                return
            self._await_turn(slots, searches=search is not None)
            self._feed = search or feed.Feed(self._next_job, slots, self._over.set)
            self._run_pass(passes, spec, self._feed)
            fruitless = 0 if self._feed.handed_out or not slots.count else fruitless + 1
            if fruitless > _MOST_FRUITLESS:
                raise RuntimeError("Tune returns again and again without having started a trial")

    def _await_turn(self, slots: "Slots", *, searches: bool) -> None:
        """Waits until a trial may begin; the experiment goes back to a worker that counts where none may for long."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            if not slots.wait(max(0.0, deadline - time.monotonic())):
                self._give_back("no slot is left for it")
            rest = 0.0 if searches else patiently(self._rest_seconds)
            if rest == 0:
                return
            if slots.limited and time.monotonic() + rest > deadline:
                self._give_back(f"{rests.ALL_REST}, for {rest:.0f} s at least")
            time.sleep(min(rest, LOOK_SECONDS))

    def _rest_seconds(self) -> float:
        with self._database.read() as session:
            return driver_reads.rest_seconds(session, self._lease)

    def _listen(self, slots: "Slots", passes: "Passes") -> None:
        """Hears from the worker how many trials may run. Where nobody ever says anything, all may."""
        said = False
        for line in sys.stdin:
            said = True
            share = json.loads(line)
            logger.info("%d trials may run now", share["slots"])
            slots.set(share["slots"], share.get("shunned", ()), share.get("besides", 0), share.get("unfit", ()))
            passes.allow(share["most"], share.get("staying", {}))
        if not said:
            slots.unlimited()

    def _write(self, work: Callable[[Session], _T]) -> _T:
        """Writes, as soon as the database is there."""
        return patiently(lambda: self._database.write(work))

    def _run_pass(self, passes: "Passes", spec: ExperimentSpec, feed: "Feed") -> None:
        from workers.driver.tuner import Pass

        data_dir, experiment_id = self._settings.data_dir, self._lease.experiment_id
        remove_tune_folders(data_dir, experiment_id, self._lease.fence)
        board = data_dir / "tensorboard" / str(experiment_id)
        folder = tune_folder(data_dir, experiment_id, self._lease.fence)
        work = Pass(
            spec=spec,
            data_dir=data_dir,
            folder=folder,
            home=self._home(folder),
            feed=feed,
            earlier=patiently(partial(self._earlier, spec)),
            board_folder=board if self._settings.tensorboard else None,
        )
        passes.run(work)
        self._recorder.flush()

    def _home(self, folder: Path) -> Home:
        """Where the files of trials belong; by what the database says of it, as it may be unmounted just now."""
        from workers.driver.tuner import node_here

        return light_beacon(self._settings, folder, node_here(), patiently(self._known_mark))

    def _known_mark(self) -> str | None:
        with self._database.read() as session:
            return known_mark(session)

    def _complete(self) -> bool:
        """Completes the experiment if nothing is left to do; whether nothing was."""
        self._leftovers.wait(LEFTOVERS_SECONDS)  # checkpoints are the largest files: who sees the end finds none
        complete = self._write(partial(leases.complete, lease=self._lease))
        if complete:
            logger.info("experiment %d ends: every trial is final", self._lease.experiment_id)
        return complete

    def _await_end(self) -> None:
        """Completes the experiment as soon as nothing is left to do, however long Tune takes to return."""
        while True:
            self._over.wait()
            self._over.clear()
            self._recorder.flush()
            with contextlib.suppress(LeaseLostError):
                if not self._complete():
                    continue
            os._exit(0)

    def _await_stop(self) -> None:
        """Has no further trial begin once the experiment was asked to stop; those that run go on.

        What a later feed finds ran before, and lost its process or its driver: all else is cancelled by then.
        """
        while True:
            time.sleep(LOOK_SECONDS)
            with contextlib.suppress(SQLAlchemyError), self._database.look() as session:
                if leases.is_stopping(session, self._lease) and self._feed is not None:
                    self._feed.stop()
                    return

    def _read_spec(self) -> ExperimentSpec:
        with self._database.read() as session:
            return ExperimentSpec.model_validate(store.get_experiment(session, self._lease.experiment_id).spec)

    def _tidy(self, session: Session) -> None:
        """Between passes no Tuner is at work: a trial that counts as running lost its process unnoticed."""
        with hold(session, self._lease) as held:
            for trial in driver_reads.running_trials(session, self._lease):
                held.lose_trial(trial.id, "its process ended without a word", charged=False)
                self._recorder.forget(trial.id)

    def _next_job(self, taken: Collection[int]) -> Job | None:
        """The trial that is to begin next; one that cannot fails."""
        while True:
            with self._database.look() as session:
                trial = driver_reads.next_trial(session, self._lease, taken)
                if trial is None:
                    return None
                source = trial.source_trial_id
                path = None if source is None else driver_reads.model_path(session, source)
            if source is None or path is not None:
                attempt = self._attempt(trial.id)
                return Job(
                    trial_id=trial.id,
                    fence=self._lease.fence,
                    stored_epochs=trial.epoch,
                    config=trial.config,
                    source=path,
                    attempt=attempt,
                    alone=trial.alone,
                )
            self._database.write(partial(self._fail_orphan, trial_id=trial.id, source=source))

    def _fail_orphan(self, session: Session, trial_id: int, source: int) -> None:
        """Fails a trial that was to evaluate what there is not."""
        with hold(session, self._lease) as held:
            held.start_trial(trial_id)
            what, removed_at = (
                f"trial {source}, which this one evaluates",
                driver_reads.model_removed_at(session, source),
            )
            if removed_at is None:
                why = f"{what}, left no `{driver_reads.MODEL}`; name one that succeeded"
            else:
                why = f"the network of {what}, was removed on {removed_at:%Y-%m-%d} to make room; clone its experiment"
            held.fail_trial(trial_id, "bad_data", why)

    def _make_search(self, spec: ExperimentSpec) -> "SearchTrials | None":
        """The search as its rows have it: what an earlier driver had of it is gone. None where it is over."""
        if spec.search is None:
            return None
        from workers.driver.search import SearchTrials  # brings Optuna

        if isinstance(self._feed, SearchTrials) and self._feed.exhausted:
            return None
        assert self._slots is not None, "slots come before passes"
        with self._database.read() as session:
            if leases.is_stopping(session, self._lease):
                return None
            trials = driver_reads.planned_trials(session, self._lease)
            history = driver_reads.tried(session, self._lease, spec.search.metric)
        make = partial(SearchTrials, spec.search, search_base(spec), trials, history, self._add, self._end_search)
        search = make(self._next_job, self._slots, self._over.set)
        return None if search.exhausted else search

    def _add(self, planned: PlannedTrial, point: FieldValues) -> Job:
        def work(session: Session) -> int:
            with hold(session, self._lease) as held:
                return held.add_trial(planned, point)

        trial_id = self._database.write(work)
        return Job(trial_id, self._lease.fence, 0, planned.config.to_dict(), attempt=self._attempt(trial_id))

    def _end_search(self) -> None:
        """Has the worker count on no further trial: its places would stay empty for as long as others of it run."""

        def work(session: Session) -> None:
            with hold(session, self._lease) as held:
                held.end_search()

        self._database.write(work)

    def _attempt(self, trial_id: int) -> int:
        """The number of the next attempt at a trial: no two write into one folder."""
        self._attempts[trial_id] += 1
        return self._attempts[trial_id] - 1

    def _earlier(self, spec: ExperimentSpec) -> list[driver_reads.Curve]:
        """What a scheduler has to know of the trials that began."""
        if not isinstance(spec.scheduler, Asha):
            return []
        with self._database.read() as session:
            return driver_reads.curves(session, self._lease, spec.scheduler.metric)

    def _ended(self, trial_id: int) -> None:
        """Nothing goes on from what the attempts until now left: the next is made once this end is settled."""
        self._leftovers.add(trial_id, self._attempts[trial_id])

    def _refused(self, trial_id: int) -> None:
        """The trial was cancelled before its process began."""
        if self._passes is not None:
            self._passes.refuse(trial_id)
        self._settled(trial_id)

    def _settled(self, trial_id: int) -> None:
        if self._feed is not None:
            self._feed.settled(trial_id)

    def _sweep(self) -> None:
        """Removes what a driver before could no longer, that died as soon as the ends of trials were stored."""
        for trial_id in patiently(self._last_ended) if self._lease.fence > 1 else ():
            self._ended(trial_id)

    def _last_ended(self) -> Sequence[int]:
        with self._database.read() as session:
            return driver_reads.last_ended(session, self._lease, _SWEPT)

    def _lost(self) -> NoReturn:
        logger.info("experiment %d is no longer ours: stopping", self._lease.experiment_id)
        os._exit(0)

    def _await_signal(self) -> None:
        """Stops at once: checkpoints are on disk, and what was reported is written before the lease is given back."""
        received = signal.Signals(signal.sigwait(_STOP_SIGNALS))
        self._give_back(f"{received.name} came")

    def _give_back(self, reason: str) -> NoReturn:
        logger.info("experiment %d is given back: %s", self._lease.experiment_id, reason)
        if self._feed is not None and self._passes is not None:
            self._feed.stop()
            self._passes.settle(VERIFY_SECONDS)
        self._recorder.mute()
        self._recorder.flush(FLUSH_SECONDS)
        self._leftovers.wait(1.0)  # what stays the next driver removes
        with contextlib.suppress(LeaseLostError, SQLAlchemyError):
            self._database.write(partial(leases.release, lease=self._lease, drained=True))
        os._exit(0)


def main(run: RunTrial = run_trial) -> None:
    """The driver's process; `run` is what runs one trial."""
    # Blocked in every thread that follows; a thread of our own waits for them, so that no Ray call can hold them up.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    parser = argparse.ArgumentParser(description="Runs one claimed experiment; workers start it.")
    parser.add_argument("--experiment", type=int, required=True)
    parser.add_argument("--fence", type=int, required=True)
    arguments = parser.parse_args()
    settings = Settings()
    configure_logging(settings)
    Driver(settings, Lease(arguments.experiment, arguments.fence), run).run()
    os._exit(0)  # nothing is left to do, and Ray takes half a second to say goodbye


if __name__ == "__main__":
    main()
