"""Every role on every route on another project's experiment: it is not there, whatever is asked of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response

from service.access import keys
from service.access.security import Scope, installation_secret, new_key
from service.database import Artifact, Event, Experiment, Trial
from service.database.engine import Database
from service.main import create_app
from service.queue import leases
from service.queue.leases import Lease
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.settings import Settings

SECRET = "known-to-nobody-else"
SPEC = {
    "name": SECRET,
    "notes": SECRET,
    "tags": [SECRET],
    "base": {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 1}},
    "grid": {"seed": [0, 1]},
}
ROLES = [("read",), ("submit",), ("cancel",), ("read", "submit", "cancel")]
BODIES = {"reevaluateExperiment": {"evaluation": {"certified": True}}, "extendExperiment": {"grid": {"seed": [7]}}}
ABSENT = 987_654


@dataclass(frozen=True)
class Theirs:
    """What another project has: the ids by which it could be asked for."""

    experiment_id: int
    trial_id: int
    artifact_id: int


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    return Settings(database_url=database_url, data_dir=tmp_path / "data", host="127.0.0.1", require_keys=True)


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def ask(client: TestClient, database: Database, settings: Settings) -> Callable[..., Response]:
    """Sends a request with a key of a project that has these scopes."""
    made: dict[tuple[str, ...], str] = {}

    def key(project: str, scopes: tuple[str, ...]) -> str:
        if (project, *scopes) not in made:
            fresh = new_key(installation_secret(settings.data_dir))

            def work(session: Any) -> None:
                found = keys.project_named(session, project) or keys.create_project(session, project)
                keys.add_key(session, found.id, fresh, owner=project, scopes={Scope(name) for name in scopes})

            database.write(work)
            made[project, *scopes] = fresh.text
        return made[project, *scopes]

    def ask(project: str, scopes: tuple[str, ...], method: str, path: str, **request: Any) -> Response:
        headers = {"Authorization": f"Bearer {key(project, scopes)}"}
        return client.request(method, path, headers=headers, **request)

    return ask


@pytest.fixture
def theirs(
    ask: Callable[..., Response],
    database: Database,
    settings: Settings,
    claim: Callable[..., Lease],
    trial_result: Callable[..., dict[str, Any]],
    protocol: Callable[..., ProtocolRecord],
    table: Callable[[type], list[Any]],
) -> Theirs:
    """An experiment of theirs: one trial has a result and a file, the other waits."""
    posted = ask("theirs", ROLES[-1], "POST", "/v1/experiments", json=SPEC)
    assert posted.status_code == 201, posted.text
    lease = claim()
    trial_id = table(Trial)[0].id
    path = settings.data_dir / "trials" / str(trial_id) / "1" / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(SECRET.encode())
    path.with_name("trial.log").write_text(SECRET)
    file = ArtifactFile("model", str(path.relative_to(settings.data_dir)), 64 * "0", len(SECRET))

    def work(session: Any) -> None:
        with hold(session, lease) as held:
            held.start_trial(trial_id)
            held.finish_trial(trial_id, trial_result(0.876543), protocol(), [file])

    database.write(work)
    return Theirs(posted.json()["id"], trial_id, table(Artifact)[0].id)


def operations(document: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(method, path, operation id, scope) of every operation about one experiment, trial or artifact."""
    return [
        (method.upper(), path, operation["operationId"], operation["security"][0]["key"][0])
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if "_id}" in path and not path.startswith(("/v1/keys", "/v1/projects"))
    ]


def asked(path: str, theirs: Theirs) -> str:
    return path.format(**vars(theirs))


def body(operation: str) -> dict[str, Any]:
    return {"json": BODIES.get(operation, {"name": "mine"} if operation == "updateExperiment" else {})}


def request_of(method: str, operation: str) -> dict[str, Any]:
    return body(operation) if method in ("POST", "PATCH") else {}


