"""What people do with experiments, over HTTP and in the database, the same on SQLite and Postgres."""

from functools import partial
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from service.database import (
    OPEN_EXPERIMENTS,
    EpochPoint,
    Event,
    Experiment,
    ExperimentState,
    Result,
    Score,
    Tag,
    Trial,
    TrialState,
    now,
)
from service.database.engine import Database
from service.experiments import actions, store
from service.queue import leases
from service.queue.contenders import Specs, contenders, give_up_unfit
from service.queue.driver_reads import planned_trials
from service.queue.leases import Lease
from service.queue.trials import HeldExperiment, ProtocolRecord
from service.specs.planner import Planner
from tests.examples import mostly_sqlite
from tests.held import reported, under, unfinished_trials, write
from tests.machinery import Claim, Finish, Make, Submit, Table

S = ExperimentState

ACTIONS: dict[str, tuple[set[S], dict[str, Any] | None]] = {
    "pause": ({S.QUEUED, S.RUNNING, S.PAUSED}, None),
    "resume": ({S.QUEUED, S.RUNNING, S.PAUSED}, None),
    "stop": ({S.QUEUED, S.RUNNING, S.PAUSED, S.STOPPED}, None),
    "cancel": ({S.QUEUED, S.RUNNING, S.PAUSED, S.CANCELLED}, None),
    "archive": ({S.SUCCEEDED, S.STOPPED, S.FAILED, S.CANCELLED}, None),
    "unarchive": (set(S), None),
    "retry": (set(S), None),
    "extend": (set(S) - {S.CANCELLED}, {"grid": {"seed": [0, 1]}}),
    "clone": (set(S), None),
    "re-evaluate": (set(), {"evaluation": {"lipschitz": "fgsm"}}),  # without a trial that succeeded
}
"""Action -> where it may be said, and a body with which it adds nothing to an experiment of two seeds."""


def put(database: Database, experiment_id: int, **columns: Any) -> None:
    """Sets columns of an experiment, past all actions."""

    def work(session: Session) -> None:
        experiment = session.get_one(Experiment, experiment_id)
        for name, value in columns.items():
            setattr(experiment, name, value)

    database.write(work)


def say(api: TestClient, experiment_id: int, action: str, body: object = None, **headers: str) -> dict[str, Any]:
    """What the API answers to an action that is allowed."""
    response = api.post(f"/v1/experiments/{experiment_id}/{action}", json=body, headers=headers)
    assert response.status_code in (200, 201), response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal(api: TestClient, experiment_id: int, action: str, body: object = None, status: int = 409) -> str:
    """Why the API refuses an action."""
    response = api.post(f"/v1/experiments/{experiment_id}/{action}", json=body)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json")
    detail: str = response.json()["detail"]
    return detail


def kinds(table: Table) -> list[str]:
    return [event.kind for event in table(Event)]


