"""Counts of each experiment's trials, and indexes for reading"""

import sqlalchemy as sa
from alembic import op

from service.database import tallies

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TRIAL_STATES = ("queued", "running", "succeeded", "early_stopped", "failed", "diverged", "cancelled")


def upgrade() -> None:
    listed = ", ".join(f"'{state}'" for state in TRIAL_STATES)
    op.create_table(
        "tallies",
        sa.Column("experiment_id", Id, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("trials", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("epochs", sa.BigInteger(), nullable=False),
        sa.Column("run_seconds", sa.Double(), nullable=False),
        sa.Column("best_val_accuracy", sa.Double(), nullable=True),
        sa.Column("best_accuracy", sa.Double(), nullable=True),
        sa.CheckConstraint(f"state IN ({listed})", name=op.f("ck_tallies_state")),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_tallies_experiment_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("experiment_id", "state", name=op.f("pk_tallies")),
    )
    op.create_index("ix_events_kind", "events", ["kind"])


def downgrade() -> None:
    tallies.uninstall(op.get_bind())  # `service.upkeep.migrate` makes the triggers after every upgrade
    op.drop_index("ix_events_kind", "events")
    op.drop_table("tallies")
