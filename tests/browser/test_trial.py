"""A trial's tabs in a browser: pictures from the API's numbers, tables behind them, keys, live ends, what lacks."""

import json
import re
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sqlalchemy.orm import Session

from service.database import Artifact, Trial, TrialState
from service.database.engine import Database
from tests import grids, measured
from tests.browser.accessibility import violations
from tests.browser.conftest import Site, Tab, served
from tests.browser.test_pages import come_back
from tests.examples import deep

PANELS = (
    "training",
    "evaluated",
    "singular-values",
    "robustness",
    "calibration",
    "resources",
    "followed",
    "provenance",
    "left",
)
PICTURES: dict[str, dict[str, str | None]] = {
    "singular-values": {"ranges": "8"},
    "robustness": {"corruptions": "95", "certified": "12", "lipschitz": None},
    "calibration": {"reliability": None},
}
RUNNING = 90
VALUES = [min(1.0, 1.3 - index / 25) for index in range(27)]


@pytest.fixture(scope="module")
def shown(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service with a trial, the first, of which everything was measured."""
    import shutil

    file = tmp_path_factory.mktemp("shown") / "ttsv.db"
    shutil.copyfile(filled, file)
    database = Database(f"sqlite:///{file}")
    text = json.dumps({"layers": [{"name": "features.0", "count": 27, "index": [*range(27)], "values": VALUES}]})
    path = "trials/1/1/spectra.json"
    (file.parent / "data" / path).parent.mkdir(parents=True)
    (file.parent / "data" / path).write_text(text)

    def dress(session: Session) -> None:
        measured.dress(session, 1)
        session.add(Artifact(trial_id=1, kind="spectra", path=path, sha256="0" * 64, size=len(text)))

    database.write(dress)
    database.close()
    with served(file) as running:
        yield running


@pytest.mark.parametrize(
    ("scheme", "width"), [("dark", 1280), deep("light", 390), deep("light", 1280), deep("dark", 390)]
)
def test_every_picture_is_drawn_and_axe_finds_nothing(
    shown: Site, browse: Callable[..., Tab], scheme: str, width: int
) -> None:
    tab = browse(f"{shown.url}/trials/1", scheme=scheme, width=width)
    page = tab.page
    for panel in PANELS:
        page.locator(f"#tabs a[href='#{panel}']").click()
        for name, items in PICTURES.get(panel, {}).items():
            drawn = f"='{items}'" if items else ""
            page.wait_for_selector(f"#{panel} .picture[data-picture={name}][data-drawn{drawn}]")
        if panel == "singular-values":
            page.wait_for_selector(".fans-figure[data-drawn='8']")
        if panel == "resources":
            page.wait_for_selector(".resources-figure[data-drawn='4']")
        tab.settle()
        assert page.locator("[role=tabpanel]:visible").get_attribute("id") == panel
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, panel
        assert violations(tab, "html" if panel == PANELS[0] else f"#{panel}") == [], panel


def test_tabs_are_links_that_keys_move_over(shown: Site, browse: Callable[..., Tab]) -> None:
    page = browse(f"{shown.url}/trials/1").page
    tabs = page.locator("#tabs [role=tab]")
    assert tabs.evaluate_all("all => all.map(one => one.hash.slice(1))") == list(PANELS)
    assert tabs.evaluate_all("all => all.filter(one => one.tabIndex === 0).length") == 1
    tabs.first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.url.endswith("#robustness")
    assert page.evaluate("() => document.activeElement.hash") == "#robustness"
    assert page.locator("[role=tabpanel]:visible").get_attribute("id") == "robustness"
    assert page.locator("#tabs [aria-selected=true]").inner_text() == "Robustness"
    page.keyboard.press("End")
    assert page.url.endswith("#left")
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("#training")


def test_hover_and_keys_say_what_is_there(shown: Site, browse: Callable[..., Tab]) -> None:
    tab = browse(f"{shown.url}/trials/1#robustness")
    page = tab.page
    figure = page.locator(".picture[data-picture=corruptions]")
    page.wait_for_selector(".picture[data-picture=corruptions][data-drawn]")
    figure.locator(".canvas").focus()
    page.keyboard.press("Home")
    readout = figure.locator(".readout")
    cells = page.locator("#corruption-table td").evaluate_all("all => all.map(one => one.textContent)")
    assert re.fullmatch(r"brightness, severity 1; accuracy \d\d\.\d %", readout.inner_text())
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    said = re.fullmatch(r"contrast, severity 2; accuracy (\d\d\.\d) %", readout.inner_text())
    assert said is not None
    assert abs(float(said[1]) - float(cells[7].removesuffix(" %"))) <= 0.051  # the table behind it says the same
    box = figure.locator(".canvas").bounding_box()
    page.mouse.move(box["x"] + 160, box["y"] + 40)
    page.locator(".tip").wait_for(state="visible")
    assert page.locator(".tip").inner_text().startswith("brightness, severity 1")
    for kind, begins in (("csv", b"corruption,severity 1"), ("svg", b"<svg"), ("png", b"\x89PNG")):
        name, content = tab.saved(f".picture[data-picture=corruptions] button[data-save={kind}]")
        assert name == f"trial-1-corruptions.{kind}"
        assert content.startswith(begins)


def test_on_another_screen_pictures_are_as_fine(shown: Site, browse: Callable[..., Tab]) -> None:
    tab = browse(f"{shown.url}/trials/1#robustness", fresh=True)
    tab.page.wait_for_selector(".picture[data-picture=lipschitz][data-drawn]")
    tab.settle()
    tab.to_screen(2)


def test_what_has_no_answer_for_a_moment_is_asked_for_again(shown: Site, browse: Callable[..., Tab]) -> None:
    tab = browse("about:blank")
    page = tab.page
    picture = page.locator(".picture[data-picture=corruptions]")
    answered = "() => document.querySelector('.picture[data-picture=corruptions]').dataset.drawn !== undefined"
    page.route("**/v1/curves?*", lambda route: route.fulfill(status=503), times=2)
    page.route("**/v1/trials/1/result", lambda route: route.fulfill(status=503))
    with page.expect_response("**/v1/trials/1/result"):
        tab.go(f"{shown.url}/trials/1#robustness")
    page.unroute("**/v1/trials/1/result")
    tab.until(answered)
    page.route("**/v1/trials/1/result", lambda route: route.abort())
    with page.expect_event("requestfailed"):
        page.evaluate("() => document.dispatchEvent(new CustomEvent('progressed'))")
    page.unroute("**/v1/trials/1/result")
    assert picture.is_visible()  # what was drawn stands meanwhile
    with page.expect_response("**/v1/trials/1/result") as again:
        pass
    assert again.value.status == 200
    assert picture.is_visible()
    tab.until("() => !document.querySelector('.trial-curves').hidden")
    page.route("**/v1/artifacts/*", lambda route: route.fulfill(status=503), times=1)
    with page.expect_response("**/v1/artifacts/*"):
        page.locator("#tabs a[href='#singular-values']").click()
    page.wait_for_selector(".picture[data-picture=ranges][data-drawn]")  # of what is kept elsewhere
    page.wait_for_selector(".values-figure[data-drawn]")
    tab.complaints.clear()  # the console tells of what had no answer


def test_while_the_service_is_away_a_tab_asks_ever_less_until_it_is_heard_of(
    shown: Site, browse: Callable[..., Tab]
) -> None:
    tab = browse("about:blank")
    tab.ever_less("**/v1/trials/1/result", lambda: tab.go(f"{shown.url}/trials/1#robustness"))
    tab.page.evaluate("document.dispatchEvent(new CustomEvent('answered'))")
    tab.page.wait_for_selector(
        ".picture[data-picture=corruptions][data-drawn]", timeout=4000
    )  # not after eight seconds
    tab.complaints.clear()  # the console tells of what had no answer


def test_certificates_stand_beside_attacks(shown: Site, browse: Callable[..., Tab]) -> None:
    page = browse(f"{shown.url}/trials/1#robustness").page
    page.wait_for_selector(".picture[data-picture=certified][data-drawn='12']")
    figure = page.locator(".picture[data-picture=certified]")
    figure.locator(".canvas").focus()
    page.keyboard.press("End")
    assert "autoattack, Linf radius 0.03137; accuracy left" in figure.locator(".readout").inner_text()
    lipschitz = page.locator(".picture[data-picture=lipschitz]")
    page.wait_for_selector(".picture[data-picture=lipschitz][data-drawn]")
    lipschitz.locator(".canvas").focus()
    page.keyboard.press("Home")
    said = lipschitz.locator(".readout").inner_text()
    assert re.match(r"pixels, fgsm: .*; \d+ of 10000 images; certified bound 11.4", said)


_BOUNDS = """
() => {
  const round = document.querySelector("svg").getBoundingClientRect();
  const boxes = [...document.querySelectorAll("svg text")].map(one => [one.textContent, one.getBoundingClientRect()]);
  const bars = [...document.querySelectorAll("svg path[fill='#0072b2']")].map(one => one.getBoundingClientRect());
  return {
    cut: boxes.filter(([, box]) => box.left < round.left - 1 || box.right > round.right + 1).map(([text]) => text),
    texts: boxes.map(([text]) => text),
    under: boxes.filter(([text]) => text.startsWith("δ")).map(([, box]) => box.bottom)[0],
    top: Math.min(...bars.map(one => one.top)),
    spread: Math.max(...bars.map(one => one.right)) - Math.min(...bars.map(one => one.left)),
  };
}
"""


def test_nothing_is_cut_off_on_a_telephone(shown: Site, browse: Callable[..., Tab]) -> None:
    tab, aside = browse(f"{shown.url}/trials/1#robustness", width=390), browse("about:blank", width=390)
    found = {}
    for panel, names in PICTURES.items():
        tab.page.locator(f"#tabs a[href='#{panel}']").click()
        tab.settle()
        strip = tab.page.locator("#tabs").bounding_box()
        chosen = tab.page.locator("#tabs [aria-selected=true]").bounding_box()
        assert strip["x"] <= chosen["x"]
        assert chosen["x"] + chosen["width"] <= strip["x"] + strip["width"]
        for name in names:
            _, content = tab.saved(f".picture[data-picture={name}] button[data-save=svg]")
            aside.page.set_content(content.decode())
            found[name] = aside.page.evaluate(_BOUNDS)
            assert found[name]["cut"] == [], name
    assert {"0.5", "1", "2", "5", "10"} <= set(found["lipschitz"]["texts"])  # the axis is logarithmic
    assert found["lipschitz"]["spread"] > 90
    assert found["ranges"]["under"] <= found["ranges"]["top"]  # what the threshold is stands above the first bar
    tab.page.locator("#tabs a[href='#training']").click()
    tab.settle()
    _, content = tab.saved(".trial-curves button[data-save=svg]")
    texts = re.findall(r">([^<>]+)</text>", content.decode())
    assert "orthogonal loss, logarithmic" in texts
    assert texts.count("epoch") == 4
    assert re.findall(r">([^<>]+)<title>[^<]*</title></text>", content.decode()) == ["training", "validation"]
    assert {"1e-4", "0.001"} - set(texts)  # one way of writing beside an axis
    assert not any(re.search(r"\.0+e", text) for text in texts)


def test_spectra_over_training_are_a_fan_for_each_layer(shown: Site, browse: Callable[..., Tab]) -> None:
    tab = browse(f"{shown.url}/trials/1#singular-values")
    page = tab.page
    page.wait_for_selector(".fans-figure[data-drawn='8']")
    page.locator(".fans-figure .uplot").first.focus()
    page.keyboard.press("End")
    said = page.locator(".fans-figure .readout").inner_text()
    assert said.startswith("epoch 80; ")
    for words in ("1 largest", "median", "largest before", "1 δ"):
        assert words in said
    with Image.open(BytesIO(tab.saved(".fans-figure button[data-save=png]")[1])) as picture:
        # Below the charts stands what their three kinds of lines are; all of it is finer than the screen.
        assert picture.height == 2 * (8 * (224 + 28) + 3 * 18 + 12)
    page.locator(".fans-figure [name=before]").uncheck()
    page.locator(".fans-figure .uplot").first.focus()
    page.keyboard.press("End")
    assert "before" not in page.locator(".fans-figure .readout").inner_text()
    with page.expect_download() as saved:
        page.locator(".fans-figure button[data-save=csv]").click()
    assert saved.value.path().read_text().startswith("layer,epoch,projection,least,5 %,25 %,median,75 %,95 %,largest")
    page.wait_for_selector(".values-figure[data-drawn='1']")
    page.locator(".values-figure .uplot").focus()
    page.keyboard.press("End")
    assert page.locator(".values-figure .readout").inner_text() == "index 26; 0.26 singular value; 1 δ"
    _, content = tab.saved(".values-figure button[data-save=csv]")
    assert content.startswith(b"layer,index,singular value\r\nfeatures.0,0,1\r\n")
    ranges = page.locator(".picture[data-picture=ranges]")
    ranges.locator(".canvas").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    said = ranges.locator(".readout").inner_text()
    assert said.startswith("features.3, TTConv2d; smallest 0.02, largest 1; 5 % 0.2, 25 % 0.4, median 0.6")


def test_resources_are_drawn_by_attempt(shown: Site, browse: Callable[..., Tab]) -> None:
    page = browse(f"{shown.url}/trials/1#resources").page
    page.wait_for_selector(".resources-figure[data-drawn='4']")
    choice = page.locator(".resources-figure select")
    assert choice.input_value() == "2"
    choice.select_option("1")
    page.locator(".resources-figure .uplot").first.focus()
    page.keyboard.press("End")
    assert page.locator(".resources-figure .readout").inner_text().startswith("118 s after the attempt began; ")


def test_what_was_not_measured_says_why(shown: Site, browse: Callable[..., Tab]) -> None:
    tab = browse(f"{shown.url}/trials/2")
    page = tab.page

    def said(panel: str) -> str:
        page.locator(f"#tabs a[href='#{panel}']").click()
        tab.quiet(0.2)
        assert page.locator(f"#{panel} .picture:visible").count() == 0
        text: str = page.locator(f"#{panel}").inner_text()
        return text

    text = said("robustness")
    for words in ("reevaluate 1 corruptions=published", "certified=true attack=autoattack", "lipschitz=both"):
        assert words in text
    assert "training: {spectra_every: 5}" in said("singular-values")
    assert "no record of this" in said("calibration")
    assert "Nothing was sampled" in said("resources")
    page.goto(f"{shown.url}/trials/{RUNNING}#robustness")
    assert "It is not finished yet" in page.locator("#robustness").inner_text()


def test_without_scripts_every_part_stands_below_the_other(shown: Site, browse: Callable[..., Tab]) -> None:
    page = browse(f"{shown.url}/trials/1", script=False).page
    for panel in PANELS:
        assert page.locator(f"#{panel}").is_visible(), panel
    assert page.locator("#tabs a").first.is_visible()
    page.locator("#corruption-table summary").click()
    assert page.locator("#corruption-table table").is_visible()
    assert page.locator(".picture:visible, .fans-figure:visible, .resources-figure:visible").count() == 0


_HAS_COLOUR = """
(canvas, rgb) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) if (rgb.every((value, part) => data[at + part] === value)) return true;
  return false;
}
"""
LIGHT_BLUE, DARK_BLUE = [0, 114, 178], [86, 180, 233]


def test_on_paper_there_are_all_parts_and_pictures_in_light_colours(shown: Site, browse: Callable[..., Tab]) -> None:
    """A browser prints what stands there as `beforeprint` is over: tabs that nobody opened are drawn by then."""
    tab = browse(f"{shown.url}/trials/1", scheme="dark")
    page = tab.page
    page.wait_for_selector(".trial-curves[data-drawn='4']")
    page.evaluate("() => import('/static/pictures.js').then(({load}) => load())")  # what is loaded when it is idle
    drawn = page.locator(
        ".picture[data-drawn], .fans-figure[data-drawn='8'], .resources-figure[data-drawn='4'],"
        " .values-figure[data-drawn='1']"
    )
    curves, fans = page.locator(".trial-curves canvas:not(.stroke)").first, page.locator(".fans-figure canvas").last
    assert drawn.count() == 0
    page.evaluate("() => { dispatchEvent(new Event('beforeprint')); }")
    assert drawn.count() == 8
    sheets = page.locator(".picture .sheet")
    assert sheets.evaluate_all("all => all.map(one => one.width > 2000)") == [True] * 5
    for canvas in (curves, fans):
        assert canvas.evaluate("one => one.width / one.clientWidth") > 2.5  # as paper is finer than a screen
        assert canvas.evaluate(_HAS_COLOUR, LIGHT_BLUE)
        assert not canvas.evaluate(_HAS_COLOUR, DARK_BLUE)
    page.emulate_media(media="print")
    for width in (1031, 640):  # a sheet across, and another that somebody chose
        page.set_viewport_size({"width": width, "height": 900})
        for panel in PANELS:
            assert page.locator(f"#{panel}").is_visible(), panel
        right = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
        seen = page.locator("canvas, .u-wrap" if width == 640 else "th, td, canvas, .u-wrap").locator("visible=true")
        assert seen.evaluate_all(right) <= width
    # A log that were no higher than on a screen would stand on what follows.
    assert page.locator("pre.log").evaluate("one => getComputedStyle(one).maxHeight") == "none"
    breaks = "all => all.map(one => getComputedStyle(one)).map(one => one.breakInside + ' ' + one.breakAfter)"
    assert set(page.locator("h2:visible, h3:visible").evaluate_all(breaks)) == {"auto avoid"}
    assert set(page.locator(".charts-live, .trial-curves, .fans-figure").evaluate_all(breaks)) == {"auto auto"}
    page.emulate_media(media="screen", color_scheme="dark")
    page.set_viewport_size({"width": 1280, "height": 900})
    tab.until("() => !document.documentElement.classList.contains('paper')")
    assert sheets.count() == 0
    assert curves.evaluate(_HAS_COLOUR, DARK_BLUE)
    assert page.locator("details[open]").count() == 0
    page.locator("#tabs a[href='#robustness']").click()
    page.locator(".picture[data-picture=lipschitz] canvas").wait_for()
    tab.until("() => document.querySelector('[data-picture=lipschitz] canvas').clientWidth > 1200")


def test_one_that_ends_while_it_is_watched_fills_its_tabs(live: Site, browse: Callable[..., Tab]) -> None:
    tab = browse(f"{live.url}/trials/{RUNNING}#calibration")
    page = tab.page
    assert "It is not finished yet" in page.locator("#calibration").inner_text()
    page.evaluate("() => { window.same = true; }")

    def end(session: Session) -> None:
        measured.attempts(session, RUNNING)
        measured.spectra(session, RUNNING)
        grids.finish(session, RUNNING, 0.4321, **measured.changes(0.4321))

    tab.quiet(2.5)  # longer than what is changed waits to be read: it stands there as it began
    live.database.write(end)
    page.wait_for_selector(".picture[data-picture=reliability][data-drawn]")
    assert "expected calibration error" in page.locator("#calibration").inner_text()
    for panel, selector in (
        ("robustness", ".picture[data-picture=lipschitz][data-drawn]"),
        ("singular-values", ".fans-figure[data-drawn='8']"),
        ("resources", ".resources-figure[data-drawn='4']"),
    ):
        page.locator(f"#tabs a[href='#{panel}']").click()
        page.wait_for_selector(selector)
    assert "43.21 %" in page.locator("#result").text_content()
    assert page.evaluate("() => window.same") is True


def test_spectra_of_a_single_epoch_are_dots(live: Site, browse: Callable[..., Tab]) -> None:
    live.database.write(lambda session: measured.spectra(session, RUNNING, epochs=1))
    page = browse(f"{live.url}/trials/{RUNNING}#singular-values", scheme="light").page
    page.wait_for_selector(".fans-figure[data-drawn='8']")
    assert page.locator(".fans-figure canvas:not(.stroke)").first.evaluate(_HAS_COLOUR, LIGHT_BLUE)


def test_while_it_trains_the_page_is_not_read_again(live: Site, browse: Callable[..., Tab]) -> None:
    tab = browse(f"{live.url}/trials/{RUNNING}#singular-values")
    page = tab.page
    tab.quiet(2.5)
    tab.asked.clear()

    def step(session: Session) -> None:
        trial = session.get(Trial, RUNNING)
        assert trial is not None
        trial.epoch += 1
        measured.spectra(session, RUNNING, epochs=15)

    assert page.locator("#watched > .empty").is_visible()
    live.database.write(step)
    page.wait_for_selector(".fans-figure[data-drawn='8']")
    assert not page.locator("#watched > .empty").is_visible()
    assert not [url for url in tab.asked if url == f"{live.url}/trials/{RUNNING}"]
    # What is drawn anew stays as it was zoomed, and keys go on where they were.
    tab.quiet(2)
    page.locator(".fans-figure .uplot").first.focus()
    for key in ("Home", "Shift+ArrowRight", "Enter"):
        page.keyboard.press(key)
    with page.expect_response("**/spectra/epochs"):
        page.evaluate("() => document.dispatchEvent(new CustomEvent('progressed'))")
    tab.settle()
    page.keyboard.press("End")
    assert page.locator(".fans-figure .readout").inner_text().startswith("epoch 5;")
    with live.database.read() as session:
        trial = session.get(Trial, RUNNING)
        assert trial is not None
        assert f"epoch {trial.epoch} of 80" in page.locator("#summary").inner_text()


def test_numbers_at_the_edges(shown: Site, browse: Callable[..., Tab]) -> None:
    """Of nothing but zeros an axis has a length, of equal numbers a label; what is whole keeps its digits."""
    page = browse(f"{shown.url}/trials/1").page
    page.wait_for_selector(".trial-curves[data-drawn]")
    found = page.evaluate(
        """async () => {
          const [{ LineCharts }, { said, ticks }, { scaleOf }] = await Promise.all(
            ['lines', 'numbers', 'parallel'].map(name => import(`/static/${name}.js`)));
          const figure = document.querySelector('.trial-curves');
          const view = new LineCharts(figure, {key: 'edges', along: 's', say: String});
          const one = {title: 't', xs: [0, 1], from: 0, series: [{label: 'a', values: [0, 0], stroke: '#ff0000'}]};
          view.show(() => Array(140).fill(one));
          const png = await view.png();
          const { min, max } = view.plots[0].scales.y;
          const blob = await new Promise(done => png.toBlob(done));
          return [min, max, blob !== null, said(12345), said(131072), scaleOf([23.4, 23.4], String, true).labels,
            ticks([1, 1.0002, 0.1 + 0.2, null]), scaleOf([1.0001, 1.0002], String, true).labels[1].text];
        }"""
    )
    assert found == [
        0,
        1,
        True,
        "12\u202f345",
        "131\u202f072",
        [{"text": "23.4", "at": 0}],
        ["1", "1.0002", "0.3", ""],
        "1.00012",
    ]


def test_the_log_is_followed_while_its_tab_is_seen(live: Site, browse: Callable[..., Tab]) -> None:
    log = live.data_dir / "trials" / str(RUNNING) / "1" / "trial.log"
    log.parent.mkdir(parents=True)
    log.write_text("the first line\n")
    tab = browse(f"{live.url}/trials/{RUNNING}")
    page = tab.page
    page.wait_for_timeout(500)
    assert not [url for url in tab.asked if "/logs" in url]
    page.route("**/logs?*", lambda route: route.fulfill(status=503), times=1)  # asked for again
    page.locator("#tabs a[href='#followed']").click()
    page.locator("#log-live:has-text('the first line')").wait_for()
    with log.open("a") as file:
        file.write("<b>the second</b>\n")
    page.locator("#log-live:has-text('<b>the second</b>')").wait_for()
    page.locator("#tabs a[href='#training']").click()
    page.wait_for_timeout(300)
    with log.open("a") as file:
        file.write("the third\n")
    page.wait_for_timeout(1200)
    assert "the third" not in page.locator("#log-live").text_content()  # left: nothing is read for it
    page.locator("#tabs a[href='#followed']").click()
    page.locator("#log-live:has-text('the third')").wait_for()

    def fail(session: Session) -> None:
        trial = session.get(Trial, RUNNING)
        assert trial is not None
        trial.state, trial.failure, trial.error = TrialState.FAILED, "error", "it failed"

    live.database.write(fail)
    page.wait_for_selector("#log-live[data-ended]")
    tab.quiet(2)

    def again(session: Session) -> None:
        trial = session.get(Trial, RUNNING)
        assert trial is not None
        trial.state, trial.failure, trial.error, trial.attempts = TrialState.RUNNING, None, None, 2

    live.database.write(again)
    log = log.parents[1] / "2" / "trial.log"
    log.parent.mkdir()
    log.write_text("once more\n")
    come_back(page)
    page.locator("#log-live:has-text('once more')").wait_for()
    tab.complaints.clear()  # the console tells of what had no answer

    def cancel(session: Session) -> None:
        trial = session.get(Trial, RUNNING + 1)
        assert trial is not None
        trial.state = TrialState.CANCELLED

    def late(route: Any) -> None:
        live.database.write(cancel)  # since the page was read
        route.continue_()

    page.route("**/logs?*", late)
    tab.go(f"{live.url}/trials/{RUNNING + 1}#followed")
    page.locator("#log", has_text="There is none.").wait_for()
    tab.quiet(1)


def test_radii_of_every_image_are_read_from_their_file(live: Site, browse: Callable[..., Tab]) -> None:
    """Where the file of predictions is there, the curve has a point for each of many radii."""
    import torch  # which no other test of pages needs
    from safetensors.torch import save_file

    folder = live.data_dir / "trials" / "1" / "1"
    folder.mkdir(parents=True)
    file: Any = folder / "predictions.safetensors"
    radii = torch.linspace(-0.2, 0.8, 1001, dtype=torch.float64)
    save_file({"labels": torch.zeros(1001, dtype=torch.int64), "certified_radii": radii}, file)

    def dress(session: Session) -> None:
        measured.dress(session, 1)
        path = "trials/1/1/predictions.safetensors"
        size = file.stat().st_size
        session.add(Artifact(trial_id=1, kind="predictions", path=path, sha256="0" * 64, size=size))

    live.database.write(dress)
    page = browse(f"{live.url}/trials/1#robustness").page
    page.wait_for_selector(".picture[data-picture=certified][data-drawn='31']")
    figure = page.locator(".picture[data-picture=certified]")
    figure.locator(".canvas").focus()
    page.keyboard.press("Home")
    assert figure.locator(".readout").inner_text() == "L2 radius 0; certified 79.9 %"
