"""The pages in headless Chromium: how soon an experiment and its matrix are there, and what those who watch it cost.

    python benchmarks/pages.py [--views 7] [--watchers 4] [--seconds 60] [--only sqlite] [--quick]

On SQLite and on PostgreSQL (the server that the tests use) in turn: fills a database with a grid of 1,000 and one of
10,000 trials, half done, and starts the API as a process of its own. A first view is cold, of a browser that knows
nothing, and warm, of one that looked at the other grid before; it ends when the matrix is drawn. Then pages of the
larger grid stay open while nothing changes, and while a trial ends each second. Prints each figure beside its bound and
fails if a bound is missed. The record is `pages`; --quick takes 100 trials twice. It needs Playwright and Debian's
Chromium, as the tests of the pages do, and says where these are not. Figures of a busy machine are those of its load.
"""

import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hosting import cpu_seconds, databases, served
from measuring import keep, parser

ROOT = Path(__file__).parents[1]
CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--in-process-gpu")
BOUNDS = {
    "first view of 1,000 trials": (500, "ms"),
    "first view of 10,000 trials": (1000, "ms"),
    "beside the libraries, 1,000 trials": (300, "KB"),
    "beside the libraries, 10,000 trials": (300, "KB"),
    "received while nothing changes": (10, "KB a minute"),
    "processor per watcher, nothing changes": (5, "% of a core"),
    "processor per watcher, a trial ends each second": (5, "% of a core"),
}
SIZES = ("1,000", "10,000")
SETTLED = 3.0
"""Seconds after which a page that was opened asks for nothing more by itself."""
DRAWN = ".matrix-figure[data-drawn]"
NOTE = """
new MutationObserver(() => {
  if (window.drawnAt === undefined && document.querySelector(".matrix-figure[data-drawn]")) {
    window.drawnAt = performance.now();
  }
}).observe(document, {subtree: true, childList: true, attributes: true, attributeFilter: ["data-drawn"]});
"""


class Browser:
    """Chromium on the pages of one service."""

    def __init__(self, chromium: Any, url: str, process: int) -> None:
        self.chromium, self.url, self.process = chromium, url, process

    def new(self) -> Any:
        """A page that shares nothing with others, and notes when a matrix is drawn."""
        context = self.chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.add_init_script(NOTE)
        return page

    def view(self, page: Any, experiment: int) -> dict[str, float]:
        """Opens an experiment: until its matrix is drawn, and what that took of the network and of the server."""
        addresses: dict[str, str] = {}
        received: dict[str, float] = {}
        network = page.context.new_cdp_session(page)
        network.send("Network.enable")
        network.on(
            "Network.requestWillBeSent", lambda said: addresses.update({said["requestId"]: said["request"]["url"]})
        )
        network.on(
            "Network.loadingFinished", lambda said: received.update({said["requestId"]: said["encodedDataLength"]})
        )
        page.goto("about:blank")
        used = cpu_seconds(self.process)
        page.goto(f"{self.url}/experiments/{experiment}", wait_until="commit")
        page.wait_for_selector(DRAWN, state="attached")
        page.wait_for_timeout(300)
        used = cpu_seconds(self.process) - used
        milliseconds = page.evaluate("() => window.drawnAt")
        network.detach()
        own = sum(size for name, size in received.items() if "/static/lib/" not in addresses.get(name, ""))
        return {
            "ms": milliseconds,
            "own_kb": own / 1000,
            "all_kb": sum(received.values()) / 1000,
            "cpu_ms": 1000 * used,
        }

    def views(self, experiment: int, other: int, count: int, *, warm: bool) -> dict[str, float]:
        """The best and the median of several first views, each of another browser; warm ones know another grid."""
        found = []
        for _ in range(count):
            page = self.new()
            if warm:
                self.view(page, other)
            found.append(self.view(page, experiment))
            page.context.close()
        times = [one["ms"] for one in found]
        sizes = {
            name: round(statistics.median(one[name] for one in found), 1) for name in ("own_kb", "all_kb", "cpu_ms")
        }
        return {"best_ms": min(times), "median_ms": statistics.median(times), **sizes}

    def watched(self, pages: list[Any], seconds: float) -> dict[str, float]:
        """What these pages receive in a time, each on average, and the server's share of a core meanwhile."""
        received: list[float] = []
        asked: list[str] = []
        listening = []
        for page in pages:
            network = page.context.new_cdp_session(page)
            network.send("Network.enable")
            network.on("Network.dataReceived", lambda said: received.append(said["encodedDataLength"]))
            network.on("Network.requestWillBeSent", lambda said: asked.append(said["request"]["url"]))
            listening.append(network)
        used, began = cpu_seconds(self.process), time.perf_counter()
        while (taken := time.perf_counter() - began) < seconds:
            if pages:
                pages[0].wait_for_timeout(200)
            else:
                time.sleep(0.2)
        used = cpu_seconds(self.process) - used
        for network in listening:
            network.detach()
        each = 60 / taken / max(1, len(pages))
        return {
            "percent": 100 * used / taken,
            "kb_a_minute": sum(received) / 1000 * each,
            "asked_a_minute": len(asked) * each,
        }


