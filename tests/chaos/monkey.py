"""What goes wrong, drawn by a seed.

Kills, frozen processes, cut or silent connections, lost replies, a full disk, bits that a disk has lost.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.database import ClusterNode, Experiment, ExperimentState
from service.database.engine import Database
from service.specs.states import NodeState
from tests.chaos import notes
from tests.chaos.images import Spoilt
from tests.chaos.site import LEASE_SECONDS, Site

TRIALS = {"trial": 8, "driver": 5, "api": 2}
"""Whom a SIGKILL meets, with how often beside the others; who is just starting again is met by none."""
MACHINERY = {"worker": 1, "raylet": 2, "gcs": 1, "node": 1, "postgres": 1}
"""Others without whom nothing trains: one of them is met, and then none of them for a while.

Else at a kill a second there would never be a trial to be killed.
"""
RESPITE_SECONDS = 20.0
"""So long, unless another time is asked for."""
FREEZES = {"trial": 3, "driver": 3, "api": 1}
FROZEN_MACHINERY = {"worker": 1, "raylet": 1, "postgres": 1}
SPOILT = 0.3
"""So many of the kills of trials have the newest checkpoint changed before."""
DATA_SECONDS, MOST_DATA_SECONDS = 3.0, 15.0
"""So long a file of the data set stays wrong at least, and at most where no trial meets it, that the service cannot put
right by itself."""
MOST_PATIENCE = 60.0
"""So long, in seconds, a party stands still whose experiments nobody takes over; and so long one is waited for that
trains something of each."""


@dataclass
class Party:
    """A worker that stands still, with its drivers and its trials' processes, and what it had claimed by then."""

    name: str
    frozen: dict[str, list[int]]
    claims: dict[int, int]
    since: float = field(default_factory=time.monotonic)


