"""/v1/trials: lists over experiments, single trials, their results and epochs, the spectra of their layers."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from service.api.http.authentication import Reader
from service.api.http.dependencies import Cursor, Db, FieldNames, Limit, TrialId
from service.api.http.examples import UNCHANGED, kept
from service.api.http.formats import VARY, AskedFormat, Format, forms
from service.api.http.problems import RESPONSES, refusals
from service.api.http.query_filters import ShownFields, TrialSort, WhichTrials
from service.api.http.responses import Answer, result_out, trials_out
from service.api.openapi_examples.trials import (
    ATTEMPTS,
    EPOCH_SPECTRA,
    METRICS,
    RESOURCES,
    RESULT,
    SPECTRA,
    TRIAL_DETAIL,
    TRIALS,
    TRIALS_TEXT,
)
from service.database import Result
from service.errors import FieldProblem, NotFoundError, QueryError
from service.experiments import epoch_points, epoch_spectra, store
from service.experiments.listing import list_trials
from service.experiments.store import TrialDetail
from service.queue import attempts, rests
from service.queue.attempts import AttemptDetail
from service.schemas.answers import Selection, SelectionMetrics, SelectionPage
from service.schemas.field_selection import Fields
from service.schemas.trial_tables import trial_records, trials_sheet
from service.schemas.trials import (
    ArtifactOut,
    AttemptList,
    AttemptOut,
    AttemptResources,
    ColumnOut,
    EpochOut,
    EpochSpectraOut,
    LayerSpectraOut,
    MetricsPage,
    ResourceList,
    ResourcePoint,
    ResultDetailOut,
    SpectraOut,
    TrialDetailOut,
    TrialOut,
    TrialPage,
)
from ttsv.results import SPECTRUM_SHARES

router = APIRouter(prefix="/v1/trials", tags=["trials"], responses=RESPONSES)

MAX_POINTS_SHOWN = 1000
"""A trial is shown with so many epochs; of more, with a selection (`epoch_points.thin`)."""


@dataclass(frozen=True, kw_only=True)
class TrialList:
    """A list of trials as a request asks for it, newest first or in another order.

    As a table (CSV, Markdown, LaTeX) it has the fields in which the trials of the page differ, or those asked for.
    """

    answer: Answer
    form: Annotated[AskedFormat, Depends()]
    database: Db
    which: WhichTrials
    shown: ShownFields
    limit: Limit = 100
    cursor: Cursor = None
    sort: TrialSort = "-id"
    field_names: FieldNames = None

    def page(self, experiment_id: int | None = None) -> Response:
        """A page of the trials of one experiment, or of all; raises `QueryError` and `NotFoundError`."""
        wanted = Fields(TrialOut, self.field_names)
        if not wanted.everything and self.form.format is not Format.JSON:
            raise QueryError([FieldProblem("fields", "is for JSON; columns and hide choose those of a table")])
        with self.database.read() as session:
            if experiment_id is not None:
                store.get_experiment(session, experiment_id, project_id=self.which.project_id)
            found = list_trials(
                session,
                replace(self.which, experiment_id=experiment_id),
                limit=self.limit,
                sort=self.sort,
                cursor=self.cursor,
                with_config="config" in wanted,
                with_result="result" in wanted,
            )
            items = trials_out(session, found.rows, wanted)
        if self.form.format is Format.JSON:
            answer = self.answer(self._with_columns(wanted.page(TrialPage, items, found.next)), following=found.next)
            answer.headers["Vary"] = VARY
            return answer
        title = "Trials" if experiment_id is None else f"Trials of experiment {experiment_id}"
        table = self.form.answer(
            dict,
            lambda: [trials_sheet(items, self.shown, title=title)],
            lambda: trial_records(items, self.shown),
        )
        table.headers.update(self.answer.link(found.next))
        return table

    def _with_columns(self, page: Any) -> Any:
        """A page of whole trials with what a table of them has as columns, and what they share."""
        if not isinstance(page, TrialPage):
            return page
        shape = self.shown.columns([trial.config for trial in page.items])
        columns, decided = (
            [ColumnOut(field=one.field, name=one.name) for one in some] for some in (shape.fields, shape.decided)
        )
        return page.model_copy(update={"columns": columns, "decided": decided, "common": shape.common})


LISTED = forms(TRIALS, TRIALS_TEXT, "Link", "ETag", "Cache-Control") | UNCHANGED | refusals(406)
"""What both lists of trials say of their answers."""


@router.get(
    "",
    operation_id="listAllTrials",
    responses=LISTED,
    response_model=TrialPage | SelectionPage,
)
def index(asked: Annotated[TrialList, Depends()]) -> Any:
    """Trials of all experiments, newest first or in another order.

    As JSON, CSV, Markdown or LaTeX, by `format` or Accept. `columns` of the answer are the fields in which the trials
    of the page differ, or those that `columns` names, and `common` what they share: the columns of such a table.
    Without `columns` those that another one decides are in `decided` alone.
    """
    return asked.page()


@router.get(
    "/{trial_id}",
    operation_id="getTrial",
    responses=kept(TRIAL_DETAIL),
    response_model=TrialDetailOut | Selection,
)
def show(trial_id: TrialId, answer: Answer, who: Reader, database: Db, field_names: FieldNames = None) -> Any:
    """One trial with its epochs, its result, the protocol of the result and every layer's singular values.

    Of more than 1000 epochs it has 1000 that draw the same curves; `/metrics` has them all.
    """
    wanted = Fields(TrialDetailOut, field_names)
    with database.read() as session:
        found = store.trial_detail(session, trial_id, project_id=who.project_id)
        epochs = "epoch_metrics" in wanted
        drawn = epoch_points.sample(session, trial_id, epoch_points.METRICS, MAX_POINTS_SHOWN) if epochs else []
        (plain,) = trials_out(session, [(found.trial, found.result)])
    values = dict(plain) | {
        "epoch_metrics": [EpochOut.model_construct(**point) for point in drawn],
        "protocol": found.protocol,
        "layers": found.result.layers if found.result else None,
        "environment": found.result.environment if found.result else None,
        "artifacts": [ArtifactOut.of(artifact) for artifact in found.artifacts],
        "rests_until": rests.until(found.trial),
    }
    return answer(wanted.one(TrialDetailOut.model_construct(**values)))


@router.get(
    "/{trial_id}/result",
    operation_id="getTrialResult",
    responses=kept(RESULT),
    response_model=ResultDetailOut | Selection,
)
def result(trial_id: TrialId, answer: Answer, who: Reader, database: Db, field_names: FieldNames = None) -> Any:
    """A succeeded trial's result with its protocol, what its evaluations recorded, and where it ran."""
    wanted = Fields(ResultDetailOut, field_names)
    with database.read() as session:
        detail = store.trial_detail(session, trial_id, project_id=who.project_id)
        found = _result(detail)
        values = dict(result_out(found)) | {
            "trial_id": trial_id,
            "protocol_record": detail.protocol or {},
            "evaluation": found.evaluation,
            "environment": found.environment,
            "created_at": found.created_at,
        }
    return answer(wanted.one(ResultDetailOut.model_construct(**values)))


