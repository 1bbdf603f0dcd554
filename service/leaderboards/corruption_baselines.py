"""Which boards a mean corruption error stands on: it is relative to a baseline, of which no other metric knows.

A result that has one stands on the board of its protocol without that number, beside results that have none, and with
all its numbers on a board for its protocol and that baseline, where only results of the same one are. Those who ask
for the metric, or name the board's protocol, are shown it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, case

from service.database import Protocol, Result
from service.leaderboards.metrics import Metric

METRIC = Metric.MCE
_CORRUPTIONS, _BASELINE = METRIC.reading.protocol.split(".")

BASELINE: ColumnElement[str | None] = case(
    (Result.mce.is_not(None), Result.evaluation[_CORRUPTIONS]["baseline_sha256"].as_string())
)
"""The baseline of a result's mean corruption error; null without one."""
IN_RECORD: ColumnElement[str] = Protocol.record[_CORRUPTIONS][_BASELINE].as_string()
"""That of a protocol's record."""


def baseline_of(record: Mapping[str, Any]) -> str | None:
    """The baseline that a board's record names."""
    part = record.get(_CORRUPTIONS)
    return part.get(_BASELINE) if isinstance(part, Mapping) else None


def with_baseline(record: Mapping[str, Any], baseline: str) -> dict[str, Any]:
    """The record of the board for this baseline."""
    return {**record, _CORRUPTIONS: {**(record.get(_CORRUPTIONS) or {}), _BASELINE: baseline}}


def without_baseline(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the results on a board: what decides all other metrics."""
    part = {name: value for name, value in record[_CORRUPTIONS].items() if name != _BASELINE}
    return {**record, _CORRUPTIONS: part}


def without_error(values: Sequence[float | None], metrics: Sequence[Metric]) -> Sequence[float | None]:
    """A result's values as they stand on the board of its protocol."""
    return [None if metric is METRIC else value for metric, value in zip(metrics, values, strict=True)]