@pytest.mark.slow
def test_another_project_s_things_are_not_there(
    openapi: dict[str, Any], ask: Callable[..., Response], theirs: Theirs, table: Callable[[type], list[Any]]
) -> None:
    before = [(row.id, row.state, row.revision, row.fence, row.name) for row in table(Experiment)]
    events = len(table(Event))
    absent = Theirs(ABSENT, ABSENT, ABSENT)
    found = operations(openapi)
    assert len(found) >= 20
    for method, path, operation, scope in found:
        for role in ROLES:
            request = request_of(method, operation)
            answer = ask("ours", role, method, asked(path, theirs), **request)
            nothing = ask("ours", role, method, asked(path, absent), **request)
            where = (role, method, path, answer.text)
            assert answer.status_code == (404 if scope in role else 403), where
            assert answer.status_code == nothing.status_code, where
            assert SECRET not in answer.text, where
            ids = (theirs.experiment_id, theirs.trial_id, theirs.artifact_id)
            if scope in role:
                shown = {answer.json()["detail"].replace(f" {number}", f" {ABSENT}") for number in ids}
                assert nothing.json()["detail"] in shown, where
    assert [(row.id, row.state, row.revision, row.fence, row.name) for row in table(Experiment)] == before
    assert len(table(Event)) == events


def test_no_list_has_them(client: TestClient, ask: Callable[..., Response], theirs: Theirs) -> None:
    lists = (
        "/v1/experiments",
        "/v1/trials",
        "/v1/events",
        "/v1/leaderboards/digits",
        "/v1/tables/senderovich2022/table2",
        "/figures/senderovich2022/vgg",
        "/figures/senderovich2022/vgg.tex",
    )
    searches = (f"/v1/experiments?tag={SECRET}", "/v1/experiments?owner=theirs", "/v1/trials?dataset=digits")
    boards = tuple(f"/v1/leaderboards/digits?format={name}" for name in ("csv", "markdown", "latex"))
    for path in (*lists, *searches, *boards):
        ours = ask("ours", ("read",), "GET", path)
        if ours.status_code == 422 and "?" in path:
            continue  # no such filter
        assert ours.status_code == 200, (path, ours.text)
        assert SECRET not in ours.text, path
        assert "876543" not in ours.text, path
    for path in ("/v1/experiments", "/v1/trials", "/v1/events"):
        assert ask("ours", ("read",), "GET", path).json()["items"] == [], path
    board = ask("ours", ("read",), "GET", "/v1/leaderboards/digits").json()
    assert (board["boards"], board["holes"]) == ([], [])
    narrowed = ask("ours", ("read",), "GET", f"/v1/leaderboards/digits?experiment={theirs.experiment_id}")
    assert narrowed.status_code == 404
    for form in ("", ".svg", ".pdf", ".tex"):
        path = f"/figures/senderovich2022/vgg{form}?experiment={theirs.experiment_id}"
        assert ask("ours", ("read",), "GET", path).status_code == 404, path


def test_metrics_count_what_is_a_project_s_own(
    ask: Callable[..., Response], theirs: Theirs, database: Database
) -> None:
    """Theirs: one experiment, reaped and waiting again, of two trials one finished; how much they ask is not told."""

    def work(session: Any) -> None:
        (seen,) = leases.watch(session)
        leases.greet(session, "worker", 1, 0)
        session.get_one(Trial, theirs.trial_id).run_seconds = 60
        experiment = session.get_one(Experiment, theirs.experiment_id)
        experiment.spec = experiment.spec | {"resources": {"cpus": 1, "gpus": 0.5}}
        session.flush()
        assert leases.reap(session, seen)

    database.write(work)
    told = {
        'ttsv_experiments{state="queued"}': (0, 1),
        'ttsv_trials{state="succeeded"}': (0, 1),
        'ttsv_trials{state="queued"}': (0, 1),
        "ttsv_queue_depth": (0, 1),
        "ttsv_gpu_seconds_total": (0, 30),
        "ttsv_lost_leases_total": (0, 1),
        "ttsv_succeeded_trials_total": (0, 1),
        "ttsv_workers": (1, 1),
    }
    for project, role in (("ours", ("read",)), ("theirs", ("read",)), ("ours", ("admin",))):
        text = ask(project, role, "GET", "/metrics").text
        numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        for name, (none, all_there_is) in told.items():
            expected = none if (project, role) == ("ours", ("read",)) else all_there_is
            assert float(numbers[name]) == expected, (project, role, name)
        assert ("ttsv_http_requests_total" in text) == (role == ("admin",))
    assert ask("ours", ("submit",), "GET", "/metrics").status_code == 403