class TestStates:
    @mostly_sqlite
    @pytest.mark.parametrize("action", ACTIONS)
    def test_in_every_state(
        self, api: TestClient, submit: Submit, database: Database, table: Table, action: str
    ) -> None:
        allowed, body = ACTIONS[action]
        for state in ExperimentState:
            experiment_id = submit(seeds=2)
            finished = None if state in OPEN_EXPERIMENTS else now()
            put(
                database,
                experiment_id,
                state=state,
                finished_at=finished,
                worker="here" if state == S.RUNNING else None,
            )
            before, events = api.get(f"/v1/experiments/{experiment_id}").json(), kinds(table)
            response = api.post(f"/v1/experiments/{experiment_id}/{action}", json=body)
            if state in allowed:
                assert response.status_code == (201 if action == "clone" else 200), response.text
                continue
            assert response.status_code == 409
            detail = response.json()["detail"]
            assert f"experiment {experiment_id} " in detail
            if action != "re-evaluate":
                assert f" is {state.value}: it can be " in detail
                assert all(name in detail for name in allowed)
            assert api.get(f"/v1/experiments/{experiment_id}").json() == before
            assert kinds(table) == events

    def test_of_nothing(self, api: TestClient) -> None:
        for action, (_, body) in ACTIONS.items():
            assert refusal(api, 7, action, body, status=404) == "there is no experiment 7"

    @pytest.mark.parametrize("action", ["retry", "extend"])
    def test_nothing_runs_in_the_archive(
        self, api: TestClient, submit: Submit, database: Database, action: str
    ) -> None:
        experiment_id = submit()
        say(api, experiment_id, "cancel")
        say(api, experiment_id, "archive")
        assert "is archived: it can be" in refusal(api, experiment_id, action, ACTIONS[action][1])

    @pytest.mark.parametrize("action", ["retry", "extend"])
    def test_nothing_begins_in_what_stops(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database, table: Table, action: str
    ) -> None:
        experiment_id = submit()
        database.write(under(claim(), HeldExperiment.start_trial, table(Trial)[0].id))
        say(api, experiment_id, "stop")
        assert "once it has stopped" in refusal(api, experiment_id, action, ACTIONS[action][1])


class TestPause:
    def test_takes_a_running_experiment_from_its_worker(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database, table: Table, epoch_point: Make
    ) -> None:
        experiment_id = submit(seeds=2)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(1))))
        for _ in range(2):
            assert say(api, experiment_id, "pause")["state"] == "paused"
        (experiment,) = table(Experiment)
        assert (experiment.worker, experiment.process, experiment.fence) == (None, None, lease.fence + 1)
        assert [(trial.state.value, trial.attempts, trial.epoch) for trial in table(Trial)] == [
            ("queued", 0, 1),
            ("queued", 0, 0),
        ]
        assert kinds(table) == ["submitted", "claimed", "paused"]
        assert write(database, leases.claim, "other", None) is None

    def test_resumed_it_is_claimed_again(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database, table: Table
    ) -> None:
        experiment_id = submit()
        for _ in range(9):  # a pause is held against nobody
            lease = claim()
            say(api, experiment_id, "pause")
            for _ in range(2):
                assert say(api, experiment_id, "resume")["state"] == "queued"
            with database.read() as session:
                assert not leases.is_held(session, lease)
        assert claim().fence == 2 * 9 + 1


