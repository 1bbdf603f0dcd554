"""Experiments as MLflow runs, one per trial: `ttsv export --mlflow URI`.

A run is found again by the tag `ttsv.trial`, which names the trial by its number and the instant at which its
experiment was posted: the same wherever the service listens. What a run holds is marked by `ttsv.exported`; a run whose
trial did not change is left alone, and of one that went on only the new epochs are added. Where a trial was trained
anew and gave other numbers, its run is deleted and made again.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from service.client import Client
from service.client.frames import flat
from service.errors import UserError
from service.schemas.experiments import ExperimentOut
from service.schemas.trials import EpochOut, TrialOut
from service.specs.states import OPEN_TRIALS, TrialState

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

EXPERIMENT, TRIAL, EXPORTED, EPOCH, ERROR, ARTIFACT = (
    "ttsv.experiment",
    "ttsv.trial",
    "ttsv.exported",
    "ttsv.epoch",
    "ttsv.error",
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
    try:
        return _Export(client, MlflowClient(tracking_uri=uri), client.experiment(experiment_id), attach).run()
    except MlflowException as error:
        raise UserError(f"MLflow at {uri}: {error}") from error
    except ImportError as error:  # a store that needs more than the small package
        raise UserError(f"MLflow at {uri} needs the whole package ({error}): pip install mlflow") from None


class _Export:
    """One experiment on its way into a store; `attach` are the kinds of artifacts that are copied too."""

    def __init__(self, client: Client, store: "MlflowClient", experiment: ExperimentOut, attach: Sequence[str]) -> None:
        self._client, self._store, self._experiment, self._attached = client, store, experiment, attach
        self._name = f"{experiment.id}@{experiment.created_at.isoformat()}"
        self._target, name = self._mlflow_experiment()
        self._done = Exported(name)

    def run(self) -> Exported:
        """Brings the run of every trial up to date."""
        runs = {run.data.tags[TRIAL]: run for run in self._runs()}
        for trial in self._client.trials(self._experiment.id):
            self._export_trial(trial, runs.get(self._trial_name(trial)))
        return self._done

    def _export_trial(self, trial: TrialOut, run: "Run | None") -> None:
        store = self._store
        mark = hashlib.sha256(trial.model_dump_json().encode()).hexdigest()
        changed = run is None or run.data.tags.get(EXPORTED) != mark
        epochs = list(self._client.epochs(trial.id)) if changed else []
        if run is not None and epochs and self._differs(run, epochs):
            # A run keeps every point that it was sent: it would have the curves of both trainings.
            store.delete_run(run.info.run_id)
            run = None
        before = {} if run is None else run.data.tags
        files = self._client.artifacts(trial.id) if self._attached else []
        files = [file for file in files if file.kind in self._attached]
        missing = [file for file in files if before.get(ARTIFACT + file.kind) != file.sha256]
        if run is not None and not changed and not missing:
            self._done.same += 1
            return
        if run is None:
            self._done.created += 1
            run = self._create(trial)
        else:
            self._done.updated += 1
        run_id = run.info.run_id
        if changed:
            after = int(before.get(EPOCH, 0))
            self._log(run_id, trial, [epoch for epoch in epochs if epoch.epoch > after])
            store.set_tag(run_id, "ttsv.state", trial.state.value)
            if trial.error:
                store.set_tag(run_id, ERROR, trial.error[:_LONGEST_TAG])
            elif ERROR in before:
                store.delete_tag(run_id, ERROR)
            if trial.finished_at is None or trial.state in OPEN_TRIALS:
                store.update_run(run_id, status=_STATUS[trial.state])
            else:
                ended = _milliseconds(trial.finished_at)
                store.set_terminated(run_id, status=_STATUS[trial.state], end_time=ended)
        for file in missing:
            with tempfile.TemporaryDirectory() as folder:
                store.log_artifact(run_id, str(self._client.download(file, Path(folder))))
            store.set_tag(run_id, ARTIFACT + file.kind, file.sha256)
        store.set_tag(run_id, EXPORTED, mark)  # last: an export that was interrupted is taken up again

    def _create(self, trial: TrialOut) -> "Run":
        """A run with the trial's configuration, which never changes."""
        from mlflow.entities import Param, RunTag

        began = _milliseconds(trial.started_at or self._experiment.created_at)
        name = f"{trial.number}: {trial.config['model']} {trial.config['layer']} seed {trial.config['seed']}"
        tags = {TRIAL: self._trial_name(trial)}
        run = self._store.create_run(self._target, start_time=began, run_name=name, tags=tags)
        params = [Param(name, str(value)[:_LONGEST_PARAM]) for name, value in flat(trial.config)]
        about = {
            "ttsv.experiment_id": self._experiment.id,
            "ttsv.trial_id": trial.id,
            "ttsv.fingerprint": trial.fingerprint,
            "ttsv.cell": trial.cell,
        }
        described = [RunTag(name, str(value)) for name, value in about.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._store.log_batch(run.info.run_id, params=params[first : first + _MOST_PARAMS], tags=described)
        return run

    def _differs(self, run: "Run", epochs: Sequence[EpochOut]) -> bool:
        """Whether a run has other numbers of some epoch: a retry that began anew replaced it."""
        now = {epoch.epoch: epoch.train_loss for epoch in epochs}
        held = self._store.get_metric_history(run.info.run_id, "epoch/train_loss")
        return any(point.value != now.get(point.step, point.value) for point in held)

    def _log(self, run_id: str, trial: TrialOut, epochs: Sequence[EpochOut]) -> None:
        """Epochs that the run does not have, and the result."""
        from mlflow.entities import RunTag

        moment = _milliseconds(trial.started_at) if trial.started_at else 0
        together = _MOST_METRICS // len(EpochOut.model_fields)
        for first in range(0, len(epochs), together):
            batch = epochs[first : first + together]
            metrics = [metric for epoch in batch for metric in _metrics(epoch, moment)]
            self._store.log_batch(run_id, metrics=metrics, tags=[RunTag(EPOCH, str(batch[-1].epoch))])
        if (result := trial.result) is None:
            return
        values = result.model_dump(exclude={"protocol", "valid", "violations"})
        ended = _milliseconds(trial.finished_at) if trial.finished_at else moment
        tags = {"ttsv.protocol": result.protocol, "ttsv.valid": str(result.valid).lower()}
        if result.violations:
            tags["ttsv.violations"] = "; ".join(result.violations)[:_LONGEST_TAG]
        metrics = list(_present(values, ended, trial.epoch))
        self._store.log_batch(run_id, metrics=metrics, tags=[RunTag(name, value) for name, value in tags.items()])

    def _mlflow_experiment(self) -> tuple[str, str]:
        """Id and name of the MLflow experiment, found by its tag or made."""
        found = self._store.search_experiments(filter_string=f"tags.`{EXPERIMENT}` = '{self._name}'")
        if found:
            return found[0].experiment_id, found[0].name
        name = f"{self._experiment.name} (ttsv {self._experiment.id}, {self._experiment.created_at:%Y-%m-%d %H:%M:%S})"
        return self._store.create_experiment(name, tags={EXPERIMENT: self._name}), name

    def _runs(self) -> "Iterator[Run]":
        """All runs of an MLflow experiment that an export made."""
        token: str | None = None
        while True:
            page = self._store.search_runs([self._target], max_results=1000, page_token=token)
            yield from (run for run in page if TRIAL in run.data.tags)
            token = page.token
            if not token:
                return

    def _trial_name(self, trial: TrialOut) -> str:
        return f"{self._name}/{trial.number}"


def _metrics(epoch: EpochOut, moment: int) -> "Iterator[Metric]":
    """One epoch's; `epoch/` keeps them apart from the result's of the same names."""
    values = {f"epoch/{name}": value for name, value in epoch.model_dump(exclude={"epoch"}).items()}
    # No clock is read: the same epoch sent twice is the same point, which the store keeps once.
    return _present(values, moment + epoch.epoch, epoch.epoch)


def _present(values: Mapping[str, float | None], moment: int, step: int) -> "Iterator[Metric]":
    from mlflow.entities import Metric

    return (Metric(name, float(value), moment, step) for name, value in values.items() if value is not None)


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
