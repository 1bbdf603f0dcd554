"""The same runs recorded here and in MLflow, and the same question asked of both, for benchmarks/serving.py.

Both keep them in SQLite. There every run is created, gets its 40 metrics and a parameter in one batch, and is ended:
three calls, as its client has them. Here trials start and end as workers report them: the recorder writes what has
queued up in one transaction (`record_seconds`), and one run at a time, waited for, for comparison
(`record_alone_seconds`). The question is the 50 best with all their metrics: here over HTTP, there in the process.
"""

import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

from sqlalchemy import select

from fill import result_row
from hosting import served
from service.database import Trial
from service.database.engine import Database
from service.experiments.submission import Draft, submit
from service.leaderboards.filters import Filters, Question
from service.leaderboards.leaderboard import leaderboard
from service.leaderboards.metrics import Metric
from service.queue import leases
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.upkeep.migrate import migrate
from ttsv.results import TrialResult
from workers.driver.recorder import Recorder
from workers.trial_process.messages import ResultReport

ALONE = 100
"""Further runs, recorded one at a time."""


def against_mlflow(runs: int, folder: Path) -> dict[str, Any]:
    """The same runs recorded and the same question asked here and there, both on SQLite, from Python."""
    rng = random.Random(1)
    values = [result_row(rng) for _ in range(runs)]
    return {"runs": runs, "mlflow": _mlflow(values, folder), "ttsv": _ours(values, folder)}


def _mlflow(values: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    import logging

    logging.getLogger("alembic").setLevel(logging.ERROR)
    from mlflow.entities import Metric as MlflowMetric
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.create_experiment("benchmark")
    recorded = []
    for number, row in enumerate(values):
        began = time.perf_counter()
        run = client.create_run(experiment)
        stamp = int(time.time() * 1000)
        metrics = [MlflowMetric(name.value, float(row[name]), stamp, 0) for name in Metric]
        client.log_batch(run.info.run_id, metrics, [Param("seed", str(number))])
        client.set_terminated(run.info.run_id)
        recorded.append(time.perf_counter() - began)
    asked = []
    for _ in range(5):
        began = time.perf_counter()
        found = client.search_runs([experiment], order_by=["metrics.accuracy DESC"], max_results=50)
        asked.append(time.perf_counter() - began)
    assert len(found) == 50
    return {"record_seconds": statistics.median(recorded), "answer_seconds": statistics.median(asked)}


def _ours(values: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    database = Database(f"sqlite:///{folder / 'ours.db'}")
    migrate(database)
    axes = {"training.lr": [0.001 * k for k in range(1, len(values) + ALONE + 1)]}
    spec = ExperimentSpec(name="runs", base={"dataset": "digits", "model": "small-cnn"}, grid=axes)
    plan = expand_grid(spec, max_trials=len(values) + ALONE)
    database.write(lambda session: submit(session, Draft(spec, plan)))
    lease = database.write(lambda session: leases.claim(session, "benchmark", None))
    assert lease is not None
    with database.read() as session:
        trials = session.scalars(select(Trial.id).order_by(Trial.number)).all()
    reports = [_report(row) for row in values]
    recorder = Recorder(database, lease, lost=lambda: None)
    recorder.open()
    alone = []
    for trial_id, report in zip(trials[len(values) :], itertools.cycle(reports), strict=False):
        began = time.perf_counter()
        recorder.started(trial_id)
        recorder.reported(trial_id, report)
        recorder.flush()
        alone.append(time.perf_counter() - began)
    began = time.perf_counter()
    for trial_id, report in zip(trials, reports, strict=False):
        recorder.started(trial_id)
        recorder.reported(trial_id, report)
    recorder.flush()
    recorded = (time.perf_counter() - began) / len(values)
    asked = []
    with served(str(database.engine.url), folder) as (client, _process):
        for _ in range(50):
            began = time.perf_counter()
            answer = client.get("/v1/leaderboards/digits", params={"limit": 50, "metrics": "all"})
            asked.append(time.perf_counter() - began)
    (board,) = answer.json()["boards"]
    assert (len(board["rows"]), board["total"]) == (50, len(trials))
    plain = []
    question = Question(dataset="digits", limit=50, filters=Filters())
    for _ in range(20):
        began = time.perf_counter()
        with database.read() as session:
            leaderboard(session, question)
        plain.append(time.perf_counter() - began)
    database.close()
    return {
        "record_seconds": recorded,
        "record_alone_seconds": statistics.median(alone),
        "answer_seconds": statistics.median(asked),
        "answer_in_process_seconds": statistics.median(plain),
    }


def _report(row: dict[str, Any]) -> ResultReport:
    return ResultReport(TrialResult(protocol={"benchmark": True}, **row), [])
