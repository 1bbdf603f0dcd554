"""The pages, on SQLite and Postgres: what they show, that names are inert in them, and who may press their buttons."""

import math
import re
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from service.access import keys
from service.access.security import Scope, installation_secret, new_key
from service.dashboard.charts import line_chart
from service.dashboard.spec_form import IN_THE_TEXT
from service.dashboard.spec_pages import START
from service.dashboard.wording import counted
from service.database import Artifact, Experiment, Protocol, Result, Trial
from service.database.engine import Database
from service.errors import KeyRefusedError
from service.experiments import actions
from service.main import create_app
from service.paper.presets import presets
from service.queue import leases
from service.queue.leases import Lease
from service.queue.trials import HeldExperiment, ProtocolRecord, hold
from service.schemas.experiments import ExperimentOut
from service.schemas.trials import TrialDetailOut
from service.settings import Settings
from service.specs.documents import read_yaml, write_yaml
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.held import reported, under
from workers.cli.tables import epochs_table, experiments_table, progress_line

BROWSER = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
HOSTILE = "\"'><canary onclick=alert(1) style=x>{{7*7}}</pre></textarea></script>javascript:alert(1)"
VOID = {"meta", "link", "input", "img", "br"}
FOREIGN = {"path", "rect", "circle", "line"}
"""SVG's, which may be closed at once."""


class Page(HTMLParser):
    """A page taken apart: its elements with their attributes, and its text. Fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inside: dict[str, str] = {}
        """Text of the elements with an id that have no others in them."""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID | FOREIGN, f"<{tag}/>"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if name := self.elements and self.elements[-1][1].get("id"):
            self.inside[name] = self.inside.get(name, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element of this name."""
        return [attributes for name, attributes in self.elements if name == tag]

    def links(self) -> list[str]:
        """Where the page leads to."""
        return [found["href"] or "" for found in self.all("a")]


def sound(page: Page) -> None:
    """Nothing inline, nothing from elsewhere, and what assistive technology needs."""
    for tag, attributes in page.elements:
        assert tag != "canary"
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "src", "action"):
            where = attributes.get(name)
            assert where is None or where[:1] in ("/", "?", "#"), f"{tag} {name}={where}"
            assert where is None or not where.startswith("//")
    assert all("src" in script for script in page.all("script"))
    assert len(page.all("h1")) == len(page.all("main")) == 1
    assert page.elements[[tag for tag, _ in page.elements].index("title") - 1][0] == "meta"
    assert all(heading.get("scope") for heading in page.all("th"))
    assert all("alt" in image for image in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    regions = [attributes["aria-label"] for _, attributes in page.elements if attributes.get("role") == "region"]
    assert len(regions) == len(set(regions))
    named = {attributes["for"] for attributes in page.all("label") if "for" in attributes}
    for tag in ("input", "select", "textarea"):
        for attributes in page.all(tag):
            inside_label = attributes.get("type") != "hidden" and "id" not in attributes
            assert inside_label or attributes.get("type") == "hidden" or attributes["id"] in named
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert name not in attributes or attributes[name] in ids


@pytest.fixture
def show(api: TestClient) -> Callable[[str], Page]:
    """Asks for a page as a browser does, and looks whether it is sound."""

    def show(path: str) -> Page:
        answer = api.get(path, headers=BROWSER)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        page = Page(answer.text)
        sound(page)
        return page

    return show


@pytest.fixture
def world(
    api: TestClient,
    database: Database,
    claim: Callable[..., Lease],
    epoch_point: Callable[..., dict[str, Any]],
    trial_result: Callable[..., dict[str, Any]],
    protocol: Callable[..., ProtocolRecord],
    tmp_path: Path,
) -> int:
    """An experiment whose every free text is hostile: trials 1 (result), 2 (invalid), 3 (failed), 4 (running)."""
    spec = {
        "name": HOSTILE,
        "notes": HOSTILE,
        "tags": ["thesis"],
        "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "rank": 4, "training": {"epochs": 3}},
        "grid": {"lambda_ort": [0.1, 0.2, 0.3, 0.4]},
    }
    experiment_id: int = api.post("/v1/experiments", json=spec).json()["id"]
    lease = claim(worker=HOSTILE)
    layer = {"name": HOSTILE, "kind": HOSTILE, "shape": {HOSTILE: [3]}, "largest": 2.0, "smallest": 0.5}
    result = trial_result(0.9, layers=[layer], environment={HOSTILE: HOSTILE})

    def work(session: Session) -> None:
        with hold(session, lease) as held:
            held.start_trial(1)
            for epoch in (1, 2, 3):
                held.add_epoch(1, reported(epoch_point(epoch)))
            held.finish_trial(1, result, protocol(split=HOSTILE))
            held.start_trial(2)
            violations = {"valid": False, "violations": [f"accuracy 123 {HOSTILE}"]}
            held.finish_trial(2, result | violations, protocol(split=HOSTILE))
            held.start_trial(3)
            held.fail_trial(3, "error", HOSTILE)
            held.start_trial(4)
        session.add(Artifact(trial_id=1, kind=HOSTILE[:60], path="trials/1/x.svg", sha256="0" * 64, size=3))
        found = session.get(Experiment, experiment_id)
        assert found is not None
        found.owner = found.error = HOSTILE

    database.write(work)
    for path in ("trials/1/1/trial.log", f"logs/experiment-{experiment_id}-1.log"):
        file = tmp_path / "data" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HOSTILE + "\x1b[31m\xff")
    return experiment_id


