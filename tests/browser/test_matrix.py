"""An experiment as a matrix, in a browser: what it draws, how it is moved in, and what a change costs."""

import re
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from PIL import Image
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.client import Client
from service.database import Trial
from service.experiments import actions
from service.experiments.submission import Draft, submit
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests import grids
from tests.browser.conftest import Site, Tab, served

DRAWN = "#matrix .matrix-figure[data-drawn]"


def drawn(tab: Tab) -> Tab:
    """Waits for the picture."""
    tab.page.wait_for_selector(DRAWN)
    return tab


def test_it_is_drawn_and_a_table_stands_behind_it(site: Site, browse: Callable[..., Tab]) -> None:
    page = drawn(browse(f"{site.url}/experiments/1")).page
    assert page.locator(DRAWN).get_attribute("data-drawn") == "20"
    assert page.locator("#matrix canvas").count() >= 2
    rows = page.locator("#matrix .behind tbody tr")
    assert rows.count() == 4
    assert re.search(r"\d\d\.\d\d ± \d+\.\d\d \(\d of 5\)", rows.nth(1).inner_text() or rows.nth(1).text_content())
    legend = page.locator("#matrix .scale").inner_text()
    assert "accuracy, mean over seeds" in legend
    assert "running" in legend


def test_a_saved_picture_says_what_it_shows(site: Site, browse: Callable[..., Tab]) -> None:
    tab = drawn(browse(f"{site.url}/experiments/1?where=rank%3E2"))
    legend = tab.page.locator("#matrix .scale")
    name, content = tab.saved("#matrix button[data-save=svg]")
    assert name == "matrix-1-accuracy.svg"
    drawing = ElementTree.fromstring(content)
    said = " ".join(text.strip() for text in drawing.itertext())
    for words in (
        "Rank against lambda, VGG (experiment 1)",
        "where rank>2",
        "accuracy, mean over seeds:",
        "not all seeds",
    ):
        assert words in said, words
    for part in (*legend.locator(".key").all_inner_texts(), *legend.locator(".end").all_inner_texts()):
        assert part in said, part
    assert drawing.findall(".//{*}pattern/{*}image")  # what waits or failed, by its pattern
    assert len(drawing.findall(".//{*}linearGradient/{*}stop")) > 2
    name, content = tab.saved("#matrix button[data-save=png]")
    with Image.open(BytesIO(content)) as picture:
        shown = tab.page.locator("#matrix .canvas").bounding_box()
        assert picture.width == 2 * shown["width"]
        assert picture.height > 2 * (shown["height"] + 40)  # the head is above the matrices


def test_long_headings_stand_above_their_matrices(live: Site, browse: Callable[..., Tab]) -> None:
    fields: dict[str, list[Any]] = {
        "training.batch_size": [32, 64],
        "training.lr": [0.1, 0.2],
        "training.momentum": [0, 0.9],
    }
    grid = fields | {"rank": [2, 4], "lambda_ort": [0.0, 1.0], "training.weight_decay": [0, 0.1]}
    spec = ExperimentSpec(name="many", base={"dataset": "cifar10", "model": "vgg11", "layer": "tt"}, grid=grid)
    made = live.database.write(lambda session: submit(session, Draft(spec, expand_grid(spec, max_trials=100))).id)
    tab = drawn(browse(f"{live.url}/experiments/{made}"))
    _, content = tab.saved("#matrix button[data-save=svg]")
    tab.go("about:blank")
    tab.page.evaluate("drawing => (document.body.innerHTML = drawing)", content.decode())
    names, overlapping = tab.page.evaluate(
        """() => {
            const texts = [...document.querySelectorAll("svg text")];
            const box = (one) => one.getBoundingClientRect();
            const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1;
            const names = texts.filter((one) => one.textContent === "lambda_ort");
            const others = texts.filter((one) => !names.includes(one));
            const hidden = others.filter((b) => names.some((a) => over(box(a), box(b))));
            return [names.length, hidden.map((b) => b.textContent)];
        }"""
    )
    assert (names, overlapping) == (16, [])


