"""Chaos: a grid on two nodes of Ray while everything that can die does, and a verdict on what is left.

    python -m tests.chaos [--database sqlite|postgresql] [--seconds N | --count N] [--every SECONDS] [--seed N]
                          [--respite SECONDS] [--calm] [--only kill|freeze|node|data|database] [--unshared]
                          [--away SECONDS] [--unfenced] [--faults] [--record]

Experiments are posted through the API as long as things are broken, so that there is always work; then all is left in
peace until everything has ended. The seed is printed: the same one draws the same mishaps, if not at the same moments.
Each kind of process is killed once before others come again, if need be for twice as long as `--seconds`; not `--calm`.
Ends with code 1 where anything was lost, doubled or changed, or a trial did not succeed.

With `--only freeze` there are two workers with a cluster each, of which one after the other stands still, with its
drivers and their trials, until the other has claimed what it had, and then wakes up. With `--only node` the second node
is killed with all that it runs, with `--only data` nothing dies, but bits of the data set change, and with `--only
database` PostgreSQL dies, is cut off, falls silent, or swallows replies to COMMIT.

With `--faults` besides all that whoever comes first to a fault point (`ttsv.runtime.faults`) is killed there.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import httpx2 as httpx
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from service.database import Experiment, Trial
from service.database.engine import Database
from service.experiments.submission import turns_of
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.specs.states import OPEN_EXPERIMENTS, OPEN_TRIALS
from tests.chaos import images
from tests.chaos.derived import BAD_DATA
from tests.chaos.fences import read as read_refusals
from tests.chaos.monkey import RESPITE_SECONDS, Monkey
from tests.chaos.site import ROOT, Site, why_not_unshared
from tests.chaos.verdict import judge
from ttsv.runtime.faults import POINTS
from workers.trial_process.trainable import REPORT_SECONDS

RECORDS = Path(__file__).with_name("records.jsonl")


@dataclass(frozen=True)
class Grid:
    """What is posted again and again: trials of so many epochs, of so many seconds each.

    With `most_open` experiments and trials open nothing more is. Each node has room for as many trials as `cpus`.
    `first`: of every other grid, in mixed order, only so many trials are posted, those whose turn is last; all others
    are added once one of these runs. So they come before those that run, and yet after those that are lost.
    """

    trials: int = 4
    epochs: int = 20
    seconds: float = 0.25
    most_open: int = 12
    cpus: int = 2
    first: int | None = None

    def spec(self, number: int) -> dict[str, Any]:
        """The whole grid; no two of different numbers have a trial in common."""
        training = {"epochs": self.epochs, "lr": self.seconds}
        return {
            "name": f"chaos {number}",
            "order": "random" if self._is_split(number) else "grid",
            "base": {"dataset": images.NAME, "model": "small-cnn", "training": training},
            "grid": {"seed": list(range(self.trials)), "training.weight_decay": [number / 1000]},
        }

    def seeds(self, number: int) -> tuple[list[int], list[int]]:
        """The seeds that are posted, and those that are added."""
        spec = ExperimentSpec.model_validate(self.spec(number))
        planned = expand_grid(spec, max_trials=self.trials).trials
        turns = turns_of(planned, spec.order)
        seeds = [trial.config.seed for _, trial in sorted(zip(turns, planned, strict=True), key=itemgetter(0))]
        return (seeds[-self.first :], seeds[: -self.first]) if self._is_split(number) and self.first else (seeds, [])

    def within(self, seconds: float) -> "Grid":
        """Of its trials as many as two nodes run in so many seconds, where nothing breaks; at least one each place."""
        rounds = max(1, int(seconds / (self.epochs * self.seconds)))
        return dataclasses.replace(self, trials=min(self.trials, 2 * self.cpus * rounds))

    def _is_split(self, number: int) -> bool:
        return self.first is not None and number % 2 == 0


GRIDS = {
    # Small ones, so that a worker always has some of them.
    "freeze": Grid(trials=2, epochs=60, most_open=9, cpus=3),
    # Mid-grid there must be some that never began; an epoch is longer than reports are held back.
    "node": Grid(trials=16, epochs=12, seconds=0.6, most_open=17, first=4),
}
CALM = Grid(trials=12, epochs=30, seconds=0.5, most_open=1, cpus=1)
"""One experiment after the other, of so many trials that a process runs several: to start processes is what costs."""


class Poster:
    """Posts experiments through an API that comes and goes, each with an Idempotency-Key of its own."""

    def __init__(self, site: Site, grid: Grid) -> None:
        self._whole = self._grid = grid
        self.posted: dict[str, int] = {}
        self._client = httpx.Client(base_url=site.address, timeout=5)
        self._sent = False
        self._rest: list[int] = []
        self._id = 0

    @property
    def pending(self) -> bool:
        """Whether something was sent and not answered yet, or is to be added."""
        return self._sent or bool(self._rest)

    def post(self, database: Database, seconds: float = math.inf) -> bool:
        """Tries once, with the same experiment until it is answered and whole; whether it was answered.

        `database` is what a checker sees of it. An experiment that is a new one has what takes so many seconds.
        """
        if self._rest:
            return self._extend(database)
        if not self._sent:
            self._grid = self._whole if seconds == math.inf else self._whole.within(seconds)
        number = len(self.posted)
        seeds, rest = self._grid.seeds(number)
        spec = self._grid.spec(number)
        spec["grid"]["seed"] = seeds
        self._sent = True
        answer = self._answer("/v1/experiments", spec, spec["name"])
        if answer is None:
            return False
        self._sent, self._rest, self._id = False, rest, answer["id"]
        self.posted[spec["name"]] = self._grid.trials
        return True

    def _extend(self, database: Database) -> bool:
        if not _has_begun(database, self._id):
            return False
        address, key = f"/v1/experiments/{self._id}/extend", f"more of {self._id}"
        if self._answer(address, {"grid": {"seed": self._rest}}, key) is None:
            return False
        self._rest = []
        return True

    def retry(self, database: Database, monkey: Monkey) -> bool:
        """Does as a person who reads why trials were refused their data, and runs them again once that is put right.

        Whether there are any; `database` is what a checker sees of it.
        """
        refused = _refused(database)
        for experiment_id, error in refused:
            monkey.refused(error)
            if not monkey.wrong_data():
                self._answer(f"/v1/experiments/{experiment_id}/retry", {}, None)
        return bool(refused)

    def _answer(self, address: str, document: dict[str, Any], key: str | None) -> Any:
        """What the API says; None where it is away, or its database, or where it cannot read the data set just then."""
        headers = {} if key is None else {"Idempotency-Key": key}
        try:
            answer = self._client.post(address, json=document, headers=headers)
        except httpx.TransportError:
            return None
        if answer.status_code >= 500 or (answer.status_code == 422 and images.SOURCE in answer.text):
            return None
        answer.raise_for_status()
        return answer.json()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="postgresql")
    parser.add_argument("--seconds", type=float, default=120, help="how long things break")
    parser.add_argument("--count", type=int, help="until so many of what is asked for were met")
    parser.add_argument("--every", type=float, help="mean pause between two mishaps, in seconds; 3, or 10 of --calm")
    parser.add_argument(
        "--respite",
        type=float,
        default=RESPITE_SECONDS,
        help="how long nothing is met, in seconds, of what all others need, once one of these was",
    )
    parser.add_argument("--calm", action="store_true", help="what leaves the processor to others")
    parser.add_argument("--only", choices=("kill", "freeze", "node", "data", "database"), help="no other mishap")
    parser.add_argument("--unshared", action="store_true", help="the second node does not see the data folder")
    parser.add_argument("--away", type=float, default=0, help="first PostgreSQL is away for so many seconds")
    parser.add_argument("--unfenced", action="store_true", help="without the fence, until it is missed")
    parser.add_argument("--faults", action="store_true", help="who comes first to a fault point is killed there")
    parser.add_argument(
        "--clock",
        type=float,
        default=3600,
        help="by how much the clocks of drivers, workers and APIs are wrong at most, in seconds",
    )
    parser.add_argument("--peace", type=float, default=240, help="how long the rest may take once nothing breaks")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--record", action="store_true", help=f"add what was found to {RECORDS.name}")
    options = parser.parse_args()
    if options.away and options.database == "sqlite":
        parser.error("--away: there is no server of SQLite that could be away")
    if options.only == "database" and options.database != "postgresql":
        parser.error("--only database: with --database postgresql, as SQLite has no server")
    if options.only == "node" and not options.unshared:
        parser.error("--only node: with --unshared, by which the second node is a machine of its own")
    if options.unshared and (reason := why_not_unshared()) is not None:
        print(f"skipped: {reason}")
        return 0
    print(f"seed {options.seed}, {options.database}", flush=True)
    grid, rival = GRIDS.get(options.only, CALM if options.calm else Grid()), options.only == "freeze"
    every = options.every or (10.0 if options.calm else 3.0)
    made = circumstances(options, every)  # now: the code may be another one in the end
    site = Site(
        options.database,
        disk_mib=256,
        clock=options.clock,
        seed=options.seed,
        rival=rival,
        unshared=options.unshared,
        unfenced=options.unfenced,
        faults=options.faults,
        cpus=grid.cpus,
    )
    database = site.database()
    try:
        site.start()
        poster = Poster(site, grid)
        while not site.victims("trial"):
            if poster.pending or not poster.posted:
                poster.post(database)
            site.mend()
            time.sleep(0.5)
        began = time.monotonic()
        monkey = Monkey(site, options.seed, every, options.only, options.respite)
        if options.away:
            monkey.take_database(options.away)
        longest = options.seconds if options.calm else 2 * options.seconds
        while not _enough(monkey, time.monotonic() - began - options.away, options.seconds, longest, options.count):
            monkey.turn(database)
            site.mend()
            if options.unfenced and read_refusals(site.notes).stale:
                break  # it is missed: what comes of that need not be waited for
            if poster.pending or _open(database) < grid.most_open:
                # What is left in the end runs in peace, where nothing is tried any more.
                poster.post(database, began + options.seconds - time.monotonic() if options.calm else math.inf)
            poster.retry(database, monkey)
            time.sleep(0.1)
        monkey.rest()
        if site.postgres is not None:
            site.postgres.proxy.swallow = 0
        broken = time.monotonic() - began
        print(f"{broken:.0f} s, {sum(monkey.done.values())} mishaps; now peace", flush=True)
        deadline = time.monotonic() + options.peace
        while not options.unfenced and (poster.retry(database, monkey) or _open(database) or poster.pending):
            if time.monotonic() > deadline:
                print("not all came to an end in time", flush=True)
                break
            site.mend()
            monkey.look_at_data()
            if poster.pending:
                poster.post(database)
            time.sleep(0.2)
        with database.read() as session:
            places = 2 * site.cpus if options.only == "node" else None
            # On a node without the folder trials wait for the head once in so long, which may be away when they die.
            alone = not options.unshared or options.only == "node"
            ahead = 0 if alone else 1 + math.ceil(REPORT_SECONDS / grid.seconds)
            fired = site.fired()
            killed = monkey.done["kill trial"] + sum(POINTS[name].who == "trial" for name in fired)
            verdict = judge(session, site.data, poster.posted, site.notes, killed=killed, places=places, ahead=ahead)
        if options.unfenced:
            verdict.faults = read_refusals(site.notes).stale
        elif rival and not monkey.zombies:
            verdict.faults.append("no zombie woke up: nothing was tried")
    finally:
        database.close()
        logs = {path.name: path.read_text()[-3000:] for path in site.folder.glob("*.log")}
        site.close()
    for name, text in logs.items() if verdict.faults else ():
        print(f"---- {name}\n{text}")
    found = {
        "seed": options.seed,
        "database": options.database,
        **made,
        "seconds": round(broken),
        "mishaps": dict(sorted(monkey.done.items())) | {f"fault {name}": 1 for name in fired},
        "unmet": monkey.unmet() + [f"fault {name}" for name in POINTS if options.faults and name not in fired],
        "zombies": monkey.zombies,
        "zombie_trials": monkey.zombie_trials,
        "restarts": site.restarts,
        "swallowed": 0 if site.postgres is None else site.postgres.proxy.swallowed,
        "experiments": len(poster.posted),
        **{key: value for key, value in dataclasses.asdict(verdict).items() if key != "faults"},
        "faults": len(verdict.faults),
        "peace_seconds": round(time.monotonic() - began - broken),
    }
    print(json.dumps(found), flush=True)
    refused = ", ".join(f"{count} of the thread {name}" for name, count in verdict.refused.items()) or "none"
    print(f"{monkey.zombies} drivers woke up after somebody else had claimed; writes refused: {refused}", flush=True)
    told = f"{verdict.mutated} checkpoints were changed, {verdict.noticed} of them noticed"
    told += f"; {verdict.data_changed} files of the data set, {verdict.data_noticed} of them noticed"
    print(f"{told}, for which {verdict.data_refused} trials were refused it and retried", flush=True)
    for fault in verdict.faults:
        print(f"FAULT: {fault}", flush=True)
    if options.record:
        with RECORDS.open("a") as file:
            file.write(json.dumps(found) + "\n")
    return 1 if verdict.faults else 0


def circumstances(options: argparse.Namespace, every: float) -> dict[str, Any]:
    """When, on which code and with what a run is made, so that it can be made again; `every` as it was in effect."""
    asked = {name: value for name, value in vars(options).items() if name not in ("seed", "database", "record")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _git("rev-parse", "HEAD") or None,
        "dirty": bool(_git("status", "--porcelain")),
        "options": asked | {"every": every},
    }


def _git(*arguments: str) -> str:
    try:
        ended = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ended.stdout.strip()


def _enough(monkey: Monkey, lasted: float, seconds: float, longest: float, count: int | None) -> bool:
    if count is not None:
        return monkey.met() >= count
    return lasted > (longest if monkey.unmet() else seconds)


def _has_begun(database: Database, experiment: int) -> bool:
    """Whether a trial of the experiment ever ran, as far as the database answers."""
    with contextlib.suppress(SQLAlchemyError), database.read() as session:
        begun = select(Trial.id).where(Trial.experiment_id == experiment, Trial.started_at.is_not(None))
        return session.scalar(begun.limit(1)) is not None
    return False


def _refused(database: Database) -> list[tuple[int, str]]:
    """Trials that were refused their data: experiment, and why; as far as the database answers."""
    with contextlib.suppress(SQLAlchemyError), database.read() as session:
        query = select(Trial.experiment_id, Trial.error).where(Trial.failure == BAD_DATA)
        return [(row.experiment_id, row.error or "") for row in session.execute(query.distinct())]
    return []


def _open(database: Database) -> int:
    """How many experiments and trials are not final; more than ever were where the database does not say."""
    try:
        with database.read() as session:
            trials = session.scalar(select(func.count()).where(Trial.state.in_(OPEN_TRIALS))) or 0
            owners = session.scalar(select(func.count()).where(Experiment.state.in_(OPEN_EXPERIMENTS))) or 0
            return trials + owners
    except SQLAlchemyError:
        return sys.maxsize


if __name__ == "__main__":
    sys.exit(main())
