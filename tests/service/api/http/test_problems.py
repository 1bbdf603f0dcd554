"""The `type` of a problem leads to a page of the service that says what to do."""

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.api.http.problem_types import PROBLEM_TYPES, ProblemType
from service.api.http.problems import EXAMPLE
from service.dashboard.rendering import HEADERS

SPEC: dict[str, Any] = {"name": "one", "base": {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 4}}}


def section(client: TestClient, uri: str) -> str:
    """What is said where a type leads: the page's text from the element with that id to the next one."""
    page = client.get(uri, headers={"Accept": "text/html"})
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    name = uri.partition("#")[2]
    assert page.text.count(f'id="{name}"') == 1
    return re.split(r'<h2 id="|</main>', page.text.partition(f'id="{name}"')[2])[0]


@pytest.mark.parametrize("kind", PROBLEM_TYPES, ids=lambda kind: kind.name)
def test_every_type_leads_to_what_it_means(sqlite_api: TestClient, kind: ProblemType) -> None:
    assert [other.name for other in PROBLEM_TYPES].count(kind.name) == 1
    said = section(sqlite_api, kind.uri)
    assert str(kind.status) in said
    assert said.count("<p>") == 2
    assert kind.meaning.endswith(".")
    assert kind.fix.endswith(".")
    assert EXAMPLE["type"] in {known.uri for known in PROBLEM_TYPES}


@pytest.mark.parametrize(
    ("name", "method", "path", "how"),
    [
        (
            "unreadable-body",
            "POST",
            "/v1/experiments",
            {"content": "{", "headers": {"Content-Type": "application/json"}},
        ),
        ("unknown-host", "GET", "/v1/experiments", {"headers": {"Host": "evil.example"}}),
        ("not-allowed", "POST", "/v1/experiments", {"json": SPEC, "headers": {"Origin": "https://evil.example"}}),
        ("not-found", "GET", "/v1/experiments/99", {}),
        ("not-found", "GET", "/nowhere", {}),
        ("wrong-method", "DELETE", "/v1/experiments", {}),
        ("no-such-form", "GET", "/v1/leaderboards/digits", {"headers": {"Accept": "image/png"}}),
        ("wrong-state", "POST", "/v1/experiments/1/archive", {}),
        ("name-taken", "POST", "/v1/projects", {"json": {"name": "vision"}}),
        ("changed-meanwhile", "PATCH", "/v1/experiments/1", {"json": {"priority": 3}, "headers": {"If-Match": '"9"'}}),
        ("wrong-media-type", "POST", "/v1/experiments", {"content": "x", "headers": {"Content-Type": "text/plain"}}),
        ("invalid-request", "POST", "/v1/experiments", {"json": {}}),
        ("invalid-request", "GET", "/v1/experiments?limit=x", {}),
        ("idempotency-key-used", "POST", "/v1/experiments", {"json": SPEC, "headers": {"Idempotency-Key": "a"}}),
    ],
)
def test_a_refusal_is_of_its_type(sqlite_api: TestClient, name: str, method: str, path: str, how: Any) -> None:
    sqlite_api.post("/v1/projects", json={"name": "vision"})
    sqlite_api.post("/v1/experiments", json=SPEC | {"name": "former"}, headers={"Idempotency-Key": "a"})
    answer = sqlite_api.request(method, path, **how)
    body = answer.json()
    assert body["type"] == f"/problems#{name}"
    assert body["status"] == answer.status_code
    assert f"{answer.status_code}" in section(sqlite_api, body["type"])


def test_a_browser_is_led_there(sqlite_api: TestClient) -> None:
    page = sqlite_api.get("/experiments/99", headers={"Accept": "text/html"})
    assert page.status_code == 404
    assert '<a href="/problems#not-found">' in page.text
