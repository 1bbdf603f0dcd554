"""Spectra of epochs: quantiles of every layer's singular values while a trial trains"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON(none_as_null=True)


def upgrade() -> None:
    op.create_table(
        "epoch_spectra",
        sa.Column("trial_id", Id, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("layers", Json, nullable=False),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["trials.id"], name=op.f("fk_epoch_spectra_trial_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trial_id", "epoch", name=op.f("pk_epoch_spectra")),
    )


def downgrade() -> None:
    op.drop_table("epoch_spectra")
