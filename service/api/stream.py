"""Server-sent events: an experiment's progress and events as they happen."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException

from service.api.http.authentication import Reader, Watched
from service.api.http.dependencies import MAX_ID, Db, ExperimentId, OneId, Subscribed
from service.api.http.examples import Responses, headers_of
from service.api.http.problems import RESPONSES
from service.api.http.responses import progress_out
from service.database import OPEN_EXPERIMENTS
from service.experiments import store
from service.experiments.subscriptions import Seen
from service.schemas.experiments import EventOut, ExperimentPosted, ExperimentUpdate, TrialsChanged

router = APIRouter(prefix="/v1/experiments", tags=["experiments"], responses=RESPONSES)
all_router = APIRouter(prefix="/v1", tags=["experiments"], responses=RESPONSES)


@dataclass(frozen=True)
class _Asked:
    """What is to be streamed: the events of an experiment after one of them."""

    experiment_id: int
    position: int


def _asked(
    experiment_id: ExperimentId,
    who: Reader,
    database: Db,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=MAX_ID, description="Sent by browsers on reconnecting.")
    ] = None,
    after: Annotated[int, Query(ge=0, le=MAX_ID, description="Only later events, if there is no Last-Event-ID.")] = 0,
) -> _Asked:
    """Looked for before the stream begins: what is not there is a 404, and what is over for who asks again a 204."""
    with database.read() as session:
        experiment = store.get_experiment(session, experiment_id, project_id=who.project_id)
        if last_event_id is None:
            return _Asked(experiment.id, after)
        newest = store.newest_events(session, [experiment.id]).get(experiment.id, 0)
    if experiment.state not in OPEN_EXPERIMENTS and last_event_id >= newest:
        raise HTTPException(204)
    return _Asked(experiment.id, last_event_id)


@dataclass(frozen=True)
class _Several:
    """Whose progress is to be streamed, and of whose project new experiments are to be told."""

    experiments: list[int]
    project_id: int | None


def _several(
    who: Reader,
    database: Db,
    experiments: Annotated[
        list[OneId] | None,
        Query(alias="experiment", max_length=200, description="Whose progress is wanted; may be repeated."),
    ] = None,
) -> _Several:
    with database.read() as session:
        for experiment_id in experiments or ():
            store.get_experiment(session, experiment_id, project_id=who.project_id)
    return _Several(list(dict.fromkeys(experiments or ())), who.project_id)


_EXAMPLE = (
    'event: event\ndata: {"id":1,"experiment_id":1,"trial_id":null,"at":"2026-11-21T03:30:31.615887Z",'
    '"actor":"anonymous","kind":"submitted","detail":{}}\nid: 1\n\n'
    'event: progress\ndata: {"id":1,"state":"running","error":null,"waiting":null,'
    '"progress":{"trials":{"queued":12,"running":2,'
    '"succeeded":6,"early_stopped":0,"failed":0,"diverged":0,"cancelled":0},"epochs_done":84,"epochs":240,'
    '"best_accuracy":0.98,"best_val_accuracy":1.0,"seconds_left":61.2,"validated_on":"held-out"}}\n\n'
)
_ANSWERS: Responses = {
    200: {
        "description": "Events until the experiment is final",
        "content": {"text/event-stream": {"example": _EXAMPLE}},
    }
    | headers_of("Cache-Control"),
    204: {"description": "The experiment is final and Last-Event-ID its last event: do not connect again"},
}


@router.get(
    "/{experiment_id}/stream",
    operation_id="streamExperiment",
    response_class=EventSourceResponse,
    responses=_ANSWERS,
)
async def stream(
    asked: Annotated[_Asked, Depends(_asked)],
    subscriptions: Subscribed,
    watch: Watched,
    events: Annotated[bool, Query(description="Whether events are wanted, or progress alone.")] = True,
    trials: Annotated[bool, Query(description="Whether it is told which trials begin and end to run.")] = False,
) -> AsyncGenerator[ServerSentEvent, None]:
    """`progress` at once and whenever it changes, `event` for everything that happened and happens, `end` at the end.

    With `trials` an event of that name has the `ids` of trials that began or ended to run: at first of all that run.
    Each `event` has its number as `id`; on reconnecting with Last-Event-ID it goes on after that one: none is missed
    and none comes twice. After `end`, sent when the experiment is final, the stream closes; who connects again with the
    `id` of `end`, as browsers do by themselves, gets 204 and no more, unless something has happened since. It closes
    without `end`, too, some seconds after the key was revoked or has expired.
    """
    experiment_id, position = asked.experiment_id, asked.position
    shown: tuple[Any, ...] | None = None
    running: frozenset[int] = frozenset()
    async with aclosing(subscriptions.changes(experiment_id)) as changes:
        async for seen in changes:
            if not await watch.holds(subscriptions.aside):
                return
            state = (seen.state, seen.error, seen.waiting, seen.progress)
            update = _update(seen)
            if state != shown:
                shown = state
                yield ServerSentEvent(event="progress", data=update)
            if trials and seen.running != running:
                changed, running = running ^ seen.running, seen.running
                yield ServerSentEvent(event="trials", data=TrialsChanged(ids=sorted(changed)))
            while events and position < seen.newest_event:
                found = await subscriptions.events(experiment_id, position)
                if not found:
                    break
                for event in found:
                    position = event.id
                    yield ServerSentEvent(event="event", data=EventOut.model_validate(event), id=str(event.id))
            if update.state not in OPEN_EXPERIMENTS:
                yield ServerSentEvent(event="end", data=update, id=str(max(position, seen.newest_event)))
                return


_SEVERAL_EXAMPLE = 'event: posted\ndata: {"id":7}\n\nevent: progress\n' + _EXAMPLE.partition("event: progress\n")[2]


@all_router.get(
    "/stream",
    operation_id="streamExperiments",
    response_class=EventSourceResponse,
    responses={
        200: {
            "description": "Progress of several experiments, until one of them is deleted",
            "content": {"text/event-stream": {"example": _SEVERAL_EXAMPLE}},
        }
        | headers_of("Cache-Control")
    },
)
async def stream_all(
    asked: Annotated[_Several, Depends(_several)], subscriptions: Subscribed, database: Db, watch: Watched
) -> AsyncGenerator[ServerSentEvent, None]:
    """`progress` of each experiment that is named, at once and whenever it changes, and `posted` for new ones.

    `posted` has the number of the newest experiment as `id`: at first, and whenever it changes. The stream ends only
    where one of the experiments is deleted: who asks for it again gets 404.
    """
    posted: int | None = None

    def visible() -> int:
        with database.read() as session:
            return store.newest_experiment(session, project_id=asked.project_id)

    async with aclosing(subscriptions.any_changes(asked.experiments)) as changes:
        async for seen in changes:
            if not await watch.holds(subscriptions.aside):
                return
            if isinstance(seen, int):
                if (newest := await subscriptions.aside(visible)) != posted:
                    posted = newest
                    yield ServerSentEvent(event="posted", data=ExperimentPosted(id=newest))
            else:
                yield ServerSentEvent(event="progress", data=_update(seen))


def _update(seen: Seen) -> ExperimentUpdate:
    return ExperimentUpdate(
        id=seen.experiment.id,
        state=seen.experiment.state,
        error=seen.error,
        waiting=seen.waiting,
        progress=progress_out(seen.experiment, seen.progress),
    )
