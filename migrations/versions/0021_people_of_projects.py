"""What the people of a project weigh beside each other"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "people",
        sa.Column("project_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_people_project_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("project_id", "owner", name="pk_people"),
    )


def downgrade() -> None:
    op.drop_table("people")
