"""A worker's decision who may run what, and what trials cost the database: 100 experiments, 10,000 queued trials each.

    python benchmarks/scheduling.py [--experiments N] [--trials N] [--turns N] [--workers N] [--rate N] [--quick]

On SQLite and on PostgreSQL. A decision reads who contends, divides 1,000 places on 125 nodes of 8 GPUs among them, with
all that ran lately remembered, and reads the next trial of one of them; its parts are timed alone, and all are asked
again with a tenth of the trials: no part may grow with the queue. A share is the whole of what a worker does twice
a second (`Scheduler.share`) while some 1,000 trials run, of which a twentieth makes room for others between two of
them. It is timed on the wall, and by the processor time of its thread, which what else runs lengthens less, and which
has nothing of PostgreSQL's server. Then trials go from claimed to finished as a driver records them, one at a time:
started, ten epochs, result. And four workers at once, each with an experiment and eight places, do nothing but claim,
start and finish trials for some seconds: so many are recorded a second at most, and so long it takes until a result is
known to be stored, 99 of 100 below. Then the four offer, whether or not the database keeps up, the trials a second that
are asked of it (100 of SQLite, 300 of PostgreSQL), once each has made its statements with the first eight: how long it
takes then. Five seeds are a cell. The record is `scheduling`.
"""

import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

from sqlalchemy import insert, select, text, update
from sqlalchemy.orm import Session

from fill import epoch_metrics, result_row
from hosting import databases
from measuring import keep, median, parser
from service.database import Experiment, ExperimentState, Trial, TrialState
from service.database.engine import Database
from service.queue import driver_reads, leases
from service.queue.cluster import GPUS, Node
from service.queue.contenders import Specs, contenders
from service.queue.nodes import needs_of, record
from service.queue.shares import Amount, Usage, allocate
from service.settings import Settings
from service.specs.spec import ExperimentSpec
from service.upkeep.migrate import migrate
from ttsv.config.trial import TrialConfig
from ttsv.results import TrialResult
from workers.driver.recorder import Recorder
from workers.trial_process.messages import EpochReport, ResultReport
from workers.worker import scheduler as scheduler_module
from workers.worker.drivers import Drivers
from workers.worker.scheduler import Scheduler

NODES = [Amount(64, 8, 512)] * 125
EPOCHS = 10
WARM_UP = 20
"""Decisions before any is timed: the nodes fill, and who is short is remembered."""
SLOTS = 8
"""Of each worker."""
WARM_TRIALS = 64
"""Recorded by each worker before any is timed: thirteen cells get their first result, by statements of their own."""
OFFERED = {"sqlite": 100.0, "postgresql": 300.0}
"""Trials a second, of all workers together."""
SEEDS = 5
"""Of a cell, whose mean is made anew with each of its results."""

T = TypeVar("T")
_Stand = tuple[int, int, str, list[int]]
"""A trial's experiment and number, and the host and cards that it is on."""


