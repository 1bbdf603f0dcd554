"""Equal means are ordered by their cells; when an experiment last got on"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("experiments", sa.Column("progressed_at", sa.DateTime(timezone=True), nullable=True))
    _renew_ranks(sa.Column("tie", sa.BigInteger(), nullable=False))


def downgrade() -> None:
    _renew_ranks()
    op.drop_column("experiments", "progressed_at")


def _renew_ranks(*ties: sa.Column[int]) -> None:
    """Drops all scores: where there are none, `service.upkeep.migrate` makes them from the results."""
    op.drop_table("score_ranks")
    op.execute("DELETE FROM scores")
    op.execute("DELETE FROM score_boards")
    op.create_table(
        "score_ranks",
        sa.Column("score_id", Id, autoincrement=False, nullable=False),
        sa.Column("metric", sa.String(length=40), nullable=False),
        sa.Column("board_id", Id, nullable=False),
        sa.Column("mean", sa.Double(), nullable=False),
        *ties,
        sa.ForeignKeyConstraint(["score_id"], ["scores.id"], name=op.f("fk_score_ranks_score_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("score_id", "metric", name=op.f("pk_score_ranks")),
        sqlite_with_rowid=False,
    )
    order = ["board_id", "metric", "mean", *(column.name for column in ties), "score_id"]
    op.create_index("ix_score_ranks_order", "score_ranks", order)
