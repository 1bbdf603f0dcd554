"""API keys, scopes, projects and quotas, on SQLite and Postgres."""

import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Connection, event, update
from sqlalchemy.orm import Session

from service.access import keys
from service.access.security import Principal, Scope, hash_secret, installation_secret, new_key, split_key
from service.api.http.authentication import Watch
from service.database import ApiKey, Trial, now
from service.database.engine import Database
from service.errors import ConflictError, UserError
from service.main import create_app
from service.queue.trials import HeldExperiment
from service.settings import Settings
from tests.examples import mostly_sqlite
from tests.held import under
from tests.machinery import Claim, Table

SPEC = {
    "name": "grid",
    "base": {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 1}},
    "grid": {"seed": [0, 1]},
}


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    return Settings(database_url=database_url, data_dir=tmp_path / "data", host="127.0.0.1", require_keys=True)


@pytest.fixture
def make(database: Database, settings: Settings) -> Callable[..., str]:
    """Makes a key and gives its text."""

    def make(project: str = "vision", *scopes: str, owner: str = "ada", **options: Any) -> str:
        key = new_key(installation_secret(settings.data_dir))

        def work(session: Any) -> None:
            found = keys.project_named(session, project) or keys.create_project(session, project)
            wanted = {Scope(scope) for scope in scopes or ("read", "submit", "cancel")}
            keys.add_key(session, found.id, key, owner=owner, scopes=wanted, **options)

        database.write(work)
        return key.text

    return make


@pytest.fixture
def guarded(settings: Settings) -> Iterator[TestClient]:
    """The API that asks for keys."""
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class TestKeys:
    def test_a_key_is_its_id_and_a_secret(self) -> None:
        key = new_key(b"here")
        assert split_key(key.text) == (key.id, key.text[len("ttsv_") + 17 :])
        assert key.text != new_key(b"here").text
        assert split_key(key.text + "x") is None
        assert split_key(key.text.upper()) is None

    def test_another_installation_has_other_hashes(self) -> None:
        assert hash_secret(b"here", "secret") != hash_secret(b"there", "secret")

    def test_the_secret_is_made_once_and_is_ours_alone(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(installation_secret, [tmp_path / "data"] * 8))
        assert len(set(found)) == 1
        assert len(found[0]) == 32
        assert [path.name for path in (tmp_path / "data").iterdir()] == ["key-secret"]
        assert stat.S_IMODE((tmp_path / "data" / "key-secret").stat().st_mode) == 0o600

    def test_no_secret_is_stored(self, make: Callable[..., str], table: Callable[[type], list[Any]]) -> None:
        text = make()
        row = table(ApiKey)[0]
        parts = split_key(text)
        assert parts is not None
        assert parts[1] not in str(vars(row))


