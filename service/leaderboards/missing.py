"""What no leaderboard shows: missing seeds, cells without a result, results that cannot be true."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, bindparam, false, func, select
from sqlalchemy.orm import Session

from service.database import Experiment, Result, Score, ScoreBoard, Trial, TrialState
from service.database.engine import among, driver_rows
from service.leaderboards.boards import MOST_MISSING, Hole, Invalid, Missing
from service.leaderboards.conditions import as_stored
from service.leaderboards.corruption_baselines import BASELINE
from service.leaderboards.filters import Question
from service.leaderboards.source import hashable
from service.specs.columns import default_of
from service.specs.states import OPEN_TRIALS
from ttsv.config.fields import FieldValue, TrialFields

MOST_LISTED = 100
"""Holes and invalid results that an answer names; all are counted."""


# Statements that every leaderboard asks, made once: to make one takes longer than to answer it.
_UNDONE = Trial.state.in_([state for state in TrialState if state is not TrialState.SUCCEEDED])
_AN_UNDONE = select(Trial.id).where(Trial.dataset == bindparam("dataset_name"), _UNDONE).limit(1)
_INVALID = select(Result.trial_id).where(~Result.valid)
_SOME_INVALID = _INVALID.limit(MOST_LISTED + 1)


@dataclass(frozen=True)
class _Try:
    """A trial of a cell, and the protocol of its result, if it has one."""

    trial_id: int
    seed: int
    state: TrialState
    failure: str | None
    protocol: str | None
    valid: bool | None
    baseline: str | None
    """That of its mean corruption error, if it has one."""

    def missing(self) -> Missing:
        """Why it adds nothing to a board on which it has no result."""
        if self.protocol is None:
            return Missing(self.trial_id, self.seed, self.state.value, self.failure)
        return Missing(self.trial_id, self.seed, "other_protocol" if self.valid else "invalid")


def _tries(session: Session, conditions: Sequence[ColumnElement[bool]]) -> dict[str, dict[str, list[_Try]]]:
    """Cell -> fingerprint -> the trials that have it, oldest first."""
    query = (
        select(Trial.cell, Trial.fingerprint, Trial.id, Trial.seed, Trial.state, Trial.failure)
        .add_columns(Result.protocol, Result.valid, BASELINE)
        .join(Experiment, Experiment.id == Trial.experiment_id)
        .outerjoin(Result, Result.trial_id == Trial.id)
        .where(*conditions)
        .order_by(Trial.id)
    )
    found: dict[str, dict[str, list[_Try]]] = {}
    for cell, fingerprint, *rest in session.execute(query):
        found.setdefault(cell, {}).setdefault(fingerprint, []).append(_Try(*rest))
    return found


def _missing(tries: dict[str, list[_Try]], protocol: str | None = None, baseline: str | None = None) -> list[Missing]:
    """Of each fingerprint without a valid result under a protocol the trial that may yet bring one, or the newest."""
    lacking = [
        mine
        for mine in tries.values()
        if not any(one.valid and protocol in (None, one.protocol) and baseline in (None, one.baseline) for one in mine)
    ]
    chosen = [next((one for one in reversed(mine) if one.state in OPEN_TRIALS), mine[-1]) for mine in lacking]
    return sorted((one.missing() for one in chosen), key=lambda one: one.seed)


class SeenTrials:
    """The trials of cells that lack results, to say which seeds are missing, and why."""

    def __init__(self, session: Session, question: Question, cells: Collection[str]) -> None:
        # Of the trials of cells that are shown it need not be asked again what they are.
        conditions = [Trial.dataset == question.dataset, *question.filters.of_experiments(question.scope)]
        self._tries = _tries(session, [*conditions, among(session, Trial.cell, list(cells))]) if cells else {}

    def missing(self, cell: str, protocol: str, baseline: str | None) -> list[Missing]:
        """The trials without a result under a protocol, and a baseline."""
        return _missing(self._tries[cell], protocol, baseline) if cell in self._tries else []


def _holes(session: Session, question: Question, is_invalid: ColumnElement[bool] | None) -> ColumnElement[bool] | None:
    """That a trial is of a cell without a valid result; None where there is no such trial."""
    # Trials that are not done, along an index; cells whose results are all invalid are found by those.
    if is_invalid is None and not driver_rows(session, _AN_UNDONE, {"dataset_name": question.dataset}):
        return None
    conditions, undone = question.of_trials(), (Trial.dataset == question.dataset, _UNDONE)
    without: ColumnElement[bool]
    if question.filters.choose_trials:
        valid = select(Trial.cell).join(Result, Result.trial_id == Trial.id).join(Experiment)
        without = Trial.cell.not_in(valid.where(*conditions, Result.valid))
    else:
        measured = (
            select(Score.cell)
            .join(ScoreBoard, ScoreBoard.id == Score.board_id)
            .where(Score.cell == Trial.cell, ScoreBoard.dataset == question.dataset, ScoreBoard.scope == question.scope)
            .correlate(Trial)
        )
        without = ~measured.exists()
    open_cells = select(Trial.cell).join(Experiment).where(*conditions, *undone, without)
    bad = false() if is_invalid is None else is_invalid
    bad_cells = select(Trial.cell).join(Experiment).where(*conditions, bad, without)
    # Cells may come twice: UNION would sort them, and read them all in the order of an index for it.
    cells = open_cells.union_all(bad_cells).subquery()
    return Trial.cell.in_(select(cells.c.cell))


def find_holes(session: Session, question: Question, is_invalid: ColumnElement[bool] | None) -> tuple[list[Hole], int]:
    """Cells without a valid result, in the order in which they were asked for: the first ones, and how many."""
    of_hole = _holes(session, question, is_invalid)
    if of_hole is None:
        return [], 0
    conditions = question.of_trials()
    grouped = (
        select(Trial.cell, func.count(Trial.fingerprint.distinct()).label("trials"), func.min(Trial.id).label("first"))
        .join(Experiment)
        .where(*conditions, of_hole)
        .group_by(Trial.cell)
        .subquery()
    )
    query = (
        select(grouped.c.cell, Trial.config, grouped.c.trials, func.count().over())
        .join(Trial, Trial.id == grouped.c.first)
        .order_by(grouped.c.first)
        .limit(MOST_LISTED)
    )
    rows = session.execute(query).all()
    named = [row[0] for row in rows]
    tries = _tries(session, [*conditions, among(session, Trial.cell, named)]) if rows else {}
    holes = [
        Hole(cell, _cell_of(config), trials, _missing(tries[cell])[:MOST_MISSING]) for cell, config, trials, _ in rows
    ]
    return holes, rows[0][3] if rows else 0


def hole_places(
    session: Session, question: Question, fields: tuple[str, str], is_invalid: ColumnElement[bool] | None
) -> dict[tuple[FieldValue, FieldValue], Counter[str]]:
    """By the values of two fields, tuples for lists: the trials of cells without a valid result, by what they are."""
    conditions, of_hole = question.of_trials(), _holes(session, question, is_invalid)
    if of_hole is None:
        return {}
    tries = _tries(session, [*conditions, of_hole])
    firsts = select(func.min(Trial.id)).join(Experiment).where(*conditions, of_hole).group_by(Trial.cell)
    told = [part for field in fields for part in as_stored(field)]
    found: dict[tuple[FieldValue, FieldValue], Counter[str]] = {}
    for cell, *values in session.execute(select(Trial.cell, *told).where(Trial.id.in_(firsts))):
        down, across = (
            hashable(default_of(field) if kind is None else value)
            for field, value, kind in zip(fields, values[::2], values[1::2], strict=True)
        )
        found.setdefault((down, across), Counter()).update(one.said for one in _missing(tries[cell]))
    return found


def find_invalid(
    session: Session, question: Question, is_invalid: ColumnElement[bool] | None
) -> tuple[list[Invalid], int]:
    """Results that do not count, the first ones, and how many."""
    if is_invalid is None:
        return [], 0
    query = (
        select(Trial.id, Trial.cell, Trial.config, Result.protocol, Result.violations, func.count().over())
        .join(Result, Result.trial_id == Trial.id)
        .join(Experiment)
        .where(*question.of_trials(), is_invalid)
        .order_by(Trial.id)
        .limit(MOST_LISTED)
    )
    rows = session.execute(query).all()
    found = [Invalid(row[0], row[1], _cell_of(row[2]), row[3], row[4] or []) for row in rows]
    return found, rows[0][5] if rows else 0


def invalid_condition(session: Session) -> ColumnElement[bool] | None:
    """That a trial has an invalid result; None if no trial has.

    Few have, and a planner that is told which looks at no others.
    """
    few = [trial for (trial,) in driver_rows(session, _SOME_INVALID)]
    if not few:
        return None
    return Trial.id.in_(few if len(few) <= MOST_LISTED else _INVALID)


def _cell_of(config: TrialFields) -> TrialFields:
    return {name: value for name, value in config.items() if name != "seed"}
