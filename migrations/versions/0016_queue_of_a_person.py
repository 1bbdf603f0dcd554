"""An index by which a worker finds the first queued experiments of each person"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    columns = ["state", "project_id", "owner", sa.text("priority DESC"), "id"]
    op.create_index("ix_experiments_queue", "experiments", columns)


def downgrade() -> None:
    op.drop_index("ix_experiments_queue", "experiments")
