"""/v1/experiments."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Path, Query, Request, Response
from sqlalchemy.orm import Session

from service import store
from service.api.examples import CREATED, EXPERIMENT, SPEC, TRIAL, page, shown
from service.api.parts import MAX_ID, Config, Cursor, Db, Limit, decode_cursor, encode_cursor, link_next
from service.api.problems import RESPONSES
from service.db import Database
from service.grid import PRINTABLE, ExperimentSpec, Plan, expand_grid
from service.models import Experiment, ExperimentState, Result, Trial, TrialState, now
from service.schemas import ExperimentOut, ExperimentPage, ExperimentProgress, ResultOut, TrialOut, TrialPage
from service.settings import Settings

router = APIRouter(prefix="/v1/experiments", tags=["experiments"], responses=RESPONSES)

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200, pattern=PRINTABLE)]
ExperimentId = Annotated[int, Path(ge=1, le=MAX_ID)]


@router.post(
    "", status_code=201, operation_id="createExperiment", responses=shown(CREATED, 201), response_model=ExperimentOut
)
def create(
    spec: Annotated[ExperimentSpec, Body(openapi_examples={"quickstart": {"value": SPEC}})],
    response: Response,
    database: Db,
    settings: Config,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Stores the experiment and all its trials, or nothing.

    With an Idempotency-Key the same request can be sent again: it gets the same answer and stores nothing more.
    """
    return store_experiment(spec, response, database, settings, idempotency_key)


@router.get("", operation_id="listExperiments", responses=shown(page(EXPERIMENT)), response_model=ExperimentPage)
def index(
    request: Request,
    response: Response,
    database: Db,
    limit: Limit = 50,
    cursor: Cursor = None,
    state: Annotated[ExperimentState | None, Query()] = None,
) -> ExperimentPage:
    """Experiments, newest first."""
    with database.read() as session:
        found = store.list_experiments(session, limit=limit + 1, after=decode_cursor(cursor), state=state)
        page = found[:limit]
        progress = store.progress(session, [experiment.id for experiment in page])
        items = [_out(experiment, progress[experiment.id]) for experiment in page]
    following = encode_cursor(page[-1].id) if len(found) > limit else None
    link_next(response, str(request.url.include_query_params(cursor=following)), following)
    return ExperimentPage(items=items, next=following)


@router.get("/{experiment_id}", operation_id="getExperiment", responses=shown(EXPERIMENT), response_model=ExperimentOut)
def show(experiment_id: ExperimentId, database: Db) -> ExperimentOut:
    """One experiment with its trials counted by state, and its progress."""
    with database.read() as session:
        experiment = store.get_experiment(session, experiment_id)
        return _out(experiment, store.progress(session, [experiment_id])[experiment_id])


@router.get(
    "/{experiment_id}/trials", operation_id="listTrials", responses=shown(page(TRIAL)), response_model=TrialPage
)
def trials(
    experiment_id: ExperimentId,
    request: Request,
    response: Response,
    database: Db,
    limit: Limit = 100,
    cursor: Cursor = None,
    state: Annotated[TrialState | None, Query()] = None,
) -> TrialPage:
    """The experiment's trials in the grid's order, with the results of those that have one."""
    with database.read() as session:
        found = store.list_trials(session, experiment_id, limit=limit + 1, after=decode_cursor(cursor), state=state)
        items = [trial_out(trial, result) for trial, result in found[:limit]]
    following = encode_cursor(items[-1].number) if len(found) > limit else None
    link_next(response, str(request.url.include_query_params(cursor=following)), following)
    return TrialPage(items=items, next=following)


@router.post(
    "/{experiment_id}/cancel",
    operation_id="cancelExperiment",
    responses=shown(EXPERIMENT),
    response_model=ExperimentOut,
)
def cancel(experiment_id: ExperimentId, database: Db) -> ExperimentOut:
    """Cancels every trial that is not final; running ones are killed. Again, or too late, it changes nothing."""

    def work(session: Session) -> ExperimentOut:
        experiment = store.cancel_experiment(session, experiment_id)
        return _out(experiment, store.progress(session, [experiment_id])[experiment_id])

    return database.write(work)


def store_experiment(
    spec: ExperimentSpec, response: Response, database: Database, settings: Settings, idempotency_key: str | None
) -> dict[str, Any]:
    """Stores what a spec asks for, once per key; the answer as plain data."""
    plan = expand_grid(spec, max_trials=settings.max_trials)
    body = spec.model_dump(mode="json")
    answer = database.write(
        lambda session: store.answer_once(
            session,
            idempotency_key,
            body,
            lambda: _out(store.create_experiment(session, spec, plan), _queued(plan)).model_dump(mode="json"),
        )
    )
    response.headers["Location"] = f"/v1/experiments/{answer['id']}"
    return answer


def trial_out(trial: Trial, result: Result | None) -> TrialOut:
    """A trial as the API shows it."""
    plain = TrialOut.model_validate(trial)
    return plain.model_copy(update={"result": ResultOut.model_validate(result)}) if result else plain


def _queued(plan: Plan) -> store.Progress:
    progress = store.Progress()
    epochs = sum(planned.config.training.epochs for planned in plan.trials)
    progress.add(TrialState.QUEUED, len(plan.trials), 0, epochs, None, None)
    return progress


def _out(experiment: Experiment, progress: store.Progress) -> ExperimentOut:
    shown = ExperimentProgress(
        trials=progress.trials,
        epochs_done=progress.epochs_done,
        epochs=progress.epochs,
        best_accuracy=progress.best_accuracy,
        best_val_accuracy=progress.best_val_accuracy,
        seconds_left=_seconds_left(experiment, progress),
    )
    columns = {name: getattr(experiment, name) for name in ExperimentOut.model_fields if name != "progress"}
    return ExperimentOut(**columns, progress=shown)


def _seconds_left(experiment: Experiment, progress: store.Progress) -> float | None:
    """At the pace since the last claim; None until a twentieth of its work is done, as starting takes time too."""
    done = progress.epochs_done - experiment.epochs_at_claim
    wanted = (progress.epochs - experiment.epochs_at_claim) / 20
    if experiment.state != ExperimentState.RUNNING or experiment.claimed_at is None or done < max(1, wanted):
        return None
    return (now() - experiment.claimed_at).total_seconds() * (progress.epochs - progress.epochs_done) / done
