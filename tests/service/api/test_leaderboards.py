"""Leaderboards and tables over HTTP: forms, refusals, pages, and a preset from its spec to the paper's table."""

import csv
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from service.api.http.formats import MEDIA_TYPES, Format, _accepted
from service.database import Protocol, Trial
from service.database.engine import Database
from service.paper.presets import PAPER
from service.paper.reference import paper_table
from service.queue.leases import Lease
from service.queue.trials import ProtocolRecord, hold
from service.schemas.leaderboards import LeaderboardOut, TableOut
from tests.held import unfinished_trials
from tests.machinery import Claim, Finish, Submit, Table
from ttsv.config.trial import TrialConfig

BOARD = "/v1/leaderboards/digits"


@pytest.fixture
def filled(submit: Submit, claim: Claim, table: Table, finish: Finish, database: Database) -> int:
    """Three cells: two seeds, one seed of two, none: of the last one trial diverged."""
    experiment_id = submit(seeds=2, **{"training.lr": [0.1, 0.2, 0.3]})
    lease = claim()
    for trial, accuracy in zip(table(Trial), (0.25, 0.5, 0.75), strict=False):
        finish(lease, trial.id, accuracy)
    with_failure = table(Trial)[5].id

    def work(session: Session) -> None:
        with hold(session, lease) as held:
            held.start_trial(with_failure)
            held.fail_trial(with_failure, "diverged", "loss became nan")

    database.write(work)
    return experiment_id


