"""Streams over a real server: progress and events without loss or repetition, and many at once."""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from fastapi import sse
from sqlalchemy import insert
from sqlalchemy.orm import Session

from service.access.security import ANYONE
from service.api import logs
from service.client import ApiError, Client, DamagedError
from service.database import EpochPoint, Event, Trial
from service.database.engine import Database
from service.experiments import actions, events
from service.experiments.events import EventKind
from service.main import create_app
from service.queue import leases
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.schemas.experiments import EventOut, ExperimentUpdate
from service.settings import Settings
from service.storage import Attempt, Folder, begin
from service.upkeep import deletion
from tests.machinery import Claim, Finish, Submit, Table

pytestmark = pytest.mark.here


@dataclass
class Server:
    """A served API."""

    url: str
    data_dir: Path
    app: Any


@contextmanager
def served(database_url: str, folder: Path) -> Iterator[Server]:
    settings = Settings(database_url=database_url, data_dir=folder / "data")
    app = create_app(settings)
    app.state.subscriptions.every = 0.05
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    config = uvicorn.Config(app, log_config=None, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}", settings.data_dir, app)
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


@pytest.fixture(autouse=True)
def _quick_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who follows a log is not to wait for long."""
    monkeypatch.setattr(logs, "_LOOK_SECONDS", 0.05)


@pytest.fixture
def server(database_url: str, tmp_path: Path) -> Iterator[Server]:
    with served(database_url, tmp_path) as server:
        yield server


def read(lines: Iterator[str]) -> Iterator[tuple[str, Any, str | None]]:
    """(event, data, id) of a stream, by the rules of the HTML standard; comments have the name ":"."""
    event, data, identity = "message", "", None
    for line in lines:
        if line.startswith(":"):
            yield ":", line, None
        elif line == "":
            if data:
                yield event, json.loads(data), identity
            event, data, identity = "message", "", None
        else:
            name, _, value = line.partition(": ")
            match name:
                case "event":
                    event = value
                case "data":
                    data += value
                case "id":
                    identity = value


@contextmanager
def stream(
    server: Server, experiment_id: int, query: str = "", **headers: str
) -> Iterator[Iterator[tuple[str, Any, str | None]]]:
    url = f"{server.url}/v1/experiments/{experiment_id}/stream{query}"
    with httpx.stream("GET", url, headers=headers, timeout=20) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield read(response.iter_lines())


def run_to_the_end(database: Database, claim: Claim, finish: Finish, table: Table) -> None:
    lease = claim()
    for trial in table(Trial):
        finish(lease, trial.id)
    database.write(lambda session: leases.complete(session, lease))


def test_from_submission_to_the_end(
    server: Server, submit: Submit, claim: Claim, finish: Finish, table: Table, database: Database
) -> None:
    experiment_id = submit(seeds=3)
    with stream(server, experiment_id) as messages:
        name, data, identity = next(messages)
        assert (name, data["state"], data["progress"]["trials"]["queued"], identity) == ("progress", "queued", 3, None)
        run_to_the_end(database, claim, finish, table)
        rest = list(messages)
    assert [name for name, _, _ in rest if name != ":"][-1] == "end"
    last = [data for name, data, _ in rest if name == "progress"][-1]
    assert (last["state"], last["progress"]["trials"]["succeeded"], last["progress"]["epochs_done"]) == (
        "succeeded",
        3,
        9,
    )
    assert rest[-1][1] == last
    told = [(data["id"], identity) for name, data, identity in rest if name == "event"]
    assert told == [(event.id, str(event.id)) for event in table(Event)]
    kinds = [data["kind"] for name, data, _ in rest if name == "event"]
    assert kinds[0] == "submitted"
    assert kinds.count("trial_finished") == 3
    assert kinds[-1] == "closed"


@pytest.mark.slow
def test_trials_that_begin_and_end_are_named(
    server: Server, submit: Submit, claim: Claim, finish: Finish, database: Database
) -> None:
    experiment_id = submit(seeds=3)
    lease = claim()

    def start(trial_id: int) -> None:
        def work(session: Session) -> None:
            with hold(session, lease) as held:
                held.start_trial(trial_id)

        database.write(work)

    def named(messages: Iterator[tuple[str, Any, str | None]]) -> list[int]:
        ids: list[int] = next(data["ids"] for name, data, _ in messages if name == "trials")
        return ids

    start(1)
    with stream(server, experiment_id, "?events=false&trials=true") as messages:
        assert named(messages) == [1]
        start(2)
        assert named(messages) == [2]

        def fail(session: Session) -> None:
            with hold(session, lease) as held:
                held.fail_trial(1, "error", "x")

        database.write(fail)
        assert named(messages) == [1]
    with stream(server, experiment_id) as messages:
        assert "trials" not in {name for name, _, _ in (next(messages) for _ in range(3))}


def test_several_experiments_and_new_ones(server: Server, submit: Submit, database: Database) -> None:
    first, second = submit(), submit(name="second")

    def spoken(messages: Iterator[tuple[str, Any, str | None]]) -> tuple[str, int]:
        return next((name, data["id"]) for name, data, _ in messages if name != ":")

    url = f"{server.url}/v1/stream?experiment={first}&experiment={second}"
    with httpx.stream("GET", url, timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        messages = read(response.iter_lines())
        assert {spoken(messages) for _ in range(3)} == {("posted", 2), ("progress", first), ("progress", second)}
        third = submit(name="third")
        assert spoken(messages) == ("posted", third)
        database.write(lambda session: actions.pause(session, second))
        assert spoken(messages) == ("progress", second)
        database.write(lambda session: actions.cancel(session, second))
        assert spoken(messages) == ("progress", second)
        database.write(lambda session: deletion.mark(session, second, ANYONE))
        assert next(messages, None) is None  # it ends, and before it would have to say that it lives
    for _ in range(200):
        if not server.app.state.subscriptions._feeds:
            break
        time.sleep(0.05)
    assert server.app.state.subscriptions._feeds == {}
    assert httpx.get(f"{server.url}/v1/stream?experiment=99").status_code == 404
    assert httpx.get(f"{server.url}/v1/stream?experiment=0").status_code == 422


def test_reconnecting_anywhere_loses_and_repeats_nothing(
    server: Server, submit: Submit, claim: Claim, finish: Finish, table: Table, database: Database
) -> None:
    experiment_id = submit(seeds=30)
    worker = threading.Thread(target=run_to_the_end, args=(database, claim, finish, table))
    worker.start()
    told: list[int] = []
    ended = False
    url = f"{server.url}/v1/experiments/{experiment_id}/stream"
    while not ended:
        headers = {"Last-Event-ID": str(told[-1])} if told else {}
        if told and httpx.head(url, headers=headers).status_code == 204:
            break  # cut between the last event and `end`
        with stream(server, experiment_id, **headers) as messages:
            for count, (name, data, _) in enumerate(messages):
                if name == "event":
                    told.append(data["id"])
                ended = ended or name == "end"
                if count >= 4:
                    break  # the line is cut
    worker.join()
    assert told == [event.id for event in table(Event)]


def test_a_final_experiment_is_told_at_once(server: Server, submit: Submit, database: Database, table: Table) -> None:
    experiment_id = submit(seeds=1)
    database.write(lambda session: actions.cancel(session, experiment_id))
    with stream(server, experiment_id, "?events=false") as messages:
        assert [(name, data["state"]) for name, data, _ in messages] == [
            ("progress", "cancelled"),
            ("end", "cancelled"),
        ]
    newest = table(Event)[-1].id
    with stream(server, experiment_id, f"?after={newest - 1}") as messages:
        assert [identity for name, _, identity in messages if name == "event"] == [str(newest)]


@pytest.mark.parametrize("events_too", ["true", "false"])
def test_after_the_end_browsers_are_told_to_stay_away(
    server: Server, submit: Submit, database: Database, table: Table, events_too: str
) -> None:
    experiment_id = submit(seeds=1)
    url, query = f"{server.url}/v1/experiments/{experiment_id}/stream", f"?events={events_too}"
    newest = str(table(Event)[-1].id)
    with stream(server, experiment_id, query, **{"Last-Event-ID": newest}) as messages:
        assert next(messages)[0] == "progress"  # not final yet
    database.write(lambda session: actions.cancel(session, experiment_id))
    with stream(server, experiment_id, query, **{"Last-Event-ID": newest}) as messages:
        *_, (name, _, identity) = messages
    last = str(table(Event)[-1].id)
    assert (name, identity) == ("end", last)
    for known, status in ((last, 204), (str(2**62), 204), (newest, 200), ("0", 200)):
        answer = httpx.get(url + query, headers={"Last-Event-ID": known})
        assert answer.status_code == status, known
        assert (answer.content == b"") == (status == 204)
    database.write(lambda session: actions.archive(session, experiment_id))
    assert httpx.get(url + query, headers={"Last-Event-ID": last}).status_code == 200  # something has happened since
    with Client(server.url) as client:
        known_to_all = table(Event)[-1].id
        (update,) = client.follow(experiment_id, after=known_to_all)
        assert isinstance(update, ExperimentUpdate)
        assert update.state == "cancelled"
        seen = list(client.follow(experiment_id))
        assert [event.id for event in seen if isinstance(event, EventOut)] == [event.id for event in table(Event)]


def test_the_end_is_behind_no_event_that_was_told(
    server: Server, submit: Submit, database: Database, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment_id = submit(seeds=1)
    database.write(lambda session: actions.cancel(session, experiment_id))
    read_events = server.app.state.subscriptions.events

    async def after_one_more(experiment_id: int, after: int) -> Any:
        database.write(lambda session: actions.archive(session, experiment_id))
        return await read_events(experiment_id, after)

    monkeypatch.setattr(server.app.state.subscriptions, "events", after_one_more)
    with stream(server, experiment_id) as messages:
        told = [(name, identity) for name, _, identity in messages if name != "progress"]
    newest = str(table(Event)[-1].id)
    assert told[-2:] == [("event", newest), ("end", newest)]


def test_more_events_than_are_read_at_once(server: Server, submit: Submit, database: Database, table: Table) -> None:
    experiment_id = submit(seeds=1)

    def work(session: Session) -> None:
        experiment = actions.cancel(session, experiment_id)
        for _ in range(1200):
            events.record(session, EventKind.UPDATED, "ada", experiment)

    database.write(work)
    with stream(server, experiment_id) as messages:
        told = [int(identity or 0) for name, _, identity in messages if name == "event"]
    assert told == [event.id for event in table(Event)]


def test_refusals(server: Server, submit: Submit) -> None:
    experiment_id = submit(seeds=1)
    url = f"{server.url}/v1/experiments"
    assert httpx.get(f"{url}/7/stream").status_code == 404
    refused = httpx.get(f"{url}/{experiment_id}/stream", headers={"Last-Event-ID": "seven"})
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"


def test_a_silent_stream_says_that_it_lives(server: Server, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import routing

    assert sse._PING_INTERVAL == 15
    monkeypatch.setattr(routing, "_PING_INTERVAL", 0.1)
    experiment_id = submit(seeds=1)
    with stream(server, experiment_id, "?events=false") as messages:
        names = (name for name, _, _ in messages)
        # On a busy machine the first look at the database may take longer than a tenth of a second.
        assert set(takewhile(lambda name: name != "progress", names)) <= {":"}
        assert next(names) == ":"


@pytest.mark.slow
def test_fifty_watchers_leave_the_service_to_others(
    server: Server, submit: Submit, claim: Claim, finish: Finish, table: Table, database: Database
) -> None:
    """More streams than there are threads or connections, on few looks at the database."""
    experiment_id = submit(seeds=2)
    looks = 0
    look = server.app.state.subscriptions._look

    def counted(ids: list[int]) -> Any:
        nonlocal looks
        looks += 1
        return look(ids)

    server.app.state.subscriptions._look = counted
    begun = threading.Barrier(51)

    def watch() -> list[str]:
        with stream(server, experiment_id) as messages:
            first = next(messages)
            begun.wait(20)
            return [first[0], *(name for name, _, _ in messages)]

    with ThreadPoolExecutor(50) as pool:
        watchers = [pool.submit(watch) for _ in range(50)]
        begun.wait(20)
        start, before = time.monotonic(), looks
        times = []
        for _ in range(10):
            asked = time.monotonic()
            assert httpx.get(f"{server.url}/v1/experiments/{experiment_id}").status_code == 200
            times.append(time.monotonic() - asked)
        looked, passed = looks - before, time.monotonic() - start
        run_to_the_end(database, claim, finish, table)  # before anything may fail: until then the watchers stay
        told = [watcher.result(30) for watcher in watchers]
    assert sorted(times)[5] < 1
    assert looked <= passed / server.app.state.subscriptions.every + 2
    expected = len(table(Event))
    for names in told:
        assert names.count("event") == expected
        assert names[-1] == "end"
    deadline = time.monotonic() + 5
    while server.app.state.subscriptions._feeds:
        assert time.monotonic() < deadline, "a feed is left without watchers"
        time.sleep(0.02)


@pytest.mark.parametrize("path", ["experiments/1/stream", "trials/1/logs?follow=true"])
def test_head_of_what_does_not_end(server: Server, submit: Submit, path: str) -> None:
    submit(seeds=1)
    head = httpx.head(f"{server.url}/v1/{path}", timeout=5)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/")
    deadline = time.monotonic() + 5
    while server.app.state.subscriptions._feeds:
        assert time.monotonic() < deadline, "nobody listens"
        time.sleep(0.02)


def test_watchers_that_leave_are_forgotten(server: Server, submit: Submit) -> None:
    experiment_id = submit(seeds=1)
    with stream(server, experiment_id) as messages:
        next(messages)
        assert server.app.state.subscriptions._feeds
    deadline = time.monotonic() + 5
    while server.app.state.subscriptions._feeds:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_client_reads_what_a_trial_left(
    server: Server,
    submit: Submit,
    claim: Claim,
    database: Database,
    tmp_path: Path,
    epoch_point: Callable[..., dict[str, Any]],
    trial_result: Callable[..., dict[str, Any]],
) -> None:
    submit(seeds=1)
    lease, text = claim(), b"weights" * 100_000
    folder = server.data_dir / "trials" / "1" / "1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(text)
    (folder / "trial.log").write_text("one\ntwo\n")

    def work(session: Session) -> None:
        with hold(session, lease) as held:
            held.start_trial(1)
            session.execute(insert(EpochPoint), [epoch_point(epoch, trial_id=1) for epoch in range(1, 1101)])
            file = ArtifactFile("model", "trials/1/1/model.safetensors", hashlib.sha256(text).hexdigest(), len(text))
            held.finish_trial(1, trial_result(), ProtocolRecord("p" * 64, {}), [file])

    database.write(work)
    with Client(server.url) as client:
        assert [point.epoch for point in client.epochs(1)] == list(range(1, 1101))
        assert len(list(client.epochs(1, points=10))) == 10
        assert client.trial_log(1, tail=1) == "two\n"
        (artifact,) = client.artifacts(1)
        client.download(artifact, tmp_path / artifact.name)
        assert (tmp_path / artifact.name).read_bytes() == text
        with pytest.raises(DamagedError, match="SHA-256"):
            client.download(artifact.model_copy(update={"sha256": "0" * 64}), tmp_path / "other")
        (folder / "model.safetensors").unlink()
        with pytest.raises(ApiError, match=r"404 .* is not in the data folder"):
            client.download(artifact, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.glob("*other*")) == []


@pytest.mark.slow
def test_following_a_log_through_two_attempts(
    server: Server, submit: Submit, claim: Claim, finish: Finish, table: Table, database: Database
) -> None:
    submit(seeds=1)
    store = Folder(server.data_dir)

    def log(fence: int) -> Path:
        return server.data_dir / begin(store, 1, Attempt(fence)) / "trial.log"

    log(9).write_text("before\none\n")
    found: list[str] = []

    def follow() -> None:
        with httpx.stream("GET", f"{server.url}/v1/trials/1/logs?follow=true&tail=1", timeout=20) as response:
            assert response.status_code == 200
            found.extend(response.iter_text())

    reader = threading.Thread(target=follow)
    reader.start()

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 10
        while text not in "".join(found):
            assert time.monotonic() < deadline, found
            time.sleep(0.02)

    wait_for("one\n")
    for fence, lines in ((9, ["two\n"]), (10, ["three\n", "four ü\n"])):
        for line in lines:
            with log(fence).open("a") as file:
                file.write(line)
            wait_for(line)
    other = server.data_dir / "other"  # no copy of what was told
    other.mkdir()
    (other / "trial.log").write_text("another\n")
    other.rename(server.data_dir / Attempt(11).folder(1))
    wait_for("another\n")
    lease = claim()
    finish(lease, 1)
    reader.join(10)
    assert not reader.is_alive()
    assert "".join(found) == "one\ntwo\nthree\nfour ü\nanother\n"