def test_places_on_a_telephone_have_the_colours_of_their_scale(live: Site, browse: Callable[..., Tab]) -> None:
    """Two hundred in a row, of one accuracy, and two data sets with names as long as they may be."""
    data = [f"npz:{'d' * 50}", f"npz:{'e' * 50}"]
    grid: dict[str, list[Any]] = {"dataset": data, "training.lr": [0.001 * (1 + k) for k in range(200)]}
    spec = ExperimentSpec(name="wide", base={"model": "small-cnn"}, grid=grid)

    def post(session: Session) -> int:
        made = submit(session, Draft(spec, expand_grid(spec, max_trials=400))).id
        for trial_id in session.scalars(select(Trial.id).where(Trial.experiment_id == made)).all():
            grids.finish(session, trial_id, 0.5)
        return made

    made = live.database.write(post)
    page = drawn(browse(f"{live.url}/experiments/{made}?x=training.lr", scheme="dark", width=390)).page
    assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.locator("#matrix .scale .end").all_inner_texts() == ["50.00 %"]
    seen, scale = page.evaluate(
        """() => {
            const canvas = document.querySelector("#matrix .canvas canvas");
            const mean = (one, ...part) => {
                const { data } = one.getContext("2d").getImageData(...part);
                const of = (which) => data.filter((_, at) => at % 4 === which);
                return [0, 1, 2, 3].map((which) => of(which).reduce((a, b) => a + b) / (data.length / 4));
            };
            const bar = document.querySelector("#matrix .scale canvas");
            return [mean(canvas, canvas.width - 150, 24, 100, 2), mean(bar, 0, 0, bar.width, bar.height)];
        }"""
    )
    assert max(abs(a - b) for a, b in zip(seen, scale, strict=True)) < 12, (seen, scale)


def test_arrow_keys_move_and_enter_opens(site: Site, browse: Callable[..., Tab]) -> None:
    page = drawn(browse(f"{site.url}/experiments/1")).page
    page.locator("#matrix .canvas").focus()
    said = page.locator("#matrix .readout")
    page.keyboard.press("Home")
    # The ring is no wider than leaves the words above alone.
    assert page.locator("#matrix .canvas").evaluate("one => getComputedStyle(one).outlineOffset") == "0px"
    first = said.inner_text()
    assert "rank 2" in first
    assert "of 5 seeds" in first
    page.keyboard.press("ArrowRight")
    assert "rank 4" in said.inner_text()
    page.keyboard.press("ArrowDown")
    assert "lambda_ort 0.01" in said.inner_text()
    page.keyboard.press("End")
    assert "rank 32" in said.inner_text()
    page.keyboard.press("ArrowRight")
    assert "rank 32" in said.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/trials\?dataset=cifar10&cell=[0-9a-f]{64}"))
    assert page.locator("tr[data-trial]").count() == 5


def test_on_another_screen_it_is_as_fine(site: Site, browse: Callable[..., Tab]) -> None:
    tab = drawn(browse(f"{site.url}/experiments/1", fresh=True))
    page = tab.page
    page.locator("#matrix .canvas").focus()
    page.keyboard.press("Home")
    tab.to_screen(2)
    page.keyboard.press("ArrowRight")
    assert "rank 4" in page.locator("#matrix .readout").inner_text()
    page.locator(".tabs a[href='#curves-panel']").click()
    page.wait_for_selector(".curves-figure[data-drawn='4']")
    tab.to_screen(1)
    page.locator(".tabs a[href='#matrix']").click()  # it was not to be seen meanwhile
    tab.to_screen(1)


def test_hover_says_mean_and_deviation_and_a_click_opens(site: Site, browse: Callable[..., Tab]) -> None:
    page = drawn(browse(f"{site.url}/experiments/1")).page
    box = page.locator("#matrix .canvas").bounding_box()
    page.mouse.move(box["x"] + 120, box["y"] + 20)
    tip = page.locator(".tip")
    tip.wait_for(state="visible")
    assert re.search(r"rank \d+, lambda_ort 0\b[^±]*accuracy \d\d\.\d\d ± \d\.\d\d %\s+\d of 5 seeds", tip.inner_text())
    page.mouse.click(box["x"] + 120, box["y"] + 20)
    page.wait_for_url(re.compile("cell="))


