"""The pages in a browser: curves, a trial watched to its end, lists, print, names that mean harm, accessibility."""

import random
import re
import runpy
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageStat
from sqlalchemy import Engine, insert, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from service.access import keys
from service.access.security import ANYONE, Scope, installation_secret, new_key
from service.api.http.authentication import COOKIE
from service.client import Client
from service.database import EpochPoint, Event, Experiment, Trial, TrialState, now
from service.experiments import actions
from service.experiments.submission import Draft, submit
from service.leaderboards.metrics import Metric
from service.queue import nodes
from service.queue.cluster import Node
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.upkeep import deletion
from tests import grids
from tests.browser.accessibility import OF_LOOKS, violations
from tests.browser.conftest import Pages, Site, Tab, served
from tests.examples import deep

LAYER = {"name": "conv1", "kind": "conv", "shape": {"kernel": [3]}, "largest": 1.0, "smallest": 0.5}
HOSTILE = "<b onclick=alert(1)>\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627</b>{{7*7}} " + "long" * 40


def posted(site: Site, name: str, **more: Any) -> int:
    """An experiment of a few trials."""
    base = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 3}}
    spec = ExperimentSpec(name=name, base=base, grid={"layer": ["dense", "soc"], "seed": [0, 1]}, **more)
    plan = expand_grid(spec, max_trials=100)
    made: int = site.database.write(lambda session: submit(session, Draft(spec, plan)).id)
    return made


def leave(page: Any) -> None:
    """What a browser says when somebody turns to another tab. (One without a window shows all of them.)"""
    page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', {configurable: true, value: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )


def come_back(page: Any) -> None:
    """What a browser says when somebody returns to a tab."""
    page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }")


