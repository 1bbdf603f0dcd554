"""Results, the protocols under which they were measured, and the scores that leaderboards read."""

from datetime import datetime
from typing import Any

from pydantic import JsonValue
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    UniqueConstraint,
    text,
    true,
)
from sqlalchemy.orm import Mapped, MappedColumn, mapped_column

from service.database.base import Base, Id, Json
from service.database.clock import now
from ttsv.config.fields import FieldValues
from ttsv.metrics.catalog import METRICS, in_column_order
from ttsv.results import LayerFields


class Protocol(Base):
    """How results were measured; results of different protocols are never ranked together."""

    __tablename__ = "protocols"

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    record: Mapped[dict[str, JsonValue]]


def _numbers() -> dict[str, MappedColumn[Any]]:
    """The columns between a result's keys and its records: the catalogue's metrics and an epoch."""
    columns = {
        name: mapped_column(BigInteger if info.whole else Double, nullable=info.nullable, sort_order=-1)
        for name, info in METRICS.items()
    }
    epoch: MappedColumn[Any] = mapped_column(Integer, nullable=False, sort_order=-1)
    return in_column_order({**columns, "selected_epoch": epoch})


_Numbers: Any = type("_Numbers", (), _numbers())


class Result(_Numbers, Base):  # type: ignore[misc] # whose columns are the catalogue's
    """What a succeeded trial is worth (`ttsv.results.TrialResult`): at most one per trial.

    The metrics of `ttsv.metrics.catalog`, each a column; what the trial's `evaluation` did not ask for is null. A
    result with `violations` is no number to be shown: what it says cannot be true.
    """

    __tablename__ = "results"
    __table_args__ = (
        CheckConstraint("accuracy >= 0 AND accuracy <= 1", name="accuracy"),
        Index("ix_results_invalid", "trial_id", sqlite_where=text("valid = 0"), postgresql_where=text("NOT valid")),
    )

    trial_id: Mapped[int] = mapped_column(
        Id, ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True, sort_order=-2
    )
    protocol: Mapped[str] = mapped_column(String(64), ForeignKey("protocols.fingerprint"), index=True, sort_order=-2)
    fence: Mapped[int] = mapped_column(sort_order=-2)
    valid: Mapped[bool] = mapped_column(default=True, server_default=true())
    violations: Mapped[list[str] | None]
    evaluation: Mapped[dict[str, JsonValue] | None]
    layers: Mapped[list[LayerFields]] = mapped_column(Json)
    environment: Mapped[dict[str, JsonValue]]
    created_at: Mapped[datetime] = mapped_column(default=now)


class ScoreBoard(Base):
    """What is ranked together: one data set and protocol, within a scope: a project, or 0 for all trials there are."""

    __tablename__ = "score_boards"
    __table_args__ = (UniqueConstraint("scope", "dataset", "protocol"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    scope: Mapped[int] = mapped_column(Id)
    dataset: Mapped[str] = mapped_column(String(200))
    protocol: Mapped[str] = mapped_column(String(64), ForeignKey("protocols.fingerprint"))


class Score(Base):
    """One cell over its seeds on one board (`service.leaderboards.cell_scores`): what leaderboards are read from.

    `metrics` are all its means and spreads over `seeds` results of its `trials` different trials; `trial_id` is the
    newest trial among them, whose configuration is the cell's. The fields by which rows are filtered are kept here too:
    some in columns, in `fields` by path all that are not at their defaults (`service.specs.columns.told`).
    """

    __tablename__ = "scores"
    __table_args__ = (
        UniqueConstraint("cell", "board_id"),
        Index("ix_scores_filters", "board_id", "model", "layer", "constraint", "rank", "seeds"),
        # A page of SQLite holds one score with all its metrics: their fields and counts alone are read from here.
        # (PostgreSQL keeps what is long elsewhere.)
        Index("ix_scores_fields", "board_id", "fields", "seeds", "trials").ddl_if(dialect="sqlite"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(Id, primary_key=True)
    board_id: Mapped[int] = mapped_column(Id, ForeignKey("score_boards.id", ondelete="CASCADE"))
    cell: Mapped[str] = mapped_column(String(64))
    trial_id: Mapped[int] = mapped_column(Id, ForeignKey("trials.id", ondelete="CASCADE"), index=True)
    model: Mapped[str] = mapped_column(String(200))
    layer: Mapped[str] = mapped_column(String(32))
    constraint: Mapped[str] = mapped_column(String(32))
    rank: Mapped[float | None]
    seeds: Mapped[int]
    trials: Mapped[int]
    # Before the metrics: SQLite walks through all that stands before a column.
    fields: Mapped[FieldValues] = mapped_column(Json)
    metrics: Mapped[dict[str, list[float | None]]] = mapped_column(Json)


class ScoreRank(Base):
    """The means of `Score.metrics` in an order that an index can walk: a board's first rows are read, no others.

    `standing` puts complete cells first (`service.leaderboards.score_ranks.standing_of`); `tie` is a number of the cell
    (`tie_of` there), by which equal means are ordered. A matrix takes all rows of a board: `seeds` and `std` are read
    from the index, too.
    """

    __tablename__ = "score_ranks"
    __table_args__ = (
        Index("ix_score_ranks_order", "board_id", "metric", "standing", "mean", "tie", "score_id", "seeds", "std"),
        {"sqlite_with_rowid": False},
    )

    score_id: Mapped[int] = mapped_column(Id, ForeignKey("scores.id", ondelete="CASCADE"), primary_key=True)
    metric: Mapped[str] = mapped_column(String(40), primary_key=True)
    board_id: Mapped[int] = mapped_column(Id)
    standing: Mapped[int]
    mean: Mapped[float]
    tie: Mapped[int] = mapped_column(BigInteger)
    seeds: Mapped[int]
    std: Mapped[float | None]
