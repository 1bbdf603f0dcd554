"""The states of experiments, trials and nodes: what the database, the API and its clients call them."""

from enum import StrEnum


class ExperimentState(StrEnum):
    """`succeeded`: every trial did, or was stopped early by its scheduler. `failed`: all are final and some did not.

    `stopped`: running trials finished and queued ones were dropped, as asked.
    """

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TrialState(StrEnum):
    """`diverged` is apart from `failed`: the same seed would diverge again.

    `early_stopped`: a scheduler found it worse than its siblings; it has epochs and no result.
    """

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    EARLY_STOPPED = "early_stopped"
    FAILED = "failed"
    DIVERGED = "diverged"
    CANCELLED = "cancelled"


class NodeState(StrEnum):
    """`left`: it was stopped, or is not heard of any more. `refused`: it asked to join, and does not fit."""

    ALIVE = "alive"
    LEFT = "left"
    REFUSED = "refused"


OPEN_TRIALS = (TrialState.QUEUED, TrialState.RUNNING)
OPEN_EXPERIMENTS = (ExperimentState.QUEUED, ExperimentState.RUNNING, ExperimentState.PAUSED)
