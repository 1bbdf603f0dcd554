"""/v1/experiments."""

from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Response
from fastapi.responses import JSONResponse
from sqlalchemy.orm import Session

from service.access.security import Principal
from service.api.http.authentication import Reader, Submitter
from service.api.http.dependencies import UNCHANGED, Answer, Config, Cursor, Db, ExperimentId, FieldNames, Limit
from service.api.http.problems import RESPONSES
from service.api.http.query_filters import ExperimentSort, TrialSort, WhichExperiments, WhichTrials
from service.api.http.responses import experiment_out, experiments_out, trial_page
from service.api.openapi_examples.experiments import CREATED, EXPERIMENT, SPEC, page, shown
from service.api.openapi_examples.trials import TRIAL
from service.database.engine import Database
from service.experiments import store
from service.experiments.estimate import Estimate, Estimator
from service.experiments.listing import list_experiments
from service.experiments.submission import Draft, submit
from service.schemas.experiments import (
    SHOWN,
    DryRunOut,
    DryTotals,
    DryTrialOut,
    ExperimentOut,
    ExperimentPage,
    NewExperimentOut,
    Selection,
    SelectionPage,
    TrialPage,
)
from service.schemas.field_selection import Fields
from service.specs.grid import PRINTABLE, ExperimentSpec, expand_grid
from service.specs.planner import warnings

DryRun = Annotated[
    bool, Query(description="Store nothing: answer (200) with the trials and what they would cost.", alias="dry_run")
]

_EXAMPLE = {
    "grid_points": 24,
    "trial_count": 20,
    "totals": {"steps": 5040, "seconds": None},
    "warnings": [],
    "trials": [
        {name: TRIAL[name] for name in ("fingerprint", "cell", "config")}
        | {
            "number": 0,
            "parameters": 2486,
            "compression": 35.5,
            "multiply_accumulates": 45_000,
            "steps": 252,
            "seconds": None,
            "basis": None,
            "reasons": ["nothing was measured yet from which the time could be told"],
        }
    ],
}

DRY_RUN: dict[int | str, dict[str, Any]] = {
    200: {
        "model": DryRunOut,
        "description": "With dry_run: what would be stored.",
        "content": {"application/json": {"example": _EXAMPLE}},
    }
}


def dry_run(draft: Draft, who: Principal, database: Database) -> JSONResponse:
    """The answer to a draft that is only to be looked at."""
    plan = draft.plan
    with database.read() as session:
        estimator = Estimator(session, (planned.config for planned in plan.trials), who.project_id)
    estimates = [estimator.estimate(planned.config) for planned in plan.trials]
    trials = [
        DryTrialOut(
            number=number,
            fingerprint=planned.fingerprint,
            cell=planned.cell,
            config=planned.config.to_dict(),
            **asdict(estimate) | {"reasons": list(estimate.reasons)},
        )
        for number, (planned, estimate) in enumerate(zip(plan.trials[:SHOWN], estimates, strict=False))
    ]
    found = DryRunOut(
        grid_points=plan.points,
        trial_count=len(plan.trials),
        totals=_totals(estimates),
        warnings=warnings(draft.spec, plan),
        trials=trials,
    )
    return JSONResponse(found.model_dump(mode="json"))


def _totals(estimates: list[Estimate]) -> DryTotals:
    steps = [estimate.steps for estimate in estimates]
    seconds = [estimate.seconds for estimate in estimates]
    return DryTotals(
        steps=None if None in steps or not steps else sum(step or 0 for step in steps),
        seconds=None if None in seconds or not seconds else sum(second or 0.0 for second in seconds),
    )


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
    draft = Draft(spec, expand_grid(spec, max_trials=settings.max_trials))
    if dry:
        return dry_run(draft, who, database)
    answer = store_draft(database, who, draft, response, idempotency_key, spec.model_dump(mode="json"))
    return answer | {"warnings": warnings(spec, draft.plan)}


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


def store_draft(
    database: Database, who: Principal, draft: Draft, response: Response, key: str | None, request: dict[str, Any]
) -> dict[str, Any]:
    """Submits a draft, once per Idempotency-Key; the experiment as plain data.

    `request` says what is asked, and of what. A new experiment's address becomes the header Location.
    """

    def work(session: Session) -> dict[str, Any]:
        return store.answer_once(
            session,
            key,
            request,
            lambda: experiment_out(session, submit(session, draft, who)).model_dump(mode="json"),
            project_id=who.project_id,
        )

    answer = database.write(work)
    if draft.before is None:
        response.headers["Location"] = f"/v1/experiments/{answer['id']}"
    return answer
