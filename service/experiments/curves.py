"""Curves of many trials over epochs: of those that are named, or of an experiment's best cells with all their seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import Experiment, Trial
from service.errors import NotFoundError
from service.experiments import epoch_points
from service.specs.columns import Columns, columns_of, value_of
from ttsv.config.fields import FieldValues

_DIGITS = 7


@dataclass(frozen=True)
class Curve:
    """A trial's epochs by column: `epoch`, and the values of each metric in the order in which they were asked for.

    `fields` are its values in the columns that tell the trials apart, by path.
    """

    trial: int
    experiment_id: int
    number: int
    cell: str
    seed: int
    state: str
    epochs: int
    best_val_accuracy: float | None
    validated_on: str
    fields: FieldValues
    epoch: list[int]
    values: list[list[float | None]]


@dataclass(frozen=True)
class Curves:
    """Curves of several trials, and the fields that tell these apart."""

    metrics: Sequence[str]
    columns: Columns
    curves: list[Curve]


def best_trials(session: Session, experiment_id: int, cells: int, most: int) -> list[int]:
    """All seeds of the cells with the largest mean of their trials' best epochs, at most so many trials.

    Epochs are measured on the images that `training.validation` names. Of the first cell for all of whose seeds there
    is no room, and of those after it, there is none: a mean over some of its seeds would be taken for that of all. (Of
    the very first there are so many as there is room for.)
    """
    mean = func.avg(Trial.best_val_accuracy)
    here = Trial.experiment_id == experiment_id
    best = (
        select(Trial.cell, func.min(Trial.dataset))
        .where(here, Trial.best_val_accuracy.is_not(None))
        .group_by(Trial.cell)
        .order_by(mean.desc(), Trial.cell)
        .limit(cells)
    )
    rows = session.execute(best).all()
    order = {cell: index for index, (cell, _) in enumerate(rows)}
    cells_of = Trial.dataset.in_({dataset for _, dataset in rows}), Trial.cell.in_(order)
    # By their cells, and not by the index of the experiment, all of whose rows SQLite would read once more.
    seeds = select(Trial.id, Trial.cell).where(*cells_of, Trial.experiment_id + 0 == experiment_id)
    found = session.execute(seeds.order_by(Trial.id)).all()
    seeds_of: dict[str, list[int]] = {cell: [] for cell in order}
    for trial_id, cell in found:
        seeds_of[cell].append(trial_id)
    chosen: list[int] = []
    for trials in seeds_of.values():
        if chosen and len(chosen) + len(trials) > most:
            break
        chosen += trials
    return chosen[:most]


def curves(
    session: Session, trial_ids: Sequence[int], metrics: Sequence[str], points: int, *, project_id: int | None = None
) -> Curves:
    """The epochs of trials, of each at most `points` (3 or more) that draw the same curves (`epoch_points.thin`).

    Raises `NotFoundError` for a trial that is not there, or not of this project's if one is given.
    """
    query = select(Trial).join(Experiment).where(Trial.id.in_(trial_ids), Experiment.deleted_at.is_(None))
    if project_id is not None:
        query = query.where(Experiment.project_id == project_id)
    trials = {trial.id: trial for trial in session.scalars(query)}
    if missing := [trial_id for trial_id in trial_ids if trial_id not in trials]:
        raise NotFoundError(f"there is no trial {missing[0]}")
    configs = [trials[trial_id].config for trial_id in trial_ids]
    columns = columns_of(configs, hidden=("seed",), without_decided=True) if configs else None
    samples = epoch_points.samples(session, trial_ids, metrics, points)
    found = []
    for trial_id in trial_ids:
        trial = trials[trial_id]
        drawn = samples.get(trial_id, [])
        found.append(
            Curve(
                trial=trial_id,
                experiment_id=trial.experiment_id,
                number=trial.number,
                cell=trial.cell,
                seed=trial.seed,
                state=trial.state.value,
                epochs=trial.epochs,
                best_val_accuracy=trial.best_val_accuracy,
                validated_on=str(value_of(trial.config, "training.validation")),
                fields=columns.of(trial.config) if columns else {},
                epoch=[point["epoch"] for point in drawn],
                values=[[_short(point[name]) for point in drawn] for name in metrics],
            )
        )
    return Curves(metrics, columns or Columns([], {}), found)


def _short(value: float | None) -> float | None:
    """As many digits as a picture shows."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")
