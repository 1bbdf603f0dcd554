"""Experiments made of other experiments, and experiments that grow, the same on SQLite and Postgres."""

import itertools
from datetime import datetime
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from service.database import (
    Artifact,
    Event,
    Experiment,
    ExperimentState,
    Result,
    Trial,
    TrialState,
    now,
)
from service.database.engine import Database
from service.errors import StateError
from service.experiments import submission
from service.experiments.drafts import draft_extension
from service.experiments.submission import turns_of
from service.leaderboards import field_index
from service.queue import leases
from service.queue.trials import HeldExperiment
from service.specs.grid import factored
from service.specs.spec import Additions, ExperimentSpec
from tests.examples import mostly_sqlite
from tests.grids import plan_of
from tests.held import under, unfinished_trials, waiting_trials, write
from tests.machinery import Claim, Finish, Submit, Table
from ttsv.config.training import LOOKING_ON

BASE: dict[str, Any] = {"dataset": "digits", "model": "small-cnn", "layer": "tt"}


def post(api: TestClient, path: str, body: object, status: int = 200, **headers: str) -> dict[str, Any]:
    """The API's answer, which must have this status."""
    response = api.post(path, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()})
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def submit_spec(api: TestClient, **spec: Any) -> str:
    """Posts a spec; the path of the experiment."""
    return f"/v1/experiments/{post(api, '/v1/experiments', {'name': 'grid'} | spec, 201)['id']}"