@router.get(
    "/{trial_id}/spectra",
    operation_id="getTrialSpectra",
    responses=kept(SPECTRA),
    response_model=SpectraOut,
)
def spectra(trial_id: TrialId, answer: Answer, who: Reader, database: Db) -> Any:
    """The singular values of a succeeded trial's layers: largest and smallest, and the largest before projection."""
    with database.read() as session:
        found = _result(store.trial_detail(session, trial_id, project_id=who.project_id))
        largest, layers = found.max_singular_value, [dict(layer) for layer in found.layers]
    return answer(SpectraOut.model_construct(trial_id=trial_id, max_singular_value=largest, layers=layers))


@router.get(
    "/{trial_id}/spectra/epochs",
    operation_id="listTrialSpectra",
    responses=kept(EPOCH_SPECTRA),
    response_model=EpochSpectraOut,
)
def spectra_of_epochs(
    trial_id: TrialId,
    answer: Answer,
    who: Reader,
    database: Db,
    points: Annotated[int, Query(ge=2, le=1000, description="So many epochs at most, evenly chosen.")] = 300,
) -> Any:
    """The singular values of a trial's layers while it trained: quantiles, before and after the projection.

    Of trials whose `training.spectra_every` asked for them; of others there are no epochs.
    """
    with database.read() as session:
        store.get_trial(session, trial_id, project_id=who.project_id)
        found = epoch_spectra.history(session, trial_id, points)
    layers = [LayerSpectraOut.model_construct(**vars(layer)) for layer in found.layers]
    shares = list(SPECTRUM_SHARES)
    return answer(EpochSpectraOut(trial_id=trial_id, shares=shares, epochs=found.epochs, layers=layers))


