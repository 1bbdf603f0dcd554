"""/v1/events, and the events of one experiment: who did what, and when."""

from typing import Annotated

from fastapi import APIRouter, Query

from service import store
from service.api.access import Reader
from service.api.examples import EVENT, page, shown
from service.api.parts import MAX_ID, Db, ExperimentId, Limit
from service.api.problems import RESPONSES
from service.events import EventKind, list_events
from service.schemas import EventOut, EventPage

router = APIRouter(prefix="/v1", tags=["events"], responses=RESPONSES)

After = Annotated[int, Query(ge=0, le=MAX_ID, description="Only later ones: the `id` of the last event that is known.")]
Kinds = Annotated[list[EventKind] | None, Query(max_length=30, description="Only of these kinds; may be repeated.")]
SHOWN = shown(page(EVENT) | {"next": EVENT["id"]})


@router.get("/experiments/{experiment_id}/events", operation_id="listExperimentEvents", responses=SHOWN)
def of_experiment(
    experiment_id: ExperimentId,
    database: Db,
    who: Reader,
    kind: Kinds = None,
    limit: Limit = 100,
    after: After = 0,
) -> EventPage:
    """What happened to the experiment and its trials, oldest first: none is missed by asking for what came after."""
    with database.read() as session:
        store.get_experiment(session, experiment_id, project_id=who.project_id)
        found = list_events(session, limit=limit + 1, after=after, experiment_id=experiment_id, kinds=kind or ())
        return _page([EventOut.model_validate(event) for event in found], limit)


@router.get("/events", operation_id="listEvents", responses=SHOWN)
def of_all(database: Db, who: Reader, kind: Kinds = None, limit: Limit = 100, after: After = 0) -> EventPage:
    """What happened to any experiment, oldest first.

    Two things that happen to two experiments at once may show up in either order: to miss nothing, ask for each.
    """
    with database.read() as session:
        found = list_events(session, limit=limit + 1, after=after, project_id=who.project_id, kinds=kind or ())
        return _page([EventOut.model_validate(event) for event in found], limit)


def _page(found: list[EventOut], limit: int) -> EventPage:
    items = found[:limit]
    return EventPage(items=items, next=items[-1].id if len(found) > limit else None)
