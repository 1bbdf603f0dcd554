"""Wrong clocks: by how much that of each process is, is drawn by the run's seed, and noted for the verdict."""

import json
import os
import random
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

from tests.chaos.fences import NOTES

CLOCK = "CHAOS_CLOCK"
"""The environment variable that says by how many seconds a clock is wrong at most; without it none is."""
SEED = "CHAOS_CLOCK_SEED"
WHO = "CHAOS_WHO"
"""What an API or a worker is called, with how often it was started again."""
FOLLOWED_SECONDS = 5.0
"""By so much one that goes by the database's clock may be wrong: it was read through a proxy that holds answers up."""
_FILE = "clocks"


def driver(experiment: object, fence: object) -> str:
    """What the driver of a claim is called."""
    return f"driver {experiment} {fence}"


def drawn(seed: str, who: str, most: float) -> float:
    """By how many seconds a clock is ahead, or behind where that is negative; of one seed always the same."""
    return random.Random(f"{seed} {who}").uniform(-most, most)


def put_off(who: str) -> None:
    """Has this process take another moment for now: what it stores, and what it reads off the machine's clock."""
    most = float(os.environ.get(CLOCK, "0"))
    if not most:
        return
    from service.database import clock

    ahead = drawn(os.environ.get(SEED, ""), who, most)
    genuine = time.time

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override] # no moment is of this class
            return datetime.fromtimestamp(genuine() + ahead, tz)

    # What is stored is of `clock.now`, which others have imported by now: it stays, and asks another clock.
    setattr(clock, "datetime", Wrong)  # noqa: B010
    time.time = lambda: genuine() + ahead
    with (Path(os.environ[NOTES]) / _FILE).open("a") as file:
        file.write(f"{json.dumps({'who': who, 'ahead': ahead})}\n")


def read(notes: Path) -> dict[str, float]:
    """Who was ahead, and by how many seconds, as it was noted in this folder."""
    path = notes / _FILE
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {one["who"]: one["ahead"] for one in found}


def spread(clocks: dict[str, float]) -> float:
    """By how many seconds two clocks of a run differ at most, one of which may be right."""
    return max(0.0, *clocks.values()) - min(0.0, *clocks.values()) if clocks else 0.0


def corrected(moment: datetime, ahead: float) -> datetime:
    """When it was, of what a clock said that was ahead by so much."""
    return moment - timedelta(seconds=ahead)
