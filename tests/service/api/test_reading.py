"""What is read over HTTP: filters and fields, ETags, metrics, results, artifacts and logs."""

import csv
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response
from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from service.api.http.responses import revision_matches
from service.database import Artifact, EpochPoint, Experiment, Result, Tag, Trial
from service.database.engine import Database
from service.experiments.listing import METRICS
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.schemas.trials import ResultOut
from tests.machinery import Claim, Finish, Make, Submit, Table


@pytest.fixture
def data_dir(api: TestClient) -> Path:
    """The data folder of the running API."""
    folder: Path = api.app.state.settings.data_dir  # type: ignore[attr-defined]
    return folder


@pytest.fixture
def finished(submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make) -> Callable[..., int]:
    """Finishes the first trial of a new experiment, with these files in its manifest; the trial's id."""

    def finished(*files: ArtifactFile, **metrics: Any) -> int:
        submit(seeds=1)
        lease, trial_id = claim(), table(Trial)[-1].id

        def work(session: Session) -> None:
            with hold(session, lease) as held:
                held.start_trial(trial_id)
                held.finish_trial(trial_id, trial_result(**metrics), ProtocolRecord("p" * 64, {"split": "test"}), files)

        database.write(work)
        return int(trial_id)

    return finished


@pytest.fixture
def grid(api: TestClient) -> Callable[..., int]:
    """Posts a grid over these axes; the experiment's id."""

    def grid(axes: dict[str, list[Any]]) -> int:
        base = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 3}}
        answer = api.post("/v1/experiments", json={"name": "grid", "base": base, "grid": axes})
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    return grid


@pytest.mark.slow
def test_head_is_get_without_its_body(
    api: TestClient, data_dir: Path, finished: Callable[..., int], openapi: dict[str, Any]
) -> None:
    folder = data_dir / "trials" / "1" / "1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "trial.log").write_text("one\n")
    finished(ArtifactFile("model", "trials/1/1/model.safetensors", hashlib.sha256(b"weights").hexdigest(), 7))
    known = {"dataset": "digits", "paper": "senderovich2022", "name": "table2"}
    paths = openapi["paths"]
    assert not [path for path, methods in paths.items() if "head" in methods]
    asked = 0
    for path, methods in paths.items():
        if "get" not in methods or path.endswith("/stream") or "spec" in path:
            continue
        names = [parameter["name"] for parameter in methods["get"].get("parameters", []) if parameter["in"] == "path"]
        url = path.format(**{name: known.get(name, 1) for name in names})
        if path == "/v1/presets/{name}":
            url = "/v1/presets/smoke"
        plain = {"Accept-Encoding": "identity"}  # what is not sent is not compressed, either
        head, get = api.head(url, headers=plain), api.get(url, headers=plain)
        assert (head.status_code, head.content) == (get.status_code, b""), url
        for name in ("content-length", "content-type", "etag", "cache-control", "vary", "link"):
            if path != "/metrics" or name != "content-length":
                there, here = (answer.headers.get(name, "") for answer in (head, get))
                if name == "vary":  # said of bodies that are long enough to be compressed
                    here = here.removesuffix("Accept-Encoding").removesuffix(", ")
                assert there == here, (url, name)
        asked += get.status_code == 200
    assert asked >= 15
    tag = api.head("/v1/experiments/1").headers["etag"]
    assert api.head("/v1/experiments/1", headers={"If-None-Match": tag}).status_code == 304
    assert api.head("/v1/artifacts/1", headers={"Range": "bytes=0-1"}).status_code == 200  # Range is of GET alone
    assert api.head("/v1/experiments/7").status_code == 404
    assert api.head("/v1/experiments/1/pause").headers["allow"] == "POST"
    assert "HEAD" in api.put("/v1/experiments/1").headers["allow"].split(", ")
    assert 'method="HEAD",route="/v1/experiments/{experiment_id}"' in api.get("/metrics").text


@pytest.mark.parametrize(
    ("method", "path", "wrong"),
    [
        ("post", "/v1/experiments?dryrun=true", "dryrun"),
        ("get", "/v1/experiments?stat=failed", "stat"),
        ("get", "/v1/leaderboards/digits?metric=ece&foo=bar", "foo"),
        ("get", "/v1/events?order=kind", "order"),
    ],
)
def test_parameters_that_there_are_not_are_refused(sqlite_api: TestClient, method: str, path: str, wrong: str) -> None:
    body = {"name": "n", "base": {"dataset": "digits", "model": "small-cnn"}}
    answer = sqlite_api.request(method, path, json=body if method == "post" else None)
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["field"] == wrong
    assert "there is no such parameter here; there are " in str(error)
    assert sqlite_api.get("/v1/experiments").json()["items"] == [], "nothing was stored"