def test_places_are_chosen_by_keys_and_mouse_and_compared(site: Site, browse: Callable[..., Tab]) -> None:
    tab = drawn(browse(f"{site.url}/experiments/1"))
    page = tab.page
    place, bar = page.locator("#matrix .canvas"), page.locator("#matrix .chosen")
    assert not bar.is_visible()
    place.focus()
    page.route("**/v1/trials/*", lambda route: route.fulfill(status=503), times=1)  # asked for again
    page.keyboard.press("Space")
    assert bar.locator(".count").inner_text() == "1 chosen: choose 2 to 10 to compare them"
    assert "; chosen; " in page.locator("#matrix .readout").inner_text()
    assert not bar.locator(".compare").is_visible()
    box = place.bounding_box()
    for x in (box["x"] + 200, box["x"] + 280):
        page.keyboard.down("Shift")
        page.mouse.click(x, box["y"] + 20)
        page.keyboard.up("Shift")
    assert bar.locator(".count").inner_text() == "3 chosen"
    page.keyboard.press("Space")  # where the mouse was last
    assert bar.locator(".count").inner_text() == "2 chosen"
    page.locator("#matrix .compare").click()
    page.wait_for_url(re.compile(r"/compare\?cells=[0-9a-f]{64},[0-9a-f]{64}$"))
    assert page.locator("thead").first.locator(".side").count() == 2
    page.go_back()
    page.wait_for_selector(DRAWN)
    place.focus()
    page.keyboard.press("Space")
    bar.locator("[data-none]").click()
    assert not bar.is_visible()
    assert page.evaluate("() => document.activeElement.getAttribute('aria-roledescription')") == "matrix"
    tab.complaints.clear()  # the console tells of what had no answer


def test_holes_are_in_the_key_and_small_places_say_which_seeds_lack(live: Site, browse: Callable[..., Tab]) -> None:
    base = {"dataset": "cifar10", "model": "vgg11", "training": {"epochs": 3}}
    variants = [{"layer": "tt", "rank": 2 + at, "lambda_ort": 0.1 if at % 3 else 1.0} for at in range(14)]
    spec = ExperimentSpec(name="ragged", base=base, variants=variants, grid={"seed": [0, 1]})
    plan = expand_grid(spec, max_trials=100)
    made = live.database.write(lambda session: submit(session, Draft(spec, plan)).id)
    with live.database.read() as session:
        trials = list(session.scalars(select(Trial.id).where(Trial.experiment_id == made).order_by(Trial.number)))
    for trial in trials[:3]:
        live.database.write(partial(grids.finish, trial_id=trial, accuracy=0.7, loss=1e20))
    tab = drawn(browse(f"{live.url}/experiments/{made}?x=rank&y=lambda_ort"))
    for width, said in ((820, {"70.00", "1/2"}), (560, {"1/2"})):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.settle()
        assert "no trial" in tab.page.locator("#matrix .scale .key").all_inner_texts()
        texts = ElementTree.fromstring(tab.saved("#matrix button[data-save=svg]")[1]).iter(
            "{http://www.w3.org/2000/svg}text"
        )
        assert said <= {text.text for text in texts}, width
    tab = drawn(browse(f"{live.url}/experiments/{made}?x=rank&y=lambda_ort&metric=loss"))
    tab.page.set_viewport_size({"width": 820, "height": 900})
    tab.settle()
    texts = ElementTree.fromstring(tab.saved("#matrix button[data-save=svg]")[1]).iter(
        "{http://www.w3.org/2000/svg}text"
    )
    assert [text.text for text in texts].count("1.0e+20") == 2, "whole it would not fit"
    tab = drawn(browse(f"{live.url}/experiments/1"))
    assert "no trial" not in tab.page.locator("#matrix .scale .key").all_inner_texts()


