"""/v1/experiments/{id}/matrix: a metric over two fields of an experiment."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from service.api.http.authentication import Reader
from service.api.http.dependencies import Db, ExperimentId
from service.api.http.examples import Example, kept
from service.api.http.problems import RESPONSES
from service.api.http.responses import Answer
from service.errors import FieldProblem, QueryError
from service.experiments import store
from service.leaderboards.conditions import condition
from service.leaderboards.matrix import Matrix, MatrixQuestion, Patch, Seeds, matrix, patch
from service.leaderboards.metrics import Metric
from service.schemas.leaderboards import MatrixOut
from service.specs.columns import known_field
from service.specs.patterns import FIELD, NUMBERS

router = APIRouter(prefix="/v1/experiments", tags=["experiments"], responses=RESPONSES)

_MOST_TRIALS = 1000
_WHERE = ("facet", "x", "y")

MATRIX: Example = {
    "experiment_id": 1,
    "metric": "accuracy",
    "seeds": "mean",
    "x": {"field": "rank", "name": "rank", "values": [4.0, 16.0]},
    "y": {"field": "delta", "name": "delta", "values": [None, 1.0]},
    "axes": [
        {"field": "rank", "name": "rank", "values": [4.0, 16.0]},
        {"field": "delta", "name": "delta", "values": [None, 1.0]},
    ],
    "facets": [{"fields": {}}],
    "protocols": ["5f0bd9e2f0b2aa6b3a9b1f3c7b5fd1c6f58c5f4f2d8ce0cbb79b9f0b5d5a3a11"],
    "places": {
        "trial": [1, 3, 5, 7],
        "facet": [0, 0, 0, 0],
        "x": [0, 0, 1, 1],
        "y": [0, 1, 0, 1],
        "state": ["succeeded", "running", "failed", "queued"],
        "value": [0.9312, 0.9187, None, None],
        "deviation": [0.0021, None, None, None],
        "seeds": [2, 1, 0, 0],
        "trials": [2, 2, 2, 2],
        "protocol": [0, 0, None, None],
    },
    "newest_event": 31,
}


@dataclass(frozen=True, kw_only=True)
class AskedMatrix:
    """The parameters of a matrix, of the page as of the API."""

    metric: Annotated[Metric, Query(description="What the places show.")] = Metric.ACCURACY
    x: Annotated[
        str | None,
        Query(max_length=100, pattern=FIELD, description="The field along x; by default one with many values."),
    ] = None
    y: Annotated[str | None, Query(max_length=100, pattern=FIELD, description="The field along y, likewise.")] = None
    seeds: Annotated[Seeds, Query(description="How the results of a place's seeds make its value.")] = Seeds.MEAN
    where: Annotated[
        list[Annotated[str, Field(max_length=2000)]] | None,
        Query(
            max_length=20,
            description="A condition on any field of a trial; several must all hold. =, !=, <, <=, >, >=, in, not in.",
            examples=[["layer=tt", "seed<3"]],
        ),
    ] = None

    def question(self, experiment_id: int, trials: str | None = None) -> MatrixQuestion:
        """The question to an experiment; raises `QueryError`."""
        chosen = None if trials is None else list(dict.fromkeys(map(int, trials.split(","))))
        if chosen is not None and len(chosen) > _MOST_TRIALS:
            raise QueryError([FieldProblem("trials", f"at most {_MOST_TRIALS} at a time")])
        return MatrixQuestion(
            experiment_id=experiment_id,
            metric=self.metric,
            x=None if self.x is None else known_field(self.x, "x"),
            y=None if self.y is None else known_field(self.y, "y"),
            seeds=self.seeds,
            where=[condition(text, field_named=known_field) for text in self.where or ()],
            trials=chosen,
        )


@router.get(
    "/{experiment_id}/matrix",
    operation_id="getExperimentMatrix",
    responses=kept(MATRIX),
    response_model=MatrixOut,
)
def show(
    experiment_id: ExperimentId,
    answer: Answer,
    who: Reader,
    database: Db,
    asked: Annotated[AskedMatrix, Depends()],
    trials: Annotated[
        str | None,
        Query(
            max_length=20_000,
            pattern=NUMBERS,
            description="Only the places of these trials, as they are now: `x`, `y`, `axes` and `facets` are left out.",
            examples=["7,8"],
        ),
    ] = None,
) -> Any:
    """A metric over two fields, by column: a place for each cell, and a facet for all else that is varied.

    A place takes the results of one protocol alone, and of one configuration. Fields are those in which the
    experiment's trials differ; numbers have seven digits.
    """
    question = asked.question(experiment_id, trials)
    with database.read() as session:
        store.get_experiment(session, experiment_id, project_id=who.project_id)
        found = matrix(session, question) if question.trials is None else patch(session, question)
    return answer({"experiment_id": experiment_id, "metric": question.metric, "seeds": question.seeds} | written(found))


def written(found: Matrix | Patch) -> dict[str, object]:
    """A matrix as `MatrixOut` has it. (`asdict` would copy every number.)"""
    values: dict[str, object] = {**vars(found), "places": vars(found.places)}
    if isinstance(found, Patch):
        values["places"] = {name: column for name, column in vars(found.places).items() if name not in _WHERE}
        return values
    return values | {
        "x": vars(found.x),
        "y": vars(found.y),
        "axes": [vars(axis) for axis in found.axes],
        "facets": [vars(facet) for facet in found.facets],
    }
