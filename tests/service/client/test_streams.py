"""What the client takes up again: streams, downloads; data frames."""

import hashlib
import json
import math
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from sqlalchemy import insert
from sqlalchemy.orm import Session

from service.client import (
    ApiError,
    ChangedError,
    Client,
    ConflictError,
    DamagedError,
    InvalidError,
    MissingError,
    UnreachableError,
)
from service.client.frames import RESULT_COLUMNS
from service.database import EpochPoint, Experiment
from service.database.engine import Database
from service.experiments import actions
from service.queue import leases
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.schemas.experiments import EventOut, ExperimentUpdate
from tests.held import unfinished_trials
from tests.machinery import Make

BASE = {"dataset": "digits", "model": "small-cnn"}
SPEC: dict[str, Any] = {"name": "x", "base": BASE, "grid": {"seed": [0, 1, 2], "rank": [None, 4]}}
ONE: dict[str, Any] = {"name": "one", "base": BASE}
CONTENT = random.Random(0).randbytes(300_000)


class Cutter:
    """Passes connections on, byte by byte; each of the first ones ends after so many bytes of the answer."""

    def __init__(self, target: str, limits: list[int]) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self.target, self.limits = (host, int(port)), limits
        self.requests: list[bytes] = []
        self.threads: list[threading.Thread] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self.serve, args=(client,), daemon=True))
            self.threads[-1].start()

    def serve(self, client: socket.socket) -> None:
        with client:
            request = b""
            while b"\r\n\r\n" not in request and (piece := client.recv(65536)):
                request += piece
            if not request:
                return
            head, _, body = request.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            missing = int(lengths[0].partition(b":")[2]) - len(body) if lengths else 0
            while missing > 0 and (piece := client.recv(missing)):
                request += piece
                missing -= len(piece)
            self.requests.append(request)
            limit = self.limits.pop(0) if self.limits else 1 << 40
            with socket.create_connection(self.target) as server:
                server.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                while limit > 0 and (piece := server.recv(65536)):
                    client.sendall(piece[:limit])
                    limit -= len(piece)
                client.close()
                while server.recv(65536):  # the service is to be done with it when the test ends
                    pass


@pytest.fixture
def cut(server: str) -> Iterator[Callable[..., Cutter]]:
    made: list[Cutter] = []

    def cut(*limits: int) -> Cutter:
        made.append(Cutter(server, list(limits)))
        return made[-1]

    yield cut
    for cutter in made:
        cutter.listener.shutdown(socket.SHUT_RDWR)
        cutter.listener.close()
        for thread in cutter.threads:
            thread.join(10)


@pytest.fixture
def finished(
    client: Client, stored: Database, trial_result: Make, epoch_point: Make, tmp_path: Path
) -> Callable[..., int]:
    """Posts an experiment and finishes its trials; the first leaves a model and has epochs."""

    def finished(spec: dict[str, Any] = SPEC, **result: Any) -> int:
        experiment_id = client.submit(spec).id

        def work(session: Session) -> None:
            lease = leases.claim(session, "worker", None)
            assert lease is not None
            with hold(session, lease) as held:
                for trial in unfinished_trials(session, lease):
                    held.start_trial(trial.id)
                    files = []
                    if trial.number == 0:
                        path = f"trials/{trial.id}/1/model.safetensors"
                        (tmp_path / "data" / path).parent.mkdir(parents=True)
                        (tmp_path / "data" / path).write_bytes(CONTENT)
                        files = [ArtifactFile("model", path, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))]
                        points = [epoch_point(epoch, trial_id=trial.id) for epoch in range(1, 1201)]
                        session.execute(insert(EpochPoint), points)
                    accuracy = 0.5 + trial.id / 100
                    held.finish_trial(trial.id, trial_result(accuracy, **result), ProtocolRecord("p" * 64, {}), files)
            assert leases.complete(session, lease)

        stored.write(work)
        return experiment_id

    return finished


