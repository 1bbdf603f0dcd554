"""An index of the trials that run, with where each of them does"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    running = sa.text("state = 'running'")
    op.create_index(
        "ix_trials_running",
        "trials",
        ["experiment_id", "id", "node", "failure", "started_at"],
        sqlite_where=running,
        postgresql_where=running,
    )


def downgrade() -> None:
    op.drop_index("ix_trials_running", "trials")
