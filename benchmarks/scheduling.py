"""A worker's decision who may run what, and what trials cost the database: 100 experiments, 10,000 queued trials each.

    python benchmarks/scheduling.py [--experiments N] [--trials N] [--turns N] [--quick]

On SQLite and on PostgreSQL. A decision reads who contends, divides 1,000 places on 125 nodes of 8 GPUs among them, with
all that ran lately remembered, and reads the next trial of one of them; its parts are timed alone, and all are asked
again with a hundredth of the trials: no part may grow with the queue. Then trials go from claimed to finished as a
driver records them, one at a time: started, ten epochs, result. And four workers at once, each with an experiment and
eight places, do nothing but claim, start and finish trials for some seconds: so many are recorded a second at most.
Then the four offer, whether or not the database keeps up, the trials a second that are asked of it (100 of SQLite, 300
of PostgreSQL): how long it takes to know of a result, 99 of 100 below. Five seeds are a cell. The record is
`scheduling`.
"""

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from fill import epoch_metrics, result_row
from hosting import databases
from measuring import keep, median, parser
from service.database import Experiment, ExperimentState, TrialState
from service.database.engine import Database
from service.migrate import migrate
from service.queue import driver_reads, leases
from service.queue.contenders import Specs, contenders
from service.queue.shares import Amount, Usage, allocate
from service.specs.spec import ExperimentSpec
from ttsv.config.trial import TrialConfig
from ttsv.results import TrialResult
from workers.driver.recorder import Recorder
from workers.trial_process.messages import EpochReport, ResultReport

NODES = [Amount(64, 8, 512)] * 125
EPOCHS = 10
WORKERS = 4
SLOTS = 8
"""Of each worker."""
OFFERED = {"sqlite": 100, "postgresql": 300}
"""Trials a second, of all workers together."""
SEEDS = 5
"""Of a cell, whose mean is made anew with each of its results."""

