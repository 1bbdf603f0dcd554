"""What can be done with an experiment: POST /v1/experiments/{id}/<verb>, and PATCH of the experiment itself."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Header, Response

from service.access.security import Principal
from service.api.experiments import IdempotencyKey, store_draft
from service.api.http.authentication import Canceller, Submitter
from service.api.http.dependencies import Config, Db, ExperimentId, revision_matches, tag_of, written
from service.api.http.problems import RESPONSES, refusals
from service.api.http.responses import experiment_out
from service.api.openapi_examples.experiments import CREATED, EXPERIMENT, shown
from service.database import Experiment
from service.database.engine import Database
from service.experiments import actions, submission
from service.schemas.experiments import ExperimentOut
from service.schemas.requests import Additions, Change, Clone, Reevaluation, Retry

router = APIRouter(prefix="/v1/experiments", tags=["verbs"], responses=RESPONSES | refusals(409))

PAUSED = EXPERIMENT | {"state": "paused", "finished_at": None}
QUEUED = EXPERIMENT | {"state": "queued", "finished_at": None}

Route = TypeVar("Route", bound=Callable[..., Any])


def _verb(name: str, example: dict[str, Any], *refused: int) -> Callable[[Route], Route]:
    """Makes a function the route of a verb: it answers with the experiment, or with one of the statuses `refused`."""
    return router.post(
        f"/{{experiment_id}}/{name}",
        operation_id=f"{name}Experiment",
        responses=shown(example) | refusals(*refused),
        response_model=ExperimentOut,
    )


@_verb("pause", PAUSED)
def pause(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Takes the experiment off the queue at once, until it is resumed.

    Running trials wait again and go on from their last checkpoint. A final experiment cannot be paused.
    """
    return _do(database, who, experiment_id, actions.pause)


@_verb("resume", QUEUED)
def resume(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Puts a paused experiment back into the queue; one that is queued or running stays as it is."""
    return _do(database, who, experiment_id, actions.resume)


@_verb("stop", EXPERIMENT | {"state": "stopped"})
def stop(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Drops the trials that wait and lets those that run finish; then the experiment is `stopped`."""
    return _do(database, who, experiment_id, actions.stop)


@_verb("cancel", EXPERIMENT | {"state": "cancelled"})
def cancel(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Cancels every trial that is not final; running ones are killed. What ended otherwise cannot be cancelled."""
    return _do(database, who, experiment_id, actions.cancel)


@_verb("archive", EXPERIMENT)
def archive(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Leaves a final experiment out of lists and leaderboards. Nothing of it is deleted."""
    return _do(database, who, experiment_id, actions.archive)


@_verb("unarchive", EXPERIMENT)
def unarchive(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Takes an experiment out of the archive."""
    return _do(database, who, experiment_id, actions.unarchive)


@_verb("retry", QUEUED, 429)
def retry(
    experiment_id: ExperimentId,
    database: Db,
    who: Submitter,
    body: Annotated[
        Retry | None, Body(openapi_examples={"diverged too": {"value": {"states": ["failed", "diverged"]}}})
    ] = None,
) -> ExperimentOut:
    """Runs the failed trials again, and only those; without any it changes nothing.

    A final experiment is queued again. What succeeded keeps its results.
    """
    states = (body or Retry()).trial_states()
    return _do(database, who, experiment_id, partial(actions.retry, states=states))


@_verb("extend", QUEUED, 429)
def extend(
    experiment_id: ExperimentId,
    additions: Annotated[Additions, Body(openapi_examples={"more seeds": {"value": {"grid": {"seed": [2, 3]}}}})],
    response: Response,
    database: Db,
    settings: Config,
    who: Submitter,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Adds values to the axes of the experiment's grid, or variants or trials beside it.

    Trials that are there are not run again; a final experiment is queued again. Where nothing is new nothing changes.
    """
    more = additions.model_dump()
    with database.read() as session:
        draft = submission.draft_extension(
            session, experiment_id, submission.Additions(**more), who, max_trials=settings.max_trials
        )
    return store_draft(database, who, draft, response, idempotency_key, {"extend": experiment_id} | more)


@router.post(
    "/{experiment_id}/clone",
    status_code=201,
    operation_id="cloneExperiment",
    responses=shown(CREATED, 201) | refusals(429),
    response_model=ExperimentOut,
)
def clone(
    experiment_id: ExperimentId,
    response: Response,
    database: Db,
    settings: Config,
    who: Submitter,
    body: Annotated[Clone | None, Body(openapi_examples={"a name": {"value": {"name": "quickstart again"}}})] = None,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Stores a new experiment of the same spec, extensions and changes included."""
    name = body.name if body else None
    with database.read() as session:
        draft = submission.draft_clone(session, experiment_id, who, name=name, max_trials=settings.max_trials)
    return store_draft(database, who, draft, response, idempotency_key, {"clone": experiment_id, "name": name})


@router.post(
    "/{experiment_id}/re-evaluate",
    status_code=201,
    operation_id="reevaluateExperiment",
    responses=shown(CREATED, 201) | refusals(429),
    response_model=ExperimentOut,
)
def reevaluate(
    experiment_id: ExperimentId,
    body: Annotated[
        Reevaluation,
        Body(
            openapi_examples={"AutoAttack": {"value": {"evaluation": {"attack": "autoattack", "attack_images": 1000}}}}
        ),
    ],
    response: Response,
    database: Db,
    settings: Config,
    who: Submitter,
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Stores a new experiment that evaluates the networks which this one has trained by now, and trains nothing.

    Its spec lists the trials with their new evaluation; each trial names the one whose network it takes.
    """
    with database.read() as session:
        draft = submission.draft_reevaluation(
            session, experiment_id, body.evaluation, who, name=body.name, max_trials=settings.max_trials
        )
    request = {"re-evaluate": experiment_id} | body.model_dump()
    return store_draft(database, who, draft, response, idempotency_key, request)


@router.patch(
    "/{experiment_id}",
    operation_id="updateExperiment",
    responses=shown(EXPERIMENT) | refusals(412),
    response_model=ExperimentOut,
)
def update(
    experiment_id: ExperimentId,
    body: Annotated[Change, Body(openapi_examples={"tags": {"value": {"tags": ["thesis", "table-2"], "priority": 5}}})],
    response: Response,
    database: Db,
    who: Submitter,
    if_match: Annotated[
        str | None, Header(max_length=1000, description="ETag of an answer that showed the experiment as it was.")
    ] = None,
) -> ExperimentOut:
    """Changes name, notes, tags or priority; what is left out stays.

    The ETag is the one that a GET of the experiment has from then on.
    """

    expected = partial(revision_matches, if_match)
    changed = _do(database, who, experiment_id, partial(actions.change, fields=body.fields(), expected=expected))
    response.headers["ETag"] = tag_of(written(changed), changed.revision)
    return changed


def _do(database: Database, who: Principal, experiment_id: int, verb: Callable[..., Experiment]) -> ExperimentOut:
    """Lets somebody do something, and answers with the experiment as it is then."""
    return database.write(lambda session: experiment_out(session, verb(session, experiment_id, who=who)))
