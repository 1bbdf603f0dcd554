"""Attempts at a trial: each with its place, its environment and what it used, the newest kept; and their silence."""

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, func, select, update

from service.database import Attempt, Environment, Trial, now
from service.database.engine import Database
from service.database.experiments import ResourceSeries
from service.queue import attempts, nodes
from service.queue.cluster import Node
from service.queue.leases import Lease
from service.queue.trials import HeldExperiment
from tests.held import under, unfinished_trials

ENVIRONMENT = {"host": "node-1", "packages": {"torch": "2"}, "git_diff": "+one\n"}
SERIES: ResourceSeries = {
    "interval": 1.0,
    "seconds": [1.0, 2.0],
    "cpu": [99.0, 101.5],
    "memory": [100.0, 120.0],
    "gpu": [None, 50.0],
    "gpu_memory": [None, 7.0],
}


@pytest.fixture
def begun(
    database: Database, submit: Callable[..., int], claim: Callable[..., Lease]
) -> tuple[Lease, int, Callable[..., None]]:
    """A lease, a trial, and what starts it once more."""
    submit(seeds=1)
    lease = claim()
    with database.read() as session:
        (trial,) = unfinished_trials(session, lease)

    def start(place: str = "node-1, GPU 0", environment: dict[str, Any] | None = ENVIRONMENT) -> None:
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.place_trial, trial.id, place, environment))

    return lease, trial.id, start


def test_a_place_is_cut_where_its_cards_have_long_names(database: Database, begun: Any) -> None:
    """PostgreSQL refuses what is too long for its column, and the trial would fail for it."""
    _, trial_id, start = begun
    start("node-1, GPU " + ", ".join(["GPU-c07f3f5e-0ed5-4b8f-8a0e-0d5a5f4b2b8d"] * 8))
    with database.read() as session:
        assert len(session.get_one(Trial, trial_id).node or "") == 200
        assert [len(one.place) for one in attempts.listed(session, trial_id)] == [200]


def test_each_start_is_one(database: Database, begun: Any) -> None:
    lease, trial_id, start = begun
    start()
    start()  # the reply to COMMIT was lost: said again
    database.write(under(lease, HeldExperiment.record_resources, trial_id, SERIES))
    database.write(under(lease, HeldExperiment.lose_trial, trial_id, "its process died"))
    start("node-2", ENVIRONMENT | {"host": "node-2"})
    database.write(under(lease, HeldExperiment.lose_trial, trial_id, "its node died", charged=False))
    start("node-3", None)
    with database.read() as session:
        found = attempts.listed(session, trial_id)
        assert [(one.number, one.place) for one in found] == [(1, "node-1, GPU 0"), (2, "node-2"), (3, "node-3")]
        assert [one.environment and one.environment["host"] for one in found] == ["node-1", "node-2", None]
        assert [one.resources for one in attempts.listed(session, trial_id, resources=True)] == [SERIES, None, None]
        assert session.scalar(select(func.count()).select_from(Environment)) == 2


def test_starts_are_numbered_as_they_come_by_whatever_clock(database: Database, begun: Any) -> None:
    """The next driver may run where the clock is behind; its attempt would else be another first one."""
    lease, trial_id, start = begun
    start()
    database.write(under(lease, HeldExperiment.lose_trial, trial_id, "its driver died", charged=False))
    behind = now() - timedelta(hours=1)
    database.write(under(lease, HeldExperiment.start_trial, trial_id, behind))
    for _ in range(2):  # the reply to COMMIT was lost: said again
        database.write(under(lease, HeldExperiment.place_trial, trial_id, "node-2"))
    with database.read() as session:
        assert [(one.number, one.place) for one in attempts.listed(session, trial_id)] == [
            (1, "node-1, GPU 0"),
            (2, "node-2"),
        ]


