"""/v1/compare, on SQLite and Postgres: numbers as NumPy and SciPy have them, protocols kept apart, what is refused."""

import csv
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete
from sqlalchemy.orm import Session

from service.database import Experiment, Result, Trial, TrialState
from service.database.engine import Database
from service.errors import NotFoundError
from service.experiments import submission
from service.experiments.submission import Draft
from service.leaderboards.comparison import CompareQuestion, compare
from service.leaderboards.sides import Kind
from service.queue.leases import Lease
from service.queue.trials import ProtocolRecord, hold
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.lazily import lazily

stats = lazily("scipy.stats")

SLOW = [0.90, 0.93, 0.91]
FAST = [0.80, 0.87, 0.82]


def cell_of(database: Database, trial_id: int) -> str:
    with database.read() as session:
        trial = session.get(Trial, trial_id)
        assert trial is not None
        return trial.cell


def asked(api: TestClient, query: str) -> dict[str, Any]:
    answer = api.get(f"/v1/compare?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def measured(
    database: Database, trial_result: Callable[..., dict[str, Any]], protocol: Callable[..., ProtocolRecord]
) -> Callable[..., None]:
    """Starts a trial and stores its result under a protocol with these changes."""

    def measured(lease: Lease, trial_id: int, accuracy: float, record: dict[str, Any] = {}, **metrics: Any) -> None:  # noqa: B006
        def work(session: Session) -> None:
            with hold(session, lease) as held:
                held.start_trial(trial_id)
                held.finish_trial(trial_id, trial_result(accuracy, **metrics), protocol(**record))

        database.write(work)

    return measured


@pytest.fixture
def two_cells(submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]) -> Lease:
    """Trials 1 to 3 are the seeds of a cell, 4 to 6 of another, 7 to 9 of a third of which one seed has a result."""
    submit(seeds=3, **{"training.lr": [0.1, 0.2, 0.3]})
    lease = claim()
    for trial, accuracy in enumerate([*SLOW, *FAST, 0.5], 1):
        finish(lease, trial, accuracy, ece=accuracy / 10)
    return lease


