"""/v1/events, and the events of one experiment: who did what, and when."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Db, ExperimentId, FieldNames, Limit
from service.api.http.examples import Example, kept, page
from service.api.http.problems import RESPONSES
from service.api.http.responses import Answer
from service.experiments import store
from service.experiments.events import EventKind, list_events
from service.schemas.answers import SelectionEvents
from service.schemas.experiments import EventOut, EventPage
from service.schemas.field_selection import Fields

router = APIRouter(prefix="/v1", tags=["events"], responses=RESPONSES)

EVENT: Example = {
    "id": 31,
    "experiment_id": 1,
    "trial_id": 7,
    "at": "2026-11-21T03:32:12.296113Z",
    "actor": "node-1-4711",
    "kind": "trial_finished",
    "detail": {"number": 6, "attempt": 1},
}

SHOWN = kept(page(EVENT) | {"next": EVENT["id"]}, "Link")


class EventSort(StrEnum):
    """Orders of events."""

    OLDEST_FIRST = "id"
    NEWEST_FIRST = "-id"


@dataclass(frozen=True)
class _Asked:
    """Which events are wanted, in which order and form."""

    reply: Answer
    database: Db
    who: Reader
    kinds: Annotated[
        list[EventKind] | None,
        Query(alias="kind", max_length=30, description="Only of these kinds; may be repeated."),
    ] = None
    limit: Limit = 100
    after: Annotated[
        int | None,
        Query(ge=0, le=MAX_ID, description="Only what comes after the event with this `id`, in the order asked for."),
    ] = None
    sort: Annotated[EventSort, Query(description="Oldest or newest first.")] = EventSort.OLDEST_FIRST
    field_names: FieldNames = None

    def page(self, experiment_id: int | None = None) -> Response:
        """A page of the events of one experiment, or of all that who asks may see; raises `NotFoundError`."""
        wanted = Fields(EventOut, self.field_names)
        with self.database.read() as session:
            if experiment_id is not None:
                store.get_experiment(session, experiment_id, project_id=self.who.project_id)
            found = list_events(
                session,
                limit=self.limit + 1,
                after=self.after,
                newest_first=self.sort is EventSort.NEWEST_FIRST,
                experiment_id=experiment_id,
                project_id=self.who.project_id,
                kinds=self.kinds or (),
            )
            items = [EventOut.model_validate(event) for event in found[: self.limit]]
        following = items[-1].id if len(found) > self.limit else None
        return self.reply(wanted.page(EventPage, items, following), following=following, page_parameter="after")


Asked = Annotated[_Asked, Depends()]


@router.get(
    "/experiments/{experiment_id}/events",
    operation_id="listExperimentEvents",
    responses=SHOWN,
    response_model=EventPage | SelectionEvents,
)
def of_experiment(experiment_id: ExperimentId, asked: Asked) -> Any:
    """What happened to the experiment and its trials: none is missed by asking for what came after."""
    return asked.page(experiment_id)


@router.get("/events", operation_id="listEvents", responses=SHOWN, response_model=EventPage | SelectionEvents)
def of_all(asked: Asked) -> Any:
    """What happened to any experiment.

    Two things that happen to two experiments at once may show up in either order: to miss nothing, ask for each.
    """
    return asked.page()
