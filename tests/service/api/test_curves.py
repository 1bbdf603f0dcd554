"""/v1/curves, on SQLite and Postgres: by column, thinned, the best cells first, and nothing of other projects."""

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event
from sqlalchemy.orm import Session

from service.database import EpochPoint, Trial
from service.database.engine import Database

pytestmark = pytest.mark.here


@pytest.fixture
def trained(submit: Callable[..., int], database: Database, epoch_point: Callable[..., dict[str, Any]]) -> int:
    """Three cells of two seeds; trial n has 10 n epochs, and the second cell is the best."""
    made = submit(seeds=2, **{"training.lr": [0.1, 0.2, 0.3]})

    def work(session: Session) -> None:
        for trial in range(1, 7):
            for epoch in range(1, 10 * trial + 1):
                session.add(EpochPoint(trial_id=trial, **epoch_point(epoch, val_loss=trial + epoch / 1000)))
            found = session.get(Trial, trial)
            assert found is not None
            found.best_val_accuracy = {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.8}.get(trial)

    database.write(work)
    return made


def test_named_trials_by_column(api: TestClient, trained: int) -> None:
    answer = api.get("/v1/curves?trials=5,1&metrics=val_loss,lr&points=10")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["metrics"] == ["val_loss", "lr"]
    assert [curve["trial"] for curve in found["curves"]] == [5, 1]
    long, short = found["curves"]
    assert long["validated_on"] == "held-out"
    assert [column["field"] for column in found["columns"]] == ["training.lr"]
    assert (long["fields"], long["seed"], long["number"], long["experiment_id"]) == (
        {"training.lr": 0.3},
        0,
        4,
        trained,
    )
    assert (long["epoch"][0], long["epoch"][-1], len(long["epoch"])) == (1, 50, 10)
    assert short["epoch"] == list(range(1, 11))
    assert [len(column) for curve in found["curves"] for column in curve["values"]] == [10] * 4
    assert long["values"][0][-1] == 5.05
    again = api.get(
        "/v1/curves?trials=5,1&metrics=val_loss,lr&points=10", headers={"If-None-Match": answer.headers["etag"]}
    )
    assert again.status_code == 304


def test_fields_that_others_decide_are_no_columns(api: TestClient, submit: Callable[..., int]) -> None:
    """As in the tables of trials: what tells curves apart is as short as it can be, and nothing is lost."""
    for rate, momentum in ((0.1, 0.9), (0.2, 0.8), (0.3, 0.9)):
        decays = {"training.weight_decay": [0.0, 0.1, 0.2]}
        submit(seeds=1, **decays, **{"training.lr": [rate], "training.momentum": [momentum]})
    found = api.get("/v1/curves?trials=1,2,3,4,5,6,7,8,9").json()
    fields = [[column["field"] for column in found[some]] for some in ("columns", "decided")]
    assert fields == [["training.lr", "training.weight_decay"], ["training.momentum"]]
    assert found["curves"][3]["fields"] == {
        "training.lr": 0.2,
        "training.weight_decay": 0.0,
        "training.momentum": 0.8,
    }


def test_the_best_cells_with_all_their_seeds(api: TestClient, trained: int) -> None:
    def best(count: int) -> list[int]:
        answer = api.get(f"/v1/curves?experiment={trained}&best={count}&points=3")
        return [curve["trial"] for curve in answer.json()["curves"]]

    assert best(1) == [3, 4]
    assert best(5) == [3, 4, 1, 2]  # the last cell has no epoch's accuracy yet


def test_of_the_best_no_cell_has_some_of_its_seeds_alone(
    api: TestClient, trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their mean would be taken for that of all: where there is no room for it a cell is left out."""
    for most, trials in ((3, [3, 4]), (4, [3, 4, 1, 2]), (1, [3])):
        monkeypatch.setattr("service.api.curves.MOST_TRIALS", most)
        answer = api.get(f"/v1/curves?experiment={trained}&best=5&points=3")
        assert [curve["trial"] for curve in answer.json()["curves"]] == trials


def test_no_row_is_read_twice(api: TestClient, trained: int) -> None:
    """Of the best among many thousand trials that train, a page that is watched asks every few seconds."""
    database: Database = api.app.state.database  # type: ignore[attr-defined]
    sent: list[tuple[str, Any]] = []
    event.listen(database.engine, "before_cursor_execute", lambda *args: sent.append(args[2:4]))
    assert len(api.get(f"/v1/curves?experiment={trained}&best=3").json()["curves"]) == 4
    assert len([text for text, _ in sent if "FROM epoch_points" in text]) == 1, "of all trials at once"
    if database.engine.dialect.name == "sqlite":
        query, values = next((text, values) for text, values in sent if "trials.experiment_id + " in text)
        with database.read() as session:
            plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values).all()
        assert "ix_trials_dataset_cell (dataset=? AND cell=?)" in str(plan)


def test_trials_of_a_deleted_experiment_are_not_there(api: TestClient, trained: int) -> None:
    """As everywhere else, from the moment when it was deleted."""
    api.post(f"/v1/experiments/{trained}/cancel")
    assert api.get("/v1/curves?trials=1").status_code == 200
    assert api.delete(f"/v1/experiments/{trained}").json()["deleted"]
    assert api.get("/v1/trials/1").status_code == 404
    assert api.get("/v1/curves?trials=1").status_code == 404


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("trials=1&metrics=nix", 422),
        ("trials=1&metrics=epoch", 422),
        ("trials=x", 422),
        ("", 422),
        ("trials=1&experiment=1", 422),
        ("trials=99", 404),
        ("experiment=99", 404),
        ("trials=1&points=2", 422),
        ("trials=999999999999999999", 404),
        ("trials=" + ",".join(map(str, range(1, 203))), 422),
        ("trials=1,1,1", 200),
    ],
)
def test_what_is_wrong_is_refused(api: TestClient, submit: Callable[..., int], query: str, status: int) -> None:
    submit()
    answer = api.get(f"/v1/curves?{query}")
    assert answer.status_code == status, answer.text
    if status == 200:
        assert [curve["epoch"] for curve in answer.json()["curves"]] == [[]]
