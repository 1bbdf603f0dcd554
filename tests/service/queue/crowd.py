"""A worker process of a crowd that works a queue off."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from service.database.engine import Database
from service.errors import LeaseLostError
from service.queue import leases
from service.queue.trials import HeldExperiment, ProtocolRecord
from tests.held import reported, under, unfinished_trials


@dataclass
class Report:
    """What a worker did: the trials whose results it stored, its claims, and the leases that it lost."""

    process: int
    finished: list[int] = field(default_factory=list)
    claims: int = 0
    lost: int = 0


def work(url: str, name: str, *, point: dict[str, Any], result: dict[str, Any]) -> Report:
    """Takes experiments until none is left, and gives every trial these epochs and this result."""
    database, report = Database(url), Report(os.getpid())

    def write(function: Callable[..., Any], *args: Any) -> Any:
        return database.write(lambda session: function(session, *args))

    while (lease := write(leases.claim, name, {"pid": 1})) is not None:
        report.claims += 1
        try:
            for trial in write(unfinished_trials, lease):
                database.write(under(lease, HeldExperiment.start_trial, trial.id))
                for epoch in (1, 2):
                    database.write(under(lease, HeldExperiment.add_epoch, trial.id, reported(point | {"epoch": epoch})))
                write(leases.renew, lease)
                protocol = ProtocolRecord("p" * 64, {})
                database.write(under(lease, HeldExperiment.finish_trial, trial.id, result, protocol))
                report.finished.append(trial.id)
            assert write(leases.complete, lease)
        except LeaseLostError:
            report.lost += 1
    database.close()
    return report