class TestExtend:
    def seeds(self, table: Table) -> list[tuple[int, int, str]]:
        return [(trial.number, trial.seed, trial.state.value) for trial in table(Trial)]

    def test_only_what_is_new_is_run(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database, table: Table, finish: Finish
    ) -> None:
        path = f"/v1/experiments/{submit(seeds=2)}"
        lease = claim()
        for trial in table(Trial):
            finish(lease, trial.id)
        assert write(database, leases.complete, lease)
        for _ in range(2):
            answer = post(api, f"{path}/extend", {"grid": {"seed": [1, 4, 3, 4]}})
            assert (answer["state"], answer["trial_count"], answer["grid_points"]) == ("queued", 4, 4)
            assert answer["spec"]["grid"] == {"seed": [0, 1, 4, 3]}
            assert (answer["finished_at"], answer["revision"]) == (None, 1)
        assert self.seeds(table) == [(0, 0, "succeeded"), (1, 1, "succeeded"), (2, 4, "queued"), (3, 3, "queued")]
        assert len(table(Result)) == 2
        assert [event.detail for event in table(Event) if event.kind == "extended"] == [{"trials": 2}]
        assert [trial.seed for trial in write(database, unfinished_trials, claim())] == [4, 3]
        assert database.write(field_index.is_whole)

    def test_several_axes_at_once_make_the_whole_product(self, api: TestClient, table: Table) -> None:
        path = submit_spec(api, base=BASE, grid={"rank": [2, 4], "seed": [0]})
        post(api, f"{path}/extend", {"grid": {"rank": [8], "seed": [1]}})
        expected = set(itertools.product([2, 4, 8], [0, 1]))
        assert {(trial.rank, trial.seed) for trial in table(Trial)} == expected
        assert len(table(Trial)) == len(expected)

    @pytest.mark.parametrize("order", ["grid", "random", "seeds-last"])
    def test_what_is_new_keeps_the_order(
        self, api: TestClient, database: Database, table: Table, claim: Claim, finish: Finish, order: str
    ) -> None:
        """Seeds of a cell go on where it stands; of a new cell the first comes with the others' first."""
        path = submit_spec(api, base=BASE, grid={"rank": [1, 2], "seed": [0, 1]}, order=order)
        finish(claim(), table(Trial)[0].id)
        assert post(api, f"{path}/extend", {"grid": {"rank": [1, 2, 3]}})["spec"]["order"] == order
        assert post(api, f"{path}/extend", {"grid": {"seed": [0, 1, 2]}})["progress"]["trials"]["queued"] == 8
        begun = [(trial.rank, trial.seed) for trial in waiting_trials(database)]
        if order == "grid":
            assert begun == [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (1, 2), (2, 2), (3, 2)]
        elif order == "seeds-last":
            assert begun == [(2, 0), (3, 0), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)]
        else:
            turns = {trial.fingerprint: trial.turn for trial in table(Trial)}
            again = ExperimentSpec(name="whole", base=BASE, grid={"rank": [3, 2, 1], "seed": [2, 1, 0]})
            expected = turns_of(plan_of(again).trials, "random")
            for planned, turn in zip(plan_of(again).trials, expected, strict=True):
                assert turns[planned.fingerprint] == turn

    def test_a_running_experiment_goes_on(
        self, api: TestClient, submit: Submit, claim: Claim, database: Database
    ) -> None:
        path = f"/v1/experiments/{submit(seeds=1)}"
        lease = claim()
        assert post(api, f"{path}/extend", {"grid": {"seed": [1]}})["state"] == "running"
        assert [trial.number for trial in write(database, unfinished_trials, lease)] == [0, 1]

    @pytest.mark.parametrize(
        ("spec", "more", "ranks"),
        [
            ({}, {"variants": [{"rank": 4}]}, [None, 4]),
            ({}, {"trials": [{"rank": 4}]}, [None, 4]),
            ({}, {"variants": [{"rank": 4}], "trials": [{"rank": 8}]}, [None, 4, 8]),
            ({"variants": [{"rank": 2}]}, {"variants": [{"rank": 2}, {"rank": 4}]}, [2, 4]),
            ({"variants": [{"rank": 2}]}, {"trials": [{"rank": 4}]}, [2, 4]),
            ({"trials": [{"rank": 2}]}, {"trials": [{"rank": 4}, {"rank": 2}]}, [2, 4]),
            ({"trials": [{"rank": 2}]}, {"variants": [{"rank": 4}]}, [2, 4]),
            ({"grid": {"lambda_ort": [0.0]}}, {"variants": [{"rank": 4}]}, [None, 4]),
            ({"grid": {"lambda_ort": [0.0]}}, {"trials": [{"rank": 4}]}, [None, 4]),
        ],
    )
    def test_variants_and_trials_leave_what_there_is(
        self, sqlite_api: TestClient, spec: dict[str, Any], more: dict[str, Any], ranks: list[float | None]
    ) -> None:
        path = submit_spec(sqlite_api, base=BASE, **spec)
        before = sqlite_api.get(f"{path}/trials").json()["items"]
        for _ in range(2):
            answer = post(sqlite_api, f"{path}/extend", more)
            after = sqlite_api.get(f"{path}/trials").json()["items"]
            assert [trial["config"]["rank"] for trial in after] == ranks
            assert after[: len(before)] == before
            # The stored spec says what there is: posted anew it makes the same trials.
            plan = plan_of(ExperimentSpec.model_validate(answer["spec"]))
            assert {planned.fingerprint for planned in plan.trials} == {trial["fingerprint"] for trial in after}

    def test_more_repetitions(self, api: TestClient, table: Table) -> None:
        path = submit_spec(api, base=BASE, grid={"rank": [2, 4]}, repeat=2)
        assert post(api, f"{path}/extend", {"repeat": 3})["trial_count"] == 6
        assert sorted((trial.rank, trial.seed) for trial in table(Trial)) == [(r, s) for r in (2, 4) for s in range(3)]
        refused = post(api, f"{path}/extend", {"repeat": 1}, 422)
        assert refused["errors"][0] == {"field": "repeat", "message": "is 3 now and can only grow, not 1"}

    @mostly_sqlite
    @pytest.mark.parametrize(
        ("more", "field", "reason"),
        [
            ({"grid": {"rank": [2]}}, "grid.rank", "is no axis of this experiment (seed), and a new one would change"),
            ({"grid": {"seed": [7, -1]}}, "grid.seed[1]", "must be"),
            ({"grid": {"seed": [0, -1, -1]}}, "grid.seed[1]", "must be"),
            ({"grid": {"seed": 3}}, "grid.seed", "list"),
            ({"variants": [{"seed": 3}]}, "grid.seed", "is set in variants[0] too; remove it here or variants[0].seed"),
            ({"trials": [{"mdoel": 3}]}, "trials[0].mdoel", "unknown"),
            ({"trials": [{"rank": 2}, {"rank": 0}]}, "trials[1].rank", "must be"),
            ({"base": {}}, "base", "unknown field"),
        ],
    )
    def test_what_cannot_be_added(
        self, api: TestClient, table: Table, more: dict[str, Any], field: str, reason: str
    ) -> None:
        path = submit_spec(api, base=BASE, grid={"seed": [0]}, trials=[{"rank": 2}, {"rank": 3}])
        refused = post(api, f"{path}/extend", more, 422)
        assert refused["errors"][0]["field"] == field
        assert reason in refused["errors"][0]["message"]
        assert table(Experiment)[0].revision == 0

    def test_the_limit_is_the_whole_grids(self, sqlite_api: TestClient) -> None:
        path = submit_spec(sqlite_api, base=BASE, grid={"seed": list(range(150)), "training.lr": [0.1]})
        rates = [0.001 * (n + 1) for n in range(200)]
        refused = post(sqlite_api, f"{path}/extend", {"grid": {"training.lr": rates}}, 422)
        assert "at most 20000 are allowed" in refused["detail"]

    def test_not_over_anothers_change(self, submit: Submit, database: Database, table: Table) -> None:
        experiment_id = submit(seeds=1)
        more = [Additions(grid={"seed": [seed]}) for seed in (1, 2)]
        with database.read() as session:
            drafts = [draft_extension(session, experiment_id, one, max_trials=9) for one in more]
        write(database, submission.submit, drafts[0])
        with pytest.raises(StateError, match="send the request again"):
            write(database, submission.submit, drafts[1])
        assert [trial.seed for trial in table(Trial)] == [0, 1]


