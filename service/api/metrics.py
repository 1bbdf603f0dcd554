"""/v1/trials/{trial_id}/metrics: what a trial's epochs gave."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from service import points, store
from service.api.access import Reader
from service.api.examples import shown
from service.api.parts import UNCHANGED, Answer, Db, FieldNames, Limit, TrialId
from service.api.problems import RESPONSES
from service.api.trial_examples import METRICS
from service.fields import Fields
from service.schemas import EpochOut, MetricsPage, SelectionMetrics

router = APIRouter(prefix="/v1/trials", tags=["trials"], responses=RESPONSES)


@router.get(
    "/{trial_id}/metrics",
    operation_id="listTrialMetrics",
    responses=shown(METRICS) | UNCHANGED,
    response_model=MetricsPage | SelectionMetrics,
)
def index(
    trial_id: TrialId,
    answer: Answer,
    who: Reader,
    database: Db,
    limit: Limit = 100,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="Only later epochs: `next` of the page before.")] = 0,
    count: Annotated[
        int | None, Query(alias="points", ge=3, le=10_000, description="Instead of a page: so many epochs of all.")
    ] = None,
    field_names: FieldNames = None,
) -> Any:
    """A page of a trial's epochs in their order, or with `points` at most so many of them that draw the same curves.

    Those are epochs as they are, no means: the first, the last, and between them what largest-triangle-three-buckets
    chooses over all metrics asked for (`fields`), each in units of its range. `epoch` is always among the fields.
    """
    wanted = Fields(EpochOut, field_names)
    metrics = [name for name in points.METRICS if name in wanted]
    with database.read() as session:
        store.get_trial(session, trial_id, project_id=who.project_id)
        following = None
        if count is None:
            found = points.page(session, trial_id, metrics, limit=limit + 1, after=after)
            if len(found) > limit:
                found.pop()
                following = found[-1]["epoch"]
        else:
            found = points.sample(session, trial_id, metrics, count, after=after)
    url = None if following is None else str(answer.url.include_query_params(after=following))
    body = {"items": found, "next": following, "sampled": count is not None}
    return answer(body, following_url=url)