def test_another_choice_exchanges_the_panel_and_keeps_the_focus(site: Site, browse: Callable[..., Tab]) -> None:
    tab = drawn(browse(f"{site.url}/experiments/1"))
    page = tab.page
    tab.asked.clear()
    page.locator("select[name=metric]").focus()
    page.locator("#matrix select[name=metric]").select_option("ece")
    tab.until("() => document.querySelector('#matrix .scale').innerText.includes('ECE, mean')")
    assert page.evaluate("document.activeElement.name") == "metric"
    assert "metric=ece" in page.url
    page.locator("#matrix select[name=seeds]").select_option("max")
    tab.until("() => document.querySelector('#matrix .scale').innerText.includes('ECE, largest')")
    page.locator("#matrix select[name=x]").select_option("lambda_ort")
    tab.until("() => document.querySelector('#matrix select[name=y]').value === 'rank'")
    tab.until("() => !document.querySelector('#matrix').hasAttribute('aria-busy')")
    assert not [url for url in tab.asked if re.search(r"/experiments/1($|\?)", url)]
    page.go_back()
    tab.until("() => document.querySelector('#matrix select[name=x]').value !== 'lambda_ort'")
    assert page.evaluate("document.querySelector('#matrix select[name=seeds]').value") == "max"
    page.go_back()
    tab.until("() => document.querySelector('#matrix select[name=seeds]').value === 'mean'")
    page.locator("[role=tab][href='#trials-panel']").click()
    page.go_back()
    tab.until("() => document.querySelector('#matrix select[name=metric]').value === 'accuracy'")
    assert page.locator("#matrix").is_visible()  # where no tab was chosen yet
    # The first choice is gone back to from an address that names the tab, too.
    tab.go(f"{page.url.partition('#')[0].partition('?')[0]}#matrix")
    drawn(tab)
    page.locator("#matrix select[name=seeds]").select_option("max")
    tab.until("() => location.search.includes('seeds=max')")
    page.go_back()
    tab.until("() => document.querySelector('#matrix select[name=seeds]').value === 'mean'")
    # Where that has no answer, the page is read anew.
    page.locator("#matrix select[name=seeds]").select_option("max")
    tab.until("() => location.search.includes('seeds=max')")
    page.route("**/experiments/1/matrix", lambda route: route.abort(), times=1)
    page.go_back()
    page.locator("#matrix select[name=seeds] option[value=mean]:checked").wait_for(state="attached")
    tab.complaints.clear()  # the console tells of what had no answer


def test_a_condition_that_names_no_field_is_refused_where_it_was_written(
    site: Site, browse: Callable[..., Tab]
) -> None:
    tab = drawn(browse(f"{site.url}/experiments/1"))
    page, where = tab.page, tab.page.locator("#matrix .chooser input[name=where]")
    where.fill("ranc<=2")
    where.press("Enter")
    page.wait_for_selector("#matrix .alarm:visible")
    assert "there is no field 'ranc'; the nearest is rank" in page.locator("#matrix .alarm").inner_text()
    assert "ranc" not in page.url
    assert page.locator(DRAWN).count() == 1
    where.fill("rank<=2")
    where.press("Enter")
    tab.until("() => location.search.includes('rank')")
    tab.until("() => document.querySelector('#matrix .alarm').hidden")
    tab.complaints.clear()  # the console tells of what was refused


