"""How long the pool takes, on real processes at its defaults: each bound of the pool, and whether it is kept.

    python -m tests.chaos.pool [--database sqlite|postgresql] [--only NAME ...] [--quick] [--record]

Two workers: one stands still with all that it runs, as if it were a machine that is away (of one on its own machine a
worker sees the end at once), until the other runs its trials. One worker and a second node, four places in all: an
urgent experiment of two trials behind an endless grid of long ones, and behind one that may be interrupted; two equal
endless grids, two of projects of which one weighs three times as much, two of people of one project of whom one does,
and two of one person of which one has the higher priority; a cancelling, until no process is left of it; a drain,
until no process is left at all; what a worker and its drivers hold with a hundred trials that wait, and with four
hundred times as many; and Ray's GCS, or the head's raylet, that stands still for good, until trials begin in the
cluster that is started anew. With four times as many places, room that shares leave over, lent to a grid and given
back. `--quick` has leases and trials short, to see that it works: no bound, no record. Ends with code 1 where a bound
is missed.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.client import Client
from service.database import Experiment, Person, Project, Trial, TrialState, now
from service.database.engine import Database
from service.queue.places import SHORT_SECONDS
from tests.chaos.program import PROCESS
from tests.chaos.site import QUICK, Site

RECORDS = Path(__file__).with_name("pools.jsonl")
NAMES = (
    "takeover",
    "urgent",
    "preempting",
    "shares",
    "weights",
    "people",
    "priorities",
    "lending",
    "cancel",
    "drain",
    "memory",
    "gcs",
    "raylet",
)
SITES: dict[str, dict[str, Any]] = {"takeover": {"rival": True}, "lending": {"cpus": 8}}
"""What another site has than one worker and a second node of two places each."""
MOST_GROWTH = 1.05
"""Of what a process holds, with four hundred times as many trials."""
STANDSTILL_SECONDS = 240.0
"""Of a part of Ray, until trials begin anew: a minute and a half of silence, and before it what Ray takes to notice."""
PATIENCE = 600.0
START_SECONDS = 10.0
"""What a trial's process may take to begin, once there is a place."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class Lengths:
    """How long trials are, in epochs of half a second: those of an endless grid, and others."""

    long: int = 60
    short: int = 10


@dataclass
class Bench:
    """A site with a client and a view of its database."""

    site: Site
    client: Client
    database: Database
    posted: int = 0

    def post(self, trials: int, epochs: int, **more: Any) -> int:
        """The id of an experiment of so many trials; epochs last half a second."""
        self.posted += 1
        training = {"epochs": epochs, "lr": 0.5, "weight_decay": self.posted / 1000}
        base = {"dataset": "digits", "model": "small-cnn", "training": training}
        spec = {"name": f"pool {self.posted}", "base": base, "grid": {"seed": list(range(trials))}, **more}
        return self.client.submit(spec).id

    def give(self, weights: dict[int, float]) -> None:
        """Gives each experiment to a project of its own that weighs so much."""

        def write(session: Session) -> None:
            for number, weight in weights.items():
                project = Project(name=f"of experiment {number}", weight=weight)
                session.add(project)
                session.flush()
                session.get_one(Experiment, number).project_id = project.id

        self.database.write(write)

    def give_to_people(self, weights: dict[int, float]) -> None:
        """Gives each experiment to a person who weighs so much, all of one project."""

        def write(session: Session) -> None:
            project = Project(name=f"of experiments {', '.join(map(str, weights))}")
            session.add(project)
            session.flush()
            for number, weight in weights.items():
                owner = f"of experiment {number}"
                session.add(Person(project_id=project.id, owner=owner, weight=weight))
                experiment = session.get_one(Experiment, number)
                experiment.project_id, experiment.owner = project.id, owner

        self.database.write(write)

    def trials(self, *experiments: int) -> list[Trial]:
        """All of them, as they are now."""
        with self.database.read() as session:
            return list(session.scalars(select(Trial).where(Trial.experiment_id.in_(experiments)).order_by(Trial.id)))

    def running(self, *experiments: int) -> list[Trial]:
        """Those whose process is at work."""
        return [one for one in self.trials(*experiments) if one.state is TrialState.RUNNING and one.node is not None]

    def training(self, *experiments: int) -> list[Trial]:
        """Those that have trained an epoch, and go on."""
        return [one for one in self.running(*experiments) if one.epoch >= 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="postgresql")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these alone")
    parser.add_argument("--quick", action="store_true", help="short leases and trials; no bound, no record")
    parser.add_argument("--record", action="store_true", help=f"add what was found to {RECORDS.name}")
    options = parser.parse_args()
    lengths = Lengths(12, 4) if options.quick else Lengths()
    load, found = os.getloadavg(), dict[str, dict[str, Any]]()
    work: dict[str, Callable[[Bench, Lengths], dict[str, Any]]] = {
        "takeover": takeover,
        "urgent": urgent,
        "preempting": preempting,
        "shares": shares,
        "weights": weights,
        "people": people,
        "priorities": priorities,
        "lending": lending,
        "cancel": cancel,
        "drain": drain,
        "memory": memory,
        "gcs": partial(standstill, part="gcs_server"),
        "raylet": partial(standstill, part="raylet"),
    }
    for name in NAMES:
        if name in options.only:
            with benches(options.database, quick=options.quick, **SITES.get(name, {})) as bench:
                found[name] = work[name](bench, lengths)
            told = ", ".join(f"{key} {value}" for key, value in found[name].items() if key != "kept")
            print(f"{name}: {told}: {'kept' if found[name]['kept'] else 'missed'}", flush=True)
    if options.record and not options.quick:
        record = {"database": options.database, "processors": os.cpu_count(), "load": load, **found}
        with RECORDS.open("a") as file:
            file.write(f"{json.dumps(record)}\n")
    return int(not options.quick and not all(one["kept"] for one in found.values()))


