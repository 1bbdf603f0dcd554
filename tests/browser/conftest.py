"""A browser, and a service on a database that a grid half done fills. Skipped where there is no browser, with why."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import uvicorn

from service.database.engine import Database
from service.main import create_app
from service.settings import Settings
from tests import grids

# Debian's packages; the first draws as the second does, without a user's interface, at three quarters of the cost.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
# There is no GPU to draw with, and processes that share the work of one page cost more than they help.
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--in-process-gpu",
    "--num-raster-threads=1",
    "--enable-features=NetworkServiceInProcess2",
)
PICTURES = (
    ".matrix-figure, .curves-figure, .trial-curves, .fans-figure, .values-figure, .resources-figure, .plane-figure,"
    " .picture"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is `browser` and starts a service."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker("browser")
            item.add_marker("machinery")
            item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the browser after the last of this folder's tests: Playwright's event loop must not run while others do."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        stash = item.session.stash
        if _BROWSER in stash:
            stash[_BROWSER].close()
            del stash[_BROWSER]


_PORTS: list[int] = []
"""Where services were heard that have ended: of scripts that come from there a browser keeps what it made of them."""


def _listener() -> socket.socket:
    """Listens where a service was heard before, else at a free port."""
    while _PORTS:
        with suppress(OSError):  # somebody else has it now
            return socket.create_server(("127.0.0.1", _PORTS.pop()))
    return socket.create_server(("127.0.0.1", 0))


@dataclass
class Site:
    """A running service and its database."""

    url: str
    database: Database
    data_dir: Path
    experiment: int = 1


@contextmanager
def served(file: Path, *, keys: bool = False) -> Iterator[Site]:
    """The service on a SQLite database, which asks for keys or does not."""
    url = f"sqlite:///{file}"
    listener = _listener()
    port = listener.getsockname()[1]
    data_dir = file.parent / "data"
    application = create_app(Settings(database_url=url, data_dir=data_dir, host="127.0.0.1", require_keys=keys))
    process = uvicorn.Server(uvicorn.Config(application, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=process.run, kwargs={"sockets": [listener]})
    thread.start()
    while not process.started:
        time.sleep(0.01)
    database = Database(url)
    try:
        yield Site(f"http://127.0.0.1:{port}", database, data_dir)
    finally:
        database.close()
        process.should_exit = True
        thread.join()
        _PORTS.append(port)


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
    """A page, with everything that it asked for and complained of; a dialog that opens by itself is a complaint."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    asked_last: float = 0.0

    def listen(self) -> Callable[[], None]:
        """Begins to note what the page says and asks for; what is returned ends that."""

        def opened(dialog: Any) -> None:
            self.complaints.append(f"a dialog: {dialog.message}")
            dialog.dismiss()

        def said(message: Any) -> None:
            # What browsers advise tests that look at pixels is no warning of a page's own scripts.
            if message.type == "error" or (message.type == "warning" and message.location["url"]):
                self.complaints.append(message.text)

        def asks(request: Any) -> None:
            self.asked.append(request.url)
            self.asked_last = time.monotonic()

        listeners: dict[str, Callable[[Any], None]] = {
            "console": said,
            "pageerror": lambda error: self.complaints.append(str(error)),
            "request": asks,
            "dialog": opened,
        }
        for event, listener in listeners.items():
            self.page.on(event, listener)

        def end() -> None:
            for event, listener in listeners.items():
                self.page.remove_listener(event, listener)

        return end

    def go(self, address: str) -> None:
        """Opens another page, whatever part of it the address names."""
        if address.partition("#")[0] == self.page.url.partition("#")[0]:
            self.page.goto("about:blank")  # else it would be scrolled alone
        self.page.goto(address)

    def until(self, expression: str, argument: Any = None) -> None:
        """Waits until it is true in the page. (Playwright's own waiting asks for `eval`, which the policy forbids.)"""
        end = time.monotonic() + 60
        pause = 10.0
        while not self.page.evaluate(expression, argument):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(pause)
            pause = min(1.3 * pause, 100)  # to ask costs more than to wait

    def to_screen(self, pixels: float) -> None:
        """Moves the window, of a fresh page, to a screen of so many pixels to a point: all in sight is as fine."""
        size = self.page.viewport_size
        # Chromium tells of a screen that is made up only where the window's size is another, too.
        values = {**size, "height": size["height"] + int(4 * pixels), "deviceScaleFactor": pixels, "mobile": False}
        self.page.context.new_cdp_session(self.page).send("Emulation.setDeviceMetricsOverride", values)
        self.until(
            "pixels => devicePixelRatio === pixels && [...document.querySelectorAll('.canvas canvas, .uplot canvas')]"
            ".every(one => !one.checkVisibility() || Math.abs(one.width - one.clientWidth * pixels) < 1)",
            pixels,
        )

    def settle(self) -> None:
        """Waits until every picture in sight is drawn, nothing is being read for a part, and that stands there."""
        self.until(
            "pictures => !document.querySelector('[aria-busy=true]') && [...document.querySelectorAll(pictures)]"
            ".every(one => one.dataset.drawn !== undefined || !one.checkVisibility())",
            PICTURES,
        )
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        )

    def ever_less(self, asked: str, wanted: Callable[[], Any]) -> None:
        """Has what is asked for unanswered, once somebody wants it: each time it is asked for after a longer pause."""
        times: list[float] = []

        def none(route: Any) -> None:
            times.append(time.monotonic())
            route.abort()

        self.page.route(asked, none)
        wanted()
        end = time.monotonic() + 30
        while len(times) < 3:
            assert time.monotonic() < end, times
            self.page.wait_for_timeout(100)
        self.page.unroute(asked)
        assert times[2] - times[1] > 1.5 * (times[1] - times[0]), times

    def saved(self, button: str) -> tuple[str, bytes]:
        """Presses a button that saves a file: its name and content. A picture that is no XML fails, as an SVG."""
        with self.page.expect_download() as download:
            self.page.locator(button).click()
        name, content = download.value.suggested_filename, download.value.path().read_bytes()
        if name.endswith(".svg"):
            assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
        return name, content

    def quiet(self, seconds: float) -> None:
        """Waits for so long a time in which the page asks for nothing; one that never leaves off fails."""
        began = time.monotonic()
        while (left := max(began, self.asked_last) + seconds - time.monotonic()) > 0:
            assert time.monotonic() < began + 60, self.asked[-5:]
            self.page.wait_for_timeout(1000 * left + 1)


