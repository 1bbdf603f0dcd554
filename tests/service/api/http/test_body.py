"""The door: bodies that never reach a route, and nothing stored after any of them."""

import asyncio
import json
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.settings import Settings

SPEC: dict[str, Any] = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}}
JSON = {"Content-Type": "application/json"}
LIMIT = Settings.model_fields["max_body_bytes"].default


@pytest.fixture
def door(sqlite_api: TestClient) -> Iterator[TestClient]:
    """The API; whatever is posted must have been refused."""
    yield sqlite_api
    assert sqlite_api.get("/v1/experiments").json()["items"] == []


def refused(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    kinds = {400: "unreadable-body", 413: "body-too-large", 415: "wrong-media-type", 422: "invalid-request"}
    assert (body["status"], body["instance"]) == (status, "/v1/experiments")
    assert body["type"] == f"/problems#{kinds[status]}"
    assert body["title"]
    detail: str = body["detail"]
    return detail


def chunks(body: bytes, size: int = 60_000) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def padded(size: int) -> bytes:
    """A right spec of exactly so many bytes."""
    bare = json.dumps(SPEC).encode()
    return bare + b" " * (size - len(bare))


def nested(depth: int) -> bytes:
    """So many objects in each other."""
    return b'{"base":' * depth + b"1" + b"}" * depth


class TestSize:
    def test_too_large_by_its_own_word(self, door: TestClient) -> None:
        body = padded(LIMIT + 1)
        assert str(LIMIT) in refused(door.post("/v1/experiments", content=body, headers=JSON), 413)

    def test_too_large_in_chunks(self, door: TestClient) -> None:
        response = door.post("/v1/experiments", content=chunks(padded(LIMIT + 1)), headers=JSON)
        assert "content-length" not in response.request.headers
        refused(response, 413)

    def test_a_length_that_lies(self, door: TestClient) -> None:
        headers = JSON | {"Content-Length": "10"}
        refused(door.post("/v1/experiments", content=chunks(padded(LIMIT + 1)), headers=headers), 413)

    @pytest.mark.parametrize("length", ["-1", "ten", "", "\xb2"])
    def test_a_length_that_is_no_number(self, door: TestClient, length: str) -> None:
        headers = {b"Content-Type": b"application/json", b"Content-Length": length.encode("latin-1")}
        response = door.post("/v1/experiments", content=chunks(padded(LIMIT + 1)), headers=headers)
        refused(response, 413)

    @pytest.mark.parametrize("streamed", [False, True])
    def test_the_limit_itself_passes(self, sqlite_api: TestClient, streamed: bool) -> None:
        body = padded(LIMIT)
        response = sqlite_api.post("/v1/experiments", content=chunks(body) if streamed else body, headers=JSON)
        assert response.status_code == 201

    def test_bytes_count_not_characters(self, door: TestClient) -> None:
        body = json.dumps(SPEC | {"notes": "ü" * (LIMIT // 2)}, ensure_ascii=False).encode()
        refused(door.post("/v1/experiments", content=body, headers=JSON), 413)


class TestSyntax:
    @pytest.mark.parametrize(
        "body",
        [
            b"{",
            b"nonsense",
            b"{'name': 'x'}",
            b'{"name": "x",}',
            b'{"name": "x"} {}',
            b"\xff\xfe",
            b'{"name": "\xff"}',
            b" ",
        ],
    )
    def test_not_json(self, door: TestClient, body: bytes) -> None:
        assert "not JSON" in refused(door.post("/v1/experiments", content=body, headers=JSON), 400)

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
    @pytest.mark.parametrize("where", ['{{"name": "x", "priority": {}}}', '{{"grid": {{"delta": [1.0, {}]}}}}'])
    def test_no_numbers(self, door: TestClient, value: str, where: str) -> None:
        detail = refused(door.post("/v1/experiments", content=where.format(value), headers=JSON), 400)
        assert f"{value} is not a JSON number" in detail

    @pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
    @pytest.mark.parametrize("field", ["delta", "rank", "seed", "lambda_ort"])
    def test_numbers_beyond_all_bounds(self, door: TestClient, number: str, field: str) -> None:
        body = f'{{"name": "x", "base": {{"dataset": "digits", "model": "small-cnn", "{field}": {number}}}}}'
        response = door.post("/v1/experiments", content=body, headers=JSON)
        assert f"base.{field}" in refused(response, 422)

    def test_a_number_of_five_thousand_digits(self, door: TestClient) -> None:
        response = door.post("/v1/experiments", content='{"priority": [-' + "1" * 5000 + "]}", headers=JSON)
        assert refused(response, 400) == "priority[0]: a number of 5000 digits; write one of at most 4300"
        assert [error["field"] for error in response.json()["errors"]] == ["priority[0]"]

    @pytest.mark.parametrize(
        "body", ['{"name": "a", "name": "b"}', '{"name": "a", "grid": {"seed": [1], "rank": [1], "seed": [2]}}']
    )
    def test_a_key_twice(self, door: TestClient, body: str) -> None:
        response = door.post("/v1/experiments", content=body, headers=JSON)
        assert "stands twice in one object" in refused(response, 400)
        assert [error["field"] for error in response.json()["errors"]] == ["seed" if "seed" in body else "name"]

    @pytest.mark.parametrize("text", ['"\\ud800"', '{"\\udfff": 1}', '[["a\\ud83d"]]', '"\\udc00\\ud800"'])
    @pytest.mark.parametrize("key", ["base", "grid", "notes", "extra\\ud800"])
    def test_half_a_character(self, door: TestClient, key: str, text: str) -> None:
        body = f'{{"name": "x", "{key}": {text}}}'
        assert "half of a character" in refused(door.post("/v1/experiments", content=body, headers=JSON), 400)

    def test_a_whole_character_from_its_halves(self, sqlite_api: TestClient) -> None:
        body = json.dumps(SPEC | {"name": "\U0001f333"})
        assert "\\ud83c" in body
        assert sqlite_api.post("/v1/experiments", content=body, headers=JSON).json()["name"] == "\U0001f333"

    @pytest.mark.parametrize("body", [nested(21), nested(25_000), b"[" * 100_000, b"[" * 30_000 + b"]" * 30_000])
    def test_too_deep(self, door: TestClient, body: bytes) -> None:
        detail = refused(door.post("/v1/experiments", content=body, headers=JSON), 400)
        assert "nested deeper than 20 levels" in detail or "not JSON" in detail

    def test_twenty_levels_are_not_too_deep(self, door: TestClient) -> None:
        refused(door.post("/v1/experiments", content=nested(20), headers=JSON), 422)

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
    def test_other_encodings_are_read_or_refused(self, sqlite_api: TestClient, encoding: str) -> None:
        body = json.dumps(SPEC).encode(encoding)
        assert sqlite_api.post("/v1/experiments", content=body, headers=JSON).status_code in (201, 400)


class TestType:
    @pytest.mark.parametrize(
        "kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml", "application/jsonx", ""]
    )
    def test_only_json(self, door: TestClient, kind: str) -> None:
        response = door.post("/v1/experiments", content=json.dumps(SPEC), headers={"Content-Type": kind})
        assert "application/json" in refused(response, 415)

    def test_no_type(self, door: TestClient) -> None:
        refused(door.post("/v1/experiments", content=json.dumps(SPEC).encode()), 415)

    @pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
    def test_json(self, sqlite_api: TestClient, kind: str) -> None:
        response = sqlite_api.post("/v1/experiments", content=json.dumps(SPEC), headers={"Content-Type": kind})
        assert response.status_code == 201

    def test_an_empty_body(self, door: TestClient) -> None:
        for headers in ({}, JSON):
            assert refused(door.post("/v1/experiments", headers=headers), 422) == "body: is required"

    def test_a_body_where_none_is_wanted_is_looked_at_all_the_same(self, sqlite_api: TestClient) -> None:
        created = sqlite_api.post("/v1/experiments", json=SPEC).json()
        response = sqlite_api.post(f"/v1/experiments/{created['id']}/cancel", content="{", headers=JSON)
        assert response.status_code == 400
        assert sqlite_api.get(f"/v1/experiments/{created['id']}").json()["state"] == "queued"


@pytest.mark.parametrize(
    ("path", "kind", "come"),
    [
        ("/v1/experiments", b"application/yaml", b"name: y\nbase: {dataset: digits, model: small-cnn}\n"),
        ("/v1/experiments/1/clone", b"application/json", b""),
    ],
)
def test_what_is_cut_off_is_not_taken_for_the_whole(
    sqlite_api: TestClient, path: str, kind: bytes, come: bytes
) -> None:
    """The first lines of a document of YAML are one; a body that may be left out is not left out by who is cut off."""
    assert sqlite_api.post("/v1/experiments", json=SPEC).status_code == 201
    messages = chain([{"type": "http.request", "body": come, "more_body": True}], repeat({"type": "http.disconnect"}))
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"testserver"), (b"content-type", kind), (b"content-length", b"900")]
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(sqlite_api.app(scope, receive, send))  # type: ignore[arg-type]
    assert sent == []
    assert len(sqlite_api.get("/v1/experiments").json()["items"]) == 1


def test_thousands_of_wrong_values_get_a_short_answer(door: TestClient) -> None:
    response = door.post("/v1/experiments", json=SPEC | {"grid": {"rank": [0] * 15_000}})
    assert refused(response, 422).startswith("15000 fields are wrong: grid.rank[0], ")
    assert [error["field"] for error in response.json()["errors"]] == [f"grid.rank[{index}]" for index in range(100)]
    assert len(response.content) < 20_000


def test_the_field_of_a_number_that_is_none_is_named(door: TestClient) -> None:
    body = b'{"name": "x", "base": {"dataset": "digits"}, "grid": {"delta": [1.0, NaN]}}'
    response = door.post("/v1/experiments", content=body, headers=JSON)
    assert refused(response, 400).startswith("grid.delta[1]: NaN is not a JSON number")
    assert [error["field"] for error in response.json()["errors"]] == ["grid.delta[1]"]