def test_a_change_patches_one_place_and_does_not_fetch_the_page(live: Site, browse: Callable[..., Tab]) -> None:
    tab = browse("about:blank")
    page = tab.page
    page.route("**/experiments/1/stream?*", lambda route: route.fulfill(status=503), times=1)  # asked for again
    with page.expect_response(lambda answer: "/stream?" in answer.url and answer.status == 200):
        tab.go(f"{live.url}/experiments/1")
    drawn(tab)
    before = page.locator("#matrix .behind table").text_content()
    tab.quiet(3)  # nothing changed, nothing is asked for
    tab.asked.clear()
    live.database.write(lambda session: grids.finish(session, 90, 0.1234))
    tab.until("before => document.querySelector('#matrix .behind table').textContent !== before", before)
    tab.until("() => document.querySelector('#summary').textContent.includes('17 running')")
    tab.until("() => document.querySelector('#events tr').textContent.includes('trial finished')")
    asked = {re.sub(r"^https?://[^/]+|\?.*", "", url) for url in tab.asked}
    assert asked <= {"/v1/experiments/1/matrix", "/experiments/1/changes"}
    assert all("trials=" in url for url in tab.asked if "/matrix" in url)
    assert len(tab.asked) <= 4
    # What has no answer for a moment is asked for again.
    before = page.locator("#matrix .behind table").text_content()
    page.route("**/experiments/1/*", lambda route: route.fulfill(status=429 if "/matrix" in route.request.url else 503))
    with (
        page.expect_response("**/experiments/1/matrix?*"),
        page.expect_response("**/experiments/1/changes?*"),
    ):
        live.database.write(lambda session: grids.finish(session, 91, 0.1234))
    page.unroute("**/experiments/1/*")
    tab.until("before => document.querySelector('#matrix .behind table').textContent !== before", before)
    tab.until("() => document.querySelector('#summary').textContent.includes('16 running')")
    tab.complaints.clear()  # the console tells of what had no answer
    # None is asked for before the answer to the one before is there.
    held: list[Any] = []
    page.route("**/experiments/1/matrix?*", lambda route: held.append(route))
    change = "trials => document.dispatchEvent(new CustomEvent('trials-changed', {detail: {trials}}))"
    with page.expect_request("**/experiments/1/matrix?*"):
        page.evaluate(change, [1])
    page.evaluate(change, [2])
    page.wait_for_timeout(1500)
    assert len(held) == 1
    page.route("**/experiments/1/matrix?*", lambda route: route.continue_())
    with page.expect_response("**/experiments/1/matrix?*trials=2"):
        held[0].continue_()


def test_a_change_is_written_as_the_table_says_its_numbers(live: Site, browse: Callable[..., Tab]) -> None:
    """The least of some seeds has no deviation, nor has a deviation."""
    tab = drawn(browse(f"{live.url}/experiments/1?seeds=min"))
    before = tab.page.locator("#matrix .behind table").text_content()
    live.database.write(lambda session: grids.finish(session, 90, 0.1234))
    tab.until("before => document.querySelector('#matrix .behind table').textContent !== before", before)
    after = tab.page.locator("#matrix .behind table").text_content()
    assert "12.34 (" in after
    assert "±" not in before + after
    tab.page.locator("#matrix .canvas").focus()
    assert re.search(r"least accuracy \d\d\.\d\d %; ", tab.page.locator("#matrix .readout").inner_text())


def test_while_the_service_is_away_it_asks_ever_less_until_it_is_heard_of(
    live: Site, browse: Callable[..., Tab]
) -> None:
    tab = drawn(browse(f"{live.url}/experiments/1"))
    tab.quiet(2)
    tab.ever_less(
        "**/v1/experiments/1/matrix?*",
        lambda: live.database.write(lambda session: grids.finish(session, 90, 0.5)),
    )
    with tab.page.expect_response("**/v1/experiments/1/matrix?*", timeout=4000):  # not after eight seconds
        tab.page.evaluate("document.dispatchEvent(new CustomEvent('answered'))")
    tab.complaints.clear()  # the console tells of what had no answer


def test_one_that_is_not_to_be_seen_is_read_once_it_is(live: Site, browse: Callable[..., Tab]) -> None:
    tab = browse(f"{live.url}/experiments/1?state=running")
    page = tab.page
    before = page.locator("#matrix .behind table").text_content()
    tab.quiet(2)
    live.database.write(lambda session: grids.finish(session, 90, 0.1234))
    tab.until("() => document.querySelector('#summary').textContent.includes('17 running')")
    tab.quiet(1.5)
    assert not [url for url in tab.asked if "/matrix?" in url]
    page.locator("[role=tab][href='#matrix']").click()
    tab.until("before => document.querySelector('#matrix .behind table').textContent !== before", before)


