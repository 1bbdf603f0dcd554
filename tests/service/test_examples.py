"""The examples in the OpenAPI document are answers that the API could give."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from service.api import examples, leaderboard_examples, trial_examples
from service.grid import ExperimentSpec
from service.main import create_app
from service.schemas import (
    ArtifactList,
    ExperimentOut,
    MetricsPage,
    ResultDetailOut,
    SpectraOut,
    TrialDetailOut,
    TrialOut,
)
from service.schemas_leaderboard import LeaderboardOut, TableOut
from service.schemas_service import Problem, Readiness
from service.settings import Settings


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (ExperimentSpec, examples.SPEC),
        (ExperimentOut, examples.EXPERIMENT),
        (ExperimentOut, examples.CREATED),
        (TrialOut, trial_examples.TRIAL),
        (TrialDetailOut, trial_examples.TRIAL_DETAIL),
        (ResultDetailOut, trial_examples.RESULT),
        (SpectraOut, trial_examples.SPECTRA),
        (MetricsPage, trial_examples.METRICS),
        (ArtifactList, trial_examples.ARTIFACTS),
        (LeaderboardOut, leaderboard_examples.LEADERBOARD),
        (TableOut, leaderboard_examples.TABLE),
        (Readiness, examples.READINESS),
        (Problem, examples.PROBLEM),
    ],
)
def test_example_is_an_answer(model: type[BaseModel], example: dict[str, Any]) -> None:
    answer = model.model_validate_json(json.dumps(example))
    assert set(answer.model_dump(mode="json")) == set(example)


def test_every_operation_has_an_example(tmp_path: Path) -> None:
    document = create_app(Settings(data_dir=tmp_path)).openapi()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) >= 9
    for operation in operations:
        good = next(response for status, response in operation["responses"].items() if status in ("200", "201"))
        assert any("example" in content for content in good["content"].values()), operation["operationId"]
        if "requestBody" in operation:
            assert operation["requestBody"]["content"]["application/json"]["examples"], operation["operationId"]
