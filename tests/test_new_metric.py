"""A new metric takes three edits: its module, its entry in the catalogue, and the stage that measures it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

ENTRY = """
from ttsv.metrics.catalog import METRICS, MetricInfo

METRICS["sharpness"] = MetricInfo(
    name="sharpness",
    heading="sharpness of the loss",
    unit="%",
    decimals=1,
    best="most",
    definition="Largest rise of the loss near the weights. Of no use but here.",
    protocol="metrics.sharpness",
    source="Nobody 2026",
    group="Sharpness",
    headline=True,
)
"""
"""What a metric's author adds to the catalogue; nothing else of the project knows the name."""

PROGRAM = """
import json, sys
from pathlib import Path

from fastapi.testclient import TestClient
from sqlalchemy import inspect

from docs import generate
from service.client import frames
from service.database import Result, Score, Trial
from service.database.engine import Database
from service.experiments import submission
from service.experiments.submission import Draft
from service.leaderboards.metrics import HEADLINE, Metric
from service.main import create_app
from service.upkeep.migrate import migrate
from service.queue import leases
from service.queue.trials import HeldExperiment, hold
from service.settings import Settings
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.held import under
from tests.results import made_result
from workers.driver import recorder
from workers.trial_process.messages import ResultReport


def recorded(session, trial_id, report):
    with hold(session, lease) as held:
        recorder._finish(held, trial_id, report)


settings = Settings(data_dir=Path(sys.argv[1]), allowed_hosts=["testserver"])
database = Database(settings.url)
migrate(database)
spec = ExperimentSpec(name="new", base={"dataset": "digits", "model": "small-cnn"}, grid={"seed": [0, 1]})
database.write(lambda s: submission.submit(s, Draft(spec, expand_grid(spec, max_trials=2))).id)
lease = database.write(lambda s: leases.claim(s, "worker", {"pid": 1}))
for trial_id, sharpness in ((1, 0.25), (2, 0.75)):
    report = ResultReport(made_result(sharpness=sharpness), [])
    database.write(under(lease, HeldExperiment.start_trial, trial_id))
    database.write(lambda s: recorded(s, trial_id, report))
with database.engine.connect() as connection:
    columns = {c["name"]: [str(c["type"]), c["nullable"]] for c in inspect(connection).get_columns("results")}
board = "/v1/leaderboards/digits?metric=sharpness"
with TestClient(create_app(settings)) as api:
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    found = {
        "column": columns["sharpness"],
        "default": made_result().sharpness,
        "metric": [list(Metric)[-1], Metric.SHARPNESS in HEADLINE],
        "row": api.get(board).json()["boards"][0]["rows"][0]["metrics"]["sharpness"],
        "csv": api.get(board + "&format=csv").text,
        "latex": api.get(board + "&format=latex").text,
        "legend": api.get("/leaderboards/digits?metric=sharpness").text,
        "trial": api.get("/trials/1").text,
        "schema": schemas["ResultOut"]["properties"]["sharpness"],
        "ranked by": schemas["Metric"]["enum"][-1],
        "result": api.get("/v1/trials/2/result").json()["sharpness"],
        "sorted": [one["id"] for one in api.get("/v1/trials?sort=-sharpness").json()["items"]],
        "ready": api.get("/readyz").json()["checks"]["schema"],
        "frame": frames.RESULT_COLUMNS.count("sharpness"),
        "document": generate.metrics_page(),
    }
database.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an interpreter whose catalogue has one metric more makes of a fresh database with two results."""
    command = [sys.executable, "-c", ENTRY + PROGRAM, str(tmp_path_factory.mktemp("data"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
def test_it_is_a_field_of_results_and_a_column(found: dict[str, Any]) -> None:
    assert found["default"] is None
    assert found["column"][1] is True
    assert found["ready"] == "ok"


def test_leaderboards_rank_by_it(found: dict[str, Any]) -> None:
    assert found["metric"] == ["sharpness", True]
    row = found["row"]
    assert (row["seeds"], row["mean"], row["min"], row["max"]) == (2, 0.5, 0.25, 0.75)
    assert "sharpness_mean" in found["csv"].splitlines()[0].split(",")
    assert "sharpness of the loss (\\%)" in found["latex"]
    assert "50.0" in found["latex"]


def test_pages_say_what_it_means(found: dict[str, Any]) -> None:
    for page in (found["legend"], found["trial"]):
        assert "sharpness of the loss" in page
        assert "Largest rise of the loss near the weights." in page


def test_the_api_has_it(found: dict[str, Any]) -> None:
    assert (
        found["schema"]["description"]
        == "Largest rise of the loss near the weights. Of no use but here. As a fraction."
    )
    assert found["schema"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert found["ranked by"] == "sharpness"
    assert found["result"] == 0.75
    assert found["sorted"] == [2, 1]
    assert found["frame"] == 1


def test_the_document_has_it(found: dict[str, Any]) -> None:
    row = "| `sharpness` | Largest rise of the loss near the weights. Of no use but here."
    assert f"{row} | sharpness of the loss (%) | most | `metrics.sharpness` | Nobody 2026 |" in found["document"]
    assert "\n## Sharpness\n" in found["document"]
