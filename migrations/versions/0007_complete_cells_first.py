"""Complete cells stand before others; scores know all fields of their cells"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON(none_as_null=True)


def upgrade() -> None:
    _renew(
        of_scores=[
            sa.Column("seeds", sa.Integer(), nullable=False),
            sa.Column("trials", sa.Integer(), nullable=False),
            sa.Column("fields", Json, nullable=False),
            sa.Column("metrics", Json, nullable=False),
        ],
        of_ranks=[sa.Column("standing", sa.Integer(), nullable=False)],
    )
    if op.get_bind().dialect.name == "sqlite":
        op.create_index("ix_scores_fields", "scores", ["board_id", "fields"])


def downgrade() -> None:
    counts, metrics = sa.Column("seeds", sa.Integer(), nullable=False), sa.Column("metrics", Json, nullable=False)
    _renew(of_scores=[counts, metrics], of_ranks=[])


def _renew(of_scores: list[sa.Column[Any]], of_ranks: list[sa.Column[Any]]) -> None:
    """Drops all scores: where there are none, `service.upkeep.migrate` makes them from the results."""
    op.drop_table("score_ranks")
    op.drop_table("scores")
    op.execute("DELETE FROM score_boards")
    op.create_table(
        "scores",
        sa.Column("id", Id, nullable=False),
        sa.Column("board_id", Id, nullable=False),
        sa.Column("cell", sa.String(length=64), nullable=False),
        sa.Column("trial_id", Id, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("layer", sa.String(length=32), nullable=False),
        sa.Column("constraint", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Double(), nullable=True),
        *of_scores,
        sa.ForeignKeyConstraint(["board_id"], ["score_boards.id"], name=op.f("fk_scores_board_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_scores_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_scores")),
        sa.UniqueConstraint("cell", "board_id", name=op.f("uq_scores_cell_board_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_scores_filters", "scores", ["board_id", "model", "layer", "constraint", "rank", "seeds"])
    op.create_index("ix_scores_trial_id", "scores", ["trial_id"])
    op.create_table(
        "score_ranks",
        sa.Column("score_id", Id, autoincrement=False, nullable=False),
        sa.Column("metric", sa.String(length=40), nullable=False),
        sa.Column("board_id", Id, nullable=False),
        *of_ranks,
        sa.Column("mean", sa.Double(), nullable=False),
        sa.Column("tie", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["score_id"], ["scores.id"], name=op.f("fk_score_ranks_score_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("score_id", "metric", name=op.f("pk_score_ranks")),
        sqlite_with_rowid=False,
    )
    order = ["board_id", "metric", *(column.name for column in of_ranks), "mean", "tie", "score_id"]
    op.create_index("ix_score_ranks_order", "score_ranks", order)
