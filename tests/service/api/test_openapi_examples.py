"""The examples in the OpenAPI document are answers that the API could give."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from service.api import health, keys
from service.api.http import problems
from service.api.openapi_examples import experiments, leaderboards, trials
from service.schemas.experiments import ExperimentOut
from service.schemas.leaderboards import LeaderboardOut, TableOut
from service.schemas.service import KeyOut, NewKeyOut, PersonOut, Problem, ProjectOut, Readiness
from service.schemas.trials import ArtifactList, MetricsPage, ResultDetailOut, SpectraOut, TrialDetailOut, TrialOut
from service.specs.spec import ExperimentSpec


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (ExperimentSpec, experiments.SPEC),
        (ExperimentOut, experiments.EXPERIMENT),
        (ExperimentOut, experiments.CREATED),
        (TrialOut, trials.TRIAL),
        (TrialDetailOut, trials.TRIAL_DETAIL),
        (ResultDetailOut, trials.RESULT),
        (SpectraOut, trials.SPECTRA),
        (MetricsPage, trials.METRICS),
        (ArtifactList, trials.ARTIFACTS),
        (LeaderboardOut, leaderboards.LEADERBOARD),
        (TableOut, leaderboards.TABLE),
        (Readiness, health.READINESS),
        (ProjectOut, keys.PROJECT),
        (PersonOut, keys.PERSON),
        (KeyOut, keys.KEY),
        (NewKeyOut, keys.NEW_KEY),
        (Problem, problems.EXAMPLE),
    ],
)
def test_example_is_an_answer(model: type[BaseModel], example: dict[str, Any]) -> None:
    answer = model.model_validate_json(json.dumps(example))
    assert set(answer.model_dump(mode="json")) == set(example)


def test_every_operation_has_an_example(openapi: dict[str, Any]) -> None:
    operations = [operation for path in openapi["paths"].values() for operation in path.values()]
    assert len(operations) >= 9
    for operation in operations:
        good = next(response for status, response in operation["responses"].items() if status in ("200", "201"))
        assert any("example" in content for content in good["content"].values()), operation["operationId"]
        if "requestBody" in operation:
            assert operation["requestBody"]["content"]["application/json"]["examples"], operation["operationId"]
