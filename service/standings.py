"""SQL of the data sets that there are trials of, and how much was measured on each. Functions take a Session."""

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.models import Experiment, Score, ScoreBoard, Trial


@dataclass(frozen=True)
class Standing:
    """A data set: its protocols (boards) and the cells that stand on them; none: there are trials, but no result."""

    dataset: str
    boards: int
    cells: int


def standings(session: Session, scope: int) -> list[Standing]:
    """Data sets by name, of a project or (`scope` 0) of all."""
    query = (
        select(ScoreBoard.dataset, func.count(ScoreBoard.id.distinct()), func.count(Score.id))
        .join(Score, Score.board_id == ScoreBoard.id)
        .where(ScoreBoard.scope == scope)
        .group_by(ScoreBoard.dataset)
    )
    found = {dataset: Standing(dataset, boards, cells) for dataset, boards, cells in session.execute(query)}
    names = sorted({*found, *_names(session, scope)})
    return [found.get(name, Standing(name, 0, 0)) for name in names]


def _names(session: Session, scope: int) -> Iterator[str]:
    """The data sets of all trials: one step along the index for each, however many trials it has."""
    query = select(Trial.dataset).order_by(Trial.dataset).limit(1)
    if scope:
        query = query.join(Experiment).where(Experiment.project_id == scope)
    name = session.scalar(query)
    while name is not None:
        yield name
        name = session.scalar(query.where(Trial.dataset > name))
