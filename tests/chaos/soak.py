"""A soak: hours of small grids on two nodes of Ray, and a verdict on what grew meanwhile.

    python -m tests.chaos.soak [--database sqlite|postgresql] [--seconds N] [--pause N] [--record]

Nothing is broken here. Experiments are posted, watched as a person would (stream, list, board, pages, metrics) until
they end, and once their drivers are gone every process that lives on is looked at: its own memory, its descriptors, its
threads, and how many there are. Ends with code 1 where all that lived throughout, together, or one of ours by itself
has grown by more than 5 % since it had warmed up, where one of them holds more descriptors or threads, or where there
are more processes or connections to the database than before. Ray's own two, which keep a little of every experiment,
may have 20 KiB more for each, if that is more than 5 % of them.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import psutil

from service.client import Client
from tests.chaos.site import Site
from tests.chaos.verdict import judge

RECORDS = Path(__file__).with_name("soaks.jsonl")
EXPERIMENTS, TRIALS, EPOCHS = 2, 4, 3
"""So many at a time, of so many trials, of so many epochs each."""
MOST_GROWTH = 0.05
RAYS = ("gcs_server", "raylet")
RAYS_MEBIBYTES = 20 / 1024
"""What each of Ray's may keep of every experiment."""
RAYS_THREADS = 2
"""So many threads more its pools may have at one time than at another."""
QUIET_SECONDS = 60
"""How long drivers and trials may take to go when their experiment has ended."""
PAGES = ("/", "/experiments/{id}", "/trials/{trial}", "/leaderboards/digits", "/pool")


@dataclass(frozen=True)
class Look:
    """What one process held at one moment. `memory`, in bytes, is what would be free without it."""

    name: str
    memory: int
    descriptors: int
    threads: int


@dataclass
class Diary:
    """What was seen, look by look: `processes` by pid, `connections` to PostgreSQL (none of SQLite), `experiments`."""

    processes: list[dict[int, Look]] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)
    experiments: list[int] = field(default_factory=list)

    def steady(self) -> dict[int, list[Look]]:
        """The processes that lived throughout."""
        pids = set.intersection(*(set(looks) for looks in self.processes))
        return {pid: [looks[pid] for looks in self.processes] for pid in sorted(pids)}


@dataclass(frozen=True)
class Growth:
    """What one kind of process had when warm, and in the end (of several alike, what grew most).

    Memory and descriptors are medians; threads the most of then and the fewest of now.
    """

    name: str
    mebibytes: tuple[float, float]
    descriptors: tuple[float, float]
    threads: tuple[float, float]

    @property
    def share(self) -> float:
        """By which part its memory has grown."""
        return self.mebibytes[1] / self.mebibytes[0] - 1


