"""Dry runs: what a spec would become and cost, with nothing stored."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from service.database.engine import Database
from service.experiments.estimate import Estimator
from service.queue import nodes
from service.queue.cluster import Gpu, Machine, Node, Versions
from service.queue.leases import Lease
from service.schemas.dry_runs import SHOWN
from ttsv.config.trial import TrialConfig
from ttsv.data import archive, load_dataset
from ttsv.data.catalog import training_images

SPEC: dict[str, Any] = {
    "name": "dry",
    "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training": {"epochs": 3, "batch_size": 64}},
    "grid": {"rank": [None, 4], "seed": [0, 1]},
}


@pytest.mark.parametrize("name", ["digits", "synthetic:1x8x8:7:300"])
@pytest.mark.parametrize("validation", ["held-out", "test"])
def test_training_images_are_those_of_the_split(name: str, validation: str, tmp_path: Path) -> None:
    data = load_dataset(name, tmp_path)
    expected = len(data.train.labels) + (len(data.validation.labels) if validation == "test" else 0)
    assert training_images(name, validation) == expected


def test_published_training_images() -> None:
    assert [training_images(name, "test") for name in ("cifar10", "cifar100", "fashion-mnist", "svhn")] == [
        50_000,
        50_000,
        60_000,
        73_257,
    ]
    assert training_images("cifar100") == 45_000
    assert training_images("npz:mine") is None


def test_nothing_is_stored(api: TestClient) -> None:
    response = api.post("/v1/experiments?dry_run=true", json=SPEC)
    assert response.status_code == 200, response.text
    found = response.json()
    assert api.get("/v1/experiments").json()["items"] == []
    assert (found["grid_points"], found["trial_count"]) == (4, 4)
    steps = 3 * math.ceil(1295 / 64)
    assert [trial["steps"] for trial in found["trials"]] == [steps] * 4
    assert found["totals"] == {"steps": 4 * steps, "seconds": None}
    dense, small = found["trials"][0], found["trials"][2]
    # Three 3x3 convolutions, their batch norms and the head, by hand.
    assert dense["parameters"] == 9 * (1 * 32 + 32 * 64 + 64 * 64) + 2 * (32 + 64 + 64) + 64 * 10 + 10
    assert (dense["compression"], dense["config"]["rank"], small["config"]["rank"]) == (1.0, None, 4)
    assert small["parameters"] < dense["parameters"]
    assert "nothing was measured" in dense["reasons"][0]
    real = api.post("/v1/experiments", json=SPEC).json()
    stored = api.get(f"/v1/experiments/{real['id']}/trials").json()["items"]
    for name in ("fingerprint", "cell", "config", "number"):
        assert [trial[name] for trial in found["trials"]] == [trial[name] for trial in stored]


def test_wrong_specs_are_refused_all_the_same(sqlite_api: TestClient) -> None:
    response = sqlite_api.post("/v1/experiments?dry_run=true", json=SPEC | {"grid": {"rank": [0]}})
    assert response.status_code == 422
    assert "grid.rank[0]" in response.json()["detail"]


def test_presets_too(sqlite_api: TestClient) -> None:
    found = sqlite_api.post("/v1/presets/senderovich2022/table2?dry_run=true").json()
    assert found["trial_count"] == len(found["trials"]) > 5
    assert found["totals"]["steps"] > 0
    assert sqlite_api.get("/v1/experiments").json()["items"] == []


def test_a_large_grid_shows_its_first_thousand(sqlite_api: TestClient) -> None:
    found = sqlite_api.post("/v1/experiments?dry_run=true", json=SPEC | {"grid": {"seed": list(range(3000))}}).json()
    assert (found["trial_count"], len(found["trials"])) == (3000, 1000)
    assert found["totals"]["steps"] == 3000 * found["trials"][0]["steps"]


class TestSummary:
    """`summary=true`: all is counted, nothing is listed."""

    def both(self, api: TestClient, spec: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        whole = api.post("/v1/experiments?dry_run=true", json=spec).json()
        brief = api.post("/v1/experiments?dry_run=true&summary=true", json=spec).json()
        return whole, brief

    def test_it_says_the_same_and_lists_nothing(self, api: TestClient) -> None:
        spec = SPEC | {
            "variants": [{}, {"delta": 1.0}, {"training": {"lr": 0.1}}],
            "trials": [{"seed": 1}, {"rank": 7}],
        }
        whole, brief = self.both(api, spec)
        assert len(whole.pop("trials")) == whole["trial_count"] == 9 < whole["grid_points"] == 14
        assert brief.pop("trials") == []
        assert [one["name"] for one in whole["columns"]] == ["layer", "rank", "seed", "lr"]
        assert whole["common"]["model"] == SPEC["base"]["model"]
        for name in ("columns", "decided", "common"):  # of trials that are listed
            assert not brief.pop(name)
            whole.pop(name)
        assert brief == whole
        assert brief["ranges"]["compression"]["least"] == 1.0 < brief["ranges"]["compression"]["largest"]
        assert brief["ranges"]["seconds"] is None
        assert brief["reasons"] == ["nothing was measured yet from which the time could be told"]
        assert brief["warnings"]
        assert api.get("/v1/experiments").json()["items"] == []

    def test_seeds_beyond_the_thousandth_trial_count(self, sqlite_api: TestClient) -> None:
        spec = SPEC | {"grid": {"seed": list(range(1500)), "rank": [2, 4]}}
        answer = sqlite_api.post("/v1/experiments?dry_run=true&summary=true", json=spec)
        assert len(answer.content) < 1000
        found = answer.json()
        assert (found["trial_count"], found["grid_points"], found["trials"]) == (3000, 3000, [])
        assert found["totals"]["steps"] == 3000 * 3 * math.ceil(1295 / 64)
        spec = SPEC | {"grid": {"rank": [2, 4]}, "repeat": 5000}
        assert sqlite_api.post("/v1/experiments?dry_run=true&summary=true", json=spec).json()["trial_count"] == 10_000

    @pytest.mark.slow
    def test_twenty_thousand_trials_are_counted_quickly(self, sqlite_api: TestClient) -> None:
        """At a fraction of what the listing takes: the processor's time, whatever else runs."""
        grid = {"rank": list(range(1, 21)), "delta": [k / 10 for k in range(1, 21)], "seed": list(range(50))}
        spec = SPEC | {"base": SPEC["base"] | {"constraint": "clip"}, "grid": grid}
        took = {}
        for name in ("", "&summary=true"):
            begin = time.process_time()
            found = sqlite_api.post(f"/v1/experiments?dry_run=true{name}", json=spec).json()
            took[name] = time.process_time() - begin
            assert found["trial_count"] == 20_000
        assert took["&summary=true"] < took[""] / 4, took

    def test_of_a_search_there_are_none_yet(self, sqlite_api: TestClient) -> None:
        search = {"algorithm": "random", "trials": 50, "space": {"training.lr": {"loguniform": [1e-3, 1]}}}
        whole, brief = self.both(sqlite_api, {"name": "x", "base": SPEC["base"], "search": search})
        assert brief == whole
        assert (brief["grid_points"], brief["trial_count"], brief["ranges"]["compression"]) == (50, 0, None)

    def test_it_refuses_the_same(self, sqlite_api: TestClient) -> None:
        wrong = (
            {"grid": {"rank": [0], "nix": [1]}},
            {"grid": {"clipping.floor": [0.5, 2.0], "delta": [1.0]}},
            {"grid": {}, "base": SPEC["base"] | {"seed": 2**32 - 2}, "repeat": 5},
            {"grid": {"seed": list(range(300)), "rank": list(range(1, 101))}},
        )
        for change in wrong:
            whole, brief = self.both(sqlite_api, SPEC | change)
            whole.pop("request_id"), brief.pop("request_id")
            assert brief == whole
            assert brief["status"] == 422

    def test_without_a_dry_run_nothing_is_stored(self, sqlite_api: TestClient) -> None:
        for path in ("/v1/experiments", "/v1/presets/senderovich2022/table2"):
            answer = sqlite_api.post(f"{path}?summary=true", json=SPEC)
            assert answer.status_code == 422
            assert answer.json()["errors"][0]["field"] == "summary"
        assert sqlite_api.get("/v1/experiments").json()["items"] == []
        found = sqlite_api.post("/v1/presets/senderovich2022/table2?dry_run=true&summary=true").json()
        assert (found["trials"], found["trial_count"] > 5) == ([], True)


