"""/v1/leaderboards."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from service import store
from service.api.examples import LEADERBOARD, shown
from service.api.parts import MAX_ID, Db
from service.api.problems import RESPONSES
from service.errors import NotFoundError
from service.leaderboard import Metric, leaderboard
from service.schemas import BoardOut, HoleOut, LeaderboardOut
from ttsv.data.catalog import DatasetName

router = APIRouter(prefix="/v1/leaderboards", tags=["leaderboards"], responses=RESPONSES)


@router.get("/{dataset}", operation_id="getLeaderboard", responses=shown(LEADERBOARD), response_model=LeaderboardOut)
def show(
    dataset: Annotated[str, Path(max_length=200, examples=["digits"])],
    database: Db,
    metric: Annotated[Metric, Query(description="What the rows are ranked by.")] = Metric.ACCURACY,
    experiment: Annotated[int | None, Query(ge=1, le=MAX_ID, description="Only this experiment's trials.")] = None,
) -> LeaderboardOut:
    """Cells ranked by the mean over their seeds, one board per protocol: other protocols' numbers are shown apart."""
    if fix := DatasetName().fix(dataset):
        raise NotFoundError(f"there is no data set {dataset!r}: the name {fix}")
    with database.read() as session:
        if experiment is not None:
            store.get_experiment(session, experiment)
        found = leaderboard(session, dataset, metric=metric, experiment_id=experiment)
    return LeaderboardOut(
        dataset=dataset,
        metric=metric,
        boards=[BoardOut.model_validate(board) for board in found.boards],
        holes=[HoleOut.model_validate(hole) for hole in found.holes],
    )
