"""A browser, and a service on a database that a grid half done fills. Skipped where there is no browser, with why."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from service.database.engine import Database
from service.main import create_app
from service.settings import Settings
from tests import grids

CHROMIUM = "/usr/bin/chromium"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is `browser` and starts a service."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("browser")
            item.add_marker("machinery")
            item.add_marker("slow")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, without a window. Playwright's event loop must not run while other tests do."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is not there: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Site:
    """A running service and its database."""

    url: str
    database: Database
    data_dir: Path
    experiment: int = 1


@contextmanager
def served(file: Path) -> Iterator[Site]:
    """The service on a SQLite database, at a free port."""
    url = f"sqlite:///{file}"
    listener = socket.create_server(("127.0.0.1", 0))
    data_dir = file.parent / "data"
    application = create_app(Settings(database_url=url, data_dir=data_dir, host="127.0.0.1"))
    process = uvicorn.Server(uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
    thread.start()
    while not process.started:
        time.sleep(0.01)
    database = Database(url)
    try:
        yield Site(f"http://127.0.0.1:{listener.getsockname()[1]}", database, data_dir)
    finally:
        database.close()
        process.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def filled(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with an experiment of 100 trials: 82 are over, 18 run."""
    file = tmp_path_factory.mktemp("filled") / "ttsv.db"
    shutil.copyfile(sqlite_template, file)
    database = Database(f"sqlite:///{file}")
    grids.fill(database, 100, epochs=80)
    database.write(grids.machines)
    database.close()
    return file


@pytest.fixture(scope="session")
def site(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service for tests that only read."""
    file = tmp_path_factory.mktemp("site") / "ttsv.db"
    shutil.copyfile(filled, file)
    with served(file) as running:
        yield running


@pytest.fixture
def live(filled: Path, tmp_path: Path) -> Iterator[Site]:
    """A service of one's own, for tests that change something."""
    file = tmp_path / "ttsv.db"
    shutil.copyfile(filled, file)
    database = Database(f"sqlite:///{file}")
    database.write(grids.machines)  # heard of just now, however long ago the copy was made
    database.close()
    with served(file) as running:
        yield running


@dataclass
class Tab:
    """A page, with everything that it asked for and complained of."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def go(self, address: str) -> None:
        """Opens another page, whatever part of it the address names."""
        self.page.goto("about:blank")
        self.page.goto(address)

    def until(self, expression: str, argument: Any = None) -> None:
        """Waits until it is true in the page. (Playwright's own waiting asks for `eval`, which the policy forbids.)"""
        end = time.monotonic() + 20
        while not self.page.evaluate(expression, argument):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(50)


@pytest.fixture
def browse(chromium: Any) -> Iterator[Callable[..., Tab]]:
    """Opens a page; whatever the console says of errors, those of the policy among them, fails the test."""
    opened: list[tuple[Any, Tab]] = []

    def browse(address: str, *, scheme: str = "light", width: int = 1280, script: bool = True) -> Tab:
        context = chromium.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": 900},
            java_script_enabled=script,
            reduced_motion="reduce",
        )
        tab = Tab(context.new_page())
        tab.page.set_default_timeout(20_000)
        tab.page.on("console", lambda said: tab.complaints.append(said.text) if said.type == "error" else None)
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.page.on("request", lambda request: tab.asked.append(request.url))
        opened.append((context, tab))
        tab.page.goto(address)
        return tab

    yield browse
    complaints = [complaint for _, tab in opened for complaint in tab.complaints]
    for context, _ in opened:
        context.close()
    assert complaints == []
