"""Which events webhooks were told of"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("after", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("endpoint", name=op.f("pk_webhooks")),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("event_id", Id, autoincrement=False, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["endpoint"], ["webhooks.endpoint"], name=op.f("fk_webhook_deliveries_endpoint"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["event_id"], ["events.id"], name=op.f("fk_webhook_deliveries_event_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("endpoint", "event_id", name=op.f("pk_webhook_deliveries")),
    )
    op.create_index("ix_webhook_deliveries_event_id", "webhook_deliveries", ["event_id"])


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
