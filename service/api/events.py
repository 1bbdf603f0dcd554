"""/v1/events, and the events of one experiment: who did what, and when."""

from enum import StrEnum
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response
from sqlalchemy.orm import Session

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, UNCHANGED, Answer, Db, ExperimentId, FieldNames, Limit, Reply
from service.api.http.problems import RESPONSES
from service.api.openapi_examples.experiments import EVENT, page, shown
from service.experiments import store
from service.experiments.events import EventKind, list_events
from service.schemas.experiments import EventOut, EventPage, SelectionEvents
from service.schemas.field_selection import Fields

router = APIRouter(prefix="/v1", tags=["events"], responses=RESPONSES)

SHOWN = shown(page(EVENT) | {"next": EVENT["id"]}) | UNCHANGED


class EventSort(StrEnum):
    """Orders of events."""

    OLDEST_FIRST = "id"
    NEWEST_FIRST = "-id"


class _Asked:
    """Which events are wanted, in which order and form."""

    def __init__(
        self,
        kind: Annotated[
            list[EventKind] | None, Query(max_length=30, description="Only of these kinds; may be repeated.")
        ] = None,
        limit: Limit = 100,
        after: Annotated[
            int | None,
            Query(
                ge=0, le=MAX_ID, description="Only what comes after the event with this `id`, in the order asked for."
            ),
        ] = None,
        sort: Annotated[EventSort, Query(description="Oldest or newest first.")] = EventSort.OLDEST_FIRST,
        field_names: FieldNames = None,
    ) -> None:
        self._kinds = kind or ()
        self._limit = limit
        self._after = after
        self._newest_first = sort is EventSort.NEWEST_FIRST
        self._fields = Fields(EventOut, field_names)

    def answer(
        self, session: Session, reply: Reply, *, experiment_id: int | None = None, project_id: int | None = None
    ) -> Response:
        """A page of an experiment's or a project's events."""
        found = list_events(
            session,
            limit=self._limit + 1,
            after=self._after,
            newest_first=self._newest_first,
            experiment_id=experiment_id,
            project_id=project_id,
            kinds=self._kinds,
        )
        items = [EventOut.model_validate(event) for event in found[: self._limit]]
        following = items[-1].id if len(found) > self._limit else None
        url = None if following is None else str(reply.url.include_query_params(after=following))
        return reply(self._fields.page(EventPage, items, following), following_url=url)


Asked = Annotated[_Asked, Depends()]


@router.get(
    "/experiments/{experiment_id}/events",
    operation_id="listExperimentEvents",
    responses=SHOWN,
    response_model=EventPage | SelectionEvents,
)
def of_experiment(experiment_id: ExperimentId, asked: Asked, answer: Answer, database: Db, who: Reader) -> Any:
    """What happened to the experiment and its trials: none is missed by asking for what came after."""
    with database.read() as session:
        store.get_experiment(session, experiment_id, project_id=who.project_id)
        return asked.answer(session, answer, experiment_id=experiment_id)


@router.get("/events", operation_id="listEvents", responses=SHOWN, response_model=EventPage | SelectionEvents)
def of_all(asked: Asked, answer: Answer, database: Db, who: Reader) -> Any:
    """What happened to any experiment.

    Two things that happen to two experiments at once may show up in either order: to miss nothing, ask for each.
    """
    with database.read() as session:
        return asked.answer(session, answer, project_id=who.project_id)