T = TypeVar("T")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--experiments", type=int, default=100)
    arguments.add_argument("--trials", type=int, default=10_000, help="queued trials of each experiment")
    arguments.add_argument("--turns", type=int, default=200)
    arguments.add_argument("--seconds", type=float, default=10, help="how long workers record side by side")
    options = arguments.parse_args()
    if options.quick:
        options.experiments, options.trials, options.turns, options.seconds = 10, 100, 5, 0.2
    found: dict[str, Any] = {"experiments": options.experiments, "trials": options.trials}
    for kind in ("sqlite", "postgresql"):
        sizes = [max(1, options.trials // 100), options.trials]
        found[kind] = {
            str(size): measured(kind, options.experiments, size, options.turns, options.seconds) for size in sizes
        }
        for size, figures in found[kind].items():
            told = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            print(f"{kind}, {size} trials each: {told}", flush=True)
    if not options.quick:
        keep("scheduling", "python benchmarks/scheduling.py", found)
    return 0


def measured(kind: str, experiments: int, trials: int, turns: int, seconds: float) -> dict[str, float]:
    """Milliseconds of a decision and of its parts (median, and 99 of 100 below), trials recorded a second."""
    with tempfile.TemporaryDirectory() as folder, databases(kind, Path(folder)) as url:
        database = Database(url)
        migrate(database)
        _fill(database, experiments, trials)
        lease = database.write(lambda session: leases.claim(session, "benchmark", None))
        assert lease is not None
        specs, usage = Specs(), Usage()
        parts: dict[str, list[float]] = {"contenders": [], "shares": [], "next": [], "decision": []}
        for _ in range(turns):
            began = time.perf_counter()
            found = _timed(parts["contenders"], partial(_read, database, lambda s: contenders(s, [1], specs)))
            demands = [one.demand for one in found]
            usage.add(demands, NODES, 0.5)
            share = partial(allocate, demands, NODES, most_experiments=experiments, usage=usage)
            assert _timed(parts["shares"], share)
            _timed(parts["next"], partial(_look, database, lambda s: driver_reads.next_trial(s, lease, {1, 2})))
            parts["decision"].append(time.perf_counter() - began)
        figures = {f"{name} ms": 1000 * (median(seconds) or 0) for name, seconds in parts.items()}
        slowest = sorted(parts["decision"])[int(0.99 * (turns - 1))]
        figures["decision p99 ms"] = 1000 * slowest
        figures["trials a second"] = _record(database, lease, min(trials, turns))
        database.close()
        with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
            done = [each.result() for each in [pool.submit(most_alone, url, seconds) for _ in range(WORKERS)]]
            offered = OFFERED[kind]
            late = [pool.submit(offer_alone, url, offered / WORKERS, seconds) for _ in range(WORKERS)]
            waits = sorted(wait for each in late for wait in each.result())
        figures[f"trials a second, {WORKERS} workers"] = sum(done)
        figures[f"result p99 ms, {offered} a second offered"] = 1000 * waits[int(0.99 * (len(waits) - 1))]
        return figures


class _Driver:
    """An experiment that one process has claimed, and the trials of it that it starts and finishes at once."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)
        lease = self._database.write(lambda session: leases.claim(session, f"benchmark {os.getpid()}", None))
        assert lease is not None, "there are more experiments than workers"
        self._lease = lease
        self.stored: SimpleQueue[tuple[int, float]] = SimpleQueue()
        """Trials, and when their results were stored."""
        self._recorder = Recorder(self._database, lease, lost=lambda: None, ended=self._ended)
        self._recorder.open()
        self._result = TrialResult(protocol={"benchmark": True}, **result_row(random.Random(0)))
        self._taken: set[int] = set()

    def start(self) -> int | None:
        """Takes the next trial, which has its result as soon as it begins; None where there is no other."""
        with self._database.look() as session:
            trial = driver_reads.next_trial(session, self._lease, self._taken.copy())
        if trial is None:
            return None
        self._taken.add(trial.id)
        self._recorder.started(trial.id)
        self._recorder.reported(trial.id, ResultReport(self._result, []))
        return trial.id

    def close(self) -> None:
        """Waits until all is stored; the experiment stays claimed, and the next worker has another."""
        self._recorder.flush()
        self._database.close()

    def _ended(self, trial_id: int) -> None:
        self._taken.discard(trial_id)
        self.stored.put((trial_id, time.perf_counter()))


def most_alone(url: str, seconds: float) -> float:
    """Trials a second that one worker records that has always the next one ready."""
    driver, running, done = _Driver(url), 0, 0
    began = time.perf_counter()
    for _ in range(SLOTS):
        running += driver.start() is not None
    while running:
        driver.stored.get()
        running, done = running - 1, done + 1
        if time.perf_counter() - began < seconds:
            running += driver.start() is not None
    spent = time.perf_counter() - began
    driver.close()
    return done / spent


def offer_alone(url: str, rate: float, seconds: float) -> list[float]:
    """How long each result waits that one worker has in its turn, whether those before it are stored or not."""
    driver, due = _Driver(url), dict[int, float]()
    began = time.perf_counter()
    for number in range(max(1, int(rate * seconds))):
        moment = began + number / rate
        time.sleep(max(0.0, moment - time.perf_counter()))
        if (trial_id := driver.start()) is None:
            break
        due[trial_id] = moment
    driver.close()
    stored = dict(driver.stored.get() for _ in due)
    return [stored[trial_id] - moment for trial_id, moment in due.items()]


def _read(database: Database, work: Callable[[Session], T]) -> T:
    with database.read() as session:
        return work(session)


def _look(database: Database, work: Callable[[Session], T]) -> T:
    with database.look() as session:
        return work(session)


def _timed(seconds: list[float], work: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = work()
    seconds.append(time.perf_counter() - began)
    return result


def _record(database: Database, lease: leases.Lease, trials: int) -> float:
    """Trials a second from start to result, one at a time, each stored before the next begins."""
    recorder = Recorder(database, lease, lost=lambda: None)
    recorder.open()
    result = TrialResult(protocol={"benchmark": True}, **result_row(random.Random(0)))
    began = time.perf_counter()
    taken: set[int] = set()
    for _ in range(trials):
        with database.look() as session:
            trial = driver_reads.next_trial(session, lease, taken)
        assert trial is not None
        recorder.started(trial.id)
        recorder.reported(trial.id, EpochReport([epoch_metrics(number, EPOCHS) for number in range(1, EPOCHS + 1)]))
        recorder.reported(trial.id, ResultReport(result, []))
        recorder.flush()
    return trials / (time.perf_counter() - began)


def _fill(database: Database, experiments: int, trials: int) -> None:
    """Experiments of different people and sizes, of which nothing has run."""
    rng = random.Random(0)
    config = TrialConfig.from_dict({"dataset": "digits", "model": "small-cnn", "training": {"epochs": EPOCHS}})
    series = (
        f"generate_series(1, {trials}) AS numbers(number)"
        if database.engine.dialect.name == "postgresql"
        else f"(WITH RECURSIVE numbers(number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers"
        f" WHERE number < {trials}) SELECT number FROM numbers) AS numbers"
    )
    rows = []
    for number in range(1, experiments + 1):
        resources = {"cpus": rng.choice([1, 2, 4]), "gpus": rng.choice([0.5, 1, 2, 4])}
        spec = ExperimentSpec.model_validate({"name": f"grid {number}", "resources": resources})
        rows.append(
            {
                "name": spec.name,
                "spec": spec.model_dump(mode="json"),
                "state": ExperimentState.QUEUED,
                "priority": rng.randint(-2, 2),
                "grid_points": trials,
                "trial_count": trials,
                "owner": f"person {number % 20}",
            }
        )

    def work(session: Session) -> None:
        session.execute(insert(Experiment), rows)
        if session.get_bind().dialect.name == "postgresql":
            session.execute(text("SET LOCAL statement_timeout = 0"))
        session.execute(
            text(
                "INSERT INTO trials (experiment_id, number, fingerprint, cell, config, dataset, model, layer,"
                ' lambda_ort, "constraint", seed, epochs, epoch, state, attempts, run_seconds)'
                " SELECT experiments.id, number, experiments.id || ' ' || number,"
                f" experiments.id || ' ' || ((number - 1) / {SEEDS}), :config, 'digits',"
                " 'small-cnn', 'dense', 0, 'none', number, :epochs, 0, :state, 0, 0"
                f" FROM experiments CROSS JOIN {series}".replace(
                    ":config", "CAST(:config AS JSON)" if "generate" in series else ":config"
                )
            ),
            {"config": json.dumps(config.to_dict()), "epochs": EPOCHS, "state": TrialState.QUEUED.value},
        )

    database.write(work)
    if database.engine.dialect.name == "postgresql":  # as it would have done by itself before long
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("SET statement_timeout = 0"))
            connection.execute(text("VACUUM ANALYZE"))


if __name__ == "__main__":
    sys.exit(main())
