"""The libraries with which the pages draw: shipped whole, as they were built, with their licences."""

import gzip
import hashlib
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import service.dashboard
from service.api.http.middleware import Compression

HERE = Path(service.dashboard.__file__).parent
SHIPPED = HERE / "static" / "lib"
SUMS = {line.split()[1]: line.split()[0] for line in (SHIPPED / "SHA256SUMS").read_text().splitlines()}


def test_every_file_is_listed_and_as_it_was_built() -> None:
    assert set(SUMS) == {path.name for path in SHIPPED.iterdir()} - {"SHA256SUMS"}
    for name, digest in SUMS.items():
        assert hashlib.sha256((SHIPPED / name).read_bytes()).hexdigest() == digest, f"{name}: run libraries/build.sh"


def test_every_library_is_there_with_its_licence_and_in_the_version_that_the_script_pins() -> None:
    text = (SHIPPED / "LICENSES.txt").read_text()
    pinned = dict(re.findall(r"\b(uplot|echarts)@([\d.]+)", (HERE / "libraries" / "build.sh").read_text()))
    assert set(pinned) == {"uplot", "echarts"}
    for name, version in pinned.items():
        assert f"{name} {version}\n" in text
        assert version in (SHIPPED / f"{name}.js").read_text()[:200]
    for words in ("Apache License", "The MIT License", "Redistribution and use in source and binary forms", "zrender "):
        assert words in text


def test_nothing_in_them_needs_more_than_the_policy_allows() -> None:
    for path in SHIPPED.glob("*.js"):
        text = path.read_text()
        assert not re.search(r"\beval\(|new Function\b|\bimport\(", text), path.name
        assert "sourceMappingURL" not in text


def test_no_page_loads_anything_from_elsewhere() -> None:
    for path in [*HERE.rglob("*.html"), *HERE.glob("static/*.js"), *HERE.glob("static/*.css")]:
        for found in re.findall(r"(?:src|href|from|import|url)\W{1,3}(https?:)?//", path.read_text()):
            pytest.fail(f"{path.name}: {found}")


@pytest.mark.slow
def test_pages_and_scripts_come_compressed_to_who_takes_it(sqlite_api: TestClient) -> None:
    for path in ("/static/lib/echarts.js", "/static/style.css", "/presets", "/openapi.json"):
        packed = sqlite_api.get(path, headers={"Accept-Encoding": "gzip", "Accept": "text/html"})
        assert packed.headers["content-encoding"] == "gzip", path
        assert "Accept-Encoding" in packed.headers["vary"]
        plain = sqlite_api.get(path, headers={"Accept-Encoding": "identity", "Accept": "text/html"})
        assert "content-encoding" not in plain.headers
        assert plain.content == packed.content
    assert sum(len(gzip.compress(path.read_bytes(), 5)) for path in SHIPPED.glob("*.js")) < 250_000


def test_a_script_is_compressed_once_and_asked_for_again_only_when_it_changed(sqlite_api: TestClient) -> None:
    path, whole = "/static/lib/echarts.js", (SHIPPED / "echarts.js").read_bytes()
    takes = {"Accept-Encoding": "gzip"}
    first = sqlite_api.get(path, headers=takes)
    assert first.content == whole
    assert int(first.headers["content-length"]) < len(whole) / 2  # of bytes that are there, not of a stream
    assert sqlite_api.get(path, headers={**takes, "If-None-Match": first.headers["etag"]}).status_code == 304
    part = sqlite_api.get(path, headers={**takes, "Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole[10:20])
    head = sqlite_api.head(path, headers=takes)
    assert (head.content, head.headers["content-encoding"]) == (b"", "gzip")


def test_logs_and_files_stay_as_they_are() -> None:
    """A log is followed line by line, a file's download goes on where it broke off."""

    async def plain(_request: Request) -> Response:
        return Response("line\n" * 1000, media_type="text/plain")

    async def file(_request: Request) -> Response:
        return Response("{}" * 1000, media_type="application/json")

    routes = [Route("/logs", plain), Route("/v1/artifacts/1", file), Route("/v1/trials", file)]
    client = TestClient(Compression(Starlette(routes=routes)), headers={"Accept-Encoding": "gzip"})
    packed = {
        path: "content-encoding" in client.get(path).headers for path in ("/logs", "/v1/artifacts/1", "/v1/trials")
    }
    assert packed == {"/logs": False, "/v1/artifacts/1": False, "/v1/trials": True}
