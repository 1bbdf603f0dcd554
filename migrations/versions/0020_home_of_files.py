"""Where the files of trials are, so that a worker that would leave them elsewhere is refused"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "homes",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("mark", sa.String(64), nullable=False),
        sa.Column("place", sa.String(4096), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_homes"),
    )


def downgrade() -> None:
    op.drop_table("homes")