class TestLists:
    def test_filters_and_orders_over_http(self, api: TestClient, submit: Submit, database: Database) -> None:
        ids = [submit(seeds=seeds, name=name) for seeds, name in ((2, "b ranks"), (3, "a"), (1, "C ranks"))]

        def work(session: Session) -> None:
            session.add(Tag(experiment_id=ids[1], name="paper"))
            session.get_one(Experiment, ids[2]).owner = "ada"

        database.write(work)

        def found(query: str) -> list[int]:
            response = api.get(f"/v1/experiments?{query}")
            assert response.status_code == 200, response.text
            return [item["id"] for item in response.json()["items"]]

        assert found("name=RANKS") == [ids[2], ids[0]]
        assert found("sort=trial_count") == [ids[2], ids[0], ids[1]]
        assert found("tag=paper") == [ids[1]]
        assert found("tag=paper&tag=other") == []
        assert found("owner=ada") == [ids[2]]
        assert found("state=queued&state=running") == ids[::-1]
        assert found("archived=true") == []
        created = api.get(f"/v1/experiments/{ids[1]}").json()["created_at"]
        assert found(f"created_after={created}") == [ids[2], ids[1]]
        assert found(f"created_before={created}") == [ids[0]]
        assert api.get("/v1/experiments?tag=paper").json()["items"][0]["tags"] == ["paper"]

    @pytest.mark.parametrize("part", ["ränge", "RÄNGE", "große r"])
    def test_a_name_is_found_in_upper_and_lower_case(self, api: TestClient, submit: Submit, part: str) -> None:
        """Whatever its letters are."""
        submit(name="Große Ränge")
        assert [one["name"] for one in api.get(f"/v1/experiments?name={part}").json()["items"]] == ["Große Ränge"]

    @pytest.mark.parametrize("path", ["/v1/trials", "/v1/experiments/1/trials", "/v1/experiments/1/matrix", "/trials"])
    def test_a_condition_with_a_null_character_is_refused(self, api: TestClient, submit: Submit, path: str) -> None:
        """PostgreSQL has no text for it: it was an error of the service's there."""
        submit()
        for condition in ("dataset=a%00b", "model!=%00", "model in (a, b%00)"):
            answer = api.get(f"{path}?where={condition}")
            assert answer.status_code == 422, answer.text
            assert "without null characters" in answer.text

    @pytest.mark.parametrize(
        "instant", ["7", "2026-01-01", "2026-01-01T00:00:00", "0001-01-01T00:00:00%2B23:59", "2026-13-01T00:00:00Z"]
    )
    def test_instants_have_a_zone(self, sqlite_api: TestClient, instant: str) -> None:
        response = sqlite_api.get(f"/v1/experiments?created_after={instant}")
        assert response.status_code == 422
        assert "2026-11-21T03:30:31Z" in response.json()["detail"]

    def test_all_trials(self, api: TestClient, submit: Submit) -> None:
        submit(seeds=2)
        submit(seeds=1)
        listed = api.get("/v1/trials?limit=2").json()
        assert [item["id"] for item in listed["items"]] == [3, 2]
        rest = api.get("/v1/trials", params={"limit": 2, "cursor": listed["next"]}).json()
        assert [item["id"] for item in rest["items"]] == [1]
        assert [item["id"] for item in api.get("/v1/trials?seed=0&sort=id").json()["items"]] == [1, 3]
        assert [item["id"] for item in api.get("/v1/trials?rank=none&seed=1").json()["items"]] == [2]

    def test_fields(self, api: TestClient, submit: Submit, finished: Callable[..., int]) -> None:
        trial_id = finished(accuracy=0.5)
        submit(seeds=1)
        items = api.get("/v1/experiments?fields=id,progress.trials.queued,spec.grid").json()["items"]
        assert items == [
            {"id": 2, "progress": {"trials": {"queued": 1}}, "spec": {"grid": {"seed": [0]}}},
            {"id": 1, "progress": {"trials": {"queued": 0}}, "spec": {"grid": {"seed": [0]}}},
        ]
        assert api.get("/v1/experiments/2?fields=name").json() == {"name": "grid"}
        trials = api.get("/v1/trials?fields=id,result.accuracy,config.training.epochs&sort=id").json()["items"]
        assert trials == [
            {"id": 1, "config": {"training": {"epochs": 3}}, "result": {"accuracy": 0.5}},
            {"id": 2, "config": {"training": {"epochs": 3}}, "result": None},
        ]
        assert api.get(f"/v1/trials/{trial_id}?fields=layers.name").json() == {"layers": [{"name": "conv1"}]}
        assert api.get(f"/v1/trials/{trial_id}/result?fields=accuracy").json() == {"accuracy": 0.5}
        refusal = api.get("/v1/trials?fields=result.speed").json()
        assert refusal["errors"][0]["field"] == "fields"
        assert "'result.speed'; there are result.protocol, result.accuracy, " in refusal["detail"]

    def test_what_cannot_be_true_is_no_number_of_a_table(
        self, api: TestClient, finished: Callable[..., int], database: Database
    ) -> None:
        finished(accuracy=0.625)
        database.write(lambda session: session.execute(update(Result).values(valid=False)))
        (row,) = [line for line in api.get("/v1/trials?format=markdown").text.splitlines() if "succeeded" in line]
        assert "| succeeded, invalid |" in row
        assert "62.5" not in row

    def test_a_table_has_the_fields_in_which_trials_differ(
        self, api: TestClient, finished: Callable[..., int], grid: Callable[..., int]
    ) -> None:
        """Over fields that no filter knows, in every form; `columns` and `hide` choose."""
        finished(accuracy=0.5)
        experiment = grid({"augmentation.flip": [False, True], "training.schedule": ["multistep", "cosine"]})
        listed = api.get(f"/v1/experiments/{experiment}/trials").json()
        differing = ["augmentation.flip", "training.schedule"]
        assert sorted(column["field"] for column in listed["columns"]) == sorted(differing)
        assert {column["name"] for column in listed["columns"]} == {"schedule", "flip"}
        assert listed["common"]["training.epochs"] == 3
        assert listed["common"].keys().isdisjoint(differing)

        def table(query: str, form: str = "csv", path: str = f"/v1/experiments/{experiment}/trials") -> Response:
            answer = api.get(f"{path}?format={form}{query}")
            assert answer.status_code == 200, answer.text
            assert answer.headers["vary"].removesuffix(", Accept-Encoding") == "Accept, Authorization"
            return answer

        read = list(csv.DictReader(io.StringIO(table("").text)))
        assert len({(row["augmentation.flip"], row["training.schedule"]) for row in read}) == 4
        assert {row["state"] for row in read} == {"queued"}
        assert {row["accuracy"] for row in read} == {""}
        for form, sign in (("markdown", " | "), ("latex", "} & {")):
            text = table("", form).text
            assert f"schedule{sign}" in text
            assert len({line for line in text.splitlines() if "queued" in line.lower()}) == 4, text
        chosen = csv.reader(io.StringIO(table("&columns=rank, seed&hide=seed").text))
        header = next(chosen)
        assert [name for name in ("rank", "seed", "training.schedule") if name in header] == ["rank"]
        everywhere = table("&sort=id&columns=model", path="/v1/trials")
        assert float(next(csv.DictReader(io.StringIO(everywhere.text)))["accuracy"]) == 0.5
        first = table("&limit=3")
        rest = api.get(first.links["next"]["url"])
        assert len(rest.text.splitlines()) == 2
        accepted = api.get(f"/v1/experiments/{experiment}/trials", headers={"Accept": "text/csv"})
        assert accepted.headers["content-type"] == "text/csv; charset=utf-8"
        refused = api.get("/v1/trials?columns=training.learning_rate")
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "columns")
        assert "the nearest is " in refused.json()["detail"]
        assert api.get("/v1/trials?format=csv&fields=id").json()["errors"][0]["field"] == "fields"

    def test_every_metric_is_shown(self) -> None:
        assert set(METRICS) <= set(ResultOut.model_fields)


