"""A cell ranks as complete by a metric where all of its trials have that metric, not only a result"""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_COMPLETE = "(SELECT trials FROM scores WHERE scores.id = score_id AND scores.seeds = scores.trials)"
"""Of a rank whose cell has all results: how many there are."""


def upgrade() -> None:
    op.execute(f"UPDATE score_ranks SET standing = 1 - standing WHERE seeds < {_COMPLETE}")


def downgrade() -> None:
    upgrade()  # those that are complete by their cell were turned, and no others
