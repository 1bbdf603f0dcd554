"""The page of the API's operations: whole without any other host."""

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from service.access import keys
from service.access.security import Scope, installation_secret, new_key
from service.database.engine import Database
from service.main import create_app
from service.settings import Settings

TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class Named(HTMLParser):
    """The addresses that a page names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.files: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = [value for name, value in attrs if name in ("href", "src", "action") and value]
        self.addresses += found
        if tag in ("script", "link", "img"):
            self.files += found


def test_it_names_no_other_host(sqlite_api: TestClient) -> None:
    answer = sqlite_api.get("/docs/try", headers={"Accept": "text/html"})
    assert answer.status_code == 200
    assert "//" not in answer.text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'" in policy
    assert "unsafe" not in policy
    found = Named(answer.text)
    assert "/openapi.json" in found.addresses
    assert all(address.startswith(("/", "#")) for address in found.addresses)
    assert {"/static/style.css", "/static/swagger-ui/swagger-ui.css", "/static/swagger-ui/swagger-ui-bundle.js"} <= set(
        found.files
    )
    for name in found.files:
        file = sqlite_api.get(name)
        assert file.status_code == 200, name
        assert file.headers["content-type"].startswith(TYPES[name.rpartition(".")[2]])
        assert file.headers["x-content-type-options"] == "nosniff"


def test_every_operation_is_on_a_page_of_ours(sqlite_api: TestClient) -> None:
    """With its parameters and an example of what is sent and answered, without a script."""
    document = sqlite_api.get("/openapi.json").json()
    page = unescape(sqlite_api.get("/docs", headers={"Accept": "text/html"}).text)
    parts = {found[1]: found[2] for found in re.finditer(r'<details[^>]* id="(\w+)">(.*?)</details>', page, re.DOTALL)}
    count = 0
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            count += 1
            part = parts.pop(operation["operationId"])
            assert f"<code>{method.upper()} {path}</code> {operation['summary'].replace('`', '')}" in part
            for parameter in operation.get("parameters", []):
                assert f"<dt><code>{parameter['name']}</code> " in part, (path, parameter["name"])
            assert "<pre" in part, path
            if "requestBody" in operation:
                assert "Sent as application/json, for example" in part
    assert parts == {}
    assert count > 40


def test_what_it_loads_loads_nothing_from_elsewhere(sqlite_api: TestClient) -> None:
    css = sqlite_api.get("/static/swagger-ui/swagger-ui.css").text
    assert re.findall(r"@import|url\((?!\"?'?data:)", css) == []
    script = sqlite_api.get("/static/swagger-ui/swagger-ui-bundle.js").text
    assert "SwaggerUIBundle" in script[:1000]
    start = sqlite_api.get("/static/api.js").text
    assert 'url: "/openapi.json"' in start
    assert "http" not in start
    assert sqlite_api.get("/openapi.json").json()["openapi"].startswith("3.1")


def test_there_is_one_such_page(sqlite_api: TestClient) -> None:
    assert sqlite_api.get("/redoc").status_code == 404
    assert sqlite_api.get("/docs/oauth2-redirect").status_code == 404
    assert sqlite_api.get("/static/swagger-ui/../core.py").status_code == 404
    assert sqlite_api.get("/static/swagger-ui/%2e%2e/core.py").status_code == 404


@pytest.mark.parametrize("valid", [False, True])
def test_both_are_open_and_know_who_signed_in(sqlite_url: str, tmp_path: Path, valid: bool) -> None:
    settings = Settings(database_url=sqlite_url, data_dir=tmp_path / "data", host="127.0.0.1", require_keys=True)
    settings.data_dir.mkdir(exist_ok=True)
    key = new_key(installation_secret(settings.data_dir))
    database = Database(sqlite_url)

    def make(session: Session) -> None:
        project = keys.create_project(session, "vision")
        keys.add_key(session, project.id, key, owner="ada", scopes={Scope.READ})

    database.write(make)
    database.close()
    with TestClient(create_app(settings), headers={"Accept": "text/html"}, follow_redirects=False) as site:
        for path in ("/docs", "/docs/try"):
            site.cookies.clear()
            before = site.get(path)
            assert before.status_code == 200
            assert "Sign out" not in before.text
            site.cookies.set("ttsv_key", key.text if valid else "ttsv_x")
            page = site.get(path)
            assert page.status_code == 200
            assert (">ada<" in page.text, "Sign out" in page.text) == (valid, valid)
