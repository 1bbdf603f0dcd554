"""One pass of Ray Tune over the unfinished trials of an experiment."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from service.queue.driver_reads import Curve
from service.specs.grid import ExperimentSpec, Resources
from service.specs.search import best_direction
from service.specs.spec import Asha, Fifo
from workers.driver.callback import TuneCallback, job_of
from workers.driver.recorder import Recorder
from workers.driver.tensorboard import TensorBoardLogger
from workers.driver.watchdog import Watchdog
from workers.trial_process.messages import FailureReport, Job, RunTrial, TuneConfig
from workers.trial_process.trainable import COMPARED_EPOCH, TrialTrainable

if TYPE_CHECKING:
    from workers.driver.search import SearchTrials  # brings Optuna

GIB = 2**30

_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # Tune's books serve nobody: the database is the truth
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failure has none of the metrics that a scheduler compares
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


def connect(address: str) -> None:
    """Joins the cluster."""
    os.environ.update(_ENVIRONMENT)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses its log files, which we turned off
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)


def shortage(resources: Resources) -> str | None:
    """Why the cluster could never run such a trial, or None. Tune would wait for ever."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    wishes = (
        ("cpus", resources.cpus, total.get("CPU", 0)),
        ("gpus", resources.gpus, total.get("GPU", 0)),
        ("memory_gib", resources.memory_gib or 0, total.get("memory", 0) / GIB),
    )
    for name, wanted, there in wishes:
        if wanted > there:
            fix = "ask for less or run a larger worker"
            return f"resources.{name} = {wanted:g}: the worker's cluster has {there:g}; {fix}"
    return None


@dataclass(frozen=True)
class Pass:
    """What one pass runs: jobs or, of a search, those it hands out; `earlier` is what its scheduler knows already.

    While the file `stop` is there no further trial begins.
    """

    spec: ExperimentSpec
    data_dir: Path
    folder: Path
    jobs: Sequence[Job]
    search: "SearchTrials | None" = None
    earlier: Iterable[Curve] = ()
    board_folder: Path | None = None

    @property
    def stop(self) -> Path:
        """The file that says so."""
        return self.folder / "stop"


class Passes:
    """Runs passes, one after another, and hands what happens to the recorder.

    `all_ended` is called when all trials of a pass did; Tune takes seconds more to stop its actors and return.
    """

    def __init__(self, run: RunTrial, recorder: Recorder, all_ended: Callable[[], None]) -> None:
        self._run, self._recorder, self._all_ended = run, recorder, all_ended
        self._watchdog: Watchdog | None = None

    def refuse(self, trial_id: int) -> None:
        """Ends a trial that must not run."""
        if self._watchdog is not None:
            self._watchdog.kill(trial_id)

    def run(self, work: Pass) -> None:
        """Runs every job once: each reports its end or loses its process."""
        limit = work.spec.timeout_seconds
        self._watchdog = Watchdog(limit, partial(self._timed_out, limit=limit))
        self._watchdog.start()
        try:
            self._tuner(work, self._watchdog).fit()
        finally:
            self._watchdog.close()

    def _tuner(self, work: Pass, watchdog: Watchdog) -> tune.Tuner:
        resources, search = work.spec.resources, work.search
        reserved = {"cpu": resources.cpus, "gpu": resources.gpus}
        if resources.memory_gib is not None:
            reserved["memory"] = resources.memory_gib * GIB
        expected = (lambda: len(work.jobs)) if search is None else (lambda: search.total)
        callbacks: list[tune.Callback] = [TuneCallback(self._recorder, watchdog, expected, self._all_ended)]
        if work.board_folder is not None:
            callbacks.append(TensorBoardLogger(work.board_folder))
        config = TuneConfig(
            run=self._run,
            data_dir=str(work.data_dir),
            cpus=resources.cpus,
            stop_file=str(work.stop),
            every_epoch=work.board_folder is not None or not isinstance(work.spec.scheduler, Fifo),
        )
        # As plain data: Tune puts placeholders where other objects stand.
        jobs = {} if search is not None else {"job": tune.grid_search([asdict(job) for job in work.jobs])}
        return tune.Tuner(
            tune.with_resources(TrialTrainable, reserved),
            param_space={**config, **jobs},
            tune_config=tune.TuneConfig(
                reuse_actors=True,
                max_concurrent_trials=work.spec.max_concurrent_trials,
                scheduler=make_scheduler(work.spec.scheduler, work.earlier),
                search_alg=search,
                num_samples=1 if search is None else search.most,
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

    def _timed_out(self, trial_id: int, limit: float | None) -> None:
        message = f"timeout_seconds = {limit:g}: the trial took longer and was killed; allow more, or make it smaller"
        self._recorder.reported(trial_id, FailureReport("timeout", message))


def _name(trial: Trial) -> str:
    return f"trial-{job_of(trial).trial_id}"


def make_scheduler(wanted: Fifo | Asha, earlier: Iterable[Curve] = ()) -> TrialScheduler:
    """The scheduler of a pass. `earlier` are the epochs of trials that are final already.

    Those take part in every comparison they came as far as, as if the driver had never changed.
    """
    if isinstance(wanted, Fifo):
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    return _Halving(wanted, earlier)


class _Halving(ASHAScheduler):
    """Successive halving that stops nothing after the last comparison: a trial's own end comes later."""

    def __init__(self, wanted: Asha, earlier: Iterable[Curve]) -> None:
        super().__init__(
            time_attr=COMPARED_EPOCH,
            metric=wanted.metric,
            mode=best_direction(wanted.metric),
            grace_period=wanted.grace_epochs,
            reduction_factor=wanted.reduction,
            max_t=wanted.max_epochs or sys.maxsize,
            stop_last_trials=False,
        )
        sign = 1 if best_direction(wanted.metric) == "max" else -1
        for curve in earlier:
            trial: Any = SimpleNamespace(trial_id=f"earlier-{curve.trial_id}")  # all that a bracket asks of it
            for epoch, value in curve.points:
                self._brackets[0].on_result(trial, epoch, sign * value)