def _result(detail: TrialDetail) -> Result:
    if detail.result is None:
        raise NotFoundError(f"trial {detail.trial.id} has no result: it is {detail.trial.state.value}")
    return detail.result


@router.get(
    "/{trial_id}/attempts",
    operation_id="listTrialAttempts",
    responses=kept(ATTEMPTS),
    response_model=AttemptList,
)
def list_attempts(trial_id: TrialId, answer: Answer, who: Reader, database: Db) -> Any:
    """Every start of a trial: when, where, and with which packages, processors, driver and code."""
    with database.read() as session:
        store.get_trial(session, trial_id, project_id=who.project_id)
        found = attempts.listed(session, trial_id)
    return answer(AttemptList(items=[AttemptOut.model_validate(one) for one in found]))


@router.get(
    "/{trial_id}/resources",
    operation_id="listTrialResources",
    responses=kept(RESOURCES),
    response_model=ResourceList,
)
def resources(trial_id: TrialId, answer: Answer, who: Reader, database: Db) -> Any:
    """What a trial's process used over time, attempt by attempt: CPU, memory, GPU, memory on it.

    At most 300 points of each attempt; those of one that runs are at most half a minute old once it reports.
    """
    with database.read() as session:
        store.get_trial(session, trial_id, project_id=who.project_id)
        found = attempts.listed(session, trial_id, resources=True)
    return answer(ResourceList(items=[_resources_of(one) for one in found]))


def _resources_of(attempt: AttemptDetail) -> AttemptResources:
    used = attempt.resources
    points: list[ResourcePoint] = []
    if used is not None:
        columns = used["seconds"], used["cpu"], used["memory"], used["gpu"], used["gpu_memory"]
        points = [
            ResourcePoint.model_construct(seconds=seconds, cpu=cpu, memory=memory, gpu=gpu, gpu_memory=gpu_memory)
            for seconds, cpu, memory, gpu, gpu_memory in zip(*columns, strict=True)
        ]
    return AttemptResources(
        number=attempt.number,
        started_at=attempt.started_at,
        place=attempt.place,
        interval=None if used is None else used["interval"],
        points=points,
    )


@router.get(
    "/{trial_id}/metrics",
    operation_id="listTrialMetrics",
    responses=kept(METRICS, "Link"),
    response_model=MetricsPage | SelectionMetrics,
)
def metrics(
    trial_id: TrialId,
    answer: Answer,
    who: Reader,
    database: Db,
    limit: Limit = 100,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="Only later epochs: `next` of the page before.")] = 0,
    count: Annotated[
        int | None, Query(alias="points", ge=3, le=10_000, description="Instead of a page: so many epochs of all.")
    ] = None,
    field_names: FieldNames = None,
) -> Any:
    """A page of a trial's epochs in their order, or with `points` at most so many of them that draw the same curves.

    Those are epochs as they are, no means: the first, the last, and between them what largest-triangle-three-buckets
    chooses over all metrics asked for (`fields`), each in units of its range. `epoch` is always among the fields.
    """
    wanted = Fields(EpochOut, field_names)
    metrics = [name for name in epoch_points.METRICS if name in wanted]
    with database.read() as session:
        store.get_trial(session, trial_id, project_id=who.project_id)
        following = None
        if count is None:
            found = epoch_points.page(session, trial_id, metrics, limit=limit + 1, after=after)
            if len(found) > limit:
                found.pop()
                following = found[-1]["epoch"]
        else:
            found = epoch_points.sample(session, trial_id, metrics, count, after=after)
    body = {"items": found, "next": following, "sampled": count is not None}
    return answer(body, following=following, page_parameter="after")