class TestStop:
    def test_running_trials_finish_and_the_others_are_dropped(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database, table: Table, trial_result: Make
    ) -> None:
        experiment_id = submit(seeds=3)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        with database.read() as session:
            assert not leases.is_stopping(session, lease)
        for _ in range(2):
            answer = say(api, experiment_id, "stop")
            assert (answer["state"], answer["stopping"]) == ("running", True)
            assert answer["progress"]["trials"] == dict.fromkeys(TrialState, 0) | {"running": 1, "cancelled": 2}
        with database.read() as session:
            assert leases.is_stopping(session, lease)
        assert not write(database, leases.complete, lease)
        database.write(
            under(lease, HeldExperiment.finish_trial, trial.id, trial_result(), ProtocolRecord("p" * 64, {}))
        )
        assert write(database, leases.complete, lease)
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.error) == (S.STOPPED, None)
        assert kinds(table) == ["submitted", "claimed", "stopping", "trial_finished", "closed"]

    @pytest.mark.parametrize("state", [S.QUEUED, S.PAUSED, S.RUNNING])
    def test_at_once_where_nothing_runs(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database, table: Table, state: ExperimentState
    ) -> None:
        experiment_id = submit(seeds=2)
        if state == S.PAUSED:
            say(api, experiment_id, "pause")
        lease = claim() if state == S.RUNNING else Lease(experiment_id, 0)
        for _ in range(2):
            answer = say(api, experiment_id, "stop")
            assert (answer["state"], answer["progress"]["trials"]["cancelled"]) == ("stopped", 2)
            assert answer["finished_at"] is not None
        with database.read() as session:
            assert not leases.is_held(session, lease)

    def test_the_next_worker_finishes_what_ran(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        experiment_id = submit(seeds=2)
        database.write(under(claim(), HeldExperiment.start_trial, table(Trial)[0].id))
        say(api, experiment_id, "stop")
        with database.read() as session:
            (seen,) = leases.watch(session)
        write(database, leases.reap, seen, "neighbour")
        assert say(api, experiment_id, "stop")["state"] == "queued"
        lease = claim()
        (trial,) = write(database, unfinished_trials, lease)
        finish(lease, trial.id)
        assert write(database, leases.complete, lease)
        assert table(Experiment)[0].state == S.STOPPED
        reaped = next(event for event in table(Event) if event.kind == "reaped")
        assert (reaped.actor, reaped.detail["worker"]) == ("neighbour", "worker")


class TestCancel:
    def test_in_the_middle(
        self,
        submit: Submit,
        claim: Claim,
        database: Database,
        table: Table,
        finish: Finish,
        epoch_point: Make,
    ) -> None:
        experiment_id = submit(seeds=3)
        lease = claim()
        done, running, _ = table(Trial)
        finish(lease, done.id)
        database.write(under(lease, HeldExperiment.start_trial, running.id))
        database.write(under(lease, HeldExperiment.add_epoch, running.id, reported(epoch_point())))
        write(database, actions.cancel, experiment_id)
        (experiment,) = table(Experiment)
        assert (experiment.state, experiment.fence) == (ExperimentState.CANCELLED, lease.fence + 1)
        assert experiment.finished_at is not None
        assert [trial.state.value for trial in table(Trial)] == ["succeeded", "cancelled", "cancelled"]
        assert all(trial.finished_at is not None for trial in table(Trial))
        assert (len(table(Result)), len(table(EpochPoint))) == (1, 1)
        assert write(database, leases.claim, "other", None) is None

    def test_again_changes_nothing(self, api: TestClient, submit: Submit, claim: Claim, table: Table) -> None:
        experiment_id = submit()
        claim()
        first = say(api, experiment_id, "cancel")
        assert say(api, experiment_id, "cancel") == first
        assert kinds(table) == ["submitted", "claimed", "cancelled", "closed"]

    def test_before_anyone_claimed(self, submit: Submit, database: Database, table: Table) -> None:
        experiment_id = submit(seeds=2)
        other = submit(seeds=2)
        write(database, actions.cancel, experiment_id)
        assert [experiment.state.value for experiment in table(Experiment)] == ["cancelled", "queued"]
        states = [trial.state.value for trial in table(Trial) if trial.experiment_id == other]
        assert states == ["queued", "queued"]


class TestRetry:
    @pytest.fixture
    def searching(self, api: TestClient) -> int:
        """A search of four trials, none of which is made."""
        search = {"algorithm": "random", "trials": 4, "space": {"seed": {"int": [0, 9]}}}
        base = {"dataset": "digits", "model": "small-cnn"}
        answer = api.post("/v1/experiments", json={"name": "search", "base": base, "search": search})
        return int(answer.json()["id"])

    @pytest.fixture
    def failed(
        self, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish, epoch_point: Make
    ) -> int:
        """An experiment that ended: one trial succeeded, one failed in its second epoch, one diverged."""
        experiment_id = submit(seeds=3)
        lease = claim()
        good, bad, worse = table(Trial)
        finish(lease, good.id)
        for trial, failure in ((bad, "oom"), (worse, "diverged")):
            database.write(under(lease, HeldExperiment.start_trial, trial.id))
            database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(1))))
            database.write(under(lease, HeldExperiment.fail_trial, trial.id, failure, "no"))
        assert write(database, leases.complete, lease)
        return experiment_id

    def test_runs_what_failed_and_that_only(
        self, failed: int, api: TestClient, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        before = table(Result)[0]
        assert (say(api, failed, "retry")["state"], say(api, failed, "retry")["revision"]) == ("queued", 1)
        (experiment,) = table(Experiment)
        assert (experiment.error, experiment.finished_at) == (None, None)
        good, bad, worse = table(Trial)
        assert (good.state, worse.state) == (TrialState.SUCCEEDED, TrialState.DIVERGED)
        assert (bad.state, bad.attempts, bad.failure, bad.error, bad.finished_at) == (
            TrialState.QUEUED, 0, None, None, None,
        )  # fmt: skip
        assert bad.deaths == 0
        assert [point.trial_id for point in table(EpochPoint)] == [worse.id], "the others' training is gone"
        lease = claim()
        (trial,) = write(database, unfinished_trials, lease)
        assert trial.id == bad.id
        finish(lease, bad.id)
        assert write(database, leases.complete, lease)
        assert table(Experiment)[0].error == "1 of 3 trials did not succeed"
        assert table(Result)[0].created_at == before.created_at

    @pytest.mark.parametrize(("failure", "kept"), [("oom", False), ("timeout", False), ("crashed", True)])
    def test_who_begins_anew_gets_on_with_its_first_epoch(
        self, submit: Submit, claim: Claim, api: TestClient, database: Database, table: Table, epoch_point: Make,
        failure: str, kept: bool,
    ) -> None:  # fmt: skip
        """Else each death before the epoch at which it failed would be held against it."""
        experiment_id, lease, trial = submit(seeds=1), claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(3))))
        database.write(under(lease, HeldExperiment.fail_trial, trial.id, failure, "no"))
        say(api, experiment_id, "retry")
        (trial,) = table(Trial)
        assert (trial.epoch, trial.best_val_accuracy is None) == ((3, False) if kept else (0, True))
        with database.read() as session:
            assert store.progress(session, [experiment_id])[experiment_id].best_val_accuracy == trial.best_val_accuracy
        assert [point.epoch for point in table(EpochPoint)] == ([3] if kept else [])
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.lose_trial, trial.id, "SIGKILL"))
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(epoch_point(1))))
        assert table(Trial)[0].deaths == (1 if kept else 0)

    def test_other_states_if_asked(self, failed: int, api: TestClient, table: Table) -> None:
        answer = say(api, failed, "retry", {"states": ["diverged", "cancelled"]})
        assert answer["progress"]["trials"]["queued"] == 1
        assert [trial.state.value for trial in table(Trial)] == ["succeeded", "failed", "queued"]

    @pytest.mark.parametrize("states", [["succeeded"], ["running"], "failed", [1]])
    def test_no_other_states(self, failed: int, api: TestClient, states: object) -> None:
        assert "states" in refusal(api, failed, "retry", {"states": states}, status=422)

    def test_in_a_running_experiment_they_wait_again(
        self, submit: Submit, claim: Claim, api: TestClient, database: Database, table: Table
    ) -> None:
        experiment_id = submit(seeds=2)
        lease, trial = claim(), table(Trial)[0]
        database.write(under(lease, HeldExperiment.start_trial, trial.id))
        database.write(under(lease, HeldExperiment.fail_trial, trial.id, "oom", "no"))
        assert say(api, experiment_id, "retry")["state"] == "running"
        trials = write(database, unfinished_trials, lease)  # the lease holds on
        assert [trial.number for trial in trials] == [0, 1]

    def test_what_was_stopped_goes_on(self, submit: Submit, api: TestClient, claim: Claim, database: Database) -> None:
        experiment_id = submit(seeds=2)
        say(api, experiment_id, "stop")
        answer = say(api, experiment_id, "retry", {"states": ["cancelled"]})
        assert (answer["state"], answer["stopping"], answer["progress"]["trials"]["queued"]) == ("queued", False, 2)
        assert len(write(database, unfinished_trials, claim())) == 2

    def test_nothing_to_retry(self, submit: Submit, api: TestClient, table: Table) -> None:
        experiment_id = submit()
        say(api, experiment_id, "cancel")
        answer = say(api, experiment_id, "retry")
        assert (answer["state"], answer["revision"]) == ("cancelled", 1)

    @pytest.mark.parametrize("ended", ["given up", "cancelled", "stopped"])
    def test_a_search_that_ended_before_its_first_trial_goes_on(
        self, searching: int, api: TestClient, database: Database, claim: Claim, ended: str
    ) -> None:
        if ended == "given up":
            reason = "needs 3 GPUs on one node"
            database.write(partial(give_up_unfit, experiment_id=searching, worker="w", reason=reason))
        else:
            say(api, searching, {"cancelled": "cancel", "stopped": "stop"}[ended])
            assert say(api, searching, "retry")["state"] == ended, "it was not asked for"
        assert say(api, searching, "retry", {"states": ["failed", "cancelled"]})["state"] == "queued"
        lease = claim()
        assert lease.experiment_id == searching
        with database.look() as session:
            assert planned_trials(session, lease) == 4

    @pytest.mark.parametrize("verb", ["stop", "cancel"])
    def test_a_search_that_was_ended_makes_no_other_trial_unless_asked_for(
        self, searching: int, api: TestClient, database: Database, claim: Claim, table: Table, finish: Finish, verb: str
    ) -> None:
        lease = claim()
        planned = Planner("search").plan({"dataset": "digits", "model": "small-cnn", "seed": 1})
        trial_id = database.write(under(lease, HeldExperiment.add_trial, planned, {"seed": 1}))
        database.write(under(lease, HeldExperiment.start_trial, trial_id))
        database.write(under(lease, HeldExperiment.fail_trial, trial_id, "oom", "no"))
        say(api, searching, verb)
        assert say(api, searching, "retry")["state"] == "queued"
        (found,) = database.write(lambda session: contenders(session, [searching], Specs()))
        assert found.demand.trials == 1
        lease = claim()
        with database.look() as session:
            assert planned_trials(session, lease) == 1
        finish(lease, trial_id)
        assert write(database, leases.complete, lease)
        assert table(Experiment)[0].state.value == "succeeded"


