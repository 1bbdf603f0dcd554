"""Whether a worker's processor has instructions for bf16"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workers", sa.Column("bf16", sa.Boolean(), nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "bf16")