@dataclass
class Monkey:
    """Draws one mishap after another. `done` counts them; `every` is the mean pause between two, in seconds.

    `only` is `kill`, `freeze`, `node`, `data`, `database`, or None for any. Each kind of victim is met once, in an
    order that is drawn, before any that can be met comes again; `respite` is for how long what all others need is left
    alone. `zombies` are drivers that woke up after somebody else had claimed their experiment, `zombie_trials`
    processes of their trials.
    """

    site: Site
    seed: int
    every: float
    only: str | None = None
    respite: float = RESPITE_SECONDS
    done: Counter[str] = field(default_factory=Counter)
    zombies: int = 0
    zombie_trials: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._next = time.monotonic()
        self._machinery_from = 0.0
        self._wait_until = time.monotonic() + MOST_PATIENCE
        self._party: Party | None = None
        self._spoilt: list[tuple[Spoilt, float]] = []
        self._unseen: list[Spoilt] = []
        kinds = list((TRIALS | MACHINERY).keys() - ({"postgres"} if self.site.postgres is None else set()))
        frozen = list((FREEZES | FROZEN_MACHINERY).keys() & kinds)
        self._unmet = {"kill": self._shuffled(kinds), "freeze": self._shuffled(frozen)}

    def _shuffled(self, kinds: Iterable[str]) -> list[str]:
        drawn = sorted(kinds)
        self._random.shuffle(drawn)
        return drawn

    def unmet(self) -> list[str]:
        """The kinds of processes of which none was killed yet, where kills are drawn."""
        return [] if self.only in ("freeze", "node", "data", "database") else sorted(self._unmet["kill"])

    def met(self) -> int:
        """How much was done of what `only` names: processes or nodes killed, zombies woken, files of data changed."""
        if self.only == "freeze":
            return self.zombies
        if self.only == "data":
            return self.done["data changed"]
        return sum(count for name, count in self.done.items() if name.startswith("kill "))

    def turn(self, database: Database) -> None:
        """Does what is due. `database` is what a checker sees of it."""
        self.look_at_data()
        if self._party is not None:
            self._look_after(self._party, database)
            return
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._random.expovariate(1 / self.every)
        if self.only == "freeze":
            self._stun(database)
        elif self.only == "node":
            self._kill_node()
        elif self.only == "data":
            self._change_data()
        elif self.only == "database":
            self._hit_database()
        elif self.only == "kill" or self._random.random() < 0.7:
            self._kill()
        else:
            self._hinder()

    def rest(self) -> None:
        """Nothing more goes wrong, and who stands still goes on; what only a person puts right is."""
        self._spoilt = [(spoilt, -MOST_DATA_SECONDS) for spoilt, _ in self._spoilt]
        if self._party is not None:
            self._wake(self._party, {})

    def wrong_data(self) -> list[Spoilt]:
        """What only a person puts right, and nobody has yet."""
        return [spoilt for spoilt, _ in self._spoilt if spoilt.for_a_person]

    def look_at_data(self) -> None:
        """Sees what the service has noticed of the data set, and puts right in time what it cannot by itself."""
        left = []
        for spoilt, since in self._spoilt:
            if (stands := spoilt.stands()) is False:
                notes.note_data(self.site.notes, "noticed", str(spoilt))
                self._tell("data noticed", str(spoilt))
            elif stands and not (self._is_due(spoilt, since) and self._put_right(spoilt)):
                left.append((spoilt, since))
        self._spoilt = left

    def refused(self, error: str) -> None:
        """A trial was refused the set, and this is what a person reads: it says which file that is about."""
        for spoilt in [one for one in self._unseen if str(one.folder / one.file) in error]:
            self._unseen.remove(spoilt)
            notes.note_data(self.site.notes, "noticed", str(spoilt))
            self._tell("data refused", error)

    def _is_due(self, spoilt: Spoilt, since: float) -> bool:
        unseen = any(spoilt is one for one in self._unseen)
        lasted = time.monotonic() - since
        return spoilt.for_a_person and lasted > (MOST_DATA_SECONDS if unseen else DATA_SECONDS)

    def _put_right(self, spoilt: Spoilt) -> bool:
        if done := spoilt.put_right():
            self._tell("data put right", str(spoilt))
        return done

    def take_database(self, seconds: float) -> None:
        """The database is away for so long; nothing else goes wrong meanwhile."""
        assert self.site.postgres is not None
        self.site.postgres.proxy.cut(seconds)
        self._next = time.monotonic() + seconds
        self._say("database away", f"for {seconds:g} s")

    def _draw(self, what: str, chosen: dict[str, int], machinery: dict[str, int]) -> tuple[str, list[int]]:
        """A kind and all of it that live and go on, perhaps nobody; machinery only when it has had its respite.

        The first that was not met so yet, of those that are there; then any.
        """
        rested = time.monotonic() > self._machinery_from
        weights = chosen | (machinery if rested else {})
        unmet = self._unmet[what]
        for kind in (one for one in unmet if one in weights):
            if living := self._living(kind):
                unmet.remove(kind)
                break
        else:
            (kind,) = self._random.choices(list(weights), list(weights.values()))
            living = self._living(kind)
        if living and kind in machinery:
            self._machinery_from = time.monotonic() + self.respite
        return kind, living

    def _living(self, kind: str) -> list[int]:
        return [pid for pid in self.site.victims(kind) if not self.site.is_frozen(pid)]

    def _kill(self) -> None:
        kind, living = self._draw("kill", TRIALS, MACHINERY)
        if not living:
            return
        pid = self._random.choice(living)
        if kind == "trial" and self._random.random() < SPOILT and self.site.spoil(pid, self._random):
            self._say("checkpoint changed", f"of process {pid}")
        self.site.kill(pid)
        self._say(f"kill {kind}", f"process {pid}")

    def _freeze(self) -> None:
        kind, living = self._draw("freeze", FREEZES, FROZEN_MACHINERY)
        if not living:
            return
        pid, seconds = self._random.choice(living), LEASE_SECONDS + 3.0
        pids = [pid]
        if kind == "postgres" and self.site.postgres is not None:
            pids = [process.pid for process in self.site.postgres.processes()]
        self.site.freeze(pids, seconds)
        self._say(f"freeze {kind}", f"process {pid} for {seconds:g} s")

    def _kill_node(self) -> None:
        """The second node with all that it runs, in the middle of its trials."""
        trials = self.site.training(self.site.party("node")["trial"])
        if not trials:
            self._next = time.monotonic() + 0.2
            return
        time.sleep(self._random.uniform(0, 2))
        processes = self.site.tree("node")
        self.site.kill(*(process.pid for process in processes))
        self._say("kill node", f"with its {len(processes)} processes, {len(trials)} of them of trials")

    def _stun(self, database: Database) -> None:
        """A whole party stands still, where another worker is there to take over what it runs."""
        self._next = time.monotonic() + 0.2  # until there is one
        parties = {name: self.site.party(name) for name in ("worker", "rival")}
        names = [name for name in parties if parties[name]["trial"] and parties[name]["driver"]]
        workers = [pid for party in parties.values() for pid in party["worker"]]
        if not names or len(_asked(database, lambda session: _clusters(session, workers)) or ()) < len(parties):
            return
        name = self._random.choice(names)
        (pid,) = parties[name]["worker"]
        claims = _asked(database, lambda session: _claims(session, pid)) or {}
        training = len(self.site.training(parties[name]["trial"]))
        if not claims or not training or (training < len(claims) and time.monotonic() < self._wait_until):
            return
        frozen = {kind: self.site.freeze(pids) for kind, pids in parties[name].items()}
        # What was claimed until it stood still.
        claims = _asked(database, lambda session: _claims(session, pid)) or claims
        self._party = Party(name, frozen, claims)
        for kind, pids in frozen.items():
            self.done[f"freeze {kind}"] += len(pids)
        counts = ", ".join(f"{len(pids)} {kind}" for kind, pids in frozen.items())
        self._tell(f"freeze {name}", f"{counts}, with experiments {sorted(claims)}")

    def _look_after(self, party: Party, database: Database) -> None:
        fences = _asked(database, lambda session: _fences(session, party.claims))
        if fences is None:
            return
        # One more was the reaping, another one the next claim.
        taken = {number: fence for number, fence in fences.items() if fence >= party.claims[number] + 2}
        if len(taken) == len(party.claims) or time.monotonic() - party.since > MOST_PATIENCE:
            self._wake(party, taken)

    def _wake(self, party: Party, taken: dict[int, int]) -> None:
        drivers = self.site.drivers_of(taken, party.frozen["driver"], party.claims)
        trials = [pid for pid in self.site.training(party.frozen["trial"]) if taken and self.site.lives(pid)]
        self.zombies += len(drivers)
        self.zombie_trials += len(trials)
        for pids in party.frozen.values():
            self.site.thaw(pids)
        self._party, self._next = None, time.monotonic() + self._random.expovariate(1 / self.every)
        self._wait_until = time.monotonic() + MOST_PATIENCE
        still = time.monotonic() - party.since
        self._tell(
            f"wake {party.name}",
            f"after {still:.0f} s; {len(drivers)} zombies and {len(trials)} processes that train, as others have "
            f"{sorted(taken)} now; {self.zombies} in all",
        )

    def _hinder(self) -> None:
        mishaps = ["freeze", "data"]
        if self.site.postgres is not None:
            mishaps += ["cut", "silence", "swallow"]
        mishaps += self.site.disks
        mishap = self._random.choice(mishaps)
        if mishap == "freeze":
            self._freeze()
        elif mishap == "data":
            self._change_data()
        elif mishap in self.site.disks:
            if self.site.fill_disk(mishap, 3):
                self._say(f"{mishap} full", "for 3 s")
        else:
            self._cut_off(mishap)

    def _cut_off(self, mishap: str) -> None:
        """Something of the way to the database."""
        assert self.site.postgres is not None
        proxy = self.site.postgres.proxy
        if mishap == "cut":
            proxy.cut(2)
            self._say("database cut", "for 2 s")
        elif mishap == "silence":
            proxy.fall_silent(5)
            self._say("database silent", "for 5 s")
        else:
            proxy.swallow += 3
            self._say("COMMIT swallowed", "three replies")

    def _hit_database(self) -> None:
        """Its server dies, or the way to it does; what died is up again before it dies anew."""
        mishap = self._random.choice(["kill", "cut", "silence", "swallow", "swallow"])
        if mishap != "kill":
            self._cut_off(mishap)
        elif living := self._living("postgres"):
            self.site.kill(*living)
            self._say("kill postgres", f"process {living[0]}")

    def _change_data(self) -> None:
        """A bit of a file of the data set, where it is and can be changed."""
        standing = [spoilt for spoilt, _ in self._spoilt]
        if (spoilt := self.site.spoil_data(self._random, standing)) is not None:
            self._spoilt.append((spoilt, time.monotonic()))
            self._unseen += [spoilt] if spoilt.for_a_person else []
            notes.note_data(self.site.notes, "changed", str(spoilt))
            self._say("data changed", str(spoilt))

    def _say(self, name: str, detail: str) -> None:
        self.done[name] += 1
        self._tell(name, detail)

    def _tell(self, name: str, detail: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {name}: {detail}", flush=True)


def _asked(database: Database, question: Callable[[Session], dict[int, int]]) -> dict[int, int] | None:
    """What the database says; None where it does not answer."""
    try:
        with database.read() as session:
            return question(session)
    except SQLAlchemyError:
        return None


def _claims(session: Session, pid: int) -> dict[int, int]:
    """What the worker of this process runs: experiment -> fence."""
    running = Experiment.state == ExperimentState.RUNNING, Experiment.worker.like(f"%-{pid}")
    return {row.id: row.fence for row in session.execute(select(Experiment.id, Experiment.fence).where(*running))}


def _clusters(session: Session, pids: Iterable[int]) -> dict[int, int]:
    """Which of these processes of workers have nodes, and how many."""
    alive = ClusterNode.state == NodeState.ALIVE
    names = session.scalars(select(ClusterNode.worker).where(alive)).all()
    counts = Counter(int(name.rpartition("-")[2]) for name in names)
    return {pid: counts[pid] for pid in pids if counts[pid]}


def _fences(session: Session, experiments: dict[int, int]) -> dict[int, int]:
    found = select(Experiment.id, Experiment.fence).where(Experiment.id.in_(experiments))
    return {row.id: row.fence for row in session.execute(found)}
