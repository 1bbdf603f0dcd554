"""Tune's scheduler for a spec, with what earlier passes learnt."""

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from service.queue.driver_reads import Curve
from service.specs.search import best_direction
from service.specs.spec import Asha, Fifo
from workers.trainable import COMPARED_EPOCH


def make_scheduler(wanted: Fifo | Asha, earlier: Iterable[Curve] = ()) -> TrialScheduler:
    """The scheduler of a pass. `earlier` are the epochs of trials that are final already.

    Those take part in every comparison they came as far as, as if the driver had never changed.
    """
    if isinstance(wanted, Fifo):
        return FIFOScheduler()  # type: ignore[no-untyped-call]
    return _Halving(wanted, earlier)


class _Halving(ASHAScheduler):
    """Successive halving that stops nothing after the last comparison: a trial's own end comes later."""

    def __init__(self, wanted: Asha, earlier: Iterable[Curve]) -> None:
        super().__init__(
            time_attr=COMPARED_EPOCH,
            metric=wanted.metric,
            mode=best_direction(wanted.metric),
            grace_period=wanted.grace_epochs,
            reduction_factor=wanted.reduction,
            max_t=wanted.max_epochs or sys.maxsize,
            stop_last_trials=False,
        )
        sign = 1 if best_direction(wanted.metric) == "max" else -1
        for curve in earlier:
            trial: Any = SimpleNamespace(trial_id=f"earlier-{curve.trial_id}")  # all that a bracket asks of it
            for epoch, value in curve.points:
                self._brackets[0].on_result(trial, epoch, sign * value)
