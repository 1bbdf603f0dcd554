"""Comparisons in a browser: check boxes lead there, what differs, warnings, curves and spectra, keyboard, names."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from service.database import Score, ScoreBoard
from service.database.engine import Database
from tests.browser import compared
from tests.browser.accessibility import covered, violations
from tests.browser.conftest import Site, Tab, served
from tests.examples import deep

SPECTRA = ".spectra-panel .curves-figure"
CURVES = ".curves-panel .curves-figure"


@pytest.fixture(scope="module")
def beside(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service with experiments to compare; tests only read."""
    file = tmp_path_factory.mktemp("compared") / "ttsv.db"
    shutil.copyfile(filled, file)
    database = Database(f"sqlite:///{file}")
    compared.fill(database, file.parent / "data")
    database.close()
    with served(file) as running:
        yield running


def board_cells(site: Site) -> list[str]:
    """The cells of the first board, in its order."""
    with site.database.read() as session:
        query = select(Score.cell).join(ScoreBoard, ScoreBoard.id == Score.board_id)
        return list(session.scalars(query.where(ScoreBoard.scope == 0).order_by(Score.id).limit(3)))


class TestBoxes:
    @pytest.mark.parametrize(
        ("path", "name", "leads"),
        [
            ("/", "experiment", r"/compare\?experiments=\d+,\d+$"),
            deep("/trials", "trial", r"/compare\?trials=\d+,\d+$"),
            ("/experiments/1#trials-panel", "trial", r"/compare\?trials=\d+,\d+$"),
            ("/leaderboards/cifar10", "cell", r"/compare\?cells=[0-9a-f]{64},[0-9a-f]{64}$"),
        ],
    )
    @pytest.mark.parametrize("script", [True, deep(False)])
    def test_they_lead_there(
        self, beside: Site, browse: Callable[..., Tab], path: str, name: str, leads: str, script: bool
    ) -> None:
        page = browse(f"{beside.url}{path}", script=script).page
        boxes = page.locator(f"form.choosing input[name={name}]")
        boxes.nth(0).check()
        boxes.nth(1).check()
        page.locator(".chosen .compare:visible").first.click()
        page.wait_for_url(re.compile(leads))
        assert page.locator("h2:text-is('What differs')").is_visible()
        assert page.locator("thead .letter").first.inner_text() == "A"

    def test_a_bar_counts_and_refuses(self, beside: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{beside.url}/trials").page
        said, compare = page.locator(".chosen .count"), page.locator(".chosen .compare")
        boxes = page.locator("input[name=trial]")
        assert said.inner_text() == "0 chosen: check 2 to 10 to compare them"
        boxes.nth(0).check()
        assert compare.get_attribute("aria-disabled") == "true"
        compare.click(force=True)
        assert page.url.endswith("/trials")
        for index in range(1, 10):
            boxes.nth(index).check()
        assert said.inner_text() == "10 chosen"
        assert compare.get_attribute("aria-disabled") == "false"
        boxes.nth(10).check()
        assert said.inner_text() == "11 chosen: at most 10 are compared"
        assert compare.get_attribute("aria-disabled") == "true"
        page.locator(".chosen .clear").click()
        assert boxes.nth(0).is_checked() is False
        assert page.evaluate("document.activeElement.name") == "trial"

    def test_the_keyboard_is_enough(self, beside: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{beside.url}/").page
        page.locator("input[name=experiment]").first.focus()
        page.keyboard.press("Space")
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.name") == "experiment":
                page.keyboard.press("Space")
                break
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.classList.contains('compare')"):
                break
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"/compare\?experiments="))
        page.locator("select[name=baseline]").focus()
        page.keyboard.press("ArrowDown")
        page.locator(".filters button[type=submit]").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("baseline="))
        page.wait_for_selector(f"{CURVES}[data-drawn]")
        page.locator(f"{CURVES} .uplot").first.focus()
        page.keyboard.press("Home")
        assert page.locator(f"{CURVES} .readout").inner_text().startswith("epoch 1;")

    def test_what_has_the_focus_stands_before_the_bar(self, beside: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{beside.url}/trials")
        box = tab.page.locator("input[name=trial]").first
        box.check()
        assert covered(tab, 60) == []


class TestPage:
    def test_only_what_differs_and_the_rest_folded_away(self, beside: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{beside.url}/compare?trials=1,6").page
        fields = page.locator("table").first.locator("tbody th").all_inner_texts()
        assert fields == ["lambda_ort"]
        assert page.locator("table").first.locator("tbody td").all_inner_texts()[:2] == ["0.00", "0.01"]
        folded = page.locator("details:has(summary:text('What all of them share'))")
        assert not folded.locator("dt:text-is('model')").is_visible()
        folded.locator("summary").click()
        assert folded.locator("dt:text-is('model')").is_visible()
        accuracy = page.locator("#results + .wide tr", has_text="accuracy (%)").first
        said = accuracy.locator("td").nth(1).inner_text().strip()
        assert re.search(r"\d\d\.\d\d ± 0\.\d\d\s+[+\u2212]\d+\.\d\d$", said)
        assert "single trials have no error" in page.locator("main").inner_text()
        assert page.locator(".alarm").count() == 0

    def test_unequal_protocols_are_warned_of(self, beside: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{beside.url}/compare?experiments=1,2,3").page
        alarm = page.locator(".alarm").inner_text()
        assert "C was not measured as A was (accuracy): split validation against test; attacks" in alarm
        assert "B was" not in alarm
        row = page.locator("#results + .wide tbody tr").first
        assert row.locator("th, td").first.inner_text() == "8"
        cells = row.locator("td.number").all_inner_texts()
        assert re.search(r"\d\d\.\d\d ± \d\.\d\d \(5 of 5\)$", cells[0].strip())
        assert re.search(r"[+\u2212]\d+\.\d\d ± \d+\.\d\d \(p (< )?0\.\d+\)$", cells[1].strip())
        assert re.search(r"^\d\d\.\d\d ± \d\.\d\d \(3 of 3\)$", cells[2].strip())
        page.locator("select[name=metric]").select_option("ece")
        page.locator(".filters button[type=submit]").first.click()
        page.wait_for_url(re.compile("metric=ece"))
        assert page.locator("#results").inner_text() == "ECE (%) of matching configurations"

    def test_curves_and_spectra_lie_over_each_other(self, beside: Site, browse: Callable[..., Tab]) -> None:
        tab = browse("about:blank")
        page = tab.page
        page.route("**/v1/trials/6?*", lambda route: route.fulfill(status=503), times=1)  # asked for again
        tab.go(f"{beside.url}/compare?trials=1,6,110")
        page.wait_for_selector(f"{CURVES}[data-drawn='4']")
        assert page.locator(f"{CURVES} .lines li").count() == 3
        assert page.locator(f"{CURVES} .lines li").nth(1).inner_text().startswith("B: rank 2, lambda_ort 0.01")
        named = page.locator(f"{CURVES} .lines a").all_inner_texts()
        headings = page.locator("table.measured").first.locator("th.side a").all_inner_texts()
        assert named == headings == ["trial 1", "trial 6", "trial 110"]
        page.wait_for_selector(f"{SPECTRA}[data-drawn='{len(compared.LAYERS)}']")
        lines = page.locator(f"{SPECTRA} .lines li").all_inner_texts()
        assert [line.strip() for line in lines[3:]] == ["δ = 1", "δ = 2"]
        assert page.locator(f"{SPECTRA} .plot figcaption").all_inner_texts() == list(compared.LAYERS)
        page.locator(f"{SPECTRA} .uplot").first.focus()
        page.keyboard.press("Home")
        said = page.locator(f"{SPECTRA} .readout").inner_text()
        assert said.startswith("index 0; 1 A: rank 2")
        assert "2 C: rank 16" in said
        page.keyboard.press("End")
        assert page.locator(f"{SPECTRA} .readout").inner_text().startswith("index 26;")  # of this layer, not of others
        page.locator(f"{SPECTRA} input[name=log]").check()
        assert "logarithmic" in page.locator(f"{SPECTRA} .plot figcaption").first.inner_text()
        with page.expect_download() as saved:
            page.locator(f"{SPECTRA} button[data-save=csv]").click()
        assert saved.value.suggested_filename == "spectra.csv"
        assert b",index,features.0,features.4,features.8\r\n" in saved.value.path().read_bytes()
        rows = page.locator(".spectra-panel table tbody tr")
        assert rows.count() == len(compared.LAYERS)
        assert re.fullmatch(r"\d\.\d{4} to 1\.0000", rows.first.locator("td").first.inner_text())
        tab.complaints.clear()  # the console tells of what had no answer

    def test_while_the_service_is_away_it_says_so_and_asks_ever_less(
        self, beside: Site, browse: Callable[..., Tab]
    ) -> None:
        tab = browse("about:blank")
        page, asked = tab.page, list[float]()

        def none(route: Any) -> None:
            asked.append(time.monotonic())
            route.abort()

        page.route("**/v1/trials/6?*", none)
        page.route("**/v1/curves?*", lambda route: route.abort())
        tab.go(f"{beside.url}/compare?trials=1,6")
        page.locator(".curves-problem:has-text('does not answer')").wait_for()
        said = page.locator(".spectra-problem")
        said.wait_for()
        assert said.inner_text().startswith("The service does not answer. It is asked again")
        with page.expect_event("requestfailed", lambda request: "/v1/trials/6" in request.url):
            pass
        # Each pause begins with an answer: no load makes one shorter.
        assert (asked[1] - asked[0] > 1.9, asked[2] - asked[1] > 3.9) == (True, True)
        page.unroute("**/v1/trials/6?*")
        page.unroute("**/v1/curves?*")
        page.wait_for_selector(f"{CURVES}[data-drawn='4']")
        page.wait_for_selector(f"{SPECTRA}[data-drawn='{len(compared.LAYERS)}']")
        assert not said.is_visible()
        assert not page.locator(".curves-problem").is_visible()
        tab.complaints.clear()  # the console tells of what had no answer

    def test_seeds_of_cells_are_bands(self, beside: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{beside.url}/compare?cells={','.join(board_cells(beside)[:2])}")
        page = tab.page
        page.wait_for_selector(f"{CURVES}[data-drawn='4']")
        assert page.locator(f"{CURVES} .lines li").count() == 2
        page.locator(".curves-panel input[name=bands]").uncheck()
        assert page.locator(f"{CURVES} .lines li").count() > 4
        for kind, begins in (("csv", b"trial,experiment,"), ("svg", b"<svg xmlns"), ("png", b"\x89PNG")):
            assert tab.saved(f"{CURVES} button[data-save={kind}]")[1].startswith(begins), kind

    def test_without_scripts_the_tables_say_all(self, beside: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{beside.url}/compare?experiments=1,2", script=False).page
        assert page.locator("table").count() == 3
        page.locator("select[name=baseline]").select_option("2")
        page.locator(".filters button[type=submit]").first.click()
        assert "baseline=2" in page.url
        assert "Differences to B" in page.locator("main").inner_text()
        with page.expect_download() as saved:
            page.locator(".downloads a").first.click()
        assert saved.value.path().read_text().startswith("side,key,about,rank,lambda_ort,metric")

    @pytest.mark.parametrize(
        ("query", "said"),
        [
            ("?trial=1", "trials: names 1 different trial: 2 to 10 are compared"),
            ("?trials=1,99999", "there is no trial 99999"),
            ("?trials=1,2&experiments=1,2", "cannot be compared with each other"),
            ("", None),
        ],
    )
    def test_what_is_wrong_is_said(
        self, beside: Site, browse: Callable[..., Tab], query: str, said: str | None
    ) -> None:
        tab = browse(f"{beside.url}/compare{query}")
        if said is not None:
            assert said in tab.page.locator(".alarm").inner_text()
        assert tab.page.locator("input[name=experiments]").is_visible() or said is None
        tab.complaints.clear()  # the console tells of every answer that refuses

    def test_names_that_mean_harm_are_names(self, beside: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{beside.url}/compare?experiments=2,3")
        page = tab.page
        page.wait_for_selector(f"{SPECTRA}[data-drawn]")
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            tab.settle()
            assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
            line = page.locator(f"{SPECTRA} .lines button", has_text="longlong")
            assert line.bounding_box()["height"] < 40  # cut short, and whole in its title
            assert compared.HOSTILE in (line.get_attribute("title") or "")
        named = f"{SPECTRA} button[data-save=svg]"
        assert re.search("[long]\u2026<title>", tab.saved(named)[1].decode())
        assert page.locator("b[onclick]").count() == 0
        assert "{{7*7}}" in page.locator("thead").first.inner_text()

    @pytest.mark.parametrize(
        ("scheme", "width"), [("dark", 390), deep("light", 1280), deep("dark", 1280), deep("light", 390)]
    )
    def test_axe_finds_nothing(self, beside: Site, browse: Callable[..., Tab], scheme: str, width: int) -> None:
        tab = browse("about:blank", scheme=scheme, width=width)
        for path in ("/compare", "/compare?experiments=1,2,3", "/compare?trials=1,6,110"):
            tab.go(f"{beside.url}{path}")
            if "=" in path:
                tab.page.wait_for_selector(f"{SPECTRA}[data-drawn]")
            tab.settle()
            assert violations(tab) == [], path

    def test_it_is_printed_whole(self, beside: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{beside.url}/compare?experiments=1,2,3", width=1031)
        page = tab.page
        tab.settle()
        page.emulate_media(media="print")  # upon which what is drawn becomes as wide as the paper
        tab.until("() => document.querySelector('.paper .behind[open]')")
        tab.settle()
        cut = "[...document.querySelectorAll('th, td')].filter(o => o.getBoundingClientRect().right > 1031)"
        assert page.evaluate(f"() => {cut}.map(o => o.textContent)") == []
        assert page.locator(".spectra-panel table").is_visible()
        assert not page.locator(".filters").first.is_visible()