class TestETags:
    PATHS = (
        "/v1/experiments",
        "/v1/experiments/1",
        "/v1/experiments/1/trials",
        "/v1/trials",
        "/v1/trials/1",
        "/v1/trials/1/result",
        "/v1/trials/1/spectra",
        "/v1/trials/1/metrics",
        "/v1/trials/1/artifacts",
        "/v1/events",
        "/v1/experiments/1/events",
    )

    def test_what_is_known_is_not_sent_again(self, api: TestClient, finished: Callable[..., int]) -> None:
        finished()
        for path in self.PATHS:
            first = api.get(path)
            assert first.status_code == 200
            tag = first.headers["etag"]
            for known in (tag, f'"other", W/{tag}', "*"):
                again = api.get(path, headers={"If-None-Match": known})
                assert (again.status_code, again.content) == (304, b"")
                assert again.headers["etag"] == tag
            assert api.get(path, headers={"If-None-Match": '"other"'}).content == first.content

    def test_what_changed_is_sent(self, api: TestClient, submit: Submit, claim: Claim, finish: Finish) -> None:
        submit(seeds=2)
        paths = ("/v1/experiments", "/v1/experiments/1", "/v1/experiments/1/trials", "/v1/trials", "/v1/trials/1")
        tags = {path: api.get(path).headers["etag"] for path in paths}
        finish(claim(), 1)
        for path, tag in tags.items():
            assert api.get(path, headers={"If-None-Match": tag}).status_code == 200

    def test_an_experiment_shows_its_revision(self, api: TestClient, submit: Submit, database: Database) -> None:
        submit(seeds=1)
        before = api.get("/v1/experiments/1").headers["etag"]
        some = api.get("/v1/experiments/1?fields=id").headers["etag"]
        assert revision_matches(before, 0)
        assert revision_matches(some, 0)
        assert revision_matches(f'"other", {before}', 0)
        assert not revision_matches(before, 1)
        assert not revision_matches(f"W/{before}", 0)
        assert revision_matches("*", 7)
        assert revision_matches(None, 7)


