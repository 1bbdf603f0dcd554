"""Experiments as MLflow runs, one per trial: `ttsv export --mlflow URI`.

A run is found again by the tag `ttsv.trial`, which names the trial by its number and the instant at which its
experiment was posted: the same wherever the service listens. What a run holds is marked by `ttsv.exported`; a run whose
trial did not change is left alone, and of one that went on only the new epochs are added.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.client import Client
from service.client.frames import flat
from service.errors import UserError
from service.schemas.experiments import ArtifactOut, EpochOut, ExperimentOut, TrialOut
from service.specs.states import OPEN_TRIALS, TrialState

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

EXPERIMENT, TRIAL, EXPORTED, EPOCH, ARTIFACT = (
    "ttsv.experiment",
    "ttsv.trial",
    "ttsv.exported",
    "ttsv.epoch",
    "ttsv.artifact.",
)
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM, _LONGEST_TAG = 1000, 100, 6000, 5000
_STATUS = {
    TrialState.QUEUED: "SCHEDULED",
    TrialState.RUNNING: "RUNNING",
    TrialState.SUCCEEDED: "FINISHED",
    TrialState.EARLY_STOPPED: "KILLED",  # it has no result, so it must not look as if it had
    TrialState.FAILED: "FAILED",
    TrialState.DIVERGED: "FAILED",
    TrialState.CANCELLED: "KILLED",
}


@dataclass
class Exported:
    """What an export did: the MLflow experiment's name, and runs that were made, updated, and left as they were."""

    name: str
    created: int = 0
    updated: int = 0
    same: int = 0


def export_experiment(client: Client, experiment_id: int, uri: str, *, attach: Sequence[str] = ()) -> Exported:
    """Brings an MLflow store up to date with an experiment; `attach` are kinds of artifacts that are copied too.

    Raises `UserError` where MLflow is missing or refuses.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise UserError("MLflow is not installed: pip install 'ttsv[mlflow]'") from None
    experiment = client.experiment(experiment_id)
    try:
        store = MlflowClient(tracking_uri=uri)
        target, name = _mlflow_experiment(store, experiment)
        runs = {run.data.tags[TRIAL]: run for run in _runs(store, target)}
        done = Exported(name)
        for trial in client.trials(experiment_id):
            run = runs.get(_trial_name(experiment, trial))
            _export_trial(client, store, target, experiment, trial, run, attach, done)
    except MlflowException as error:
        raise UserError(f"MLflow at {uri}: {error}") from error
    except ImportError as error:  # a store that needs more than the small package
        raise UserError(f"MLflow at {uri} needs the whole package ({error}): pip install mlflow") from None
    return done


def _export_trial(
    client: Client,
    store: "MlflowClient",
    target: str,
    experiment: ExperimentOut,
    trial: TrialOut,
    run: "Run | None",
    attach: Sequence[str],
    done: Exported,
) -> None:
    before = {} if run is None else run.data.tags
    mark = hashlib.sha256(trial.model_dump_json().encode()).hexdigest()
    files = [file for file in client.artifacts(trial.id) if file.kind in attach] if attach else []
    missing = [file for file in files if before.get(ARTIFACT + file.kind) != file.sha256]
    if run is not None and before.get(EXPORTED) == mark and not missing:
        done.same += 1
        return
    if run is None:
        done.created += 1
        run = _create(store, target, experiment, trial)
    else:
        done.updated += 1
    run_id = run.info.run_id
    if before.get(EXPORTED) != mark:
        _log(client, store, run_id, trial, after=int(before.get(EPOCH, 0)))
        store.set_tag(run_id, "ttsv.state", trial.state.value)
        if trial.error:
            store.set_tag(run_id, "ttsv.error", trial.error[:_LONGEST_TAG])
        ended = None if trial.finished_at is None or trial.state in OPEN_TRIALS else _milliseconds(trial.finished_at)
        if ended is None:
            store.update_run(run_id, status=_STATUS[trial.state])
        else:
            store.set_terminated(run_id, status=_STATUS[trial.state], end_time=ended)
    _attach(client, store, run_id, missing)
    store.set_tag(run_id, EXPORTED, mark)  # last: an export that was interrupted is taken up again


def _create(store: "MlflowClient", target: str, experiment: ExperimentOut, trial: TrialOut) -> "Run":
    """A run with the trial's configuration, which never changes."""
    from mlflow.entities import Param, RunTag

    began = _milliseconds(trial.started_at or experiment.created_at)
    name = f"{trial.number}: {trial.config['model']} {trial.config['layer']} seed {trial.config['seed']}"
    run = store.create_run(target, start_time=began, run_name=name, tags={TRIAL: _trial_name(experiment, trial)})
    params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in flat(trial.config)]
    about = {
        "ttsv.experiment_id": experiment.id,
        "ttsv.trial_id": trial.id,
        "ttsv.fingerprint": trial.fingerprint,
        "ttsv.cell": trial.cell,
    }
    tags = [RunTag(name, str(value)) for name, value in about.items()]
    while params:
        store.log_batch(run.info.run_id, params=params[:_MOST_PARAMS], tags=tags)
        params = params[_MOST_PARAMS:]
    return run