def test_what_changes_out_of_sight_leaves_it_as_wide(live: Site, browse: Callable[..., Tab]) -> None:
    """A new least value, by which all colours are others, while another tab is seen."""
    right = """() => {
      const canvas = document.querySelector('#matrix .canvas canvas');
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let most = 0;
      data.forEach((value, at) => at % 4 === 3 && value > 0 && (most = Math.max(most, ((at - 3) / 4) % canvas.width)));
      return most;
    }"""
    tab = drawn(browse(f"{live.url}/experiments/1"))
    page = tab.page
    tab.settle()
    before, wide = page.locator("#matrix .behind table").text_content(), page.evaluate(right)
    page.locator("[role=tab][href='#trials-panel']").click()
    live.database.write(lambda session: grids.finish(session, 90, 0.1234))
    tab.until("before => document.querySelector('#matrix .behind table').textContent !== before", before)
    page.locator("[role=tab][href='#matrix']").click()
    tab.settle()
    assert "12.34" in page.locator("#matrix .scale").inner_text()
    assert abs(page.evaluate(right) - wide) < 5


def test_the_list_stays_of_what_it_was_asked_for(live: Site, browse: Callable[..., Tab]) -> None:
    """What is chosen of the matrix later holds for the list once the page is read with it: its form says so then."""
    tab = drawn(browse(f"{live.url}/experiments/1"))
    page = tab.page
    where = page.locator("#matrix .chooser input[name=where]")
    where.fill("rank=2")
    where.press("Enter")
    tab.until("() => location.search.includes('rank')")
    with page.expect_response(lambda answer: answer.url.endswith("/experiments/1")):
        live.database.write(lambda session: actions.cancel(session, 1))
    page.locator("#trials tr[data-trial]", has_text="cancelled").first.wait_for(state="attached")
    assert page.locator("#trials tr[data-trial]").count() == 100


def test_no_matrix_is_higher_than_a_canvas_can_be(site: Site, browse: Callable[..., Tab]) -> None:
    page = drawn(browse(f"{site.url}/experiments/1")).page
    height = page.evaluate(
        """async () => {
          const { Matrix } = await import('/static/matrix.js');
          const texts = Array.from({length: 9000}, (_, index) => String(index));
          const [x, y] = [{field: 'a', values: [1]}, {field: 'b', name: 'b', values: texts}];
          const data = {x, y, texts: {x: ['1'], y: texts, facets: ['']}};
          const one = {data, facets: 1, measure: () => 20, linesOf: () => 0};
          return Matrix.prototype.layout.call(one, 1200).height;
        }"""
    )
    assert 10_000 < height < 16_200


def test_one_that_grows_goes_on_where_it_stood(live: Site, browse: Callable[..., Tab]) -> None:
    tab = drawn(browse(f"{live.url}/experiments/1"))
    page = tab.page
    page.locator("#matrix .chooser input[name=where]").evaluate("one => (one.value = 'rank>')")
    page.locator("#matrix .canvas").focus()
    for key in ("ArrowRight", "ArrowDown", "Space"):
        page.keyboard.press(key)
    said = page.locator("#matrix .readout").inner_text()
    with page.expect_response("**/experiments/1/matrix?*"):
        live.database.write(lambda session: actions.retry(session, 1))
    tab.until("() => !document.querySelector('#matrix .scale').innerText.includes('failed')")
    tab.settle()
    assert page.locator("#matrix .readout").inner_text() == said
    assert page.locator("#matrix .chosen .count").inner_text().startswith("1 chosen")
    assert page.evaluate("() => document.activeElement.getAttribute('aria-roledescription')") == "matrix"
    assert page.locator("#matrix .chooser input[name=where]").input_value() == "rank>"
    page.locator("#matrix button[data-save=svg]").focus()
    with page.expect_response("**/experiments/1/matrix?*"), page.expect_response(lambda answer: answer.url == page.url):
        live.database.write(lambda session: actions.cancel(session, 1))
    tab.settle()
    assert page.evaluate("() => document.activeElement.dataset.save") == "svg"
    # Who is signed out meanwhile is not led away from what stands there.
    page.route("**/experiments/1/matrix?*", lambda route: route.fulfill(status=401))
    tab.asked.clear()
    with page.expect_response("**/experiments/1/matrix?*"):
        page.evaluate(
            "trials => document.dispatchEvent(new CustomEvent('trials-changed', {detail: {trials}}))", [*range(501)]
        )
    tab.quiet(0.3)
    assert not [url for url in tab.asked if url == page.url]
    tab.complaints.clear()  # the console tells of what was refused