class TestMetrics:
    @pytest.fixture
    def epochs(self, submit: Submit, database: Database, epoch_point: Make) -> int:
        """A trial with 250 epochs."""
        submit(seeds=2)
        points = [epoch_point(epoch, trial_id=2, val_accuracy=(epoch * 7 % 100) / 100) for epoch in range(1, 251)]
        database.write(lambda session: session.execute(insert(EpochPoint), points))
        return 250

    def test_pages(self, api: TestClient, epochs: int) -> None:
        found, url = [], "/v1/trials/2/metrics?limit=100"
        while url:
            response = api.get(url)
            found += response.json()["items"]
            url = response.headers.get("link", "").partition(">")[0].removeprefix("<")
        assert [item["epoch"] for item in found] == list(range(1, epochs + 1))
        page = api.get("/v1/trials/2/metrics?limit=100&after=100").json()
        assert ([item["epoch"] for item in page["items"]], page["next"]) == (list(range(101, 201)), 200)
        assert api.get("/v1/trials/1/metrics").json() == {"items": [], "next": None, "sampled": False}

    def test_points_and_fields(self, api: TestClient, epochs: int) -> None:
        body = api.get("/v1/trials/2/metrics?points=20&fields=val_accuracy").json()
        assert (len(body["items"]), body["next"], body["sampled"]) == (20, None, True)
        assert (body["items"][0]["epoch"], body["items"][-1]["epoch"]) == (1, epochs)
        assert all(
            item == {"epoch": e, "val_accuracy": (e * 7 % 100) / 100} for item in body["items"] for e in [item["epoch"]]
        )
        assert len(api.get("/v1/trials/2/metrics?points=1000").json()["items"]) == epochs

    def test_a_trial_is_shown_with_at_most_a_thousand(
        self, api: TestClient, submit: Submit, database: Database, epoch_point: Make
    ) -> None:
        submit(seeds=1)
        points = [epoch_point(epoch, trial_id=1) for epoch in range(1, 1502)]
        database.write(lambda session: session.execute(insert(EpochPoint), points))
        shown = api.get("/v1/trials/1").json()["epoch_metrics"]
        assert (len(shown), shown[0]["epoch"], shown[-1]["epoch"]) == (1000, 1, 1501)

    def test_refusals(self, sqlite_api: TestClient) -> None:
        for query in ("points=2", "points=10001", "after=-1", "after=x", "limit=0", "fields=speed"):
            assert sqlite_api.get(f"/v1/trials/1/metrics?{query}").status_code == 422
        assert sqlite_api.get("/v1/trials/1/metrics").status_code == 404


