"""/v1/experiments."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends
from pydantic import WrapValidator

from service.api.dry_run import DRY_RUN
from service.api.http.authentication import Reader
from service.api.http.dependencies import Cursor, Db, ExperimentId, FieldNames, Limit
from service.api.http.examples import kept, page, shown
from service.api.http.problems import RESPONSES
from service.api.http.query_filters import ExperimentSort, TrialSort, WhichExperiments
from service.api.http.responses import Answer, experiments_out
from service.api.openapi_examples.experiments import CREATED, EXPERIMENT, SPEC
from service.api.submission import SpecSubmission
from service.api.trials import LISTED, TrialList
from service.experiments import store
from service.experiments.listing import list_experiments
from service.schemas.answers import Selection, SelectionPage
from service.schemas.experiments import ExperimentOut, ExperimentPage, NewExperimentOut
from service.schemas.field_selection import Fields
from service.schemas.trials import TrialPage
from service.specs.posted import as_posted
from service.specs.spec import ExperimentSpec

YAML_BODY = {
    "requestBody": {"content": {"application/yaml": {"schema": {"$ref": "#/components/schemas/ExperimentSpec"}}}}
}

router = APIRouter(prefix="/v1/experiments", tags=["experiments"], responses=RESPONSES)


@router.post(
    "",
    status_code=201,
    operation_id="createExperiment",
    responses=shown(CREATED | {"warnings": []}, 201, "Location") | DRY_RUN,
    response_model=NewExperimentOut,
    openapi_extra=YAML_BODY,
)
def create(
    spec: Annotated[ExperimentSpec, WrapValidator(as_posted), Body(openapi_examples={"quickstart": {"value": SPEC}})],
    posted: Annotated[SpecSubmission, Depends()],
) -> Any:
    """Stores the experiment and all its trials, or nothing. The spec may be sent as YAML, too.

    With an Idempotency-Key the same request can be sent again: it gets the same answer and stores nothing more.
    """
    return posted.post(spec)


@router.get(
    "",
    operation_id="listExperiments",
    responses=kept(page(EXPERIMENT), "Link"),
    response_model=ExperimentPage | SelectionPage,
)
def index(
    answer: Answer,
    database: Db,
    which: WhichExperiments,
    limit: Limit = 50,
    cursor: Cursor = None,
    sort: ExperimentSort = "-id",
    field_names: FieldNames = None,
) -> Any:
    """Experiments, newest first or in another order. `fields` without `spec` make a quick list of large grids.

    In the order of `id` or `created_at` pages hold everything once, whatever is added or changes meanwhile. In another
    one what changes its place meanwhile, as by `state`, may come twice or not at all.
    """
    wanted = Fields(ExperimentOut, field_names)
    with database.read() as session:
        found = list_experiments(session, which, limit=limit, sort=sort, cursor=cursor, with_spec="spec" in wanted)
        items = experiments_out(session, found.rows, wanted)
    return answer(wanted.page(ExperimentPage, items, found.next), following=found.next)


@router.get(
    "/{experiment_id}",
    operation_id="getExperiment",
    responses=kept(EXPERIMENT),
    response_model=ExperimentOut | Selection,
)
def show(experiment_id: ExperimentId, answer: Answer, who: Reader, database: Db, field_names: FieldNames = None) -> Any:
    """One experiment with its trials counted by state, and its progress.

    The ETag holds the revision: sent as If-Match with a change, it is refused if someone else made one meanwhile.
    """
    wanted = Fields(ExperimentOut, field_names)
    with database.read() as session:
        experiment = store.get_experiment(session, experiment_id, project_id=who.project_id)
        (found,) = experiments_out(session, [experiment], wanted)
        return answer(wanted.one(found), revision=experiment.revision)


@dataclass(frozen=True, kw_only=True)
class _TrialsInGrid(TrialList):
    """A list of an experiment's trials, in the grid's order unless another is asked for."""

    sort: TrialSort = "number"


@router.get(
    "/{experiment_id}/trials",
    operation_id="listTrials",
    responses=LISTED,
    response_model=TrialPage | SelectionPage,
)
def trials(experiment_id: ExperimentId, asked: Annotated[_TrialsInGrid, Depends()]) -> Any:
    """The experiment's trials in the grid's order or another, with the results of those that have one.

    As JSON, CSV, Markdown or LaTeX, by `format` or Accept, as `GET /v1/trials`.
    """
    return asked.page(experiment_id)