class TestDownload:
    def test_goes_on_where_it_broke_off(
        self, client: Client, cut: Callable[..., Cutter], finished: Callable[..., int], tmp_path: Path
    ) -> None:
        finished(ONE)
        (artifact,) = client.artifacts(1)
        cutter = cut(1000, 100_000, 30)
        with Client(cutter.url) as through:
            path = through.download(artifact, tmp_path)
        assert path == tmp_path / "trial-1-model.safetensors"
        assert path.read_bytes() == CONTENT
        ranges = [ranged(request) for request in cutter.requests]
        assert ranges[0] is None
        assert 0 < (ranges[1] or 0) < 1000
        assert (ranges[1] or 0) < (ranges[2] or 0) < 101_000
        assert ranges[3] == ranges[2], "the third broke off before its body"

    def test_goes_on_in_a_later_call(self, client: Client, finished: Callable[..., int], tmp_path: Path) -> None:
        finished(ONE)
        (artifact,) = client.artifacts(1)
        (tmp_path / "m.part").write_bytes(CONTENT[:5000])
        assert client.download(artifact, tmp_path / "m").read_bytes() == CONTENT
        assert not (tmp_path / "m.part").exists()

    def test_what_is_wrong_is_not_kept(self, client: Client, finished: Callable[..., int], tmp_path: Path) -> None:
        finished(ONE)
        (artifact,) = client.artifacts(1)
        (tmp_path / "m.part").write_bytes(bytes(5000))
        with pytest.raises(DamagedError, match="SHA-256"):
            client.download(artifact, tmp_path / "m")
        assert list(tmp_path.glob("m*")) == []
        assert client.download(artifact, tmp_path / "m").read_bytes() == CONTENT
        (tmp_path / "n.part").write_bytes(CONTENT + b"more")
        assert client.download(artifact, tmp_path / "n").read_bytes() == CONTENT

    def test_gives_up(
        self, client: Client, cut: Callable[..., Cutter], finished: Callable[..., int], tmp_path: Path
    ) -> None:
        finished(ONE)
        (artifact,) = client.artifacts(1)
        with Client(cut(*[10] * 9).url, retries=2) as through, pytest.raises(UnreachableError):
            through.download(artifact, tmp_path / "m")
        with pytest.raises(MissingError):
            client.download(artifact.model_copy(update={"id": 99}), tmp_path / "m")
        assert list(tmp_path.glob("m*")) == []


def ranged(request: bytes) -> int | None:
    lines = [line for line in request.split(b"\r\n") if line.lower().startswith(b"range:")]
    return int(lines[0].partition(b"=")[2].rstrip(b"-")) if lines else None


