"""The tables."""

from service.models.access import ApiKey, Project
from service.models.base import Base, Timestamp, now
from service.models.experiments import EPOCHS_DONE, Artifact, EpochPoint, Event, Experiment, Tag, Tally, Trial
from service.models.results import Protocol, Result, Score, ScoreBoard, ScoreRank
from service.models.running import IdempotencyKey, Webhook, WebhookDelivery, Worker
from service.states import OPEN_EXPERIMENTS, OPEN_TRIALS, ExperimentState, TrialState

__all__ = [
    "EPOCHS_DONE",
    "OPEN_EXPERIMENTS",
    "OPEN_TRIALS",
    "ApiKey",
    "Artifact",
    "Base",
    "EpochPoint",
    "Event",
    "Experiment",
    "ExperimentState",
    "IdempotencyKey",
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