def warm_and_last(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the second and of the last eighth."""
    eighth = max(1, math.ceil(len(values) / 8))
    return statistics.median(values[eighth : 2 * eighth] or values), statistics.median(values[-eighth:])


def most_and_fewest(values: Sequence[int]) -> tuple[int, int]:
    """The most of the second eighth, the fewest of the last: Ray's pools have threads more and less all the time."""
    eighth = max(1, math.ceil(len(values) / 8))
    return max(values[eighth : 2 * eighth] or values), min(values[-eighth:])


def growths(diary: Diary) -> list[Growth]:
    """What each kind of process has grown by."""
    kinds: dict[str, list[Growth]] = defaultdict(list)
    for looks in diary.steady().values():
        memory = warm_and_last([look.memory for look in looks])
        descriptors = warm_and_last([look.descriptors for look in looks])
        threads = most_and_fewest([look.threads for look in looks])
        mebibytes = (round(memory[0] / 2**20, 1), round(memory[1] / 2**20, 1))
        kinds[looks[0].name].append(Growth(looks[0].name, mebibytes, descriptors, threads))
    return [max(alike, key=lambda growth: growth.share) for _, alike in sorted(kinds.items())]


def together(kinds: Sequence[Growth]) -> Growth:
    """The memory of all kinds; of what else there is each is looked at by itself."""
    warm, last = (round(math.fsum(kind.mebibytes[at] for kind in kinds), 1) for at in (0, 1))
    return Growth("all together", (warm, last), (0, 0), (0, 0))


def leaks(diary: Diary) -> list[str]:
    """What must not be, in sentences; none where all is well."""
    found, kinds = [], growths(diary)
    warm, last = warm_and_last(diary.experiments)
    for growth in [*kinds, together(kinds)]:
        rays = growth.name in RAYS
        room = max(MOST_GROWTH * growth.mebibytes[0], (last - warm) * RAYS_MEBIBYTES if rays else 0)
        if growth.mebibytes[1] - growth.mebibytes[0] > room:
            found.append(f"{growth.name} grew from {growth.mebibytes[0]} to {growth.mebibytes[1]} MiB")
        more = RAYS_THREADS if rays else 0
        for what, (then, now), spare in (("descriptors", growth.descriptors, 0), ("threads", growth.threads, more)):
            if now > then + spare:
                found.append(f"{growth.name} has {now:g} {what}, {then:g} when it was warm")
    counts = {"processes": [len(looks) for looks in diary.processes], "connections": diary.connections}
    for what, numbers in counts.items():
        warm, last = warm_and_last(numbers) if numbers else (0, 0)
        if last > warm:
            found.append(f"there are {last:g} {what}, {warm:g} when all was warm")
    return found


def look(site: Site, diary: Diary, experiments: int) -> None:
    """Notes what every process of the site holds now, after so many experiments."""
    seen: dict[int, Look] = {}
    for process in site.processes():
        with contextlib.suppress(psutil.Error, IndexError):
            name = _name(site, process)
            memory = process.memory_full_info().uss
            seen[process.pid] = Look(name, memory, process.num_fds(), process.num_threads())
    diary.processes.append(seen)
    diary.experiments.append(experiments)
    if site.postgres is not None:
        with contextlib.suppress(psutil.Error):
            served = psutil.Process(site.postgres.pid).children()
            diary.connections.append(sum("chaos" in " ".join(child.cmdline()) for child in served))


def _name(site: Site, process: psutil.Process) -> str:
    if (role := site.role(process.pid)) is not None:
        return role
    line = process.cmdline()
    if len(line) == 1:  # Ray's own titles: ray::IDLE, ray::DashboardAgent
        return line[0].split()[0]
    if "-m" in line:
        return line[line.index("-m") + 1]
    script = next((Path(word).name for word in line[1:] if word.endswith(".py")), None)
    return script or process.name()


class Visitor:
    """Does with an API what a laboratory does all day."""

    def __init__(self, client: Client, browser: httpx.Client) -> None:
        self.posted: dict[str, int] = {}
        self._client = client
        self._browser = browser

    def round(self) -> None:
        """Posts experiments, watches them to their end, and looks at what came out."""
        new = []
        for _ in range(EXPERIMENTS):
            number = len(self.posted)
            training = {"epochs": EPOCHS, "lr": 0.02, "weight_decay": number / 10_000}
            base = {"dataset": "digits", "model": "small-cnn", "training": training}
            spec = {"name": f"soak {number}", "base": base, "grid": {"seed": list(range(TRIALS))}}
            new.append(self._client.submit(spec).id)
            self.posted[f"soak {number}"] = TRIALS
        for experiment in new:
            for _ in self._client.watch(experiment, every=0.2):
                pass
        trial = next(iter(self._client.trials(new[0]))).id
        self._client.leaderboard("digits")
        self._client.matrix(new[0])
        self._client.service_metrics()
        for page in PAGES:
            self._browser.get(page.format(id=new[0], trial=trial)).raise_for_status()


def _ready(site: Site) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{site.address}/readyz").status_code == 200
    return False


def _quiet(site: Site) -> bool:
    """Waits until drivers and trials are gone; whether they went in time."""
    deadline = time.monotonic() + QUIET_SECONDS
    while site.victims("driver") or any("Agent" not in name for name in map(_title, site.victims("trial"))):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _title(pid: int) -> str:
    try:
        return psutil.Process(pid).cmdline()[0]
    except (psutil.Error, IndexError):  # it has just ended
        return "Agent"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="postgresql")
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--pause", type=float, default=0.0, help="between two rounds of grids, in seconds")
    parser.add_argument("--record", action="store_true", help=f"add what was found to {RECORDS.name}")
    options = parser.parse_args()
    site, diary = Site(options.database), Diary()
    try:
        site.start()
        while not _ready(site):
            time.sleep(0.2)
        began = time.monotonic()
        with Client(site.address, retries=8) as client, httpx.Client(base_url=site.address, timeout=60) as browser:
            visitor = Visitor(client, browser)
            while time.monotonic() - began < options.seconds:
                visitor.round()
                site.mend()
                if _quiet(site):
                    look(site, diary, len(visitor.posted))
                time.sleep(options.pause)
                if len(diary.processes) % 20 == 1:
                    held = ", ".join(f"{one.name} {one.memory / 2**20:.1f}" for one in diary.processes[-1].values())
                    told = f"{time.monotonic() - began:.0f} s, {len(visitor.posted)} experiments"
                    print(f"{told}; MiB: {held}", flush=True)
        database = site.database()
        with database.read() as session:
            verdict = judge(session, site.data, visitor.posted, site.notes)
        database.close()
        faults = [f"{name} ended {count} times" for name, count in site.restarts.items() if count]
        faults += verdict.faults + leaks(diary)
    finally:
        site.close()
    found = {
        "database": options.database,
        "seconds": round(time.monotonic() - began),
        "looks": len(diary.processes),
        "experiments": len(visitor.posted),
        "trials": verdict.trials,
        "processes": len(diary.processes[-1]),
        "connections": list(warm_and_last(diary.connections)) if diary.connections else None,
        "memory_mib": {growth.name: growth.mebibytes for growth in (*growths(diary), together(growths(diary)))},
        "descriptors": {growth.name: growth.descriptors for growth in growths(diary)},
        "faults": faults,
    }
    print(json.dumps(found, indent=1), flush=True)
    if options.record:
        with RECORDS.open("a") as file:
            file.write(json.dumps(found) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
