"""Which boards a mean corruption error stands on: it is relative to a baseline, of which no other metric knows.

A result that has one stands on the board of its protocol without that number, beside results that have none, and with
all its numbers on a board for its protocol and that baseline, where only results of the same one are. Those who ask
for the metric, or name the board's protocol, are shown it.
"""

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, case, select

from service.database import Protocol, Result
from service.database.engine import upsert
from service.leaderboards.metrics import Metric
from service.leaderboards.protocols import Record
from ttsv.config.fields import Json
from ttsv.results import protocol_fingerprint

METRIC = Metric.MCE
_CORRUPTIONS, _BASELINE = METRIC.reading.protocol.split(".")

BASELINE: ColumnElement[str | None] = case(
    (Result.mce.is_not(None), Result.evaluation[_CORRUPTIONS]["baseline_sha256"].as_string())
)
"""The baseline of a result's mean corruption error; null without one."""
IN_RECORD: ColumnElement[str] = Protocol.record[_CORRUPTIONS][_BASELINE].as_string()
"""That of a protocol's record."""


def baseline_of(record: Record) -> str | None:
    """The baseline that a board's record names."""
    found = _corruptions(record).get(_BASELINE)
    return found if isinstance(found, str) else None


def with_baseline(record: Record, baseline: str) -> Record:
    """The record of the board for this baseline."""
    return {**record, _CORRUPTIONS: {**_corruptions(record), _BASELINE: baseline}}


def without_baseline(record: Record) -> Record:
    """The record of the results on a board: what decides all other metrics."""
    return {**record, _CORRUPTIONS: {name: one for name, one in _corruptions(record).items() if name != _BASELINE}}


def _corruptions(record: Record) -> Mapping[str, Json]:
    part = record.get(_CORRUPTIONS)
    return part if isinstance(part, dict) else {}


def without_error(values: Sequence[float | None], metrics: Sequence[Metric]) -> Sequence[float | None]:
    """A result's values as they stand on the board of its protocol."""
    return [None if metric is METRIC else value for metric, value in zip(metrics, values, strict=True)]


class BaselineProtocols:
    """The protocols of boards for a protocol and a baseline of mean corruption errors; `enter` those that are new."""

    def __init__(self, connection: Connection, *, enter: bool) -> None:
        self._connection, self._enter = connection, enter
        self._known: dict[tuple[str, str], str] = {}

    def name(self, protocol: str, baseline: str) -> str:
        """The protocol's fingerprint."""
        if (protocol, baseline) not in self._known:
            own = self._connection.scalar(select(Protocol.record).where(Protocol.fingerprint == protocol))
            record = with_baseline(own or {}, baseline)
            found = self._known[protocol, baseline] = protocol_fingerprint(record)
            if self._enter:
                new = upsert(self._connection)(Protocol).values(fingerprint=found, record=record)
                self._connection.execute(new.on_conflict_do_nothing())
        return self._known[protocol, baseline]