class TestResults:
    def test_result_and_spectra(self, api: TestClient, finished: Callable[..., int], trial_result: Make) -> None:
        trial_id = finished(accuracy=0.75, robust_accuracy=0.25)
        body = api.get(f"/v1/trials/{trial_id}/result").json()
        assert (body["trial_id"], body["accuracy"], body["robust_accuracy"]) == (trial_id, 0.75, 0.25)
        assert (body["protocol_record"], body["environment"]) == ({"split": "test"}, {"torch": "2"})
        assert (body["valid"], body["evaluation"]) == (True, None)
        assert not body["violations"]
        said = {"training": {"projection": "of the last step"}}
        other = finished(accuracy=0.5, evaluation=said)
        second = api.get(f"/v1/trials/{other}/result").json()
        assert second["protocol_record"] == {"split": "test", **said}, "a trial's own, beside the record of many"
        assert second["protocol"] == body["protocol"]
        spectra = api.get(f"/v1/trials/{trial_id}/spectra").json()
        assert spectra == {"trial_id": trial_id, "max_singular_value": 1.0, "layers": trial_result()["layers"]}

    @pytest.mark.parametrize("part", ["result", "spectra"])
    def test_a_trial_without_one_says_its_state(self, api: TestClient, submit: Submit, part: str) -> None:
        submit(seeds=1)
        response = api.get(f"/v1/trials/1/{part}")
        assert response.status_code == 404
        assert response.json()["detail"] == "trial 1 has no result: it is queued"


