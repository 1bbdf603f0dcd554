"""SQL of epoch points: pages of a trial's epochs, or a selection that draws the same curves."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, TypeAlias

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.database import EpochPoint

METRICS = tuple(c.key for c in EpochPoint.__table__.columns if c.key not in ("trial_id", "epoch"))
_READ_AT_ONCE = 1000

Point: TypeAlias = Mapping[str, Any]
"""One epoch: its number, whole, under "epoch", and of the metrics asked for numbers, null where there is none."""


def page(session: Session, trial_id: int, metrics: Sequence[str], *, limit: int, after: int = 0) -> list[Point]:
    """At most `limit` epochs numbered above `after`, in their order; only these columns are read."""
    names = ("epoch", *metrics)
    query = (
        select(*(getattr(EpochPoint, name) for name in names))
        .where(EpochPoint.trial_id == trial_id, EpochPoint.epoch > after)
        .order_by(EpochPoint.epoch)
        .limit(limit)
    )
    return [dict(zip(names, row, strict=True)) for row in session.execute(query)]


def sample(session: Session, trial_id: int, metrics: Sequence[str], points: int, *, after: int = 0) -> list[Point]:
    """At most `points` (3 or more) of the epochs above `after`, the first and the last among them (`thin`)."""
    every: list[Point] = []
    while len(found := page(session, trial_id, metrics, limit=_READ_AT_ONCE, after=after)) == _READ_AT_ONCE:
        every += found
        after = found[-1]["epoch"]
    return thin(every + found, metrics, points)


def samples(session: Session, trial_ids: Sequence[int], metrics: Sequence[str], points: int) -> dict[int, list[Point]]:
    """Of each trial that has epochs at most `points` of them, as `sample` has them: all in one statement."""
    names = ("epoch", *metrics)
    query = (
        select(EpochPoint.trial_id, *(getattr(EpochPoint, name) for name in names))
        .where(EpochPoint.trial_id.in_(trial_ids))
        .order_by(EpochPoint.trial_id, EpochPoint.epoch)
        .execution_options(yield_per=_READ_AT_ONCE)
    )
    return {
        trial_id: thin([dict(zip(names, row[1:], strict=True)) for row in rows], metrics, points)
        for trial_id, rows in groupby(session.execute(query), key=itemgetter(0))
    }


def thin(every: Sequence[Point], metrics: Sequence[str], points: int) -> list[Point]:
    """Largest-triangle-three-buckets (Steinarsson 2013): epochs as they are, no means.

    The inner epochs are cut into `points` - 2 buckets; of each, the epoch is kept that spans the largest triangle with
    the one kept before and the mean of the next bucket, summed over the metrics, each in units of its range. A metric
    that is null at a corner does not count there.
    """
    if len(every) <= points:
        return list(every)
    kept = [every[0]]
    inner = len(every) - 2
    edges = [1 + bucket * inner // (points - 2) for bucket in range(points - 1)]
    scales = {name: scale for name in metrics if (scale := _range(every, name)) > 0}
    for (start, end), following in zip(pairwise(edges), [*edges[2:], len(every)], strict=True):
        ahead = every[end:following]
        epoch = sum(point["epoch"] for point in ahead) / len(ahead)
        means = {name: mean for name in scales if (mean := _mean(ahead, name)) is not None}

        def area(point: Point, last: Point = kept[-1], epoch: float = epoch, means: Point = means) -> float:
            total = 0.0
            for name, mean in means.items():
                a, b = last[name], point[name]
                if a is not None and b is not None:
                    width, reach = epoch - last["epoch"], point["epoch"] - last["epoch"]
                    total += abs(width * (b - a) - reach * (mean - a)) / scales[name]
            return total

        kept.append(max(every[start:end], key=area))
    return [*kept, every[-1]]


def _range(points: Sequence[Point], name: str) -> float:
    values = [point[name] for point in points if point[name] is not None]
    return float(max(values) - min(values)) if values else 0.0


def _mean(points: Sequence[Point], name: str) -> float | None:
    values = [point[name] for point in points if point[name] is not None]
    return sum(values) / len(values) if values else None