class TestPages:
    def test_empty_ones_say_what_to_do_next(self, show: Callable[[str], Page]) -> None:
        for path in ("/", "/leaderboards", "/leaderboards/digits", "/trials", "/presets", "/submit"):
            text = show(path).text
            assert any(word in text for word in ("ttsv submit", "Submit an experiment", "ttsv presets submit")), path

    def test_hostile_texts_are_texts_everywhere(self, show: Callable[[str], Page], world: int) -> None:
        for path, times in {
            "/": 2,  # name, owner
            f"/experiments/{world}": 7,  # title, heading, error, notes, owner, actor, spec, log ...
            "/trials/1": 8,  # the experiment's name, protocol, environment, layer, kind, shape, artifact, log
            "/trials/2": 2,
            "/trials/3": 2,
            "/trials/4": 1,
            "/leaderboards/digits": 2,  # protocol, violation
            f"/submit?experiment={world}": 2,
            "/pool": 1,  # the experiment's name
        }.items():
            page = show(path)
            shown = page.text + "".join(value or "" for _, attributes in page.elements for value in attributes.values())
            assert shown.count("<canary") >= times, path
        for path in (f"/?name={HOSTILE}", f"/?tag={HOSTILE[:60]}", f"/trials?cell={HOSTILE}&model={HOSTILE}"):
            assert "<canary" in str(show(path).elements)

    def test_fits_what_the_rows_say(self, show: Callable[[str], Page], world: int) -> None:
        text = show(f"/experiments/{world}").text
        assert "90.00 %" in text
        assert "2.00 %" in text  # ECE
        assert "1 failed" in text
        text = show("/trials/1").text
        assert "90.00 %" in text
        assert "1.2500" not in text
        assert "AutoAttack accuracy" in text.partition("Not measured")[2]
        assert "Not measured" not in show("/trials/4").text

    def test_a_trial_says_every_field_that_is_not_as_everywhere(
        self, show: Callable[[str], Page], submit: Callable[..., int]
    ) -> None:
        submit(seeds=1, **{"augmentation.pad": [3], "training.schedule": ["constant"]})
        text = " ".join(show("/trials/1").text.split())
        assert "pad3" in text
        assert "scheduleconstant" in text

    def test_an_invalid_result_is_shown_loudly(self, show: Callable[[str], Page], world: int) -> None:
        page = show("/trials/2")
        assert {"class": "alarm", "role": "alert", "aria-labelledby": "invalid"} in page.all("section")
        assert "accuracy 123" in page.text
        assert [table for table in page.all("table") if table["class"] == "rows void"]
        assert "invalid" in show(f"/experiments/{world}?state=succeeded").text
        board = show("/leaderboards/digits")
        assert "counted nowhere: 1" in board.text
        assert "/trials/2" in board.links()

    def test_what_is_live_can_be_found_again(self, show: Callable[[str], Page], world: int) -> None:
        """live.js exchanges parts by their id, whatever the state."""
        for path in ("/", f"/experiments/{world}", "/trials/4"):
            page = show(path)
            (body,) = page.all("body")
            assert "data-stream" in body or "data-poll" in body
            assert all("id" in attributes for _, attributes in page.elements if "data-live" in attributes)

    def test_scripts_styles_and_their_names_fit(
        self, api: TestClient, show: Callable[[str], Page], world: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(_engine: Engine) -> None:
            raise OperationalError("SELECT 1", {}, ConnectionError("gone"))

        with monkeypatch.context() as broken:
            broken.setattr(Engine, "connect", away)
            failed = api.get("/", headers={"Accept": "text/html"})
        assert (failed.status_code, failed.headers["retry-after"]) == (503, "5")
        asked = set(re.findall(r'src="(/static/[^"]+)"', failed.text))
        for path in (
            "/",
            f"/experiments/{world}",
            "/submit",
            "/trials/4",
            "/compare?trials=1,2",
            "/leaderboards/digits",
            "/docs",
            "/docs/try",
        ):
            page = show(path)
            asked |= {script["src"] for script in page.all("script")} | {link["href"] for link in page.all("link")}
        asked = {name for name in asked if not str(name).startswith("/static/swagger-ui/")}
        assert len(asked) >= 12
        folder = Path(__file__).parents[3] / "service" / "dashboard" / "static"
        about = {"/static/lib/LICENSES.txt", "/static/lib/SHA256SUMS"}
        served = {f"/static/{file.relative_to(folder)}" for file in folder.rglob("*.*")} - about
        imported = set(re.findall(r'from "(/static/[^"]+)"', "".join(f.read_text() for f in folder.glob("*.js"))))
        assert asked | imported == served
        for name in served:
            answer = api.get(name)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[name.rpartition(".")[2]]
            assert answer.headers["content-type"].startswith(kind)
        assert api.get("/static/../main.py").status_code == 404
        assert api.get("/static/%2e%2e/site.py").status_code == 404

    def test_the_form_has_what_its_script_looks_for(self, show: Callable[[str], Page]) -> None:
        script = Path(__file__).parents[3] / "service" / "dashboard" / "static" / "submit.js"
        ids = {attributes.get("id") for _, attributes in show("/submit").elements}
        wanted = set(re.findall(r'getElementById\("([^"]+)"\)', script.read_text()))
        assert {"spec", "problem", "stored", "preview"} <= wanted <= ids


class TestNamed:
    """Trials, cells and experiments that somebody named in a field."""

    @pytest.mark.parametrize(
        ("path", "said", "kept"),
        [
            ("/curves?trials=1,99", "there is no trial 99", "1"),
            ("/curves?trials=1;x", "trials: '1;x' is no id: write the ids of trials with commas between", "1;x"),
            ("/curves?trials=0", "trials: '0' is no id", "0"),
            (f"/curves?trials={','.join(map(str, range(1, 202)))}", "there is no trial 5, 6", "1,2,3,4"),
            ("/compare?trials=abc", "trials: 'abc' is no id: write the ids of trials with commas between", "abc"),
            ("/compare?trials=1,-2", "trials: '-2' is no id", "1,-2"),
            ("/compare?trials=1,99999999999999999999", "'99999999999999999999' is no id", "1,99999999999999999999"),
            ("/compare?cells=abc,def", "cells: 'abc' is none of a cell: write their fingerprints", "abc,def"),
        ],
    )
    def test_what_is_wrong_is_said_where_it_was_written(
        self, api: TestClient, world: int, path: str, said: str, kept: str
    ) -> None:
        answer = api.get(path, headers=BROWSER)
        assert answer.status_code in (200, 422), answer.text
        page = Page(answer.text)
        sound(page)
        assert said in " ".join(page.text.split())
        assert kept in [field.get("value") for field in page.all("input")]

    @pytest.mark.parametrize("listed", ["1,2", "1 2", " 1 , 2,", "2,,1,2"])
    @pytest.mark.parametrize("path", ["/curves", "/compare"])
    def test_commas_and_spaces_may_stand_between(
        self, show: Callable[[str], Page], world: int, path: str, listed: str
    ) -> None:
        values = [field.get("value") for field in show(f"{path}?trials={listed}").all("input")]
        assert {"1,2", "2,1"} & {*values}

    def test_what_differences_were_to_is_forgotten_with_it(self, show: Callable[[str], Page], world: int) -> None:
        assert "Differences to A." in show("/compare?trials=2,4&baseline=1").text
        assert "Differences to B." in show("/compare?trials=1,2&baseline=2").text

    @pytest.mark.parametrize(
        "query", ["trials=1,+4", "trials=1 4,&baseline=4", "trials=1,4&baseline=2", "experiments=1,2"]
    )
    def test_files_of_a_comparison_are_of_what_stands_there(
        self, api: TestClient, show: Callable[[str], Page], submit: Callable[..., int], world: int, query: str
    ) -> None:
        submit()
        files = [link for link in show(f"/compare?{query}").links() if "format=" in link]
        assert len(files) == 4
        for link in files:
            answer = api.get(link)
            assert answer.status_code == 200, answer.text
        if "trials" in query:
            assert [side["key"] for side in api.get(files[3]).json()["sides"]] == [1, 4]
            assert api.get(files[3]).json()["baseline"] == (1 if "baseline=4" in query else 0)

    def test_curves_are_drawn_as_the_address_says(self, show: Callable[[str], Page], world: int) -> None:
        def chosen(path: str) -> list[str | None]:
            boxes = [one for one in show(path).all("input") if one.get("type") == "checkbox" and "checked" in one]
            return [one.get("value") or one.get("name") for one in boxes]

        assert chosen("/curves?trials=1") == ["bands", "val_accuracy", "val_loss", "train_loss", "ort_loss"]
        assert chosen("/curves?trials=1&metric=lr&log=on&smoothing=0.5") == ["log", "lr"]
        assert "Best by" not in show("/curves?trials=1").text
        assert "Best by" in show(f"/experiments/{world}").text


class TestWords:
    def test_files_that_lack_trials_say_so(
        self, show: Callable[[str], Page], database: Database, submit: Callable[..., int]
    ) -> None:
        made = submit(seeds=2)
        assert "writes all" not in show(f"/experiments/{made}").text
        database.write(lambda session: session.execute(update(Experiment).values(trial_count=1001)))
        said = f"These have the first 1\u202f000 in this order; ttsv export {made} --csv trials.csv writes all."
        assert said in show(f"/experiments/{made}").text

    def test_files_of_a_list_say_so_too(
        self, show: Callable[[str], Page], submit: Callable[..., int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submit(seeds=3)
        monkeypatch.setattr("service.dashboard.experiments._MOST_TAKEN", 2)
        said = "These have the first 1\u202f000 in this order."
        assert said in show("/trials?limit=1").text
        assert said not in show("/trials?limit=1&state=failed").text
        (following,) = [link for link in show("/trials?limit=2").links() if "cursor=" in link]
        assert said in show(f"/trials{following}").text  # the last page as well
        monkeypatch.setattr("service.dashboard.experiments._MOST_TAKEN", 3)
        assert said not in show("/trials?limit=1").text

    def test_files_of_some_trials_of_an_experiment_say_what_they_have(
        self, show: Callable[[str], Page], submit: Callable[..., int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No command writes these alone."""
        made = submit(seeds=3)
        monkeypatch.setattr("service.dashboard.experiments._MOST_TAKEN", 2)
        assert "writes all" in show(f"/experiments/{made}").text
        assert "These have the first" not in show(f"/experiments/{made}?seed=1").text
        few = show(f"/experiments/{made}?state=queued&limit=1").text
        assert "These have the first 1\u202f000 in this order." in few
        assert "writes all" not in few

    def test_an_axis_without_a_field_says_nothing(self, show: Callable[[str], Page], world: int) -> None:
        assert '"texts":{"x":["0.1","0.2","0.3","0.4"],"y":[""]' in show(f"/experiments/{world}").text

    def test_one_is_not_many(self) -> None:
        assert [counted(count, "trial") for count in (0, 1, 2, 1000)] == [
            "0 trials",
            "1 trial",
            "2 trials",
            "1\u202f000 trials",
        ]

    @pytest.mark.parametrize(
        ("low", "high"), [(0.022, 0.045), (0.0123, 0.0187), (1.2e-14, 1.9e-14), (0.021, 0.02100001), (3e7, 4e7)]
    )
    def test_a_narrow_logarithmic_axis_has_ticks(self, low: float, high: float) -> None:
        """None of these ranges holds two of 1, 2 and 5 times a power of ten."""
        chart = line_chart("Orthogonal loss", "epoch", [1.0, 2.0], {"training": [high, low]}, log=True)
        assert chart is not None
        assert chart.y.log
        assert 2 <= len(chart.y.ticks) <= 8
        heights = [tick.at for tick in chart.y.ticks]
        assert heights == sorted(heights, reverse=True)
        assert all(chart.y.end <= height <= chart.y.start for height in heights)
        assert all(float(tick.label) > 0 for tick in chart.y.ticks)

    def test_values_that_differ_by_a_rounding_make_a_chart(self) -> None:
        value = 0.7
        chart = line_chart("x", "epoch", [1, 2], {"x": [value, math.nextafter(value, 1)]}, log=True)
        assert chart is not None
        assert len(chart.y.ticks) >= 2


class TestLists:
    def test_filters_and_sort(
        self, api: TestClient, database: Database, submit: Callable[..., int], show: Callable[[str], Page]
    ) -> None:
        names = ["alpha", "beta", "Gamma"]
        for name in names:
            submit(name=name)
        database.write(lambda session: actions.cancel(session, 2))
        database.write(lambda session: actions.change(session, 3, {"tags": ["thesis"]}, expected=lambda _: True))

        def listed(query: str) -> list[str]:
            links = [link for link in show(f"/{query}").links() if re.fullmatch(r"/experiments/\d+", link)]
            return list(dict.fromkeys(link.rpartition("/")[2] for link in links))

        assert listed("") == ["3", "2", "1"]
        assert listed("?sort=name") == sorted(["1", "2", "3"], key=lambda number: names[int(number) - 1])
        assert listed("?state=cancelled") == ["2"]
        assert listed("?name=GAM") == ["3"]
        assert listed("?tag=thesis") == ["3"]
        assert listed("?archived=true") == []
        empty = api.get("/?name=&state=&tag=thesis&owner=", headers=BROWSER, follow_redirects=False)
        assert (empty.status_code, empty.headers["location"]) == (303, "?tag=thesis")
        assert api.get("/?name=", follow_redirects=False).headers["location"] == "/"

    def test_columns_of_trials_are_chosen(self, api: TestClient, show: Callable[[str], Page], world: int) -> None:
        """By a form that works without scripts; what it was sent with stays in it, in headings and in downloads."""
        for home in (f"/experiments/{world}", "/trials"):
            assert "lambda_ort" in show(home).text
            page = show(f"{home}?columns=rank,+lr&hide=layer")
            table = page.text.partition("All rows: ")[2].partition("Compare")[0]
            assert re.search(r"\srank\s+lr\s", table), table
            assert "lambda_ort" not in table
            assert "layer tt" not in page.text
            filled = {field["name"]: field.get("value") for field in page.all("input")}
            assert (filled["columns"], filled["hide"]) == ("rank, lr", "layer")
            assert all("columns=rank%2C+lr" in link for link in page.links() if link.startswith("?"))
            csv = next(link for link in page.links() if "format=csv" in link)
            header = api.get(csv).text.splitlines()[0].split(",")
            assert "rank" in header
            assert "lambda_ort" not in header
            assert api.get(f"{home}?columns=lambda", headers=BROWSER).status_code == 422

    def test_what_is_asked_of_the_matrix_is_none_of_a_file_s_parameters(
        self, api: TestClient, show: Callable[[str], Page], world: int
    ) -> None:
        page = show(f"/experiments/{world}?metric=ece&seeds=min&x=lambda_ort&where=lambda_ort<0.3")
        files = [link for link in page.links() if "format=" in link]
        assert len(files) == 4
        for link in files:
            assert api.get(link).status_code == 200, api.get(link).text
        assert len(api.get(files[0]).text.splitlines()) == 1 + 2  # the conditions are the list's, too

    def test_the_pool_counts_what_has_no_row(
        self,
        api: TestClient,
        claim: Callable[..., Lease],
        database: Database,
        show: Callable[[str], Page],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Of hundreds of experiments that wait those have a row that are first: what is held is that of all."""
        for seeds in (2, 3):
            spec = {
                "name": "waits",
                "base": {"dataset": "digits", "model": "small-cnn"},
                "grid": {"seed": [*range(seeds)]},
                "resources": {"cpus": 3, "gpus": 0.5},
            }
            assert api.post("/v1/experiments", json=spec).status_code == 201
        lease = claim()

        def begin(session: Session) -> None:
            with hold(session, lease) as held:
                held.start_trial(1)

        database.write(begin)
        assert "by priority" not in show("/pool").text
        monkeypatch.setattr("service.dashboard.pool._MOST", 1)
        text = " ".join(show("/pool").text.split())
        assert "The first 1 of 2 by priority." in text
        assert re.search(r"nobody named ?1 ?4 ?3 ?0\.5", text), text

    def test_pages_hold_everything_once(self, submit: Callable[..., int], show: Callable[[str], Page]) -> None:
        experiment = submit(seeds=7)
        seen, path = [], f"/experiments/{experiment}?limit=3&sort=-seed"
        while True:
            page = show(path)
            seen += [link for link in page.links() if re.fullmatch(r"/trials/\d+", link) and link not in seen]
            following = [a["href"] for a in page.all("a") if a.get("rel") == "next"]
            if not following:
                break
            path = f"/experiments/{experiment}{following[0]}"
        assert seen == [f"/trials/{number}" for number in range(7, 0, -1)]


class TestActions:
    def test_every_button_is_allowed(
        self,
        api: TestClient,
        database: Database,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
        show: Callable[[str], Page],
    ) -> None:
        """In each state the API takes what a button would send, and what is not offered it refuses or ignores."""

        def running(experiment: int) -> None:
            database.write(
                lambda session: actions.change(session, experiment, {"priority": 9}, expected=lambda _: True)
            )
            claim()

        def failed(experiment: int) -> None:
            running(experiment)
            lease = Lease(experiment, 1)
            trials = [t["id"] for t in api.get(f"/v1/experiments/{experiment}/trials").json()["items"]]
            finish(lease, trials[0])

            def work(session: Session) -> None:
                with hold(session, lease) as held:
                    held.start_trial(trials[1])
                    held.fail_trial(trials[1], "error", "x")
                leases.complete(session, lease)

            database.write(work)

        def after(*said: str) -> Callable[[int], None]:
            def say(experiment: int) -> None:
                for verb in said:
                    api.post(f"/v1/experiments/{experiment}/{verb}").raise_for_status()

            return say

        states = {
            "queued": after(),
            "paused": after("pause"),
            "running": running,
            "cancelled": after("cancel"),
            "stopped": after("stop"),
            "failed": failed,
            "archived": after("cancel", "archive"),
        }
        expected = {
            "queued": {"pause", "stop", "cancel"},
            "paused": {"resume", "stop", "cancel"},
            "running": {"pause", "stop", "cancel"},
            "cancelled": {"archive"},
            "stopped": {"archive"},
            "failed": {"retry", "archive"},
            "archived": {"unarchive"},
        }
        for name, prepare in states.items():
            offered = expected[name]
            for verb in sorted(offered):
                experiment = submit()
                prepare(experiment)
                page = show(f"/experiments/{experiment}")
                sent = {button["data-action"] for button in page.all("button") if "data-action" in button}
                assert sent == {f"/v1/experiments/{experiment}/{one}" for one in offered}, name
                before = api.get(f"/v1/experiments/{experiment}").json()["revision"]
                answer = api.post(f"/v1/experiments/{experiment}/{verb}")
                assert answer.status_code == 200, (name, verb, answer.text)
                assert answer.json()["revision"] > before, (name, verb)

    def test_presets_and_the_form_begin_with_valid_specs(self, show: Callable[[str], Page]) -> None:
        def document(path: str) -> Any:
            return read_yaml(show(path).inside["spec"])

        assert document("/submit") == START
        assert len(expand_grid(ExperimentSpec.model_validate(START), max_trials=100).trials) == 8
        links = [link for link in show("/presets").links() if link.startswith("/submit?")]
        assert len(links) == 2 * len(presets())
        for link in links[:4]:
            expand_grid(ExperimentSpec.model_validate(document(link)), max_trials=1000)


class TestForm:
    """The page that makes a spec: fields of the schema, and what it does without scripts."""

    def test_every_field_of_the_served_schema_is_there(
        self, show: Callable[[str], Page], openapi: dict[str, Any]
    ) -> None:
        page = show("/submit")
        fields = {attributes["data-path"]: attributes for attributes in page.all("div") if "data-path" in attributes}
        schema = openapi["components"]["schemas"]["ExperimentSpec"]["properties"]
        axes = set(schema["grid"]["properties"])
        assert {path for path, found in fields.items() if "data-varies" in found} == axes
        rest = {str(path).partition(".")[0] for path in fields if path not in axes}
        assert rest == set(schema) - {"spec_version", "base", "grid", *IN_THE_TEXT}
        training = schema["base"]["properties"]["training"]["properties"]
        assert training["lr"]["description"] in page.text
        inputs = {found.get("id"): found for found in page.all("input")}
        assert inputs["field-training.lr"]["placeholder"] == str(training["lr"]["default"])
        choices = [found["value"] for found in page.all("option")]
        assert {f'"{name}"' for name in schema["base"]["properties"]["layer"]["enum"]} <= set(choices)
        for path in fields:
            (about,) = [found for _, found in page.elements if found.get("id") == f"about-{path}"]
            assert page.inside[str(about["id"])].strip()

    def test_a_stored_spec_is_shown_without_its_defaults(self, api: TestClient, show: Callable[[str], Page]) -> None:
        spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}, "repeat": 2, "notes": "a\nb"}
        made = api.post("/v1/experiments", json=spec).json()
        assert read_yaml(show(f"/submit?experiment={made['id']}").inside["spec"]) == spec | {"spec_version": 2}

    def send(self, api: TestClient, **fields: str) -> Any:
        return api.post("/submit", data=fields, headers=BROWSER, follow_redirects=False)

    def test_without_scripts_it_is_looked_at_first(self, api: TestClient) -> None:
        answer = self.send(api, spec=write_yaml(START), do="look")
        assert answer.status_code == 200
        page = Page(answer.text)
        sound(page)
        assert "8 trials of 8 points" in re.sub(r"\s+", " ", page.text)
        assert "GPU memory of the largest trial" in page.text
        assert "GPU memory: worked out of its layers" in page.text
        (looked,) = [found["value"] for found in page.all("input") if found.get("name") == "spec"]
        (key,) = [found["value"] for found in page.all("input") if found.get("name") == "key"]
        assert api.get("/v1/experiments").json()["items"] == []
        for _ in range(2):
            posted = self.send(api, spec=str(looked), key=str(key), do="post")
            assert (posted.status_code, posted.headers["location"]) == (303, "/experiments/1")
        assert len(api.get("/v1/experiments").json()["items"]) == 1

    @pytest.mark.parametrize("key", ["x" * 300, "a\x00b"])
    def test_a_key_that_the_page_did_not_make_is_none(self, api: TestClient, key: str) -> None:
        assert self.send(api, spec=write_yaml(START), key=key, do="post").status_code == 303

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("name: [", "not YAML that can be read"),
            ('{"name": NaN}', "NaN is not a JSON number"),
            ("name: x", "base.dataset: is required"),
            (HOSTILE, "canary"),
            ("", "empty"),
        ],
    )
    def test_what_is_wrong_is_said(self, sqlite_api: TestClient, text: str, said: str) -> None:
        for what in ("look", "post"):
            answer = self.send(sqlite_api, spec=text, do=what)
            assert answer.status_code == 422
            page = Page(answer.text)
            sound(page)
            assert said in page.text
            assert page.inside.get("spec", "").strip() == text.strip()
        assert sqlite_api.get("/v1/experiments").json()["items"] == []

    @pytest.mark.parametrize("listed", [False, True])
    def test_looked_at_while_somebody_writes_it_is_what_a_dry_run_says(
        self, sqlite_api: TestClient, listed: bool
    ) -> None:
        query = "dry_run=true" if listed else "dry_run=true&summary=true"
        for wrong in ({}, {"grid": {"rank": [0], "lambda": [1]}}, {"name": ""}, {"base": {"dataset": "nix"}}):
            spec = START | wrong
            told = sqlite_api.post(f"/v1/experiments?{query}", json=spec)
            looked = sqlite_api.post("/submit/look", json={"text": write_yaml(spec), "listed": listed})
            assert looked.status_code == 200
            if told.status_code == 200:
                assert looked.json() == told.json()
                assert bool(looked.json()["trials"]) is listed
            else:
                assert looked.json() == {"refused": {name: told.json()[name] for name in ("detail", "errors")}}
        assert sqlite_api.post("/submit/look", json={"text": "- x"}).json()["refused"]["errors"]
        assert sqlite_api.get("/v1/experiments").json()["items"] == []

    def test_a_text_and_its_changes(self, sqlite_api: TestClient) -> None:
        text = "name: x  # mine\nbase: {rank: 4}\n"
        edits = [{"path": ["base", "rank"], "remove": True}, {"path": ["grid", "rank"], "value": [4, 8]}]
        found = sqlite_api.post("/submit/text", json={"text": text, "edits": edits}).json()
        assert found["document"] == read_yaml(found["text"]) == {"name": "x", "grid": {"rank": [4, 8]}}
        assert found["text"].startswith("name: x  # mine\n")
        for body, said in (
            ({"text": "- x"}, "must be an object"),
            ({"text": "a: &x 1"}, "anchors"),
            ({"text": "a: .inf"}, "Infinity"),
            ({"text": "{" * 50}, "not JSON"),
            ({"text": "base: 5", "edits": [{"path": ["base", "x"], "value": 1}]}, "must be an object"),
        ):
            answer = sqlite_api.post("/submit/text", json=body)
            assert answer.status_code == 200, body
            (problem,) = answer.json()["refused"]["errors"]
            assert problem["field"] == ("base" if "edits" in body else "text")
            assert said in problem["message"], body
        malformed: list[tuple[dict[str, object], str]] = [
            ({"text": "a: 1", "edits": [{"path": []}]}, "at least 1"),
            ({"text": "a: 1", "nix": 1}, "unknown"),
        ]
        for request, said in malformed:
            answer = sqlite_api.post("/submit/text", json=request)
            assert answer.status_code == 422, request
            assert said in answer.text, request


class TestBoards:
    def test_means_and_spreads(
        self,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
        show: Callable[[str], Page],
    ) -> None:
        values = [0.91, 0.934, 0.9275]
        submit(seeds=4)
        lease = claim()
        for trial, value in enumerate(values, 1):
            finish(lease, trial, value)
        mean, std = 100 * statistics.mean(values), 100 * statistics.stdev(values)
        page = show("/leaderboards/digits")
        assert f"{mean:.2f} ± {std:.2f}" in page.text
        assert "3 of 4" in page.text
        assert "missing seed 3" in page.text
        assert "digits" in show("/leaderboards").text
        by_ece = show("/leaderboards/digits?metric=ece&column=ece&column=brier&x=ece&y=brier")
        assert "Brier score" in by_ece.text
        assert [a for a in by_ece.all("th") if a.get("aria-sort") == "ascending"]
        by_field = show("/leaderboards/digits?metric=ece&sort=lr")
        assert not [a for a in by_field.all("th") if "aria-sort" in a]  # the metric gives places, and no order

    def test_protocols_stand_apart_with_the_reason(
        self,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
        show: Callable[[str], Page],
        table: Callable[[type], list[Any]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        submit(seeds=1, **{"training.lr": [0.1, 0.2, 0.3]})
        lease = claim()
        for trial, by in ((1, "test"), (2, "test"), (3, "other")):
            finish(lease, trial, 0.5 + trial / 10, under=by)
        page = show("/leaderboards/digits")
        assert len(table(Protocol)) == 2
        assert "split: other here, test there" in page.text
        assert show("/leaderboards/digits?pivot=lr,layer").text.count("accuracy (%) by lr and layer") == 2
        assert "they have the first" not in page.text
        monkeypatch.setattr("service.dashboard.leaderboards.MOST_TAKEN", 1)
        assert "they have the first 1:" in show("/leaderboards/digits").text
        few = show("/leaderboards/digits?limit=1")
        following = next(a["href"] for a in few.all("a") if a.get("rel") == "next")
        second = show(f"/leaderboards/digits{following}")
        assert "60.00" in second.text
        assert "70.00" not in second.text.partition("compression and accuracy")[0]

    def test_downloads_answer(
        self,
        api: TestClient,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
        show: Callable[[str], Page],
    ) -> None:
        submit()
        finish(claim(), 1)
        for path in (
            "/leaderboards/digits?layer=dense&rank=none&min_seeds=1&metric=ece&column=brier&group_by=layer",
            "/tables/senderovich2022/table2",
            "/tables/senderovich2022/table1?experiment=1&scale=smoke",
        ):
            links = [link for link in show(path).links() if "format=" in link]
            assert len(links) == 4
            for link in links:
                assert api.get(link).status_code == 200, link

    def test_the_paper_s_values_stand_alone_where_nothing_was_measured(self, show: Callable[[str], Page]) -> None:
        page = show("/tables/senderovich2022/table2")
        assert "95.52" in page.text
        assert "ttsv presets submit senderovich2022/table2" in page.text
        tables = [link for link in show("/leaderboards").links() if link.startswith("/tables/")]
        assert "/tables/senderovich2022/table4" in tables
        for link in tables:
            show(link)


class TestErrors:
    @pytest.mark.parametrize(
        ("path", "status", "said"),
        [
            ("/experiments/99", 404, "there is no experiment 99"),
            ("/trials/99", 404, "there is no trial 99"),
            ("/leaderboards/nix", 404, "there is no data set"),
            ("/tables/senderovich2022/table9", 404, "there is no table"),
            ("/submit?preset=nix", 404, "there is no preset"),
            ("/submit?experiment=99", 404, "there is no experiment 99"),
            ("/experiments/x", 422, "experiment_id"),
            ("/changes?experiment=9223372036854775808", 422, "experiment"),
            ("/?sort=nix", 422, "unknown"),
            ("/leaderboards/digits?metric=nix", 422, "metric"),
            (f"/{HOSTILE}", 404, "there is nothing at"),
            ("/v1/artifacts/99", 404, "there is no artifact 99"),
        ],
    )
    def test_browsers_get_pages_and_others_problems(
        self, sqlite_api: TestClient, path: str, status: int, said: str
    ) -> None:
        answer = sqlite_api.get(path, headers=BROWSER)
        assert answer.status_code == status
        page = Page(answer.text)
        sound(page)
        assert said in page.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-request-id"] in page.text
        plain = sqlite_api.get(path)
        assert plain.status_code == status
        assert plain.headers["content-type"] == "application/problem+json"

    def test_a_refused_verb_too(self, sqlite_api: TestClient) -> None:
        spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [0]}}
        assert sqlite_api.post("/v1/experiments", json=spec).status_code == 201
        sqlite_api.post("/v1/experiments/1/cancel").raise_for_status()
        answer = sqlite_api.post("/v1/experiments/1/pause", headers=BROWSER)
        assert answer.status_code == 409
        assert "cancelled" in Page(answer.text).text

    def test_a_page_of_another_site_changes_nothing(self, sqlite_api: TestClient) -> None:
        """A POST without a body needs no leave of ours: a browser sends it from any page."""
        spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [0]}}
        for origin in ("https://evil.example", "null", "http://testserver.evil.example", "http://testserver:1"):
            refused = sqlite_api.post("/v1/experiments", json=spec, headers={"Origin": origin})
            assert refused.status_code == 403
        assert sqlite_api.get("/v1/experiments", headers={"Origin": "https://evil.example"}).json()["items"] == []
        assert sqlite_api.post("/v1/experiments", json=spec, headers={"Origin": "http://testserver"}).is_success