def refused(response: Any, status: int, field: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert field in [error["field"] for error in body["errors"]] or not field
    return body


class TestForms:
    def test_by_header_and_by_parameter(self, api: TestClient, filled: int) -> None:
        for path, form in itertools.product([BOARD, f"/v1/tables/{PAPER}/table1"], Format):
            by_header = api.get(path, headers={"Accept": MEDIA_TYPES[form]})
            assert by_header.status_code == 200
            assert by_header.headers["content-type"].split(";")[0] == MEDIA_TYPES[form]
            by_parameter = api.get(f"{path}?format={form}", headers={"Accept": "text/csv"})
            assert by_parameter.content == by_header.content
        for short, form in (("md", Format.MARKDOWN), ("tex", Format.LATEX)):
            assert api.get(f"{BOARD}?format={short}").content == api.get(f"{BOARD}?format={form}").content

    def test_json_is_what_the_document_says(self, api: TestClient, filled: int) -> None:
        body = api.get(BOARD).json()
        model = LeaderboardOut.model_validate(body)
        assert model.model_dump(mode="json") == body
        assert (len(model.boards[0].rows), model.hole_count, model.boards[0].next) == (2, 1, None)
        body = api.get(f"/v1/tables/{PAPER}/table3").json()
        assert TableOut.model_validate(body).model_dump(mode="json") == body

    def test_each_form_has_every_row(self, api: TestClient, filled: int) -> None:
        rows = list(csv.DictReader(io.StringIO(api.get(f"{BOARD}?format=csv").text)))
        shown = [tuple(row[name] for name in ("status", "place", "seeds", "trials", "missing_seeds")) for row in rows]
        assert shown == [
            ("ranked", "1", "2", "2", ""),
            ("ranked", "2", "1", "2", "1"),
            ("no result", "", "0", "2", "0 1"),
        ]
        assert [row["accuracy_mean"] for row in rows] == ["0.375", "0.75", ""]
        cut = [
            (row["status"], row["reason"])
            for row in csv.DictReader(api.get(f"{BOARD}?format=csv&limit=1").iter_lines())
        ]
        assert cut[1] == ("not listed", "1 of the 2 rows of this protocol")
        assert [row["training.lr"] for row in rows] == ["0.1", "0.2", "0.3"]
        assert [row["reason"] for row in rows] == ["", "seed 1 queued", "seed 0 queued; seed 1 diverged"]
        assert {(row["dataset"], row["training.epochs"]) for row in rows} == {("digits", "3")}  # no caption has these
        for query, fields in (("hide=epochs,rank,lr", ["dataset", "model", "layer"]), ("columns=lr", ["training.lr"])):
            header = api.get(f"{BOARD}?format=csv&{query}").text.partition("\r\n")[0].split(",")
            shown_fields = header[header.index("cell") + 1 : header.index("seeds")]
            assert shown_fields[: len(fields)] == fields
            assert not {"training.epochs", "rank"} & set(shown_fields)
        (hole,) = api.get(BOARD).json()["holes"]
        assert (rows[2]["cell"], rows[2]["model"]) == (hole["cell"], "small-cnn")
        assert rows[1]["accuracy_std"] == ""
        text = api.get(f"{BOARD}?format=markdown").text
        assert "| \\# | lr | accuracy (%) |" in text
        assert "\n\nAll rows: model small-cnn, layer dense, epochs 3.\n\n" in text
        one = api.get(f"{BOARD}?format=markdown&limit=1").text
        assert "\n\nAll rows shown: model small-cnn, layer dense, epochs 3, lr 0.1.\n\n" in one
        assert "| 1 | 0.1 | 37.50 ± 17.68 |" in text
        assert "| 2 | 0.2 | 75.00 |" in text
        assert "| 1 of 2 |" in text
        assert "1 cell has no result (2 trials: 1 queued, 1 diverged)" in text
        assert "\n- no result: lr 0.3: seed 0 queued; seed 1 diverged\n" in text
        assert "\n- Missing: lr 0.2: seed 1 queued.\n" in text
        text = api.get(f"{BOARD}?format=latex&standalone=true").text
        assert text.startswith("\\documentclass")
        assert "37.50 $\\pm$ 17.68" in text
        assert "accuracy (\\%)" in text
        assert "{Missing: lr 0.2: seed 1 queued.}" in text
        assert "\\caption{digits: by accuracy. All rows: model small-cnn, layer dense, epochs 3.}" in text

    def test_rows_and_holes_say_what_they_are(self, api: TestClient, filled: int) -> None:
        body = api.get(BOARD).json()
        (board,), (hole,) = body["boards"], body["holes"]
        assert board["columns"] == body["columns"] == [{"field": "training.lr", "name": "lr"}]
        assert [row["fields"] for row in board["rows"]] == [{"training.lr": 0.1}, {"training.lr": 0.2}]
        assert (board["common"]["model"], board["common"]["training.epochs"]) == ("small-cnn", 3)
        assert "training.lr" not in board["common"]
        assert [(one["seed"], one["state"], one["failure"]) for one in board["rows"][1]["missing"]] == [
            (1, "queued", None)
        ]
        assert [(one["seed"], one["state"]) for one in hole["missing"]] == [(0, "queued"), (1, "diverged")]
        for asked in ("columns=rank,lr&hide=lr", "columns=rank, lr &hide= lr"):  # blanks as for lists of trials
            (board,) = api.get(f"{BOARD}?{asked}").json()["boards"]
            assert board["columns"] == [{"field": "rank", "name": "rank"}]
        assert [row["fields"] for row in board["rows"]] == [{"rank": None}] * 2
        header = api.get(f"{BOARD}?format=csv&columns=epochs").text.split("\r\n")[0]
        assert ",cell,training.epochs,seeds," in header

    def test_numbers_that_differ_late_are_told_apart_in_every_note_and_heading(
        self, api: TestClient, submit: Submit, claim: Claim, finish: Finish, table: Table
    ) -> None:
        near = (0.123456781, 0.123456782)
        submit(seeds=2, **{"training.lr": [*near, 0.123456783]})
        lease = claim()
        for trial in (table(Trial)[0], table(Trial)[2]):
            finish(lease, trial.id, 0.5)
        texts = [f"{rate * 10:.8f}e-01" for rate in near]
        board, unranked = api.get(f"{BOARD}?format=markdown&group_by=lr").text.split("not on the leaderboards")
        for text in texts:
            assert f" {text} (of 1)" in board
            assert f"lr {text}: seed 1 queued" in board
            assert f"| {text} |" in board
        assert "no result: lr 1.23456783e-01: seeds 0, 1 queued" in unranked
        header = api.get(f"{BOARD}?pivot=momentum,lr&format=csv").text.splitlines()[0].split(",")
        assert len(set(header)) == len(header)
        assert f"training.lr={texts[0]} mean" in header

    def test_the_csv_says_why_a_row_is_not_ranked_with_the_others(
        self,
        api: TestClient,
        filled: int,
        database: Database,
        table: Table,
        trial_result: Callable[..., dict[str, Any]],
    ) -> None:
        """Another protocol, an invalid result, a metric that was not measured: each with its reason, none a formula."""

        def work(session: Session) -> None:
            lease = Lease(filled, 1)
            with hold(session, lease) as held:
                for trial, protocol, robust, wrong in (
                    (table(Trial)[3], ProtocolRecord("q" * 64, {"split": "train"}), 0.5, None),
                    (table(Trial)[4], ProtocolRecord("p" * 64, {}), None, ["=accuracy of 7"]),
                ):
                    more = {"robust_accuracy": robust, "valid": wrong is None, "violations": wrong}
                    held.start_trial(trial.id)
                    held.finish_trial(trial.id, trial_result(0.5) | more, protocol)

        database.write(work)

        def read(query: str) -> list[dict[str, str]]:
            return list(csv.DictReader(io.StringIO(api.get(f"{BOARD}?format=csv{query}").text)))

        rows = read("")
        assert [row["status"] for row in rows] == ["ranked", "ranked", "apart", "no result", "invalid"]
        assert rows[2]["reason"].startswith("split: train here, ")
        assert rows[4]["reason"] == f"trial {table(Trial)[4].id}: =accuracy of 7"
        assert [row["accuracy_mean"] == "" for row in rows] == [False, False, False, True, True]
        rows = read("&metric=robust_accuracy")
        said = "2 cells have results without the ranked metric"
        assert ("unmeasured", said) in [(row["status"], row["reason"]) for row in rows]

    @pytest.mark.parametrize("accept", ["image/png", "application/json;q=0", "*/*;q=0"])
    def test_unknown_forms(self, sqlite_api: TestClient, accept: str) -> None:
        refused(sqlite_api.get(BOARD, headers={"Accept": accept}), 406)
        refused(sqlite_api.get(f"/v1/tables/{PAPER}/table1", headers={"Accept": accept}), 406)

    def test_an_unknown_format(self, sqlite_api: TestClient) -> None:
        refused(sqlite_api.get(f"{BOARD}?format=xlsx"), 422, "format")

    @pytest.mark.parametrize(
        ("accept", "form"),
        [
            (None, Format.JSON),
            ("*/*", Format.JSON),
            ("text/html, */*;q=0.8", Format.JSON),
            ("text/csv", Format.CSV),
            ("TEXT/CSV; q=1.0", Format.CSV),
            ("text/*", Format.CSV),
            ("text/csv;q=0.5, text/markdown", Format.MARKDOWN),
            ("application/json;q=0, application/*", Format.LATEX),
            ("text/x-tex", Format.LATEX),
            ("text/csv;q=high, application/json;q=0.1", Format.JSON),
        ],
    )
    def test_what_accept_likes_best(self, accept: str | None, form: Format) -> None:
        assert _accepted(accept) is form


class TestQuestions:
    def test_pages(self, api: TestClient, filled: int, table: Table) -> None:
        (protocol,) = table(Protocol)
        for chosen in ("", f"&experiment={filled}"):
            ask = f"{BOARD}?limit=1&protocol={protocol.fingerprint}{chosen}"
            (first,) = api.get(ask).json()["boards"]
            (second,) = api.get(f"{ask}&cursor={first['next']}").json()["boards"]
            places = [row["place"] for board in (first, second) for row in board["rows"]]
            assert (places, second["next"], first["total"]) == ([1, 2], None, 2)
            refused(api.get(f"{ask}&cursor={first['next']}&metric=loss"), 422, "cursor")

    @pytest.mark.parametrize("cursor", ["x", "e30", "W10", "WzEsMl0", "~", "%00", "W251bGwsbnVsbCxudWxsLG51bGxd"])
    def test_wrong_cursors(self, sqlite_api: TestClient, cursor: str) -> None:
        refused(sqlite_api.get(f"{BOARD}?protocol={'0' * 64}&cursor={cursor}"), 422, "cursor")

    def test_a_cursor_is_of_one_board(self, sqlite_api: TestClient) -> None:
        refused(sqlite_api.get(f"{BOARD}?cursor=abc"), 422, "cursor")

    @pytest.mark.parametrize("order", ["sort=-lr", "group_by=lr"])
    def test_a_cursor_is_of_one_order(self, api: TestClient, filled: int, order: str) -> None:
        """The pages of one hold everything once; in another its position would be that of other rows."""
        (whole,) = api.get(f"{BOARD}?{order}").json()["boards"]
        one = f"{BOARD}?protocol={whole['protocol']}&limit=1"
        (first,) = api.get(f"{one}&{order}").json()["boards"]
        (second,) = api.get(f"{one}&{order}&cursor={first['next']}").json()["boards"]
        found = [(row["place"], row["cell"], row["group"]) for row in [*first["rows"], *second["rows"]]]
        assert found == [(row["place"], row["cell"], row["group"]) for row in whole["rows"]]
        assert second["next"] is None
        for other in ("", "&sort=lr", "&group_by=model", f"&{order}&metric=loss"):
            refused(api.get(f"{one}{other}&cursor={first['next']}"), 422, "cursor")

    def test_columns_front_baseline_and_group(self, api: TestClient, filled: int) -> None:
        (board,) = api.get(f"{BOARD}?metrics=ece").json()["boards"]
        assert [list(row["metrics"]) for row in board["rows"]] == [["accuracy", "ece"]] * 2
        cell = board["rows"][0]["cell"]
        (board,) = api.get(f"{BOARD}?metrics=all&pareto=accuracy,loss&baseline={cell}&group_by=model").json()["boards"]
        (row,) = board["rows"]
        assert {"loss", "parameters", "latency_seconds"} <= set(row["metrics"])
        assert (row["on_front"], row["group"]) == (False, {"field": "model", "value": "small-cnn", "cells": 2})
        assert row["difference"]["accuracy"] == {"mean": 0.0, "error": pytest.approx(math.sqrt(1 / 32))}
        assert len(board["front"]) == 1  # the other, which is better and lacks a seed
        assert board["front"] != [cell]

    def test_conditions_groups_orders_and_a_matrix(self, api: TestClient, filled: int) -> None:
        def lrs(query: str) -> list[float]:
            (board,) = api.get(f"{BOARD}?columns=lr&{query}").json()["boards"]
            return [row["fields"]["training.lr"] for row in board["rows"]]

        for chosen in ("", f"&experiment={filled}"):
            assert lrs(f"where=training.lr<=0.1{chosen}") == [0.1]
            assert lrs(f"where=lr>0.1&where=lr in (0.2, 0.3){chosen}") == [0.2]
            assert lrs(f"sort=-lr{chosen}") == [0.2, 0.1]
            assert lrs(f"group_by=training.lr{chosen}") == [0.1, 0.2]
            assert lrs(f"group_by=training.lr&sort=-lr{chosen}") == [0.2, 0.1]
            body = api.get(f"{BOARD}?pivot=epochs,lr{chosen}").json()
            assert LeaderboardOut.model_validate(body).model_dump(mode="json") == body
            pivot = body["boards"][0]["pivot"]
            assert (pivot["down"]["field"], pivot["rows"], pivot["columns"]) == (
                "training.epochs",
                [3],
                [0.1, 0.2, 0.3],
            )
            assert [(cell["mean"], cell["seeds"], cell["trials"]) for cell in pivot["cells"][0]] == [
                (0.375, 2, 2),
                (0.75, 1, 2),
                (None, 0, 2),
            ]
            assert pivot["cells"][0][2]["missing"] == {"queued": 1, "diverged": 1}
            table = list(csv.DictReader(io.StringIO(api.get(f"{BOARD}?pivot=epochs,lr{chosen}&format=csv").text)))
            parts = [table[0][f"training.lr={lr} {part}"] for lr in (0.1, 0.3) for part in ("mean", "seeds", "missing")]
            assert (len(table), parts) == (1, ["0.375", "2", "", "", "0", "1 queued, 1 diverged"])
        assert api.get(f"{BOARD}?where=lr=0.3").json()["hole_count"] == 1
        text = api.get(f"{BOARD}?pivot=epochs,lr&format=markdown").text
        assert "| epochs | lr 0.1 | lr 0.2 | lr 0.3 |" in text
        assert "| 3 | 37.50 ± 17.68 (2 of 2) | 75.00 (1 of 2) | 0 of 2, 1 queued, 1 diverged |" in text
        assert "N counts the trials of cells that have results with this metric" in text
        assert "37.50 $\\pm$ 17.68 (2 of 2)" in api.get(f"{BOARD}?pivot=epochs,lr&format=latex").text
        page = api.get("/leaderboards/digits?pivot=epochs,lr&where=lr<1&sort=lr&hide=rank").text
        assert "accuracy (%) by epochs and lr" in page
        assert "where=training.lr+%3C+1" in page  # of the downloads

    def test_an_unknown_field_is_refused_with_the_nearest(self, sqlite_api: TestClient) -> None:
        for parameter, value in (("where", "lern=1"), ("group_by", "lern"), ("sort", "-lern"), ("pivot", "lern,rank")):
            (error,) = refused(sqlite_api.get(f"{BOARD}?{parameter}={value}"), 422, parameter)["errors"]
            assert error["message"] == "there is no field 'lern'; the nearest is lr"

    @pytest.mark.parametrize(
        ("query", "field"),
        [
            ("where=lr<fast", "where"),
            ("sort=seed", "sort"),
            ("pivot=lr,training.lr", "pivot"),
            ("pivot=lr", "pivot"),
            ("metrics=speed", "metrics"),
            ("metrics=,", "metrics"),
            ("pareto=accuracy", "pareto"),
            ("pareto=accuracy,speed", "pareto"),
            ("pareto=accuracy,temperature", "pareto"),
            ("metric=temperature&group_by=layer", "group_by"),
            ("group_by=seed", "group_by"),
            ("columns=lear", "columns"),
            ("hide=training.", "hide"),
            ("baseline=abc", "baseline"),
            ("rank=-1", "rank"),
            ("protocol=abc", "protocol"),
            ("min_seeds=0", "min_seeds"),
            ("metrics=all,accuracy", "metrics"),
            ("limit=0", "limit"),
            ("tag=%00", "tag"),
        ],
    )
    def test_refusals(self, sqlite_api: TestClient, query: str, field: str) -> None:
        refused(sqlite_api.get(f"{BOARD}?{query}"), 422, field)

    def test_a_baseline_that_is_nowhere(self, api: TestClient, filled: int) -> None:
        assert "is on no leaderboard" in refused(api.get(f"{BOARD}?baseline={'0' * 64}"), 404)["detail"]


class TestTables:
    def test_before_anything_ran(self, api: TestClient) -> None:
        for name in ("table1", "table2", "table3", "table4", "figure-vgg", "figure-speedup"):
            body = api.get(f"/v1/tables/{PAPER}/{name}").json()
            assert {row["status"] for row in body["rows"]} == {"not run"}
            assert len(body["rows"]) == len(paper_table(PAPER, name).rows)
            assert body["protocols"] == {}
            # Whoever posts the figure's preset as it is learns why some rows stay empty.
            assert any("under the protocol text" in note for note in body["notes"]) == (name == "figure-vgg")

    def test_refusals(self, sqlite_api: TestClient) -> None:
        assert "table1" in refused(sqlite_api.get(f"/v1/tables/{PAPER}/table9"), 404)["detail"]
        refused(sqlite_api.get(f"/v1/tables/{PAPER}/table1?scale=smoke"), 422, "experiment")
        refused(sqlite_api.get(f"/v1/tables/{PAPER}/table1?experiment=7"), 404)

    @pytest.mark.parametrize("scale", ["full", "smoke"])
    def test_from_the_preset_to_the_table(
        self, api: TestClient, database: Database, claim: Claim, finish: Finish, scale: str
    ) -> None:
        """Clipping takes time in proportion to the rank; one seed of the last trial is left out."""
        experiment_id = api.post(f"/v1/presets/{PAPER}/table2?scale={scale}").json()["id"]
        lease = claim()
        with database.read() as session:
            trials = [(t.id, t.config) for t in unfinished_trials(session, lease)]
        for trial_id, config in trials[:-1]:
            times = 0.4 if config["rank"] is None else 0.1
            if config["constraint"] == "none":  # the orthogonal loss alone takes some
                times = 0.00003 if config["rank"] is None else 0.003
            finish(lease, trial_id, 0.9, constraint_step_seconds=times)
        # Another experiment of the same cells, that is not asked for.
        query = f"?experiment={experiment_id}" + ("&scale=smoke" if scale == "smoke" else "")
        body = api.get(f"/v1/tables/{PAPER}/table2{query}").json()
        done = [row for row in body["rows"] if row["status"] == "complete"]
        assert len(done) == len(trials) - 1
        speedups = {(row["labels"]["method"], row["labels"]["rank"]): row["speedup"] for row in done}
        assert (speedups["baseline", None], speedups["baseline", 192]) == (None, None)
        assert (speedups["clip to 1", None], speedups["clip to 1", 192]) == (1.0, pytest.approx(4.0))
        assert all(row["metrics"]["accuracy"]["mean"] == 0.9 for row in done)
        # Small stand-ins have no number of the paper beside them, in no form.
        printed = [row["paper"]["accuracy"]["mean"] > 0.94 for row in body["rows"] if row["paper"]]
        assert printed == ([True] * 16 if scale == "full" else [])
        left = [row["status"] for row in body["rows"] if row["status"] != "complete"]
        assert "no result: 1 queued" in left
        notes = "\n".join(body["notes"])
        assert ("measure nothing" in notes) == (scale == "smoke")
        assert ("AutoAttack: in the paper" in notes) == (scale == "full")
        assert "times taken on a machine that nobody recorded" in notes
        text = api.get(f"/v1/tables/{PAPER}/table2{query}&format=markdown").text
        assert ("| clip to 1 | 192 | 90.00 | 95.25 |" in text) == (scale == "full")
        assert ("| paper |" in text) == (scale == "full")
        assert "**90" not in text  # all are equal
        rows = list(csv.DictReader(io.StringIO(api.get(f"/v1/tables/{PAPER}/table2{query}&format=csv").text)))
        assert rows[5].get("paper_accuracy_mean") == ("0.9525" if scale == "full" else None)

    @pytest.mark.parametrize(
        ("table", "times"),
        [("table2", "Tesla V100 and a machine that nobody recorded"), ("figure-speedup", "an AMD EPYC, 2 threads")],
    )
    def test_times_are_of_the_machines_that_took_them(
        self, api: TestClient, database: Database, claim: Claim, finish: Finish, table: str, times: str
    ) -> None:
        """A network that another machine evaluated again was trained where it was trained."""
        experiment_id = api.post(f"/v1/presets/{PAPER}/{table}").json()["id"]
        lease = claim()
        with database.read() as session:
            trials = [(t.id, t.config) for t in unfinished_trials(session, lease)]
        here = {"device": "cpu", "device_name": "an AMD EPYC", "threads": 2}
        for number, (trial_id, config) in enumerate(trials):
            trained = ["Tesla V100"] if number else ["a machine that nobody recorded"]
            environment = here | {"trained_on": trained}
            finish(lease, trial_id, 0.9, under=config["dataset"], environment=environment)
        (said,) = (
            note
            for note in api.get(f"/v1/tables/{PAPER}/{table}?experiment={experiment_id}").json()["notes"]
            if note.startswith("times taken on")
        )
        several = ": times of different machines are not comparable" if " and " in times else ""
        assert said == f"times taken on {times}{several}"

    def test_a_figure_beside_what_is_predicted(
        self, api: TestClient, database: Database, claim: Claim, finish: Finish
    ) -> None:
        """Times here as (r / c)^2 and memory as r / c, where cubes and squares are predicted."""
        experiment_id = api.post(f"/v1/presets/{PAPER}/figure-speedup").json()["id"]
        lease = claim()
        with database.read() as session:
            trials = [(t.id, t.config) for t in unfinished_trials(session, lease)]
        for trial_id, config in trials:
            share = TrialConfig.from_dict(config).rank or 1.0
            numbers = {"spectrum_seconds": 3 * share**2, "spectrum_memory": round(2**20 * share)}
            finish(lease, trial_id, 0.9, under=config["dataset"], **numbers)  # a protocol is one of a data set
        query = f"/v1/tables/{PAPER}/figure-speedup?experiment={experiment_id}"
        body = api.get(query).json()
        assert body["beside"] == "predicted"
        assert len(set(body["protocols"].values())) == len(body["protocols"]) == 5
        assert body["other_protocols"] == []
        one = next(iter(body["protocols"].items()))
        assert api.get(f"{query}&protocol={one[1]}").json()["protocols"][one[0]] == one[1]
        assert api.get(f"{query}&protocol={'0' * 64}").json()["protocols"] == {}
        assert len(body["rows"]) == 20
        for row in body["rows"]:
            ratio = 1 / (row["labels"]["rank"] or 1)
            assert row["status"] == "complete"
            assert (row["speedup"], row["memory_saving"]) == pytest.approx((ratio**2, ratio), rel=1e-5)
            predicted = row["paper"]["speedup"]["mean"], row["paper"]["memory_saving"]["mean"]
            assert predicted == pytest.approx((ratio**3, ratio**2))
        text = api.get(f"{query}&format=markdown").text
        headings = (
            "| channels | rank | spectrum (ms) | speedup | predicted | memory of the spectrum (MiB) | memory saving |"
        )
        assert headings in text
        assert "seeds:" not in text
        rows = list(csv.DictReader(io.StringIO(api.get(f"{query}&format=csv").text)))
        assert rows[3]["predicted_speedup_mean"] == "8.0"
        assert rows[3]["memory_saving"] == "2.0"

    def test_rows_of_another_protocol_are_not_mixed(
        self, api: TestClient, database: Database, claim: Claim, finish: Finish
    ) -> None:
        api.post(f"/v1/presets/{PAPER}/table2")
        lease = claim()
        with database.read() as session:
            trials = [t.id for t in unfinished_trials(session, lease)]
        finish(lease, trials[0], 0.5)
        finish(lease, trials[1], 0.5)
        finish(lease, trials[2], 0.5, under="other")
        body = api.get(f"/v1/tables/{PAPER}/table2").json()
        statuses = [row["status"] for row in body["rows"]][:4]
        assert statuses == ["complete", "complete", "measured under another protocol", "no result: 1 queued"]
        (other,) = body["other_protocols"]
        body = api.get(f"/v1/tables/{PAPER}/table2?protocol={other}").json()
        assert [row["status"] for row in body["rows"]][2] == "complete"

    def test_some_seeds_are_missing(self, api: TestClient, database: Database, claim: Claim, finish: Finish) -> None:
        api.post(f"/v1/presets/{PAPER}/table1")
        lease = claim()
        with database.read() as session:
            trials = [t.id for t in unfinished_trials(session, lease)]
        finish(lease, trials[0], 0.5)
        assert api.get(f"/v1/tables/{PAPER}/table1").json()["rows"][0]["status"] == "1 of 3 seeds"
        text = api.get(f"/v1/tables/{PAPER}/table1?format=latex").text
        assert "{1 of 3 seeds}" in text
        assert "& 75.6 $\\pm$ 0.3 &" in text  # as it is printed
        board = api.get("/v1/leaderboards/cifar10").json()["boards"][0]
        (reference,) = board["rows"][0]["paper"]
        assert (reference["table"], reference["values"]["accuracy"]["mean"]) == ("table1", 0.756)
        assert board["rows"][0]["missing_seeds"] == [3408, 3409]
        assert " accuracy (%) | paper | " in api.get("/v1/leaderboards/cifar10?format=markdown").text


@pytest.mark.parametrize(
    ("query", "field", "why"),
    [
        ("columns=seed,training.lr", "columns", "rows are means over seeds"),
        (
            "where=accuracy>0.9",
            "where",
            "accuracy is measured: rows chosen by it would be the lucky ones; rank by it (metric=accuracy)",
        ),
        ("where=learning_rate=1", "where", "the nearest is lr"),
        ("where=sigma<1", "where", "the nearest is delta"),
    ],
)
def test_what_would_be_said_of_one_seed_or_ignored_is_refused(
    sqlite_api: TestClient, query: str, field: str, why: str
) -> None:
    answer = sqlite_api.get(f"/v1/leaderboards/digits?{query}")
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["field"] == field
    assert why in problem["message"]