class TestCurves:
    @pytest.fixture
    def tab(self, site: Site, browse: Callable[..., Tab]) -> Tab:
        tab = browse(f"{site.url}/experiments/1#curves-panel")
        tab.page.wait_for_selector(".curves-figure[data-drawn='4']")
        return tab

    def test_a_chart_for_each_metric_and_a_line_for_each_cell(self, tab: Tab) -> None:
        page = tab.page
        assert page.locator(".curves-panel .u-over").count() == 4
        assert page.locator(".lines li").count() == 5
        assert "(5 seeds)" in page.locator(".lines li").first.inner_text()
        page.locator(".lines button").nth(1).click()
        assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
        page.locator("input[name=bands]").uncheck()
        assert page.locator(".lines li").count() == 25
        assert page.locator(".lines button[aria-pressed=false]").count() == 0  # it was none of these that was hidden
        page.locator("input[name=metric][value=lr]").check()
        page.wait_for_selector(".curves-figure[data-drawn='5']")
        page.locator("input[name=best]").fill("2")
        page.locator("input[name=best]").blur()
        tab.until("() => document.querySelectorAll('.lines li').length === 10")
        page.locator("input[name=log]").check()
        page.locator(".lines a").first.click()
        page.wait_for_url("**/trials/*")
        page.go_back()  # what was chosen is in the form, and drawn
        tab.until("() => document.querySelectorAll('.lines li').length === 10")
        assert "logarithmic" in page.locator(".curves-panel .plot figcaption").first.inner_text()

    def test_one_cursor_over_all_charts_and_one_zoom(self, tab: Tab) -> None:
        page = tab.page
        over = page.locator(".curves-panel .u-over").first
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 60)
        page.locator(".tip").wait_for(state="visible")
        assert re.match(r"epoch \d+\s", page.locator(".tip").inner_text())
        crossed = page.locator(".curves-panel .u-cursor-x").evaluate_all("all => all.map(one => one.style.transform)")
        assert len(set(crossed)) == 1
        page.mouse.down()
        page.mouse.move(box["x"] + 250, box["y"] + 60, steps=5)
        page.mouse.up()
        page.wait_for_selector(".curves-figure[data-zoomed='x']")
        page.locator("button[data-unzoom]").first.click()
        page.wait_for_selector(".curves-figure[data-zoomed='']")

    def test_what_the_pointer_is_near_is_a_line_that_is_seen(self, tab: Tab) -> None:
        page = tab.page
        tab.settle()
        page.evaluate(
            "() => import('/static/curves.js').then(({CurveView}) => { const draw = CurveView.prototype.drawAll;"
            " CurveView.prototype.drawAll = function() { window.view = this; return draw.call(this); }; })"
        )
        page.emulate_media(color_scheme="dark")
        tab.until("() => window.view !== undefined && view.plots[0].over.clientWidth > 0")
        page.locator("#curves-panel .u-over").first.scroll_into_view_if_needed()
        at = page.evaluate(
            "() => { const [plot] = view.plots; const index = Math.floor(plot.data[0].length / 2);"
            " const isEdge = (one, which) => which > 0 && one.width === 0 && plot.data[which][index] !== null;"
            " const edge = plot.series.findIndex(isEdge);"
            " const {left, top} = plot.over.getBoundingClientRect();"
            " const [x, y] = [plot.valToPos(plot.data[0][index], 'x'), plot.valToPos(plot.data[edge][index], 'y')];"
            " return [left + x, top + y]; }"
        )
        page.mouse.move(at[0] - 20, at[1])
        page.mouse.move(*at)
        tab.until("() => view.plots[0].series.some((one) => one.width > 0 && one._focus)")
        page.mouse.down()
        page.mouse.move(at[0] + 60, at[1], steps=3)
        assert page.locator(".tip:visible").count() == 1
        page.mouse.up()
        assert page.locator(".tip:visible").count() == 0  # it said of another epoch than lies there now

    def test_arrow_keys_say_what_is_there(self, tab: Tab) -> None:
        page = tab.page
        page.locator(".curves-panel .uplot").first.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        said = page.locator(".curves-panel .readout")
        assert said.inner_text().startswith("epoch 2;")
        for scheme in ("dark", "light"):  # all is drawn anew meanwhile
            for _ in range(4):
                page.keyboard.press("Shift+ArrowRight")
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function(f"() => matchMedia('(prefers-color-scheme: {scheme})').matches")
        assert said.inner_text().startswith("from 2 to 10: Enter zooms; epoch 10;")
        page.keyboard.press("Enter")
        page.wait_for_selector(".curves-figure[data-zoomed='x']")
        page.keyboard.press("End")
        assert said.inner_text().startswith("epoch 10;")  # of what is to be seen
        page.keyboard.press("Escape")
        page.wait_for_selector(".curves-figure[data-zoomed='']")
        page.keyboard.press("End")
        assert said.inner_text().startswith("epoch 80;")

    def test_a_table_stands_behind_them(self, tab: Tab) -> None:
        page = tab.page
        tables = page.locator(".curves-panel .behind table")
        assert tables.count() == 0
        page.locator(".curves-panel .behind summary").click()
        tables.nth(3).wait_for()
        assert tables.locator("caption").first.inner_text() == "validation accuracy (%)"
        epochs = tables.first.locator("thead th").all_inner_texts()
        assert len(epochs) == 11
        assert (epochs[0], epochs[1], epochs[10]) == ("epoch", "1", "80")
        rows = tables.first.locator("tbody tr")
        assert rows.count() == page.locator(".lines li").count()
        assert re.search(r"\(5 seeds\)\s[\d.]+ ± [\d.]+\s", rows.first.inner_text())
        assert violations(tab) == []

    def test_they_are_smoothed_and_logarithmic(self, tab: Tab) -> None:
        page = tab.page
        page.locator("input[name=smoothing]").focus()
        page.keyboard.press("End")
        page.locator("input[name=log]").check()
        assert "logarithmic" in page.locator(".curves-panel .plot figcaption").first.inner_text()
        assert tab.saved(".curves-panel button[data-save=svg]")[1].count(b", logarithmic<") == 4

    def test_of_trials_that_are_not_there_it_is_said_once(self, site: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{site.url}/curves?trials=999")
        tab.quiet(0.3)
        assert tab.page.get_by_text("there is no trial 999").locator("visible=true").count() == 1

    def test_what_is_very_large_or_small_has_numbers_beside_it(self, site: Site, browse: Callable[..., Tab]) -> None:
        tab = browse("about:blank")
        page = tab.page
        per_epoch = 0.45

        def extreme(route: Any) -> None:
            found = route.fetch().json()
            for curve in found["curves"]:
                curve["values"] = [[10.0 ** (epoch * per_epoch) for epoch in curve["epoch"]] for _ in found["metrics"]]
            route.fulfill(json=found)

        page.route("**/v1/curves?*", extreme)
        tab.go(f"{site.url}/experiments/1#curves-panel")
        for log in (False, True):
            page.locator(".curves-form input[name=log]").set_checked(log)
            page.locator(".curves-figure[data-drawn='4']").wait_for()
            said = tab.saved(".curves-panel button[data-save=svg]")[1].decode()
            beside = re.findall(r'text-anchor="end"[^>]*>([^<]+)<', said)
            assert len({*beside}) > 5, beside
            assert max(map(float, beside)) > 1e34
        page.locator(".curves-form input[name=log]").uncheck()
        per_epoch = -40
        tab.go(f"{site.url}/experiments/1#curves-panel")
        page.locator(".curves-figure[data-drawn='4']").wait_for()
        said = tab.saved(".curves-panel button[data-save=svg]")[1].decode()
        assert {"5e-41", "1e-38"} <= {*re.findall(r'text-anchor="end"[^>]*>([^<]+)<', said)}

    def test_they_are_saved(self, tab: Tab) -> None:
        for kind, begins in (("csv", b"trial,experiment,"), ("svg", b"<svg xmlns"), ("png", b"\x89PNG")):
            name, content = tab.saved(f".curves-panel button[data-save={kind}]")
            assert name == f"curves-experiment-1.{kind}"
            assert content.startswith(begins), kind
            assert len(content) > 1000
            if kind == "svg":
                texts = [text.text for text in ElementTree.fromstring(content).iter("{http://www.w3.org/2000/svg}text")]
                assert texts.count("epoch") == 4  # below each chart

    def test_what_had_no_answer_is_asked_for_again(self, tab: Tab) -> None:
        page = tab.page
        page.route("**/v1/curves?*", lambda route: route.fulfill(status=503, json={"detail": "away"}), times=1)
        page.locator("input[name=best]").fill("3")
        page.locator(".curves-form button[type=submit]").click()
        page.locator(".curves-problem:text-is('away')").wait_for()
        page.locator(".curves-form button[type=submit]").click()
        page.locator(".curves-problem").wait_for(state="hidden")  # what was drawn before is still there
        page.locator(".curves-figure[data-drawn='4']").wait_for()
        tab.complaints.clear()  # the console tells of what had no answer
        # What is wrong is said, whatever comes of what was asked before, until it is mended.
        held: list[Any] = []
        page.route("**/v1/curves?*", lambda route: held.append(route))
        page.locator("input[name=best]").fill("2")
        page.locator("input[name=best]").press("Enter")
        tab.until("() => document.querySelector('.curves-panel').ariaBusy")
        trials = page.locator(".curves-form input[name=trials]")
        trials.fill("x")
        trials.press("Enter")
        wrong = page.locator(".curves-problem:has-text('write their ids')")
        wrong.wait_for()
        page.route("**/v1/curves?*", lambda route: route.continue_())
        with page.expect_response("**/v1/curves?*"):
            held[0].continue_()
        page.wait_for_timeout(200)
        assert wrong.is_visible()
        trials.fill("")
        trials.press("Enter")
        wrong.wait_for(state="hidden")
        assert page.locator(".curves-figure").is_visible()

        # A trial of another experiment is none of this one's numbers.
        def other(route: Any) -> None:
            found = route.fetch().json()
            found["curves"][0]["experiment_id"] = 9
            route.fulfill(json=found)

        page.route("**/v1/curves?*", other)
        trials.fill("7")
        trials.press("Enter")
        page.locator(".lines li", has_text="experiment 9").locator("a:text-is('trial 7')").wait_for()

    def test_they_grow_while_they_are_watched_or_another_tab_is(self, live: Site, browse: Callable[..., Tab]) -> None:
        made = posted(live, "young")
        with live.database.read() as session:
            first = session.scalars(select(Trial.id).where(Trial.experiment_id == made)).first()

        def train(session: Session, epochs: range) -> None:
            trial = session.get(Trial, first)
            assert trial is not None
            points = [grids.epoch_of(trial.id, epoch, 12, 0.9, random.Random(1)) for epoch in epochs]
            session.execute(insert(EpochPoint), points)
            trial.state, trial.epoch, trial.best_val_accuracy = TrialState.RUNNING, epochs[-1], 0.5

        tab = browse(f"{live.url}/experiments/{made}#curves-panel")
        page, figure = tab.page, tab.page.locator("#curves-panel .curves-figure")
        page.locator(".curves-problem:has-text('done an epoch yet')").wait_for()
        page.locator("[role=tab][href='#trials-panel']").click()
        page.locator("[role=tab][href='#curves-panel']").click()
        assert not figure.is_visible()
        live.database.write(partial(train, epochs=range(1, 5)))
        figure.locator(".uplot").first.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        with page.expect_response("**/v1/curves?*"):
            live.database.write(partial(train, epochs=range(5, 7)))
        tab.settle()
        page.keyboard.press("ArrowRight")  # the focus and the cursor are where they were
        assert figure.locator(".readout").inner_text().startswith("epoch 3;")
        page.locator("[role=tab][href='#trials-panel']").click()
        live.database.write(partial(train, epochs=range(7, 10)))
        tab.until("() => document.querySelector('#summary').textContent.includes('9 of')")
        with page.expect_response("**/v1/curves?*"):
            page.locator("[role=tab][href='#curves-panel']").click()
        tab.settle()
        figure.locator(".uplot").first.focus()
        page.keyboard.press("End")
        assert figure.locator(".readout").inner_text().startswith("epoch 9;")

    def test_metrics_that_none_has_and_trials_that_are_too_many_are_said(
        self, live: Site, browse: Callable[..., Tab]
    ) -> None:
        live.database.write(lambda session: session.execute(update(EpochPoint).values(ort_loss=None)))
        tab = browse(f"{live.url}/curves?trials=1,6&metric=ort_loss")
        problem, figure = (tab.page.locator(f".curves-{part}") for part in ("problem", "figure"))
        problem.wait_for()
        assert problem.inner_text() == "None of these trials has any of these metrics."
        assert not figure.is_visible()

        def many(route: Any) -> None:
            found = route.fetch().json()
            copies = [
                one | {"trial": 1000 * copy + one["trial"], "cell": f"{copy}{one['cell']}"}
                for copy in range(8)
                for one in found["curves"][:25]
            ]
            route.fulfill(json=found | {"curves": copies})

        tab.go(f"{live.url}/experiments/1#curves-panel")
        figure.wait_for()
        assert not problem.is_visible()
        tab.page.route("**/v1/curves?*best=100*", many)
        tab.page.locator("input[name=best]").fill("100")
        tab.page.locator("input[name=best]").press("Enter")
        problem.wait_for()
        assert problem.inner_text() == "The best 40 configurations: no more than 200 trials are drawn at a time."
        assert figure.is_visible()

    def test_those_of_checked_trials(self, site: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{site.url}/experiments/1#trials-panel").page
        page.locator("input[name=trial][value='1']").check()
        page.locator("input[name=trial][value='7']").check()
        page.click("text=Curves of the checked")
        page.wait_for_selector(".curves-figure[data-drawn='4']")
        assert page.locator(".lines button").all_inner_texts() == ["lambda_ort 0, seed 0", "lambda_ort 0.01, seed 1"]
        page.locator("input[name=trials]").fill("1 6,")
        page.locator("input[name=bands]").uncheck()
        with page.expect_navigation():
            page.locator("button:text-is('Draw')").click()
        page.wait_for_selector(".curves-figure[data-drawn='4']")
        assert page.locator(".lines button").all_inner_texts() == ["lambda_ort 0", "lambda_ort 0.01"]
        assert page.locator(".lines button").first.get_attribute("title") == "lambda_ort 0, seed 0"
        assert page.locator("table.rows a[href='/trials/6']").is_visible()
        assert not page.locator("input[name=bands]").is_checked()


class TestTrial:
    def test_one_watched_to_its_end_shows_spectra_and_log(self, live: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{live.url}/trials/90")
        page = tab.page
        page.wait_for_selector(".trial-curves[data-drawn]")
        assert page.locator("#spectra table").count() == 0
        log = live.data_dir / "trials" / "90" / "1" / "trial.log"
        log.parent.mkdir(parents=True)
        log.write_text("the last line of its log\n")
        tab.quiet(2.5)  # longer than what is changed waits to be read
        tab.asked.clear()
        live.database.write(lambda session: grids.finish(session, 91, 0.5))
        page.wait_for_timeout(2500)
        assert all("/v1/trials/90" in url for url in tab.asked)  # another trial's end is no reason to read the page
        live.database.write(lambda session: grids.finish(session, 90, 0.4321, layers=[LAYER]))
        page.locator("#spectra td:has-text('kernel 3')").wait_for(state="attached")
        page.locator("#log:has-text('the last line of its log')").wait_for(state="attached")
        page.locator("#tabs a[href='#singular-values']").click()
        assert page.locator("#spectra td:has-text('kernel 3')").is_visible()
        page.locator("#tabs a[href='#evaluated']").click()
        assert "43.21 %" in page.locator("#result").inner_text()

    def test_one_that_was_opened_out_of_sight_is_as_it_is_now(self, live: Site, browse: Callable[..., Tab]) -> None:
        """It began before anybody looked at its page, whose stream is listened to from then on."""
        tab = browse("about:blank", fresh=True)
        page = tab.page

        def state(session: Session, name: TrialState, epoch: int) -> None:
            found = session.get(Trial, 90)
            assert found is not None
            found.state, found.epoch = name, epoch

        live.database.write(lambda session: state(session, TrialState.QUEUED, 0))
        page.add_init_script("Object.defineProperty(document, 'hidden', {configurable: true, value: true})")
        tab.go(f"{live.url}/trials/90")
        tab.quiet(2)
        live.database.write(lambda session: state(session, TrialState.RUNNING, 7))
        assert page.locator("#summary .state").first.inner_text() == "queued"
        come_back(page)
        page.locator("#summary .state:text-is('running')").wait_for(timeout=5000)
        assert "epoch 7 of 80" in page.locator("#summary").inner_text()

    def test_what_is_open_stays_open(self, live: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{live.url}/trials/90#provenance")
        page = tab.page
        page.locator("#where summary:text-is('Configuration')").click()
        assert page.locator("#where dt:text-is('training.epochs')").is_visible()

        def again(session: Session) -> None:
            found = session.get(Trial, 90)
            assert found is not None
            found.epoch, found.attempts = 0, found.attempts + 1

        tab.quiet(2)
        with page.expect_response(f"{live.url}/trials/90"):
            live.database.write(again)
        tab.until("() => document.querySelector('#summary').textContent.includes('epoch 0 of 80')")
        assert page.locator("#where dt:text-is('training.epochs')").is_visible()

    def test_more_than_60_epochs_have_a_hover(self, site: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{site.url}/trials/1").page
        page.wait_for_selector(".trial-curves[data-drawn='4']")
        over = page.locator(".u-over").first
        box = over.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40)
        page.locator(".tip").wait_for(state="visible")
        epoch, training, validation = page.locator(".tip p").all_inner_texts()
        assert int(epoch.removeprefix("epoch ")) > 60
        assert {training.split()[-1], validation.split()[-1]} == {"training", "validation"}

    def test_one_epoch_has_whole_ticks(self, live: Site, browse: Callable[..., Tab]) -> None:
        def one(session: Session) -> None:
            for point in session.query(EpochPoint).where(EpochPoint.trial_id == 90, EpochPoint.epoch > 1):
                session.delete(point)

        live.database.write(one)
        tab = browse(f"{live.url}/trials/90")
        tab.page.wait_for_selector(".trial-curves[data-drawn]")
        plain = browse(f"{live.url}/trials/90", script=False).page
        ticks = plain.locator("#curves svg text.x:not(.title)").all_text_contents()
        assert set(ticks) == {"1"}

        def many(session: Session) -> None:
            points = [grids.epoch_of(90, epoch, 320, 0.9, random.Random(1)) for epoch in range(2, 321)]
            session.execute(insert(EpochPoint), points)

        live.database.write(many)
        tab.page.reload()
        tab.page.wait_for_selector(".trial-curves[data-drawn]")
        assert tab.saved(".trial-curves button[data-save=csv]")[1].count(b"\r\n") == 321  # more than are drawn

    def test_words_stand_apart(self, live: Site, browse: Callable[..., Tab]) -> None:
        def fail(session: Session) -> None:
            trial = session.get(Trial, 90)
            assert trial is not None
            trial.state, trial.failure, trial.epoch = TrialState.FAILED, "error", 26

        live.database.write(fail)
        page = browse(f"{live.url}/trials/90").page
        text = page.locator("#summary .said").inner_text()
        assert re.search(r"failed\s+error\s+epoch 26 of 80", text)
        live.database.write(lambda session: grids.finish(session, 91, 0.5, parameters=2486))
        page = browse(f"{live.url}/trials/91#evaluated").page
        assert re.search(r"parameters\s+2\u202f486\s", page.locator("#result").inner_text())


def brushed(tab: Tab) -> int:
    """How dark the upper left corner of the plane is, from 0 to 255: no cell stands there, a rectangle may."""
    tab.page.wait_for_timeout(100)
    found: int = tab.page.evaluate(
        """() => {
          const canvas = document.querySelector('.plane-figure canvas');
          const scale = canvas.width / canvas.clientWidth;
          return canvas.getContext('2d').getImageData(80 * scale, 24 * scale, 1, 1).data[3];
        }"""
    )
    return found


class TestPlane:
    def test_all_cells_are_drawn_coloured_and_chosen(self, site: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{site.url}/leaderboards/cifar10")
        page = tab.page
        page.wait_for_selector(".plane-figure[data-drawn='17']")
        assert not page.locator(".plane-fallback").is_visible()
        page.locator("select[name=by]").select_option("lambda_ort")
        assert page.locator(".plane-figure .scale .key [dir]").all_inner_texts() == ["0", "0.01", "0.1", "1"]
        page.locator(".plane-figure .canvas").focus()
        page.keyboard.press("ArrowRight")
        said = page.locator(".plane-figure .readout")
        assert re.search(r"rank \d+, lambda_ort .*; accuracy \d\d.*compression", said.inner_text())
        page.locator("button[data-brush]").click()
        rows = page.locator("tr[data-cell]:visible")
        before = rows.count()
        place = page.locator(".plane-figure .canvas")
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        page.mouse.move(box["x"] + 72, box["y"] + 14)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 380, steps=8)
        page.mouse.up()
        tab.until("() => document.querySelector('.plane-figure .readout').textContent.includes(' chosen; ')")
        chosen = int(said.inner_text().split()[0])
        assert 0 < chosen < before
        assert rows.count() == chosen
        assert brushed(tab) > 0
        page.locator("select[name=by]").select_option("rank")
        page.emulate_media(color_scheme="dark")
        assert brushed(tab) > 0  # the rectangle stands in another painting, too
        page.locator("button[data-brush]").click()
        assert brushed(tab) == 0
        tab.until("before => document.querySelectorAll('tr[data-cell]:not([hidden])').length === before", before)
        for kind, begins in (("svg", b"<svg"), ("png", b"\x89PNG")):
            assert tab.saved(f".plane-figure button[data-save={kind}]")[1].startswith(begins)

    def test_a_rectangle_chooses_among_all_pages(self, site: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{site.url}/leaderboards/cifar10?limit=4")
        page = tab.page
        page.wait_for_selector(".plane-figure[data-drawn='17']")
        shown = page.locator("tr[data-cell]:visible")
        assert shown.count() == 4
        first = shown.evaluate_all("all => all.map(one => one.dataset.cell)")
        headings = page.locator("thead").first.inner_text()
        page.locator("button[data-brush]").click()
        place = page.locator(".plane-figure .canvas")
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        page.mouse.move(box["x"] + 72, box["y"] + 14)
        page.mouse.down()
        page.mouse.move(box["x"] + 420, box["y"] + 380, steps=8)
        page.mouse.up()
        tab.until("() => document.querySelector('.plane-figure .readout').textContent.includes(' chosen; ')")
        said = page.locator(".plane-figure .readout").inner_text()
        chosen = int(said.split()[0])
        assert chosen > 4
        assert f"; {chosen} of them stand in the table" in said
        cells = shown.evaluate_all("all => all.map(one => one.dataset.cell)")
        assert len(cells) == len(set(cells)) == chosen
        widths = shown.evaluate_all("all => all.map(one => one.cells.length)")
        assert len(set(widths)) == 1
        assert page.locator("thead").first.inner_text() == headings
        places = [int(text) for text in shown.locator("th a").all_inner_texts()]
        assert places == sorted(places)
        shown.last.locator("input").check()
        counted = page.locator(".chosen .count").first
        assert counted.inner_text().startswith("1 chosen")
        page.locator("button[data-brush]").click()
        tab.until("() => document.querySelectorAll('tr[data-cell]:not([hidden])').length === 4")
        assert shown.evaluate_all("all => all.map(one => one.dataset.cell)") == first
        assert counted.inner_text().startswith("0 chosen")  # its row is gone


class TestLists:
    def test_the_pool_says_what_runs_where_and_what_waits(self, live: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{live.url}/pool")
        page = tab.page
        assert "2 nodes, 2 GPUs and 48 CPUs" in page.locator("#nodes").inner_text()
        gpu = page.locator(".slots li", has_text="GPU 0: NVIDIA H100")
        assert re.search(r"trials 83, 84, 85, .*and 10 more of experiment 1, since [\w ]+ ago$", gpu.inner_text())
        assert gpu.inner_text().count("of experiment 1") == 1
        assert "idle" in page.locator(".slots li", has_text="GPU 1: NVIDIA H100").inner_text()
        assert "torch 2.8.0 here" in page.locator("table").last.inner_text()
        running = page.locator("#wanting tbody tr").first.locator("td").nth(3)
        before = int(running.inner_text())
        tab.asked.clear()
        live.database.write(lambda session: grids.finish(session, 90, 0.5))
        tab.until(
            f"() => document.querySelector('#wanting tbody').rows[0].cells[4].textContent.trim() === '{before - 1}'"
        )
        tab.until("() => document.querySelector('#shares td').textContent === '17'")
        assert tab.asked == [f"{live.url}/pool/changes?experiment=1"]
        assert "gpu1" not in page.locator("#away").inner_text()

        why = "() => document.querySelector('#wanting tbody').rows[0].cells[7].textContent"
        live.database.write(lambda session: session.execute(update(Experiment).values(waiting="others come first")))
        tab.until(f"() => ({why})() === 'others come first'")
        assert tab.asked == [f"{live.url}/pool/changes?experiment=1"] * 2  # not with the machines, once in a minute

        def leaves(session: Session) -> None:
            nodes.record(session, "head1-4711", [Node("a" * 56, "head1", "10.0.0.2", 16, 0, 60.0, head=True)])
            grids.finish(session, 91, 0.5)

        live.database.write(leaves)
        page.locator("#away tr", has_text="gpu1").wait_for()

    def test_experiments_stream(self, live: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{live.url}/?tag=pages")
        tab.quiet(3)
        assert not [url for url in tab.asked if "/changes" in url]  # nothing changed, nothing is asked for
        received = self.received(tab)
        tab.page.locator("input[name=experiment]").check()
        counts = tab.page.locator("tr[data-experiment] td.number").nth(1)
        before = counts.inner_text()
        tab.asked.clear()
        live.database.write(lambda session: grids.finish(session, 90, 0.5))
        tab.page.locator(f"td:text-is('{int(before.partition('/')[0]) + 1}/100')").wait_for()
        assert tab.asked == [f"{live.url}/changes?tag=pages&experiment=1"]  # its row alone
        assert sum(received) < 2000
        assert tab.page.locator("input[name=experiment]").is_checked()
        assert tab.page.locator("a.tag").get_attribute("href") == "?tag=pages"
        tab.go(f"{live.url}/")
        new = posted(live, "a new one")
        tab.page.locator("a:text-is('a new one')").wait_for()
        live.database.write(lambda session: actions.cancel(session, new))
        tab.page.locator(f"tr[data-experiment='{new}']", has_text="cancelled").wait_for()  # it is listened to as well
        # A stream that is refused, as one that names a deleted experiment is, is asked for again.
        last = posted(live, "the last")
        tab.page.locator("a:text-is('the last')").wait_for()
        with tab.page.expect_response(lambda answer: "/v1/stream?" in answer.url and answer.status == 404):
            live.database.write(lambda session: deletion.mark(session, new, ANYONE))
        newest = posted(live, "newest")
        live.database.write(lambda session: actions.cancel(session, last))
        live.database.write(lambda session: actions.cancel(session, newest))
        for one in (last, newest):
            tab.page.locator(f"tr[data-experiment='{one}']", has_text="cancelled").wait_for()
        assert tab.page.locator(f"tr[data-experiment='{new}']").count() == 0
        tab.complaints.clear()  # the console tells of what was refused

    def test_a_list_that_grew_has_the_page_that_follows_it(self, live: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{live.url}/?limit=1").page
        assert page.locator("a[rel=next]").count() == 0
        posted(live, "a new one")
        page.locator("a:text-is('a new one')").wait_for()
        page.locator("a[rel=next]").click()
        page.locator("tr[data-experiment='1']").wait_for()

    def test_a_condition_of_the_list_leads_to_the_list(self, site: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{site.url}/experiments/1#trials-panel").page
        for where, many in (("rank<=4", 40), ("rank>1000", 0), ("", 100)):
            page.locator("#trials-panel input[name=where]").fill(where)
            with page.expect_navigation():
                page.locator("#trials-panel button:text-is('Show')").click()
            assert page.locator("#trials-panel").is_visible()
            assert page.locator("tr[data-trial]").count() == many
            assert page.locator("#trials-panel input[name=where]").input_value() == where

    def test_an_open_page_says_that_nobody_is_signed_in_and_that_it_was_deleted(
        self, filled: Path, tmp_path: Path, browse: Callable[..., Tab]
    ) -> None:
        file = tmp_path / "ttsv.db"
        shutil.copyfile(filled, file)
        with served(file, keys=True) as site:
            key = new_key(installation_secret(site.data_dir))

            def issue(session: Session) -> None:
                project = keys.create_project(session, "ours")
                keys.add_key(session, project.id, key, owner="ada", scopes={Scope.READ})
                session.execute(update(Experiment).values(project_id=project.id))

            site.database.write(issue)
            tab = browse("about:blank", fresh=True)
            page = tab.page
            cookie = {"name": COOKIE, "value": key.text, "url": site.url}
            page.context.add_cookies([cookie])
            alarm = page.locator("main > .alarm[role=alert]:visible")
            for path in ("/?tag=pages", "/trials/90"):
                held: list[Any] = []
                page.route("**/stream?*", lambda route: held.append(route))  # noqa: B023
                tab.go(f"{site.url}{path}")
                assert alarm.count() == 0
                page.context.clear_cookies()
                come_back(page)
                alarm.wait_for()
                # A stream that was asked for before is answered only now, which tells nothing new.
                held[0].fulfill(content_type="text/event-stream", body=": open\n\n")
                page.wait_for_timeout(100)
                assert alarm.is_visible()
                page.unroute("**/stream?*")
                assert alarm.inner_text() == "You are signed out: what stands here is not kept up to date. Sign in"
                next_to = parse_qs(urlsplit(alarm.locator("a").get_attribute("href")).query)
                assert next_to == {"next": [path]}
                page.context.add_cookies([cookie])  # in another tab
                come_back(page)
                alarm.wait_for(state="detached")
            site.database.write(lambda session: actions.cancel(session, 1))
            tab.go(f"{site.url}/experiments/1#events-panel")
            site.database.write(lambda session: deletion.mark(session, 1, ANYONE, force=True))
            come_back(page)
            alarm.wait_for()
            assert "it was deleted" in alarm.inner_text()
            assert alarm.locator("a").get_attribute("href") == "/"
            tab.complaints.clear()  # the console tells of what was refused

    def test_more_tabs_are_opened_than_a_browser_has_connections(self, live: Site, browse: Callable[..., Tab]) -> None:
        first = browse("about:blank", fresh=True).page
        paths = ["/experiments/1", "/trials/90", "/", "/pool"] * 2
        tabs = [first, *(first.context.new_page() for _ in paths[1:])]
        for page, path in zip(tabs, paths, strict=True):
            with page.expect_response(lambda answer: "stream?" in answer.url and answer.status == 200):
                page.goto(f"{live.url}{path}")
            leave(page)
        live.database.write(lambda session: grids.finish(session, 90, 0.5))
        assert first.locator("#summary", has_text="18 running").count() == 1
        come_back(first)
        first.locator("#summary", has_text="17 running").wait_for()
        live.database.write(lambda session: grids.finish(session, 91, 0.5))
        first.locator("#summary", has_text="16 running").wait_for()  # it listens again

    def test_rows_have_the_columns_of_a_table_that_grew(self, live: Site, browse: Callable[..., Tab]) -> None:
        with Client(live.url) as client:
            base = {"dataset": "digits", "model": "small-cnn"}
            made = client.submit({"name": "one", "base": base, "grid": {"layer": ["dense"]}}).id
            tab = browse(f"{live.url}/experiments/{made}#trials-panel")
            tab.quiet(2)
            client.extend(made, grid={"layer": ["soc"]})
        tab.until("() => document.querySelectorAll('tr[data-trial]').length === 2")

        def begin(session: Session) -> None:
            trial = session.scalars(select(Trial).where(Trial.experiment_id == made)).first()
            assert trial is not None
            trial.state, trial.epoch = TrialState.RUNNING, 1

        live.database.write(begin)
        row = tab.page.locator("tr[data-trial]", has_text="running")
        row.wait_for()
        assert row.locator("th, td").count() == tab.page.locator("#trials thead th").count()

    def test_what_is_over_is_listened_to(self, live: Site, browse: Callable[..., Tab]) -> None:
        live.database.write(lambda session: actions.cancel(session, 1))
        with live.database.read() as session:
            failed = session.scalars(select(Trial.id).where(Trial.state == TrialState.FAILED)).first()
        of_experiment, of_trial = browse(f"{live.url}/experiments/1"), browse(f"{live.url}/trials/{failed}")
        for tab in (of_experiment, of_trial):
            tab.quiet(2)
            assert not [url for url in tab.asked if "/changes" in url or "/summary" in url]
        # Somebody else has it go on.
        live.database.write(lambda session: actions.retry(session, 1))
        for tab in (of_experiment, of_trial):
            tab.page.locator("#summary .state", has_text="queued").first.wait_for()
        live.database.write(lambda session: actions.cancel(session, 1))
        of_experiment.page.locator("#summary .state", has_text="cancelled").first.wait_for()
        live.database.write(lambda session: deletion.mark(session, 1, ANYONE, force=True))
        for tab in (of_experiment, of_trial):
            tab.page.locator("main > .alarm[role=alert]", has_text="it was deleted").wait_for()
        for tab in (of_experiment, of_trial):
            tab.quiet(0.5)
            tab.complaints.clear()  # the console tells of what was refused

    @staticmethod
    def received(tab: Tab) -> list[int]:
        """The bytes of answers that come from now on, one after the other."""
        found: list[int] = []
        network = tab.page.context.new_cdp_session(tab.page)
        network.send("Network.enable")
        network.on("Network.dataReceived", lambda said: found.append(said["encodedDataLength"]))
        return found

    def test_a_figure_without_printed_numbers_says_so(self, site: Site, browse: Callable[..., Tab]) -> None:
        text = browse(f"{site.url}/tables/senderovich2022/figure-vgg").page.locator(".empty").inner_text()
        assert "stand alone" not in text
        assert "the paper prints no numbers" in text
        text = browse(f"{site.url}/tables/senderovich2022/table2").page.locator(".empty").inner_text()
        assert "the paper's values stand alone" in text

    def test_downloads_have_an_extension(self, site: Site, browse: Callable[..., Tab]) -> None:
        page = browse("about:blank").page
        for path in ("/leaderboards/cifar10", "/tables/senderovich2022/table2", "/trials", "/experiments/1"):
            page.goto(f"{site.url}{path}")
            names = page.locator(".downloads a").evaluate_all("all => all.map(one => one.download)")
            assert [name.rpartition(".")[2] for name in names] == ["csv", "md", "tex", "json"], path
        with page.expect_download() as saved:
            page.evaluate("() => document.querySelector('.downloads a').click()")
        assert saved.value.suggested_filename.endswith(".csv")

    def test_the_columns_of_a_configuration_stay_in_sight(self, site: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{site.url}/leaderboards/cifar10?columns=rank,lambda_ort", width=700)
        page = tab.page
        page.wait_for_selector("td.stay")
        row = page.locator("tr[data-cell]").first
        lefts = "all => all.slice(0, 5).map(one => Math.round(one.getBoundingClientRect().left))"
        before = row.locator("th, td").evaluate_all(lefts)
        page.locator(".wide").first.evaluate("one => one.scrollTo(200, 0)")
        tab.until("() => document.querySelector('.wide').scrollLeft === 200")
        after = row.locator("th, td").evaluate_all(lefts)
        assert after[:3] == before[:3]  # place, rank, lambda_ort
        assert after[4] == before[4] - 200
        assert page.locator("tr[data-cell] .stay").count() == 3 * page.locator("tr[data-cell]").count()
        # So do those of a table that was read anew.
        tab.go(f"{site.url}/experiments/1?state=running")
        page.wait_for_selector("#trials .stay")
        page.evaluate("import('/static/live.js').then(({refresh}) => refresh('#trials'))")
        tab.until("() => document.querySelectorAll('#trials .stay').length > 0")
        assert page.locator("#trials .wide").get_attribute("class") == "wide cut beyond"


class TestSettings:
    """What people have set: colours that a system forces, letters twice as large."""

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_forced_colours_leave_states_apart(self, site: Site, browse: Callable[..., Tab], scheme: str) -> None:
        tab = browse("about:blank", fresh=True, scheme=scheme)
        tab.page.emulate_media(forced_colors="active")
        tab.go(f"{site.url}/experiments/1")
        tab.settle()
        tiles = tab.page.locator("#matrix .scale .tile").evaluate_all("all => all.map(one => one.toDataURL())")
        assert len(set(tiles)) == len(tiles) > 2
        colours = "all => all.map(one => getComputedStyle(one).backgroundColor)"
        swatches = tab.page.locator("#summary .swatch").evaluate_all(colours)
        assert len(set(swatches)) == len(swatches) > 2
        edges = "all => all.map(one => getComputedStyle(one).borderBottomColor)"
        chosen, *others = tab.page.locator(".tabs a").evaluate_all(edges)
        assert chosen not in others

        # Who asks for contrast has edges as clear as text is elsewhere.
        edge = "() => getComputedStyle(document.querySelector('.tabs')).borderBottomColor"
        found = []
        for contrast in ("no-preference", "more"):
            tab.page.emulate_media(forced_colors="none", contrast=contrast)
            found.append(tab.page.evaluate(edge))
        assert found[1] == {"light": "rgb(85, 97, 110)", "dark": "rgb(163, 176, 189)"}[scheme] != found[0]

    @pytest.mark.parametrize("path", ["/experiments/1", "/leaderboards/cifar10", "/submit"])
    def test_letters_twice_as_large_fit_on_a_telephone(self, site: Site, browse: Callable[..., Tab], path: str) -> None:
        tab = browse(f"{site.url}{path}", width=390)
        tab.until("() => document.querySelector('.matrix-figure[data-drawn], .plane-figure[data-drawn], #spec')")
        tab.settle()
        tab.page.evaluate("() => { document.documentElement.style.fontSize = '200%'; }")
        tab.until("() => document.documentElement.scrollWidth <= innerWidth")
        assert tab.page.evaluate("() => getComputedStyle(document.body).fontSize") == "30px"
        # What is drawn stays within its room, which is narrower now.
        tab.until(
            "() => [...document.querySelectorAll('.matrix-figure .canvas canvas, .plane-figure > .canvas canvas')]"
            ".every(one => one.clientWidth <= one.closest('.canvas').clientWidth)"
        )


class TestAway:
    """The service, or its database, is away for a time."""

    ALARM = "main > .alarm[role=alert]:visible"

    def test_an_open_page_says_so_until_it_is_back(self, live: Site, browse: Callable[..., Tab]) -> None:
        tab = browse("about:blank")
        page, alarm = tab.page, tab.page.locator(self.ALARM)
        page.route("**/v1/stream?*", lambda route: route.abort())
        tab.go(f"{live.url}/?tag=pages")
        alarm.wait_for()
        assert alarm.inner_text().startswith("The service does not answer. What stands here was read before")
        assert alarm.locator("a").get_attribute("href") == "/?tag=pages"
        page.unroute("**/v1/stream?*")
        alarm.wait_for(state="detached")
        # Its database alone, of which a stream that is open says nothing.
        with page.expect_response(lambda answer: "/stream?" in answer.url and answer.status == 200):
            tab.go(f"{live.url}/experiments/1#events-panel")
        page.route("**/experiments/1/changes?*", lambda route: route.fulfill(status=503))
        with page.expect_response("**/experiments/1/changes?*"):
            live.database.write(lambda session: grids.finish(session, 90, 0.1234))
        assert alarm.count() == 0, "a moment is none of anybody's business"
        alarm.wait_for()
        page.unroute("**/experiments/1/changes?*")
        alarm.wait_for(state="detached")
        # What happened unseen is all there, however much it was.
        tab.quiet(2)
        leave(page)
        told = [{"experiment_id": 1, "actor": "a worker", "kind": "claimed", "detail": {"n": n}} for n in range(120)]
        live.database.write(lambda session: session.execute(insert(Event), [one | {"at": now()} for one in told]))
        come_back(page)
        page.locator("#events tr:first-child", has_text="n 119").wait_for()
        # Who tries by themselves is led to where they are.
        page.route("**/experiments/1/changes?*", lambda route: route.fulfill(status=503))
        live.database.write(lambda session: grids.finish(session, 91, 0.1234))
        alarm.wait_for()
        page.unroute("**/experiments/1/changes?*")
        page.evaluate("() => { window.same = true; }")
        alarm.locator("a").click()
        tab.until("() => window.same === undefined && document.querySelector('#events-panel.current')")
        tab.complaints.clear()  # the console tells of what had no answer

    def test_one_that_is_opened_meanwhile_is_there_as_soon_as_it_can_be(
        self, live: Site, browse: Callable[..., Tab], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(_engine: Engine) -> None:
            raise OperationalError("SELECT 1", {}, ConnectionError("gone"))

        monkeypatch.setattr(Engine, "connect", away)
        tab = browse(f"{live.url}/trials/1?tag=pages")
        alarm = tab.page.locator(self.ALARM)
        assert alarm.inner_text().startswith("the database does not answer")
        assert "This page looks again every 5 seconds" in tab.page.locator("main").inner_text()
        tab.complaints.clear()  # the console tells of what was refused
        monkeypatch.undo()
        tab.page.locator("#summary").wait_for()
        assert (alarm.count(), tab.page.url) == (0, f"{live.url}/trials/1?tag=pages")


FIGURE = "/figures/senderovich2022/lipschitz"
PAGES: dict[str, tuple[str, ...]] = {
    "/": (),
    "/experiments/1": ("curves-panel", "trials-panel", "events-panel", "spec-panel"),
    "/trials": (),
    "/trials/1": (),
    "/trials/90": (),
    "/curves?trials=1,2,90": (),
    "/pool": (),
    "/leaderboards": (),
    "/leaderboards/cifar10": (),
    "/tables/senderovich2022/table1": (),
    "/figures/senderovich2022/vgg": (),
    FIGURE: (),
    "/presets": (),
    "/submit": (),
    "/login": (),
    "/problems": (),
    "/docs": (),
}
"""Addresses, each with the panels of its page that are chosen one after the other."""


# Words of headings that stand in more than one line.
_BROKEN = r"""
heads => {
  const found = [];
  for (const head of heads) {
    const texts = document.createTreeWalker(head, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      for (const word of texts.currentNode.data.matchAll(/[A-Za-z]+/g)) {
        const range = document.createRange();
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        if (range.getClientRects().length > 1) found.push(word[0]);
      }
    }
  }
  return found;
}
"""
_NOT_EXACT = """
all => all.map(one => getComputedStyle(one, one.matches(".state") ? "::before" : null))
  .filter(one => one.printColorAdjust !== "exact").length
"""


class TestEveryPage:
    @pytest.mark.parametrize(
        ("scheme", "widths", "other"),
        [
            ("light", (1280, 1920, 320), ("dark", 390)),  # 320: one of 1280, four times as large
            deep("dark", (390,), None),
            deep("dark", (1280,), None),
            deep("light", (390,), None),
            deep("light", (1920, 390), None),
        ],
    )
    def test_axe_finds_nothing_and_none_is_wider_than_the_window(
        self,
        site: Site,
        browse: Callable[..., Tab],
        scheme: str,
        widths: tuple[int, ...],
        other: tuple[str, int] | None,
    ) -> None:
        """A page is opened at the first width, and made as wide as the others when it is there.

        Then it is seen in the other scheme and width by the rules to which it is not the same there.
        """
        found = {}
        tab = browse("about:blank", scheme=scheme, width=widths[0])
        page = tab.page

        def look(width: int, path: str, panel: str) -> None:
            page.set_viewport_size({"width": width, "height": 900})
            tab.settle()
            wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, (path, panel, width)
            if width == 1920:
                assert page.evaluate("() => document.querySelector('main').clientWidth") > 1800

        for path, panels in PAGES.items():
            tab.go(f"{site.url}{path}")
            for panel in ("", *panels):
                if path == "/docs":
                    page.evaluate(
                        "() => [...document.querySelectorAll('details')].forEach((one, at) => one.open = at < 3)"
                    )
                if panel:
                    page.locator(f"[role=tab][href='#{panel}']").click()
                    page.locator(f"#{panel}").wait_for()
                within = f"#{panel}" if panel else "html"  # what is around a panel was seen before
                look(widths[0], path, panel)
                if broken := violations(tab, within):
                    found[path, panel, scheme] = broken
                for width in widths[1:]:
                    look(width, path, panel)
                if other is not None:
                    page.emulate_media(color_scheme=other[0])
                    look(other[1], path, panel)
                    if broken := violations(tab, within, OF_LOOKS):
                        found[path, panel, other[0]] = broken
                    page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": widths[0], "height": 900})
        assert found == {}

    def test_every_column_is_on_paper(self, site: Site, browse: Callable[..., Tab]) -> None:
        """At the width of a landscape page nothing stands beyond it, and every part of a page is there."""
        tab = browse("about:blank", width=1031)
        page = tab.page
        board = "/leaderboards/cifar10?" + "&".join(f"column={metric.value}" for metric in Metric)
        for path in (
            board,
            "/experiments/1",
            "/compare?trials=1,2",
            "/trials",
            "/tables/senderovich2022/table1",
            FIGURE,
            "/",
        ):
            tab.go(f"{site.url}{path}")
            page.emulate_media(media="screen")
            page.wait_for_timeout(300)
            page.emulate_media(media="print")
            tab.until("() => document.documentElement.classList.contains('paper')")
            tab.settle()
            cells = page.locator("th, td, canvas, .u-wrap").locator("visible=true")
            right = max(cells.evaluate_all("all => all.map(one => one.getBoundingClientRect().right)"))
            assert right <= 1031, path
            assert page.locator("thead").evaluate_all(_BROKEN) == [], path
            assert page.locator("details:not([open])").count() == 0, path
            exact = page.locator(".swatch, .state").evaluate_all(_NOT_EXACT)
            assert exact == 0, path
            if path == board:
                # In parts whose letters can be read: each says what its rows are, and all together have every column.
                whole, *parts = page.locator(".wide > table[data-fields]").evaluate_all(
                    "all => all.map(one => [...one.rows[0].cells].map(cell => cell.textContent.trim()))"
                )
                assert len(whole) > 40
                assert max(map(len, parts)) <= 14
                assert [part[:3] for part in parts] == [whole[:3]] * len(parts)
                assert whole[:3] + [name for part in parts for name in part[3:]] == whole
                size = "one => parseFloat(getComputedStyle(one).fontSize)"
                assert page.locator(".wide > .part").first.evaluate(size) >= 10
                # What is placed in a part that scrolls is left white on paper.
                position = "one => getComputedStyle(one).position"
                assert page.locator(".parallel-figure canvas").first.evaluate(position) == "static"
            if path == "/experiments/1":
                for name in ("matrix", "curves-panel", "trials-panel", "events-panel", "spec-panel"):
                    assert page.locator(f"#{name}").is_visible()
                assert page.locator("#matrix .sheet").count() == 1
                assert page.locator("#curves-panel .curves-figure").get_attribute("data-drawn") == "4"
        # A long example that were no higher than on a screen would stand on what follows.
        tab.go(f"{site.url}/docs")
        page.emulate_media(media="screen")
        page.wait_for_timeout(300)
        page.emulate_media(media="print")
        tab.until("() => document.documentElement.classList.contains('paper')")
        over = "all => all.filter(one => one.scrollHeight > one.clientHeight).length"
        assert page.locator(".operation pre").evaluate_all(over) == 0
        # Of a new experiment nothing stands over the last lines of a sheet, and of a long text nothing is cut off.
        tab.go(f"{site.url}/submit#text-panel")
        page.emulate_media(media="screen")
        page.locator("#spec").fill("# a note\n" * 60 + "name: [")
        page.locator("#problem:visible").wait_for()
        page.emulate_media(media="print")
        tab.until("() => document.documentElement.classList.contains('paper')")
        assert (
            page.locator("#said, .check").evaluate_all("all => all.map(one => getComputedStyle(one).position)")
            == ["static"] * 2
        )
        assert page.locator("#spec").evaluate("one => one.scrollHeight - one.clientHeight") <= 0
        assert len(page.pdf(landscape=True)) > 10_000

    def test_names_that_mean_harm_are_names(self, live: Site, browse: Callable[..., Tab]) -> None:
        made = posted(live, HOSTILE[:200], notes=HOSTILE)
        live.database.write(
            lambda session: session.add(
                Event(experiment_id=made, actor=HOSTILE[:200], kind="claimed", detail={HOSTILE: HOSTILE})
            )
        )

        def own(session: Session) -> None:
            found = session.get(Experiment, made)
            assert found is not None
            found.owner, found.error = HOSTILE[:100], HOSTILE

        live.database.write(own)
        tab = browse("about:blank")
        page = tab.page
        for path in ("/", f"/experiments/{made}", "/trials", f"/submit?experiment={made}", "/trials/101"):
            tab.go(f"{live.url}{path}")
            for width in (1280, 390):
                page.set_viewport_size({"width": width, "height": 900})
                tab.settle()
                assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, path
            assert page.locator("b[onclick]").count() == 0


@pytest.mark.deep
def test_pictures_are_taken_of_a_page_in_light_and_in_dark(site: Site, pages: Pages, tmp_path: Path) -> None:
    pictures = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "pictures.py"))
    with Client(site.url) as client:
        found = pictures["addresses"](client, 1)
    assert found["curves"] == "/curves?trials=1,3,5,7"
    wanted = {"leaderboard": f"{site.url}{found['leaderboard']}"}
    said = pictures["take_all"](pages.browser, wanted, tmp_path)
    assert list(said.values()) == [[], []]
    light, dark = said
    with Image.open(light) as bright, Image.open(dark) as dim:
        assert bright.size == dim.size == (1280, 900)
        brightness = [ImageStat.Stat(one.convert("L")).mean[0] for one in (bright, dim)]
    assert brightness[0] > 200
    assert brightness[1] < 80
    missing = pictures["take_all"](pages.browser, {"nothing": f"{site.url}/nothing"}, tmp_path)
    assert all("it answers 404" in complaints for complaints in missing.values())
