"""Trials in an order of their own, deaths told apart from attempts, why an experiment waits, weights of projects"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("projects", sa.Column("weight", sa.Double(), nullable=False, server_default="1"))
    op.add_column("experiments", sa.Column("waiting", sa.String(), nullable=True))
    op.add_column("experiments", sa.Column("unfit_since", sa.DateTime(timezone=True), nullable=True))
    op.drop_column("experiments", "fruitless_claims")
    op.add_column("trials", sa.Column("turn", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("trials", sa.Column("deaths", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("trials", sa.Column("node", sa.String(200), nullable=True))
    op.create_index("ix_trials_queue", "trials", ["experiment_id", "state", "turn", "number"])
    op.drop_index("ix_trials_experiment_id_state", "trials")


def downgrade() -> None:
    op.create_index("ix_trials_experiment_id_state", "trials", ["experiment_id", "state"])
    op.drop_index("ix_trials_queue", "trials")
    op.drop_column("trials", "node")
    op.drop_column("trials", "deaths")
    op.drop_column("trials", "turn")
    op.add_column("experiments", sa.Column("fruitless_claims", sa.Integer(), nullable=False, server_default="0"))
    op.drop_column("experiments", "unfit_since")
    op.drop_column("experiments", "waiting")
    op.drop_column("projects", "weight")
