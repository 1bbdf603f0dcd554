"""The plane of two metrics, on SQLite and Postgres: every cell, with its deviations, and the front."""

import statistics
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient

from service.queue.leases import Lease

pytestmark = pytest.mark.here


def test_every_cell_is_a_point_however_near_another(
    api: TestClient, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    submit(seeds=2, **{"training.lr": [0.1, 0.2, 0.3]})
    lease = claim()
    values = [0.5, 0.7, 0.6, 0.6, 0.6, 0.6]  # the second and the third cell lie at one place
    for trial, value in enumerate(values, 1):
        finish(lease, trial, value)
    for query in ("", "&experiment=1"):  # stored scores, and those added up
        found = api.get(f"/v1/leaderboards/digits/plane?x=ece&y=accuracy{query}").json()
        assert (found["total"], len(found["cell"]), len(set(found["cell"]))) == (3, 3, 3)
        assert sorted(found["y"]) == [0.6, 0.6, 0.6]
        assert max(found["y_error"]) == statistics.stdev([0.5, 0.7])
        assert found["seeds"] == found["trials"] == [2, 2, 2]
        assert sorted(found["fields"]["training.lr"]) == [0.1, 0.2, 0.3]
        assert [column["field"] for column in found["columns"]] == ["training.lr"]
        assert all(found["front"])
    some = api.get("/v1/leaderboards/digits/plane", params={"x": "ece", "y": "accuracy", "where": "lr<0.25"}).json()
    assert some["total"] == 2


def test_a_point_that_lacks_seeds_says_so(
    api: TestClient, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    submit(seeds=3)
    lease = claim()
    for trial in (1, 2):
        finish(lease, trial, 0.5)
    for query in ("", "&experiment=1"):
        found = api.get(f"/v1/leaderboards/digits/plane?x=ece&y=accuracy{query}").json()
        assert (found["seeds"], found["trials"]) == ([2], [3])
        page = api.get(f"/leaderboards/digits?x=ece&y=accuracy{query}").text
        assert "accuracy (%) 50.00, 2 of 3 seeds</title>" in page


def test_a_metric_that_is_best_between_has_points_and_no_front(
    api: TestClient, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    """The coldest network is none of the best: a temperature is best near 1."""
    submit(seeds=1, **{"training.lr": [0.1, 0.2, 0.3]})
    lease = claim()
    for trial, temperature in enumerate((0.3, 1.0, 1.5), 1):
        finish(lease, trial, 0.5, temperature=temperature)
    for query in ("", "&experiment=1"):
        for axes in ("x=accuracy&y=temperature", "x=temperature&y=accuracy"):
            found = api.get(f"/v1/leaderboards/digits/plane?{axes}{query}").json()
            assert (found["total"], found["front"]) == (3, [False] * 3)
            page = api.get(f"/leaderboards/digits?{axes}{query}").text
            assert "temperature near 1)" in page or "(temperature near 1," in page
            assert ("temperature, near 1 is better" in page) == axes.endswith("temperature")
            assert "Pareto front" not in page
            assert 'class="front"' not in page
            assert "pareto=" not in page, "which the downloads would be refused for"


def test_the_board_is_one_that_has_both_metrics(
    api: TestClient, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    """More cells were measured under a protocol without attacks; and none has all."""
    submit(seeds=1, **{"training.lr": [0.1, 0.2, 0.3, 0.4, 0.5]})
    lease = claim()
    for trial in (1, 2, 3):
        finish(lease, trial, 0.9)
    for trial in (4, 5):
        finish(lease, trial, 0.9, under="attacked", robust_accuracy=trial / 10)
    for query in ("", "&experiment=1"):
        for axes in ("x=compression&y=robust_accuracy", "x=robust_accuracy&y=compression"):
            found = api.get(f"/v1/leaderboards/digits/plane?{axes}{query}").json()
            assert (found["total"], found["front"].count(True)) == (2, 1)
            page = api.get(f"/leaderboards/digits?{axes}{query}").text
            assert f"2 configurations of protocol <code>{found['protocol'][:12]}</code>" in page
        nowhere = "x=robust_accuracy&y=pgd_accuracy"
        assert api.get(f"/v1/leaderboards/digits/plane?{nowhere}{query}").json()["protocol"] is None
        assert "No configuration has both" in api.get(f"/leaderboards/digits?{nowhere}{query}").text


def test_what_is_wrong_and_what_is_not_there(api: TestClient, submit: Callable[..., int]) -> None:
    submit()
    assert api.get("/v1/leaderboards/digits/plane?x=accuracy&y=accuracy").status_code == 422
    assert api.get("/v1/leaderboards/nix/plane").status_code == 404
    found = api.get("/v1/leaderboards/digits/plane").json()
    assert (found["protocol"], found["total"], found["cell"]) == (None, 0, [])