class TestArtifacts:
    TEXT = bytes(range(256)) * 500

    @pytest.fixture
    def stored(self, data_dir: Path, finished: Callable[..., int]) -> Callable[..., Path]:
        """Writes a file into the data folder and into the manifest as artifact 1; its path."""

        def stored(name: str = "trials/1/1/model.safetensors", kind: str = "model", text: bytes = self.TEXT) -> Path:
            path = data_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
            finished(ArtifactFile(kind, name, hashlib.sha256(text).hexdigest(), len(text)))
            return path

        return stored

    def test_the_whole(self, api: TestClient, stored: Callable[..., Path]) -> None:
        stored()
        (item,) = api.get("/v1/trials/1/artifacts").json()["items"]
        response = api.get(item["url"])
        assert (response.status_code, response.content) == (200, self.TEXT)
        assert response.headers["etag"] == f'"{hashlib.sha256(self.TEXT).hexdigest()}"'
        assert response.headers["content-type"] == "application/octet-stream"
        assert response.headers["content-disposition"] == 'attachment; filename="trial-1-model.safetensors"'
        assert response.headers["accept-ranges"] == "bytes"
        head = api.head(item["url"])
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(self.TEXT)))
        assert api.get(item["url"], headers={"If-None-Match": response.headers["etag"]}).status_code == 304

    @pytest.mark.parametrize(
        ("asked", "start", "end"),
        [
            ("bytes=0-9", 0, 10),
            ("bytes=100-", 100, 128_000),
            ("bytes=-10", 127_990, 128_000),
            ("Bytes = 127999-999999", 127_999, 128_000),
            ("bytes=-999999", 0, 128_000),
            ("bytes=0-9,200000-", 0, 10),
        ],
    )
    def test_one_range(self, api: TestClient, stored: Callable[..., Path], asked: str, start: int, end: int) -> None:
        stored()
        response = api.get("/v1/artifacts/1", headers={"Range": asked})
        assert (response.status_code, response.content) == (206, self.TEXT[start:end])
        assert response.headers["content-range"] == f"bytes {start}-{end - 1}/128000"

    def test_several_ranges(self, api: TestClient, stored: Callable[..., Path]) -> None:
        stored()
        response = api.get("/v1/artifacts/1", headers={"Range": "bytes=0-1,10-11"})
        assert response.status_code == 206
        assert response.headers["content-type"].startswith("multipart/byteranges")
        assert self.TEXT[10:12] in response.content

    @pytest.mark.parametrize("asked", ["bytes=128000-", "bytes=-0", "bytes=128000-128001,999999-"])
    def test_ranges_beyond(self, api: TestClient, stored: Callable[..., Path], asked: str) -> None:
        stored()
        response = api.get("/v1/artifacts/1", headers={"Range": asked})
        assert (response.status_code, response.headers["content-range"]) == (416, "bytes */128000")
        assert response.headers["content-type"] == "application/problem+json"

    @pytest.mark.parametrize("asked", ["lines=0-9", "bytes=9-0", "bytes=a-b", "bytes=", "x", "bytes=" + "0-1," * 50])
    def test_ranges_that_mean_nothing_are_ignored(
        self, api: TestClient, stored: Callable[..., Path], asked: str
    ) -> None:
        stored()
        response = api.get("/v1/artifacts/1", headers={"Range": asked})
        assert (response.status_code, len(response.content)) == (200, len(self.TEXT))

    def test_if_range(self, api: TestClient, stored: Callable[..., Path]) -> None:
        stored()
        tag = api.head("/v1/artifacts/1").headers["etag"]
        same = api.get("/v1/artifacts/1", headers={"Range": "bytes=0-9", "If-Range": tag})
        other = api.get("/v1/artifacts/1", headers={"Range": "bytes=0-9", "If-Range": '"other"'})
        assert (same.status_code, other.status_code) == (206, 200)

    def test_pictures_cannot_run_anything(self, api: TestClient, stored: Callable[..., Path]) -> None:
        stored("trials/1/1/spectrum.svg", "plot", b"<svg/>")
        headers = api.get("/v1/artifacts/1").headers
        assert headers["content-type"] == "image/svg+xml"
        assert "sandbox" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-disposition"].startswith("attachment")

    def test_names_are_safe(self, api: TestClient, stored: Callable[..., Path]) -> None:
        stored('trials/1/1/a.t"x;t', 'a/../"\r\nb', b"x")
        headers = api.get("/v1/artifacts/1").headers
        assert headers["content-disposition"] == 'attachment; filename="trial-1-a_______b.txt"'

    def test_gone(self, api: TestClient, stored: Callable[..., Path]) -> None:
        stored().unlink()
        response = api.get("/v1/artifacts/1")
        assert response.status_code == 404
        said = response.json()["detail"]
        assert said.startswith("artifact 1 (model of trial 1) was manifested but is not in the data folder: ")
        assert "another TTSV_DATA_DIR or TTSV_STORAGE" in said

    def test_cut_short(self, api: TestClient, stored: Callable[..., Path]) -> None:
        stored().write_bytes(b"half")
        response = api.get("/v1/artifacts/1")
        assert response.status_code == 410
        assert "4 bytes instead of 128000" in response.json()["detail"]

    def test_links_that_lead_out(self, api: TestClient, stored: Callable[..., Path], tmp_path: Path) -> None:
        path = stored()
        path.unlink()
        (tmp_path / "secret").write_bytes(self.TEXT)
        path.symlink_to(tmp_path / "secret")
        response = api.get("/v1/artifacts/1")
        assert response.status_code == 410
        assert str(tmp_path) not in response.text

    @pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "trials/../../secret"])
    def test_paths_that_lead_out(
        self, api: TestClient, finished: Callable[..., int], data_dir: Path, database: Database, path: str
    ) -> None:
        (data_dir.parent / "secret").write_bytes(b"x")
        finished(ArtifactFile("model", path, "0" * 64, 1))
        assert api.get("/v1/artifacts/1").status_code == 410

    def test_a_folder_is_no_file(self, api: TestClient, finished: Callable[..., int], data_dir: Path) -> None:
        (data_dir / "folder").mkdir()
        finished(ArtifactFile("model", "folder", "0" * 64, 1))
        assert api.get("/v1/artifacts/1").status_code == 404

    @pytest.mark.parametrize("path", ["..%2fsecret", "..", "%2e%2e/x", "1/../2", "0", "x"])
    def test_no_request_names_a_path(self, sqlite_api: TestClient, path: str, table: Table) -> None:
        assert sqlite_api.get(f"/v1/artifacts/{path}").status_code in (404, 422)
        assert table(Artifact) == []


