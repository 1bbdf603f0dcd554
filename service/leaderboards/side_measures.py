"""What the sides of a comparison have of each metric: every side under one of its protocols, held to the baseline.

A side may have results under several protocols. Those count under which most sides have the metric, as what differs
between two means under the same protocol can be said, and between others nothing.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from service.leaderboards.corruption_baselines import METRIC
from service.leaderboards.counted_results import Counted
from service.leaderboards.leaderboard import changes_from
from service.leaderboards.matrix import under
from service.leaderboards.metrics import Measure, Metric, spread
from service.leaderboards.protocols import Record, differences
from service.leaderboards.sides import SideMeasure, Unequal
from service.leaderboards.significance import chance, unbeaten
from ttsv.metrics.catalog import CERTIFIED_RADII

_OF_IMAGES = {
    "accuracy": "accuracy",
    "top5_accuracy": "accuracy",
    "robust_accuracy": "autoattack",
    "pgd_accuracy": "pgd",
    **dict.fromkeys(CERTIFIED_RADII, "certified"),
}
"""Metrics that count images, each judged by itself: where a protocol says of how many."""


@dataclass
class Part:
    """The trials of one side in one row: how many different ones, and their results."""

    trials: int
    results: list[Counted]
    baselines: dict[int, str | None]

    def numbers(self, metric: Metric, column: int) -> dict[str, list[float]]:
        """By protocol (`under`) the values of a metric."""
        found: dict[str, list[float]] = {}
        for result in self.results:
            if (value := result.values[column]) is not None:
                baseline = [self.baselines[result.trial_id]] if metric is METRIC else []
                found.setdefault(under(result.protocol, *baseline), []).append(float(value))
        return found


@dataclass
class Numbers:
    """Of one row and metric, by side: the protocol that was chosen, and what is measured under it."""

    protocols: list[str | None] = field(default_factory=list)
    measures: list[Measure | None] = field(default_factory=list)

    def reference(self, baseline: int) -> int | None:
        """The side to which others are held: the baseline or, where it has no number, the first that has."""
        order = [baseline, *range(len(self.protocols))]
        return next((side for side in order if self.protocols[side] is not None), None)


def numbers_of(
    shown: Collection[Sequence[Part | None]],
    every: Collection[Sequence[Part | None]],
    metrics: Sequence[Metric],
    baseline: int,
) -> list[dict[Metric, Numbers]]:
    """Of each row shown, by metric, the numbers of its sides; without metrics that no side has.

    `metrics` are those of the results' values, in their order. Which protocols are chosen `every` row decides.
    """
    rows: list[dict[Metric, Numbers]] = [{} for _ in shown]
    for column, metric in enumerate(metrics):
        standing = _standing(every, metric, column)
        for numbers, parts in zip(rows, shown, strict=True):
            one = _numbers(parts, metric, column, standing)
            if one.reference(baseline) is not None:
                numbers[metric] = one
    return rows


def unequal(rows: Iterable[Mapping[Metric, Numbers]], baseline: int, records: Mapping[str, Record]) -> list[Unequal]:
    """Where the numbers of a side are of another protocol than those that it is held to."""
    found: dict[tuple[int, int, str, str], dict[str, None]] = {}
    for numbers in rows:
        for metric, one in numbers.items():
            reference = one.reference(baseline)
            theirs = None if reference is None else one.protocols[reference]
            for side, mine in enumerate(one.protocols):
                if reference is not None and theirs is not None and mine not in (None, theirs):
                    found.setdefault((side, reference, mine or "", theirs), {})[metric.value] = None
    return [
        Unequal(side, other, list(metrics), differences(records[mine], records[theirs]))
        for (side, other, mine, theirs), metrics in sorted(found.items())
    ]


def _standing(rows: Iterable[Sequence[Part | None]], metric: Metric, column: int) -> dict[str, int]:
    """Protocol -> its rank by how many sides have the metric under it, and how many results do."""
    sides: defaultdict[str, set[int]] = defaultdict(set)
    results: Counter[str] = Counter()
    for row in rows:
        for side, part in enumerate(row):
            for protocol, values in part.numbers(metric, column).items() if part is not None else ():
                sides[protocol].add(side)
                results[protocol] += len(values)
    return {
        name: rank
        for rank, name in enumerate(sorted(sides, key=lambda name: (-len(sides[name]), -results[name], name)))
    }


def _numbers(row: Sequence[Part | None], metric: Metric, column: int, standing: Mapping[str, int]) -> Numbers:
    """Of each side what it has under the first of its protocols."""
    found = Numbers()
    for part in row:
        known = {} if part is None else part.numbers(metric, column)
        chosen = min(known, key=standing.__getitem__, default=None)
        found.protocols.append(chosen)
        found.measures.append(None if chosen is None else spread(known[chosen]))
    return found


def side_measures(
    metric: Metric,
    numbers: Numbers,
    row: Sequence[Part | None],
    baseline: int,
    index: Mapping[str, int],
    records: Mapping[str, Record],
) -> list[SideMeasure | None]:
    """Of a row's sides, by their numbers, what is said of a metric; `index` numbers the protocols."""
    name = metric.value
    common = Counter(protocol for protocol in numbers.protocols if protocol is not None).most_common(1)[0][0]
    rivals = [
        measure if protocol == common else None
        for protocol, measure in zip(numbers.protocols, numbers.measures, strict=True)
    ]
    # As on leaderboards a side that lacks seeds is no match for one that has all.
    whole = [
        measure if measure and part and measure.seeds == part.trials else None
        for measure, part in zip(rivals, row, strict=True)
    ]
    best = unbeaten(whole if any(whole) else rivals, metric)
    base = numbers.measures[baseline]
    found: list[SideMeasure | None] = []
    for side, (protocol, one, part) in enumerate(zip(numbers.protocols, numbers.measures, row, strict=True)):
        if protocol is None or one is None or part is None:
            found.append(None)
            continue
        change = None
        if base is not None and side != baseline and protocol == numbers.protocols[baseline]:
            change = changes_from({name: base}, {name: one}, [name])[name]
        images = _images(metric, records[protocol])
        found.append(
            SideMeasure(
                protocol=index[protocol],
                seeds=one.seeds,
                trials=part.trials,
                mean=one.mean,
                std=one.std,
                min=one.least,
                max=one.largest,
                images=images,
                binomial=_binomial(one, images),
                difference=None if change is None else change.mean,
                error=None if change is None else change.error,
                chance=None if change is None or change.error is None or base is None else chance(one, base),
                best=side in best,
            )
        )
    return found


def _images(metric: Metric, record: Record) -> int | None:
    """Of how many images a metric is the share, where its protocol says so."""
    images = record.get("images")
    count = images.get(_OF_IMAGES.get(metric.value, "")) if isinstance(images, dict) else None
    return count if type(count) is int and count > 0 else None


def _binomial(one: Measure, images: int | None) -> float | None:
    """The standard error of a single share by the number of its images; of none or all of them it says nothing."""
    if images is None or one.seeds > 1 or not 0 < one.mean < 1:
        return None
    return math.sqrt(one.mean * (1 - one.mean) / images)
