"""First schema"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON()


def upgrade() -> None:
    op.create_table(
        "experiments",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("spec", Json, nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "queued",
                "running",
                "succeeded",
                "failed",
                "cancelled",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("grid_points", sa.Integer(), nullable=False),
        sa.Column("trial_count", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("epochs_at_claim", sa.Integer(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("heartbeat", sa.Integer(), nullable=False),
        sa.Column("fruitless_claims", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=200), nullable=True),
        sa.Column("process", Json, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiments")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_experiments_state_priority_id", "experiments", ["state", "priority", "id"])

    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("response", Json, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "protocols",
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("record", Json, nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name=op.f("pk_protocols")),
    )
    op.create_table(
        "workers",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("gpus", sa.Double(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_workers")),
    )
    op.create_table(
        "trials",
        sa.Column("id", Id, nullable=False),
        sa.Column("experiment_id", Id, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("cell", sa.String(length=64), nullable=False),
        sa.Column("config", Json, nullable=False),
        sa.Column("dataset", sa.String(length=200), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("layer", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Double(), nullable=True),
        sa.Column("lambda_ort", sa.Double(), nullable=False),
        sa.Column("constraint", sa.String(length=32), nullable=False),
        sa.Column("delta", sa.Double(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("epochs", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("best_val_accuracy", sa.Double(), nullable=True),
        sa.Column(
            "state",
            sa.Enum(
                "queued",
                "running",
                "succeeded",
                "failed",
                "diverged",
                "cancelled",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=16,
            ),
            nullable=False,
        ),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("failure", sa.String(length=32), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_trials_experiment_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trials")),
        sa.UniqueConstraint("experiment_id", "fingerprint", name=op.f("uq_trials_experiment_id_fingerprint")),
        sa.UniqueConstraint("experiment_id", "number", name=op.f("uq_trials_experiment_id_number")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_trials_dataset_cell", "trials", ["dataset", "cell"])
    op.create_index("ix_trials_experiment_id_state", "trials", ["experiment_id", "state"])

    op.create_table(
        "artifacts",
        sa.Column("id", Id, nullable=False),
        sa.Column("trial_id", Id, nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_artifacts_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifacts")),
        sa.UniqueConstraint("trial_id", "kind", name=op.f("uq_artifacts_trial_id_kind")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "epoch_points",
        sa.Column("trial_id", Id, nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("train_loss", sa.Double(), nullable=False),
        sa.Column("train_accuracy", sa.Double(), nullable=False),
        sa.Column("val_loss", sa.Double(), nullable=False),
        sa.Column("val_accuracy", sa.Double(), nullable=False),
        sa.Column("ort_loss", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("constraint_seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_epoch_points_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("trial_id", "epoch", name=op.f("pk_epoch_points")),
    )
    op.create_table(
        "results",
        sa.Column("trial_id", Id, nullable=False),
        sa.Column("protocol", sa.String(length=64), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("accuracy", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=False),
        sa.Column("ece", sa.Double(), nullable=False),
        sa.Column("max_singular_value", sa.Double(), nullable=False),
        sa.Column("compression", sa.Double(), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("multiply_accumulates", sa.BigInteger(), nullable=False),
        sa.Column("train_seconds", sa.Double(), nullable=False),
        sa.Column("constraint_seconds", sa.Double(), nullable=False),
        sa.Column("step_seconds", sa.Double(), nullable=False),
        sa.Column("constraint_step_seconds", sa.Double(), nullable=False),
        sa.Column("eval_seconds", sa.Double(), nullable=False),
        sa.Column("spectrum_seconds", sa.Double(), nullable=False),
        sa.Column("latency_seconds", sa.Double(), nullable=False),
        sa.Column("batch_seconds", sa.Double(), nullable=False),
        sa.Column("peak_memory", sa.BigInteger(), nullable=True),
        sa.Column("selected_epoch", sa.Integer(), nullable=False),
        sa.Column("layers", Json, nullable=False),
        sa.Column("environment", Json, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("accuracy >= 0 AND accuracy <= 1", name=op.f("ck_results_accuracy")),
        sa.ForeignKeyConstraint(["protocol"], ["protocols.fingerprint"], name=op.f("fk_results_protocol")),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_results_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_results")),
    )
    op.create_index("ix_results_protocol", "results", ["protocol"])


def downgrade() -> None:
    op.drop_index("ix_results_protocol", "results")

    op.drop_table("results")
    op.drop_table("epoch_points")
    op.drop_table("artifacts")
    op.drop_index("ix_trials_experiment_id_state", "trials")
    op.drop_index("ix_trials_dataset_cell", "trials")

    op.drop_table("trials")
    op.drop_table("workers")
    op.drop_table("protocols")
    op.drop_table("idempotency_keys")
    op.drop_index("ix_experiments_state_priority_id", "experiments")

    op.drop_table("experiments")
