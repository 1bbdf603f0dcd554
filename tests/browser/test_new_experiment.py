"""A new experiment in a browser: the form and the text in step, the check while typing, and what is posted."""

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from service.database import Experiment
from service.specs.documents import read_yaml
from tests.browser.accessibility import covered, violations
from tests.browser.conftest import Site, Tab
from tests.browser.test_pages import HOSTILE
from tests.examples import deep

Browse = Callable[..., Tab]
DRY = "**/submit/look"
TEXT = """\
# ranks of digits
name: by hand  # for the thesis
base: {dataset: digits, model: small-cnn, layer: tt}
variants: [{frames: orthonormal}, {lambda_ort: 0.1}]
grid:
  rank: [2, 4]  # two
  seed: [0, 1, 2]
"""


def field(tab: Tab, path: str) -> Any:
    return tab.page.locator(f"[id='field-{path}']")


def chips(tab: Tab, path: str) -> list[str]:
    found: list[str] = tab.page.locator(f"[data-path='{path}'] .chip").evaluate_all(
        "all => all.map(one => one.firstChild.textContent)"
    )
    return found


def text(tab: Tab) -> str:
    found: str = tab.page.locator("#spec").input_value()
    return found


def spec(tab: Tab) -> Any:
    return read_yaml(text(tab))


def ready(tab: Tab, words: str = "") -> Tab:
    """Waits until what stands there was looked at, can be posted, and the form says it as well."""
    tab.until(
        "words => !document.querySelector('#submit').disabled && !document.querySelector('#fields').inert && "
        "document.querySelector('#preview').textContent.includes(words)",
        words,
    )
    return tab


def refused(tab: Tab, words: str) -> Tab:
    """Waits until it was refused with these words."""
    tab.until("words => !document.querySelector('#problem').hidden && problem.textContent.includes(words)", words)
    assert tab.page.locator("#submit").is_disabled()
    return tab


def write(tab: Tab, spec: str) -> None:
    tab.page.get_by_role("tab", name="YAML").click()
    tab.page.locator("#spec").fill(spec)


def experiments(site: Site) -> list[str]:
    with site.database.read() as session:
        return list(session.scalars(select(Experiment.name).order_by(Experiment.id)))


def stored(tab: Tab) -> None:
    """Waits until it says where it was stored."""
    tab.until("() => location.pathname !== '/submit' || !document.querySelector('#stored').hidden")


@pytest.fixture
def tab(site: Site, browse: Browse) -> Tab:
    return ready(browse(f"{site.url}/submit"), "8 trials")