class TestArchive:
    def test_leaves_leaderboards_and_comes_back(
        self, submit: Submit, claim: Claim, api: TestClient, database: Database, table: Table, finish: Finish
    ) -> None:
        experiment_id = submit(seeds=2)
        lease = claim()
        for trial in table(Trial):
            finish(lease, trial.id)
        write(database, leases.complete, lease)
        assert [score.seeds for score in table(Score)] == [2]
        for _ in range(2):
            answer = say(api, experiment_id, "archive")
            assert answer["archived_at"] is not None
            assert table(Score) == []
        assert (answer["state"], len(table(Result))) == ("succeeded", 2)
        for _ in range(2):
            assert say(api, experiment_id, "unarchive")["archived_at"] is None
        assert [score.seeds for score in table(Score)] == [2]
        assert kinds(table)[-2:] == ["archived", "unarchived"]


class TestUpdate:
    def test_changes_what_is_named(self, submit: Submit, api: TestClient, table: Table, database: Database) -> None:
        experiment_id = submit(name="before")
        path = f"/v1/experiments/{experiment_id}"
        for tags in (["b", "a"], ["c", "a"]):
            answer = api.patch(path, json={"tags": tags, "notes": "ünïcode", "priority": 7}).json()
        assert (answer["name"], answer["priority"], answer["revision"]) == ("before", 7, 2)
        assert (answer["spec"]["tags"], answer["spec"]["notes"]) == (["c", "a"], "ünïcode")
        assert answer["spec"]["grid"] == {"seed": [0, 1]}
        assert [tag.name for tag in table(Tag)] == ["a", "c"]
        assert api.patch(path, json={}).json() == answer
        assert api.patch(path, json={"name": "after", "notes": None}).json()["name"] == "after"
        (experiment,) = table(Experiment)
        assert (experiment.name, experiment.spec["notes"]) == ("after", "ünïcode")
        assert table(Event)[-1].detail == {"fields": ["name"]}

    def test_how_many_run_at_a_time(
        self, submit: Submit, api: TestClient, table: Table, claim: Claim, database: Database
    ) -> None:
        """Whoever runs it goes on; 10,000 is no limit."""
        experiment_id = submit(seeds=5)
        path, lease = f"/v1/experiments/{experiment_id}", claim()
        for revision, most in enumerate((2, 10_000, 1), 1):
            for _ in range(2):
                answer = api.patch(path, json={"max_concurrent_trials": most}).json()
            assert (answer["spec"]["max_concurrent_trials"], answer["revision"]) == (most, revision)
            with database.read() as session:
                (one,) = contenders(session, [experiment_id], Specs())
            assert one.demand.trials == min(most, 5)
        assert api.patch(path, json={"max_concurrent_trials": None}).json() == answer
        with database.read() as session:
            assert leases.is_held(session, lease)
        assert table(Event)[-1].detail == {"fields": ["max_concurrent_trials"]}

    def test_a_higher_priority_is_claimed_first(self, submit: Submit, api: TestClient, claim: Claim) -> None:
        submit()
        urgent = submit()
        api.patch(f"/v1/experiments/{urgent}", json={"priority": 1})
        assert claim().experiment_id == urgent

    def test_not_over_anothers_change(self, submit: Submit, api: TestClient, claim: Claim, table: Table) -> None:
        path = f"/v1/experiments/{submit()}"
        seen = api.get(path).headers["etag"]
        claim()  # what workers do is no change of anybody's
        assert api.patch(path, json={"name": "mine"}, headers={"If-Match": seen}).status_code == 200
        assert api.patch(path, json={"name": "mine"}, headers={"If-Match": seen}).status_code == 200  # sent again
        refused = api.patch(path, json={"name": "yours"}, headers={"If-Match": seen})
        assert refused.status_code == 412
        assert "at revision 1" in refused.json()["detail"]
        assert table(Experiment)[0].name == "mine"
        assert api.patch(path, json={"name": "yours"}, headers={"If-Match": api.get(path).headers["etag"]}).is_success
        for tags in (["b", "a"], ["b", "a"], []):  # changed, sent again, changed
            tag = api.patch(path, json={"tags": tags, "priority": len(tags)}).headers["etag"]
            assert api.get(path).headers["etag"] == tag
            assert api.get(path, headers={"If-None-Match": tag}).status_code == 304
            assert api.patch(path, json={"notes": f"{tags}"}, headers={"If-Match": tag}).is_success

    @mostly_sqlite
    @pytest.mark.parametrize(
        "change",
        [
            {"name": ""}, {"name": 1}, {"priority": 1001}, {"tags": ["no spaces"]}, {"tags": "a"}, {"state": "queued"},
            {"max_concurrent_trials": 0}, {"max_concurrent_trials": 10_001}, {"max_concurrent_trials": "many"},
            {"preempt": True}, {"order": "random"},
        ],
    )  # fmt: skip
    def test_wrong_values(self, submit: Submit, api: TestClient, table: Table, change: dict[str, Any]) -> None:
        response = api.patch(f"/v1/experiments/{submit()}", json=change)
        assert response.status_code == 422
        assert response.json()["errors"][0]["field"].startswith(next(iter(change)))
        assert table(Experiment)[0].revision == 0