class TestGuard:
    @pytest.mark.parametrize(
        "header",
        [None, "Bearer", "Bearer nonsense", "Basic YTpi", "Bearer ttsv_0123456789abcdef_" + 43 * "x"],
    )
    def test_without_a_key_nothing_opens(self, guarded: TestClient, header: str | None) -> None:
        answer = guarded.get("/v1/experiments", headers={"Authorization": header} if header else {})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"] == "application/problem+json"

    def test_where_none_is_asked_for_one_that_is_sent_counts(self, api: TestClient, make: Callable[..., str]) -> None:
        """And what is no key of ours, as a proxy in front may send, does not."""
        reader, writer = bearer(make("vision", "read")), bearer(make("vision", "submit", owner="grace"))
        assert api.post("/v1/experiments", json=SPEC, headers=reader).status_code == 403
        posted = api.post("/v1/experiments", json=SPEC, headers=writer)
        assert posted.json()["owner"] == "grace"
        assert api.post("/v1/experiments", json=SPEC).json()["owner"] is None
        cut = api.post("/v1/experiments", json=SPEC, headers=bearer("ttsv_768b2c93f43cee89"))
        assert (cut.status_code, "this is no key: a key is ttsv_<16" in cut.json()["detail"]) == (401, True)
        seen = api.get("/v1/experiments", headers=reader).json()["items"]
        assert [experiment["owner"] for experiment in seen] == ["grace"]
        unknown = bearer("ttsv_0123456789abcdef_" + 43 * "x")
        assert api.get("/v1/experiments", headers=unknown).status_code == 401
        for foreign in (bearer("nonsense"), {"Authorization": "Basic YTpi"}):
            assert len(api.get("/v1/experiments", headers=foreign).json()["items"]) == 2

    def test_health_needs_none(self, guarded: TestClient) -> None:
        assert guarded.get("/livez").status_code == 200
        assert guarded.get("/readyz").status_code == 200

    def test_a_key_opens(self, guarded: TestClient, make: Callable[..., str]) -> None:
        answer = guarded.get("/v1/me", headers=bearer(make(owner="grace")))
        assert answer.json()["name"] == "grace"

    def test_a_changed_secret_does_not(self, guarded: TestClient, make: Callable[..., str]) -> None:
        key = make()
        wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
        assert guarded.get("/v1/me", headers=bearer(wrong)).status_code == 401

    @pytest.mark.parametrize("scope", Scope)
    def test_every_key_says_whose_it_is(self, guarded: TestClient, make: Callable[..., str], scope: Scope) -> None:
        answer = guarded.get("/v1/me", headers=bearer(make("vision", scope)))
        assert answer.status_code == 200
        assert answer.json()["scopes"] == [scope]

    def test_one_that_expired_before_is_not_made(self, guarded: TestClient, make: Callable[..., str]) -> None:
        admin = bearer(make("ops", "admin"))
        body = {"project_id": 1, "owner": "ada", "scopes": ["read"]}
        for moment, status in ((now() - timedelta(seconds=1), 422), (now() + timedelta(days=1), 201)):
            made = guarded.post("/v1/keys", json=body | {"expires_at": moment.isoformat()}, headers=admin)
            assert made.status_code == status, made.text
            if status == 422:
                (error,) = made.json()["errors"]
                assert error["field"] == "expires_at"
                assert "must be in the future" in error["message"]

    def test_lists_have_pages(self, guarded: TestClient, make: Callable[..., str]) -> None:
        admin = bearer(make("p0", "admin"))
        for number in range(1, 5):
            make(f"p{number}", "read")
        for path, name in (("/v1/keys", "id"), ("/v1/projects", "name")):
            every = [row[name] for row in guarded.get(path, headers=admin).json()]
            assert len(every) == 5
            found, url, pages = [], f"{path}?limit=2", 0
            while url:
                answer = guarded.get(url, headers=admin)
                found += [row[name] for row in answer.json()]
                url, pages = answer.links.get("next", {}).get("url", ""), pages + 1
                etag = {"If-None-Match": answer.headers["ETag"]}
                assert guarded.get(answer.url, headers=admin | etag).status_code == 304
            assert (found, pages) == (every, 3)
            refused = guarded.get(f"{path}?cursor=x", headers=admin)
            assert refused.status_code == 422
            assert refused.json()["errors"][0]["field"] == "cursor"

    def test_where_none_is_valid_the_api_does_not_begin(
        self, database: Database, settings: Settings, make: Callable[..., str]
    ) -> None:
        elsewhere = settings.model_copy(update={"host": "0.0.0.0"})
        make(expires_at=now() - timedelta(seconds=1))
        with pytest.raises(UserError, match=r"and none is valid; make one with `ttsv keys create"):
            keys.refuse_without_keys(database, elsewhere)
        make(expires_at=now() + timedelta(days=1))
        keys.refuse_without_keys(database, elsewhere)

    def test_without_the_secret_none_is_valid_and_no_other_is_made(
        self, database: Database, settings: Settings, guarded: TestClient, make: Callable[..., str]
    ) -> None:
        """Put back from a backup it opens all that it opened."""
        key, secret = make(), settings.data_dir / "key-secret"
        aside = secret.rename(settings.data_dir / "aside")
        refused = guarded.get("/v1/me", headers=bearer(key))
        assert (refused.status_code, secret.exists()) == (401, False)
        assert "key-secret in the service's data folder" in refused.json()["detail"]
        with pytest.raises(UserError, match=r"none opens anything without .*/key-secret"):
            keys.refuse_without_keys(database, settings.model_copy(update={"host": "0.0.0.0"}))
        aside.rename(secret)
        assert guarded.get("/v1/me", headers=bearer(key)).status_code == 200

    def test_nor_does_who_makes_a_key_without_one_make_another(
        self, database: Database, settings: Settings, api: TestClient, make: Callable[..., str]
    ) -> None:
        """Where none is asked for: the keys there are would open nothing from then on, and nobody would be told."""
        key, secret = make(), settings.data_dir / "key-secret"
        body = {"project_id": 1, "owner": "grace", "scopes": ["read"]}
        aside = secret.rename(settings.data_dir / "aside")
        refused = api.post("/v1/keys", json=body)
        assert (refused.status_code, secret.exists()) == (409, False)
        assert refused.json()["type"] == "/problems#secret-missing"
        assert "Put the file back from a backup; if it is lost, revoke the keys" in refused.json()["detail"]
        assert len(api.get("/v1/keys").json()) == 1
        aside.rename(secret)
        assert api.post("/v1/keys", json=body).status_code == 201
        assert api.get("/v1/me", headers=bearer(key)).status_code == 200
        for one in api.get("/v1/keys").json():
            api.delete(f"/v1/keys/{one['id']}")
        secret.unlink()  # lost for good
        made = api.post("/v1/keys", json=body).json()["key"]
        assert api.get("/v1/me", headers=bearer(made)).json()["name"] == "grace"

    def test_where_nothing_can_be_stored_what_there_is_is_read(
        self, settings: Settings, make: Callable[..., str]
    ) -> None:
        """When a key was used last is not worth a refusal, as on a standby, or beside a full disk."""
        application, headers = create_app(settings), bearer(make())

        def read_only(connection: Connection) -> None:
            on_sqlite = connection.dialect.name == "sqlite"
            connection.exec_driver_sql("PRAGMA query_only=ON" if on_sqlite else "SET TRANSACTION READ ONLY")

        event.listen(application.state.database.engine, "begin", read_only)
        with TestClient(application) as client:
            assert client.get("/v1/experiments", headers=headers).json() == {"items": [], "next": None}
            assert client.post("/v1/experiments", json=SPEC, headers=headers).status_code == 503

    def test_while_the_database_is_away_it_begins(self, tmp_path: Path) -> None:
        """Who starts it again each time would give it up before the database is back."""
        away = f"postgresql://nobody@/nothing?host={tmp_path}"
        with TestClient(create_app(Settings(database_url=away, data_dir=tmp_path, host="0.0.0.0"))) as api:
            assert (api.get("/livez").status_code, api.get("/readyz").status_code) == (200, 503)

    def test_an_expired_one_does_not(self, guarded: TestClient, make: Callable[..., str]) -> None:
        key = make(expires_at=now() - timedelta(seconds=1))
        assert guarded.get("/v1/me", headers=bearer(key)).status_code == 401

    def test_a_revoked_one_does_not(self, guarded: TestClient, make: Callable[..., str]) -> None:
        admin, key = make("ops", "admin"), make()
        parts = split_key(key)
        assert parts is not None
        for _ in range(2):
            answer = guarded.delete(f"/v1/keys/{parts[0]}", headers=bearer(admin))
            assert answer.status_code == 200
            assert answer.json()["revoked_at"] is not None
        assert guarded.get("/v1/me", headers=bearer(key)).status_code == 401

    def test_a_scope_that_is_missing_is_named(self, guarded: TestClient, make: Callable[..., str]) -> None:
        key = make("vision", "read")
        answer = guarded.post("/v1/experiments", json=SPEC, headers=bearer(key))
        assert answer.status_code == 403
        assert "scope submit" in answer.json()["detail"]
        assert guarded.get("/v1/keys", headers=bearer(key)).status_code == 403

    def test_its_last_use_is_known(
        self, guarded: TestClient, make: Callable[..., str], table: Callable[[type], list[Any]]
    ) -> None:
        key = make()
        assert table(ApiKey)[0].last_used_at is None
        guarded.get("/v1/me", headers=bearer(key))
        assert table(ApiKey)[0].last_used_at is not None

    def test_a_made_key_opens(self, guarded: TestClient, make: Callable[..., str]) -> None:
        admin = bearer(make("ops", "admin"))
        project = guarded.post("/v1/projects", json={"name": "speech"}, headers=admin).json()
        body = {"project_id": project["id"], "owner": "bob", "scopes": ["read"]}
        made = guarded.post("/v1/keys", json=body, headers=admin)
        assert made.status_code == 201
        me = guarded.get("/v1/me", headers=bearer(made.json()["key"])).json()
        assert me == {"name": "bob", "project_id": project["id"], "scopes": ["read"]}
        assert "key" not in guarded.get("/v1/keys", headers=admin).json()[0]

    def test_a_project_s_name_is_taken_once(self, guarded: TestClient, make: Callable[..., str]) -> None:
        admin = bearer(make("ops", "admin"))
        answer = guarded.post("/v1/projects", json={"name": "ops"}, headers=admin)
        assert answer.status_code == 409
        assert answer.json()["errors"][0]["field"] == "name"

    @pytest.mark.parametrize("name", ["Vision", "vision ", "  VISION", "\uff56ision"])
    def test_what_people_take_for_another_project_s_name_is_taken(
        self, guarded: TestClient, make: Callable[..., str], name: str
    ) -> None:
        admin = bearer(make("vision", "admin"))
        answer = guarded.post("/v1/projects", json={"name": name}, headers=admin)
        assert (answer.status_code, answer.json()["detail"]) == (409, "there is a project 'vision' already")
        # Its own name can be written in another way.
        assert guarded.put("/v1/projects/1", json={"name": name.strip()}, headers=admin).status_code == 200
        assert guarded.post("/v1/projects", json={"name": " "}, headers=admin).status_code == 422

    def test_of_two_that_take_a_name_at_once_the_second_is_told(self, database: Database) -> None:
        def second() -> None:
            database.write(lambda session: keys.create_project(session, "Speech"))

        with ThreadPoolExecutor(1) as pool:

            def first(session: Session) -> Future[None]:
                keys.create_project(session, "speech")
                other = pool.submit(second)
                time.sleep(0.2)
                assert not other.done()  # it waits for what is not committed yet
                return other

            with pytest.raises(ConflictError, match="there is a project 'speech' already"):
                database.write(first).result(10)

    @pytest.mark.parametrize(
        "path",
        ["experiments/1/stream", "stream?experiment=1", "experiments/1/logs?follow=true"],
        ids=["one", "all", "log"],
    )
    def test_what_is_streamed_to_it_ends_with_it(
        self, guarded: TestClient, make: Callable[..., str], monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        """Though the experiment goes on, and nothing happens that could be told."""
        monkeypatch.setattr(Watch, "AGAIN_SECONDS", 0.0)
        subscriptions = guarded.app.state.subscriptions  # type: ignore[attr-defined]
        subscriptions.every, subscriptions.quiet = 0.02, 0.05
        key, other = make(), make()
        assert guarded.post("/v1/experiments", json=SPEC, headers=bearer(key)).status_code == 201
        with ThreadPoolExecutor(1) as pool:
            streamed = pool.submit(guarded.get, f"/v1/{path}", headers=bearer(key))
            time.sleep(0.2)
            assert not streamed.done()
            guarded.delete(f"/v1/keys/{key.split('_')[1]}", headers=bearer(make("vision", "admin")))
            ended = wait([streamed], 3).done
            monkeypatch.setattr(Watch, "holds", AsyncMock(return_value=False))  # ends what is left over
            guarded.post("/v1/experiments/1/cancel", headers=bearer(other))
            assert streamed.result(10).status_code == 200
        assert ended


class TestPeople:
    """Whose keys a project has, and what they weigh beside each other."""

    @pytest.fixture
    def admin(self, make: Callable[..., str]) -> dict[str, str]:
        """Of the project 1; those of the project 2 are not in order, and one has two keys."""
        admin = bearer(make("ops", "admin", owner="root"))
        for owner in ("bob", "ada", "a/b c%?#", "ada"):
            make(owner=owner)
        return admin

    def people(self, api: TestClient, admin: dict[str, str], project: int = 2) -> dict[str, float]:
        answer = api.get(f"/v1/projects/{project}/people", headers=admin)
        assert answer.status_code == 200
        return {row["owner"]: row["weight"] for row in answer.json()}

    def test_each_weighs_one_until_another_weight_is_set(self, guarded: TestClient, admin: dict[str, str]) -> None:
        assert self.people(guarded, admin) == {"a/b c%?#": 1, "ada": 1, "bob": 1}
        for weight in (3, 0.5, 0.5):
            changed = guarded.put("/v1/projects/2/people/ada", json={"weight": weight}, headers=admin)
            assert (changed.status_code, changed.json()) == (200, {"owner": "ada", "weight": weight})
        slashed = guarded.put("/v1/projects/2/people/a%2Fb%20c%25%3F%23", json={"weight": 1000}, headers=admin)
        assert slashed.json() == {"owner": "a/b c%?#", "weight": 1000}
        assert self.people(guarded, admin) == {"a/b c%?#": 1000, "ada": 0.5, "bob": 1}
        assert self.people(guarded, admin, 1) == {"root": 1}

    def test_of_another_project_too_it_is_another_weight(
        self, guarded: TestClient, admin: dict[str, str], make: Callable[..., str]
    ) -> None:
        make("speech", owner="ada")
        guarded.put("/v1/projects/3/people/ada", json={"weight": 7}, headers=admin)
        assert (self.people(guarded, admin)["ada"], self.people(guarded, admin, 3)) == (1, {"ada": 7})

    @mostly_sqlite
    @pytest.mark.parametrize(
        ("body", "field", "message"),
        [
            ({"weight": 0}, "weight", "above 0"),
            ({"weight": 1001}, "weight", "at most 1000"),
            ({"weight": True}, "weight", "number"),
            ({"weight": None}, "weight", "number"),
            ({}, "weight", "required"),
            ({"weight": 2, "wait": 3}, "wait", "unknown"),
        ],
        ids=str,
    )
    def test_what_is_no_weight_is_refused(
        self, guarded: TestClient, admin: dict[str, str], body: dict[str, Any], field: str, message: str
    ) -> None:
        answer = guarded.put("/v1/projects/2/people/ada", json=body, headers=admin)
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["field"]) == (422, field)
        assert message in error["message"]
        assert self.people(guarded, admin)["ada"] == 1

    def test_who_is_not_there_is_told(self, guarded: TestClient, admin: dict[str, str]) -> None:
        for method, path in (("GET", ""), ("PUT", "/ada")):
            body = {"weight": 2} if method == "PUT" else None
            answer = guarded.request(method, f"/v1/projects/9/people{path}", json=body, headers=admin)
            assert (answer.status_code, answer.json()["detail"]) == (404, "there is no project 9")
        misspelt = guarded.put("/v1/projects/2/people/adda", json={"weight": 2}, headers=admin)
        told = "project 'vision' has no key of 'adda': make one, or name who has one"
        assert (misspelt.status_code, misspelt.json()["detail"]) == (404, told)
        unseen = guarded.put("/v1/projects/2/people/%20", json={"weight": 2}, headers=admin)
        assert (unseen.status_code, unseen.json()["errors"][0]["field"]) == (422, "owner")

    def test_their_list_has_pages(self, guarded: TestClient, admin: dict[str, str]) -> None:
        first = guarded.get("/v1/projects/2/people?limit=2", headers=admin)
        second = guarded.get(first.links["next"]["url"], headers=admin)
        assert [[row["owner"] for row in page.json()] for page in (first, second)] == [["a/b c%?#", "ada"], ["bob"]]
        assert "next" not in second.links

    def test_whose_keys_are_revoked_stays_while_experiments_may_wait(
        self, guarded: TestClient, admin: dict[str, str], make: Callable[..., str]
    ) -> None:
        key = make(owner="eve")
        guarded.delete(f"/v1/keys/{key.split('_')[1]}", headers=admin)
        assert guarded.put("/v1/projects/2/people/eve", json={"weight": 2}, headers=admin).status_code == 200
        assert self.people(guarded, admin)["eve"] == 2

    def test_of_two_that_set_the_first_weight_at_once_one_is_the_last(self, database: Database, admin: Any) -> None:
        with ThreadPoolExecutor(4) as pool:
            weights = [2.0, 3.0, 4.0, 5.0]
            list(pool.map(lambda each: database.write(lambda s: keys.weigh(s, 2, "bob", each).weight), weights))
        with database.read() as session:
            assert {row.owner: row.weight for row in keys.list_people(session, 2)}["bob"] in weights