class TestForm:
    def test_it_makes_a_spec_and_values_become_an_axis(self, tab: Tab) -> None:
        field(tab, "name").fill("made in the form")
        lr = field(tab, "training.lr")
        lr.click()
        tab.page.keyboard.type("0.1, 0.2")
        ready(tab, "16 trials")
        assert chips(tab, "training.lr") == ["0.1"]
        assert lr.input_value() == "0.2"  # is being written, and counts
        lr.press("Enter")
        assert chips(tab, "training.lr") == ["0.1", "0.2"]
        tab.page.locator("[data-path='layer'] .vary").click()
        tab.page.locator("[data-path='layer'] .picks").get_by_label("dense", exact=True).check()
        field(tab, "training.optimizer").select_option(label="adam")
        tab.page.locator("[data-path='seed'] .chip").first.click()
        field(tab, "training.milestones").fill("30, 60")
        field(tab, "tags").fill("thesis, ranks")
        tab.until("() => document.querySelector('#spec').value.includes('milestones')")
        ready(tab, "12 trials")
        found = spec(tab)
        assert found["name"] == "made in the form"
        assert found["tags"] == ["thesis", "ranks"]
        assert found["base"] == {
            "dataset": "digits",
            "model": "small-cnn",
            "constraint": "clip",
            "training": {"epochs": 12, "optimizer": "adam", "milestones": [30, 60]},
        }
        assert found["grid"] == {
            "rank": [4, 16],
            "delta": [None, 1],
            "seed": [1],
            "training.lr": [0.1, 0.2],
            "layer": ["tt", "dense"],
        }
        assert "has an effect in no trial" in tab.page.locator("#preview .warning").inner_text()

    def test_backspace_takes_the_last_chip_back(self, tab: Tab) -> None:
        rank = field(tab, "rank")
        rank.focus()
        tab.page.keyboard.press("Backspace")
        assert (chips(tab, "rank"), rank.input_value()) == (["4"], "16")
        tab.page.keyboard.press("Control+A")
        tab.page.keyboard.type("null")
        tab.until("() => document.querySelector('#spec').value.includes('[4, null]')")
        ready(tab, "8 trials")
        assert spec(tab)["grid"]["rank"] == [4, None]
        tab.page.keyboard.press("Control+A")
        for _ in range(2):
            tab.page.keyboard.press("Backspace")
        tab.until("() => document.querySelector('#spec').value.includes('rank: 4')")
        ready(tab, "4 trials")
        assert spec(tab)["base"]["rank"] == 4
        assert "rank" not in spec(tab)["grid"]

    def test_the_scheduler_s_fields_stand_with_it(self, tab: Tab) -> None:
        tab.page.locator("summary:has-text('Running')").click()
        grace = field(tab, "scheduler.grace_epochs")
        assert not grace.is_visible()
        field(tab, "scheduler.type").select_option(label="asha")
        grace.fill("2")
        tab.until("() => document.querySelector('#spec').value.includes('grace_epochs')")
        assert spec(tab)["scheduler"] == {"type": "asha", "grace_epochs": 2}
        field(tab, "scheduler.type").select_option(value="")
        tab.until("() => !document.querySelector('#spec').value.includes('scheduler')")

    def test_its_trials_are_listed_on_demand(self, tab: Tab) -> None:
        assert all("summary=true" in url for url in tab.asked if "dry_run" in url)
        tab.page.locator("#list summary").click()
        tab.page.locator("#trials tbody tr").nth(7).wait_for()
        ready(tab)
        assert tab.page.locator("#trials thead").inner_text().split()[:4] == ["#", "rank", "constraint", "delta"]
        field(tab, "seed").fill("5")
        tab.page.locator("#trials tbody tr").nth(11).wait_for()

    def test_a_preset_to_begin_with(self, site: Site, tab: Tab) -> None:
        tab.page.locator("select[name=preset]").select_option("senderovich2022/table2")
        tab.page.click("text=Begin with it")
        tab.page.wait_for_url(re.compile(r"preset=senderovich2022%2Ftable2"))
        ready(tab)
        assert spec(tab)["name"].startswith("senderovich2022/table2")
        assert chips(tab, "rank") != []
        assert tab.page.locator("select[name=preset]").input_value() == "senderovich2022/table2"


