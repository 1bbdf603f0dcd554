"""/v1/curves: the epochs of many trials by column."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy.orm import Session

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Db
from service.api.http.examples import Example, kept
from service.api.http.problems import RESPONSES
from service.api.http.responses import Answer
from service.errors import FieldProblem, QueryError
from service.experiments import epoch_points, store
from service.experiments.curves import Curves, best_trials, curves
from service.schemas.trials import CurvesOut
from service.specs.patterns import METRICS, NUMBERS

router = APIRouter(prefix="/v1/curves", tags=["trials"], responses=RESPONSES)

MOST_TRIALS = 200
DEFAULT = "val_accuracy,train_loss,val_loss"

CURVES: Example = {
    "metrics": ["val_accuracy", "val_loss"],
    "columns": [{"field": "rank", "name": "rank"}],
    "decided": [],
    "curves": [
        {
            "trial": 7,
            "experiment_id": 1,
            "number": 6,
            "cell": "9f7c1d7f5d2e4b8a9f7c1d7f5d2e4b8a9f7c1d7f5d2e4b8a9f7c1d7f5d2e4b8a",
            "seed": 0,
            "state": "running",
            "epochs": 12,
            "best_val_accuracy": 0.93,
            "fields": {"rank": 4.0},
            "epoch": [1, 2, 3],
            "values": [[0.71, 0.88, 0.93], [1.2, 0.61, 0.35]],
        }
    ],
}


@dataclass(frozen=True, kw_only=True)
class AskedCurves:
    """Which trials' curves are wanted: those that are named, or the best of an experiment."""

    trials: Annotated[
        str | None,
        Query(
            max_length=4000,
            pattern=NUMBERS,
            description=f"The trials, at most {MOST_TRIALS}, separated by commas.",
            examples=["7,8"],
        ),
    ] = None
    experiment: Annotated[
        int | None, Query(ge=1, le=MAX_ID, description="Instead of `trials`: the best cells of this experiment.")
    ] = None
    best: Annotated[
        int,
        Query(
            ge=1,
            le=100,
            description="How many cells, with all seeds, by the mean of their trials' best epochs; `validated_on` of "
            f"each says on which images these were measured. Fewer where these have more than {MOST_TRIALS} trials.",
        ),
    ] = 5

    def chosen(self, session: Session, project_id: int | None) -> list[int]:
        """The trials; raises `QueryError` and `NotFoundError`."""
        if (self.trials is None) == (self.experiment is None):
            raise QueryError([FieldProblem("trials", "name either trials or an experiment")])
        if self.experiment is not None:
            store.get_experiment(session, self.experiment, project_id=project_id)
            return best_trials(session, self.experiment, self.best, MOST_TRIALS)
        named = list(dict.fromkeys(map(int, (self.trials or "").split(","))))
        if len(named) > MOST_TRIALS:
            raise QueryError([FieldProblem("trials", f"at most {MOST_TRIALS} at a time")])
        if too_large := [one for one in named if one > MAX_ID]:
            raise QueryError([FieldProblem("trials", f"{too_large[0]} is no number of a trial")])
        return named


@router.get("", operation_id="getCurves", responses=kept(CURVES), response_model=CurvesOut)
def show(
    answer: Answer,
    who: Reader,
    database: Db,
    asked: Annotated[AskedCurves, Depends()],
    metrics: Annotated[
        str,
        Query(
            max_length=200,
            pattern=METRICS,
            description=f"Separated by commas: {', '.join(epoch_points.METRICS)}.",
        ),
    ] = DEFAULT,
    points: Annotated[int, Query(ge=3, le=2000, description="At most so many epochs of each trial.")] = 300,
) -> Any:
    """The epochs of many trials by column, of each at most `points` that draw the same curves.

    Those are epochs as they are, no means. Numbers have seven digits.
    """
    names = list(dict.fromkeys(metrics.split(",")))
    if unknown := [name for name in names if name not in epoch_points.METRICS]:
        fix = f"there is no metric {unknown[0]!r} of epochs; there are {', '.join(epoch_points.METRICS)}"
        raise QueryError([FieldProblem("metrics", fix)])
    with database.read() as session:
        found = curves(session, asked.chosen(session, who.project_id), names, points, project_id=who.project_id)
    return answer(written(found))


def written(found: Curves) -> dict[str, object]:
    """Curves as `CurvesOut` has them."""
    columns, decided = (
        [{"field": one.field, "name": one.name} for one in some]
        for some in (found.columns.fields, found.columns.decided)
    )
    curves = [vars(curve) for curve in found.curves]
    return {"metrics": found.metrics, "columns": columns, "decided": decided, "curves": curves}