class TestEvents:
    def test_who_did_what(
        self, submit: Submit, claim: Claim, api: TestClient, database: Database, table: Table, finish: Finish
    ) -> None:
        experiment_id = submit(seeds=3)
        other = submit(seeds=1)
        lease = claim("node-1")
        one, two, three = (trial.id for trial in table(Trial) if trial.experiment_id == experiment_id)
        finish(lease, one)
        database.write(under(lease, HeldExperiment.start_trial, two))
        database.write(under(lease, HeldExperiment.lose_trial, two, "signal 9"))
        database.write(under(lease, HeldExperiment.start_trial, three))
        database.write(under(lease, HeldExperiment.fail_trial, three, "oom", "too big"))
        write(database, leases.release, lease, drained=True)
        say(api, experiment_id, "cancel")
        found = api.get(f"/v1/experiments/{experiment_id}/events").json()["items"]
        assert [(event["actor"], event["kind"], event["trial_id"]) for event in found] == [
            ("anonymous", "submitted", None),
            ("node-1", "claimed", None),
            ("node-1", "trial_finished", one),
            ("node-1", "trial_lost", two),
            ("node-1", "trial_failed", three),
            ("node-1", "released", None),
            ("anonymous", "cancelled", None),
            ("anonymous", "closed", None),
        ]
        assert found[4]["detail"] == {"number": 2, "attempt": 1, "failure": "oom"}
        kinds = {event["kind"] for event in api.get("/v1/events?kind=submitted&kind=paused").json()["items"]}
        assert kinds <= {"submitted", "paused"}
        assert "submitted" in kinds
        assert api.get("/v1/events?kind=eaten").status_code == 422
        everything = api.get("/v1/events").json()["items"]
        assert sorted(everything, key=lambda event: event["id"]) == everything
        assert [event["experiment_id"] for event in everything].count(other) == 1

    def test_pages_hold_everything_once(self, submit: Submit, api: TestClient) -> None:
        experiment_id = submit()
        for _ in range(3):
            say(api, experiment_id, "pause")
            say(api, experiment_id, "resume")
        path, seen = f"/v1/experiments/{experiment_id}/events", list[str]()
        after: int | None = 0
        while after is not None:
            page = api.get(path, params={"after": after, "limit": 2}).json()
            assert len(page["items"]) <= 2
            seen += [event["kind"] for event in page["items"]]
            after = page["next"]
        assert seen == ["submitted"] + 3 * ["paused", "resumed"]

    def test_newest_first_in_parts_and_with_an_etag(self, submit: Submit, api: TestClient) -> None:
        experiment_id = submit()
        say(api, experiment_id, "pause")
        say(api, experiment_id, "resume")
        for path in (f"/v1/experiments/{experiment_id}/events", "/v1/events"):
            first = api.get(path, params={"sort": "-id", "limit": 2, "fields": "id,kind"})
            page = first.json()
            assert [event.pop("kind") for event in page["items"]] == ["resumed", "paused"]
            assert page["items"] == [{"id": page["next"] + 1}, {"id": page["next"]}]
            rest = api.get(first.links["next"]["url"])
            assert ([event["kind"] for event in rest.json()["items"]], rest.json()["next"]) == (["submitted"], None)
            assert "next" not in rest.links
            tag = first.headers["etag"]
            assert api.get(first.url, headers={"If-None-Match": tag}).status_code == 304
        say(api, experiment_id, "pause")
        assert api.get(first.url, headers={"If-None-Match": tag}).status_code == 200

    def test_what_is_refused_leaves_none(self, submit: Submit, claim: Claim, database: Database, table: Table) -> None:
        submit()
        lease = claim()

        def work(session: Session) -> object:
            actions.pause(session, lease.experiment_id)
            return 1 / 0

        with pytest.raises(ZeroDivisionError):
            database.write(work)
        assert kinds(table) == ["submitted", "claimed"]

    @pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=0", "limit=1001", "sort=kind", "fields=x"])
    def test_wrong_queries(self, sqlite_api: TestClient, query: str) -> None:
        assert sqlite_api.get(f"/v1/events?{query}").status_code == 422

    def test_of_nothing(self, api: TestClient) -> None:
        assert api.get("/v1/events").json() == {"items": [], "next": None}
        assert api.get("/v1/experiments/7/events").status_code == 404
