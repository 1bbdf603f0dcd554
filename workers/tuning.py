"""One pass of Ray Tune over the unfinished trials of an experiment."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial

from service.grid import Resources
from workers.recorder import Recorder
from workers.reports import Job, RunTrial
from workers.trainable import TrialTrainable

logger = logging.getLogger(__name__)

_REASON_CHARACTERS = 2000

_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # Tune's books serve nobody: the database is the truth
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
    for name, wanted in (("CPU", resources.cpus), ("GPU", resources.gpus)):
        there = total.get(name, 0)
        if wanted > there:
            field = f"resources.{name.lower()}s"
            return f"{field} = {wanted:g}: the worker's cluster has {there:g}; ask for less or run a larger worker"
    return None


def run_pass(
    jobs: Sequence[Job],
    *,
    run: RunTrial,
    recorder: Recorder,
    all_ended: Callable[[], None],
    resources: Resources,
    max_concurrent_trials: int | None,
    data_dir: Path,
    folder: Path,
) -> None:
    """Runs every job once: each reports its end or loses its process.

    `all_ended` is called when all did; Tune takes seconds more to stop its actors and return.
    """
    tune.Tuner(
        tune.with_resources(TrialTrainable, {"cpu": resources.cpus, "gpu": resources.gpus}),
        param_space={
            # As plain data: Tune puts placeholders where other objects stand.
            "job": tune.grid_search([asdict(job) for job in jobs]),
            "run": run,
            "data_dir": str(data_dir),
            "cpus": resources.cpus,
        },
        tune_config=tune.TuneConfig(
            reuse_actors=True,
            max_concurrent_trials=max_concurrent_trials,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            callbacks=[_Listener(recorder, len(jobs), all_ended)],
            failure_config=tune.FailureConfig(max_failures=0),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    ).fit()


class _Listener(tune.Callback):
    """Hands Tune's events to the recorder. It runs in Tune's control loop: it must not wait, and must not fail."""

    def __init__(self, recorder: Recorder, jobs: int, all_ended: Callable[[], None]) -> None:
        self._recorder, self._open, self._all_ended = recorder, jobs, all_ended

    def __reduce__(self) -> tuple[Any, ...]:
        return (tune.Callback, ())  # Tune keeps a pickled copy in its books; nobody uses it

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        """A process was found for the trial."""
        self._recorder.started(_job(trial).trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: object
    ) -> None:
        """The trial reported."""
        self._recorder.reported(_job(trial).trial_id, result["report"])
        if result["done"]:
            self._count_end()

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        """The trial's process died (what a trial raises itself it reports)."""
        self._recorder.died(_job(trial).trial_id, _reason(trial))
        self._count_end()

    def _count_end(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._all_ended()


def _job(trial: Trial) -> Job:
    return Job(**trial.config["job"])


def _name(trial: Trial) -> str:
    return f"trial-{_job(trial).trial_id}"


def _reason(trial: Trial) -> str:
    """What Ray knows about the death of a trial's process."""
    try:
        text = Path(trial.error_file).read_text()
    except (OSError, TypeError):
        return "the process died, and Ray does not say why"
    _, _, last = text.rpartition("Failure # ")
    reason = last.partition("\n")[2].partition(" Some common causes")[0]  # the rest is advice about Ray
    return reason[-_REASON_CHARACTERS:].strip()