class TestClone:
    def test_the_same_trials_once_more(self, api: TestClient, table: Table, claim: Claim, finish: Finish) -> None:
        path = submit_spec(api, base=BASE, grid={"seed": [0, 1]}, tags=["x"])
        finish(claim(), table(Trial)[0].id)
        post(api, f"{path}/extend", {"grid": {"seed": [2]}})
        api.patch(path, json={"notes": "changed"})
        new = post(api, f"{path}/clone", None, 201)
        assert (new["name"], new["state"], new["spec"]["notes"]) == ("grid (clone)", "queued", "changed")
        assert new["spec"]["name"] == "grid (clone)"
        assert new["tags"] == ["x"]
        trials = table(Trial)
        assert [trial.fingerprint for trial in trials[3:]] == [trial.fingerprint for trial in trials[:3]]
        assert {trial.state for trial in trials[3:]} == {TrialState.QUEUED}
        assert post(api, f"{path}/clone", {"name": "other"}, 201)["name"] == "other"
        assert [event.detail for event in table(Event) if event.kind == "cloned"] == 2 * [{"trials": 3, "source": 1}]

    def test_it_says_which_one_it_is_within_a_names_length(self, api: TestClient) -> None:
        path = submit_spec(api, base=BASE, name="n" * 200)
        new = post(api, f"{path}/clone", None, 201)
        assert new["name"] == "n" * 192 + " (clone)"
        again = post(api, f"/v1/experiments/{new['id']}/clone", {}, 201)
        assert again["name"] == again["spec"]["name"] == "n" * 190 + " (clone 2)"
        assert post(api, f"{path}/clone", None, 201)["name"] == "n" * 190 + " (clone 3)"
        api.patch(f"/v1/experiments/{again['id']}", json={"name": "other"}).raise_for_status()
        assert post(api, f"{path}/clone", None, 201)["name"] == again["name"], "nobody is called so now"

    @pytest.mark.parametrize(
        ("action", "body", "status"),
        [("clone", {"name": "twin"}, 201), ("extend", {"grid": {"seed": [9]}}, 200)],
    )
    def test_once_per_key(
        self, api: TestClient, submit: Submit, table: Table, action: str, body: dict[str, Any], status: int
    ) -> None:
        path, other = (f"/v1/experiments/{submit(seeds=1)}" for _ in range(2))
        first, second = (post(api, f"{path}/{action}", body, status, Idempotency_Key="k") for _ in range(2))
        assert first == second
        assert len(table(Experiment)) == (3 if action == "clone" else 2)
        post(api, f"{other}/{action}", body, 422, Idempotency_Key="k")
        post(api, f"{path}/{action}", {}, 422, Idempotency_Key="k")


