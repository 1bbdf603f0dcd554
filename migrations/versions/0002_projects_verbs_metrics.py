"""Projects and keys, events and tags, verbs, evaluation metrics, scores"""

import sqlalchemy as sa
from alembic import op
from alembic.operations import BatchOperations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON()

COUNTS_UP = {"sqlite_autoincrement": True}  # a copied table forgets it, and would use ids again

METRICS = (
    "top5_accuracy",
    "max_calibration_error",
    "adaptive_ece",
    "brier",
    "temperature",
    "scaled_ece",
    "scaled_loss",
    "robust_accuracy",
    "pgd_accuracy",
    "attack_seconds",
    "corruption_accuracy",
    "mce",
    "lipschitz_bound",
    "certified_36",
    "certified_72",
    "certified_108",
    "certified_255",
    "assumed_certified_36",
    "assumed_certified_72",
    "assumed_certified_108",
    "lipschitz_fgsm",
    "lipschitz_ascent",
    "merged_latency_seconds",
    "merged_batch_seconds",
)
EXPERIMENT_STATES = ("queued", "running", "succeeded", "failed", "cancelled")
MORE_EXPERIMENT_STATES = ("queued", "running", "paused", "succeeded", "stopped", "failed", "cancelled")
TRIAL_STATES = ("queued", "running", "succeeded", "failed", "diverged", "cancelled")
MORE_TRIAL_STATES = ("queued", "running", "succeeded", "early_stopped", "failed", "diverged", "cancelled")


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("max_queued_trials", sa.Integer(), nullable=True),
        sa.Column("max_gpu_hours", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("project_id", Id, nullable=False),
        sa.Column("owner", sa.String(length=100), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", Json, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_index("ix_api_keys_project_id", "api_keys", ["project_id"])

    with op.batch_alter_table("experiments", table_kwargs=COUNTS_UP) as table:
        _change_states(table, "experiments", MORE_EXPERIMENT_STATES)
        table.add_column(sa.Column("project_id", Id, nullable=True))
        table.add_column(sa.Column("owner", sa.String(length=100), nullable=True))
        table.add_column(sa.Column("revision", sa.Integer(), nullable=False, server_default="0"))
        table.add_column(sa.Column("stopping", sa.Boolean(), nullable=False, server_default=sa.false()))
        table.add_column(sa.Column("archived_at", sa.DateTime(timezone=True), nullable=True))
        table.create_foreign_key(op.f("fk_experiments_project_id"), "projects", ["project_id"], ["id"])
        table.create_index("ix_experiments_project_id_id", ["project_id", "id"])
    with op.batch_alter_table("trials", table_kwargs=COUNTS_UP) as table:
        _change_states(table, "trials", MORE_TRIAL_STATES)
        table.add_column(sa.Column("run_seconds", sa.Double(), nullable=False, server_default="0"))
        table.add_column(sa.Column("source_trial_id", Id, nullable=True))
        table.create_foreign_key(op.f("fk_trials_source_trial_id"), "trials", ["source_trial_id"], ["id"])
        table.create_index("ix_trials_source_trial_id", ["source_trial_id"])
        table.create_index("ix_trials_dataset_state_cell", ["dataset", "state", "cell"])
    for name in METRICS:
        op.add_column("results", sa.Column(name, sa.Double(), nullable=True))
    op.add_column("results", sa.Column("valid", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.create_index(
        "ix_results_invalid",
        "results",
        ["trial_id"],
        sqlite_where=sa.text("valid = 0"),
        postgresql_where=sa.text("NOT valid"),
    )
    op.add_column("results", sa.Column("violations", Json, nullable=True))
    op.add_column("results", sa.Column("evaluation", Json, nullable=True))

    op.create_table(
        "tags",
        sa.Column("experiment_id", Id, nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_tags_experiment_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("experiment_id", "name", name=op.f("pk_tags")),
    )
    op.create_index("ix_tags_name", "tags", ["name"])
    op.create_table(
        "events",
        sa.Column("id", Id, nullable=False),
        sa.Column("experiment_id", Id, nullable=True),
        sa.Column("trial_id", Id, nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(length=200), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("detail", Json, nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment_id"], ["experiments.id"], name=op.f("fk_events_experiment_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_events_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_experiment_id_id", "events", ["experiment_id", "id"])
    op.create_index("ix_events_trial_id", "events", ["trial_id"])
    op.create_table(
        "score_boards",
        sa.Column("id", Id, nullable=False),
        sa.Column("scope", Id, nullable=False),
        sa.Column("dataset", sa.String(length=200), nullable=False),
        sa.Column("protocol", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["protocol"], ["protocols.fingerprint"], name=op.f("fk_score_boards_protocol")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_score_boards")),
        sa.UniqueConstraint("scope", "dataset", "protocol", name=op.f("uq_score_boards_scope_dataset_protocol")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "scores",
        sa.Column("id", Id, nullable=False),
        sa.Column("board_id", Id, nullable=False),
        sa.Column("cell", sa.String(length=64), nullable=False),
        sa.Column("trial_id", Id, nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("layer", sa.String(length=32), nullable=False),
        sa.Column("constraint", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Double(), nullable=True),
        sa.Column("seeds", sa.Integer(), nullable=False),
        sa.Column("metrics", Json, nullable=False),
        sa.ForeignKeyConstraint(["board_id"], ["score_boards.id"], name=op.f("fk_scores_board_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name=op.f("fk_scores_trial_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_scores")),
        sa.UniqueConstraint("cell", "board_id", name=op.f("uq_scores_cell_board_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_scores_filters", "scores", ["board_id", "model", "layer", "constraint", "rank", "seeds"])
    op.create_index("ix_scores_trial_id", "scores", ["trial_id"])
    op.create_table(
        "score_ranks",
        sa.Column("score_id", Id, autoincrement=False, nullable=False),
        sa.Column("metric", sa.String(length=40), nullable=False),
        sa.Column("board_id", Id, nullable=False),
        sa.Column("mean", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["score_id"], ["scores.id"], name=op.f("fk_score_ranks_score_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("score_id", "metric", name=op.f("pk_score_ranks")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_score_ranks_order", "score_ranks", ["board_id", "metric", "mean", "score_id"])


def downgrade() -> None:
    op.drop_table("score_ranks")
    op.drop_table("scores")
    op.drop_table("score_boards")
    op.drop_index("ix_results_invalid", "results")
    op.drop_table("events")
    op.drop_table("tags")
    for name in (*METRICS, "valid", "violations", "evaluation"):
        op.drop_column("results", name)
    # What the older schema has no word for: dropped trials and unfinished business.
    op.execute("UPDATE trials SET state = 'cancelled' WHERE state = 'early_stopped'")
    op.execute("UPDATE experiments SET state = 'queued' WHERE state = 'paused'")
    op.execute("UPDATE experiments SET state = 'cancelled' WHERE state = 'stopped'")
    with op.batch_alter_table("trials", table_kwargs=COUNTS_UP) as table:
        table.drop_index("ix_trials_dataset_state_cell")
        table.drop_index("ix_trials_source_trial_id")
        table.drop_constraint(op.f("fk_trials_source_trial_id"), type_="foreignkey")
        table.drop_column("source_trial_id")
        table.drop_column("run_seconds")
        _change_states(table, "trials", TRIAL_STATES)
    with op.batch_alter_table("experiments", table_kwargs=COUNTS_UP) as table:
        table.drop_index("ix_experiments_project_id_id")
        table.drop_constraint(op.f("fk_experiments_project_id"), type_="foreignkey")
        for name in ("project_id", "owner", "revision", "stopping", "archived_at"):
            table.drop_column(name)
        _change_states(table, "experiments", EXPERIMENT_STATES)
    op.drop_table("api_keys")
    op.drop_table("projects")


def _change_states(table: BatchOperations, name: str, states: tuple[str, ...]) -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite's copy of the table leaves checks behind
        table.drop_constraint(op.f(f"ck_{name}_state"), type_="check")
    listed = ", ".join(f"'{state}'" for state in states)
    table.create_check_constraint(op.f(f"ck_{name}_state"), f"state IN ({listed})")
