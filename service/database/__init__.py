"""The database: tables, and the engine of SQLite or PostgreSQL under them.

`engine` opens it and says what a transaction is, `clock` what time it is, `outages` how to live through its absence,
`pagination` reads it page by page, `server` asks what it is; `tallies` are kept by triggers. Specs and errors may be
imported.
"""

from service.database.access import ApiKey, Person, Project
from service.database.base import Base, Timestamp
from service.database.clock import now
from service.database.experiments import (
    EPOCHS_DONE,
    OUT_OF_MEMORY,
    Artifact,
    Attempt,
    Environment,
    EpochPoint,
    EpochSpectra,
    Event,
    Experiment,
    FieldIndex,
    Tag,
    Tally,
    Trial,
)
from service.database.results import Protocol, Result, Score, ScoreBoard, ScoreRank
from service.database.running import ClusterNode, Home, IdempotencyKey, Webhook, WebhookDelivery, Worker
from service.specs.states import OPEN_EXPERIMENTS, OPEN_TRIALS, ExperimentState, TrialState

__all__ = [
    "EPOCHS_DONE",
    "OPEN_EXPERIMENTS",
    "OPEN_TRIALS",
    "OUT_OF_MEMORY",
    "ApiKey",
    "Artifact",
    "Attempt",
    "Base",
    "ClusterNode",
    "Environment",
    "EpochPoint",
    "EpochSpectra",
    "Event",
    "Experiment",
    "ExperimentState",
    "FieldIndex",
    "Home",
    "IdempotencyKey",
    "Person",
    "Project",
    "Protocol",
    "Result",
    "Score",
    "ScoreBoard",
    "ScoreRank",
    "Tag",
    "Tally",
    "Timestamp",
    "Trial",
    "TrialState",
    "Webhook",
    "WebhookDelivery",
    "Worker",
    "now",
]