@dataclass(frozen=True)
class Crowd:
    """Workers that record side by side, for so long; then they offer so many trials a second together."""

    workers: int
    seconds: float
    rate: float


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--experiments", type=int, default=100)
    arguments.add_argument("--trials", type=int, default=10_000, help="queued trials of each experiment")
    arguments.add_argument("--turns", type=int, default=200)
    arguments.add_argument("--seconds", type=float, default=10, help="how long workers record side by side")
    arguments.add_argument("--workers", type=int, default=4, help="that record side by side")
    arguments.add_argument(
        "--rate", type=float, help="trials a second that they offer; else what is asked of a database"
    )
    arguments.add_argument("--databases", nargs="+", choices=OFFERED, default=list(OFFERED))
    options = arguments.parse_args()
    if options.quick:
        options.experiments, options.trials, options.turns, options.seconds = 10, 1_000, 5, 0.2
    found: dict[str, Any] = {"experiments": options.experiments, "trials": options.trials}
    for kind in options.databases:
        sizes = [max(2 * WARM_TRIALS, options.trials // 10), options.trials]
        crowd = Crowd(options.workers, options.seconds, options.rate or OFFERED[kind])
        found[kind] = {str(size): measured(kind, options.experiments, size, options.turns, crowd) for size in sizes}
        for size, figures in found[kind].items():
            told = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            print(f"{kind}, {size} trials each: {told}", flush=True)
    if not options.quick:
        keep("scheduling", "python benchmarks/scheduling.py", found)
    return 0


def measured(kind: str, experiments: int, trials: int, turns: int, crowd: Crowd) -> dict[str, float]:
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
            found = _timed(parts["contenders"], partial(_look, database, lambda s: contenders(s, [1], specs)))
            demands = [one.demand for one in found]
            usage.add(demands, NODES, 0.5)
            share = partial(allocate, demands, NODES, most_experiments=experiments, usage=usage)
            assert _timed(parts["shares"], share)
            _timed(parts["next"], partial(_look, database, lambda s: driver_reads.next_trial(s, lease, {1, 2})))
            parts["decision"].append(time.perf_counter() - began)
        figures = {f"{name} ms": 1000 * (median(seconds) or 0) for name, seconds in parts.items()}
        figures["decision p99 ms"] = _percentile(parts["decision"], 99)
        figures |= _shared(database, turns)
        figures["trials a second"] = _record(database, lease, min(trials, turns))
        database.close()
        with ProcessPoolExecutor(crowd.workers, multiprocessing.get_context("spawn")) as pool:
            done = [pool.submit(most_alone, url, crowd.seconds) for _ in range(crowd.workers)]
            most, waits = zip(*(each.result() for each in done), strict=True)
            each_rate = crowd.rate / crowd.workers
            late = [pool.submit(offer_alone, url, each_rate, crowd.seconds) for _ in range(crowd.workers)]
            offered = [wait for each in late for wait in each.result()]
        figures[f"trials a second, {crowd.workers} workers"] = sum(most)
        figures["result p99 ms at most trials a second"] = _percentile([wait for each in waits for wait in each], 99)
        figures[f"result p50 ms, {crowd.rate:g} a second offered"] = _percentile(offered, 50)
        figures[f"result p99 ms, {crowd.rate:g} a second offered"] = _percentile(offered, 99)
        return figures


class _Told:
    """A driver that hears of its share, and runs so many trials."""

    def __init__(self, lease: leases.Lease) -> None:
        self.lease, self.slots, self.shunned = lease, 0, frozenset[str]()

    def tell(self, slots: int, most: int, shunned: Sequence[str] = (), *_: object, **__: object) -> None:
        self.slots, self.shunned = slots, frozenset(shunned)


class _AllTold(list[_Told]):
    """A worker's drivers, none of which ever dies."""

    def start(self, lease: leases.Lease) -> _Told:
        self.append(_Told(lease))
        return self[-1]

    def trouble(self, experiment_id: int) -> None:
        return None


class _Pool:
    """Full nodes: each trial is on the emptiest that has room for it, as Ray puts them, and on cards of it."""

    def __init__(self, database: Database, told: _AllTold, needs: Mapping[int, Amount]) -> None:
        self._database, self._told, self._needs = database, told, needs
        self._cards = {f"node-{number}": [1.0] * int(node.gpus) for number, node in enumerate(NODES)}
        self._cpus = {f"node-{number}": node.cpus for number, node in enumerate(NODES)}
        self._running: list[_Stand] = []
        self._begun: Counter[int] = Counter()
        self._ended: defaultdict[int, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._running)

    def turn(self, rng: random.Random) -> None:
        """A twentieth of all is to run again, and drivers begin what they may and what has room."""
        rng.shuffle(self._running)
        ending = [self._running.pop() for _ in range(len(self._running) // 20)]
        for number, trial, host, cards in ending:
            self._take(number, host, cards, -1)
            self._ended[number].append(trial)
        waiting = [driver for driver in self._told for _ in range(driver.slots)]
        counts, begun = Counter(number for number, *_ in self._running), []
        rng.shuffle(waiting)
        for driver in waiting:
            number = driver.lease.experiment_id
            if counts[number] < driver.slots and (place := self._place(number, driver.shunned)) is not None:
                counts[number] += 1
                begun.append((number, self._next(number), *place))
        self._running += begun
        self._database.write(partial(self._write, ending=ending, begun=begun))

    def _next(self, number: int) -> int:
        if self._ended[number]:
            return self._ended[number].pop(0)
        self._begun[number] += 1
        return self._begun[number]

    def _place(self, number: int, shunned: Collection[str]) -> tuple[str, list[int]] | None:
        cpus, gpus, _ = self._needs[number]
        for host in sorted(self._cards, key=lambda host: -sum(self._cards[host])):
            fitting = [at for at, left in enumerate(self._cards[host]) if left >= min(gpus, 1.0)]
            fitting = sorted(fitting, key=lambda at: self._cards[host][at])[: max(1, int(gpus))]
            if host not in shunned and self._cpus[host] >= cpus and len(fitting) >= gpus:
                self._take(number, host, fitting, 1)
                return host, fitting
        return None

    def _take(self, number: int, host: str, cards: Sequence[int], sign: int) -> None:
        self._cpus[host] -= sign * self._needs[number].cpus
        for at in cards:
            self._cards[host][at] -= sign * min(self._needs[number].gpus, 1.0)

    @staticmethod
    def _write(session: Session, ending: Sequence[_Stand], begun: Sequence[_Stand]) -> None:
        for state, stands in ((TrialState.QUEUED, ending), (TrialState.RUNNING, begun)):
            for number, trial, host, cards in stands:
                values = {"state": state, "node": f"{host}{GPUS}{', '.join(map(str, cards))}"}
                session.execute(
                    update(Trial).where(Trial.experiment_id == number, Trial.number == trial).values(values)
                )


def _shared(database: Database, turns: int) -> dict[str, float]:
    """Milliseconds of a worker's whole decision, and how many trials run meanwhile; two decisions a second."""
    told, clock = _AllTold(), [time.monotonic()]
    settings = Settings()
    nodes = [Node(f"node-{at}", f"node-{at}", "", *node) for at, node in enumerate(NODES)]
    database.write(lambda session: record(session, "pool", nodes))
    with database.look() as session:
        pool = _Pool(database, told, needs_of(session, session.scalars(select(Experiment.id)).all()))
    walls, cpus, rng = list[float](), list[float](), random.Random(0)
    gc.freeze()  # as a worker does
    scheduler = Scheduler(settings, database, cast("Drivers", told), "pool", None, most=1000)
    with patch.object(scheduler_module, "time", SimpleNamespace(monotonic=lambda: clock[0])):
        for turn in range(-WARM_UP, turns):
            clock[0] += 0.5
            began, began_cpu = time.perf_counter(), time.thread_time()
            assert scheduler.share(nodes)
            if turn >= 0:
                walls.append(time.perf_counter() - began)
                cpus.append(time.thread_time() - began_cpu)
            pool.turn(rng)
    database.write(_give_back)
    return {
        "share running": len(pool),
        "share ms": 1000 * (median(walls) or 0),
        "share p99 ms": _percentile(walls, 99),
        "share cpu ms": 1000 * (median(cpus) or 0),
        "share cpu p99 ms": _percentile(cpus, 99),
    }


def _give_back(session: Session) -> None:
    """Has all wait again that the pool had."""
    session.execute(update(Trial).where(Trial.state == TrialState.RUNNING).values(state=TrialState.QUEUED, node=None))
    session.execute(
        update(Experiment).where(Experiment.worker == "pool").values(state=ExperimentState.QUEUED, worker=None)
    )


def _percentile(seconds: Sequence[float], percent: float) -> float:
    """Milliseconds that so many of 100 are below."""
    return 1000 * sorted(seconds)[int(percent / 100 * (len(seconds) - 1))]


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
        gc.freeze()  # as a driver does

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

    def warm_up(self) -> None:
        """Records the first trials, upon which statements are made and prepared."""
        for _ in range(WARM_TRIALS):
            if self.start() is not None:
                self.stored.get()

    def close(self) -> None:
        """Waits until all is stored; the experiment stays claimed, and the next worker has another."""
        self._recorder.flush()
        self._database.close()

    def _ended(self, trial_id: int) -> None:
        self._taken.discard(trial_id)
        self.stored.put((trial_id, time.perf_counter()))


def most_alone(url: str, seconds: float) -> tuple[float, list[float]]:
    """Trials a second that one worker records that has always the next one ready, and how long each result waits."""
    driver, began = _Driver(url), time.perf_counter()
    due, waits = dict[int, float](), list[float]()

    def start() -> None:
        moment = time.perf_counter()
        if (trial_id := driver.start()) is not None:
            due[trial_id] = moment

    for _ in range(SLOTS):
        start()
    while due:
        trial_id, stored = driver.stored.get()
        waits.append(stored - due.pop(trial_id))
        if time.perf_counter() - began < seconds:
            start()
    spent = time.perf_counter() - began
    driver.close()
    return len(waits) / spent, waits


def offer_alone(url: str, rate: float, seconds: float) -> list[float]:
    """How long each result waits that one worker has in its turn, whether those before it are stored or not."""
    driver, due = _Driver(url), dict[int, float]()
    driver.warm_up()
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