class TestCells:
    def test_means_differences_and_errors_are_scipys(
        self, api: TestClient, two_cells: Lease, database: Database
    ) -> None:
        cells = [cell_of(database, trial) for trial in (1, 4, 7)]
        found = asked(api, f"cells={','.join(cells)}&metrics=accuracy,ece")
        assert (found["kind"], found["baseline"], found["unequal"]) == ("cells", 0, [])
        assert found["differing"] == [
            {"field": "training.lr", "name": "lr", "values": [[0.1], [0.2], [0.3]], "counts": [1, 1, 1]}
        ]
        assert found["common"]["model"] == "small-cnn"
        assert "seed" not in found["common"]
        assert [side["about"] for side in found["sides"]] == ["lr 0.1", "lr 0.2", "lr 0.3"]
        assert [side["drawn"] for side in found["sides"]] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        (row,) = found["rows"]
        assert (row["fields"], row["trials"], found["row_count"]) == ({}, [3, 3, 3], 1)
        slow, fast, single = row["metrics"]["accuracy"]
        assert slow["mean"] == pytest.approx(np.mean(SLOW))
        assert slow["std"] == pytest.approx(np.std(SLOW, ddof=1))
        assert (slow["seeds"], slow["trials"], slow["min"], slow["max"]) == (3, 3, 0.90, 0.93)
        assert (slow["difference"], slow["error"], slow["chance"]) == (None, None, None)
        welch = stats.ttest_ind(FAST, SLOW, equal_var=False)
        assert fast["difference"] == pytest.approx(np.mean(FAST) - np.mean(SLOW))
        assert fast["error"] == pytest.approx(np.sqrt(np.var(FAST, ddof=1) / 3 + np.var(SLOW, ddof=1) / 3))
        assert fast["chance"] == pytest.approx(welch.pvalue)
        assert (slow["best"], fast["best"]) == (True, False)
        assert (single["seeds"], single["trials"], single["std"]) == (1, 3, None)
        assert single["difference"] == pytest.approx(0.5 - np.mean(SLOW))
        assert (single["error"], single["chance"]) == (None, None)
        again = asked(api, f"cells={','.join(cells)}&metrics=accuracy&baseline={cells[1]}")
        assert again["baseline"] == 1
        assert again["rows"][0]["metrics"]["accuracy"][0]["difference"] == pytest.approx(-fast["difference"])

    def test_a_cell_is_as_on_the_leaderboard(
        self,
        api: TestClient,
        two_cells: Lease,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
        database: Database,
    ) -> None:
        """A trial that ran twice counts once, with its newest result, and archived experiments do not count."""
        submit(seeds=4, **{"training.lr": [0.1]})
        lease = claim()
        finish(lease, 10, 0.99)
        finish(lease, 13, 0.95)
        cells = [cell_of(database, trial) for trial in (1, 4)]
        board = api.get("/v1/leaderboards/digits").json()["boards"][0]
        (theirs,) = [row for row in board["rows"] if row["cell"] == cells[0]]
        ours = asked(api, f"cells={','.join(cells)}")["rows"][0]["metrics"]["accuracy"][0]
        assert (ours["seeds"], ours["trials"]) == (theirs["seeds"], theirs["trials"]) == (4, 4)
        assert ours["mean"] == theirs["metrics"]["accuracy"]["mean"] == pytest.approx(np.mean([0.99, 0.93, 0.91, 0.95]))
        assert ours["std"] == theirs["metrics"]["accuracy"]["std"]
        side = asked(api, f"cells={','.join(cells)}")["sides"][0]
        assert side["drawn"] == [10, 11, 12, 13]
        assert (side["states"], side["missing"]) == ({"queued": 2, "succeeded": 5}, {})  # those ran in the other one

    def test_a_side_that_lacks_seeds_of_a_metric_is_no_match_for_one_with_all(
        self,
        api: TestClient,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        measured: Callable[..., None],
        database: Database,
    ) -> None:
        """The second cell has all accuracies, and the robust ones of two seeds."""
        submit(seeds=3, **{"training.lr": [0.1, 0.2, 0.3]})
        lease = claim()
        for trial, value in enumerate([0.3, 0.31, 0.32, 0.8, 0.81, None, 0.1, 0.11, 0.12], 1):
            measured(lease, trial, 0.5, robust_accuracy=value)
        query = f"cells={','.join(cell_of(database, trial) for trial in (1, 4, 7))}&metrics=robust_accuracy"
        first, second, third = asked(api, query)["rows"][0]["metrics"]["robust_accuracy"]
        assert (second["seeds"], second["trials"], second["mean"]) == (2, 3, pytest.approx(0.805))
        assert second["chance"] == pytest.approx(
            stats.ttest_ind([0.8, 0.81], [0.3, 0.31, 0.32], equal_var=False).pvalue
        )
        assert [one["best"] for one in (first, second, third)] == [True, False, False]

    def test_protocols_are_never_averaged_over(
        self,
        api: TestClient,
        two_cells: Lease,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        measured: Callable[..., None],
        database: Database,
    ) -> None:
        """The cell of trial 1 has a fourth seed under another protocol; the cell of trial 14 none under the first."""
        submit(seeds=4, **{"training.lr": [0.1, 0.9]})
        lease = claim()
        other = {"split": "validation", "attacks": {"pgd": {"steps": 10}}}
        measured(lease, 13, 0.10, other)
        measured(lease, 14, 0.20, other)
        measured(lease, 15, 0.30, other)
        cells = [cell_of(database, trial) for trial in (1, 4, 14)]
        found = asked(api, f"cells={','.join(cells)}&metrics=accuracy")
        slow, fast, apart = found["rows"][0]["metrics"]["accuracy"]
        assert slow["mean"] == pytest.approx(np.mean(SLOW))
        assert (slow["seeds"], slow["trials"], fast["protocol"]) == (3, 4, slow["protocol"])
        assert [side["left_out"] for side in found["sides"]] == [1, 0, 0]
        assert apart["mean"] == pytest.approx(0.25)
        assert apart["protocol"] != slow["protocol"]
        assert (apart["difference"], apart["error"], apart["chance"], apart["best"]) == (None, None, None, False)
        (unequal,) = found["unequal"]
        assert (unequal["side"], unequal["other"], unequal["metrics"]) == (2, 0, ["accuracy"])
        assert unequal["fields"] == [
            {"field": "split", "here": "validation", "there": "test"},
            {"field": "attacks", "here": {"pgd": {"steps": 10}}, "there": None},
        ]
        names = [used["protocol"] for used in found["protocols"]]
        chosen = asked(api, f"cells={','.join(cells)}&metrics=accuracy&protocol={names[apart['protocol']]}")
        assert chosen["unequal"] == []
        slow, fast, apart = chosen["rows"][0]["metrics"]["accuracy"]
        assert (slow["mean"], slow["seeds"], fast) == (0.1, 1, None)
        assert apart["difference"] == pytest.approx(0.15)
        assert [side["left_out"] for side in chosen["sides"]] == [3, 3, 0]

    def test_corruption_errors_of_unequal_baselines_are_not_compared(
        self, api: TestClient, submit: Callable[..., int], claim: Callable[..., Lease], measured: Callable[..., None]
    ) -> None:
        submit(seeds=1, **{"training.lr": [0.1, 0.2, 0.3]})
        lease = claim()
        for trial, baseline in ((1, "a" * 64), (2, "a" * 64), (3, "b" * 64)):
            measured(lease, trial, 0.9, mce=0.5 + trial, evaluation={"corruptions": {"baseline_sha256": baseline}})
        found = asked(api, "trials=1,2,3&metrics=accuracy,mce")
        numbers = found["rows"][0]["metrics"]
        assert [one["difference"] for one in numbers["mce"]] == [None, 1.0, None]
        assert [one["difference"] for one in numbers["accuracy"]] == [None, 0.0, 0.0]
        (unequal,) = found["unequal"]
        assert (unequal["side"], unequal["metrics"]) == (2, ["mce"])
        assert unequal["fields"] == [{"field": "corruptions.mce_baseline", "here": "b" * 64, "there": "a" * 64}]

    def test_invalid_results_count_nowhere(self, api: TestClient, two_cells: Lease, database: Database) -> None:
        def spoil(session: Session) -> None:
            result = session.get(Result, 3)
            assert result is not None
            result.valid = False

        cells = [cell_of(database, trial) for trial in (1, 4)]
        database.write(spoil)
        found = asked(api, f"cells={','.join(cells)}&metrics=accuracy")
        one = found["rows"][0]["metrics"]["accuracy"][0]
        assert (one["seeds"], one["trials"]) == (2, 3)
        assert one["mean"] == pytest.approx(np.mean(SLOW[:2]))
        assert found["sides"][0]["invalid"] == 1


