"""What a planned trial will cost: its network's size, its steps, and how long they take by what was measured before.

Functions take a Session and change nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session

from service.database import Experiment, Result, Trial
from service.specs.planner import Facts
from ttsv.config.trial import TrialConfig
from ttsv.data.catalog import DatasetInfo, dataset_info, training_images
from ttsv.errors import ConfigError
from ttsv.models.counts import Cost, network_cost

_PASSES = 3
"""A step takes about three times the multiply-accumulates of a forward pass: backward has two products for each."""

Key = tuple[str, str, str, float | None]
"""Data set, network, layer and rank: what decides the time of a step, batch and machine aside."""


@dataclass(frozen=True)
class Estimate:
    """Of one trial. What is None is not known: `reasons` says why. `seconds` are those of training alone."""

    parameters: int | None
    multiply_accumulates: int | None
    compression: float | None
    steps: int | None
    seconds: float | None
    reasons: tuple[str, ...]
    basis: str | None
    """How `seconds` came about."""


@dataclass(frozen=True)
class _Measured:
    trial_id: int
    step_seconds: float
    multiply_accumulates: int
    batch_size: int


class Estimator:
    """Estimates the trials of one spec, from what the trials of a project (None: of all) measured.

    `facts`: what is known of data sets.
    """

    def __init__(
        self,
        session: Session,
        trials: Iterable[TrialConfig],
        project_id: int | None = None,
        facts: Facts = dataset_info,
    ) -> None:
        self._facts = facts
        wanted = {key_of(config) for config in trials}
        self._measured = _newest(session, wanted, project_id)
        self._any = _largest_of_all(session, project_id)

    def estimate(self, config: TrialConfig) -> Estimate:
        """One trial's."""
        info = self._facts(config.dataset)
        cost = _cost(info, *key_of(config))
        reasons = [cost.reason] if cost.reason else []
        images = training_images(config.dataset, config.training.validation, info)
        steps = None
        if images is None:
            reasons.append(f"how many images {config.dataset} has is known once it is read")
        else:
            batches = -(-images // config.training.batch_size)
            steps = config.training.epochs * min(batches, config.training.steps or batches)
        seconds, basis = None, None
        if steps is not None:
            step_seconds, basis = self._step_seconds(config, cost)
            seconds = None if step_seconds is None else steps * step_seconds
            if seconds is None:
                reasons.append("nothing was measured yet from which the time could be told")
        return Estimate(
            cost.parameters, cost.multiply_accumulates, cost.compression, steps, seconds, tuple(reasons), basis
        )

    def _step_seconds(self, config: TrialConfig, cost: Cost) -> tuple[float | None, str | None]:
        batch = config.training.batch_size
        if found := self._measured.get(key_of(config)):
            basis = f"the steps of trial {found.trial_id}, the newest of this data set, network, layer and rank"
            if found.batch_size != batch:
                basis += f", of {found.batch_size} images each"
            return found.step_seconds * batch / found.batch_size, basis
        if self._any is None or cost.multiply_accumulates is None:
            return None, None
        work = self._any.multiply_accumulates * self._any.batch_size * _PASSES
        if cost.multiply_accumulates * batch * _PASSES > _FARTHEST * work:
            return None, None
        rate = work / self._any.step_seconds
        basis = (
            f"{_PASSES} times the multiply-accumulates of a forward pass, at {rate:.3g} of them a second as in trial "
            f"{self._any.trial_id}"
        )
        return cost.multiply_accumulates * batch * _PASSES / rate, basis


def key_of(config: TrialConfig) -> Key:
    """A trial's."""
    return config.dataset, config.model, config.layer, config.rank


_FARTHEST = 100
"""How many times the work of a measured step another may do whose time is told from it: small ones are all overhead."""


@cache
def _cost(info: DatasetInfo | None, dataset: str, model: str, layer: str, rank: float | None) -> Cost:
    if info is None:
        return Cost(reason=f"the images of {dataset} are known once they are read")
    try:
        return network_cost(
            model,
            layer=layer,
            rank=rank,
            in_channels=info.channels,
            image_size=info.image_size,
            num_classes=info.classes,
        )
    except ConfigError as error:
        return Cost(reason=str(error))


def newest_measured(measured: ColumnElement[bool], wanted: Iterable[Key], project_id: int | None) -> Select[int]:
    """The newest trials, one of each key, of whose results something holds."""
    keys = set(wanted)
    return (
        select(func.max(Trial.id))
        .join(Result, Result.trial_id == Trial.id)
        .where(
            measured,
            Trial.dataset.in_({key[0] for key in keys}),
            Trial.model.in_({key[1] for key in keys}),
            *_visible(project_id),
        )
        .group_by(Trial.dataset, Trial.model, Trial.layer, Trial.rank)
    )


def _newest(session: Session, wanted: set[Key], project_id: int | None) -> dict[Key, _Measured]:
    """The newest measured trial of each key."""
    newest = newest_measured(Result.step_seconds > 0, wanted, project_id)
    rows = session.execute(_MEASURED.where(Trial.id.in_(newest)))
    return {(row.dataset, row.model, row.layer, row.rank): _measured(row) for row in rows}


def _largest_of_all(session: Session, project_id: int | None) -> _Measured | None:
    query = _MEASURED.where(Result.step_seconds > 0, Result.multiply_accumulates > 0, *_visible(project_id))
    row = session.execute(query.order_by(Result.multiply_accumulates.desc(), Trial.id.desc()).limit(1)).first()
    return None if row is None else _measured(row)


_MEASURED = select(
    Trial.id,
    Trial.dataset,
    Trial.model,
    Trial.layer,
    Trial.rank,
    Trial.config,
    Result.step_seconds,
    Result.multiply_accumulates,
).join(Result, Result.trial_id == Trial.id)


def _visible(project_id: int | None) -> tuple[Any, ...]:
    if project_id is None:
        return ()
    return (Trial.experiment_id.in_(select(Experiment.id).where(Experiment.project_id == project_id)),)


def _measured(row: Any) -> _Measured:
    return _Measured(row.id, row.step_seconds, row.multiply_accumulates, row.config["training"]["batch_size"])
