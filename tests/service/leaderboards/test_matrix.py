"""An experiment as a matrix, on SQLite and Postgres: places, states, protocols, and what a patch says."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from service.database import Experiment, Result, Trial, TrialState
from service.database.engine import Database
from service.errors import QueryError
from service.experiments.submission import Draft, submit
from service.leaderboards.conditions import condition
from service.leaderboards.matrix import Matrix, MatrixQuestion, Seeds, matrix, patch
from service.leaderboards.metrics import Metric
from service.queue.leases import Lease
from service.queue.trials import hold
from service.specs.columns import known_field
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec

BASE = {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training": {"epochs": 3}}


@pytest.fixture
def grid(database: Database) -> Callable[..., int]:
    """Stores an experiment with these axes."""

    def grid(**axes: list[Any]) -> int:
        spec = ExperimentSpec(name="grid", base=BASE, grid=axes)
        plan = expand_grid(spec, max_trials=1000)
        return database.write(lambda session: submit(session, Draft(spec, plan)).id)

    return grid


@pytest.fixture
def asked(database: Database) -> Callable[..., Matrix]:
    """Asks for the matrix of experiment 1."""

    def asked(**question: Any) -> Matrix:
        with database.read() as session:
            return matrix(session, MatrixQuestion(experiment_id=1, **question))

    return asked


def place(found: Matrix, x: Any, y: Any, facet: int = 0) -> dict[str, Any]:
    """The place of two values, by column."""
    places = found.places
    where = (facet, found.x.values.index(x), found.y.values.index(y))
    (index,) = [i for i, here in enumerate(zip(places.facet, places.x, places.y, strict=True)) if here == where]
    return {name: column[index] for name, column in vars(places).items()}


def test_a_place_for_each_cell_with_mean_and_deviation(
    grid: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None], asked: Callable[..., Matrix]
) -> None:
    grid(rank=[2, 4, 8], lambda_ort=[0.0, 1.0], seed=[0, 1, 2])
    lease = claim()
    values = [0.5, 0.61, 0.7]
    for trial, value in enumerate(values, 1):
        finish(lease, trial, value)
    finish(lease, 4, 0.9)
    found = asked()
    assert (found.x.field, found.y.field) == ("rank", "lambda_ort")
    assert found.x.values == [2, 4, 8]
    assert found.y.values == [0.0, 1.0]
    assert [facet.fields for facet in found.facets] == [{}]
    assert len(found.places.trial) == 6
    whole = place(found, 2, 0.0)
    assert whole["value"] == pytest.approx(statistics.mean(values))
    assert whole["deviation"] == pytest.approx(statistics.stdev(values))
    assert (whole["seeds"], whole["trials"], whole["state"], whole["trial"]) == (3, 3, "succeeded", 1)
    part = place(found, 2, 1.0)
    assert (part["value"], part["deviation"], part["seeds"], part["trials"]) == (0.9, None, 1, 3)
    assert part["state"] == "queued"
    assert place(found, 8, 1.0)["value"] is None
    for way, expected in {
        Seeds.MEDIAN: 0.61,
        Seeds.LEAST: 0.5,
        Seeds.LARGEST: 0.7,
        Seeds.DEVIATION: statistics.stdev(values),
    }.items():
        assert place(asked(seeds=way), 2, 0.0)["value"] == pytest.approx(expected), way
    assert place(asked(metric=Metric.ECE), 2, 0.0)["value"] == pytest.approx(0.02)


def test_a_median_of_the_largest_numbers(
    grid: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None], asked: Callable[..., Matrix]
) -> None:
    grid(rank=[2], seed=[0, 1])
    lease = claim()
    for trial in (1, 2):
        finish(lease, trial, loss=1.6e308)
    assert asked(metric=Metric.LOSS, seeds=Seeds.MEDIAN).places.value == [1.6e308]


def test_what_is_decided_by_the_rest_sets_no_facets_apart(
    grid: Callable[..., int], asked: Callable[..., Matrix]
) -> None:
    """Rank None makes a layer dense, without a penalty; delta None leaves no constraint, and nothing to set of it."""
    grid(rank=[None, 4], lambda_ort=[0.1, 1.0], delta=[None, 1.0], **{"constraint": ["clip"], "clipping.every": [20]})
    found = asked(x="rank", y="constraint")
    assert found.decided == ["layer", "delta", "clipping.every"]
    assert [facet.fields for facet in found.facets] == [{"lambda_ort": value} for value in (0.0, 0.1, 1.0)]
    assert [axis.field for axis in found.axes] == [
        "layer",
        "rank",
        "lambda_ort",
        "constraint",
        "delta",
        "clipping.every",
    ]
    places = found.places
    assert len({*zip(places.facet, places.x, places.y, strict=True)}) == len(places.trial) == 6, "none is mixed"
    assert asked(x="layer", y="delta").decided == ["rank", "constraint", "clipping.every"]
    one = asked(x="rank", y="lambda_ort", where=[condition("delta=1", field_named=known_field)])
    assert one.decided == ["layer"]
    assert [facet.fields for facet in one.facets] == [{"constraint": "clip", "delta": 1.0, "clipping.every": 20}]


def test_what_else_is_varied_stands_in_facets_and_is_never_mixed(
    grid: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None], asked: Callable[..., Matrix]
) -> None:
    grid(rank=[2, 4], lambda_ort=[0.0, 0.1, 1.0], **{"training.lr": [0.1, 0.2], "seed": [0, 1]})
    lease = claim()
    for trial in range(1, 25):
        finish(lease, trial, trial / 100)
    found = asked(x="rank", y="training.lr")
    assert [facet.fields for facet in found.facets] == [{"lambda_ort": value} for value in (0.0, 0.1, 1.0)]
    assert set(found.places.seeds) == {2}
    one = place(found, 4, 0.2, facet=1)
    assert one["deviation"] == pytest.approx(statistics.stdev([0.01, 0.02]), rel=1e-6)
    by = asked(
        where=[condition("lambda_ort=0.1", field_named=known_field), condition("seed=1", field_named=known_field)]
    )
    assert {facet.fields.get("lambda_ort", 0.1) for facet in by.facets} == {0.1}
    assert set(by.places.trials) == {1}
    assert [axis.field for axis in by.axes] == ["rank", "lambda_ort", "training.lr"]
    assert asked(x="lambda_ort").x.field == "lambda_ort"
    assert asked(y="lambda_ort").y.field == "lambda_ort"


def test_a_place_takes_the_results_of_one_protocol(
    grid: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None], asked: Callable[..., Matrix]
) -> None:
    grid(rank=[2, 4], seed=[0, 1, 2])
    lease = claim()
    for trial, (value, under) in enumerate(
        [(0.2, "rare"), (0.4, "rare"), (0.9, "usual"), (0.5, "usual"), (0.6, "usual"), (0.7, "usual")], 1
    ):
        finish(lease, trial, value, under=under)
    found = asked()
    mixed, plain = place(found, 2, None), place(found, 4, None)
    assert (mixed["value"], mixed["seeds"], mixed["state"]) == (0.9, 1, "other_protocol")
    assert (plain["value"], plain["seeds"], plain["state"]) == (pytest.approx(0.6), 3, "succeeded")
    assert mixed["protocol"] == plain["protocol"] == 0
    assert len(found.protocols) == 2


def test_states_that_are_not_results(
    grid: Callable[..., int],
    claim: Callable[..., Lease],
    finish: Callable[..., None],
    asked: Callable[..., Matrix],
    database: Database,
) -> None:
    grid(rank=[2, 3, 4, 5, 6, 7, 8], seed=[0, 1])
    lease = claim()
    finish(lease, 1, 0.9)
    finish(lease, 13, 0.9)

    def work(session: Session) -> None:
        with hold(session, lease) as held:
            for trial in (2, 3, 5):
                held.start_trial(trial)
            held.fail_trial(2, "error", "x")
            held.fail_trial(3, "diverged", "x")
        for trial, state in ((4, TrialState.DIVERGED), (6, TrialState.SUCCEEDED), (7, TrialState.CANCELLED)):
            found = session.get(Trial, trial)
            assert found is not None
            found.state = state
        session.get(Trial, 8).state = TrialState.CANCELLED  # type: ignore[union-attr]
        for trial in (9, 10):
            session.get(Trial, trial).state = TrialState.EARLY_STOPPED  # type: ignore[union-attr]
        result = session.get(Result, 13)
        assert result is not None
        result.valid, result.violations = False, ["accuracy 9"]
        session.get(Trial, 14).state = TrialState.FAILED  # type: ignore[union-attr]

    database.write(work)
    found = asked()
    assert found.y.values == [None]
    states = {value: place(found, value, None)["state"] for value in found.x.values}
    assert states == {
        2: "failed",
        3: "diverged",
        4: "running",
        5: "cancelled",
        6: "early_stopped",
        7: "queued",
        8: "failed",
    }
    assert place(found, 2, None)["value"] == 0.9
    assert place(found, 8, None)["value"] is None  # what cannot be true is no number


def test_a_patch_says_the_same_of_its_places(
    grid: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None], database: Database
) -> None:
    grid(rank=[2, 4, 8], seed=[0, 1])
    lease = claim()
    finish(lease, 1, 0.5)
    finish(lease, 4, 0.75)
    for where in ((), (condition("seed=1", field_named=known_field),)):
        with database.read() as session:
            whole = matrix(session, MatrixQuestion(experiment_id=1, where=where))
            some = patch(session, MatrixQuestion(experiment_id=1, trials=[4, 6], where=where))
            assert patch(session, MatrixQuestion(experiment_id=1, trials=[])).places.trial == []
        assert len(some.places.trial) == 2
        for index, trial in enumerate(some.places.trial):
            at = whole.places.trial.index(trial)
            for name in ("state", "value", "deviation", "seeds", "trials"):
                assert getattr(some.places, name)[index] == getattr(whole.places, name)[at], name
        assert some.places.facet == some.places.x == []


def test_trials_of_others_are_no_part_of_it(
    grid: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None], asked: Callable[..., Matrix]
) -> None:
    grid(rank=[2, 4])
    lease = claim()
    finish(lease, 1, 0.5)
    grid(rank=[2, 4], seed=[0, 1])
    assert asked().places.trials == [1, 1]


def test_fields_that_are_no_axes_are_refused(grid: Callable[..., int], asked: Callable[..., Matrix]) -> None:
    grid(rank=[2, 4], seed=[0, 1])
    with pytest.raises(QueryError) as refused:
        asked(x="layer")
    assert "choose one of rank" in refused.value.problems[0].message
    with pytest.raises(QueryError):
        asked(x="rank", y="rank")
    only = asked()
    assert (only.x.field, only.y.field, only.y.values) == ("rank", "", [None])


def test_seeds_alone_and_nothing_at_all(grid: Callable[..., int], asked: Callable[..., Matrix]) -> None:
    grid(seed=[0, 1])
    found = asked()
    assert (found.x.field, found.y.field) == ("", "")
    assert found.places.trials == [2]
    assert asked(where=[condition("rank=99")]).places.trial == []


class TestApi:
    def test_it_is_answered_by_column(
        self, api: TestClient, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
    ) -> None:
        submit(seeds=2, layer=["dense", "soc"], **{"training.lr": [0.1, 0.2]})
        finish(claim(), 1, 1 / 3)
        answer = api.get("/v1/experiments/1/matrix?x=lr&y=layer")
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["x"]["field"], found["y"]["values"]) == ("training.lr", ["dense", "soc"])
        assert len({len(column) for column in found["places"].values()}) == 1
        assert found["places"]["value"][0] == 0.3333333
        assert found["newest_event"] > 0
        again = api.get("/v1/experiments/1/matrix?x=lr&y=layer", headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304
        some = api.get("/v1/experiments/1/matrix?trials=1").json()
        assert some["places"]["trial"] == [1]
        assert "x" not in some["places"]
        assert all(math.isfinite(one) for one in some["places"]["value"])

    @pytest.mark.parametrize(
        ("query", "status"),
        [
            ("x=nix", 422),
            ("x=lr&y=lr", 422),
            ("metric=nix", 422),
            ("seeds=sum", 422),
            ("where=lr", 422),
            ("trials=1,,2", 422),
            ("trials=" + ",".join(["7"] * 1001), 200),
            ("trials=" + ",".join(map(str, range(1, 1002))), 422),
            ("unknown=1", 422),
        ],
    )
    def test_what_is_wrong_is_refused(self, sqlite_api: TestClient, query: str, status: int) -> None:
        spec = {"name": "x", "base": BASE, "grid": {"training.lr": [0.1, 0.2]}}
        assert sqlite_api.post("/v1/experiments", json=spec).status_code == 201
        assert sqlite_api.get(f"/v1/experiments/1/matrix?{query}").status_code == status
        assert sqlite_api.get("/v1/experiments/2/matrix").status_code == 404

    def test_seeds_are_no_axis_as_they_are_put_together(self, sqlite_api: TestClient) -> None:
        spec = {"name": "x", "base": BASE, "grid": {"training.lr": [0.1, 0.2], "seed": [0, 1]}}
        assert sqlite_api.post("/v1/experiments", json=spec).status_code == 201
        refused = sqlite_api.get("/v1/experiments/1/matrix?x=seed").json()["errors"]
        assert refused[0]["message"] == "the seeds of a place are put together; choose one of training.lr"


def test_another_experiment_s_trials_cannot_be_asked_for(database: Database, grid: Callable[..., int]) -> None:
    """Not even those of the same cell: whoever may not see them would learn what they are."""
    grid(rank=[2, 4])
    grid(rank=[8, 16])
    grid(rank=[4, 2])
    with database.read() as session:
        assert session.get(Experiment, 3) is not None
        found = patch(session, MatrixQuestion(experiment_id=1, trials=[3, 4, 5, 6]))
    assert found.places.trial == []