class TestKeys:
    @pytest.fixture
    def settings(self, database_url: str, tmp_path: Path) -> Settings:
        return Settings(database_url=database_url, data_dir=tmp_path / "data", host="127.0.0.1", require_keys=True)

    @pytest.fixture
    def make(self, database: Database, settings: Settings) -> Callable[..., str]:
        """Makes a key and gives its text."""

        def make(project: str = "vision", *scopes: str) -> str:
            key = new_key(installation_secret(settings.data_dir))

            def work(session: Session) -> None:
                found = keys.project_named(session, project) or keys.create_project(session, project)
                wanted = {Scope(scope) for scope in scopes or ("read", "submit", "cancel")}
                keys.add_key(session, found.id, key, owner="ada", scopes=wanted)

            database.write(work)
            return key.text

        return make

    @pytest.fixture
    def site(self, settings: Settings) -> Iterator[TestClient]:
        """The pages of a service that asks for keys, as a browser sees them."""
        with TestClient(create_app(settings), headers=BROWSER, follow_redirects=False) as client:
            yield client

    def login(self, site: TestClient, key: str, **more: str) -> Any:
        return site.post("/login", data={"key": key, **more}, headers={"Origin": "http://testserver"})

    def test_without_a_key_there_is_the_login_page(self, site: TestClient, make: Callable[..., str]) -> None:
        make()
        for path in (
            "/",
            "/experiments/1",
            "/trials/1",
            "/leaderboards",
            "/leaderboards/digits",
            "/presets",
            "/submit",
            "/pool",
            "/curves",
        ):
            answer = site.get(f"{path}?limit=3")
            assert answer.status_code == 303, path
            assert answer.headers["location"] == f"/login?next={path.replace('/', '%2F')}%3Flimit%3D3"
        assert site.get("/", headers={"Accept": "*/*"}).status_code == 401
        page = Page(site.get("/login?next=/trials/1").text)
        sound(page)
        assert {"type": "hidden", "name": "next", "value": "/trials/1"} in page.all("input")
        # Sent to the page's own address, a browser keeps the tab named behind its #.
        assert {"method": "post", "class": "login"} in page.all("form")

    def test_a_key_is_kept_out_of_scripts_reach(self, site: TestClient, make: Callable[..., str]) -> None:
        wrong = self.login(site, "ttsv_x")
        assert wrong.status_code == 401
        assert "no key" in Page(wrong.text).text
        assert "set-cookie" not in wrong.headers
        right = self.login(site, make(), next="/trials?state=failed")
        assert (right.status_code, right.headers["location"]) == (303, "/trials?state=failed")
        kept = right.headers["set-cookie"].lower()
        assert "httponly" in kept
        assert "samesite=strict" in kept
        assert "secure" not in kept
        page = Page(site.get("/").text)
        assert "ada" in page.text
        assert {"method": "post", "action": "/logout", "class": "who"} in page.all("form")
        gone = site.post("/logout", headers={"Origin": "http://testserver"})
        assert gone.headers["location"] == "/login"
        assert site.get("/").status_code == 303

    def test_who_signs_in_while_the_database_takes_its_time_keeps_nobody_waiting(
        self, site: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, answered, over = threading.Event(), threading.Event(), threading.Event()

        def slow(*_: object) -> None:
            asked.set()
            answered.wait(5)
            over.set()
            raise KeyRefusedError("slow")

        monkeypatch.setattr("service.dashboard.signing_in.principal_of", slow)
        with ThreadPoolExecutor(1) as pool:
            signing = pool.submit(self.login, site, "x")
            assert asked.wait(10)
            assert site.get("/livez").status_code == 200
            assert not over.is_set()
            answered.set()
            assert signing.result().status_code == 401

    def test_over_https_it_travels_over_https_alone(self, settings: Settings, make: Callable[..., str]) -> None:
        with TestClient(create_app(settings), base_url="https://testserver", follow_redirects=False) as site:
            answer = site.post("/login", data={"key": make()}, headers={"Origin": "https://testserver"})
            assert "secure" in answer.headers["set-cookie"].lower()

    def test_it_leads_to_no_other_site(self, site: TestClient, make: Callable[..., str]) -> None:
        key = make()
        others = (
            "//evil.example",
            "https://evil.example",
            "/\\evil.example",
            "\t//evil",
            "/\n/evil",
            "login",
            "/login",
        )
        for where in others:
            assert self.login(site, key, next=where).headers["location"] == "/", where

    def test_a_form_of_too_many_fields(self, site: TestClient) -> None:
        fields = {f"field{number}": "x" for number in range(11)}
        assert self.login(site, "x", **fields).status_code == 400
        assert site.post("/login", data=fields, headers={"Origin": "https://evil.example"}).status_code == 403

    def test_buttons_work_from_our_pages_alone(self, site: TestClient, make: Callable[..., str]) -> None:
        self.login(site, make())
        spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [0]}}
        plain = {"Accept": "application/json"}
        for origin in ({}, {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://testserver:81"}):
            assert site.post("/v1/experiments", json=spec, headers=plain | origin).status_code == 401
            assert site.post("/login", data={"key": "x"}, headers=origin).status_code == 403
            assert site.post("/logout", headers=origin).status_code == 403
        ours = plain | {"Origin": "http://testserver"}
        made = site.post("/v1/experiments", json=spec, headers=ours)
        assert made.status_code == 201
        assert made.json()["owner"] == "ada"
        assert site.post("/v1/experiments/1/pause", headers=ours).status_code == 200

    def test_projects_do_not_see_each_other(
        self,
        site: TestClient,
        make: Callable[..., str],
        claim: Callable[..., Lease],
        finish: Callable[..., None],
    ) -> None:
        mine, theirs = make("vision"), make("speech")
        spec = {"name": "secret-name", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [0]}}
        headers = {"Authorization": f"Bearer {mine}"}
        assert site.post("/v1/experiments", json=spec, headers=headers).status_code == 201
        finish(claim(), 1, 0.777)
        self.login(site, theirs)
        for path in (
            "/experiments/1",
            "/experiments/1/matrix",
            "/experiments/1/changes",
            "/trials/1",
            "/trials/1/cell",
            "/submit?experiment=1",
            "/leaderboards/digits?experiment=1",
            "/v1/experiments/1/matrix",
            "/v1/experiments/1/matrix?trials=1",
            "/v1/curves?trials=1",
            "/v1/curves?experiment=1",
            "/v1/stream?experiment=1",
        ):
            assert site.get(path).status_code == 404, path
        assert site.get("/v1/leaderboards/digits/plane").json()["total"] == 0
        for path in (
            "/",
            "/trials",
            "/changes?experiment=1",
            "/pool",
            "/pool/changes?experiment=1",
            "/curves?trials=1",
            "/leaderboards",
            "/leaderboards/digits",
            "/trials?dataset=digits",
        ):
            text = site.get(path).text
            assert "secret-name" not in text
            assert "77.7" not in text
            assert "/trials/1" not in text
        assert '<a href="/leaderboards/digits">' not in site.get("/leaderboards").text
        self.login(site, mine)
        assert "secret-name" in site.get("/").text
        assert site.get("/v1/leaderboards/digits/plane").json()["total"] == 1
        assert site.get("/trials/1/cell").headers["location"] == "/trials/1"
        assert "77.70" in site.get("/leaderboards/digits").text
        assert '<a href="/leaderboards/digits">' in site.get("/leaderboards").text

    def test_who_may_only_read_sees_no_buttons(self, site: TestClient, make: Callable[..., str]) -> None:
        headers = {"Authorization": f"Bearer {make()}"}
        spec = {"name": "x", "base": {"dataset": "digits", "model": "small-cnn"}, "grid": {"seed": [0]}}
        assert site.post("/v1/experiments", json=spec, headers=headers).status_code == 201
        self.login(site, make("vision", "read"))
        page = Page(site.get("/experiments/1").text)
        assert not [button for button in page.all("button") if "data-action" in button]
        form = Page(site.get("/submit").text)
        assert "may read and not submit" in form.text
        assert "submit" not in {button.get("id") for button in form.all("button")}
        ours = {"Origin": "http://testserver"}
        looked = site.post("/submit", data={"spec": write_yaml(START), "do": "look"}, headers=ours)
        assert looked.status_code == 200
        assert "Submit what is shown here" not in looked.text
        posted = site.post("/submit", data={"spec": write_yaml(START), "do": "post"}, headers=ours)
        assert posted.status_code == 403
        others = {"Origin": "https://evil.example"}
        for path in ("/submit", "/submit/text", "/submit/look"):
            assert site.post(path, data={"spec": "x"} if path == "/submit" else None, headers=others).status_code == 401
        assert len(site.get("/v1/experiments").json()["items"]) == 1


def test_a_trial_s_page_needs_no_experiment_of_its_own_state(
    submit: Callable[..., int], show: Callable[[str], Page], table: Callable[[type], list[Any]]
) -> None:
    submit(seeds=1)
    assert table(Result) == []
    (trial,) = table(Trial)
    page = show(f"/trials/{trial.id}")
    assert "No epoch is done yet." in page.text
    assert "It is not finished yet." in page.text


def test_a_search_that_has_not_begun_has_no_trials_yet(sqlite_api: TestClient) -> None:
    search = {"algorithm": "random", "trials": 2, "space": {"training.lr": {"uniform": [0.01, 0.1]}}}
    spec = {"name": "s", "base": {"dataset": "digits", "model": "small-cnn"}, "search": search}
    assert sqlite_api.post("/v1/experiments", json=spec).status_code == 201
    looked = sqlite_api.post("/submit", data={"spec": write_yaml(spec), "do": "look"}, headers=BROWSER)
    assert "up to 2 trials" in (said := Page(looked.text).text)
    assert "0 trials" not in said
    assert "There are no trials yet: a search" in Page(sqlite_api.get("/experiments/1").text).text
    assert "No trial is like that" in Page(sqlite_api.get("/experiments/1?state=failed").text).text


@pytest.mark.parametrize(
    ("seeds", "said"), [("mean", "54.00 ± 1.41"), ("median", "54.00"), ("min", "53.00"), ("std", "1.41")]
)
def test_a_matrix_s_table_has_the_deviation_of_means_alone(
    submit: Callable[..., int],
    claim: Callable[..., Lease],
    finish: Callable[..., None],
    api: TestClient,
    seeds: str,
    said: str,
) -> None:
    submit(**{"training.lr": [0.1, 0.2]})
    lease = claim()
    for trial, accuracy in enumerate((0.53, 0.55), 1):
        finish(lease, trial, accuracy)
    assert f">{said} (2 of 2)<" in api.get(f"/experiments/1?seeds={seeds}").text


def test_a_search_s_many_values_make_no_matrix(
    show: Callable[[str], Page], database: Database, table: Callable[[type], list[Any]], submit: Callable[..., int]
) -> None:
    """Each trial has its own value of two fields: a matrix of 201 x 201 places would show nothing."""
    made = submit(seeds=1, **{"training.lr": [0.001 * k for k in range(1, 202)]})

    def scatter(session: Session) -> None:
        for trial in session.query(Trial):
            trial.config = {**trial.config, "lambda_ort": 0.001 * trial.number}

    assert "matrix-data" in str(show(f"/experiments/{made}").all("pre"))
    database.write(scatter)
    page = show(f"/experiments/{made}")
    assert "too many for a matrix" in page.text
    assert "matrix-data" not in str(page.all("pre"))
    current = [section["id"] for section in page.all("section") if "current" in (section["class"] or "")]
    assert current == ["trials-panel"]
    assert len(table(Trial)) == 201


class TestWhatIsValidatedOnTestImages:
    """The presets of the paper's tables validate on test images: their best epoch is no validation accuracy."""

    @pytest.mark.parametrize(
        ("images", "on", "said", "row"),
        [
            (["held-out"], "held-out", "best validation accuracy", "50.0 %"),
            (["test"], "test", "best test accuracy of an epoch: not for selection", "50.0 % (test)"),
            (
                ["held-out", "test"],
                "both",
                "best accuracy of an epoch, validation or test: not for selection",
                "50.0 %",
            ),
        ],
    )
    def test_it_says_so(
        self,
        api: TestClient,
        show: Callable[[str], Page],
        database: Database,
        submit: Callable[..., int],
        claim: Callable[..., Lease],
        epoch_point: Callable[..., dict[str, Any]],
        images: list[str],
        on: str,
        said: str,
        row: str,
    ) -> None:
        experiment = submit(seeds=1, **{"training.validation": images})
        lease = claim()
        database.write(under(lease, HeldExperiment.start_trial, 1))
        database.write(under(lease, HeldExperiment.add_epoch, 1, reported(epoch_point(1, val_accuracy=0.5))))
        found = ExperimentOut.model_validate(api.get(f"/v1/experiments/{experiment}").json())
        assert found.progress.best_val_accuracy == 0.5
        assert found.progress.validated_on == on
        words = said.partition(":")[0]
        assert f"{words} 50.00%" in progress_line(found)
        table = experiments_table([found])
        assert [*table.columns[5].cells] == ["50.00%" if on == "held-out" else "-"]
        assert said in show(f"/experiments/{experiment}").text
        assert row in " ".join(show(f"/experiments/{experiment}").text.split())
        assert ("50.0 %" in show("/").text) == (on == "held-out")
        images_said = {"held-out": "validation", "test": "test", "both": "validation or test"}[on]
        trials = ",".join(str(number) for number in range(1, len(images) + 1))
        for path in (f"/experiments/{experiment}", f"/curves?trials={trials}"):
            assert f" {images_said} loss" in show(path).text
            assert (" validation loss" in show(path).text) == (on == "held-out")
        trial = TrialDetailOut.model_validate(api.get("/v1/trials/1").json() | {"epoch_metrics": [], "artifacts": []})
        headings = [column.header for column in epochs_table(trial).columns]
        assert ("test loss" in headings, "val. loss" in headings) == (images == ["test"], images != ["test"])
        labels = show("/trials/1").text
        assert ("validation" in labels.partition("Accuracy (%)")[2][:200]) == (images != ["test"])
