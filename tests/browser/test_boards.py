"""Leaderboards and lists of trials of many kinds in a browser: columns in sight, the plane, the paper's values."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Trial
from service.experiments.submission import Draft, submit
from service.paper.presets import PAPER, preset_spec
from service.specs.grid import ExperimentSpec, expand_grid
from tests import grids
from tests.browser.conftest import Site, Tab, served

CUT = "one => one.scrollWidth - one.clientWidth"


def _searched(rng: random.Random) -> ExperimentSpec:
    """Trials that differ in ten fields, as a search makes them."""
    variants = [
        {
            "rank": rng.choice([2, 4, 8]),
            "lambda_ort": 10 ** -rng.uniform(1, 4),
            "delta": 1 + rng.random(),
            "training": {"lr": 10 ** -rng.uniform(1, 3), "weight_decay": 1e-3 * rng.random(), "epochs": 2 + index % 5},
            "augmentation": {"flip": rng.random() < 0.5, "pad": rng.choice([0, 2, 4])},
            "clipping": {"every": rng.choice([10, 50, 100])},
        }
        for index in range(12)
    ]
    base = {"dataset": "digits", "model": "small-cnn", "layer": "tt", "constraint": "clip"}
    return ExperimentSpec(name="Searched", base=base, variants=variants, grid={"seed": [0, 1]})


def _fill(session: Session) -> None:
    """Table 2 of the paper, with a result of each of its cells, and a search."""
    spec = ExperimentSpec.model_validate(preset_spec(f"{PAPER}/table2"))
    made = submit(session, Draft(spec, expand_grid(spec, max_trials=200))).id
    rng = random.Random(3)
    searched = _searched(rng)
    submit(session, Draft(searched, expand_grid(searched, max_trials=200)))
    for trial_id in session.scalars(select(Trial.id).where(Trial.experiment_id == made)).all():
        numbers = {"compression": 1 + 3 * rng.random(), "robust_accuracy": 0.5 + 0.05 * rng.random()}
        grids.finish(session, trial_id, 0.95 + 0.01 * rng.random(), ece=0.02 + 0.01 * rng.random(), **numbers)


@pytest.fixture(scope="module")
def boards(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A grid of VGG-11 (experiment 1), and table 2 of the paper (experiment 2)."""
    file = tmp_path_factory.mktemp("boards") / "ttsv.db"
    shutil.copyfile(filled, file)
    with served(file) as site:
        site.database.write(_fill)
        yield site


class TestColumns:
    @pytest.mark.parametrize("path", ["/trials", "/leaderboards/cifar10", "/leaderboards/cifar10?experiment=2"])
    def test_accuracy_is_in_sight(self, boards: Site, browse: Callable[..., Tab], path: str) -> None:
        page = browse(f"{boards.url}{path}").page
        room = page.locator(".wide").first.bounding_box()
        for heading in page.locator(".wide thead").first.locator("th", has_text="accuracy").all():
            box = heading.bounding_box()
            assert box["x"] + box["width"] <= room["x"] + room["width"]
        assert "Decided by the other fields: " in page.locator("main").inner_text()

    def test_what_is_decided_is_shown_where_it_is_asked_for(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/leaderboards/cifar10?experiment=2").page
        assert page.locator("table[data-fields]").first.get_attribute("data-fields") == "rank,constraint,delta"
        page.locator("a:text-is('All fields as columns')").click()
        fields = page.locator("table[data-fields]").first.get_attribute("data-fields").split(",")
        assert {"rank", "constraint", "delta", "layer", "clipping.rescale"} <= {*fields}

    def test_a_list_of_trials_begins_with_few_fields(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/trials?dataset=digits").page
        headings = page.locator("thead th").all_inner_texts()
        assert headings[-8:] == ["rank", "lambda_ort", "delta", "seed", "epochs", "lr", "weight_decay", "flip"]
        more = page.locator("main p", has_text="more fields differ")
        assert more.inner_text() == "2 more fields differ: pad, clipping.every."
        more.locator("a").click()
        assert len(page.locator("thead th").all_inner_texts()) == len(headings) + 2

    def test_a_wide_window_is_filled(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/trials", width=2560).page
        assert page.locator(".wide").evaluate(CUT) == 0
        assert page.locator("main").evaluate("one => one.clientWidth") > 2500