def test_one_that_dies_for_ever_leaves_no_more(database: Database, begun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MOST_ATTEMPTS", 3)
    lease, trial_id, start = begun
    for _ in range(6):
        start()
        database.write(under(lease, HeldExperiment.lose_trial, trial_id, "its process died"))
    start()
    with database.read() as session:
        assert [one.number for one in attempts.listed(session, trial_id)] == [5, 6, 7]


def test_a_trial_of_one_attempt_took_as_long_as_its_moments_say(database: Database, begun: Any) -> None:
    lease, trial_id, start = begun
    start()
    database.write(under(lease, HeldExperiment.fail_trial, trial_id, "error", "it failed"))
    with database.read() as session:
        trial = session.get_one(Trial, trial_id)
        assert trial.started_at is not None
        assert trial.finished_at is not None
        assert trial.run_seconds == (trial.finished_at - trial.started_at).total_seconds()


def test_what_is_no_more_running_is_not_recorded(database: Database, begun: Any) -> None:
    lease, trial_id, start = begun
    start()
    database.write(under(lease, HeldExperiment.fail_trial, trial_id, "error", "it failed"))
    database.write(under(lease, HeldExperiment.record_resources, trial_id, SERIES))
    with database.read() as session:
        assert session.scalars(select(Attempt.resources)).all() == [None]


def test_the_api_serves_them(api: TestClient, database: Database, begun: Any) -> None:
    lease, trial_id, start = begun
    start()
    database.write(under(lease, HeldExperiment.record_resources, trial_id, SERIES))
    (attempt,) = api.get(f"/v1/trials/{trial_id}/attempts").json()["items"]
    assert (attempt["number"], attempt["place"], attempt["environment"]) == (1, "node-1, GPU 0", ENVIRONMENT)
    (used,) = api.get(f"/v1/trials/{trial_id}/resources").json()["items"]
    assert (used["interval"], used["number"]) == (1.0, 1)
    assert used["points"] == [
        {"seconds": 1.0, "cpu": 99.0, "memory": 100.0, "gpu": None, "gpu_memory": None},
        {"seconds": 2.0, "cpu": 101.5, "memory": 120.0, "gpu": 50.0, "gpu_memory": 7.0},
    ]
    for what in ("attempts", "resources"):
        assert api.get(f"/v1/trials/999/{what}").status_code == 404


@pytest.mark.parametrize(
    ("asked", "longest_pause", "limit"),
    [(None, 0.0, 1800.0), (None, 180.0, 1800.0), (None, 181.0, 1810.0), (77.0, 181.0, 77.0), (7200.0, 0.0, 7200.0)],
)
def test_it_hangs_after_what_its_spec_says_or_ten_pauses(
    asked: float | None, longest_pause: float, limit: float
) -> None:
    assert attempts.hung_seconds(asked, longest_pause) == limit


def told(api: TestClient, path: str) -> Any:
    return api.get(path).raise_for_status().json()


def begin_long_ago(session: Any) -> None:
    """Has the attempt have begun 26 minutes ago."""
    began = now() - timedelta(minutes=26, seconds=0.5)
    session.execute(update(Trial).values(started_at=began))
    session.execute(update(Attempt).values(started_at=began))


class TestSilence:
    """What is said of a trial while it runs: when it last reported, and how long it may say nothing."""

    @staticmethod
    def of(answer: dict[str, Any]) -> tuple[float, float]:
        """Seconds from the attempt's beginning to the last report, and those after which it counts as hung."""
        last, began = (datetime.fromisoformat(answer[name]) for name in ("last_report_at", "started_at"))
        return (last - began).total_seconds(), answer["hung_after"]

    def test_it_follows_the_reports_of_the_attempt_that_runs(
        self, api: TestClient, database: Database, begun: Any
    ) -> None:
        lease, trial_id, start = begun
        address = f"/v1/trials/{trial_id}"
        nothing = {"last_report_at": None, "hung_after": None}
        assert told(api, f"{address}?fields=last_report_at,hung_after") == nothing  # it waits
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        assert self.of(told(api, address)) == (0.0, 1800.0)  # its process has not said where it is
        start()
        assert self.of(told(api, address)) == (0.0, 1800.0)
        paced: ResourceSeries = {**SERIES, "pace": {"reported": 4000.5, "longest_pause": 300.0}}
        database.write(under(lease, HeldExperiment.record_resources, trial_id, paced))
        assert self.of(told(api, address)) == (4000.5, 3000.0)
        (listed,) = told(api, "/v1/trials")["items"]
        assert self.of(listed) == (4000.5, 3000.0)
        assert told(api, "/v1/trials?fields=hung_after")["items"] == [{"hung_after": 3000.0}]
        assert "hung_after" not in told(api, "/v1/trials?fields=id,state")["items"][0]
        database.write(under(lease, HeldExperiment.record_resources, trial_id, SERIES))  # of an older driver
        assert self.of(told(api, address)) == (0.0, 1800.0)
        database.write(under(lease, HeldExperiment.record_resources, trial_id, paced))
        database.write(under(lease, HeldExperiment.lose_trial, trial_id, "it reported nothing for 3000 s"))
        assert told(api, f"{address}?fields=last_report_at,hung_after") == nothing
        start("node-2")  # begins anew, at its own pace
        assert self.of(told(api, address)) == (0.0, 1800.0)
        database.write(under(lease, HeldExperiment.fail_trial, trial_id, "error", "it failed"))
        assert told(api, f"{address}?fields=last_report_at,hung_after") == nothing

    def test_what_its_spec_says_holds(
        self, api: TestClient, database: Database, submit: Callable[..., int], claim: Callable[..., Lease]
    ) -> None:
        base = {"dataset": "digits", "model": "small-cnn"}
        spec = {"name": "impatient", "base": base, "grid": {"seed": [0, 1]}, "hung_after": 77.5}
        api.post("/v1/experiments", json=spec).raise_for_status()
        submit(seeds=1)
        for trial_id in (2, 3):
            database.write(under(claim(), HeldExperiment.start_trial, trial_id))
        found = told(api, "/v1/trials?sort=id")["items"]
        assert [trial["hung_after"] for trial in found] == [None, 77.5, 1800.0]

    def test_one_that_lives_is_within_its_time_though_its_reports_are_told_late(
        self, api: TestClient, database: Database, claim: Callable[..., Lease]
    ) -> None:
        spec = {"name": "impatient", "base": {"dataset": "digits", "model": "small-cnn"}, "hung_after": 20}
        api.post("/v1/experiments", json=spec).raise_for_status()
        lease = claim()
        database.write(under(lease, HeldExperiment.start_trial, 1))

        def silent(seconds: float) -> float:
            """How long it is said to be silent, begun so long ago and never told of since."""
            began = now() - timedelta(seconds=seconds)
            database.write(lambda session: session.execute(update(Trial).values(started_at=began)))
            last = datetime.fromisoformat(told(api, "/v1/trials/1")["last_report_at"])
            return (now() - last).total_seconds()

        assert silent(15) == pytest.approx(15, abs=2)
        assert silent(29) == pytest.approx(20, abs=2)
        assert silent(300) == pytest.approx(270, abs=2), "nobody watches it: its driver may be dead"

    def test_nothing_is_asked_of_trials_that_do_not_run(
        self, database: Database, begun: Any, submit: Callable[..., int]
    ) -> None:
        """Two statements for those that do, however many others there are."""
        _, trial_id, start = begun
        submit(seeds=5)
        statements: list[str] = []

        def ask(session: Any) -> set[int]:
            trials = session.scalars(select(Trial)).all()
            statements.clear()
            event.listen(session.connection(), "before_cursor_execute", note)
            return set(attempts.silences(session, trials))

        def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            statements.append(statement)

        with database.read() as session:
            assert (ask(session), statements) == (set(), [])
        start()
        with database.read() as session:
            assert (ask(session), len(statements)) == ({trial_id}, 2)

    def test_the_nodes_say_it_of_what_runs_on_them(self, api: TestClient, database: Database, begun: Any) -> None:
        lease, trial_id, start = begun
        node = Node("n" * 56, "node-1", "10.0.0.2", cpus=8, gpus=0, memory_gib=20.5)
        database.write(lambda session: nodes.record(session, "worker", [node]))
        start("node-1")
        paced: ResourceSeries = {**SERIES, "pace": {"reported": 60.0, "longest_pause": 400.0}}
        database.write(under(lease, HeldExperiment.record_resources, trial_id, paced))

        ((trial,),) = [one["trials"] for one in told(api, "/v1/nodes")]
        assert self.of(trial | {"started_at": trial["since"]}) == (60.0, 4000.0)
        words = re.compile(rf"trial {trial_id}: last report 25 min( \d s)? ago; killed and tried again after 1 h 6 min")
        assert "last report" not in api.get("/pool", headers={"Accept": "text/html"}).raise_for_status().text
        database.write(begin_long_ago)
        assert words.search(api.get("/pool", headers={"Accept": "text/html"}).raise_for_status().text)

    def test_the_page_says_it_and_tables_of_files_do_not(self, api: TestClient, database: Database, begun: Any) -> None:
        lease, trial_id, start = begun
        browser = {"Accept": "text/html"}
        pages = (f"/trials/{trial_id}", f"/trials/{trial_id}/summary")
        for page in pages:
            assert "last report" not in api.get(page, headers=browser).raise_for_status().text
        start()
        paced: ResourceSeries = {**SERIES, "pace": {"reported": 60.0, "longest_pause": 400.0}}
        database.write(under(lease, HeldExperiment.record_resources, trial_id, paced))

        database.write(begin_long_ago)
        words = re.compile(
            r"<dt>last report</dt><dd>25 min( \d s)? ago; killed and tried again after 1 h 6 min without one</dd>"
        )
        for page in pages:
            assert words.search(api.get(page, headers=browser).text)
        assert "hung_after" not in api.get("/v1/trials?format=csv").text
