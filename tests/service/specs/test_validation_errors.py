"""What is said of a wrong request: the field as its writer knows it, what would be right, and the value."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.specs.patterns import WORDS

BASE = {"dataset": "digits", "model": "small-cnn"}
SEARCH = {"algorithm": "random", "trials": 3}


def said(response: Any) -> dict[str, str]:
    """Field -> message."""
    assert response.status_code == 422, response.text
    return {error["field"]: error["message"] for error in response.json()["errors"]}


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"scheduler": {"grace_epochs": 1}}, "scheduler.type", "is required; /docs lists what it can be"),
        ({"scheduler": {"type": "pbt"}}, "scheduler.type", "must be one of 'fifo', 'asha', not \"pbt\""),
        ({"scheduler": "asha"}, "scheduler", 'must be an object, {name: value, ...}, not "asha"'),
        ({"scheduler": {"type": "asha", "reduction": 1}}, "scheduler.reduction", "must be at least 1.1, not 1"),
        (
            {"scheduler": {"type": "asha", "grace_epochs": 5, "max_epochs": 4}},
            "scheduler",
            "max_epochs must be at least grace_epochs, 5, not 4",
        ),
        ({"spec_version": 3}, "spec_version", "must be 1 or 2, not 3"),
        ({"spec_version": "1"}, "spec_version", 'must be 1 or 2, not "1"'),
        ({"spec_version": 1, "tags": ["a"]}, "tags", "unknown in version 1 of the spec; set spec_version to 2, or"),
        (
            {"spec_version": 1, "resources": {"memory_gib": 1}},
            "resources.memory_gib",
            "unknown in version 1 of the spec; set spec_version to 2, or",
        ),
        ({"search": SEARCH | {"space": [1]}}, "search.space", "must be an object, {name: value, ...}, not [1]"),
        (
            {"search": SEARCH | {"space": {"training.lr": {"normal": [0, 1]}}}},
            "search.space.training.lr",
            "must be one of {uniform: [low, high]}, {loguniform",
        ),
        (
            {"search": SEARCH | {"space": {"seed": {"int": [9, 1]}}}},
            "search.space.seed",
            "int must be finite, the first",
        ),
        ({"priority": "high"}, "priority", 'must be a whole number, not "high"'),
        ({"repeat": 0}, "repeat", "must be at least 1, not 0"),
        (
            {"search": SEARCH | {"space": {"training.lr": {"choice": [0.1]}}, "seed": 2**32}},
            "search.seed",
            "must be at most 4294967295, not 4294967296",
        ),
        ({"timeout_seconds": 0}, "timeout_seconds", "must be above 0, not 0"),
        ({"grid": {"rank": 3}}, "grid.rank", "must be a list, not 3"),
        ({"seeds": [1]}, "seeds", "unknown field; remove it, or see /docs for the fields there are"),
        ({"notes": 7}, "notes", "must be a text, not 7"),
        ({"name": ""}, "name", 'must have at least 1 characters, not ""'),
        ({"name": "a\u202eb"}, "name", "must be without control characters, and without such as break lines or turn"),
        ({"name": "a\uffffb"}, "name", "must be without control characters, and without such as break lines or turn"),
        ({"tags": ["a b"]}, "tags[0]", "must be a letter or digit, then up to 63 letters, digits and ._:/+-, without"),
        ({"notes": "\0"}, "notes", "must be without null characters"),
    ],
)
def test_of_a_spec(sqlite_api: TestClient, change: dict[str, Any], field: str, message: str) -> None:
    found = said(sqlite_api.post("/v1/experiments", json={"name": "x", "base": BASE} | change))
    assert list(found) == [field]
    assert found[field].startswith(message)


@pytest.mark.parametrize(
    ("query", "field", "message"),
    [
        ("trials?rank=nan", "rank", 'must be a number such as 8 or 0.25, or none (not decomposed), not "nan"'),
        ("trials?rank=1_0", "rank", 'must be a number such as 8 or 0.25, or none (not decomposed), not "1_0"'),
        ("trials?state=lost", "state[0]", "must be 'queued', 'running', 'succeeded', 'early_stopped', 'failed', "),
        ("trials?limit=1001", "limit", 'must be at most 1000, not "1001"'),
        ("leaderboards/digits?min_seeds=2000000", "min_seeds", 'must be at most 1000000, not "2000000"'),
        ("trials?limit=ten", "limit", 'must be a whole number, not "ten"'),
        ("trials?limit=" + "1" * 5000, "limit", "must be a whole number of fewer digits, not "),
        (
            "leaderboards/digits?rank=-1",
            "rank",
            'must be a number such as 8 or 0.25, or none (not decomposed), not "-1"',
        ),
        ("trials?sort=a b", "sort", "must be one name, such as training.lr, or with - before it for the largest"),
        ("trials?columns=,", "columns", "must be names of fields, separated by commas, such as rank,training.lr"),
        ("leaderboards/digits?pivot=rank", "pivot", "must be the names of two fields with a comma between them"),
        ("leaderboards/digits?baseline=7", "baseline", "must be a fingerprint, 64 digits and letters a to f, not"),
    ],
)
def test_of_a_query(sqlite_api: TestClient, query: str, field: str, message: str) -> None:
    sqlite_api.post("/v1/experiments", json={"name": "x", "base": BASE})
    path = f"/v1/{query}" if query.startswith("leaderboards") else f"/v1/experiments/1/{query}"
    found = said(sqlite_api.get(path))
    assert list(found) == [field]
    assert found[field].startswith(message)
    assert len(found[field]) < 200


def test_of_a_header(sqlite_api: TestClient) -> None:
    headers = {"Idempotency-Key": "k" * 201}
    found = said(sqlite_api.post("/v1/experiments", json={"name": "x", "base": BASE}, headers=headers))
    assert found == {"Idempotency-Key": "must have at most 200 characters"}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/experiments", "GET, HEAD, POST"),
        ("PUT", "/v1/experiments/1", "DELETE, GET, HEAD, PATCH"),
        ("POST", "/livez", "GET, HEAD"),
        ("POST", "/static/style.css", "GET, HEAD"),
        ("BREW", "/v1/leaderboards/digits", "GET, HEAD"),
    ],
)
def test_of_a_method(sqlite_api: TestClient, method: str, path: str, allowed: str) -> None:
    response = sqlite_api.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["detail"] == f"{path} takes {allowed}, not {method}"


def test_every_pattern_of_a_query_is_said_in_words(openapi: dict[str, Any]) -> None:
    operations = [one for path in openapi["paths"].values() for one in path.values()]
    schemas = [parameter["schema"] for one in operations for parameter in one.get("parameters", ())]
    patterns = {way["pattern"] for schema in schemas for way in schema.get("anyOf", [schema]) if "pattern" in way}
    others = patterns - WORDS.keys()
    assert [one for one in others if "none" not in one] == [], "a rank has words of its own"


def test_what_two_parts_of_a_page_refuse_is_said_once(sqlite_api: TestClient) -> None:
    made = sqlite_api.post("/v1/experiments", json={"name": "x", "base": BASE})
    page = sqlite_api.get(
        f"/experiments/{made.json()['id']}", params={"where": "a" * 3000}, headers={"Accept": "text/html"}
    )
    assert page.status_code == 422
    assert page.text.count("where[0]") == 1
