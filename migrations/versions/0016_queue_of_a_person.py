"""An index by which a worker finds the first queued experiments of each person"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    highest_first = sa.text("priority DESC")
    op.create_index("ix_experiments_queue", "experiments", ["state", "project_id", "owner", highest_first, "id"])


def downgrade() -> None:
    op.drop_index("ix_experiments_queue", "experiments")
