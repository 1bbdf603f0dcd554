"""From planned trials to rows of the table `trials`."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json
from sqlalchemy import func, insert, select, text
from sqlalchemy.orm import Session

from service.db import is_postgres
from service.grid import PlannedTrial
from service.models import Trial, TrialState


def trial_columns(planned: PlannedTrial) -> dict[str, Any]:
    """The columns that a trial's configuration decides."""
    config = planned.config
    return {
        "fingerprint": planned.fingerprint,
        "cell": planned.cell,
        "config": config.to_dict(),
        "dataset": config.dataset,
        "model": config.model,
        "layer": config.layer,
        "rank": config.rank,
        "lambda_ort": config.lambda_ort,
        "constraint": config.constraint,
        "delta": config.delta,
        "seed": config.seed,
        "epochs": config.training.epochs,
    }


def insert_trials(
    session: Session,
    experiment_id: int,
    planned: Sequence[PlannedTrial],
    *,
    first: int = 0,
    sources: Mapping[str, int] | None = None,
) -> None:
    """Queues trials, numbered from `first` on.

    `sources`, by fingerprint, makes re-evaluations of them: such a trial has no epochs.
    """
    rows = [
        {"experiment_id": experiment_id, "number": number, **trial_columns(trial)}
        for number, trial in enumerate(planned, first)
    ]
    if sources is not None:
        rows = [row | {"source_trial_id": sources[row["fingerprint"]], "epochs": 0} for row in rows]
    if rows and is_postgres(session):
        _insert_document(session, rows)
    elif rows:
        session.execute(insert(Trial), rows)


def _insert_document(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """All rows as one JSON document in one statement: of ten thousand it takes half the time, and triggers run once."""
    fresh = {"state": TrialState.QUEUED.value, "attempts": 0, "epoch": 0, "run_seconds": 0.0}
    names = ", ".join(f'"{name}"' for name in rows[0] | fresh)
    document = to_json([row | fresh for row in rows]).decode()
    session.execute(
        text(
            f"INSERT INTO trials ({names}) SELECT {names} "
            "FROM json_populate_recordset(NULL::trials, CAST(:document AS json))"
        ),
        {"document": document},
    )


def next_number(session: Session, experiment_id: int) -> int:
    """The number after the last trial's. The experiment must be locked."""
    last = session.scalar(select(func.max(Trial.number)).where(Trial.experiment_id == experiment_id))
    return 0 if last is None else last + 1


def fingerprints(session: Session, experiment_id: int) -> set[str]:
    """The fingerprints of the experiment's trials."""
    return set(session.scalars(select(Trial.fingerprint).where(Trial.experiment_id == experiment_id)))
