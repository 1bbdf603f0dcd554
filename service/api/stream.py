"""Server-sent events: an experiment's progress and events as they happen."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent

from service import store
from service.api.access import Reader
from service.api.answers import progress_out
from service.api.examples import STREAM
from service.api.parts import MAX_ID, Db, ExperimentId, Watched
from service.api.problems import RESPONSES
from service.models import OPEN_EXPERIMENTS
from service.schemas import EventOut, ExperimentUpdate

router = APIRouter(prefix="/v1/experiments", tags=["experiments"], responses=RESPONSES)


def _there(experiment_id: ExperimentId, who: Reader, database: Db) -> int:
    """Looked for before the stream begins, so that its absence is a 404."""
    with database.read() as session:
        return store.get_experiment(session, experiment_id, project_id=who.project_id).id


_EXAMPLE: dict[int | str, dict[str, Any]] = {
    200: {"description": "Events until the experiment is final", "content": {"text/event-stream": {"example": STREAM}}}
}


@router.get(
    "/{experiment_id}/stream",
    operation_id="streamExperiment",
    response_class=EventSourceResponse,
    responses=_EXAMPLE,
)
async def stream(
    experiment_id: Annotated[int, Depends(_there)],
    watching: Watched,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=MAX_ID, description="Sent by browsers on reconnecting.")
    ] = None,
    after: Annotated[int, Query(ge=0, le=MAX_ID, description="Only later events, if there is no Last-Event-ID.")] = 0,
    events: Annotated[bool, Query(description="Whether events are wanted, or progress alone.")] = True,
) -> AsyncGenerator[ServerSentEvent, None]:
    """`progress` at once and whenever it changes, `event` for everything that happened and happens, `end` at the end.

    Each `event` has its number as `id`; on reconnecting with Last-Event-ID it goes on after that one: none is missed
    and none comes twice. After `end`, sent when the experiment is final, the stream closes for good.
    """
    position = after if last_event_id is None else last_event_id
    shown: tuple[Any, ...] | None = None
    async with aclosing(watching.changes(experiment_id)) as changes:
        async for seen in changes:
            state = (seen.state, seen.error, seen.progress)
            update = ExperimentUpdate(
                id=experiment_id,
                state=seen.experiment.state,
                error=seen.error,
                progress=progress_out(seen.experiment, seen.progress),
            )
            if state != shown:
                shown = state
                yield ServerSentEvent(event="progress", data=update)
            while events and position < seen.newest_event:
                found = await watching.events(experiment_id, position)
                if not found:
                    break
                for event in found:
                    position = event.id
                    yield ServerSentEvent(event="event", data=EventOut.model_validate(event), id=str(event.id))
            if update.state not in OPEN_EXPERIMENTS:
                yield ServerSentEvent(event="end", data=update)
                return
