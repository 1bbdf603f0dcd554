"""/v1/experiments."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Response

from service import store
from service.api.access import Reader, Submitter
from service.api.answers import experiments_out, trial_page
from service.api.dry_run import DRY_RUN, DryRun, dry_run
from service.api.examples import CREATED, EXPERIMENT, SPEC, page, shown
from service.api.filters import ExperimentSort, TrialSort, WhichExperiments, WhichTrials
from service.api.parts import UNCHANGED, Answer, Config, Cursor, Db, ExperimentId, FieldNames, Limit
from service.api.problems import RESPONSES
from service.api.storing import New, store_new
from service.api.trial_examples import TRIAL
from service.db import Database
from service.fields import Fields
from service.grid import PRINTABLE, ExperimentSpec, expand_grid
from service.idle_fields import warnings
from service.listing import list_experiments
from service.schemas import ExperimentOut, ExperimentPage, NewExperimentOut, Selection, SelectionPage, TrialPage
from service.security import Principal
from service.settings import Settings
from service.submission import Draft

YAML_BODY = {
    "requestBody": {"content": {"application/yaml": {"schema": {"$ref": "#/components/schemas/ExperimentSpec"}}}}
}

router = APIRouter(prefix="/v1/experiments", tags=["experiments"], responses=RESPONSES)

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200, pattern=PRINTABLE)]


@router.post(
    "",
    status_code=201,
    operation_id="createExperiment",
    responses=shown(CREATED | {"warnings": []}, 201) | DRY_RUN,
    response_model=NewExperimentOut,
    openapi_extra=YAML_BODY,
)
def create(
    spec: Annotated[ExperimentSpec, Body(openapi_examples={"quickstart": {"value": SPEC}})],
    response: Response,
    database: Db,
    settings: Config,
    who: Submitter,
    dry: DryRun = False,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Stores the experiment and all its trials, or nothing. The spec may be sent as YAML, too.

    With an Idempotency-Key the same request can be sent again: it gets the same answer and stores nothing more.
    """
    if dry:
        return dry_run(spec, who, database, settings)
    return store_experiment(spec, who, response, database, settings, idempotency_key)


@router.get(
    "",
    operation_id="listExperiments",
    responses=shown(page(EXPERIMENT)) | UNCHANGED,
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

    Pages hold everything once, whatever is added or changes state meanwhile.
    """
    wanted = Fields(ExperimentOut, field_names)
    with database.read() as session:
        found = list_experiments(session, which, limit=limit, sort=sort, cursor=cursor, with_spec="spec" in wanted)
        items = experiments_out(session, found.rows, wanted)
    return answer(wanted.page(ExperimentPage, items, found.next), following=found.next)


@router.get(
    "/{experiment_id}",
    operation_id="getExperiment",
    responses=shown(EXPERIMENT) | UNCHANGED,
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


@router.get(
    "/{experiment_id}/trials",
    operation_id="listTrials",
    responses=shown(page(TRIAL)) | UNCHANGED,
    response_model=TrialPage | SelectionPage,
)
def trials(
    experiment_id: ExperimentId,
    answer: Answer,
    database: Db,
    which: WhichTrials,
    limit: Limit = 100,
    cursor: Cursor = None,
    sort: TrialSort = "number",
    field_names: FieldNames = None,
) -> Any:
    """The experiment's trials in the grid's order or another, with the results of those that have one."""
    with database.read() as session:
        store.get_experiment(session, experiment_id, project_id=which.project_id)
        which = replace(which, experiment_id=experiment_id)
        return trial_page(session, answer, which, limit=limit, cursor=cursor, sort=sort, field_names=field_names)


def store_experiment(
    spec: ExperimentSpec,
    who: Principal,
    response: Response,
    database: Database,
    settings: Settings,
    idempotency_key: str | None,
) -> dict[str, Any]:
    """Stores what a spec asks for, once per key; the answer as plain data."""
    plan = expand_grid(spec, max_trials=settings.max_trials)
    new = New(Draft(spec, plan))
    answer = store_new(database, who, new, response, idempotency_key, spec.model_dump(mode="json"))
    return answer | {"warnings": warnings(spec, plan)}
