"""A trial's epochs and its result for tests that care about little of them."""

import dataclasses
from typing import Any

from ttsv.results import EpochMetrics, TrialResult

_PLAIN = TrialResult(
    accuracy=0.5,
    loss=1.0,
    ece=0.1,
    max_singular_value=1.0,
    compression=1.0,
    parameters=10,
    multiply_accumulates=100,
    train_seconds=1.0,
    constraint_seconds=0.0,
    step_seconds=0.1,
    constraint_step_seconds=0.0,
    eval_seconds=0.1,
    spectrum_seconds=0.01,
    latency_seconds=0.001,
    batch_seconds=0.05,
    peak_memory=None,
    selected_epoch=2,
    protocol={"split": "test"},
    environment={},
    layers=[],
)


def made_result(**changes: Any) -> TrialResult:
    """Some result, with these fields changed."""
    return dataclasses.replace(_PLAIN, **changes)


def made_epoch(number: int, **changes: Any) -> EpochMetrics:
    """The epoch of that number, of three, with these fields changed."""
    epoch = EpochMetrics(
        epoch=number,
        epochs=3,
        train_loss=1.0,
        train_accuracy=0.5,
        val_loss=1.0,
        val_accuracy=0.5,
        ort_loss=None,
        lr=0.1,
        seconds=0.1,
        constraint_seconds=0.0,
    )
    return dataclasses.replace(epoch, **changes)
