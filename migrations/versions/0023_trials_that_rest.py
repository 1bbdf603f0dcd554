"""Until when trials rest whose processes died again and again"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trials", sa.Column("rests_until", sa.DateTime(timezone=True), nullable=True))
    op.add_column("trials", sa.Column("rest_seconds", sa.Double(), nullable=False, server_default="0"))
    resting = sa.text("rests_until IS NOT NULL")
    op.create_index("ix_trials_rests_until", "trials", ["rests_until"], sqlite_where=resting, postgresql_where=resting)


def downgrade() -> None:
    op.drop_index("ix_trials_rests_until", "trials")
    op.drop_column("trials", "rest_seconds")
    op.drop_column("trials", "rests_until")
