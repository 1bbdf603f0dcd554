"""An index of trials by their fields; trials that are there are entered later, a little at a time"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON(none_as_null=True)


def upgrade() -> None:
    op.create_table(
        "field_index",
        sa.Column("trial_id", Id, autoincrement=False, nullable=False),
        sa.Column("experiment_id", Id, nullable=False),
        sa.Column("dataset", sa.String(length=200), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("layer", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Double(), nullable=True),
        sa.Column("lambda_ort", sa.Double(), nullable=False),
        sa.Column("constraint", sa.String(length=32), nullable=False),
        sa.Column("delta", sa.Double(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("fields", Json, nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_field_index_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_field_index")),
    )
    op.create_index("ix_field_index_experiment_id", "field_index", ["experiment_id"])


def downgrade() -> None:
    op.drop_table("field_index")