class TestTrials:
    def test_a_difference_has_no_error_and_a_share_that_of_its_images(
        self, api: TestClient, submit: Callable[..., int], claim: Callable[..., Lease], measured: Callable[..., None]
    ) -> None:
        submit(seeds=2, **{"training.lr": [0.1, 0.2]})
        lease = claim()
        record = {"images": {"accuracy": 360, "autoattack": 50}}
        measured(lease, 1, 0.9, record, robust_accuracy=0.4)
        measured(lease, 4, 0.85, record, robust_accuracy=0.0)
        found = asked(api, "trials=4,1&metrics=all&baseline=1")
        assert [side["key"] for side in found["sides"]] == [4, 1]
        assert [(one["field"], one["values"]) for one in found["differing"]] == [
            ("seed", [[1], [0]]),
            ("training.lr", [[0.2], [0.1]]),
        ]
        ours, base = found["rows"][0]["metrics"]["accuracy"]
        assert base["binomial"] == pytest.approx(stats.binom(360, 0.9).std() / 360)
        assert ours["binomial"] == pytest.approx(stats.binom(360, 0.85).std() / 360)
        assert (ours["difference"], ours["error"], ours["chance"]) == (pytest.approx(-0.05), None, None)
        assert base["images"] == 360
        none, some = found["rows"][0]["metrics"]["robust_accuracy"]
        assert some["binomial"] == pytest.approx(stats.binom(50, 0.4).std() / 50)
        assert (none["images"], none["binomial"]) == (50, None)  # of no image it says nothing
        assert all(one["binomial"] is None for one in found["rows"][0]["metrics"]["ece"])

    def test_one_without_a_result_has_no_numbers(self, api: TestClient, two_cells: Lease) -> None:
        found = asked(api, "trials=1,8&metrics=accuracy")
        first, second = found["rows"][0]["metrics"]["accuracy"]
        assert first["mean"] == 0.9
        assert second is None
        assert [side["states"] for side in found["sides"]] == [{"succeeded": 1}, {"queued": 1}]
        assert asked(api, "trials=8,9")["rows"][0]["metrics"] == {}

    def test_tables_say_what_became_of_those_without_a_result(
        self, api: TestClient, two_cells: Lease, database: Database
    ) -> None:
        with database.read() as session:
            assert session.get_one(Trial, 8).state is TrialState.QUEUED
        database.write(lambda session: setattr(session.get_one(Trial, 9), "state", TrialState.EARLY_STOPPED))
        database.write(lambda session: setattr(session.get_one(Trial, 9), "failure", "pruned"))
        cells = [cell_of(database, trial) for trial in (1, 7)]
        for query, said in (
            ("trials=1,8,9", "Trials without a result: B 1 queued; C 1 stopped early (pruned)."),
            (f"cells={','.join(cells)}", "Trials without a result: B 1 queued, 1 stopped early (pruned)."),
        ):
            for form in ("markdown", "latex"):
                assert said in api.get(f"/v1/compare?{query}&format={form}").text
        assert "without a result" not in api.get("/v1/compare?trials=1,4&format=markdown").text


