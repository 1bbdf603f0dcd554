"""Every endpoint: what it answers and how it refuses, on SQLite and Postgres."""

import re
import shutil
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Connection, event, exc
from sqlalchemy.orm import Session

from service.api import experiments, submission
from service.api.http.problem_types import PROBLEM_TYPES
from service.database import Experiment, IdempotencyKey, Trial, Worker
from service.database.engine import Database
from service.main import create_app
from service.queue import leases, nodes
from service.queue.cluster import Node
from service.queue.trials import ArtifactFile, HeldExperiment, ProtocolRecord, hold
from service.settings import Settings
from tests.held import reported, under
from tests.machinery import Claim, Finish, Make, Submit, Table
from ttsv.runtime import faults

SPEC: dict[str, Any] = {
    "name": "ranks",
    "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training": {"epochs": 4}},
    "grid": {"rank": [None, 8], "lambda_ort": [0.0, 1.0], "seed": [0, 1]},
}
PLAIN: dict[str, Any] = {"name": "plain", "base": {"dataset": "digits", "model": "small-cnn"}}


def problem(response: Any, status: int, *fields: str) -> dict[str, Any]:
    """The answer as a problem document that names exactly these fields."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert set(body) == {"type", "title", "status", "detail", "instance", "errors", "request_id"}
    assert body["request_id"] == response.headers["x-request-id"]
    assert body["type"] in {known.uri for known in PROBLEM_TYPES if known.status == status}
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    assert body["instance"] == response.request.url.path
    assert [error["field"] for error in body["errors"]] == list(fields)
    assert all(error["message"] for error in body["errors"])
    return body


class TestCreate:
    def test_stores_and_answers(self, api: TestClient, table: Table) -> None:
        response = api.post("/v1/experiments", json=SPEC)
        assert response.status_code == 201
        body = response.json()
        assert response.headers["location"] == f"/v1/experiments/{body['id']}"
        assert (body["name"], body["state"], body["error"]) == ("ranks", "queued", None)
        assert (body["grid_points"], body["trial_count"]) == (8, 6)
        assert body["progress"]["trials"] == {
            "queued": 6,
            "running": 0,
            "succeeded": 0,
            "early_stopped": 0,
            "failed": 0,
            "diverged": 0,
            "cancelled": 0,
        }
        assert (body["progress"]["epochs_done"], body["progress"]["epochs"]) == (0, 24)
        assert body["spec"]["grid"] == SPEC["grid"]
        assert body.pop("warnings") == []
        assert api.get(response.headers["location"]).json() == body
        assert len(table(Trial)) == 6

    def test_the_example_of_the_documentation_can_be_posted(self, api: TestClient, openapi: dict[str, Any]) -> None:
        examples = openapi["paths"]["/v1/experiments"]["post"]["requestBody"]["content"]
        for example in examples["application/json"]["examples"].values():
            assert api.post("/v1/experiments", json=example["value"]).status_code == 201

    def test_every_wrong_field_is_named(self, api: TestClient, table: Table) -> None:
        spec = {
            "name": "x",
            "base": {"dataset": "cifar11", "model": "small-cnn", "rank": 0, "training": {"lr": "fast"}},
            "grid": {"delta": [-1.0, 1.0], "seed": []},
        }
        fields = ["base.dataset", "base.rank", "base.training.lr", "grid.delta[0]", "grid.seed"]
        body = problem(api.post("/v1/experiments", json=spec), 422, *fields)
        assert body["detail"].startswith("5 fields are wrong: base.dataset, ")
        assert table(Experiment) == []

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"name": ""}, "name"),
            ({"name": None}, "name"),
            ({"name": " \u3000\u200b"}, "name"),
            ({"nmae": "x"}, "nmae"),
            ({"priority": 5000}, "priority"),
            ({"priority": "high"}, "priority"),
            ({"resources": {"cpus": 0}}, "resources.cpus"),
            ({"grid": {"seed": 3}}, "grid.seed"),
            ({"grid": {"seed": list(range(20_001))}}, "grid"),
            ({"grid": {"seed": [0], "sede": [1]}}, "grid.sede"),
            ({"base": {"dataset": "digits", "model": "small-cnn", "layer": "fourier"}}, "base.layer"),
            ({"base": {"dataset": "digits", "model": "small-cnn", "constraint": "?"}}, "base.constraint"),
            ({"base": {"dataset": "digits", "model": "lenet-1"}}, "base.model"),
            ({"spec_version": 3}, "spec_version"),
        ],
    )
    def test_one_wrong_field(self, sqlite_api: TestClient, change: dict[str, Any], field: str) -> None:
        body = problem(sqlite_api.post("/v1/experiments", json=SPEC | change), 422, field)
        assert body["detail"].startswith(f"{field}: ")
        assert sqlite_api.get("/v1/experiments").json()["items"] == []

    def test_a_network_s_name_is_no_longer_than_it_can_be_stored(
        self, api: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without torchvision beside the API nobody knows its names, and PostgreSQL's columns have a width."""
        for module in ("service.specs.planner", "ttsv.config.trial"):
            monkeypatch.setattr(f"{module}.has_torchvision", lambda: False)
        named = {"dataset": "digits", "model": f"torchvision:{'a' * 200}"}
        problem(api.post("/v1/experiments", json=PLAIN | {"base": named}), 422, "base.model")
        named["model"] = f"torchvision:{'a' * 100}"
        assert api.post("/v1/experiments", json=PLAIN | {"base": named}).status_code == 201

    @pytest.mark.parametrize("body", ["[]", '"text"', "3", "null", "true"])
    def test_a_body_that_is_no_object(self, sqlite_api: TestClient, body: str) -> None:
        headers = {"Content-Type": "application/json"}
        problem(sqlite_api.post("/v1/experiments", content=body, headers=headers), 422, "body")
        assert sqlite_api.get("/v1/experiments").json()["items"] == []

    def test_a_thousand_trials_within_seconds(self, sqlite_api: TestClient) -> None:
        spec = {"name": "many", "base": {"dataset": "digits", "model": "small-cnn"}}
        sqlite_api.post("/v1/experiments", json=spec)
        start = time.process_time()
        response = sqlite_api.post("/v1/experiments", json=spec | {"grid": {"seed": list(range(1000))}})
        assert time.process_time() - start < 3
        assert response.json()["trial_count"] == 1000