def test_the_focus_stays_after_a_verb(live: Site, browse: Callable[..., Tab]) -> None:
    tab = drawn(browse(f"{live.url}/experiments/1"))
    page = tab.page
    page.locator("button:text-is('Pause')").focus()
    page.keyboard.press("Enter")
    page.locator("button:text-is('Resume')").wait_for(timeout=1300)  # at once, not with what else changes
    assert page.evaluate("document.activeElement.closest('#verbs') !== null")
    assert "Done" in page.locator("#action-said").inner_text()
    tab.until("() => document.querySelector('#summary').textContent.includes('paused')")


def test_name_notes_tags_and_priority_are_edited(live: Site, browse: Callable[..., Tab]) -> None:
    other = drawn(browse(f"{live.url}/experiments/1")).page
    tab = drawn(browse(f"{live.url}/experiments/1"))
    page = tab.page
    page.click("button:text-is('Edit')")
    dialog = page.locator("#edit-dialog")
    dialog.locator("[name=name]").fill("Another <b>name</b>")
    dialog.locator("[name=tags]").fill("thesis, ranks")
    dialog.locator("[name=priority]").fill("7")
    dialog.locator("[name=notes]").fill("line one\nline two")
    dialog.locator("button[type=submit]").click()
    dialog.wait_for(state="hidden")
    tab.until("() => document.querySelector('#summary').textContent.includes('line two')")
    assert page.locator("h1").inner_text() == "Another <b>name</b>"
    assert page.locator("#summary .tag").all_inner_texts() == ["ranks", "thesis"]
    assert '"Another <b>name</b>"' in page.locator("#spec").text_content()
    assert page.evaluate("document.activeElement.textContent") == "Edit"
    other.locator("h1:text-is('Another <b>name</b>')").wait_for()
    assert other.title() == page.title() == "Another <b>name</b> (experiment 1) · ttsv"
    page.click("button:text-is('Edit')")
    dialog.locator("[name=name]").fill("x")
    page.evaluate("document.querySelector('#edit-dialog [name=priority]').removeAttribute('max')")
    dialog.locator("[name=priority]").fill("5000")
    dialog.locator("button[type=submit]").click()
    dialog.locator(".alarm").wait_for()
    assert "Refused (422)" in dialog.locator(".alarm").inner_text()
    tab.complaints.clear()  # the console tells of every answer that refuses


def test_what_another_tab_changed_stands_in_the_form_of_changes(live: Site, browse: Callable[..., Tab]) -> None:
    here, there = (browse(f"{live.url}/experiments/1") for _ in range(2))
    for page, field, text in ((there.page, "notes", "theirs"), (here.page, "name", "ours")):
        page.get_by_role("button", name="Edit", exact=True).click()
        page.locator(f"#edit-dialog [name={field}]").fill(text)
        page.locator("#edit-dialog button[type=submit]").click()
        page.locator("#edit-dialog").wait_for(state="hidden")
    for tab in (here, there):
        tab.page.get_by_role("button", name="Edit", exact=True).click()
        for field, text in (("name", "ours"), ("notes", "theirs")):
            tab.until(f"text => document.querySelector('#edit-dialog [name={field}]').value === text", text)


def test_what_somebody_else_added_is_not_counted_as_ours(live: Site, browse: Callable[..., Tab]) -> None:
    tab = drawn(browse(f"{live.url}/experiments/1"))
    page = tab.page
    with Client(live.url) as client:
        client.extend(1, grid={"rank": [256]})
    tab.until("() => document.querySelector('#spec').textContent.includes('256')")
    page.click("button:text-is('Extend')")
    page.locator("#extend-dialog [name='grid.rank']").fill("64, 128")
    page.locator("#extend-dialog button[type=submit]").click()
    tab.until("() => document.querySelector('#action-said').textContent.includes('added')")
    assert page.locator("#action-said").inner_text() == "40 trials added."