def test_networks_that_are_known_only_once_built(sqlite_api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Path = sqlite_api.app.state.settings.data_dir / "datasets"  # type: ignore[attr-defined]
    folder.mkdir()
    np.savez(folder / "mine.npz", x_train=np.zeros((40, 3, 32, 32), np.uint8), y_train=np.arange(40) % 2)
    base = SPEC["base"] | {"model": "torchvision:resnet18", "dataset": "npz:mine"}
    (trial,) = sqlite_api.post("/v1/experiments?dry_run=true", json={"name": "x", "base": base}).json()["trials"]
    assert (trial["parameters"], trial["steps"], trial["seconds"]) == (None, 3, None)
    assert trial["reasons"][0] == "the layers of torchvision:resnet18 are known once it is built"
    monkeypatch.setattr(archive, "_MOST_LABELS", 9)
    (trial,) = sqlite_api.post("/v1/experiments?dry_run=true", json={"name": "x", "base": base}).json()["trials"]
    assert (trial["parameters"], trial["steps"], trial["seconds"]) == (None, None, None)
    assert len(trial["reasons"]) == 2
    assert all("npz:mine" in reason for reason in trial["reasons"])


GPU = Machine(
    versions=Versions(package="0.1.0+abc", python="3.11.9", ray="2.60.0", torch="2.9.1"),
    gpus=(Gpu("H100", 79.6), Gpu("L4", 22.5)),
    memory_gib=64.0,
    free_disk_gib=100.0,
    bf16=True,
)


class TestCards:
    """What trials take of a card, and the fraction that is suggested."""

    def join(self, database: Database, host: str = "one", machine: Machine | None = GPU, **fields: Any) -> None:
        node = Node(
            host[0] * 56, host, "10.0.0.1", **{"cpus": 8, "gpus": 2, "memory_gib": 64} | fields, machine=machine
        )
        database.write(lambda session: nodes.record(session, host, [node]))

    def dry(self, api: TestClient, gpus: float, **change: Any) -> dict[str, Any]:
        spec = SPEC | {"resources": {"cpus": 1, "gpus": gpus}} | change
        found: dict[str, Any] = api.post("/v1/experiments?dry_run=true", json=spec).json()
        return found

    def test_without_a_known_card_the_memory_alone_is_said(self, api: TestClient, database: Database) -> None:
        for machine in (None, dataclasses.replace(GPU, gpus=())):
            self.join(database, machine=machine)
            found = self.dry(api, 0.25)
            assert (found["memory"]["card_gib"], found["memory"]["gpus"], found["notes"]) == (None, None, [])
            largest = max(found["trials"], key=lambda trial: trial["memory_gib"])
            assert found["memory"]["gib"] == largest["memory_gib"] > 0.1
            assert found["memory"]["basis"] == largest["memory_basis"]
            assert found["memory"]["needed_gib"] == pytest.approx(1.1 * largest["memory_gib"] + 0.5)
            assert "worked out of its layers" in largest["memory_basis"]

    def test_the_smallest_card_decides(self, api: TestClient, database: Database) -> None:
        self.join(database)
        found = self.dry(api, 0.25)
        memory = found["memory"]
        assert memory["card_gib"] == 22.5
        count = int(1 / memory["gpus"])
        assert memory["gpus"] * 22.5 >= memory["needed_gib"] > 22.5 / (count + 1)
        (note,) = found["notes"]
        assert f"resources.gpus: {memory['gpus']:g} would run {count} side by side on a card of 22 GiB" in note
        assert found["warnings"] == []
        assert found["trials"][0]["config"] == self.dry(api, 0)["trials"][0]["config"]
        self.join(database, "two", dataclasses.replace(GPU, gpus=(Gpu("small", 4.0),)), gpus=1)
        assert self.dry(api, 0.25)["memory"]["card_gib"] == 4.0
        self.join(database, "two", dataclasses.replace(GPU, gpus=(Gpu("small", 4.0),)), gpus=0)
        assert self.dry(api, 0.25)["memory"]["card_gib"] == 22.5, "a node that gives no GPU to trials"

    def test_nothing_is_suggested_to_whom_asks_for_no_share(self, api: TestClient, database: Database) -> None:
        self.join(database)
        for gpus in (0, 2):
            found = self.dry(api, gpus)
            assert (found["memory"]["gpus"], found["notes"]) == (None, [])
            assert found["memory"]["gib"] > 0

    def test_a_fraction_that_is_too_small_is_warned_of(self, api: TestClient, database: Database) -> None:
        """In a dry run and where it is posted; nothing of the spec is changed."""
        self.join(database)
        found = self.dry(api, 0.01)
        (warning,) = found["warnings"]
        assert "resources.gpus: 0.01 of the smallest one there, of 22 GiB, is 0.2 GiB: it would run out of" in warning
        assert warning.endswith(f"ask for {found['memory']['gpus']:g} or more")
        stored = api.post("/v1/experiments", json=SPEC | {"resources": {"cpus": 1, "gpus": 0.01}}).json()
        assert stored["warnings"] == [warning]
        assert stored["spec"]["resources"]["gpus"] == 0.01

    def test_networks_that_are_known_only_once_built_are_left_out(self, api: TestClient, database: Database) -> None:
        self.join(database)
        unknown = {"base": {"model": "torchvision:resnet18", "dataset": "cifar10"}, "grid": {}}
        found = self.dry(api, 0.5, **unknown)
        assert (found["memory"], found["notes"]) == (None, [])
        assert found["trials"][0]["memory_gib"] is None
        assert "once it is built" in found["reasons"][0]
        both = {"base": {"dataset": "cifar10"}, "grid": {"model": ["torchvision:resnet18", "small-cnn"]}}
        assert self.dry(api, 0.5, **both)["notes"][0].startswith(
            "the largest of the trials whose memory is known needs"
        )

    def test_of_a_search_there_are_none_yet(self, api: TestClient, database: Database) -> None:
        self.join(database)
        search = {"algorithm": "random", "trials": 50, "space": {"training.lr": {"loguniform": [1e-3, 1]}}}
        found = self.dry(api, 0.5, grid={}, search=search)
        assert (found["memory"], found["notes"]) == (None, [])


def test_time_from_what_was_measured(
    database: Database, submit: Callable[..., int], claim: Callable[..., Lease], finish: Callable[..., None]
) -> None:
    """Of the same network and layer its own steps; of another one by its multiply-accumulates."""
    submit(seeds=2)
    lease = claim()
    finish(lease, 1, step_seconds=0.5, multiply_accumulates=100_000)
    finish(lease, 2, step_seconds=0.25, multiply_accumulates=100_000)
    base = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 2, "batch_size": 64}}
    same = TrialConfig.from_dict(base).canonical()
    half = TrialConfig.from_dict(base | {"training": {"epochs": 2, "batch_size": 32}}).canonical()
    other = TrialConfig.from_dict(base | {"layer": "tt", "rank": 4}).canonical()
    with database.read() as session:
        estimator = Estimator(session, [same, half, other])
        nobodys = Estimator(session, [same], project_id=7)
    steps = 2 * math.ceil(1295 / 64)
    found = estimator.estimate(same)
    assert found.steps == steps
    assert found.seconds == pytest.approx(steps * 0.25)
    assert "trial 2" in (found.basis or "")
    found = estimator.estimate(half)
    assert found.seconds == pytest.approx(2 * math.ceil(1295 / 32) * 0.25 / 2)
    assert "of 64 images each" in (found.basis or "")
    found = estimator.estimate(other)
    assert found.multiply_accumulates is not None
    assert found.seconds == pytest.approx(steps * found.multiply_accumulates * 0.25 / 100_000)
    assert nobodys.estimate(same).seconds is None
    large = estimator.estimate(TrialConfig.from_dict(base | {"dataset": "cifar10", "model": "wrn16-10"}).canonical())
    assert large.seconds is None  # a step of five billion multiply-accumulates is not told from one of 100,000
    assert "nothing was measured" in large.reasons[0]


def test_columns_are_those_of_all_trials_and_not_of_the_listed_ones(sqlite_api: TestClient) -> None:
    spec = {
        "name": "late",
        "base": {"dataset": "digits", "model": "small-cnn"},
        "grid": {"training.nesterov": [True, False], "seed": list(range(SHOWN))},
    }
    found = sqlite_api.post("/v1/experiments?dry_run=true", json=spec).json()
    assert {trial["config"]["training"]["nesterov"] for trial in found["trials"]} == {True}
    assert [one["field"] for one in found["columns"]] == ["seed", "training.nesterov"]
    assert "training.nesterov" not in found["common"]
