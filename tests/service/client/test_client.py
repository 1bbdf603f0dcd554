"""The client against a real server on a free port."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from service.client import ApiError, Client, InvalidError
from service.client.connection import of_paper
from service.database import Experiment, IdempotencyKey, TrialState
from service.database.engine import Database
from service.experiments import submission
from service.experiments.submission import Draft
from service.queue import leases
from service.queue.leases import Lease
from service.queue.trials import ProtocolRecord, hold
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from tests.held import reported, unfinished_trials
from tests.machinery import Make

SPEC: dict[str, Any] = {
    "name": "x",
    "base": {"dataset": "digits", "model": "small-cnn"},
    "grid": {"seed": [0, 1, 2]},
}


class Proxy:
    """Passes connections on to a server. `cut` says what happens to the next ones: None, "request" or "answer"."""

    def __init__(self, target: str, cuts: list[str | None]) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self.target, self.cuts, self.heads = (host, int(port)), cuts, list[bytes]()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client:
                self.serve(client)

    def serve(self, client: socket.socket) -> None:
        cut = self.cuts.pop(0) if self.cuts else None
        request = self.message(client)
        self.heads.append(request.partition(b"\r\n\r\n")[0])
        if cut == "request":
            return
        with socket.create_connection(self.target) as server:
            server.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            answer = self.message(server)
        client.sendall(answer[:20] if cut == "answer" else answer)

    @staticmethod
    def message(source: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data and (more := source.recv(65536)):
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length")), 0
        )
        while len(body) < length and (more := source.recv(65536)):
            body += more
        return head + b"\r\n\r\n" + body


@contextmanager
def through(server: str, *cuts: str | None) -> Iterator[Proxy]:
    proxy = Proxy(server, list(cuts))
    yield proxy
    proxy.listener.shutdown(socket.SHUT_RDWR)
    proxy.listener.close()
    proxy.thread.join(5)


class TestAgainstAServer:
    def test_submit_and_look(self, client: Client) -> None:
        experiment = client.submit(SPEC)
        assert (experiment.name, experiment.trial_count) == ("x", 3)
        assert client.experiment(experiment.id).model_dump() | {"warnings": []} == experiment.model_dump()
        assert [trial.number for trial in client.trials(experiment.id)] == [0, 1, 2]
        trial = next(client.trials(experiment.id, state="queued"))
        assert client.trial(trial.id).epoch_metrics == []
        assert client.cancel(experiment.id).state == "cancelled"
        assert list(client.trials(experiment.id, state="queued")) == []
        assert client.leaderboard("digits", metric="loss", experiment_id=experiment.id).boards == []
        assert client.leaderboard("digits", where=["lr<1", "rank in (2, 4)"], pivot=["rank", "lr"]).boards == []
        assert list(client.leaderboard_frame("digits").columns) == ["place", "seeds", "trials"]
        beside = client.compare(trials=[1, 2], metrics=["accuracy", "ece"], baseline=2)
        assert (beside.kind, beside.baseline, [side.key for side in beside.sides]) == ("trials", 1, [1, 2])
        assert "| seed | 0 | 1 |" in client.compare_text(trials=[1, 2], format="markdown")
        with pytest.raises(InvalidError, match="names 1 different experiment"):
            client.compare(experiments=[1])
        assert client.ready().status == "ok"

    def test_what_pictures_are_drawn_from(self, client: Client) -> None:
        experiment = client.submit(SPEC | {"grid": {"training.lr": [0.1, 0.2], "seed": [0, 1]}})
        ids = [trial.id for trial in client.trials(experiment.id)]
        found = client.curves(ids[:2], metrics=["val_loss", "lr"], points=10)
        assert (found.metrics, [curve.trial for curve in found.curves]) == (["val_loss", "lr"], ids[:2])
        assert client.curves(experiment_id=experiment.id, best=2).curves == []
        whole = client.matrix(experiment.id, metric="loss", x="training.lr")
        assert (whole.metric, whole.x and whole.x.values, whole.places.trials) == ("loss", [0.1, 0.2], [2, 2])
        assert client.matrix(experiment.id, where=["seed<2", "lr>0.1"]).places.trials == [2]
        assert client.matrix(experiment.id, trials=ids[3:]).places.state == ["queued"]
        with pytest.raises(TypeError, match="there is no 'z'"):
            client.matrix(experiment.id, z="seed")  # type: ignore[call-arg]
        plane = client.plane("digits", x="ece", y="loss", experiment_id=experiment.id, where="lr>0.1")
        assert (plane.x_metric, plane.y_metric, plane.total, plane.cell) == ("ece", "loss", 0, [])
        with pytest.raises(InvalidError, match="another metric"):
            client.plane("digits", x="loss", y="loss")

    def test_lists_go_over_pages(self, client: Client, stored: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = ExperimentSpec.model_validate(SPEC)
        plan = expand_grid(spec, max_trials=3)
        ids = stored.write(lambda session: [submission.submit(session, Draft(spec, plan)).id for _ in range(53)])
        requests: list[str] = []
        request = client._http.request

        def counted(method: str, path: str, **more: Any) -> Any:
            requests.append(path)
            return request(method, path, **more)

        monkeypatch.setattr(client._http, "request", counted)
        assert [experiment.id for experiment in client.experiments()] == ids[::-1]
        assert len(requests) == 2
        assert next(client.experiments(state="queued")).id == ids[-1]
        assert len(requests) == 3

    def test_people_of_a_project_have_weights(self, client: Client) -> None:
        project = client.create_project("team").id
        for owner in ("bob", "a/b c%?#"):
            client.create_key(project, owner)
        assert client.update_person(project, "a/b c%?#", weight=2).weight == 2
        assert {row.owner: row.weight for row in client.people(project)} == {"a/b c%?#": 2, "bob": 1}

    def test_lists_of_bare_items_too(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        for number in range(5):
            client.create_project(f"p{number}")
        asked: list[str] = []
        request = client._http.request

        def two_at_a_time(method: str, path: str, *, params: dict[str, str], **more: Any) -> Any:
            asked.append(path)
            return request(method, path, params={"limit": "2"} | params, **more)

        monkeypatch.setattr(client._http, "request", two_at_a_time)
        assert [project.name for project in client.projects()] == [f"p{number}" for number in range(5)]
        assert asked == ["/v1/projects"] * 3

    def test_watch_until_the_end(self, client: Client, stored: Database, epoch_point: Make, trial_result: Make) -> None:
        experiment_id = client.submit(SPEC | {"grid": {"seed": [0]}}).id

        def begin(session: Session) -> Lease:
            lease = leases.claim(session, "worker", None)
            assert lease is not None
            with hold(session, lease) as held:
                for trial in unfinished_trials(session, lease):
                    held.start_trial(trial.id)
                    held.add_epoch(trial.id, reported(epoch_point(1)))
            return lease

        def end(session: Session, lease: Lease) -> None:
            with hold(session, lease) as held:
                for trial in unfinished_trials(session, lease):
                    held.finish_trial(trial.id, trial_result(), ProtocolRecord("p" * 64, {}))
            assert leases.complete(session, lease)

        watched = client.watch(experiment_id, every=0.01)
        seen = [next(watched)]
        client.extend(experiment_id, grid={"seed": [1]})
        lease = stored.write(begin)
        seen.append(next(watched))
        stored.write(lambda session: end(session, lease))
        seen += watched
        states = [(found.state.value, found.progress.epochs_done, found.trial_count) for found in seen]
        assert states == [("queued", 0, 1), ("running", 2, 2), ("succeeded", 40, 2)]

    def test_an_error_names_every_field(self, client: Client) -> None:
        with pytest.raises(ApiError) as caught:
            client.submit({"name": "x", "base": {"dataset": "digits", "model": "?"}, "grid": {"rank": [0]}})
        lines = str(caught.value).splitlines()
        assert lines[0].startswith("422 Unprocessable")
        assert [line.split(":")[0].strip() for line in lines[1:]] == ["base.model", "grid.rank[0]"]
        assert caught.value.problem.status == 422

    def test_one_wrong_field_is_one_line(self, client: Client) -> None:
        with pytest.raises(ApiError, match=r"^422 [^\n]*: base.rank: must be a whole number of at least 1[^\n]*$"):
            client.submit({"name": "x", "base": {"dataset": "digits", "model": "small-cnn", "rank": 0}})

    def test_not_found(self, client: Client) -> None:
        with pytest.raises(ApiError, match=r"^404 Not Found: there is no experiment 7$"):
            client.experiment(7)


class TestVerbs:
    def test_each(self, client: Client, stored: Database, trial_result: Make) -> None:
        """One experiment through all of them."""
        one = client.submit(SPEC).id
        assert client.pause(one).state == "paused"
        assert client.resume(one).state == "queued"
        changed = client.update(one, name="y", notes="n", tags=["b", "a"], priority=2, revision=2)
        assert (changed.name, changed.priority, changed.spec["notes"], sorted(changed.tags)) == (
            "y",
            2,
            "n",
            ["a", "b"],
        )
        with pytest.raises(ApiError, match=r"^412 "):
            client.update(one, name="z", revision=2)

        def fail(session: Session) -> None:
            lease = leases.claim(session, "worker", None)
            assert lease is not None
            with hold(session, lease) as held:
                for trial, failure in zip(unfinished_trials(session, lease), ("", "oom", "diverged"), strict=True):
                    held.start_trial(trial.id)
                    if failure:
                        held.fail_trial(trial.id, failure, "no")
                    else:
                        held.finish_trial(trial.id, trial_result(), ProtocolRecord("p" * 64, {}))
            assert leases.complete(session, lease)

        stored.write(fail)
        assert client.archive(one).archived_at is not None
        assert client.unarchive(one).archived_at is None
        assert client.retry(one).progress.trials[TrialState.QUEUED] == 1
        assert client.retry(one, ["diverged"]).progress.trials[TrialState.QUEUED] == 2
        extended = client.extend(one, grid={"seed": [3]}, trials=[{"seed": 4, "layer": "tt", "rank": 2}])
        assert extended.progress.trials[TrialState.QUEUED] == 4
        clones = {client.clone(one, name="twin", idempotency_key=key).id for key in ("k", "k", "l")}
        assert len(clones) == 2
        again = client.reevaluate(one, {"lipschitz": "fgsm"}, name="anew")
        assert (again.name, again.trial_count) == ("anew", 1)
        assert client.stop(one).state == "stopped"
        assert client.cancel(again.id).state == "cancelled"
        with pytest.raises(ApiError, match=r"^409 Conflict: experiment 1 is stopped: it can be paused while it is"):
            client.pause(one)
        kinds = [event.kind for event in client.events(one)]
        assert kinds[:4] == ["submitted", "paused", "resumed", "updated"]
        assert kinds[-2:] == ["stopping", "closed"]
        everything = list(client.events())
        assert [event for event in everything if event.experiment_id == one] == list(client.events(one))
        assert list(client.events(after=everything[-2].id)) == everything[-1:]
        chosen = [event.kind for event in client.events(one, kind=["paused", "closed"])]
        assert chosen == [kind for kind in kinds if kind in ("paused", "closed")]
        assert {event.kind for event in client.events(kind="cancelled")} == {"cancelled"}


class TestRetries:
    def count(self, database: Database, kind: type) -> int:
        with database.read() as session:
            return len(session.scalars(select(kind)).all())

    @pytest.mark.parametrize("cut", ["request", "answer"])
    def test_a_post_that_was_not_answered_is_stored_once(self, server: str, stored: Database, cut: str) -> None:
        with through(server, cut, cut) as proxy, Client(proxy.url) as client:
            experiment = client.submit(SPEC)
        assert experiment.trial_count == 3
        assert (self.count(stored, Experiment), self.count(stored, IdempotencyKey)) == (1, 1)
        keys = {line for head in proxy.heads for line in head.split(b"\r\n") if line.lower().startswith(b"idempot")}
        assert (len(proxy.heads), len(keys)) == (3, 1)

    def test_two_posts_have_two_keys(self, client: Client, stored: Database) -> None:
        assert client.submit(SPEC).id != client.submit(SPEC).id
        assert self.count(stored, IdempotencyKey) == 2

    def test_a_key_of_ones_own(self, client: Client) -> None:
        ids = {client.submit(SPEC, idempotency_key="mine").id for _ in range(2)}
        assert len(ids) == 1

    def test_gives_up_in_the_end(self, server: str, stored: Database) -> None:
        with (
            through(server, *["request"] * 9) as proxy,
            Client(proxy.url, retries=2) as client,
            pytest.raises(ApiError, match=r"does not answer .*; is `ttsv serve` up\?"),
        ):
            client.submit(SPEC)
        assert len(proxy.heads) == 3
        assert self.count(stored, Experiment) == 0

    def test_a_refusal_is_not_sent_again(self, server: str) -> None:
        with through(server) as proxy, Client(proxy.url) as client, pytest.raises(ApiError, match="404"):
            client.experiment(7)
        assert len(proxy.heads) == 1

    def test_nobody_there(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with Client(f"http://127.0.0.1:{port}", retries=1) as client, pytest.raises(ApiError) as caught:
            client.ready()
        assert f"http://127.0.0.1:{port} does not answer" in str(caught.value)

    @pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", json.dumps({"status": "not ready"}).encode()])
    def test_an_answer_that_is_no_problem_document(self, body: bytes) -> None:
        def serve(listener: socket.socket) -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    Proxy.message(connection)
                    connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n" % len(body))
                    connection.sendall(b"Connection: close\r\n\r\n" + body)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=serve, args=(listener,))
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with Client(url, retries=1) as client, pytest.raises(ApiError) as caught:
                client.ready()
            thread.join()
        assert str(caught.value) == f"503 Service Unavailable: {body.decode()}"


def test_names_of_the_paper_lead_nowhere_else() -> None:
    assert of_paper("senderovich2022/table2") == "senderovich2022/table2"
    assert of_paper("../experiments/3/cancel") == "-/experiments%2F3%2Fcancel"
    assert of_paper("a/..") == "a/-"
    assert of_paper("table2") == "-/table2"


def test_a_board_s_rows_refuse_a_wrong_name_at_once() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(TypeError, match="there is no 'metrik'"):
        client.board_rows("digits", "p" * 64, metrik="ece")
