"""Nodes of workers' clusters"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    state = sa.Enum(
        "alive", "left", "refused", name=op.f("ck_nodes_state"), native_enum=False, length=16, create_constraint=True
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=100), nullable=False),
        sa.Column("worker", sa.String(length=200), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("address", sa.String(length=100), nullable=False),
        sa.Column("head", sa.Boolean(), nullable=False),
        sa.Column("state", state, nullable=False),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("memory_gib", sa.Double(), nullable=False),
        sa.Column("machine", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("problem", sa.String(), nullable=True),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("left_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_index("ix_nodes_worker", "nodes", ["worker"])


def downgrade() -> None:
    op.drop_table("nodes")
