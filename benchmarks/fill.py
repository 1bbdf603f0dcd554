"""Fills a database with finished trials in bulk, for benchmarks/serving.py."""

import random
import time
from functools import partial
from typing import Any

from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from service.database import Experiment, ExperimentState, Protocol, Result, Trial, TrialState, now
from service.database.engine import Database
from service.leaderboards import cell_scores, field_index
from service.leaderboards.metrics import Metric
from service.upkeep.migrate import migrate
from ttsv.config.fields import plain
from ttsv.config.trial import TrialConfig
from ttsv.results import EpochMetrics

DATASET = "cifar10"
CELLS_SEEDS = 4
PER_EXPERIMENT = 1000
PROTOCOLS = 2


def result_row(rng: random.Random) -> dict[str, Any]:
    """A result with a value in each of its 40 metrics."""
    values = {m.value: rng.randrange(10**6, 10**9) if m.reading.whole else rng.random() for m in Metric}
    return values | {"selected_epoch": 50, "layers": [{"name": "conv1", "largest": 1.0}], "environment": {"torch": "2"}}


def epoch_metrics(epoch: int, epochs: int) -> EpochMetrics:
    """What a trial reports of an epoch of so many."""
    return EpochMetrics(
        epoch=epoch,
        epochs=epochs,
        train_loss=1.0,
        train_accuracy=0.5,
        val_loss=1.0,
        val_accuracy=0.5,
        ort_loss=None,
        lr=0.1,
        seconds=1.0,
        constraint_seconds=0.1,
    )


def fill(url: str, trials: int, points: int) -> int:
    """Enters so many trials and epoch points; gives the number of experiments."""
    began = time.perf_counter()
    database = Database(url)
    migrate(database)
    rng = random.Random(0)
    experiments = max(1, trials // PER_EXPERIMENT)
    for number in range(1, experiments + 1):
        database.write(partial(_experiment, number=number, rng=rng))
    epochs = max(1, points // (experiments * PER_EXPERIMENT))
    with database.writer.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            series = f"generate_series(1, {epochs}) AS epochs(number)"
        else:
            series = (
                f"(WITH RECURSIVE epochs(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM epochs"
                f" WHERE number < {epochs}) SELECT number FROM epochs) AS epochs"
            )
        connection.execute(
            text(
                "INSERT INTO epoch_points (trial_id, epoch, train_loss, train_accuracy, val_loss, val_accuracy,"
                " ort_loss, lr, seconds, constraint_seconds)"
                f" SELECT trials.id, number, 1.0 / number, 0.5, 1.5 / number, 0.4, NULL, 0.1, 1.0, 0.1"
                f" FROM (SELECT id FROM trials) AS trials CROSS JOIN {series}"
            )
        )
    print(
        f"{experiments * PER_EXPERIMENT} trials, {epochs} epochs each: {time.perf_counter() - began:.0f} s", flush=True
    )
    with database.writer.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))
        with Session(connection) as session:
            cell_scores.refresh_all(session)
            session.commit()
    while database.write(field_index.fill):
        pass
    with database.writer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        # As autovacuum would within a minute.
        connection.execute(text("VACUUM ANALYZE" if connection.dialect.name == "postgresql" else "ANALYZE"))
        for table in ("experiments", "trials") if connection.dialect.name == "postgresql" else ():  # ids were given
            following = f"setval(pg_get_serial_sequence('{table}', 'id'), max(id))"
            connection.execute(text(f"SELECT {following} FROM {table}"))
    print(f"with scores: {time.perf_counter() - began:.0f} s", flush=True)
    database.close()
    return experiments


def _experiment(session: Any, number: int, rng: random.Random) -> None:
    protocols = [f"{index:064x}" for index in range(PROTOCOLS)]
    if number == 1:
        session.execute(
            insert(Protocol),
            [
                {"fingerprint": name, "record": {"dataset": DATASET, "variant": index}}
                for index, name in enumerate(protocols)
            ],
        )
    state = ExperimentState.SUCCEEDED
    counts = {"grid_points": PER_EXPERIMENT, "trial_count": PER_EXPERIMENT, "finished_at": now()}
    spec = {"spec_version": 1, "name": f"grid {number}", "base": {}, "grid": {"seed": list(range(CELLS_SEEDS))}}
    session.add(Experiment(id=number, name=f"grid {number}", spec=spec, state=state, **counts))
    session.flush()
    config = TrialConfig.from_dict({"dataset": DATASET, "model": "vgg11", "layer": "tt", "rank": 2})
    fields, training = config.to_dict(), plain(config.training)
    rows, results = [], []
    for index in range(PER_EXPERIMENT):
        cell = (number - 1) * PER_EXPERIMENT // CELLS_SEEDS + index // CELLS_SEEDS
        seed, rank = index % CELLS_SEEDS, 2 + cell % 50
        trial_id = (number - 1) * PER_EXPERIMENT + index + 1
        rows.append(
            {
                "id": trial_id,
                "experiment_id": number,
                "number": index,
                "fingerprint": f"{cell:060x}{seed:04x}",
                "cell": f"{cell:064x}",
                "config": {
                    **fields,
                    "rank": rank,
                    "seed": seed,
                    "training": {**training, "lr": 0.001 * (1 + cell % 97)},
                },
                "dataset": DATASET,
                "model": "vgg11",
                "layer": "tt",
                "rank": rank,
                "lambda_ort": 0.0,
                "constraint": "none",
                "seed": seed,
                "epochs": 50,
                "epoch": 50,
                "state": TrialState.SUCCEEDED,
                "attempts": 1,
            }
        )
        results.append({"trial_id": trial_id, "protocol": protocols[cell % 10 == 0], "fence": 1, **result_row(rng)})
    session.execute(insert(Trial), rows)
    session.execute(insert(Result), results)