def takeover(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """From a worker's standstill until another runs what it ran."""
    experiment = bench.post(2, 10 * lengths.long)
    before = {one.id: one.epoch for one in _wait(lambda: _all(bench.training(experiment), 2))}
    parties = {name: bench.site.party(name)["driver"] for name in ("worker", "rival")}
    name = next(name for name, drivers in parties.items() if drivers)
    began = time.monotonic()
    bench.site.freeze(process.pid for process in bench.site.tree(name))
    _wait(lambda: not bench.running(experiment))
    noticed = time.monotonic() - began
    _wait(lambda: _all(bench.running(experiment), 2))
    seconds = time.monotonic() - began
    _wait(lambda: all(one.epoch > before[one.id] + 1 for one in bench.trials(experiment)))
    bench.site.kill(*(process.pid for process in bench.site.tree(name)))
    return _timed(seconds, 90) | {"noticed after": round(noticed, 1)}


def urgent(bench: Bench, lengths: Lengths, *, preempt: bool = False) -> dict[str, Any]:
    """From the posting of two urgent trials until both run, behind a full pool.

    Where the others may not be interrupted two of them have to end first: the bound is the time that takes, and what
    a process takes to start.
    """
    places = 2 * bench.site.cpus
    grid = bench.post(400, 10 * lengths.long if preempt else lengths.long, preempt=preempt)
    _wait(lambda: _all(bench.training(grid), places))
    began = time.monotonic()
    wanted = bench.post(2, lengths.short, priority=1000)
    ended = 0.0
    if not preempt:
        _wait(lambda: _succeeded(bench, grid) >= 2)
        ended = time.monotonic() - began
    _wait(lambda: all(one.state is not TrialState.QUEUED and one.node for one in bench.trials(wanted)))
    found = _timed(time.monotonic() - began, 15 if preempt else round(ended, 1) + START_SECONDS)
    return found if preempt else found | {"two trials ended after": round(ended, 1)}


def preempting(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """The same behind a grid that may be interrupted, and whose trials would take very long."""
    return urgent(bench, lengths, preempt=True)


def shares(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """The places that two equal endless grids have had, summed over time, until ten trials have ended."""
    places = 2 * bench.site.cpus
    both = [bench.post(400, lengths.short) for _ in range(2)]
    _wait(lambda: all(_all(bench.training(one), places // 2) for one in both))
    had, idle = _ten_ends(bench, places, *both)
    share = had[both[0]] / had.total()
    return {"share": round(share, 3), "bound": "0.45 to 0.55", "idle": idle, "kept": abs(share - 0.5) <= 0.05}


def weights(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """The same of grids of two projects, of which the second weighs so much that all places but one are due to it."""
    return _weighed(bench, lengths, bench.give)


def people(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """The same of two people of one project."""
    return _weighed(bench, lengths, bench.give_to_people)


def _weighed(bench: Bench, lengths: Lengths, give: Callable[[dict[int, float]], None]) -> dict[str, Any]:
    places = 2 * bench.site.cpus
    both = [bench.post(400, lengths.short) for _ in range(2)]
    give(dict(zip(both, (1.0, places - 1.0), strict=True)))
    _wait(lambda: all(_all(bench.training(one), due) for one, due in zip(both, (1, places - 1), strict=True)))
    had, idle = _ten_ends(bench, places, *both)
    share, due = had[both[0]] / had.total(), 1 / places
    bound = f"{0.9 * due:g} to {1.1 * due:g}"
    return {"share": round(share, 3), "bound": bound, "idle": idle, "kept": abs(share - due) <= 0.1 * due}


def priorities(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """The share of the more urgent of one person's two grids, once what ran before it has ended."""
    places = 2 * bench.site.cpus
    low = bench.post(400, lengths.short)
    _wait(lambda: _all(bench.training(low), places))
    high = bench.post(400, lengths.short, priority=1)
    _wait(lambda: _all(bench.training(high), places))
    had, idle = _ten_ends(bench, places, low, high)
    share = had[high] / had.total()
    return {"share": round(share, 3), "bound": "0.9 at least", "idle": idle, "kept": share >= 0.9}


def lending(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """From a grid's first trial until its second runs, in room that was lent; then who is due it begins as one ends.

    Its trials take five processors of eight, and on each node one stands that takes three. Counted as if these were on
    one node they leave room for a single one, which is its share; where they stand there is room for two.
    """
    pair = bench.post(2, 100 * lengths.long, priority=1, resources={"cpus": 3})
    _wait(lambda: _all(bench.training(pair), 2))
    grid = bench.post(400, lengths.short, resources={"cpus": 5})
    _wait(lambda: bench.running(grid))
    began = time.monotonic()
    _wait(lambda: _all(bench.running(grid), 2))
    found = _timed(time.monotonic() - began, SHORT_SECONDS + START_SECONDS)
    _, idle = _ten_ends(bench, 2, grid)
    wanted = bench.post(1, lengths.short, priority=1000, resources={"cpus": 5})
    began, done = time.monotonic(), _succeeded(bench, grid)
    _wait(lambda: bench.running(wanted))
    back, bound = time.monotonic() - began, lengths.short / 2 + START_SECONDS
    told = {"idle": idle, "given back after": round(back, 1), "ends meanwhile": _succeeded(bench, grid) - done}
    return found | told | {"kept": found["kept"] and back <= bound}


def cancel(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """From a cancelling until neither driver nor trial is left."""
    experiment = bench.post(2 * bench.site.cpus, 10 * lengths.long)
    running = _wait(lambda: _all(bench.training(experiment), 2 * bench.site.cpus))
    pids = set(bench.site.party("worker")["driver"])
    for one in running:
        pids |= {int(note.read_text()) for note in bench.site.data.glob(f"trials/{one.id}/*/{PROCESS}")}
    began = time.monotonic()
    bench.client.cancel(experiment)
    _wait(lambda: not any(map(bench.site.lives, pids)))
    return _timed(time.monotonic() - began, 15) | {"processes": len(pids)}


def drain(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """From the worker's SIGTERM until nothing of it is left."""
    experiment = bench.post(2 * bench.site.cpus, 10 * lengths.long)
    _wait(lambda: _all(bench.training(experiment), 2 * bench.site.cpus))
    tree = bench.site.tree("worker")
    began = time.monotonic()
    tree[0].send_signal(signal.SIGTERM)
    _wait(lambda: not any(bench.site.lives(process.pid) and _same(process) for process in tree))
    seconds = time.monotonic() - began
    spent = sum(one.attempts for one in bench.trials(experiment))
    states = {one.state.value for one in bench.trials(experiment)}
    found = _timed(seconds, 60) | {"attempts spent": spent, "states": sorted(states)}
    return found | {"kept": found["kept"] and not spent and states == {"queued"}}


def memory(bench: Bench, lengths: Lengths) -> dict[str, Any]:
    """MiB that a worker and its largest driver have to themselves, with few trials that wait and then with many."""
    few, many = (_held(bench, lengths, *sizes) for sizes in ((4, 25), (4, 10_000)))
    kept = all(many[name] <= MOST_GROWTH * few[name] for name in few)
    return {"MiB with 100 trials": few, "with 40,000": many, "kept": kept}


def _held(bench: Bench, lengths: Lengths, grids: int, trials: int) -> dict[str, float]:
    posted = [bench.post(trials, lengths.short) for _ in range(grids)]
    _wait(lambda: _succeeded(bench, *posted) >= 10)
    pids = {"worker": [bench.site.tree("worker")[0].pid], "driver": bench.site.party("worker")["driver"]}
    found = {
        name: round(max(psutil.Process(pid).memory_full_info().uss for pid in of_kind) / 2**20, 1)
        for name, of_kind in pids.items()
    }
    for experiment in posted:
        bench.client.cancel(experiment)
    _wait(lambda: not bench.site.party("worker")["driver"])
    return found


def standstill(bench: Bench, lengths: Lengths, *, part: str) -> dict[str, Any]:
    """From the standstill of a part of the head until a trial trains that began in the cluster that came after it."""
    grid = bench.post(400, lengths.short)
    _wait(lambda: _all(bench.training(grid), 2 * bench.site.cpus))
    frozen = next(process.pid for process in bench.site.tree("worker") if process.name() == part)
    began = time.monotonic()
    bench.site.freeze([frozen])
    _wait(lambda: not bench.site.lives(frozen))
    ended, moment = time.monotonic() - began, now()
    _wait(lambda: any(one.started_at is not None and one.started_at > moment for one in bench.training(grid)))
    found = _timed(time.monotonic() - began, STANDSTILL_SECONDS)
    spent = sum(one.attempts - 1 for one in bench.trials(grid) if one.attempts)
    return found | {"ended after": round(ended, 1), "attempts charged": spent, "kept": found["kept"] and not spent}


@contextmanager
def benches(kind: str, *, quick: bool, **more: Any) -> Iterator[Bench]:
    """A fresh site, all of whose workers and nodes are up."""
    site = Site(kind, settings=QUICK if quick else {}, **more)
    database = site.database()
    try:
        site.start()
        with Client(site.address) as client:
            _wait(lambda: _answers(client))
            _wait(lambda: sum(one.state == "alive" for one in client.nodes()) == 2)
            yield Bench(site, client, database)
    finally:
        database.close()
        site.close()


def _ten_ends(bench: Bench, places: int, *experiments: int) -> tuple[Counter[int], float]:
    """Until ten trials have ended: places that each experiment has had, summed over time, and what part was idle."""
    had, idle, looks, done = Counter[int](), 0, 0, _succeeded(bench, *experiments)
    while _succeeded(bench, *experiments) < done + 10:
        running = [one.experiment_id for one in bench.trials(*experiments) if one.state is TrialState.RUNNING]
        had.update(running)
        looks += 1
        idle += max(0, places - len(running))
        time.sleep(0.2)
    return had, round(idle / (looks * places), 3)


def _timed(seconds: float, bound: float) -> dict[str, Any]:
    return {"seconds": round(seconds, 1), "bound": bound, "kept": seconds <= bound}


def _succeeded(bench: Bench, *experiments: int) -> int:
    done = Trial.experiment_id.in_(experiments), Trial.state == TrialState.SUCCEEDED
    with bench.database.read() as session:
        return session.scalar(select(func.count()).select_from(Trial).where(*done)) or 0


def _all(found: list[Trial], count: int) -> list[Trial]:
    return found if len(found) >= count else []


def _same(process: psutil.Process) -> bool:
    try:
        return process.is_running()
    except psutil.Error:
        return False


def _answers(client: Client) -> bool:
    try:
        client.nodes()
    except Exception:
        return False
    return True


def _wait(condition: Callable[[], _T | None]) -> _T:
    """The condition's first true value."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE:g} s")
        time.sleep(0.1)
    return value


if __name__ == "__main__":
    sys.exit(main())
