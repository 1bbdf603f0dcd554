"""What goes wrong, drawn by a seed: kills, frozen processes, cut or silent connections, lost replies, a full disk."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.site import LEASE_SECONDS, Site

KILLS = {"trial": 8, "driver": 4, "api": 2, "worker": 1, "raylet": 2, "gcs": 1, "node": 1, "postgres": 1}
"""Whom a SIGKILL meets, with how often beside the others; who is just starting again is met by none."""
FREEZES = ("driver", "trial", "worker")


@dataclass
class Monkey:
    """Draws one mishap after another. `done` counts them; `every` is the mean pause between two, in seconds.

    `only` is `kill`, `freeze`, or None for any.
    """

    site: Site
    seed: int
    every: float
    only: str | None = None
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._next = time.monotonic()

    def met(self, mishap: str) -> int:
        """How many processes a `kill` or `freeze` has met."""
        return sum(count for name, count in self.done.items() if name.startswith(f"{mishap} "))

    def turn(self) -> None:
        """Does what is due."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._random.expovariate(1 / self.every)
        if self.only == "freeze":
            self._freeze()
        elif self.only == "kill" or self._random.random() < 0.7:
            self._kill()
        else:
            self._hinder()

    def _kill(self) -> None:
        (kind,) = self._random.choices(list(KILLS), list(KILLS.values()))
        if victims := self.site.victims(kind):
            pid = self._random.choice(victims)
            self.site.kill(pid)
            self._say(f"kill {kind}", f"process {pid}")

    def _freeze(self) -> None:
        kind = self._random.choice(FREEZES)
        if victims := self.site.victims(kind):
            pid, seconds = self._random.choice(victims), LEASE_SECONDS + 3.0
            self.site.freeze(pid, seconds)
            self._say(f"freeze {kind}", f"process {pid} for {seconds:g} s")

    def _hinder(self) -> None:
        mishaps = ["freeze"]
        if self.site.postgres is not None:
            mishaps += ["cut", "silence", "swallow"]
        if self.site.mounted:
            mishaps.append("disk")
        mishap = self._random.choice(mishaps)
        proxy = None if self.site.postgres is None else self.site.postgres.proxy
        if mishap == "freeze":
            self._freeze()
        elif mishap == "disk":
            if self.site.fill_disk(3):
                self._say("disk full", "for 3 s")
        elif proxy is not None and mishap == "cut":
            proxy.cut(2)
            self._say("database cut", "for 2 s")
        elif proxy is not None and mishap == "silence":
            proxy.fall_silent(5)
            self._say("database silent", "for 5 s")
        elif proxy is not None:
            proxy.swallow += 3
            self._say("COMMIT swallowed", "three replies")

    def _say(self, name: str, detail: str) -> None:
        self.done[name] += 1
        print(f"{time.strftime('%H:%M:%S')} {name}: {detail}", flush=True)