class TestLogs:
    @pytest.fixture
    def log(self, submit: Submit, data_dir: Path) -> Path:
        """The log of trial 1, which is queued."""
        submit(seeds=1)
        folder = data_dir / "trials" / "1" / "3"
        folder.mkdir(parents=True)
        return folder / "trial.log"

    def test_the_end(self, api: TestClient, log: Path) -> None:
        lines = [f"line {number} ü\n" for number in range(30_000)]
        log.write_text("".join(lines))
        response = api.get("/v1/trials/1/logs?tail=7000")
        assert response.text == "".join(lines[-7000:])
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
        assert api.get("/v1/trials/1/logs").text == "".join(lines[-1000:])
        assert api.get("/v1/trials/1/logs?tail=0").text == ""
        log.write_text("no end")
        assert api.get("/v1/trials/1/logs?tail=1").text == "no end"

    def test_the_end_of_one_endless_line(self, api: TestClient, log: Path) -> None:
        with log.open("wb") as file:
            file.truncate(300 * 2**20)  # a hole: it takes no room
        assert 4 * 2**20 <= len(api.get("/v1/trials/1/logs").content) <= 5 * 2**20

    def test_the_newest_attempt(self, api: TestClient, log: Path) -> None:
        for fence, text in (("3", "third"), ("12", "twelfth"), ("7", "seventh"), ("abc", "none"), ("99", None)):
            folder = log.parent.parent / fence
            folder.mkdir(exist_ok=True)
            if text:
                (folder / "trial.log").write_text(text)
        assert api.get("/v1/trials/1/logs").text == "twelfth"

    def test_of_an_experiment(self, api: TestClient, log: Path, data_dir: Path) -> None:
        assert api.get("/v1/experiments/1/logs").status_code == 404
        (data_dir / "logs").mkdir()
        for name in ("experiment-1-2.log", "experiment-1-10.log", "experiment-11-99.log", "experiment-1-x.log"):
            (data_dir / "logs" / name).write_text(name)
        assert api.get("/v1/experiments/1/logs").text == "experiment-1-10.log"

    def test_none_yet(self, api: TestClient, log: Path) -> None:
        response = api.get("/v1/trials/1/logs")
        assert response.status_code == 404
        assert response.json()["detail"].startswith("trial 1 has no log")
        assert api.get("/v1/trials/7/logs").json()["detail"] == "there is no trial 7"

    def test_links_that_lead_out(self, api: TestClient, log: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        log.symlink_to(tmp_path / "secret")
        assert api.get("/v1/trials/1/logs").status_code == 404

    def test_following_what_is_final_is_reading_it(
        self, api: TestClient, finished: Callable[..., int], data_dir: Path
    ) -> None:
        trial_id = finished()
        folder = data_dir / "trials" / str(trial_id) / "1"
        answer = api.get(f"/v1/trials/{trial_id}/logs?follow=true")
        assert (answer.status_code, answer.text) == (200, "")  # as of one that ended right after it was asked for
        folder.mkdir(parents=True)
        (folder / "trial.log").write_text("a\nb\nc\n" + "x" * 200_000)
        assert api.get(f"/v1/trials/{trial_id}/logs?tail=2&follow=true").text == "c\n" + "x" * 200_000


def test_trials_are_filtered_by_results(api: TestClient, finished: Callable[..., int]) -> None:
    trial = finished()
    accuracy = api.get(f"/v1/trials/{trial}").json()["result"]["accuracy"]
    for where, found in ((f"accuracy>={accuracy}", [trial]), (f"accuracy>{accuracy}", [])):
        assert [one["id"] for one in api.get("/v1/trials", params={"where": where}).json()["items"]] == found
    (error,) = api.get("/v1/trials", params={"where": "acuracy>0"}).json()["errors"]
    assert error["message"] == "there is no field 'acuracy'; the nearest is accuracy"


def test_any_field_filters_trials(api: TestClient, submit: Callable[..., int]) -> None:
    experiment = submit(seeds=2, **{"training.lr": [0.05, 0.1, 0.2]})
    for path in (f"/v1/experiments/{experiment}/trials", "/v1/trials"):
        found = api.get(path, params={"where": ["lr<=0.1", "seed=1", "dataset=digits"]}).json()["items"]
        assert [(t["config"]["training"]["lr"], t["config"]["seed"]) for t in found] in (
            [(0.05, 1), (0.1, 1)],
            [(0.1, 1), (0.05, 1)],
        )
        for where, fix in (("lern=1", "the nearest is lr"), ("state=failed", "a parameter of its own: state=...")):
            answer = api.get(path, params={"where": where})
            assert answer.status_code == 422
            (error,) = answer.json()["errors"]
            assert error["field"] == "where"
            assert error["message"].endswith(fix)
        first = api.get(path, params={"sort": "-training.lr", "limit": 2}).json()
        assert [t["config"]["training"]["lr"] for t in first["items"]] == [0.2, 0.2]
        rest = api.get(path, params={"sort": "-lr", "limit": 3, "cursor": first["next"]}).json()
        assert [t["config"]["training"]["lr"] for t in rest["items"]] == [0.1, 0.1, 0.05]
