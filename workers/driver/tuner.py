"""One pass of Ray Tune over the unfinished trials of an experiment."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from service.queue.contenders import amount
from service.queue.driver_reads import Curve
from service.specs.search import best_direction
from service.specs.spec import Asha, ExperimentSpec, Fifo
from workers.driver.callback import TuneCallback, job_of
from workers.driver.deaths import survive_deaths
from workers.driver.feed import ENDLESS, PLACE_SECONDS, STARTING_SECONDS, Feed
from workers.driver.hanging import ended_if_hung
from workers.driver.recorder import Recorder
from workers.driver.signs import SignReader
from workers.driver.tensorboard import TensorBoardLogger
from workers.driver.verification import Verification
from workers.driver.watchdog import Verdict, Watchdog
from workers.node.depot.home import Home
from workers.trial_process.messages import EpochReport, FailureReport, RunTrial, TuneConfig
from workers.trial_process.signs import signs
from workers.trial_process.trainable import Reservation, TrialTrainable

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # Tune's books serve nobody: the database is the truth
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failure has none of the metrics that a scheduler compares
    "TUNE_MAX_PENDING_TRIALS_PG": "16",  # else one at a time where a searcher hands them out
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


def connect(address: str) -> None:
    """Joins the cluster."""
    os.environ.update(_ENVIRONMENT)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses its log files, which we turned off
    # To count its loggers among a run's, Tune imports MLflow where that is installed: most of a second.
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type] # as Python lets an import fail
    survive_deaths()
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)


def node_here() -> str:
    """The node of the cluster (Ray's id) that this driver is on."""
    return str(ray.get_runtime_context().get_node_id())


@dataclass(frozen=True)
class Pass:
    """What one pass runs: what `feed` hands out; `earlier` is what its scheduler knows already."""

    spec: ExperimentSpec
    data_dir: Path
    folder: Path
    home: Home
    feed: Feed
    earlier: Iterable[Curve] = ()
    board_folder: Path | None = None


class Passes:
    """Runs passes, one after another, and hands what happens to the recorder."""

    def __init__(self, run: RunTrial, recorder: Recorder) -> None:
        self._run, self._recorder = run, recorder
        self._watchdog: Watchdog | None = None
        self._verification: Verification | None = None
        self._allowed: tuple[int, Mapping[str, int]] = sys.maxsize, {}
        self._allowing = Lock()  # else a pass that begins could put what was allowed before over what is now

    def refuse(self, trial_id: int) -> None:
        """Ends a trial that must not run."""
        if self._watchdog is not None:
            self._watchdog.kill(trial_id)

    def allow(self, most: int, staying: Mapping[str, int]) -> None:
        """Has trials give way, so that no more than so many run, and on some nodes no more than so many stay."""
        with self._allowing:
            self._allowed = most, staying
            if self._watchdog is not None:
                self._watchdog.allow(most, staying)

    def settle(self, seconds: float) -> None:
        """Waits until the results that came are recorded, at most so long."""
        if self._verification is not None:
            self._verification.wait(seconds)

    def run(self, work: Pass) -> None:
        """Runs what there is: each trial reports its end or loses its process."""
        with self._allowing:
            self._watchdog = Watchdog(work.spec.timeout_seconds, work.spec.hung_after, self._judge)
            self._watchdog.allow(*self._allowed)
        self._watchdog.start()
        shelf = signs()
        reader = None if shelf is None else SignReader(self._watchdog, shelf, self._recorder.reported)
        if reader is not None:
            reader.start()
        verification = self._verification = Verification(work.home, self._recorder)
        try:
            with ended_if_hung():
                self._tuner(work, self._watchdog, verification).fit()
        finally:
            self._watchdog.close()
            if reader is not None:
                reader.close()
            verification.close()

    def _tuner(self, work: Pass, watchdog: Watchdog, verification: Verification) -> tune.Tuner:
        resources = work.spec.resources
        callbacks: list[tune.Callback] = [
            TuneCallback(
                self._recorder,
                watchdog,
                verification,
                work.feed.began,
                memory_gib=resources.memory_gib or 0.0,
            ),
            _NoProgress(),
        ]
        if work.board_folder is not None:
            callbacks.append(TensorBoardLogger(work.board_folder))
        config = TuneConfig(
            run=self._run,
            data_dir=str(work.data_dir),
            home=work.home,
            cpus=resources.cpus,
            gpus=resources.gpus,
            every_epoch=work.board_folder is not None or not isinstance(work.spec.scheduler, Fifo),
        )
        return tune.Tuner(
            tune.with_resources(TrialTrainable, Reservation(amount(resources))),
            param_space=dict(config),
            tune_config=tune.TuneConfig(
                reuse_actors=True,
                scheduler=make_scheduler(work.spec.scheduler, work.feed, work.earlier),
                search_alg=work.feed,
                num_samples=ENDLESS,
                trial_name_creator=_name,
                trial_dirname_creator=_name,
            ),
            run_config=tune.RunConfig(
                name=work.folder.name,
                storage_path=str(work.folder.parent),
                callbacks=callbacks,
                failure_config=tune.FailureConfig(max_failures=0),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                verbose=0,
            ),
        )

    def _judge(self, trial_id: int, verdict: Verdict, seconds: float) -> None:
        match verdict:
            case Verdict.TIMEOUT:
                cause = f"timeout_seconds = {seconds:g}: the trial took longer and was killed"
                self._recorder.reported(trial_id, FailureReport("timeout", f"{cause}; allow more, or make it smaller"))
            case Verdict.HUNG:
                self._recorder.died(trial_id, f"it reported nothing for {seconds:g} s (`hung_after`) and was killed")
            case Verdict.YIELD:
                self._recorder.gave_way(trial_id)


class _NoProgress(TrialProgressCallback):
    """Takes the place of Tune's own, which keeps every trial to print what it reported."""

    def log_result(self, trial: Trial, result: dict[str, Any], error: bool = False) -> None:
        """Prints nothing."""

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        """Prints nothing."""


def _name(trial: Trial) -> str:
    return f"trial-{job_of(trial).trial_id}-{trial.trial_id}"  # one that lost its process comes again


def make_scheduler(wanted: Fifo | Asha, feed: Feed, earlier: Iterable[Curve] = ()) -> TrialScheduler:
    """The scheduler of a pass. `earlier` are the epochs that trials have told already.

    Those take part in every comparison they came as far as, as if the driver had never changed. `feed` decides what
    becomes of free processes.
    """
    return _First(feed) if isinstance(wanted, Fifo) else _Halving(wanted, feed, earlier)


def _next_to_start(controller: Any, feed: Feed) -> Trial | None:
    """Chooses the trial that Tune is to start next; nothing but a scheduler is shown Tune's controller.

    A free process goes to a trial for which none is being started yet. To the first that waits, as Tune has it, it
    would go in place of the process that starts for that one: where trials are shorter than such a start, a driver that
    may run more of them would never get so far. But one that has waited long for room comes first, and before all
    others one that was lost, though its process starts: else all that are handed out later would begin before it.
    """
    tuner = controller._tune_controller
    _withdraw(tuner, feed)
    _let_go(tuner)
    feed.watch(tuner._actor_cache)
    _send_elsewhere(tuner, feed)
    _end_stuck(tuner, feed)
    late: list[Trial] = [trial for trial in tuner._pending_trials if _is_late(tuner, trial, feed)]
    if late:
        return max(late, key=lambda trial: _precedence(trial, feed))
    waiting: list[Trial] = [trial for trial in tuner._pending_trials_list if trial in tuner._pending_trials]
    return next((trial for trial in waiting if trial not in tuner._trial_to_actor), waiting[0] if waiting else None)


def _let_go(tuner: Any) -> None:
    """Has Tune forget the trials that ended: for a table that nobody reads it would keep all that they reported.

    The newest stays where there is no other, as Tune names one when it warns that nothing runs.
    """
    ended = tuner._stopped_trials | tuner._failed_trials
    if not ended:
        return
    tuner._trials[:] = [trial for trial in tuner._trials if not trial.is_finished()] or tuner._trials[-1:]
    tuner._pending_trials_list[:] = [trial for trial in tuner._pending_trials_list if trial not in ended]
    # One that failed stays alive to Tune, and in a reset that never ends.
    for kept in (tuner._stopped_trials, tuner._failed_trials, tuner._live_trials, tuner._resetting_trials):
        kept -= ended
    tuner._trials_to_cache -= ended
    for trial in ended & tuner._staged_trials:  # whose process failed as it was to take it over
        tuner._unstage_trial_with_resources(trial)
    for trial in ended:
        tuner._trial_metadata.pop(trial.trial_id, None)


def _is_late(tuner: Any, trial: Trial, feed: Feed) -> bool:
    """Whether a trial has waited long for room, or though it was lost, and could have a process that is free."""
    if feed.waited(trial.trial_id) <= PLACE_SECONDS:
        return False
    placeless = _is_placeless(tuner, trial)
    wants = placeless or feed.has_begun(job_of(trial))
    return wants and bool(tuner._actor_cache.has_cached_object(trial.placement_group_factory))


def _precedence(trial: Trial, feed: Feed) -> tuple[bool, float]:
    """By what one comes before others: that it lost a process or gave way, then that it has waited for longer."""
    return feed.has_begun(job_of(trial)), feed.waited(trial.trial_id)


def _is_placeless(tuner: Any, trial: Trial) -> bool:
    """Whether a process was asked for, for which no node has had room yet."""
    return tuner._trial_to_actor.get(trial) in tuner._actor_manager._pending_actors_to_attrs


def _withdraw(tuner: Any, feed: Feed) -> None:
    """Takes trials back that were handed out when more might run, and wait for room: others have it by now."""
    if not (excess := feed.excess()):
        return
    waiting = [
        trial for trial in tuner._pending_trials if trial not in tuner._trial_to_actor or _is_placeless(tuner, trial)
    ]
    for trial in sorted(waiting, key=lambda trial: _precedence(trial, feed))[:excess]:
        _drop_request(tuner, trial)
        tuner._scheduler_alg.on_trial_remove(tuner._wrapped(), trial)
        tuner._set_trial_status(trial, Trial.TERMINATED)
        feed.withdraw(trial.trial_id)


def _drop_request(tuner: Any, trial: Trial) -> None:
    """Asks for no process for it any more."""
    if (actor := tuner._trial_to_actor.pop(trial, None)) is not None:
        del tuner._actor_to_trial[actor]
        tuner._actor_manager.remove_actor(actor)
    if trial in tuner._staged_trials:
        tuner._staged_trials.remove(trial)
        tuner._actor_cache.decrease_max(trial.placement_group_factory)


def _send_elsewhere(tuner: Any, feed: Feed) -> None:
    """Has trials that wait for a process, handed out before, know which nodes are shunned now.

    Else one would wait for a node that is full while another has room again, or take what is kept for others.
    """
    for trial in list(tuner._pending_trials):
        shunned = feed.shunned_by(trial.trial_id)
        if tuple(trial.config["shunned"]) == shunned:
            continue
        if trial in tuner._trial_to_actor and not _is_placeless(tuner, trial):
            continue  # its process starts already
        _drop_request(tuner, trial)
        tuner._resources_to_pending_trials[trial.placement_group_factory].discard(trial)
        trial.config["shunned"] = shunned
        trial.update_resources(trial.get_trainable_cls().default_resource_request(trial.config))
        tuner._resources_to_pending_trials[trial.placement_group_factory].add(trial)
        if trial not in tuner._pending_trials_list:
            tuner._pending_trials_list.append(trial)


def _end_stuck(tuner: Any, feed: Feed) -> None:
    """Ends processes that have room, and in which no trial begins: nobody else hears of one that hangs as it starts."""
    started, live = tuner._started_actors, tuner._actor_manager._live_actors_to_ray_actors_resources
    processes = {
        trial.trial_id: live[actor][0]
        for trial, actor in tuner._trial_to_actor.items()
        if actor in live and (actor not in started or trial in tuner._resetting_trials)
    }
    for name in feed.stuck(processes):
        logger.warning("a process has not begun with its trial for %g s: killing it", STARTING_SECONDS)
        with contextlib.suppress(RayError):  # it is tried again
            ray.kill(processes[name])


class _First(FIFOScheduler):
    """First come, first served."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._feed = feed

    def __reduce__(self) -> tuple[Any, ...]:
        return (FIFOScheduler, ())  # Tune keeps a pickled copy in its books; nobody uses it

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """The first for which no process is being started."""
        return _next_to_start(tune_controller, self._feed)


class _Halving(ASHAScheduler):
    """Successive halving that stops nothing after the last comparison: a trial's own end comes later.

    A trial takes part in each comparison once, however often it began. To Tune it is another one each time. One that is
    to stop, but was killed before that was stored, stops at its next word.
    """

    def __init__(self, wanted: Asha, feed: Feed, earlier: Iterable[Curve]) -> None:
        self._feed, self._compared = feed, wanted.metric
        self._stops: set[int] = set()
        super().__init__(
            metric=wanted.metric,
            mode=best_direction(wanted.metric),
            grace_period=wanted.grace_epochs,
            reduction_factor=wanted.reduction,
            max_t=wanted.max_epochs or sys.maxsize,
            stop_last_trials=False,
        )
        self._sign = 1 if best_direction(wanted.metric) == "max" else -1
        for curve in earlier:
            for epoch, value in curve.points:
                self._compare(curve.trial_id, epoch, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return (FIFOScheduler, ())  # Tune keeps a pickled copy in its books; nobody uses it

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """The first for which no process is being started."""
        return _next_to_start(tune_controller, self._feed)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Whether the trial goes on, by all epochs that it tells now: after its last one it is not stopped any more."""
        report, trial_id = result.get("report"), job_of(trial).trial_id
        if not isinstance(report, EpochReport):
            return str(TrialScheduler.CONTINUE)
        for point in report.points:
            value = getattr(point, self._compared)
            if value is not None and self._compare(trial_id, point.epoch, value) == TrialScheduler.STOP:
                self._stops.add(trial_id)
        last = report.points[-1]
        goes_on = trial_id not in self._stops or last.epoch >= last.epochs
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Forgets what to Tune is another trial each time."""
        self._trial_info.pop(trial.trial_id, None)

    def _compare(self, trial_id: int, epoch: int, value: float) -> str:
        trial: Any = SimpleNamespace(trial_id=trial_id)  # all that a bracket asks of it
        return str(self._brackets[0].on_result(trial, epoch, self._sign * value))
