"""A thousand running trials that report an epoch each second, for ten minutes, and the API asked meanwhile.

    python benchmarks/reporting.py [--trials 1000] [--seconds 600] [--quick]

On SQLite and on PostgreSQL. One driver's recorder takes the reports, each trial's at a moment of its own within the
second, as a driver that runs a thousand trials at once would; the API is a process of its own, and a client asks it ten
times a second for the experiment, a page of its trials and a trial's newest epochs by turns. In the end every report
must be in the database: any that is lost fails the benchmark, as do a recorder that is behind in the end and an API
whose p95 is above 50 ms. The record is `reporting`.
"""

import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
from sqlalchemy import func, select

from fill import epoch_metrics
from hosting import cpu_seconds, databases, served
from measuring import keep, parser
from service.database import EpochPoint, Trial
from service.database.engine import Database
from service.experiments import submission
from service.experiments.submission import Draft
from service.queue import leases
from service.queue.leases import Lease
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.upkeep.migrate import migrate
from workers.driver.recorder import Recorder
from workers.trial_process.messages import EpochReport

ASKED_PER_SECOND = 10
MOST_MILLISECONDS = 50.0
"""Of the API's p95."""
MOST_BEHIND = 2.0
"""Seconds that the recorder may be behind at the end."""


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--trials", type=int, default=1000)
    arguments.add_argument("--seconds", type=int, default=600)
    options = arguments.parse_args()
    if options.quick:
        options.trials, options.seconds = 20, 2
    found: dict[str, Any] = {"trials": options.trials, "seconds": options.seconds}
    for kind in ("sqlite", "postgresql"):
        with tempfile.TemporaryDirectory() as folder, databases(kind, Path(folder)) as url:
            found[kind] = measured(url, Path(folder), options.trials, options.seconds)
        told = ", ".join(f"{name} {value:.3g}" for name, value in found[kind].items())
        print(f"{kind}, {options.trials} trials for {options.seconds} s: {told}", flush=True)
    if not options.quick:
        keep("reporting", "python benchmarks/reporting.py", found)
    kinds = (found["sqlite"], found["postgresql"])
    missed = any(one["behind at the end s"] > MOST_BEHIND or one["api p95 ms"] > MOST_MILLISECONDS for one in kinds)
    return int(any(one["lost"] for one in kinds) or (missed and not options.quick))


def measured(url: str, folder: Path, count: int, seconds: int) -> dict[str, float]:
    """Reports a second, how far the recorder is behind, what is lost, the API's milliseconds, and CPU of both."""
    database = Database(url)
    migrate(database)
    lease, trials = begun(database, count, seconds)
    recorder = Recorder(database, lease, lost=lambda: None)
    recorder.open()
    for trial in trials:
        recorder.started(trial)
    recorder.flush()
    with ThreadPoolExecutor(1) as pool, served(url, folder) as (client, process):
        over = threading.Event()
        asking = pool.submit(ask, client, lease.experiment_id, trials, over)
        used, api_used, began = time.process_time(), cpu_seconds(process), time.monotonic()
        try:
            behind = [report(recorder, trials, epoch, seconds, began) for epoch in range(1, seconds + 1)]
            ended = time.monotonic()
            recorder.flush()
            late = time.monotonic() - ended
        finally:
            over.set()
        used, api_used = time.process_time() - used, cpu_seconds(process) - api_used
        answers = asking.result()
    with database.read() as session:
        stored = session.scalar(select(func.count()).select_from(EpochPoint)) or 0
        reached = session.scalar(select(func.count()).where(Trial.epoch == seconds)) or 0
    database.close()
    return {
        "reports a second": count * seconds / (ended + late - began),
        "lost": count * seconds - stored + count - reached,
        "behind at the end s": late,
        "behind p95 s": statistics.quantiles(behind, n=20)[-1] if len(behind) > 1 else behind[0],
        "api p50 ms": 1000 * statistics.median(answers),
        "api p95 ms": 1000 * statistics.quantiles(answers, n=20)[-1],
        "recorder and clients CPU": used / seconds,
        "api CPU": api_used / seconds,
    }


def begun(database: Database, count: int, epochs: int) -> tuple[Lease, list[int]]:
    """An experiment of so many trials under a lease, and their ids."""
    base = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": epochs}}
    spec = ExperimentSpec.model_validate({"name": "reports", "base": base, "grid": {"seed": list(range(count))}})
    plan = expand_grid(spec, max_trials=count)
    database.write(lambda session: submission.submit(session, Draft(spec, plan)))
    lease = database.write(lambda session: leases.claim(session, "benchmark", None))
    assert lease is not None
    with database.read() as session:
        return lease, list(session.scalars(select(Trial.id).order_by(Trial.number)))


def report(recorder: Recorder, trials: list[int], epoch: int, epochs: int, began: float) -> float:
    """One epoch of every trial, spread over its second; how far behind the schedule the last of it was."""
    for place, trial in enumerate(trials):
        due = began + epoch - 1 + place / len(trials)
        if (early := due - time.monotonic()) > 0:
            time.sleep(early)
        recorder.reported(trial, EpochReport([epoch_metrics(epoch, epochs)]))
    return max(0.0, time.monotonic() - (began + epoch))


def ask(client: httpx.Client, experiment: int, trials: list[int], over: threading.Event) -> list[float]:
    """Asks until it is `over`; how many seconds each answer took."""
    rng = random.Random(0)
    answers: list[float] = []
    began = time.monotonic()
    for number in itertools.count():
        if over.wait(max(0.0, began + number / ASKED_PER_SECOND - time.monotonic())):
            break
        paths = (
            f"/v1/experiments/{experiment}",
            f"/v1/experiments/{experiment}/trials?limit=20",
            f"/v1/trials/{rng.choice(trials)}/metrics?limit=20",
        )
        asked = time.perf_counter()
        answer = client.get(paths[number % len(paths)])
        answers.append(time.perf_counter() - asked)
        assert answer.is_success, answer.text
    return answers


if __name__ == "__main__":
    sys.exit(main())