class TestIdempotency:
    def test_same_key_and_body_get_the_same_answer(self, api: TestClient, table: Table) -> None:
        first, second = (api.post("/v1/experiments", json=SPEC, headers={"Idempotency-Key": "k-1"}) for _ in range(2))
        assert (first.status_code, second.status_code) == (201, 201)
        assert first.content == second.content
        assert first.headers["location"] == second.headers["location"]
        assert (len(table(Experiment)), len(table(IdempotencyKey))) == (1, 1)

    def test_the_answer_stays_what_it_was(self, api: TestClient, claim: Claim) -> None:
        first = api.post("/v1/experiments", json=SPEC, headers={"Idempotency-Key": "k-1"})
        claim()
        assert api.post("/v1/experiments", json=SPEC, headers={"Idempotency-Key": "k-1"}).json() == first.json()

    def test_what_was_committed_and_not_answered_is_answered_when_sent_again(
        self, api: TestClient, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as armed:
            armed.setattr(faults, "_armed", faults.read("after_submission=raise"))
            lost = api.post("/v1/experiments", json=SPEC, headers={"Idempotency-Key": "k-1"})
        assert (lost.status_code, lost.headers["retry-after"]) == (503, "5")
        answer = api.post("/v1/experiments", json=SPEC, headers={"Idempotency-Key": "k-1"})
        (experiment,) = table(Experiment)
        assert (answer.status_code, answer.json()["id"]) == (201, experiment.id)

    def test_another_body_is_refused(self, api: TestClient, table: Table) -> None:
        api.post("/v1/experiments", json=SPEC, headers={"Idempotency-Key": "k-1"})
        response = api.post("/v1/experiments", json=SPEC | {"name": "other"}, headers={"Idempotency-Key": "k-1"})
        assert "use a new key" in problem(response, 422, "Idempotency-Key")["detail"]
        assert len(table(Experiment)) == 1

    def test_an_extension_sent_again_is_answered_as_before_though_it_has_grown_since(self, api: TestClient) -> None:
        path = f"/v1/experiments/{api.post('/v1/experiments', json=PLAIN).json()['id']}/extend"
        first = api.post(path, json={"repeat": 2}, headers={"Idempotency-Key": "k-1"})
        assert api.post(path, json={"repeat": 3}).json()["trial_count"] == 3
        again = api.post(path, json={"repeat": 2}, headers={"Idempotency-Key": "k-1"})
        assert (again.status_code, again.json()) == (200, first.json())
        other = api.post(path, json={"repeat": 4}, headers={"Idempotency-Key": "k-1"})
        assert "use a new key" in problem(other, 422, "Idempotency-Key")["detail"]

    def test_a_clone_sent_again_is_answered_as_before_though_its_origin_is_gone(self, api: TestClient) -> None:
        path = f"/v1/experiments/{api.post('/v1/experiments', json=PLAIN).json()['id']}"
        first = api.post(f"{path}/clone", headers={"Idempotency-Key": "k-1"})
        api.post(f"{path}/cancel")
        assert api.delete(path).json()["deleted"]
        again = api.post(f"{path}/clone", headers={"Idempotency-Key": "k-1"})
        assert (again.status_code, again.json()) == (201, first.json())
        assert again.headers["Location"] == first.headers["Location"]

    @pytest.mark.parametrize("key", ["", "x" * 201])
    def test_keys_have_a_length(self, sqlite_api: TestClient, key: str) -> None:
        headers = {"Idempotency-Key": key}
        problem(sqlite_api.post("/v1/experiments", json=SPEC, headers=headers), 422, "Idempotency-Key")
        assert sqlite_api.get("/v1/experiments").json()["items"] == []

    @pytest.mark.parametrize("key", [b"caf\xe9", b"a\x00b", b"\xf0\x9f\x8c\xb3"])
    def test_keys_of_any_bytes_are_no_outage(self, api: TestClient, key: bytes) -> None:
        response = api.post("/v1/experiments", json=SPEC, headers={b"Idempotency-Key": key})
        assert response.status_code in (201, 422)

    def test_a_refused_request_leaves_its_key_free(self, api: TestClient) -> None:
        headers = {"Idempotency-Key": "k-1"}
        problem(api.post("/v1/experiments", json=SPEC | {"priority": 5000}, headers=headers), 422, "priority")
        assert api.post("/v1/experiments", json=SPEC, headers=headers).status_code == 201


class TestExperiments:
    def pages(self, api: TestClient, url: str) -> list[dict[str, Any]]:
        """Follows the Link headers; the cursor in the body says the same."""
        found: list[dict[str, Any]] = []
        while True:
            response = api.get(url)
            assert response.status_code == 200
            body = response.json()
            found += body["items"]
            assert len(found) < 100, "the pages go round"
            link = response.headers.get("link")
            if link is None:
                assert body["next"] is None
                return found
            match = re.fullmatch(r'<(.+)>; rel="next"', link)
            assert match is not None
            url = match[1]
            assert f"cursor={body['next']}" in url

    @pytest.mark.parametrize("limit", [1, 2, 5, 6, 1000])
    def test_pages_hold_everything_once(self, api: TestClient, submit: Submit, limit: int) -> None:
        ids = [submit(seeds=1) for _ in range(5)]
        assert [item["id"] for item in self.pages(api, f"/v1/experiments?limit={limit}")] == ids[::-1]

    @pytest.mark.parametrize("limit", [1, 3, 7, 8])
    def test_trials_in_pages(self, api: TestClient, submit: Submit, limit: int) -> None:
        submit(seeds=2)
        experiment_id = submit(seeds=7)
        items = self.pages(api, f"/v1/experiments/{experiment_id}/trials?limit={limit}&state=queued")
        assert [item["number"] for item in items] == list(range(7))
        assert {item["experiment_id"] for item in items} == {experiment_id}

    def test_filters_by_state_over_pages(self, api: TestClient, submit: Submit, claim: Claim) -> None:
        ids = [submit(seeds=1) for _ in range(5)]
        claim()
        found = self.pages(api, "/v1/experiments?limit=2&state=queued")
        assert [item["id"] for item in found] == ids[:0:-1]
        assert [item["id"] for item in self.pages(api, "/v1/experiments?state=running")] == ids[:1]

    def test_new_experiments_do_not_move_the_pages(self, api: TestClient, submit: Submit) -> None:
        ids = [submit(seeds=1) for _ in range(4)]
        first = api.get("/v1/experiments?limit=2").json()
        submit(seeds=1)
        second = api.get("/v1/experiments", params={"limit": 2, "cursor": first["next"]}).json()
        assert [item["id"] for page in (first, second) for item in page["items"]] == ids[::-1]

    def test_an_empty_list(self, api: TestClient) -> None:
        response = api.get("/v1/experiments")
        assert response.json() == {"items": [], "next": None}
        assert "link" not in response.headers

    @pytest.mark.parametrize(
        ("query", "field"),
        [
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("limit=many", "limit"),
            ("state=lost", "state[0]"),
            ("state=queued&state=lost", "state[1]"),
            ("sort=speed", "sort"),
            ("fields=nmae", "fields"),
            ("fields=id,,state", "fields"),
            ("fields=id.x", "fields"),
            ("cursor=", "cursor"),
            ("cursor=abc", "cursor"),
            ("cursor=%C3%A4", "cursor"),
            ("cursor=djE6MQ", "cursor"),  # of an older release
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/experiments", "/v1/experiments/1/trials"])
    def test_wrong_queries(self, sqlite_api: TestClient, path: str, query: str, field: str) -> None:
        sqlite_api.post("/v1/experiments", json=SPEC)
        problem(sqlite_api.get(f"{path}?{query}"), 422, field)

    @pytest.mark.parametrize("path", ["/v1/experiments/{}", "/v1/experiments/{}/trials", "/v1/trials/{}"])
    def test_what_is_not_there(self, api: TestClient, path: str) -> None:
        kind = "trial" if path.startswith("/v1/trials") else "experiment"
        assert problem(api.get(path.format(7)), 404)["detail"] == f"there is no {kind} 7"
        assert "no" in problem(api.get(path.format(2**63 - 1)), 404)["detail"]
        for wrong in ("0", "-1", "x", "1.5", str(2**63)):
            problem(api.get(path.format(wrong)), 422, f"{kind}_id")

    def test_progress_of_a_running_experiment(
        self,
        api: TestClient,
        submit: Submit,
        claim: Claim,
        finish: Finish,
        database: Database,
        table: Table,
        epoch_point: Make,
    ) -> None:
        experiment_id = submit(seeds=2)
        lease = claim()
        first, second = table(Trial)
        finish(lease, first.id, 0.75)
        database.write(under(lease, HeldExperiment.start_trial, second.id))
        database.write(under(lease, HeldExperiment.add_epoch, second.id, reported(epoch_point(1))))
        body = api.get(f"/v1/experiments/{experiment_id}").json()
        assert body["state"] == "running"
        assert body["started_at"] is not None
        progress = body["progress"]
        assert (progress["epochs_done"], progress["epochs"]) == (4, 6)
        assert (progress["best_accuracy"], progress["best_val_accuracy"]) == (0.75, 0.7)
        assert progress["seconds_left"] >= 0
        for path in (f"/v1/experiments/{experiment_id}", "/v1/experiments"):
            tag = api.get(path).headers["etag"]  # it does not change with the clock
            assert api.get(path, headers={"If-None-Match": tag}).status_code == 304
        assert api.get("/v1/experiments").json()["items"][0]["progress"]["trials"] == progress["trials"]

    def test_time_left_at_the_pace_of_what_is_done(
        self,
        api: TestClient,
        submit: Submit,
        claim: Claim,
        finish: Finish,
        database: Database,
        table: Table,
        epoch_point: Make,
    ) -> None:
        """Six epochs of nine in 60 seconds: 30 more. How long an evaluation takes is not known of epochs."""
        experiment_id = submit(seeds=3)
        lease = claim()
        for trial in table(Trial)[:2]:
            finish(lease, trial.id)

        def a_minute(session: Session) -> None:
            experiment = session.get_one(Experiment, experiment_id)
            assert experiment.progressed_at is not None
            experiment.claimed_at = experiment.progressed_at - timedelta(seconds=60)

        database.write(a_minute)
        assert api.get(f"/v1/experiments/{experiment_id}").json()["progress"]["seconds_left"] == 30
        last = table(Trial)[2].id
        database.write(under(lease, HeldExperiment.start_trial, last))
        for epoch in (1, 2, 3):
            database.write(under(lease, HeldExperiment.add_epoch, last, reported(epoch_point(epoch))))
        trained = api.get(f"/v1/experiments/{experiment_id}").json()["progress"]
        database.write(under(lease, HeldExperiment.yield_trial, last))
        queued = api.get(f"/v1/experiments/{experiment_id}").json()["progress"]
        for progress, state in ((trained, "running"), (queued, "queued")):
            assert (progress["trials"][state], progress["epochs_done"], progress["epochs"]) == (1, 9, 9)
            assert progress["seconds_left"] is None


class TestTrials:
    def test_everything_about_one(
        self,
        api: TestClient,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        epoch_point: Make,
        trial_result: Make,
    ) -> None:
        experiment_id = submit(seeds=1)
        lease, trial_id = claim(), table(Trial)[0].id
        bare = api.get(f"/v1/trials/{trial_id}").json()
        assert (bare["state"], bare["result"], bare["protocol"], bare["epoch_metrics"]) == ("queued", None, None, [])

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                held.start_trial(trial_id)
                for epoch in (1, 2):
                    held.add_epoch(trial_id, reported(epoch_point(epoch, ort_loss=0.125)))
                file = ArtifactFile("model", "trials/1/model.safetensors", "ab" * 32, 9)
                held.finish_trial(trial_id, trial_result(0.5), ProtocolRecord("p" * 64, {"split": "test"}), [file])

        database.write(work)
        body = api.get(f"/v1/trials/{trial_id}").json()
        assert (body["state"], body["epoch"], body["epochs"], body["attempts"]) == ("succeeded", 2, 3, 1)
        assert body["epoch_metrics"] == [epoch_point(epoch, ort_loss=0.125) for epoch in (1, 2)]
        expected = {name: v for name, v in trial_result(0.5).items() if name not in ("layers", "environment")}
        found = {name: value for name, value in body["result"].items() if name in expected}
        assert found == expected
        assert (body["result"]["protocol"], body["result"]["valid"]) == ("p" * 64, True)
        assert {
            value
            for name, value in body["result"].items()
            if name not in (*expected, "protocol", "valid", "violations")
        } == {None}
        assert (body["protocol"], body["layers"]) == ({"split": "test"}, trial_result()["layers"])
        assert body["environment"] == {"torch": "2"}
        (artifact,) = body["artifacts"]
        assert (artifact["kind"], artifact["sha256"], artifact["size"]) == ("model", "ab" * 32, 9)
        assert "trials/1" not in str(artifact), "no path leaves the service"
        (listed,) = api.get(f"/v1/experiments/{experiment_id}/trials").json()["items"]
        assert listed == {name: body[name] for name in listed}

    def test_a_failure_says_why(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        submit(seeds=1)
        lease, trial_id = claim(), table(Trial)[0].id
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        database.write(under(lease, HeldExperiment.fail_trial, trial_id, "bad_data", "run `ttsv data fetch`"))
        body = api.get(f"/v1/trials/{trial_id}").json()
        assert (body["state"], body["failure"], body["error"]) == ("failed", "bad_data", "run `ttsv data fetch`")


class TestCancel:
    def test_cancels_once(self, api: TestClient, submit: Submit, claim: Claim, table: Table, finish: Finish) -> None:
        experiment_id = submit(seeds=3)
        finish(claim(), table(Trial)[0].id)
        first, second = (api.post(f"/v1/experiments/{experiment_id}/cancel") for _ in range(2))
        assert first.status_code == 200
        assert first.json() == second.json()
        assert first.json()["state"] == "cancelled"
        trials = first.json()["progress"]["trials"]
        assert (trials["succeeded"], trials["cancelled"]) == (1, 2)
        assert table(Experiment)[0].fence == 2

    def test_nothing_to_cancel(self, api: TestClient) -> None:
        problem(api.post("/v1/experiments/7/cancel"), 404)


class TestLeaderboard:
    def test_ranks(self, api: TestClient, submit: Submit, claim: Claim, table: Table, finish: Finish) -> None:
        experiment_id = submit(seeds=2, **{"training.lr": [0.1, 0.2, 0.3]})
        lease = claim()
        for trial, accuracy in zip(table(Trial), (0.25, 0.75, 0.875, 0.625), strict=False):
            finish(lease, trial.id, accuracy)
        body = api.get("/v1/leaderboards/digits").json()
        assert (body["dataset"], body["metric"]) == ("digits", "accuracy")
        (board,) = body["boards"]
        assert board["record"] == {"split": "test", "samples": 360}
        assert [(row["place"], row["config"]["training"]["lr"]) for row in board["rows"]] == [(1, 0.2), (2, 0.1)]
        first = board["rows"][0]
        assert (first["trials"], first["seeds"], first["complete"]) == (2, 2, True)
        assert first["metrics"]["accuracy"] == {
            "seeds": 2,
            "mean": 0.75,
            "std": pytest.approx(0.125 * 2**0.5),
            "min": 0.625,
            "max": 0.875,
        }
        assert [hole["config"]["training"]["lr"] for hole in body["holes"]] == [0.3]
        same = api.get(f"/v1/leaderboards/digits?experiment={experiment_id}&metric=loss").json()
        assert same["metric"] == "loss"
        assert [row["place"] for row in same["boards"][0]["rows"]] == [1, 1]

    def test_of_nothing(self, api: TestClient) -> None:
        body = api.get("/v1/leaderboards/cifar10").json()
        assert (body["boards"], body["holes"]) == ([], [])

    def test_refusals(self, api: TestClient) -> None:
        body = problem(api.get("/v1/leaderboards/imagenet"), 404)
        assert body["detail"].startswith("there is no data set 'imagenet': the name must be one of digits, cifar10")
        assert problem(api.get("/v1/leaderboards/digitz"), 404)["detail"].endswith("; the nearest is digits")
        for asked in ("metric", "metrics"):
            (wrong,) = problem(api.get(f"/v1/leaderboards/digits?{asked}=acuracy"), 422, asked)["errors"]
            assert "the nearest is accuracy" in wrong["message"]
        problem(api.get("/v1/leaderboards/digits?experiment=0"), 422, "experiment")
        problem(api.get("/v1/leaderboards/digits?experiment=7"), 404)
        problem(api.get(f"/v1/leaderboards/{'x' * 201}"), 422, "dataset")


class TestRoutes:
    @pytest.mark.parametrize("path", ["/v1", "/v2/experiments", "/v1/experiments/1/nothing", "/v1/trials/1/nothing"])
    def test_unknown_routes(self, sqlite_api: TestClient, path: str) -> None:
        assert path in problem(sqlite_api.get(path), 404)["detail"]

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("DELETE", "/v1/experiments", {"GET", "HEAD", "POST"}),
            ("PUT", "/v1/experiments/1", {"DELETE", "GET", "HEAD", "PATCH"}),
            ("GET", "/v1/experiments/1/cancel", {"POST"}),
            ("POST", "/livez", {"GET", "HEAD"}),
        ],
    )
    def test_methods_that_are_not_there(
        self, sqlite_api: TestClient, method: str, path: str, allowed: set[str]
    ) -> None:
        response = sqlite_api.request(method, path)
        problem(response, 405)
        assert set(response.headers["allow"].split(", ")) == allowed


class TestHealth:
    def test_live(self, api: TestClient) -> None:
        assert api.get("/livez").json() == {"status": "ok"}

    def test_ready(self, api: TestClient, database: Database, table: Table) -> None:
        response = api.get("/readyz")
        assert response.status_code == 200
        assert response.json() == {
            "status": "ok",
            "checks": {"database": "ok", "schema": "ok", "disk": "ok"},
            "worker_seen_at": None,
            "node_seen_at": None,
        }
        database.write(lambda session: leases.greet(session, "worker", 1, 0))
        assert api.get("/readyz").json()["worker_seen_at"] is not None
        assert api.get("/readyz").json()["node_seen_at"] is None
        for problem in ("another data set", None):
            node = Node("a" * 56, "host", "10.0.0.1", cpus=1, gpus=0, memory_gib=1, problem=problem)
            database.write(partial(nodes.record, worker="worker", seen=[node]))
            assert (api.get("/readyz").json()["node_seen_at"] is None) == (problem is not None)
        assert len(table(Worker)) == 1

    def test_ready_while_the_store_of_files_is_silent(self, database: Database, tmp_path: Path) -> None:
        """All but files of trials is answered, and trials wait for it: nobody is better off without the API."""
        url = database.engine.url.render_as_string(hide_password=False)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            host, port = silent.getsockname()
            storage = f"s3://key:word@bucket/x?endpoint_override={host}:{port}&scheme=http"
            settings = Settings(database_url=url, data_dir=tmp_path / "data", storage=storage, host="127.0.0.1")
            with TestClient(create_app(settings)) as api:
                assert api.get("/readyz").json()["status"] == "ok"
                assert api.get("/v1/trials").json()["items"] == []

    def test_columns_are_looked_for_once(
        self, api: TestClient, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert api.get("/readyz").status_code == 200
        looked: list[Connection] = []
        monkeypatch.setattr("service.upkeep.migrate.lacking_metrics", looked.append)
        assert api.get("/readyz").json()["checks"]["schema"] == "ok"
        assert not looked

    def test_not_ready_where_nothing_can_be_written(self, postgres_url: str, tmp_path: Path) -> None:
        settings = Settings(database_url=postgres_url, data_dir=tmp_path / "data", host="127.0.0.1")
        application = create_app(settings)

        def read_only(connection: Connection) -> None:  # as on a standby
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

        event.listen(application.state.database.engine, "begin", read_only)
        with TestClient(application) as api:
            ready = api.get("/readyz")
            assert ready.status_code == 503
            assert ready.json()["checks"]["database"].startswith("read-only: ")
            assert "read-only" in problem(api.post("/v1/experiments", json=SPEC), 503)["detail"]

    def test_not_ready_before_the_migration(self, empty_url: str, tmp_path: Path) -> None:
        settings = Settings(database_url=empty_url, data_dir=tmp_path / "data", host="127.0.0.1")
        with TestClient(create_app(settings), raise_server_exceptions=False) as api:
            response = api.get("/readyz")
            assert response.status_code == 503
            assert response.json()["status"] == "not ready"
            assert "ttsv migrate" in str(response.json()["checks"])
            assert api.get("/livez").status_code == 200
            assert problem(api.get("/v1/experiments"), 503)

    def test_not_ready_on_a_damaged_file(self, tmp_path: Path) -> None:
        (tmp_path / "ttsv.db").write_bytes(b"no database, and long enough to be read as one" * 100)
        with TestClient(create_app(Settings(data_dir=tmp_path, host="127.0.0.1"))) as api:
            says = api.get("/readyz").json()["checks"]["database"]
        assert says == "DatabaseError: it is damaged, and `ttsv restore --force FILE` puts a backup in its place"

    def test_not_ready_at_another_revision(self, api: TestClient, database: Database) -> None:
        from sqlalchemy import text

        database.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = '0000'")))
        response = api.get("/readyz")
        assert response.status_code == 503
        assert "at 0000" in response.json()["checks"]["schema"]
        assert "of a newer version than this code" in response.json()["checks"]["schema"]
        database.write(lambda session: session.execute(text("UPDATE alembic_version SET version_num = '0022'")))
        assert api.get("/readyz").json()["checks"]["schema"].endswith("run `ttsv migrate`")

    def test_not_ready_without_a_column_for_every_metric(self, api: TestClient, database: Database) -> None:
        from sqlalchemy import text

        database.write(lambda session: session.execute(text("ALTER TABLE results DROP COLUMN brier")))
        response = api.get("/readyz")
        assert response.status_code == 503
        assert response.json()["checks"]["schema"] == "no column for brier: run `ttsv migrate`"

    def test_not_ready_on_a_full_disk(self, sqlite_api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage("/")._replace(free=5 * 2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        response = sqlite_api.get("/readyz")
        assert response.status_code == 503
        assert response.json()["checks"]["disk"].startswith("5 MiB free")


REQUESTS = [
    ("GET", "/v1/experiments"),
    ("POST", "/v1/experiments"),
    ("GET", "/v1/experiments/1"),
    ("GET", "/v1/experiments/1/trials"),
    ("POST", "/v1/experiments/1/cancel"),
    ("GET", "/v1/trials/1"),
    ("GET", "/v1/leaderboards/digits"),
]


class TestDatabaseGone:
    def gone(self, url: str, folder: Path) -> None:
        settings = Settings(database_url=url, data_dir=folder / "data", host="127.0.0.1")
        application = create_app(settings)
        if url.startswith("sqlite"):
            shutil.rmtree(Path(url.removeprefix("sqlite:///")).parent)
        with TestClient(application, raise_server_exceptions=False) as api:
            for method, path in REQUESTS:
                body = SPEC if path == "/v1/experiments" and method == "POST" else None
                response = api.request(method, path, json=body)
                assert "can be sent again" in problem(response, 503)["detail"]
                assert response.headers["retry-after"] == "5"
            assert api.get("/livez").status_code == 200
            ready = api.get("/readyz")
            assert ready.status_code == 503
            fix = "its file must be there" if url.startswith("sqlite") else "does it run"
            assert fix in ready.json()["checks"]["database"]

    def test_the_file_is_gone(self, sqlite_url: str, tmp_path: Path) -> None:
        self.gone(sqlite_url, tmp_path)

    def test_the_server_is_gone(self, tmp_path: Path) -> None:
        self.gone(f"postgresql://nobody@/nothing?host={tmp_path}", tmp_path)

    def test_no_connection_is_free(self, sqlite_api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> None:
            raise exc.TimeoutError("QueuePool limit of size 5 overflow 10 reached")

        monkeypatch.setattr(experiments, "list_experiments", full)
        problem(sqlite_api.get("/v1/experiments"), 503)

    def test_a_commit_that_was_not_answered_may_be_stored(
        self, sqlite_api: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lose(point: str, error: Callable[[str], Exception]) -> None:
            raise error(point)

        monkeypatch.setattr(submission, "fault", lose)
        mine = {"Idempotency-Key": "mine"}
        for headers, stored in (({}, 1), ({}, 2), (mine, 3)):
            body = problem(sqlite_api.post("/v1/experiments", json=SPEC, headers=headers), 503)
            assert "not known" in body["detail"]
            assert body["type"].endswith("#database-unsure")
            assert len(sqlite_api.get("/v1/experiments").json()["items"]) == stored
        assert sqlite_api.post("/v1/experiments", json=SPEC, headers=mine).json()["id"] == 3

    def test_a_full_disk_is_named(self, sqlite_url: str, tmp_path: Path) -> None:
        def full(connection: Any, _record: Any) -> None:
            connection.execute("PRAGMA max_page_count=1")  # taken as the pages that there are

        application = create_app(Settings(database_url=sqlite_url, data_dir=tmp_path / "data", host="127.0.0.1"))
        engine = application.state.database.engine
        spec = SPEC | {"notes": "n" * 9000, "grid": {"seed": [*range(500)]}}
        with TestClient(application, raise_server_exceptions=False) as api:
            engine.dispose()
            event.listen(engine, "connect", full)
            body = problem(api.post("/v1/experiments", json=spec), 503)
            assert body["detail"].startswith("the database has no room left on its disk; nothing was stored")
            event.remove(engine, "connect", full)
            engine.dispose()
            assert api.get("/v1/experiments").json()["items"] == []
            assert api.post("/v1/experiments", json=spec).status_code == 201

    def test_an_error_of_ours_is_a_problem_too(self, sqlite_api: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(experiments, "list_experiments", broken)
        assert "secret" not in problem(sqlite_api.get("/v1/experiments"), 500)["detail"]


class TestOpenApi:
    @pytest.fixture
    def document(self, openapi: dict[str, Any]) -> dict[str, Any]:
        return openapi

    def test_every_operation_has_an_id_and_a_summary(self, document: dict[str, Any]) -> None:
        operations = {
            f"{method.upper()} {path}": operation["operationId"]
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if operation["summary"] and operation["description"]
        }
        every = [operation for methods in document["paths"].values() for operation in methods.values()]
        assert len(operations) == len(every), "an operation has no summary or no description"
        assert len(set(operations.values())) == len(every)
        assert all(re.fullmatch(r"[a-z]+([A-Z][a-z]*)+", name) for name in operations.values())
        assert operations["POST /v1/experiments"] == "createExperiment"

    def test_every_reference_leads_somewhere(self, document: dict[str, Any]) -> None:
        def references(value: object) -> list[str]:
            if isinstance(value, dict):
                here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
                return here + [ref for inner in value.values() for ref in references(inner)]
            return [ref for inner in value for ref in references(inner)] if isinstance(value, list) else []

        for reference in set(references(document)):
            target: Any = document
            for part in reference.removeprefix("#/").split("/"):
                assert part in target, reference
                target = target[part]

    def test_the_schemas_are_schemas(self, document: dict[str, Any]) -> None:
        assert document["openapi"].startswith("3.1")
        for schema in document["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)

    def test_the_example_fits_its_schema(self, document: dict[str, Any]) -> None:
        content = document["paths"]["/v1/experiments"]["post"]["requestBody"]["content"]["application/json"]
        validator = jsonschema.Draft202012Validator(document | content["schema"])
        for example in content["examples"].values():
            validator.validate(example["value"])

    def test_a_refusal_fits_its_schema(self, sqlite_api: TestClient, document: dict[str, Any]) -> None:
        responses = document["paths"]["/v1/experiments"]["post"]["responses"]
        schema = responses["422"]["content"]["application/problem+json"]["schema"]
        body = sqlite_api.post("/v1/experiments", json={"name": ""}).json()
        jsonschema.Draft202012Validator(document | schema).validate(body)
        assert body["errors"]

    def test_the_answers_fit_their_schemas(self, sqlite_api: TestClient, document: dict[str, Any]) -> None:
        created = sqlite_api.post("/v1/experiments", json=SPEC).json()
        trial = sqlite_api.get(f"/v1/experiments/{created['id']}/trials").json()["items"][0]
        for path, name in (
            (f"/v1/experiments/{created['id']}", "ExperimentOut"),
            ("/v1/experiments", "ExperimentPage"),
            (f"/v1/trials/{trial['id']}", "TrialDetailOut"),
            ("/v1/leaderboards/digits", "LeaderboardOut"),
            ("/readyz", "Readiness"),
        ):
            schema = document | {"$ref": f"#/components/schemas/{name}"}
            jsonschema.Draft202012Validator(schema).validate(sqlite_api.get(path).json())


def test_a_page_may_end_with_any_name(sqlite_api: TestClient) -> None:
    """The longest name, of characters that take four bytes each, makes a cursor that is taken back."""
    for number in range(2):
        sqlite_api.post("/v1/experiments", json=SPEC | {"name": chr(0x1F600 + number) * 200})
    first = sqlite_api.get("/v1/experiments?sort=name&limit=1").json()
    rest = sqlite_api.get("/v1/experiments", params={"sort": "name", "cursor": first["next"]}).json()["items"]
    assert [item["name"] for item in (*first["items"], *rest)] == [chr(0x1F600) * 200, chr(0x1F601) * 200]
