"""The order of a board's cells by each metric, kept as an index that leaderboards walk."""

import hashlib
from collections.abc import Sequence
from typing import TypedDict

from sqlalchemy import Connection, bindparam, delete, update

from service.database import ScoreRank
from service.database.rows import Rows, Way, write_rows
from service.leaderboards.counted_results import MadeScore
from service.leaderboards.metrics import Measure, Measures, Metric

ORDER = (ScoreRank.standing, ScoreRank.mean, ScoreRank.tie)
"""As the parts of a `Position`."""
_TURN = (
    update(ScoreRank)
    .where(ScoreRank.score_id == bindparam("of_score"))
    .where(ScoreRank.seeds.in_([bindparam("before"), bindparam("now")]))
    .values(standing=1 - ScoreRank.standing)
)
_UNPLACE = delete(ScoreRank).where(
    ScoreRank.score_id == bindparam("of_score"), ScoreRank.metric == bindparam("of_metric")
)


def tie_of(cell: str) -> int:
    """By what cells of equal means are ordered: 56 bits of the cell itself, the same in every database and query."""
    return int.from_bytes(hashlib.blake2b(cell.encode(), digest_size=7).digest())


def standing_of(metric: Metric, *, complete: bool) -> int:
    """What puts complete cells first, in the direction in which the metric's values get worse.

    Complete are those all of whose trials have the metric.
    """
    return int(complete == metric.more_is_better)


class _RankedMean(TypedDict):
    """What ranks keep of a measure."""

    mean: float
    seeds: int
    std: float | None


class _NewRank(_RankedMean):
    """A row that takes the place of an older one, if there is one."""

    score_id: int
    metric: str
    board_id: int
    standing: int
    tie: int


class _GoneRank(TypedDict):
    """What `_UNPLACE` names."""

    of_score: int
    of_metric: str


class RankChanges:
    """What changes of the order: only that is written."""

    def __init__(self) -> None:
        self._gone: list[_GoneRank] = []
        self._new: list[_NewRank] = []

    def change(
        self, score_id: int, board_id: int, cell: str, made: MadeScore, old: Measures, *, trials: int = 0
    ) -> None:
        """One score's means; `trials`: how many the cell had when it had the `old` ones."""
        tie = tie_of(cell)
        self._gone += [{"of_score": score_id, "of_metric": name} for name in old if name not in made.measures]
        self._new += [
            {
                "score_id": score_id,
                "metric": name,
                "board_id": board_id,
                "standing": standing_of(Metric(name), complete=one.seeds == made.trials),
                "tie": tie,
                **_ranked(one),
            }
            for name, one in made.measures.items()
            if trials != made.trials or name not in old or _ranked(old[name]) != _ranked(one)
        ]

    def write(self, connection: Connection, *beside: Rows) -> None:
        """Into the database, and other rows with it."""
        if self._gone:
            connection.execute(_UNPLACE, self._gone)
        write_rows(connection, *beside, Rows(ScoreRank, self._new, Way.REPLACE))


def _ranked(one: Measure) -> _RankedMean:
    return {"mean": one.mean, "seeds": one.seeds, "std": one.std}


class Recounted(TypedDict):
    """A score, and how many trials its cell had `before` and has `now`, which are not as many."""

    of_score: int
    before: int
    now: int


def turn_standing(connection: Connection, scores: Sequence[Recounted]) -> None:
    """Of means that became complete, or are so no more: puts them before the others, or behind them."""
    connection.execute(_TURN, scores)