def test_it_is_extended_cloned_and_evaluated_again(live: Site, browse: Callable[..., Tab]) -> None:
    tab = drawn(browse(f"{live.url}/experiments/1"))
    page = tab.page
    other = browse(f"{live.url}/experiments/1?where=rank%3E32")
    other.page.locator("#matrix .empty:has-text('No trial is like that')").wait_for()
    ranks, said = page.locator("#extend-dialog [name='grid.rank']"), page.locator("#action-said")
    assert ranks.get_attribute("placeholder") == "beside 2, 4, 8, 16, 32"
    page.click("button:text-is('Extend')")
    ranks.fill("x")
    page.click("#extend-dialog [data-close]")
    page.click("button:text-is('Extend')")
    assert ranks.input_value() == ""  # what was left is not sent with what comes later
    ranks.fill("2, 4,")
    page.locator("#extend-dialog button[type=submit]").click()
    tab.until("() => document.querySelector('#action-said').textContent.startsWith('Nothing added')")
    page.click("button:text-is('Extend')")
    ranks.fill("64, 128")
    page.locator("#extend-dialog button[type=submit]").click()
    page.wait_for_selector(f"{DRAWN}[data-drawn='28']")
    assert said.inner_text() == "40 trials added."
    other.page.wait_for_selector(f"{DRAWN}[data-drawn='8']")  # the first that are like that
    page.click("button:text-is('Clone')")
    dialog = page.locator("#clone-dialog")
    dialog.locator("[name=name]").fill("the clone")

    def lose(route: Any) -> None:
        route.fetch()
        route.abort()

    page.route("**/clone", lose, times=1)
    dialog.locator("button[type=submit]").click()
    dialog.locator(".alarm:has-text('No answer')").wait_for()
    dialog.evaluate("one => one.addEventListener('close', () => sessionStorage.setItem('closed', '1'))")
    dialog.locator("button[type=submit]").click()
    page.wait_for_url(re.compile(r"/experiments/2$"))  # a second try makes no second one
    assert page.evaluate("sessionStorage.getItem('closed')") == "1"  # nor does a click on the way there
    tab.complaints.clear()  # the console tells of what had no answer
    assert page.locator("h1").inner_text() == "the clone"
    assert page.locator(".state").first.inner_text() == "queued"


def test_without_scripts_everything_stands_below_each_other(site: Site, browse: Callable[..., Tab]) -> None:
    page = browse(f"{site.url}/experiments/1", script=False).page
    for heading in ("Matrix", "Trials", "What happened", "Spec"):
        assert page.locator(f"h2:text-is('{heading}')").is_visible()
    page.locator("#matrix summary").click()
    assert page.locator("#matrix .behind table").is_visible()
    page.locator("#matrix select[name=metric]").select_option("ece")
    page.locator("#matrix button[type=submit]").click()
    assert "metric=ece" in page.url
    assert "ECE" in page.locator("#matrix caption").text_content()


def test_an_experiment_of_10_000_trials(sqlite_template: Path, tmp_path: Path, browse: Callable[..., Tab]) -> None:
    """What it weighs, and what an idle minute costs: nothing is asked for while nothing changes."""
    file = tmp_path / "ttsv.db"
    file.write_bytes(sqlite_template.read_bytes())
    with served(file) as large:
        grids.fill(large.database, 10_000, curves=0)
        tab = browse("about:blank", fresh=True)
        page = tab.page
        received: list[int] = []
        protocol = page.context.new_cdp_session(page)
        protocol.send("Network.enable")
        protocol.on("Network.dataReceived", lambda said: received.append(said["encodedDataLength"]))
        protocol.on("Network.loadingFinished", lambda said: received.append(0))
        page.goto(f"{large.url}/experiments/1")
        drawn(tab)
        assert page.locator(DRAWN).get_attribute("data-drawn") == "2000"
        libraries = 260_000
        assert sum(received) < libraries + 300_000
        for _ in range(3):  # where others compute it may hear late of what was, and read that once
            tab.quiet(4)  # longer than what is changed waits to be read
            received.clear()
            tab.asked.clear()
            page.wait_for_timeout(4000)
            if not tab.asked:
                break
        assert tab.asked == []
        assert sum(received) < 1000
        large.database.write(lambda session: actions.change(session, 1, {"priority": 3}, expected=lambda _: True))
        tab.until("() => document.querySelector('#summary').textContent.match(/priority\\s*3/)")
        assert not [url for url in tab.asked if url.endswith("/experiments/1")]
