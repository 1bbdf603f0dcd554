"""What the exact singular values took of memory"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("results", sa.Column("spectrum_memory", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("results", "spectrum_memory")
    for table in ("score_ranks", "scores", "score_boards"):  # made anew from the results, where there are none
        op.execute(f"DELETE FROM {table}")
