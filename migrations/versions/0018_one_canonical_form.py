"""One normalisation, one schedule, one clip: one cell and one protocol, however they were written"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

from ttsv.config.trial import TrialConfig
from ttsv.data.catalog import dataset_info
from ttsv.errors import ConfigError
from ttsv.results import protocol_fingerprint

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

Json = sa.JSON(none_as_null=True)
_TRIALS = sa.table(
    "trials",
    *(sa.column(name) for name in ("id", "experiment_id", "state", "model", "fingerprint", "cell")),
    sa.column("config", Json),
)
_FIELD_INDEX = sa.table("field_index", sa.column("trial_id"))
_PROTOCOLS = sa.table("protocols", sa.column("fingerprint", sa.String), sa.column("record", Json))
_RESULTS = sa.table("results", sa.column("trial_id"), sa.column("protocol"), sa.column("layers", Json))
_BATCH = 1000
_PAGE = (
    sa.select(*(_TRIALS.c[name] for name in ("id", "experiment_id", "state", "config")))
    .where(_TRIALS.c.id > sa.bindparam("after"))
    .order_by(_TRIALS.c.id)
    .limit(_BATCH)
)
_SAME = sa.select(_TRIALS.c.id).where(
    _TRIALS.c.experiment_id == sa.bindparam("experiment"),
    _TRIALS.c.fingerprint == sa.bindparam("own"),
    _TRIALS.c.id != sa.bindparam("trial"),
)
_THIS = _TRIALS.c.id == sa.bindparam("trial")
_MOVE = _TRIALS.update().where(_THIS).values(fingerprint=sa.bindparam("own"), cell=sa.bindparam("own_cell"))
_REWRITE = _TRIALS.update().where(_THIS).values(config=sa.bindparam("own_config", type_=Json))
_FORGET = _FIELD_INDEX.delete().where(_FIELD_INDEX.c.trial_id == sa.bindparam("trial"))
_USUAL = 0.5
"""Mean and std of every channel where nothing else is asked for."""


def upgrade() -> None:
    connection = op.get_bind()
    moved = _move_trials(connection)
    if _move_results(connection) or moved:
        for table in ("score_ranks", "scores", "score_boards"):  # `service.upkeep.migrate` makes them from the results
            op.execute(f"DELETE FROM {table}")


def downgrade() -> None:
    """The version before reads all of this as it is: what is canonical here was so there, too."""


def _move_trials(connection: sa.Connection) -> bool:
    """Gives trials that were written otherwise the fingerprint and the cell of the canonical form; whether any was.

    One that is not over keeps its configuration: its checkpoints are found by that. Where an experiment has the
    canonical trial already, the other one stays as it is: a fingerprint is there once.
    """
    moved = False
    last = -1
    while True:
        rows = list(connection.execute(_PAGE, {"after": last}))
        if found := _moves(connection, rows):
            moved = True
            connection.execute(_MOVE, [{name: one[name] for name in ("trial", "own", "own_cell")} for one in found])
            if over := [one for one in found if not one["open"]]:
                connection.execute(_REWRITE, [{"trial": one["trial"], "own_config": one["config"]} for one in over])
                # `service.upkeep.migrate` enters them anew.
                connection.execute(_FORGET, [{"trial": one["trial"]} for one in over])
        if len(rows) < _BATCH:
            return moved
        last = rows[-1].id


def _moves(connection: sa.Connection, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """What becomes of those of the trials whose configuration is not canonical."""
    found: list[dict[str, Any]] = []
    taken: set[tuple[int, str]] = set()
    for row in rows:
        config = _canonical(row.config)
        if config == row.config:
            continue
        try:
            trial = TrialConfig.from_dict(config)
        except ConfigError:  # of a version whose trials are none any more: no new one is like it
            continue
        own = row.experiment_id, trial.fingerprint()
        same = list(connection.execute(_SAME, {"experiment": own[0], "own": own[1], "trial": row.id}))
        if same or own in taken:
            continue
        taken.add(own)
        is_open = row.state in ("queued", "running")
        found.append({"trial": row.id, "own": own[1], "own_cell": trial.cell(), "config": config, "open": is_open})
    return found


def _canonical(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as this version plans it."""
    found = dict(config)
    for name in ("mean", "std"):
        values = found.get(name)
        if values and len(set(values)) == 1:
            found[name] = [] if values[0] == _USUAL else values[:1]
    training = found.get("training")
    if isinstance(training, dict) and training.get("schedule") == "multistep":
        before_end = [one for one in training.get("milestones", []) if one < training.get("epochs", 20)]
        found["training"] = training | {"milestones": before_end}
        if not before_end:
            found["training"] |= {"schedule": "constant", "gamma": 0.1}
    clipping = found.get("clipping")
    if isinstance(clipping, dict) and clipping.get("rescale") is False:
        found["clipping"] = clipping | {"operator": "periodic"}
    return found


def _move_results(connection: sa.Connection) -> bool:
    """Gives results the protocol that names mean and std of every channel; whether any was another."""
    protocols = list(connection.execute(sa.select(_PROTOCOLS.c.fingerprint, _PROTOCOLS.c.record)))
    by_content = {
        record.get("dataset_sha256"): len(record["preprocessing"]["mean"])
        for _, record in protocols
        if len(_normalisation(record).get("mean", ())) > 1
    }
    known = {fingerprint for fingerprint, _ in protocols}
    moved = False
    for fingerprint, record in protocols:
        written = _normalisation(record)
        lengths = [len(written[name]) for name in ("mean", "std") if name in written]
        if 1 not in lengths:
            continue
        channels = max(lengths)
        if channels == 1:
            channels = _channels(record, by_content) or _seen_channels(connection, fingerprint) or 1
        per_channel = {name: written[name] * (channels if len(written[name]) == 1 else 1) for name in ("mean", "std")}
        own = {**record, "preprocessing": {**written, **per_channel}}
        name = protocol_fingerprint(own)
        if name == fingerprint:
            continue
        if name not in known:
            connection.execute(_PROTOCOLS.insert().values(fingerprint=name, record=own))
            known.add(name)
        connection.execute(_RESULTS.update().where(_RESULTS.c.protocol == fingerprint).values(protocol=name))
        moved = True
    return moved


def _normalisation(record: Any) -> dict[str, Any]:
    found = record.get("preprocessing") if isinstance(record, dict) else None
    return found if isinstance(found, dict) and {"mean", "std"} <= found.keys() else {}


def _channels(record: dict[str, Any], by_content: dict[Any, int]) -> int | None:
    """Of the images: by the data set's name, or by what another protocol says of the same content."""
    try:
        info = dataset_info(record["dataset"])
    except (ConfigError, KeyError):
        return None
    return by_content.get(record.get("dataset_sha256")) if info is None else info.channels


def _seen_channels(connection: sa.Connection, fingerprint: str) -> int | None:
    """Of the images, as the first layer of a network measured under the protocol takes them; None: it does not say."""
    query = (
        sa.select(_RESULTS.c.layers)
        .join(_TRIALS, _TRIALS.c.id == _RESULTS.c.trial_id)
        # Those pad the images with channels before their first layer.
        .where(_RESULTS.c.protocol == fingerprint, _TRIALS.c.model.not_like("lipconvnet%"))
        .limit(1)
    )
    row = next(iter(connection.execute(query)), None)
    if row is None or not row.layers:
        return None
    first = row.layers[0]
    if "k1" in first["shape"]:
        return int(first["shape"]["k1"][0])
    return int(first["shape"]["weight"][1]) if first["kind"].startswith("Conv") else None
