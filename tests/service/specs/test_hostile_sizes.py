"""Bodies and grids of any size are refused without being taken in."""

import asyncio
import json
import tracemalloc
from collections.abc import MutableMapping
from typing import Any

from fastapi.testclient import TestClient

from tests.effort import effort

MEGABYTE = 2**20


def test_a_hundred_megabytes_are_not_read(sqlite_api: TestClient) -> None:
    """Straight into the application, as a test client would keep the whole body itself."""
    sent = 0
    answered: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        nonlocal sent
        sent += MEGABYTE
        return {"type": "http.request", "body": b" " * MEGABYTE, "more_body": sent < 100 * MEGABYTE}

    async def send(message: MutableMapping[str, Any]) -> None:
        answered.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/experiments",
        "raw_path": b"/v1/experiments",
        "query_string": b"",
        "headers": [(b"host", b"testserver"), (b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("testserver", 80),
        "client": ("testclient", 1),
    }
    tracemalloc.start()
    seconds = effort(lambda: asyncio.run(sqlite_api.app(scope, receive, send)))  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answered[0]["status"] == 413
    assert sent == MEGABYTE
    assert peak < 20 * MEGABYTE
    assert seconds < 0.3


def test_a_grid_of_a_million_millions_is_counted_not_made(sqlite_api: TestClient) -> None:
    axes = {"seed": 1000, "rank": 1000, "lambda_ort": 1000, "delta": 1000}
    grid = {name: [number + 1 for number in range(length)] for name, length in axes.items()}
    spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt"}, "grid": grid}
    body = json.dumps(spec)
    headers = {"Content-Type": "application/json"}
    sqlite_api.post("/v1/experiments", content=body, headers=headers)  # what is made once is made
    seconds = effort(lambda: sqlite_api.post("/v1/experiments", content=body, headers=headers))
    response = sqlite_api.post("/v1/experiments", content=body, headers=headers)
    tracemalloc.start()
    sqlite_api.post("/v1/experiments", content=body, headers=headers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert response.status_code == 422
    assert "1000000000000" in response.text.replace(",", "").replace("_", "")
    assert peak < 20 * MEGABYTE
    assert seconds < 0.3
