"""What operators get: request ids, log lines, numbers for Prometheus; and whom the service answers."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from service.api import experiments
from service.database import Experiment, Trial
from service.database.engine import Database
from service.main import create_app
from service.queue import leases
from service.queue.census import Counted, take_census
from service.settings import LogFormat, Settings
from service.settings.logs import JsonFormatter, TextFormatter, about, configure_logging, errors_in
from tests.machinery import Claim, Finish, Submit, Table


class TestRequestIds:
    def test_one_is_made(self, sqlite_api: TestClient) -> None:
        first, second = (sqlite_api.get("/v1/experiments").headers["x-request-id"] for _ in range(2))
        assert first != second
        assert len(first) == 32

    def test_one_is_taken_over(self, sqlite_api: TestClient) -> None:
        response = sqlite_api.get("/v1/trials/7", headers={"X-Request-ID": "trace-1.a:b"})
        assert response.headers["x-request-id"] == response.json()["request_id"] == "trace-1.a:b"

    @pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b'"', b"caf\xe9", b"{json}"])
    def test_but_not_any_text(self, sqlite_api: TestClient, given: bytes) -> None:
        response = sqlite_api.get("/livez", headers={b"X-Request-ID": given})
        assert len(response.headers["x-request-id"]) == 32

    def test_refusals_at_the_door_have_one(self, sqlite_api: TestClient) -> None:
        for response in (
            sqlite_api.post("/v1/experiments", content=b"{", headers={"Content-Type": "application/json"}),
            sqlite_api.get("/livez", headers={"Host": "evil.example"}),
            sqlite_api.get("/nothing"),
        ):
            assert response.json()["request_id"] == response.headers["x-request-id"]

    def test_errors_of_ours_have_one(
        self, sqlite_api: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(experiments, "list_experiments", broken)
        response = sqlite_api.get("/v1/experiments")
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.json()["request_id"] == response.headers["x-request-id"]
        assert "secret detail" in caplog.text, "the log has what the answer hides"


class TestLogs:
    @pytest.fixture
    def lines(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        """What is logged, as JSON lines."""
        found: list[str] = []

        class Keeper(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                found.append(self.format(record))

        keeper = Keeper()
        keeper.setFormatter(JsonFormatter())
        access = logging.getLogger("service.access")
        access.addHandler(keeper)
        access.setLevel(logging.INFO)
        monkeypatch.setattr(access, "disabled", False)  # a library that configures logging may have turned it off
        yield found
        access.removeHandler(keeper)
        access.setLevel(logging.NOTSET)

    def test_every_request_is_a_line(self, sqlite_api: TestClient, lines: list[str]) -> None:
        sqlite_api.get("/v1/experiments/7/trials?limit=3", headers={"X-Request-ID": "r-1"})
        (line,) = map(json.loads, lines)
        assert line.pop("milliseconds") > 0
        assert line.pop("time").endswith("Z")
        assert line.pop("message").startswith("GET /v1/experiments/7/trials 404 ")
        assert line == {
            "level": "info",
            "logger": "service.access",
            "request_id": "r-1",
            "experiment_id": "7",
            "method": "GET",
            "path": "/v1/experiments/7/trials",
            "status": 404,
        }

    def test_lines_say_what_they_are_about(self) -> None:
        record = logging.makeLogRecord(
            {"name": "w", "levelname": "INFO", "msg": "a\nb %d", "args": (7,), "trial_id": 3, "_of_a_library": 1}
        )
        with about(experiment_id=2, request_id=None):
            line = JsonFormatter().format(record)
            text = TextFormatter().format(record)
        assert "\n" not in line
        assert "_of_a_library" not in line
        found = json.loads(line)
        assert (found["message"], found["experiment_id"], found["trial_id"]) == ("a\nb 7", 2, 3)
        assert text.endswith("INFO w: a\nb 7 experiment_id=2 trial_id=3")
        assert "experiment_id" not in JsonFormatter().format(record)

    @pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
    def test_errors_are_found_again(self, formatter: logging.Formatter) -> None:
        lines = [
            formatter.format(logging.makeLogRecord({"name": "a.b", "levelname": level, "msg": f"{level}: it {word}"}))
            for word in ("was", "is")
            for level in ("INFO", "WARNING", "ERROR")
        ]
        assert errors_in("\n".join(["{", "{}", "Traceback", *lines])) == ["ERROR: it was", "ERROR: it is"]

    @pytest.mark.parametrize("form", LogFormat)
    def test_configured(self, form: LogFormat, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        configure_logging(Settings(data_dir=tmp_path, log_format=form, log_level="warning"))
        logging.getLogger("service").info("not this")
        try:
            raise ValueError("what happened")
        except ValueError:
            logging.getLogger("service").exception("this")
        err = capfd.readouterr().err
        assert "not this" not in err
        assert "ValueError: what happened" in err
        if form is LogFormat.JSON:
            (line,) = err.splitlines()
            assert json.loads(line)["level"] == "error"


class TestMetrics:
    def numbers(self, api: TestClient) -> dict[tuple[str, ...], float]:
        """Every sample by its name and labels' values."""
        response = api.get("/metrics")
        assert response.status_code == 200
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }

    def test_the_database(
        self, api: TestClient, submit: Submit, claim: Claim, finish: Finish, database: Database, table: Table
    ) -> None:
        first, second = submit(seeds=3), submit(seeds=2)

        def work(session: Session) -> None:
            for experiment_id, gpus in ((first, 0.5), (second, 2)):
                experiment = session.get_one(Experiment, experiment_id)
                experiment.spec = experiment.spec | {"resources": {"cpus": 1, "gpus": gpus}}
            leases.greet(session, "worker", 1, 0)

        database.write(work)
        lease = claim()
        finish(lease, table(Trial)[0].id)
        claim()
        (seen, other) = database.write(leases.watch)
        database.write(lambda session: leases.reap(session, other))

        def time_spent(session: Session) -> None:
            for trial in session.query(Trial):
                trial.run_seconds = 8.0

        database.write(time_spent)
        found = self.numbers(api)
        assert found["ttsv_database_up",] == 1
        states = {state: found["ttsv_experiments", state] for state in ("queued", "running", "paused")}
        assert states == {"queued": 1, "running": 1, "paused": 0}
        assert (found["ttsv_trials", "queued"], found["ttsv_trials", "succeeded"]) == (4, 1)
        assert found["ttsv_queue_depth",] == 4
        assert found["ttsv_gpu_seconds_total",] == 8 * (3 * 0.5 + 2 * 2)
        assert found["ttsv_lost_leases_total",] == 1
        assert found["ttsv_workers",] == 1
        assert seen.experiment_id == first

    def test_a_sum_in_another_order_is_no_less(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prometheus would take it for a counter that began anew."""
        sums = iter([Counted(0.1 + 0.2 + 0.3, 0, 0), Counted(0.3 + 0.2 + 0.1, 0, 0)])
        monkeypatch.setattr("service.queue.census.counted", lambda *_: next(sums))
        with database.read() as session:
            assert take_census(session).gpu_seconds == take_census(session).gpu_seconds

    def test_requests(self, sqlite_api: TestClient) -> None:
        for experiment_id in (1, 2, 3):
            sqlite_api.get(f"/v1/experiments/{experiment_id}")
        sqlite_api.get("/nothing")
        sqlite_api.request("BREW", "/livez")
        sqlite_api.post("/v1/experiments", content="name: no base", headers={"Content-Type": "application/yaml"})
        sqlite_api.head("/v1/experiments/4")
        found = self.numbers(sqlite_api)
        assert found["ttsv_http_requests_total", "POST", "/v1/experiments", "422"] == 1
        route = "/v1/experiments/{experiment_id}"
        assert found["ttsv_http_requests_total", "GET", route, "404"] == 3
        assert found["ttsv_http_requests_total", "HEAD", route, "404"] == 1
        assert found["ttsv_http_request_seconds_count", "GET", route] == 3
        assert found["ttsv_http_requests_total", "GET", "none", "404"] == 1
        assert [key for key in found if "other" in key]
        assert not [key for key in found if "BREW" in key or "/nothing" in key]

    def test_scrapes_do_not_load_the_database(self, sqlite_api: TestClient) -> None:
        self.numbers(sqlite_api)
        statements: list[str] = []
        engine: Engine = sqlite_api.app.state.database.engine  # type: ignore[attr-defined]
        event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        for _ in range(5):
            self.numbers(sqlite_api)
        assert statements == []

    def test_without_a_database(self, tmp_path: Path) -> None:
        settings = Settings(database_url=f"postgresql://nobody@/nothing?host={tmp_path}", data_dir=tmp_path)
        with TestClient(create_app(settings)) as api:
            found = self.numbers(api)
        assert found["ttsv_database_up",] == 0
        assert ("ttsv_queue_depth",) not in found


class TestHosts:
    def statuses(self, settings: Settings, *hosts: str) -> list[int]:
        with TestClient(create_app(settings)) as api:
            return [api.get("/livez", headers={"Host": host}).status_code for host in hosts]

    def test_loopback_answers_to_its_own_names_only(self, tmp_path: Path) -> None:
        settings = Settings(data_dir=tmp_path, host="127.0.0.1", allowed_hosts=())
        own = ("127.0.0.1", "127.0.0.1:8000", "localhost:1", "LocalHost", "localhost.", "[::1]:8000", "[::1]")
        assert self.statuses(settings, *own) == [200] * len(own)
        others = (
            "testserver",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost@evil.example",
            "::1",
            "a b",
            "[::1",
            "",
        )
        assert self.statuses(settings, *others) == [400] * len(others)

    def test_the_refusal_names_the_setting(self, sqlite_api: TestClient) -> None:
        response = sqlite_api.get("/v1/experiments", headers={"Host": "evil.example:80"})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/problem+json"
        assert "'evil.example:80'" in response.json()["detail"]
        assert "TTSV_ALLOWED_HOSTS" in response.json()["detail"]

    def test_more_names_from_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TTSV_ALLOWED_HOSTS", "ttsv.lab.example, [fd00::1]")
        settings = Settings(data_dir=tmp_path, host="127.0.0.1")
        assert settings.allowed_hosts == ("ttsv.lab.example", "[fd00::1]")
        hosts = ("TTSV.lab.example:443", "[fd00::1]:8000", "localhost", "testserver")
        assert self.statuses(settings, *hosts) == [200, 200, 200, 400]
        monkeypatch.setenv("TTSV_ALLOWED_HOSTS", "*")
        assert self.statuses(Settings(data_dir=tmp_path, host="127.0.0.1"), "evil.example") == [200]

    def test_a_network_address_answers_to_every_name_unless_some_are_listed(self, tmp_path: Path) -> None:
        settings = Settings(data_dir=tmp_path, host="0.0.0.0", trust_network=True, allowed_hosts=())
        assert self.statuses(settings, "ttsv.lab.example") == [200]
        settings = Settings(data_dir=tmp_path, host="0.0.0.0", trust_network=True, allowed_hosts=("ttsv.lab.example",))
        assert self.statuses(settings, "ttsv.lab.example", "evil.example", "localhost") == [200, 400, 200]
