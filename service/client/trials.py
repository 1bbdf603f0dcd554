"""Trials: their configurations, results, epochs, spectra, logs and files."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import httpx2 as httpx

from service.client.connection import Connection, checked, covers
from service.client.downloads import Download
from service.client.frames import epoch_frame, result_frame
from service.schemas.trial_tables import Shown
from service.schemas.trials import (
    ArtifactList,
    ArtifactOut,
    AttemptList,
    AttemptOut,
    AttemptResources,
    CurvesOut,
    EpochOut,
    EpochSpectraOut,
    MetricsPage,
    ResourceList,
    ResultDetailOut,
    SpectraOut,
    TrialDetailOut,
    TrialOut,
    TrialPage,
)

if TYPE_CHECKING:
    import pandas as pd

_MAX_TAIL = 100_000


class TrialQuestion(TypedDict, total=False):
    """Which trials are wanted, and by what they are sorted.

    `rank` is a number or `none`, `failure` the class of what went wrong, `cell` the fingerprint without the seed.
    `where` are conditions on fields and results (`lr<=0.1`, `accuracy>=0.9`), all of which must hold.
    """

    state: str | Sequence[str] | None
    dataset: str | None
    model: str | None
    layer: str | None
    constraint: str | None
    rank: float | str | None
    seed: int | None
    cell: str | None
    failure: str | None
    where: str | Sequence[str] | None
    sort: str | None


class Trials(Connection):
    """Asks about trials."""

    @covers("listTrials", "listAllTrials")
    def trials(
        self, experiment_id: int | None = None, *, page_size: int = 1000, **question: Unpack[TrialQuestion]
    ) -> Iterator[TrialOut]:
        """An experiment's trials in the grid's order, or those of all experiments, fetched as they are needed."""
        path = "/v1/trials" if experiment_id is None else f"/v1/experiments/{experiment_id}/trials"
        asked = checked(TrialQuestion, question)
        return self._pages(TrialPage.model_validate_json, path, limit=page_size, **asked)

    @covers("listTrials", "listAllTrials")
    def trials_text(
        self,
        experiment_id: int | None = None,
        *,
        format: str,
        columns: str | Sequence[str] | None = None,
        hide: str | Sequence[str] | None = None,
        standalone: bool | None = None,
        page_size: int = 1000,
        **question: Unpack[TrialQuestion],
    ) -> str:
        """The first page of `trials` as a table: csv, markdown or latex.

        Its columns are the fields in which these trials differ, or `columns`; without those that `hide` names.
        """
        path = "/v1/trials" if experiment_id is None else f"/v1/experiments/{experiment_id}/trials"
        asked = checked(TrialQuestion, question) | {"columns": _joined(columns), "hide": _joined(hide)}
        return self._text(path, format=format, standalone=standalone, limit=page_size, **asked)

    @covers("getTrial")
    def trial(self, trial_id: int) -> TrialDetailOut:
        """One trial with its epochs, protocol, layers and files."""
        return self._get(TrialDetailOut, f"/v1/trials/{trial_id}")

    @covers("getTrialResult")
    def result(self, trial_id: int) -> ResultDetailOut:
        """A succeeded trial's result with its protocol, what its evaluations recorded, and where it ran."""
        return self._get(ResultDetailOut, f"/v1/trials/{trial_id}/result")

    @covers("getTrialSpectra")
    def spectra(self, trial_id: int) -> SpectraOut:
        """The singular values of a succeeded trial's layers."""
        return self._get(SpectraOut, f"/v1/trials/{trial_id}/spectra")

    @covers("listTrialSpectra")
    def spectra_of_epochs(self, trial_id: int, *, points: int = 300) -> EpochSpectraOut:
        """The singular values of a trial's layers while it trained, at so many of its epochs at most."""
        return self._get(EpochSpectraOut, f"/v1/trials/{trial_id}/spectra/epochs", points=points)

    @covers("listTrialAttempts")
    def attempts(self, trial_id: int) -> list[AttemptOut]:
        """Every start of a trial: when, where, and with which packages, processors, driver and code."""
        return self._get(AttemptList, f"/v1/trials/{trial_id}/attempts").items

    @covers("listTrialResources")
    def resources(self, trial_id: int) -> list[AttemptResources]:
        """What a trial's process used over time, attempt by attempt."""
        return self._get(ResourceList, f"/v1/trials/{trial_id}/resources").items

    @covers("listTrialMetrics")
    def epochs(self, trial_id: int, *, after: int = 0, points: int | None = None) -> Iterator[EpochOut]:
        """A trial's epochs past `after`, in order; with `points` so many of them that draw the same curves."""
        path = f"/v1/trials/{trial_id}/metrics"
        return self._pages(MetricsPage.model_validate_json, path, "after", after=after, points=points, limit=1000)

    @covers("getCurves")
    def curves(
        self,
        trials: Sequence[int] | None = None,
        *,
        experiment_id: int | None = None,
        best: int | None = None,
        metrics: str | Sequence[str] | None = None,
        points: int | None = None,
    ) -> CurvesOut:
        """The epochs of many trials by column: of these, or of the `best` cells of an experiment.

        Of each trial at most `points` epochs (by default 300) that draw the same curves.
        """
        named = None if trials is None else ",".join(map(str, trials))
        asked = {"trials": named, "experiment": experiment_id, "best": best, "metrics": _joined(metrics)}
        return self._get(CurvesOut, "/v1/curves", **asked, points=points)

    @covers("listTrialArtifacts")
    def artifacts(self, trial_id: int) -> list[ArtifactOut]:
        """The files that a trial left, with sizes and SHA-256; `download` fetches them."""
        return self._get(ArtifactList, f"/v1/trials/{trial_id}/artifacts").items

    @covers("getTrialLog")
    def trial_log(self, trial_id: int, *, tail: int = 1000) -> str:
        """The last lines of the log of a trial's newest attempt."""
        return self._text(f"/v1/trials/{trial_id}/logs", tail=min(tail, _MAX_TAIL))

    @covers("getExperimentLog")
    def experiment_log(self, experiment_id: int, *, tail: int = 1000) -> str:
        """The last lines of the log of the process that ran an experiment last."""
        return self._text(f"/v1/experiments/{experiment_id}/logs", tail=min(tail, _MAX_TAIL))

    @covers("getTrialLog")
    def follow_trial_log(self, trial_id: int, *, tail: int = 1000) -> Iterator[str]:
        """A trial's log as it is written, through all attempts, until the trial is final."""
        return self._pieces(f"/v1/trials/{trial_id}/logs", tail=min(tail, _MAX_TAIL), follow=True)

    @covers("getExperimentLog")
    def follow_experiment_log(self, experiment_id: int, *, tail: int = 1000) -> Iterator[str]:
        """An experiment's log as it is written, until the experiment is final."""
        return self._pieces(f"/v1/experiments/{experiment_id}/logs", tail=min(tail, _MAX_TAIL), follow=True)

    @covers("getArtifact")
    def download(self, artifact: ArtifactOut, target: str | Path) -> Path:
        """Fetches a file of a trial into a file or folder, and checks its SHA-256; the path where it is.

        A download that broke off, in an earlier call too, goes on where it was. Raises `DamagedError`.
        """
        failures = 0
        with Download(artifact, Path(target)) as download:
            while not download.done:
                have = download.size
                try:
                    with self._stream(download.path, headers=download.headers) as answer:
                        if answer.is_success:
                            download.begin(answer)
                            for chunk in answer.iter_bytes():
                                download.write(chunk)
                        outcome: httpx.Response | httpx.TransportError = answer
                except httpx.TransportError as error:
                    outcome = error
                if not download.done:
                    failures = 0 if download.size > have else failures
                    time.sleep(self._pause_after(outcome, failures))
                    failures += 1
            return download.finish()

    def results(
        self,
        experiment_id: int | None = None,
        *,
        dataset: str | None = None,
        state: str | None = None,
        columns: str | Sequence[str] | None = None,
        hide: str | Sequence[str] | None = None,
    ) -> "pd.DataFrame":
        """One row per trial of an experiment, or of a data set over all experiments, indexed by the trial's id.

        Columns: its state, its configuration by dotted path (`training.lr`) and every metric of its result, NaN where
        it has none. `columns` and `hide` choose among the fields of the configuration, by whole or short names;
        `attrs["columns"]` are the fields in which the trials differ, `attrs["common"]` has what they share. Raises
        `QueryError` for a name that is no field.
        """
        return result_frame(self.trials(experiment_id, dataset=dataset, state=state), Shown.named(columns, hide))

    def metrics(self, trial_id: int) -> "pd.DataFrame":
        """One row per epoch of a trial, indexed by its number."""
        return epoch_frame(self.epochs(trial_id))


def _joined(names: str | Sequence[str] | None) -> str | None:
    """Several names as the API takes them: one text."""
    return names if names is None or isinstance(names, str) else ",".join(names)
