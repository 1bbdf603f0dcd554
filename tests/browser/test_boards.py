"""Leaderboards and lists of trials of many kinds in a browser: columns in sight, the plane, the paper's values."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import Trial
from service.experiments.submission import Draft, submit
from service.paper.presets import PAPER, preset_spec
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests import grids
from tests.browser.conftest import Site, Tab, served
from tests.examples import deep

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
    @pytest.mark.parametrize(
        "path", [deep("/trials"), deep("/leaderboards/cifar10"), "/leaderboards/cifar10?experiment=2"]
    )
    def test_accuracy_is_in_sight(self, boards: Site, browse: Callable[..., Tab], path: str) -> None:
        page = browse(f"{boards.url}{path}").page
        room = page.locator(".wide").first.bounding_box()
        for heading in page.locator(".wide thead").first.locator("th", has_text="accuracy").all():
            box = heading.bounding_box()
            assert box["x"] + box["width"] <= room["x"] + room["width"]
        assert page.locator(".wide").first.evaluate(CUT) <= 0
        assert "Decided by the other fields: " in page.locator("main").text_content()
        if path == "/leaderboards/cifar10":
            page.set_viewport_size({"width": 390, "height": 900})
            box = page.locator(".wide thead").first.locator("th", has_text="accuracy (%)").first.bounding_box()
            assert box["width"] < 75  # on a telephone a deviation stands below its mean
            assert box["x"] < 364
            self.scrolls_in_sight(browse(f"{boards.url}{path}?columns=layer,rank,constraint", width=800))

    @staticmethod
    def scrolls_in_sight(tab: Tab) -> None:
        """One that is wider than its window says so, and scrolls in it by keys under its headings."""
        room = tab.page.locator(".wide").first
        tab.until("() => document.querySelector('.wide').classList.contains('beyond')")
        assert room.evaluate("one => one.clientHeight <= innerHeight && one.scrollHeight > one.clientHeight")
        room.focus()
        tab.page.keyboard.press("End")
        tab.page.keyboard.press("ArrowRight")
        tab.until("() => document.querySelector('.wide').classList.contains('before')")
        tab.until("() => document.querySelector('.wide').scrollTop > 100")
        tops = "one => one.getBoundingClientRect().top - one.closest('.wide').getBoundingClientRect().top"
        assert room.locator("thead th").last.evaluate(tops) < 3

    def test_what_is_decided_is_shown_where_it_is_asked_for(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/leaderboards/cifar10?experiment=2").page
        assert page.locator("table[data-fields]").first.get_attribute("data-fields") == "rank,constraint,delta"
        with page.expect_navigation():
            page.locator("a:text-is('All fields as columns')").click()
        fields = page.locator("table[data-fields]").first.get_attribute("data-fields").split(",")
        assert {"rank", "constraint", "delta", "layer", "clipping.rescale"} <= {*fields}

    def test_a_list_of_trials_begins_with_few_fields(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/trials?dataset=digits").page
        headings = page.locator("thead th").all_inner_texts()
        assert headings[-8:] == ["rank", "lambda_ort", "delta", "seed", "epochs", "lr", "weight_decay", "flip"]
        more = page.locator("main p", has_text="more fields differ")
        assert more.inner_text() == "2 more fields differ: pad, clipping.every."
        with page.expect_navigation():
            more.locator("a").click()
        assert len(page.locator("thead th").all_inner_texts()) == len(headings) + 2

    def test_a_wide_window_is_filled(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/trials", width=2560).page
        assert page.locator(".wide").evaluate(CUT) == 0
        assert page.locator("main").evaluate("one => one.clientWidth") > 2500

    def test_the_papers_values_stand_beside_ours(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/leaderboards/cifar10?experiment=2").page
        headings = [one.replace(" ↓", "") for one in page.locator("thead").first.locator("th").all_inner_texts()]
        ours = headings.index("accuracy (%)")
        assert headings[ours + 1] == "paper"
        first = page.locator("tr[data-cell]", has_text="192").first.locator("th, td").all_inner_texts()
        assert re.fullmatch(r"9\d\.\d+", first[ours + 1])
        assert page.locator(".wide").first.evaluate(CUT) <= 0

    def test_rows_of_other_pages_have_them_too(self, boards: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{boards.url}/leaderboards/cifar10?experiment=2&limit=2")
        page = tab.page
        page.wait_for_selector(".plane-figure[data-drawn='16']")
        page.locator(".ranges summary").click()
        page.locator("input[name=y_from]").fill("90")
        page.keyboard.press("Tab")
        tab.until("() => document.querySelectorAll('tr[data-cell]:not([hidden])').length === 16")
        headings = page.locator("thead").first.locator("th").all_inner_texts()
        papers = [at for at, heading in enumerate(headings) if heading == "paper"]
        last = page.locator("tr[data-cell]").last.locator("th, td").all_inner_texts()
        assert len({last[at] for at in papers}) == len(papers) == 4


class TestPlane:
    def test_it_stands_above_the_table_with_tools_of_its_own(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/leaderboards/cifar10?experiment=2&sort=-rank").page
        page.wait_for_selector(".plane-figure[data-drawn='16']")
        plane, table = page.locator(".plane-figure").bounding_box(), page.locator("table.rows").first.bounding_box()
        assert plane["y"] + plane["height"] < table["y"]
        page.locator(".plane-axes select[name=x]").select_option("ece")
        with page.expect_navigation():
            page.locator(".plane-axes button").click()
        page.wait_for_selector(".plane-figure[data-drawn='16']")
        assert page.locator("h2#plane").inner_text() == "ECE and accuracy"
        assert {"experiment=2", "sort=-rank", "x=ece"} <= {*page.url.partition("?")[2].partition("#")[0].split("&")}

    def test_cells_are_chosen_without_a_pointer(self, boards: Site, browse: Callable[..., Tab]) -> None:
        tab = browse(f"{boards.url}/leaderboards/cifar10?experiment=2")
        page = tab.page
        page.wait_for_selector(".plane-figure[data-drawn='16']")
        page.locator(".ranges summary").focus()
        page.keyboard.press("Enter")
        page.locator("input[name=x_from]").fill("2.5")
        page.keyboard.press("Tab")
        tab.until("() => document.querySelector('.plane-figure .readout').textContent.includes(' chosen; ')")
        rows = page.locator("tr[data-cell]:visible")
        at = page.locator("thead th").all_inner_texts().index("compression")
        left = [float(row.locator("th, td").nth(at).inner_text()) for row in rows.all()]
        assert 0 < len(left) < 16
        assert min(left) >= 2.5
        page.locator("select[name=by]").select_option("constraint")
        page.locator(".parallel-figure summary").click()
        page.locator(".parallel-figure .checks input[value=delta]").uncheck()
        rows.first.locator("th a").click()
        page.wait_for_url("**/trials?*")
        page.go_back()
        tab.until("() => document.querySelector('.plane-figure .readout').textContent.includes(' chosen; ')")
        assert (page.locator("input[name=x_from]").input_value(), rows.count()) == ("2.5", len(left))
        assert page.locator("select[name=by]").input_value() == "constraint"
        assert page.locator(".plane-figure .scale .key [dir]").all_inner_texts() == ["clip", "divide", "none"]
        assert not page.locator(".parallel-figure .checks input[value=delta]").is_checked()
        page.locator(".ranges button[type=reset]").click()
        tab.until("() => document.querySelectorAll('tr[data-cell]:not([hidden])').length === 16")

    def test_where_deviations_are_left_out_is_said(self, boards: Site, browse: Callable[..., Tab]) -> None:
        """The service is away for a moment besides: its plane is asked for again."""
        tab = browse("about:blank")
        page = tab.page

        def many(route: Any) -> None:
            found = route.fetch().json()
            for name in ("cell", "x", "x_error", "y", "y_error", "seeds", "trials", "front"):
                found[name] = (found[name] * 100)[:1600]
            found["fields"] = {path: (values * 100)[:1600] for path, values in found["fields"].items()}
            route.fulfill(json=found | {"total": 7000})

        page.route("**/plane?*", many)
        page.route("**/plane?*", lambda route: route.fulfill(status=503), times=1)
        page.goto(f"{boards.url}/leaderboards/cifar10?experiment=2")
        page.wait_for_selector(".plane-figure[data-drawn='1600']")
        tab.complaints.clear()  # the console tells of what had no answer
        said = "Of more than 1\u202f500 the deviations of the front and of the chosen are drawn alone."
        assert said in page.locator(".plane-figure figcaption").inner_text()
        said = "Of so many 1\u202f600 are drawn: the best in compression and the front."
        assert said in page.locator(".plane-figure figcaption").inner_text()

    def test_axes_reach_to_the_ends_of_deviations(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse("about:blank").page

        def wide(route: Any) -> None:
            found = route.fetch().json()
            route.fulfill(json=found | {"y_error": [0.3] * len(found["y"])})

        page.route("**/plane?*", wide)
        page.goto(f"{boards.url}/leaderboards/cifar10?experiment=2&x=parameters")
        page.wait_for_selector(".plane-figure[data-drawn='16']")
        with page.expect_download() as saved:
            page.locator(".plane-figure button[data-save=svg]").click()
        texts = re.findall(r"<text[^>]*>([-\d.]+)</text>", saved.value.path().read_text())
        means = page.evaluate(
            "async () => (await (await fetch(document.querySelector('.plane-figure').dataset.source)).json()).y"
        )
        assert min(map(float, texts)) <= 100 * (min(means) - 0.3)

    def test_on_another_screen_all_is_as_fine_and_what_was_chosen_too(
        self, boards: Site, browse: Callable[..., Tab]
    ) -> None:
        tab = browse(f"{boards.url}/leaderboards/cifar10?experiment=1", fresh=True)
        page = tab.page
        page.wait_for_selector(".plane-figure[data-drawn]")
        page.locator(".plane-figure button[data-brush]").click()
        box = page.locator(".plane-figure > .canvas").bounding_box()
        page.mouse.move(box["x"] + 80, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + 150, steps=3)
        page.mouse.up()
        readout = page.locator(".plane-figure > .readout")
        readout.filter(has_text="chosen").wait_for()
        for pixels in (2, 1.25):
            tab.to_screen(pixels)
            # The rectangle, in the middle of its upper edge, is drawn there again.
            assert page.evaluate(
                "([x, y]) => [...document.querySelectorAll('.plane-figure > .canvas canvas')].some(one =>"
                " one.getContext('2d').getImageData((x) * devicePixelRatio - 2, (y) * devicePixelRatio - 2, 5, 5)"
                ".data.filter((_, at) => at % 4 === 3).some(alpha => alpha > 200))",
                [240, 20],
            )
        assert "chosen" in readout.inner_text()

    def test_numbers_beside_axes_are_written_as_on_pages(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/leaderboards/cifar10?experiment=2&x=parameters").page
        page.wait_for_selector(".plane-figure[data-drawn='16']")
        read = "const { evenly, inDigits, short, ticks } = await import('/static/numbers.js')"
        call = f"async (values) => {{ {read}; return [ticks(values), values.map(short)]; }}"
        assert page.evaluate(call, [0, 1200, 20_000]) == [["0", "1\u202f200", "20\u202f000"]] * 2
        assert page.evaluate(call, [0, 5000, 2e5])[0] == ["0", "5e3", "2e5"]
        assert page.evaluate(call, [0.00012, 1.5])[1] == ["1.2e-4", "1.5"]
        call = f"async (all) => {{ {read}; return all.map(numbers => inDigits(...numbers)); }}"
        texts = {
            "-1.2e-9": [-1.24e-9, 2],
            "0.00": [-0.0, 2],
            "0.0": [2e-9, 1, 0.1],
            "0.004": [0.004, 2],
            "1.000e+30": [1e30, 2],
        }
        assert page.evaluate(call, [*texts.values()]) == [*texts]
        # Means that differ in nothing but their last bit are an axis, too.
        assert page.evaluate(f"async (low) => {{ {read}; return evenly(low, low + 2 ** -50); }}", 5) == [5]
        tell = "async (values) => values.map((await import('/static/numbers.js')).telling(values))"
        assert page.evaluate(tell, [0.12341, 0.12344, None]) == ["0.12341", "0.12344", "none"]
        radii = [36 / 255 * number for number in range(1, 13)]
        short = [f"[0.1412, 0.2824, …, {last}] ({count})" for last, count in ((1.694, 12), (1.553, 11))]
        assert page.evaluate(tell, [radii, radii[:11]]) == short
        told = page.evaluate(tell, [radii, [*radii[:6], 1, *radii[7:]]])
        assert [len(one.split(", ")) for one in told] == [12, 12]
        assert told[0] != told[1]

    def test_files_have_the_key_of_the_colours(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/leaderboards/cifar10?experiment=2").page
        page.wait_for_selector(".plane-figure[data-drawn='16']")
        page.locator("select[name=by]").select_option("constraint")
        assert page.locator(".plane-figure .scale .key [dir]").all_inner_texts() == ["clip", "divide", "none"]
        sizes = []
        for by in ("constraint", ""):
            page.locator("select[name=by]").select_option(by)
            with page.expect_download() as saved:
                page.locator(".plane-figure button[data-save=svg]").click()
            text = saved.value.path().read_text()
            assert all((f">{one}<" in text) == bool(by) for one in ("clip", "divide"))
            with page.expect_download() as saved:
                page.locator(".plane-figure button[data-save=png]").click()
            with Image.open(saved.value.path()) as picture:
                sizes.append(picture.size)
        assert sizes[0][1] > sizes[1][1]


class TestOverFields:
    def test_hover_and_keys_say_which_line_is_meant(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/leaderboards/cifar10?experiment=2").page
        page.wait_for_selector(".parallel-figure[data-drawn='16']")
        place = page.locator(".parallel-figure .canvas")
        place.focus()
        page.keyboard.press("Home")
        worst = page.locator(".parallel-figure .readout").inner_text()
        assert re.match(r"rank (\d+|none), constraint \w+, delta (\d|none); accuracy 9\d\.\d\d", worst)
        page.keyboard.press("ArrowRight")
        assert page.locator(".parallel-figure .readout").inner_text() != worst
        box = place.bounding_box()
        page.mouse.move(box["x"] + 20, box["y"] + box["height"] - 15)  # where rank is none
        page.locator(".tip").wait_for(state="visible")
        assert page.locator(".tip .head").inner_text().startswith("rank none")

    def test_axes_are_chosen_and_scrolled(self, boards: Site, browse: Callable[..., Tab]) -> None:
        page = browse(f"{boards.url}/leaderboards/cifar10", width=390).page
        page.wait_for_selector(".parallel-figure[data-drawn='33']")
        boxes = page.locator(".parallel-figure .checks input")
        assert page.locator(".parallel-figure .checks input:checked").count() <= 8
        across = page.locator(".parallel-figure .across")
        before = across.evaluate(CUT)
        assert before > 0
        page.locator(".parallel-figure summary").click()
        boxes.last.check()
        assert across.evaluate(CUT) > before
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0

    def test_numbers_over_decades_are_logarithmic_with_none_below(
        self, boards: Site, browse: Callable[..., Tab]
    ) -> None:
        page = browse(boards.url).page
        values = [None, 0, 0.001, 0.1, 10, *(0.002 * index for index in range(1, 10))]
        found = page.evaluate("async (values) => (await import('/static/parallel.js')).scaleOf(values, String)", values)
        assert [one["text"] for one in found["labels"]] == ["null", "0", "0.001", "0.01", "0.1", "1", "10"]
        assert found["at"][:5] == pytest.approx([0, 0.12, 0.24, 0.62, 1])


def test_boxes_stand_below_each_other_and_figures_are_led_to(boards: Site, browse: Callable[..., Tab]) -> None:
    page = browse(f"{boards.url}/leaderboards/cifar10?experiment=2").page
    lefts = page.locator("tr[data-cell] [data-choose]").evaluate_all(
        "all => all.map(one => Math.round(one.getBoundingClientRect().left))"
    )
    assert len(lefts) == 16
    assert len({*lefts}) == 1
    page.goto(f"{boards.url}/presets")
    links = page.locator("tbody a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    assert {f"/figures/{PAPER}/vgg", f"/tables/{PAPER}/figure-vgg", f"/tables/{PAPER}/table2"} <= {*links}
    page.goto(boards.url)
    assert "queued" in page.locator(".legend").inner_text()
    assert "waiting" not in page.locator(".legend").inner_text()