def _log(client: Client, store: "MlflowClient", run_id: str, trial: TrialOut, after: int) -> None:
    """The epochs past `after`, and the result."""
    from mlflow.entities import RunTag

    epochs = client.epochs(trial.id, after=after)
    moment = _milliseconds(trial.started_at) if trial.started_at else 0
    while batch := list(islice(epochs, _MOST_METRICS // len(EpochOut.model_fields))):
        metrics = [metric for epoch in batch for metric in _metrics(epoch, moment)]
        store.log_batch(run_id, metrics=metrics, tags=[RunTag(EPOCH, str(batch[-1].epoch))])
    if trial.result is not None:
        values = trial.result.model_dump(exclude={"protocol", "valid", "violations"})
        ended = _milliseconds(trial.finished_at) if trial.finished_at else moment
        tags = {"ttsv.protocol": trial.result.protocol, "ttsv.valid": str(trial.result.valid).lower()}
        if trial.result.violations:
            tags["ttsv.violations"] = "; ".join(trial.result.violations)[:_LONGEST_TAG]
        store.log_batch(
            run_id,
            metrics=list(_present(values, ended, trial.epoch)),
            tags=[RunTag(name, value) for name, value in tags.items()],
        )


def _metrics(epoch: EpochOut, moment: int) -> "Iterator[Metric]":
    """One epoch's; `epoch/` keeps them apart from the result's of the same names."""
    values = {f"epoch/{name}": value for name, value in epoch.model_dump(exclude={"epoch"}).items()}
    # No clock is read: the same epoch sent twice is the same point, which the store keeps once.
    return _present(values, moment + epoch.epoch, epoch.epoch)


def _present(values: dict[str, Any], moment: int, step: int) -> "Iterator[Metric]":
    from mlflow.entities import Metric

    return (Metric(name, float(value), moment, step) for name, value in values.items() if value is not None)


def _attach(client: Client, store: "MlflowClient", run_id: str, files: Sequence[ArtifactOut]) -> None:
    for file in files:
        with tempfile.TemporaryDirectory() as folder:
            store.log_artifact(run_id, str(client.download(file, Path(folder))))
        store.set_tag(run_id, ARTIFACT + file.kind, file.sha256)


def _mlflow_experiment(store: "MlflowClient", experiment: ExperimentOut) -> tuple[str, str]:
    """Id and name of the MLflow experiment, found by its tag or made."""
    found = store.search_experiments(filter_string=f"tags.`{EXPERIMENT}` = '{_name(experiment)}'")
    if found:
        return found[0].experiment_id, found[0].name
    name = f"{experiment.name} (ttsv {experiment.id}, {experiment.created_at:%Y-%m-%d %H:%M:%S})"
    return store.create_experiment(name, tags={EXPERIMENT: _name(experiment)}), name


def _runs(store: "MlflowClient", target: str) -> "Iterator[Run]":
    """All runs of an MLflow experiment that an export made."""
    token: str | None = None
    while True:
        page = store.search_runs([target], max_results=1000, page_token=token)
        yield from (run for run in page if TRIAL in run.data.tags)
        token = page.token
        if not token:
            return


def _name(experiment: ExperimentOut) -> str:
    return f"{experiment.id}@{experiment.created_at.isoformat()}"


def _trial_name(experiment: ExperimentOut, trial: TrialOut) -> str:
    return f"{_name(experiment)}/{trial.number}"


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