class TestExperiments:
    @pytest.fixture
    def three(
        self, database: Database, claim: Callable[..., Lease], finish: Callable[..., None]
    ) -> tuple[list[float], list[float]]:
        """Two experiments over ranks 2 and 4, of one over 4 and 8, each with two seeds; the accuracies at rank 4."""
        first, second = [0.70, 0.74], [0.80, 0.82]
        for constraint, ranks, more in (
            ("none", [2, 4], {}),
            ("clip", [4, 8], {"max_concurrent_trials": 2, "tags": ["x"]}),
        ):
            base: dict[str, Any] = {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training": {"epochs": 3}}
            base |= {"constraint": constraint} | ({"delta": 1.0} if constraint == "clip" else {})
            grid = {"rank": ranks, "seed": [0, 1]}
            spec = ExperimentSpec.model_validate({"name": f"with {constraint}", "base": base, "grid": grid, **more})
            plan = expand_grid(spec, max_trials=100)
            database.write(lambda session: submission.submit(session, Draft(spec, plan)))  # noqa: B023
        lease = claim()
        for trial, accuracy in zip((1, 2, 3, 4), (0.5, 0.6, *first), strict=True):
            finish(lease, trial, accuracy)
        lease = claim("another")
        for trial, accuracy in zip((5, 6, 7), (*second, 0.95), strict=True):
            finish(lease, trial, accuracy)
        return first, second

    def test_cells_are_matched_by_what_they_vary(self, api: TestClient, three: tuple[list[float], list[float]]) -> None:
        first, second = three
        found = asked(api, "experiments=1,2&metrics=accuracy")
        assert [(side["name"], side["about"]) for side in found["sides"]] == [
            ("experiment 1", "with none"),
            ("experiment 2", "with clip"),
        ]
        alone = asked(api, "trials=1,2,5")["sides"]  # they differ in constraint and delta, too
        assert [side["about"] for side in alone] == ["rank 2, seed 0", "rank 2, seed 1", "rank 4, seed 0"]
        assert found["axes"] == [{"field": "rank", "name": "rank"}]
        differing = {one["field"]: one["values"] for one in found["differing"]}
        assert differing == {
            "rank": [[2.0, 4.0], [4.0, 8.0]],
            "constraint": [["none"], ["clip"]],
            "delta": [[None], [1.0]],
            "max_concurrent_trials": [[None], [2]],
        }
        assert found["row_count"] == 3
        both, only_first, only_second = found["rows"]
        assert (both["fields"], both["trials"]) == ({"rank": 4.0}, [2, 2])
        ours, theirs = both["metrics"]["accuracy"]
        assert ours["mean"] == pytest.approx(np.mean(first))
        assert theirs["difference"] == pytest.approx(np.mean(second) - np.mean(first))
        assert theirs["error"] == pytest.approx(np.sqrt(np.var(first, ddof=1) / 2 + np.var(second, ddof=1) / 2))
        assert theirs["chance"] == pytest.approx(stats.ttest_ind(first, second, equal_var=False).pvalue)
        assert (only_first["fields"], only_first["trials"]) == ({"rank": 2.0}, [2, None])
        assert only_first["metrics"]["accuracy"][1] is None
        assert only_second["trials"] == [None, 2]
        assert (only_second["metrics"]["accuracy"][1]["seeds"], found["common"]["dataset"]) == (1, "digits")
        fewer = asked(api, "experiments=1,2&metrics=accuracy&limit=1")
        assert (len(fewer["rows"]), fewer["row_count"]) == (1, 3)

    def test_those_that_have_no_trials_yet(
        self, api: TestClient, three: tuple[list[float], list[float]], database: Database
    ) -> None:
        """A search makes its trials while it runs."""

        def empty(session: Session, *experiments: int) -> None:
            session.execute(delete(Trial).where(Trial.experiment_id.in_(experiments)))

        database.write(lambda session: empty(session, 2))
        found = asked(api, "experiments=1,2&metrics=accuracy")
        assert [side["states"] for side in found["sides"]] == [{"succeeded": 4}, {}]
        assert [row["trials"] for row in found["rows"]] == [[2, None], [2, None]]
        for query in ("experiments=1,2", "experiments=2,1"):
            page = api.get(f"/compare?{query}", headers={"Accept": "text/html"})
            assert page.status_code == 200
        database.write(lambda session: empty(session, 1))
        assert asked(api, "experiments=1,2")["rows"] == []
        assert "None of them has a result yet" in api.get("/compare?experiments=1,2").text

    def test_the_best_cell_is_drawn(
        self, api: TestClient, three: tuple[list[float], list[float]], database: Database
    ) -> None:
        def work(session: Session) -> None:
            for trial, accuracy in ((1, 0.9), (2, 0.1), (3, 0.6), (4, 0.7), (7, 0.5)):
                found = session.get(Trial, trial)
                assert found is not None
                found.best_val_accuracy = accuracy

        database.write(work)
        found = asked(api, "experiments=1,2")
        assert [side["drawn"] for side in found["sides"]] == [[3, 4], [7, 8]]


@pytest.mark.parametrize(
    ("query", "status", "field", "said"),
    [
        ("", 422, "trials", "name 2 to 10 trials, cells or experiments"),
        ("trials=1", 422, "trials", "names 1 different trial: 2 to 10 are compared"),
        ("trials=1,1", 422, "trials", "names 1 different trial"),
        ("trials=1,2,3,4,5,6,7,8,9,10,11", 422, "trials", "names 11 different trials: 2 to 10"),
        ("trials=1,2&experiments=1,2", 422, "experiments", "trials and experiments cannot be compared with each other"),
        ("trials=1,2&baseline=3", 422, "baseline", "3 is none of the trials named"),
        ("trials=1,2&metrics=nix", 422, "metrics", "there is no metric 'nix'"),
        ("trials=a,b", 422, "trials", ""),
        ("cells=1,2", 422, "cells", ""),
        ("trials=1,2&where=x", 422, "where", "there is no such parameter"),
        ("trials=1,99", 404, None, "there is no trial 99"),
        ("experiments=1,99", 404, None, "there is no experiment 99"),
        (f"cells={'a' * 64},{'b' * 64}", 404, None, f"there is no cell {'a' * 64}"),
    ],
)
def test_what_is_wrong_is_refused(
    api: TestClient, submit: Callable[..., int], query: str, status: int, field: str | None, said: str
) -> None:
    submit(seeds=12)
    answer = api.get(f"/v1/compare?{query}")
    assert answer.status_code == status, answer.text
    problem = answer.json()
    assert said in problem["detail"]
    if field is not None:
        assert [one["field"] for one in problem["errors"]] == [field]


@pytest.mark.parametrize("kind", Kind)
def test_what_another_project_has_is_not_there(two_cells: Lease, database: Database, kind: Kind) -> None:
    keys: dict[Kind, list[int | str]] = {
        Kind.TRIALS: [1, 4],
        Kind.CELLS: [cell_of(database, 1), cell_of(database, 4)],
        Kind.EXPERIMENTS: [1],
    }
    with database.read() as session:
        assert compare(session, CompareQuestion(kind=kind, keys=keys[kind])).sides
        with pytest.raises(NotFoundError, match=f"there is no {kind.one} {keys[kind][0]}"):
            compare(session, CompareQuestion(kind=kind, keys=keys[kind], scope=999))


def test_in_other_forms(api: TestClient, two_cells: Lease) -> None:
    table = api.get("/v1/compare?trials=1,4&metrics=accuracy&format=csv").text.splitlines()
    assert table[0].startswith(
        "side,key,about,metric,protocol,seeds,trials,mean,std,min,max,images,binomial,difference"
    )
    assert table[2].split(",")[:4] == ["B", "4", "lr 0.2", "accuracy"]
    assert float(table[2].split(",")[13]) == pytest.approx(-0.1)
    text = api.get("/v1/compare?trials=1,4&format=markdown").text
    assert "| lr | 0.1 | 0.2 |" in text
    assert "| accuracy (%) | 90.00 | 80.00 | -10.00 |" in text
    assert "single trials have no error" in text
    assert "; all sides were shown the same images" in text
    assert "\\begin{tabular}" in api.get("/v1/compare?trials=1,4&format=latex").text


def test_sides_of_unequal_protocols_are_not_said_to_see_the_same_images(
    api: TestClient, submit: Callable[..., int], claim: Callable[..., Lease], measured: Callable[..., None]
) -> None:
    submit(seeds=2)
    lease = claim()
    measured(lease, 1, 0.5, {"dataset": "digits"})
    measured(lease, 2, 0.75, {"dataset": "svhn"})
    text = api.get("/v1/compare?trials=1,2&format=markdown").text
    assert "all sides" not in text
    assert "; sides measured alike were shown the same images" in text


def test_a_side_without_the_metric_is_told_from_one_without_the_cell(
    api: TestClient, two_cells: Lease, database: Database
) -> None:
    cells = [cell_of(database, trial) for trial in (1, 7)]
    database.write(lambda session: session.execute(delete(Result).where(Result.trial_id == 7)))
    query = f"/v1/compare?cells={','.join(cells)}&metrics=accuracy&format="
    assert "| accuracy (%) | 91.33 ± 1.53 (3 of 3) | 0 of 3 | - |" in api.get(f"{query}markdown").text
    first, second = csv.DictReader(io.StringIO(api.get(f"{query}csv").text))
    assert (first["side"], first["seeds"], first["trials"]) == ("A", "3", "3")
    assert (second["side"], second["seeds"], second["trials"], second["mean"]) == ("B", "0", "3", "")


def test_an_experiment_that_was_deleted_is_not_there(
    api: TestClient, submit: Callable[..., int], database: Database
) -> None:
    submit()
    submit(name="another", **{"training.lr": [0.3]})

    def delete(session: Session) -> None:
        found = session.get(Experiment, 2)
        assert found is not None
        found.deleted_at = found.created_at

    assert api.get("/v1/compare?experiments=1,2").status_code == 200
    database.write(delete)
    assert api.get("/v1/compare?experiments=1,2").status_code == 404
    assert api.get("/v1/compare?trials=1,3").status_code == 404
