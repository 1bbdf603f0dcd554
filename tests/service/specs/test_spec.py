"""Versions of specs, listed and repeated trials, searches: what they become, and what is refused."""

import copy
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from service.errors import SpecError
from service.specs.grid import Plan, expand_grid
from service.specs.planner import Planner
from service.specs.spec import ExperimentSpec
from service.specs.versions import NEWEST, upgrade
from tests.examples import mostly_sqlite

SPECS = Path(__file__).with_name("golden")
BASE: dict[str, Any] = {"dataset": "digits", "model": "small-cnn"}
SCHEMA = ExperimentSpec.model_json_schema()


def spec_of(**fields: Any) -> ExperimentSpec:
    return ExperimentSpec.model_validate({"name": "test", "base": BASE} | fields)


def expand(*, most: int = 1000, **fields: Any) -> Plan:
    return expand_grid(spec_of(**fields), max_trials=most)


def problems_of(*, most: int = 1000, **fields: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        expand(most=most, **fields)
    return {problem.field: problem.message for problem in caught.value.problems}


class TestUpgrades:
    @pytest.mark.parametrize("path", sorted(SPECS.glob("*.json")), ids=lambda path: path.stem)
    def test_golden_documents(self, path: Path) -> None:
        """Each version's documents become what they were when the version was published, and so do their trials."""
        golden = json.loads(path.read_text())
        posted = copy.deepcopy(golden["posted"])
        assert upgrade(posted) == golden["upgraded"]
        assert posted == golden["posted"]
        spec = ExperimentSpec.model_validate(posted)
        assert spec == ExperimentSpec.model_validate(golden["upgraded"])
        trials = expand_grid(spec, max_trials=1000).trials
        assert [trial.fingerprint for trial in trials] == golden["fingerprints"]

    def test_every_version_has_a_golden_document(self) -> None:
        versions = {int(path.stem.partition("-")[0].removeprefix("v")) for path in SPECS.glob("*.json")}
        assert versions == set(range(1, NEWEST + 1))

    def test_no_version_is_the_newest(self) -> None:
        assert upgrade({"name": "x"}) == {"spec_version": NEWEST, "name": "x"}

    @pytest.mark.parametrize(
        "later", [{"trials": []}, {"repeat": 2}, {"tags": ["a"]}, {"resources": {"memory_gib": 1}}, {"search": None}]
    )
    def test_what_came_later_is_unknown_to_an_older_version(self, later: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match="unknown in version 1 of the spec; set spec_version to 2"):
            spec_of(spec_version=1, **later)

    @pytest.mark.parametrize("version", [0, 3, -1, "1", True, 1.0, None, [1]])
    def test_there_are_no_other_versions(self, version: object) -> None:
        with pytest.raises(ValidationError) as caught:
            spec_of(spec_version=version)
        assert [error["loc"] for error in caught.value.errors()] == [("spec_version",)]


class TestListed:
    def test_they_are_added_to_the_grid_and_not_multiplied_by_it(self) -> None:
        plan = expand(grid={"seed": [1, 2]}, trials=[{"seed": 7}, {"training": {"epochs": 3}}])
        found = [(trial.config.seed, trial.config.training.epochs) for trial in plan.trials]
        assert found == [(1, 20), (2, 20), (7, 20), (0, 3)]
        assert plan.points == 4

    def test_alone_they_are_all_there_is(self) -> None:
        assert [trial.config.seed for trial in expand(trials=[{"seed": 3}, {"seed": 5}, {"seed": 3}]).trials] == [3, 5]

    def test_wrong_ones_are_named(self) -> None:
        found = problems_of(trials=[{}, {"rank": 0, "colour": 1, "training": {"lr": 0}}])
        assert set(found) == {"trials[1].rank", "trials[1].colour", "trials[1].training.lr"}

    def test_required_fields_may_be_theirs(self) -> None:
        assert len(expand(base={"model": "small-cnn"}, trials=[{"dataset": "digits"}]).trials) == 1
        found = problems_of(base={"model": "small-cnn"}, trials=[{"dataset": "digits"}, {}])
        assert "in every trial" in found["base.dataset"]
        found = problems_of(base={"model": "small-cnn"}, trials=[{"dataset": "digits"}], grid={"seed": [1]})
        assert set(found) == {"base.dataset"}


class TestRepeat:
    def test_seeds_follow_the_trials_own(self) -> None:
        plan = expand(base=BASE | {"seed": 10}, grid={"training.epochs": [1, 2]}, trials=[{"seed": 5}], repeat=3)
        found = [(trial.config.training.epochs, trial.config.seed) for trial in plan.trials]
        grid = [(epochs, seed) for epochs in (1, 2) for seed in (10, 11, 12)]
        assert found == [*grid, (20, 5), (20, 6), (20, 7)]
        assert plan.points == 9

    def test_equals_the_axis(self) -> None:
        assert expand(repeat=4).trials == expand(grid={"seed": [0, 1, 2, 3]}).trials

    def test_not_together_with_an_axis(self) -> None:
        assert set(problems_of(grid={"seed": [1]}, repeat=2)) == {"repeat"}

    def test_seeds_end_somewhere(self) -> None:
        assert set(problems_of(base=BASE | {"seed": 2**32 - 2}, repeat=3)) == {"seed"}


class TestCount:
    @pytest.mark.parametrize(
        ("fields", "field", "said"),
        [
            ({"grid": {"seed": [1, 2, 3]}}, "grid", "3 = 3 points; at most 2"),
            ({"repeat": 3}, "repeat", "1 x 3 = 3 points"),
            ({"trials": [{"seed": n} for n in range(3)]}, "trials", "0 + 3 = 3 points"),
            ({"grid": {"rank": [1, 2]}, "trials": [{}], "repeat": 2}, "grid", "(2 + 1) x 2 = 6 points"),
            ({"search": {"algorithm": "random", "trials": 3, "space": {}}}, "search.trials", "3 = 3 points"),
        ],
    )
    def test_too_many_are_counted_aloud(self, fields: dict[str, Any], field: str, said: str) -> None:
        assert problems_of(most=2, **fields)[field].startswith(said)

    def test_a_million_million_points(self, api: TestClient) -> None:
        """Refused by arithmetic, before anything is made of them."""
        axes = {name: list(range(1, 101)) for name in ("seed", "rank", "training.epochs", "training.batch_size")}
        body = {"name": "x", "base": BASE, "grid": axes, "repeat": 10_000, "variants": [{}] * 100}
        del axes["seed"]
        body["grid"] = axes
        api.post("/v1/experiments", json=body)
        tracemalloc.start()
        start = time.process_time()
        response = api.post("/v1/experiments", json=body)
        spent, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert response.status_code == 422
        assert "100 x 100 x 100 x 100 x 10000 = 1000000000000 points" in response.json()["detail"]
        assert spent < 0.5  # 0.02 s without the tracing
        assert peak < 20e6


def search_of(space: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"algorithm": "random", "trials": 4, "space": space} | fields


class TestSearch:
    def test_has_no_trials_before_it_runs(self) -> None:
        plan = expand(search=search_of({"training.lr": {"loguniform": [1e-3, 1]}}))
        assert (plan.trials, plan.points) == ([], 4)

    @pytest.mark.parametrize(
        "drawn",
        [
            {"training.lr": {"loguniform": [1e-3, 1]}},
            {"training.lr": {"uniform": [0.1, 1]}},
            {"training.epochs": {"int": [1, 9]}},
            {"rank": {"int": [1, 64]}},
            {"rank": {"uniform": [0.1, 0.9]}},
            {"rank": {"choice": [None, 4, 0.5]}},
            {"training.milestones": {"choice": [[1], [1, 2]]}},
            {"constraint": {"choice": ["none", "clip"]}},
        ],
    )
    def test_spaces(self, drawn: dict[str, Any]) -> None:
        expand(search=search_of(drawn))
        assert jsonschema.Draft202012Validator(SCHEMA).is_valid({"name": "x", "base": BASE, "search": search_of(drawn)})

    @pytest.mark.parametrize(
        ("drawn", "said"),
        [
            ({"training.lr": {"loguniform": [0, 1]}}, "above 0"),
            ({"training.lr": {"uniform": [1, 0.1]}}, "the first number below the second"),
            ({"training.lr": {"uniform": [1]}}, "two numbers"),
            ({"training.lr": {"uniform": [-1, 1]}}, "must be above 0, not -1"),
            ({"training.lr": {"uniform": [0.1, 10**400]}}, "finite"),
            ({"training.lr": {"normal": [0, 1]}}, '{choice: [...]}, not {"normal": [0, 1]}'),
            ({"training.lr": {}}, "must be one of {uniform"),
            ({"training.lr": {"uniform": [0.1, 1], "choice": [1]}}, "must be one of {uniform"),
            ({"training.epochs": {"uniform": [1, 9]}}, "a whole number"),
            ({"training.epochs": {"uniform": [1, 3]}}, "a whole number"),
            ({"training.epochs": {"int": [0, 9]}}, "at least 1"),
            ({"training.epochs": {"int": [1, 2.5]}}, "two whole numbers"),
            ({"training.epochs": {"int": [1, 10**30]}}, "at most 100000"),
            ({"training.lr": {"int": [1, 10**30]}}, "whole numbers within"),
            ({"rank": {"uniform": [0.5, 4]}}, "a fraction above 0 and below 1"),
            ({"rank": {"choice": []}}, "a list of 1 to 1000"),
            ({"rank": {"choice": [4, 0]}}, "not 0"),
            ({"dataset": {"choice": ["digits"]}}, "is set in base too"),
            ({"colour": {"choice": [1]}}, "unknown; a field is one of"),
        ],
    )
    def test_wrong_spaces(self, drawn: dict[str, Any], said: str) -> None:
        (path,) = drawn
        assert said in problems_of(search=search_of(drawn))[f"search.space.{path}"]

    def test_an_empty_space(self) -> None:
        assert set(problems_of(search=search_of({}))) == {"search.space"}

    def test_a_point_whose_fields_do_not_go_together(self) -> None:
        base = BASE | {"constraint": "clip", "clipping": {"floor": 1.0}}
        found = problems_of(base=base, search=search_of({"delta": {"uniform": [0.5, 2.0]}}))
        assert "at the point" in found["clipping.floor"]

    def test_goes_with_no_other_source_of_trials(self) -> None:
        search = search_of({"training.lr": {"uniform": [0.1, 1]}})
        found = problems_of(search=search, grid={"seed": [1]}, variants=[{}], trials=[{}], repeat=2)
        assert {"grid", "variants", "trials"} <= set(found)
        assert set(problems_of(search=search | {"mode": "min"})) == {"search.mode"}
        assert set(problems_of(base={}, search=search)) == {"base.dataset", "base.model"}

    @pytest.mark.parametrize(
        "change", [{"algorithm": "grid"}, {"trials": 0}, {"metric": "accuracy"}, {"seed": -1}, {"space": [1]}, {"x": 1}]
    )
    def test_wrong_fields(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValidationError) as caught:
            spec_of(search=search_of({"seed": {"int": [0, 9]}}) | change)
        assert [error["loc"][:2] for error in caught.value.errors()] == [("search", next(iter(change)))]


class TestFields:
    @pytest.mark.parametrize(
        ("change", "where"),
        [
            ({"scheduler": {"type": "pbt"}}, ("scheduler",)),
            ({"scheduler": {"type": "asha", "reduction": 1}}, ("scheduler", "asha", "reduction")),
            ({"scheduler": {"type": "asha", "metric": "accuracy"}}, ("scheduler", "asha", "metric")),
            ({"scheduler": {"type": "asha", "grace_epochs": 5, "max_epochs": 4}}, ("scheduler", "asha")),
            ({"scheduler": {"type": "fifo", "grace_epochs": 5}}, ("scheduler", "fifo", "grace_epochs")),
            ({"repeat": 0}, ("repeat",)),
            ({"timeout_seconds": 0}, ("timeout_seconds",)),
            ({"resources": {"memory_gib": -1}}, ("resources", "memory_gib")),
            ({"tags": ["two words"]}, ("tags", 0)),
            ({"tags": ["a", "a"]}, ("tags",)),
            ({"tags": ["=cmd()"]}, ("tags", 0)),
            ({"trials": {}}, ("trials",)),
        ],
    )
    def test_wrong_ones_are_refused(self, change: dict[str, Any], where: tuple[str | int, ...]) -> None:
        with pytest.raises(ValidationError) as caught:
            spec_of(**change)
        assert [error["loc"] for error in caught.value.errors()] == [where]
        if "max_epochs" not in str(change):  # which JSON Schema cannot say
            assert not jsonschema.Draft202012Validator(SCHEMA).is_valid({"name": "x", "base": BASE} | change)

    def test_survive_their_storage(self) -> None:
        spec = spec_of(
            trials=[{"seed": 3}],
            repeat=2,
            scheduler={"type": "asha", "grace_epochs": 2, "max_epochs": 9},
            resources={"memory_gib": 1.5},
            timeout_seconds=60.0,
            tags=["a", "team/b"],
        )
        stored = json.loads(json.dumps(spec.model_dump(mode="json")))
        assert ExperimentSpec.model_validate(stored) == spec
        assert jsonschema.Draft202012Validator(SCHEMA).is_valid(stored)


def test_planning_remembers_what_recurs_and_changes_nothing() -> None:
    """Against a planner that has nothing to remember."""
    planner = Planner()
    for fields in (
        BASE | {"seed": 3, "training.lr": 0.5},
        BASE | {"seed": 4, "training.lr": 0.5},
        BASE | {"training.lr": 1},
        BASE | {"training.lr": 1.0, "rank": 4, "layer": "tt"},
        BASE | {"training.lr": 1.0, "training.schedule": "multistep", "training.milestones": [2]},
        BASE | {"training.lr": 0.5, "seed": 0},
    ):
        planned = planner.plan(fields)
        assert planned == Planner().plan(fields)
        assert planned.fingerprint == planned.config.fingerprint()
        assert planned.cell == planned.config.cell()
        assert planned.config == planned.config.canonical()


@pytest.mark.slow
@mostly_sqlite
def test_ten_thousand_trials_are_posted_quickly(api: TestClient) -> None:
    axes = {"rank": [8, 16, 32, 64, 128], "delta": [0.1, 0.5, 1.0, 2.0], "lambda_ort": [0.1, 1.0, 10.0, 100.0, 1e3]}
    base = BASE | {"layer": "tt", "constraint": "clip"}
    start = time.process_time()
    response = api.post("/v1/experiments", json={"name": "x", "base": base, "grid": axes, "repeat": 100})
    spent = time.process_time() - start
    assert response.status_code == 201
    assert response.json()["trial_count"] == 10_000
    assert spent < 10  # a busy processor is no defect; `benchmarks/serving.py` measures