class TestStart:
    def test_an_open_address_needs_a_key_first(
        self, database_url: str, tmp_path: Path, make: Callable[..., str]
    ) -> None:
        settings = Settings(database_url=database_url, data_dir=tmp_path / "data", host="0.0.0.0")
        assert settings.keys_required
        with pytest.raises(UserError, match="ttsv keys create"):
            create_app(settings)
        make()
        with TestClient(create_app(settings)) as client:
            assert client.get("/livez").status_code == 200

    def test_an_open_address_without_asking_for_keys_is_refused(self, tmp_path: Path) -> None:
        settings = Settings(data_dir=tmp_path, host="0.0.0.0", require_keys=False)
        with pytest.raises(UserError, match="TTSV_TRUST_NETWORK"):
            create_app(settings)

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
    def test_loopback_asks_for_none(self, host: str) -> None:
        assert not Settings(host=host).keys_required


class TestQuota:
    def test_usage_counts_open_trials_and_gpu_hours(self, database: Database, make: Callable[..., str]) -> None:
        make()
        with database.read() as session:
            project = keys.project_named(session, "vision")
            assert project is not None
            assert keys.usage(session, project.id) == keys.Usage(0, 0.0)

    def test_usage_is_that_of_its_trials(
        self, guarded: TestClient, make: Callable[..., str], database: Database, claim: Claim, table: Table
    ) -> None:
        key = make()
        spec = {"name": "some", "base": SPEC["base"], "grid": {"seed": [0, 1, 2]}, "resources": {"gpus": 0.5}}
        assert guarded.post("/v1/experiments", json=spec, headers=bearer(key)).status_code == 201
        lease, (first, second, _) = claim(), table(Trial)
        for trial in (first, second):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.fail_trial, first.id, "error", "no"))
        database.write(lambda session: session.execute(update(Trial).values(run_seconds=2400.0)))
        with database.read() as session:
            used = keys.usage(session, 1)
        assert used.open_trials == 2
        assert used.gpu_hours == pytest.approx(1.0)

    @pytest.mark.parametrize("quota", [{"max_gpu_hours": 0}, {"max_queued_trials": 0}], ids=str)
    def test_a_search_is_held_to_it_as_a_grid_is(
        self, guarded: TestClient, make: Callable[..., str], quota: dict[str, int]
    ) -> None:
        key, admin = make(), make("ops", "admin")
        guarded.put("/v1/projects/1", json={"name": "vision", **quota}, headers=bearer(admin))
        search = {"algorithm": "random", "trials": 9, "space": {"training.lr": {"uniform": [0.01, 0.1]}}}
        for spec in (SPEC, {"name": "search", "base": SPEC["base"], "search": search}):
            assert guarded.post("/v1/experiments", json=spec, headers=bearer(key)).status_code == 429

    def test_a_search_that_was_admitted_may_go_on(self, guarded: TestClient, make: Callable[..., str]) -> None:
        key, admin = make(), make("ops", "admin")
        guarded.put("/v1/projects/1", json={"name": "vision", "max_queued_trials": 2}, headers=bearer(admin))
        search = {"algorithm": "random", "trials": 9, "space": {"training.lr": {"uniform": [0.01, 0.1]}}}
        spec = {"name": "search", "base": SPEC["base"], "search": search}
        posted = guarded.post("/v1/experiments", json=spec, headers=bearer(key))
        path = f"/v1/experiments/{posted.json()['id']}"
        assert guarded.post(f"{path}/cancel", headers=bearer(key)).status_code == 200
        again = guarded.post(f"{path}/retry", json={"states": ["cancelled"]}, headers=bearer(key))
        assert (again.status_code, again.json().get("state")) == (200, "queued"), again.text

    def test_waiting_is_advised_where_it_helps(self, guarded: TestClient, make: Callable[..., str]) -> None:
        key, admin = make(), make("ops", "admin")
        guarded.put("/v1/projects/1", json={"name": "vision", "max_queued_trials": 2}, headers=bearer(admin))
        told = []
        for seeds in (2, 2, 3):
            spec = {"name": "some", "base": SPEC["base"], "grid": {"seed": [*range(seeds)]}}
            told.append(guarded.post("/v1/experiments", json=spec, headers=bearer(key)))
        assert [answer.status_code for answer in told] == [201, 429, 429]
        assert [answer.headers.get("Retry-After") for answer in told] == [None, "60", "3600"]
        assert "; wait for some to finish, or" in told[1].json()["detail"]
        assert "2 are, and this adds 3; post fewer, or" in told[2].json()["detail"]

    def test_nobody_s_requests_have_none(self, database: Database) -> None:
        anyone = Principal("anonymous", None, frozenset(Scope))
        with database.read() as session:
            keys.check_quota(session, anyone, 10**9)