def watchers(browser: Browser, url: str, experiment: int, count: int, seconds: float) -> dict[str, Any]:
    """What a page of a grid costs that stays open, and what each of several does while trials end."""
    found: dict[str, Any] = {}

    def ending() -> subprocess.Popen[bytes]:
        wanted = ["--end", str(experiment), "--seconds", str(seconds + 2 * SETTLED)]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.grids", url, *wanted], cwd=ROOT, stdout=subprocess.DEVNULL
        )

    pages: list[Any] = []
    for name, many, ends in (
        ("nobody, quiet", 0, False),
        ("nobody", 0, True),
        ("one, quiet", 1, False),
        ("all", count, True),
    ):
        while len(pages) < many:
            pages.append(browser.new())
            browser.view(pages[-1], experiment)
        time.sleep(SETTLED)
        process = ending() if ends else None
        time.sleep(SETTLED if ends else 0)
        found[name] = browser.watched(pages, seconds)
        if process is not None:
            process.wait()
    for page in pages:
        page.context.close()
    found["percent each, quiet"] = max(0.0, found["one, quiet"]["percent"] - found["nobody, quiet"]["percent"])
    found["percent each"] = max(0.0, found["all"]["percent"] - found["nobody"]["percent"]) / count
    return found


def measure(browser: Browser, url: str, experiments: Mapping[str, int], chosen: Any) -> dict[str, Any]:
    """All figures of one database."""
    found: dict[str, Any] = {}
    for size, other in (SIZES, SIZES[::-1]):
        for how in ("cold", "warm"):
            found[f"{size}, {how}"] = browser.views(
                experiments[size], experiments[other], chosen.views, warm=how == "warm"
            )
    return found | {"watched": watchers(browser, url, experiments["10,000"], chosen.watchers, chosen.seconds)}


def verdicts(found: Mapping[str, Any]) -> dict[str, float]:
    """The figures that have bounds. Of first views it is the median of the cold ones."""
    values: dict[str, float] = {}
    for size in SIZES:
        values[f"first view of {size} trials"] = found[f"{size}, cold"]["median_ms"]
        values[f"beside the libraries, {size} trials"] = found[f"{size}, cold"]["own_kb"]
    watched = found["watched"]
    values["received while nothing changes"] = watched["one, quiet"]["kb_a_minute"]
    values["processor per watcher, nothing changes"] = watched["percent each, quiet"]
    values["processor per watcher, a trial ends each second"] = watched["percent each"]
    return values


def _report(kind: str, found: Mapping[str, Any]) -> list[str]:
    for name, view in found.items():
        if name != "watched":
            print(
                f"{kind:9} {f'view of {name}':30} median {view['median_ms']:7.0f} ms, best {view['best_ms']:6.0f} ms, "
                f"{view['own_kb']:6.1f} KB and libraries of {view['all_kb'] - view['own_kb']:6.1f} KB, "
                f"server {view['cpu_ms']:5.0f} ms"
            )
    for name, watched in found["watched"].items():
        if isinstance(watched, dict):
            print(
                f"{kind:9} {f'watched by {name}':30} server {watched['percent']:5.2f} % of a core, each page "
                f"{watched['kb_a_minute']:7.2f} KB and {watched['asked_a_minute']:4.1f} requests a minute"
            )
    missed = []
    for name, value in verdicts(found).items():
        bound, unit = BOUNDS[name]
        kept = value <= bound
        print(f"{kind:9} {name:48} {value:8.2f}, bound {bound:4} {unit}: {'kept' if kept else 'missed'}", flush=True)
        missed += [] if kept else [f"{kind} {name}"]
    return missed


def filled(url: str, sizes: tuple[int, ...]) -> dict[str, int]:
    """A database with these grids: the id of each."""
    found = {}
    for name, size in zip(SIZES, sizes, strict=True):
        command = [sys.executable, "-m", "tests.grids", url, str(size)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        found[name] = int(done.stdout.split()[-1])
    return found


def main() -> int:
    shared = parser(__doc__)
    shared.add_argument("--views", type=int, default=7)
    shared.add_argument("--watchers", type=int, default=4)
    shared.add_argument("--seconds", type=float, default=60, help="of watching, four times for each database")
    shared.add_argument("--only", choices=["sqlite", "postgres"])
    chosen = shared.parse_args()
    sizes = (1000, 10_000)
    if chosen.quick:
        chosen.views, chosen.watchers, chosen.seconds, sizes = 1, 2, 1.0, (100, 100)
    playwright: Any = None
    with suppress(ImportError):
        from playwright import sync_api as playwright
    if playwright is None or not CHROMIUM.exists():
        print(f"left out: needs Playwright (pip install playwright) and {CHROMIUM} (apt-get install chromium)")
        return 0
    figures: dict[str, Any] = {}
    missed: list[str] = []
    about = {"playwright": version("playwright")}
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=str(CHROMIUM), args=[*OPTIONS])
        about["chromium"] = chromium.version
        for kind in ("sqlite", "postgres"):
            if chosen.only not in (None, kind):
                continue
            with tempfile.TemporaryDirectory() as name, databases(kind, Path(name)) as url:
                experiments = filled(url, sizes)
                with served(url, Path(name)) as (client, process):
                    browser = Browser(chromium, str(client.base_url), process)
                    figures[kind] = measure(browser, url, experiments, chosen)
            missed += _report(kind, figures[kind])
        chromium.close()
    if chosen.only is None and not chosen.quick:
        command = shlex.join(["python", "benchmarks/pages.py", *sys.argv[1:]])
        keep("pages", command, {"versions": about, "figures": figures, "missed": missed})
    print("missed: " + ", ".join(missed) if missed else "every bound is kept")
    return int(bool(missed) and not chosen.quick)


if __name__ == "__main__":
    sys.exit(main())
