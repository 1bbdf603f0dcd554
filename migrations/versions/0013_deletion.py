"""Experiments that are being deleted, files that retention removed, GPU-hours of what is gone"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_MARKED = sa.text("deleted_at IS NOT NULL")


def upgrade() -> None:
    op.add_column("experiments", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("artifacts", sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("projects", sa.Column("deleted_gpu_hours", sa.Double(), nullable=False, server_default="0"))
    op.create_index(
        "ix_experiments_deleted_at", "experiments", ["deleted_at"], sqlite_where=_MARKED, postgresql_where=_MARKED
    )


def downgrade() -> None:
    op.drop_index("ix_experiments_deleted_at", "experiments")
    op.drop_column("projects", "deleted_gpu_hours")
    op.drop_column("artifacts", "removed_at")
    op.drop_column("experiments", "deleted_at")