@pytest.mark.slow
def test_they_and_an_admin_have_them(openapi: dict[str, Any], ask: Callable[..., Response], theirs: Theirs) -> None:
    """Without it the tests above could pass on empty hands."""
    for project, role in (("theirs", ("read",)), ("ours", ("admin",))):
        for method, path, _operation, scope in operations(openapi):
            if method == "GET" and scope == "read" and not path.endswith("/stream"):
                answer = ask(project, role, method, asked(path, theirs))
                assert answer.status_code in (200, 404), (path, answer.text)
                if answer.status_code == 404:
                    assert path.endswith("/{experiment_id}/logs"), answer.text  # no driver wrote one
        assert SECRET in ask(project, role, "GET", "/v1/experiments").text
        assert "876543" in ask(project, role, "GET", "/v1/leaderboards/digits").text
        assert len(ask(project, role, "GET", "/v1/leaderboards/digits").json()["boards"]) == 1


@pytest.mark.parametrize("role", ROLES)
def test_only_an_admin_makes_keys(ask: Callable[..., Response], role: tuple[str, ...]) -> None:
    for method, path, request in (
        ("GET", "/v1/keys", {}),
        ("GET", "/v1/projects", {}),
        ("POST", "/v1/projects", {"json": {"name": "x"}}),
        ("POST", "/v1/keys", {"json": {"project_id": 1, "owner": "x", "scopes": ["admin"]}}),
        ("PUT", "/v1/projects/1", {"json": {"name": "x"}}),
        ("GET", "/v1/projects/1/people", {}),
        ("PUT", "/v1/projects/1/people/ours", {"json": {"weight": 1000}}),
        ("DELETE", "/v1/keys/0123456789abcdef", {}),
    ):
        assert ask("ours", role, method, path, **request).status_code == 403, path


def test_quotas_are_the_project_s(
    ask: Callable[..., Response], database: Database, client: TestClient, settings: Settings
) -> None:
    assert ask("small", ROLES[-1], "GET", "/v1/me").status_code == 200
    project = ask("ops", ("admin",), "GET", "/v1/projects").json()
    small = next(row for row in project if row["name"] == "small")
    changed = ask(
        "ops", ("admin",), "PUT", f"/v1/projects/{small['id']}", json={"name": "small", "max_queued_trials": 3}
    )
    assert changed.status_code == 200
    first = ask("small", ROLES[-1], "POST", "/v1/experiments", json=SPEC)
    assert first.status_code == 201
    second = ask("small", ROLES[-1], "POST", "/v1/experiments", json=SPEC)
    assert second.status_code == 429, second.text
    assert "3 trials" in second.json()["detail"]
    assert second.headers["Retry-After"] == "60"
    for action, request in (("clone", {}), ("extend", {"json": {"grid": {"seed": [5, 6, 7]}}})):
        answer = ask("small", ROLES[-1], "POST", f"/v1/experiments/{first.json()['id']}/{action}", **request)
        assert answer.status_code == 429, (action, answer.text)
    assert ask("large", ROLES[-1], "POST", "/v1/experiments", json=SPEC).status_code == 201
    assert ask("small", ("cancel",), "POST", f"/v1/experiments/{first.json()['id']}/cancel").status_code == 200
    assert ask("small", ROLES[-1], "POST", "/v1/experiments", json=SPEC).status_code == 201
