"""Which results count in a cell's score, and what score they make.

A cell's results count where they are valid and their experiment is not archived; a trial that ran more than once (the
same fingerprint in several experiments) counts once per protocol, with its newest result. There is one board for every
scope, data set and protocol: scope 0 has the trials of all projects, the others those of one. Results with a mean
corruption error are on two: see `corruption_baselines`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypedDict

from sqlalchemy import select

from service.database import Experiment, Result, Trial
from service.leaderboards.corruption_baselines import BASELINE, BaselineProtocols, without_error
from service.leaderboards.metrics import Measures, Metric, Stored, measures, to_stored

EVERYONE = 0
"""The scope of all projects."""
METRIC_COLUMNS = tuple(getattr(Result, metric.value) for metric in Metric)
_FIELDS = ("model", "layer", "constraint", "rank")

CELL_TRIALS = (
    select(Trial.id, Trial.fingerprint, Experiment.project_id, Result.protocol, BASELINE)
    .add_columns(*METRIC_COLUMNS, *(getattr(Trial, name) for name in _FIELDS))
    .outerjoin(Result, (Result.trial_id == Trial.id) & Result.valid)
    .join(Experiment, Experiment.id == Trial.experiment_id)
    .where(Experiment.archived_at.is_(None))
)
"""Every trial that is not archived, with its result if that is valid: a row as `CellResults` takes it."""


@dataclass(frozen=True)
class Counted:
    """One result as it enters a score; `values` in the order of `Metric`."""

    trial_id: int
    fingerprint: str
    project_id: int | None
    protocol: str
    values: Sequence[float | None]
    fields: Sequence[Any] = ()
    """Of its cell, by which rows are filtered."""


class ScoreColumns(TypedDict):
    """What a score's row has of how it was made."""

    trial_id: int
    seeds: int
    trials: int
    metrics: Stored
    model: str
    layer: str
    constraint: str
    rank: float | None


@dataclass(frozen=True)
class MadeScore:
    """A cell's score as its results make it, of so many different trials."""

    trial_id: int
    seeds: int
    trials: int
    measures: Measures
    fields: Sequence[Any]

    def columns(self) -> ScoreColumns:
        """As they are written."""
        model, layer, constraint, rank = self.fields
        return {
            "trial_id": self.trial_id,
            "seeds": self.seeds,
            "trials": self.trials,
            "metrics": to_stored(self.measures),
            "model": model,
            "layer": layer,
            "constraint": constraint,
            "rank": rank,
        }


class CellResults:
    """The results of a cell, and how many different trials it has of each scope.

    These are counted by rows of all its trials, or told (`count`), where only rows with results are added.
    """

    def __init__(self, names: BaselineProtocols) -> None:
        self._names = names
        self._results: list[Counted] = []
        self._trials: dict[int, set[str]] = {}
        self._told: Mapping[int, int] = {}

    @property
    def scopes(self) -> set[int]:
        """All that results are of."""
        return {EVERYONE, *(one.project_id for one in self._results if one.project_id is not None)}

    def count(self, trials: Mapping[int, int]) -> None:
        """Takes so many different trials for those of each scope."""
        self._told = trials

    def add(self, row: Any) -> None:
        """One row of `CELL_TRIALS`."""
        trial_id, fingerprint, project_id, protocol, baseline = row[:5]
        for scope in (EVERYONE, project_id):
            if scope is not None:
                self._trials.setdefault(scope, set()).add(fingerprint)
        if protocol is not None:
            values = 5 + len(METRIC_COLUMNS)
            found = Counted(
                trial_id, fingerprint, project_id, protocol, row[5:values], row[values : values + len(_FIELDS)]
            )
            if baseline is not None:
                self._results.append(replace(found, protocol=self._names.name(protocol, baseline)))
                found = replace(found, values=without_error(found.values, tuple(Metric)))
            self._results.append(found)

    def scores(self) -> Iterator[tuple[tuple[int, str], MadeScore]]:
        """(scope, protocol) and the score there."""
        for (scope, protocol), counted in _by_board(self._results).items():
            found = measures(one.values for one in counted)
            newest_one, trials = counted[-1], self._told.get(scope) or len(self._trials[scope])
            yield (
                (scope, protocol),
                MadeScore(newest_one.trial_id, len(counted), trials, found, newest_one.fields),
            )


def newest(results: Iterable[Counted]) -> list[Counted]:
    """Of results that share fingerprint and protocol the newest, in the order of their trials."""
    of_trial = attrgetter("trial_id")
    found = {(counted.fingerprint, counted.protocol): counted for counted in sorted(results, key=of_trial)}
    return sorted(found.values(), key=of_trial)  # a dictionary keeps the place of the oldest


def _by_board(results: Iterable[Counted]) -> dict[tuple[int, str], list[Counted]]:
    """(scope, protocol) -> the results that count there, oldest first."""
    found: dict[tuple[int, str], list[Counted]] = {}
    by_scope: dict[int, list[Counted]] = {}
    for counted in results:
        for scope in (EVERYONE, counted.project_id):
            if scope is not None:
                by_scope.setdefault(scope, []).append(counted)
    for scope, mine in by_scope.items():
        for counted in newest(mine):
            found.setdefault((scope, counted.protocol), []).append(counted)
    return found