@dataclass
class Pages:
    """The pages of a browser, with scripts and without, lent to one test after the other.

    What draws a page, a process, takes longer to start than the page takes to draw, and has each script compiled.
    """

    browser: Any
    idle: dict[bool, list[Any]] = field(default_factory=lambda: {True: [], False: []})

    def new(self, *, script: bool) -> Any:
        """Another page, which shares nothing with those that are there."""
        context = self.browser.new_context(java_script_enabled=script, reduced_motion="reduce")
        page = context.new_page()
        page.set_default_timeout(60_000)
        return page

    def take(self, *, script: bool) -> Any:
        """A page that no test uses now."""
        return self.idle[script].pop() if self.idle[script] else self.new(script=script)

    def give_back(self, page: Any, *, script: bool) -> None:
        """Leaves a page as a new one is: nothing open, no cookies, nothing held back."""
        page.unroute_all(behavior="ignoreErrors")
        page.goto("about:blank")
        page.emulate_media(media="null")
        page.context.clear_cookies()
        self.idle[script].append(page)


_BROWSER = pytest.StashKey[ExitStack]()
"""What ends the browser that is there."""
_PAGES = pytest.StashKey[Pages]()


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Pages:
    """The pages of Debian's Chromium, without a window, for all tests of this folder that follow each other."""
    stash = request.session.stash
    if _BROWSER not in stash:
        reason = "Playwright is not installed: pip install playwright"
        sync_api = pytest.importorskip("playwright.sync_api", reason=reason)
        if CHROMIUM is None:
            pytest.skip("there is no Chromium: apt-get install chromium-headless-shell, or chromium")
        end = ExitStack()
        playwright = end.enter_context(sync_api.sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*OPTIONS])
        end.callback(browser.close)
        stash[_BROWSER], stash[_PAGES] = end, Pages(browser)
    return stash[_PAGES]


@pytest.fixture
def browse(pages: Pages) -> Iterator[Callable[..., Tab]]:
    """Opens a page; whatever the console says of errors, those of the policy among them, fails the test.

    One that is `fresh` has nothing kept from pages that were seen before, and is closed.
    """
    opened: list[tuple[Tab, Callable[[], None], bool, bool]] = []

    def browse(
        address: str, *, scheme: str = "light", width: int = 1280, script: bool = True, fresh: bool = False
    ) -> Tab:
        page = pages.new(script=script) if fresh else pages.take(script=script)
        tab = Tab(page)
        opened.append((tab, tab.listen(), script, fresh))
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(address)
        return tab

    yield browse
    complaints = [complaint for tab, _, _, _ in opened for complaint in tab.complaints]
    for tab, end, script, fresh in opened:
        end()
        if fresh:
            tab.page.context.close()
        else:
            pages.give_back(tab.page, script=script)
    assert complaints == []