class TestStreams:
    def test_no_event_is_missed_and_none_comes_twice(
        self, client: Client, stored: Database, cut: Callable[..., Cutter]
    ) -> None:
        one = client.submit(ONE).id
        for _ in range(5):
            stored.write(lambda session: actions.pause(session, one))
            stored.write(lambda session: actions.resume(session, one))
        stored.write(lambda session: actions.cancel(session, one))
        expected = [event.id for event in client.events(one)]
        cutter = cut(900, 1500, 1300, 10)
        with Client(cutter.url) as through:
            items = list(through.follow(one))
        assert [item.id for item in items if isinstance(item, EventOut)] == expected
        assert isinstance(items[-1], ExperimentUpdate)
        assert items[-1].state == "cancelled"
        assert len(cutter.requests) == 5
        with Client(cutter.url) as through:
            later = list(through.follow(one, after=expected[-3]))
            assert [item.id for item in later if isinstance(item, EventOut)] == expected[-2:]
            assert not any(isinstance(item, EventOut) for item in through.follow(one, events=False))

    def test_the_last_word_comes_where_the_service_was_away_for_a_moment(
        self, client: Client, stored: Database, cut: Callable[..., Cutter]
    ) -> None:
        """The stream had no more to say, and the experiment itself could not be asked for."""
        one = client.submit(ONE).id
        stored.write(lambda session: actions.cancel(session, one))
        *_, newest = client.events(one)
        whole, nothing = 1 << 40, 10
        with Client(cut(whole, nothing, nothing).url, retries=1) as through:
            (last,) = through.follow(one, after=newest.id)
        assert isinstance(last, ExperimentUpdate)
        assert last.state == "cancelled"
        with (
            Client(cut(whole, nothing, whole, *[nothing] * 9).url, retries=0) as through,
            pytest.raises(UnreachableError),
        ):
            list(through.follow(one, after=newest.id))

    def test_watching_without_streams(self, client: Client, stored: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        """Something between lets none through: the experiment is asked for again and again."""
        one = client.submit(ONE).id
        request = httpx.Client.stream

        def refused(self: Any, method: str, path: str, **more: Any) -> Any:
            if path.endswith("/stream"):
                raise httpx.ReadError("no streams here")
            return request(self, method, path, **more)

        monkeypatch.setattr(httpx.Client, "stream", refused)
        watched = client.watch(one, every=0.5)
        assert next(watched).state == "queued"
        timer = threading.Timer(0.3, lambda: stored.write(lambda session: actions.cancel(session, one)))
        timer.start()
        assert [experiment.state for experiment in watched] == ["cancelled"]
        timer.join()

    def test_watching_through_what_swallows_streams(
        self, client: Client, stored: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a proxy that answers 200 and ends at once: it is not asked for ever."""
        one = client.submit(ONE).id
        request = httpx.Client.stream

        @contextmanager
        def swallowed(self: Any, method: str, path: str, **more: Any) -> Iterator[Any]:
            if path.endswith("/stream"):
                yield httpx.Response(200, content=b"", headers={"Content-Type": "text/event-stream"})
            else:
                with request(self, method, path, **more) as answer:
                    yield answer

        monkeypatch.setattr(httpx.Client, "stream", swallowed)
        with Client(client.url, retries=1) as through:
            with pytest.raises(UnreachableError, match="a stream that ends without a word"):
                list(through.follow(one))
            watched = through.watch(one, every=0.05)
            assert next(watched).state == "queued"
            stored.write(lambda session: actions.cancel(session, one))
            assert [experiment.state for experiment in watched] == ["cancelled"]

    def test_there_is_nothing_to_watch(self, client: Client) -> None:
        for items in (client.watch(7), client.follow(7), client.follow_trial_log(7)):
            with pytest.raises(MissingError, match="404"):
                next(items)

    def test_a_stream_that_is_left_is_closed(self, client: Client) -> None:
        one = client.submit(ONE).id
        followed = client.follow(one)
        next(followed)
        followed.close()  # type: ignore[attr-defined]
        assert client.experiment(one).state == "queued"


class TestFrames:
    def test_results(self, client: Client, finished: Callable[..., int]) -> None:
        done = finished(robust_accuracy=0.25)
        queued = client.submit(SPEC | {"base": BASE | {"lambda_ort": 2.0}}).id
        frame = client.results(done)
        assert len(frame) == 3, "a dense network has no rank"
        trials = {trial.id: trial for trial in client.trials(done)}
        for number, row in frame.iterrows():
            trial = trials[int(str(number))]
            assert trial.result is not None
            assert (row["state"], row["seed"], row["training.lr"], row["accuracy"], row["robust_accuracy"]) == (
                "succeeded", trial.config["seed"], trial.config["training"]["lr"], trial.result.accuracy, 0.25,
            )  # fmt: skip
        assert set(RESULT_COLUMNS) <= set(frame.columns)
        assert frame.columns.is_unique, "configuration, state and metrics have names of their own"
        assert frame.groupby("model")["accuracy"].mean().item() == pytest.approx(0.52)
        assert client.results(queued)["accuracy"].isna().all()
        assert len(client.results(dataset="digits")) == 6
        assert len(client.results(dataset="digits", state="succeeded")) == 3
        empty = client.results(dataset="cifar10")
        assert (len(empty), "accuracy" in empty.columns) == (0, True)

    def test_metrics(self, client: Client, finished: Callable[..., int]) -> None:
        finished(ONE)
        frame = client.metrics(1)
        assert list(frame.index) == list(range(1, 1201))
        assert frame.loc[4, "train_loss"] == 0.25
        assert math.isnan(float(frame["ort_loss"].astype(float).iloc[0]))


class TestErrors:
    def test_each_has_its_class(self, client: Client) -> None:
        one = client.submit(ONE).id
        cases: list[tuple[type[ApiError], Callable[[], object]]] = [
            (MissingError, lambda: client.trial(99)),
            (InvalidError, lambda: client.submit({"name": "x"})),
            (ConflictError, lambda: client.archive(one)),
            (ChangedError, lambda: client.update(one, name="y", revision=7)),
            (ConflictError, lambda: [client.create_project("a"), client.create_project("a")]),
        ]
        for kind, ask in cases:
            with pytest.raises(kind) as caught:
                ask()
            assert type(caught.value) is kind
            assert caught.value.problem.detail

    def test_what_would_double_is_not_sent_again(
        self, cut: Callable[..., Cutter], client: Client, stored: Database
    ) -> None:
        cutter = cut(10, 10, 10)
        with Client(cutter.url) as through:
            with pytest.raises(UnreachableError):
                through.create_project("team")
            assert len(cutter.requests) == 1
            assert [project.name for project in client.projects()] == ["team"]
            assert through.submit(ONE).id == through.experiment(1).id
        with stored.read() as session:
            assert session.query(Experiment).count() == 1

    def test_the_environment(self, monkeypatch: pytest.MonkeyPatch, server: str) -> None:
        monkeypatch.setenv("TTSV_URL", f"{server}/")
        monkeypatch.setenv("TTSV_KEY", "secret")
        with Client() as client:
            assert client.url == server
            assert client.alive().status == "ok"
            assert client._http.headers["Authorization"] == "Bearer secret"
        with Client(key="mine") as client:
            assert client._http.headers["Authorization"] == "Bearer mine"

    def test_a_wait_that_the_service_asks_for(self) -> None:
        client = Client("http://x", retries=3)
        busy = httpx.Response(503, headers={"Retry-After": "5"})
        assert client._pause_after(busy, 0) == 5
        assert client._pause_after(httpx.Response(503, headers={"Retry-After": "9999"}), 0) == 10
        assert client._pause_after(httpx.Response(502), 2) < 1.3
        with pytest.raises(UnreachableError):
            client._pause_after(busy, 3)
        assert client._pause_after(httpx.ConnectError("x"), 0, repeatable=False) < 0.4
        with pytest.raises(UnreachableError):
            client._pause_after(httpx.ReadError("x"), 0, repeatable=False)


def test_lists_without_specs(client: Client) -> None:
    client.submit(SPEC | {"tags": ["a"]})
    (found,) = client.experiments(tag="a", specs=False)
    (whole,) = client.experiments(tag="a")
    assert (found.spec, whole.spec["name"]) == ({}, "x")
    assert found == whole.model_copy(update={"spec": {}})
    assert json.loads(found.model_dump_json())["tags"] == ["a"]