class TestInStep:
    def test_the_form_follows_the_text(self, tab: Tab) -> None:
        write(tab, TEXT)
        ready(tab, "12 trials")
        tab.page.get_by_role("tab", name="Form").click()
        assert field(tab, "name").input_value() == "by hand"
        assert chips(tab, "rank") == ["2", "4"]
        assert field(tab, "constraint").input_value() == ""
        assert field(tab, "training.epochs").input_value() == ""

    def test_what_the_form_does_not_change_stays_as_it_is_written(self, tab: Tab) -> None:
        write(tab, TEXT)
        ready(tab, "12 trials")
        tab.page.get_by_role("tab", name="Form").click()
        tab.page.locator("[data-path='rank'] .chip").first.click()
        field(tab, "training.epochs").fill("3")
        tab.until("() => document.querySelector('#spec').value.includes('epochs')")
        ready(tab, "6 trials")
        expected = TEXT.replace("rank: [2, 4]", "rank: [4]").replace("tt}", "tt, training: {epochs: 3}}")
        assert text(tab) == expected

    def test_json_stays_json(self, tab: Tab) -> None:
        write(tab, json.dumps({"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}}, indent=2))
        ready(tab, "1 trial")
        tab.page.get_by_role("tab", name="Form").click()
        field(tab, "rank").fill("4")
        tab.until("() => document.querySelector('#spec').value.includes('rank')")
        assert json.loads(text(tab))["base"]["rank"] == 4

    def test_while_the_text_cannot_be_read_the_form_waits(self, tab: Tab) -> None:
        write(tab, "name: [")
        refused(tab, "line 2")
        tab.page.get_by_role("tab", name="Form").click()
        assert "cannot be read" not in tab.page.locator("#fields").inner_text()
        assert "not YAML that can be read" in tab.page.locator("#odd").inner_text()
        assert tab.page.evaluate("document.querySelector('#fields').inert")
        write(tab, TEXT)
        ready(tab, "12 trials")
        assert not tab.page.evaluate("document.querySelector('#fields').inert")

    def test_what_the_form_cannot_show_it_leaves_alone(self, tab: Tab) -> None:
        write(tab, "name: x\nbase: {dataset: digits, model: small-cnn, training: 5}\n")
        refused(tab, "must be an object with")
        tab.page.get_by_role("tab", name="Form").click()
        assert tab.page.locator("[data-path='training.lr']").evaluate("one => one.inert")
        field(tab, "rank").fill("3")
        tab.until("() => document.querySelector('#spec').value.includes('rank: 3')")
        assert spec(tab)["base"]["training"] == 5
        refused(tab, "must be an object with")


class TestCheck:
    def test_errors_stand_at_their_fields(self, tab: Tab) -> None:
        lr = field(tab, "training.lr")
        lr.fill("0")
        refused(tab, "must be above 0")
        assert lr.get_attribute("aria-invalid") == "true"
        wrong, about = (lr.get_attribute("aria-describedby") or "").split()
        assert "above 0, not 0" in tab.page.locator(f"[id='{wrong}']").inner_text()
        assert "learning rate" in tab.page.locator(f"[id='{about}']").inner_text()
        lr.fill("0.1")
        ready(tab, "8 trials")
        assert lr.get_attribute("aria-invalid") is None
        assert tab.page.locator(".wrong").count() == 0
        field(tab, "rank").fill("x, 8")
        refused(tab, 'not "x"')
        assert tab.page.locator("[data-path='rank'] .chip.bad").inner_text().startswith("x")
        tab.page.locator("[data-path='rank'] .chip.bad").click()
        ready(tab, "12 trials")
        field(tab, "lambda_ort").fill("1e400")
        refused(tab, 'not "1e400"')

    def test_one_of_a_closed_group_can_be_gone_to(self, tab: Tab) -> None:
        write(tab, TEXT.replace("layer: tt", "layer: tt, clipping: {floor: 3}, delta: 1"))
        refused(tab, "must be at most delta")
        assert tab.page.locator("#spec").get_attribute("aria-invalid") == "true"
        tab.page.locator("#problem button").click()
        assert tab.page.evaluate("document.activeElement.id") == "field-clipping.floor"
        assert tab.page.locator("[data-path='clipping.floor'] .wrong").is_visible()
        assert "1 wrong" in tab.page.locator("summary", has_text="Clipping").inner_text()

    def test_what_is_written_outlives_silence_and_a_reload(self, tab: Tab) -> None:
        page = tab.page
        page.route("**/submit/*", lambda route: route.abort())
        field(tab, "name").fill("while nobody answers")
        page.locator("#problem:has-text('does not answer')").wait_for()
        assert not page.evaluate("document.getElementById('fields').inert")
        assert page.locator("#submit").is_disabled()
        page.unroute("**/submit/*")
        tab.until("() => document.querySelector('#spec').value.includes('while nobody answers')")
        ready(tab)
        page.goto("about:blank")
        page.go_back()
        ready(tab)
        page.reload()
        assert field(ready(tab), "name").input_value() == "while nobody answers"
        tab.complaints.clear()  # the console tells of what had no answer

    def test_while_the_service_is_away_it_asks_ever_less_until_somebody_comes_back(self, tab: Tab) -> None:
        page = tab.page
        tab.ever_less("**/submit/look", lambda: field(tab, "name").fill("while nobody answers"))
        began = time.monotonic()
        with page.expect_request("**/submit/look"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        assert time.monotonic() - began < 4  # not after the eight seconds that came next
        ready(tab)
        tab.complaints.clear()  # the console tells of what had no answer

    def test_many_changes_are_one_request(self, tab: Tab) -> None:
        tab.asked.clear()
        field(tab, "name").focus()
        tab.page.keyboard.type(" with a longer name", delay=15)
        tab.until("() => document.querySelector('#spec').value.includes('longer name')")
        ready(tab)
        assert len([url for url in tab.asked if "dry_run" in url]) <= 3

    def test_twenty_thousand_trials_are_counted(self, tab: Tab) -> None:
        seeds = ", ".join(map(str, range(5000)))
        base = "name: x\nbase: {dataset: digits, model: small-cnn, layer: tt}\n"
        write(tab, base + f"grid: {{rank: [1, 2, 3, 4], seed: [{seeds}]}}\n")
        tab.asked.clear()
        ready(tab, "20\u202f000 trials")
        assert "compression" in tab.page.locator("#preview").inner_text()
        assert [url for url in tab.asked if "dry_run" in url and "summary=true" not in url] == []
        write(tab, text(tab).replace("[1, 2, 3, 4]", "[1, 2, 3, 4, 5]"))
        refused(tab, "at most 20000 are allowed")


class Slow:
    """Holds the answers of dry runs back until they are let go."""

    def __init__(self, tab: Tab) -> None:
        self.held: list[Any] = []
        self.tab = tab
        tab.page.route(DRY, lambda route: self.held.append(route))

    def until(self, count: int) -> None:
        end = 200
        while len(self.held) < count and end:
            self.tab.page.wait_for_timeout(50)
            end -= 1
        assert len(self.held) >= count

    def let_go(self, index: int) -> None:
        """Answers a request as the service would; one that was given up cannot be answered."""
        self.held[index].continue_()
        self.tab.page.wait_for_timeout(1500)


NO_ABORT = "AbortController.prototype.abort = function () {};"


class TestRace:
    """What is submitted is what was previewed."""

    @pytest.mark.parametrize("aborts", [True, False])
    def test_an_answer_to_an_older_text_is_neither_shown_nor_submittable(
        self, live: Site, browse: Browse, aborts: bool
    ) -> None:
        """Without `abort` too: a browser may have the answer already."""
        tab = browse("about:blank", fresh=True)
        if not aborts:
            tab.page.add_init_script(NO_ABORT)
        tab.go(f"{live.url}/submit")
        ready(tab, "8 trials")
        slow = Slow(tab)
        submit = tab.page.locator("#submit")
        field(tab, "seed").fill("2")
        assert submit.is_disabled()
        slow.until(1)
        field(tab, "seed").fill("2, 3")
        slow.until(2)
        slow.let_go(0)
        assert "12 trials" not in tab.page.locator("#preview").inner_text()
        assert submit.is_disabled()
        submit.evaluate("one => { one.disabled = false; one.click(); }")  # whatever the button says
        tab.page.wait_for_timeout(300)
        assert len(experiments(live)) == 1
        slow.let_go(1)
        ready(tab, "16 trials")
        shown = text(tab)
        bodies: list[bytes] = []
        tab.page.on(
            "request", lambda one: bodies.append(one.post_data_buffer) if one.url.endswith("/v1/experiments") else None
        )
        submit.click()
        stored(tab)
        assert bodies == [shown.encode()]
        assert len(experiments(live)) == 2

    def test_the_form_waits_for_the_text_that_it_says(self, site: Site, browse: Browse) -> None:
        """What is written in it before it says what the text says would be taken for all that is meant."""
        held: list[Any] = []
        tab = browse("about:blank")
        tab.page.route("**/submit/text", lambda route: held.append(route))
        tab.go(f"{site.url}/submit")
        tab.until("() => document.querySelector('#preview').textContent.includes('8 trials')")
        field(tab, "seed").click(force=True)
        tab.page.keyboard.type("2")
        held.pop().continue_()
        tab.until("() => !document.querySelector('#fields').inert")
        assert (chips(tab, "seed"), field(tab, "seed").input_value()) == (["0", "1"], "")
        write(tab, TEXT)
        tab.until("() => document.querySelector('#preview').textContent.includes('12 trials')")
        tab.page.get_by_role("tab", name="Form").click()
        tab.page.locator("[data-path='rank'] .chip").first.click(force=True)
        held.pop().continue_()
        tab.until("() => !document.querySelector('#fields').inert")
        assert chips(tab, "rank") == ["2", "4"]
        assert text(tab) == TEXT

    def test_an_edit_of_the_text_while_it_is_looked_at(self, live: Site, browse: Browse) -> None:
        tab = ready(browse(f"{live.url}/submit"))
        slow = Slow(tab)
        write(tab, TEXT)
        slow.until(1)
        tab.page.locator("#spec").fill(TEXT.replace("[2, 4]", "[2, 4, 8]"))
        slow.let_go(0)
        assert tab.page.locator("#submit").is_disabled()
        assert "12 trials" not in tab.page.locator("#preview").inner_text()
        slow.until(2)
        slow.let_go(1)
        ready(tab, "18 trials")

    def test_a_value_that_is_being_written_is_no_older_spec(self, live: Site, browse: Browse) -> None:
        """The change that a click on the button ends is looked at first."""
        tab = ready(browse(f"{live.url}/submit"))
        field(tab, "seed").focus()
        tab.page.keyboard.type("9")
        tab.page.locator("#submit").click(force=True, no_wait_after=True)
        ready(tab, "12 trials")
        assert len(experiments(live)) == 1

    def test_a_double_click_makes_one_experiment(self, live: Site, browse: Browse) -> None:
        tab = ready(browse(f"{live.url}/submit"))
        tab.page.locator("#submit").dblclick()
        stored(tab)
        tab.page.wait_for_timeout(500)
        assert len(experiments(live)) == 2
        # Who goes back is told, and stores it once more only where they say so.
        tab.page.locator("#stored a").click()
        tab.page.wait_for_url("**/experiments/2")
        tab.page.go_back()
        submit, said = ready(tab).page.locator("#submit"), tab.page.locator("#stored")
        assert submit.inner_text() == "Submit once more"
        assert said.inner_text() == "This is experiment 2, as it was posted."
        field(tab, "seed").fill("7")
        ready(tab, "12 trials")
        assert (submit.inner_text(), said.is_visible()) == ("Submit", False)
        field(tab, "seed").fill("1")
        ready(tab, "8 trials")
        submit.click()
        said.locator("a", has_text="experiment 3").wait_for()

    def test_a_second_try_after_a_lost_answer_makes_one_too(self, live: Site, browse: Browse) -> None:
        tab = ready(browse(f"{live.url}/submit"))
        keys: list[str] = []
        lost = threading.Event()

        def lose(route: Any) -> None:
            keys.append(route.request.headers["idempotency-key"])
            if lost.is_set():
                route.continue_()
                return
            lost.set()
            route.fetch()
            route.abort()

        tab.page.route("**/v1/experiments", lose)
        tab.page.locator("#submit").click()
        tab.page.locator("#problem:has-text('does not answer')").wait_for()
        tab.complaints.clear()
        tab.page.locator("#list summary").click()  # it is looked at once more
        tab.page.locator("#trials tbody tr").first.wait_for()
        ready(tab)
        tab.page.locator("#submit").click()
        stored(tab)
        assert keys[0] == keys[1]
        assert len(experiments(live)) == 2


class TestEverybody:
    def test_by_keyboard_alone(self, live: Site, browse: Browse) -> None:
        tab = ready(browse(f"{live.url}/submit"))
        press, write = tab.page.keyboard.press, tab.page.keyboard.type

        def to(selector: str, key: str = "Tab") -> None:
            for _ in range(120):
                if tab.page.evaluate("selector => document.activeElement.matches(selector)", selector):
                    return
                press(key)
            raise AssertionError(f"{selector} cannot be reached")

        to("[role=tab]")
        press("ArrowRight")
        assert tab.page.locator("#text-panel").is_visible()
        press("ArrowLeft")
        to("[id='field-name']")
        press("Control+A")
        write("by keys")
        to("[data-path='layer'] .vary")
        press("Space")
        to("[data-path='layer'] .picks input", "Shift+Tab")
        to("[data-path='layer'] input[value='\"dense\"']", "Tab")
        press("Space")
        to("[data-path='rank'] .chip")
        press("Enter")
        assert tab.page.evaluate("document.activeElement.matches(\"[data-path='rank'] .chip\")")
        assert chips(tab, "rank") == ["16"]
        to("[id='field-seed']")
        write("7,")
        ready(tab, "12 trials")
        to("#submit")
        press("Enter")
        stored(tab)
        assert experiments(live)[-1] == "by keys"

    def test_hostile_names_are_names(self, site: Site, tab: Tab) -> None:
        field(tab, "name").fill(HOSTILE[:200])
        field(tab, "tags").fill("<img src=x onerror=alert(1)>,")
        refused(tab, "<img src")
        tab.page.locator("[data-path='tags'] .chip").click()
        field(tab, "rank").fill("<b onclick=alert(1)>" + "long" * 40 + ", 4")
        refused(tab, "<b onclick=")
        assert tab.page.locator("b[onclick], img").count() == 0
        assert tab.page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
        tab.page.set_viewport_size({"width": 390, "height": 800})
        assert tab.page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
        assert spec(tab)["name"] == HOSTILE[:200].strip()
        field(tab, "tags").focus()
        assert covered(tab, 40) == []  # by the line at the lower edge

    @pytest.mark.parametrize(
        ("scheme", "width"), [("dark", 390), deep("light", 1280), deep("dark", 1280), deep("light", 390)]
    )
    def test_axe_finds_nothing(self, site: Site, browse: Browse, scheme: str, width: int) -> None:
        """With chips, picks, errors, a list of trials; every group open; in both tabs."""
        tab = ready(browse(f"{site.url}/submit", scheme=scheme, width=width))
        page = tab.page
        page.locator("#list summary").click()
        page.locator("#trials tbody tr").first.wait_for()
        page.evaluate("document.querySelectorAll('.group').forEach(one => { one.open = true; })")
        found = {}

        def look(name: str) -> None:
            if said := violations(tab):
                found[name] = said
            assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, name

        ready(tab)
        look("right")
        page.locator("[data-path='layer'] .vary").click()
        field(tab, "training.lr").fill("x, 0.1")
        refused(tab, 'not "x"')
        look("wrong")
        page.get_by_role("tab", name="YAML").click()
        look("text")
        assert found == {}

    def test_without_scripts_a_text_is_looked_at_and_posted(self, live: Site, browse: Browse) -> None:
        tab = browse(f"{live.url}/submit", script=False)
        page = tab.page
        assert not page.locator("#fields").is_visible()
        page.locator("#spec").fill(TEXT.replace("[2, 4]", "[0, 4]"))
        page.click("button:text-is('Dry run')")
        assert "grid.rank[0]: must be a whole number" in page.locator("#problem").inner_text()
        assert "rank: [0, 4]  # two" in page.locator("#spec").input_value()
        page.locator("#spec").fill(TEXT)
        page.click("button:text-is('Dry run')")
        assert "12 trials of 12 points" in page.locator("#preview").inner_text()
        page.locator("#spec").fill("name: something else")  # was not looked at
        page.click("button:text-is('Submit what is shown here')")
        page.wait_for_url(re.compile(r"/experiments/\d+$"))
        assert experiments(live)[1:] == ["by hand"]
        page.go_back()
        page.click("button:text-is('Submit what is shown here')")
        assert len(experiments(live)) == 2
        tab.complaints.clear()  # the console tells of every answer that refuses
