"""What can be done with an experiment: POST /v1/experiments/{id}/<action>, and PATCH of the experiment itself."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Depends, Header, Query, Response

from service.access.security import Principal
from service.api.http.authentication import Canceller, Submitter
from service.api.http.dependencies import Db, ExperimentId
from service.api.http.examples import Example, shown
from service.api.http.problems import RESPONSES, refusals
from service.api.http.responses import experiment_out, revision_matches, tag_of, written
from service.api.openapi_examples.experiments import CREATED, EXPERIMENT
from service.api.submission import Submission
from service.database import Experiment
from service.database.engine import Database
from service.experiments import actions
from service.experiments.drafts import draft_clone, draft_extension, draft_reevaluation
from service.schemas.experiments import DeletionOut, ExperimentOut, NewExperimentOut
from service.schemas.requests import Change, Clone, Reevaluation, Retry
from service.specs.spec import Additions
from service.upkeep import deletion

router = APIRouter(prefix="/v1/experiments", tags=["verbs"], responses=RESPONSES | refusals(409))

PAUSED = EXPERIMENT | {"state": "paused", "finished_at": None}
QUEUED = EXPERIMENT | {"state": "queued", "finished_at": None}

WARNED: Example = {"warnings": []}

Submitted = Annotated[Submission, Depends()]

_Route = TypeVar("_Route", bound=Callable[..., Any])


def _action(name: str, example: Example, *refused: int, status: int = 200) -> Callable[[_Route], _Route]:
    """Makes a function the route of an action: it answers with an experiment, or with one of the statuses `refused`.

    An example with warnings is that of an action which drafts trials.
    """
    return router.post(
        f"/{{experiment_id}}/{name}",
        status_code=status,
        operation_id=f"{name.replace('-', '')}Experiment",
        responses=shown(example, status, *(["Location"] if status == 201 else [])) | refusals(*refused),
        response_model=NewExperimentOut if "warnings" in example else ExperimentOut,
    )


@_action("pause", PAUSED)
def pause(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Takes the experiment off the queue at once, until it is resumed.

    Running trials wait again and go on from their last checkpoint. A final experiment cannot be paused.
    """
    return _do(database, who, experiment_id, actions.pause)


@_action("resume", QUEUED)
def resume(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Puts a paused experiment back into the queue; one that is queued or running stays as it is."""
    return _do(database, who, experiment_id, actions.resume)


@_action("stop", EXPERIMENT | {"state": "stopped"})
def stop(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Drops the trials that wait and lets those that run finish; then the experiment is `stopped`."""
    return _do(database, who, experiment_id, actions.stop)


@_action("cancel", EXPERIMENT | {"state": "cancelled"})
def cancel(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Cancels every trial that is not final; running ones are killed. What ended otherwise cannot be cancelled."""
    return _do(database, who, experiment_id, actions.cancel)


@_action("archive", EXPERIMENT)
def archive(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Leaves a final experiment out of lists and leaderboards. Nothing of it is deleted."""
    return _do(database, who, experiment_id, actions.archive)


@_action("unarchive", EXPERIMENT)
def unarchive(experiment_id: ExperimentId, database: Db, who: Canceller) -> ExperimentOut:
    """Takes an experiment out of the archive."""
    return _do(database, who, experiment_id, actions.unarchive)


@_action("retry", QUEUED, 429)
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


@_action("extend", QUEUED | WARNED, 429)
def extend(
    experiment_id: ExperimentId,
    additions: Annotated[Additions, Body(openapi_examples={"more seeds": {"value": {"grid": {"seed": [2, 3]}}}})],
    submitted: Submitted,
) -> Any:
    """Adds values to the axes of the experiment's grid, or variants or trials beside it.

    Trials that are there are not run again; a final experiment is queued again. Where nothing is new nothing changes.
    """
    request = {"extend": experiment_id} | additions.model_dump()
    return submitted.of(experiment_id, request, draft_extension, additions=additions)


@_action("clone", CREATED | WARNED, 429, status=201)
def clone(
    experiment_id: ExperimentId,
    submitted: Submitted,
    body: Annotated[Clone | None, Body(openapi_examples={"a name": {"value": {"name": "quickstart again"}}})] = None,
) -> Any:
    """Stores a new experiment of the same spec, extensions and changes included."""
    name = body.name if body else None
    return submitted.of(experiment_id, {"clone": experiment_id, "name": name}, draft_clone, name=name)


@_action("re-evaluate", CREATED | WARNED, 429, status=201)
def reevaluate(
    experiment_id: ExperimentId,
    body: Annotated[
        Reevaluation,
        Body(
            openapi_examples={"AutoAttack": {"value": {"evaluation": {"attack": "autoattack", "attack_images": 1000}}}}
        ),
    ],
    submitted: Submitted,
) -> Any:
    """Stores a new experiment that evaluates the networks which this one has trained by now, and trains nothing.

    Its spec lists the trials with their new evaluation; each trial names the one whose network it takes.
    """
    request = {"re-evaluate": experiment_id} | body.model_dump()
    return submitted.of(experiment_id, request, draft_reevaluation, evaluation=body.evaluation, name=body.name)


@router.patch(
    "/{experiment_id}",
    operation_id="updateExperiment",
    responses=shown(EXPERIMENT, 200, "ETag") | refusals(412),
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
    """Changes name, notes, tags, priority or how many trials run at a time; what is left out stays.

    The ETag is the one that a GET of the experiment has from then on.
    """
    expected = partial(revision_matches, if_match)
    changed = _do(database, who, experiment_id, partial(actions.change, fields=body.fields(), expected=expected))
    response.headers["ETag"] = tag_of(written(changed), changed.revision)
    return changed


DELETION = {
    "id": 7,
    "name": "quickstart",
    "trials": 8,
    "results": 8,
    "files": 48,
    "size": 1_234_567,
    "shown_on": [],
    "deleted": True,
}


@router.delete(
    "/{experiment_id}",
    operation_id="deleteExperiment",
    responses=shown(DELETION),
    response_model=DeletionOut,
)
def delete(
    experiment_id: ExperimentId,
    database: Db,
    who: Canceller,
    dry_run: Annotated[bool, Query(description="Delete nothing: answer with what would go.")] = False,
    force: Annotated[bool, Query(description="Also what boards and tables show now.")] = False,
) -> DeletionOut:
    """Deletes a final experiment with its trials, results and files; nothing brings them back.

    It is out of sight at once; a worker then removes files and rows. An experiment whose results boards show must be
    archived first, unless `force`; one whose networks another one evaluates cannot be deleted before that.
    """
    if dry_run:
        with database.read() as session:
            return DeletionOut.model_validate(deletion.preview(session, experiment_id, who))
    marked = database.write(lambda session: deletion.mark(session, experiment_id, who, force=force))
    return DeletionOut.model_validate(marked)


def _do(database: Database, who: Principal, experiment_id: int, action: Callable[..., Experiment]) -> ExperimentOut:
    """Lets somebody do something, and answers with the experiment as it is then."""
    return database.write(lambda session: experiment_out(session, action(session, experiment_id, who=who)))
