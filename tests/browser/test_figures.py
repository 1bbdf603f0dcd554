"""The paper's figures in a browser: points, hollow marks, what was not run, files, both schemes."""

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Protocol, Trial
from service.experiments.submission import Draft, submit
from service.paper.presets import PAPER, Scale, preset_spec
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests import grids
from tests.browser.accessibility import violations
from tests.browser.conftest import Site, Tab, served
from tests.examples import deep

NAMES = ("vgg", "lipschitz", "speedup", "soc-speedup")


def _posted(session: Session, spec: ExperimentSpec) -> list[int]:
    """An experiment's trials."""
    made = submit(session, Draft(spec, expand_grid(spec, max_trials=200))).id
    query = select(Trial.id).where(Trial.experiment_id == made).order_by(Trial.number)
    return list(session.scalars(query))


@pytest.fixture(scope="module")
def figures(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Of the figure of VGG-19 all but three trials have a result, of its smoke stand-ins (experiment 2) all."""
    file = tmp_path_factory.mktemp("figures") / "ttsv.db"
    shutil.copyfile(sqlite_template, file)
    with served(file) as site:
        record = {"dataset": "cifar10", "split": "test"}
        site.database.write(lambda session: session.add(Protocol(fingerprint=grids.PROTOCOL, record=record)))
        for scale in (Scale.FULL, Scale.SMOKE):
            plain = preset_spec(f"{PAPER}/figure-vgg", scale=scale)
            if scale is Scale.FULL:
                plain["grid"]["seed"] = [3407, 3408, 3409]
            made = site.database.write(partial(_posted, spec=ExperimentSpec.model_validate(plain)))
            for number, trial in enumerate(made[3:] if scale is Scale.FULL else made):
                accuracy = 0.5 + 0.4 * ((number * 37) % 50) / 50
                site.database.write(partial(grids.finish, trial_id=trial, accuracy=accuracy))
        yield site


class TestFigures:
    def test_rows_of_panels_are_printed_one_by_one(self, figures: Site, browse: Callable[..., Tab]) -> None:
        """All five together are higher than a sheet: it would be cut within a panel, behind two that are empty."""
        page = browse(f"{figures.url}/figures/{PAPER}/vgg?experiment=1", width=1031).page
        assert not page.locator(".figure-sheets").is_visible()
        page.emulate_media(media="print")
        rows = page.locator(".figure-sheets svg")
        assert not page.locator(".paper-figure svg").is_visible()
        assert rows.count() == 5
        assert max(rows.evaluate_all("all => all.map(one => one.getBoundingClientRect().height)")) < 450
        assert "Filled: ours" in page.locator(".paper-figure figcaption").inner_text()
        page.emulate_media(media="screen")

    def test_ours_are_points_with_spread_and_what_is_missing_is_a_mark(
        self, figures: Site, browse: Callable[..., Tab]
    ) -> None:
        page = browse(f"{figures.url}/figures/{PAPER}/vgg?experiment=1").page
        said = page.locator(".paper-figure title").evaluate_all("all => all.map(one => one.textContent)")
        measured = re.compile(r"clip to 0.5, rank 192: [\d.]+ ± [\d.]+, ours \(3 seeds; complete\)")
        assert any(measured.search(one) for one in said)
        numbers = re.findall(r": ([\d.]+) ± ([\d.]+), ours", "\n".join(said))
        decimals = [[len(one.partition(".")[2]) for one in pair] for pair in numbers]
        assert {mean for mean, _ in decimals} == {1, 2}  # those of each metric, by the catalogue
        assert all(mean == spread for mean, spread in decimals)
        assert any("no result: 3 queued" in one for one in said)
        assert page.locator("tbody tr").count() == len(said)  # the table has every mark
        assert page.locator(".paper-figure svg").get_attribute("role") == "img"

    def test_the_papers_are_hollow(self, figures: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{figures.url}/figures/{PAPER}/lipschitz").page
        said = page.locator(".paper-figure title").evaluate_all("all => all.map(one => one.textContent)")
        assert sum("printed in table3" in one for one in said) == 2 * 18
        assert sum(one.endswith(": not run") for one in said) == 2 * 21
        fills = page.locator(".paper-figure g").evaluate_all(
            "all => all.filter((one) => one.firstChild.textContent.includes('printed in'))"
            ".map((one) => one.lastChild.getAttribute('fill'))"
        )
        assert set(fills) == {"none"}
        assert len(fills) == 39  # of table 3 all 36 places, and the accuracy of SOC at three depths from table 1

    def test_nothing_stands_alone_where_nothing_is_printed(self, site: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{site.url}/figures/{PAPER}/vgg").page
        assert "the paper prints no numbers" in page.locator(".empty").inner_text()
        assert "stand alone" not in page.locator("main").inner_text()
        assert "nothing measured here" in page.locator(".paper-figure svg").text_content()
        page.goto(f"{site.url}/figures/{PAPER}/speedup")
        assert "formulas predict stands alone" in page.locator(".empty").inner_text()

    def test_smoke_is_watermarked_in_every_form(self, figures: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{figures.url}/figures/{PAPER}/vgg?experiment=2&scale=smoke").page
        assert "SMOKE: NO RESULT" in page.locator(".paper-figure text.fill-water").first.text_content()
        for name, begins in (("SVG", b"<svg xmlns"), ("PDF", b"%PDF-1.4"), ("LaTeX data", b"% TT, clipping")):
            with page.expect_download() as saved:
                page.locator(f".downloads a:text-is('{name}')").click()
            content = saved.value.path().read_bytes()
            assert saved.value.suggested_filename.startswith(f"{PAPER}-vgg-smoke.")
            assert content.startswith(begins)
            assert b"SMOKE: NO RESULT" in content

    @pytest.mark.parametrize(
        ("scheme", "width"), [("dark", 390), deep("light", 1280), deep("dark", 1280), deep("light", 390)]
    )
    def test_axe_finds_nothing(self, figures: Site, browse: Callable[..., Tab], scheme: str, width: int) -> None:
        tab = browse("about:blank", scheme=scheme, width=width)
        for name in NAMES:
            tab.go(f"{figures.url}/figures/{PAPER}/{name}")
            tab.settle()
            assert violations(tab) == [], name
            grounds = tab.page.evaluate(
                "() => [getComputedStyle(document.querySelector('.paper-figure .paper')).fill,"
                " getComputedStyle(document.body).backgroundColor]"
            )
            assert grounds[0] == grounds[1]  # axe does not look at what is behind the texts of a drawing
            assert tab.page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0

    def test_without_scripts(self, figures: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{figures.url}/figures/{PAPER}/soc-speedup", script=False).page
        assert page.locator(".paper-figure svg").is_visible()
        assert page.locator("tbody tr").count() == 2 * 12
