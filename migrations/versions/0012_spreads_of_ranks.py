"""Ranks know the spreads of their means; scores are counted from an index"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_ORDER = ("board_id", "metric", "standing", "mean", "tie", "score_id")


def upgrade() -> None:
    op.drop_index("ix_score_ranks_order", "score_ranks")
    if op.get_bind().dialect.name == "sqlite":
        _index_fields("seeds", "trials")
        # Doubles are read by Python: SQLite does not promise all their digits.
        driver: Any = op.get_bind().connection.driver_connection
        driver.create_function("number", 1, _number)
        _copy(
            sa.Column("seeds", sa.Integer(), nullable=False),
            sa.Column("std", sa.Double(), nullable=True),
            # CROSS JOIN keeps SQLite to this order: every document is taken apart once.
            select="old_ranks.*, json_extract(each.value, '$[0]'), number(each.value -> '$[2]') FROM scores"
            " CROSS JOIN json_each(scores.metrics) AS each"
            " CROSS JOIN old_ranks ON score_id = scores.id AND metric = each.key",
        )
    else:
        # A million rows are written anew in half the time in which they are changed.
        op.execute("SET LOCAL statement_timeout = 0")
        op.execute(
            "CREATE TABLE new_ranks AS SELECT score_ranks.*, (each.value ->> 0)::integer AS seeds,"
            " (each.value ->> 2)::double precision AS std"
            " FROM scores CROSS JOIN LATERAL json_each(scores.metrics) AS each"
            " JOIN score_ranks ON score_id = scores.id AND metric = each.key"
        )
        op.drop_table("score_ranks")
        op.rename_table("new_ranks", "score_ranks")
        for column in ("score_id", "metric", "board_id", "standing", "mean", "tie", "seeds"):
            op.alter_column("score_ranks", column, nullable=False)
        op.create_primary_key(op.f("pk_score_ranks"), "score_ranks", ["score_id", "metric"])
        name = op.f("fk_score_ranks_score_id")
        op.create_foreign_key(name, "score_ranks", "scores", ["score_id"], ["id"], ondelete="CASCADE")
    op.create_index("ix_score_ranks_order", "score_ranks", [*_ORDER, "seeds", "std"])


def downgrade() -> None:
    op.drop_index("ix_score_ranks_order", "score_ranks")
    if op.get_bind().dialect.name == "sqlite":
        _index_fields()
        _copy(select="score_id, metric, board_id, standing, mean, tie FROM old_ranks")
    else:
        op.drop_column("score_ranks", "seeds")
        op.drop_column("score_ranks", "std")
    op.create_index("ix_score_ranks_order", "score_ranks", _ORDER)


def _index_fields(*counts: str) -> None:
    op.drop_index("ix_scores_fields", "scores")
    op.create_index("ix_scores_fields", "scores", ["board_id", "fields", *counts])


def _copy(*spreads: sa.Column[int] | sa.Column[float], select: str) -> None:
    """Makes the table anew: SQLite cannot add a column that must have a value."""
    op.rename_table("score_ranks", "old_ranks")
    op.create_table(
        "score_ranks",
        sa.Column("score_id", Id, autoincrement=False, nullable=False),
        sa.Column("metric", sa.String(length=40), nullable=False),
        sa.Column("board_id", Id, nullable=False),
        sa.Column("standing", sa.Integer(), nullable=False),
        sa.Column("mean", sa.Double(), nullable=False),
        sa.Column("tie", sa.BigInteger(), nullable=False),
        *spreads,
        sa.ForeignKeyConstraint(["score_id"], ["scores.id"], name=op.f("fk_score_ranks_score_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("score_id", "metric", name=op.f("pk_score_ranks")),
        sqlite_with_rowid=False,
    )
    op.execute(f"INSERT INTO score_ranks SELECT {select}")
    op.drop_table("old_ranks")


def _number(text: str | None) -> float | None:
    return None if text in (None, "null") else float(text)
