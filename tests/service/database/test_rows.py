"""Rows of several tables that are written at once, on each database."""

import math
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import IntegrityError

from service.database import EpochPoint, Protocol, Trial, TrialState
from service.database.engine import Database
from service.database.rows import Rows, Way, write_rows
from tests.machinery import Submit, Table

LOSSES = {"train_loss": 1, "train_accuracy": 0.1, "val_loss": 2.5, "val_accuracy": 0.3, "ort_loss": None, "lr": 0.1}


def point(trial_id: int, **columns: Any) -> dict[str, Any]:
    return {"trial_id": trial_id, "epoch": 1, **LOSSES, "seconds": 1.0, "constraint_seconds": 0.0, **columns}


def test_tables_are_written_together(database: Database, submit: Submit, table: Table) -> None:
    submit(seeds=2)
    first, second = (trial.id for trial in table(Trial))
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    known = {"fingerprint": "p", "record": {"z": "first", "a": [None, 1e-300]}}
    for change in ({}, {"val_loss": math.inf, "train_loss": 3e8}):
        with database.writer.begin() as connection:
            statements.clear()
            write_rows(
                connection,
                Rows(Trial, [{"id": second, "state": TrialState.FAILED, "error": 'it\'s "bad" \\'}], Way.CHANGE),
                Rows(EpochPoint, [point(first), point(second, **change)], Way.REPLACE),
                Rows(Protocol, [known if not change else {**known, "record": {}}], Way.ADD_MISSING),
                Rows(Protocol, []),
            )
        assert len(statements) == (1 if database.engine.dialect.name == "postgresql" else 3)
    assert [(one.state, one.error) for one in table(Trial)] == [
        (TrialState.QUEUED, None),
        (TrialState.FAILED, 'it\'s "bad" \\'),
    ]
    assert [(one.train_loss, one.val_loss, one.ort_loss) for one in table(EpochPoint)] == [
        (1.0, 2.5, None),
        (3e8, math.inf, None),
    ]
    with database.read() as session:
        (record,) = session.scalars(select(Protocol.record))
    assert list(record.items()) == [("z", "first"), ("a", [None, 1e-300])], "in its order"
    with pytest.raises(IntegrityError), database.writer.begin() as connection:
        write_rows(connection, Rows(Protocol, [known]))


def test_no_column_is_lost_that_the_first_row_does_not_name() -> None:
    with pytest.raises(ValueError, match="epoch_points: some rows name seconds, and some do not"):
        Rows(EpochPoint, [LOSSES, {**LOSSES, "seconds": 1.0}])