class TestReevaluate:
    @pytest.fixture
    def trained(self, api: TestClient, claim: Claim, table: Table, finish: Finish, database: Database) -> str:
        """The path of an experiment of four trials, of which two succeeded and one was cancelled."""
        how = {"order": "seeds-last", "preempt": True, "hung_after": 77.0, "max_concurrent_trials": 3}
        grid = {"lambda_ort": [0.0, 1.0], "seed": [0, 1]}
        path = submit_spec(api, base=BASE | {"rank": 2}, grid=grid, priority=4, **how)
        lease = claim()
        trials = table(Trial)
        finish(lease, trials[0].id)
        finish(lease, trials[3].id)
        database.write(under(lease, HeldExperiment.start_trial, trials[1].id))
        database.write(under(lease, HeldExperiment.fail_trial, trials[1].id, "oom", "no"))
        post(api, f"{path}/cancel", None)
        return path

    def test_takes_what_succeeded_and_trains_nothing(
        self, trained: str, api: TestClient, claim: Claim, table: Table, finish: Finish, database: Database
    ) -> None:
        body = {"evaluation": {"lipschitz": "fgsm", "lipschitz_images": 10}, "name": "again"}
        answer = post(api, f"{trained}/re-evaluate", body, 201)
        assert (answer["name"], answer["state"], answer["priority"]) == ("again", "queued", 4)
        assert (answer["progress"]["epochs"], answer["progress"]["epochs_done"]) == (0, 0)
        how = {name: answer["spec"][name] for name in ("order", "preempt", "hung_after", "max_concurrent_trials")}
        assert how == {"order": "seeds-last", "preempt": True, "hung_after": 77.0, "max_concurrent_trials": 3}
        old, new = table(Trial)[:4], table(Trial)[4:]
        assert [(t.source_trial_id, t.lambda_ort, t.seed, t.epochs) for t in new] == [
            (old[0].id, 0.0, 0, 0),
            (old[3].id, 1.0, 1, 0),
        ]
        for mine, theirs in zip(new, (old[0], old[3]), strict=True):
            evaluation = mine.config.pop("evaluation")
            assert (evaluation["lipschitz"], evaluation["lipschitz_images"]) == ("fgsm", 10)
            assert mine.config == {key: value for key, value in theirs.config.items() if key != "evaluation"}
            assert mine.fingerprint != theirs.fingerprint
        lease = claim()
        assert api.get(f"/v1/experiments/{answer['id']}").json()["progress"]["seconds_left"] is None
        for trial in new:
            finish(lease, trial.id)
        assert write(database, leases.complete, lease)
        assert table(Experiment)[1].state == ExperimentState.SUCCEEDED
        (event,) = [event for event in table(Event) if event.kind == "reevaluated"]
        assert event.detail == {"trials": 2, "source": 1}

    def test_its_spec_lists_its_trials(self, trained: str, api: TestClient, table: Table) -> None:
        answer = post(api, f"{trained}/re-evaluate", {"evaluation": {"lipschitz": "fgsm"}}, 201)
        assert answer["name"] == answer["spec"]["name"] == "grid (re-evaluated)"
        assert not {*LOOKING_ON} & answer["spec"]["base"]["training"].keys(), (
            "drivers of the version before refuse them"
        )
        spec = answer["spec"]
        assert spec["trials"] == [{"lambda_ort": 0.0, "seed": 0}, {"lambda_ort": 1.0, "seed": 1}]
        plan = plan_of(ExperimentSpec.model_validate(spec))
        assert [planned.fingerprint for planned in plan.trials] == [trial.fingerprint for trial in table(Trial)[4:]]

    def test_its_clone_evaluates_the_same_networks(
        self, trained: str, api: TestClient, table: Table, claim: Claim, finish: Finish
    ) -> None:
        again = post(api, f"{trained}/re-evaluate", {"evaluation": {"lipschitz": "fgsm"}}, 201)
        path = f"/v1/experiments/{again['id']}"
        post(api, f"{path}/clone", None, 201)
        sources = [trial.source_trial_id for trial in table(Trial)]
        assert sources[4:6] == sources[6:8] == [table(Trial)[0].id, table(Trial)[3].id]
        finish(claim(), table(Trial)[4].id)
        post(api, f"{path}/re-evaluate", {"evaluation": {"lipschitz": "ascent"}}, 201)
        assert table(Trial)[8].source_trial_id == sources[4]  # the one that was trained, not the one between
        assert "re-evaluates others' trials" in post(api, f"{path}/extend", {"trials": [{}]}, 409)["detail"]

    def test_of_networks_that_were_removed_copies_are_evaluated_or_none(
        self, trained: str, api: TestClient, table: Table, claim: Claim, finish: Finish, database: Database
    ) -> None:
        again = post(api, f"{trained}/re-evaluate", {"evaluation": {"lipschitz": "fgsm"}}, 201)
        copy = table(Trial)[4]
        finish(claim(), copy.id)
        path = f"/v1/experiments/{again['id']}"

        def leave(trial_id: int, removed_at: datetime | None) -> None:
            file = {"path": f"{trial_id}", "sha256": "0" * 64, "size": 1}
            row = Artifact(trial_id=trial_id, kind="model", removed_at=removed_at, **file)
            database.write(lambda session: session.add(row))

        for trial in (table(Trial)[0], table(Trial)[3]):
            leave(trial.id, now())
        words = "the networks of all its trials were removed to make room"
        for where in (trained, path):
            assert words in post(api, f"{where}/re-evaluate", {"evaluation": {"lipschitz": "ascent"}}, 409)["detail"]
        leave(copy.id, None)
        post(api, f"{path}/re-evaluate", {"evaluation": {"lipschitz": "ascent"}}, 201)
        assert table(Trial)[-1].source_trial_id == copy.id

    @mostly_sqlite
    @pytest.mark.parametrize(
        ("evaluation", "field"),
        [
            ({"lipschitz": "newton"}, "evaluation.lipschitz"),
            ({"attak": 1}, "evaluation.attak"),
            ({"corruptions": "published"}, "evaluation.corruptions"),
            ([], "evaluation"),
        ],
    )
    def test_wrong_evaluations(
        self, trained: str, api: TestClient, table: Table, evaluation: object, field: str
    ) -> None:
        refused = post(api, f"{trained}/re-evaluate", {"evaluation": evaluation}, 422)
        assert refused["errors"][0]["field"] == field
        assert len(table(Experiment)) == 1

    def test_what_is_wrong_is_said_though_there_is_nothing_to_evaluate_yet(self, sqlite_api: TestClient) -> None:
        path = submit_spec(sqlite_api, base=BASE)
        refused = post(sqlite_api, f"{path}/re-evaluate", {"evaluation": {"attak": 1}}, 422)
        assert refused["errors"][0]["field"] == "evaluation.attak"
        refused = post(sqlite_api, f"{path}/re-evaluate", {"evaluation": {"attack": "pgd"}}, 409)
        assert "there is nothing to evaluate yet" in refused["detail"]

    @pytest.mark.parametrize("action", ["clone", "re-evaluate"])
    def test_a_name_that_nobody_sees_is_none(self, sqlite_api: TestClient, action: str) -> None:
        path = submit_spec(sqlite_api, base=BASE)
        body: dict[str, Any] = {"name": "  "} | ({"evaluation": {}} if action == "re-evaluate" else {})
        assert "a character that is seen" in post(sqlite_api, f"{path}/{action}", body, 422)["errors"][0]["message"]


values = st.none() | st.booleans() | st.integers(0, 2) | st.floats(0, 2, allow_nan=False) | st.sampled_from(["a", "b"])


@given(
    st.lists(
        st.fixed_dictionaries({"a": values, "b": values, "part": st.fixed_dictionaries({"c": values, "d": values})}),
        min_size=1,
        max_size=5,
    )
)
def test_factoring_loses_nothing(configs: list[dict[str, Any]]) -> None:
    found: tuple[dict[str, Any], list[dict[str, Any]]] = factored(configs)
    base, trials = found
    rebuilt = [base | trial | {"part": base.get("part", {}) | trial.get("part", {})} for trial in trials]
    assert [[(k, repr(v)) for k, v in sorted(one.items())] for one in map(flat, rebuilt)] == [
        [(k, repr(v)) for k, v in sorted(one.items())] for one in map(flat, configs)
    ]
    assert not any(set(flat(base)) & set(flat(trial)) for trial in trials)


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Fields by dotted path."""
    inner = {f"part.{name}": value for name, value in config.get("part", {}).items()}
    return {name: value for name, value in config.items() if name != "part"} | inner
