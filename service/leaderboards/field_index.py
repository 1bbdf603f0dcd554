"""The index of trials by their fields: rows of a few words, so that a hundred thousand are looked through in no time.

Every version of this code that knows the index enters the trials that it makes. Those of versions before are entered by
`service.upkeep.migrate`, a few thousand at a time; until then lists are read from the trials themselves.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from service.database import FieldIndex, Tally, Trial
from service.database.engine import is_postgres
from service.database.rows import Rows, write_rows
from service.specs.columns import told

_COLUMNS = tuple(name for name in map(attrgetter("key"), FieldIndex.__table__.c) if name not in ("trial_id", "fields"))
_BATCH = 5000
"""Trials that `fill` enters at a time: a second in which nobody else writes on SQLite."""


def enter(session: Session, trials: Iterable[Mapping[str, Any]]) -> None:
    """Enters new trials, given by their columns and `trial_id`, in the caller's transaction."""
    of_cells: dict[str, Any] = {}
    rows = []
    for trial in trials:
        if trial["cell"] not in of_cells:
            named = told(trial["config"])
            of_cells[trial["cell"]] = {path: value for path, value in named.items() if path not in _COLUMNS}
        columns = {name: trial[name] for name in _COLUMNS}
        rows.append({"trial_id": trial["trial_id"], **columns, "fields": of_cells[trial["cell"]]})
    write_rows(session.connection(), Rows(FieldIndex, rows))


def fill(session: Session) -> bool:
    """Enters trials that are missing, the oldest first; whether there may be more."""
    if is_whole(session):
        return False
    if is_postgres(session):  # two that fill it would enter the same ones (SQLite has one writer)
        session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended('ttsv field index', 0))"))
    indexed = select(FieldIndex.trial_id).where(FieldIndex.trial_id == Trial.id).exists()
    columns = [getattr(Trial, name) for name in (*_COLUMNS, "cell", "config")]
    query = select(Trial.id.label("trial_id"), *columns).where(~indexed).order_by(Trial.id).limit(_BATCH)
    query = query.with_for_update(read=True, key_share=True, of=Trial)  # nobody deletes them meanwhile
    rows = [dict(row) for row in session.execute(query).mappings()]
    enter(session, rows)
    return len(rows) == _BATCH


def is_whole(session: Session) -> bool:
    """Whether every trial is in it."""
    trials, entered = session.execute(_counts()).one()
    return bool(trials == entered)


@cache
def _counts() -> Any:
    trials = select(func.coalesce(func.sum(Tally.trials), 0)).scalar_subquery()
    return select(trials, select(func.count()).select_from(FieldIndex).scalar_subquery())
