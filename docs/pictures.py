"""Takes the pictures of the pages in docs/images, each in light and in dark, from a service that runs.

    python docs/pictures.py [--url http://127.0.0.1:8000] [--experiment N] [--only NAME ...] [--into FOLDER]

Without an experiment it posts one of its own, which takes some minutes on two cores, and waits for it. It needs
Playwright and Debian's Chromium, as the tests of the pages do. A console error, or a page that is not there, ends it
with code 1.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from service.client import Client

CHROMIUM = "/usr/bin/chromium"
WIDTH, HEIGHT = 1280, 900
SPEC: dict[str, Any] = {
    "name": "ranks and frames on digits",
    "tags": ["pictures"],
    "base": {
        "dataset": "digits",
        "model": "small-cnn",
        "layer": "tt",
        "constraint": "clip",
        "clipping": {"every": 20},
        "training": {"epochs": 12, "lr": 0.1, "spectra_every": 2},
        "evaluation": {
            "attack": "autoattack",
            "attack_images": 100,
            "corruptions": "generated",
            "corruption_images": 50,
            "certified": True,
            "lipschitz": "ascent",
            "lipschitz_images": 100,
        },
    },
    "grid": {"rank": [2, 4, 8], "lambda_ort": [0.1, 1.0, 10.0], "delta": [1.0], "seed": [0, 1]},
}
PAGES = {
    "experiments": "/",
    "experiment": "/experiments/{experiment}",
    "trials": "/trials",
    "curves": "/curves?trials={trials}",
    "trial": "/trials/{trial}",
    "trial-result": "/trials/{trial}#evaluated",
    "trial-spectra": "/trials/{trial}#singular-values",
    "trial-robustness": "/trials/{trial}#robustness",
    "trial-calibration": "/trials/{trial}#calibration",
    "trial-resources": "/trials/{trial}#resources",
    "compare": "/compare?trials={trials}",
    "leaderboards": "/leaderboards",
    "leaderboard": "/leaderboards/{dataset}",
    "table": "/tables/senderovich2022/table2",
    "figure": "/figures/senderovich2022/lipschitz",
    "presets": "/presets",
    "new-experiment": "/submit",
    "pool": "/pool",
}
"""By the name of its picture: the address of a page."""
# When every picture in sight is drawn and nothing is being read for a part.
SETTLED = """
() => !document.querySelector("[aria-busy=true]") && [...document.querySelectorAll(
  ".matrix-figure, .curves-figure, .trial-curves, .fans-figure, .values-figure, .resources-figure, .plane-figure,"
  + ".picture"
)].every(one => one.dataset.drawn !== undefined || !one.checkVisibility())
"""
MOST_SECONDS = 20


def addresses(client: Client, experiment: int) -> dict[str, str]:
    """The pages' addresses, with the best trial of an experiment and the first ones of it."""
    results = {trial.id: trial.result.accuracy for trial in client.trials(experiment) if trial.result is not None}
    best = max(results, key=lambda trial: results[trial])
    known = {
        "experiment": str(experiment),
        "trial": str(best),
        "trials": ",".join(str(trial) for trial in list(results)[:8:2]),
        "dataset": client.experiment(experiment).spec["base"]["dataset"],
    }
    return {name: address.format_map(known) for name, address in PAGES.items()}


def take(browser: Browser, address: str, file: Path, scheme: str) -> list[str]:
    """Takes a picture of what is seen first; what the page complained of."""
    said: list[str] = []
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    answer = page.goto(address)
    if answer is not None and not answer.ok:
        said.append(f"it answers {answer.status}")
    end = time.monotonic() + MOST_SECONDS
    page.wait_for_timeout(300)
    while not page.evaluate(SETTLED) and time.monotonic() < end:
        page.wait_for_timeout(100)
    page.wait_for_timeout(300)
    page.screenshot(path=file)
    page.close()
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(128).save(file, optimize=True)
    return said


def take_all(browser: Browser, wanted: dict[str, str], into: Path) -> dict[Path, list[str]]:
    """Takes pictures of addresses by name, in light and in dark, and says of each how large it is: what pages said."""
    found = {}
    for name, address in wanted.items():
        for scheme, ending in (("light", ""), ("dark", "-dark")):
            file = into / f"{name}{ending}.png"
            found[file] = take(browser, address, file, scheme)
            print(f"{file.name:28} {file.stat().st_size // 1024:4} KiB  {address}", *found[file], flush=True)
    return found


def main() -> int:
    """Takes them, says how large each is, and what its page complained of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--experiment", type=int, help="one that has succeeded")
    parser.add_argument("--only", nargs="+", choices=sorted(PAGES), default=list(PAGES))
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "images")
    options = parser.parse_args()
    with Client(options.url) as client, sync_playwright() as playwright:
        experiment = options.experiment
        if experiment is None:
            experiment = client.submit(SPEC).id
            for seen in client.watch(experiment):
                sys.stdout.write(f"\rexperiment {experiment}: {seen.state}, {seen.progress.epochs_done} epochs done")
            print(flush=True)
        found = addresses(client, experiment)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        wanted = {name: options.url + found[name] for name in options.only}
        said = take_all(browser, wanted, options.into)
        browser.close()
    return int(any(said.values()))


if __name__ == "__main__":
    sys.exit(main())
