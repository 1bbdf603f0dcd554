"""The baseline of mean corruption errors decides nothing but these"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from ttsv.results import protocol_fingerprint

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

Json = sa.JSON(none_as_null=True)
_PROTOCOLS = sa.table("protocols", sa.column("fingerprint", sa.String), sa.column("record", Json))
_RESULTS = sa.table(
    "results", sa.column("trial_id"), sa.column("protocol"), sa.column("mce"), sa.column("evaluation", Json)
)


def upgrade() -> None:
    connection = op.get_bind()
    for whole, own, record in _of_baselines(connection):
        if connection.scalar(sa.select(_PROTOCOLS.c.fingerprint).where(_PROTOCOLS.c.fingerprint == own)) is None:
            connection.execute(_PROTOCOLS.insert().values(fingerprint=own, record=record))
        connection.execute(_RESULTS.update().where(_RESULTS.c.protocol == whole).values(protocol=own))
        _drop_scores()


def downgrade() -> None:
    connection = op.get_bind()
    for whole, own, _ in _of_baselines(connection):
        record: Any = connection.scalar(sa.select(_PROTOCOLS.c.record).where(_PROTOCOLS.c.fingerprint == whole))
        mine = sa.select(_RESULTS.c.trial_id, _RESULTS.c.evaluation).where(
            _RESULTS.c.protocol == own, _RESULTS.c.mce.is_not(None)
        )
        for trial_id, evaluation in connection.execute(mine).all():
            if evaluation["corruptions"]["baseline_sha256"] == record["corruptions"]["mce_baseline"]:
                connection.execute(_RESULTS.update().where(_RESULTS.c.trial_id == trial_id).values(protocol=whole))
        _drop_scores()


def _of_baselines(connection: sa.Connection) -> list[tuple[str, str, dict[str, Any]]]:
    """Protocols that name a baseline: their fingerprints with and without it, and the record without it."""
    found = []
    for fingerprint, record in connection.execute(sa.select(_PROTOCOLS.c.fingerprint, _PROTOCOLS.c.record)).all():
        corruptions = dict(record.get("corruptions") or {}) if isinstance(record, dict) else {}
        if corruptions.pop("mce_baseline", None) is not None:
            own = {**record, "corruptions": corruptions}
            found.append((fingerprint, protocol_fingerprint(own), own))
    return found


def _drop_scores() -> None:
    """Where there are none, `service.upkeep.migrate` makes them from the results."""
    for table in ("score_ranks", "scores", "score_boards"):
        op.execute(f"DELETE FROM {table}")
