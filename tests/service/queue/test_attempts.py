"""Attempts at a trial: each with its place, its environment and what it used, the newest kept."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select

from service.database import Attempt, Environment
from service.database.engine import Database
from service.database.experiments import ResourceSeries
from service.queue import attempts
from service.queue.leases import Lease
from service.queue.trials import HeldExperiment
from tests.held import under, unfinished_trials

ENVIRONMENT = {"host": "node-1", "packages": {"torch": "2"}, "git_diff": "+one\n"}
SERIES: ResourceSeries = {
    "interval": 1.0,
    "seconds": [1.0, 2.0],
    "cpu": [99.0, 101.5],
    "memory": [100.0, 120.0],
    "gpu": [None, 50.0],
    "gpu_memory": [None, 7.0],
}


@pytest.fixture
def begun(
    database: Database, submit: Callable[..., int], claim: Callable[..., Lease]
) -> tuple[Lease, int, Callable[..., None]]:
    """A lease, a trial, and what starts it once more."""
    submit(seeds=1)
    lease = claim()
    with database.read() as session:
        (trial,) = unfinished_trials(session, lease)

    def start(place: str = "node-1, GPU 0", environment: dict[str, Any] | None = ENVIRONMENT) -> None:
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.place_trial, trial.id, place, environment))

    return lease, trial.id, start


def test_each_start_is_one(database: Database, begun: Any) -> None:
    lease, trial_id, start = begun
    start()
    start()  # the reply to COMMIT was lost: said again
    database.write(under(lease, HeldExperiment.record_resources, trial_id, SERIES))
    database.write(under(lease, HeldExperiment.lose_trial, trial_id, "its process died"))
    start("node-2", ENVIRONMENT | {"host": "node-2"})
    database.write(under(lease, HeldExperiment.lose_trial, trial_id, "its node died", charged=False))
    start("node-3", None)
    with database.read() as session:
        found = attempts.listed(session, trial_id)
        assert [(one.number, one.place) for one in found] == [(1, "node-1, GPU 0"), (2, "node-2"), (3, "node-3")]
        assert [one.environment and one.environment["host"] for one in found] == ["node-1", "node-2", None]
        assert [one.resources for one in attempts.listed(session, trial_id, resources=True)] == [SERIES, None, None]
        assert session.scalar(select(func.count()).select_from(Environment)) == 2


def test_one_that_dies_for_ever_leaves_no_more(database: Database, begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MOST_ATTEMPTS", 3)
    lease, trial_id, start = begun
    for _ in range(6):
        start()
        database.write(under(lease, HeldExperiment.lose_trial, trial_id, "its process died"))
    start()
    with database.read() as session:
        assert [one.number for one in attempts.listed(session, trial_id)] == [5, 6, 7]


def test_what_is_no_more_running_is_not_recorded(database: Database, begun: Any) -> None:
    lease, trial_id, start = begun
    start()
    database.write(under(lease, HeldExperiment.fail_trial, trial_id, "error", "it failed"))
    database.write(under(lease, HeldExperiment.record_resources, trial_id, SERIES))
    with database.read() as session:
        assert session.scalars(select(Attempt.resources)).all() == [None]


def test_the_api_serves_them(api: TestClient, database: Database, begun: Any) -> None:
    lease, trial_id, start = begun
    start()
    database.write(under(lease, HeldExperiment.record_resources, trial_id, SERIES))
    (attempt,) = api.get(f"/v1/trials/{trial_id}/attempts").json()["items"]
    assert (attempt["number"], attempt["place"], attempt["environment"]) == (1, "node-1, GPU 0", ENVIRONMENT)
    (used,) = api.get(f"/v1/trials/{trial_id}/resources").json()["items"]
    assert (used["interval"], used["number"]) == (1.0, 1)
    assert used["points"] == [
        {"seconds": 1.0, "cpu": 99.0, "memory": 100.0, "gpu": None, "gpu_memory": None},
        {"seconds": 2.0, "cpu": 101.5, "memory": 120.0, "gpu": 50.0, "gpu_memory": 7.0},
    ]
    for what in ("attempts", "resources"):
        assert api.get(f"/v1/trials/999/{what}").status_code == 404
