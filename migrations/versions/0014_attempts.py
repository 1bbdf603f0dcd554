"""Attempts at trials: where and with what each ran, and what it used of its machine"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON(none_as_null=True)


def upgrade() -> None:
    op.create_table(
        "environments",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("record", Json, nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_environments")),
    )
    op.create_table(
        "attempts",
        sa.Column("id", Id, nullable=False),
        sa.Column("trial_id", Id, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("place", sa.String(length=200), nullable=False),
        sa.Column("environment", sa.String(length=64), nullable=True),
        sa.Column("resources", Json, nullable=True),
        sa.ForeignKeyConstraint(["environment"], ["environments.fingerprint"], name=op.f("fk_attempts_environment")),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_attempts_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("trial_id", "started_at", name=op.f("uq_attempts_trial_id_started_at")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_attempts_environment", "attempts", ["environment"])


def downgrade() -> None:
    op.drop_table("attempts")
    op.drop_table("environments")
