"""The OpenAPI document says what every property of a body means, and which headers an answer has."""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from service.database.engine import Database
from service.queue import leases
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.schemas.trials import ResultOut
from service.settings import Settings
from ttsv.metrics.catalog import METRICS

SPEC: dict[str, Any] = {
    "name": "one",
    "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "rank": 8, "training": {"epochs": 4}},
}

EVERYWHERE = {
    "content-encoding",
    "content-length",
    "content-type",
    "x-request-id",
    "x-content-type-options",
    "x-accel-buffering",
}
"""Headers that say nothing about an answer that its client would want to know, or that all answers have."""


def test_every_property_says_what_it_means(openapi: dict[str, Any]) -> None:
    schemas = openapi["components"]["schemas"]
    properties = {
        f"{name}.{field}": stated
        for name, schema in schemas.items()
        for field, stated in schema.get("properties", {}).items()
    }
    assert len(properties) > 400
    assert [name for name, stated in properties.items() if not stated.get("description")] == []
    assert [name for name, stated in properties.items() if not re.search(r"[.]$", stated["description"])] == []


def test_every_parameter_says_what_it_means(openapi: dict[str, Any]) -> None:
    found = {
        f"{method} {path} {one['name']}": one.get("description", "")
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
        for one in operation.get("parameters", ())
    }
    assert len(found) > 200
    assert [name for name, said in found.items() if not said.endswith(".")] == []


def test_so_does_every_property_within_another(openapi: dict[str, Any]) -> None:
    """The parts of a trial, the axes of a grid, the ways in which a search draws."""

    def within(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, stated in schema.get("properties", {}).items():
            yield f"{path}.{name}", stated
            yield from within(f"{path}.{name}", stated)
        for one in (schema.get("items"), *schema.get("anyOf", ())):
            if isinstance(one, dict):
                yield from within(path, one)

    found = dict(part for name, schema in openapi["components"]["schemas"].items() for part in within(name, schema))
    assert {"ExperimentSpec.base.training.lr", "ExperimentSpec.grid.training.lr", "Search.space.rank.int"} <= {*found}
    assert [name for name, stated in found.items() if not stated.get("description")] == []


def test_a_metric_says_what_the_catalogue_says() -> None:
    stated = ResultOut.model_json_schema()["properties"]
    for name, info in METRICS.items():
        assert stated[name]["description"].startswith(info.definition)
    assert stated["train_seconds"]["description"].endswith("In seconds.")
    assert stated["peak_memory"]["description"].endswith("In bytes.")


@pytest.fixture
def trial(sqlite_api: TestClient, trial_result: Callable[..., dict[str, Any]], tmp_path: Path) -> int:
    """A succeeded trial with a file and a log."""
    posted = sqlite_api.post("/v1/experiments", json=SPEC)
    settings: Settings = sqlite_api.app.state.settings  # type: ignore[attr-defined]
    folder = settings.data_dir / "trials" / "1" / "1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "trial.log").write_text("one")
    database: Database = sqlite_api.app.state.database  # type: ignore[attr-defined]

    def work(session: Session) -> None:
        lease = leases.claim(session, "worker", {"boot": "a kernel", "pids": 1, "pid": 1, "start": 1})
        assert lease is not None
        with hold(session, lease) as held:
            held.start_trial(1)
            file = ArtifactFile("model", "trials/1/1/model.safetensors", hashlib.sha256(b"weights").hexdigest(), 7)
            held.finish_trial(1, trial_result(), ProtocolRecord("p" * 64, {"split": "test"}), [file])

    database.write(work)
    assert posted.status_code == 201
    return 1


def test_an_answer_has_the_headers_that_the_document_names(
    sqlite_api: TestClient, trial: int, openapi: dict[str, Any]
) -> None:
    tag = sqlite_api.get("/v1/experiments/1").headers["etag"]
    asked: list[tuple[str, str, str, int, set[str], dict[str, Any]]] = [
        ("GET", "/v1/experiments", "?limit=1", 200, {"ETag", "Link"}, {}),
        ("GET", "/v1/experiments/{experiment_id}", "", 200, {"ETag"}, {}),
        ("GET", "/v1/experiments/{experiment_id}", "", 304, {"ETag"}, {"headers": {"If-None-Match": tag}}),
        ("PATCH", "/v1/experiments/{experiment_id}", "", 200, {"ETag"}, {"json": {"priority": 1}}),
        ("POST", "/v1/experiments", "", 201, {"Location"}, {"json": SPEC}),
        ("POST", "/v1/experiments/{experiment_id}/clone", "", 201, {"Location"}, {}),
        ("GET", "/v1/trials/{trial_id}", "", 200, {"ETag"}, {}),
        ("GET", "/v1/trials/{trial_id}/result", "", 200, {"ETag"}, {}),
        ("GET", "/v1/trials/{trial_id}/logs", "", 200, {"Cache-Control"}, {}),
        ("GET", "/v1/events", "?limit=1", 200, {"ETag", "Link"}, {}),
        ("GET", "/v1/artifacts/{artifact_id}", "", 200, {"ETag", "Content-Disposition"}, {}),
        ("GET", "/v1/artifacts/{artifact_id}", "", 206, {"Content-Range"}, {"headers": {"Range": "bytes=1-3"}}),
        ("GET", "/v1/artifacts/{artifact_id}", "", 416, {"Content-Range"}, {"headers": {"Range": "bytes=9-"}}),
        ("GET", "/v1/leaderboards/{dataset}", "", 200, {"Vary"}, {}),
    ]
    sqlite_api.post("/v1/experiments", json=SPEC)  # there is a second page
    for method, path, query, status, wanted, how in asked:
        address = re.sub(r"{\w+_id}", "1", path).format(dataset="digits") + query
        answer = sqlite_api.request(method, address, **how)
        assert answer.status_code == status, (address, answer.text)
        named = openapi["paths"][path][method.lower()]["responses"][str(status)].get("headers", {})
        assert wanted <= set(named), address
        assert all(name in answer.headers for name in wanted), address
        unsaid = set(answer.headers) - EVERYWHERE - {"content-security-policy"} - {name.lower() for name in named}
        assert unsaid == set(), address
        assert all(header["description"].endswith(".") for header in named.values())


def test_refusals_say_when_to_come_again(openapi: dict[str, Any]) -> None:
    paths = openapi["paths"]
    clone = paths["/v1/experiments/{experiment_id}/clone"]["post"]["responses"]
    assert set(clone["429"]["headers"]) == {"Retry-After"}
    assert set(clone["401"]["headers"]) == {"WWW-Authenticate"}
    assert set(clone["default"]["headers"]) == {"Allow", "Retry-After"}
